"""LayerScale: its weights, and how much each residual branch adds to what passes it by (Touvron's thesis, Fig. 3.6).

A block computes ``x' = x + lambda * g(x)`` for each of its branches g, with a weight lambda for each channel
(thesis, Section 3.5.1). Blocks are known by their class; one whose forward was replaced is left alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.architectures.lookup import RECORDS, known
from tcnn_probe.architectures.record import ResidualBranch
from tcnn_probe.probes.probe import ForwardCall, Probe
from tcnn_probe.schema import Variable

__all__ = ["LAYER_SCALE"]


_BRANCHES = [branch for record in RECORDS.values() for branch in record.branches or ()]
_PARTS = {str(part).removeprefix(":") for branch in _BRANCHES for part in (branch.scale, branch.output, branch.main)}


def _branches(block: nn.Module) -> Sequence[ResidualBranch] | None:
    return known(block).branches


def _weights(block: nn.Module, branch: ResidualBranch) -> Tensor | None:
    scale = getattr(block, branch.scale) if branch.scale else None
    return getattr(scale, "gamma", None) if isinstance(scale, nn.Module) else scale


def _state(block: nn.Module) -> dict[str, Tensor]:
    weights = [_weights(block, branch) for branch in _branches(block) or ()]
    some = next((w for w in weights if w is not None), None)
    if some is None:
        return {}
    return {"scale": torch.stack([torch.ones_like(some) if w is None else w for w in weights])}


def _main(call: ForwardCall, branch: ResidualBranch) -> Tensor:
    if isinstance(branch.main, int):
        return call.inputs[branch.main]
    part = call.parts[branch.main.removeprefix(":")]
    return part.output if branch.main.startswith(":") else part.inputs[0]


def _added(call: ForwardCall, branch: ResidualBranch) -> Tensor:
    """What the branch adds, before stochastic depth, in the layout of the main branch."""
    if not branch.output:
        return call.parts[branch.scale].output
    added, weights = call.parts[branch.output].output, _weights(call.module, branch)
    axis = branch.axis if isinstance(branch.axis, int) else branch.axis(call.module)
    if weights is not None:
        shape = [1] * added.ndim
        shape[axis] = -1
        added = added * weights.view(shape)
    return added.movedim(axis, branch.main_axis)


def _norm(x: Tensor) -> Tensor:
    """Norm of each image over tokens and channels, shape (B,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=at_least_float32(x.dtype))


def _measure(call: ForwardCall) -> dict[str, Tensor]:
    ratios = [_norm(_added(call, branch)) / _norm(_main(call, branch)) for branch in _branches(call.module) or ()]
    return {"residual_ratio": torch.stack(ratios, 1)}


def _rebuild(call: ForwardCall) -> Tensor | None:
    """The sum of the main branch and all residual ones: all must be what they are taken for."""
    block, branches = call.module, _branches(call.module) or ()
    if block.training and any(getattr(part, "drop_prob", 0) for part in block.children()):
        return None
    return sum((_added(call, branch)[:1] for branch in branches), _main(call, branches[0])[:1])


_LABELS = ["mixer", "mlp", "local"]
_ORDER = (
    "Branches in the order: mixer (attention, ResMLP's cross-patch layer, or the only branch, as in ConvNeXt), mlp, "
    "local (XCiT)."
)

LAYER_SCALE = Probe(
    "layer-scale",
    {
        "scale": Variable(
            ("layer", "branch", "channel"),
            "1",
            "LayerScale weights",
            "lambda of each channel of a residual branch (Touvron's thesis, Section 3.5.1), as marked; 1 for a branch "
            f"without LayerScale in a block that has it in another, NaN for a block without. {_ORDER}",
        ),
        "residual_ratio": Variable(
            ("layer", "branch"),
            "1",
            "residual branch / main branch",
            "||lambda g(x)||_2 / ||x||_2 of an image, over all its tokens and channels, x being what the branch g is "
            "added to (Touvron's thesis, Fig. 3.6); before stochastic depth. Mean over the images seen since the "
            f"previous mark. {_ORDER}",
        ),
    },
    lambda module: _branches(module) is not None,
    state=_state,
    measure=_measure,
    rebuild=_rebuild,
    parts=sorted(_PARTS),
    coords={"branch": _LABELS},
)
