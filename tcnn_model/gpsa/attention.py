"""The gated attention of one batch, before it is applied to the values (T-CNN paper, Eq. 7).

:class:`GatedAttention` describes the attention of :class:`~tcnn_model.GPSA` and of timm's ConViT
layers alike: :func:`~tcnn_model.gpsa` applies it, a probe measures it.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from tcnn_model.gpsa.positional import (
    Axis,
    is_jit_tracing,
    positional_factors,
    traces_sizes,
)
from tcnn_model.precision import widen, without_autocast

__all__ = ["GatedAttention"]


@dataclass(frozen=True)
class GatedAttention:
    """``A_h = (1 - gate_h) softmax(q k^T / sqrt(d)) + gate_h softmax(position_h · r)``.

    The content part attends to real pixels only, the positional part to the grid extended by the
    padding.

    Args:
        query: Queries, shape (B, heads, N_query, d), row-major over the y.queries x x.queries grid.
        key: Keys, shape (B, heads, H * W, d), row-major over the real pixels.
        position: v_pos, the weights of r = (||delta||^2, delta_1, delta_2) in the positional
            logits, shape (heads, 3).
        gate: sigma(lambda), the share of positional attention, shape (heads,).
        y: Vertical axis.
        x: Horizontal axis.

    Raises:
        TypeError: If an argument is neither a floating-point tensor nor, for ``y`` and ``x``, an
            :class:`Axis`.
        ValueError: If the shapes do not fit each other or the grid, the grid is empty, or devices
            or dtypes are mixed.
    """

    query: Tensor
    key: Tensor
    position: Tensor
    gate: Tensor
    y: Axis
    x: Axis

    def __post_init__(self) -> None:
        """Raise unless the arguments fit together."""
        if traces_sizes():
            return
        y, x = self.y, self.x
        for name, axis in (("y", y), ("x", x)):
            if not isinstance(axis, Axis):
                raise TypeError(f"expected {name} to be a tcnn_model.Axis, got {axis!r}")
        for name, tensor in (
            ("queries", self.query),
            ("keys", self.key),
            ("position", self.position),
            ("gate", self.gate),
        ):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                actual = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
                raise TypeError(f"expected {name} to be a tensor of a floating dtype, got {actual}")
        if min(y.length, x.length, y.queries, x.queries) < 1:
            raise ValueError(
                f"empty grid: {y.queries} x {x.queries} queries on {y.length} x {x.length} pixels"
            )
        shape = tuple(self.query.shape)
        if len(shape) != 4 or shape[2] != y.queries * x.queries:
            expected = f"(B, heads, {y.queries} * {x.queries} = {y.queries * x.queries}, d)"
            raise ValueError(f"expected queries of shape {expected}, got {shape}")
        batch, heads, _, dim = shape
        if min(heads, dim) < 1:
            raise ValueError(
                f"expected at least one head of at least one channel, got queries {shape}"
            )
        _check_shape("keys", self.key, (batch, heads, y.length * x.length, dim), grid=(y, x))
        _check_shape("position", self.position, (heads, 3))
        _check_shape("gate", self.gate, (heads,))
        check_alike(self.query, keys=self.key)
        # Position and gate may have a wider dtype than the queries: positional logits of far pixels
        # need its range, and gates near 1 its precision.
        device = self.query.device
        for name, tensor in (("position", self.position), ("gate", self.gate)):
            if tensor.device != device:
                raise ValueError(
                    f"expected {name} on the device of the queries, {device}, got {tensor.device}"
                )

    @property
    def scale(self) -> float:
        """Factor of the content logits, 1 / sqrt(d)."""
        if not is_jit_tracing():
            return float(self.query.shape[-1] ** -0.5)
        with warnings.catch_warnings():
            # torch warns that the number of channels becomes a constant of the traced graph, as it
            # should.
            warnings.simplefilter("ignore")
            return float(int(self.query.shape[-1]) ** -0.5)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return positional attention along y, (heads, y.queries, y.keys),
        and along x, (heads, x.queries, x.keys).
        """
        return positional_factors(self.position, self.y, self.x)

    def factors_on_pixels(
        self, dtype: torch.dtype, *, logarithm: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the factors, or their logarithms, without the padding.

        Values on the padding are zero, so attention to the padding contributes nothing to the
        output.

        Returns:
            Factors of shapes (heads, y.queries, H) and (heads, x.queries, W).
        """
        return positional_factors(
            self.position,
            self.y,
            self.x,
            logarithm=logarithm,
            padding=False,
            dtype=dtype,
        )

    def content(self, queries: Tensor | slice | None = None) -> Tensor:
        """Return the content attention of some or all queries,
        (B, heads, n, H * W), in float32 at least.
        """
        # The default is None because torch 2.8 cannot compile a slice as a default argument.
        query = self.query if queries is None else self.query[:, :, queries]
        with without_autocast(self.query):
            # Scaling the queries is cheaper than scaling the logits, of which there are more.
            scaled = widen(query) * self.scale
            return torch.softmax(scaled @ widen(self.key).transpose(2, 3), dim=-1)

    def positional(self) -> Tensor:
        """Return the dense positional attention over the extended grid,
        shape (heads, N_query, N_key).
        """
        return product(*self.factors())

    def dense(self) -> Tensor:
        """Return the whole attention A over the extended grid,
        shape (B, heads, N_query, N_key); rows sum to one.

        Keys are row-major over a grid of ``y.keys`` by ``x.keys`` pixels, padding included. This is
        meant for pictures and tests: the layer itself never forms the matrix.
        """
        content = self.content()
        gate = self.gate[:, None, None]
        padding = (self.x.before, self.x.after, self.y.before, self.y.after)
        on_grid = content.unflatten(-1, (self.y.length, self.x.length))
        extended = torch.nn.functional.pad(on_grid, padding).flatten(-2)
        return (1 - gate) * extended + gate * self.positional().to(content.dtype)


def product(rows: Tensor, cols: Tensor) -> Tensor:
    """Multiply the factors (heads, queries_y, H)
    and (heads, queries_x, W) into (heads, N_query, H * W).
    """
    return torch.einsum("hyj,hxi->hyxji", rows, cols).flatten(3).flatten(1, 2)


def check_values(attention: GatedAttention, values: Tensor) -> None:
    """Raise unless values have shape (B, 1 or heads, H * W, C),
    and the device and dtype of the queries.
    """
    if traces_sizes():
        return
    batch, heads = attention.query.shape[:2]
    y, x = attention.y, attention.x
    pixels = y.length * x.length
    if (
        values.ndim != 4
        or values.shape[3] < 1
        or tuple(values.shape[:3])
        not in (
            (batch, heads, pixels),
            (batch, 1, pixels),
        )
    ):
        expected = f"({batch}, 1 or {heads}, {y.length} * {x.length} = {pixels}, C)"
        raise ValueError(f"expected values of shape {expected}, got {tuple(values.shape)}")
    check_alike(attention.query, values=values)


def check_alike(query: Tensor, **tensors: Tensor) -> None:
    """Raise unless the tensors have the device and dtype of the queries."""
    for name, tensor in tensors.items():
        if (tensor.device, tensor.dtype) != (query.device, query.dtype):
            raise ValueError(
                f"expected {name} like the queries, {query.dtype} on {query.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )


def _check_shape(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    *,
    grid: tuple[Axis, Axis] | None = None,
) -> None:
    if tuple(tensor.shape) != shape:
        pixels = f" on {grid[0].length} x {grid[1].length} pixels" if grid else ""
        raise ValueError(f"expected {name} of shape {shape}{pixels}, got {tuple(tensor.shape)}")
