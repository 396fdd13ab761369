"""The study of entropies and distances by type of head: its numbers, and a check that can fail."""

import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import head_entropy as study
from tests.studies.conftest import Refusal, SmallRun


@pytest.fixture
def found(small_run: SmallRun) -> xr.Dataset:
    path: Path = small_run("head_entropy").out / "head_entropy.zarr"
    return xr.open_zarr(path, consolidated=False).load()


def test_the_whole_is_the_sum_of_its_parts(found: xr.Dataset) -> None:
    assert dict(found.sizes) == {"epoch": 5, "layer": 4, "head": 9}
    parts = found.gate * found.positional_distance + (1 - found.gate) * found.content_distance
    np.testing.assert_allclose(parts, found.attention_distance, rtol=1e-4)


def test_distance_of_the_positional_part_by_hand(found: xr.Dataset) -> None:
    distances = []
    for y in range(8):
        for x in range(8):  # head 0, alpha = 1, looks at (-1, -1); keys are 8 x 8 pixels and a ring of padding
            keys = [(j - y, i - x) for j in range(-1, 9) for i in range(-1, 9)]
            weights = [math.exp(-((dy + 1) ** 2) - (dx + 1) ** 2) for dy, dx in keys]
            distances.append(sum(w * math.hypot(*key) for w, key in zip(weights, keys, strict=True)) / sum(weights))
    start = found.positional_distance.isel(epoch=0, head=0)
    np.testing.assert_allclose(start, sum(distances) / 64, rtol=1e-5)


def test_types_of_every_head(found: xr.Dataset) -> None:
    assert (found.head_type.isel(epoch=0) == "convolutional").all()
    assert set(found.head_type.values.ravel()) <= set(study.TYPES)
    np.testing.assert_array_equal(found.head_type == "content", found.gate <= 1 / 3)


def test_a_line_for_each_part_and_type_in_each_layer(found: xr.Dataset) -> None:
    figure = study.draw(found)
    panels = np.array(figure.axes).reshape(3, 4)
    for column in range(4):
        one = found.isel(layer=column)
        for line, name in zip(panels[0, column].lines, study.TYPES, strict=True):
            assert line.get_ydata().tolist() == [(one.head_type[n] == name).values.sum() for n in range(5)]
        assert len(panels[1, column].lines) == len(panels[2, column].lines) == 2 * 3 + 1
        mean = [one.content_distance[n].values[one.head_type[n].values == "content"] for n in range(5)]
        expected = [values.mean() if len(values) else np.nan for values in mean]
        np.testing.assert_allclose(panels[2, column].lines[5].get_ydata(), expected)


def test_the_check_can_fail(found: xr.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    types = found.head_type.copy()
    types[-1, 0], types[-1, 1:] = "convolutional", "content"
    found = found.assign(head_type=types, entropy=found.entropy.copy())
    found.entropy[-1, 0] = 0.1
    found["attention_distance"] = found.entropy
    assert study.check(found) == 0
    assert study.check(found.assign(entropy=-found.entropy)) == 1
    assert "entropy of content heads NOT larger" in capsys.readouterr().out
    assert study.check(found.assign(head_type=types.where(types != "content", "mixed"))) == 1
    assert "9 are convolutional and 0 content: NOT both kinds" in capsys.readouterr().out
    types[0, 0, 3] = "mixed"
    assert study.check(found) == 1
    assert "35 of 36 heads start convolutional, NOT all" in capsys.readouterr().out


def test_wrong_options_say_so_and_write_nothing(refusal: Refusal) -> None:
    assert "need --model, the name of a timm CNN" in refusal(study, ["--data", "."])
