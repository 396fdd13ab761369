"""A tiny T-CNN and tiny random data to train it on."""

import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tcnn_model import reparameterize
from tests.tcnn_model.helpers import random, randomise_norms, seeded

CLASSES = 3


def tiny_cnn() -> nn.Module:
    torch.manual_seed(0)
    cnn = ResNet(BasicBlock, [1, 1, 1, 1], channels=(8, 8, 16, 16), in_chans=1, num_classes=CLASSES)
    return randomise_norms(cnn)


def tiny_tcnn() -> nn.Module:
    return reparameterize(tiny_cnn(), input_size=(1, 64, 64))


def batches(images: int = 11, batch_size: int = 4, *, shuffle: bool = True, seed: int = 0) -> DataLoader:
    """Noise of 32 x 24 pixels with random labels; with 11 images the last of 3 batches is smaller."""
    labels = torch.randint(CLASSES, (images,), generator=seeded(seed))
    x = random(images, 1, 32, 24, seed=seed, dtype=torch.float32) + labels[:, None, None, None]
    return DataLoader(TensorDataset(x, labels), batch_size, shuffle=shuffle)


def validation_batches() -> DataLoader:
    return batches(7, shuffle=False, seed=1)
