"""Published test sets for models trained on ImageNet, read from where they lie on disk, with their class masks."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tcnn_probe.models import check_batch_size, unwrap

__all__ = ["VARIANTS", "Variant", "imagenet_variant"]

VARIANTS: Mapping[str, str] = {
    "imagenet": "Deng et al. 2009; the validation set, by class: <wnid>/*",
    "imagenet-a": "Hendrycks et al. 2021, Natural Adversarial Examples; 200 classes: <wnid>/*",
    "imagenet-c": "Hendrycks & Dietterich 2019, Benchmarking Neural Network Robustness to Common Corruptions and "
    "Perturbations: <corruption>/<severity>/<wnid>/*",
    "imagenet-r": "Hendrycks et al. 2021, The Many Faces of Robustness; 200 classes: <wnid>/*",
    "imagenet-real": "Beyer et al. 2020, Are we done with ImageNet?; the validation set: ILSVRC2012_val_*.JPEG",
    "imagenet-v2": "Recht et al. 2019, Do ImageNet Classifiers Generalize to ImageNet?: <class index>/*",
}
_CLASSES = 1000
_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")


@dataclass(frozen=True)
class Variant:
    """A test set; one of your own, too.

    ``loader`` gives, each time, batches of images in pixel space, (B, C, H, W) in [0, 1], and labels: (B,), or, where
    several classes are right, (B, K), bool. ``classes`` are those of the model's that the prediction is taken of; None
    for all. ``images`` is their number.
    """

    name: str
    loader: Iterable[tuple[Tensor, Tensor]]
    classes: tuple[int, ...] | None = None
    images: int | None = None
    source: str = ""


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
    labels: str | Path | None = None,
) -> Variant:
    """A published variant of ImageNet's validation set that you have on disk, for :func:`tcnn_probe.robustness`.

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

    Images are resized and cropped by timm as the model's configuration says (as timm's validation does: at its test
    size, where it has one), and stay in pixel space. Those of ImageNet-C are 224 x 224 and only cropped at the centre,
    as published. Read by timm's reader of folders.

    Args:
        name: see above.
        root: the folder.
        model: for whose configuration of timm's the images are resized and cropped; None: as timm does by default.
        size: of images, height and width; None for that of the model, or 224.
        batch_size: images at a time.
        workers: processes that read images.
        corruption: of ImageNet-C: the folder's name.
        severity: of ImageNet-C: 1 to 5.
        labels: of "imagenet-real": the published ``real.json``; None for the copy that timm has.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: an unknown name, an option that the variant does not have, or folders that are not those above.

    Warns:
        UserWarning: folders of some classes are missing.
    """
    _check(name, size, corruption, severity, labels)
    check_batch_size(batch_size)
    folder = _folder(Path(root), corruption, severity)
    known = _known_classes(name)
    classes = tuple(sorted(known.values())) if len(known) < _CLASSES else None
    transform = _transform(model, size, only_crop=name == "imagenet-c")
    if name == "imagenet-real":
        reader = _reader(folder, None)
        dataset = _Images(reader, transform, _right(reader, folder, labels))
    else:
        _check_layout(folder, known, name)
        dataset = _Images(_reader(folder, known), transform)
    generator = torch.Generator()  # of its own: torch's global state is not advanced
    loader = DataLoader(dataset, batch_size, num_workers=workers, generator=generator)
    full = f"{name}/{corruption}/{severity}" if name == "imagenet-c" else name
    return Variant(full, loader, classes, len(dataset), VARIANTS[name])


class _Images(Dataset[tuple[Tensor, Any]]):
    """Images of a reader of timm's, or some of them, each with its class, or with all classes that are right, (K,).

    Unlike timm's own dataset it does not put the next image in the place of one that cannot be read.
    """

    def __init__(self, reader: Any, transform: Any, right: Mapping[int, list[int]] | None = None) -> None:
        self.reader, self.transform = reader, transform
        self.which = range(len(reader)) if right is None else list(right)
        self.right = right

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        file, label = self.reader[self.which[index]]
        with file, Image.open(file) as image:
            pixels = self.transform(image.convert("RGB"))
        if self.right is None:
            return pixels, label
        right = torch.zeros(_CLASSES, dtype=torch.bool)
        right[self.right[self.which[index]]] = True
        return pixels, right


def _check(name: str, size: Any, corruption: str | None, severity: int | None, labels: Any) -> None:
    if name not in VARIANTS:
        raise ValueError(f"expected one of {', '.join(VARIANTS)}; got {name!r}")
    if name == "imagenet-c":
        if corruption is None or isinstance(severity, bool) or severity not in range(1, 6):
            raise ValueError(
                f"expected the corruption and the severity, 1 to 5, of imagenet-c: got {corruption!r}, {severity!r}"
            )
        if size not in (None, 224, (224, 224)):
            raise ValueError(f"images of imagenet-c are 224 x 224 as published, and only cropped: got size={size!r}")
    elif corruption is not None or severity is not None:
        raise ValueError(f"only imagenet-c has a corruption and a severity, not {name}")
    sides = (size,) if isinstance(size, int) else size
    if sides is not None and not (len(sides) < 3 and all(isinstance(side, int) and side > 0 for side in sides)):
        raise ValueError(f"expected size, in pixels, or height and width, got {size!r}")
    if labels is not None and name != "imagenet-real":
        raise ValueError(f"only imagenet-real has labels of its own, not {name}")


def _folder(root: Path, corruption: str | None, severity: int | None) -> Path:
    """Where the folders of the classes are."""
    folder = root
    for name in (None,) if corruption is None else (None, corruption, str(severity)):
        above, folder = folder, folder if name is None else folder / name
        if not folder.is_dir():
            hint = "" if name is None else f"; there are {_some(_folders(above)) or 'none'}"
            raise FileNotFoundError(f"there is no folder {folder}{hint}")
    return folder


def _known_classes(name: str) -> dict[str, int]:
    """Class index by folder."""
    from timm.data import ImageNetInfo

    if name == "imagenet-v2":
        return {str(index): index for index in range(_CLASSES)}
    index = {wnid: number for number, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    if name not in ("imagenet-a", "imagenet-r"):
        return index
    listed = _of_timm(f"{name.replace('-', '_')}_synsets.txt").split()
    return {wnid: index[wnid] for wnid in listed}


def _of_timm(file: str) -> str:
    return (files("timm.data") / "_info" / file).read_text()


def _check_layout(folder: Path, known: Mapping[str, int], name: str) -> None:
    """Refuse folders that are none of the classes; warn of classes without one."""
    what = "class indices, 0 to 999" if name == "imagenet-v2" else "WordNet ids such as n01443537"
    found = _folders(folder)
    if not found:
        raise ValueError(f"expected folders named by {what} in {folder}, got none")
    if unknown := [each for each in found if each not in known]:
        of = f", of the {len(known)} classes of {name}" if len(known) < _CLASSES else ""
        raise ValueError(f"expected folders named by {what}{of} in {folder}; got {_some(unknown)}")
    if len(found) < len(known):
        warnings.warn(
            f"{folder} has folders of {len(found)} of the {len(known)} classes of {name}: what is measured on it is "
            "not what is published",
            stacklevel=3,
        )


def _reader(folder: Path, classes: dict[str, int] | None) -> Any:
    """timm's, of all images in folders within the folder."""
    from timm.data.readers import create_reader

    try:
        return create_reader("", str(folder), class_map=classes)
    except RuntimeError as error:
        raise ValueError(f"expected images in the folders of {folder}: {error}") from error


def _right(reader: Any, folder: Path, labels: str | Path | None) -> dict[int, list[int]]:
    """The classes that are right of each image that has any."""
    listed = json.loads(_of_timm("imagenet_real_labels.json") if labels is None else Path(labels).read_text())
    if not isinstance(listed, list) or not all(_are_classes(each) for each in listed):
        raise ValueError(f"expected a list of lists of class indices, 0 to 999, one for each image, in {labels}")
    right = {}
    for index, file in enumerate(reader.filenames(basename=True)):
        named = _VALIDATION.fullmatch(Path(file).stem)
        if named is None or not 1 <= int(named[1]) <= len(listed):
            first, last = (f"ILSVRC2012_val_{number:08d}.JPEG" for number in (1, len(listed)))
            raise ValueError(f"expected images named {first} to {last}, which have labels, in {folder}; got {file}")
        if any_of := listed[int(named[1]) - 1]:
            right[index] = any_of
    if not right:
        raise ValueError(f"no image in {folder} has a label")
    return right


def _are_classes(labels: Any) -> bool:
    return isinstance(labels, list) and all(isinstance(each, int) and 0 <= each < _CLASSES for each in labels)


def _transform(model: nn.Module | None, size: int | tuple[int, int] | None, only_crop: bool) -> Any:
    """From an image of PIL's to a tensor (3, H, W) in [0, 1]."""
    from timm.data import create_transform, resolve_data_config
    from torchvision.transforms import CenterCrop, Compose, ConvertImageDtype, PILToTensor

    if only_crop:
        return Compose([CenterCrop(224), PILToTensor(), ConvertImageDtype(torch.float32)])
    config = None if model is None else getattr(unwrap(model), "pretrained_cfg", None)
    if model is not None and not config:
        raise ValueError("the model has no pretrained_cfg of timm's: give size instead of model")
    args = {"input_size": (3, 224, 224)} if model is None else {}
    if size is not None:
        args = {"input_size": (3, *((size, size) if isinstance(size, int) else size))}
    config = resolve_data_config(args, pretrained_cfg=config, use_test_size=True)
    return Compose([create_transform(**config, is_training=False, normalize=False), ConvertImageDtype(torch.float32)])


def _folders(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
