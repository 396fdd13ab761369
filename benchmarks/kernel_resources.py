"""(k) Resources of the softmax statistics kernel,
compiled for compute capability 9.0, and lower bounds of its time.

    # registers, spills, shared memory, roofline; a minute on one core, no GPU
    python benchmarks/kernel_resources.py

Triton's own compiler and assembler need no GPU. Nothing here is measured on one.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import contest

# An H200 (SXM), from NVIDIA's data sheet and the CUDA programming guide's table of throughputs for
# 9.0.
BYTES = 4.8e12  # bytes of memory per second
MATRIX = 989e12  # FLOP of bfloat16 products per second
LANES = 132 * 128 * 1.98e9  # float32 operations per second, where a multiply-add is one
SPECIAL = 132 * 16 * 1.98e9  # exponentials and square roots per second

# Operations on each weight of a tile besides the product, counted in row_statistics.py: the scale,
# the test for the last key, the maximum, two to subtract it, one of the exponential, two sums; and
# for the distance two differences, squares, the sum.
OPERATIONS = 14
# An exponential and the square root of the distance.
SPECIALS = 2

# Images, tokens, heads, channels of a head, and channels of the transformer block (None for a
# T-ResNet).
SHAPES = {
    "ViT-S/16 at 224": (64, 197, 6, 64, 384),
    "ViT-B/16 at 224": (64, 197, 12, 64, 768),
    "ViT-B/16 at 512": (16, 1025, 12, 64, 768),
    "T-ResNet50 at 320, content part": (32, 400, 9, 56, None),
}
HEADS = (32, 64, 80, 128)


class Resources(NamedTuple):
    """Resources of a compiled kernel: registers of a thread,
    bytes of its stack, bytes of shared memory.
    """

    registers: int
    spilled: int
    shared: int


class _Hopper:
    """The part of Triton's driver that compiling needs, for a GPU of compute capability 9.0."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[Resources]]:
    """Compile the kernels of the block without launching them,
    and yield the list of their resources.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    # The attribute of the driver, which would look for a GPU if it were read, has another name in
    # Triton 3.4.
    place = "_active" if hasattr(driver, "_active") else "active"
    launch, active, compiled = JITFunction.run, vars(driver)[place], []

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiled.append(_resources(launch(kernel, *args, warmup=True, **options)))

    driver.set_active(_Hopper())
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        setattr(driver, place, active)


def _resources(kernel: Any) -> Resources:
    """Read the resources off the machine code."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = (
        int(re.search(rf"{word}:(\d+)", report.stdout)[1]) for word in ("REG", "STACK")
    )
    return Resources(registers, stack, kernel.metadata.shared)


def statistics_of(dim: int, dtype: torch.dtype, *, full: bool) -> Callable[[], object]:
    """Return a call of the kernel on 197 tokens, 14 x 14 and a class token.

    Args:
        dim: Channels of a head.
        dtype: Dtype of queries and keys.
        full: Whether the call has an additive mask and returns the columns' sums.
    """
    from tcnn_model.kernels import TokenGrid, attention_statistics

    q = torch.empty(2, 3, 197, dim, dtype=dtype)
    mask: Tensor | None = torch.empty(197, 197, dtype=dtype) if full else None
    grid = {"queries": TokenGrid(1, 14), "keys": TokenGrid(1, 14), "received": full}
    return lambda: attention_statistics(q, q, dim**-0.5, mask, **grid)


def compiled(dims: list[int], dtype: torch.dtype) -> dict[str, Resources]:
    """Return the resources for heads of some sizes."""
    resources = {}
    for dim in dims:
        for full in (False, True):
            with compiling() as kernels:
                statistics_of(dim, dtype, full=full)()
            name = f"d = {dim}" + (", mask and columns" if full else "")
            (resources[name],) = kernels
    return resources


def best_times(images: int, tokens: int, heads: int, dim: int, width: int | None) -> list[str]:
    """Return the least times in microseconds that each part of the GPU allows a layer's statistics.

    Args:
        images, tokens, heads, dim: Shape of the queries and the keys.
        width: Channels of the transformer block around the layer, the products of which are the
            last number; None for a layer without such a block.
    """
    from tcnn_model.kernels.launch import blocks, power_of_two

    tile = blocks("statistics", torch.empty(0, dtype=torch.bfloat16), dim)
    of_queries = -(-tokens // tile.queries) * tile.queries
    of_keys = -(-tokens // tile.keys) * tile.keys
    weights = images * heads * of_queries * of_keys
    rows = images * heads * tokens
    seconds = {
        # Queries and keys are read once, as the keys of a head stay in the cache; five numbers are
        # written per query.
        "memory": (2 * rows * dim * 2 + 5 * rows * 4) / BYTES,
        "products": 2 * weights * power_of_two(dim) / MATRIX,
        "special": SPECIALS * weights / SPECIAL,
        "other": OPERATIONS * weights / LANES,
    }
    row = [f"{1e6 * x:.1f}" for x in (*seconds.values(), max(seconds.values()))]
    if width is None:
        return [*row, ""]
    block = 24 * images * tokens * width**2 + 4 * images * tokens**2 * width
    return [*row, f"{1e6 * block / MATRIX:.0f}"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=list(HEADS))
    parser.add_argument("--dtype", default="bfloat16")
    return parser


def main() -> None:
    """Print both tables."""
    arguments = parser().parse_args()
    import triton

    resources = compiled(arguments.dims, getattr(torch, arguments.dtype))
    header = ["registers", "spilled bytes", "shared memory, KB"]
    rows = [
        (name, *map(str, (r.registers, r.spilled, -(-r.shared // 1024))))
        for name, r in resources.items()
    ]
    contest.print_table(("", *header), rows)
    print(f"\n{arguments.dtype}, Triton {triton.__version__}, for 9.0\n")
    header = ["memory", "products", "special", "other", "at best", "block, at best"]
    rows = [(name, *best_times(*shape)) for name, shape in SHAPES.items()]
    contest.print_table(("", *header), rows)
    print("\nmicroseconds per layer on an H200, on paper: not measured on a GPU")


if __name__ == "__main__":
    main()
