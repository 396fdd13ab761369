"""Random access to the images of WebDataset shards on a local disk.

The package ``webdataset`` reads shards as a stream, with which no run can be resumed exactly. Here
the headers and labels of each tar file are read once; an image is then read from its offset in the
file. Files of a split and names of samples are found as in ``timm.data.readers.reader_wds``.
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

# The files of a sample have the same path up to the first dot of the name: dir/000.jpg,
# dir/000.cls.
_SAMPLE = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")

# webdataset's notation for many shards: photos-{0000..0123}.tar.
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class ShardReader(Reader):  # type: ignore[misc]  # timm has no types
    """Image files of a split with their labels, in the order of the shards.

    Args:
        root: Folder of the shards, and of ``_info.json`` if there is one.
        splits: Synonyms of the split's name, one of which is in ``_info.json`` or in the names of
            the shards; or a single pattern such as "photos-train-{0000..0123}.tar".

    Raises:
        ValueError: There is no such split, a shard is not a tar file, or a sample has no image or
            no label.
    """

    def __init__(self, root: str, splits: Sequence[str]) -> None:
        super().__init__()
        self._shards, field = _shards_of(root, splits)
        places = []
        for number, shard in enumerate(self._shards):
            places += [(number, *sample) for sample in _samples(shard, field)]
        # An array, not a list of tuples, whose pages the workers of a DataLoader would copy by
        # counting references. Columns: shard, first byte, size, label.
        self._places = np.array(places, dtype=np.int64).reshape(-1, 4)
        labels = np.unique(self._places[:, 3]).tolist()
        # Labels with gaps get no names, because timm would take their positions for the labels.
        self.class_to_idx = (
            {str(label): label for label in labels} if labels == [*range(len(labels))] else {}
        )

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        shard, first, size, label = self._places[index].tolist()
        # The file is opened for each image: forked workers would share the position in a file that
        # stays open.
        with self._shards[shard].open("rb") as file:
            file.seek(first)
            return io.BytesIO(file.read(size)), label

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Return the path of the shard, followed by the name of the image in it."""
        shard = self._shards[self._places[index, 0]]
        first = self._places[index, 1]
        with tarfile.open(shard, "r:") as tar:
            path = shard / next(member.name for member in tar if member.offset_data == first)
        if basename:
            return path.name
        return str(path.absolute() if absolute else path)


def _shards_of(root: str, splits: Sequence[str]) -> tuple[list[Path], str]:
    """Return the tar files of a split, and the field
    of a sample's JSON that holds its label ("" for ``.cls``).
    """
    folder = Path(root)
    info = _split_info(folder, splits)
    if info:
        names = info.get("filenames", [])
    elif ".tar" in splits[0]:
        # timm allows the number of images after a "|".
        names = _expanded(splits[0].partition("|")[0])
    else:
        synonyms = "|".join(map(re.escape, splits))
        split = re.compile(rf"(.*[-_.])?({synonyms})([-_.].*)?\.tar")
        names = sorted(path.name for path in folder.glob("*.tar") if split.fullmatch(path.name))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        expected = (
            f"the shard {missing[0]}"
            if missing
            else f"a split {splits[0]!r}, in {_INFO[0]} or names of shards"
        )
        raise ValueError(
            f"expected {expected} in the folder {root}: shards are read from a disk, so copy them "
            "there first"
        )
    return [folder / name for name in names], info.get("alt_label", "")


def _split_info(folder: Path, splits: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a split in ``_info.json``; an empty one if there is none."""
    known: dict[str, Any] = {}
    for path in map(folder.joinpath, _INFO):
        if path.is_file():
            known |= json.loads(path.read_text()).get("splits", {})
    return next((known[name] for name in splits if name in known), {})


def _expanded(pattern: str) -> list[str]:
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    names = []
    for number in range(int(first), int(last) + 1):
        # File names keep the leading zeros of the pattern.
        digits = str(number).zfill(len(first))
        names += _expanded(pattern.replace(match[0], digits, 1))
    return names


def _samples(shard: Path, field: str) -> Iterator[tuple[int, int, int]]:
    """Yield the offset, size and label of each image."""
    try:
        # "r:" refuses compressed files, in which an image cannot be read from its offset.
        with tarfile.open(shard, "r:") as tar:
            matches = [
                (_SAMPLE.fullmatch(member.name), member) for member in tar if member.isfile()
            ]
            files = [(match[1], match[2].lower(), member) for match, member in matches if match]
            # The files of a sample are adjacent: webdataset, which reads a stream, relies on this,
            # too.
            for key, group in groupby(files, key=lambda file: file[0]):
                parts = {ending: member for _, ending, member in group}
                image = next((parts[ending] for ending in _IMAGES if ending in parts), None)
                label = _label(tar, parts, field)
                if image is None or label is None:
                    place = (
                        f"{field or 'label'!r} of .json" if field or "cls" not in parts else ".cls"
                    )
                    missing = (
                        f"an integer in {place}" if image else f"an image, {' or '.join(_IMAGES)},"
                    )
                    raise ValueError(
                        f"expected {missing} for {key} in {shard}, found {', '.join(parts)}"
                    )
                if label >= 0:  # timm leaves out negative labels, too
                    yield image.offset_data, image.size, label
    except tarfile.TarError as error:
        raise ValueError(f"{shard} is not a whole, uncompressed tar file: {error}") from error


def _label(tar: tarfile.TarFile, parts: Mapping[str, tarfile.TarInfo], field: str) -> int | None:
    """Read the label of a sample from ``.cls``,
    or from JSON if a field is named or there is no ``.cls``.
    """
    ending = "json" if field or "cls" not in parts else "cls"
    if ending not in parts:
        return None
    file = tar.extractfile(parts[ending])
    if file is None:
        return None
    try:
        content = json.loads(file.read())  # a .cls file is valid JSON, too
    except ValueError:
        return None
    label = content.get(field or "label") if isinstance(content, dict) else content
    return label if isinstance(label, int) else None
