"""Small classifiers of images in pixel space, with images for them."""

import timm
import torch
from torch import Tensor, nn

# Sizes are primes, and small, because attacks take many forwards.
SIZE = (13, 19)
# Numbers differ between channels, so that exchanged channels would show.
NORMALIZATION = ([0.3, 0.5, 0.4], [0.2, 0.25, 0.3])
NONE = ((0,), (1,))


class Small(nn.Module):
    """Classifier of images (B, C, H, W) into 5 classes:
    two convolutions with batch norm and dropout.
    """

    def __init__(self, channels: int = 3, classes: int = 5, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Conv2d(channels, 7, 3, padding=1)
            self.norm = nn.BatchNorm2d(7)
            self.second = nn.Conv2d(7, 11, 3, stride=2)
            # Dropout and batch norm reveal forwards that are not in eval mode.
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(11, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.norm(self.first(x)))
        pooled = nn.functional.gelu(self.second(x)).mean((2, 3))
        # Scores are multiplied by 9, as the initial ones differ too little for an attack to change
        # a decision.
        return self.head(self.drop(pooled)) * 9


def configured() -> nn.Module:
    """Return a classifier with a pretrained_cfg, like a model of timm."""
    model = Small()
    model.pretrained_cfg = timm.create_model("test_resnet").pretrained_cfg
    return model


def pixels(count: int, channels: int = 3, seed: int = 0, size: tuple[int, int] = SIZE) -> Tensor:
    """Return images with some pixels that are exactly 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, channels, *size, generator=generator) * 1.2 - 0.1).clamp(0, 1)


def labels(count: int, classes: int = 5) -> Tensor:
    return torch.arange(count) * 3 % classes
