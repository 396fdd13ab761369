"""Half of the heads made convolutions, by two choices, and the same short training for both."""

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

import tcnn_probe
from common.head_ladder import BATCH, choose, relative_change
from common.pretrained import Network
from tcnn_model import convolve, parameter_groups

__all__ = ["trained_convolutions"]

ORDERS = ("shares", "deviation")


def trained_convolutions(
    network: Network,
    heads: xr.Dataset,
    fit: Tensor,
    evaluated: Tensor,
    training: Tensor,
    *,
    steps: int,
    lr: float = 1e-5,
    batch: int = 4,
) -> xr.Dataset:
    """Convolve half of the heads, and train the model to give the features that it gave before.

    Args:
        network: Network, which stays as it is.
        heads: Result of ``lost_shares``, with ``deviation``.
        fit, evaluated, training: Images for the kernels, for the change of the features, and for
            the training, all different.
        steps: Number of steps of AdamW.
        lr, batch: Learning rate at the start, which falls to zero by a cosine, and batch size.

    Returns:
        ``change`` of the features of each evaluated image, dims (order, trained, image).
    """
    kernels = tcnn_probe.head_kernels(network.features, list(fit.split(BATCH)))
    with torch.no_grad():
        whole = torch.cat([network.features(x) for x in evaluated.split(BATCH)])
    changes = []
    for order in ORDERS:
        chosen = choose(heads, "convolutional", order, 1 / 2, 0)
        model = convolve(network.features, kernels.where(chosen)).eval()
        changes.append(_change(model, evaluated, whole))
        _freeze_unused(model, training[:1])
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=lr, weight_decay=0))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        generator = torch.Generator().manual_seed(0)
        for _ in tqdm(range(steps), f"training, {order}", disable=None):
            images = training[torch.randint(len(training), (batch,), generator=generator)]
            with torch.no_grad():
                target = network.features(images)
            loss = (model(images) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        changes.append(_change(model, evaluated, whole))
    values = np.stack(changes).reshape(len(ORDERS), 2, len(evaluated))
    coords = {"order": list(ORDERS), "trained": [False, True]}
    return xr.Dataset({"change": (("order", "trained", "image"), values)}, coords)


def _freeze_unused(model: torch.nn.Module, images: Tensor) -> None:
    """Freeze parameters that features of patches do not depend on,
    such as those of the class token's last queries.
    """
    model(images).square().mean().backward()
    for parameter in model.parameters():
        is_used = parameter.grad is not None and bool(parameter.grad.any())
        parameter.requires_grad_(is_used)
    model.zero_grad()


@torch.no_grad()
def _change(model: torch.nn.Module, images: Tensor, whole: Tensor) -> np.ndarray:
    features = torch.cat([model(batch) for batch in images.split(BATCH)])
    return relative_change(features, whole)
