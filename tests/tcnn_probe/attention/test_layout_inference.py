"""A grid that is not there is never reported, and heads, windows and images are not taken for each other."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import TOLERANCE, as_it_is, check, merged, same
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded

pytestmark = pytest.mark.numerical

DIM, HEADS = 12, 3


class Attend(nn.Module):
    """(..., N, d) to itself, or to the keys."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(DIM, 3 * DIM), heads

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        (q, _, _), (_, k, v) = (
            self.qkv(given).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-2, -3)
            for given in (x, x if keys is None else keys)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


class Seeing(nn.Module):
    """4 x 4 or 3 x 5 patches of 8 x 8 pixels, handed on in some way."""

    def __init__(self, way: Callable[["Seeing", Tensor], Tensor], heads: int = HEADS, more: int = 1) -> None:
        super().__init__()
        self.stem, self.attend, self.among = nn.Conv2d(3, DIM, 8, 8), Attend(heads), Attend(heads)
        self.norm, self.more, self.way = nn.LayerNorm(DIM), nn.Parameter(torch.randn(1, more, DIM)), way
        sharpen(self, 2.2)

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).mT

    def with_more(self, x: Tensor) -> Tensor:
        return torch.cat([self.more.expand(len(x), -1, -1), self.tokens(x)], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def patches(model: Seeing, x: Tensor) -> Tensor:
    return model.attend(model.tokens(x))


def registers(model: Seeing, x: Tensor) -> Tensor:
    return model.attend(model.with_more(x))


def latents(model: Seeing, x: Tensor) -> Tensor:
    """A Perceiver: latents look at the patches, then at each other."""
    return model.among(model.attend(model.more.expand(len(x), -1, -1), model.tokens(x)))


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
        self.image, self.text = Seeing(patches), Text()

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(x), self.text(words)


def square(images: int = 5) -> Tensor:
    return torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(5))


WORDS = torch.randint(50, (5, 9), generator=torch.Generator().manual_seed(6))
PATCHES, NOWHERE = same(grid(4, 4)), Layout(None, None)

CASES = {
    "latents": (Seeing(latents, more=9), square(), NOWHERE),  # no 3 x 3 of anything
    "registers": (Seeing(registers, more=9), square(), NOWHERE),  # 25 tokens, no 5 x 5
    "text": (sharpen(Text()), WORDS, NOWHERE),
    "features": (sharpen(Attend()), torch.randn(5, 16, DIM), NOWHERE),
    # Axial: the 4 pixels of each row attend to each other, in no 2 x 2 windows.
    "rows": (Seeing(lambda m, x: m.attend(m.stem(x).permute(0, 2, 3, 1).flatten(0, 1))), square(), NOWHERE),
    # 3 windows of 4 tokens, of which heads are next to the tokens, where they nearly always are.
    "windows": (
        Seeing(lambda m, x: m.attend(m.tokens(x)[:, :12].unflatten(1, (3, 4)))),
        square(),
        Layout(None, None, arrange=as_it_is),
    ),
    # (B, T, N, C) with one frame: the layer is given (B, 1, 16, C), and 1 x 16 is no grid of these images.
    "frames": (Seeing(lambda m, x: m.attend(m.tokens(x)[:, None])), square(), same(grid(4, 4), arrange=as_it_is)),
    # No module is given (B, C, H, W) after the images: (B, H, W, C) shows the grid.
    "channels last": (
        Seeing(lambda m, x: m.attend(m.norm(F.avg_pool2d(x.repeat(1, 4, 1, 1), 8).movedim(1, 3)).flatten(1, 2))),
        square(),
        PATCHES,
    ),
    "one head": (Seeing(patches, heads=1), square(), PATCHES),
    "B = heads": (Seeing(patches), square(3), PATCHES),
    "B = N": (Seeing(patches), square(16), PATCHES),
    "N = 1": (Seeing(patches), square()[..., :8, :8], same(grid(1, 1))),
}


@pytest.mark.parametrize("case", CASES)
def test_grids(case: str) -> None:
    model, inputs, layout = CASES[case]
    check(model, inputs, dict.fromkeys(("attend", "among", ""), layout))


def test_image_and_text() -> None:
    model = sharpen(ImageAndText(), 2.2)
    check(model, (square(), WORDS), {"image.attend": PATCHES, "text.attend": NOWHERE})


@pytest.mark.parametrize("count", [4, 9])
def test_registers_that_are_declared(count: int) -> None:
    model = Seeing(registers, more=count)
    check(model, square(), {"attend": same(grid(4, 4, prefix=count))}, prefix_tokens=count)


def test_reasons_of_what_is_missing() -> None:
    for model, missing in ((Seeing(registers, more=9), ["attend"]), (Seeing(latents, more=9), ["attend", "among"])):
        recorder = recorded(model, square(), images=1)
        assert [*recorder.missing["center_attention"]] == missing
        assert recorder.missing["attention_distance"].keys() == set(missing)
    assert recorder.missing["attention_received"].keys() == {"among"}
    assert "9 keys: no grid found" in recorder.missing["attention_distance"]["among"]


class Merged(Seeing):
    """(B * heads, N, d), as many write it by hand."""

    def __init__(self, name: str = "") -> None:
        super().__init__(patches)
        if name:
            setattr(self, name, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend.qkv(self.tokens(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)


@pytest.mark.parametrize(("name", "images"), [("num_heads", 5), ("num_attention_heads", HEADS)])
def test_merged_heads(name: str, images: int) -> None:
    """How many there are is known from the layer, also if there are as many images."""
    check(Merged(name), square(images), {"": same(grid(4, 4), arrange=merged(HEADS))})


def test_merged_heads_that_nobody_counts() -> None:
    model = Merged()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(square())
        assert "or as many heads, if the layer has no num_heads" in recorder.missing["attention_distance"][""]


def test_parts_called_one_after_another() -> None:
    """Whoever calls forward_features of a model of his own enters through its children."""
    model, wide, narrow = Seeing(patches).double(), square().double(), square()[..., :24].double()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for images in (wide, narrow):
            model.attend(model.stem(images).flatten(2).mT)
        recorder.mark(epoch=0)
    expected = [
        same(grid(4, columns)).expected(attention_of(model, images)[0], 5)["attention_distance"]
        for images, columns in ((wide, 4), (narrow, 3))
    ]
    distance = recorder.dataset.attention_distance.isel(epoch=0).sel(layer="attend")
    np.testing.assert_allclose(distance, np.mean(expected, 0), rtol=0, atol=TOLERANCE)
