"""Vision models of transformers and torchvision: tokens, grids and windows are found; numbers equal brute force."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import check, same
from tests.tcnn_probe.attention.sharpen import sharpen

pytestmark = pytest.mark.numerical

TINY = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24, "patch_size": 8}
WINDOWS = {"patch_size": 4, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 3}


def of(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")  # not where tests are collected: by each of pytest's workers
        return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))

    return make


def detections_first(weights: Tensor, images: int) -> Tensor:
    """A class token, 7 for detection, then the patches."""
    order = [0, *range(25, 32), *range(1, 25)]
    return weights[..., order, :][..., order].unflatten(0, (images, 1))


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 3, 12, 24, num_classes=5)


FLAT, SQUARE = (32, 48), (32, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], Layout]] = {
    "vit": (of("ViT", **TINY, image_size=FLAT), FLAT, same(grid(4, 6, prefix=1))),
    "deit": (of("DeiT", **TINY, image_size=FLAT), FLAT, same(grid(4, 6, prefix=2))),
    "dinov2": (of("Dinov2", **TINY, image_size=32), SQUARE, same(grid(4, 4, prefix=1))),
    "dinov2 with registers": (
        of("Dinov2WithRegisters", **TINY, image_size=32, num_register_tokens=4),
        SQUARE,
        same(grid(4, 4, prefix=5)),
    ),
    "dinov3": (of("DINOv3ViT", **TINY, image_size=FLAT, num_register_tokens=4), FLAT, same(grid(4, 6, prefix=5))),
    "yolos": (
        of("Yolos", **TINY, image_size=list(FLAT), num_detection_tokens=7),
        FLAT,
        same(grid(4, 6, prefix=8), arrange=detections_first),
    ),
    "beit": (of("Beit", **TINY, image_size=FLAT), FLAT, same(grid(4, 6, prefix=1))),
    "swin": (of("Swin", **WINDOWS, image_size=(28, 40)), (28, 40), same(grid(3, 3))),
    "swinv2": (of("Swinv2", **WINDOWS, image_size=(48, 48)), (48, 48), same(grid(3, 3))),
    "torchvision vit": (torchvision_vit, SQUARE, same(grid(4, 4, prefix=1))),
}


@pytest.mark.parametrize(("make", "size", "layout"), CASES.values(), ids=CASES)
def test_equals_brute_force(make: Callable[[], nn.Module], size: tuple[int, int], layout: Layout) -> None:
    torch.manual_seed(0)
    model, images = sharpen(make().eval(), 2.0), torch.randn(2, 3, *size)
    layers = {one.layer for one in attention_of(model, images)}
    assert len(layers) == 2
    check(model, images, dict.fromkeys(layers, layout))


def test_maps_of_windows_and_of_what_is_behind_the_grid() -> None:
    torch.manual_seed(0)
    model, images = CASES["yolos"][0]().double().eval(), torch.randn(2, 3, *FLAT, dtype=torch.float64)
    weights = attention_of(model, images)[1].weights
    node = tcnn_probe.attention_maps(model, images)["3x4x6"]
    np.testing.assert_allclose(node.attention[:, 1].values.reshape(2, 3, 24, 24), weights[:, :, 1:25, 1:25], atol=1e-9)
    np.testing.assert_allclose(node.class_attention[:, 1].values.reshape(2, 3, 24), weights[:, :, 0, 1:25], atol=1e-9)


def test_projections_inside_of_an_attention_are_none() -> None:
    """CvT calls its convolutions CvtSelfAttentionConvProjection, and the like."""
    torch.manual_seed(0)
    model = of("Cvt", depth=[1, 2, 3], embed_dim=[8, 12, 12], num_heads=[1, 3, 3])().eval()
    images = torch.randn(2, 3, 64, 64)
    whole = model(images).last_hidden_state
    with tcnn_probe.record(model) as recorder:
        model(images)
        recorder.mark(epoch=0)
    assert not recorder.unsupported
    assert len(recorder.layers) == 6
    with tcnn_probe.ablate(model, recorder.layers, "shuffled", images=images):
        assert not torch.equal(model(images).last_hidden_state, whole)


def test_pictures_are_refused_with_the_way_to_prepare_them() -> None:
    with pytest.raises(TypeError, match="AutoImageProcessor"):
        tcnn_probe.attention_maps(CASES["vit"][0](), np.zeros((32, 48, 3), np.uint8))
