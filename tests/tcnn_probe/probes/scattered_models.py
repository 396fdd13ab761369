"""Small timm models with scattered parameters, and the inputs of their modules."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
import xarray as xr
from torch import Tensor, nn

from tests.tcnn_probe.contracts import helpers

__all__ = [
    "VIT",
    "images",
    "inputs_in_float64",
    "recorded",
    "scattered",
    "small",
    "step",
]

VIT = {
    "img_size": (32, 48),
    # Heads have seven channels, so that the total is odd.
    "embed_dim": 21,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}


def scattered(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter at random, so that none is right by being 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            # Matrices are scattered less, because sums over their columns are larger.
            spread = 0.1 if parameter.ndim > 1 else 0.5
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator).to(parameter))
            assert parameter.isfinite().all(), name
    return model


def small(name: str, **about: Any) -> nn.Module:
    """Return a timm model of a few kilobytes, in eval mode."""
    torch.manual_seed(0)
    return scattered(timm.create_model(name, **about)).eval()


def images(count: int, height: int = 32, width: int = 48, seed: int = 1) -> Tensor:
    """Return images of shape (count, 3, height, width)."""
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def inputs_in_float64(
    model: nn.Module, batch: Tensor, which: Callable[[nn.Module], bool]
) -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Return a float64 copy of each module that ``which`` names, and the arguments of its call."""
    wide = copy.deepcopy(model).double()
    calls = {}
    for name, module in wide.named_modules():
        if which(module):
            keep = partial(_keep, calls, name)
            module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        # The model runs in float64, so that these inputs are exact compared with float32.
        wide(batch.double())
    return calls


def _keep(
    calls: dict[str, Any],
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    calls[name] = module, args, kwargs


def recorded(model: nn.Module, probe: Any, *batches: Tensor, **about: Any) -> xr.Dataset:
    """Return the group of one probe after one epoch."""
    kind = probe if isinstance(probe, str) else probe.kind
    recorder = helpers.recorded(model, *batches, probes=probe, **about)
    return recorder.tree[kind].to_dataset().sel(epoch=0).load()


def step(model: nn.Module, batch: Tensor, times: float = 1.0) -> None:
    """Run a forward and a backward pass whose gradients reach every parameter."""
    output = model(batch)
    (times * output.square().sum()).backward()
