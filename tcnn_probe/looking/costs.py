"""Costs of heads to first order, as a probe that records them beside what the heads attend to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm.data
import torch
from torch import Tensor, nn

from tcnn_probe.interventions.importance import head_importance
from tcnn_probe.interventions.rungs import RUNGS
from tcnn_probe.models import first_line, layer_names, unwrap
from tcnn_probe.probes import Probe
from tcnn_probe.probes.shared_variables import HEAD
from tcnn_probe.schema import Variable

__all__ = ["class_labels", "costs_of_heads"]

_IMAGENET = 1000
# Class and register tokens keep their own attention in all other modes.
_OF_ALL_QUERIES = ("zero", "static")


def class_labels(model: nn.Module, paths: Sequence[Path]) -> Tensor | None:
    """Return the classes of photographs in folders named
    by ImageNet's WordNet ids, for a model of its 1,000 classes.

    None for other folders and models, whose classes are unknown.
    """
    if getattr(unwrap(model), "num_classes", None) != _IMAGENET:
        return None
    labels = {name: label for label, name in enumerate(timm.data.ImageNetInfo().label_names())}
    found = [labels.get(path.parent.name) for path in paths]
    known = [label for label in found if label is not None]
    return torch.tensor(known) if len(known) == len(found) else None


def costs_of_heads(
    model: nn.Module,
    batches: Sequence[Tensor],
    labels: Tensor | None,
    progress: bool | None,
) -> tuple[Probe | None, str]:
    """Measure the cost of every head at each rung
    of the ladder of :func:`tcnn_probe.ablate`, to first order.

    Args:
        model: The model.
        batches: Photographs.
        labels: Their classes; None to measure the change of the model's output.
        progress: Whether to show a progress bar.

    Returns:
        A probe that records the costs at a mark; None if the model cannot be ablated. And the
        reason for this, or what the costs are.
    """
    try:
        # Of class tokens as queries, too: a model may read these alone in its last layer.
        costs = head_importance(model, list(batches), labels, queries=None, progress=progress)
    # Models whose heads cannot be edited, or that have no gradient, are refused with many types of
    # errors.
    except Exception as error:
        return None, first_line(error)
    means = costs.mean("image", skipna=False)
    what = (
        "the cross entropy of the folders' classes"
        if labels is not None
        else "the model's output (its norm)"
    )
    count = sum(map(len, batches))
    meaning = f"change of {what} to first order, mean over {count} photographs"
    variables = {f"cost_{mode}": _variable(mode, meaning) for mode in RUNGS}
    by_layer: dict[str, dict[str, Tensor]] = {}
    for layer in means.layer.values.tolist():
        row = means.sel(layer=layer).dropna("head", how="all")
        if row.sizes["head"]:
            by_layer[layer] = {
                f"cost_{mode}": torch.from_numpy(row.sel(mode=mode).values) for mode in RUNGS
            }
    names = layer_names(model)

    def is_measured(module: nn.Module) -> bool:
        return names.get(module) in by_layer

    def read(module: Any) -> dict[str, Tensor]:
        return by_layer[names[module]]

    return Probe("costs", variables, module_type=is_measured, state=read), meaning


def _variable(mode: str, meaning: str) -> Variable:
    replaced = "0" if mode == "zero" else f"that of {mode} attention"
    queries = "all queries" if mode in _OF_ALL_QUERIES else "patches as queries"
    return Variable(
        HEAD,
        "1",
        f"cost of {mode}",
        f"{meaning[0].upper()}{meaning[1:]}, if the output of the head becomes {replaced} for "
        f"{queries} (ablate, mode={mode!r}). The exact cost can be far from it: head_costs "
        "measures it.",
        nan_reason="the layer cannot be ablated in this way",
    )
