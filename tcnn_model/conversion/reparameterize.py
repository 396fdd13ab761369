"""Turning a CNN into a Transformed CNN: which convolutions, their stride, and the exchange itself.

Everything is planned and tried on a copy without storage first, so a model is converted whole or not at all.
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
    """Replace convolutions of a CNN by :class:`~tcnn_model.GPSA` layers loaded with their filters (T-CNN, Sec. 2).

    The defaults are the paper's: the k x k convolutions of the last stage, that stage at stride 1, alpha = lambda = 1.
    The result then *starts near* the CNN's function, not at it. ``stride="keep", locality_strength=20, gating=20``
    gives the same function to float32 rounding.

    The last stage is where the network works at its final resolution: its k x k convolutions there, depthwise ones
    included, and those of the block that brings it there; those inside attention layers are left out. In a network
    built with timm's ``output_stride`` several stages share the final resolution, and all are converted.

    ``stride="unit"`` takes out the stride of a chosen convolution, or else that of its block: the module around it
    that makes the step in resolution, which may be the stage. Every operation that makes the same step (1 x 1 shortcut,
    parallel branch, average, max or blur pool) is set to stride 1 too, and the grid doubles. Operations whose output
    would then be too small for the grid are extended at the border. For the 2 x 2 convolutions of ConvNeXt's
    downsampling this is one pixel of zeros to the right and down: windows overlap, and every second one is a window of
    the CNN. An error is raised where operations would not fit together any more. Where the stride stands in a separate
    layer before the chosen ones and their blocks (the pools of VGG and DenseNet), there is nothing to take out, and
    both settings give the same.

    A weight-standardised convolution becomes a layer with the standardised weight, which is a new parameter; a
    checkpoint of the CNN has to be loaded before the conversion. Plain convolutions keep their weight, and its name.

    Args:
        model: any module with a 2-D feature extractor. ``forward_features`` is looked at where there is one.
        layers: None for the last stage, of a model that has no GPSA layers yet; else a convolution's name, the name of
            a module (all k x k convolutions in it), a glob over k x k convolutions, a collection of these, or a
            predicate ``(name, conv) -> bool``, which is asked for k x k convolutions only.
        stride: "unit" or "keep".
        locality_strength: initial alpha of every head, in 1 / pixel^2.
        gating: initial lambda of every head, or one number for each head of a layer.
        qk_dim: channels of queries and keys per head, see :class:`~tcnn_model.GPSA`.
        qk_scale: initial scale of the weights of queries and keys, see :class:`~tcnn_model.GPSA`. The papers have 1.
        backend: how the layers compute attention, see :func:`~tcnn_model.gpsa`.
        input_size: (C, H, W) at which stages are told apart; timm's ``pretrained_cfg`` or 3 x 224 x 224 unless given.
        inplace: convert ``model`` itself rather than a copy.

    Returns:
        the converted model, in the mode, on the device and with the dtype and ``requires_grad`` of ``model``.
        What attention adds (query, key, value, locality, centre, gating) requires gradients.

    Raises:
        TypeError: ``model`` is no module, or ``layers`` none of the above.
        ValueError: no convolution to reparameterize; a name, glob or predicate that chooses none; a convolution that
            does something else as well, or whose weight is parametrized, pruned or partly frozen; a stride that cannot
            be taken out (the error names ``stride="keep"``). The model is then unchanged.
    """
    if stride not in ("unit", "keep"):
        raise ValueError(f"expected stride='unit' or 'keep', got {stride!r}")
    options: dict[str, Any] = {"locality_strength": locality_strength, "gating": gating}
    options |= {"qk_dim": qk_dim, "qk_scale": qk_scale, "backend": backend}
    return _converted(model, layers, stride, input_size, inplace, partial(_convert, **options))


def unstride(
    model: nn.Module,
    *,
    layers: LayerFilter | None = None,
    input_size: InputSize | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Take the stride out of a CNN's last stage, as :func:`reparameterize` does, and leave its convolutions.

    This is the control that the T-CNN paper does not have: its T-CNNs have attention, and a last stage on twice the
    grid ("Without SA" in its Table 1 is the CNN at its own stride). Every operation that makes the stage's step in
    resolution is set to stride 1, with the same filters; so the layers see the pixels that they saw before, and others
    between them.

    Args:
        model, layers, input_size, inplace: as of :func:`reparameterize`.

    Returns:
        the CNN at stride 1, with the parameters of ``model`` under their names.

    Raises:
        TypeError, ValueError: as :func:`reparameterize`; also where there is no stride to take out.
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
    """The model with ``convert(name, convolution, step to take out)`` for each chosen one; None leaves these."""
    _check_types(model, layers)
    rehearsal = meta_copy(model)
    size = find_input_size(rehearsal, input_size)
    calls = trace(rehearsal, size)
    chosen = _choose(rehearsal, calls, layers)
    steps = _strided_steps(calls, chosen) if stride == "unit" else {}
    if convert is None and not steps:
        raise ValueError(f"no stride to take out: neither {_some(chosen)} nor what is around them in a block has one")

    def replacements(source: nn.Module) -> dict[str, nn.Module]:
        new = {name: at_unit_stride(call, source.get_submodule(name)) for name, call in steps.items()}
        if convert is not None:
            new |= {name: convert(name, source.get_submodule(name), steps.get(name)) for name in chosen}
        return new

    check_phases(steps.values())
    if inplace and "" in chosen:
        raise ValueError("the model is itself the convolution to replace, which cannot be done in place")
    rehearsal = _exchange(rehearsal, replacements(rehearsal))
    feature_info = updated_feature_info(model, calls, _check_grids(rehearsal, size, steps))
    result = model if inplace else copy_in_its_modes(model)
    result = _exchange(result, replacements(result))
    if feature_info is not None:
        setattr(result, "feature_info", feature_info)  # noqa: B010 (which nn.Module's annotations do not know)
    return result


def _check_types(model: object, layers: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__} {model!r}")
    if layers is None or callable(layers) or isinstance(layers, str):
        return
    if not isinstance(layers, Collection) or not all(isinstance(name, str) for name in layers):
        raise TypeError(f"expected layers to be None, a name, a collection of names or a predicate, got {layers!r}")


def _choose(model: nn.Module, calls: list[Call], layers: LayerFilter | None) -> list[str]:
    convolutions = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    spatial = {name: conv for name, conv in convolutions.items() if max(conv.kernel_size) > 1}
    if layers is None:
        if present := gpsa_layers(model):
            raise ValueError(f"already reparameterized ({', '.join(present)}): name further convolutions with layers=")
        chosen = _last_stage(calls)
        if not chosen:
            raise ValueError(
                f"no convolution to reparameterize: the last stage of {type(model).__name__} has no k x k convolution "
                f"with k > 1{_others(calls)}; name earlier ones with layers=, of {len(spatial)} in the model"
            )
    elif not spatial:
        raise ValueError(
            f"no convolution to reparameterize: {type(model).__name__} has no k x k convolution with k > 1"
        )
    elif callable(layers):
        chosen = list(select_layers(spatial, layers, what="k x k convolutions"))
    else:  # a 1 x 1 convolution has to be asked for by its own name
        names = (layers,) if isinstance(layers, str) else tuple(layers)
        named = {name: convolutions[name] for name in names if name in convolutions}
        chosen = list(select_layers(spatial | named, names, what="k x k convolutions"))
    run = {call.name for call in calls}
    if idle := [name for name in chosen if name not in run]:
        raise ValueError(f"not used by the model's feature extractor, so not known at which resolution: {idle}")
    return chosen


def _others(calls: list[Call]) -> str:
    """Layers that convolve at the final resolution and cannot be chosen (conditional convolutions), for an error."""
    convolving = [c for c in calls if c.convolves and not isinstance(c.module, nn.Conv2d) and c.module._parameters]
    found = [f"{c.name} ({type(c.module).__name__})" for c in convolving if c.outputs == calls[-1].outputs]
    return f", and {_some(found)} are no nn.Conv2d with filters of their own" if found else ""


def _last_stage(calls: list[Call]) -> list[str]:
    """K x k convolutions at the final resolution, and in the block that reduces to it (whose stride may be a pool)."""
    every = [c for c in calls if isinstance(c.module, nn.Conv2d) and not c.in_attention]
    if tiny := [c.name for c in every if c.outputs == (1, 1) and max(_kernel(c)) > 1]:
        raise ValueError(f"the image is too small to tell stages apart: {tiny[0]} works on 1 x 1; pass input_size=")
    # Any other 1 x 1 map is a pooled vector (squeeze-and-excitation), not a resolution at which the network works.
    convolutions = [c for c in every if c.outputs != (1, 1)]
    if not convolutions:
        return []
    final = convolutions[-1].outputs
    reaching = [c for c in calls if is_strided(c) and c.outputs == final]
    blocks = {_parent(c.name) for c in reaching}
    entered = {c.name for c in calls if c.outputs == final and c.inputs in {r.inputs for r in reaching}}

    def belongs(call: Call) -> bool:
        before_pool = not blocks.isdisjoint(_ancestors(call.name) & entered)
        one_step = max(i / o for i, o in zip(call.inputs, final, strict=True)) <= 3
        return one_step and (call.outputs == final or before_pool)

    chosen = [c.name for c in convolutions if max(_kernel(c)) > 1 and belongs(c)]
    return list(dict.fromkeys(chosen))


def _strided_steps(calls: list[Call], chosen: list[str]) -> dict[str, Call]:
    """The operations to set to stride 1: those that make the same step in resolution as a chosen layer's block.

    The block of an operation is the smallest module around it with a k x k convolution in it: one that has only pools
    and 1 x 1 convolutions is a part of what is around it.
    """
    strided = [call for call in calls if is_strided(call) and (call.name in chosen or not call.in_attention)]
    around = set[str]().union(*map(_ancestors, chosen))
    spatial = [c.name for c in calls if (c.convolves and c.module._parameters) or isinstance(c.module, GPSA)]
    blocks = around.union(*map(_ancestors, spatial))
    whole = {(c.name, c.inputs, c.outputs) for c in calls}

    def belongs(call: Call) -> bool:
        block = max(_ancestors(call.name) & blocks, key=len)
        return block in around and (block, call.inputs, call.outputs) in whole

    steps = {(c.inputs, c.outputs) for c in strided if c.name in chosen or belongs(c)}
    return {c.name: c for c in strided if (c.inputs, c.outputs) in steps}


def _convert(name: str, conv: nn.Module, step: Call | None, **options: float | str | None) -> GPSA:
    """The GPSA layer for a convolution, at stride 1 if it makes a step in resolution that is taken out."""
    try:
        if conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks or conv._backward_pre_hooks:
            raise ValueError("it carries hooks, which would be lost: remove them first and attach them afterwards")
        own = describe(conv)
        if step is not None:
            y, x = replace(own, stride=(1, 1)).axes(*step.inputs)
            keeps_grid = (y.queries, x.queries) == step.inputs
            own = replace(own, stride=(1, 1), padding=own.padding if keeps_grid else "same")
        layer = GPSA.from_conv(own, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot reparameterize {name!r}: {error}") from error
    # The very parameters of the convolution, which is dropped: ties, and an optimizer's state for them, stay.
    for key, applied in (("weight", own.weight), ("bias", own.bias)):
        if applied is conv._parameters[key]:
            setattr(layer, key, applied)
    return layer


def _exchange(model: nn.Module, new: dict[str, nn.Module]) -> nn.Module:
    if "" in new:
        return new[""]
    aliases = dict(model.named_modules(remove_duplicate=False))
    by_module = {id(aliases[name]): module for name, module in new.items()}
    for alias, module in aliases.items():  # a convolution shared under two names stays shared
        if id(module) in by_module:
            parent, _, child = alias.rpartition(".")
            setattr(model.get_submodule(parent), child, by_module[id(module)])
    return model


def _check_grids(model: nn.Module, size: InputSize, steps: dict[str, Call]) -> list[Call]:
    """Run the rehearsal again: un-striding must leave a network that runs, each changed step on its input's grid."""
    try:
        calls = trace(model, size)
    except FAILURES as error:
        if not steps:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"with {_some(sorted(steps))} at stride 1 the network no longer runs ({reason}); use stride='keep'"
        ) from error
    after = {call.name: call for call in calls}
    for name in steps:
        if after[name].outputs != after[name].inputs:
            raise ValueError(f"{name} does not keep its grid at stride 1; use stride='keep'")
    return calls


def _some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kernel(call: Call) -> tuple[int, ...]:
    assert isinstance(call.module, nn.Conv2d)
    return call.module.kernel_size


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _ancestors(name: str) -> set[str]:
    """Names of the modules that contain the one named, the model itself ("") included."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(len(parts))}
