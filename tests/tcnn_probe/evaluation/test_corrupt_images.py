"""corrupt(): types of images, random draws,
severities and errors; corruptions/ tests the values.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tcnn_probe.evaluation import CORRUPTIONS, corrupt
from tcnn_probe.evaluation.corrupt_images import _random_state

KINDS = {
    "tensor": lambda x: torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255,
    "single tensor": lambda x: torch.from_numpy(x[0]).permute(2, 0, 1).double() / 255,
    "half": lambda x: torch.from_numpy(x).permute(0, 3, 1, 2).half() / 255,
    "bfloat16, grey": lambda x: torch.from_numpy(x[..., :1]).permute(0, 3, 1, 2).bfloat16() / 255,
    "uint8": lambda x: x,
    "single, float32": lambda x: (x[0] / 255).astype(np.float32),
    # FITS and HDF5 files have this byte order.
    "grey, big-endian": lambda x: (x[0, ..., 0] / 255).astype(">f4"),
    "grey channel": lambda x: x[..., 1:2],
    # Mirrored arrays have negative strides, which torch cannot use.
    "mirrored": lambda x: x[:, ::-1, ::-1],
}
GREY = np.full((11, 13), 0.5)


@pytest.fixture
def batch() -> NDArray[Any]:
    """Return a uint8 batch, (3, 23, 37, 3)."""
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    # The images are photographs, as many corruptions do not change noise.
    views = (china[20:380, 20:600], flower[:360, 40:620], china[60:400, 200:640])
    return np.stack([np.asarray(Image.fromarray(view).resize((37, 23))) for view in views])


@pytest.mark.parametrize("kind", KINDS)
def test_result_has_the_type_of_the_input(kind: str, batch: NDArray[Any]) -> None:
    images: Any = KINDS[kind](batch)
    before = images.clone() if isinstance(images, torch.Tensor) else images.copy()
    # Snow blurs, draws random numbers, and mixes channels.
    corrupted = corrupt(images, "snow", 4)
    assert type(corrupted) is type(images)
    assert corrupted.shape == images.shape
    assert corrupted.dtype == images.dtype
    assert (images == before).all()
    assert (corrupted != images).any()
    if isinstance(corrupted, torch.Tensor):
        assert corrupted.is_contiguous()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_bytes_tensors_and_arrays_agree(name: str, batch: NDArray[Any]) -> None:
    exact = corrupt(batch / 255, name, 3)
    assert 0 <= exact.min() <= exact.max() <= 1
    # Bytes are rounded to the nearest level.
    np.testing.assert_allclose(corrupt(batch, name, 3) / 255, exact, atol=0.5 / 255 + 1e-12)
    tensor = corrupt(torch.from_numpy(batch / 255).permute(0, 3, 1, 2).requires_grad_(), name, 3)
    np.testing.assert_array_equal(tensor.permute(0, 2, 3, 1).numpy(), exact)
    grey = corrupt(batch[..., :1] / 255, name, 3)
    assert grey.shape == (3, 23, 37, 1)


def global_generators() -> list[Any]:
    return [
        random.getstate(),
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),  # noqa: NPY002
    ]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_draws_depend_on_the_seed_and_the_images_number(name: str, batch: NDArray[Any]) -> None:
    """Draws depend neither on the batch nor on global generators, which stay unchanged."""
    before = global_generators()
    # The seed is a NumPy integer, as an image's index often is.
    together = corrupt(batch, name, 2, seed=np.int64(11), first=40)  # type: ignore[arg-type]
    np.testing.assert_array_equal(corrupt(batch[2], name, 2, seed=11, first=42), together[2])
    assert global_generators() == before
    for options in ({"seed": 11, "first": 41}, {"seed": 12, "first": 40}):
        differs = (corrupt(batch, name, 2, **options)[0] != together[0]).any()  # type: ignore[arg-type]
        assert differs == bool(CORRUPTIONS[name].random)


def test_draws_are_the_same_in_every_version() -> None:
    grey = np.full((8, 9), 0.5)
    names = ("gaussian_noise", "shot_noise", "fog")
    corrupted = {name: corrupt(grey, name, 1, seed=3, first=2)[0, :3] for name in names}
    assert {name: values.round(9).tolist() for name, values in corrupted.items()} == {
        # The numbers are fixed, so that published accuracies can be reproduced with later versions.
        "gaussian_noise": [0.552024263, 0.463816824, 0.476168421],
        "shot_noise": [0.516666667, 0.466666667, 0.533333333],
        "fog": [0.125, 0.202326478, 0.260019185],
    }


def test_draws_differ_between_corruptions_images_and_seeds_but_not_severities() -> None:
    # Keys are seed and image, also beyond 32 bits, where NumPy's older seeding ends.
    keys = ((0, 0), (0, 1), (1, 0), (2**32, 0), (0, 2**32))
    draws = {
        _random_state(corruption, *key).random_sample()
        for corruption in CORRUPTIONS.values()
        for key in keys
    }
    assert len(draws) == 15 * len(keys)
    noise = [(corrupt(GREY, "gaussian_noise", severity) - GREY) for severity in (1, 2)]
    # 0.08 and 0.12 are the published standard deviations at severities 1 and 2.
    np.testing.assert_allclose(noise[0] / 0.08, noise[1] / 0.12, atol=1e-12)


# In these cases the published parameters do less damage than at the severity before, in squared
# differences.
LESS = {("glass_blur", 2), ("glass_blur", 4), ("frost", 4), ("elastic_transform", 3)}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_damage_grows_with_severity(name: str) -> None:
    from sklearn.datasets import load_sample_images

    images = [
        Image.fromarray(image).crop((x, 20, x + 380, 420))
        for image in load_sample_images().images
        for x in (9, 250)
    ]
    batch = np.stack([np.asarray(image.resize((59, 61))) for image in images]) / 255
    damage = [
        np.square(corrupt(batch, name, severity) - batch).mean() for severity in (1, 2, 3, 4, 5)
    ]
    assert damage[0] > 5e-4
    growing = [
        severity for severity in (2, 3, 4, 5) if damage[severity - 1] > 1.02 * damage[severity - 2]
    ]
    assert growing == [severity for severity in (2, 3, 4, 5) if (name, severity) not in LESS], (
        damage
    )
    # This is the smallest accepted size; kernels and displacements are larger.
    smallest = batch[:, :8, :9]
    assert np.isfinite(corrupt(smallest, name, 5)).all()


def test_pictures_of_frost_can_be_given(batch: NDArray[Any], tmp_path: Path) -> None:
    blue = np.zeros((300, 400, 3), np.uint8)
    blue[..., 2] = 255
    Image.fromarray(blue).save(tmp_path / "blue.png")
    (tmp_path / "readme.txt").write_text("not a picture")
    for frost in ([blue], [blue / 255], tmp_path, str(tmp_path)):
        corrupted = corrupt(batch / 255, "frost", 1, frost=frost)
        np.testing.assert_allclose(
            # Severity 1 adds 0.4 of the frost to the whole picture.
            corrupted,
            np.clip(batch / 255 + [0, 0, 0.4], 0, 1),
            atol=1e-12,
        )
    grey = corrupt(batch[..., :1] / 255, "frost", 2, frost=[blue, blue])
    np.testing.assert_allclose(
        # Severity 2 has the factors 0.8 and 0.6; 0.114 is the weight of blue in grey (ITU-R
        # BT.601).
        grey,
        np.clip(0.8 * batch[..., :1] / 255 + 0.6 * 0.114, 0, 1),
        atol=1e-12,
    )
    np.testing.assert_array_equal(corrupt(batch, "fog", 1, frost=[blue]), corrupt(batch, "fog", 1))


def test_rounding_errors_beyond_the_range_are_clipped() -> None:
    images = torch.full((3, 8, 11), 1 + 1e-6)
    assert corrupt(images, "contrast", 1).max() <= 1
    # Counts cannot be negative.
    assert (corrupt(images - (1 + 2e-6), "shot_noise", 1) == 0).all()


IMAGE = np.full((9, 11, 3), 0.5)
TENSOR = torch.full((2, 3, 9, 11), 0.5)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([[0.5]], TypeError, "a tensor, an array or a PIL image, got list"),
        (IMAGE > 1, TypeError, "uint8, or of floats .*, got bool"),
        ((TENSOR * 255).byte(), TypeError, "floating-point tensor .* got torch.uint8"),
        (
            TENSOR[0, 0],
            ValueError,
            r"\(C, H, W\) or \(B, C, H, W\) .* got shape \(9, 11\)",
        ),
        (
            TENSOR.permute(0, 2, 3, 1),
            ValueError,
            r"1 or 3 channels, got shape \(2, 9, 11, 3\)",
        ),
        (IMAGE.transpose(2, 0, 1), ValueError, "channels come first in tensors only"),
        (
            np.full((5, 9, 11), 0.5),
            ValueError,
            r"got shape \(5, 9, 11\); .* is images\[..., None\]",
        ),
        (IMAGE[:7], ValueError, r"at least 8 x 8 pixels; got shape \(7, 11, 3\)"),
        (TENSOR[:0], ValueError, "at least one image"),
        (
            IMAGE * 255,
            ValueError,
            r"in \[0, 1\], before normalisation; got values from 127.5 to 127.5: .* divide by",
        ),
        (
            TENSOR.index_fill(0, torch.tensor([1]), float("nan")),
            ValueError,
            "from nan to nan",
        ),
    ],
)
def test_bad_images_are_refused(images: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        corrupt(images, "fog", 1)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            ("gausian_noise", 1),
            {},
            ValueError,
            "got 'gausian_noise'; did you mean 'gaussian_noise'?",
        ),
        (("fog", 6), {}, ValueError, "integer from 1 to 5 for severity, got 6"),
        (("fog", 1), {"seed": -1}, ValueError, "integer from 0 for seed, got -1"),
        (("fog", 1), {"first": 0.5}, TypeError, "integer from 0 for first, got 0.5"),
        (
            ("frost", 1),
            {"frost": "nowhere"},
            ValueError,
            "expected at least one picture of frost",
        ),
    ],
)
def test_bad_arguments_are_refused(
    arguments: tuple[Any, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        corrupt(IMAGE, *arguments, **options)


def test_a_pil_image_stays_a_pil_image() -> None:
    array = np.random.default_rng(0).integers(0, 256, (31, 43, 3), dtype=np.uint8)
    blurred = corrupt(Image.fromarray(array), "defocus_blur", 2)
    assert isinstance(blurred, Image.Image)
    np.testing.assert_array_equal(np.asarray(blurred), corrupt(array, "defocus_blur", 2))
