"""Inference of layouts: grids are not invented, and heads,
windows and images are not confused with each other.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention.token_order import OTHER_TOKENS
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, distances, grid
from tests.tcnn_probe.attention.checking import TOLERANCE, as_it_is, check, merged, same
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded

DIM, HEADS = 12, 3


class Attend(nn.Module):
    """Attention of (..., N, d) to itself, or to separate keys."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.num_heads = heads

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        # One projection gives the queries from the tokens, and the keys and values from the keys.
        (q, _, _), (_, k, v) = (
            self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-2, -3)
            for tokens in (x, x if keys is None else keys)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


class Seeing(nn.Module):
    """Model on 4 x 4 or 3 x 5 patches of 8 x 8 pixels, which reach its attention in some way."""

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
        # Initial attention is uniform, and uniform attention has the right statistics on any grid.
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
    """Put a class token behind the patches."""
    return model.attend(torch.cat([model.tokens(x), model.extra_tokens.expand(len(x), -1, -1)], 1))


def after_registers(model: Seeing, x: Tensor) -> Tensor:
    """Put registers before the patches, and a class token behind them."""
    extra_tokens = model.extra_tokens.expand(len(x), -1, -1)
    return model.attend(torch.cat([extra_tokens[:, 1:], model.tokens(x), extra_tokens[:, :1]], 1))


def joined_twice(model: Seeing, x: Tensor) -> Tensor:
    """Put a class token first, and then registers between it and the patches, as in DINOv2."""
    tokens = torch.cat([model.extra_tokens[:, :1].expand(len(x), -1, -1), model.tokens(x)], 1)
    # The registers are joined last, but the grid was joined before.
    return model.attend(
        torch.cat([tokens[:, :1], model.extra_tokens.expand(len(x), -1, -1), tokens[:, 1:]], 1)
    )


def written(model: Seeing, x: Tensor, place: int = -1) -> Tensor:
    """Write a class token to its position by index, so that its position is unknown."""
    tokens = model.tokens(x)
    # Without a concatenation, nothing shows which token came from where.
    sequence = tokens.new_zeros(len(x), 17, DIM)
    sequence[:, 1 if place == 0 else 0 :][:, :16] = tokens
    sequence[:, place] = model.extra_tokens[0, 0]
    return model.attend(sequence)


def latents(model: Seeing, x: Tensor) -> Tensor:
    """Let latents attend to the patches, and then to each other, as in Perceiver."""
    return model.among(model.attend(model.extra_tokens.expand(len(x), -1, -1), model.tokens(x)))


class Text(nn.Module):
    """Attention of 9 words to each other."""

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


# Five images differ from the number of heads.
def square(images: int = 5) -> Tensor:
    return torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(5))


# 9 words could be a grid of 3 x 3.
WORDS = torch.randint(50, (5, 9), generator=torch.Generator().manual_seed(6))
PATCHES = same(grid(4, 4))
NOWHERE = Layout(None, None)


def first_last(weights: Tensor, images: int) -> Tensor:
    """Move the last token before the others."""
    # Tokens are rolled by one, so that the class token leads, as in all our layouts.
    return weights.roll((1, 1), (-2, -1)).unflatten(0, (images, 1))


BEHIND = same(grid(4, 4, prefix=1), arrange=first_last)

CASES = {
    "latents": (
        Seeing(latents, extra_tokens=9),
        square(),
        NOWHERE,
    ),  # nothing is a grid of 3 x 3
    "registers": (
        Seeing(registers, extra_tokens=9),
        square(),
        same(grid(4, 4, prefix=9)),
    ),  # 25 tokens are not a grid of 5 x 5
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
    # In axial attention, the 4 pixels of each row attend to each other; they are not a window of 2
    # x 2.
    "rows": (
        Seeing(lambda m, x: m.attend(m.stem(x).permute(0, 2, 3, 1).flatten(0, 1))),
        square(),
        NOWHERE,
    ),
    # There are 3 windows of 4 tokens; the axis of heads is next to the tokens, where models nearly
    # always have it.
    "windows": (
        Seeing(lambda m, x: m.attend(m.tokens(x)[:, :12].unflatten(1, (3, 4)))),
        square(),
        Layout(None, None, arrange=as_it_is),
    ),
    # The layer gets (B, 1, 16, C), one frame, and 1 x 16 is not a grid of these images.
    "frames": (
        Seeing(lambda m, x: m.attend(m.tokens(x)[:, None])),
        square(),
        same(grid(4, 4), arrange=as_it_is),
    ),
    # No module gets (B, C, H, W) after the images, so that (B, H, W, C) shows the grid.
    "channels last": (
        Seeing(
            lambda m, x: m.attend(
                m.norm(F.avg_pool2d(x.repeat(1, 4, 1, 1), 8).movedim(1, 3)).flatten(1, 2)
            )
        ),
        square(),
        PATCHES,
    ),
    "one head": (Seeing(patches, heads=1), square(), PATCHES),
    # There are three images and three heads, and their axes must not be confused.
    "B = heads": (Seeing(patches), square(3), PATCHES),
    # There are as many images as tokens.
    "B = N": (Seeing(patches), square(16), PATCHES),
    "N = 1": (Seeing(patches), square()[..., :8, :8], same(grid(1, 1))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:no attention_distance and no maps of among")
def test_inferred_grids(case: str) -> None:
    model, inputs, layout = CASES[case]
    check(model, inputs, dict.fromkeys(("attend", "among", ""), layout))


def test_towers_of_an_image_and_a_text() -> None:
    model = sharpen(ImageAndText(), 2.2)
    check(model, (square(), WORDS), {"image.attend": PATCHES, "text.attend": NOWHERE})


class Packed(nn.Module):
    """Model that gets patches with their rows and columns, as FLUX and NaFlex do."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        return self.attend(patches)


def test_upright_images_have_another_grid_than_wide_ones_with_as_many_patches() -> None:
    torch.manual_seed(0)
    model = sharpen(Packed(), 2.2).double().eval()
    sizes = (3, 5), (5, 3)
    expected = []
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for rows, columns in sizes:
            x = torch.randn(2, 15, DIM).double()
            positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            model(x, positions)
            (reference,) = attention_of(model, x, positions)
            places = grid(rows, columns)
            of_batch = distances(reference.weights.numpy(), places, places)
            expected.append(of_batch.mean((0, 2)))
        # Queries of different places are not compared.
        with pytest.warns(RuntimeWarning, match="images of several sizes"):
            recorder.mark(epoch=0)
    distance = recorder.dataset.attention_distance.isel(epoch=0, layer=0)
    np.testing.assert_allclose(distance, np.mean(expected, 0), atol=TOLERANCE)
    assert np.isnan(recorder.dataset.content_information).all()


def test_upright_and_wide_images_of_one_batch_are_not_compared() -> None:
    model, x = Packed().double().eval(), torch.randn(2, 15, DIM).double()
    sizes = (3, 5), (5, 3)
    positions = torch.stack(
        [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in sizes]
    )
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(x, positions)
        recorder.mark(epoch=0)
    for name in ("content_information", "attention_distance"):
        assert recorder.missing[name]["attend"] == OTHER_TOKENS
    assert np.isfinite(recorder.dataset.entropy).all()


def test_reasons_for_missing_statistics() -> None:
    with pytest.warns(
        RuntimeWarning,
        match=r"no maps of among: 9 keys: no grid found; "
        r"if they are patches of the image, give grid=\(rows, columns\)",
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
        # The user may give a grid that differs from the image's.
        ({"grid": (2, 8), "prefix_tokens": 1}, same(grid(2, 8, prefix=1))),
    ],
)
def test_layouts_that_the_user_gives(said: dict[str, Any], layout: Layout) -> None:
    check(Seeing(written), square(), {"attend": layout}, **said)


def test_a_token_at_an_unknown_position_is_reported() -> None:
    # The message offers two remedies: a number of tokens before the grid, or the position of the
    # class token.
    message = (
        "17 keys: no grid found; .*, prefix_tokens=1 gives a grid of 4 x 4 .* class_token='last'"
    )
    with tcnn_probe.record(Seeing(written).eval()) as recorder, torch.no_grad():
        recorder._model(square())
        with pytest.warns(RuntimeWarning, match=message):
            recorder.mark(epoch=0)
        recorder._model(square())
        recorder.mark(epoch=1)  # the warning comes only once
    assert recorder.dataset.attention_distance.isnull().all()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"class_token": "end"}, "class_token='first', 'last' or 'none', got 'end'"),
        ({"grid": 4}, r"grid=\(rows, columns\) of patches, got 4"),
    ],
)
def test_invalid_layouts_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.record(Seeing(patches), **said)


class Other(nn.Module):
    """Layer with a softmax that is not attention between tokens."""

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
    q = q.softmax(-1)  # with the shape of the keys
    summary = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return torch.einsum("bhnd,bhde->bhne", q, summary)


def linear_attention_scaled(m: Other, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return q.softmax(-1) @ (k.mT @ v / k.shape[-2])


def soft_assignment(m: Other, x: Tensor) -> Tensor:
    return m.qkv(x).softmax(-1) @ m.codes


def soft_assignment_expanded(m: Other, x: Tensor) -> Tensor:
    # Expanded or repeated codes have an axis of images, but are the same for all of them.
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
    # Another layer attends, and must not be replaced by the one that is refused.
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
    """Apply attention to the output of attention, which consists of tokens."""
    q, k, v = m.attend.qkv(m.tokens(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    weights = torch.softmax(q @ k.mT, -1)
    return torch.softmax(k @ q.mT, -1) @ (weights @ v)


def test_attention_to_the_output_of_attention() -> None:
    check(Seeing(attention_of_attention), square(), {"": PATCHES, "#1": PATCHES})


class Merged(Seeing):
    """Attention of (B * heads, N, d), as many models write it by hand."""

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


@pytest.mark.parametrize(("name", "images"), [("num_heads", 5), ("num_attention_heads", HEADS)])
def test_merged_heads_are_counted_by_the_layer(name: str, images: int) -> None:
    """The layer tells the number of heads, even if it equals the number of images."""
    check(Merged(name), square(images), {"": same(grid(4, 4), arrange=merged(HEADS))})


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_merged_heads_of_unknown_number() -> None:
    model = Merged()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(square())
        assert (
            "or as many heads if the layer has no attribute num_heads"
            in recorder.missing["attention_distance"][""]
        )


def test_children_called_instead_of_the_model() -> None:
    """Users who call forward_features of their own model bypass its forward."""
    model = Seeing(patches).double()
    # The second batch lacks the last column of patches.
    wide = square().double()
    narrow = square()[..., :24].double()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for images in (wide, narrow):
            model.attend(model.stem(images).flatten(2).mT)
        with pytest.warns(RuntimeWarning, match="images of several sizes"):
            recorder.mark(epoch=0)
    expected = [
        same(grid(4, columns)).expected(attention_of(model, images)[0], 5)["attention_distance"]
        for images, columns in ((wide, 4), (narrow, 3))
    ]
    distance = recorder.dataset.attention_distance.isel(epoch=0).sel(layer="attend")
    np.testing.assert_allclose(distance, np.mean(expected, 0), rtol=0, atol=TOLERANCE)
