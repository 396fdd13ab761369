"""A grid that is not there is never reported, and heads, windows and images are not taken for each other."""

from collections.abc import Callable
from typing import Any

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

DIM, HEADS = 12, 3


class Attend(nn.Module):
    """(..., N, d) to itself, or to the keys."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.num_heads = heads

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        # Queries from the tokens, keys and values from the keys, through one projection.
        (q, _, _), (_, k, v) = (
            self.qkv(tokens)
            .unflatten(-1, (3, self.num_heads, -1))
            .movedim(-3, 0)
            .transpose(-2, -3)
            for tokens in (x, x if keys is None else keys)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


class Seeing(nn.Module):
    """4 x 4 or 3 x 5 patches of 8 x 8 pixels, handed on in some way."""

    def __init__(
        self,
        way: Callable[["Seeing", Tensor], Tensor],
        heads: int = HEADS,
        extra_tokens: int = 1,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 8, 8)
        self.attend = Attend(heads)
        self.among = Attend(heads)
        self.norm = nn.LayerNorm(DIM)
        self.extra_tokens = nn.Parameter(torch.randn(1, extra_tokens, DIM))
        self.way = way
        # As drawn, attention is even, and even attention has the right numbers on any grid.
        sharpen(self, 2.2)

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).mT

    def with_extra_tokens(self, x: Tensor) -> Tensor:
        return torch.cat([self.extra_tokens.expand(len(x), -1, -1), self.tokens(x)], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def patches(model: Seeing, x: Tensor) -> Tensor:
    return model.attend(model.tokens(x))


def registers(model: Seeing, x: Tensor) -> Tensor:
    return model.attend(model.with_extra_tokens(x))


def at_the_end(model: Seeing, x: Tensor) -> Tensor:
    """A class token behind the patches."""
    return model.attend(
        torch.cat([model.tokens(x), model.extra_tokens.expand(len(x), -1, -1)], 1)
    )


def after_registers(model: Seeing, x: Tensor) -> Tensor:
    """Registers before the patches, a class token behind them."""
    extra_tokens = model.extra_tokens.expand(len(x), -1, -1)
    return model.attend(
        torch.cat([extra_tokens[:, 1:], model.tokens(x), extra_tokens[:, :1]], 1)
    )


def joined_twice(model: Seeing, x: Tensor) -> Tensor:
    """A class token, then registers between it and the patches, as in DINOv2."""
    tokens = torch.cat(
        [model.extra_tokens[:, :1].expand(len(x), -1, -1), model.tokens(x)], 1
    )
    # Between the class token and the patches: the grid is not what was joined last.
    return model.attend(
        torch.cat(
            [tokens[:, :1], model.extra_tokens.expand(len(x), -1, -1), tokens[:, 1:]], 1
        )
    )


def written(model: Seeing, x: Tensor, place: int = -1) -> Tensor:
    """A class token written into its place, so that nothing shows where it is."""
    tokens = model.tokens(x)
    # Written by index, so that no concatenation shows which token came from where.
    sequence = tokens.new_zeros(len(x), 17, DIM)
    sequence[:, 1 if place == 0 else 0 :][:, :16] = tokens
    sequence[:, place] = model.extra_tokens[0, 0]
    return model.attend(sequence)


def latents(model: Seeing, x: Tensor) -> Tensor:
    """A Perceiver: latents look at the patches, then at each other."""
    return model.among(
        model.attend(model.extra_tokens.expand(len(x), -1, -1), model.tokens(x))
    )


class Text(nn.Module):
    """9 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, DIM)
        self.attend = Attend()

    def forward(self, words: Tensor) -> Tensor:
        return self.attend(self.embed(words))


class ImageAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = Seeing(patches)
        self.text = Text()

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(x), self.text(words)


# Five images, which is no number of heads here.
def square(images: int = 5) -> Tensor:
    return torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(5))


# 9 words could be a grid of 3 x 3.
WORDS = torch.randint(50, (5, 9), generator=torch.Generator().manual_seed(6))
PATCHES = same(grid(4, 4))
NOWHERE = Layout(None, None)


def first_last(weights: Tensor, images: int) -> Tensor:
    """The last token before the others."""
    # Rolled by one, so that the class token leads, as in all our layouts.
    return weights.roll((1, 1), (-2, -1)).unflatten(0, (images, 1))


BEHIND = same(grid(4, 4, prefix=1), arrange=first_last)

CASES = {
    "latents": (
        Seeing(latents, extra_tokens=9),
        square(),
        NOWHERE,
    ),  # no 3 x 3 of anything
    "registers": (
        Seeing(registers, extra_tokens=9),
        square(),
        same(grid(4, 4, prefix=9)),
    ),  # 25 tokens, no 5 x 5
    "at the end": (Seeing(at_the_end), square(), BEHIND),
    "after registers": (
        Seeing(after_registers, extra_tokens=5),
        square(),
        same(grid(4, 4, prefix=5), arrange=first_last),
    ),
    "twice": (
        Seeing(joined_twice, extra_tokens=2),
        square(),
        same(grid(4, 4, prefix=3)),
    ),
    "text": (sharpen(Text()), WORDS, NOWHERE),
    "features": (sharpen(Attend()), torch.randn(5, 16, DIM), NOWHERE),
    # Axial: the 4 pixels of each row attend to each other, in no 2 x 2 windows.
    "rows": (
        Seeing(lambda m, x: m.attend(m.stem(x).permute(0, 2, 3, 1).flatten(0, 1))),
        square(),
        NOWHERE,
    ),
    # 3 windows of 4 tokens, of which heads are next to the tokens, where they nearly always are.
    "windows": (
        Seeing(lambda m, x: m.attend(m.tokens(x)[:, :12].unflatten(1, (3, 4)))),
        square(),
        Layout(None, None, arrange=as_it_is),
    ),
    # (B, T, N, C) with one frame: the layer is given (B, 1, 16, C), and 1 x 16 is no grid of these images.
    "frames": (
        Seeing(lambda m, x: m.attend(m.tokens(x)[:, None])),
        square(),
        same(grid(4, 4), arrange=as_it_is),
    ),
    # No module is given (B, C, H, W) after the images: (B, H, W, C) shows the grid.
    "channels last": (
        Seeing(
            lambda m, x: m.attend(
                m.norm(F.avg_pool2d(x.repeat(1, 4, 1, 1), 8).movedim(1, 3)).flatten(
                    1, 2
                )
            )
        ),
        square(),
        PATCHES,
    ),
    "one head": (Seeing(patches, heads=1), square(), PATCHES),
    # Three images and three heads: an axis of one must not be taken for the other.
    "B = heads": (Seeing(patches), square(3), PATCHES),
    # As many images as tokens.
    "B = N": (Seeing(patches), square(16), PATCHES),
    "N = 1": (Seeing(patches), square()[..., :8, :8], same(grid(1, 1))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:no attention_distance and no maps of among")
def test_grids(case: str) -> None:
    model, inputs, layout = CASES[case]
    check(model, inputs, dict.fromkeys(("attend", "among", ""), layout))


def test_image_and_text() -> None:
    model = sharpen(ImageAndText(), 2.2)
    check(model, (square(), WORDS), {"image.attend": PATCHES, "text.attend": NOWHERE})


# 4 and 9 are squares, which could be taken for grids of their own.
@pytest.mark.parametrize("count", [4, 9])
def test_registers_that_are_declared(count: int) -> None:
    model = Seeing(registers, extra_tokens=count)
    check(
        model, square(), {"attend": same(grid(4, 4, prefix=count))}, prefix_tokens=count
    )


def test_reasons_of_what_is_missing() -> None:
    with pytest.warns(
        RuntimeWarning,
        match=r"no maps of among: 9 keys: no grid found; if they show the image, grid=\(rows, columns\)",
    ):
        recorder = recorded(Seeing(latents, extra_tokens=9), square(), images=1)
    assert [*recorder.missing["center_attention"]] == ["attend", "among"]
    assert recorder.missing["attention_distance"].keys() == {"attend", "among"}
    assert recorder.missing["attention_received"].keys() == {"among"}
    assert "9 keys: no grid found" in recorder.missing["attention_distance"]["among"]


@pytest.mark.parametrize(
    ("said", "layout"),
    [
        ({"class_token": "last"}, BEHIND),
        ({"class_token": "first"}, same(grid(4, 4, prefix=1))),
        ({"prefix_tokens": 1}, same(grid(4, 4, prefix=1))),
        # Another grid than that of the image is taken at the user's word.
        ({"grid": (2, 8), "prefix_tokens": 1}, same(grid(2, 8, prefix=1))),
    ],
)
def test_what_the_user_says(said: dict[str, Any], layout: Layout) -> None:
    check(Seeing(written), square(), {"attend": layout}, **said)


def test_a_token_of_which_nobody_says_where_it_is() -> None:
    # The message names both ways out: a number of tokens before the grid, or the place of the class token.
    message = "17 keys: no grid found; .*, prefix_tokens=1 makes it 4 x 4 .* class_token='last'"
    with tcnn_probe.record(Seeing(written).eval()) as recorder, torch.no_grad():
        recorder._model(square())
        with pytest.warns(RuntimeWarning, match=message):
            recorder.mark(epoch=0)
        recorder._model(square())
        recorder.mark(epoch=1)  # once is enough
    assert recorder.dataset.attention_distance.isnull().all()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"class_token": "end"}, "class_token='first', 'last' or 'none', got 'end'"),
        ({"grid": 4}, r"grid=\(rows, columns\) of patches, got 4"),
    ],
)
def test_what_the_user_cannot_say(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.record(Seeing(patches), **said)


class Other(nn.Module):
    """A layer with a softmax that is no attention between tokens."""

    def __init__(self, way: Callable[["Other", Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.codes = nn.Parameter(torch.randn(3 * DIM, DIM))
        self.way = way

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def linear_attention(m: Other, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


def linear_attention_by_einsum(m: Other, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    q = q.softmax(-1)  # which has the keys' shape
    summary = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return torch.einsum("bhnd,bhde->bhne", q, summary)


def linear_attention_scaled(m: Other, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return q.softmax(-1) @ (k.mT @ v / k.shape[-2])


def soft_assignment(m: Other, x: Tensor) -> Tensor:
    return m.qkv(x).softmax(-1) @ m.codes


def soft_assignment_expanded(m: Other, x: Tensor) -> Tensor:
    # Expanded or repeated, codes have an axis of images, over which they are the same.
    return m.qkv(x).softmax(-1) @ m.codes.expand(len(x), -1, -1)


def soft_assignment_repeated(m: Other, x: Tensor) -> Tensor:
    return m.qkv(x).softmax(-1) @ m.codes.repeat(len(x), 1, 1)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (linear_attention, "softmax over channels"),
        (linear_attention_scaled, "softmax over channels"),
        (linear_attention_by_einsum, "softmax over channels"),
        (soft_assignment, "the same for all images"),
        (soft_assignment_expanded, "the same for all images"),
        (soft_assignment_repeated, "the same for all images"),
    ],
)
def test_a_softmax_over_something_else_is_not_recorded(
    way: Callable[..., Tensor], reason: str
) -> None:
    # Beside a layer that attends: what is refused must not take the other's place.
    model = Seeing(lambda m, x: m.attend(m.tokens(x)) + m.other(m.tokens(x)).sum())
    model.other = Other(way)
    recorder = recorded(model, square())
    assert recorder.layers == ("attend",)
    assert reason in recorder.unsupported["other"]
    with (
        tcnn_probe.ablate(model, {"other": [0]}),
        pytest.raises(RuntimeError, match=reason),
    ):
        model(square())


def attention_of_attention(m: Seeing, x: Tensor) -> Tensor:
    """The values of the second are what the first gives: tokens."""
    q, k, v = (
        m.attend.qkv(m.tokens(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    )
    weights = torch.softmax(q @ k.mT, -1)
    return torch.softmax(k @ q.mT, -1) @ (weights @ v)


def test_attention_over_what_attention_gives() -> None:
    check(Seeing(attention_of_attention), square(), {"": PATCHES, "#1": PATCHES})


class Merged(Seeing):
    """(B * heads, N, d), as many write it by hand."""

    def __init__(self, name: str = "") -> None:
        super().__init__(patches)
        if name:
            setattr(self, name, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.attend.qkv(self.tokens(x))
            .unflatten(-1, (3, HEADS, -1))
            .permute(2, 0, 3, 1, 4)
            .flatten(1, 2)
        )
        return torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)


@pytest.mark.parametrize(
    ("name", "images"), [("num_heads", 5), ("num_attention_heads", HEADS)]
)
def test_merged_heads(name: str, images: int) -> None:
    """The layer says how many heads there are, also if there are as many images."""
    check(Merged(name), square(images), {"": same(grid(4, 4), arrange=merged(HEADS))})


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_merged_heads_that_nobody_counts() -> None:
    model = Merged()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(square())
        assert (
            "or as many heads, if the layer has no num_heads"
            in recorder.missing["attention_distance"][""]
        )


def test_parts_called_one_after_another() -> None:
    """Whoever calls forward_features of a model of his own enters through its children."""
    model = Seeing(patches).double()
    # The same images with and without their last column of patches.
    wide = square().double()
    narrow = square()[..., :24].double()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for images in (wide, narrow):
            model.attend(model.stem(images).flatten(2).mT)
        with pytest.warns(RuntimeWarning, match="images of several sizes"):
            recorder.mark(epoch=0)
    expected = [
        same(grid(4, columns)).expected(attention_of(model, images)[0], 5)[
            "attention_distance"
        ]
        for images, columns in ((wide, 4), (narrow, 3))
    ]
    distance = recorder.dataset.attention_distance.isel(epoch=0).sel(layer="attend")
    np.testing.assert_allclose(distance, np.mean(expected, 0), rtol=0, atol=TOLERANCE)
