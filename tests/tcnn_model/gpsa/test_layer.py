"""Initial values, properties, shapes and errors of the layer."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model import GPSA, gpsa_layers
from tests.tcnn_model.numerics import disturb, random


def test_centres_are_the_row_major_offsets_of_the_taps() -> None:
    # Column-major order, as in ConViT, would give other offsets, and so would exchanged axes, as
    # padding and dilation differ.
    layer = GPSA(2, 3, (2, 3), padding=(1, 2), dilation=(5, 7))
    expected = [(-1, -2), (-1, 5), (-1, 12), (4, -2), (4, 5), (4, 12)]
    assert [tuple(center) for center in layer.center.tolist()] == expected


def test_initial_values() -> None:
    torch.manual_seed(0)
    # 37 channels are not a multiple of 9 heads, so that the dimension 4 must be rounded down.
    layer = GPSA(37, 5, 3)
    assert torch.equal(layer.value, torch.eye(37))
    assert torch.equal(layer.locality_strength, torch.ones(9))
    # sigmoid(1) is the initial gate of the thesis.
    assert torch.allclose(layer.gate, torch.full((9,), 1 / (1 + math.exp(-1))))
    assert layer.heads == 9
    assert layer.qk_dim == 37 // 9
    for matrix in (layer.query, layer.key):
        assert matrix.shape == (9 * 4, 37)
        # The standard deviation of 1,332 random weights has a relative error of 2 %.
        assert float(matrix.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(layer.query, layer.key)


def test_qk_scale_scales_only_queries_and_keys() -> None:
    layers = []
    # With the same seed, only the scale may differ.
    for scale in (1.0, 5.0):
        torch.manual_seed(0)
        layers.append(GPSA(37, 5, 3, qk_scale=scale))
    for name, parameter in layers[0].named_parameters():
        factor = 5 if name in ("query", "key") else 1
        torch.testing.assert_close(layers[1].get_parameter(name), factor * parameter)


def test_weight_and_bias_start_as_those_of_a_convolution() -> None:
    # Groups divide the fan-in, which sets the range of weight and bias.
    arguments: dict[str, Any] = {
        "in_channels": 6,
        "out_channels": 4,
        "kernel_size": 3,
        "groups": 2,
    }
    # With one seed for both, the numbers agree if they are drawn in the same order.
    torch.manual_seed(0)
    conv = nn.Conv2d(**arguments)
    torch.manual_seed(0)
    layer = GPSA(**arguments)
    assert torch.equal(layer.weight, conv.weight)
    assert layer.bias is not None
    assert torch.equal(layer.bias, conv.bias)


def test_locality_and_gating_per_head() -> None:
    # Values differ between heads, so that a permutation would show.
    alpha = [0.5 + h for h in range(6)]
    gates = [h - 2.0 for h in range(6)]
    layer = GPSA(2, 3, (2, 3), locality_strength=alpha, gating=gates, dtype=torch.float64)
    # In float16 a gate near 1 would be rounded to 1.
    assert GPSA(2, 3, 3, dtype=torch.float16).gate.dtype == torch.float32
    # Strengths are stored through the inverse of softplus and so rounded; gating is stored as it
    # is.
    assert layer.locality_strength.tolist() == pytest.approx(alpha, rel=1e-9)
    assert layer.gating.tolist() == gates
    assert layer.gate.tolist() == pytest.approx([1 / (1 + math.exp(-g)) for g in gates], rel=1e-12)


# These lie on both sides of 4, where torch's softplus becomes linear (5 x 4 = 20 is its threshold).
@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 3.99, 4.01, 20.0, 40.0])
def test_locality_round_trip(alpha: float) -> None:
    """The error is rounding, eps / alpha near 0,
    and less than e^-20 / 5 where torch's softplus is linear.
    """
    for dtype in (torch.float64, torch.float32):
        layer = GPSA(2, 3, 1, locality_strength=alpha, dtype=dtype)
        tolerance = 4 * torch.finfo(dtype).eps * (1 + 1 / alpha) + 1e-9
        assert float(layer.locality_strength.detach()) == pytest.approx(alpha, rel=tolerance)


def test_locality_is_the_softplus_of_its_parameter() -> None:
    layer = GPSA(2, 3, (1, 2), dtype=torch.float64)
    with torch.no_grad():
        # The parameter may be negative, unlike the strength.
        layer.raw_locality.copy_(torch.tensor([-0.3, 0.7], dtype=torch.float64))
    expected = [math.log(1 + math.exp(5 * raw)) / 5 for raw in (-0.3, 0.7)]
    assert layer.locality_strength.tolist() == pytest.approx(expected, rel=1e-12)


def test_state_consists_of_parameters_only() -> None:
    layer = GPSA(3, 5, 3)
    assert list(layer.buffers()) == []
    names = {
        "weight",
        "bias",
        "query",
        "key",
        "value",
        "raw_locality",
        "center",
        "gating",
    }
    assert set(layer.state_dict()) == names
    layer(random(1, 3, 5, 7, dtype=torch.float32))  # the forward caches nothing
    assert set(layer.state_dict()) == names
    assert set(GPSA(3, 5, 3, bias=False).state_dict()) == names - {"bias"}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    # A copy of a layer must use its own head_outputs, or hooks on it would have no effect.
    "copied",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
)
def test_heads_can_be_edited_before_the_projection(
    copied: Callable[[GPSA], GPSA], groups: int
) -> None:
    """Without a head's output, the layer equals the one without the tap of this head."""
    layer = copied(disturb(GPSA(3, 6, (2, 3), padding=1, groups=groups, dtype=torch.float64)))
    x = random(2, 3, 5, 7)
    shapes = []
    without = copy.deepcopy(layer)
    with torch.no_grad():
        # Head 3 of a 2 x 3 kernel is the tap in row 1, column 0.
        without.weight[:, :, 1, 0] = 0

    def edit(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        shapes.append(output.shape)
        return output * (torch.arange(6) != 3)[:, None, None]

    with layer.head_outputs.register_forward_hook(edit):
        edited = layer(x)
    # 5 x 7 pixels with a padding of 1 and a kernel of 2 x 3 give 6 x 7 outputs.
    assert shapes == [(2, 6, 6 * 7, 3)]
    assert torch.equal(edited, without(x))
    assert not torch.equal(edited, layer(x))


def test_hooks_can_read_queries_and_keys() -> None:
    # The stride makes queries fewer than keys.
    layer = disturb(GPSA(3, 6, (2, 3), stride=2, padding=1))
    x = random(2, 3, 5, 7).float()
    outputs: list[Tensor] = []
    for seam in (layer.head_queries, layer.head_keys):
        seam.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    layer(x)
    queries, keys = outputs
    for actual, weight, pixels in (
        (queries, layer.query, x[:, :, ::2, ::2]),
        (keys, layer.key, x),
    ):
        expected = torch.einsum(
            "hdc,bcn->bhnd", weight.unflatten(0, (6, layer.qk_dim)), pixels.flatten(2)
        )
        torch.testing.assert_close(actual, expected)
    assert torch.equal(layer.attention_between(queries, keys, (5, 7)).dense(), layer.attention(x))


def test_a_function_mode_sees_the_gates() -> None:
    # A gate of e^-30 is closed unless the mode opens it.
    layer = GPSA(3, 5, 3, gating=-30.0)
    x = torch.zeros(1, 3, 5, 7)

    class OpenGates(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.sigmoid and args[0] is layer.gating:
                self.calls += 1
                return torch.ones(9)
            return func(*args, **(kwargs or {}))

    with OpenGates() as mode:
        assert torch.equal(layer.gated_attention(x).gate, torch.ones(9))
        layer(x)
    # gated_attention calls it once, and the forward once.
    assert mode.calls == 2


def test_layers_of_a_model_by_name() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 1), nn.ModuleDict({"a": GPSA(5, 5, 3), "b": GPSA(5, 2, 1)})
    )
    assert gpsa_layers(model) == {
        "1.a": model.get_submodule("1.a"),
        "1.b": model.get_submodule("1.b"),
    }
    assert gpsa_layers(nn.Linear(2, 3)) == {}


def test_repr_shows_the_arguments() -> None:
    # There is one argument of each kind that differs from its default.
    shown = repr(GPSA(6, 4, (3, 5), stride=2, groups=2, bias=False))
    for part in (
        "6, 4, kernel_size=(3, 5)",
        "stride=(2, 2)",
        "groups=2",
        "bias=False",
        "heads=15",
        "qk_dim=1",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"groups": 4},
            "groups must divide in_channels and out_channels; got groups=4, in_channels=6, "
            "out_channels=4",
        ),
        ({"groups": 0}, "groups must divide"),
        ({"qk_dim": 0}, "qk_dim must be an integer of at least 1; got 0"),
        ({"qk_dim": 2.5}, "qk_dim must be an integer of at least 1; got 2.5"),
        ({"stride": 1.5}, r"stride must be one integer or two; got 1.5"),
        ({"kernel_size": (3, 0)}, r"kernel_size must be at least 1; got \(3, 0\)"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size .*\(3, 3, 3\)"),
        ({"padding": -1}, "padding must be at least 0; got -1"),
        ({"locality_strength": 0.0}, "locality_strength must be positive; got 0"),
        (
            {"locality_strength": [1.0] * 8 + [-2.0]},
            "locality_strength must be positive",
        ),
        (
            {"locality_strength": [1.0] * 8},
            "locality_strength must be one finite number or one for each of the 9",
        ),
        ({"qk_scale": -1.0}, "qk_scale must be a finite number of at least 0; got -1"),
        (
            {"gating": math.inf},
            "gating must be one finite number or one for each of the 9 heads; got inf",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPSA(**{"in_channels": 6, "out_channels": 4, "kernel_size": 3, **arguments})


@pytest.mark.parametrize("shape", [(6, 5, 7), (2, 3, 6, 5, 7), (2, 5, 6, 7)])
def test_bad_inputs_are_refused(shape: tuple[int, ...]) -> None:
    layer = GPSA(6, 4, 3)
    with pytest.raises(
        ValueError,
        match=r"expected an input of shape \(B, 6, H, W\), got \(" + str(shape[0]),
    ):
        layer(torch.zeros(shape))


def test_a_map_smaller_than_the_kernel_is_refused() -> None:
    layer = GPSA(3, 5, (3, 5), padding=(0, 1), dilation=(2, 1))
    # A dilation of 2 makes 3 rows span 5, and a padding of 1 makes 3 columns 5: the kernel fits
    # once.
    assert layer(torch.zeros(1, 3, 5, 3)).shape == (1, 5, 1, 1)
    # There are too few rows, too few columns, or no rows.
    for grid in ((4, 7), (7, 2), (0, 7)):
        with pytest.raises(
            ValueError,
            match=f"at least 5 x 5 pixels .* got a feature map of {grid[0]} x {grid[1]}",
        ):
            layer(torch.zeros(1, 3, *grid))


def test_backend_is_kept_and_checked() -> None:
    layer = GPSA(3, 5, 3, padding=1, backend="dense")
    assert layer.backend == "dense"
    # The backend is set later and checked at the forward, when shapes are known.
    layer.backend = "fused"
    with pytest.raises(
        ValueError,
        match=r"backend='fused' needs values for each head.*; use 'blocks' or 'auto'",
    ):
        layer(torch.zeros(1, 3, 5, 7))
    with pytest.raises(
        ValueError,
        match="expected backend to be one of auto, dense, blocks, fused, triton; got 'fast'",
    ):
        GPSA(3, 5, 3, backend="fast")


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_output_has_the_memory_format_of_the_input(
    memory_format: torch.memory_format, groups: int
) -> None:
    # With odd sides and more than one channel, the two formats differ in their strides.
    x = random(2, 3, 5, 7, dtype=torch.float32).to(memory_format=memory_format)
    assert GPSA(3, 6, 3, padding=1, groups=groups)(x).is_contiguous(memory_format=memory_format)
