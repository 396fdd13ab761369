"""Subclasses of ``nn.Conv2d``: the convolution that each computes,
or the reason why it is refused.
"""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import (
    Conv2dSame,
    ScaledStdConv2d,
    ScaledStdConv2dSame,
    StdConv2d,
    StdConv2dSame,
)
from torch import Tensor, nn

from tcnn_model import GPSA, reparameterize
from tcnn_model.conversion.convolution import describe
from tests.tcnn_model.numerics import (
    CONVOLUTIONAL,
    SHARP,
    assert_same,
    random,
    relative_error,
)

pytestmark = pytest.mark.numerical

# "Same" padding depends on the size, so sides are odd and even along each axis.
GRIDS = ((5, 7), (8, 11), (12, 6))


class _Plain(nn.Conv2d):
    pass


def _convolution(kind: type[nn.Conv2d], *arguments: Any, **options: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    conv = kind(*arguments, **options)
    for parameter in conv.parameters():
        # Gains of one and biases of zero would have no effect.
        nn.init.normal_(parameter, std=0.5)
    return conv


CONVOLUTIONS = {
    "subclass": (_Plain, 3, 5, 3, 2, 1),
    # BiT and NFNet compute their weights at each forward.
    "standardised": (StdConv2d, 3, 5, 3),
    "standardised, grouped": (StdConv2d, 6, 9, 3, 2, 1, 1, 3),
    "scaled": (ScaledStdConv2d, 3, 5, 3, 2),
    # timm's EfficientNets with TensorFlow's weights have this padding.
    "same": (Conv2dSame, 3, 5, 3, 2),
    "same, 1 x 4, stride 3 x 2": (Conv2dSame, 3, 5, (1, 4), (3, 2)),
    "same, dilated depthwise": (Conv2dSame, 6, 6, 3, 2, 0, 2, 6),
    "same, stride 1": (Conv2dSame, 3, 5, 5),
    "same, even": (Conv2dSame, 3, 5, 2, 1),
    "standardised, same": (StdConv2dSame, 3, 5, 3, 2),
    "standardised, padded": (StdConv2dSame, 3, 5, 3, 1),
    "scaled, same": (ScaledStdConv2dSame, 3, 5, 5, 2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@torch.no_grad()
def test_layer_equals_the_convolution_and_leaves_it_unchanged(name: str) -> None:
    kind, *arguments = CONVOLUTIONS[name]
    conv = _convolution(kind, *arguments)
    before = repr(vars(conv))
    state = copy.deepcopy(conv.state_dict())
    generator = torch.get_rng_state()
    description = describe(conv)
    assert torch.equal(torch.get_rng_state(), generator)
    assert repr(vars(conv)) == before
    assert all(torch.equal(value, state[key]) for key, value in conv.state_dict().items())

    # A model may be built under the meta device, without values.
    with torch.device("meta"):
        meta = describe(copy.deepcopy(conv).to("meta"))
        assert describe(conv).weight.device.type == "cpu"
    for field in ("stride", "padding", "dilation", "groups", "kernel_size"):
        assert getattr(description, field) == getattr(meta, field)
    assert meta.weight.shape == description.weight.shape

    exact = copy.deepcopy(conv).double()
    narrow = GPSA.from_conv(conv, **CONVOLUTIONAL)
    layer = GPSA.from_conv(exact, **SHARP)
    for grid in GRIDS:
        x = random(2, conv.in_channels, *grid)
        assert_same(narrow(x.float()), conv(x.float()))
        assert_same(layer(x), exact(x))


def _in_place(conv: nn.Conv2d) -> Any:
    return reparameterize(
        nn.Sequential(conv),
        layers="0",
        stride="keep",
        inplace=True,
        input_size=(3, 11, 13),
    )[0]


def test_unchanged_parameters_are_shared_and_computed_parameters_are_new() -> None:
    conv = _convolution(Conv2dSame, 3, 5, 3, 2)
    layer = _in_place(conv)
    assert isinstance(layer, GPSA)
    assert layer.weight is conv.weight
    assert layer.bias is conv.bias
    conv = _convolution(ScaledStdConv2d, 3, 5, 3)
    conv.gain.requires_grad_(False)  # type: ignore[union-attr]
    folded = _in_place(conv)
    assert folded.weight is not conv.weight
    assert folded.bias is conv.bias
    assert folded.weight.requires_grad
    assert folded.weight.is_leaf
    # The layer must hold the standardised weight, not the weight from which it is computed.
    assert relative_error(folded.weight, conv.weight) > 0.1
    assert not hasattr(folded, "gain")


def test_trainability_and_mode_carry_over() -> None:
    conv = _convolution(StdConv2d, 3, 5, 3).eval().half()
    conv.weight.requires_grad_(False)
    layer = GPSA.from_conv(conv)
    assert not layer.training
    assert not layer.weight.requires_grad
    assert layer.weight.dtype == torch.float16


# Each of these runs a convolution, and does something else that a GPSA layer would lose.
class _Rectified(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class _Twice(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class _Conditional(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * x.mean(), self.bias)


class _Reflected(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="reflect"))


class _Routed(nn.Conv2d):
    def forward(self, x: Tensor, routes: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * routes)


class _Unfolded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.flatten(1) @ F.unfold(x, 3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Rectified, "_Rectified computes something other than a single convolution"),
        (_Twice, "_Twice makes 2 calls of conv2d in its forward; expected one"),
        (
            _Conditional,
            "_Conditional computes something other than a single convolution",
        ),
        (
            _Reflected,
            "_Reflected computes something other than a single convolution with zero or 'same' "
            "padding",
        ),
        (_Routed, "_Routed does not run on an image alone"),
        (_Unfolded, "_Unfolded makes 0 calls of conv2d"),
    ],
)
def test_other_computations_are_refused(kind: type[nn.Conv2d], message: str) -> None:
    conv = _convolution(kind, 3, 5, 3)
    with pytest.raises(ValueError, match=re.escape(message)):
        GPSA.from_conv(conv)


@pytest.mark.parametrize("inplace", [False, True])
def test_refusal_that_depends_on_values_leaves_the_model_unchanged(
    inplace: bool,
) -> None:
    """The rehearsal has no values, so this layer is refused only
    when the model itself is converted.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1), _convolution(_Rectified, 3, 5, 3, padding=1)
    )
    modules = list(model)
    with pytest.raises(
        ValueError,
        match="cannot reparameterize '1': _Rectified computes something other",
    ):
        reparameterize(model, inplace=inplace)
    assert list(model) == modules


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_forward_of_an_instance_is_refused(name: str) -> None:
    """Generators use such a forward to make images that tile."""
    conv = _convolution(nn.Conv2d, 3, 5, 3)
    setattr(
        conv,
        name,
        lambda x, *_: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), conv.weight),
    )
    with pytest.raises(
        ValueError, match=f"its {name} was replaced by another one, which would be lost"
    ):
        GPSA.from_conv(conv)
    with pytest.raises(ValueError, match=f"cannot reparameterize '0': its {name} was replaced"):
        reparameterize(nn.Sequential(conv), input_size=(3, 11, 13), inplace=True)


class _LowRank(nn.Conv2d):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # LoRA trains only such factors.
        self.down = nn.Parameter(torch.ones(2, 27))
        self.up = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight + (self.up @ self.down).view_as(self.weight), self.bias)


def test_trainable_update_of_a_frozen_weight_is_refused() -> None:
    conv = _convolution(_LowRank, 3, 5, 3)
    conv.weight.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"_LowRank has further trainable parameters \(down, up\).* merge them",
    ):
        GPSA.from_conv(conv)
    # If the weight is trained as well, the sum may be trained as one parameter.
    conv.weight.requires_grad_(True)
    conv.bias.requires_grad_(False)  # type: ignore[union-attr]
    layer = GPSA.from_conv(conv)
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad
    for parameter in conv.parameters():
        parameter.requires_grad_(False)
    assert not GPSA.from_conv(conv).weight.requires_grad


class _Shifted(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        # The bias of the layer is twice the parameter from which it is computed.
        return F.conv2d(x, self.weight, 2 * self.bias)  # type: ignore[operator]


def test_computed_bias_trains_if_its_parameter_does() -> None:
    conv = _convolution(_Shifted, 3, 5, 3)
    conv.weight.requires_grad_(False)
    layer = GPSA.from_conv(conv)
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
