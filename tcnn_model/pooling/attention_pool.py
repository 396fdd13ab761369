"""Attention-based aggregation: pooling of patches
by a trainable query (PatchConvNet paper, §3.1).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AttentionPool2d", "ClassScores", "PatchAttention"]


class PatchAttention(nn.Module):
    """Attention of class tokens to patches, but not to tokens:
    timm's ``cait.ClassAttn`` for a token per class.

    Args:
        dim: Channels d of tokens and patches.
        num_heads: Number of heads.
        tokens: Number K of class tokens, which come first in the input.
        qkv_bias: Whether queries, keys and values have a bias.
        attn_drop: Dropout rate of the attention.
        proj_drop: Dropout rate of the output.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        tokens: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        from timm.layers import use_fused_attn

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.tokens = tokens
        self.scale = (dim // num_heads) ** -0.5
        # timm's switch, which TIMM_FUSED_ATTN=0 turns off.
        self.fused_attn = use_fused_attn()
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.k = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.v = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def of(cls, attention: nn.Module, tokens: int) -> "PatchAttention":
        """Create a layer that shares the submodules of a ``cait.ClassAttn``."""
        original: Any = attention
        # The meta device suffices, because the submodules created here are replaced at once.
        layer = cls(original.q.in_features, original.num_heads, tokens=tokens, device="meta")
        for name, child in original.named_children():
            setattr(layer, name, child)
        layer.fused_attn = original.fused_attn
        return layer.train(original.training)

    def forward(self, x: Tensor) -> Tensor:
        """Pool the patches for each class token: (B, K + N, d) -> (B, K, d)."""
        tokens = x[:, : self.tokens]
        patches = x[:, self.tokens :]
        features = (self.q(tokens), self.k(patches), self.v(patches))
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in features)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            gathered = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        else:
            # Evaluated as (q * scale) @ k^T: scaling the queries is cheaper than scaling the
            # logits.
            attention = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
            gathered = self.attn_drop(attention) @ v
        return self.proj_drop(self.proj(gathered.transpose(1, 2).flatten(2)))


class AttentionPool2d(nn.Module):
    """Learned pooling of a feature map: one block of class attention,
    then a LayerNorm (PatchConvNet paper, Fig. 3).

    A token c attends to the patches X: c' = c + γ₁ ⊙ A(LN(c, X)), c'' = c' + γ₂ ⊙ FFN(LN(c')). By
    default there is one head, whose softmax gives the weight of each patch; with several heads, as
    in the paper's Table 5, each head has its own weights. The block is timm's
    ``cait.LayerScaleBlockClassAttn``. (timm's own ``AttentionPool2d`` is a different layer, that of
    CLIP.)

    With a single token, the token is among the keys, as published. With ``num_classes=K`` there is
    a token for each class, which gives K maps, and only patches are among the keys.

    Args:
        channels: Channels d of the feature map.
        num_classes: Number of classes, each with a token; None for a single token.
        num_heads: Number of heads, a divisor of d.
        mlp_ratio: Width of the FFN as a multiple of d.
        init_values: Initial value of γ₁ and γ₂. The published values are 1e-4 and, for the deeper
            models, 1e-6.
        drop: Dropout rate of the outputs of attention and FFN.
        attn_drop: Dropout rate of the attention.

    Raises:
        ValueError: If there are no channels or no classes, or the heads do not divide the channels.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int | None = None,
        *,
        num_heads: int = 1,
        mlp_ratio: float = 3.0,
        init_values: float = 1e-4,
        drop: float = 0.0,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__()
        from timm.models.cait import LayerScaleBlockClassAttn  # recording needs no timm

        if channels < 1 or (num_classes is not None and num_classes < 1):
            raise ValueError(
                f"expected at least one channel and one class, got {channels} and {num_classes}"
            )
        if num_heads < 1 or channels % num_heads:
            raise ValueError(
                f"expected a number of heads that divides {channels} channels, got "
                f"num_heads={num_heads}"
            )
        norm = partial(nn.LayerNorm, eps=1e-6)  # as in timm's CaiT
        attention = (
            {}
            if num_classes is None
            else {"attn_block": partial(PatchAttention, tokens=num_classes)}
        )
        self.channels = channels
        self.num_classes = num_classes
        self.cls_token = nn.Parameter(torch.empty(1, num_classes or 1, channels))
        self.block = LayerScaleBlockClassAttn(
            channels,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=True,
            proj_drop=drop,
            attn_drop=attn_drop,
            norm_layer=norm,
            init_values=init_values,
            **attention,
        )
        self.norm = norm(channels)
        self.reset_parameters()

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        heads: int = self.block.attn.num_heads
        return heads

    @property
    def per_class(self) -> bool:
        """True if each class has its own token."""
        return self.num_classes is not None

    def reset_tokens(self, num_classes: int) -> None:
        """Replace the tokens by new, untrained tokens
        for ``num_classes`` classes; the block stays as it is.

        Raises:
            ValueError: If the pool has a single token, or there are no classes.
        """
        if not self.per_class:
            raise ValueError("a single token serves any number of classes")
        if num_classes < 1:
            raise ValueError(f"expected at least one class, got {num_classes}")
        tokens = self.cls_token.new_empty(1, num_classes, self.channels)
        self.cls_token = nn.Parameter(
            nn.init.trunc_normal_(tokens, std=0.02), self.cls_token.requires_grad
        )
        self.num_classes = self.block.attn.tokens = num_classes

    def specialize(self, num_classes: int) -> None:
        """Copy the single token for each class;
        the block keeps its weights (:func:`tcnn_model.specialize`).

        Raises:
            ValueError: If there is a token for each class already, or there are no classes.
        """
        if self.per_class:
            raise ValueError(f"there is a token for each of {self.num_classes} classes already")
        if num_classes < 1:
            raise ValueError(f"expected at least one class, got {num_classes}")
        self.block.attn = PatchAttention.of(self.block.attn, num_classes)
        # These are copies rather than views, so that each class trains its own token.
        tokens = self.cls_token.detach().repeat(1, num_classes, 1)
        self.cls_token = nn.Parameter(tokens, self.cls_token.requires_grad)
        self.num_classes = num_classes

    def reset_parameters(self) -> None:
        """Draw tokens and weights from a normal distribution
        of standard deviation 0.02, cut at 2; set biases to 0.
        """
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Pool a feature map: (B, d, H, W) -> (B, d), or (B, K, d) with a token per class."""
        tokens = self.block(x.flatten(2).transpose(1, 2), self.cls_token.expand(x.shape[0], -1, -1))
        tokens = self.norm(tokens)
        return tokens if self.per_class else tokens[:, 0]


class ClassScores(nn.Linear):
    """Linear score of each class from its own token,
    with ``weight`` (K, d) and ``bias`` (K,) as in a Linear.

    The published form is K layers ``Linear(d, 1)``, whose weights are the rows of ``weight``.
    """

    @classmethod
    def of(cls, classifier: nn.Module) -> "ClassScores":
        """Create the scores from a classifier's rows; the parameters of a Linear are shared.

        Args:
            classifier: A Linear or a 1 x 1 convolution.

        Raises:
            ValueError: If the classifier is any other layer, or its weight is computed from other
                parameters.
        """
        pointwise = isinstance(classifier, nn.Conv2d) and (
            *classifier.kernel_size,
            classifier.groups,
        ) == (1, 1, 1)
        if (
            not (isinstance(classifier, nn.Linear) or pointwise)
            or "weight" not in classifier._parameters
        ):
            raise ValueError(
                f"expected a classifier that is a Linear or a 1 x 1 convolution, got {classifier}"
            )
        weight: Any = classifier.weight
        bias: Any = classifier.bias
        scores = cls(
            # On the meta device no random numbers are drawn. The parameters created here are
            # replaced at once.
            weight.shape[1],
            weight.shape[0],
            bias=bias is not None,
            device="meta",
        )
        scores.weight = (
            weight
            if weight.ndim == 2
            else nn.Parameter(weight.detach().flatten(1), weight.requires_grad)
        )
        scores.bias = bias
        return scores.train(classifier.training)

    def forward(self, x: Tensor) -> Tensor:
        """Score tokens, shape (B, K).

        Args:
            x: Tokens, shape (B, K, d); or (B K, d) or (B K, d, 1, 1), with the tokens of an image
                in succession.
        """
        tokens = x.reshape(-1, self.out_features, self.in_features)
        scores = torch.einsum("bkd,kd->bk", tokens, self.weight)
        return scores if self.bias is None else scores + self.bias
