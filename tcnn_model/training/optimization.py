"""Parameter groups and stochastic depth for fine-tuning."""

from typing import Any

import torch
from timm.layers import DropPath
from timm.optim import param_groups_weight_decay
from torch import nn

from tcnn_model.gpsa.layer import gpsa_layers
from tcnn_model.pooling.attention_pool import AttentionPool2d

__all__ = ["parameter_groups", "set_drop_path"]


def parameter_groups(
    model: nn.Module,
    lr: float = 1e-4,
    gating_lr: float = 0.1,
    weight_decay: float = 0.05,
    *,
    qk_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Optimizer groups of a T-CNN (paper, Sec. 3): the gates learn at their own, much larger rate.

    Weight decay is left out for gates, locality strengths, centres of attention, the tokens of attention pools, norms
    and biases, and for what the model's own ``no_weight_decay()`` names.

    Args:
        model: any module; one without GPSA layers gets no group of gates.
        lr: of everything but the gates.
        gating_lr: of the gating parameters lambda.
        weight_decay: of the matrices and filters.
        qk_lr: of GPSA's queries and keys, in a group of their own; None for ``lr``, as in the papers. A larger one lets
            heads learn to attend to content within few epochs.

    Returns:
        groups for any torch or timm optimizer, each with "params", "lr", "weight_decay" and a "name"; every parameter
        that requires a gradient is in exactly one, empty groups are left out.
    """
    layers = gpsa_layers(model)
    gates = [layer.gating for layer in layers.values() if layer.gating.requires_grad]
    undecayed = {f"{name}.{p}" if name else p for name in layers for p in ("gating", "raw_locality", "center")}
    pools = (name for name, module in model.named_modules() if isinstance(module, AttentionPool2d))
    undecayed |= {f"{name}.cls_token" if name else "cls_token" for name in pools}
    undecayed |= set(getattr(model, "no_weight_decay", set)())
    groups: list[dict[str, Any]] = [{"name": "gates", "params": gates, "weight_decay": 0.0, "lr": gating_lr}]
    queries_and_keys = [p for layer in layers.values() for p in (layer.query, layer.key) if p.requires_grad]
    if qk_lr is not None:
        groups.append(
            {"name": "queries and keys", "params": queries_and_keys, "weight_decay": weight_decay, "lr": qk_lr}
        )
    grouped = {id(p) for group in groups for p in group["params"]}
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed):
        params = [p for p in group["params"] if id(p) not in grouped]
        decay = group["weight_decay"]
        groups.append({"name": "decayed" if decay else "undecayed", "params": params, "weight_decay": decay, "lr": lr})
    return [group for group in groups if group["params"]]


@torch.no_grad()
def set_drop_path(model: nn.Module, rate: float) -> int:
    """Set stochastic depth, growing linearly from 0 at the first residual block to ``rate`` at the last.

    For models that were built without it: timm's residual blocks carry a ``drop_path`` that is then None or Identity.

    Args:
        model: changed in place.
        rate: drop rate of the last block, in [0, 1).

    Returns:
        the number of residual blocks set; 0 where the model has none, and is unchanged.

    Raises:
        ValueError: a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"expected a drop path rate in [0, 1), got {rate}")
    blocks = [m for m in model.modules() if _drops_path(m)]
    for block, p in zip(blocks, torch.linspace(0, rate, max(len(blocks), 1)).tolist(), strict=False):
        block.drop_path = DropPath(p).train(block.training) if p else nn.Identity()
    return len(blocks)


def _drops_path(block: nn.Module) -> bool:
    missing = object()
    current = getattr(block, "drop_path", missing)
    return current is None or isinstance(current, DropPath | nn.Identity)
