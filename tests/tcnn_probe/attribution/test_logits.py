"""Classifiers of transformers, whose forward returns an object with logits."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_model.outputs import class_scores
from tests.extras import need

transformers = need("transformers")


class LogitsAlone(nn.Module):
    """The same classifier, which returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(5)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 31,
    }
    config = transformers.ViTConfig(image_size=24, patch_size=8, num_labels=5, **sizes)
    return transformers.ViTForImageClassification(config).eval()


@pytest.mark.parametrize(
    "method",
    ["class_attention", "gradcam", "integrated_gradients", "occlusion", "DeepLift"],
)
@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
def test_saliency_is_that_of_the_logits(vit: nn.Module, method: str) -> None:
    images = torch.randn(2, 3, 24, 24)
    maps = tcnn_probe.saliency(vit, images, method=method)
    assert maps.target.values.tolist() == class_scores(vit, images).argmax(1).tolist()
    expected = tcnn_probe.saliency(LogitsAlone(vit), images, method=method)
    # Equal bit for bit, as the same model computes both in the same order.
    np.testing.assert_array_equal(maps.values, expected.values)
    assert not vit._forward_hooks


def test_faithfulness_is_that_of_the_logits(vit: nn.Module) -> None:
    images = torch.randn(2, 3, 24, 24)
    methods = ["class_attention", "gradcam"]
    scores = tcnn_probe.faithfulness(vit, images, methods, steps=3)
    expected = tcnn_probe.faithfulness(LogitsAlone(vit), images, methods, steps=3)
    for name in expected:
        np.testing.assert_array_equal(scores[name].values, expected[name].values)


def test_attacks_are_those_on_the_logits(vit: nn.Module) -> None:
    images = torch.rand(2, 3, 24, 24)
    labels = torch.tensor([1, 3])
    options = {"epsilon": 0.03, "normalization": (0.5, 0.5)}
    attacked = tcnn_probe.evaluation.fgsm(vit, images, labels, **options)
    assert torch.equal(
        attacked,
        tcnn_probe.evaluation.fgsm(LogitsAlone(vit), images, labels, **options),
    )
