"""Gates of some heads set to 1 or 0 while their layer runs: of our GPSA layers and of timm's ConViT."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model import GPSA
from tcnn_probe.attention.gated import GATED_LAYERS
from tcnn_probe.interventions.edits import Edit

__all__ = ["GATES", "GateEditor", "gate_editor", "why_not"]

GATES: Mapping[str, float] = {"positional": 1.0, "content": 0.0}

_SIGMOID = {torch.sigmoid, Tensor.sigmoid, torch.special.expit}
_SAME_NUMBERS = {Tensor.view, Tensor.reshape, Tensor.unsqueeze, Tensor.to, Tensor.float, Tensor.double}


def why_not(module: nn.Module, mode: str) -> str | None:
    """Why a layer cannot do a mode that edits gates; None if it can, or if the mode edits none."""
    if mode not in GATES:
        return None
    if not isinstance(module, GATED_LAYERS):
        return f"mode={mode!r} needs gates (tcnn_model.GPSA, or timm's ConViT)"
    name = _name_of_gating(module)
    return None if name in module._parameters else f"its {name!r} is parametrized"


def gate_editor(module: nn.Module, edits: Sequence[Edit]) -> "GateEditor | None":
    """What edits the gates of a layer during one call, if any of them is to be; of several edits the last counts."""
    forced: dict[int, float] = {}
    for edit in edits:
        if edit.mode in GATES:
            gating: Tensor = getattr(module, _name_of_gating(module))
            forced |= dict.fromkeys(edit.among(len(gating)), GATES[edit.mode])
    return GateEditor(gating, forced) if forced else None


class GateEditor:
    """Follows the gating parameter of a layer to its sigmoid, and gives the gates of some heads another value.

    The other gates stay differentiable with respect to the parameter, lambda of shape (heads,), which is never touched.
    """

    def __init__(self, gating: Tensor, forced: Mapping[int, float]) -> None:
        self._forms = [gating]
        self._forced = torch.full((len(gating),), math.nan)
        self._forced[list(forced)] = torch.tensor(list(forced.values()))

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a torch function gives; NotImplemented if it is not given the parameter, in one of its forms."""
        if func not in _SIGMOID and func not in _SAME_NUMBERS:
            return NotImplemented
        if not args or not any(args[0] is form for form in self._forms):
            return NotImplemented
        given = func(*args, **kwargs)
        if func in _SAME_NUMBERS:
            self._forms.append(given)
            return given
        forced = self._forced.to(given).view(given.shape)
        return torch.where(forced.isnan(), given, forced)


def _name_of_gating(module: nn.Module) -> str:
    return "gating" if isinstance(module, GPSA) else "gating_param"
