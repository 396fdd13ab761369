"""ImageNet-C from disk, in small: every decision against a loop over files,
and the comparison of models.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from torch import Tensor

import tcnn_probe
from tcnn_probe import evaluation
from tcnn_probe.evaluation import imagenet_c

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*accuracies on it are not comparable with published ones:UserWarning"
)

CLASSES = {"n01443537": 1, "n01484850": 2, "n01494475": 4}
CORRUPTIONS = ("shot_noise", "fog")  # in the order of the published table
FILES = [f"{wnid}/ILSVRC2012_val_{n:08d}.JPEG" for wnid in CLASSES for n in (2, 11)]
EXTRA = "n01440764/ILSVRC2012_val_00000007.JPEG"  # of a class that precedes the others


def level(file: str, corruption: str, severity: int) -> int:
    """Return the grey level of an image, a multiple of 10
    that depends on its position, corruption and severity.
    """
    place = FILES.index(file) if file in FILES else 9
    # 23 is a prime beyond all positions, so that another position, corruption or severity gives
    # another level.
    return 10 * ((3 * place + 5 * CORRUPTIONS.index(corruption) + severity) % 23)


def write(path: Path, grey: int, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The format is lossless, whatever the file's name says, as the grey level identifies the image.
    Image.fromarray(np.full((size, size, 3), grey, np.uint8)).save(path, "PNG")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two corruptions at five severities of six images in three classes,
    and seven clean images in ``val``.
    """
    folder = tmp_path_factory.mktemp("imagenet")
    for corruption in CORRUPTIONS:
        for severity in range(1, 6):
            for file in FILES:
                path = folder / "c" / corruption / str(severity) / file
                write(path, level(file, corruption, severity), 224)
    # The extra image comes first, and would shift clean images against corrupted ones that are
    # matched by number.
    for number, file in enumerate([EXTRA, *FILES]):
        write(folder / "val" / file, 20 * number, 31)
    return folder


def by_grey(factor: int) -> Callable[[Tensor], Tensor]:
    """Return a classifier that decides by the grey level of the first pixel."""

    def scores(images: Tensor) -> Tensor:
        greys = (images[:, 0, 0, 0] * 255).round().long()
        return torch.eye(1000)[predicted(greys, factor)]

    return scores


def predicted(grey: Tensor | int, factor: int) -> Tensor | int:
    return grey // 10 * factor % 5


MODELS = {"cnn": by_grey(1), "tcnn": by_grey(3)}


def classify(root: Path, **options: object) -> xr.Dataset:
    return imagenet_c(
        MODELS,
        root / "c",
        corruptions=CORRUPTIONS,
        normalization=((0,), (1,)),
        batch_size=4,
        **options,
    )


@pytest.fixture(scope="module")
def results(root: Path) -> xr.Dataset:
    return classify(root, clean=root / "val", size=17)


def test_every_decision_equals_that_of_a_loop(results: xr.Dataset) -> None:
    ds = results
    assert ds.file.values.tolist() == FILES
    assert ds.label.values.tolist() == [CLASSES[file[:9]] for file in FILES]
    assert ds.group.values.tolist() == ["noise", "weather"]
    assert ds.prediction.dims == ("model", "corruption", "severity", "seed", "image")
    for model, factor in (("cnn", 1), ("tcnn", 3)):
        for place, file in enumerate(FILES):
            image = ds.sel(model=model, image=place)
            # The first level is that of the clean image.
            clean = predicted(20 * (place + 1), factor)
            assert image.clean_prediction == clean
            assert image.clean_correct == (clean == CLASSES[file[:9]])
            for corruption in CORRUPTIONS:
                for severity in range(1, 6):
                    grey = level(file, corruption, severity)
                    decision = image.sel(corruption=corruption, severity=severity)
                    assert decision.prediction == predicted(grey, factor)
    right = ds.prediction.values == ds.label.values
    np.testing.assert_array_equal(ds.correct, right)
    np.testing.assert_array_equal(ds.accuracy, right.mean(-1))
    assert 0 < right.mean() < 1


def test_models_are_compared_image_by_image(results: xr.Dataset) -> None:
    better = evaluation.improvement(results, "cnn", "severity", relative=False)
    assert better.interval.notnull().all()
    pairs = evaluation.disagreement(results, by="group")
    assert "ground truth" in pairs.model.values
    axes = tcnn_probe.plot.robustness(results, baseline="cnn", by="group")
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        "clean",
        "noise",
        "weather",
    ]


def test_mean_corruption_error_with_published_errors(results: xr.Dataset) -> None:
    """The sums of published errors over severities are five times their means."""
    published = {"fog": 0.7, "shot_noise": 0.9, "clean": 0.4}
    ds = results
    result = evaluation.mean_corruption_error(ds, published)
    for model in MODELS:
        clean = 1 - ds.clean_correct.sel(model=model).values.mean()
        ratios = []
        for corruption in CORRUPTIONS:
            right = ds.correct.sel(model=model, corruption=corruption).values
            error = 1 - right.mean()
            cells = result.sel(model=model, corruption=corruption)
            ratios.append(error / published[corruption])
            assert float(cells.corruption_error) == pytest.approx(ratios[-1])
            loss = (error - clean) / (published[corruption] - 0.4)
            assert float(cells.relative_corruption_error) == pytest.approx(loss)
        mean = result.mean_corruption_error.sel(model=model)
        assert float(mean) == pytest.approx(np.mean(ratios))
    assert result.attrs["baseline"] == "published errors"
    without_clean = ds.drop_vars([name for name in ds if "clean" in name])
    without = evaluation.mean_corruption_error(without_clean, published)
    assert sorted(without) == sorted(n for n in result if "relative" not in str(n))
    with pytest.raises(ValueError, match=r"severities 1 to 5, .*, got \[1, 5\]"):
        evaluation.mean_corruption_error(ds.sel(severity=[1, 5]), published)
    with pytest.raises(KeyError, match="fog"):
        evaluation.mean_corruption_error(ds, {"shot_noise": 0.9})


def test_published_errors_are_those_of_alexnet() -> None:
    """Means over severities equal those of the authors' own list of rates."""
    assert evaluation.ALEXNET_ERRORS.keys() == {*evaluation.CORRUPTIONS, "clean"}
    # These are the rates of Gaussian noise by severity, from the authors' repository.
    rates = (0.69528, 0.82542, 0.93554, 0.98138, 0.99452)
    mean = np.mean(rates)
    assert evaluation.ALEXNET_ERRORS["gaussian_noise"] == pytest.approx(mean, abs=1e-9)


def test_clean_images_are_optional(root: Path) -> None:
    assert "clean_accuracy" not in classify(root, severities=[1])


def test_folders_that_do_not_fit_are_refused(root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(root, tmp_path / "imagenet")
    (root / "val" / FILES[3]).unlink()
    with pytest.raises(ValueError, match=f"lacks 1: {FILES[3]}"):
        classify(root, clean=root / "val")
    (root / "c" / "fog" / "4" / FILES[2]).unlink()
    with pytest.raises(ValueError, match=f"6 in shot_noise/1 and 5 in fog/4: {FILES[2]} in one"):
        classify(root)
    with pytest.raises(FileNotFoundError, match=r"no folder .*snow.1"):
        imagenet_c(MODELS, root / "c", corruptions="snow")
    with pytest.raises(ValueError, match="at least one corruption and one severity"):
        imagenet_c(MODELS, root / "c", corruptions=())


def test_missing_classes_are_warned_of_once(root: Path) -> None:
    with pytest.warns(UserWarning, match="folders of 3 of the 1000 classes") as caught:
        classify(root, severities=2)
    assert len(caught) == 1
