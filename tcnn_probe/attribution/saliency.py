"""``saliency()``: maps of chosen images by chosen methods, labelled."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_probe.attribution.methods import Attribution, OwnMethod, find_methods, name_of
from tcnn_probe.attribution.unsupported import UnsupportedMethodError
from tcnn_probe.images import as_images
from tcnn_probe.models import (
    batches,
    class_indices,
    class_scores,
    progress_bar,
    untouched,
    whole_number,
)
from tcnn_probe.provenance import provenance

__all__ = ["find_targets", "maps_of", "saliency"]


def saliency(
    model: nn.Module,
    images: Any,
    target: int | Sequence[int] | Tensor | None = None,
    method: str | type | OwnMethod | Sequence[str | type | OwnMethod] = "class_attention",
    *,
    batch_size: int = 32,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """Show which pixels a model's score for a class depends on, by one method or several, at the images' resolution.

    ::

        maps = tcnn_probe.saliency(model, images, method=["class_attention", "gradcam"], gradcam={"layer": "blocks"})
        maps.gradcam.sel(image=0).plot(yincrease=False)

    Methods are "class_attention", "rollout", "gradcam", "integrated_gradients", "input_x_gradient", "occlusion" and the
    classes of captum.attr that attribute, or their names ("GuidedBackprop"). Their options are those of the functions
    :func:`class_attention`, :func:`rollout` and :func:`captum_maps` in :mod:`tcnn_probe.attribution`.

    The model runs in eval mode and is afterwards as it was: flags, gradients, hooks. Calls on one model from several
    threads wait for each other.

    Args:
        model: gives a score for each class, shape (B, K).
        images: as the model takes them, shape (B, C, H, W), a tensor or an array, on any device; or pictures, see
            :func:`tcnn_probe.images.as_images`.
        target: the class to explain: one for all, or one an image; None for the model's own prediction.
        method: a name or class, as above; a function of yours ``(model, images, target) -> maps`` with tensors
            (B, C, H, W), (B,) and (B, H, W); or several of these.
        batch_size: images in the model at a time.
        progress: whether to show a progress bar; None: once it takes more than three seconds, on a terminal.
        **options: of the method, such as ``layer``, whose attention or feature map it is, if that is not the method's
            own choice; of several methods, ``name={...}`` for each.

    Returns:
        an ``xarray.DataArray``, dims (image, y, x) with the coordinate ``target``, its ``attrs`` saying what it is
        (method, layer, units, definition, source, options) and by which versions it was made; of several methods an
        ``xarray.Dataset`` of these, by name. float64 for a float64 model, else float32. Of several methods, one that
        the model does not support is left out, with a warning.

    Raises:
        ValueError, TypeError: images, targets, a method or an option of another kind or out of range; a model without
            what the method needs, or without scores.
    """
    alone = isinstance(method, str) or callable(method)
    if alone:
        options = {name_of(method): options} if options else {}
    elif wrong := next((name for name, value in options.items() if not isinstance(value, dict)), None):
        raise TypeError(
            f"with several methods, expected the options of each, as in gradcam={{'layer': ...}}; "
            f"got {wrong}={options[wrong]!r}"
        )
    methods, images = find_methods(method, options), as_images(images, model)
    batch_size = whole_number(batch_size, "batch_size", 1)
    labelled, unsupported = {}, {}
    with untouched(model):
        targets = find_targets(model, images, target, batch_size)
        coords = {"image": range(len(images)), "target": ("image", targets.numpy())}
        with progress_bar(len(images) * len(methods), "saliency", progress) as bar:
            for one in methods:
                try:
                    maps, of_layer = maps_of(one, model, images, targets, batch_size, bar.update)
                except UnsupportedMethodError as error:
                    unsupported[one.name] = error
                    continue
                attrs = {"long_name": "saliency", "method": one.name, "layer": of_layer, **one.about}
                attrs |= provenance(model, "captum")
                labelled[one.name] = xr.DataArray(maps.numpy(), coords, ("image", "y", "x"), one.name, attrs)
    if not labelled:
        raise next(iter(unsupported.values()))
    for name, reason in unsupported.items():
        warnings.warn(f"{name!r} is left out: {reason}", RuntimeWarning, stacklevel=2)
    return labelled[methods[0].name].rename("saliency") if alone else xr.Dataset(labelled)


@torch.no_grad()
def find_targets(
    model: nn.Module, images: Tensor, target: int | Sequence[int] | Tensor | None, batch_size: int
) -> Tensor:
    """Classes, shape (B,): the model's own prediction, one class for all images, or those given."""
    if target is None:
        return torch.cat([class_scores(model, some).argmax(1).cpu() for _, some in batches(model, images, batch_size)])
    classes = class_scores(model, next(batches(model, images, 1))[1]).shape[1]
    features = " (features, as the model has num_classes=0)" * (getattr(model, "num_classes", None) == 0)
    given = class_indices(target, f"targets{features}", classes)
    if given.ndim and given.shape != images.shape[:1]:
        raise ValueError(f"expected one target, or {len(images)}: one an image; got shape {tuple(given.shape)}")
    return given.expand(len(images)).clone()


def maps_of(
    attribution: Attribution,
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    batch_size: int,
    done: Callable[[int], Any],
) -> tuple[Tensor, str]:
    """Maps of all images, (B, H, W) on the CPU, and the layer's name; the model is in eval mode."""
    if attribution.explain is None:
        assert attribution.maps is not None
        done(len(images))
        return attribution.maps, ""
    maps, layer = [], ""
    for which, some in batches(model, images, batch_size):
        found, layer = attribution.explain(model, some, targets[which].to(some.device), batch_size)
        maps.append(found.to(torch.promote_types(found.dtype, torch.float32)).cpu())
        done(len(some))
    return torch.cat(maps), layer
