"""Saliency maps of every method for the probed images of a study,
and scores of their faithfulness.
"""

import argparse
import copy
from typing import Any

import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from common.data import Probed
from tcnn_probe.attribution import (
    area_under,
    deletion_curve,
    energy_inside,
    insertion_curve,
    pointing_game,
)

__all__ = ["logits", "on_object", "score", "usable_methods"]

METHODS = (
    "class_attention",
    "rollout",
    "gradcam",
    "integrated_gradients",
    "input_x_gradient",
    "occlusion",
)
MASK_MEASURES = ("pointing_game", "energy_inside")


def usable_methods(model: nn.Module, image: Tensor) -> list[str]:
    """Return the methods that work for this model:
    class attention, for instance, needs a class token.
    """
    usable, side = [], image.shape[-1] // 2
    # The options are as coarse as can be, since only a refusal matters.
    quick: Any = {
        "integrated_gradients": {"n_steps": 1},
        "occlusion": {"window": side, "stride": side},
    }
    for method in METHODS:
        options = quick.get(method, {})
        try:
            tcnn_probe.saliency(model, image, method=method, progress=False, **options)
            usable.append(method)
        except ValueError as error:
            print(f"{type(model).__name__}: without {method} ({error})")
    return usable


def score(
    model: nn.Module, methods: list[str], probed: Probed, args: argparse.Namespace
) -> xr.Dataset:
    """Return every measure of every method, the maps, and the probabilities of all classes.

    Args:
        model: Model to explain.
        methods: Saliency methods that work for the model.
        probed: Images to explain.
        args: Command line of the study.
    """
    images, labels, masks = probed.images, probed.labels, probed.masks
    maps = tcnn_probe.saliency(
        model,
        images,
        labels,
        method=methods,
        batch_size=args.batch_size,
        **_method_options(methods, images.shape[-1], args),
    )
    saliency = {name: maps[name] for name in methods}
    data = {"masks": masks, "batch_size": args.batch_size}
    of_masks = () if masks is None else MASK_MEASURES
    scores = tcnn_probe.faithfulness(
        model,
        images,
        saliency,
        labels,
        metrics=["deletion_auc", "insertion_auc", *of_masks, "rank_correlation"],
        steps=args.steps,
        tolerance=args.tolerance,
        **data,
    )
    if masks is not None:
        without_tolerance = tcnn_probe.faithfulness(
            model, images, saliency, labels, metrics="pointing_game", **data
        )
        scores["pointing_game_exact"] = without_tolerance.pointing_game
    # A forward pass of the model itself would be recorded as one of validation.
    unrecorded = copy.deepcopy(model).eval()
    scores = _with_chance(scores, unrecorded, probed, args)
    # Single precision is enough to draw maps, which are the largest part of the file.
    stacked = maps.to_dataarray("attribution").astype("float32")
    scores["saliency"] = stacked.reindex(attribution=scores.attribution)
    probability = logits(unrecorded, probed, args).softmax(1).numpy()
    scores["probability"] = ("image", "class"), probability
    return scores


def on_object(attention: xr.DataArray, masks: Tensor) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the share of attention that falls on the object,
    (image, layer, head), and that of uniform attention.

    Shares are of the attention to patches; that of a patch is spread evenly over its pixels.

    Args:
        attention: Attention, (image, layer, head, y, x).
        masks: Masks of the objects, shape (image, H, W), bool.
    """
    # The share of each patch that the object covers.
    cells = F.adaptive_avg_pool2d(masks[:, None].double(), attention.shape[-2:])[:, 0]
    share = xr.DataArray(cells.numpy(), dims=("image", "y", "x"))
    dims = ["y", "x"]
    return (attention * share).sum(dims) / attention.sum(dims), share.mean(dims)


@torch.no_grad()
def logits(model: nn.Module, probed: Probed, args: argparse.Namespace) -> Tensor:
    """Return the model's scores of the probed images, shape (B, K)."""
    batches = probed.images.split(args.batch_size)
    return torch.cat([model(batch.to(args.device)).float().cpu() for batch in batches])


def _method_options(
    methods: list[str], size: int, args: argparse.Namespace
) -> dict[str, dict[str, int]]:
    """Return the options of the methods that have any."""
    # Windows have a quarter of the image's size, and overlap by half except in the small form.
    window = max(2, size // 4)
    stride = window if args.small else window // 2
    options = {
        "integrated_gradients": {"n_steps": args.steps},
        "occlusion": {"window": window, "stride": stride},
    }
    return {method: options[method] for method in methods if method in options}


def _with_chance(
    scores: xr.Dataset, model: nn.Module, probed: Probed, args: argparse.Namespace
) -> xr.Dataset:
    """Return the scores with those of a map that is the same everywhere,
    which has every measure at chance.
    """
    images, labels, masks = probed.images, probed.labels, probed.masks
    # tcnn_probe.faithfulness does not score constant maps, because a method that gives one has
    # failed.
    flat = torch.zeros(len(images), *images.shape[2:])
    options = {"steps": args.steps, "batch_size": args.batch_size}
    deletion = deletion_curve(model, images, flat, labels, **options)
    insertion = insertion_curve(model, images, flat, labels, **options)
    chance = {
        "deletion_auc": area_under(*deletion),
        "insertion_auc": area_under(*insertion),
    }
    if masks is not None:
        chance["energy_inside"] = energy_inside(flat, masks)
        chance["pointing_game"] = pointing_game(flat, masks, args.tolerance)
        chance["pointing_game_exact"] = pointing_game(flat, masks)
    scores = scores.reindex(attribution=[*scores.attribution.values, "chance"])
    for name, values in chance.items():
        scores[name].loc[{"attribution": "chance"}] = values.cpu().numpy()
    return scores
