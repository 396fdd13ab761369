"""The convolution that a head becomes: a positive kernel over offsets,
normalised for each query.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model.gpsa.positional import Axis
from tcnn_model.precision import without_autocast

__all__ = ["HeadConvolution"]

# Logarithms of weights, relative to the largest of their kernel, below which attention is zero in
# any precision. They stay finite, so that averages of weights over steps do (infinity minus
# infinity is NaN).
_LEAST = -70.0


class HeadConvolution(nn.Module):
    """Depthwise convolutions of the values of heads, whose weights sum to one for each query.

    ``T_i(j) = exp(theta(j - i)) / Z_i``, with Z_i the sum over the keys of query i: the offsets of
    the kernel that lie on the grid, and the tokens off the grid, such as a class token, each with a
    weight of its own.

    Args:
        kernel: Weights of each offset from query to key, shape (heads, k_y, k_x), k_y and k_x odd.
            Not negative.
        prefix: Weights of the tokens off the grid, shape (heads, tokens); None without such tokens.

    Attributes:
        theta: Logarithms of the kernel up to a constant of each head, shape (heads, k_y, k_x).
        prefix_theta: Those of the tokens off the grid, shape (heads, tokens), or None.
    """

    def __init__(self, kernel: Tensor, prefix: Tensor | None = None) -> None:
        super().__init__()
        weights = kernel.flatten(1)
        if prefix is not None:
            weights = torch.cat([weights, prefix], 1)
        largest = weights.amax(1, keepdim=True)
        theta = (weights / largest).log().clamp_min(_LEAST)
        on_grid, off_grid = theta.tensor_split([kernel[0].numel()], 1)
        self.theta = nn.Parameter(on_grid.reshape(kernel.shape).clone())
        self.prefix_theta = None if prefix is None else nn.Parameter(off_grid.clone())

    def forward(self, maps: Tensor, y: Axis, x: Axis, prefix: Tensor | None = None) -> Tensor:
        """Convolve the values of the heads.

        Args:
            maps: Values on the grid, shape (B, heads * d, H, W), fastest in torch.channels_last.
            y: Vertical axis of queries and keys.
            x: Horizontal axis.
            prefix: Values of the tokens off the grid, shape (B, tokens, heads * d).

        Returns:
            Outputs of the heads, shape (B, heads * d, y.queries, x.queries).
        """
        heads, channels = len(self.theta), maps.shape[1] // len(self.theta)
        kernel, off_grid = (None if theta is None else theta.exp() for theta in self._relative())
        assert kernel is not None
        rows, columns = map(_margins, (y, x), kernel.shape[1:])
        real = (
            columns[0] + x.before,
            columns[1] + x.after,
            rows[0] + y.before,
            rows[1] + y.after,
        )
        weight = kernel.to(maps.dtype).repeat_interleave(channels, 0)[:, None]
        stride = (y.stride, x.stride)
        padded = F.pad(maps, real).contiguous(memory_format=torch.channels_last)
        sums = F.conv2d(padded, weight, stride=stride, groups=maps.shape[1])
        with without_autocast(maps):
            # Keys in the zero padding of a T-CNN's layer count, as they do in its attention.
            ones = kernel.new_ones(1, heads, y.keys, x.keys)
            ones = F.pad(ones, (*columns, *rows))
            normalisers = F.conv2d(ones, kernel[:, None], stride=stride, groups=heads)
            if off_grid is not None:
                normalisers = normalisers + off_grid.sum(1)[:, None, None]
            normalisers = normalisers.repeat_interleave(channels, 1).to(sums.dtype)
        if off_grid is not None and prefix is not None:
            by_head = prefix.unflatten(2, (heads, channels))
            added = torch.einsum("bthd,ht->bhd", by_head, off_grid.to(prefix.dtype))
            sums = sums + added.flatten(1)[:, :, None, None]
        return sums / normalisers

    def logits(self, y: Axis, x: Axis) -> Tensor:
        """Return theta for each pair of query and key, for recorders and tests.

        Returns:
            Shape (heads, N_query, tokens off the grid + N_key), whose softmax is T. Keys beyond the
            kernel have the lowest finite logit.
        """
        theta, off_grid = self._relative()
        places, inside = zip(
            *(
                _places_in_kernel(axis, size, theta)
                for axis, size in zip((y, x), theta.shape[1:], strict=True)
            ),
            strict=True,
        )
        # (heads, queries_y, keys_y, queries_x, keys_x) -> (heads, N_query, N_key)
        by_axis = theta[:, places[0]][:, :, :, places[1]]
        is_inside = inside[0][:, :, None, None] & inside[1]
        by_axis = by_axis.where(is_inside, _LEAST).transpose(2, 3)
        logits = by_axis.flatten(3).flatten(1, 2)
        if off_grid is None:
            return logits
        off_grid = off_grid[:, None].expand(-1, logits.shape[1], -1)
        return torch.cat([off_grid, logits], 2)

    def extra_repr(self) -> str:
        """Return the sizes, as ``print(model)`` shows them."""
        heads, rows, columns = self.theta.shape
        tokens = 0 if self.prefix_theta is None else self.prefix_theta.shape[1]
        return f"heads={heads}, {rows} x {columns}, tokens off the grid={tokens}"

    def _relative(self) -> tuple[Tensor, Tensor | None]:
        """Return theta and that of tokens off the grid,
        minus the largest of each head, so that exp cannot overflow.
        """
        largest = self.theta.detach().flatten(1).amax(1)
        if self.prefix_theta is None:
            return self.theta - largest[:, None, None], None
        largest = largest.maximum(self.prefix_theta.detach().amax(1))
        return self.theta - largest[:, None, None], self.prefix_theta - largest[:, None]


def _margins(axis: Axis, size: int) -> tuple[int, int]:
    """Return how many zeros to put before and after the keys of an axis;
    negative numbers remove keys.

    A kernel of this odd size, moved by the stride over the result, is centred at each query in
    turn.
    """
    before = size // 2 - (axis.first_query + axis.before)
    length = (axis.queries - 1) * axis.stride + size
    return before, length - axis.keys - before


def _places_in_kernel(axis: Axis, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of offsets in a kernel of this size,
    and whether they lie in it: (queries, keys) each.
    """
    offsets = axis.key_positions(like) - axis.query_positions(like)[:, None]
    places = offsets.long() + size // 2
    return places.clamp(0, size - 1), (places >= 0) & (places < size)
