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
from tests.tcnn_probe.networks import small_resnet

pytestmark = pytest.mark.numerical


def product(model: nn.Module, images: Tensor, prefix: int, token: int) -> np.ndarray:
    """Multiply the matrices of all layers, where class attention acts on the token and the patches.

    ``prefix`` counts class and register tokens of the trunk; ``token`` is 1 if the class token
    comes after the trunk.
    """
    heads: dict[str, list[Tensor]] = {}
    for reference in attention_of(model, images):
        # Parallel layers, such as blocks.0.attns.0.attn and blocks.0.attns.1.attn, are one with the
        # heads of both.
        heads.setdefault(reference.layer.split(".attns.")[0], []).append(reference.weights)
    layers = [torch.cat(weights, 1).numpy() for weights in heads.values()]
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
        ("vit_small_patch16_18x2_224", 1, 0),
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


class Towers(nn.Module):
    """Two transformers side by side, "a" and "b",
    with a function from these and images to scores.
    """

    def __init__(self, scores: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = (transformer("deit_tiny_patch16_224") for _ in range(2))
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.a, self.b, x)


def without_gradients(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        b(x)
    return a(x)


def from_a_trunk(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """Return the scores of ``a``, from whose first block a block
    of ``b`` branches off, with an unused result.
    """
    tokens = a.blocks[0](a._pos_embed(a.patch_embed(x)))
    b.blocks[1](tokens)
    return a.forward_head(a.norm(a.blocks[1](tokens)))


@pytest.mark.parametrize(
    "scores",
    [
        lambda a, b, x: (b(x), a(x))[1],
        lambda a, b, x: (a(x), b(x))[0],
        lambda a, b, x: (a(x.flip(3)), a(x))[1],
        without_gradients,
        from_a_trunk,
    ],
)
def test_layers_on_which_the_output_does_not_depend_do_not_count(
    scores: Callable[..., Tensor],
) -> None:
    model, images = Towers(scores), torch.randn(2, 3, *SIZE)
    alone = product(model.a.eval(), images, 1, 0)
    assert alone.std() > 0.005
    maps = tcnn_probe.saliency(model, images, method="rollout").values
    np.testing.assert_allclose(maps, bilinear(alone, *SIZE), atol=1e-5)


def into_a_buffer(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    scores = torch.zeros(2, len(x), 5)
    scores[0] = a(x)
    scores[1].add_(b(x))  # a view
    return scores.mean(0)


@pytest.mark.parametrize(
    ("scores", "second"),
    [
        (lambda a, b, x: a(x) + b(x), "b"),
        (lambda a, b, x: torch.stack([a(x), a(x.flip(3))]).mean(0), "a"),
        (into_a_buffer, "b"),
    ],
)
def test_towers_side_by_side_are_refused(scores: Callable[..., Tensor], second: str) -> None:
    message = f"depends on 'a.blocks.1.attn' and '{second}.blocks.0.attn', which run side by side"
    with pytest.raises(ValueError, match=message):
        tcnn_probe.saliency(Towers(scores), torch.randn(2, 3, *SIZE), method="rollout")


class Untracked(nn.Module):
    """Layer whose result no function of torch has made, as that of a kernel."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2


@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_path_that_is_lost_is_followed_alone_and_refused_beside_a_teacher(
    has_teacher: bool,
) -> None:
    model = Towers(lambda a, b, x: (b(x) if has_teacher else None, a(x))[1])
    model.a.norm = nn.Sequential(model.a.norm, Untracked())
    model.a.blocks[1] = nn.Sequential(model.a.blocks[1], Untracked())
    images = torch.randn(2, 3, *SIZE)
    if has_teacher:
        with pytest.raises(ValueError, match=r"lost them around 'b.blocks.0.attn'"):
            tcnn_probe.saliency(model, images, method="rollout")
        return
    maps = tcnn_probe.saliency(model, images, method="rollout").values
    alone = product(model.a.eval(), images, 1, 0)
    np.testing.assert_allclose(maps, bilinear(alone, *SIZE), atol=1e-5)


WINDOWS = {
    "num_classes": 3,
    "depths": (1, 1),
    "embed_dim": 16,
    "num_heads": (1, 2),
    "window_size": 7,
}


def swin() -> nn.Module:
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=(56, 84), **WINDOWS)


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
            "same tokens in every layer: 'stages.0.blocks.0.attn' has 384 queries and 6 "
            "keys.*'occlusion'",
        ),
        (
            without_class_token,
            SIZE,
            "starts from a class token, and this model has none",
        ),
        (OneBlock, (12, 20), "no attention was seen"),
        (small_resnet, (32, 48), "around the GPSA layer 'layer4.0.conv1' convolutions move them"),
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
            torch.randn(2, {OneBlock: 2, small_resnet: 1}.get(model, 3), *size),
            method="rollout",
        )


class Alternating(nn.Module):
    """Transformer whose blocks run in the other order in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformer("deit_tiny_patch16_224")
        self.calls = [0]  # also of copies

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        tokens = self.model._pos_embed(self.model.patch_embed(x))
        for block in [*self.model.blocks][:: 1 if self.calls[0] % 2 else -1]:
            tokens = block(tokens)
        return self.model.forward_head(self.model.norm(tokens))


def test_layers_in_another_order_in_the_second_forward_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout needs the same layers in every forward"):
        tcnn_probe.saliency(Alternating(), torch.randn(2, 3, *SIZE), method="rollout")


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
