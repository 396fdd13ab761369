"""Update of timm's ``feature_info``, the reduction
of resolution at each stage, for a converted model.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from tcnn_model.conversion.tracing import Call

__all__ = ["updated_feature_info"]


def updated_feature_info(model: nn.Module, before: Iterable[Call], after: Iterable[Call]) -> Any:
    """Return the ``feature_info`` of a converted model,
    in which stages on a doubled grid reduce half as much.

    Args:
        model: The model before its conversion. Neither the model nor its class is changed.
        before: Runs of its modules before the conversion.
        after: Runs of its modules after the conversion.

    Returns:
        A changed copy; None if nothing changes, or if ``feature_info`` does not have timm's form,
        which is a list of dictionaries or an object with such a list as ``info``.
    """
    info = getattr(model, "feature_info", None)
    if isinstance(
        # A property computes its value and cannot be set.
        getattr(type(model), "feature_info", None),
        property,
    ) or not isinstance(_entries(info), list | tuple):
        return None
    rows_before, rows_after = (
        {call.name: call.outputs[0] for call in calls} for calls in (before, after)
    )
    # The list may be an attribute of the class, which other models share.
    info = copy.deepcopy(info)
    changed = False
    for entry in _entries(info):
        if not isinstance(entry, dict):
            continue
        module = entry.get("module")
        reduction = entry.get("reduction")
        if isinstance(module, str) and isinstance(reduction, int):
            # With odd sizes, a doubled grid may have one row less than twice the rows, so the ratio
            # is rounded.
            growth = round(_rows(rows_after, module) / _rows(rows_before, module))
            if growth > 1:
                entry["reduction"] = reduction // growth
                changed = True
    return info if changed else None


def _entries(info: Any) -> Any:
    return getattr(info, "info", info)


def _rows(grids: Mapping[str, int], module: str) -> int:
    """Return the rows of a stage's map, or 1 if it is not found."""
    # timm's extractors rename stages.3 to stages_3 (FeatureListNet) or model.stages.3
    # (FeatureGetterNet).
    names = (
        module,
        module.replace(".", "_"),
        f"model.{module}",
        f"graph_module.{module}",
    )
    for name in names:
        if name in grids:
            return grids[name]
    # FeatureGraphNet, which uses torch.fx, does not call a stage as a module: the map of its last
    # operation is taken.
    children = tuple(f"{name}." for name in names)
    inside = [rows for name, rows in grids.items() if name.startswith(children)]
    return inside[-1] if inside else 1
