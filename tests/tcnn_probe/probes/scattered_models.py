"""Small timm models whose parameters are all scattered, and what their modules were given."""

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
    # Seven channels a head, and an odd number in all.
    "embed_dim": 21,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}


def scattered(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter its own random value, so that nothing is right by being 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            # Matrices by less: a sum over their columns is taken.
            spread = 0.1 if parameter.ndim > 1 else 0.5
            parameter.add_(
                spread * torch.randn(parameter.shape, generator=generator).to(parameter)
            )
            assert parameter.isfinite().all(), name
    return model


def small(name: str, **about: Any) -> nn.Module:
    """A timm model of a few kilobytes, in eval mode."""
    torch.manual_seed(0)
    return scattered(timm.create_model(name, **about)).eval()


def images(count: int, height: int = 32, width: int = 48, seed: int = 1) -> Tensor:
    """Shape (count, 3, height, width)."""
    return torch.randn(
        count, 3, height, width, generator=torch.Generator().manual_seed(seed)
    )


def inputs_in_float64(
    model: nn.Module, batch: Tensor, which: Callable[[nn.Module], bool]
) -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Return a float64 copy of each of the modules that ``which`` names, and the arguments it is called with."""
    wide = copy.deepcopy(model).double()
    calls = {}
    for name, module in wide.named_modules():
        if which(module):
            keep = partial(_keep, calls, name)
            module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        # In float64, so that what an oracle computes from these inputs is exact beside float32.
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


def recorded(
    model: nn.Module, probe: Any, *batches: Tensor, **about: Any
) -> xr.Dataset:
    """The group of one probe after one epoch."""
    kind = probe if isinstance(probe, str) else probe.kind
    recorder = helpers.recorded(model, *batches, probes=probe, **about)
    return recorder.tree[kind].to_dataset().sel(epoch=0).load()


def step(model: nn.Module, batch: Tensor, times: float = 1.0) -> None:
    """A forward and a backward pass whose gradients reach everything."""
    output = model(batch)
    (times * output.square().sum()).backward()
