"""PatchConvNet in timm's registry: a convnet of a single resolution
with attention pooling (PatchConvNet paper, §3).

``timm.create_model("patchconvnet_s60")``, likewise ``s20``, ``s36``, ``s120``, ``b36`` to ``b120``,
``l60`` and ``l120``; with ``_multi``, a token for each class. ``norm_layer="batchnorm2d"`` gives
the trunk of Table B.3, and ``num_heads``, ``global_pool="avg"`` and ``stem="linear"`` the other
variants of Table 5.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    DropPath,
    LayerNorm2d,
    LayerScale2d,
    SelectAdaptivePool2d,
    SqueezeExcite,
    get_norm_layer,
    trunc_normal_,
)
from timm.models import (
    build_model_with_cfg,
    checkpoint_seq,
    generate_default_cfgs,
    register_model,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from tcnn_model.pooling.attention_pool import AttentionPool2d, ClassScores

_WIDTHS = {"s": 384, "b": 768, "l": 1024}
_SIZES = ("s20", "s36", "s60", "s120", "b36", "b60", "b120", "l60", "l120")

__all__ = [
    "PatchConvNet",
    *(f"patchconvnet_{size}{kind}" for size in _SIZES for kind in ("", "_multi")),
]  # pyright: ignore


class Block(nn.Module):
    """Residual block: norm, 1 x 1, GELU, depthwise 3 x 3,
    GELU, squeeze and excite, 1 x 1, LayerScale.
    """

    def __init__(
        self,
        dim: int,
        norm_layer: Callable[[int], nn.Module],
        drop_path: float,
        init_values: float,
    ) -> None:
        super().__init__()
        self.norm = norm_layer(dim)
        self.conv1 = nn.Conv2d(dim, dim, 1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.se = SqueezeExcite(dim, rd_channels=dim // 4)
        self.conv3 = nn.Conv2d(dim, dim, 1)
        self.act = nn.GELU()
        self.ls = LayerScale2d(dim, init_values)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block, which keeps the shape (B, d, H, W)."""
        y = self.act(self.conv1(self.norm(x)))
        y = self.se(self.act(self.conv2(y)))
        return x + self.drop_path(self.ls(self.conv3(y)))


class PatchConvNet(nn.Module):
    """A trunk of residual blocks at one resolution,
    pooled by attention (PatchConvNet paper, Fig. 3).

    Images of any height and width are split into one patch for every 16 x 16 pixels. Patch (i, j)
    is centred at pixel (16 i, 16 j), like the strided convolutions of the stem, and not in the
    middle of its pixels. With the linear stem a patch depends on its 16 x 16 pixels only, and
    pixels beyond the last whole patch are ignored.

    Args:
        embed_dim, depth: d and N, the two parameters of the family.
        num_classes: Number of classes; 0 for no classifier.
        per_class: Whether each class has a token.
        in_chans: Channels of the images.
        norm_layer: Normalisation of the trunk: a layer, or timm's name of a layer.
        drop_path_rate: Rate of stochastic depth, the same in every block.
        drop_rate: Dropout rate before the classifier.
        init_values: Initial value of every LayerScale.
        stem: "conv", four convolutions of 3 x 3, or "linear", a single layer on each patch, as in
            ViT.
        num_heads: Number of heads of the pooling.
        mlp_ratio: Width of the pooling's FFN as a multiple of d.
        global_pool: "attn"; "avg" for the mean of the patches and a LayerNorm, which also ends the
            attention pool, and without which the output of the residual trunk would not be
            normalised; or "" for the feature map itself.

    Raises:
        ValueError: If ``global_pool`` or ``stem`` is unknown, the width is not a multiple of 8, or
            ``per_class`` is set without classes or without attention.
    """

    def __init__(
        self,
        embed_dim: int = 384,
        depth: int = 60,
        num_classes: int = 1000,
        *,
        per_class: bool = False,
        in_chans: int = 3,
        norm_layer: str | Callable[[int], nn.Module] = "layernorm2d",
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
        init_values: float = 1e-4,
        stem: str = "conv",
        num_heads: int = 1,
        mlp_ratio: float = 3.0,
        global_pool: str = "attn",
    ) -> None:
        super().__init__()
        if embed_dim % 8:
            raise ValueError(f"expected a width that is a multiple of 8, got embed_dim={embed_dim}")
        if global_pool not in ("attn", "avg", ""):
            raise ValueError(f"expected global_pool='attn', 'avg' or '', got {global_pool!r}")
        if per_class and not (num_classes and global_pool == "attn"):
            raise ValueError(
                f"tokens for each class need classes and attention, got {num_classes=}, "
                f"{global_pool=}"
            )
        if num_classes and not global_pool:
            raise ValueError(
                f"without a pool there is no classifier: expected num_classes=0, got {num_classes}"
            )
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.embed_dim = embed_dim
        # Attributes that timm reads.
        self.num_features = self.head_hidden_size = embed_dim
        self.grad_checkpointing = False
        self.stem = _create_stem(stem, in_chans, embed_dim)
        norm = (
            partial(LayerNorm2d, eps=1e-6)
            if norm_layer == "layernorm2d"
            else get_norm_layer(norm_layer)
        )
        self.blocks = nn.Sequential(
            *(Block(embed_dim, norm, drop_path_rate, init_values) for _ in range(depth))
        )
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": 16, "module": f"blocks.{i}"} for i in range(depth)
        ]
        self.pool: Any = nn.Identity()
        if global_pool == "attn":
            self.pool = AttentionPool2d(
                embed_dim,
                num_classes if per_class else None,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                init_values=init_values,
            )
        elif global_pool == "avg":
            mean = SelectAdaptivePool2d(pool_type="avg", flatten=True)
            layers = OrderedDict(mean=mean, norm=nn.LayerNorm(embed_dim, eps=1e-6))
            self.pool = nn.Sequential(layers)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._new_head()

    @property
    def per_class(self) -> bool:
        """True if each class has its own token."""
        return isinstance(self.pool, AttentionPool2d) and self.pool.per_class

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: the tokens."""
        return {"pool.cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns of layers for timm's layer-wise learning rates."""
        # (99999,) is timm's convention for "after all numbered layers".
        blocks = r"^blocks" if coarse else [(r"^blocks\.(\d+)", None), (r"^pool", (99999,))]
        return {"stem": r"^stem", "blocks": blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing: activations inside blocks are computed again
        in the backward pass.
        """
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the linear layer, or :class:`~tcnn_model.pooling.attention_pool.ClassScores`."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and with ``per_class`` the tokens, by untrained ones.

        Args:
            num_classes: Number of classes; with 0 the features are (B, d), or (B, K, d) with the
                present tokens.
            global_pool: "" to remove the pooling as well; None or its present value to keep it.

        Raises:
            ValueError: If ``global_pool`` is unknown, or there are classes without pooling.
        """
        pooling = self.global_pool if global_pool is None else global_pool
        if pooling not in (self.global_pool, "") or (num_classes and not pooling):
            raise ValueError(
                f"cannot have {num_classes} classes with global_pool={pooling!r}, from "
                f"{self.global_pool!r}"
            )
        if not pooling:
            self.pool = nn.Identity()
        elif self.per_class and num_classes:
            self.pool.reset_tokens(num_classes)
        self.global_pool = pooling
        self.num_classes = num_classes
        self.head = self._new_head().to(next(self.stem.parameters())).train(self.training)

    def _new_head(self) -> nn.Module:
        if not self.num_classes:
            return nn.Identity()
        head = (ClassScores if self.per_class else nn.Linear)(self.embed_dim, self.num_classes)
        # As in the original implementation and in timm's vision transformers.
        trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the outputs of selected blocks,
        (B, d, H / 16, W / 16), and the features (timm's interface).

        Args:
            x: Images, shape (B, C, H, W).
            indices: Indices of the blocks; an integer n for the last n blocks; None for all.
            norm: Has no effect, because the trunk has no final norm.
            stop_early: Whether to stop after the last selected block.
            output_fmt: "NCHW".
            intermediates_only: Whether to return the outputs of blocks only, without the features.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"expected output_fmt='NCHW', got {output_fmt!r}")
        # timm's private helper is used so that indices have the same meaning as in timm's models.
        selected, last = feature_take_indices(len(self.blocks), indices)
        x = self.stem(x)
        intermediates = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint_seq([block], x) if self._checkpoints else block(x)
            if index in selected:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop the blocks after the last selected block and,
        if ``prune_head``, pooling and classifier.
        """
        selected, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return selected

    def forward_features(self, x: Tensor) -> Tensor:
        """Compute the patches of images: (B, C, H, W) -> (B, d, H / 16, W / 16), rounded up."""
        x = self.stem(x)
        return checkpoint_seq(self.blocks, x) if self._checkpoints else self.blocks(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Compute class scores of patches, (B, K),
        or with ``pre_logits`` pooled features, (B, d) or (B, K, d).
        """
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Compute class scores of images: (B, C, H, W) -> (B, K)."""
        return self.forward_head(self.forward_features(x))

    @property
    def _checkpoints(self) -> bool:
        return self.grad_checkpointing and self.training


def _create_stem(kind: str, in_chans: int, embed_dim: int) -> nn.Sequential:
    """Create the layers that map an image to patches: (B, C, H, W) -> (B, d, H / 16, W / 16)."""
    if kind == "linear":
        return nn.Sequential(nn.Conv2d(in_chans, embed_dim, 16, 16))
    if kind != "conv":
        raise ValueError(f"expected stem='conv' or 'linear', got {kind!r}")
    widths = [in_chans, embed_dim // 8, embed_dim // 4, embed_dim // 2, embed_dim]
    layers: list[nn.Module] = []
    for in_channels, out_channels in pairwise(widths):
        convolution = nn.Conv2d(in_channels, out_channels, 3, 2, 1, bias=False)
        layers += [convolution, nn.GELU()]
    # There is no activation after the last convolution.
    return nn.Sequential(*layers[:-1])


# Patterns of parameter names in the original implementation (facebookresearch/deit), and the names
# here.
_PUBLISHED = (
    (r"^patch_embed\.proj\.(\d+)\.0\.", r"stem.\1."),
    (r"^blocks\.(\d+)\.norm1\.", r"blocks.\1.norm."),
    (r"^blocks\.(\d+)\.attn\.qkv_pos\.0\.", r"blocks.\1.conv1."),
    (r"^blocks\.(\d+)\.attn\.qkv_pos\.2\.", r"blocks.\1.conv2."),
    (r"^blocks\.(\d+)\.attn\.qkv_pos\.4\.conv_reduce\.", r"blocks.\1.se.fc1."),
    (r"^blocks\.(\d+)\.attn\.qkv_pos\.4\.conv_expand\.", r"blocks.\1.se.fc2."),
    (r"^blocks\.(\d+)\.attn\.qkv_pos\.5\.", r"blocks.\1.conv3."),
    (r"^blocks\.(\d+)\.gamma_1$", r"blocks.\1.ls.gamma"),
    (r"^blocks_token_only\.0\.", "pool.block."),
    (r"^cls_token$", "pool.cls_token"),
    (r"^norm\.", "pool.norm."),
)


def checkpoint_filter_fn(state: Mapping[str, Tensor], model: PatchConvNet) -> dict[str, Tensor]:
    """Rename weights of the original implementation (facebookresearch/deit);
    weights under our names stay.

    The K classifiers ``head.k`` of the original become the rows of one classifier. If the model has
    a token per class, a single token in the weights is copied for each class (see
    :func:`tcnn_model.specialize`), and tokens for another number of classes are ignored, as timm
    ignores such a classifier.
    """
    # Published checkpoints wrap the weights.
    state = state.get("model", state)  # type: ignore[assignment]
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        for pattern, replacement in _PUBLISHED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    num_heads = sum(bool(re.match(r"head\.\d+\.weight", name)) for name in renamed)
    if num_heads:
        for part in ("weight", "bias"):
            rows = [renamed.pop(f"head.{k}.{part}") for k in range(num_heads)]
            renamed[f"head.{part}"] = torch.cat(rows)
    tokens = renamed.get("pool.cls_token")
    if model.per_class and tokens is not None and tokens.shape[1] != model.num_classes:
        if tokens.shape[1] == 1:
            renamed["pool.cls_token"] = tokens.expand(-1, model.num_classes, -1)
        else:
            renamed["pool.cls_token"] = model.pool.cls_token.detach()
    return renamed


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (14, 14),
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {f"patchconvnet_{size}{kind}": _cfg() for size in _SIZES for kind in ("", "_multi")}
)


def _entrypoint(size: str, kind: str) -> Callable[..., nn.Module]:
    depth = int(size[1:])

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        options: dict[str, Any] = {
            "embed_dim": _WIDTHS[size[0]],
            "depth": depth,
            "per_class": bool(kind),
            # The published values are smaller in deeper and wider models.
            "init_values": 1e-4 if size in ("s20", "s36", "s60") else 1e-6,
            **kwargs,
        }
        return build_model_with_cfg(
            PatchConvNet,
            create.__name__,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": 1, "feature_cls": "getter"},
            **options,
        )

    create.__name__ = create.__qualname__ = f"patchconvnet_{size}{kind}"
    tokens = "one token per class" if kind else "one token"
    create.__doc__ = (
        f"PatchConvNet of width {_WIDTHS[size[0]]} and {depth} blocks, pooled by {tokens}."
    )
    return create


for _size in _SIZES:
    for _kind in ("", "_multi"):
        globals()[f"patchconvnet_{_size}{_kind}"] = register_model(_entrypoint(_size, _kind))
