"""Vision models of transformers and torchvision: tokens,
grids and windows are found; numbers equal brute force.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.extras import need
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import (
    TOLERANCE,
    Family,
    check,
    check_family,
    expect,
    recorded,
    same,
)
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts import helpers

pytestmark = pytest.mark.numerical

# Two layers of three heads in 12 channels are built in milliseconds, and have every kind of module
# of the full model.
TINY = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 24,
    "patch_size": 8,
}
# The grids are not always multiples of the window of 3, so that transformers pads; a depth of 2
# shifts one layer.
WINDOWS = {
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2],
    "num_heads": [2],
    "window_size": 3,
}


def of(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        # The import is not done while tests are collected, as each of pytest's workers would do it.
        transformers = need("transformers")
        return getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(**options)
        )

    return make


def detections_first(weights: Tensor, images: int) -> Tensor:
    """Move YOLOS' detection tokens behind the class token, before the patches."""
    # YOLOS has its detection tokens at the end, but our layouts have all tokens without a position
    # first.
    order = [0, *range(25, 32), *range(1, 25)]
    return weights[..., order, :][..., order].unflatten(0, (images, 1))


# Images are flat for classes that accept them, and square for classes whose positions require it.
FLAT, SQUARE = (32, 48), (32, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], Layout]] = {
    "vit": (of("ViT", **TINY, image_size=FLAT), FLAT, same(grid(4, 6, prefix=1))),
    # A distillation token follows the class token.
    "deit": (of("DeiT", **TINY, image_size=FLAT), FLAT, same(grid(4, 6, prefix=2))),
    "dinov2 with registers": (
        of("Dinov2WithRegisters", **TINY, image_size=32, num_register_tokens=4),
        SQUARE,
        same(grid(4, 4, prefix=5)),
    ),
    "dinov3": (
        of("DINOv3ViT", **TINY, image_size=FLAT, num_register_tokens=4),
        FLAT,
        same(grid(4, 6, prefix=5)),
    ),
    # Of these models, only YOLOS has further tokens behind the grid.
    "yolos": (
        of("Yolos", **TINY, image_size=list(FLAT), num_detection_tokens=7),
        FLAT,
        same(grid(4, 6, prefix=8), arrange=detections_first),
    ),
    "beit": (of("Beit", **TINY, image_size=FLAT), FLAT, same(grid(4, 6, prefix=1))),
    "swin": (of("Swin", **WINDOWS, image_size=(28, 40)), (28, 40), same(grid(3, 3))),
    # The window is as large as its grid: nothing is cut, and yet the layer must have the grid of a
    # window.
    "swin, of which the second layer has a single window": (
        of(
            "Swin",
            **WINDOWS | {"depths": [1, 1], "num_heads": [2, 2]},
            image_size=(24, 24),
        ),
        (24, 24),
        same(grid(3, 3)),
    ),
    "swinv2": (
        of("Swinv2", **WINDOWS, image_size=(48, 48)),
        (48, 48),
        same(grid(3, 3)),
    ),
}


@pytest.mark.study(but=["deit", "dinov2 with registers", "swin"])
@pytest.mark.parametrize(("make", "size", "layout"), CASES.values(), ids=CASES)
def test_equals_brute_force(
    make: Callable[[], nn.Module], size: tuple[int, int], layout: Layout
) -> None:
    torch.manual_seed(0)
    # Weights are scaled up, as the initial attention of models this small is nearly uniform.
    model = sharpen(make().eval(), 2.0)
    images = torch.randn(2, 3, *size)
    layers = {reference.layer for reference in attention_of(model, images)}
    assert len(layers) == 2
    check(model, images, dict.fromkeys(layers, layout))


def by_einsum(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attend like a user's own function that is registered by name."""
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * options["scaling"]
    return torch.einsum("bhqk,bhkd->bqhd", logits.softmax(-1), v), None


@pytest.mark.study(but=["eager", "sdpa", "by_einsum"])
@pytest.mark.filterwarnings(
    "ignore:.*flex_attention called without torch.compile", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", "by_einsum"])
def test_attention_interfaces(implementation: str) -> None:
    need("transformers").AttentionInterface.register("by_einsum", by_einsum)
    make, size, layout = CASES["vit"]
    model = sharpen(make()).double()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
    # The reference intercepts the softmax, which fused attention does not call.
    model.set_attn_implementation("eager")
    references = attention_of(model, images)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        ds, layers, unsupported = recorded(model, [images.double()])
    assert len(layers) == 2
    assert not unsupported
    # Eager attention computes its softmax in float32, with a rounding error of 6e-8 that reaches
    # the second layer.
    tolerance = 1e-6 if implementation == "eager" else TOLERANCE
    layouts = dict.fromkeys(layers, layout)
    expect(ds, references, layouts, len(images), tolerance)


def test_maps_leave_out_tokens_before_and_behind_the_grid() -> None:
    torch.manual_seed(0)
    model = CASES["yolos"][0]().double().eval()
    images = torch.randn(2, 3, *FLAT, dtype=torch.float64)
    weights = attention_of(model, images)[1].weights
    node = tcnn_probe.attention_maps(model, images)["3x4x6"]
    # The 24 patches stand between the class token and seven more tokens.
    np.testing.assert_allclose(
        node.attention[:, 1].values.reshape(2, 3, 24, 24),
        weights[:, :, 1:25, 1:25],
        atol=1e-9,
    )
    np.testing.assert_allclose(
        node.class_attention[:, 1].values.reshape(2, 3, 24),
        weights[:, :, 0, 1:25],
        atol=1e-9,
    )


def test_projections_inside_an_attention_are_not_attention_layers() -> None:
    """CvT has convolutions called CvtSelfAttentionConvProjection, and the like."""
    torch.manual_seed(0)
    # Depths are 1, 2 and 3, so that stages cannot be confused in the count.
    model = of("Cvt", depth=[1, 2, 3], embed_dim=[8, 12, 12], num_heads=[1, 3, 3])().eval()
    images = torch.randn(2, 3, 64, 64)
    hidden_state = model(images).last_hidden_state
    recorder = helpers.recorded(model, images)
    assert not recorder.unsupported
    assert len(recorder.layers) == 6
    # The number of layers does not show that they are read correctly, but an edit must change the
    # output.
    with tcnn_probe.ablate(model, recorder.layers, "shuffled", images=images):
        assert not torch.equal(model(images).last_hidden_state, hidden_state)


def test_keys_of_strided_convolutions() -> None:
    """Those of CvT have 3 x 3 pixels and padding, so they are centred at every second pixel."""
    layouts = {
        "*stages.0*": Layout(grid(16, 24), grid(8, 12, spacing=(2, 2))),
        "*stages.1*": Layout(grid(8, 12), grid(4, 6, spacing=(2, 2))),
        "*": Layout(grid(4, 6, prefix=1), grid(2, 3, prefix=1, spacing=(2, 2)), class_query=True),
    }
    make = of("Cvt", depth=[1, 2, 3], embed_dim=[8, 12, 12], num_heads=[1, 3, 3])
    check_family(Family("cvt", make, (64, 96), layouts, flattest=0.99))


@pytest.mark.filterwarnings("ignore:no attention_distance:RuntimeWarning")  # groups are not patches
def test_group_tokens_behind_the_grid_are_not_taken_for_a_class_token() -> None:
    torch.manual_seed(0)
    options = TINY | {"num_hidden_layers": 1, "image_size": 32}
    groups = {
        "depths": [1, 1, 1],
        "num_group_tokens": [5, 3, 0],
        "num_output_groups": [5, 3, 0],
    }
    model = of("GroupViTVision", **options, **groups)().eval()
    recorder = helpers.recorded(model, torch.randn(2, 3, *SQUARE))
    first = recorder.dataset.isel(layer=0)
    assert first.attention_distance.notnull().all()
    assert first.prefix_attention.notnull().all()
    assert not [name for name in recorder.dataset if str(name).startswith("class_")]


def test_queries_before_a_class_token_hide_it() -> None:
    """EoMT puts its queries before all other tokens in its last layers."""
    torch.manual_seed(0)
    transformers = need("transformers")
    # Only the last block has queries, so that it differs from those before it.
    options = TINY | {
        "num_hidden_layers": 3,
        "image_size": 32,
        "num_blocks": 1,
        "num_queries": 7,
    }
    config = transformers.EomtConfig(**options, num_upscale_blocks=1, num_register_tokens=2)
    model = transformers.EomtForUniversalSegmentation(config).eval()
    recorder = helpers.recorded(model, torch.randn(2, 3, 32, 32))
    known = recorder.dataset.class_entropy.notnull().all("head").sel(epoch=0)
    assert known.values.tolist() == [True, True, False]
    assert recorder.dataset.attention_distance.notnull().all()


@pytest.mark.filterwarnings("ignore:no attention_distance:RuntimeWarning")
def test_mask_units_that_are_kept_are_unknown() -> None:
    transformers = need("transformers")
    torch.manual_seed(0)
    options = {
        "embed_dim": 8,
        "image_size": [64, 64],
        "depths": [1, 1, 1, 1],
        "num_heads": [4, 4, 4, 4],
        # Half of the units are dropped at random, and the model does not tell which.
        "mask_ratio": 0.5,
        "decoder_hidden_size": 8,
        "decoder_num_heads": 2,
        "decoder_depth": 1,
    }
    config = transformers.HieraConfig(**options)
    model = transformers.HieraForPreTraining(config).eval()
    recorder = helpers.recorded(model, torch.randn(2, 3, 64, 64))
    missing = recorder.missing["attention_distance"]
    encoder = [layer for layer in recorder.layers if "encoder" in layer]
    assert len(encoder) == 4
    for layer in encoder:
        # Layers that attend inside of single units cannot tell which unit it is.
        assert "positions of the units" in missing[layer] or "different patches" in missing[layer]


def test_raw_pictures_are_refused_with_the_way_to_prepare_them() -> None:
    with pytest.raises(TypeError, match="AutoImageProcessor"):
        # An array of bytes is a picture that was not prepared, and its maps would be meaningless.
        tcnn_probe.attention_maps(CASES["vit"][0](), np.zeros((32, 48, 3), np.uint8))
