"""Known orders of tokens are detected during a forward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention import token_finder
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.carried_numbers import CarriedNumbers
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.token_order import PlaceTracker, objection_to_order
from tests.extras import need
from tests.tcnn_probe.attention.checking import layouts_of
from tests.tcnn_probe.contracts.helpers import recorded

# The sides are primes, so that exchanged rows and columns would show; patches of 4 are more than a
# pixel apart.
ROWS, COLUMNS, PATCH = 5, 7, 4
IMAGES = torch.Size((2, 3, ROWS * PATCH, COLUMNS * PATCH))
RASTER = np.arange(ROWS * COLUMNS)
ORDERS = {
    "raster": RASTER,
    # The transposed order has the right number of cells, nearly all of them elsewhere.
    "columns": RASTER.reshape(ROWS, COLUMNS).T.ravel(),
    "backwards": RASTER[::-1].copy(),
    "shuffled": np.random.default_rng(0).permutation(ROWS * COLUMNS),
    # This is the smallest possible error: all distances are right but those of two tokens.
    "two tokens exchanged": RASTER.reshape(ROWS, COLUMNS)[:, [0, 1, 3, 2, 4, 5, 6]].ravel(),
    # In a cyclic shift, as in Swin's windows, nearly all neighbours stay neighbours.
    "rolled": np.roll(RASTER.reshape(ROWS, COLUMNS), (2, 3), (0, 1)).ravel(),
}
NOT_IN_ORDER = "the tokens are not in the order of the image's rows"
OTHER_TOKENS = "images have different patches at the same places in the sequence"
NO_IMAGE = "the tokens come from parameters, not from the image"


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # This convolution, whose channels are the heads, is the identity.
    query = F.conv2d(weight=torch.eye(3)[..., None, None], input=q)
    return F.scaled_dot_product_attention(value=v, key=k, query=query)


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # The constants scale and shift all logits alike, and must not be taken for a mask or bias.
    return ((q / 2) @ k.transpose(-2, -1) + 0.1).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.einsum("bhlk,bhtk->bhlt", [q, k])
    return torch.einsum("bhlt,bhtv->bhlv", [logits.softmax(dim=-1), v])


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with heads merged into the batch, so that its axis is no longer that of images."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.mT), -1), v).unflatten(0, (-1, 3))


def mixed_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with talking heads, whose logits are mixed along another axis."""
    logits = (q @ k.mT).permute(0, 2, 3, 1)
    # The identity keeps the weights, as only the change of axes is under test.
    return F.linear(logits, torch.eye(3)).permute(0, 3, 1, 2).softmax(-1) @ v


class Attend(nn.Module):
    num_heads = 3

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


class Ordered(nn.Module):
    """Model with patches in some order behind a class token, and two layers without residuals."""

    def __init__(
        self,
        order: np.ndarray,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = fused,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, 12))
        self.norm = nn.LayerNorm(12)
        # With two layers, positions must pass through the first layer's attention to reach the
        # second.
        layers = [Multihead() if attend is None else Attend(attend) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)
        self.order = torch.from_numpy(order)

    def arrange(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT[:, self.order]

    def forward(self, x: Tensor) -> Tensor:
        x = self.arrange(self.patches(x))
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(self.norm(x))
        return x


def layouts(model: nn.Module, images: Tensor) -> dict[str, Layout]:
    """Return the layouts of the attention layers in a forward."""
    by_name: dict[str, Layout] = {}

    def look(attention: Attention) -> None:
        by_name[attention.name] = attention.layout

    with tcnn_probe.attention_stream(model, look) as stream, torch.no_grad():
        model(images)
    return {name: by_name[name] for name in stream.layers}


@pytest.mark.parametrize("attend", [fused, by_name, unfused, by_einsum, merged, mixed_heads, None])
@pytest.mark.parametrize("order", ORDERS)
def test_a_grid_is_in_raster_order(
    order: str, attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None
) -> None:
    torch.manual_seed(0)
    model = Ordered(ORDERS[order], attend).eval()
    layouts_of_layers = layouts(model, torch.randn(IMAGES))
    # Without layers, the loop below would check nothing.
    assert [name.split(".")[1] for name in layouts_of_layers] == ["0", "1"]
    for layout in layouts_of_layers.values():
        if order == "raster":
            assert layout.keys == layout.queries == Tokens(1, ROWS, COLUMNS)
        else:
            assert layout == Layout(None, None, NOT_IN_ORDER)


class ColumnMajor(Ordered):
    def arrange(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(2).mT


@pytest.mark.parametrize("size", [IMAGES, torch.Size((2, 3, 20, 20))])
def test_column_major_order_is_detected(size: torch.Size) -> None:
    """The image may be square, with as many rows as columns."""
    layouts_of_layers = layouts(ColumnMajor(RASTER).eval(), torch.randn(size))
    assert [layout.reason for layout in layouts_of_layers.values()] == [NOT_IN_ORDER] * 2


class LookedUp(Ordered):
    """Model that reads the positions of its patches from a table by a product, as Gemma 4 does."""

    def arrange(self, x: Tensor) -> Tensor:
        x = super().arrange(x)
        rows = F.one_hot(torch.arange(x.shape[1])).to(x.dtype)
        return x + rows @ torch.randn(x.shape[1:])


@pytest.mark.parametrize("attend", [fused, unfused])
@pytest.mark.parametrize("order", ORDERS)
def test_products_of_parameters_do_not_hide_the_image(
    order: str, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    layouts_of_layers = layouts(LookedUp(ORDERS[order], attend).eval(), torch.randn(IMAGES))
    reason = "" if order == "raster" else NOT_IN_ORDER
    assert [layout.reason for layout in layouts_of_layers.values()] == [reason] * 2


class Written(Ordered):
    """Module that writes its tokens into an empty tensor, each at its position."""

    write = "zeros_like"

    def arrange(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mT
        place = self.order.argsort()
        if self.write == "scatter":
            index = place[:, None].expand(x.shape)
            return torch.zeros(x.shape).scatter(1, index, x)
        if self.write == "view":
            canvas = torch.zeros(x.shape)
            canvas[:, :].copy_(x[:, self.order])
            return canvas
        canvas = x.new_zeros(x.shape)
        if self.write == "zeros_like":
            canvas = torch.zeros_like(x)
        canvas[:, place] = x
        return canvas


@pytest.mark.parametrize(
    ("write", "order", "reason"),
    [
        *((write, "raster", "") for write in ("zeros_like", "new_zeros", "scatter")),
        *((write, "shuffled", NOT_IN_ORDER) for write in ("zeros_like", "new_zeros", "scatter")),
        # Tokens that are written through a view are unknown, and not taken for parameters.
        ("view", "raster", ""),
    ],
)
def test_tokens_written_into_a_canvas(write: str, order: str, reason: str) -> None:
    model = Written(ORDERS[order]).eval()
    model.write = write
    for layout in layouts(model, torch.randn(IMAGES)).values():
        assert layout.reason == reason


def test_objections_to_positions() -> None:
    numbers = torch.arange(8.0)
    tokens = Tokens(2, 2, 3)
    assert "beside the grid" in objection_to_order(numbers, tokens)
    places = numbers.masked_fill(numbers < 2, torch.nan)
    assert objection_to_order(places, tokens) == ""
    assert objection_to_order(None, tokens) == "", "unknown"
    assert objection_to_order(places[1:], tokens) == "", "other tokens"
    # Tokens without a position, such as padding, are left out of the comparison.
    padded = torch.tensor([torch.nan, torch.nan, 0, 1, torch.nan, 3, 4, torch.nan])
    assert objection_to_order(padded, tokens) == ""
    assert objection_to_order(padded.flip(0), tokens) == NOT_IN_ORDER
    assert objection_to_order(torch.full((8,), torch.nan), tokens) == NO_IMAGE
    # If some tokens are unknown, the others may be in order, not in order, or not of the image.
    unknown = torch.tensor([torch.nan, torch.nan, 0, torch.inf, 2, 3, torch.inf, 5])
    assert objection_to_order(unknown, tokens) == ""
    assert objection_to_order(unknown.flip(0).roll(2), tokens) == NOT_IN_ORDER
    prompts = torch.full((8,), torch.nan)
    prompts[4:] = torch.inf
    assert "some of the tokens come from parameters" in objection_to_order(prompts, tokens)
    beside_unknown = unknown.masked_fill(unknown.isnan(), torch.inf)
    assert objection_to_order(beside_unknown, tokens) == ""
    # One token is of the image without being a patch, such as a class token that is the mean of all
    # patches.
    behind = torch.tensor([torch.nan, 0, 1, 2, 3, 4, 5, 0])
    assert objection_to_order(behind[[0, 7, *range(1, 7)]], tokens) == ""
    assert objection_to_order(behind, tokens) == NOT_IN_ORDER


TINY = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 24,
    "patch_size": 8,
}
DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    # There are as many queries as cells of the encoder (4 x 6), so that their number cannot tell
    # them apart.
    "num_queries": 24,
}


def transformers_model(name: str, config: str, **options: Any) -> nn.Module:
    transformers = need("transformers")
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


def test_shuffled_tokens_of_a_masked_autoencoder() -> None:
    """Shuffled tokens are recorded without a grid; the decoder puts them in order again."""
    torch.manual_seed(0)
    # Nothing is masked, so that there are as many shuffled tokens as patches: only their order can
    # be the objection.
    options = {**TINY, "image_size": 40, "mask_ratio": 0.0}
    decoder = {
        "decoder_hidden_size": 24,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 3,
        "decoder_intermediate_size": 32,
    }
    model = transformers_model("ViTMAEForPreTraining", "ViTMAEConfig", **options, **decoder)
    encoder = ["vit.layers.0.attention", "vit.layers.1.attention"]
    # The order is drawn anew in each forward, and the result of the first one must hold for the
    # second.
    recorder = recorded(model, *torch.randn(2, 2, 3, 40, 40))
    for name in ("attention_distance", "content_information"):
        assert recorder.missing[name] == dict.fromkeys(encoder, OTHER_TOKENS)
    dataset = recorder.dataset.isel(epoch=0)
    assert dataset.entropy.sel(layer=encoder).notnull().all()
    assert dataset.attention_distance.sel(layer=encoder).isnull().all()
    decoding = "decoder.decoder_layers.0.attention"
    assert dataset.attention_distance.sel(layer=decoding).notnull().all()
    assert dataset.content_information.sel(layer=decoding).notnull().all()


class Masked(Ordered):
    """Model that keeps some patches of each image, and sees nothing but their positions."""

    def __init__(self, kept: Tensor, select: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(RASTER)
        self.positions = nn.Parameter(4 * torch.randn(ROWS * COLUMNS, 12))
        self.kept, self.select = kept, select

    def arrange(self, x: Tensor) -> Tensor:
        return self.select(0 * x.flatten(2).mT + self.positions, self.kept)


def by_boolean(x: Tensor, kept: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool).scatter(1, kept, True)
    return x[mask].unflatten(0, kept.shape)


@pytest.mark.filterwarnings("ignore:no attention_distance:RuntimeWarning")
@pytest.mark.parametrize(
    "select",
    [
        lambda x, kept: x.gather(1, kept[..., None].expand(-1, -1, 12)),
        lambda x, kept: x[torch.arange(len(x))[:, None], kept],
        by_boolean,
    ],
    ids=["gathered", "by index", "by mask"],
)
def test_images_with_other_patches_are_not_compared(
    select: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Attention by position depends on which patches an image keeps, but not on its content."""
    torch.manual_seed(0)
    images = torch.randn(5, *IMAGES[1:])
    kept = torch.rand(5, ROWS * COLUMNS).argsort(1)[:, :11]
    same = recorded(Masked(kept[:1].expand(5, -1), select).eval(), images)
    assert abs(same.dataset.content_information).max() < 1e-5
    # The first forward shows that the patches differ, and this must hold for the second.
    other = recorded(Masked(kept, select).eval(), images, images)
    layers = ("blocks.0", "blocks.1")
    for name in ("content_information", "selectivity", "key_content_information"):
        assert other.missing[name] == dict.fromkeys(layers, OTHER_TOKENS)
    assert other.dataset.entropy.notnull().all()
    assert (tcnn_probe.head_types(other.dataset) == "").all()


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("Detr", {}),
        ("Detr", {"attn_implementation": "eager"}),
        ("TableTransformer", {"attn_implementation": "eager"}),
    ],
    ids=["fused", "unfused", "heads merged"],
)
def test_as_many_object_queries_as_cells(name: str, attention: dict[str, str]) -> None:
    torch.manual_seed(0)
    transformers = need("transformers")
    # The last stage has a 32nd of the size: 128 x 192 pixels become 4 x 6 cells.
    sizes = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
    backbone = transformers.ResNetConfig(**sizes, out_features=["stage4"])
    options = {**DETR, "backbone_config": backbone, **attention}
    model = transformers_model(f"{name}Model", f"{name}Config", **options)
    layouts_of_layers = layouts(model, torch.randn(1, 3, 128, 192))
    grid = Tokens(0, 4, 6)
    assert layouts_of_layers["encoder.layers.0.self_attn"] == Layout(grid, grid)
    for layer in ("decoder.layers.0", "decoder.layers.1"):
        assert layouts_of_layers[f"{layer}.self_attn"] == Layout(None, None, NO_IMAGE)
        assert layouts_of_layers[f"{layer}.encoder_attn"] == Layout(None, grid, NO_IMAGE)


class Prompted(nn.Module):
    """Two learned tokens and the user's points,
    together as many as the cells of a window, as is possible with SAM.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, PATCH, PATCH)
        self.window = nn.Identity()
        self.learned = nn.Parameter(torch.randn(1, 2, 12))
        self.points = nn.Linear(2, 12)
        self.attend = Attend(fused)

    def forward(self, image: Tensor, points: Tensor) -> Tensor:
        self.window(self.patches(image)[:, :, :2, :3].repeat(2, 1, 1, 1))
        # After NumPy, the origin of the points is unknown.
        points = torch.from_numpy(points.numpy())
        tokens = [self.learned.expand(len(image), -1, -1), self.points(points)]
        return self.attend(torch.cat(tokens, 1))


def test_as_many_prompts_as_cells() -> None:
    (layout,) = layouts_of(Prompted(), torch.randn(IMAGES), torch.rand(IMAGES[0], 4, 2))
    assert layout.queries is None
    assert layout.keys is None
    assert "some of the tokens come from parameters" in layout.reason


class Queries(nn.Module):
    """Learned queries, as many as patches, which attend to the patches
    with a mask of unknown origin.
    """

    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(ROWS * COLUMNS, 12))

    def forward(self, x: Tensor) -> Tensor:
        patches = x.flatten(2).mT[:, None]
        # A mask of ones shifts all logits alike; its origin is not followed, as in DETR in
        # transformers 5.0.
        mask = torch.ones(1, 1, *self.query.shape[:1] * 2)
        query = self.query.expand(len(patches), 1, -1, -1)
        return (query @ patches.mT + mask).softmax(-1) @ patches


class BothWays(nn.Module):
    """Learned queries and patches that attend to each other with the same logits."""

    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(ROWS * COLUMNS, 12))

    def forward(self, x: Tensor) -> Tensor:
        patches = x.flatten(2).mT
        queries = self.query.expand(len(patches), -1, -1)
        logits = queries @ patches.mT
        # Values differ between images, because a product with values that all images share is not
        # attention.
        values = queries * patches.mean((1, 2), keepdim=True)
        back = logits.transpose(1, 2).softmax(-1) @ values
        return logits.softmax(-1) @ patches + back


def test_logits_that_are_used_in_both_directions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, PATCH, PATCH), BothWays())
    grid = Tokens(0, ROWS, COLUMNS)
    back, forth = layouts(model, torch.randn(IMAGES)).values()
    assert (back.queries, back.keys, back.reason) == (None, None, NO_IMAGE)
    assert (forth.queries, forth.keys, forth.reason) == (None, grid, NO_IMAGE)


@pytest.mark.parametrize("name", ["DeformableDetr", "DabDetr"])
def test_object_queries_after_deformable_attention(name: str) -> None:
    """Queries that start as zeros, and those
    that have gathered samples of the image, get no grid.
    """
    torch.manual_seed(0)
    transformers = need("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
    backbone = transformers.ResNetConfig(**sizes, out_features=["stage4"])
    options: dict[str, Any] = {**DETR, "backbone_config": backbone}
    if name == "DabDetr":
        options["hidden_size"] = options.pop("d_model")
        for option in ("use_timm_backbone", "use_pretrained_backbone", "backbone"):
            del options[option]
    else:
        # A group norm divides them by 32.
        options |= {"d_model": 32, "num_feature_levels": 1}
        options |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers_model(f"{name}Model", f"{name}Config", **options)
    layouts_of_layers = layouts(model, torch.randn(1, 3, 128, 192))
    reasons = [
        layout.reason
        for layer, layout in layouts_of_layers.items()
        if layer.startswith("decoder") and "self_attn" in layer
    ]
    assert reasons == [NO_IMAGE] * 2


def test_a_mask_does_not_hide_the_origin_of_queries() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, PATCH, PATCH), Queries())
    by_layer = layouts(model, torch.randn(IMAGES))
    assert by_layer == {"1": Layout(None, Tokens(0, ROWS, COLUMNS), NO_IMAGE)}


RIGHT = {
    "class and registers": (
        "vit_small_patch14_reg4_dinov2",
        {"img_size": (42, 70), "depth": 2},
        (42, 70),
    ),
    "pooled queries": ("mvitv2_tiny", {"img_size": (64, 64)}, (64, 64)),
    "reduced keys": ("pvt_v2_b0", {}, (64, 96)),
    "talking heads": ("cait_xxs24_224", {"img_size": (64, 96), "depth": 2}, (64, 96)),
    "unfolded patches": ("tnt_s_patch16_224", {"depth": 1}, (224, 224)),
    "cascaded groups": ("efficientvit_m0", {}, (224, 224)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_grids_of_ordinary_models_are_confirmed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []

    def spy(places: Tensor | None, tokens: Tokens) -> str:
        followed.append(places is not None)
        return objection_to_order(places, tokens)

    monkeypatch.setattr(token_finder, "objection_to_order", spy)
    torch.manual_seed(0)
    name, options, size = RIGHT[case]
    model = timm.create_model(name, num_classes=5, **options).eval()
    layouts_of_layers = layouts(model, torch.randn(1, 3, *size))
    assert any(layout.keys for layout in layouts_of_layers.values())
    assert not [
        x.reason for x in layouts_of_layers.values() if x.reason in (NOT_IN_ORDER, NO_IMAGE)
    ]
    assert followed
    assert all(followed)


class Uncertain(Ordered):
    """Model that shuffles its tokens, by a function that is not followed or in training only."""

    in_numpy = False

    def arrange(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mT
        if self.training:
            return x[:, self.order]
        if self.in_numpy:
            return torch.from_numpy(x.numpy()[:, self.order])
        # The argument is passed by keyword; only positional arguments are followed, so this order
        # stays unknown.
        return torch.cat(tensors=[x, x[:, :0]], dim=1)


@pytest.mark.parametrize("in_numpy", [False, True])
def test_an_unknown_order_keeps_its_grid(in_numpy: bool) -> None:
    """The forward must not fail if a function cannot be given positions in place of tensors."""
    model = Uncertain(ORDERS["shuffled"])
    model.in_numpy = in_numpy
    grid = Tokens(1, ROWS, COLUMNS)
    call_layouts: list[Layout] = []
    with tcnn_probe.attention_stream(model, lambda a: call_layouts.append(a.layout)):
        for mode in (True, False):
            model.train(mode)
            with torch.no_grad():
                model(torch.randn(IMAGES))
    assert call_layouts == [Layout(None, None, NOT_IN_ORDER)] * 2 + [Layout(grid, grid)] * 2


def test_layers_with_a_bias_that_are_called_one_by_one_keep_their_grid() -> None:
    """The places of tokens do not pass from call to call, and those of the bias are no tokens'."""
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(ROWS * PATCH, COLUMNS * PATCH),
        window_size=7,
        embed_dim=12,
        depths=(1,),
        num_heads=(3,),
    )
    call_layouts: list[Layout] = []
    stream = tcnn_probe.attention_stream(model, lambda a: call_layouts.append(a.layout))
    with stream, torch.no_grad():
        model.layers[0](model.patch_embed(torch.randn(IMAGES)))
    grid = Tokens(0, ROWS, COLUMNS)
    assert [(layout.queries, layout.keys) for layout in call_layouts] == [(grid, grid)]


def test_pixels_are_followed_once_for_each_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[torch.Size] = []

    class Counted(PlaceTracker):
        def __init__(self, inputs: Any, *rest: Any, **options: Any) -> None:
            followed.extend(x.shape for x in inputs)
            super().__init__(inputs, *rest, **options)

    monkeypatch.setattr(token_finder, "PlaceTracker", Counted)
    model = Ordered(RASTER).eval()
    monkeypatch.setattr(model, "arrange", lambda x: x.flatten(2).mT)
    with tcnn_probe.attention_stream(model, lambda _: None), torch.no_grad():
        # Two sizes take turns, and the smaller one comes again after the larger: if only one were
        # remembered, pixels would be followed four times.
        for height in (20, 20, 24, 20, 24):
            model(torch.randn(2, 3, height, 28))
    assert [shape[2] for shape in followed] == [20, 24]


def test_a_forward_that_fails_is_followed_again() -> None:
    model = Ordered(ORDERS["shuffled"]).eval()
    call_layouts: list[Layout] = []

    def fail(*args: Any) -> None:
        raise ArithmeticError("before the second layer")

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with (
        tcnn_probe.attention_stream(model, lambda a: call_layouts.append(a.layout)),
        torch.no_grad(),
    ):
        with pytest.raises(ArithmeticError):
            model(torch.randn(IMAGES))
        handle.remove()
        model(torch.randn(IMAGES))
    # These are the first layer of the forward that failed, and both layers of the next.
    assert call_layouts == [Layout(None, None, NOT_IN_ORDER)] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_runs_after_ctrl_c_is_not_tracked(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch runs no hooks then, so that the mode stays until the model is called again."""
    model = Ordered(ORDERS["shuffled"]).eval()

    def interrupt(*args: Any) -> None:
        raise error

    model.blocks[1].register_forward_pre_hook(interrupt)
    calls: list[Any] = []
    with tcnn_probe.attention_stream(model, lambda a: None), torch.no_grad():
        with pytest.raises(error):
            model(torch.randn(IMAGES))
        monkeypatch.setattr(CarriedNumbers, "follow", lambda *call: calls.append(call))
        torch.zeros(2)[0] = 1
    assert not calls


def test_maps_of_shuffled_tokens_are_refused_with_a_reason() -> None:
    torch.manual_seed(0)
    model = Ordered(ORDERS["shuffled"]).eval()
    with pytest.raises(Exception, match="order of the image's rows"):
        tcnn_probe.attention_maps(model, torch.randn(IMAGES), grid=(ROWS, COLUMNS))
