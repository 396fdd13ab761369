"""Launch options of the kernels: memory for their results, and the sizes of their tiles."""

# mypy: disable-error-code="import-untyped, import-not-found"

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tcnn_model.precision import at_least_float32

__all__ = [
    "Blocks",
    "aligned",
    "blocks",
    "empty",
    "numerics",
    "padded_empty",
    "power_of_two",
    "strides",
    "triton_dtype",
    "unit",
    "using_blocks",
]

Pass = Literal["lse", "mix", "queries", "keys", "values", "statistics"]


class Blocks(NamedTuple):
    """Tile of a program: ``queries`` x ``keys`` attention weights,
    and ``channels`` of the values at a time.
    """

    queries: int
    keys: int
    channels: int
    warps: int = 4
    stages: int = 2

    def tile(self, dim: int, *, with_channels: bool = True) -> dict[str, Any]:
        """Return the tile sizes and launch options of a kernel as its keyword arguments."""
        sizes = {"QUERIES": self.queries, "KEYS": self.keys, "DIM": power_of_two(dim)}
        if with_channels:
            sizes["CHANNELS"] = self.channels
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


# Tile sizes by bytes per element of q, k and v. They were chosen by reasoning and by the compiler's
# report of registers (README, "Blocks"), and not tuned on a GPU.
_BLOCKS: dict[int, dict[Pass, Blocks]] = {
    2: {
        "lse": Blocks(128, 128, 0, warps=8, stages=3),
        "mix": Blocks(128, 64, 256, warps=8, stages=3),
        "queries": Blocks(128, 64, 64, warps=8, stages=3),
        "keys": Blocks(64, 128, 64, warps=8, stages=3),
        "values": Blocks(32, 128, 256, warps=8, stages=3),
        "statistics": Blocks(128, 64, 0, warps=8, stages=3),
    },
    4: {
        "lse": Blocks(64, 32, 0, warps=4, stages=2),
        "mix": Blocks(64, 32, 128, warps=8, stages=2),
        "queries": Blocks(64, 64, 32, warps=8, stages=2),
        "keys": Blocks(64, 64, 32, warps=8, stages=2),
        "values": Blocks(32, 64, 128, warps=8, stages=2),
        "statistics": Blocks(64, 32, 0, warps=8, stages=2),
    },
    8: dict.fromkeys(
        ("lse", "mix", "queries", "keys", "values", "statistics"),
        Blocks(32, 32, 32, warps=4, stages=1),
    ),
}
# Bytes of shared memory that a GPU needs for the sizes above: Hopper has 227 KB, Ampere 99 or 163.
_ROOMY = 200_000
_forced: list[Blocks] = []


def blocks(which: Pass, like: Tensor, dim: int, channels: int = 0) -> Blocks:
    """Return the tile sizes of a pass.

    Args:
        which: Name of the pass.
        like: Tensor with the dtype and device of the pass.
        dim: Channels d of q and k.
        channels: Channels C of v.
    """
    if _forced:
        return _forced[-1]
    size = _BLOCKS[like.dtype.itemsize][which]
    # q, k and the sums over d grow with d, and share registers with the tile.
    if dim > 128:
        size = size._replace(queries=min(size.queries, 64), keys=min(size.keys, 64), stages=2)
    if like.is_cuda:
        properties = torch.cuda.get_device_properties(like.device)
        if properties.shared_memory_per_block_optin < _ROOMY:
            size = size._replace(channels=min(size.channels, 128), stages=min(size.stages, 2))
    return size._replace(channels=min(size.channels, power_of_two(channels)))


@contextmanager
def using_blocks(forced: Blocks) -> Iterator[None]:
    """Use the same tile sizes for every pass, for tests and tuning."""
    _forced.append(forced)
    try:
        yield
    finally:
        _forced.pop()


def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate uninitialised memory on the device of ``like``."""
    # All results of kernels are allocated here, so that tests can fill them with NaN and find
    # elements never written.
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def padded_empty(*shape: int, like: Tensor) -> Tensor:
    """Allocate uninitialised memory with a row stride that is a multiple of 16 bytes."""
    *outer, row = shape
    whole_units = row + -row % unit(like.dtype)
    return empty(*outer, whole_units, like=like)[..., :row]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for float32 or float64."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def numerics(dtype: torch.dtype) -> dict[str, Any]:
    """Return a kernel's numeric options for ``dtype``;
    float32 products follow PyTorch's setting of TF32.
    """
    import triton

    return {
        "ACC": triton_dtype(at_least_float32(dtype)),
        "UNIT": unit(dtype),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "INTERPRETED": triton.knobs.runtime.interpret,
    }


def power_of_two(size: int) -> int:
    """Return the next power of two, at least 16."""
    # 16 is the smallest side of a product on tensor cores.
    return max(16, 1 << (size - 1).bit_length())


def unit(dtype: torch.dtype) -> int:
    """Return the number of elements in 16 bytes, the widest load."""
    # Kernels take strides in these units, so that the compiler knows that rows of any length are
    # aligned.
    return 16 // dtype.itemsize


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor of 4 dimensions whose rows can be read 16 bytes at a time.

    This is the tensor itself if possible, else a copy with zeros at the end of the rows: ``d = C //
    heads`` is often odd, and rows of odd length would be read element by element.
    """
    step = unit(tensor.dtype)
    strides_fit = tensor.stride(3) == 1 and all(s % step == 0 for s in tensor.stride()[:3])
    if strides_fit and tensor.shape[3] % step == 0 and tensor.data_ptr() % 16 == 0:
        return tensor
    padding = (0, -tensor.shape[3] % step)
    return torch.nn.functional.pad(tensor, padding).contiguous()


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """Return the strides of image, head and row in units;
    that of heads is 0 if they share the tensor.
    """
    step = unit(tensor.dtype)
    image, head, row = (stride // step for stride in tensor.stride()[:3])
    # The stride of a dimension of size one is arbitrary in torch.
    shared = tensor.shape[1] == 1
    return image, 0 if shared else head, row
