"""Attention-based aggregation: a trainable query attends to the patches and pools them (PatchConvNet paper, §3.1)."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import use_fused_attn
from timm.models.cait import LayerScaleBlockClassAttn
from torch import Tensor, nn

__all__ = ["AttentionPool2d", "ClassScores", "PatchAttention"]


class PatchAttention(nn.Module):
    """Class tokens attend to the patches, and not to themselves: timm's ``cait.ClassAttn`` for one token a class.

    Args:
        dim: d, of tokens and patches.
        num_heads: of the attention.
        tokens: K, how many of the input's tokens, from the first, are class tokens.
        qkv_bias: whether queries, keys and values have a bias.
        attn_drop, proj_drop: dropout of the attention and of the output.
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
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.tokens = num_heads, tokens
        self.scale = (dim // num_heads) ** -0.5
        self.fused_attn = use_fused_attn()
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **make)
        self.k = nn.Linear(dim, dim, bias=qkv_bias, **make)
        self.v = nn.Linear(dim, dim, bias=qkv_bias, **make)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **make)
        self.proj_drop = nn.Dropout(proj_drop)

    @classmethod
    def of(cls, attention: nn.Module, tokens: int) -> "PatchAttention":
        """Make one of the very layers of a ``cait.ClassAttn``."""
        theirs: Any = attention
        ours = cls(theirs.q.in_features, theirs.num_heads, tokens=tokens, device="meta")
        for name, layer in theirs.named_children():
            setattr(ours, name, layer)
        ours.fused_attn = theirs.fused_attn
        return ours.train(theirs.training)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens and patches, shape (B, K + N, d), to what each token gathers, shape (B, K, d)."""
        tokens, patches = x[:, : self.tokens], x[:, self.tokens :]
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.q(tokens), self.k(patches), self.v(patches))
        )
        if self.fused_attn:
            gathered = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            gathered = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(-1)) @ v
        return self.proj_drop(self.proj(gathered.transpose(1, 2).flatten(2)))


class AttentionPool2d(nn.Module):
    """Learned pooling of a feature map: one block of class attention, then a LayerNorm (PatchConvNet paper, Fig. 3).

    A token c attends to the patches X: c' = c + γ₁ ⊙ A(LN(c, X)), c'' = c' + γ₂ ⊙ FFN(LN(c')). One head, so that its
    softmax is the weight of each patch. The block is timm's ``cait.LayerScaleBlockClassAttn``. (timm's own
    ``AttentionPool2d`` is another one, CLIP's.)

    With a single token the token is among the keys, as published. With ``num_classes=K`` there is one token for each
    class, which give K maps; only patches are among the keys then.

    Args:
        channels: d, of the feature map.
        num_classes: one token for each of so many classes; None for a single token.
        mlp_ratio: width of the FFN, in d.
        init_values: of γ₁ and γ₂. Published are 1e-4 and, for the deeper models, 1e-6.
        drop, attn_drop: dropout of what the attention and the FFN give, and of the attention.

    Raises:
        ValueError: no channels or no classes.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int | None = None,
        *,
        mlp_ratio: float = 3.0,
        init_values: float = 1e-4,
        drop: float = 0.0,
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if channels < 1 or (num_classes is not None and num_classes < 1):
            raise ValueError(f"expected at least one channel and one class, got {channels} and {num_classes}")
        norm = partial(nn.LayerNorm, eps=1e-6)
        attention = {} if num_classes is None else {"attn_block": partial(PatchAttention, tokens=num_classes)}
        self.channels, self.num_classes = channels, num_classes
        self.cls_token = nn.Parameter(torch.empty(1, num_classes or 1, channels))
        self.block = LayerScaleBlockClassAttn(
            channels,
            num_heads=1,
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
    def per_class(self) -> bool:
        """Whether each class has a token of its own."""
        return self.num_classes is not None

    def reset_tokens(self, num_classes: int) -> None:
        """Replace the tokens by new ones, not trained yet, for so many classes; the block stays as it is.

        Raises:
            ValueError: there is a single token, of no class; or no classes.
        """
        if not self.per_class:
            raise ValueError("a single token serves any number of classes")
        if num_classes < 1:
            raise ValueError(f"expected at least one class, got {num_classes}")
        tokens = self.cls_token.new_empty(1, num_classes, self.channels)
        self.cls_token = nn.Parameter(nn.init.trunc_normal_(tokens, std=0.02), self.cls_token.requires_grad)
        self.num_classes = self.block.attn.tokens = num_classes

    def specialize(self, num_classes: int) -> None:
        """Copy the single token for each class; the block keeps its weights (:func:`tcnn_model.specialize`).

        Raises:
            ValueError: there is a token for each class already; or no classes.
        """
        if self.per_class:
            raise ValueError(f"there is a token for each of {self.num_classes} classes already")
        if num_classes < 1:
            raise ValueError(f"expected at least one class, got {num_classes}")
        self.block.attn = PatchAttention.of(self.block.attn, num_classes)
        tokens = self.cls_token.detach().repeat(1, num_classes, 1)
        self.cls_token = nn.Parameter(tokens, self.cls_token.requires_grad)
        self.num_classes = num_classes

    def reset_parameters(self) -> None:
        """Draw tokens and weights from a normal distribution of standard deviation 0.02, cut at 2; set biases to 0."""
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """A feature map, shape (B, d, H, W), to its pooled features: (B, d), or (B, K, d) with a token a class."""
        tokens = self.block(x.flatten(2).transpose(1, 2), self.cls_token.expand(x.shape[0], -1, -1))
        tokens = self.norm(tokens)
        return tokens if self.per_class else tokens[:, 0]


class ClassScores(nn.Linear):
    """One linear score for each class, of that class's own token: ``weight`` (K, d) and ``bias`` (K,), as of a Linear.

    The published form is K layers ``Linear(d, 1)``; these are their rows.
    """

    @classmethod
    def of(cls, classifier: nn.Module) -> "ClassScores":
        """Make one of a classifier's rows: a Linear's very parameters, or those of a 1 x 1 convolution.

        Raises:
            ValueError: any other layer, or one whose weight is computed from other parameters.
        """
        pointwise = isinstance(classifier, nn.Conv2d) and (*classifier.kernel_size, classifier.groups) == (1, 1, 1)
        if not (isinstance(classifier, nn.Linear) or pointwise) or "weight" not in classifier._parameters:
            raise ValueError(f"expected a classifier that is a Linear or a 1 x 1 convolution, got {classifier}")
        theirs: Any = classifier
        weight, bias = theirs.weight, theirs.bias
        scores = cls(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        scores.weight = weight if weight.ndim == 2 else nn.Parameter(weight.detach().flatten(1), weight.requires_grad)
        scores.bias = bias
        return scores.train(classifier.training)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to scores, shape (B, K).

        Args:
            x: shape (B, K, d); or (B K, d) or (B K, d, 1, 1), the tokens of an image one after the other.
        """
        tokens = x.reshape(-1, self.out_features, self.in_features)
        scores = torch.einsum("bkd,kd->bk", tokens, self.weight)
        return scores if self.bias is None else scores + self.bias
