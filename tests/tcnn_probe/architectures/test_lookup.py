"""Records of layers: each fact comes from the nearest base class that has it,
and recorded classes exist.
"""

import importlib
import types
from collections.abc import Iterator

import pytest
from timm.models.hiera import MaskUnitAttention
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from tcnn_probe.architectures import lookup
from tcnn_probe.architectures.lookup import (
    RECORDS,
    head_count,
    known,
    looks_like_attention,
)
from tcnn_probe.architectures.record import LayerRecord
from tests.extras import need


class Derived(MaskUnitAttention):
    pass


class Overriding(MultiScaleAttention):
    def forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        return super().forward(x, feat_size)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record a fact about a class of this file, which its base class has as well, and no others."""
    name = f"{Derived.__module__}.{Derived.__qualname__}"
    monkeypatch.setitem(lookup.RECORDS, name, LayerRecord(heads_axis=2))
    lookup._combined_record.cache_clear()
    yield
    lookup._combined_record.cache_clear()


@pytest.mark.usefixtures("recorded")
def test_each_fact_comes_from_the_nearest_class_that_has_it() -> None:
    layer = Derived(12, 12, 3)
    assert known(layer).heads_axis == 2
    assert (
        known(layer).not_in_raster_order
        == known(MaskUnitAttention(12, 12, 3)).not_in_raster_order
        is not None
    )


def test_facts_about_a_forward_hold_only_for_that_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Block(12, 3)
    assert known(block).branches is not None
    block.forward = types.MethodType(lambda self, x: x, block)
    assert known(block).branches is None

    layer, overriding = (cls(12, 12, (5, 5), 3) for cls in (MultiScaleAttention, Overriding))
    assert known(layer).head_parameters is not None
    assert known(overriding).head_parameters is None
    assert known(overriding).strided is known(layer).strided is not None

    monkeypatch.setattr(Overriding, "forward", MultiScaleAttention.forward)
    assert known(overriding).head_parameters is not None, "by the class's present forward"


def test_nothing_is_known_about_other_modules() -> None:
    assert known(nn.Linear(2, 3)) == LayerRecord()


@pytest.mark.parametrize("name", RECORDS)
def test_recorded_classes_exist(name: str) -> None:
    module, _, cls = name.rpartition(".")
    need(module.split(".")[0])
    layer_class = getattr(importlib.import_module(module), cls)
    assert issubclass(layer_class, nn.Module)
    present = f"{layer_class.__module__}.{layer_class.__qualname__}"
    assert RECORDS[present] == RECORDS[name], "a class that was moved is known by both names"


def test_number_of_heads_and_names_of_attention() -> None:
    layer = Attention(12, 3)
    assert head_count(layer) == 3
    assert head_count(nn.Linear(2, 3)) is None
    assert looks_like_attention(layer)
    assert not looks_like_attention(nn.Linear(2, 3))
