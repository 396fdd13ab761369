"""The command ``tcnn-probe look``: one model,
two side by side, or a list of models, each with a page.
"""

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tcnn_model.class_folders import reason_unused
from tcnn_probe.looking.look import compare, is_first_rank, look

__all__ = ["run_look"]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


def run_look(options: argparse.Namespace) -> Path | None:
    """Run the command, and return the file of the page or the table; None on ranks that write none.

    Raises:
        ValueError: Options contradict each other, or there is no such model or photograph.
    """
    # It logs each attempt to reach its server, and the error says the same.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    names, photographs = _split(options.targets)
    if options.models is not None:
        names += _listed(Path(options.models))
    if not names or not photographs:
        raise ValueError(
            f"expected a model and photographs, got {'a model' if names else 'photographs'} only: "
            "tcnn-probe look MODEL FOLDER -o page.html"
        )
    models = [*_with_weights(names, options)]
    common = {
        "size": options.size,
        "limit": options.limit,
        "shown": options.shown,
        "masks": options.masks,
        "device": options.device,
        "dtype": None if options.dtype is None else getattr(torch, options.dtype),
        "batch_size": options.batch_size,
        "max_mb": options.max_mb,
        "progress": True,
    }
    output = Path(options.output)
    with _ranks(options.device):
        if options.models is not None:
            from tcnn_probe.looking.several import look_at_each

            look_at_each(models, photographs, output, common, options.scheduler)
        elif len(models) == 1:
            look(models[0][0], photographs, output, weights=models[0][1], **common)
        else:
            compare(models, photographs, output, **common)
        page = output if options.models is None else output / "index.html"
        return page if is_first_rank() else None


def _split(targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into models and, from the first
    that is a picture or a folder without a model, photographs.
    """
    for place, target in enumerate(targets):
        path = Path(target)
        is_folder = path.is_dir() and not (path / "config.json").exists()
        is_picture = path.is_file() and reason_unused([path.name]) is None
        # A missing folder is the last of several arguments, and its error says so.
        is_missing = 0 < place == len(targets) - 1 and not (path / "config.json").exists()
        if is_folder or is_picture or is_missing:
            return [*targets[:place]], [*targets[place:]]
    return [*targets], []


def _listed(path: Path) -> list[str]:
    """Return the names in a file, one a line; what follows a # is a comment."""
    if not path.is_file():
        raise FileNotFoundError(f"--models: there is no file {path}")
    lines = [
        line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()
    ]
    names = [line for line in lines if line]
    if not names:
        raise ValueError(f"--models: {path} names no model")
    return names


def _with_weights(names: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield each model with its weights; several checkpoints of a single model make it several."""
    files = options.weights or []
    if not files:
        yield from ((name, "random" if options.random else "pretrained") for name in names)
    elif len(names) == 1 or len(names) == len(files):
        yield from zip([*names] * (len(files) if len(names) == 1 else 1), files, strict=True)
    else:
        raise ValueError(f"expected a --weights for each of {len(names)} models, got {len(files)}")


@contextmanager
def _ranks(device: str | None) -> Iterator[None]:
    """Join the processes that torchrun has started;
    each of them looks at a share of the photographs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    on_gpu = device is not None and device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
