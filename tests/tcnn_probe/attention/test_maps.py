"""attention_maps: the attention of a forward on the grid
of the image equals brute force in float64.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from timm.models.davit import DaVit, SpatialBlock
from timm.models.hiera import Unroll
from timm.models.twins import Twins
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit, PartitionAttentionLayer
from torchvision.models.swin_transformer import SwinTransformer

import tcnn_model
import tcnn_probe
from tests.extras import need
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.oracle import gpsa_attention

# Patches of 8 make 4 x 6 cells, so that exchanged axes would have the wrong shape.
SIZE = (32, 48)
VIT = {
    "patch_size": 8,
    "img_size": SIZE,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}
SWIN = {
    "patch_size": 4,
    "embed_dim": 8,
    "depths": (2,),
    "num_heads": (2,),
    "num_classes": 5,
}


def small(name: str, **options: object) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, **options)


def run(
    make: Callable[[], nn.Module], size: tuple[int, int] = SIZE, count: int = 2
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = make().double().eval()
    # Initial attention is so uniform that a shifted map would pass.
    sharpen(model, 1.7)
    return model, torch.randn(count, 3, *size, dtype=torch.float64)


def on_grid(weights: Tensor, keys: tuple[int, int], queries: tuple[int, int]) -> np.ndarray:
    """Select the tokens on the grids from (B, heads, N_query, N_key)."""
    # In all models here, tokens without a position come first.
    on_grids = weights[:, :, -math.prod(queries) :, -math.prod(keys) :]
    return on_grids.unflatten(-1, keys).unflatten(2, queries).numpy()


@pytest.mark.parametrize(
    "name",
    [
        "deit_tiny_distilled_patch16_224",
        "eva02_tiny_patch14_224",
        "beit_base_patch16_224",
        "cait_xxs24_224",
    ],
)
def test_equals_brute_force(name: str) -> None:
    model, images = run(small(name, **VIT))
    expected = {reference.layer: reference.weights for reference in attention_of(model, images)}
    # Single images make batches, so that the join of batches is tested as well.
    tree = tcnn_probe.attention_maps(model, images, batch_size=1)
    assert {
        layer for node in tree.children.values() for layer in node.layer.values
    } == expected.keys()
    for node in tree.children.values():
        for layer in node.layer.values:
            maps = node.dataset.sel(layer=layer)
            weights = expected[layer]
            if weights.shape[2] > 1:
                np.testing.assert_allclose(
                    maps.attention, on_grid(weights, (4, 6), (4, 6)), atol=1e-9
                )
            # CaiT's first layers have no class token, and their 24 queries are the patches.
            if weights.shape[2] != 24:  # a class token is among the queries
                row = weights[:, :, 0, -24:].unflatten(-1, (4, 6))
                np.testing.assert_allclose(maps.class_attention, row, atol=1e-9)


def test_mixed_heads_are_the_weights_of_the_values() -> None:
    """For talking heads, a loop sums the softmaxes
    of all heads with the mixing weights of each head.
    """
    model, images = run(small("cait_xxs24_224", **VIT))
    for block in model.blocks:
        # timm initialises these biases with zeros, so that a missing bias would not show.
        nn.init.normal_(block.attn.proj_w.bias)
    softmaxes = {reference.layer: reference.weights for reference in attention_of(model, images)}
    # Heads are not in order, so that other heads would show.
    selected = [2, 0]
    tree = tcnn_probe.attention_maps(model, images, heads=selected, mixed=True, batch_size=1)
    maps = tree["3x4x6"].attention
    for index, block in enumerate(model.blocks):
        layer = f"blocks.{index}.attn"
        mixing = block.attn.proj_w
        for head in selected:
            expected = mixing.bias[head].detach()
            for source in range(3):
                weight = mixing.weight[head, source].item()
                expected = expected + weight * softmaxes[layer][:, source]
            np.testing.assert_allclose(
                maps.sel(layer=layer, head=head),
                on_grid(expected[:, None], (4, 6), (4, 6))[:, 0],
                # Maps are stored in float32; weights and biases are of order 1.
                atol=1e-5,
            )
    # Class attention does not mix its heads.
    plain = tcnn_probe.attention_maps(model, images, heads=selected, batch_size=1)
    for name, node in plain.children.items():
        if "class_attention" in node:
            xr.testing.assert_equal(node.class_attention, tree[name].class_attention)


def test_mixing_is_refused_where_no_heads_are_mixed() -> None:
    model, images = run(small("deit_tiny_patch16_224", **VIT))
    with pytest.raises(ValueError, match=r"mix their heads .* got VisionTransformer"):
        tcnn_probe.attention_maps(model, images, mixed=True)


# Windows are given by (rows, columns) of the grid and of a window, and the shift; loops find the
# cell of each token of each window.


def rolled_then_padded(grid, window, shift):  # type: ignore[no-untyped-def]  # timm's Swin
    def cell(y: int, x: int) -> tuple[int, int] | None:
        return (
            ((y + shift[0]) % grid[0], (x + shift[1]) % grid[1])
            if y < grid[0] and x < grid[1]
            else None
        )

    return neighbours(grid, window, cell)


# As in torchvision's and transformers' Swin.
def padded_then_rolled(grid, window, shift):  # type: ignore[no-untyped-def]
    # The grid is padded to whole windows before it is rolled.
    padded = [-(-n // side) * side for n, side in zip(grid, window, strict=True)]

    def cell(y: int, x: int) -> tuple[int, int] | None:
        y, x = (y + shift[0]) % padded[0], (x + shift[1]) % padded[1]
        return (y, x) if y < grid[0] and x < grid[1] else None

    return neighbours(grid, window, cell)


def neighbours(grid, window, cell):  # type: ignore[no-untyped-def]
    tops = range(0, grid[0], window[0])
    lefts = range(0, grid[1], window[1])
    return [
        [cell(y + i, x + j) for i in range(window[0]) for j in range(window[1])]
        for y in tops
        for x in lefts
    ]


def dilated(grid, window):  # type: ignore[no-untyped-def]  # MaxViT's grid attention
    # Tokens of a window are spread over the whole grid, with a stride.
    steps = grid[0] // window[0], grid[1] // window[1]
    tokens = [(i * steps[0], j * steps[1]) for i in range(window[0]) for j in range(window[1])]
    return [[(y + i, x + j) for i, j in tokens] for y in range(steps[0]) for x in range(steps[1])]


def twins() -> nn.Module:
    # Windows of 7 do not divide either side of 10 x 13 cells.
    return Twins(
        embed_dims=(8,),
        num_heads=(2,),
        mlp_ratios=(1,),
        depths=(1,),
        sr_ratios=(7,),
        wss=(7,),
    )


def davit() -> nn.Module:
    return DaVit(depths=(1,), embed_dims=(8,), num_heads=(2,), window_size=3)


def torchvision_swin() -> nn.Module:
    # The sides of a window differ, so that exchanged sides would show.
    return SwinTransformer([4, 4], 8, [2], [2], [3, 4], num_classes=5, stochastic_depth_prob=0.0)


def torchvision_maxvit() -> nn.Module:
    return MaxVit((64, 64), 8, 4, [8], [1], 4, 0.0, num_classes=5)


TIMM_SWIN = small("swin_tiny_patch4_window7_224", **SWIN, img_size=(28, 40), window_size=(3, 4))
TIMM_SWIN_V2 = small("swinv2_tiny_window8_256", **SWIN, img_size=(28, 40), window_size=(3, 4))
# The window is larger than the grid, so that there is one window with padding.
LARGE = small(
    "swin_tiny_patch4_window7_224",
    **SWIN,
    img_size=44,
    window_size=11,
    strict_img_size=False,
)
ATTN = "stages.0.blocks.0.attn"
MAXVIT = small("maxvit_tiny_rw_224", img_size=(64, 96), embed_dim=(32,), depths=(1,), num_classes=5)


# Windows of 3 are padded on both sides of 8 x 10 cells.
SAM2 = small(
    "sam2_hiera_tiny",
    embed_dim=8,
    stages=(1, 2, 1, 1),
    # The first one must divide its grid because of the positions.
    window_spec=(2, 3, 3, 3),
    global_att_blocks=(),
    q_pool=0,
)


SAMVIT = small(
    "samvit_base_patch16_224",
    img_size=(28, 40),
    patch_size=4,
    embed_dim=8,
    num_heads=2,
    depth=1,
    window_size=3,
    global_attn_indexes=(),
)


BLOCKS, LAYERS = "layers.0.blocks", "blocks.0.layers.0.layers"
NO_SHIFT, SWIN_GRID = (0, 0), ((7, 10), (3, 4))
OF_SWIN = rolled_then_padded(*SWIN_GRID, (1, 2))
# Model, size of images, module that cuts windows, its attention, and the cells of each window's
# tokens.
CASES = {
    "swin": (
        TIMM_SWIN,
        (28, 40),
        f"{BLOCKS}.0",
        ".attn",
        rolled_then_padded(*SWIN_GRID, NO_SHIFT),
    ),
    "swin-shifted": (TIMM_SWIN, (28, 40), f"{BLOCKS}.1", ".attn", OF_SWIN),
    "swin-one-larger-window": (
        LARGE,
        (28, 40),
        f"{BLOCKS}.1",
        ".attn",
        rolled_then_padded((7, 10), (11, 11), NO_SHIFT),
    ),
    "swinv2-shifted": (TIMM_SWIN_V2, (28, 40), f"{BLOCKS}.1", ".attn", OF_SWIN),
    "torchvision-swin": (
        torchvision_swin,
        (28, 40),
        "features.1.1.attn",
        "",
        padded_then_rolled(*SWIN_GRID, (1, 2)),
    ),
    "maxvit": (
        MAXVIT,
        (64, 96),
        f"{ATTN}_block",
        ".attn",
        rolled_then_padded((16, 24), (2, 3), NO_SHIFT),
    ),
    "maxvit-grid": (
        MAXVIT,
        (64, 96),
        f"{ATTN}_grid",
        ".attn",
        dilated((16, 24), (2, 3)),
    ),
    "torchvision-maxvit": (
        torchvision_maxvit,
        (64, 64),
        f"{LAYERS}.window_attention",
        ".attn_layer.1",
        rolled_then_padded((16, 16), (4, 4), NO_SHIFT),
    ),
    "torchvision-maxvit-grid": (
        torchvision_maxvit,
        (64, 64),
        f"{LAYERS}.grid_attention",
        ".attn_layer.1",
        dilated((16, 16), (4, 4)),
    ),
    "davit": (
        davit,
        (28, 40),
        "stages.0.blocks.0.0",
        ".attn",
        rolled_then_padded((7, 10), (3, 3), NO_SHIFT),
    ),
    "sam2": (
        SAM2,
        (32, 40),
        "blocks.2",
        ".attn",
        rolled_then_padded((8, 10), (3, 3), NO_SHIFT),
    ),
    "samvit": (
        SAMVIT,
        (28, 40),
        "blocks.0",
        ".attn",
        rolled_then_padded((7, 10), (3, 3), NO_SHIFT),
    ),
    "twins": (
        twins,
        (40, 52),
        "blocks.0.0.attn",
        "",
        rolled_then_padded((10, 13), (7, 7), NO_SHIFT),
    ),
}


def placed(weights: np.ndarray, cells: Any, shape: Any) -> np.ndarray:
    """Place weights (B, windows, heads, N, N) in maps;
    those of tokens in different windows are zero, not missing.
    """
    expected = np.zeros(shape)
    for w, window in enumerate(cells):
        for q, query in enumerate(window):
            for k, key in enumerate(window):
                if query is not None and key is not None:
                    expected[:, :, *query, *key] = weights[:, w, :, q, k]
    return expected


@pytest.mark.parametrize(
    ("make", "size", "cutter", "attention", "cells"), CASES.values(), ids=CASES
)
def test_windows_are_put_in_their_places(make, size, cutter, attention, cells) -> None:  # type: ignore[no-untyped-def]
    model, images = run(make, size, 2)
    for module in model.modules():
        # Convolutions of the block would bring in pixels from beyond the window.
        if isinstance(module, SpatialBlock):
            for convolution in (module.cpe1.proj, module.cpe2.proj):
                nn.init.zeros_(convolution.weight)
    layer = cutter + attention
    weights = next(
        reference.weights for reference in attention_of(model, images) if reference.layer == layer
    )
    # Libraries put the windows of an image into the batch, one image after another. Shape (B,
    # windows, heads, N, N).
    weights = weights.reshape(2, len(cells), -1, *weights.shape[-2:]).numpy()
    maps = next(
        iter(tcnn_probe.attention_maps(model, images, layers=layer).children.values())
    ).attention[:, 0]
    np.testing.assert_allclose(maps, placed(weights, cells, maps.shape), atol=1e-9)
    # The query is near the lower right corner, where windows are padded; masked weights are below
    # 1e-20.
    attended = (maps[0, :, 5, 8].values > 1e-20).any(0)
    np.testing.assert_array_equal(attended, influence(model, cutter, images[:1], (5, 8)))


def test_a_window_larger_than_the_map_is_not_drawn_over_all_of_it() -> None:
    options = {"embed_dims": (8,) * 4, "depths": (1,) * 4, "num_heads": (1, 2, 2, 2)}
    make = small("tiny_vit_5m_224", **options, window_sizes=(7,) * 4, num_classes=5)
    # Eighths of the image: 3 x 5 cells, padded to 7 x 7.
    model, images = run(make, (24, 40), 2)
    layer = "stages.1.blocks.0.attn"
    weights = next(x.weights for x in attention_of(model, images) if x.layer == layer)
    maps = tcnn_probe.attention_maps(model, images, layers=layer)["2x3x5"].attention
    of_windows = weights.reshape(2, 2, 7, 7, 7, 7)
    np.testing.assert_allclose(maps[:, 0], of_windows[:, :, :3, :5, :3, :5], atol=1e-9)


MODULES = {  # of transformers.models
    "DonutSwin": "donut",
    "MaskFormerSwin": "maskformer",
    "Sam2HieraDet": "sam2",
    "Sam3ViT": "sam3",
    "SamHQVision": "sam_hq",
    "SamVision": "sam",
    "Swin2SR": "swin2sr",
    "VitDet": "vitdet",
}
OF_TRANSFORMERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SHIFTED = {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 3}
UNSHIFTED = {**OF_TRANSFORMERS, "hidden_size": 8, "patch_size": 4, "window_size": 3}
SHIFTED_CELLS = padded_then_rolled((7, 10), (3, 3), (1, 1))
UNSHIFTED_CELLS = rolled_then_padded((10, 10), (3, 3), NO_SHIFT)
OF_SAM2 = {
    "hidden_size": 8,
    "image_size": [32, 40],
    "blocks_per_stage": [1, 2, 1, 1],
    "embed_dim_per_stage": [8] * 4,
    "num_attention_heads_per_stage": [2] * 4,
    "window_size_per_stage": [2, 3, 3, 3],
    "global_attention_blocks": [3],
    "num_query_pool_stages": 0,
}
OF_SAM = {**UNSHIFTED, "image_size": 40, "global_attn_indexes": [0]}


@pytest.mark.parametrize(
    ("name", "options", "size", "layer", "cells"),
    [
        ("DonutSwinModel", SHIFTED, (28, 40), "blocks.1.attention.self", SHIFTED_CELLS),
        (
            "MaskFormerSwinBackbone",
            {**SHIFTED, "out_features": ["stage1"]},
            (28, 40),
            "blocks.1.attention.self",
            SHIFTED_CELLS,
        ),
        (
            "Swin2SRModel",
            # Swin2SR pads its images to whole windows, and its tokens are pixels.
            {**SHIFTED, "window_size": 4},
            (8, 12),
            "layers.1.attention.self",
            padded_then_rolled((8, 12), (4, 4), (2, 2)),
        ),
        ("SamVisionModel", OF_SAM, (40, 40), "layers.1.attn", UNSHIFTED_CELLS),
        ("SamHQVisionModel", OF_SAM, (40, 40), "layers.1.attn", UNSHIFTED_CELLS),
        (
            "Sam3ViTModel",
            {**UNSHIFTED, "image_size": 40, "global_attn_indexes": [0]},
            (40, 40),
            "layers.1.attention",
            UNSHIFTED_CELLS,
        ),
        (
            "VitDetModel",
            {**UNSHIFTED, "image_size": (28, 40), "window_block_indices": [1]},
            (28, 40),
            "layer.1.attention",
            rolled_then_padded((7, 10), (3, 3), NO_SHIFT),
        ),
        (
            "Sam2HieraDetModel",
            OF_SAM2,
            (32, 40),
            "blocks.2.attn",
            rolled_then_padded((8, 10), (3, 3), NO_SHIFT),
        ),
    ],
)
def test_windows_of_transformers(  # type: ignore[no-untyped-def]
    name, options, size, layer, cells
) -> None:
    torch.manual_seed(0)
    kind = name.removesuffix("Model").removesuffix("Backbone")
    modules = need(f"transformers.models.{MODULES[kind]}")
    config = getattr(modules, f"{kind}Config")(**options, attn_implementation="eager")
    model = sharpen(getattr(modules, name)(config).double().eval(), 1.7)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    maps = tcnn_probe.attention_maps(model, images, layers=f"*{layer}")
    references = attention_of(model, images)
    # A layer of SAM 2 computes another softmax before, which is not used.
    *_, weights = (x.weights for x in references if x.layer.split("#")[0].endswith(layer))
    # Heads are an axis of their own, or the last part of the batch axis.
    weights = weights.flatten(0, -3).unflatten(0, (2, len(cells), 2)).numpy()
    attention = next(iter(maps.children.values())).attention[:, 0]
    expected = placed(weights, cells, attention.shape)
    # Eager attention may take its softmax in float32.
    np.testing.assert_allclose(attention, expected, atol=1e-6)


def timm_hiera() -> nn.Module:
    options = {"embed_dim": 8, "num_heads": 2, "stages": (1, 1, 2, 1)}
    return timm.create_model("hiera_tiny_224", img_size=(64, 96), **options)


def transformers_hiera() -> nn.Module:
    transformers = need("transformers")
    config = transformers.HieraConfig(
        # Stages differ in their number of heads, so that the axis of heads is padded.
        embed_dim=8,
        image_size=[64, 96],
        depths=[1, 1, 2, 1],
        num_heads=[2, 2, 4, 4],
    )
    return transformers.HieraModel(config)


@pytest.mark.parametrize("make", [timm_hiera, transformers_hiera])
def test_mask_units_of_hiera_are_put_in_their_places(make: Any) -> None:
    """Cells are computed with timm's own reordering, which both libraries have."""
    torch.manual_seed(0)
    model = sharpen(make()).double().eval()
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    maps = tcnn_probe.attention_maps(model, images)
    compared = 0
    for reference in attention_of(model, images):
        # (B, heads, windows, N, N), or the same without windows.
        weights = reference.weights
        weights = weights if weights.ndim == 5 else weights[:, :, None]
        _, heads, windows, *counts = weights.shape
        cells, grids = [], []
        for count in counts:
            # The four stages have 16 x 24 cells, and half of them along both sides after each
            # pooling.
            stage = [384, 96, 24, 6].index(count * windows)
            grids.append((16 >> stage, 24 >> stage))
            unroll = Unroll(grids[-1], (1, 1), [(2, 2)] * (3 - stage))
            order = unroll(torch.arange(count * windows).view(1, -1, 1))
            cells.append(order.view(count, windows))
        expected = torch.zeros(2, heads, *(rows * columns for rows, columns in grids)).double()
        for w in range(windows):
            expected[:, :, cells[0][:, w][:, None], cells[1][:, w]] = weights[:, :, w]
        node = next(node for node in maps.children.values() if reference.layer in node.layer.values)
        attention = node.attention.sel(layer=reference.layer)
        attention = attention.isel(head=slice(heads)).transpose(
            "image", "head", "query_y", "query_x", "y", "x"
        )
        assert attention.shape[2:] == (*grids[0], *grids[1])
        # Maps are stored in float32.
        np.testing.assert_allclose(attention.values.reshape(expected.shape), expected, atol=1e-6)
        compared += 1
    assert compared == 5


def influence(model: nn.Module, cutter: str, images: Tensor, query: tuple[int, int]) -> np.ndarray:
    """Return the tokens of a module's input on which one token of its output depends."""
    module = model.get_submodule(cutter)
    calls = []
    handle = module.register_forward_pre_hook(lambda _, args: calls.append(args))
    model(images)
    handle.remove()
    x, *arguments = calls[0]
    channels = -1
    # The input is detached, because gradients through earlier layers are not of interest.
    if isinstance(module, (SpatialBlock, PartitionAttentionLayer)):
        channels = 1
    x = x.detach().requires_grad_()
    output = module(x, *arguments)
    if x.ndim == 3:
        output = output.unflatten(1, arguments[0])
    # The gradient is that of a random direction, as single channels can have a gradient of zero.
    at = output.movedim(channels, -1)[0, *query]
    grad = (
        torch.autograd.grad((at * torch.randn_like(at)).sum(), x)[0]
        .movedim(channels, -1)
        .abs()
        .amax(-1)[0]
    )
    return (grad.reshape(output.movedim(channels, -1).shape[1:3]) > 1e-20).numpy()


def test_gated_layers() -> None:
    torch.manual_seed(0)
    model = (
        tcnn_model.reparameterize(
            # Strides are kept, so that queries are on a coarser grid than keys.
            timm.create_model("resnet10t", num_classes=5),
            stride="keep",
        )
        .double()
        .eval()
    )
    images = torch.randn(2, 3, 96, 160, dtype=torch.float64)
    layer_inputs: dict[str, Tensor] = {}
    layers = tcnn_model.gpsa_layers(model)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: layer_inputs.update({name: inputs[0]})
        )
    tree = tcnn_probe.attention_maps(model, images)
    assert sum(len(node.layer) for node in tree.children.values()) == len(layers)
    for node in tree.children.values():
        for name in node.layer.values:
            layer = layers[name]
            dense = gpsa_attention(layer, layer_inputs[name])
            maps = node.attention.sel(layer=name)
            height, width = layer_inputs[name].shape[2:]
            pixels = (
                # The paper's formula has keys in a padding of one pixel on each side, but maps show
                # only the image.
                dense.unflatten(-1, (height + 2, width + 2))[..., 1:-1, 1:-1]
                .flatten(2, -3)
                .unflatten(2, maps.shape[2:4])
            )
            np.testing.assert_allclose(maps, pixels, atol=1e-9)
            np.testing.assert_allclose(node.gate.sel(layer=name), layer.gate.detach())


def test_pool_with_a_token_per_class() -> None:
    torch.manual_seed(0)
    model = (
        tcnn_model.add_attention_pool(timm.create_model("resnet10t", num_classes=5), per_class=True)
        .double()
        .eval()
    )
    images = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    maps = next(iter(tcnn_probe.attention_maps(model, images).children.values())).attention_by_class
    assert maps.dims == ("image", "layer", "head", "class", "y", "x")
    # The pool is the last attention layer.
    weights = attention_of(model, images)[-1].weights
    np.testing.assert_allclose(maps[:, 0], weights.reshape(maps[:, 0].shape), atol=1e-9)


@pytest.mark.study
def test_object_queries_of_a_decoder() -> None:
    """There are seven queries; the reference is the attention that transformers returns."""
    torch.manual_seed(0)
    stages = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1] * 4}
    sizes = {"d_model": 24, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    transformers = need("transformers")
    config = transformers.DetrConfig(
        backbone_config=transformers.ResNetConfig(**stages, out_features=["stage4"]),
        encoder_layers=1, decoder_layers=2, num_queries=7,
        encoder_attention_heads=3, decoder_attention_heads=3, **sizes,
    )  # fmt: skip
    model = sharpen(transformers.DetrModel(config).double().eval(), 1.7)
    # Only eager attention can return its weights.
    model.set_attn_implementation("eager")
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    tree = tcnn_probe.attention_maps(model, images, layers="*.encoder_attn")
    maps = tree["3x2x3_from_7"].attention_by_query
    assert maps.layer.values.tolist() == [f"decoder.layers.{n}.encoder_attn" for n in range(2)]
    with torch.no_grad():
        references = model(images, output_attentions=True).cross_attentions
    for n, weights in enumerate(references):
        reference = weights.unflatten(-1, (2, 3))
        # Eager attention of transformers computes its softmax in float32.
        np.testing.assert_allclose(maps[:, n], reference, atol=1e-6)
    figure = tcnn_probe.plot.attention_maps(tree, query=3)
    assert "of query 3" in figure.get_suptitle()
    drawn = [image.get_array() for axes in figure.axes[1:] for image in axes.images[1:]]
    # There are two layers of three heads.
    assert len(drawn) == 2 * 3
    for picture, reference in zip(drawn, maps[0, :, :, 3].values.reshape(6, 2, 3), strict=True):
        # Each panel is scaled by its own maximum.
        np.testing.assert_allclose(picture, reference / reference.max(), rtol=1e-6)
    with pytest.raises(ValueError, match="expected one of 7 queries that lie on no grid"):
        tcnn_probe.plot.attention_maps(tree, query=7)
    with pytest.raises(ValueError, match="has attention maps"):
        tcnn_probe.attention_maps(model, images, layers="*.encoder_attn", queries="class")


def test_selected_queries_heads_and_layers() -> None:
    model, images = run(small("deit_tiny_patch16_224", **VIT))
    full = tcnn_probe.attention_maps(model, images)["3x4x6"]
    selection = tcnn_probe.attention_maps(
        # Corners, heads in reverse order, and a layer by glob: each selection keeps its own order.
        model,
        images,
        layers="blocks.1*",
        heads=[2, 0],
        queries=[(31, 0), (9, 47)],
    )["3x4x6"]
    assert selection["head"].values.tolist() == [0, 2]
    assert selection.layer.values.tolist() == ["blocks.1.attn"]
    assert selection.query_y.values.tolist() == [3, 1]
    assert selection.query_x.values.tolist() == [0, 5]
    assert selection.from_y.values.tolist() == [31, 9]
    assert selection.from_x.values.tolist() == [0, 47]
    for number, (y, x) in enumerate([(3, 0), (1, 5)]):
        expected = full.attention.sel(layer="blocks.1.attn", head=[0, 2], query_y=y, query_x=x)
        np.testing.assert_allclose(selection.attention[:, 0, :, number], expected, atol=1e-12)
    only = tcnn_probe.attention_maps(model, images, queries="class")["3x4x6"]
    assert set(only.data_vars) == {"class_attention"}
    np.testing.assert_array_equal(only.class_attention, full.class_attention)


def test_half_precision_and_numpy_numbers() -> None:
    model = small("deit_tiny_patch16_224", **VIT)().bfloat16()
    images = torch.randn(1, 3, *SIZE, dtype=torch.bfloat16)
    tree = tcnn_probe.attention_maps(
        model, images, heads=np.arange(1, 3), queries=np.array([[31, 0]])
    )
    np.testing.assert_array_equal(tree.input, images.float())
    head_map = tcnn_probe.attention_maps(model, images, heads=np.int64(2), queries=[(31, 0)])[
        "3x4x6"
    ].attention
    np.testing.assert_array_equal(head_map, tree["3x4x6"].attention.sel(head=[2]))


def test_selected_queries_of_shifted_windows() -> None:
    # The shift has moved the corners of the image into the middle of a window.
    model, images = run(TIMM_SWIN, (28, 40))
    full = tcnn_probe.attention_maps(model, images)["2x7x10"].attention
    selection = tcnn_probe.attention_maps(model, images, queries=[(27, 1), (0, 39)])[
        "2x7x10"
    ].attention
    np.testing.assert_array_equal(selection[:, :, :, 0], full.sel(query_y=6, query_x=0))
    np.testing.assert_array_equal(selection[:, :, :, 1], full.sel(query_y=0, query_x=9))


def test_model_is_left_unchanged_and_images_are_stored() -> None:
    model, images = run(small("deit_tiny_patch16_224", **VIT))
    model.train()
    # The parts of the model are in different modes, as with frozen layers.
    model.blocks[0].eval()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    tree = tcnn_probe.attention_maps(model, images)
    # Images are compared as strings, because a comparison of tensors has no single truth value.
    assert all(str(vars(module)) == str(before[name]) for name, module in model.named_modules())
    assert all(p.grad is None for p in model.parameters())
    np.testing.assert_array_equal(tree.input, images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            # Pixels count from 0, so that row 32 is the first one outside.
            {"queries": [(32, 0)]},
            r"queries \(y, x\) inside images of 32 x 48 pixels, got \(32, 0\)",
        ),
        ({"queries": []}, "inside images"),
        ({"queries": "cls"}, "of integers, or 'class'; got 'cls'"),
        ({"queries": 3}, "of integers"),
        ({"heads": [-1]}, "an integer from 0 for heads, got -1"),
        ({"heads": [7]}, "no layer(.|\n)*blocks.0.attn: it has 3 heads"),
        (
            {"max_bytes": 10_000},
            r"at most 0.00 GB \(max_bytes\), got 0.00 GB: give queries",
        ),
        ({"layers": "blocks.7"}, "blocks.7"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    model, images = run(small("deit_tiny_patch16_224", **VIT))
    with pytest.raises(ValueError, match=message):
        tcnn_probe.attention_maps(model, images, **options)  # type: ignore[arg-type]


def test_maps_that_the_machine_cannot_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, images = run(small("deit_tiny_patch16_224", **VIT))
    tree = tcnn_probe.attention_maps(model, images, batch_size=1)
    size = sum(
        values.nbytes for node in tree.children.values() for values in node.data_vars.values()
    )
    for room, fits in ((1.21 * size, True), (1.19 * size, False)):
        monkeypatch.setattr(
            "tcnn_probe.attention.attention_maps.available_bytes",
            lambda room=room: room,
        )
        if fits:
            tcnn_probe.attention_maps(model, images, batch_size=1)
            continue
        with pytest.raises(ValueError, match=r"GB of memory that are free.*1\.2 times"):
            tcnn_probe.attention_maps(model, images, batch_size=1)


def test_layers_without_maps_are_reported() -> None:
    with pytest.raises(
        ValueError, match="no layer of this Sequential has attention maps: no softmax"
    ):
        tcnn_probe.attention_maps(nn.Sequential(nn.Conv2d(3, 3, 1)), torch.randn(1, 3, 8, 8))
    # XCiT attends between channels, so that there is a softmax but no map.
    model = timm.create_model("xcit_nano_12_p16_224", depth=1, num_classes=5, img_size=32).eval()
    tree = tcnn_probe.attention_maps(model, torch.randn(1, 3, 32, 32))
    assert "between channels" in tree.attrs["missing"]


def test_cells_are_placed_at_the_centre_of_their_receptive_fields() -> None:
    """After padded convolutions, the first cell is centred on the first pixel,
    not on the middle of a cell.
    """
    cnn = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=5)
    model = tcnn_model.reparameterize(cnn).eval()
    maps = tcnn_probe.attention_maps(model, torch.randn(1, 3, 64, 96), queries=[(17, 94)])["9x4x6"]
    # Each stride in resnet18 has a padded kernel, so that its cells are centred on multiples of 16.
    np.testing.assert_array_equal(maps.pixel_y, [0, 16, 32, 48])
    np.testing.assert_array_equal(maps.pixel_x, [0, 16, 32, 48, 64, 80])
    assert maps.query_y.item() == 1
    assert maps.query_x.item() == 5
    figure = tcnn_probe.plot.attention_maps(
        tcnn_probe.attention_maps(model, torch.randn(1, 3, 64, 96)), query=(17, 94)
    )
    assert {
        patch.get_bbox().bounds
        for axes in figure.axes
        for patch in axes.patches
        # A cell is framed by 16 pixels around its centre: along x, 64 + 16 - 8 + 0.5.
    } == {(72.5, 8.5, 16.0, 16.0)}
    vit = small("deit_tiny_patch16_224", **VIT)()
    np.testing.assert_allclose(
        tcnn_probe.attention_maps(vit, torch.randn(1, 3, *SIZE))["3x4x6"].pixel_x,
        # The centre of a patch of 8 pixels is at 3.5.
        3.5 + 8 * np.arange(6),
    )


class SeesSome(nn.Module):
    """Transformer whose second block gets some of the images, and none of few."""

    def __init__(self) -> None:
        super().__init__()
        self.net = timm.create_model(
            "vit_tiny_patch16_224", img_size=(48, 80), embed_dim=24, depth=3
        )

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        tokens = net.blocks[0](net._pos_embed(net.patch_embed(x)))
        left = len(x) // 2
        tokens = torch.cat([net.blocks[1](tokens[:left]), tokens[left:]])
        return net.forward_head(net.norm(net.blocks[2](tokens)))


def test_a_layer_that_sees_fewer_images_has_no_maps() -> None:
    model, images = SeesSome().eval(), torch.randn(5, 3, 48, 80)
    with pytest.warns(RuntimeWarning, match="saw 2 of 4 images"):
        maps = tcnn_probe.attention_maps(model, images, batch_size=4)
    (node,) = maps.children.values()
    assert node.layer.values.tolist() == ["net.blocks.0.attn", "net.blocks.2.attn"]
    assert "net.blocks.1.attn" in json.loads(maps.attrs["missing"])
    # The other layers keep the maps of all images.
    with tcnn_probe.attention_stream(
        model,
        lambda seen: weights.update({seen.name: seen.weights()[:, 0, :, 1:, 1:]}),
    ):
        weights: dict[str, Tensor] = {}
        model(images)
    kept = node.attention.sel(layer="net.blocks.2.attn").values.reshape(5, 3, 15, 15)
    np.testing.assert_allclose(kept, weights["net.blocks.2.attn"], atol=1e-6)


def test_a_layer_that_runs_in_some_batches_has_no_maps() -> None:
    model, images = SeesSome().eval(), torch.randn(3, 3, 48, 80)
    block = model.net.blocks[1]
    block.forward = lambda x: block.__class__.forward(block, x) if len(x) > 1 else x
    model.forward = lambda x: model.net(x)
    with pytest.warns(RuntimeWarning, match="did not run in every batch"):
        maps = tcnn_probe.attention_maps(model, images, batch_size=2)
    (node,) = maps.children.values()
    assert node.layer.values.tolist() == ["net.blocks.0.attn", "net.blocks.2.attn"]
