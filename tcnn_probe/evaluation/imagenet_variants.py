"""Published test sets for models trained on ImageNet, read from disk, with their class masks."""

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tcnn_model.class_folders import ClassFolders, reason_unused
from tcnn_probe.models import unwrap, whole_number

__all__ = ["Variant", "imagenet_variant"]

_NAMES = (
    "imagenet",
    "imagenet-a",
    "imagenet-c",
    "imagenet-r",
    "imagenet-real",
    "imagenet-v2",
)
_CLASSES = 1000


@dataclass(frozen=True)
class Variant:
    """A test set for :func:`tcnn_probe.evaluation.robustness`;
    your own needs only a name and batches.

    Attributes:
        name: Label of the test set in the results.
        loader: Batches of images in pixel space, (B, C, H, W) in [0, 1], and labels: (B,), or (B,
            K), bool, if several classes can be right.
        classes: Classes of the model among which it predicts; None for all.
    """

    name: str
    loader: Iterable[tuple[Tensor, Tensor]]
    classes: tuple[int, ...] | None = None


def imagenet_variant(
    name: str,
    root: str | Path,
    *,
    model: nn.Module | None = None,
    size: int | tuple[int, int] | None = None,
    batch_size: int = 64,
    workers: int = 0,
    corruption: str | None = None,
    severity: int | None = None,
) -> Variant:
    """Open a published variant of ImageNet's validation set on disk,
    for :func:`tcnn_probe.evaluation.robustness`.

    The folder ``root`` contains

    - "imagenet": ``n01440764/``, ..., a folder for each of 1000 classes;
    - "imagenet-a", "imagenet-r": the same for 200 classes, to which predictions are restricted;
    - "imagenet-v2": ``0/`` to ``999/``, named by class indices;
    - "imagenet-c": ``<corruption>/<severity>/n01440764/``, ...;
    - "imagenet-real": ``ILSVRC2012_val_*.JPEG``, in any folders. Any of an image's labels is right;
      images without labels are left out.

    Folders are read by timm, which also has the classes and labels. Images are resized and cropped
    as in timm's validation of the model, and stay in pixel space. Images of ImageNet-C are 224 x
    224 and are not resized or cropped.

    Sources: ImageNet-A, Natural Adversarial Examples, and -R, The Many Faces of Robustness
    (Hendrycks et al. 2021); -C, Benchmarking Neural Network Robustness (Hendrycks & Dietterich
    2019); -ReaL, Are we done with ImageNet? (Beyer et al. 2020); -V2, Do ImageNet Classifiers
    Generalize to ImageNet? (Recht et al. 2019).

    Args:
        name: Name of the test set, as above.
        root: Folder with its images, as above.
        model: A model of timm, whose configuration defines how images are resized and cropped; None
            for timm's default.
        size: Height and width of the images; None for those of the model, or 224.
        batch_size: Number of images in a batch.
        workers: Number of processes that read images.
        corruption, severity: Names of the folders of ImageNet-C; None for the other test sets.

    Returns:
        A :class:`Variant`, for ``robustness(variants=)``.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The name is unknown, the variant does not have an option, or the folders are not
            those above.

    Warns:
        UserWarning: Folders of some classes are missing.
    """
    if name not in _NAMES:
        raise ValueError(f"expected one of {', '.join(_NAMES)}; got {name!r}")
    folder, label = Path(root), name
    if name == "imagenet-c":
        folder, label = (
            folder / str(corruption) / str(severity),
            f"{name}/{corruption}/{severity}",
        )
        # The images are published at this size; any other size would rescale the corruptions.
        model, size = None, 224
    elif corruption is not None or severity is not None:
        raise ValueError(f"only imagenet-c has a corruption and a severity, not {name}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    transform = _transform(model, size, uncropped=name == "imagenet-c")
    classes = _classes(name)
    samples = (
        _samples_of_real(folder)
        if name == "imagenet-real"
        else _samples_by_class(folder, classes, name)
    )
    batch_size = whole_number(batch_size, "batch_size", 1)
    # Without a separate generator, each iteration of a DataLoader advances torch's global state.
    loader = DataLoader(
        _Images(samples, transform),
        batch_size,
        num_workers=workers,
        generator=torch.Generator(),
    )
    return Variant(
        label,
        loader,
        tuple(sorted(classes.values())) if len(classes) < _CLASSES else None,
    )


class _Images(Dataset[tuple[Tensor, Any]]):
    """Images by path, with their class or a mask of all right classes, bool (K,).

    An image that cannot be read raises an error. timm's ImageDataset would return the next image
    instead.
    """

    def __init__(self, samples: list[tuple[str, Any]], transform: Any) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        path, label = self.samples[index]
        try:
            with Image.open(path) as image:
                # Published accuracies are of images that are not turned as their EXIF data say.
                pixels = self.transform(image.convert("RGB"))
        except OSError as error:
            # Pillow does not name a truncated file, which may be one of millions.
            raise OSError(f"cannot read {path}: {error}") from error
        return pixels, label if isinstance(label, int) else torch.isin(
            torch.arange(_CLASSES), torch.tensor(label)
        )


def _read_timm_info(file: str) -> str:
    return (files("timm.data") / "_info" / file).read_text()


def _classes(name: str) -> dict[str, int]:
    """Return the class index of each folder."""
    if name == "imagenet-v2":
        return {str(index): index for index in range(_CLASSES)}
    indices = {
        wnid: index for index, wnid in enumerate(_read_timm_info("imagenet_synsets.txt").split())
    }
    if name in ("imagenet-a", "imagenet-r"):
        # timm lists only the folders of these sets; models predict by the indices of all 1000
        # classes.
        subset = _read_timm_info(f"{name.replace('-', '_')}_synsets.txt").split()
        return {wnid: indices[wnid] for wnid in subset}
    return indices


def _samples_by_class(folder: Path, classes: dict[str, int], name: str) -> list[tuple[str, int]]:
    """List images of folders named by class; raise for other folders, and warn of missing ones."""
    names = list(classes)
    try:
        folders = ClassFolders(folder, names)
    except ValueError as error:
        raise ValueError(
            f"expected folders such as {names[0]}, of the {len(names)} classes of {name}, in "
            f"{folder}: {error}"
        ) from error
    present = [name for name in names if (folder / name).is_dir()]
    if len(present) < len(classes):
        warnings.warn(
            f"{folder} has folders of {len(present)} of the {len(classes)} classes of {name}: "
            "accuracies on it are not comparable with published ones",
            stacklevel=3,
        )
    return [(path, classes[names[label]]) for path, label in folders.samples]


def _samples_of_real(folder: Path) -> list[tuple[str, list[int]]]:
    """List images of the validation set with all right classes (ImageNet-ReaL),
    if they have any.
    """
    labels_by_number = json.loads(_read_timm_info("imagenet_real_labels.json"))
    labels = {
        f"ILSVRC2012_val_{number:08d}": classes
        for number, classes in enumerate(labels_by_number, 1)
    }
    samples = []
    # Folders are irrelevant here, because labels are published by the number in the file's name.
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or reason_unused(path.relative_to(folder).parts):
            continue
        name = path.stem
        if name not in labels:
            raise ValueError(
                "expected images named ILSVRC2012_val_00000001.JPEG to "
                f"ILSVRC2012_val_{len(labels):08d}.JPEG, which have labels, in {folder}; got {path}"
            )
        if labels[name]:
            samples.append((str(path), labels[name]))
    return samples


def _transform(model: nn.Module | None, size: int | tuple[int, int] | None, uncropped: bool) -> Any:
    """Create timm's transform from a PIL image to a tensor (3, H, W) in [0,
    1], uncropped or as configured.
    """
    from timm.data import create_transform, resolve_data_config

    pretrained_cfg = None if model is None else getattr(unwrap(model), "pretrained_cfg", None)
    if model is not None and not pretrained_cfg:
        raise ValueError("the model has no timm pretrained_cfg: give size instead of model")
    if size is None and model is None:
        size = 224
    args: dict[str, Any] = {"crop_pct": 1.0 if uncropped else None}
    if size is not None:
        args["input_size"] = (3, size, size) if isinstance(size, int) else (3, *size)
    # Many models are validated at a larger size than they are trained.
    config = resolve_data_config(args, pretrained_cfg=pretrained_cfg, use_test_size=True)
    # Corruptions and attacks work in pixel space, and the model's normalisation is applied after
    # them.
    return create_transform(**config | {"mean": (0.0,) * 3, "std": (1.0,) * 3})
