"""What a recording of a finished network says about its heads,
in sentences: which are local, which find objects.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from tcnn_probe.heads import TYPES
from tcnn_probe.reporting.recordings import TYPE, Run

__all__ = ["Answer", "answers", "type_rows"]

_MEANINGS = {
    "convolutional": "looks at the same offset from every patch, as a convolution does",
    "positional": "looks at the same places in every picture, or at the class token",
    "content": "looks at patches that match the one that asks, other ones in each picture",
    "salient": "looks at patches that stand out in the picture, the same for all that ask",
    "averaging": "looks at all patches nearly alike",
    "mixed": "does several of these, none of them mainly",
}
_NEAR = 2.0
"""Mean distance in patches up to which a convolutional head is local:
that of a 5 x 5 kernel's border.
"""
_LIFT = 1.5
"""Attention on objects, as a multiple of their area,
from which on a head singles them out. Ours.
"""
_CHEAP = 0.01
"""First-order cost of removing a head, as a share of the median head's,
below which it does nothing. Ours.
"""
_SILENT = ("silent head", "no-op sink")


@dataclass(frozen=True)
class Answer:
    """An answer to a question about the heads of a network.

    Args:
        question: The question.
        text: The answer, without the names of heads.
        heads: Layer and index of the heads that the answer is about, the clearest first, each with
            its numbers.
    """

    question: str
    text: str
    heads: Sequence[tuple[str, int, str]] = ()


def type_rows(run: Run) -> list[dict[str, Any]]:
    """Count the heads of each type, and say what the type means."""
    counts = Counter(_types(run).values.ravel().tolist())
    return [
        {"type": name, "code": code, "count": counts[name], "meaning": _MEANINGS[name]}
        for code, name in enumerate(TYPES)
        if counts[name]
    ]


def answers(run: Run) -> list[Answer]:
    """Answer questions about the heads of a finished network,
    from the last mark of its recording.
    """
    if TYPE not in run.numbers:
        return []
    ds, types = run.numbers.isel({run.along: -1}).load(), _types(run)
    return [
        *_overview(run, ds, types),
        _objects(run, ds, types),
        _local(ds, types),
        _nothing(run, ds),
    ]


def _types(run: Run) -> xr.DataArray:
    """Return the types at the last mark as names, "" where a head has none."""
    codes = run.numbers[TYPE].isel({run.along: -1})
    names = np.array([*TYPES, ""], dtype=object)
    return codes.copy(data=names[codes.fillna(len(TYPES)).astype(int).values])


def _has(ds: xr.Dataset, name: str) -> bool:
    """Return whether a variable has a value."""
    return name in ds and bool(ds[name].notnull().any())


def _overview(run: Run, ds: xr.Dataset, types: xr.DataArray) -> Iterator[Answer]:
    kinds = [name for name in types.values.ravel().tolist() if name]
    if not kinds:
        return
    listed = ", ".join(f"{count} {name}" for name, count in Counter(kinds).most_common())
    text = f"Of {len(kinds)} heads, {listed.replace(' ', ' are ', 1)}."
    untyped = sum(run.heads.values()) - len(kinds)
    if untyped:
        has = "has" if untyped == 1 else "have"
        text += f" {untyped} more {has} no type, for the reasons under What is missing."
    if "uncertain_type" in ds:
        uncertain = int((ds.uncertain_type > 0).sum())
        verb, pronoun = ("is", "it") if uncertain == 1 else ("are", "them")
        text += (
            f" {uncertain} of these types {verb} uncertain: the halves of the photographs disagree "
            f"on {pronoun}."
            if uncertain
            else " The halves of the photographs agree on these types."
        )
    yield Answer("What are the heads?", text)
    layers = [
        layer for layer in types.layer.values.tolist() if (types.sel(layer=layer) != "").any()
    ]
    third = len(layers) // 3
    if third:
        early = _counts(types.sel(layer=layers[:third]))
        late = _counts(types.sel(layer=layers[-third:]))
        several = f"{third} layers" if third > 1 else "layer"
        main = dict.fromkeys(counts[0][0] for counts in (early, late))
        meanings = "; ".join(f"each {name} one {_MEANINGS[name]}" for name in main)
        yield Answer(
            "What do early and late heads do?",
            f"In the first {several} {_listed(early)}, and in the last {several} {_listed(late)} "
            f"({meanings}).",
        )


def _counts(types: xr.DataArray) -> list[tuple[str, int]]:
    """Count the heads of each type, the most frequent first."""
    return Counter(name for name in types.values.ravel().tolist() if name).most_common()


def _listed(counts: list[tuple[str, int]]) -> str:
    (name, count), *others = counts
    total = sum(number for _, number in counts)
    rest = "".join(f", {number} {other}" for other, number in others)
    return f"{count} of {total} heads are {name}{rest}"


def _objects(run: Run, ds: xr.Dataset, types: xr.DataArray) -> Answer:
    """Say which heads single out objects: by masks, or else by their key content."""
    question = "Which heads single out objects?"
    if _has(ds, "object_attention"):
        shares = {"patches": ds.object_attention}
        if "class_object_attention" in ds:
            shares["the class token"] = ds.class_object_attention
        by_query = xr.concat(
            list(shares.values()), xr.Variable("query", list(shares)), join="outer"
        )
        lift = (by_query / ds.object_area).transpose("query", "layer", "head")

        def numbers(at: Mapping[str, Any]) -> str:
            known = {query: float(share.sel(at)) for query, share in shares.items()}
            words = [
                f"{share:.2f} from {query}" for query, share in known.items() if share == share
            ]
            kind = str(types.sel(at).item()) or "no type"
            return f"{', '.join(words)}; {kind}"

        heads = _ranked(lift.max("query").where(lambda ratio: ratio >= _LIFT), numbers)
        subject = _subject(heads, "puts", "put") if heads else "None puts"
        text = (
            f"{subject} at least {_LIFT:g} times as much attention on {run.attrs['objects']} as "
            f"there would be by chance ({float(ds.object_area.mean()):.2f})"
        )
        if heads and len(shares) > 1:
            counts = (lift >= _LIFT).sum(["layer", "head"]).to_series()
            listed = ", ".join(f"{count} from {query}" for query, count in counts.items())
            text += f": {listed}"
        if heads or run.attrs["objects"].startswith("the masks"):
            return Answer(question, text, heads)
    content = ds.key_content_information
    heads = _ranked(
        content.where(types == "salient"),
        lambda at: (
            f"key content {float(content.sel(at)):.2f} of {float(ds.selectivity.sel(at)):.2f} nat"
        ),
    )
    text = "No head attends mainly to patches that stand out"
    if heads:
        text = (
            f"{_subject(heads, 'attends', 'attend')} mainly to patches that stand out in a "
            "photograph (key content)"
        )
    return Answer(
        question,
        f"{text}; whether these are objects, masks would show (--masks FOLDER)",
        heads,
    )


def _local(ds: xr.Dataset, types: xr.DataArray) -> Answer:
    question = "Which heads are local?"
    if not _has(ds, "attention_distance"):
        return Answer(question, "Unknown: the grid of patches is not known")
    distance = ds.attention_distance
    near = distance.where((types == "convolutional") & (distance <= _NEAR))
    heads = _ranked(-near, lambda at: f"{float(distance.sel(at)):.1f} patches")
    if not heads:
        return Answer(
            question,
            f"None is convolutional with a mean distance of at most {_NEAR:g} patches",
        )
    return Answer(
        question,
        f"{_subject(heads, 'is', 'are')} convolutional with a mean distance of at most {_NEAR:g} "
        "patches",
        heads,
    )


def _nothing(run: Run, ds: xr.Dataset) -> Answer:
    """Say which heads do nothing, by the findings of health and their first-order costs."""
    question = "Which heads do nothing?"
    findings = [finding for finding in run.findings or () if finding.sign in _SILENT]
    heads = [(finding.layer, head, finding.sign) for finding in findings for head in finding.heads]
    unseen = [sign for sign in _SILENT if run.findings is None or sign in run.findings.unseen]
    ways = "silent, or with a sink whose value is small"
    if _has(ds, "cost_zero"):
        cost = abs(ds.cost_zero)
        median = float(cost.median())
        ways += f", or with a cost below {_CHEAP:g} of the median head's if removed, to first order"
        known = {head[:2] for head in heads}
        cheap = _ranked(
            -cost.where(cost < _CHEAP * median),
            lambda at: f"cost {float(cost.sel(at)):.2g}, median {median:.2g}",
        )
        heads += [head for head in cheap if head[:2] not in known]
    if not heads:
        rest = f" ({', '.join(unseen)} could not be looked for)" if unseen else ""
        return Answer(question, f"None: no heads are {ways}{rest}")
    return Answer(question, f"{_subject(heads, 'is', 'are')} {ways}", heads)


def _ranked(values: xr.DataArray, describe: Any) -> list[tuple[str, int, str]]:
    """Return the heads with a value, the largest first, each with a description of its numbers."""
    stacked = values.stack(place=("layer", "head")).dropna("place").sortby("place")
    order = np.argsort(-stacked.values, kind="stable")
    places = [stacked.place.values[number] for number in order]
    return [
        (str(layer), int(head), describe({"layer": layer, "head": head})) for layer, head in places
    ]


def _subject(heads: Sequence[Any], one: str, several: str) -> str:
    """Return the number of heads with the verb that follows, in the singular or the plural."""
    return f"{len(heads)} {f'head {one}' if len(heads) == 1 else f'heads {several}'}"
