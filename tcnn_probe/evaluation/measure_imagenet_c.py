"""``imagenet_c()``: the decisions of models on the published images of ImageNet-C, as a dataset."""

import json
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Subset

from tcnn_probe.evaluation.checks import whole_numbers
from tcnn_probe.evaluation.classifier import Model, Normalization
from tcnn_probe.evaluation.corruptions.table import CORRUPTIONS, named_corruptions
from tcnn_probe.evaluation.imagenet_variants import Variant, imagenet_variant
from tcnn_probe.evaluation.measure_robustness import robustness
from tcnn_probe.evaluation.summary import as_dataset
from tcnn_probe.models import progress_bar

__all__ = ["imagenet_c"]


def imagenet_c(
    models: Model | Mapping[str, Model],
    root: str | Path,
    *,
    clean: str | Path | None = None,
    corruptions: str | Collection[str] | None = None,
    severities: int | Collection[int] = (1, 2, 3, 4, 5),
    model: nn.Module | None = None,
    size: int | tuple[int, int] | None = None,
    normalization: Normalization | Mapping[str, Normalization | None] | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> xr.Dataset:
    """Classify the published images of ImageNet-C,
    and record each decision as :func:`robustness` does.

    ::

        models = {"cnn": cnn, "tcnn": tcnn}
        ds = evaluation.imagenet_c(models, "imagenet-c", clean="imagenet/val", model=cnn)
        errors = evaluation.mean_corruption_error(ds, evaluation.ALEXNET_ERRORS)
        print(100 * errors.mean_corruption_error.to_pandas())  # mCE, as papers print it

    An image has the same index in every corruption and severity, and among the clean images, so
    that comparisons of models by image work: :func:`improvement`, :func:`disagreement`,
    ``plot.robustness``.

    Args:
        models: Models with ImageNet's 1000 classes, as in :func:`robustness`.
        root: Folder with ``<corruption>/<severity>/n01440764/``, ... Images are 224 x 224 and not
            resized or cropped.
        clean: Folder of ImageNet's validation images, ``n01440764/``, ..., of which those with the
            names of the corrupted images are classified, too; None for no clean images.
        corruptions: Names in ``tcnn_probe.evaluation.CORRUPTIONS``, or groups of them; None for
            all.
        severities: Severities of the corruptions, 1 to 5.
        model, size: Options of :func:`imagenet_variant` for the clean images.
        normalization, device, progress: Options of :func:`robustness`.
        batch_size: Number of images in a batch.
        workers: Number of processes that read images.

    Returns:
        A dataset like that of :func:`robustness`, without attacks, and with the single seed 0,
        because the corruptions are given. The coordinate ``file`` (image) has the folder and the
        name of each image.

    Raises:
        FileNotFoundError: A folder does not exist.
        ValueError: The folders hold different images, or ``clean`` lacks some; an option is out of
            range.
    """
    names = named_corruptions(corruptions)
    levels = whole_numbers(severities, "severities", 1, 5)
    conditions = list(product(names, levels))
    if not conditions:
        raise ValueError("expected at least one corruption and one severity, got none")
    loading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    files = _files_of_all(root, conditions)
    options: dict[str, Any] = {
        "normalization": normalization,
        "device": device,
        "corruptions": (),
        "attacks": (),
        "progress": False,
    }
    results = []
    decisions: dict[str, Any] = {}
    total = len(conditions) + (clean is not None)
    with progress_bar(total, "ImageNet-C", progress, "condition") as bar:
        if clean is not None:
            originals = imagenet_variant("imagenet", clean, model=model, size=size, **loading)
            result = robustness(models, _selected(originals, files), **options)
            decisions["clean_"] = _clean_decisions(result)
            results.append(result)
            bar.update(1)
        corrupted = []
        for condition in conditions:
            variant = _open(root, condition, **loading)
            corrupted.append(robustness(models, variant.loader, **options))
            bar.update(1)
    results += corrupted
    stacked = np.stack([_clean_decisions(ds) for ds in corrupted], 2)
    shape = (*stacked.shape[:2], len(names), len(levels), 1, len(files))
    decisions[""] = stacked.reshape(shape)
    groups = [CORRUPTIONS[name].group for name in names]
    coordinates = {
        "model": results[0].model.values,
        "corruption": np.array(names, dtype=object),
        "group": ("corruption", np.array(groups, dtype=object)),
        "severity": list(levels),
        "seed": [0],
        "label": ("image", results[0].label.values),
    }
    nan_scores: Counter[str] = Counter()
    for ds in results:
        nan_scores.update(json.loads(ds.attrs["nan_scores"]))
    attrs = results[0].attrs | {"nan_scores": json.dumps(nan_scores)}
    del attrs["frost"], attrs["attacks"]  # neither was computed here
    ds = as_dataset(decisions, {}, coordinates, attrs)
    return ds.assign_coords(file=("image", np.array(files, dtype=object)))


def _clean_decisions(results: xr.Dataset) -> NDArray[Any]:
    """Return predictions and confidences, (2, model, image)."""
    names = "clean_prediction", "clean_confidence"
    return np.stack([results[name].values for name in names])


def _open(
    root: str | Path, condition: tuple[str, int], *, warn: bool = False, **loading: Any
) -> Variant:
    corruption, severity = condition
    with warnings.catch_warnings():
        # Only the first condition warns, mainly of missing classes, because all others lack the
        # same classes.
        if not warn:
            warnings.simplefilter("ignore", UserWarning)
        return imagenet_variant(
            "imagenet-c", root, corruption=corruption, severity=severity, **loading
        )


def _files_of_all(root: str | Path, conditions: list[tuple[str, int]]) -> list[str]:
    """Return the files that every condition has; raise unless they are the same, in the same order.

    All folders are read before the first image is classified, and are read again when their images
    are, because the lists of 75 conditions of 50,000 images would take half a gigabyte.
    """
    files = _files(_open(root, conditions[0], warn=True))
    for condition in conditions[1:]:
        further = _files(_open(root, condition))
        if further != files:
            different = sorted(set(files) ^ set(further))
            raise ValueError(
                f"expected the same images in all folders of {root}, got {len(files)} in "
                f"{'/'.join(map(str, conditions[0]))} and {len(further)} in "
                f"{'/'.join(map(str, condition))}: {', '.join(different[:3])} in one of them only"
            )
    return files


def _files(variant: Variant) -> list[str]:
    """Return the folder and the name of each image."""
    loader: Any = variant.loader
    paths = [Path(path) for path, _ in loader.dataset.samples]
    return [f"{path.parent.name}/{path.name}" for path in paths]


def _selected(variant: Variant, files: list[str]) -> DataLoader[Any]:
    """Return a loader of the images with these names, in this order."""
    loader: Any = variant.loader
    numbers = {file: number for number, file in enumerate(_files(variant))}
    missing = [file for file in files if file not in numbers]
    if missing:
        raise ValueError(
            f"expected the originals of all {len(files)} corrupted images in clean, which lacks "
            f"{len(missing)}: {', '.join(missing[:3])}"
        )
    return DataLoader(
        Subset(loader.dataset, [numbers[file] for file in files]),
        loader.batch_size,
        num_workers=loader.num_workers,
        generator=torch.Generator(),  # separate, as in the variant's loader
    )
