"""Measurements that are not marked yet, kept in a file,
so that a process that was killed can be continued.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tcnn_probe.recording.recorder import Recorder

__all__ = ["continue_measuring", "keep_measurements"]

# What numpy's arrays and torch's sizes consist of in a pickle.
_PLAIN = {
    ("numpy", "dtype"), ("numpy", "ndarray"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy._core.numeric", "_frombuffer"), ("torch", "Size"),
    ("_codecs", "encode"),
}  # fmt: skip
_OURS = ("tcnn_probe.recording.", "tcnn_probe.attention.patterns", "tcnn_probe.probes.")


def keep_measurements(recorder: "Recorder", path: Path, about: Any) -> None:
    """Write all that was measured since the previous mark to a file, in one step.

    Args:
        recorder: Recorder whose measurements are kept.
        path: Path of the file.
        about: Plain data that :func:`continue_measuring` returns.
    """
    collector = recorder._collector
    with collector.lock:
        forwards, sums = collector.forwards, [*collector.earlier, collector.read_sums()]
        measured = {"sums": sums, "images": forwards.passed, "samples": forwards.samples}
    kept = {"about": about, "measured": measured}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            pickle.dump(_converted(kept, Tensor, lambda x: x.cpu().numpy()), file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def continue_measuring(
    recorder: "Recorder", path: Path, is_continued: Callable[[Any], bool]
) -> Any:
    """Add the measurements in a file to a recorder that has measured nothing,
    and return what the file is about.

    Args:
        recorder: The recorder.
        path: Path of the file.
        is_continued: Function of what the file is about that returns whether it is of the same
            model and images; if not, nothing is added, and the result is None.

    Raises:
        ValueError: The file is damaged, or holds something else.
    """
    try:
        with path.open("rb") as file:
            kept = _Unpickler(file).load()
        if not is_continued(kept["about"]):
            return None
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        TypeError,
        KeyError,
    ) as error:
        raise ValueError(f"{path} holds no measurements: {error}") from error
    measured = _converted(kept["measured"], np.ndarray, torch.from_numpy)
    collector = recorder._collector
    collector.earlier = measured["sums"]
    collector.forwards.passed, collector.forwards.samples = measured["images"], measured["samples"]
    return kept["about"]


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return nested dictionaries with all values of a kind converted."""
    if isinstance(value, dict):
        return {key: _converted(entry, kind, convert) for key, entry in value.items()}
    return convert(value) if isinstance(value, kind) else value


class _Unpickler(pickle.Unpickler):
    """Unpickler that makes sums and arrays and nothing else, so that no file runs code."""

    def find_class(self, module: str, name: str) -> Any:
        # A dotted name would reach what our modules import.
        ours = module.startswith(_OURS) and "." not in name
        if ours or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")
