"""How the heads of timm's attention layers form their logits, for some of the heads of a layer."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model.gpsa.attention import GatedAttention

__all__ = ["HeadLogits", "QueriesAndKeys", "logits_of_class", "projection", "projections_of"]

# Names of the linear layers of queries (q), keys (k) and values (v), in timm's classes. Several
# letters are as many blocks of rows, of all heads each.
_PROJECTIONS = ("qkv", "qk", "q_proj", "k_proj", "v_proj", "v")


class QueriesAndKeys(NamedTuple):
    """Parts of the logits scale * query key^T + bias.

    Args:
        query: Shape (B, heads, N_query, d).
        key: Shape (B, heads, N, d).
        bias: Broadcasts to (B, heads, N_query, N); None without one.
    """

    query: Tensor
    key: Tensor
    bias: Tensor | None


class HeadLogits(nn.Module):
    """Queries and keys of some heads of a layer,
    as in timm's ViT, ConViT's later layers, and with rotary positions.

    Args:
        layer: timm's layer. Modules and parameters that are not divided by heads are taken over.
        heads: Indices of the heads.
        asking: Number of tokens, the first ones, that are queries; None for all.
    """

    in_windows: ClassVar[bool] = False
    """Whether the tokens of a row are those of a window."""
    has_prefix_tokens: ClassVar[bool] = True
    """Whether there may be class and register tokens before the patches."""

    def __init__(self, layer: Any, heads: Sequence[int], asking: int | None = None) -> None:
        super().__init__()
        self.asking = slice(asking)
        self.query = projection(layer, "q", heads)
        # In grouped attention several heads share their keys.
        groups = [head // _group(layer) for head in heads]
        shared = sorted(set(groups))
        self.key = projection(layer, "k", shared)
        self._key_of = None if groups == shared else [shared.index(group) for group in groups]
        self.heads, self._all_heads = list(heads), layer.num_heads
        self.head_dim = self.query.out_features // len(heads)
        self.scale = self.head_dim**-0.5
        self.q_norm = getattr(layer, "q_norm", None) or nn.Identity()
        self.k_norm = getattr(layer, "k_norm", None) or nn.Identity()
        # Layers with rotary positions know how many class and register tokens are not rotated.
        self._unrotated: int | None = getattr(layer, "num_prefix_tokens", None)
        self._rotates_half = getattr(layer, "rotate_half", False)
        if asking and self._unrotated is None and type(self.k_norm) is nn.Identity:
            # It would change all logits of a query alike, and never get a gradient.
            self.key.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        shared_bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> QueriesAndKeys | GatedAttention:
        """Return the parts of the logits.

        Args:
            x: Input of the layer, shape (B, N, C).
            rope: Rotary positions of the patches, for all heads of the layer.
            shared_bias: Bias of all heads that the layers of a model share, (heads, N, N).
            mask: Mask of the windows of an image, which is added, (windows, N, N).
        """
        query, key = self._queries(x), self._keys(x)
        if rope is not None:
            key = self._rotated(key, rope)
            query = self._rotated(query, rope) if self.asking.stop is None else query
        return QueriesAndKeys(query, key, self._bias(len(x), shared_bias, mask))

    def logits(self, x: Tensor, rope: Tensor | None, shared_bias: Tensor | None) -> Tensor:
        """Return the logits as a matrix, (B, heads, N_query, N), which suits few queries."""
        if rope is not None or type(self.k_norm) is not nn.Identity:
            parts = self(x, rope, shared_bias)
            logits, bias = parts.query @ parts.key.mT, parts.bias
        else:
            # Products of queries with the tokens themselves, q W_key x, are cheaper for a few
            # queries than the keys of all tokens, whose bias changes all logits of a query alike.
            query = self._queries(x)
            rows = self.key.weight.unflatten(0, (-1, self.head_dim))
            rows = rows if self._key_of is None else rows[self._key_of]
            logits, bias = (query @ rows) @ x.mT[:, None], self._bias(len(x), shared_bias, None)
        return self.scale * logits if bias is None else self.scale * logits + bias

    def relative_bias(self) -> Tensor | None:
        """Return the bias that depends on positions, (heads, N_query, N); None without one."""
        return None

    def _queries(self, x: Tensor) -> Tensor:
        return self._by_head(self.query(x[:, self.asking]), self.q_norm)

    def _keys(self, x: Tensor) -> Tensor:
        key = self._by_head(self.key(x), self.k_norm)
        return key if self._key_of is None else key[:, self._key_of]

    def _rotated(self, features: Tensor, rope: Tensor) -> Tensor:
        from timm.layers import apply_rot_embed_cat  # recording needs no timm

        if rope.ndim > 2 and rope.shape[-3] == self._all_heads:
            rope = rope[..., self.heads, :, :]  # positions that are learnt by head
        unrotated, patches = features.tensor_split([self._unrotated or 0], 2)
        rotated = apply_rot_embed_cat(patches, rope, half=self._rotates_half)
        return torch.cat([unrotated, rotated], 2).type_as(features)

    def _bias(self, rows: int, shared_bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
        bias = self.relative_bias()
        if shared_bias is not None:
            of_heads = shared_bias[..., self.heads, self.asking, :]
            bias = of_heads if bias is None else bias + of_heads
        if mask is not None:
            by_window = mask[:, None] if bias is None else bias + mask[:, None]
            bias = by_window.repeat(rows // len(mask), 1, 1, 1)
        return bias

    def _by_head(self, features: Tensor, norm: nn.Module) -> Tensor:
        """Split (B, N, heads * d) into (B, heads, N, d), and norm the channels of each head."""
        # Norms run before heads are moved: compiled, a norm's gradient would have other strides
        # than torch (2.15) assumes.
        return norm(features.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)


class _RelativeLogits(HeadLogits):
    """Logits of BEiT, to which a table adds a bias for each offset."""

    def __init__(self, layer: Any, heads: Sequence[int], asking: int | None = None) -> None:
        super().__init__(layer, heads, asking)
        # timm leaves parameters of this name without weight decay.
        self.relative_position_bias_table: nn.Parameter | None = None
        table = layer.relative_position_bias_table
        if table is not None:
            index = layer.relative_position_index[self.asking]
            used, places = index.unique(return_inverse=True)
            rows = table.detach()[used][:, self.heads]
            self.relative_position_bias_table = nn.Parameter(rows, table.requires_grad)
            self.register_buffer("_index", places, persistent=False)
            self._index: Tensor

    def relative_bias(self) -> Tensor | None:
        """Return the entries of the table, see :class:`HeadLogits`."""
        table = self.relative_position_bias_table
        return None if table is None else table[self._index].permute(2, 0, 1)


class _WindowLogits(_RelativeLogits):
    """Logits of Swin, which attends in windows."""

    in_windows = True
    has_prefix_tokens = False


class _CosineLogits(HeadLogits):
    """Logits of Swin V2: cosines, with a temperature
    of each head, and a bias that a small MLP computes of offsets.
    """

    in_windows = True
    has_prefix_tokens = False

    def __init__(self, layer: Any, heads: Sequence[int], asking: int | None = None) -> None:
        super().__init__(layer, heads, asking)
        self.scale = 1.0
        temperature = layer.logit_scale
        rows = temperature.detach()[self.heads]
        self.logit_scale = nn.Parameter(rows, temperature.requires_grad)
        *hidden, last = layer.cpb_mlp
        self.cpb_mlp = nn.Sequential(*hidden, _rows_of(last, self.heads))
        self.register_buffer("_offsets", layer.relative_coords_table, persistent=False)
        self.register_buffer("_index", layer.relative_position_index, persistent=False)
        self._offsets: Tensor
        self._index: Tensor

    def relative_bias(self) -> Tensor:
        """Return 16 sigma(MLP(offset)), see :class:`HeadLogits`."""
        table = 16 * self.cpb_mlp(self._offsets).flatten(0, -2).sigmoid()
        return table[self._index].permute(2, 0, 1)

    def _queries(self, x: Tensor) -> Tensor:
        temperature = self.logit_scale.clamp(max=math.log(100)).exp()
        return F.normalize(super()._queries(x), dim=-1) * temperature

    def _keys(self, x: Tensor) -> Tensor:
        return F.normalize(super()._keys(x), dim=-1)


class _GatedLogits(HeadLogits):
    """Logits of ConViT's gated layers, and their gates."""

    has_prefix_tokens = False

    def __init__(self, layer: Any, heads: Sequence[int], asking: int | None = None) -> None:
        super().__init__(layer, heads, asking)
        self.num_heads = len(heads)
        self.pos_proj = _rows_of(layer.pos_proj, self.heads)
        gates = layer.gating_param
        self.gating_param = nn.Parameter(gates.detach()[self.heads], gates.requires_grad)

    def forward(self, x: Tensor, *_: Tensor | None) -> GatedAttention:
        """Return the gated attention on the square grid of the tokens."""
        from tcnn_model.gpsa.convit import convit_attention  # recording needs no timm

        return convit_attention(self, torch.cat([self.query(x), self.key(x)], -1))


_OF_CLASSES: dict[str, type[HeadLogits]] = {
    "timm.layers.attention.Attention": HeadLogits,
    "timm.layers.attention.AttentionRope": HeadLogits,
    "timm.models.beit.Attention": _RelativeLogits,
    "timm.models.convit.GPSA": _GatedLogits,
    "timm.models.convit.MHSA": HeadLogits,
    "timm.models.eva.EvaAttention": HeadLogits,
    "timm.models.swin_transformer.WindowAttention": _WindowLogits,
    "timm.models.swin_transformer_v2.WindowAttention": _CosineLogits,
    # In older versions of timm, timm.layers.attention.Attention is defined here.
    "timm.models.vision_transformer.Attention": HeadLogits,
}


def logits_of_class(kind: type) -> type[HeadLogits] | None:
    """Return the class for the heads of a class of timm's layers; None for other layers."""
    return _OF_CLASSES.get(f"{kind.__module__}.{kind.__qualname__}")


def projections_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a layer that are divided by heads, by name."""
    names = (*_PROJECTIONS, "pos_proj", "cpb_mlp.2")
    modules = dict(layer.named_modules())
    return {name: modules[name] for name in names if name in modules}


def projection(layer: Any, role: Literal["q", "k", "v"], heads: Sequence[int]) -> nn.Linear:
    """Return the queries, keys or values of some heads of a layer as a linear layer.

    Args:
        layer: timm's layer.
        role: The letter of queries, keys or values.
        heads: Indices of the heads; of keys and values in grouped attention, those of the groups.
    """
    names = (name for name in _PROJECTIONS if role in name.removesuffix("_proj"))
    name = next(name for name in names if getattr(layer, name, None) is not None)
    letters = name.removesuffix("_proj")
    count = layer.num_heads // (1 if role == "q" else _group(layer))
    places = [letters.index(role) * count + head for head in heads]
    part = _rows_of(getattr(layer, name), places, len(letters) * count)
    bias = getattr(layer, f"{role}_bias", None)
    if isinstance(bias, nn.Parameter):  # BEiT keeps zeros for the keys as a buffer
        rows = bias.detach().unflatten(0, (count, -1))[list(heads)]
        part.bias = nn.Parameter(rows.flatten(), bias.requires_grad)
    return part


def _group(layer: Any) -> int:
    """Return the number of heads that share keys and values."""
    return int(layer.num_heads // getattr(layer, "num_kv_heads", layer.num_heads))


def _rows_of(linear: nn.Linear, places: Sequence[int], count: int | None = None) -> nn.Linear:
    """Return some of ``count`` equal blocks of the rows of a linear layer; by default, single rows.

    A copy that shares no memory with the layer.
    """
    count = linear.out_features if count is None else count
    part = nn.utils.skip_init(
        nn.Linear,
        linear.in_features,
        len(places) * (linear.out_features // count),
        bias=linear.bias is not None,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
    )
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            original = getattr(linear, name)
            rows = original.unflatten(0, (count, -1))[list(places)].flatten(0, 1)
            parameter.copy_(rows).requires_grad_(original.requires_grad)
    return part
