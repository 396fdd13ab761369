"""timm's ``feature_info`` after a conversion: true where it is timm's, and left alone where it is something else."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tcnn_model import GPSA, reparameterize
from tests.tcnn_model.families import build
from tests.tcnn_model.helpers import on_meta


def _network(info: Any) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU(), nn.Conv2d(5, 7, 3, 2, 1))
    model.feature_info = info
    return model


@pytest.mark.parametrize("info", [[64], [{"module": "2"}], {"a": 1}, "none", [{"module": 2, "reduction": 4}]], ids=str)
def test_what_is_not_timms_is_left_alone(info: Any) -> None:
    model = _network(info)
    result = reparameterize(model)
    assert isinstance(result.get_submodule("2"), GPSA)
    assert result.feature_info == model.feature_info == info


class _OfTheClass(nn.Sequential):
    feature_info = [{"module": "0", "reduction": 2}, {"module": "1", "reduction": 4}]  # noqa: RUF012


class _Property(nn.Sequential):
    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [{"module": "1", "reduction": 4}]


@pytest.mark.parametrize("inplace", [False, True])
def test_class_is_left_alone(inplace: bool) -> None:
    before = copy.deepcopy(_OfTheClass.feature_info)
    model = _OfTheClass(nn.Conv2d(3, 5, 1, 2), nn.Sequential(nn.Conv2d(5, 7, 3, 2, 1)))
    result: Any = reparameterize(model, layers="1", inplace=inplace)
    assert result.feature_info[1]["reduction"] == 2
    assert _OfTheClass.feature_info == before
    if not inplace:
        assert model.feature_info == before


@pytest.mark.parametrize("inplace", [False, True])
def test_property_is_left_alone(inplace: bool) -> None:
    model = _Property(nn.Conv2d(3, 5, 1, 2), nn.Sequential(nn.Conv2d(5, 7, 3, 2, 1)))
    assert isinstance(reparameterize(model, layers="1", inplace=inplace).get_submodule("1.0"), GPSA)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convnext_atto", {}),
        ("convnext_atto", {"feature_cls": "getter"}),
        ("convnext_atto", {"feature_cls": "hook"}),
        ("edgenext_xx_small", {}),
        ("efficientnet_b0", {}),
        ("resnet18", {"feature_cls": "fx"}),
    ],
)
@torch.no_grad()
def test_feature_extractors_of_timm(name: str, options: dict[str, Any]) -> None:
    model: Any = on_meta(name, features_only=True, **options).eval()
    tcnn: Any = reparameterize(model)
    x = torch.zeros(1, 3, 96, 128, device="meta")
    reductions = [96 // feature.shape[2] for feature in tcnn(x)]
    assert tcnn.feature_info.reduction() == reductions
    assert reductions[-1] == 16
    assert model.feature_info.reduction() == [96 // feature.shape[2] for feature in model(x)]


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_mode_of_an_extractor_made_by_fx() -> None:
    """A copy of a GraphModule is in training mode, whatever the original's."""
    model = timm.create_model("resnet18", features_only=True, feature_cls="fx", channels=(8, 8, 16, 16)).eval()
    assert not any(_modes(reparameterize(model)).values())
    model.train()
    assert all(_modes(reparameterize(model)).values())


def test_mode_of_a_part_of_a_model() -> None:
    cnn = build("resnet18")
    cnn.get_submodule("layer2").train()
    modes = _modes(cnn)
    assert {name: mode for name, mode in _modes(reparameterize(cnn)).items() if name in modes} == modes


class _Renamed(nn.Module):
    """Its stages' names end as another's: only the stage itself counts."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.s2 = nn.Conv2d(3, 5, 3, 2, 1), nn.Conv2d(5, 5, 3, 2, 1)
        self.feature_info = [{"module": "s", "reduction": 2}, {"module": "s2", "reduction": 4}]

    def forward(self, x: Tensor) -> Tensor:
        return self.s2(self.s(x))


def test_stages_with_similar_names() -> None:
    tcnn: Any = reparameterize(_Renamed(), layers="s2")
    assert [entry["reduction"] for entry in tcnn.feature_info] == [2, 2]
