"""Attention of every head of a Transformed CNN for the query at one pixel,
and loading of the user's images.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from PIL import Image
from torch import Tensor, nn

from common.digits import MEAN, STD, ClutteredDigits
from tcnn_model import GPSA, gpsa_layers
from tcnn_model.pictures import read_picture

__all__ = ["maps_of", "open_images"]


def maps_of(model: nn.Module, images: Tensor, query: tuple[int, int]) -> xr.Dataset:
    """Return the attention of every head of every GPSA layer for the query at a pixel of the input.

    Pixel y of H lies in row ``y * rows // H`` of a layer's queries. Keys on zero padding are cut
    off the maps. Where layers differ in heads or in size, missing entries are NaN.

    Args:
        model: Model, which is evaluated in eval mode; its modules keep their modes.
        images: Images of shape (B, C, H, W), as the model takes them.
        query: Pixel (y, x) of the images.

    Returns:
        ``attention`` (image, layer, head, y, x); ``outside`` (image, layer, head), the attention on
        padding; ``peak_y`` and ``peak_x`` (image, layer, head), the position relative to the query
        of the key, padding included, with the most attention; ``gate``, ``center_y`` and
        ``center_x`` (layer, head); ``query_y`` and ``query_x`` (layer), the position of the query
        in the map.
    """
    layers = gpsa_layers(model)
    inputs = _inputs_of(model, layers, images)
    by_layer = [
        _of_layer(layer, inputs[name], query, images.shape[2:]) for name, layer in layers.items()
    ]
    maps = xr.concat(
        by_layer,
        xr.Variable("layer", np.array(list(layers), dtype=object)),
        join="outer",
    )
    return maps.transpose("image", "layer", "head", "y", "x")


@torch.no_grad()
def _inputs_of(model: nn.Module, layers: dict[str, GPSA], images: Tensor) -> dict[str, Tensor]:
    """Return the input of each layer in a forward pass in eval mode."""
    layer_inputs: dict[str, Tensor] = {}
    modes = {module: module.training for module in model.modules()}

    def keep(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            layer_inputs[name] = inputs[0]

        return hook

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        model.eval()(images.to(next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
        # Modes are restored module by module, because frozen parts of a model in training may be in
        # eval mode.
        for module, training in modes.items():
            module.training = training
    return layer_inputs


@torch.no_grad()
def _of_layer(layer: GPSA, x: Tensor, query: tuple[int, int], size: Sequence[int]) -> xr.Dataset:
    """Return the dataset of :func:`maps_of` for one layer and its input (B, C, H, W)."""
    rows, columns = layer.axes(x.shape[2], x.shape[3])
    # Row and column of the query whose cell of the image contains the pixel.
    row = query[0] * rows.queries // size[0]
    column = query[1] * columns.queries // size[1]
    # Position of the query among the keys without padding.
    query_y = rows.first_query + row * rows.stride
    query_x = columns.first_query + column * columns.stride
    # Attention of this query has shape (B, heads, keys).
    attention = layer.attention(x)[:, :, row * columns.queries + column]
    padded_maps = attention.cpu().double()
    peak = padded_maps.argmax(-1)
    # Peaks are relative to the query, as the centres of the heads are.
    peak_y = peak // columns.keys - rows.before - query_y
    peak_x = peak % columns.keys - columns.before - query_x
    maps = padded_maps.unflatten(-1, (rows.keys, columns.keys))
    # Padding is dropped from the maps; the attention on it is what they lack to a sum of 1.
    maps = maps.narrow(2, rows.before, rows.length).narrow(3, columns.before, columns.length)
    heads, of_head = ("image", "head"), ("head",)
    center = layer.center.detach().cpu().double()
    return xr.Dataset(
        {
            "attention": ((*heads, "y", "x"), maps.numpy()),
            "outside": (heads, 1 - maps.sum((2, 3)).numpy()),
            "peak_y": (heads, peak_y.double().numpy()),
            "peak_x": (heads, peak_x.double().numpy()),
            "gate": (of_head, layer.gate.detach().cpu().double().numpy()),
            "center_y": (of_head, center[:, 0].numpy()),
            "center_x": (of_head, center[:, 1].numpy()),
            "query_y": query_y,
            "query_x": query_x,
        },
        {
            "image": range(len(x)),
            "head": range(layer.heads),
            "y": range(rows.length),
            "x": range(columns.length),
        },
    )


def open_images(files: Sequence[str], dataset: Any, size: int) -> Tensor:
    """Return the images of files, (B, C, H, W),
    prepared in the same way as those of the validation set.

    Raises:
        OSError: A file is missing, or is not an image.
    """
    opened = [read_picture(file) for file in files]
    if not isinstance(dataset, ClutteredDigits):
        return torch.stack([dataset.transform(image) for image in opened])
    pixels = [
        np.asarray(
            image.convert("L").resize((size, size), Image.Resampling.BILINEAR),
            dtype=np.float32,
        )
        for image in opened
    ]
    return (torch.from_numpy(np.stack(pixels))[:, None] / 255 - MEAN) / STD
