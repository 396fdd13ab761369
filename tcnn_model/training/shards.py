"""WebDataset shards on a disk, whose images are read by number.

The package ``webdataset`` reads shards as a stream, in which no run can be taken up again exactly. Here the headers of
each tar file are read once, with the labels; an image is then read from the place where it lies. Which files make a
split, and how a sample is named, is as in ``timm.data.readers.reader_wds``.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from timm.data.readers.reader import Reader

__all__ = ["ShardReader"]

_INFO = ("_info.json", "info.json")
_IMAGES = ("jpg", "jpeg", "png", "webp")
_SAMPLE = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class ShardReader(Reader):  # type: ignore[misc]  # timm has no types
    """The images of a split, in the order of the shards, as files with their labels.

    Args:
        root: folder of the shards, and of ``_info.json`` if there is one.
        splits: names of the split, of which one is in ``_info.json``, or in the names of its shards; or one pattern
            such as "photos-train-{0000..0123}.tar".

    Raises:
        ValueError: there is no such split, a shard is no tar file, or a sample has no image or no label.
    """

    def __init__(self, root: str, splits: Sequence[str]) -> None:
        super().__init__()
        self._shards, field = _shards_of(root, splits)
        found = [(n, *sample) for n, shard in enumerate(self._shards) for sample in _samples(shard, field)]
        self._places = np.array(found, dtype=np.int64).reshape(-1, 4)  # shard, first byte, size, label
        labels = np.unique(self._places[:, 3]).tolist()
        self.class_to_idx = {str(n): n for n in labels} if labels == [*range(len(labels))] else {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        shard, first, size, label = self._places[index].tolist()
        with self._shards[shard].open("rb") as file:
            file.seek(first)
            return io.BytesIO(file.read(size)), label

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """The shard, and the name of the image in it."""
        shard, first = self._shards[self._places[index, 0]], self._places[index, 1]
        with tarfile.open(shard, "r:") as tar:
            path = shard / next(member.name for member in tar if member.offset_data == first)
        return path.name if basename else str(path.absolute() if absolute else path)


def _shards_of(root: str, splits: Sequence[str]) -> tuple[list[Path], str]:
    """The tar files of a split, and the field of a sample's JSON that has its label; "" for its ``.cls``."""
    folder = Path(root)
    known: dict[str, Any] = {}
    for path in map(folder.joinpath, _INFO):
        known |= json.loads(path.read_text()).get("splits", {}) if path.is_file() else {}
    about: dict[str, Any] = next((known[name] for name in splits if name in known), {})
    if about:
        names = about.get("filenames", [])
    elif ".tar" in splits[0]:
        names = _expanded(splits[0].partition("|")[0])
    else:
        split = re.compile(rf"(.*[-_.])?({'|'.join(map(re.escape, splits))})([-_.].*)?\.tar")
        names = sorted(path.name for path in folder.glob("*.tar") if split.fullmatch(path.name))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        what = f"the shard {missing[0]}" if missing else f"a split {splits[0]!r}, in {_INFO[0]} or names of shards"
        raise ValueError(f"expected {what} in the folder {root}: shards are read from a disk, so copy them there first")
    return [folder / name for name in names], about.get("alt_label", "")


def _expanded(pattern: str) -> list[str]:
    if (found := _RANGE.search(pattern)) is None:
        return [pattern]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for number in numbers for name in _expanded(pattern.replace(found[0], number, 1))]


def _samples(shard: Path, field: str) -> Iterator[tuple[int, int, int]]:
    """First byte, size and label of each image."""
    try:
        with tarfile.open(shard, "r:") as tar:
            files = [(found, member) for member in tar if member.isfile() and (found := _SAMPLE.fullmatch(member.name))]
            for key, group in groupby(files, key=lambda file: file[0][1]):
                parts = {found[2].lower(): member for found, member in group}
                image = next((parts[ending] for ending in _IMAGES if ending in parts), None)
                label = _label(tar, parts, field)
                if image is None or label is None:
                    label_at = f"{field or 'label'!r} of .json" if field or "cls" not in parts else ".cls"
                    missing = f"an integer in {label_at}" if image else f"an image, {' or '.join(_IMAGES)},"
                    raise ValueError(f"expected {missing} for {key} in {shard}, found {', '.join(parts)}")
                if label >= 0:  # timm, too, leaves out the others
                    yield image.offset_data, image.size, label
    except tarfile.TarError as error:
        raise ValueError(f"{shard} is not a whole, uncompressed tar file: {error}") from error


def _label(tar: tarfile.TarFile, parts: Mapping[str, tarfile.TarInfo], field: str) -> int | None:
    """The label of a sample: its ``.cls``, unless a field of its JSON is named."""
    ending = "json" if field or "cls" not in parts else "cls"
    if ending not in parts or (file := tar.extractfile(parts[ending])) is None:
        return None
    try:
        told = json.loads(file.read())
    except ValueError:
        return None
    label = told.get(field or "label") if isinstance(told, dict) else told
    return label if isinstance(label, int) else None
