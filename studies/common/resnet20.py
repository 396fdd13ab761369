"""ResNet-20 of He et al. 2016 (Sec. 4.2) for images of 32 x 32 pixels."""

from pathlib import Path

import timm.models
import torch.nn.functional as F
from torch import Tensor, nn

from common.output import InputError

__all__ = ["ResNet20", "Tail", "Trunk", "load_weights"]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters ("option A"):
    strided pixels, channels of zeros.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        # Option A has no parameters for the new channels of a stage's first block, so they begin as
        # zeros.
        self.new_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C_in, H, W) to (B, C, H / stride, W / stride)."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        # Half of the zeros come before the channels and half after, as in the network of the
        # published weights.
        before = self.new_channels // 2
        shortcut = F.pad(
            x[:, :, :: self.stride, :: self.stride],
            (0, 0, 0, 0, before, self.new_channels - before),
        )
        return F.relu(residual + shortcut)


class ResNet20(nn.Module):
    """Three stages of three blocks; 0.27 M parameters at the published width.

    Args:
        width: Channels of the first stage; 16 is the published number.
        classes: Number of outputs.
        blocks: Number of blocks of each stage.
    """

    def __init__(self, width: int = 16, classes: int = 10, blocks: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, 1, blocks)
        self.layer2 = _stage(width, 2 * width, 2, blocks)
        self.layer3 = _stage(2 * width, 4 * width, 2, blocks)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to scores (B, classes)."""
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.linear(self.layer3(x).mean((2, 3)))


class Trunk(nn.Module):
    """A ResNet-20 up to its tail: images (B, 3, H, W) -> feature maps.

    Args:
        model: Network that the modules are taken from.
        blocks: Number of the last stage's blocks that belong to the tail.
    """

    def __init__(self, model: ResNet20, blocks: int) -> None:
        super().__init__()
        first = len(model.layer3) - blocks
        self.stem = nn.Sequential(model.conv1, model.bn1, nn.ReLU())
        self.stages = nn.Sequential(model.layer1, model.layer2, *model.layer3[:first])

    def forward(self, x: Tensor) -> Tensor:
        """Return feature maps, (B, C, H', W')."""
        return self.stages(self.stem(x))


class Tail(nn.Module):
    """The last blocks of a ResNet-20 and its classifier:
    feature maps of :class:`Trunk` -> scores (B, classes).

    Args:
        model: Network that the modules are taken from.
        blocks: Number of blocks of the last stage.
    """

    def __init__(self, model: ResNet20, blocks: int) -> None:
        super().__init__()
        # Layers keep their published names, such as layer3.2, in recordings.
        names = [str(n) for n in range(len(model.layer3))][-blocks:]
        self.layer3 = nn.ModuleDict({name: model.layer3[int(name)] for name in names})
        self.linear = model.linear

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H', W') to scores (B, classes)."""
        for block in self.layer3.values():
            x = block(x)
        return self.linear(x.mean((2, 3)))


def load_weights(model: ResNet20, file: str | Path) -> ResNet20:
    """Load a checkpoint (.safetensors or torch's) into the model.

    Raises:
        InputError: There is no such file, or it does not have the weights of this network.
    """
    if not Path(file).is_file():
        raise InputError(f"--weights: there is no file {str(file)!r}")
    try:
        model.load_state_dict(timm.models.load_state_dict(str(file)))
    # torch raises many types of errors for damaged files.
    except Exception as error:
        raise InputError(
            f"--weights: expected weights of ResNet-20 in {str(file)!r}: {error}"
        ) from error
    return model


def _stage(channels_in: int, channels: int, stride: int, blocks: int) -> nn.Sequential:
    # Only the first block of a stage strides and widens.
    first = BasicBlock(channels_in, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))
