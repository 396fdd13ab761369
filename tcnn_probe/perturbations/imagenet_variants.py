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

from tcnn_probe.models import check_batch_size, unwrap
from tcnn_probe.perturbations.checks import whole_number

__all__ = ["Variant", "imagenet_variant"]

_NAMES = ("imagenet", "imagenet-a", "imagenet-c", "imagenet-r", "imagenet-real", "imagenet-v2")
_CLASSES = 1000


@dataclass(frozen=True)
class Variant:
    """A test set; one of your own, too.

    ``loader`` gives, each time, batches of images in pixel space, (B, C, H, W) in [0, 1], and labels: (B,), or, where
    several classes are right, (B, K), bool. ``classes`` are those of the model's that the prediction is taken of; None
    for all.
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
    """Open a published variant of ImageNet's validation set on disk, for :func:`tcnn_probe.robustness`.

    ================ ============================================ =====================================================
    name             folders under ``root``                       what counts as right
    ================ ============================================ =====================================================
    "imagenet"       ``n01440764/``, ..., of 1000 classes         the class
    "imagenet-a"     the same, of 200 classes                     the class, the best of these 200
    "imagenet-r"     the same, of 200 classes                     the class, the best of these 200
    "imagenet-v2"    ``0/``, ..., ``999/``: class indices         the class
    "imagenet-c"     ``<corruption>/<severity>/n01440764/``, ...  the class
    "imagenet-real"  ``ILSVRC2012_val_*.JPEG``, in any folders    any of the labels; images without labels are left out
    ================ ============================================ =====================================================

    Folders are read by timm, which also has the classes and labels. Images are resized and cropped as the model's
    configuration says (as timm's validation does: at its test size, where it has one), and stay in pixel space. Those
    of ImageNet-C are 224 x 224 as published, and shown as they are.

    Sources: ImageNet-A, Natural Adversarial Examples, and -R, The Many Faces of Robustness (Hendrycks et al. 2021);
    -C, Benchmarking Neural Network Robustness (Hendrycks & Dietterich 2019); -ReaL, Are we done with ImageNet? (Beyer
    et al. 2020); -V2, Do ImageNet Classifiers Generalize to ImageNet? (Recht et al. 2019).

    Args:
        name: see above.
        root: the folder.
        model: one of timm's, for whose configuration images are resized and cropped; None: as timm does by default.
        size: of images, height and width; None for that of the model, or 224.
        batch_size: images at a time.
        workers: processes that read images.
        corruption: of ImageNet-C: the folder's name.
        severity: of ImageNet-C: 1 to 5.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: an unknown name, an option that the variant does not have, or folders that are not those above.

    Warns:
        UserWarning: folders of some classes are missing.
    """
    if name not in _NAMES:
        raise ValueError(f"expected one of {', '.join(_NAMES)}; got {name!r}")
    check_batch_size(batch_size)
    folder, full = Path(root), name
    if name == "imagenet-c":
        severity = whole_number(severity, "severity", 1, 5)
        folder, full = folder / str(corruption) / str(severity), f"{name}/{corruption}/{severity}"
        if size not in (None, 224, (224, 224)):
            raise ValueError(f"images of imagenet-c are 224 x 224, and shown as they are: got size={size!r}")
        model, size = None, 224
    elif corruption is not None or severity is not None:
        raise ValueError(f"only imagenet-c has a corruption and a severity, not {name}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    transform = _transform(model, size, whole=name == "imagenet-c")
    classes = None if name == "imagenet-real" else _classes(name)
    samples = _really_labelled(folder) if classes is None else _by_class(folder, classes, name)
    generator = torch.Generator()  # of its own: torch's global state is not advanced
    loader = DataLoader(_Images(samples, transform), batch_size, num_workers=workers, generator=generator)
    masked = name in ("imagenet-a", "imagenet-r")
    return Variant(full, loader, tuple(sorted(classes.values())) if classes and masked else None)


class _Images(Dataset[tuple[Tensor, Any]]):
    """Images by path, each with its class, or with all classes that are right, (K,), bool.

    timm's own dataset would put the next image in the place of one that cannot be read.
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
        what = "class indices, 0 to 999" if name == "imagenet-v2" else "WordNet ids such as n01443537"
        raise ValueError(
            f"expected folders named by {what}, of the {len(classes)} classes of {name}, in {folder}; got "
            f"{', '.join(unknown[:5]) or 'none'}"
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

    config = None if model is None else getattr(unwrap(model), "pretrained_cfg", None)
    if model is not None and not config:
        raise ValueError("the model has no pretrained_cfg of timm's: give size instead of model")
    if size is None and model is None:
        size = 224
    sides = (size, size) if isinstance(size, int) else size
    args: dict[str, Any] = {"crop_pct": 1.0 if whole else None}
    if sides is not None:
        args["input_size"] = (3, *(whole_number(side, "size", 1) for side in sides))
    config = resolve_data_config(args, pretrained_cfg=config, use_test_size=True)
    return create_transform(**config | {"mean": (0.0,) * 3, "std": (1.0,) * 3})
