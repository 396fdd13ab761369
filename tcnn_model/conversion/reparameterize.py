"""Conversion of a CNN into a Transformed CNN:
choice of the convolutions, their stride, and their replacement.

The conversion is planned and tried on a copy without storage first, so that an error leaves the
model unchanged.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn

from tcnn_model.conversion.convolution import describe
from tcnn_model.conversion.feature_info import updated_feature_info
from tcnn_model.conversion.selection import LayerFilter, select_layers
from tcnn_model.conversion.tracing import (
    FAILURES,
    Call,
    InputSize,
    carries_hooks,
    copy_in_its_modes,
    find_input_size,
    meta_copy,
    trace,
)
from tcnn_model.conversion.unstride import at_unit_stride, check_phases, is_strided
from tcnn_model.gpsa.functional import Backend
from tcnn_model.gpsa.layer import GPSA, gpsa_layers

__all__ = ["reparameterize", "unstride"]


def reparameterize(
    model: nn.Module,
    *,
    layers: LayerFilter | None = None,
    stride: Literal["unit", "keep"] = "unit",
    locality_strength: float = 1.0,
    gating: float | Sequence[float] = 1.0,
    qk_dim: int | None = None,
    qk_scale: float = 1.0,
    backend: Backend = "auto",
    input_size: InputSize | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Replace convolutions of a CNN by :class:`~tcnn_model.GPSA` layers loaded
    with their filters (T-CNN, Sec. 2).

    The defaults are the paper's: the k x k convolutions of the last stage, that stage at stride 1,
    alpha = lambda = 1. The result then *starts near* the CNN's function, but does not equal it.
    With ``stride="keep", locality_strength=20, gating=20`` both are the same function up to float32
    rounding, but gates, queries and keys have no gradient; 5 and 4 start close to the CNN and can
    learn attention.

    The last stage consists of the k x k convolutions, depthwise ones included, that work at the
    network's final resolution or in the block that reduces to it; those inside attention layers are
    left out. In a network built with timm's ``output_stride`` several stages share the final
    resolution, and all are converted.

    ``stride="unit"`` removes the stride of a chosen convolution, or else that of its block, which
    is the module around it that makes the step in resolution and may be the stage. Every operation
    that makes the same step (1 x 1 shortcut, parallel branch, average, max or blur pool) is set to
    stride 1, too, and the grid doubles. Operations whose output would then be too small for the
    grid are extended at the border. For the 2 x 2 convolutions of ConvNeXt's downsampling this is
    one pixel of zeros to the right and at the bottom: windows overlap, and every second window is
    one of the CNN. An error is raised if operations would no longer fit together. If the stride is
    in a separate layer before the chosen layers and their blocks (the pools of VGG and DenseNet),
    there is no stride to remove, and both settings give the same model.

    A weight-standardised convolution becomes a layer with the standardised weight, which is a new
    parameter; a checkpoint of the CNN has to be loaded before the conversion. Plain convolutions
    keep their weight and its name.

    Args:
        model: Any module with a 2-D feature extractor, which is its ``forward_features`` if it has
            that method.
        layers: None for the last stage, if the model has no GPSA layers yet; else a convolution's
            name, the name of a module (for all k x k convolutions in it), a glob over k x k
            convolutions, a collection of these, or a predicate ``(name, conv) -> bool``, which is
            called for k x k convolutions only.
        stride: "unit" or "keep".
        locality_strength: Initial alpha of every head, in 1 / pixel^2.
        gating: Initial lambda of every head, or one number for each head of a layer.
        qk_dim: Channels of queries and keys per head, see :class:`~tcnn_model.GPSA`.
        qk_scale: Initial scale of the weights of queries and keys, see :class:`~tcnn_model.GPSA`.
            The papers use 1.
        backend: Algorithm of the layers' attention, see :func:`~tcnn_model.gpsa`.
        input_size: Size (C, H, W) of the image with which stages are identified; by default that of
            timm's ``pretrained_cfg``, or 3 x 224 x 224.
        inplace: Whether to convert ``model`` itself rather than a copy.

    Returns:
        The converted model, in the mode, on the device and with the dtype and ``requires_grad`` of
        ``model``. The parameters that attention adds (query, key, value, locality, centre, gating)
        require gradients.

    Raises:
        TypeError: If ``model`` is not a module, or ``layers`` has another type.
        ValueError: If there is no convolution to reparameterize; a name, glob or predicate matches
            no convolution; a module computes more than a convolution, or its weight is
            parametrized, pruned or partly frozen; or a stride cannot be removed (the error suggests
            ``stride="keep"``). The model is then unchanged.
    """
    if stride not in ("unit", "keep"):
        raise ValueError(f"expected stride='unit' or 'keep', got {stride!r}")
    convert = partial(
        _convert,
        locality_strength=locality_strength,
        gating=gating,
        qk_dim=qk_dim,
        qk_scale=qk_scale,
        backend=backend,
    )
    return _converted(model, layers, stride, input_size, inplace, convert)


def unstride(
    model: nn.Module,
    *,
    layers: LayerFilter | None = None,
    input_size: InputSize | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Remove the stride of a CNN's last stage,
    as :func:`reparameterize` does, but keep its convolutions.

    This is a control that the T-CNN paper lacks: its T-CNNs differ from the CNN both by attention
    and by a last stage on twice the grid ("Without SA" in its Table 1 is the CNN at its own
    stride). Every operation that makes the stage's step in resolution is set to stride 1, with the
    same filters. The layers thus see the same pixels as before, and the pixels between them.

    Args:
        model, layers, input_size, inplace: The arguments of :func:`reparameterize`.

    Returns:
        The CNN at stride 1, with the parameters of ``model`` under their names.

    Raises:
        TypeError, ValueError: As in :func:`reparameterize`; also if there is no stride to remove.
    """
    return _converted(model, layers, "unit", input_size, inplace, None)


def _converted(
    model: nn.Module,
    layers: LayerFilter | None,
    stride: Literal["unit", "keep"],
    input_size: InputSize | None,
    inplace: bool,
    convert: Callable[[str, Any, Call | None], nn.Module] | None,
) -> nn.Module:
    """Return the model with its layers replaced by ``convert(name, convolution, step to remove)``.

    With ``convert=None`` the convolutions stay, and only the steps in resolution are removed.
    """
    _check_types(model, layers)
    rehearsal = meta_copy(model)
    size = find_input_size(rehearsal, input_size)
    calls = trace(rehearsal, size)
    selected = _choose(rehearsal, calls, layers)
    steps = _strided_steps(calls, selected) if stride == "unit" else {}
    if convert is None and not steps:
        raise ValueError(
            f"no stride to remove: neither {_first_names(selected)} nor the layers around them in "
            "a block have one"
        )

    def replacements(source: nn.Module) -> dict[str, nn.Module]:
        modules = {
            name: at_unit_stride(call, source.get_submodule(name)) for name, call in steps.items()
        }
        if convert is not None:
            # Conversion comes second, so that a chosen convolution at unit stride is itself
            # replaced.
            modules |= {
                name: convert(name, source.get_submodule(name), steps.get(name))
                for name in selected
            }
        return modules

    check_phases(steps.values())
    if inplace and "" in selected:
        raise ValueError(
            "the model is itself the convolution to replace, which cannot be done in place"
        )
    rehearsal = _exchange(rehearsal, replacements(rehearsal))
    calls_after = _check_grids(rehearsal, size, steps)
    feature_info = updated_feature_info(model, calls, calls_after)
    result = model if inplace else copy_in_its_modes(model)
    result = _exchange(result, replacements(result))
    if feature_info is not None:
        # The annotations of nn.Module do not know this attribute.
        setattr(result, "feature_info", feature_info)  # noqa: B010
    return result


def _check_types(model: object, layers: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__} {model!r}")
    if layers is None or callable(layers) or isinstance(layers, str):
        return
    if not isinstance(layers, Collection) or not all(isinstance(name, str) for name in layers):
        raise TypeError(
            "expected layers to be None, a name, a collection of names or a predicate, got "
            f"{layers!r}"
        )


def _choose(model: nn.Module, calls: list[Call], layers: LayerFilter | None) -> list[str]:
    """Return the names of the convolutions to reparameterize."""
    convolutions = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    spatial = {name: conv for name, conv in convolutions.items() if max(conv.kernel_size) > 1}
    if layers is None:
        if present := gpsa_layers(model):
            raise ValueError(
                f"already reparameterized ({', '.join(present)}): name further convolutions with "
                "layers="
            )
        selected = _last_stage(calls)
        if not selected:
            raise ValueError(
                f"no convolution to reparameterize: the last stage of {type(model).__name__} has "
                f"no k x k convolution with k > 1{_unsupported(calls)}; name earlier ones with "
                f"layers=, of {len(spatial)} in the model"
            )
    elif not spatial:
        raise ValueError(
            f"no convolution to reparameterize: {type(model).__name__} has no k x k convolution "
            "with k > 1"
        )
    elif callable(layers):
        selected = list(select_layers(spatial, layers, noun="k x k convolutions"))
    else:
        # A 1 x 1 convolution can only be selected by its own name, because the name of a module
        # around it selects the k x k convolutions in that module.
        names = (layers,) if isinstance(layers, str) else tuple(layers)
        named = {name: convolutions[name] for name in names if name in convolutions}
        selected = list(select_layers(spatial | named, names, noun="k x k convolutions"))
    traced = {call.name for call in calls}
    unused = [name for name in selected if name not in traced]
    if unused:
        raise ValueError(
            f"not used by the model's feature extractor, so their resolution is unknown: {unused}"
        )
    return selected


def _unsupported(calls: list[Call]) -> str:
    """Describe, for an error, layers that convolve at the final resolution but are not nn.Conv2d
    (CondConv2d).
    """
    layers = []
    for call in calls:
        convolves = (
            call.convolves and not isinstance(call.module, nn.Conv2d) and call.module._parameters
        )
        if convolves and call.outputs == calls[-1].outputs:
            layers.append(f"{call.name} ({type(call.module).__name__})")
    return (
        f", and {_first_names(layers)} are not nn.Conv2d layers with their own filters"
        if layers
        else ""
    )


def _last_stage(calls: list[Call]) -> list[str]:
    """Return the k x k convolutions at the final resolution and in the block that reduces to it."""
    convolutions = []
    for call in calls:
        if not isinstance(call.module, nn.Conv2d) or call.in_attention:
            continue
        if call.outputs != (1, 1):
            convolutions.append(call)
        elif _is_spatial(call):
            raise ValueError(
                f"the image is too small to tell stages apart: {call.name} works on 1 x 1; give "
                "larger images (input_size=, or --img-size)"
            )
        # A 1 x 1 convolution on a 1 x 1 map works on a pooled vector (squeeze-and-excitation), not
        # on the feature map.
    if not convolutions:
        return []
    final = convolutions[-1].outputs
    reductions = [call for call in calls if is_strided(call) and call.outputs == final]
    previous = {call.inputs for call in reductions}
    # The stride of a block may be in a pool after its convolution (ResNet-D, anti-aliased
    # networks), so that the convolution works at the previous resolution.
    blocks = {_parent(call.name) for call in reductions}
    reducing_blocks = {
        c.name for c in calls if c.name in blocks and c.outputs == final and c.inputs in previous
    }

    def belongs(call: Call) -> bool:
        # A stage reduces by 2, or by nearly 3 if sizes are odd; larger steps are patch embeddings
        # of transformers.
        rows, columns = call.inputs
        one_step = max(rows / final[0], columns / final[1]) <= 3
        in_block = not reducing_blocks.isdisjoint(_ancestors(call.name))
        return _is_spatial(call) and one_step and (call.outputs == final or in_block)

    # A convolution that runs several times appears only once.
    return list(dict.fromkeys(call.name for call in convolutions if belongs(call)))


def _strided_steps(calls: list[Call], selected: list[str]) -> dict[str, Call]:
    """Return the operations to set to stride 1,
    which make the same step in resolution as a chosen layer's block.

    The block of an operation is the smallest module around it that contains a k x k convolution: a
    module with only pools and 1 x 1 convolutions belongs to the block of the module around it.
    """
    strided = [
        call
        for call in calls
        if is_strided(call) and (call.name in selected or not call.in_attention)
    ]
    around_selected = set[str]().union(*map(_ancestors, selected))
    spatial = [
        c.name
        for c in calls
        # A blur pool calls conv2d, too, but its filters are a buffer. Layers converted earlier
        # count as convolutions.
        if (c.convolves and c.module._parameters) or isinstance(c.module, GPSA)
    ]
    blocks = around_selected.union(*map(_ancestors, spatial))
    runs = {(call.name, call.inputs, call.outputs) for call in calls}

    def in_selected_block(call: Call) -> bool:
        # All of them are ancestors of the same module, so the longest name is that of the
        # innermost.
        block = max(_ancestors(call.name) & blocks, key=len)
        return block in around_selected and (block, call.inputs, call.outputs) in runs

    steps = {
        (call.inputs, call.outputs)
        for call in strided
        if call.name in selected or in_selected_block(call)
    }
    return {call.name: call for call in strided if (call.inputs, call.outputs) in steps}


def _convert(name: str, conv: nn.Module, step: Call | None, **options: Any) -> GPSA:
    """Return the GPSA layer for a convolution,
    at stride 1 if it makes a step in resolution that is removed.
    """
    try:
        if carries_hooks(conv):
            raise ValueError(
                "it carries hooks, which would be lost: remove them first and attach them "
                "afterwards"
            )
        convolution = describe(conv)
        if step is not None:
            convolution = replace(convolution, stride=(1, 1))
            y, x = convolution.axes(*step.inputs)
            # Symmetric padding cannot keep the grid with an even kernel, and a kernel may have had
            # no padding.
            if (y.queries, x.queries) != step.inputs:
                convolution = replace(convolution, padding="same")
        layer = GPSA.from_conv(convolution, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot reparameterize {name!r}: {error}") from error
    # The layer takes over the parameters of the convolution, so that ties and an optimizer's state
    # stay valid.
    for key, applied in (("weight", convolution.weight), ("bias", convolution.bias)):
        if applied is conv._parameters[key]:
            setattr(layer, key, applied)
    return layer


def _exchange(model: nn.Module, replacements: dict[str, nn.Module]) -> nn.Module:
    """Replace modules of a model by name; a module
    that is shared under several names stays shared.
    """
    if "" in replacements:
        return replacements[""]
    aliases = dict(model.named_modules(remove_duplicate=False))
    # The replacements have one name per module, but a module may have several names.
    by_module = {id(aliases[name]): module for name, module in replacements.items()}
    for alias, module in aliases.items():
        if id(module) in by_module:
            parent, _, child = alias.rpartition(".")
            setattr(model.get_submodule(parent), child, by_module[id(module)])
    return model


def _check_grids(model: nn.Module, size: InputSize, steps: dict[str, Call]) -> list[Call]:
    """Run the rehearsal again, and raise unless the network runs
    and each changed step keeps the grid of its input.
    """
    try:
        calls = trace(model, size)
    except FAILURES as error:
        if not steps:  # no stride was removed, so the error is a bug of ours
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"with {_first_names(sorted(steps))} at stride 1 the network no longer runs "
            f"({reason}); use stride='keep'"
        ) from error
    after = {call.name: call for call in calls}
    for name in steps:
        if after[name].outputs != after[name].inputs:
            raise ValueError(f"{name} does not keep its grid at stride 1; use stride='keep'")
    return calls


def _first_names(names: list[str]) -> str:
    """Join the first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_spatial(call: Call) -> bool:
    """Return whether the module of a call is a k x k convolution, k > 1."""
    return isinstance(call.module, nn.Conv2d) and max(call.module.kernel_size) > 1


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _ancestors(name: str) -> set[str]:
    """Return the names of the modules that contain a module, the model itself ("") included."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(len(parts))}
