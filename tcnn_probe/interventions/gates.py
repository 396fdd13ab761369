"""Gates and locality strengths of some heads edited: of our GPSA layers and of timm's ConViT."""

import math
from collections.abc import Sequence

import torch
from timm.models import convit
from torch import Tensor, nn

from tcnn_model import GPSA
from tcnn_model.gpsa.layer import inverse_softplus
from tcnn_probe.interventions.edits import Edit

__all__ = ["edited_parameters", "keep_locality", "put_locality_back", "why_not"]

_LAMBDA = {"positional": math.inf, "content": -math.inf}  # whose sigmoid is 1 and 0, exactly


def why_not(module: nn.Module, mode: str) -> str | None:
    """Why a layer cannot do a mode that edits parameters, None if it can or the mode edits none."""
    if mode in _LAMBDA:
        able, needs = isinstance(module, GPSA | convit.GPSA), "gates (tcnn_model.GPSA, or timm's ConViT)"
    elif mode == "frozen":
        able, needs = isinstance(module, GPSA), "a locality strength of its own (tcnn_model.GPSA)"
    else:
        return None
    if not able:
        return f"mode={mode!r} needs {needs}"
    name = "raw_locality" if mode == "frozen" else _gates_of(module)
    return None if name in module._parameters else f"its {name!r} is parametrized"


def edited_parameters(module: nn.Module, edits: Sequence[Edit]) -> dict[str, Tensor]:
    """What takes the place of parameters, differentiable with respect to them; of several edits the last one counts."""
    edited: dict[str, Tensor] = {}
    for edit in edits:
        if edit.mode in _LAMBDA:
            name = _gates_of(module)
            gates = _present(edited, module, name)
            edited[name] = gates.masked_fill(_mask(edit, gates), _LAMBDA[edit.mode])
        elif edit.mode == "frozen":
            raw = _present(edited, module, "raw_locality")
            assert edit.kept is not None
            kept = edit.kept.to(raw)
            if edit.locality_strength is not None:
                alpha = torch.full(raw.shape, edit.locality_strength, dtype=torch.float64, device="cpu")
                kept = inverse_softplus(alpha).to(raw)
            edited["raw_locality"] = torch.where(_mask(edit, raw), kept, raw)
    return edited


def keep_locality(edit: Edit, raw: Tensor) -> None:
    """Remember what alpha is."""
    edit.kept = raw.detach().clone()


@torch.no_grad()
def put_locality_back(edit: Edit, raw: Tensor) -> None:
    """Undo what weight decay, momentum or anything else did to alpha of the frozen heads."""
    assert edit.kept is not None
    kept = torch.where(_mask(edit, raw), edit.kept.to(raw), raw)
    if not torch.equal(kept, raw):
        raw.copy_(kept)


def _gates_of(module: nn.Module) -> str:
    return "gating" if isinstance(module, GPSA) else "gating_param"


def _present(edited: dict[str, Tensor], module: nn.Module, name: str) -> Tensor:
    given = edited.get(name, module._parameters[name])
    assert given is not None
    return given


def _mask(edit: Edit, parameter: Tensor) -> Tensor:
    mask = torch.zeros(parameter.shape, dtype=torch.bool)
    mask[list(edit.heads.of(len(parameter), edit.layer))] = True
    return mask.to(parameter.device)
