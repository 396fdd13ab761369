"""Ways to call a model: in parts, twice, by itself, with several recorders, under checkpointing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    clean,
    entropies,
    entropy,
    images,
    vit,
)


@pytest.mark.study(but=["0"])
@pytest.mark.parametrize("first", [0, 1])
def test_several_recorders_removed_in_any_order(first: int) -> None:
    model = vit()
    expected = entropies(model, images())
    before = Trace(model)
    recorders = [
        tcnn_probe.record(model),
        tcnn_probe.record(model, layers="blocks.1", images=[1]),
        tcnn_probe.record(model, when="always", every=2),
    ]
    attached = list(recorders)
    for epoch in range(2):
        # There are two forwards, and every=2 takes the first.
        model(images())
        model(images())
        for recorder in attached:
            recorder.mark(epoch=epoch)
        # One recorder is removed after each epoch, in an order that depends on ``first``.
        attached.remove(recorders[(first + epoch) % 3])
        recorders[(first + epoch) % 3].remove()
    recorders[(first + 2) % 3].remove()
    assert before == Trace(model)
    assert clean()
    for place, (recorder, layer_entropies) in enumerate(
        zip(recorders, (expected, expected[1:], expected), strict=True)
    ):
        assert recorder.epochs == ((0,) if place == first else (0, 1))
        for mark in range(len(recorder.epochs)):
            check_entropies(recorder, layer_entropies, mark, images=3 if place == 2 else 6)


def test_attached_and_removed_in_the_middle_of_a_forward() -> None:
    """A recorder removed during a forward records nothing of it;
    one attached during a forward starts with the next.
    """
    model = vit()
    before = Trace(model)
    late = list[tcnn_probe.Recorder]()
    outer, inner = tcnn_probe.record(model), tcnn_probe.record(model)
    handles = [
        model.blocks[0].register_forward_hook(lambda *_: late.append(tcnn_probe.record(model))),
        model.blocks[1].register_forward_hook(lambda *_: inner.remove()),
    ]
    model(images())
    for handle in handles:
        handle.remove()
    model(images(2))
    for recorder, count in ((outer, [5, 5]), (late[0], [2, 2])):
        recorder.mark(epoch=0)
        recorder.remove()
        assert recorder.dataset.images.values.tolist() == [count]
    assert before == Trace(model)
    assert clean()


def forward_features(model: nn.Module, x: Tensor) -> None:
    # A mask makes timm call the blocks one by one.
    model.forward_features(x, attn_mask=torch.zeros(36, 36))


def forward_intermediates(model: nn.Module, x: Tensor) -> None:
    model.forward_intermediates(x, norm=True)


def intermediate_layers(model: nn.Module, x: Tensor) -> None:
    model.get_intermediate_layers(x, n=2, norm=True)


def forward_alone(model: nn.Module, x: Tensor) -> None:
    """Call ``forward`` itself, as the wrapper of peft does, so that no hook of the model runs."""
    model.forward(x)


def embedding_before(model: nn.Module, x: Tensor) -> None:
    """Call parts without attention beside the model,
    as for a target or a head on other features.
    """
    model.patch_embed(x)
    model(x)
    model.head(x.new_zeros(len(x), model.head.in_features))


def features_and_head(model: nn.Module, x: Tensor) -> None:
    model.forward_head(model.forward_features(x))


def layer_by_layer(model: nn.Module, x: Tensor) -> None:
    x = model._pos_embed(model.patch_embed(x))
    for block in model.blocks:
        # Blocks are taken apart down to their attention.
        x = x + block.attn(block.norm1(x))
        x = x + block.mlp(block.norm2(x))
    model.norm(x)


class Around(nn.Module):
    """A LightningModule, for example, whose model is called through its parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"trunk": model})


BY_PARTS = [
    forward_features,
    forward_intermediates,
    intermediate_layers,
    forward_alone,
    embedding_before,
    features_and_head,
    layer_by_layer,
]


@pytest.mark.study(but=["forward_features-False", "layer_by_layer-True"])
@pytest.mark.parametrize(
    ("call", "inside"),
    # A model around this one changes names, and who is called first: the embedding or a block.
    [*((call, False) for call in BY_PARTS), (forward_alone, True), (layer_by_layer, True)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_calls_of_parts_are_one_forward(
    call: Callable[[nn.Module, Tensor], None], inside: bool
) -> None:
    """Numbers, maps and hashes of images equal those of calls
    of the whole model, also with every= and max_images=.
    """
    model, batches = vit(), images(11).split(2)
    options: dict[str, Any] = {"every": 2, "max_images": 5, "images": [0, 4]}
    recorded_model: nn.Module = Around(model).eval() if inside else model
    with (
        torch.no_grad(),
        tcnn_probe.record(recorded_model, **options) as recorder,
        tcnn_probe.record(model, **options) as whole,
    ):
        for x in batches:
            with whole.pause():
                call(model, x)
            with recorder.pause():
                model(x)
        recorder.mark(epoch=0)
        whole.mark(epoch=0)
    trees = [part.tree for part in (recorder, whole)]
    for node in ("heads", "maps/3x5x7"):
        parts, expected = (tree[node].to_dataset() for tree in trees)
        parts["layer"] = expected["layer"]
        xr.testing.assert_allclose(parts, expected, rtol=1e-5, atol=1e-6)
    assert trees[0].attrs["image_hashes"] == trees[1].attrs["image_hashes"]
    assert trees[1]["heads"].images.values.tolist() == [[5, 5]]
    # Forwards 0, 2 and 4 are measured, and of the last one a single image.
    expected_entropies = entropies(model, torch.cat([*batches[::2]])[:5])
    check_entropies(recorder, expected_entropies)


@pytest.mark.filterwarnings("ignore:no content_information")
def test_images_of_a_part_called_by_hand_count() -> None:
    """Its tokens are of an unknown kind, so that its class attention is of fewer images."""
    model = vit()
    with tcnn_probe.record(model) as recorder:
        model.blocks[1](torch.randn(6, 36, 12))
        model(images(4))
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[4, 10]]


def test_a_part_called_again_begins_a_forward() -> None:
    """Blocks are called on the same tokens again, without the patch embedding."""
    model, x = vit(), images()
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(x))
        with tcnn_probe.record(model, every=2) as recorder:
            model.patch_embed(x)
            for _ in range(3):
                model.blocks(tokens)
            recorder.mark(epoch=0)
            # The mark has ended the forward.
            model.blocks[1](model.blocks[0](tokens))
            recorder.mark(epoch=1)
    assert recorder.dataset.images.values.tolist() == [[6, 6], [3, 3]]


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_whole_model_decides(training: bool) -> None:
    """Modes of its parts, which users set for frozen layers or forget, do not count."""
    model = vit().train(training)
    # One part has the opposite mode.
    model.blocks[0].train(not training)
    modes = [module.training for module in model.modules()]
    with tcnn_probe.record(model, when="train" if training else "eval") as recorder:
        model(images())
        assert [module.training for module in model.modules()] == modes
        recorder.mark(epoch=0)
        assert recorder.dataset.images.values.tolist() == [[3, 3]]


def test_a_container_with_a_forward_is_called_as_a_whole() -> None:
    """timm's features_only=True returns a ModuleDict, whose layers run in one forward."""
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        features_only=True,
        out_indices=(0, 1),
        img_size=(24, 32),
        window_size=4,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
    ).eval()
    with tcnn_probe.record(model, images=[1]) as recorder, torch.no_grad():
        model(torch.randn(5, 3, 24, 32))
        recorder.mark(epoch=0)
    assert not recorder.missing
    assert recorder.dataset.images.values.tolist() == [[5, 5]]
    # The last layer is a single window, whose grid is that of the tracked tokens.
    assert recorder.tree["maps/2x3x4"].dataset.layer.values.tolist() == ["layers_1.blocks.0.attn"]


class Pair(nn.Module):
    """Two attention layers, which each test calls as it needs."""

    def __init__(self, forward: Callable[["Pair", Tensor], Tensor]) -> None:
        super().__init__()
        blocks = vit().blocks
        self.parts = nn.Module()  # this container is never called
        self.parts.one = blocks[0].attn
        self.parts.two = blocks[1].attn
        self._how = forward
        self.eval()

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        return (
            self(0.5 * x, again - 1) + self._how(self.parts, x)
            if again
            else self._how(self.parts, x)
        )


TOKENS = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0))


def test_layer_called_twice_in_a_forward_counts_twice() -> None:
    """The mean is over both calls, and ``images`` is twice
    as many. A shared layer has its first name.
    """
    model = Pair(lambda parts, x: parts.two(parts.one(x) + parts.one(0.3 * x)))
    model.parts.again = model.parts.one
    expected = (entropy(model.parts.one, TOKENS) + entropy(model.parts.one, 0.3 * TOKENS)).mean(
        0
    ) / 2
    with tcnn_probe.record(model) as recorder:
        model(TOKENS)
        recorder.mark(epoch=0)
        assert recorder.layers == ("parts.one", "parts.two")
        assert recorder.dataset.images.values.tolist() == [[6, 3]]
        # The second layer is not under test, so its own number serves as the expected one.
        check_entropies(
            recorder,
            torch.stack([expected, torch.as_tensor(recorder.dataset.entropy.values[0, 1])]),
        )


def test_model_that_calls_itself() -> None:
    model = Pair(lambda parts, x: parts.two(parts.one(x)))
    # The layer sees the tokens, half of them and a quarter of them.
    by_depth = [entropy(model.parts.one, TOKENS * 0.5**depth) for depth in range(3)]
    expected = torch.stack(by_depth).mean((0, 1))
    before = Trace(model)
    with tcnn_probe.record(model, layers="parts.one") as recorder:
        model(TOKENS, again=2)
        assert clean()
        recorder.mark(epoch=0)
        check_entropies(recorder, expected[None], images=9)
        model(TOKENS)
        recorder.mark(epoch=1)
        assert recorder.dataset.images.values[1].tolist() == [3]
    assert before == Trace(model)


def test_recording_in_the_handler_of_an_error_and_after_an_abandoned_generator() -> None:
    def outputs(model: nn.Module) -> Iterator[Tensor]:
        while True:
            yield model(images())

    model = vit()
    with tcnn_probe.record(model) as recorder:
        try:
            raise ValueError("not the forward's")
        except ValueError:
            model(images())
        stream = outputs(model)
        next(stream)
        next(stream)
        # The generator is closed at its yield, between two forwards.
        stream.close()
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[9, 9]]


class Inside(nn.Module):
    """Model whose inner model is checkpointed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed(how: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = Inside() if how == "inside" else vit()
    if how == "timm":
        model.set_grad_checkpointing()
    return model.train(), (
        lambda x: checkpoint(model, x, use_reentrant=True)
    ) if how == "around" else model


@pytest.mark.parametrize("how", ["inside", "timm", "around"])
def test_checkpointing_counts_nothing_twice(how: str) -> None:
    x = images().requires_grad_()
    expected = entropies(vit(), images())
    model, call = checkpointed(how)
    before = Trace(model)
    with tcnn_probe.record(model, when="train") as recorder:
        for epoch in range(2):
            call(x).sum().backward()
            recorder.mark(epoch=epoch)
            check_entropies(recorder, expected, images=3)
    assert before == Trace(model)
    # Without a recorder, the same passes must give gradients that are equal bit for bit.
    alone, call = checkpointed(how)
    for _ in range(2):
        call(x).sum().backward()
    for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)
