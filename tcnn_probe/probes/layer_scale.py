"""LayerScale weights, and the norms of residual branches relative to the main branch (Touvron's
thesis, Fig. 3.6).

A block computes ``x' = x + lambda * g(x)`` for each of its branches g, with a weight lambda for
each channel (thesis, Section 3.5.1). Blocks are recognised by their class; blocks whose forward
method was replaced are ignored.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32
from tcnn_probe.architectures.lookup import known
from tcnn_probe.architectures.record import ResidualBranch
from tcnn_probe.probes.probe import ForwardCall, Probe
from tcnn_probe.schema import Variable

__all__ = ["LAYER_SCALE"]


def _branches(block: nn.Module) -> Sequence[ResidualBranch]:
    return known(block).branches or ()


def _weights(block: nn.Module, branch: ResidualBranch) -> Tensor | None:
    scale = getattr(block, branch.scale) if branch.scale else None
    return getattr(scale, "gamma", None) if isinstance(scale, nn.Module) else scale


def _state(block: nn.Module) -> dict[str, Tensor]:
    weights = [_weights(block, branch) for branch in _branches(block)]
    scales = [weight for weight in weights if weight is not None]
    if not scales:
        return {}
    return {
        "scale": torch.stack(
            [
                # A branch without LayerScale is added with the weight 1.
                torch.ones_like(scales[0]) if weight is None else weight
                for weight in weights
            ]
        )
    }


def _main(call: ForwardCall, branch: ResidualBranch) -> Tensor:
    if isinstance(branch.main, int):
        return call.inputs[branch.main]
    part = call.parts[branch.main.removeprefix(":")]
    return part.output if branch.main.startswith(":") else part.inputs[0]


def _added(call: ForwardCall, branch: ResidualBranch) -> Tensor:
    """Return the term that the branch adds,
    before stochastic depth, in the layout of the main branch.
    """
    if not branch.output:
        return call.parts[branch.scale].output
    added, weights = call.parts[branch.output].output, _weights(call.module, branch)
    axis = branch.axis if isinstance(branch.axis, int) else branch.axis(call.module)
    if weights is not None:
        shape = [1] * added.ndim
        shape[axis] = -1
        # The block multiplies by its parameter after the submodule, so the observed output does not
        # include it.
        added = added * weights.view(shape)
    return added.movedim(axis, branch.main_axis)


def _norm(x: Tensor) -> Tensor:
    """Return the norm of each image over tokens and channels, shape (B,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=at_least_float32(x.dtype))


def _measure(call: ForwardCall) -> dict[str, Tensor]:
    call.verify(lambda: _rebuild(call))
    ratios = [
        _norm(_added(call, branch)) / _norm(_main(call, branch))
        for branch in _branches(call.module)
    ]
    return {"residual_ratio": torch.stack(ratios, 1)}


def _rebuild(call: ForwardCall) -> Tensor | None:
    """Return the sum of the main branch and all residual branches,
    which verifies the block's record.
    """
    block, branches = call.module, _branches(call.module)
    # In training, stochastic depth drops the branches of some images.
    if block.training and any(getattr(child, "drop_prob", 0) for child in block.children()):
        return None
    return sum(
        # Branches are added in sequence, so the block's output is the first main branch plus all
        # residual branches.
        (_added(call, branch)[:1] for branch in branches),
        _main(call, branches[0])[:1],
    )


class LayerScaleProbe(Probe):
    """Residual branches of blocks, measured in the calls of their submodules."""

    def parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the submodules that make up the branches."""
        branches = _branches(module)
        names = {
            str(part).removeprefix(":") for b in branches for part in (b.scale, b.output, b.main)
        }
        submodules = {name: getattr(module, name, None) for name in sorted(names)}
        return {name: part for name, part in submodules.items() if isinstance(part, nn.Module)}


_ORDER = (
    "Branches in the order: mixer (attention, ResMLP's cross-patch layer, or the only branch, as "
    "in ConvNeXt), mlp, local (XCiT)."
)

LAYER_SCALE = LayerScaleProbe(
    "layer-scale",
    {
        "scale": Variable(
            ("layer", "branch", "channel"),
            "1",
            "LayerScale weights",
            "lambda of each channel of a residual branch (Touvron's thesis, Section 3.5.1), at the "
            "time of the mark; 1 for a branch without LayerScale in a block that has LayerScale in "
            f"another branch, NaN for a block without LayerScale. {_ORDER}",
        ),
        "residual_ratio": Variable(
            ("layer", "branch"),
            "1",
            "residual branch / main branch",
            "||lambda g(x)||_2 / ||x||_2 of an image, over all its tokens and channels, where the "
            "branch g is added to x (Touvron's thesis, Fig. 3.6); before stochastic depth. Mean "
            f"over the images seen since the previous mark. {_ORDER}",
        ),
    },
    lambda module: bool(_branches(module)),
    state=_state,
    measure=_measure,
    coords={"branch": ["mixer", "mlp", "local"]},
)
