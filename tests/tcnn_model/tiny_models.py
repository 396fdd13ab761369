"""Tiny models, with attention layers or attention pooling, and random data to train them on."""

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tcnn_model import add_attention_pool, reparameterize
from tests.tcnn_model.numerics import disturb, random, randomise_norms, seeded

CLASSES = 3
POOL_SIZE = (1, 64, 96)  # the input_size with which the pool of these models is found


class Plain(nn.Module):
    """Trunk, pool and classifier without timm's interface: (B, 3, H, W) -> (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.trunk(x)).flatten(1))


class Logits(nn.Module):
    """Classifier whose forward returns an object with ``logits``, like those of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model(images))


def tiny_cnn() -> nn.Module:
    torch.manual_seed(0)
    cnn = ResNet(
        BasicBlock,
        [1, 1, 1, 1],
        channels=(8, 8, 16, 16),
        in_chans=1,
        num_classes=CLASSES,
    )
    return randomise_norms(cnn)


@cache
def _reparameterized() -> nn.Module:
    return reparameterize(tiny_cnn(), input_size=(1, 64, 64))


def tiny_tcnn() -> nn.Module:
    model = copy.deepcopy(_reparameterized())
    torch.manual_seed(0)
    return model


def pooled_cnn(model: nn.Module | None = None, **options: Any) -> Any:
    """Return a tiny ResNet with attention pooling, whose pool is disturbed."""
    pooled: Any = add_attention_pool(model or tiny_cnn().eval(), input_size=POOL_SIZE, **options)
    return disturb(pooled, 1, part="attention")


def batches(
    images: int = 11, batch_size: int = 4, *, shuffle: bool = True, seed: int = 0
) -> DataLoader:
    """Return batches of noise of 32 x 24 pixels with random labels;
    11 images leave a smaller third batch.
    """
    labels = torch.randint(CLASSES, (images,), generator=seeded(seed))
    x = random(images, 1, 32, 24, seed=seed, dtype=torch.float32) + labels[:, None, None, None]
    return DataLoader(TensorDataset(x, labels), batch_size, shuffle=shuffle)


def validation_batches() -> DataLoader:
    return batches(7, shuffle=False, seed=1)
