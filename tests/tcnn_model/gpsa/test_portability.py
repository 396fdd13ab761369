"""The layer under PyTorch's machinery: compile, copy, save, load, and memory formats."""

import copy
import pickle

import pytest
import torch

from tcnn_model import GPSA, Axis, gpsa
from tests.tcnn_model.numerics import (
    assert_same,
    assert_same_gradients,
    disturb,
    random,
    saved_and_loaded,
)


@pytest.fixture
def layer() -> GPSA:
    torch.manual_seed(0)
    return disturb(GPSA(5, 7, (3, 2), stride=(2, 1), padding=1))


@pytest.mark.study
def test_compiles_without_graph_breaks(layer: GPSA) -> None:
    # Graphs of earlier tests would count towards the limit of recompilations.
    torch.compiler.reset()
    # aot_eager traces forward and backward as inductor does, without a C++ compiler.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    # Graphs for any size are those of torch.export, in models/test_graphs.py.
    x = random(2, 5, 5, 7, dtype=torch.float32)
    assert_same(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.study
@pytest.mark.parametrize("values_of", [1, 2], ids=["dense", "fused"])
def test_functions_compile_without_graph_breaks(values_of: int) -> None:
    """The layer does not choose these backends by itself; "fused" needs values for each head."""
    axis = Axis(5, 1, 1, 3)
    # Shapes are (batch, heads, 25 pixels, channels) of queries, keys and values, (heads, 3) of
    # positions, (heads,) of gates.
    shapes = [(2, 2, 25, 3), (2, 2, 25, 3), (2, values_of, 25, 3), (2, 3), (2,)]
    leaves = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        return gpsa(*tensors, y=axis, x=axis, backend="dense" if values_of == 1 else "fused")

    expected = forward(*leaves)
    output = torch.compile(forward, backend="aot_eager", fullgraph=True)(*leaves)
    assert_same(output, expected)
    assert_same_gradients(output, expected, {str(tuple(leaf.shape)): leaf for leaf in leaves})


def test_copies_compute_the_same(layer: GPSA) -> None:
    x = random(2, 5, 7, 11, dtype=torch.float32)
    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        saved_and_loaded(layer),
    ):
        assert torch.equal(twin(x), layer(x))
        assert twin.weight is not layer.weight
        assert repr(twin) == repr(layer)


def test_state_of_a_convolution_loads_into_the_layer(layer: GPSA) -> None:
    conv = torch.nn.Conv2d(5, 7, (3, 2), stride=(2, 1), padding=1)
    result = layer.load_state_dict(conv.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert torch.equal(layer.weight, conv.weight)


def test_channels_last_input(layer: GPSA) -> None:
    x = random(2, 5, 7, 11, dtype=torch.float32)
    assert_same(layer(x.to(memory_format=torch.channels_last)), layer(x))


def test_empty_batch_has_the_shape_of_a_convolution(layer: GPSA) -> None:
    x = torch.zeros(0, 5, 7, 11)
    expected = torch.nn.functional.conv2d(x, layer.weight, stride=(2, 1), padding=1)
    assert layer(x).shape == expected.shape
