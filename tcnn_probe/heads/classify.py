"""``head_types()``: the types of a recording's heads."""

import json
import operator
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.heads.features import (
    LEAST_IMAGES,
    By,
    Features,
    Rule,
    read_features,
    read_heads,
)
from tcnn_probe.heads.former_types import (
    FORMER_DEFINITIONS,
    Thresholds,
    former_types,
    types_by_mixture,
)
from tcnn_probe.heads.types import (
    AVERAGING,
    CONCENTRATED,
    PARTS,
    PREFIX,
    gate_types,
    part_types,
)

__all__ = ["head_types"]

_DEFINITIONS: Mapping[Rule, Mapping[str, str]] = {
    "parts": {
        "averaging": f"selectivity < {AVERAGING:g} uniform_entropy (GPSA, ConViT: uniform_entropy "
        f"- {1 - AVERAGING:g} uniform_content_entropy)",
        "convolutional": "offset_information - prefix_information is the largest part, and at "
        "least half of selectivity - prefix_information",
        "positional": "position_information is the largest part, and at least half of selectivity "
        "- prefix_information, or prefix_information is at least half of selectivity",
        "content": "key_content_information + query_key_content_information is the largest part, "
        "at least half of selectivity - prefix_information, and "
        "query_key_content_information the larger of the two",
        "salient": "the same, and key_content_information the larger of the two",
    },
    "gate": {
        "convolutional": "gate >= {gate[1]:.4g}, positional_entropy <= {concentrated:.4g} "
        "uniform_entropy, attention_distance <= uniform_distance",
        "content": "gate <= {gate[0]:.4g}",
    },
    "former": FORMER_DEFINITIONS,
}
_OTHER_LABELS = {
    "mixed": "all others",
    "": "no such head, or something that is needed is NaN (see unlabelled)",
}


def head_types(
    ds: xr.Dataset,
    method: Literal["thresholds", "mixture"] | None = None,
    *,
    by: By = "content",
    gate: Sequence[float] = (1 / 3, 2 / 3),
    least_images: int = LEAST_IMAGES,
    information: Sequence[float] | None = None,
    entropy: Sequence[float] | None = None,
    distance: float | None = None,
    equivariance: float | None = None,
    seed: int | None = None,
) -> xr.DataArray:
    """Classify the heads of a recording at each mark by what their attention depends on most.

    ::

        types = tcnn_probe.head_types(recorder.dataset)
        print((types == "content").sum("head").to_pandas())  # by epoch and layer
        # Of the heads whose type is certain:
        print((types == "content").where(~types.uncertain).mean())
        ds = recorder.dataset.assign(head_type=types)

    A head is "averaging" if its attention is nearly even. Else the largest part of its selectivity
    decides, if it is at least half: the head is "convolutional" (the offset from query to key),
    "positional" (the query's position), "content" (which keys match a query) or "salient" (which
    keys stand out in the image). All others are "mixed". What class and register tokens receive
    from all queries alike is set aside before; a head is "positional" if it is half of the
    selectivity. A type is ``uncertain`` if the halves of the images, of which the recording keeps
    the differences, disagree on it. With ``by="gate"`` heads of GPSA and ConViT are
    "convolutional", "content" or "mixed" by their gate, as in the papers; other heads have no type.
    The attribute ``definitions`` gives the rule.

    Types of each mark depend on this mark only, so that later marks do not change labels. Layers
    whose only queries are class tokens are typed by ``class_selectivity`` and
    ``class_content_information``.

    Args:
        ds: A recording: ``recorder.dataset``, ``xarray.open_zarr(path)``, or a selection of one.
        by: "content" for types by measured attention, "gate" for types by the gate.
        gate: Gates up to which a head is "content" by its gate, and from which on it can be
            "convolutional".
        least_images: Number of images that types by attention need at each mark; "averaging" needs
            none. At least 2.
        method, information, entropy, distance, equivariance, seed: Deprecated: options of the
            former rule, which gave types by thresholds or a mixture of Gaussians. Recordings
            without the parts are still typed by it.

    Returns:
        Types as strings, with the dims of ``ds.selectivity``, dtype object, named "head_type", with
        the boolean coordinate "uncertain". The type is "" where there is no head, or where a
        required number is not finite: ``attrs["unlabelled"]`` has the layers and the reasons, in
        JSON. ``attrs["images"]`` says from how many images types are, and ``attrs["bound"]`` in
        which layers content is limited by this number.

    Raises:
        ValueError: A required variable is missing, or an option has an unknown value.
        TypeError: ``ds`` is not a dataset, or an argument has another type.
    """
    if by not in ("content", "gate"):
        raise ValueError(f"expected by='content' or 'gate', got {by!r}")
    if method not in (None, "thresholds", "mixture"):
        raise ValueError(f"expected method='thresholds' or 'mixture', got {method!r}")
    low, high = map(float, gate)
    if not 0 <= low < high <= 1:
        raise ValueError(f"expected two ascending gates between 0 and 1, got {gate!r}")
    least_images = operator.index(least_images)
    if least_images < 2:
        raise ValueError(
            f"expected least_images of at least 2, got {least_images}: one image does not show "
            "differences of images"
        )
    if not isinstance(ds, xr.Dataset):
        hint = "; of a tree, tree['heads'].dataset" * isinstance(ds, xr.DataTree)
        raise TypeError(
            f"expected an xarray.Dataset that tcnn_probe.record has made{hint}, got "
            f"{type(ds).__name__}"
        )
    thresholds: dict[str, Any] = {
        "information": information,
        "entropy": entropy,
        "distance": distance,
        "equivariance": equivariance,
    }
    thresholds = {name: value for name, value in thresholds.items() if value is not None}
    rule = _choose_rule(ds, by, {"method": method, "seed": seed} | thresholds)
    heads = read_heads(ds, rule)
    if rule == "parts":
        heads = _with_class_queries(heads)
    features = read_features(heads, rule, least_images)
    numbers: Any = np.moveaxis(features.points, -1, 0)
    attrs = {"by": by} | _about_images(heads, rule)
    values: dict[str, Any] = {"gate": (low, high), "concentrated": CONCENTRATED}
    halves = None
    if rule == "former":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            limits = Thresholds(**thresholds)
        values |= asdict(limits)
        if method == "mixture":
            labels = types_by_mixture(features.points, limits, seed or 0)
        else:
            labels = former_types(*[*numbers, limits])
    elif rule == "gate":
        labels = gate_types(*[*numbers, (low, high)])
    else:
        prefix = _on_prefix(heads, PREFIX)
        labels = part_types(*[*numbers, _least_selectivity(heads), prefix])
        halves = _types_of_halves(heads, numbers)
    # Definitions contain the numbers, so that saved labels can be understood by themselves.
    definitions = {name: text.format(**values) for name, text in _DEFINITIONS[rule].items()}
    types = features.exists.copy(data=labels).rename("head_type")
    types.attrs = {
        "description": "Type of a head by its attention; see the attribute definitions.",
        "definitions": json.dumps(definitions | _OTHER_LABELS),
        "unlabelled": json.dumps(features.reasons(labels == "")),
    } | attrs
    if halves is not None:
        # Unknown halves do not confirm a type.
        uncertain = np.any([half != labels for half in halves], 0)
        types.coords["uncertain"] = types.dims, uncertain & (labels != ""), _UNCERTAIN
    _warn_of_few_images(heads, features, labels, rule, least_images)
    # If a single layer or head was selected, the dataset lacks this dimension, and so do the types.
    dims = ds["entropy" if rule == "former" else features.names[0]].dims
    return types.isel({dim: 0 for dim in ("layer", "head") if dim not in dims}).transpose(*dims)


_UNCERTAIN = {
    "long_name": "type is uncertain",
    "description": "Whether the types of the two halves of the images, of every second image, "
    "differ from the type.",
}


_WARNED: set[tuple[str, int]] = set()
"""Lines that have called :func:`head_types` with a recording of an earlier version."""


def _choose_rule(ds: xr.Dataset, by: By, former_options: Mapping[str, Any]) -> Rule:
    """Return the rule by which heads are typed, with a warning if it is the former one."""
    used = [name for name, value in former_options.items() if value is not None]
    if used:
        warnings.warn(
            f"{', '.join(f'{name}=' for name in used)} of head_types() will be removed in the next "
            "version: without them, types follow from the parts of attention that are recorded "
            "(docs/heads.md)",
            DeprecationWarning,
            stacklevel=3,
        )
    if by == "gate":
        return "gate"
    has_parts = {*PARTS, "selectivity"} <= {*ds.data_vars}
    # A recording that cannot be typed by the former rule either lacks more, which is an error.
    caller = sys._getframe(2)
    site = caller.f_code.co_filename, caller.f_lineno
    if not has_parts and not used and "entropy" in ds and site not in _WARNED:
        # Python forgets which lines it has warned as soon as any library changes the filters.
        _WARNED.add(site)
        warnings.warn(
            "this recording is of an earlier version and has no parts of attention, so its heads "
            "are typed by the former rule, which will be removed in the next version: record it "
            "anew",
            FutureWarning,
            stacklevel=3,
        )
    return "parts" if has_parts and not used else "former"


def _with_class_queries(ds: xr.Dataset) -> xr.Dataset:
    """Fill in selectivity and content where class tokens are the only queries;
    these share what stands out.
    """
    if "class_selectivity" not in ds or "class_content_information" not in ds:
        return ds
    alone = ds.selectivity.isnull() & ds.key_content_information.isnull()
    content = ds.class_content_information
    filled = {
        "selectivity": ds.class_selectivity,
        "key_content_information": content,
        "query_key_content_information": content * 0,
    }
    return ds.assign({name: ds[name].where(~alone, filled[name]) for name in filled})


def _least_selectivity(ds: xr.Dataset) -> np.ndarray:
    """Return the selectivity below which a head averages;
    a mean over the real cells of GPSA leaves out the padding.
    """
    like, even = ds.selectivity, ds.uniform_entropy
    real = ds.get("uniform_content_entropy", even).fillna(even)
    limit = even - (1 - AVERAGING) * real
    return limit.broadcast_like(like).transpose(*like.dims).values


def _on_prefix(ds: xr.Dataset, name: str) -> Any:
    """Return numbers of class and register tokens;
    0 for recordings that lack them, of an earlier version.
    """
    if name not in ds:
        return 0.0
    return np.nan_to_num(ds[name].transpose(*ds.selectivity.dims).values)


def _types_of_halves(ds: xr.Dataset, numbers: Any) -> list[np.ndarray] | None:
    """Return the types of the two halves of the images;
    None if their differences were not recorded.
    """
    names = [f"{part}_halves" for part in PARTS]
    if not {*names} <= {*ds.data_vars}:
        return None
    dims = ds.selectivity.dims
    differences = np.stack([ds[name].transpose(*dims).values for name in names])
    # Without a grid, the differences of the parts that are known stand for that of selectivity.
    known = np.isfinite(differences)
    total = np.where(known.any(0), np.where(known, differences, 0).sum(0), np.nan)
    halves: Any = np.concatenate([differences, total[None]]) / 2
    prefix, of_halves = (_on_prefix(ds, name) for name in (PREFIX, f"{PREFIX}_halves"))
    least = _least_selectivity(ds)
    return [
        part_types(*[*(numbers + sign * halves), least, prefix + sign * of_halves / 2])
        for sign in (1, -1)
    ]


def _about_images(ds: xr.Dataset, rule: Rule) -> dict[str, str]:
    """Say from how many images types are, and in
    which layers their number limits content information.
    """
    if rule != "parts" or not np.isfinite(ds.images).any():
        return {}
    smallest, largest = int(ds.images.min()), int(ds.images.max())
    about = {"images": f"{smallest} to {largest}" if smallest < largest else f"{largest}"}
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = ds.images / (ds.images - 1) * np.log(ds.images)
    content = ds.key_content_information + ds.query_key_content_information
    # In simulations (docs/heads.md), an estimate of half of the bound is a sixth too low.
    binds = (content >= bound / 2) & (bound < ds.uniform_entropy)
    layers = binds.any([dim for dim in binds.dims if dim != "layer"])
    if layers.any():
        about["bound"] = json.dumps(
            {
                str(layer): "content of some heads is at least half of n / (n - 1) log n = "
                f"{float(bound.sel(layer=layer).min()):.3g} nat, the largest from n "
                "images, and so too low"
                for layer in ds.layer.values[layers]
            }
        )
    return about


def _warn_of_few_images(
    ds: xr.Dataset,
    features: Features,
    labels: np.ndarray,
    rule: Rule,
    least_images: int,
) -> None:
    """Warn if heads have no type because of too few images."""
    if rule == "gate":
        return
    few = (ds.images < least_images).broadcast_like(features.exists)
    few = few.transpose(*features.exists.dims) & features.exists
    if (few.values & (labels == "")).any():
        warnings.warn(
            f"types need at least {least_images} images at each mark, and some have "
            f"{int(ds.images.min())}: heads have no type there unless they average (least_images= "
            "asks for fewer)",
            RuntimeWarning,
            stacklevel=3,
        )
