"""Graphs of models, by torch.jit.trace, torch.export and torch.fx:
one graph holds for any batch and image size.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, fx, nn

from tcnn_model import GPSA, accelerate
from tests.extras import need
from tests.tcnn_model.numerics import assert_same, disturb, random
from tests.tcnn_model.tiny_models import pooled_cnn, tiny_tcnn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace:FutureWarning", "ignore:.*torch.jit.trace:DeprecationWarning"
)  # fmt: skip

# Of the stage in 1/32 of the resolution, the last size has one more pixel than keys are attended to
# densely.
SIZES = [(2, 64, 96), (3, 97, 160), (1, 353, 352)]
_PATCHES = {"num_classes": 3, "in_chans": 1, "embed_dim": 16, "depth": 2}
_CONVIT = {
    "img_size": 32,
    "patch_size": 8,
    "in_chans": 1,
    "embed_dim": 48,
    "depth": 3,
    "local_up_to_layer": 2,
}


def accelerated_convit() -> nn.Module:
    model = disturb(timm.create_model("convit_tiny", num_classes=3, **_CONVIT))
    accelerate(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "t-cnn": tiny_tcnn,
    "pooled-per-class": lambda: pooled_cnn(per_class=True),
    "patchconvnet": lambda: timm.create_model("patchconvnet_s20", **_PATCHES),
    "patchconvnet-multi": lambda: timm.create_model("patchconvnet_s20_multi", **_PATCHES),
    # Its position embedding has the length of one image size.
    "convit": accelerated_convit,
}
_ONE_SIZE = ("convit",)


def traced(model: nn.Module, x: Tensor, *, one_size: bool) -> nn.Module:
    with warnings.catch_warnings():
        if one_size:  # timm's ConViT computes with sizes in Python
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(model, x, check_trace=False)


def exported(model: nn.Module, x: Tensor, *, one_size: bool) -> nn.Module:
    auto = torch.export.Dim.AUTO
    sizes = {} if one_size else {2: auto, 3: auto}
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(model, (x,), dynamic_shapes=({0: batch, **sizes},)).module()


def symbolic(model: nn.Module, x: Tensor, *, one_size: bool) -> nn.Module:
    graph = fx.symbolic_trace(model)
    graph.graph.lint()
    return graph


def images(one_size: bool) -> Iterator[Tensor]:
    for batch, height, width in SIZES:
        size = (32, 32) if one_size else (height, width)
        yield random(batch, 1, *size, seed=batch, dtype=torch.float32)


@pytest.mark.study(but=["t-cnn-traced", "pooled-per-class-symbolic"])
@pytest.mark.parametrize("graph_of", [traced, exported, symbolic])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_graph_of_one_image_size_holds_for_others(
    name: str, graph_of: Callable[..., nn.Module]
) -> None:
    one_size = name in _ONE_SIZE
    if one_size and graph_of is symbolic:
        pytest.skip("timm's ConViT branches on the number of tokens")
    model = MODELS[name]().eval()
    first, *others = images(one_size)
    graph = graph_of(model, first, one_size=one_size)
    for x in (first, *others):
        assert_same(graph(x), model(x), str(tuple(x.shape)))


@pytest.mark.study
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_onnx_of_the_exporter_that_torch_2_8_prefers() -> None:
    """It takes the sizes of some operators for constants,
    and ONNX Runtime has others in float32 only.
    """
    need("onnx")
    runtime = need("onnxruntime")
    model, file = tiny_tcnn().eval(), io.BytesIO()
    first, *others = images(one_size=False)
    axes = {"x": {0: "batch", 2: "height", 3: "width"}}
    torch.onnx.export(model, (first,), file, dynamo=False, input_names=["x"], dynamic_axes=axes)
    session = runtime.InferenceSession(file.getvalue())
    for x in (first, *others):
        (output,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x))


# Geometries in which queries, padding, or the pixels that hold no query depend on the size in some
# way.
LAYERS: list[dict[str, Any]] = [
    # Along y the stride leaves gaps between kernels; along x kernels overlap.
    {"kernel_size": (2, 5), "stride": 3, "padding": "same"},
    {"kernel_size": 3, "stride": 3, "padding": 2, "dilation": 2, "groups": 6},
    {"kernel_size": 1, "backend": "blocks"},
]


class SideBySide(nn.Module):
    """Several layers at once, of which one graph is made."""

    def __init__(self, kinds: list[dict[str, Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"qk_dim": 5, "qk_scale": 30.0}
        self.layers = nn.ModuleList(GPSA(6, 6, **options, **kind) for kind in kinds)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.study
@pytest.mark.parametrize("graph_of", [traced, exported])
@torch.no_grad()
def test_graphs_of_layers_hold_for_every_residue_of_the_stride(
    graph_of: Callable[..., nn.Module],
) -> None:
    model = disturb(SideBySide(LAYERS)).double()
    graph = graph_of(model, random(2, 6, 11, 13), one_size=False)
    # Several sizes have more pixels than are attended to densely.
    for height, width in ((11, 13), (12, 17), (7, 12), (13, 7), (16, 15)):
        x = random(3, 6, height, width)
        for kind, actual, expected in zip(LAYERS, graph(x), model(x), strict=True):
            assert_same(actual, expected, f"{kind} on {height} x {width}")


def test_layer_is_one_node_of_a_symbolic_trace() -> None:
    """Like a convolution, so that a graph transformation finds the layer, and its hooks run."""
    model = tiny_tcnn().eval()
    graph = fx.symbolic_trace(model)
    names = [name for name, module in model.named_modules() if isinstance(module, GPSA)]
    called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert names
    assert set(names) <= set(called)
    with pytest.raises(ValueError, match="trace a module that contains the layer"):
        fx.symbolic_trace(model.get_submodule(names[0]))


def test_exported_program_needs_no_operator_of_this_package() -> None:
    """Other programs, such as ONNX Runtime, know torch's operators only;
    blocks are used where they are asked for.
    """
    model = SideBySide(LAYERS[-2:])
    program = torch.export.export(model, (random(1, 6, 12, 13, dtype=torch.float32),))
    # Code without autocast is in graphs of its own.
    operators = [
        str(node.target)
        for part in program.graph_module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function"
    ]
    own = [name for name in operators if name.startswith("tcnn_model")]
    assert own == ["tcnn_model.mix_and_apply.default"]  # of the layer with backend="blocks"
