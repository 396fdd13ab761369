"""Rollout equals the product of the attention matrices of all layers, in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attribution.models import (
    CONVOLVED,
    SIZE,
    OneBlock,
    bilinear,
    patchconvnet,
    transformer,
)

pytestmark = pytest.mark.numerical


def product(model: nn.Module, images: Tensor, prefix: int, token: int) -> np.ndarray:
    """Multiply the matrices of all layers, where class attention acts on the token and the patches.

    ``prefix`` counts class and register tokens of the trunk; ``token`` is 1 if the class token comes after the trunk.
    """
    layers = [reference.weights.numpy() for reference in attention_of(model, images)]
    maps = []
    for image in range(len(images)):
        count = prefix + 15 + token
        total = np.eye(count)
        for weights in layers:
            mean = weights[image].mean(0)
            full = np.eye(count)
            if mean.shape[0] == 1:
                full[0] = 0
                full[0, count - mean.shape[1] :] = mean[0]
                attention = (full + np.eye(count)) / 2
                # Class attention leaves the patches unchanged.
                attention[1:] = np.eye(count)[1:]
            else:
                full[token:, token:] = mean
                attention = (full + np.eye(count)) / 2
            total = attention @ total
        maps.append(total[0, prefix + token :].reshape(3, 5))
    return np.stack(maps)


@pytest.mark.parametrize(
    ("name", "prefix", "token"),
    [
        ("deit_tiny_distilled_patch16_224", 2, 0),
        ("cait_xxs24_224", 0, 1),
        ("vit_base_patch16_siglip_224", 0, 1),
    ],
)
def test_rollout_equals_the_product(name: str, prefix: int, token: int) -> None:
    model = transformer(name, depth=3)
    images = torch.randn(2, 3, *SIZE)
    by_hand = product(model, images, prefix, token)
    # Any product would agree with a uniform map.
    assert by_hand.std() > 0.005
    maps = tcnn_probe.saliency(model, images, method="rollout")
    # Maps of three layers are in float32, the reference in float64, with weights of at most 1.
    np.testing.assert_allclose(maps.values, bilinear(by_hand, *SIZE), atol=1e-5)
    assert maps.attrs["layer"] == ""


def test_blocks_of_queries_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer("deit_tiny_patch16_224")
    images = torch.randn(2, 3, *SIZE)
    at_once = tcnn_probe.saliency(model, images, method="rollout")
    # Logits are computed for 3 queries at a time.
    monkeypatch.setattr(tcnn_probe.Attention, "BLOCK", 300)
    np.testing.assert_allclose(
        tcnn_probe.saliency(model, images, method="rollout"), at_once, atol=1e-7
    )


WINDOWS = {
    "num_classes": 3,
    "depths": (1, 1),
    "embed_dim": 16,
    "num_heads": (1, 2),
    "window_size": 7,
}


def swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=(56, 84), **WINDOWS
    )


def pvt() -> nn.Module:
    # The keys are reduced, so that queries and keys are different tokens.
    return timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), num_classes=3)


def without_class_token() -> nn.Module:
    return transformer("deit_tiny_patch16_224", class_token=False, global_pool="avg")


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (
            swin,
            (56, 84),
            "attention over the whole image; 'layers.0.blocks.0.attn' attends in windows",
        ),
        (
            pvt,
            (64, 96),
            "same tokens in every layer: 'stages.0.blocks.0.attn' has 384 queries and 6 keys.*'occlusion'",
        ),
        (
            without_class_token,
            SIZE,
            "starts from a class token, and this model has none",
        ),
        (OneBlock, (12, 20), "no attention was seen"),
        (
            patchconvnet,
            CONVOLVED,
            "here only 'pool.block.attn' attends: use 'class_attention'",
        ),
    ],
)
def test_models_that_rollout_cannot_follow_are_refused(
    model: Callable[[], nn.Module], size: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.saliency(
            model(),
            torch.randn(2, 2 if model is OneBlock else 3, *size),
            method="rollout",
        )


class Gate(nn.Module):
    """Model with a softmax between tokens that weighs no values, before the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformer("deit_tiny_patch16_224")

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2)[:, :, :16]
        gate = (tokens.transpose(1, 2) @ tokens).softmax(-1).mean((1, 2))
        return self.model(x) * gate[:, None]


def test_a_softmax_that_weighs_no_values_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"followed a softmax that is not multiplied with values: \[''\]",
    ):
        tcnn_probe.saliency(Gate().eval(), torch.randn(2, 3, *SIZE), method="rollout")
