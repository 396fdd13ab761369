"""Layer features of chosen images compared with the layers' own outputs in float64."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import reparameterize
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts import helpers
from tests.tcnn_probe.probes.scattered_models import images, scattered

FLOAT16 = 2.0**-11  # the relative rounding error
SMALL = 2.0**-25  # the absolute error below the smallest normal number


def tcnn() -> nn.Module:
    torch.manual_seed(0)
    # Every stage has a different width.
    channels = {"channels": (5, 7, 11, 13), "num_classes": 3}
    return reparameterize(
        scattered(timm.create_model("resnet10t", **channels)), layers="layer4.0.conv1"
    ).eval()


def outputs(model: nn.Module, x: Tensor, *names: str) -> dict[str, np.ndarray]:
    """Return the layers' outputs in float32, as recorded,
    in the layer's own layout, (B, C, N) or (B, N, C).
    """
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        keep = lambda _, __, out, name=name: arrays.__setitem__(  # noqa: E731
            name, out.double().numpy()
        )
        model.get_submodule(name).register_forward_hook(keep)
    with torch.no_grad():
        model(x)
    return arrays


def recorded(
    model: nn.Module, x: Tensor, store: Path | None = None, **about: object
) -> tcnn_probe.Recorder:
    probes = [*tcnn_probe.DEFAULT, tcnn_probe.features(**about)]
    with tcnn_probe.record(model, store, probes=probes) as recorder, torch.no_grad():
        for batch in x.split([3, 2]):
            model(batch)
        recorder.mark(epoch=len(recorder.epochs))
    return recorder


def check(feature: np.ndarray, expected: np.ndarray, terms: np.ndarray) -> None:
    """Compare features to within the rounding to float16 and of the mean in float32."""
    assert (abs(feature - expected) <= FLOAT16 * abs(expected) + SMALL + 4 * 2.0**-23 * terms).all()


def cosines(tokens: np.ndarray) -> float:
    lengths = np.linalg.norm(tokens, axis=-1, keepdims=True)
    unit = tokens / np.where(lengths > 0, lengths, 1)
    products = unit @ unit.swapaxes(1, 2)
    return products[:, ~np.eye(tokens.shape[1], dtype=bool)].mean()


def test_features_of_feature_maps_next_to_heads(tmp_path: Path) -> None:
    model = tcnn()
    x = images(5, 64, 96)
    # Each batch contains one of the chosen images; the third never comes.
    recorder = recorded(model, x, tmp_path / "run.zarr", images=[1, 4, 9])
    # The heads are recorded as without features.
    assert recorder.dataset.layer.values.tolist() == ["layer4.0.conv1"]
    features = recorder.tree["features"].dataset.isel(epoch=0)
    assert features.layer.values.tolist() == [f"layer{n}" for n in range(1, 5)]
    assert features["image"].values.tolist() == [1, 4, 9]
    for layer, output in outputs(model, x, *features.layer.values).items():
        row = features.sel(layer=layer)
        channels = output.shape[1]
        rows = output[[1, 4]].reshape(2, channels, -1)
        feature = row.feature.sel(token="mean").values
        check(feature[:2, :channels], rows.mean(-1), abs(rows).mean(-1))
        assert np.isnan(feature[2]).all(), "an image that did not come"
        assert np.isnan(feature[:, channels:]).all()
        tokens = output.reshape(5, channels, -1).swapaxes(1, 2)
        expected = cosines(tokens) if tokens.shape[1] > 1 else 1
        # The mean of float32 cosines of both signs cancels in part.
        np.testing.assert_allclose(row.token_cosine, expected, rtol=1e-4)
        assert row.images == 5


def test_features_of_tokens() -> None:
    torch.manual_seed(0)
    options = {"img_size": (32, 48), "depth": 2, "embed_dim": 12, "num_heads": 3}
    model = sharpen(timm.create_model("deit_tiny_distilled_patch16_224", **options)).eval()
    x = images(5)
    recorder = recorded(model, x, layers="blocks.?", images=4, tokens=[0, 1], prefix_tokens=2)
    features = recorder.tree["features"].dataset.isel(epoch=0)
    assert features.token.values.tolist() == ["mean", "0", "1"]
    for layer, output in outputs(model, x, "blocks.0", "blocks.1").items():
        feature = features.feature.sel(layer=layer).values
        check(feature[:, 0], output[:4, 2:].mean(1), abs(output[:4, 2:]).mean(1))
        check(feature[:, 1:], output[:4, :2], abs(output[:4, :2]))
        np.testing.assert_allclose(
            features.token_cosine.sel(layer=layer), cosines(output[:, 2:]), rtol=1e-4
        )
        # The first two tokens are the class and the distillation token.
        similarity = tcnn_probe.representation.token_cosine(feature[:, 1:].astype(float))
        # Each of the two tokens, stored as float16, is off by up to 2^-11 of its length.
        np.testing.assert_allclose(similarity.mean(), cosines(output[:4, :2]), atol=2e-3)


def test_features_of_layers_with_channels_last() -> None:
    x = images(5, 7, 7).movedim(1, -1)
    model = nn.Sequential(nn.Identity()).eval()
    probe = tcnn_probe.features("0", 5)
    with (
        tcnn_probe.record(model, probes=probe),
        pytest.raises(ValueError, match=r"like \(B, H, W, C\): give channel_axis"),
    ):
        model(x)
    for axis, expected in ((-1, x.mean((1, 2))), (1, x.mean((2, 3)))):
        probe = tcnn_probe.features("0", 5, channel_axis=axis)
        recorder = helpers.recorded(model, x, probes=probe)
        # Features are stored as float16, with a relative rounding error of 2^-11.
        np.testing.assert_allclose(
            recorder.tree["features"].feature[0, 0, :, 0],
            expected,
            rtol=1e-3,
            atol=1e-6,
        )
    narrow = nn.Sequential(nn.Conv2d(3, 7, 1)).eval()
    recorder = helpers.recorded(narrow, images(5, 7, 9), probes=tcnn_probe.features("0", 5))
    assert recorder.tree["features"].sizes["channel"] == 7


def test_accepted_forms_of_layers_and_images() -> None:
    """Layers may be names, globs or RegNet's stages, and images may be NumPy integers."""
    model = nn.Sequential()
    for name in ("s1", "a[1]"):
        model.add_module(name, nn.Conv2d(3, 3, 1))
    for layers, names in (("a[1]", ["a[1]"]), (None, ["s1"])):
        probe = tcnn_probe.features(layers, np.arange(3), tokens=[5])
        recorder = helpers.recorded(model.eval(), torch.randn(5, 3, 2, 3), probes=probe)
        assert recorder.tree["features"].layer.values.tolist() == names
        assert recorder.tree["features"]["image"].values.tolist() == [0, 1, 2]
    assert tcnn_probe.features(images=np.int64(2)).images == (0, 1)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    model = tcnn()
    x = images(5, 64, 96)
    layer = nn.Sequential(nn.Conv2d(3, 3, 1)).eval()
    for about in ({"tokens": [2, 6]}, {"prefix_tokens": 6}):
        with (
            tcnn_probe.record(layer, probes=tcnn_probe.features("0", **about)),
            pytest.raises(ValueError, match="below 6, the places of '0', got"),
        ):
            layer(torch.randn(5, 3, 2, 3))
    for options, message in (
        ({"images": 0}, "a number of images, or a list of their numbers, got 0"),
        ({"layers": ["layer1", "layer5"]}, "no layers match 'layer5': the model has"),
        ({"max_bytes": 9}, "256 images of 5 channels need 2560 bytes for 'layer1'"),
        ({"layers": "fc"}, r"\(B, N, C\), got shape \(3, 3\) from 'fc'"),
    ):
        with pytest.raises(ValueError, match=message):
            recorded(model, x, **options)
    recorded(model, x, tmp_path / "run.zarr", images=3)
    with pytest.raises(tcnn_probe.StoreError, match=r"'images': \[0, 1, 2\]} there"):
        recorded(model, x, tmp_path / "run.zarr", images=4)
    for options in ({"tokens": [3]}, {"prefix_tokens": 1}, {"channel_axis": 1}):
        with pytest.raises(
            tcnn_probe.StoreError, match=r"of other layers .*'tokens': \[\], .* there, "
        ):
            recorded(model, x, tmp_path / "run.zarr", images=3, **options)
    assert len(recorded(model, x, tmp_path / "run.zarr", images=3).epochs) == 2
