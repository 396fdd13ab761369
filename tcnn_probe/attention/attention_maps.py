"""``attention_maps()``: the attention of one forward of any model,
on the grids of its layers, as labelled arrays.
"""

import json
import math
import operator
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import nn

from tcnn_model.conversion.selection import LayerFilter
from tcnn_probe.architectures.lookup import known
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.attention.map_keeper import LayerMaps, MapKeeper, MapSelection
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import AttentionStream
from tcnn_probe.free_memory import available_bytes
from tcnn_probe.images import as_images, beside_images, calls_given, channel_axis
from tcnn_probe.models import (
    batches,
    check_model,
    layer_names,
    module_name,
    progress_bar,
    untouched,
    wanted_layers,
    whole_number,
)
from tcnn_probe.provenance import provenance

__all__ = ["attention_maps"]

Grid = tuple[int, ...]
Pixels = Sequence[tuple[int, ...]]

_ATTRS = {
    "attention": {
        "long_name": "attention",
        "units": "1",
        "description": "A_ij between tokens of the grid. The rest of each row, up to one, goes to "
        "class or register tokens, or to padding.",
    },
    "class_attention": {
        "long_name": "class attention",
        "units": "1",
        "description": "A_0j of the class token over the keys on the grid. The rest, up to one, "
        "goes to the class token itself and to other tokens before the grid.",
    },
    "attention_by_class": {
        "long_name": "attention of the class's token",
        "units": "1",
        "description": "A_cj of the token of class c over the keys on the grid.",
    },
    "attention_by_query": {
        "long_name": "attention of queries off the grid",
        "units": "1",
        "description": "A_ij of query i, which lies on no grid (object queries, latents, words), "
        "over the keys on the grid.",
    },
    "pixel": {
        "long_name": "centre",
        "units": "pixel",
        "description": "Centre of the cell's receptive field in the image.",
    },
    "input": {
        "long_name": "image",
        "units": "1",
        "description": "Images as they were given to the model.",
    },
    "gate": {
        "long_name": "gate",
        "units": "1",
        "description": "sigma(lambda), share of positional attention.",
    },
}


def attention_maps(
    model: nn.Module,
    images: Any,
    *,
    layers: LayerFilter | None = None,
    heads: int | Collection[int] | None = None,
    queries: Pixels | Literal["class"] | None = None,
    prefix_tokens: int | None = None,
    class_token: Literal["first", "last", "none"] | None = None,
    grid: tuple[int, int] | None = None,
    mixed: bool = False,
    batch_size: int = 8,
    max_bytes: int = 1 << 30,
    progress: bool | None = None,
) -> xr.DataTree:
    """Compute the attention maps of every head of a model for these images,
    on the grids of the layers.

    ::

        maps = tcnn_probe.attention_maps(vit, photograph, queries=[(112, 112)])
        tcnn_probe.plot.attention_maps(maps)
        maps["12x14x14"].attention.sel(layer="blocks.11.attn", head=3)  # (image, query, y, x)

    This works for any model that can be recorded; fused attention is left on. The model runs once,
    in eval mode, and is unchanged afterwards.

    Args:
        model: Any module.
        images: Images as the model takes them, shape (B, C, H, W); or videos, (B, T, C, H, W) or
            (B, C, T, H, W); or pictures (PIL images, file names, bytes), which pass through timm's
            evaluation transform for the model; or all outputs of a processor of transformers,
            including text and masks, which are one batch.
        layers: Names, globs or a predicate ``(name, module) -> bool``; None for all layers.
        heads: Indices of the heads to keep; None for all heads.
        queries: Pixels whose attention is returned, (y, x) in the images as the model takes them,
            or (frame, y, x) in videos; "class" for class tokens only. None for all queries: 22 MB
            per image for 12 layers of 12 heads and 196 patches.
        prefix_tokens, class_token, grid: Facts about the tokens, as for :func:`tcnn_probe.record`.
        mixed: Whether to return the weights after heads are mixed, for layers that mix them after
            the softmax (the talking heads of CaiT). Their rows need not sum to one, and weights may
            be negative. Other layers are not affected.
        batch_size: Number of images at a time.
        max_bytes: Largest size of the result; a larger result raises an error, and so does one that
            the machine cannot hold: at its peak, the memory is 1.2 times the result.
        progress: Whether to show a progress bar; None to show it after three seconds, on a terminal
            or in a notebook.

    Returns:
        A tree. Its root holds the images as the model saw them, ``input``. Each other node holds
        the layers of one grid, and is named "heads x rows x columns". Its variables are
        ``attention``, dims (image, layer, head, query, y, x), or (image, layer, head, query_y,
        query_x, y, x) for all queries; ``class_attention``, dims (image, layer, head, y, x), if
        there is a class token; ``attention_by_class``, dims (image, layer, head, class, y, x), for
        pools with a token for each class; ``attention_by_query``, dims (image, layer, head, query,
        y, x), in the layer's order, for queries that lie on no grid although the keys do, such as
        DETR's object queries; and ``gate``, dims (layer, head), for gated layers. Attention in
        windows (Swin, MaxViT) is placed in the whole image, with 0 outside the query's window. For
        chosen queries, ``query_y`` and ``query_x`` are the key cell nearest to the query's pixel,
        ``from_y`` and ``from_x``; ``pixel_y`` and ``pixel_x`` are the centres of the cells'
        receptive fields. Maps of videos have a dimension ``frame`` before ``y``, the frames of
        tokens, and ``query_frame`` before ``query_y``; ``input`` has ``input_frame``.
        ``attrs["missing"]`` names layers without maps, with the reason.

    Raises:
        ValueError: No layer has attention on a known grid; queries lie outside the images; the
            result takes more than ``max_bytes``, or more than the machine has; with ``mixed``, no
            layer mixes its heads.
        TypeError: ``model`` is not a module, ``images`` are not images, or a head is not an
            integer.
    """
    check_model(model)
    inputs, images = beside_images(images), as_images(images, model, videos=True)
    batch_size = whole_number(batch_size, "batch_size", 1)
    if inputs:  # it is unknown which of them have a row for each image
        batch_size = len(images)
    # (B, C, H, W) or (B, T, C, H, W).
    shown = images.movedim(channel_axis(images), -3)
    size = *shown.shape[1:-3], *shown.shape[-2:]
    if heads is not None:
        heads = [
            whole_number(head, "heads")
            for head in (heads if isinstance(heads, Collection) else [heads])
        ]
    mixing: dict[str, Any] = {}
    for name, module in model.named_modules():
        mixer = known(module).mixing if mixed else None
        if mixer is not None:
            mixing[name] = module.get_submodule(mixer)
    if mixed and not mixing:
        raise ValueError(
            "expected a model whose layers mix their heads (mixed=True), got "
            f"{type(model).__name__}, whose do not"
        )
    selection = MapSelection(
        _checked_queries(queries, size),
        heads,
        ReceptiveFields((size[-2], size[-1])),
        math.prod(size[:-2]),
        mixing,
    )
    tokens = GivenTokens(prefix_tokens, class_token, grid)
    names = layer_names(model)
    selected_layers = wanted_layers(model, layers)
    maps_by_batch: list[dict[str, LayerMaps]] = []
    missing: dict[str, str] = {}
    bar = progress_bar(len(images), "attention maps", progress)
    room = available_bytes()
    with untouched(model), torch.no_grad(), calls_given(model, inputs), bar:
        for which, batch in batches(model, images, batch_size):
            # The listener gets the number of batches, so that a result that is too large is refused
            # in the first one.
            listener = MapKeeper(
                selection,
                images=len(batch),
                copies=-(-len(images) // len(batch)),
                max_bytes=max_bytes,
                room=room,
            )
            # Receptive fields are computed in the same forward, so that the pixels of cells are
            # right for any stem.
            stream = AttentionStream(
                model,
                listener,
                layers=selected_layers,
                tokens=tokens,
                fields=selection.fields,
            )
            with stream.following():
                model(batch)
            listener.check()
            maps_by_batch.append({maps.layer: maps for maps in listener.maps})
            missing = listener.missing | missing
            bar.update(which.stop - which.start)
    complete = [
        layer for layer in maps_by_batch[0] if all(layer in by_layer for by_layer in maps_by_batch)
    ]
    for layer in set().union(*maps_by_batch).difference(complete):
        missing.setdefault(layer, "it did not run in every batch")
    # Unsupported layers are the same in every batch.
    without_maps = missing | stream.unsupported
    if not complete:
        reasons = "".join(f"\n  {layer}: {reason}" for layer, reason in without_maps.items())
        raise ValueError(
            f"no layer of this {type(model).__name__} has attention "
            f"maps{reasons or ': no softmax attention was seen'}"
        )
    if missing:
        reasons = "; ".join(f"{layer}: {reason}" for layer, reason in missing.items())
        warnings.warn(
            f"no attention maps for {len(missing)} layers: {reasons}",
            RuntimeWarning,
            stacklevel=2,
        )
    order = {name: place for place, name in enumerate(names.values())}
    # Layers are sorted in the model's order, not by their first call.
    complete.sort(key=lambda layer: (order[module_name(layer)], layer))
    maps_by_layer = [[by_layer[layer] for by_layer in maps_by_batch] for layer in complete]
    datasets = _by_grid(maps_by_layer, selection)
    # NumPy has no bfloat16.
    shown = shown.float() if images.dtype == torch.bfloat16 else shown
    # With a coordinate, a dimension of the root can be selected in the whole tree.
    frames = {"input_frame": range(size[0])} if len(size) == 3 else {}
    dims = "image", *frames, "channel", "input_y", "input_x"
    root = xr.Dataset({"input": (dims, shown.cpu().numpy(), _ATTRS["input"])}, frames)
    table = {
        "layers": json.dumps(complete),
        "missing": json.dumps(without_maps),
    }
    return xr.DataTree.from_dict({"/": root.assign_attrs(provenance(model) | table), **datasets})


def _checked_queries(queries: Any, size: tuple[int, ...]) -> Pixels | None:
    place = "(y, x)" if len(size) == 2 else "(frame, y, x)"
    if queries is None or (isinstance(queries, str) and queries == "class"):
        return None if queries is None else ()
    try:
        # operator.index accepts integers of any library, but no floats, which could lie between two
        # pixels.
        pixels = [
            tuple(operator.index(at) for at, _ in zip(pixel, size, strict=True))
            for pixel in queries
        ]
    except (TypeError, ValueError):
        raise ValueError(
            f"expected queries=[{place}, ...] of integers, or 'class'; got {queries!r}"
        ) from None
    outside = [
        pixel
        for pixel in pixels
        if not all(0 <= at < side for at, side in zip(pixel, size, strict=True))
    ]
    if outside or not pixels:
        got = outside[0] if outside else queries
        sides = " x ".join(map(str, size))
        raise ValueError(f"expected queries {place} inside images of {sides} pixels, got {got!r}")
    return pixels


_Batches = Sequence[LayerMaps]  # maps of a layer


def _by_grid(maps_by_layer: Sequence[_Batches], selection: MapSelection) -> dict[str, xr.Dataset]:
    """Return a dataset for each grid; layers whose queries lie on no grid get datasets
    of their own.
    """
    nodes: dict[tuple[Any, ...], list[_Batches]] = {}
    for maps_by_batch in maps_by_layer:
        maps = maps_by_batch[0]
        has_queries, off_grid = (
            name in maps.arrays for name in ("attention", "attention_by_query")
        )
        queries: Grid | int | None = maps.queries if has_queries else None
        if off_grid:
            queries = maps.arrays["attention_by_query"].shape[2]
        key = (not has_queries, maps.heads, maps.keys, queries)
        nodes.setdefault(key, []).append(maps_by_batch)
    tree: dict[str, xr.Dataset] = {}
    # Layers with maps of queries come first, so that they get the plain name.
    for (_, heads, keys, queries), layers in sorted(nodes.items(), key=lambda node: node[0][0]):
        name = "x".join(map(str, (heads, *keys)))
        # Layers whose queries and keys have different grids (MViT, PVT) get a node of their own.
        if isinstance(queries, int):
            name += f"_from_{queries}"
        elif queries not in (keys, None):
            name += "_from_" + "x".join(map(str, queries))
        tree[name if name not in tree else f"{name}_class"] = _dataset(layers, selection)
    return tree


def _dataset(maps_by_layer: Sequence[_Batches], selection: MapSelection) -> xr.Dataset:
    """Return the layers of one grid as a dataset,
    with NaN where a layer lacks a variable; their arrays are used up.
    """
    layers = [maps_by_batch[0] for maps_by_batch in maps_by_layer]
    first = layers[0]
    heads = selection.heads_of(first.heads)
    coords: dict[str, Any] = {"layer": [maps.layer for maps in layers], "head": heads}
    query_dims: dict[str, tuple[str, ...]] = {
        "class_attention": (),
        "attention_by_class": ("class",),
        "attention_by_query": ("query",),
    }
    cells = ("frame", "y", "x")[-len(first.keys) :]
    query_cells = tuple(f"query_{dim}" for dim in cells)
    query_dims["attention"] = query_cells if selection.queries is None else ("query",)
    variables: dict[str, Any] = {}
    for name, dims in query_dims.items():
        if any(name in maps.arrays for maps in layers):
            variables[name] = (
                ("image", "layer", "head", *dims, *cells),
                _moved_together(maps_by_layer, name),
                _ATTRS[name],
            )
    gates = [maps.gate for maps in layers]
    if any(gate is not None for gate in gates):
        absent = torch.full((len(heads),), torch.nan, dtype=torch.float64)
        values = torch.stack([absent if gate is None else gate for gate in gates])
        variables["gate"] = (("layer", "head"), values.numpy(), _ATTRS["gate"])
    for dim, (start, spacing), count in zip("yx", first.places, first.keys[-2:], strict=True):
        coords[f"pixel_{dim}"] = (
            dim,
            start + spacing * np.arange(count),
            _ATTRS["pixel"],
        )
    if selection.queries and first.queries is not None:
        nearest = np.array(selection.cells(first.keys))
        for name, values in zip(query_cells, nearest.T, strict=True):
            coords[name] = ("query", values)
        from_dims = ("from_frame", "from_y", "from_x")
        places = np.array(selection.queries).T
        for name, values in zip(from_dims[-len(places) :], places, strict=True):
            coords[name] = ("query", values)
    return xr.Dataset(variables, coords)


def _moved_together(maps_by_layer: Sequence[_Batches], name: str) -> np.ndarray:
    """Move a variable of all layers and batches into one array,
    (image, layer, ...), and free what has been moved.
    """
    rows = [
        [maps.arrays.pop(name, None) for maps in maps_by_batch] for maps_by_batch in maps_by_layer
    ]
    known = next(
        [values for values in row if values is not None] for row in rows if row[0] is not None
    )
    counts = [len(values) for values in known]
    shape, dtype = known[0].shape[1:], known[0].numpy().dtype
    del known
    # Memory that is not filled yet takes no place, so that there is never much more than the
    # result.
    moved = np.empty((sum(counts), len(rows), *shape), dtype)
    for layer, row in enumerate(rows):
        start = 0
        for batch, count in enumerate(counts):
            values, row[batch] = row[batch], None
            stop = start + count
            moved[start:stop, layer] = np.nan if values is None else values.numpy()
            start = stop
    return moved
