"""``head_costs()``: what each part of every head's attention causes,
by ablating one head after the other.
"""

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_probe.interventions.ablation_kinds import Ablated, Mode
from tcnn_probe.interventions.edited_forwards import edited_model
from tcnn_probe.interventions.evaluated_images import (
    Batch,
    Measure,
    as_measure,
    attributes_of_change,
    batches_of,
    changes_of,
    outputs_of,
    reread,
)
from tcnn_probe.interventions.head_selection import HeadSelection
from tcnn_probe.interventions.references import GivenImages, fingerprints
from tcnn_probe.interventions.rungs import RUNGS, Rungs
from tcnn_probe.interventions.shared_forward import SharedForward
from tcnn_probe.models import check_model, progress_bar, untouched, whole_number

__all__ = ["head_costs"]


def head_costs(
    model: nn.Module,
    images: GivenImages,
    metric: Any = None,
    *,
    modes: Collection[Mode] = RUNGS,
    heads: HeadSelection = None,
    reference: GivenImages | None = None,
    radius: float | None = None,
    queries: Literal["patches"] | None = "patches",
    seed: int = 0,
    batch_size: int = 16,
    path: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> xr.DataArray:
    """Measure the cost of every head at every rung
    of the ladder of :func:`ablate`, one head at a time.

    ::

        cost = tcnn_probe.head_costs(
            model, images, labels, reference=training_images, path="costs.npz"
        )
        print(tcnn_probe.evaluation.mean_interval(cost).sel(mode="static"))

    Statistics over ``reference`` are collected once, and what comes before a layer is computed once
    for all of its heads and modes. :func:`head_importance` estimates the same costs in one backward
    pass.

    Args:
        model: Model as for :func:`ablate`. It runs in eval mode.
        images: Images to evaluate: a batch, several, pairs with a target, or pictures.
        metric: None, for the Euclidean norm of the change of the model's output; the classes of all
            images, for the change of the cross entropy; or a function (output, target) that returns
            a number for each image, (B,), whose change is the cost. The target is the second item
            of a loader's pair, or None.
        modes: Modes of :func:`ablate` that edit the outputs of heads.
        heads: Heads as for :func:`ablate`.
        reference: Images over which attention is averaged; None for ``images``.
        radius: Distance for modes "local" and "distant".
        queries: "patches" to leave class and register tokens as queries their own attention in all
            modes, so that the rungs can be compared; None to ablate all queries in modes "zero",
            "mean" and "static".
        seed: Seed of mode "shuffled".
        batch_size: Largest number of images that run at once.
        path: File in which results are kept after each layer, from which an interrupted call with
            the same arguments continues. None to keep nothing.
        progress: Whether to show a progress bar; None to show it on a terminal after some seconds.

    Returns:
        Costs, dims (mode, layer, head, image), for :func:`tcnn_probe.evaluation.mean_interval`; NaN
        where a layer cannot be ablated in a mode.

    Raises:
        TypeError, ValueError: The arguments are not as above, or the file has results of others.
    """
    check_model(model)
    measure, classes = as_measure(metric)
    images = reread(images)
    seed = whole_number(seed, "seed")
    rungs = Rungs.of(model, heads, modes, reference, images, radius, seed, queries)
    batches = list(batches_of(images, model, batch_size, classes))
    results = _Results(rungs, batches, path, _name_of(metric), radius, queries, seed)
    with (
        untouched(model),
        torch.no_grad(),
        progress_bar(results.left(), "head_costs", progress, "forward") as bar,
    ):
        for batch in batches:
            if results.has_all(batch):
                continue
            # The places of tokens are found before anything is replaced.
            with edited_model(model, rungs.all, {}):
                forward = SharedForward(model, batch.images)
            plain = _measured(forward.output, batch, measure)
            for layer in forward.in_order(results.modules):
                if results.has(batch, layer):
                    continue
                with forward.until(results.modules[layer]):
                    for entry in results.layers[layer]:
                        for head in entry.indices:
                            output = _ablated_output(rungs, entry, head, batch.images)
                            if output is not None:
                                changed = _measured(output, batch, measure)
                                cost = _change(changed, plain, measure)
                                results.set(batch, entry, head, cost)
                            bar.update()
                results.keep(batch, layer)
    table = results.table
    table.attrs = attributes_of_change(measure)
    return table.rename("cost")


def _name_of(metric: Any) -> str:
    """Return a name by which a metric is recognised;
    that of classes, which belong to the batches, is one for all.
    """
    return getattr(metric, "__qualname__", type(metric).__name__)


def _ablated_output(rungs: Rungs, entry: Ablated, head: int, images: Tensor) -> Any | None:
    """Return the output of the model without a head;
    None if the layer cannot be ablated in this mode.
    """
    single = entry.fresh()
    single.heads = (head,)
    with edited_model(rungs.model, rungs.all, {single: single.module}):
        output = rungs.model(images)
    return output if single.has_attended else None


def _measured(output: Any, batch: Batch, measure: Measure | None) -> Tensor:
    if measure is None:
        return outputs_of(output, len(batch.images))
    return changes_of(measure(output, batch.target), len(batch.images))


def _change(changed: Tensor, plain: Tensor, measure: Measure | None) -> np.ndarray:
    difference = changed - plain
    cost = difference.norm(dim=1) if measure is None else difference
    return cost.double().cpu().numpy()


class _Results:
    """Costs so far, which are kept in a file.

    Attributes:
        layers: Ablations of each layer, one for each mode.
        modules: The layers themselves, by name.
        table: Costs, (mode, layer, head, image).
    """

    def __init__(self, rungs: Rungs, batches: list[Batch], path: Any, *options: Any) -> None:
        self.layers: dict[str, list[Ablated]] = {}
        for entry in rungs.all:
            self.layers.setdefault(entry.layer, []).append(entry)
        self.modules = {entry.layer: entry.module for entry in rungs.all}
        self.table = rungs.table(sum(len(batch.images) for batch in batches))
        self._batches = len(batches)
        self._path = None if path is None else Path(path)
        self._done: set[tuple[int, str]] = set()
        self._digest = _digest_of(rungs, batches, options)
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["digest"]) != self._digest:
                raise ValueError(
                    f"{path} has costs of another model, other images or other modes: give another "
                    "path, or delete it"
                )
            self.table.values[:] = kept["values"]
            self._done = {(int(row), str(layer)) for row, layer in kept["done"]}

    def has(self, batch: Batch, layer: str) -> bool:
        """Return whether a layer's costs are known for a batch."""
        return (batch.rows.start, layer) in self._done

    def has_all(self, batch: Batch) -> bool:
        """Return whether all costs are known for a batch."""
        return all(self.has(batch, layer) for layer in self.layers)

    def left(self) -> int:
        """Return the number of forwards that are left."""
        by_layer = {
            layer: sum(len(entry.indices) for entry in entries)
            for layer, entries in self.layers.items()
        }
        done = sum(by_layer[layer] for _, layer in self._done)
        return self._batches * sum(by_layer.values()) - done

    def set(self, batch: Batch, entry: Ablated, head: int, cost: np.ndarray) -> None:
        """Note the costs of the images of a batch."""
        where = {"mode": entry.mode, "layer": entry.layer, "head": head}
        self.table.loc[where][batch.rows] = cost

    def keep(self, batch: Batch, layer: str) -> None:
        """Keep the costs of a layer in the file."""
        self._done.add((batch.rows.start, layer))
        if self._path is None:
            return
        done = np.array([(str(row), name) for row, name in sorted(self._done)])
        # An interrupted write must not destroy what was kept before.
        part = self._path.with_name(self._path.name + ".part")
        with part.open("wb") as file:
            np.savez(file, values=self.table.values, digest=self._digest, done=done)
        part.replace(self._path)


def _digest_of(rungs: Rungs, batches: list[Batch], options: Collection[Any]) -> str:
    """Return a hash of what costs depend on: model, heads,
    modes, images and their targets, references and options.
    """
    heads = [(entry.mode, entry.layer, *entry.indices) for entry in rungs.all]
    digest = hashlib.sha256(json.dumps([heads, [*map(str, options)]]).encode())
    for parameter in rungs.model.parameters():
        digest.update(str(float(parameter.detach().double().abs().sum())).encode())
    for batch in batches:
        digest.update(str(batch.rows).encode())
        for values in (batch.images, batch.target):
            if isinstance(values, Tensor):
                digest.update(b"".join(fingerprints(values)))
    # All layers have seen the same references.
    for entry in rungs.all:
        if entry.reference is not None:
            digest.update(b"".join(entry.reference.fingerprints))
            break
    return digest.hexdigest()
