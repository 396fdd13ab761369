"""(o) Reading of a long recording: the time to open it whole,
in part and as a report, and its size on the disk.

    # 300 epochs of 24 layers with 16 heads; about 3 minutes
    python benchmarks/read_recording.py

The recording has the variables of a ViT with a class token, and maps of 4 images at 14 x 14. The
library's store writes random numbers as those of a training, one mark at a time.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import tcnn_probe
from tcnn_probe.probes import PROBES
from tcnn_probe.schema import COUNTS, Group
from tcnn_probe.storage import EpochStore


def groups(arguments: argparse.Namespace) -> dict[str, Group]:
    """Return the groups of numbers and of maps."""
    variables = PROBES["softmax"].variables | PROBES["class-attention"].variables
    numbers = {
        name: variable for name, variable in variables.items() if "image" not in variable.dims
    }
    maps = {
        name: replace(variable, dims=tuple(d for d in variable.dims if d != "window"))
        for name, variable in variables.items()
        if "image" in variable.dims
    }
    heads, side = arguments.heads, arguments.side
    layers = {
        f"blocks.{layer}.attn": {"kind": "softmax", "heads": heads}
        for layer in range(arguments.layers)
    }
    sizes = {"image": arguments.images, "head": heads, "y": side, "x": side}
    return {
        "": Group({**numbers, **COUNTS}, layers, {"head": heads}),
        f"maps/{heads}x{side}x{side}": Group(maps, layers, sizes),
    }


def write(path: Path, arguments: argparse.Namespace) -> list[float]:
    """Write the recording, and return the seconds of each mark."""
    random = np.random.default_rng(0)
    recorded = groups(arguments)
    store = EpochStore(path)
    images = str([*range(arguments.images)])
    attrs = {"images": images, "unsupported": "{}", "missing": "{}"}
    seconds = []
    for epoch in range(arguments.epochs):
        values = {
            place: {name: random.random(group.shape(name)) for name in group.variables}
            for place, group in recorded.items()
        }
        values[""]["images"][:] = 1000
        values[""]["nonfinite_images"][:] = 0
        start = time.perf_counter()
        scalars = {"top1": random.random()}
        store.append(epoch, recorded, values, scalars, attrs=attrs)
        seconds.append(time.perf_counter() - start)
    store.close()
    return seconds


def reads(
    path: Path, report: Path, arguments: argparse.Namespace
) -> Mapping[str, Callable[[], object]]:
    """Return what is read, by its name."""
    tree = tcnn_probe.open(path)
    maps = tree[list(groups(arguments))[1]].attention_received
    epoch = arguments.epochs // 2
    head = {"layer": arguments.layers // 2, "head": arguments.heads // 2}
    return {
        # What the times below can be compared with, as the load of a shared machine slows both.
        "bytes of all files": lambda: [
            file.read_bytes() for file in path.rglob("*") if file.is_file()
        ],
        "opened and loaded whole": lambda: tcnn_probe.open(path).load(),
        "maps of one head, all epochs": lambda: maps.isel(head).values,
        "maps of one epoch": lambda: maps.isel(epoch=epoch).values,
        "everything of one epoch": lambda: tree.isel(epoch=epoch).load(),
        "report": lambda: tcnn_probe.report(path, report),
    }


def main() -> None:
    """Write the recording, and print a table of times and sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--side", type=int, default=14)
    parser.add_argument("--folder", help="folder that keeps the recording")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        path, report = folder / "run.zarr", folder / "report.html"
        if not path.exists():
            marks = write(path, arguments)
            tenth = max(len(marks) // 10, 1)
            for name, seconds in (("first", marks[:tenth]), ("last", marks[-tenth:])):
                row(f"a mark, {name} tenth", statistics.median(seconds), "s")
        files = [file for file in path.rglob("*") if file.is_file()]
        row("size", sum(file.stat().st_size for file in files) / 1e6, "MB")
        row("files", len(files), "")
        for name, read in reads(path, report, arguments).items():
            drop_cache(files)
            start, used = time.perf_counter(), time.process_time()
            read()
            row(name, time.perf_counter() - start, "s")
            row(f"{name}, processor", time.process_time() - used, "s")
        row("report", report.stat().st_size / 1e6, "MB")


def drop_cache(files: list[Path]) -> None:
    """Ask the system to forget the contents of files, so that they are read from the disk."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(name: str, value: float, unit: str) -> None:
    """Print a row of the table."""
    print(f"| {name:<39} | {value:8.3g} {unit} |", flush=True)


if __name__ == "__main__":
    main()
