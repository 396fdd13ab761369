"""The last mark of a recording in other loggers: scalars, alarms, and maps over their images."""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from tcnn_probe.diagnosis import Finding, health

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tcnn_probe.recording.recorder import Recorder

__all__ = ["log_to_tensorboard", "log_to_wandb", "scalars"]

# Maps that are drawn in pictures. If there is a class token, its map is the most useful; the map of
# the central query shows little of an image.
_MAPS = ("class_attention", "attention_received")
_HEADS_BESIDE = 12  # number of heads in a row of a picture


def scalars(ds: xr.Dataset, *, heads: bool = False) -> dict[str, float]:
    """Return the last mark as ``{"entropy/blocks.3.attn":
    3.9, "top1": 0.8, ...}``, without numbers that are NaN.

    ::

        recorder.mark(epoch=epoch, top1=top1)
        mlflow.log_metrics(tcnn_probe.scalars(recorder.dataset), step=epoch)

    Args:
        ds: A recording: ``recorder.dataset``, or ``xr.open_zarr(path)``.
        heads: Whether to return a number for each head, ``"entropy/blocks.3.attn/0"``, instead of
            the mean over a layer's heads.

    Returns:
        Numbers by variable, layer and head; scalars that were passed to ``mark`` by their name.

    Raises:
        ValueError: The dataset is not a recording.
    """
    along = ds.attrs.get("along")
    if along not in ds.dims:
        raise ValueError("expected a recording: recorder.dataset, or xarray.open_zarr(path)")
    flat: dict[str, float] = {}
    for name, values in ds.isel({along: -1}).data_vars.items():
        if not heads and "head" in values.dims:
            values = values.mean("head")
        # Histograms and kinds of tokens are not scalars of a layer or head.
        if values.dtype.kind not in "fiu" or not {"layer", "head"} >= {*values.dims}:
            continue
        labels = product(*(map(str, values[dim].values) for dim in values.dims))
        for label, value in zip(labels, values.values.ravel(), strict=True):
            if not np.isnan(value):
                flat["/".join([str(name), *label])] = float(value)
    return flat


def log_to_tensorboard(
    writer: Any, recorder: "Recorder", images: Any = None, *, heads: bool = False
) -> None:
    """Write the last mark into TensorBoard: numbers of layers,
    the number of alarms and their text, and maps.

    ::

        recorder.mark(epoch=epoch)
        tcnn_probe.log_to_tensorboard(writer, recorder, images[:4])

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``; the mark is its step.
        recorder: The recorder, after a mark. Numbers that were passed to ``mark`` are left out,
            because the training loop logs them itself.
        images: Images whose maps are recorded (``record(images=)``), in the same order, shape (B,
            C, H, W), on which these maps are drawn; None for no pictures. Maps of windows are left
            out.
        heads: Whether to write a number for each head, instead of the mean over a layer's heads.

    Raises:
        RuntimeError: Nothing is marked yet.
        ValueError: There are fewer images than images with maps.
    """
    numbers, alarms = _layer_scalars(recorder, heads), _alarms(recorder)
    mark = recorder.epochs[-1]
    for name, value in numbers.items():
        writer.add_scalar(name, value, mark)
    writer.add_scalar("health/alarms", len(alarms), mark)
    if alarms:
        writer.add_text("health/findings", "\n\n".join(map(str, alarms)), mark)
    for name, figure in _pictures(recorder, images):
        writer.add_figure(name, figure, mark)


def log_to_wandb(
    run: Any, recorder: "Recorder", images: Any = None, *, heads: bool = False
) -> None:
    """Log the last mark to Weights & Biases: numbers of layers,
    alarms and maps; new alarms also as wandb's alerts.

    ::

        run = wandb.init(project="heads")
        ...
        recorder.mark(epoch=epoch)
        tcnn_probe.log_to_wandb(run, recorder, images[:4])

    The x axis of these charts is the mark, under the name ``recording/epoch``, and does not depend
    on the run's steps.

    Args:
        run: A run of wandb.
        recorder: The recorder, after a mark.
        images: Images on which the recorded maps are drawn, as in :func:`log_to_tensorboard`.
        heads: Whether to log a number for each head, instead of the mean over a layer's heads.

    Raises:
        RuntimeError, ValueError: As in :func:`log_to_tensorboard`.
    """
    # wandb 0.31 accepts a figure only if pyplot is imported.
    import matplotlib.pyplot  # noqa: F401
    import wandb

    values: dict[str, Any] = _layer_scalars(recorder, heads)
    alarms = _alarms(recorder)
    values["health/alarms"] = len(alarms)
    for name, figure in _pictures(recorder, images):
        values[name] = wandb.Image(figure)
    mark = recorder.epochs[-1]
    axis = f"recording/{recorder.dataset.attrs['along']}"
    run.define_metric(axis, hidden=True)
    for section in {name.partition("/")[0] for name in values}:
        run.define_metric(f"{section}/*", step_metric=axis)
    run.log(values | {axis: mark})
    for alarm in alarms:
        if alarm.since == mark:
            run.alert(title=f"{alarm.sign}: {alarm.layer}", text=str(alarm))


def _layer_scalars(recorder: "Recorder", heads: bool) -> dict[str, Any]:
    """Return the scalars of layers and heads, whose names have a slash."""
    flat = scalars(recorder.dataset, heads=heads)
    return {name: value for name, value in flat.items() if "/" in name}


def _alarms(recorder: "Recorder") -> list[Finding]:
    """Return the alarms that are seen at the last mark."""
    ds = recorder.dataset
    if "layer" not in ds.dims:
        return []
    return [alarm for alarm in health(ds).alarms if alarm.until is None]


def _pictures(recorder: "Recorder", images: Any) -> Iterator[tuple[str, "Figure"]]:
    """Yield the maps of each image at the last mark, drawn over the image, with a name for each."""
    if images is None:
        return
    from matplotlib.figure import Figure

    from tcnn_probe.plot import attention_grid

    tree = recorder.tree
    along = recorder.dataset.attrs["along"]
    for node in tree["maps"].subtree if "maps" in tree else ():
        names = [name for name in _MAPS if name in node.dataset]
        for name in names:
            maps = node.dataset[name].isel({along: -1})
            if "window" in maps.dims:
                continue
            maps = maps.dropna("layer", how="all").load()
            if maps.sizes["image"] > len(images):
                raise ValueError(
                    f"expected the {maps.sizes['image']} images whose maps are recorded, got "
                    f"{len(images)}"
                )
            heads, layers = maps.sizes["head"], maps.sizes["layer"]
            rows = layers * -(-heads // _HEADS_BESIDE)
            size = 1.1 * min(heads, _HEADS_BESIDE) + 3, 1.35 * rows + 0.8
            for number in range(maps.sizes["image"] if layers else 0):
                # The figure is separate from pyplot, whose current figure belongs to the user.
                figure = Figure(figsize=size, layout="constrained")
                attention_grid(
                    maps.isel(image=number),
                    image=images[number],
                    overlay=True,
                    col_wrap=_HEADS_BESIDE,
                    title=name.replace("_", " "),
                    figure=figure,
                )
                label = maps.image.values[number]
                yield f"maps/{name}/{node.name}/image {label}", figure
