"""Recordings made of random numbers, and functions that decode the contents of a page."""

import base64
import gzip
import html
import json
import re
from typing import Any

import numpy as np
import xarray as xr

# If it is not escaped, this text ends a script and begins an image with code.
NAUGHTY = "</script><img src=x onerror=alert(1)>"
ABOUT = {
    "units": "nat",
    "long_name": "attention entropy",
    "description": "-sum A log A <b>",
}


def recording(
    layers: dict[str, int],
    epochs: list[int],
    *,
    seed: int = 0,
    grid: tuple[int, int] | None = (3, 5),
) -> Any:
    """Return a tree like that of ``tcnn_probe.open``,
    with random numbers by layer and head and maps of two images.
    """
    rng = np.random.default_rng(seed)
    heads = max(layers.values())
    coords = {"epoch": epochs, "layer": list(layers), "head": range(heads)}
    exists = np.arange(heads) < np.array([*layers.values()])[:, None]
    table = {
        "layers": json.dumps(
            {name: {"kind": "softmax", "heads": count} for name, count in layers.items()}
        )
    }

    def of_heads(*shape: int) -> Any:
        values = rng.random((len(epochs), len(layers), *shape, heads))
        return np.where(np.expand_dims(exists, tuple(range(1, 1 + len(shape)))), values, np.nan)

    dims = ("epoch", "layer", "head")
    numbers = xr.Dataset(
        {"entropy": (dims, of_heads(), ABOUT), "gate": (dims, of_heads())},
        coords,
        table,
    )
    numbers["uniform_entropy"] = (
        ("epoch", "layer"),
        rng.random((len(epochs), len(layers))),
    )
    attrs = {
        "along": "epoch",
        "model_class": "Net",
        "unsupported": json.dumps({"stem": "no softmax"}),
        "missing": "{}",
    }
    root = xr.Dataset({"top1": ("epoch", rng.random(len(epochs)))}, {"epoch": epochs}, attrs)
    groups = {"/": root, "/heads": numbers}
    if grid is not None:
        # The axes are (epoch, layer, image, head, y, x).
        maps = np.moveaxis(of_heads(2, *grid), -1, 3).astype(np.float16)
        groups["/maps"] = xr.Dataset(
            {"class_attention": (("epoch", "layer", "image", "head", "y", "x"), maps)},
            coords | {"image": [0, 3]},
            table,
        )
    return xr.DataTree.from_dict(groups)


def held(page: str) -> tuple[dict[str, Any], np.ndarray, list[bytes]]:
    """Decode the arguments of the page's program: its facts, its numbers and its maps."""
    scripts = re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL
    )
    document = json.loads(html.unescape(scripts[0]))
    args = dict(_program(document)["args"]["entries"])
    numbers = (
        np.frombuffer(_inflated(args["numbers"]), np.uint8)
        # Bytes are grouped by their position in the number, which compresses better.
        .reshape(4, -1)
        .T.copy()
        .view("<f4")
        .ravel()
    )
    return (
        json.loads(args["page"]),
        numbers,
        [_inflated(buffer) for buffer in args["maps"]],
    )


def _inflated(about: dict[str, str]) -> bytes:
    return gzip.decompress(base64.b64decode(about["data"]))


def _program(node: Any) -> Any:
    """Return the attributes of the one CustomJS."""
    if isinstance(node, dict):
        if node.get("name") == "CustomJS":
            return node["attributes"]
        node = list(node.values())
    programs = [_program(child) for child in node] if isinstance(node, list) else []
    return next((child for child in programs if child is not None), None)
