"""Each map is that of its image, whichever rows
of the batch reach a layer and wherever the image enters the model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zarr.storage import MemoryStore

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import recorded

IMAGES, HEADS, SIZE, PATCH = 5, 3, (28, 44), 4
GRID = (SIZE[0] // PATCH, SIZE[1] // PATCH)
# Maps are stored in half precision, rounded once.
HALF = 2**-10
MAPS = f"maps/{HEADS}x{GRID[0]}x{GRID[1]}"


class Block(nn.Module):
    num_heads = HEADS

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.qkv.weight.data.mul_(5)  # so that images differ in their attention
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 4)).permute(2, 0, 3, 1, 4)
        attended = (
            F.scaled_dot_product_attention(q, k, v)
            if self.fused
            else (q @ k.mT / 2).softmax(-1) @ v
        )
        return x + attended.transpose(1, 2).flatten(2)


class Selective(nn.Module):
    """Model whose second block gets some rows of the first one's tokens."""

    def __init__(self, select: Callable[[Tensor], Tensor], *, fused: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, PATCH, PATCH)
        self.first, self.second = Block(fused=fused), Block(fused=fused)
        self.select = select

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.patches(x).flatten(2).mT)
        return self.second(self.select(x)).mean(1)


def written(order: list[int]) -> Callable[[Tensor], Tensor]:
    def write(x: Tensor) -> Tensor:
        rows = torch.zeros_like(x)
        for place, row in enumerate(order):
            rows[place] = x[row]
        return rows

    return write


PERMUTATION = [3, 0, 4, 2, 1]
# Selections of rows, with the images that they show, in order; None if they cannot be followed.
SELECTIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "all": (lambda x: x, list(range(IMAGES))),
    "early exit": (
        lambda x: x[torch.tensor([False, True, False, True, True])],
        [1, 3, 4],
    ),
    "random subset": (lambda x: x[torch.tensor([4, 2])], [4, 2]),
    "sorted": (lambda x: x[torch.tensor(PERMUTATION)], PERMUTATION),
    "index_select": (lambda x: x.index_select(0, torch.tensor([2, 0])), [2, 0]),
    "gather": (
        lambda x: x.gather(0, torch.tensor(PERMUTATION)[:, None, None].expand_as(x)),
        PERMUTATION,
    ),
    "flip": (lambda x: x.flip(0), [4, 3, 2, 1, 0]),
    "cat": (lambda x: torch.cat([x[3:], x[:2]]), [3, 4, 0, 1]),
    "written": (written(PERMUTATION), PERMUTATION),
    "copied": (lambda x: torch.empty_like(x).copy_(x.flip(0)), [4, 3, 2, 1, 0]),
    # Each row is a sum over all rows, of which the weights show a single one.
    "product": (
        lambda x: (torch.eye(IMAGES)[PERMUTATION] @ x.flatten(1)).view_as(x),
        None,
    ),
    "einsum": (
        lambda x: torch.einsum("ij,jnc->inc", torch.eye(IMAGES)[PERMUTATION], x),
        None,
    ),
    "where": (
        lambda x: torch.where(torch.arange(IMAGES)[:, None, None] > 1, x, x.flip(0)),
        None,
    ),
    "mixup": (lambda x: 0.7 * x + 0.3 * x[PERMUTATION], None),
    "lerp": (lambda x: x.lerp(x.roll(1, 0), 0.2), None),
    "numpy": (lambda x: torch.from_numpy(x.numpy()[::-1].copy()), None),
}


def received(recorder: Any, layer: str = "second") -> np.ndarray:
    """Return the recorded maps of a layer, (images, ...)."""
    maps = recorder.tree[MAPS].attention_received
    return maps.sel(layer=layer, epoch=0).transpose("image", ...).values


def pictures(count: int = IMAGES) -> Tensor:
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.study(
    but=[
        "all-True",
        "random subset-True",
        "gather-True",
        "written-False",
        "mixup-True",
    ]
)
@pytest.mark.filterwarnings("ignore:no maps")
@pytest.mark.parametrize(
    ("name", "fused"),
    # Rows are followed up to the queries, whatever attends then.
    [
        *((name, True) for name in SELECTIONS),
        *((name, False) for name in ("all", "written", "einsum")),
    ],
)
def test_maps_are_those_of_the_images_that_reach_the_layer(name: str, fused: bool) -> None:
    select, shown = SELECTIONS[name]
    torch.manual_seed(0)
    model = Selective(lambda x: x, fused=fused).eval()
    # The second batch shows whether images are numbered by the model's batch, not by what the layer
    # saw.
    batches = pictures(2 * IMAGES).split(IMAGES)
    by_batch = []
    for batch in batches:
        tokens = model.first(model.patches(batch).flatten(2).mT)
        q, k, _ = model.second.qkv(tokens).double().unflatten(-1, (3, HEADS, 4)).unbind(2)
        logits = torch.einsum("nqhd,nkhd->nhqk", q, k) / 2
        by_batch.append(logits.softmax(-1).mean(2).unflatten(-1, GRID))
    expected = torch.stack(by_batch).detach().numpy()
    model.select = select
    recorder = recorded(model, *batches, images=2 * IMAGES)
    images = recorder.dataset.images.sel(layer="second").values
    assert images == 2 * (IMAGES if shown is None else len(shown))
    if shown is None:
        reason = recorder.missing["attention_received"]["second"]
        assert "could not be followed" in reason
        return
    assert not recorder.missing
    got = received(recorder).reshape(2, IMAGES, HEADS, *GRID)
    for image in range(IMAGES):
        if image in shown:
            np.testing.assert_allclose(got[:, image], expected[:, image], rtol=HALF, atol=1e-6)
        else:
            assert np.isnan(got[:, image]).all()


@pytest.mark.filterwarnings("ignore:no maps")
def test_images_that_move_only_in_some_forwards_get_no_other_maps() -> None:
    """The first forward shows nothing of a later selection:
    that one has no maps, and the next one is followed.
    """
    torch.manual_seed(0)
    model = Selective(lambda x: x).eval()
    batch = pictures()
    with tcnn_probe.record(model, images=3 * IMAGES) as recorder, torch.no_grad():
        model(batch)
        model.select = lambda x: x[[4, 2]]
        model(batch)
        model(batch)
        recorder.mark(epoch=0)
    got = received(recorder)
    seen = [image for image in range(3 * IMAGES) if not np.isnan(got[image]).any()]
    assert seen == [0, 1, 2, 3, 4, 12, 14]
    np.testing.assert_allclose(got[[12, 14]], got[[2, 4]], atol=1e-6)


def vit() -> nn.Module:
    torch.manual_seed(0)
    options = {"embed_dim": 12, "num_heads": HEADS, "depth": 2, "patch_size": PATCH}
    model = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, **options)
    return model.eval()


@dataclasses.dataclass
class Batch:
    label: Tensor
    image: Tensor


class Step(nn.Module):
    """Wrapper of a vision transformer, as a LightningModule is."""

    def __init__(self, net: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.net = net
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.net, *args, **kwargs)


LABELS = torch.arange(3)
# How a batch of images is passed to a wrapper, and the wrapper's forward.
CALLS: dict[str, tuple[Callable[[Tensor], tuple[Any, ...]], Callable[..., Any]]] = {
    "batch and number": (
        lambda x: ([LABELS, x], 0),
        lambda net, batch, i: net(batch[1]),
    ),
    "dict": (
        lambda x: ({"id": ["a"] * 3, "data": {"image": x}},),
        lambda net, batch: net(batch["data"]["image"]),
    ),
    "dataclass": (lambda x: (Batch(LABELS, x),), lambda net, batch: net(batch.image)),
    "list of images": (lambda x: (list(x),), lambda net, batch: net(torch.stack(batch))),
    "list of dicts": (
        lambda x: ([{"image": image, "label": 0} for image in x],),
        lambda net, batch: net(torch.stack([row["image"] for row in batch])),
    ),
    "channels last": (
        lambda x: (x.permute(0, 2, 3, 1),),
        lambda net, x: net(x.permute(0, 3, 1, 2)),
    ),
    "arrays": (
        lambda x: ({"image": x.numpy()},),
        lambda net, batch: net(torch.from_numpy(batch["image"])),
    ),
    "doubled size": (
        lambda x: (F.interpolate(x, scale_factor=2),),
        lambda net, x: net(F.interpolate(x, SIZE)),
    ),
}


@pytest.mark.study(but=["batch and number", "list of dicts"])
@pytest.mark.filterwarnings("ignore:the images")  # of doubled size, they are others
@pytest.mark.parametrize("name", CALLS)
def test_the_image_stands_anywhere_among_the_inputs(name: str) -> None:
    """A recording that was begun with the plain model goes on,
    with the same maps, in the same variables.
    """
    arguments, forward = CALLS[name]
    model, batch = Step(vit(), forward).eval(), pictures(3)
    store = MemoryStore()
    for epoch in range(2):
        with tcnn_probe.record(model, store, images=3) as recorder, torch.no_grad():
            model(*arguments(batch)) if epoch else model.net(batch)
            recorder.mark(epoch=epoch)
            assert "attention_distance" not in recorder.missing
    for variables in (recorder.dataset, recorder.tree[MAPS]):
        for variable, values in variables.data_vars.items():
            first, second = values.sel(epoch=0), values.sel(epoch=1)
            if name in ("arrays", "doubled size") and variable == "cell_pixels":
                # The model gets other pixels than it embeds, or their size is unknown.
                first = first * np.nan
            np.testing.assert_array_equal(first, second, str(variable))


def crops(x: Tensor) -> Tensor:
    """Return five crops of images of twice the size."""
    height, width = SIZE
    corners = [(0, 0), (0, width), (height, 0), (height, width), (5, 7)]
    cut = [x[:, :, y : y + height, z : z + width] for y, z in corners]
    return torch.cat(cut)


# What a wrapper makes of its images, and the number of views of each.
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "flips": (lambda x: torch.cat([x, x.flip(-1)]), 1, 2),
    "flip first": (lambda x: torch.cat([x.flip(-1), x]), 1, 2),
    "stacked": (lambda x: torch.stack([x, x.flip(-2)], 1).flatten(0, 1), 1, 2),
    "crops": (crops, 2, 5),
    "windows": (
        lambda x: (
            x.unfold(2, SIZE[0], SIZE[0])
            .unfold(3, SIZE[1], SIZE[1])
            .permute(0, 2, 3, 1, 4, 5)
            .flatten(0, 2)
        ),
        2,
        4,
    ),
    "one crop": (lambda x: crops(x)[:3], 2, 1),
    "mirrored": (lambda x: x.flip(-1), 1, 1),
}


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:no maps")
@pytest.mark.parametrize("name", VIEWS)
def test_what_enters_the_patch_embedding_counts_as_an_image(name: str) -> None:
    """Its numbers are those of the views themselves; a view is no map of its image."""
    view, scale, count = VIEWS[name]
    net, images = vit(), F.interpolate(pictures(3), scale_factor=scale)
    model = Step(net, lambda net, x: net(view(x))).eval()
    numbers = []
    for observed, batch in ((model, images), (net, view(images))):
        recorder = recorded(observed, batch, images=3)
        numbers.append(recorder.dataset)
        if observed is model:
            assert MAPS not in recorder.tree
            reasons = set(recorder.missing["class_attention"].values())
            several = "turns each image into several"
            part = "crops, flips or turns images"
            assert (several if count > 1 else part) in reasons.pop()
            assert not reasons
    views, expected = numbers
    assert views.images.values.tolist() == [[3 * count] * 2]
    for variable in ("entropy", "attention_distance", "class_entropy"):
        assert np.isfinite(views[variable]).all()
        np.testing.assert_allclose(views[variable], expected[variable], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:no maps")
@pytest.mark.parametrize(("frames_first", "at_once"), [(True, 18), (False, 18), (True, 6)])
def test_views_or_frames_that_are_embedded_one_by_one_are_images(
    frames_first: bool, at_once: int
) -> None:
    """Layers that join them, such as attention over time, have a row for each place of an input."""
    net, frames = vit().double(), 6
    time = nn.MultiheadAttention(12, HEADS, batch_first=True).double()
    pictures_of_inputs = pictures(3 * frames).double()
    batch = pictures_of_inputs.unflatten(0, (3, frames))
    if not frames_first:
        batch = batch.transpose(1, 2)

    def divided(net: Any, x: Tensor) -> Tensor:
        images = (x if frames_first else x.transpose(1, 2)).flatten(0, 1)
        tokens = torch.cat([net.forward_features(x) for x in images.split(at_once)])
        over_time = tokens.unflatten(0, (-1, frames)).transpose(1, 2).flatten(0, 1)
        return model.time(over_time, over_time, over_time, need_weights=False)[0]

    model = Step(net, divided)
    model.time = time
    numbers = []
    for observed, images in ((model.eval(), batch), (net, pictures_of_inputs)):
        recorder = recorded(observed, images, images=3)
        numbers.append(recorder.dataset)
        if observed is model:
            reasons = recorder.missing["attention_distance"]
    joined, expected = numbers
    assert joined.images.sel(epoch=0, layer="time") == 3
    assert list(reasons) == ["time"]
    for variable in expected.data_vars:
        ours = joined[variable].isel(layer=slice(2))
        # Differences of information, which nearly cancel, are of numbers of a few nats.
        np.testing.assert_allclose(ours, expected[variable], 1e-5, 1e-13, err_msg=str(variable))


class Tiled(nn.Module):
    """Model that gets words and tiles of images, and calls its layers by keyword,
    as those of transformers do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(90, 12)
        self.patches = nn.Conv2d(3, 12, PATCH, PATCH)
        self.first, self.second = Block(), Block()

    def forward(self, words: Tensor, tiles: Tensor) -> Tensor:
        tokens = self.patches(tiles.flatten(0, -4)).flatten(2).mT
        return self.second(x=self.first(x=tokens)).mean() + self.words(words)


def test_tiles_beside_words_are_images() -> None:
    torch.manual_seed(0)
    model, images = Tiled().double().eval(), pictures(6).double()
    words = torch.randint(2, 90, (3, 7))
    tiled, expected = (
        recorded(model, batch).dataset
        for batch in ((words, images.unflatten(0, (3, 2))), (words, images))
    )
    assert tiled.images.values.tolist() == [[6] * 2]
    assert np.isfinite(tiled.attention_distance).all()
    for variable in ("entropy", "attention_distance", "content_information"):
        np.testing.assert_allclose(tiled[variable], expected[variable], rtol=1e-9)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "neighbours": lambda x: x.repeat_interleave(2, 0),
    "repeated": lambda x: x.repeat(2, 1, 1),
    "joined": lambda x: torch.cat([x, F.dropout(x, 0.0)]),
    "expanded": lambda x: x[:, None].expand(-1, 2, -1, -1).flatten(0, 1),
}


@pytest.mark.filterwarnings("ignore:no maps")
@pytest.mark.parametrize("name", COPIES)
def test_tokens_multiplied_after_the_embedding_count_as_images(name: str) -> None:
    """Copies of an image's tokens are no windows: they have its numbers."""
    net = vit()

    def multiplied(net: Any, x: Tensor) -> Tensor:
        tokens = COPIES[name](net._pos_embed(net.patch_embed(x)))
        return net.blocks(tokens).mean(1)

    # The second batch is not tracked.
    batches = pictures().split([3, 2])
    numbers = []
    for model in (Step(net, multiplied).eval(), net):
        recorder = recorded(model, *batches, images=2)
        numbers.append(recorder.dataset)
        if model is not net:
            reasons = set(recorder.missing["class_attention"].values())
            assert "turns each image into several" in reasons.pop()
    copied, expected = numbers
    assert copied.images.values.tolist() == [[2 * IMAGES] * 2]
    for variable in ("entropy", "attention_distance", "class_entropy", "max_logit"):
        np.testing.assert_allclose(copied[variable], expected[variable], rtol=1e-6)


class Pruned(nn.Module):
    """Vision transformer that drops half of its patches after the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit()

    def forward(self, x: Tensor) -> Tensor:
        x = self.vit.norm_pre(self.vit._pos_embed(self.vit.patch_embed(x)))
        x = self.vit.blocks[0](x)[:, ::2]
        return self.vit.forward_head(self.vit.norm(self.vit.blocks[1](x)))


def test_class_attention_of_an_early_layer_is_announced() -> None:
    with pytest.warns(RuntimeWarning, match=r"that of 'vit\.blocks\.0\.attn'.*no grid"):
        maps = tcnn_probe.saliency(Pruned().eval(), pictures())
    assert maps.attrs["layer"] == "vit.blocks.0.attn"


def test_maps_of_a_layer_that_sees_the_images_in_another_order() -> None:
    torch.manual_seed(0)
    model = Selective(lambda x: x).eval()
    batch = pictures()
    node = MAPS.removeprefix("maps/")
    expected = tcnn_probe.attention_maps(model, batch)[node].attention
    model.select, _ = SELECTIONS["sorted"]
    got = tcnn_probe.attention_maps(model, batch)[node].attention
    np.testing.assert_allclose(got, expected, atol=1e-6)
