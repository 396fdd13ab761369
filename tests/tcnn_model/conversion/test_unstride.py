"""Operations at stride 1 keep the grid of their input
and contain the strided output, or are refused.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import AvgPool2dSame, BlurPool2d, Conv2dSame, StdConv2d
from timm.layers.pool2d_same import MaxPool2dSame
from torch import Tensor, nn

from tcnn_model import gpsa_layers, reparameterize, unstride
from tcnn_model.conversion.tracing import Call, find_input_size, meta_copy, trace
from tcnn_model.conversion.unstride import at_unit_stride, check_phases
from tests.tcnn_model.numerics import SHARP, assert_same, disturb, random
from tests.tcnn_model.tiny_models import tiny_cnn


def _call(module: nn.Module, grid: tuple[int, int], name: str = "operation") -> Call:
    # The meta device suffices, as only shapes are needed.
    meta = copy.deepcopy(module).to("meta")
    outputs = meta(
        torch.empty(
            1,
            getattr(module, "in_channels", 1),
            *grid,
            device="meta",
            dtype=torch.float64,
        )
    )
    return Call(name, meta, grid, (outputs.shape[2], outputs.shape[3]))


# Entries are the operation, its stride s, and a phase for even and for odd sides: the strided
# output consists of every s-th pixel of the output at stride 1, starting at the phase.
OPERATIONS: dict[str, tuple[nn.Module, int, int, int]] = {
    # The phase is the pixel at the centre of the first window, rounded down if the centre lies
    # between two pixels.
    "1 x 1": (nn.Conv2d(3, 5, 1, 2), 2, 0, 0),
    "3 x 3": (nn.Conv2d(3, 5, 3, 2, 1), 2, 0, 0),
    "3 x 3 without padding": (nn.Conv2d(3, 5, 3, 2), 2, 1, 1),
    "2 x 2 windows": (nn.Conv2d(3, 5, 2, 2), 2, 0, 0),
    "3 x 3 windows": (nn.Conv2d(3, 5, 3, 3), 3, 1, 1),
    "7 x 7 depthwise, dilated": (nn.Conv2d(5, 5, 7, 2, 6, 2, 5), 2, 0, 0),
    # "Same" padding depends on the size: on an even side, the first window starts one pixel later.
    "3 x 3 same": (Conv2dSame(3, 5, 3, 2), 2, 1, 0),
    "1 x 1 same": (Conv2dSame(3, 5, 1, 2), 2, 0, 0),
    "average of 2 x 2": (nn.AvgPool2d(2, 2), 2, 0, 0),
    "average, last one incomplete": (
        nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False),
        2,
        0,
        0,
    ),
    "average of 3 x 3": (nn.AvgPool2d(3, 2, 1), 2, 0, 0),
    "average of 3 x 3 without the padding": (
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        2,
        0,
        0,
    ),
    "average of 3 x 3 same": (AvgPool2dSame(3, 2), 2, 1, 0),
    "maximum of 3 x 3 without padding": (nn.MaxPool2d(3, 2), 2, 1, 1),
    "maximum of 2 x 2 same": (MaxPool2dSame(2, 2), 2, 0, 0),
    "maximum of 3 x 3 same": (MaxPool2dSame(3, 2), 2, 1, 0),
    "blur": (BlurPool2d(stride=2), 2, 0, 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
@torch.no_grad()
def test_strided_output_is_part_of_the_output_at_stride_1(name: str) -> None:
    module, stride, even, odd = OPERATIONS[name]
    module = copy.deepcopy(module).double()
    # Strides of 2 and 3 divide the first sides; only 3 divides the second ones.
    for grid, phase in (((12, 18), even), ((15, 9), odd)):
        call = _call(module, grid)
        x = random(1, getattr(module, "in_channels", 1), *grid)
        strided = module(x)
        unit = at_unit_stride(call, module)(x)
        assert unit.shape[-2:] == grid
        # At stride 1 there may be windows after the last strided one.
        part = unit[:, :, phase::stride, phase::stride][
            :, :, : strided.shape[2], : strided.shape[3]
        ]
        assert_same(part, strided)
        check_phases([call])
    assert module.stride in (stride, (stride, stride))  # unchanged


def test_partners_that_start_at_the_same_pixel_are_accepted() -> None:
    for grid, names in (
        # "Same" operations start at different pixels of even and odd images.
        ((12, 18), ("3 x 3", "1 x 1", "blur", "average of 2 x 2")),
        ((15, 9), ("3 x 3 same", "maximum of 3 x 3 same")),
    ):
        check_phases([_call(OPERATIONS[name][0].double(), grid, name) for name in names])


@pytest.mark.parametrize("grid", [(12, 18), (15, 9)])
def test_partners_that_start_at_different_pixels_are_refused(
    grid: tuple[int, int],
) -> None:
    """Trial images have both parities, as both operations start at the first pixel
    of an odd image.
    """
    calls = [
        _call(OPERATIONS[name][0].double(), grid, name) for name in ("3 x 3 same", "1 x 1 same")
    ]
    message = (
        "3 x 3 same and 1 x 1 same reduce .* from different first pixels, .*; use stride='keep'"
    )
    with pytest.raises(ValueError, match=message):
        check_phases(calls)


@pytest.mark.parametrize(
    "pool",
    [
        # On even images the last window averages fewer pixels.
        nn.AvgPool2d(3, 2, ceil_mode=True),
        # On odd images the last window sums fewer pixels, and still divides by four.
        nn.AvgPool2d(2, 2, ceil_mode=True, divisor_override=4),
    ],
)
def test_pools_whose_strided_output_would_be_lost_are_refused(pool: nn.Module) -> None:
    with pytest.raises(
        ValueError,
        match=r"\(AvgPool2d\): its output at stride 1 does not contain .* use stride='keep'",
    ):
        check_phases([_call(pool, (12, 18))])


@pytest.mark.parametrize("module", [nn.Conv2d(3, 5, 3, 2, 2), nn.AvgPool2d(2, 2, 1)])
def test_operations_that_would_enlarge_the_grid_are_refused(module: nn.Module) -> None:
    # With this much padding, the map at stride 1 would be larger than the input.
    with pytest.raises(ValueError, match=r"at stride 1 would not keep the grid; use stride='keep'"):
        at_unit_stride(_call(module.double(), (12, 18)), module)


class _Block(nn.Module):
    """Block of a convolution and a shortcut."""

    def __init__(self, conv: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.shortcut(x)


def _network(block: nn.Module) -> nn.Sequential:
    """Return a stem and a block, with random weights, in float64."""
    return disturb(nn.Sequential(nn.Conv2d(3, 5, 5, stride=2, padding=2), block).double())


@torch.no_grad()
def test_a_model_whose_branches_would_not_align_is_refused() -> None:
    """ "Same" convolutions of 3 x 3 and 1 x 1 start at different pixels of an even image."""
    model = _network(_Block(Conv2dSame(5, 7, 3, 2), Conv2dSame(5, 7, 1, 2)))
    with pytest.raises(
        ValueError,
        match=r"1\.conv and 1\.shortcut reduce .* from different first pixels",
    ):
        reparameterize(model)
    same = reparameterize(model, stride="keep", **SHARP)
    assert list(gpsa_layers(same)) == ["1.conv"]
    x = random(1, 3, 26, 34)
    # At their own strides, the branches remain aligned.
    assert_same(same(x), model(x))


class _Attention(nn.Module):
    """Attention to a reduced map; its softmax is a module or a function."""

    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # PVT reduces its keys like this: the stride belongs to the attention, and does not start a
        # stage.
        self.reduce = nn.Conv2d(5, 5, 2, stride=2)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        keys = self.reduce(x).flatten(2)
        weights = self.softmax(x.flatten(2).transpose(1, 2) @ keys)
        return x + (keys @ weights.transpose(1, 2)).unflatten(2, x.shape[2:])


@pytest.mark.parametrize(
    "softmax",
    [nn.Softmax(dim=-1), partial(torch.softmax, dim=-1)],
    ids=["module", "function"],
)
def test_convolutions_of_attention_layers_are_left_alone(
    softmax: Callable[[Tensor], Tensor],
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, stride=2, padding=1),
        _Attention(softmax),
        nn.Sequential(nn.Conv2d(5, 7, 3, stride=2, padding=1), nn.Conv2d(7, 7, 3, padding=1)),
    )
    meta = meta_copy(model)
    calls = trace(meta, find_input_size(meta))
    assert [call.name for call in calls if call.in_attention] == ["1.reduce"]
    unit = reparameterize(model)
    assert list(gpsa_layers(unit)) == ["2.0", "2.1"]
    assert unit.get_submodule("1.reduce").stride == (2, 2)
    # A layer that the user names is converted all the same.
    assert list(gpsa_layers(reparameterize(model, layers="1.reduce", stride="keep"))) == [
        "1.reduce"
    ]


class _Half(nn.Module):
    """Operation that needs channels 1 and 3 of its input,
    a number of channels that cannot be inferred.
    """

    stride = 2

    def forward(self, x: Tensor) -> Tensor:
        # Indexing fails on an input with a single channel.
        return torch.stack([x[:, 3], x[:, 1]], dim=1)[:, :, :: self.stride, :: self.stride]


def test_an_operation_that_cannot_be_tried_alone_is_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 5, padding=2),
        nn.Sequential(_Half(), nn.Conv2d(2, 3, 3, padding=1)),
    )
    with pytest.raises(
        ValueError,
        match=r"1\.0 \(_Half\) cannot be tried by itself .*; use stride='keep'",
    ):
        reparameterize(model)
    assert list(gpsa_layers(reparameterize(model, stride="keep"))) == ["1.1"]


@torch.no_grad()
def test_the_stride_of_a_converted_layer_is_removed_with_its_partners() -> None:
    """One branch was converted earlier with its stride, and the other is converted now."""
    block = _Block(nn.Conv2d(5, 7, 5, 2, 2), nn.Conv2d(5, 7, 3, 2, 1))
    model = _network(block)
    # With their paddings, 5 x 5 and 3 x 3 start at the same pixel.
    once = reparameterize(model, layers="1.conv", stride="keep", **SHARP)
    twice = reparameterize(once, layers="1.shortcut", **SHARP)
    block.conv.stride = block.shortcut.stride = (1, 1)
    x = random(1, 3, 26, 34)
    assert_same(twice(x), model(x))


class _Nested(nn.Module):
    """Block whose pools are nested in other modules, as in CoAtNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.AvgPool2d(2))
        self.short = nn.Sequential(nn.Sequential(nn.AvgPool2d(2)))
        self.conv = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.down(x)) + self.short(x)


@torch.no_grad()
def test_nested_pools_of_a_block_are_unstrided() -> None:
    model = _network(_Nested())
    # The stem outputs 13 x 17 pixels: the sides are odd, so that the pools leave out a row and a
    # column.
    x = random(1, 3, 26, 34)
    unit = reparameterize(model, **SHARP)
    assert list(gpsa_layers(unit)) == ["1.conv"]
    assert unit(x).shape[-2:] == (13, 17)
    middle = model[0](x)
    # At stride 1 the pool needs one more row and column, which repeat the border.
    average = nn.AvgPool2d(2, 1)(nn.ReplicationPad2d((0, 1, 0, 1))(middle))
    assert_same(unit(x), model[1].conv(average) + average)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 5, 2, 2),
        # One axis has an even size and no padding, the other an odd size and padding.
        nn.Conv2d(3, 5, (4, 3), 2, (0, 1)),
        nn.Conv2d(3, 5, 3, 2),
        nn.Conv2d(3, 5, 4, 2, 1, padding_mode="circular"),
        # This convolution standardises its weight at each forward.
        StdConv2d(3, 5, 3, 2, padding=0),
    ],
)
@torch.no_grad()
def test_parameters_keep_their_names(conv: nn.Conv2d) -> None:
    """A checkpoint of the CNN still fits."""
    conv = copy.deepcopy(conv).double()
    before = dict(vars(conv))
    call = _call(conv, (12, 18))
    # Parameters are shared, not copied, so that an optimizer that holds them stays valid.
    unit = at_unit_stride(call, conv)
    shared = dict(conv.named_parameters())
    parameters = dict(unit.named_parameters())
    assert parameters.keys() == shared.keys()
    assert all(parameters[name] is shared[name] for name in shared)
    assert vars(conv) == before
    check_phases([call])
    x = random(1, 3, 12, 18)
    assert unit(x).shape[-2:] == (12, 18)
    # Training makes such copies for the moving average of weights.
    assert torch.equal(copy.deepcopy(unit)(x), unit(x))


@torch.no_grad()
def test_extended_shortcut_can_be_converted_later() -> None:
    # The 5 x 5 convolution is converted first, and the 2 x 2 shortcut is extended to keep its grid.
    model = _network(_Block(nn.Conv2d(5, 7, 5, 2, 2), nn.Conv2d(5, 7, 2, 2)))
    once = reparameterize(model, layers="1.conv", **SHARP)
    result = once.load_state_dict(model.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert all(key.startswith("1.conv.") for key in result.missing_keys)
    twice = reparameterize(once, layers="1.shortcut", stride="keep", **SHARP)
    x = random(1, 3, 26, 34)
    assert_same(twice(x), once(x))


@torch.no_grad()
def test_unstrided_cnn_is_the_tcnn_at_its_convolutional_limit() -> None:
    """The control equals the T-CNN with sharp attention, and a CNN un-strided by hand."""
    cnn = tiny_cnn().double().eval()
    # A conversion must not rename a parameter, so its keys are compared.
    before = cnn.state_dict()
    # The stride is removed for all sizes, not just for the 64 x 64 pixels of the trace.
    x = random(2, 1, 96, 64)
    control = unstride(cnn, input_size=(1, 64, 64))
    by_hand: Any = copy.deepcopy(cnn)
    by_hand.layer4[0].conv1.stride = by_hand.layer4[0].downsample[0].stride = (1, 1)
    # Bit for bit, because both run the same operations.
    assert torch.equal(control(x), by_hand(x))
    assert_same(reparameterize(cnn, input_size=(1, 64, 64), **SHARP)(x), control(x))
    assert not gpsa_layers(control)
    assert control.state_dict().keys() == before.keys()
    assert control.feature_info == reparameterize(cnn, input_size=(1, 64, 64)).feature_info
    assert cnn.get_submodule("layer4.0.conv1").stride == (2, 2)
    assert unstride(cnn, input_size=(1, 64, 64), inplace=True) is cnn


def test_a_stage_without_a_stride_is_refused() -> None:
    """A pool in the block before the last stage has the stride."""
    stage = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1))
    before = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.MaxPool2d(2))
    model = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), before, stage)
    with pytest.raises(ValueError, match=r"no stride to remove: neither 2\.0, 2\.1 nor"):
        unstride(model, layers="2")


def test_the_callers_default_dtype_changes_nothing() -> None:
    model = tiny_cnn()
    torch.set_default_dtype(torch.float64)
    try:
        unstride(model)
    finally:
        torch.set_default_dtype(torch.float32)
