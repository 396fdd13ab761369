"""Costs against arithmetic by hand, and against published numbers."""

import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_model
from tcnn_probe import evaluation
from tests.tcnn_probe.contracts.helpers import Trace


class Wide(nn.Module):
    """Model from 3 x 4 x 4 values to 1,000,
    which are rectified, to 2; at its peak it holds 2,000 values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(48, 1000), nn.ReLU(), nn.Linear(1000, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def quick(models: object, size: object = None, **options: object) -> xr.Dataset:
    return evaluation.cost(models, size, batch_size=8, rounds=1, progress=False, **options)


def test_costs_by_hand() -> None:
    # The models also differ in dtype: images are made in the dtype of each model, here float64.
    grouped = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, padding=1, groups=3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).double()
    ds = quick({"wide": Wide(), "grouped": grouped}, 4)
    assert ds.parameters.values.tolist() == [48 * 1000 + 1000 + 2000 + 2, 6 * 9 + 6]
    assert ds.multiply_adds.values.tolist() == [48 * 1000 + 2000, 6 * 2 * 2 * 9]
    # The peak is before and after the rectifier, for a batch of 8 in float32.
    assert ds.peak_memory.sel(model="wide") * 2**20 == 2 * 8 * 1000 * 4
    assert (ds.images_per_second > 0).all()
    # The size is height and width: three channels of 4 x 8 values have no remainder.
    assert quick(grouped, (4, 8)).multiply_adds.item() == 6 * 2 * 4 * 9
    grey = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1))
    assert quick(grey, (1, 4, 8)).multiply_adds.item() == 5 * 4 * 8 * 9


def test_attention_in_blocks_is_counted() -> None:
    layers = {backend: tcnn_model.GPSA(4, 4, 3, backend=backend) for backend in ("dense", "blocks")}
    counted = quick(layers, (4, 14, 15)).multiply_adds.values
    # Without padding, 3 x 3 taps fit 12 x 13 times.
    pixels, queries = 14 * 15, 12 * 13
    assert (
        counted[0]
        == counted[1]
        # Nine heads have q k^T with one channel, and attention with four; then come queries, keys
        # and values, and W_out.
        == 9 * queries * pixels * (1 + 4) + pixels * (9 + 4) * 4 + queries * (9 + 9 * 4) * 4
    )


@pytest.mark.study
@pytest.mark.parametrize(
    ("name", "multiply_adds", "parameters"),
    [("resnet50", 4.1e9, 25.6e6), ("cait_xxs24_224", 2.5e9, 12.0e6)],
)
def test_published_costs(name: str, multiply_adds: float, parameters: float) -> None:
    """Thesis, Tables 5.1 and 3.15, to their printed digits."""
    ds = evaluation.cost(timm.create_model(name), batch_size=1, rounds=1)
    assert ds.multiply_adds.item() == pytest.approx(multiply_adds, abs=0.05e9)
    assert ds.parameters.item() == pytest.approx(parameters, abs=0.06e6)


class Steps(nn.Module):
    """Model that counts forwards in training mode, and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        y = self.layers(x)
        if y.requires_grad:
            y.register_hook(self._back)
        return y

    def _back(self, gradient: Tensor) -> None:
        self.backwards += 1


def test_training_leaves_no_trace() -> None:
    model = Steps().eval()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        ds = evaluation.cost(model, 8, batch_size=2, rounds=3, training=True)
    # There are three rounds, and one to warm up.
    assert model.forwards == 4
    assert model.backwards == 4
    assert 0 < ds.training_images_per_second.item() < float("inf")
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert "training_images_per_second" not in quick(model, 8)
    after = []
    for training in (False, True):
        torch.manual_seed(0)
        quick(model, 8, training=training)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


def test_the_model_is_unchanged_and_tables_can_be_joined() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).train()
    before = Trace(model).hooks
    state = {name: x.clone() for name, x in model.state_dict().items()}
    ds = quick({"vit": model}, 32)
    assert model.training
    assert Trace(model).hooks == before
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    accuracy = xr.Dataset({"clean_accuracy": ("model", [0.5])}, {"model": ["vit"]})
    assert xr.merge([accuracy, ds]).sel(model="vit").parameters == sum(
        p.numel() for p in model.parameters()
    )


def test_bad_arguments_are_refused() -> None:
    for models, size, message in (
        ({}, 4, "at least one model"),
        ("resnet18", 4, r"expected a torch\.nn\.Module, got str"),
        (Wide(), None, "give size="),
        (Wide(), 0, "from 1 for size, got 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            quick(models, size)
