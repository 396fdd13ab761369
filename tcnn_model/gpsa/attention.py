"""The gated attention of one batch, before it is applied to the values (T-CNN paper, Eq. 7).

Everything that has such attention, our :class:`~tcnn_model.GPSA` and timm's ConViT layers, can be described by one
:class:`GatedAttention`: :func:`~tcnn_model.gpsa` applies it, a probe measures it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tcnn_model.gpsa.positional import Axis, positional_factors
from tcnn_model.gpsa.precision import widen, widest_dtype, without_autocast

__all__ = ["GatedAttention"]


@dataclass(frozen=True)
class GatedAttention:
    """``A_h = (1 - gate_h) softmax(q k^T / sqrt(d)) + gate_h softmax(position_h · r)``.

    The content part attends to real pixels only; the positional part to the real grid extended by the padding.

    Args:
        query: shape (B, heads, N_query, d), row-major over the y.queries x x.queries grid.
        key: shape (B, heads, H * W, d), row-major over the real pixels.
        position: v_pos, the weights of r = (||delta||^2, delta_1, delta_2) in the positional logits, shape (heads, 3).
        gate: sigma(lambda), the share of positional attention, shape (heads,).
        y: vertical axis.
        x: horizontal axis.

    Raises:
        TypeError: an argument that is no floating tensor, or no :class:`Axis`.
        ValueError: shapes that do not fit each other or the grid, an empty grid, or a mixture of devices or dtypes.
    """

    query: Tensor
    key: Tensor
    position: Tensor
    gate: Tensor
    y: Axis
    x: Axis

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        q, k, y, x = self.query, self.key, self.y, self.x
        for name, axis in (("y", y), ("x", x)):
            if not isinstance(axis, Axis):
                raise TypeError(f"expected {name} to be a tcnn_model.Axis, got {axis!r}")
        for name, tensor in (("queries", q), ("keys", k), ("position", self.position), ("gate", self.gate)):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                given = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
                raise TypeError(f"expected {name} to be a tensor of a floating dtype, got {given}")
        if min(y.length, x.length, y.queries, x.queries) < 1:
            raise ValueError(f"empty grid: {y.queries} x {x.queries} queries on {y.length} x {x.length} pixels")
        if q.ndim != 4 or q.shape[2] != y.queries * x.queries:
            expected = f"(B, heads, {y.queries} * {x.queries} = {y.queries * x.queries}, d)"
            raise ValueError(f"expected queries of shape {expected}, got {tuple(q.shape)}")
        batch, heads, _, dim = q.shape
        if min(heads, dim) < 1:
            raise ValueError(f"expected at least one head of at least one channel, got queries {tuple(q.shape)}")
        _check_shape("keys", k, (batch, heads, y.length * x.length, dim), grid=(y, x))
        _check_shape("position", self.position, (heads, 3))
        _check_shape("gate", self.gate, (heads,))
        check_alike(self.query, keys=k)
        for name, tensor in (("position", self.position), ("gate", self.gate)):
            if tensor.device != q.device:
                raise ValueError(f"expected {name} on the device of the queries, {q.device}, got {tensor.device}")

    @property
    def scale(self) -> float:
        """1 / sqrt(d)."""
        return float(self.query.shape[-1] ** -0.5)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Positional attention along y, (heads, y.queries, y.keys), and along x, (heads, x.queries, x.keys)."""
        return positional_factors(self.position, self.y, self.x)

    def factors_on_pixels(self, dtype: torch.dtype, *, logarithm: bool = False) -> tuple[Tensor, Tensor]:
        """The factors, or their logarithms, without the padding: (heads, y.queries, H) and (heads, x.queries, W).

        Padding holds zeros: attention that falls on it counts for nothing.
        """
        return positional_factors(self.position, self.y, self.x, logarithm=logarithm, padding=False, dtype=dtype)

    def on_pixels(self, queries: Tensor) -> Tensor:
        """A of some queries over the real pixels, in float32 at least.

        Args:
            queries: their indices, shape (n,).

        Returns:
            shape (B, heads, n, H * W); what rows lack to one falls on the padding.
        """
        with without_autocast(self.query):
            content, positional = self.content(queries), self.positional_on_pixels(queries)
            return torch.lerp(content, positional.to(content).expand_as(content), self.gate.to(content)[:, None, None])

    def content(self, queries: Tensor | slice = slice(None)) -> Tensor:
        """Content attention of some queries over real pixels, shape (B, heads, n, H * W), in float32 at least."""
        with without_autocast(self.query):
            return torch.softmax((widen(self.query[:, :, queries]) * self.scale) @ widen(self.key).mT, dim=-1)

    def positional_on_pixels(self, queries: Tensor) -> Tensor:
        """Positional attention of some queries, (n,), over the real pixels: shape (heads, n, H * W)."""
        rows, cols = self.factors_on_pixels(widest_dtype(self.position.device))
        at_y, at_x = queries // self.x.queries, queries % self.x.queries
        return (rows[:, at_y, :, None] * cols[:, at_x, None, :]).flatten(2)

    def positional(self) -> Tensor:
        """Positional attention over the extended grid, dense, shape (heads, N_query, N_key)."""
        return product(*self.factors())

    def dense(self) -> Tensor:
        """The whole attention A over the extended grid, shape (B, heads, N_query, N_key); rows sum to one.

        Keys are row-major over a grid of ``y.keys`` by ``x.keys`` pixels, padding included. For pictures and tests:
        the layer itself never forms this.
        """
        content, gate = self.content(), self.gate[:, None, None]
        beyond = (self.x.before, self.x.after, self.y.before, self.y.after)
        on_grid = torch.nn.functional.pad(content.unflatten(-1, (self.y.length, self.x.length)), beyond).flatten(-2)
        return (1 - gate) * on_grid + gate * self.positional().to(on_grid.dtype)


def product(rows: Tensor, cols: Tensor) -> Tensor:
    """Rows (x) cols: (heads, queries_y, H) and (heads, queries_x, W) -> (heads, N_query, H * W)."""
    return torch.einsum("hyj,hxi->hyxji", rows, cols).flatten(3).flatten(1, 2)


def check_values(attention: GatedAttention, values: Tensor) -> None:
    """Raise unless ``values`` are of shape (B, 1, H * W, C) or (B, heads, H * W, C), and like the queries."""
    (batch, heads), (y, x) = attention.query.shape[:2], (attention.y, attention.x)
    pixels = y.length * x.length
    of_heads = ((batch, heads, pixels), (batch, 1, pixels))
    if values.ndim != 4 or tuple(values.shape[:3]) not in of_heads or values.shape[3] < 1:
        expected = f"({batch}, 1 or {heads}, {y.length} * {x.length} = {pixels}, C)"
        raise ValueError(f"expected values of shape {expected}, got {tuple(values.shape)}")
    check_alike(attention.query, values=values)


def check_alike(query: Tensor, **others: Tensor) -> None:
    """Raise unless the others have the queries' device and dtype."""
    for name, tensor in others.items():
        if (tensor.device, tensor.dtype) != (query.device, query.dtype):
            raise ValueError(
                f"expected {name} like the queries, {query.dtype} on {query.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], *, grid: tuple[Axis, Axis] | None = None) -> None:
    if tuple(tensor.shape) != shape:
        pixels = f" on {grid[0].length} x {grid[1].length} pixels" if grid else ""
        raise ValueError(f"expected {name} of shape {shape}{pixels}, got {tuple(tensor.shape)}")
