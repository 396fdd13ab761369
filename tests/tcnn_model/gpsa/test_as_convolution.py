"""GPSA as the convolution it stands for: equal in the limit of large locality and gating, and made from one."""

from typing import Literal

import pytest
import torch
from torch import nn

from tcnn_model import GPSA
from tests.tcnn_model.cases import Case, every_case
from tests.tcnn_model.helpers import CONVOLUTIONAL, SHARP, random, relative_error


@every_case
def test_limit_is_the_convolution(case: Case) -> None:
    conv = case.conv()
    layer = GPSA.from_conv(conv, qk_dim=case.qk_dim, **SHARP)
    x = random(2, conv.in_channels, *case.grid)
    assert relative_error(layer(x), conv(x)) < 1e-8


@every_case
def test_twenty_is_the_convolution_in_float32(case: Case) -> None:
    conv = case.conv(torch.float32)
    layer = GPSA.from_conv(conv, qk_dim=case.qk_dim, **CONVOLUTIONAL)
    x = random(2, conv.in_channels, *case.grid, dtype=torch.float32)
    assert relative_error(layer(x), conv(x)) < 1e-4


@every_case
def test_one_is_not_the_convolution(case: Case) -> None:
    conv = case.conv()
    x = random(2, conv.in_channels, *case.grid)
    assert relative_error(GPSA.from_conv(conv, qk_dim=case.qk_dim)(x), conv(x)) > 0.05


def test_same_layer_at_several_resolutions() -> None:
    conv = nn.Conv2d(5, 3, 3, 2, 1, dtype=torch.float64)
    layer = GPSA.from_conv(conv, **SHARP)
    for grid in ((7, 11), (13, 2), (1, 1), (7, 11)):
        x = random(2, 5, *grid)
        assert relative_error(layer(x), conv(x)) < 1e-8


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding: Literal["same", "valid"]) -> None:
    conv = nn.Conv2d(3, 5, (3, 5), padding=padding, dilation=(2, 1), dtype=torch.float64)
    layer = GPSA.from_conv(conv, **SHARP)
    assert layer.padding == ((2, 2) if padding == "same" else (0, 0))
    x = random(2, 3, 7, 11)
    assert relative_error(layer(x), conv(x)) < 1e-8


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch, of the convolution itself
@pytest.mark.parametrize("kernel", [(3, 2), (2, 4), 6])
def test_one_pixel_more_behind_than_before(kernel: int | tuple[int, int]) -> None:
    conv = nn.Conv2d(3, 5, kernel, padding="same", dtype=torch.float64)
    layer = GPSA.from_conv(conv, **SHARP)
    assert layer.padding == "same"
    x = random(2, 3, 7, 11)
    assert relative_error(layer(x), conv(x)) < 1e-8


def test_other_stride_keeps_the_rest() -> None:
    conv = nn.Conv2d(3, 5, 3, stride=2, padding=1, dtype=torch.float64)
    x = random(2, 3, 7, 11)
    dense = GPSA.from_conv(conv, stride=1, **SHARP)(x)
    assert dense.shape == (2, 5, 7, 11)
    assert relative_error(dense[:, :, ::2, ::2], conv(x)) < 1e-8


def test_weights_are_copied() -> None:
    conv = nn.Conv2d(3, 5, 3)
    layer = GPSA.from_conv(conv)
    for ours, theirs in ((layer.weight, conv.weight), (layer.bias, conv.bias)):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    nn.init.zeros_(layer.weight)
    assert float(conv.weight.detach().abs().max()) > 0
    assert GPSA.from_conv(nn.Conv2d(3, 5, 3, bias=False)).bias is None


def test_device_dtype_mode_and_trainability_carry_over() -> None:
    conv = nn.Conv2d(3, 5, 3, device="meta", dtype=torch.float16).eval()
    conv.weight.requires_grad_(False)
    layer = GPSA.from_conv(conv)
    assert not layer.training
    assert GPSA.from_conv(nn.Conv2d(3, 5, 3)).training
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert [name for name, p in layer.named_parameters() if not p.requires_grad] == ["weight"]


def test_other_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Conv2d, got Linear"):
        GPSA.from_conv(nn.Linear(3, 5))


def test_other_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="expected padding_mode='zeros', got 'reflect'"):
        GPSA.from_conv(nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"))


def test_computed_weight_is_refused() -> None:
    """Copying a weight that is computed from others would silently drop the computation."""
    with pytest.raises(ValueError, match=r"parametrized: call torch\.nn\.utils\.parametrize"):
        GPSA.from_conv(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 5, 3)))


def test_weight_computed_in_a_hook_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        GPSA.from_conv(nn.utils.spectral_norm(nn.Conv2d(3, 5, 3)))
