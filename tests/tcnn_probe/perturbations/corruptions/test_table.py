import dataclasses
from typing import Any

import pytest

import tcnn_probe
from tcnn_probe.perturbations import GROUPS, Corruption

PUBLISHED = [
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
]


def test_the_fifteen_in_order() -> None:
    assert list(tcnn_probe.CORRUPTIONS) == PUBLISHED
    groups = [each.group for each in tcnn_probe.CORRUPTIONS.values()]
    assert groups == ["noise"] * 3 + ["blur"] * 4 + ["weather"] * 4 + ["digital"] * 4
    assert list(dict.fromkeys(groups)) == list(GROUPS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_five_severities(name: str) -> None:
    corruption = tcnn_probe.CORRUPTIONS[name]
    assert corruption.name == corruption.function.__name__ == name
    assert corruption.description
    assert corruption.parameters
    assert all(len(values) == 5 for values in corruption.parameters.values())
    assert corruption.at(2) == {key: values[1] for key, values in corruption.parameters.items()}


def test_nobody_changes_the_table() -> None:
    table: Any = tcnn_probe.CORRUPTIONS
    with pytest.raises(TypeError, match="does not support item assignment"):
        table["fog"] = None
    with pytest.raises(TypeError, match="does not support item assignment"):
        table["fog"].parameters["added"] = (1,) * 5
    with pytest.raises(dataclasses.FrozenInstanceError, match="group"):
        table["fog"].group = "blur"
    assert isinstance(table["fog"], Corruption)
