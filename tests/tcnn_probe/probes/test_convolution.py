"""Outputs of convolutions, against numpy in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.probes.helpers import images, recorded, small


def truth(output: np.ndarray) -> dict[str, np.ndarray]:
    """Of (B, C, ...): one image at a time, then the mean."""
    rows: dict[str, list[np.ndarray]] = {}
    for image in output.astype(np.float64):
        pixels = image.reshape(len(image), -1)
        for name, value in {
            "output_mean": pixels.mean(),
            "output_std": pixels.std(),
            "output_nonpositive": (~(pixels > 0)).mean(),
            "channel_mean": pixels.mean(1),
            "channel_rms": np.sqrt((pixels**2).mean(1)),
            "channel_nonpositive": (~(pixels > 0)).mean(1),
        }.items():
            rows.setdefault(name, []).append(value)
    return {name: np.mean(values, 0) for name, values in rows.items()}


def outputs(model: nn.Module, batch: Tensor) -> dict[str, np.ndarray]:
    kept, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            keep = lambda m, x, y, name=name: kept.__setitem__(name, y.detach().double().numpy())  # noqa: E731
            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("resnet10t", {"channels": (3, 5, 7, 11), "stem_width": 4}),
        ("nf_resnet26", {}),
        ("tf_mobilenetv3_small_minimal_100", {}),
    ],
)
def test_timm_models(name: str, about: dict, training: bool) -> None:
    """Plain, weight-standardised, depthwise and same-padded convolutions."""
    model = small(name, num_classes=3, **about).train(training)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    batch = images(3, 32, 48)
    kept = outputs(model, batch)
    ds = recorded(model, "convolution", batch, when="train" if training else "eval")
    assert list(ds["layer"].values) == list(kept)
    for layer, output in kept.items():
        for variable, value in truth(output).items():
            found = ds[variable].sel(layer=layer).values
            found = found[: output.shape[1]] if value.ndim else found
            # sums in float32 of values with a spread of sigma: 1e-5 sigma, and the same share of what is not small
            np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-5 * output.std() + 1e-30)


class Mixed(nn.Module):
    """One, two and three dimensions, and an image without a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Conv1d(2, 5, 3), nn.Conv2d(2, 7, (3, 1)), nn.Conv3d(1, 3, 2)
        self.alone = nn.Conv2d(2, 3, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.one(x.flatten(2))
        self.three(x[:, None])
        self.alone(x[0])
        return self.two(x)


def test_other_dimensions_and_channels() -> None:
    model, x = Mixed(), torch.randn(3, 2, 7, 11)
    kept = outputs(model, x)
    kept["alone"] = kept["alone"][None]
    ds = recorded(model, "convolution", x)
    assert ds.sizes["channel"] == 7
    assert dict(zip(ds["layer"].values, ds.images.values, strict=True)) == {"one": 3, "two": 3, "three": 3, "alone": 1}
    for layer, output in kept.items():
        for variable, value in truth(output).items():
            np.testing.assert_allclose(
                ds[variable].sel(layer=layer).dropna("channel") if value.ndim else ds[variable].sel(layer=layer),
                value,
                rtol=1e-5,
                atol=1e-6,
            )


def test_far_from_zero_and_large_in_half_precision() -> None:
    """A mean 300 times the spread costs no digits of it, and squares beyond the range of float16 are no infinities."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3)).eval()
    with torch.no_grad():
        model[0].bias.fill_(300)
    x = images(2, 17, 23)
    found, value = recorded(model, "convolution", x), truth(outputs(model, x)["0"])
    assert value["output_std"] < 1.5
    np.testing.assert_allclose(found.output_std, [value["output_std"]], rtol=1e-4)
    model.half()
    found, value = recorded(model, "convolution", x.half()), truth(outputs(model, x.half())["0"])
    np.testing.assert_allclose(found.channel_rms[0], value["channel_rms"], rtol=1e-5)
    np.testing.assert_allclose(found.output_std, [value["output_std"]], rtol=1e-4)


def test_many_images_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcnn_probe.probes import convolution

    model, x = Mixed(), torch.randn(5, 2, 7, 11)
    whole = recorded(model, "convolution", x)
    monkeypatch.setattr(convolution, "_AT_ONCE", 2 * 7 * 5 * 11)
    xr_equal = recorded(model, "convolution", x)
    for name in whole.data_vars:
        np.testing.assert_array_equal(whole[name], xr_equal[name])


def test_dead_channel_and_nan() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3, bias=True)).eval()
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias.copy_(torch.tensor([0.0, 9.0]))
    ds = recorded(model, "convolution", images(2, 7, 11))
    np.testing.assert_array_equal(ds.channel_nonpositive[0], [1, 0])
    broken = images(2, 7, 11)
    broken[1, 0, 0, 0] = torch.nan
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        ds = recorded(model, "convolution", broken)
    assert ds.nonfinite_images == 1


def test_attributes_layers_and_resuming(tmp_path: Path) -> None:
    model, x = Mixed(), torch.randn(3, 2, 7, 11)
    for epoch in range(2):
        with tcnn_probe.record(model, tmp_path / "run.zarr", probes="convolution", layers="t*") as recorder:
            with torch.no_grad():
                model(x)
            recorder.mark(epoch=epoch)
    ds = tcnn_probe.open(tmp_path / "run.zarr")["convolution"].to_dataset()
    assert list(ds["layer"].values) == ["two", "three"]
    assert list(ds["epoch"].values) == [0, 1]
    assert ds.channel_rms.dims == ("epoch", "layer", "channel")
    assert all(ds[name].attrs["description"] for name in ds.data_vars)
    assert all(ds[name].attrs["units"] == "1" for name in ds.data_vars)


def test_empty_and_unused() -> None:
    """A convolution that no image reaches is named."""
    model = nn.Module()
    model.used, model.idle = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
    model.forward = lambda x: model.used(x)
    model.eval()
    with pytest.raises(RuntimeError, match=r"no image in eval mode reached \['idle'\]"):
        recorded(model, "convolution", torch.randn(1, 2, 7, 5))
