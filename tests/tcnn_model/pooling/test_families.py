"""Attention pooling on timm convnets of different families:
a training step, export, and timm's methods.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tcnn_model import AttentionPool2d, add_attention_pool
from tests.tcnn_model.families import build
from tests.tcnn_model.numerics import assert_same, disturb, random

K = 3
HEADS = {  # layers after the pool, which must accept a pooled vector, or one per class
    "a Linear": "resnet18",
    "a 1 x 1 convolution": "dla34",
    "norm, Linear": "convnext_tiny",
    "1 x 1 convolution, activation, Linear": "mobilenetv3_small_050",
    "a hidden Linear": "convnext_atto",
}


def small(name: str) -> Any:
    """Build a narrow relative of a model, with 3 classes, in eval mode."""
    return build(name, **({"head_hidden_size": 24} if name == "convnext_atto" else {}))


def _images(name: str) -> torch.Tensor:
    return random(
        # dla34 refuses maps of odd size.
        2,
        3,
        *((64, 96) if name == "dla34" else (80, 112)),
        dtype=torch.float32,
    )


def _pooled(name: str, *, per_class: bool) -> Any:
    return disturb(add_attention_pool(small(name), per_class=per_class), part="attention").eval()


def _trains(model: Any, x: torch.Tensor) -> None:
    """Assert that a small step lowers the loss
    of the same batch by about as much as the gradients predict.

    The labels are the least likely classes, as the loss of other classes may already be 0 in
    float32.
    """
    model.train()
    scores = model(x)
    labels = scores.argmin(1)
    loss = nn.functional.cross_entropy(scores, labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    (token,) = (
        gradient for name, gradient in gradients.items() if name.endswith("attention.cls_token")
    )
    first = next(iter(gradients.values()))
    classifier = model.get_classifier().weight.grad
    # If the first layer, the token and the classifier have gradients, the layers in between have
    # them, too.
    assert token.any()
    assert first.any()
    assert classifier.any()
    # The step should lower the loss by a thousandth, which float32 still resolves.
    fall = 1e-3 * loss.item()
    slope = sum(
        float(gradient.square().sum(dtype=torch.float64)) for gradient in gradients.values()
    )
    torch.optim.SGD(model.parameters(), fall / slope).step()
    with torch.no_grad():
        after = nn.functional.cross_entropy(model(x), labels)
    # Curvature changes the ratio; gradients of the wrong sign would give -1.
    assert 0.4 < (loss.item() - after.item()) / fall < 2.5
    model.eval()


@pytest.mark.study(but=["resnet18-True", "convnext_atto-True"])
@pytest.mark.parametrize(
    ("name", "per_class"),
    [*((name, True) for name in HEADS.values()), ("convnext_tiny", False)],
)
def test_families_train_pool_and_reset(name: str, per_class: bool) -> None:
    model = _pooled(name, per_class=per_class)
    x = _images(name)
    _trains(model, x)
    with torch.no_grad():
        scores = model(x)
        features = model.forward_features(x)
        pooled = model.forward_head(features, pre_logits=True)
        assert scores.shape == (2, K)
        assert pooled.shape == (
            (2, K, model.head_hidden_size) if per_class else (2, model.head_hidden_size)
        )
        assert_same(model.forward_head(features), scores)
        model.reset_classifier(5)
        assert model.eval()(x).shape == (2, 5)
        assert len(model.get_classifier().weight) == 5
        model.reset_classifier(4, "avg")
        assert model.eval()(x).shape == (2, 4)
        assert not any(isinstance(module, AttentionPool2d) for module in model.modules())


@pytest.mark.study
def test_pooled_model_exports() -> None:
    model = _pooled("resnet18", per_class=True)
    x = _images("resnet18")
    assert_same(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.study(but=["a Linear"])
@pytest.mark.parametrize("name", HEADS.values(), ids=HEADS)
@torch.no_grad()
def test_any_head_is_applied_to_each_token_separately(name: str) -> None:
    """The score of a class equals that of the CNN's head
    with the class's token in place of the pooled vector.
    """
    # This loop runs the CNN's head once for each class, with the class's token as its pool.
    cnn = small(name).double()
    model = _pooled(name, per_class=True).double()
    x = _images(name).double()
    pool = next(module for module in model.modules() if hasattr(module, "replaced"))
    tokens = pool.attention(model.forward_features(x))
    assert tokens.shape[:2] == (2, K)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    scores = model(x)
    for k in range(K):
        fixed = _Fixed(tokens[:, k], pool.flatten)
        cnn.set_submodule(model._pooled_at, fixed)
        assert_same(cnn(x)[:, k], scores[:, k])
        assert_same(cnn.forward_head(x, pre_logits=True), features[:, k])


class _Fixed(nn.Module):
    def __init__(self, y: torch.Tensor, flatten: bool) -> None:
        super().__init__()
        self.y = y if flatten else y[:, :, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.y
