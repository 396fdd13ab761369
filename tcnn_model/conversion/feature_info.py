"""Keeping timm's ``feature_info``, which says how much each stage reduces resolution, true of a converted model."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from tcnn_model.conversion.tracing import Call

__all__ = ["updated_feature_info"]


def updated_feature_info(model: nn.Module, before: Iterable[Call], after: Iterable[Call]) -> Any:
    """The ``feature_info`` of a converted model: stages on a doubled grid reduce half as much.

    Args:
        model: as yet unconverted. Neither it nor its class is changed.
        before, after: runs of its modules, as it is and converted.

    Returns:
        a changed copy; None where nothing changes, as where ``feature_info`` is not the list of dictionaries, or the
        object with such a list as ``info``, that timm makes.
    """
    info = getattr(model, "feature_info", None)
    if isinstance(getattr(type(model), "feature_info", None), property) or not isinstance(_entries(info), list | tuple):
        return None
    old, new = ({call.name: call.outputs[0] for call in calls} for calls in (before, after))
    info = copy.deepcopy(info)
    changed = False
    for entry in _entries(info):
        module, reduction = (entry.get("module"), entry.get("reduction")) if isinstance(entry, dict) else (None, None)
        if isinstance(module, str) and isinstance(reduction, int):
            growth = round(_rows(new, module) / _rows(old, module))
            if growth > 1:
                entry["reduction"] = reduction // growth
                changed = True
    return info if changed else None


def _entries(info: Any) -> Any:
    return getattr(info, "info", info)


def _rows(grids: Mapping[str, int], module: str) -> int:
    """Rows of a stage's map, under the names that timm's extractors give it; 1 where it is not to be found.

    They rename ``stages.3`` to ``stages_3`` or ``model.stages.3``. Those of torch.fx do not call a stage as a module,
    only what is in it: its last operation is then taken.
    """
    names = (module, module.replace(".", "_"), f"model.{module}", f"graph_module.{module}")
    called = next((grids[name] for name in names if name in grids), None)
    inside = [rows for name, rows in grids.items() if name.startswith(tuple(f"{n}." for n in names))]
    return called or (inside[-1] if inside else 1)
