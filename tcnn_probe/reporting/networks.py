"""Finished networks as plain data: the answers of a page,
and the numbers of all heads, for JSON.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from tcnn_probe.heads import TYPES
from tcnn_probe.reporting.answers import answers, type_rows
from tcnn_probe.reporting.notes import types_rest_on
from tcnn_probe.reporting.recordings import TYPE, Axes, Run

__all__ = ["describe_network", "facts_of", "first_head", "image_names"]


def describe_network(axes: Axes, run: Run) -> dict[str, Any]:
    """Describe a finished network: answers to questions,
    its types of heads and what they rest on.
    """
    rows, columns = [*axes.layers], axes.heads
    return {
        "name": run.name,
        "types": type_rows(run),
        "rests_on": types_rest_on(run),
        "photographs": _photographs(run),
        "chosen": run.attrs.get("photographs_chosen", ""),
        "answers": [
            {
                "question": answer.question,
                "text": answer.text,
                "heads": [
                    {
                        "layer": layer,
                        "head": head,
                        "why": why,
                        "row": rows.index(layer),
                        "column": columns.index(head),
                    }
                    for layer, head, why in answer.heads
                ],
            }
            for answer in answers(run)
        ],
    }


def image_names(axes: Axes, runs: Sequence[Run]) -> list[str]:
    """Return the names of the images that have maps: of photographs, those of their files."""
    names = _photographs(runs[0])
    return [names[image] if image < len(names) else str(image) for image in axes.images]


def _photographs(run: Run) -> list[str]:
    """Return the names of the photographs, which are JSON; in older recordings a list."""
    names = run.attrs.get("photographs", [])
    return json.loads(names) if isinstance(names, str) else names


def first_head(networks: Sequence[dict[str, Any]]) -> list[int]:
    """Return row and column of the head with which the page opens:
    the first that an answer names.
    """
    named = [
        head for network in networks for answer in network["answers"] for head in answer["heads"]
    ]
    return [named[0]["row"], named[0]["column"]] if named else [0, 0]


def facts_of(runs: Sequence[Run], text: dict[str, Any]) -> dict[str, Any]:
    """Return what the page of finished networks says,
    with the numbers of all heads, in plain JSON.
    """
    networks = [
        {
            **network,
            "attributes": json.loads(
                json.dumps({str(k): v for k, v in run.attrs.items()}, default=str)
            ),
            "heads": _numbers_of(run, "head"),
            "layers": _numbers_of(run, "layer"),
        }
        for network, run in zip(text["networks"], runs, strict=True)
    ]
    return {
        "networks": networks,
        "signs": text["signs"],
        "checks": text["checks"],
        "missing": text["missing"],
    }


def _numbers_of(run: Run, level: str) -> list[dict[str, Any]]:
    """List the numbers of each head or layer at the last mark, without those that it lacks."""
    last = run.numbers.isel({run.along: -1}).load()
    names = [
        name
        for name, values in last.data_vars.items()
        if ("head" in values.dims) == (level == "head")
    ]
    rows = []
    for layer, count in run.heads.items():
        for head in last["head"].values[:count].tolist() if level == "head" else [None]:
            at = {"layer": layer} if head is None else {"layer": layer, "head": head}
            numbers = {str(name): last[name].sel(at).item() for name in names}
            known = {
                name: TYPES[int(value)] if name == TYPE else value
                for name, value in numbers.items()
                if math.isfinite(value)
            }
            rows.append(at | known)
    return rows
