"""Images in common forms become the model's input by timm's own transform,
or are refused with a clear message.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.images import as_images

# The photograph comes with scikit-learn and is not square.
ARRAY = load_sample_image("china.jpg")  # (427, 640, 3), uint8


@pytest.fixture(scope="module")
def model() -> nn.Module:
    options = {
        "patch_size": 16,
        "img_size": 64,
        "embed_dim": 6,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 5,
    }
    return timm.create_model("vit_tiny_patch16_224", **options)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    config = resolve_model_data_config(timm.create_model("vit_tiny_patch16_224")) | {
        "input_size": (3, 64, 64)
    }
    return create_transform(**config, is_training=False)(Image.fromarray(ARRAY))[None]


def as_people_have_them(folder: Path) -> dict[str, Any]:
    Image.fromarray(ARRAY).save(folder / "china.png")
    picture = Image.fromarray(ARRAY)
    return {
        "pil": picture,
        "rgba": picture.convert("RGBA"),
        "list": [picture],
        "path": folder / "china.png",
        "name": [str(folder / "china.png")],
        "file": [(folder / "china.png").read_bytes()],
        "array": ARRAY,
        "batch": ARRAY[None],
        "torchvision": torch.from_numpy(ARRAY.copy()).permute(2, 0, 1),
    }


def test_pictures_pass_through_the_models_transform(
    model: nn.Module, expected: Tensor, tmp_path: Path
) -> None:
    for name, image in as_people_have_them(tmp_path).items():
        torch.testing.assert_close(as_images(image, model), expected, msg=name)
    torch.testing.assert_close(as_images(ARRAY, nn.DataParallel(model)), expected)
    # The second picture is grey and has another size.
    assert as_images([ARRAY, ARRAY[:200, :, 0]], model).shape == (2, 3, 64, 64)
    grey = as_images(Image.fromarray(ARRAY).convert("L"), model)
    assert grey.shape == (1, 3, 64, 64)


def test_tensors_pass_as_they_are(model: nn.Module) -> None:
    images = torch.randn(2, 3, 64, 64)
    assert as_images(images, model) is images
    torch.testing.assert_close(as_images(images[0], model), images[:1])
    torch.testing.assert_close(as_images(list(images), model), images)
    # torch.from_numpy refuses views with a negative stride.
    torch.testing.assert_close(as_images(images.numpy()[:, ::-1], model), images.flip(1))


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (
            torch.full((1, 3, 64, 64), 254.0),
            ValueError,
            "got values up to 254: divide by 255",
        ),
        (
            torch.full((1, 3, 64, 64), torch.nan),
            ValueError,
            "got values that are not finite",
        ),
        (torch.rand(1, 64, 64, 3), ValueError, "got channels last"),
        (torch.ones(1, 3, 64, 64, dtype=torch.int64), TypeError, "got torch.int64"),
        (torch.rand(64, 64), ValueError, r"got shape \(64, 64\)"),
        ([torch.rand(3, 8, 8), torch.rand(3, 8, 9)], ValueError, "different shapes"),
        (torch.rand(0, 3, 8, 8), ValueError, r"got shape \(0, 3"),
        ("nowhere.png", FileNotFoundError, "nowhere.png"),
        ({"ids": 1}, TypeError, "got a mapping of ids without pixel_values"),
        (["a.png", torch.rand(3, 8, 8)], ValueError, "got str, Tensor in one list"),
        (np.zeros((5, 6, 7), np.uint8), ValueError, "C of 1, 3 or 4"),
    ],
)
def test_unsuitable_images_are_refused(
    model: nn.Module, images: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        as_images(images, model)


def test_pictures_for_a_model_with_an_unknown_transform_are_refused() -> None:
    with pytest.raises(TypeError, match="a Sequential is unknown, as it is not a timm model"):
        as_images(ARRAY, nn.Sequential())


def test_evaluation_transforms_pictures_for_the_model(
    model: nn.Module, expected: Tensor, tmp_path: Path
) -> None:
    """Pixels are those of the model's transform, without its normalisation."""
    Image.fromarray(ARRAY).save(tmp_path / "china.png")
    pixels = expected * 0.5 + 0.5  # the model's mean and standard deviation
    labels = model.eval()(expected).argmax(1)
    attacked = tcnn_probe.evaluation.fgsm(model, pixels.clamp(0, 1), labels)
    options = {"corruptions": (), "attacks": ()}
    for picture in (tmp_path / "china.png", ARRAY[None]):
        ds = tcnn_probe.evaluation.robustness(model, picture, labels, **options)
        assert ds.clean_correct.values.all()
        same = tcnn_probe.evaluation.fgsm(model, picture, labels)
        torch.testing.assert_close(same, attacked)


def test_models_with_different_crops_are_refused(model: nn.Module) -> None:
    cnn = timm.create_model("resnet10t", num_classes=5)
    with pytest.raises(ValueError, match="cut pictures in different ways"):
        tcnn_probe.evaluation.robustness({"vit": model, "cnn": cnn}, ARRAY, [0])


def test_pictures_for_functions_keep_their_size() -> None:
    def scores(images: Tensor) -> Tensor:
        assert images.shape == (1, 3, 427, 640)
        return images.mean((2, 3))

    plain = {"normalization": (0, 1), "corruptions": (), "attacks": ()}
    ds = tcnn_probe.evaluation.robustness(scores, ARRAY, [0], **plain)
    assert ds.clean_prediction.item() == ARRAY.mean((0, 1)).argmax()
    two = [ARRAY, ARRAY[:200]]
    with pytest.raises(ValueError, match="pictures of one size"):
        tcnn_probe.evaluation.robustness(scores, two, [0, 1], **plain)


def test_saliency_is_drawn_over_its_own_pictures(model: nn.Module, expected: Tensor) -> None:
    drawn = (expected[0] - expected.min()) / (expected.max() - expected.min())
    maps = tcnn_probe.saliency(model, ARRAY)
    for saved in (maps, maps.to_dataset(name="class_attention")):
        axes = tcnn_probe.plot.saliency_overlay(saved, Image.fromarray(ARRAY))
        shown = axes[0, 0].images[0].get_array()
        np.testing.assert_allclose(shown, drawn.permute(1, 2, 0), atol=1e-6)
        plt.close("all")
    maps = tcnn_probe.saliency(model, expected)
    with pytest.raises(ValueError, match="how these pictures were cut"):
        tcnn_probe.plot.saliency_overlay(maps, ARRAY)


@pytest.mark.filterwarnings("ignore:.*among images=")
def test_ablation_takes_arrays(model: nn.Module, expected: Tensor) -> None:
    arrays = [expected.numpy(), ARRAY, expected]
    scores = []
    for images in arrays:
        with tcnn_probe.ablate(model, mode="static", images=images):
            scores.append(model.eval()(expected))
    torch.testing.assert_close(scores[0], scores[2])
    torch.testing.assert_close(scores[1], scores[2])


def test_a_picture_for_a_model_of_one_channel() -> None:
    model = timm.create_model("resnet18", in_chans=1, num_classes=3)
    cfg = model.pretrained_cfg
    grey = Image.new("RGB", (300, 260), (90, 90, 90))
    mean, std = np.mean(cfg["mean"]), np.mean(cfg["std"])
    batch = as_images([grey, grey.convert("L")], model)
    assert batch.shape == (2, 1, 224, 224)
    np.testing.assert_allclose(batch, (90 / 255 - mean) / std, rtol=1e-5)
    maps = tcnn_probe.saliency(model, grey, method="gradcam")
    tcnn_probe.plot.saliency_overlay(maps, grey)
    with pytest.raises(TypeError, match=r"images of 5 channels, .* pictures have 3"):
        as_images(grey, timm.create_model("convnext_atto", in_chans=5))
