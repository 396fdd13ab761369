"""Words beside patches: joint blocks and text towers, against brute force in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_edit import HeadEdit
from tcnn_probe.probes.layer_health import TOKEN_KINDS
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, entropy, grid, mask_of
from tests.tcnn_probe.attention.checking import expect, layouts_of
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.probes.test_health import grid_kinds
from tests.tcnn_probe.probes.test_segment_attention import SEGMENTS, brute_force

WIDTH, HEADS = 15, 3
ROWS, COLUMNS = 3, 5
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(2, 3, ROWS * 16, COLUMNS * 16, generator=GENERATOR)
PATCHES = torch.randn(2, ROWS * COLUMNS, WIDTH, generator=GENERATOR)
IDS = torch.randint(2, 90, (2, 7), generator=GENERATOR)
# Seven words are fewer than the patches, and yet the number of tokens alone must not decide which
# are the grid.
VECTORS = torch.randn(2, 7, WIDTH, generator=GENERATOR)
# Positions are those of FLUX: the number of the image, row and column.
POSITIONS = F.pad(torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS)), (1, 0))


class Block(nn.Module):
    """Attention with a residual, over parts that are joined before it,
    or inside it for each head.
    """

    cached = False

    def __init__(self, inside: int | None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inside = inside

    def forward(self, parts: Sequence[Tensor], mask: Tensor | None = None) -> list[Tensor]:
        q, k, v = (self._join(layer, parts) for layer in (self.q, self.k, self.v))
        if self.cached:
            # transformers joins new keys to those of its cache, which starts without any token
            # axes.
            k, v = (torch.cat([x.new_empty(0), x], -2) for x in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        outputs = self.out(attended.flatten(2)).split([x.shape[1] for x in parts], 1)
        return [x + output for x, output in zip(parts, outputs, strict=True)]

    def _join(self, layer: nn.Linear, parts: Sequence[Tensor]) -> Tensor:
        # Libraries join parts before heads are moved to the front, or after.
        heads = [layer(x).unflatten(-1, (HEADS, -1)) for x in parts]
        if self.inside == 1:  # (B, N, heads, d)
            return torch.cat(heads, 1).transpose(1, 2)
        return torch.cat([x.transpose(1, 2) for x in heads], 2)


class Joint(nn.Module):
    """Two blocks over words, a class token and patches, in some order."""

    def __init__(self, order: Sequence[str], inside: int | None = None) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.words = nn.Embedding(90, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList([Block(inside), Block(inside)])
        self.order = order
        self.inside = inside

    def forward(
        self,
        words: Tensor,
        image: Tensor,
        mask: Tensor | None = None,
        *positions: Tensor,
    ) -> Tensor:
        parts = {
            "text": words if words.is_floating_point() else self.words(words),
            "class": self.token.expand(len(image), -1, -1),
            "patch": self.patches(image).flatten(2).mT if image.ndim == 4 else image,
        }
        x = [parts[name] for name in self.order]
        if mask is not None:
            visible = {
                "text": mask,
                "class": mask.new_ones(len(mask), 1),
                "patch": mask.new_ones(len(mask), 15),
            }
            is_visible = torch.cat([visible[name] for name in self.order], 1)
            # Models of text use a large number instead of infinity, so that a row with all keys
            # hidden stays finite.
            mask = (1 - is_visible.to(image.dtype))[:, None, None] * -1e30
        if self.inside is None:
            x = [torch.cat(x, 1)]
        for block in self.blocks:
            x = block(x, mask)
        return torch.cat(x, 1)


CASES: dict[str, tuple[Sequence[str], int | None, tuple[Any, ...]]] = {
    "image first, joined by head": (("patch", "text"), 2, (VECTORS, IMAGES)),
    "words first, of packed patches": (
        ("text", "patch"),
        1,
        (VECTORS, PATCHES, None, POSITIONS),
    ),
    # Only their origin tells 15 words from 15 patches.
    "as many words as patches": (
        ("text", "patch"),
        1,
        (PATCHES.flip(0), IMAGES),
    ),
    "words before a class token": (("text", "class", "patch"), None, (IDS, IMAGES)),
    "words behind": (("class", "patch", "text"), None, (IDS, IMAGES)),
    "words that images hide": (
        ("text", "patch", "class"),
        None,
        # Ids differ between images, so that each hides other words.
        (IDS, IMAGES, (IDS < 60).long()),
    ),
}


@pytest.mark.study(but=["words behind", "image first, joined by head"])
@pytest.mark.parametrize(("order", "inside", "inputs"), CASES.values(), ids=CASES)
def test_joint_blocks_equal_brute_force(
    order: Sequence[str], inside: int | None, inputs: tuple[Any, ...]
) -> None:
    torch.manual_seed(0)
    model = sharpen(Joint(order, inside)).double()
    inputs = tuple(
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )
    lengths = {"text": inputs[0].shape[1], "class": 1, "patch": ROWS * COLUMNS}
    kinds = [name for name in order for _ in range(lengths[name])]
    # Tokens are recorded in this order of their kinds.
    places = [i for kind in ("class", "text", "patch") for i, k in enumerate(kinds) if k == kind]
    kinds = [kinds[i] for i in places]
    words_first = grid(ROWS, COLUMNS, prefix=len(kinds) - ROWS * COLUMNS)
    layout = Layout(
        words_first,
        words_first,
        class_query="class" in order,
        arrange=lambda weights, images: weights[..., places, :][..., places][:, None],
    )
    # One recording has all probes that read segments, which must agree on the kinds of tokens.
    recorder = recorded(model, inputs, probes=[*tcnn_probe.DEFAULT, "segments", "health"])
    references = attention_of(model, *inputs)
    layers = ["blocks.0", "blocks.1"]
    assert [reference.layer for reference in references] == [*recorder.layers] == layers
    ds = recorder.dataset.isel(epoch=0)
    expect(ds.load(), references, dict.fromkeys(layers, layout), images=2)
    shares = recorder.tree["segments"].segment_attention.isel(epoch=0)
    assert shares.query_segment.values.tolist() == SEGMENTS
    kinds_of_sinks = np.array([*kinds[: -ROWS * COLUMNS], *grid_kinds(ROWS, COLUMNS)])
    for reference in references:
        weights = layout.weights(reference, 2)[:, 0]
        logits = layout.arrange(reference.logits, 2).numpy()
        real = mask_of(logits).queries[:, 0]
        of_layer = {"layer": reference.layer}
        np.testing.assert_allclose(
            shares.sel(of_layer), brute_force(weights, kinds, kinds, real), atol=1e-9
        )
        sinks = (weights * real[:, None, :, None]).sum(2).argmax(-1)
        expected = (kinds_of_sinks[sinks][..., None] == np.array(TOKEN_KINDS)).mean(0)
        np.testing.assert_allclose(ds.sink_kind.sel(of_layer), expected)


class Towers(nn.Module):
    """Tower of images, tower of texts, and words that attend to patches."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Joint(("class", "patch"))
        self.words = nn.Embedding(90, WIDTH)
        self.text = Block(None)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, words: Tensor, image: Tensor) -> Tensor:
        patches = self.image(words, image)
        words = self.text([self.words(words)])[0]
        # An image has several texts: the text's batch is a multiple of the images'.
        repeated = patches.repeat_interleave(len(words) // len(patches), 0)
        return self.cross(words, repeated, repeated, need_weights=False)[0]


# 16 words are as many as the tokens of the image, and 4 texts are twice the images.
@pytest.mark.parametrize(("texts", "count"), [(2, 7), (2, 16), (4, 7)])
def test_towers_of_images_and_texts(texts: int, count: int) -> None:
    """There may be as many words as keys, and several texts for each image."""
    torch.manual_seed(0)
    model = sharpen(Towers()).double()
    images = IMAGES.double()
    words = torch.randint(2, 90, (texts, count))
    shown: dict[str, tuple[Any, ...]] = {}

    def keep(attention: Attention) -> None:
        shown[attention.name] = (
            attention.images,
            attention.layout,
            attention.class_query,
            attention.segment_attention(),
        )

    with tcnn_probe.attention_stream(model, keep), torch.no_grad():
        model(words, images)
    references = {
        reference.layer: reference.weights.numpy()
        for reference in attention_of(model, words, images)
    }
    tokens = ["class"] + ["patch"] * 15
    for name in ("image.blocks.0", "image.blocks.1"):
        _, layout, class_query, shares = shown[name]
        assert (layout.queries.prefix, *layout.keys.size, class_query) == (
            1,
            ROWS,
            COLUMNS,
            0,
        )
        expected = brute_force(references[name], tokens, tokens)
        np.testing.assert_allclose(shares.mean(0), np.nan_to_num(expected), atol=1e-9)
    # A text tower has no grid, no class token, and no share of patches.
    count_of_rows, layout, class_query, shares = shown["text"]
    assert count_of_rows == texts
    assert layout.keys is None
    assert class_query is None
    assert shares is None
    count_of_rows, layout, class_query, shares = shown["cross"]
    assert count_of_rows == texts
    assert layout.queries is None
    assert class_query is None
    assert (layout.keys.prefix, *layout.keys.size) == (1, ROWS, COLUMNS)
    expected = brute_force(references["cross"], ["text"] * count, tokens)
    np.testing.assert_allclose(shares.mean(0), np.nan_to_num(expected), atol=1e-9)


def test_keys_are_followed_through_an_empty_cache() -> None:
    torch.manual_seed(0)
    model = Joint(("class", "patch", "text"))
    shown = []
    for cached in (False, True):
        for block in model.blocks:
            block.cached = cached
        shown += layouts_of(model, IDS, IMAGES)
    assert [layout.words for layout in shown] == [7] * 4
    assert shown[:2] == shown[2:]


@pytest.mark.parametrize("inside", [1, None])
def test_words_that_could_be_patches_have_no_grid(inside: int | None) -> None:
    """Patches are packed, and there are as many vectors of words: nothing distinguishes them."""
    model = Joint(("text", "patch"), inside)
    # Both inputs are vectors, so that there are no pixels to follow.
    layouts = layouts_of(model, PATCHES.flip(0), PATCHES, None, POSITIONS)
    assert [layout.keys for layout in layouts] == [None, None]


def test_masks_of_words_are_not_grids() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(90, WIDTH)
            self.layer = Masked()

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            return self.layer(self.words(words), (1.0 - mask)[:, None, None] * -1e30)

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                *[x.unflatten(-1, (HEADS, -1)).transpose(1, 2)] * 3, attn_mask=mask
            )

    layouts = layouts_of(Text(), IDS, torch.ones(2, 7))
    assert [layout.keys for layout in layouts] == [None]


def test_a_mask_is_not_a_feature_map() -> None:
    """Nine keys that cannot be followed are not a map
    of three rows just because a mask has three.
    """

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 16, 16)
            self.mask = nn.Identity()

        def forward(self, image: Tensor) -> Tensor:
            self.mask(torch.zeros(len(image), 1, 3, 3))
            tokens = self.patches(image).flatten(2).mT
            keys = torch.from_numpy(tokens.numpy()[:, :9])
            return F.scaled_dot_product_attention(tokens, keys, keys)

    layouts = layouts_of(Decoder(), torch.randn(2, 3, 64, 64))
    assert [layout.keys for layout in layouts] == [None]


class Sink(nn.Module):
    """Attention with an extra logit per head, whose share goes to no value."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        # As in gpt-oss, the logit is appended, and its weight cut off before the values: the others
        # no longer sum to 1.
        logits = x @ x.mT
        sinks = self.sink.expand(len(x), -1, x.shape[2], -1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)
        return weights[..., :-1] @ x


def test_sinks_are_counted_as_keys() -> None:
    """A sink lies on no grid, and contributes to the entropy."""
    torch.manual_seed(0)
    model = nn.Sequential(Sink()).double().eval()
    recorder = recorded(model, VECTORS.double())
    assert recorder.layers == ("0",)
    (reference,) = attention_of(model, VECTORS)
    # There are 7 queries and 8 keys, the last of which is the sink.
    assert reference.weights.shape == (2, HEADS, 7, 8)
    expected = entropy(reference.weights.numpy()).mean((0, 2))
    np.testing.assert_allclose(recorder.dataset.entropy[0, 0], expected, atol=1e-9)
    assert "attention_distance" in recorder.missing


@pytest.mark.parametrize("order", [("patch", "text"), ("text", "class", "patch")])
def test_given_attention_is_in_the_order_of_the_stream(order: Sequence[str]) -> None:
    """A head that is given its own attention has the same output."""
    torch.manual_seed(0)
    model = sharpen(Joint(order)).double()
    alone = model(IDS, IMAGES.double())

    def repeat(attention: Attention) -> HeadEdit:
        assert attention.order is not None
        # One head of three is edited, so that exchanged axes would show.
        return HeadEdit([1], attention=attention.weights()[:, :, [1]])

    with tcnn_probe.attention_stream(model, repeat):
        torch.testing.assert_close(model(IDS, IMAGES.double()), alone)
