"""Published test sets for models trained on ImageNet, read from where they lie on disk, with their class masks."""

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

from tcnn_probe.models import unwrap, whole_number

__all__ = ["Variant", "imagenet_variant"]

_NAMES = ("imagenet", "imagenet-a", "imagenet-c", "imagenet-r", "imagenet-real", "imagenet-v2")
_CLASSES = 1000


@dataclass(frozen=True)
class Variant:
    """A test set for :func:`tcnn_probe.evaluation.robustness`; make one of your own from a name and batches.

    Attributes:
        name: its label in the results.
        loader: batches of images in pixel space, (B, C, H, W) in [0, 1], and labels: (B,), or, where several classes
            are right, (B, K), bool.
        classes: those of the model's among which the prediction is chosen; None for all.
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
    """Open a published variant of ImageNet's validation set on disk, for :func:`tcnn_probe.evaluation.robustness`.

    Under ``root`` lie

    - "imagenet": ``n01440764/``, ..., a folder for each of 1000 classes;
    - "imagenet-a", "imagenet-r": the same for 200 classes, of which the prediction is the best;
    - "imagenet-v2": ``0/`` to ``999/``, named by class indices;
    - "imagenet-c": ``<corruption>/<severity>/n01440764/``, ...;
    - "imagenet-real": ``ILSVRC2012_val_*.JPEG``, in any folders. Any of an image's labels is right; images without
      labels are left out.

    Folders are read by timm, which also has the classes and labels. Images are resized and cropped as in timm's
    validation of the model, and stay in pixel space. Those of ImageNet-C are 224 x 224 and shown as they are.

    Sources: ImageNet-A, Natural Adversarial Examples, and -R, The Many Faces of Robustness (Hendrycks et al. 2021);
    -C, Benchmarking Neural Network Robustness (Hendrycks & Dietterich 2019); -ReaL, Are we done with ImageNet? (Beyer
    et al. 2020); -V2, Do ImageNet Classifiers Generalize to ImageNet? (Recht et al. 2019).

    Args:
        name, root: as above.
        model: one of timm's, whose configuration says how images are resized and cropped; None for timm's default.
        size: of images, height and width; None for that of the model, or 224.
        batch_size: images at a time.
        workers: processes that read images.
        corruption, severity: of ImageNet-C only: names of the folders.

    Returns:
        :class:`Variant`, for ``robustness(variants=)``.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: an unknown name, an option that the variant does not have, or folders that are not those above.

    Warns:
        UserWarning: folders of some classes are missing.
    """
    if name not in _NAMES:
        raise ValueError(f"expected one of {', '.join(_NAMES)}; got {name!r}")
    folder, full = Path(root), name
    if name == "imagenet-c":
        folder, full = folder / str(corruption) / str(severity), f"{name}/{corruption}/{severity}"
        model, size = None, 224
    elif corruption is not None or severity is not None:
        raise ValueError(f"only imagenet-c has a corruption and a severity, not {name}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    transform = _transform(model, size, whole=name == "imagenet-c")
    classes = _classes(name)
    samples = _really_labelled(folder) if name == "imagenet-real" else _by_class(folder, classes, name)
    generator = torch.Generator()  # of its own: torch's global state is not advanced
    images, batch_size = _Images(samples, transform), whole_number(batch_size, "batch_size", 1)
    loader = DataLoader(images, batch_size, num_workers=workers, generator=generator)
    return Variant(full, loader, tuple(sorted(classes.values())) if len(classes) < _CLASSES else None)


class _Images(Dataset[tuple[Tensor, Any]]):
    """Images by path, each with its class, or with all classes that are right, (K,), bool.

    An image that cannot be read is an error; timm's own dataset would put the next one in its place.
    """

    def __init__(self, samples: list[tuple[str, Any]], transform: Any) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            pixels = self.transform(image.convert("RGB"))
        return pixels, label if isinstance(label, int) else torch.isin(torch.arange(_CLASSES), torch.tensor(label))


def _of_timm(file: str) -> str:
    return (files("timm.data") / "_info" / file).read_text()


def _classes(name: str) -> dict[str, int]:
    """Class index by folder."""
    if name == "imagenet-v2":
        return {str(index): index for index in range(_CLASSES)}
    index = {wnid: number for number, wnid in enumerate(_of_timm("imagenet_synsets.txt").split())}
    if name in ("imagenet-a", "imagenet-r"):
        return {wnid: index[wnid] for wnid in _of_timm(f"{name.replace('-', '_')}_synsets.txt").split()}
    return index


def _read(folder: Path, classes: dict[str, int] | None) -> list[tuple[str, int]]:
    """The list, by timm, of all images in the folders, with their classes."""
    from timm.data.readers import create_reader

    try:
        return create_reader("", str(folder), class_map=classes).samples
    except RuntimeError as error:
        raise ValueError(f"expected images in the folders of {folder}: {error}") from error


def _by_class(folder: Path, classes: dict[str, int], name: str) -> list[tuple[str, int]]:
    """Images of folders named by class; folders of other names are refused, and missing ones warned of."""
    found = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    unknown = [each for each in found if each not in classes]
    if unknown or not found:
        raise ValueError(
            f"expected folders such as {next(iter(classes))}, of the {len(classes)} classes of {name}, in {folder}; "
            f"got {', '.join(unknown[:5]) or 'none'}"
        )
    if len(found) < len(classes):
        warnings.warn(
            f"{folder} has folders of {len(found)} of the {len(classes)} classes of {name}: what is measured on it is "
            "not what is published",
            stacklevel=3,
        )
    return _read(folder, classes)


def _really_labelled(folder: Path) -> list[tuple[str, list[int]]]:
    """Images of the validation set with all classes that are right; those without any are left out."""
    listed = json.loads(_of_timm("imagenet_real_labels.json"))
    right = {f"ILSVRC2012_val_{number:08d}": labels for number, labels in enumerate(listed, 1)}
    paths = [path for path, _ in _read(folder, None)]
    if unknown := [path for path in paths if Path(path).stem not in right]:
        raise ValueError(
            f"expected images named ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_{len(right):08d}.JPEG, which have "
            f"labels, in {folder}; got {unknown[0]}"
        )
    return [(path, right[Path(path).stem]) for path in paths if right[Path(path).stem]]


def _transform(model: nn.Module | None, size: int | tuple[int, int] | None, whole: bool) -> Any:
    """From an image of PIL's to a tensor (3, H, W) in [0, 1], by timm; the whole or as configured."""
    from timm.data import create_transform, resolve_data_config

    configured = None if model is None else getattr(unwrap(model), "pretrained_cfg", None)
    if model is not None and not configured:
        raise ValueError("the model has no pretrained_cfg of timm's: give size instead of model")
    size = 224 if size is None and model is None else size
    args: dict[str, Any] = {"crop_pct": 1.0 if whole else None}
    if size is not None:
        args["input_size"] = (3, size, size) if isinstance(size, int) else (3, *size)
    config = resolve_data_config(args, pretrained_cfg=configured, use_test_size=True)
    return create_transform(**config | {"mean": (0.0,) * 3, "std": (1.0,) * 3})
