"""Attribute ``feature_info`` after a conversion: timm's is updated, and any other is left alone."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tcnn_model import GPSA, reparameterize
from tests.tcnn_model.families import NARROW
from tests.tcnn_model.numerics import on_meta


def _network(info: Any) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU(), nn.Conv2d(5, 7, 3, 2, 1))
    model.feature_info = info
    return model


@pytest.mark.parametrize(
    "info",
    # These are nearly timm's: a list of numbers, entries without "reduction", other types, and a
    # name that is not a string.
    [[64], [{"module": "2"}], {"a": 1}, "none", [{"module": 2, "reduction": 4}]],
    ids=str,
)
def test_other_attributes_of_that_name_are_left_alone(info: Any) -> None:
    model = _network(info)
    result = reparameterize(model)
    assert isinstance(result.get_submodule("2"), GPSA)
    assert result.feature_info == model.feature_info == info


class _OfTheClass(nn.Sequential):
    feature_info = [{"module": "0", "reduction": 2}, {"module": "02", "reduction": 4}]  # noqa: RUF012


class _Property(nn.Sequential):
    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [{"module": "02", "reduction": 4}]


@pytest.mark.parametrize("inplace", [False, True])
def test_feature_info_of_the_class_is_left_alone(inplace: bool) -> None:
    """Only the entry of the stage itself changes, not that of a module with a similar name."""
    before = copy.deepcopy(_OfTheClass.feature_info)
    for kind in (_OfTheClass, _Property):
        model = kind(
            OrderedDict(
                {
                    # "02" begins with "0", but "0" is not its parent.
                    "0": nn.Conv2d(3, 5, 1, 2),
                    "02": nn.Sequential(nn.Conv2d(5, 7, 3, 2, 1)),
                }
            )
        )
        result: Any = reparameterize(model, layers="02", inplace=inplace)
        assert isinstance(result.get_submodule("02.0"), GPSA)
        assert _OfTheClass.feature_info == before
        if kind is _OfTheClass:
            assert [entry["reduction"] for entry in result.feature_info] == [2, 2]
            assert inplace or model.feature_info == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convnext_atto", {}),
        ("convnext_atto", {"feature_cls": "getter"}),
        ("convnext_atto", {"feature_cls": "hook"}),
        ("edgenext_xx_small", {"depths": (1, 1, 1, 2)}),
        # Each of timm's ways to extract features has its own names of modules.
        ("resnet18", {"feature_cls": "fx"}),
    ],
)
@torch.no_grad()
def test_feature_extractors_of_timm(name: str, options: dict[str, Any]) -> None:
    model: Any = on_meta(name, features_only=True, **NARROW.get(name, {}), **options).eval()
    tcnn: Any = reparameterize(model)
    x = torch.zeros(1, 3, 96, 128, device="meta")
    assert tcnn.feature_info.reduction() == [96 // feature.shape[2] for feature in tcnn(x)]
    assert tcnn.feature_info.reduction()[-1] == 16
    assert model.feature_info.reduction() == [96 // feature.shape[2] for feature in model(x)]
    # copy.deepcopy would leave a GraphModule in training mode.
    assert not any(module.training for module in tcnn.modules())
