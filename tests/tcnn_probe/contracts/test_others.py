"""Hooks, modes, tracers and transforms of other code treat a recorded model like any other."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import xarray as xr
from timm.models import _features_fx
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.feature_extraction import get_graph_node_names

import tcnn_probe
from tests.extras import need
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    entropies,
    images,
    vit,
)


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_hooks_of_the_user_run_in_their_order() -> None:
    def fire(model: nn.Module) -> list[str]:
        fired: list[str] = []
        model.register_forward_pre_hook(lambda *_: fired.append("model pre"))
        model.register_forward_hook(lambda *_: fired.append("model"))
        model.blocks[0].register_forward_hook(lambda *_: fired.append("block"), always_call=True)
        model.blocks[0].attn.register_forward_pre_hook(lambda *_: fired.append("attn pre"))
        model.blocks[0].attn.qkv.register_full_backward_hook(
            lambda *_: fired.append("qkv backward")
        )
        model.blocks[0].attn.qkv.weight.register_hook(lambda *_: fired.append("weight"))
        everywhere = nn.modules.module.register_module_forward_hook(
            lambda module, *_: fired.append(type(module).__name__)
        )
        try:
            model(images()).sum().backward()
        finally:
            everywhere.remove()
        return fired

    expected = fire(vit())
    model = vit()
    with tcnn_probe.record(model):
        assert fire(model) == expected
    again = vit()
    # With maps, attention is read in another way.
    with tcnn_probe.record(again, when="always", images=[0]):
        assert fire(again) == expected


class Counter(TorchFunctionMode):
    """A user's mode that counts the calls it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """A user's mode that counts the calls it sees below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    __torch_dispatch__ = Counter.__torch_function__


def run_with(mode: Callable[[], Any], model: nn.Module, where: str) -> list[str]:
    """Return the calls that a mode sees if it is entered around the forward,
    or in the middle of it.
    """
    with contextlib.ExitStack() as stack:
        entered = mode()
        if where == "around":
            stack.enter_context(entered)
        else:
            # A hook's return value replaces inputs or outputs, so it must be None.
            handles = [
                model.blocks[0].register_forward_pre_hook(
                    lambda *_: (entered.__enter__(), None)[1]
                ),
                model.blocks[1].register_forward_hook(
                    lambda *_: (entered.__exit__(None, None, None), None)[1]
                ),
            ]
            for handle in handles:
                stack.callback(handle.remove)
        model(images())
    return entered.calls


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("mode", [Counter, Operations])
def test_modes_of_the_user_see_only_the_calls_of_the_model(
    mode: Callable[[], Any], where: str
) -> None:
    if mode is Operations and where == "around" and torch.__version__ < (2, 9):
        pytest.skip(
            "with torch 2.8 the mode around the forward sees two operations of the recorder: "
            "detach and t"
        )
    alone = run_with(mode, vit(), where)
    model = vit()
    expected = entropies(model, images())
    before = Trace(model)
    with tcnn_probe.record(model, images=[0, 2]) as recorder:
        assert run_with(mode, model, where) == alone
        recorder.mark(epoch=0)
        check_entropies(recorder, expected)
    assert before == Trace(model)


def test_default_device_does_not_apply_to_the_recorder() -> None:
    """The default device applies to tensors of the user only."""
    model, x = vit(), images()
    expected = entropies(model, x)
    with tcnn_probe.record(model, images=[0]) as recorder:
        # A tensor that the recorder creates without a device would be on meta, without values.
        with torch.device("meta"):
            model(x)
        recorder.mark(epoch=0)
        check_entropies(recorder, expected)


def by_vmap(model: nn.Module) -> None:
    torch.func.vmap(lambda x: model(x[None])[0], randomness="same")(images())


def by_grad(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (images(),)).sum())(parameters)


def by_jit_trace(model: nn.Module) -> None:
    torch.jit.trace(model, images(), check_trace=False)  # its check would run a forward


def by_export(model: nn.Module) -> None:
    program = torch.export.export(model, (images(),))
    torch.testing.assert_close(program.module()(images()), vit()(images()))


def by_meta(model: nn.Module) -> None:
    with torch.device("meta"):
        parameters = {
            name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()
        }
    assert torch.func.functional_call(model, parameters, (images().to("meta"),)).is_meta


TRANSFORMS = [by_vmap, by_grad, by_jit_trace, by_export, by_meta]


@pytest.mark.study(but=["by_vmap", "by_export", "by_jit_trace"])
@pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:Converting a tensor to a Python"
)
@pytest.mark.filterwarnings("ignore:.*jit.*", "ignore:There is a performance drop because")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_work_and_record_nothing(
    transform: Callable[[nn.Module], None],
) -> None:
    model = vit()
    # Some tracers do not support its check of the size.
    model.patch_embed.strict_img_size = False
    expected = entropies(model, images())
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        transform(model)
        model(images())
        recorder.mark(epoch=0)
        check_entropies(recorder, expected)
        assert recorder.dataset.images.values.tolist() == [[3, 3]]
    assert before == Trace(model)


@pytest.mark.filterwarnings("ignore:.*since the last mark:RuntimeWarning")
def test_functional_call_is_recorded_as_a_forward() -> None:
    model = vit()
    halved = {name: p / 2 for name, p in model.named_parameters()}
    with tcnn_probe.record(model) as recorder:
        torch.func.functional_call(model, halved, (images(2),))
        recorder.mark(epoch=0)
        assert recorder.dataset.images.values.tolist() == [[2, 2]]
        # Halved logits make attention more uniform.
        assert bool((recorder.dataset.entropy > entropies(model, images(2)).numpy()).all())


@pytest.mark.study(but=["vit"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}),
        ("pit_ti_224", {"img_size": 64, "depth": (1, 1, 1)}),
        ("crossvit_tiny_240", {"depth": [(1, 1, 0)]}),
    ],
    ids=["vit", "pit", "crossvit"],
)
def test_graphs_of_timm_are_those_without_a_recorder(name: str, options: dict[str, Any]) -> None:
    """timm's own tests of torch.fx, forward and backward:
    models whose parts take lists and tuples, too.
    """
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).eval()
    leaves = {
        "leaf_modules": list(_features_fx.get_notrace_modules()),
        "autowrap_functions": list(_features_fx.get_notrace_functions()),
    }
    x = torch.randn(2, 3, *[options.get("img_size", model.default_cfg["input_size"][1])] * 2)

    def results() -> list[Tensor]:
        _, nodes = get_graph_node_names(model, tracer_kwargs=leaves)
        graph = _features_fx.create_feature_extractor(model, {nodes[-1]: "scores"})
        (scores,) = graph(x).values()
        gradients = torch.autograd.grad(scores.sum(), list(graph.parameters()))
        return [scores, *gradients]

    alone = results()
    with tcnn_probe.record(model):
        recorded = results()
    assert all(map(torch.equal, recorded, alone))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_jit_script_names_the_recorder() -> None:
    """torch.jit.script compiles hooks; a copy has hooks without effect until its first forward."""
    model = nn.Sequential(nn.Linear(4, 4))
    with tcnn_probe.record(model):
        twin = copy.deepcopy(model)
        for scripted in (model, twin):
            with pytest.raises(AttributeError, match="while no recorder is attached"):
                torch.jit.script(scripted)
        twin(torch.randn(2, 4))
        torch.jit.script(twin)
    torch.jit.script(model)


@pytest.mark.study
def test_graphs_traced_while_recording_are_those_without_a_recorder() -> None:
    alone = [str(node.target) for node in make_fx(vit())(images()).graph.nodes]
    model = vit()
    with tcnn_probe.record(model):
        assert [str(node.target) for node in make_fx(model)(images()).graph.nodes] == alone


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:FutureWarning"
)  # torch computes tangents by it
def test_forward_mode_differentiation() -> None:
    """Tangents are the same as without a recorder, and the primal is recorded."""
    model, x = vit(), images()
    for block in model.blocks:
        block.attn.fused_attn = False  # the fused kernel has no tangents
    expected = entropies(model, x)
    tangent = images(seed=1)

    def derivative() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent

    alone = derivative()
    with tcnn_probe.record(model, images=[0]) as recorder:
        assert torch.equal(derivative(), alone)
        recorder.mark(epoch=0)
        check_entropies(recorder, expected, images=3)


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:.*were measured and nothing was marked:RuntimeWarning")
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights(place: str, tmp_path: Path) -> None:
    """Between its forwards, the weights of an offloaded model are on the meta device."""
    accelerate = need("accelerate")
    expected = entropies(vit(), images())
    maps = tcnn_probe.saliency(vit(), images(), method="class_attention")
    if place == "cpu":
        model = accelerate.cpu_offload(vit(), execution_device=torch.device("cpu"))
    else:
        model = accelerate.disk_offload(vit(), str(tmp_path), execution_device=torch.device("cpu"))
    assert next(model.parameters()).is_meta
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(images())
        recorder.mark(epoch=0)
        check_entropies(recorder, expected)
    tcnn_probe.attention_maps(model, images())
    actual = tcnn_probe.saliency(model, images(), method="class_attention")
    xr.testing.assert_allclose(actual, maps)


class Trunk(nn.Module):
    """Patches and blocks in a list, of which accelerate compiles each."""

    def __init__(self) -> None:
        super().__init__()
        model = vit()
        self.patches = model.patch_embed.proj
        self.blocks = nn.ModuleList(model.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_regions_that_accelerate_compiles() -> None:
    """compile_regions compiles the blocks of a copy that shares its weights;
    the copy itself is not compiled.
    """
    utils = need("accelerate.utils")
    model = Trunk().eval()
    datasets = []
    for network in (model, utils.compile_regions(model, backend="eager")):
        with tcnn_probe.record(network) as recorder, torch.no_grad():
            network(images())
            recorder.mark(epoch=0)
            datasets.append(recorder.dataset.load())
    plain, compiled = datasets
    assert compiled.layer.values.tolist() == ["blocks.0.attn", "blocks.1.attn"]
    xr.testing.assert_allclose(compiled, plain)
