"""Recordings of different seeds as one run: means,
ranges and types, computed one number at a time.
"""

import html
import json
import math
from dataclasses import replace

import numpy as np
import xarray as xr

import tcnn_probe
from tcnn_probe.reporting.recordings import TYPE, read_run
from tcnn_probe.reporting.seeds import pool_seeds
from tests.tcnn_probe.reporting.made import held, recording

# The epochs include some of all seeds, of two seeds and of one seed.
EPOCHS = ([0, 2, 3], [0, 2], [0, 3, 5])
LAYERS = ({"a": 3, "b": 5}, {"a": 3, "b": 5}, {"a": 3, "c": 2})


def seeds() -> list[xr.DataTree]:
    """Return three recordings: none has all epochs,
    the last has another layer, and only the second has maps.
    """
    return [
        recording(layers, epochs, seed=seed, grid=(3, 5) if seed == 1 else None)
        for seed, (layers, epochs) in enumerate(zip(LAYERS, EPOCHS, strict=True))
    ]


def test_lines_are_means_and_bands_are_ranges() -> None:
    trees = seeds()
    facts, numbers, _ = held(tcnn_probe.report({"arm": trees}).html)
    assert facts["marks"] == [0, 2, 3, 5]
    layers = [layer["name"] for layer in facts["layers"]]
    assert layers == ["a", "b", "c"]
    compared = 0
    for variable in facts["variables"]:
        dims = {"head": ("epoch", "layer", "head"), "layer": ("epoch", "layer")}
        dims = dims.get(variable["of"], ("epoch",))
        labels = {"epoch": facts["marks"], "layer": layers, "head": facts["heads"]}
        shape = [len(labels[dim]) for dim in dims]
        blocks = [
            numbers[variable[kind][0] :][: math.prod(shape)].reshape(shape)
            for kind in ("starts", "lows", "highs")
        ]
        for place in np.ndindex(*shape):
            at = {dim: labels[dim][i] for dim, i in zip(dims, place, strict=True)}
            values = []
            for tree in trees:
                group = tree if variable["of"] == "model" else tree["heads"]
                array = group[variable["name"]]
                if all(label in array[dim] for dim, label in at.items()):
                    value = array.sel(at).item()
                    values += [] if math.isnan(value) else [value]
            mean, low, high = (block[place] for block in blocks)
            if not values:
                assert np.isnan([mean, low, high]).all()
                continue
            assert low == np.float32(min(values))
            assert high == np.float32(max(values))
            # A mean of positive numbers, which is rounded to float32.
            bound = np.finfo("f4").eps * sum(values) / len(values)
            assert abs(mean - math.fsum(values) / len(values)) <= bound
            compared += len(values) > 1
    # Numbers of a single seed are their own mean, so comparing only those would prove nothing.
    assert compared > 20


def test_maps_are_those_of_the_first_seed_that_has_any() -> None:
    trees = seeds()
    page = tcnn_probe.report({"arm": trees})
    facts, _, blocks = held(page.html)
    assert [tile["layer"] for tile in facts["tiles"]] == ["a", "b"]
    # Four bytes for the largest value at each of 4 epochs, 2 images and 5 heads come first.
    cells = np.frombuffer(blocks[1], np.uint8, offset=4 * 4 * 2 * 5)
    missing = cells.reshape(4, 2, 5, 3, 5) == 255
    assert missing[[2, 3]].all()  # this seed lacks these epochs
    assert not missing[[0, 1]].any()
    words = html.unescape(page.html)
    assert "maps: those of Net (B) alone are on this page" in words
    assert "Net (B): others have epochs that this one has not: 3, 5" in words
    assert "Net (C): others have layers that this one has not: b" in words


def test_type_of_a_head_is_that_of_most_seeds() -> None:
    # The cases are a majority, another majority, no label, and a tie, for which the first type is
    # taken.
    codes = [[0, 2, np.nan, 3], [1, 2, np.nan, 1], [1, 0, np.nan, np.nan]]
    attrs = {"unlabelled": json.dumps({"a": "few images"}), "definitions": "{}"}
    runs = []
    for seed, of_heads in enumerate(codes):
        run = read_run(recording({"a": 4}, [7], seed=seed))
        types = xr.full_like(run.numbers.entropy, np.nan)
        types[0, 0] = of_heads
        numbers = run.numbers.assign({TYPE: types.assign_attrs(attrs)})
        runs.append(replace(run, name=f"seed {seed}", numbers=numbers))
    pooled = pool_seeds("arm", runs)
    np.testing.assert_array_equal(pooled.numbers[TYPE].values, [[[1, 2, np.nan, 1]]])
    assert pooled.smallest is not None
    assert TYPE not in pooled.smallest
    assert json.loads(pooled.numbers[TYPE].attrs["unlabelled"]) == {"a": "few images"}


def test_differences_between_seeds_are_listed() -> None:
    trees = seeds()
    for seed, tree in enumerate(trees):
        tree.attrs |= {"seed": seed, "missing": json.dumps({"gate": {"b": f"{seed}"}})}
    page = html.unescape(tcnn_probe.report({"arm": trees}).html)
    assert '<th>seed</th><td class="name">0, 1, 2</td>' in page
    assert "gate of b: 0" in page
    assert page.count("stem is not supported") == 1
