"""An ablation leaves nothing behind in the model or in copies of it,
and raises an error if it had no effect.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.contracts.helpers import Trace, vit
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.interventions.ablations import CASES, State, chain_images
from tests.tcnn_probe.networks import Chain, scatter


class Stop(nn.Module):
    """Module that raises in the middle of a model's last attention layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.error: BaseException | None = None
        if isinstance(model, Chain):
            values = model.far.values
            vars(model.far)["values"] = lambda x: values(self(x))
        else:
            model.blocks[1].attn.proj_drop = self  # type: ignore[union-attr, index]

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.filterwarnings("ignore:.*among images=")
@pytest.mark.parametrize("case", CASES)
def test_ablation_leaves_no_trace(case: str) -> None:
    """This holds also after exceptions in a forward or in the body;
    while it acts, there are only its hooks.
    """
    make, make_images, options = CASES[case]
    model = make()
    x = make_images()
    stop = Stop(model)
    model(x).sum().backward()
    plain = model(x).detach()
    before = State(model)
    with tcnn_probe.ablate(model, **options):
        expected = model(x)
        # An ablation without effect would also leave no trace.
        assert not torch.allclose(expected, plain, atol=1e-4)
        assert [id(p) for p in model.parameters()] == [key for _, key in before.parameters]
        torch.testing.assert_close(dict(model.state_dict()), before.trace.state, rtol=0, atol=0)
        for error in (ZeroDivisionError("mine"), KeyboardInterrupt()):
            stop.error = error
            with pytest.raises(type(error)):
                model(x)
            stop.error = None
            torch.testing.assert_close(model(x), expected)
    before.check(model)
    assert torch.equal(model(x), plain)
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)), tcnn_probe.ablate(model, **options):  # noqa: PT012
            stop.error = error
            model(x)
        stop.error = None
        before.check(model)


def test_failed_means_leave_no_trace() -> None:
    model = Chain()
    before = State(model)
    for bad, error in (
        # Both fail at the second batch, when hooks are registered and sums are incomplete.
        ([chain_images(), "no images"], TypeError),
        ([chain_images(), torch.ones(1, 2, 5, 5)], ValueError),
    ):
        with (
            pytest.raises(error),
            tcnn_probe.ablate(model, mode="mean", images=iter(bad)),
        ):
            pass
        before.check(model)
    with tcnn_probe.ablate(model, mode="mean", images=chain_images()):
        with pytest.raises(ValueError, match="expected images of the size of images="):
            model(torch.ones(2, 2, 5, 7))
        model(chain_images())
    before.check(model)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            (chain_images(), torch.arange(3)),
            r"of a pair .* give the first: got torch.int64 of shape \(3,\)",
        ),
        (
            chain_images().byte(),
            r"floating point; .* got torch.uint8 of shape \(3, 2, 7, 11\)",
        ),
        (
            TensorDataset(chain_images()),
            "got single ones: TensorDataset; give its DataLoader",
        ),
        ([()], "as the model takes them, got tuple"),
        (
            torch.ones(0, 2, 7, 11),
            r"as the model takes them, got shape \(0, 2, 7, 11\)",
        ),
    ],
    ids=["labels", "bytes", "dataset", "empty", "none"],
)
def test_bad_images_are_refused(images: Any, message: str) -> None:
    """Images are refused before the model has seen any."""
    with pytest.raises(TypeError, match=message):
        tcnn_probe.ablate(Chain(), "near", "mean", images=images)


@torch.no_grad()
@pytest.mark.parametrize("case", ["positional", "zero, vit"])
def test_copies_are_not_ablated(case: str) -> None:
    make, make_images, options = CASES[case]
    model = make()
    x = make_images()
    plain = model(x)
    file = io.BytesIO()
    before = Trace(model)
    with tcnn_probe.ablate(model, **options):
        ablated = model(x)
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for twin in copies:
            assert torch.equal(twin(x), plain)
        assert torch.equal(model(x), ablated)
    for twin in copies:
        assert torch.equal(twin(x), plain)
        assert Trace(twin).hooks == before.hooks


def test_an_ablation_without_effect_is_an_error() -> None:
    model = Chain()
    x = chain_images()
    # No forward calls this layer.
    model.unused = scatter(GPSA(2, 2, 3, padding=1))
    before = State(model)
    with (
        pytest.raises(RuntimeError, match="the model ran, and 'unused' was not ablated"),
        tcnn_probe.ablate(model, ["near", "unused"]),
    ):
        model(x)
    before.check(model)
    ablation = tcnn_probe.ablate(model, {"unused": 2})
    assert repr(ablation) == "Ablation(mode='zero', heads={'unused': (2,)})"
    with (
        ablation as entered,
        pytest.raises(RuntimeError, match="already active"),
        ablation,
    ):
        pass  # no forward ran
    assert entered is ablation
    with tcnn_probe.ablate(model, "*", "mean") as ablation:
        model(x)
    assert ablation.heads["near"] == tuple(range(9))
    assert ablation.mode == "mean"
    blocks = vit()
    with (
        pytest.raises(RuntimeError, match=r"'patch_embed' ran and computed no attention"),
        tcnn_probe.ablate(blocks, "patch_embed"),
    ):
        blocks(vit_images())


@torch.no_grad()
def test_ablation_without_a_with_statement() -> None:
    """An ablation acts from the call until it is removed;
    a ``with`` statement ends it, and may start it again.
    """
    model = Chain()
    x = chain_images()
    plain = model(x)
    before = State(model)
    ablation = tcnn_probe.ablate(model, {"near": [1, 3]}, "mean", images=chain_images(5))
    ablated = model(x)
    # An ablation without effect would pass the assertions below.
    assert not torch.allclose(ablated, plain, atol=1e-4)
    # A second removal has no effect.
    ablation.remove()
    ablation.remove()
    assert torch.equal(model(x), plain)
    before.check(model)
    for _ in range(2):
        with ablation:
            assert torch.equal(model(x), ablated)
        assert torch.equal(model(x), plain)
    with ablation:
        ablation.remove()
        assert torch.equal(model(x), plain)
    before.check(model)
