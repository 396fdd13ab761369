"""A trainer's metrics as the scalars of a mark, which never end a training."""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tcnn_probe.probes import PROBES
from tcnn_probe.recording.recorder import Recorder
from tcnn_probe.schema import COORDINATES, COUNTS

__all__ = ["float_metrics", "mark_validation", "warn_of_no_validation"]


def mark_validation(
    recorder: Recorder,
    along: str,
    number: int,
    metrics: Mapping[str, Any],
    on_mark: Callable[[Recorder], object] | None,
) -> None:
    """Mark a validation; if that fails, mark it without the metrics or leave it out,
    with a warning.

    Args:
        recorder: Recorder of the training.
        along: Name of the coordinate of marks.
        number: The epoch or step.
        metrics: The trainer's metrics.
        on_mark: Function that is called with the recorder after the mark; None on all processes but
            the first.
    """
    mark = {along: number}
    try:
        try:
            recorder.mark(if_marked="skip", **float_metrics(metrics, along), **mark)
        except ValueError as error:
            # A probe of the user's own may have a variable with the name of a metric.
            recorder.mark(if_marked="skip", **mark)
            _warn(f"{along} {number} is recorded without its metrics: {error}")
    except Exception as error:  # a training of days must not end because of its recorder
        recorder.discard()
        _warn(f"{along} {number} is not recorded: {type(error).__name__}: {error}")
        return
    if on_mark is not None:
        on_mark(recorder)


def warn_of_no_validation(advice: str) -> None:
    """Warn at the end of a training that has marked nothing."""
    _warn(f"nothing was recorded, as the training ran no validation: {advice}")


def float_metrics(metrics: Mapping[str, Any], along: str = "epoch") -> dict[str, float]:
    """Return the metrics that are numbers, under names that a recording can hold:
    ``val/acc`` becomes ``val_acc``.

    A name that the recording has itself, such as ``entropy``, becomes ``metric_entropy``, and the
    second of two metrics with one name ends in ``_2``. A warning lists these and what is left out;
    epochs and steps are left out without one.

    Args:
        metrics: Metrics by name, from anywhere.
        along: Name of the coordinate of marks.
    """
    reserved = _reserved_names() | {along}
    numbers: dict[str, float] = {}
    renamed = {}
    left_out = []
    # A metric that has a valid name keeps it, whatever the order in which the trainer lists them.
    for name in sorted(metrics, key=lambda name: (not str(name).isidentifier(), name)):
        if name in ("epoch", "step", along):
            continue
        try:
            value = metrics[name]
            number = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):  # text, or an array
            left_out.append(str(name))
            continue
        plain = re.sub(r"\W", "_", str(name))
        if plain in reserved or not plain.isidentifier():
            plain = f"metric_{plain}"
        free, copies = plain, 1
        while free in numbers:
            copies += 1
            free = f"{plain}_{copies}"
        if free != re.sub(r"\W", "_", str(name)):
            renamed[str(name)] = free
        numbers[free] = number
    if renamed:
        names = ", ".join(f"{name!r} as {free!r}" for name, free in renamed.items())
        _warn(f"the recording uses some names of metrics itself: it has {names}")
    if left_out:
        _warn(f"metrics that are not single numbers are left out: {', '.join(left_out)}")
    return numbers


def _reserved_names() -> set[str]:
    """Return the names of variables, coordinates and groups of recordings,
    and of the parameters of ``mark``.
    """
    names = {"self", "if_marked", "heads", "maps", *COORDINATES, *COUNTS}
    for probe in PROBES.values():
        variables = (probe.variables, probe.class_variables, probe.image_variables)
        names |= {probe.kind, *probe.coords, *(v for table in variables for v in table)}
    return names


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
