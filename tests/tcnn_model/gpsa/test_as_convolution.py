"""GPSA as a convolution: equal in the limit of large locality and gating, and built from one."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tcnn_model import GPSA
from tests.tcnn_model.cases import Case, every_case
from tests.tcnn_model.numerics import (
    CONVOLUTIONAL,
    SHARP,
    assert_same,
    random,
    relative_error,
)

pytestmark = pytest.mark.numerical


@every_case
def test_limit_is_the_convolution(case: Case) -> None:
    conv = case.conv()
    x = random(2, conv.in_channels, *case.grid)
    assert_same(GPSA.from_conv(conv, qk_dim=case.qk_dim, **SHARP)(x), conv(x))
    # The default gates and strengths, at which fine-tuning starts, let in content and neighbouring
    # pixels.
    assert relative_error(GPSA.from_conv(conv, qk_dim=case.qk_dim)(x), conv(x)) > 0.05
    conv.float()
    assert_same(
        GPSA.from_conv(conv, qk_dim=case.qk_dim, **CONVOLUTIONAL)(x.float()),
        conv(x.float()),
    )


def test_one_layer_runs_at_several_resolutions() -> None:
    conv = nn.Conv2d(5, 3, 3, 2, 1, dtype=torch.float64)
    layer = GPSA.from_conv(conv, **SHARP)
    # The first grid comes again, to show that nothing is cached from the other grids.
    for grid in ((7, 11), (13, 2), (1, 1), (7, 11)):
        x = random(2, 5, *grid)
        assert_same(layer(x), conv(x))


# torch itself warns about the convolution.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("kernel", "padding", "expected"),
    [
        # With dilation (2, 1) the kernel spans 5 x 5 pixels, which is two on each side.
        ((3, 5), "same", (2, 2)),
        ((3, 5), "valid", (0, 0)),
        # One more pixel of padding at the end than at the beginning.
        ((2, 2), "same", "same"),
        ((6, 2), "same", "same"),
    ],
)
def test_padding_given_by_name(
    kernel: tuple[int, int], padding: Literal["same", "valid"], expected: object
) -> None:
    conv = nn.Conv2d(3, 5, kernel, padding=padding, dilation=(2, 1), dtype=torch.float64)
    layer = GPSA.from_conv(conv, **SHARP)
    assert layer.padding == expected
    x = random(2, 3, 11, 7)
    assert_same(layer(x), conv(x))


def test_weights_are_copied() -> None:
    conv = nn.Conv2d(3, 5, 3)
    layer = GPSA.from_conv(conv)
    for copied, original in ((layer.weight, conv.weight), (layer.bias, conv.bias)):
        assert torch.equal(copied, original)
        assert copied.data_ptr() != original.data_ptr()
    # If the layer held a view of the CNN's filters, training the T-CNN would change the CNN.
    nn.init.zeros_(layer.weight)
    assert float(conv.weight.detach().abs().max()) > 0
    assert GPSA.from_conv(nn.Conv2d(3, 5, 3, bias=False)).bias is None


def test_device_dtype_mode_and_trainability_carry_over() -> None:
    # None of these values is a default.
    conv = nn.Conv2d(3, 5, 3, device="meta", dtype=torch.float16).eval()
    conv.weight.requires_grad_(False)
    layer = GPSA.from_conv(conv)
    assert not layer.training
    assert GPSA.from_conv(nn.Conv2d(3, 5, 3)).training
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert [name for name, p in layer.named_parameters() if not p.requires_grad] == ["weight"]


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (
            lambda: nn.Linear(3, 5),
            TypeError,
            r"expected a torch\.nn\.Conv2d, got Linear",
        ),
        (
            lambda: nn.Conv2d(3, 5, 3, padding_mode="reflect"),
            ValueError,
            "padding_mode='zeros', got 'reflect'",
        ),
        (
            lambda: weight_norm(nn.Conv2d(3, 5, 3)),
            ValueError,
            r"call torch\.nn\.utils\.parametrize",
        ),
        (
            # Modules with torch's older spectral norm, a hook, are unknown to ``is_parametrized``.
            lambda: nn.utils.spectral_norm(nn.Conv2d(3, 5, 3)),
            ValueError,
            "its weight is computed at each forward",
        ),
    ],
)
def test_modules_other_than_plain_convolutions_are_refused(
    module: Callable[[], nn.Module], error: type[Exception], message: str
) -> None:
    """Copying a weight that is computed from other parameters would silently drop the
    computation.
    """
    with pytest.raises(error, match=message):
        GPSA.from_conv(module())
