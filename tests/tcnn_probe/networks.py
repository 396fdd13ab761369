"""Small networks of the tests, with attention far from its initial state."""

import copy

import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from tcnn_model import GPSA, gpsa_layers, reparameterize

__all__ = ["Branches", "Chain", "inputs_of", "scatter", "small_resnet"]


@torch.no_grad()
def scatter(layer: GPSA, seed: int = 0) -> GPSA:
    """Give each head its own alpha in 0.05 ... 40,
    gate in -3 ... 3 and centre, and peaked content attention.
    """
    torch.manual_seed(seed)
    # Heads are shuffled, so that alpha, gate and position do not increase together.
    order = torch.randperm(layer.heads)
    alpha = torch.logspace(-1.3, 1.6, layer.heads, dtype=torch.float64)[order]
    # This is the inverse of a softplus with beta = 5.
    layer.raw_locality.copy_(alpha + torch.log(-torch.expm1(-5 * alpha)) / 5)
    layer.gating.copy_(torch.linspace(-3, 3, layer.heads)[torch.randperm(layer.heads)])
    layer.center.add_(0.7 * torch.randn_like(layer.center))
    # Initial weights of 0.02 would leave content attention uniform, which hides errors.
    layer.query.normal_(std=0.8)
    layer.key.normal_(std=0.8)
    return layer


class Chain(nn.Module):
    """Two layers with 9 and 25 heads in sequence: (B, 2, H, W) -> (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near = scatter(GPSA(2, 5, 3, padding=1), seed=1)
        self.far = scatter(GPSA(5, 3, 5, stride=2, padding=1), seed=2)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.far(self.near(x).tanh()).mean((2, 3))


class Branches(nn.Module):
    """Two layers with 9 and 25 heads, each on its own input,
    given by keyword: two of shape (B, 2, H, W).
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near = scatter(GPSA(2, 3, 3, padding=1), seed=1)
        self.far = scatter(GPSA(2, 3, 5, padding=2), seed=2)
        self.eval()

    def forward(self, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        return self.near(x=near), self.far(x=far)


def small_resnet() -> nn.Module:
    """Return a timm ResNet with four GPSA layers of 9 heads,
    on 5 x 7 pixels for a 71 x 103 image.
    """
    torch.manual_seed(0)
    cnn = ResNet(
        BasicBlock, [1, 1, 1, 2], channels=(8, 8, 16, 16), in_chans=1, num_classes=3
    ).eval()
    model = reparameterize(cnn, input_size=(1, 71, 103))
    for seed, layer in enumerate(gpsa_layers(model).values()):
        scatter(layer, seed)
    return model


def inputs_of(model: nn.Module, names: list[str], *args: Tensor) -> dict[str, Tensor]:
    """Return the inputs of the named layers in one forward of a copy of the model."""
    model = copy.deepcopy(model)
    layer_inputs = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: layer_inputs.update(
                {name: args[0] if args else kwargs["x"]}
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(*args)
    return layer_inputs
