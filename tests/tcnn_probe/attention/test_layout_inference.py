"""A grid that is not there is never reported, and heads, windows and images are not taken for each other."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.twins import Twins
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import Family, check_family, expect, recorded
from tests.tcnn_probe.attention.sharpen import sharpen

DIM, HEADS = 12, 3


class Attend(nn.Module):
    """(..., N, d) to itself."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(DIM, 3 * DIM), heads

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        keys = x if keys is None else keys
        q, _, _ = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-2, -3)
        _, k, v = self.qkv(keys).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


class Seeing(nn.Module):
    """4 x 4 or 3 x 5 patches of 8 x 8 pixels."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.stem, self.attend = nn.Conv2d(3, DIM, 8, 8), Attend(heads)

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.tokens(x))


class Latents(Seeing):
    """A Perceiver: 9 latents look at the patches, then at each other. No 3 x 3 of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.among = nn.Parameter(torch.randn(1, 9, DIM)), Attend()

    def forward(self, x: Tensor) -> Tensor:
        return self.among(self.attend(self.latents.expand(len(x), -1, -1), self.tokens(x)))


class Registers(Seeing):
    """16 patches after 9 registers of which nobody is told: no 5 x 5."""

    def __init__(self, count: int = 9) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, count, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(torch.cat([self.registers.expand(len(x), -1, -1), self.tokens(x)], 1))


class Text(nn.Module):
    """9 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(50, DIM), Attend()

    def forward(self, words: Tensor) -> Tensor:
        return self.attend(self.embed(words))


class ImageAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Seeing(), Text()

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(x), self.text(words)


class Rows(Seeing):
    """Axial: the 4 pixels of each row attend to each other; no 2 x 2 windows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.stem(x).permute(0, 2, 3, 1).flatten(0, 1))


class Frames(Seeing):
    """(B, T, N, C) with one frame: the layer is given (B, 1, 16, C), and 1 x 16 is no grid of these images."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.tokens(x)[:, None])


def square(images: int = 5) -> Tensor:
    return torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def words(images: int = 5) -> Tensor:
    return torch.randint(50, (images, 9), generator=torch.Generator().manual_seed(6))


PATCHES = grid(4, 4)
NOWHERE = Layout(None, None)


@pytest.mark.parametrize(
    ("model", "inputs", "layouts"),
    [
        (Latents(), (square(),), {"attend": NOWHERE, "among": NOWHERE}),
        (Registers(), (square(),), {"attend": NOWHERE}),
        (Text(), (words(),), {"attend": NOWHERE}),
        (ImageAndText(), (square(), words()), {"image.attend": Layout(PATCHES, PATCHES), "text.attend": NOWHERE}),
        (Rows(), (square(),), {"attend": NOWHERE}),
        (Attend(), (torch.randn(5, 16, DIM),), {"": NOWHERE}),
        (Seeing(heads=1), (square(),), {"attend": Layout(PATCHES, PATCHES)}),
        (Seeing(), (square(3),), {"attend": Layout(PATCHES, PATCHES)}),  # as many images as heads
        (Seeing(), (square(16),), {"attend": Layout(PATCHES, PATCHES)}),  # as many images as tokens
        (Seeing(), (square()[..., :8, :8],), {"attend": Layout(grid(1, 1), grid(1, 1))}),  # one token
    ],
    ids=["latents", "registers", "text", "image+text", "rows", "features", "one head", "B=heads", "B=N", "N=1"],
)
def test_grids(model: nn.Module, inputs: tuple[Tensor, ...], layouts: dict[str, Layout]) -> None:
    sharpen(model, 2.2)
    wholes = attention_of(model, *inputs)
    ds, _, unsupported = recorded(model, [inputs])
    assert not unsupported
    expect(ds, wholes, layouts, len(inputs[0]))


def test_frames() -> None:
    """Its grid is known from the feature map, and is the right one."""
    model = sharpen(Frames(), 2.2)
    layout = Layout(PATCHES, PATCHES, arrange=lambda weights, images: weights)
    ds, _, _ = recorded(model, [square()])
    expect(ds, attention_of(model, square()), {"attend": layout}, 5)


def test_reason_is_kept() -> None:
    with tcnn_probe.record(sharpen(Registers())) as recorder:
        recorder_model = recorder._model
        with torch.no_grad():
            recorder_model(square())
        recorder.mark(epoch=0)
        assert "25 keys: no grid found" in recorder.dataset.attrs["missing"]


def test_reasons_of_missing_maps() -> None:
    with tcnn_probe.record(sharpen(Latents()), images=1) as recorder, torch.no_grad():
        recorder._model(square())
        recorder.mark(epoch=0)
    missing = recorder.missing
    assert set(missing["attention_received"]) == {"among"}
    assert set(missing["center_attention"]) == {"attend", "among"}


@pytest.mark.parametrize("count", [4, 9])
def test_registers_that_are_declared(count: int) -> None:
    model = sharpen(Registers(count), 2.2)
    tokens = grid(4, 4, prefix=count)
    ds, _, _ = recorded(model, [square()], prefix_tokens=count)
    expect(ds, attention_of(model, square()), {"attend": Layout(tokens, tokens, class_query=True)}, 5)


def test_as_many_heads_as_windows() -> None:
    """(B, windows, heads, N, d) with 2 windows and 2 heads."""
    small = {"embed_dims": (8,), "num_heads": (2,), "mlp_ratios": (1,), "depths": (1,), "sr_ratios": (7,), "wss": (7,)}
    tokens = grid(7, 7)
    layout = Layout(tokens, tokens, arrange=lambda weights, images: weights)
    check_family(
        Family("twins", lambda: sharpen(Twins(num_classes=5, **small), 2.2), (28, 56), lambda layer, module: layout)
    )


def test_as_many_heads_as_windows_of_ones_own() -> None:
    """Heads are next to the tokens, where they nearly always are."""

    class Windows(Seeing):
        def forward(self, x: Tensor) -> Tensor:
            return self.attend(self.tokens(x)[:, :12].unflatten(1, (3, 4)))

    model = sharpen(Windows(), 2.2)
    (whole,) = attention_of(model, square())
    assert whole.weights.shape == (5, 3, HEADS, 4, 4)
    ds, _, _ = recorded(model, [square()])
    expect(ds, [whole], {"attend": Layout(None, None, arrange=lambda weights, images: weights)}, 5)


def test_as_many_images_as_merged_heads() -> None:
    """(B * heads, N, N), with 4 images and 4 heads."""
    model = sharpen(timm.create_model("botnet26t_256", img_size=(64, 96)), 2.0)
    pictures = torch.randn(4, 3, 64, 96)
    wholes = attention_of(model, pictures)
    ds, _, _ = recorded(model, [pictures])
    for whole in wholes:
        weights = whole.weights.unflatten(0, (4, 4)).numpy()
        entropy = -(weights * np.log(weights)).sum(-1).mean((0, 2))
        np.testing.assert_allclose(ds.entropy.sel(layer=whole.layer), entropy, atol=1e-4)


@pytest.mark.parametrize("name", ["num_heads", "n_heads", "nhead", "heads", "n_head", "num_attention_heads"])
def test_merged_heads_of_ones_own(name: str) -> None:
    """(B * heads, N, d), as many write it by hand; how many heads is known from the layer."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.qkv = nn.Conv2d(3, DIM, 8, 8), nn.Linear(DIM, 3 * DIM)
            setattr(self, name, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.stem(x).flatten(2).mT).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return torch.bmm(torch.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT), -1), v.flatten(0, 1))

    model = sharpen(Merged(), 2.2)
    layout = Layout(PATCHES, PATCHES, arrange=lambda weights, images: weights.unflatten(0, (images, 1, HEADS)))
    ds, _, _ = recorded(model, [square()])
    expect(ds, attention_of(model, square()), {"": layout}, 5)


def test_merged_heads_that_nobody_counts() -> None:
    class Merged(Seeing):
        def forward(self, x: Tensor) -> Tensor:
            q = self.tokens(x).repeat_interleave(HEADS, 0)
            return F.scaled_dot_product_attention(q, q, q)

    with tcnn_probe.record(Merged().eval()) as recorder, torch.no_grad():
        recorder._model(square())
        assert "or as many heads, if the layer has no num_heads" in recorder.missing["attention_distance"][""]


def test_sequence_first() -> None:
    """Features (N, B, d): 16 tokens of 4 images."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(DIM, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, x, x)[0]

    model = sharpen(Encoder(), 2.2)
    features = torch.randn(2, 4, DIM)
    layout = Layout(None, None, arrange=lambda weights, images: weights.unflatten(0, (4, 1, HEADS)))
    ds, _, _ = recorded(model, [features])
    expect(ds, attention_of(model, features), {"attend": layout}, 4)


def test_parts_called_one_after_another() -> None:
    """Whoever calls forward_features of a model of his own enters through its children."""
    model = sharpen(Seeing(), 2.2)
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model.attend(model.stem(square()).flatten(2).mT)
        model.attend(model.stem(square()[..., :24]).flatten(2).mT)
        recorder.mark(epoch=0)
        distance = recorder.dataset.attention_distance.isel(epoch=0).sel(layer="attend").values
    wholes = [attention_of(model, pictures)[0] for pictures in (square(), square()[..., :24])]
    expected = [
        Layout(tokens, tokens).expected(whole, 5)["attention_distance"]
        for whole, tokens in zip(wholes, (grid(4, 4), grid(4, 3)), strict=True)
    ]
    np.testing.assert_allclose(distance, np.mean(expected, 0), atol=1e-4)
