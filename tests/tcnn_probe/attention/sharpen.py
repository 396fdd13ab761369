"""Weights that make attention far from uniform and different between heads."""

import re

import torch
from torch import nn

_QUERIES_AND_KEYS = re.compile(
    r"(^|\.)(q|k|kv|qk|qkv|qkvs|q_proj|k_proj|query|key|to_q|to_k"
    r"|in_proj_weight|in_proj|attn\.attn|pwise)(\.|$)"
)


def sharpen(model: nn.Module, gain: float = 1.7, seed: int = 0, *, only: bool = False) -> nn.Module:
    """Draw weights of size 1 / sqrt(inputs),
    those of queries and keys ``gain`` times as large; set eval mode.

    With ``only``, all weights but those of queries and keys are kept.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Swin V2 takes the exponential of its logit_scale, clamped, so noise could make
            # attention uniform or one-hot.
            if "logit_scale" in name or (only and not _QUERIES_AND_KEYS.search(name)):
                continue
            if parameter.ndim < 2:
                mean = 1.0 if name.endswith("weight") or "gamma" in name else 0.0
                parameter.copy_(mean * (gain if re.search("[qk]_norm", name) else 1) + 0.2 * noise)
            else:
                size = gain if _QUERIES_AND_KEYS.search(name) else 1.0
                # A latent is a token, not a matrix that multiplies tokens.
                inputs = 1 if name.endswith("latent") else parameter[0].numel()
                parameter.copy_(noise * size / inputs**0.5)
    return model.eval()
