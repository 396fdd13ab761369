"""WebDataset shards, made here: images are those that were written,
with their labels, and are read by number.
"""

import io
import json
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcnn_model.training.sources import open_sources
from tests.tcnn_model.training.runs import assert_same_weights, config, finish
from tests.tcnn_model.training.test_resume import _cut

LABELS = {"train": [[2, 0, 1, 0], [1, 2, 2, 0, 1]], "val": [[0, 2], [1]]}
SPLITS = ("train", "validation")


def _image(number: int, kind: str = "png") -> bytes:
    file = io.BytesIO()
    # The colour of an image is its number, so that a wrong image shows.
    Image.new("RGB", (9, 7), (number, 0, 0)).save(file, kind)
    return file.getvalue()


def _shard(path: Path, samples: Sequence[tuple[str, Mapping[str, bytes]]]) -> str:
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            for ending, data in parts.items():
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path.name


def _numbered(folder: Path, split: str) -> list[str]:
    """Write shards of PNGs with ``.cls``; the red value of an image is its number in the split."""
    number = count()
    names = []
    for shard, labels in enumerate(LABELS[split]):
        samples = [
            (f"dir/{n:03}", {"png": _image(n), "cls": f"{label}\n".encode()})
            for label in labels
            for n in [next(number)]
        ]
        names.append(_shard(folder / f"photos-{split}-{shard:04}.tar", samples))
    return names


@pytest.mark.parametrize("named", ["by shards", "by info", "by pattern"])
def test_images_and_labels(tmp_path: Path, named: str) -> None:
    names = {split: _numbered(tmp_path, split) for split in LABELS}
    splits = SPLITS
    if named == "by info":
        for split in LABELS:  # names that do not tell the split
            names[split] = [
                Path(tmp_path / name).rename(tmp_path / f"{split[0]}{name[-8:]}").name
                for name in names[split]
            ]
        info = {
            "splits": {
                split: {"name": split, "filenames": filenames} for split, filenames in names.items()
            }
        }
        (tmp_path / "_info.json").write_text(json.dumps(info))
    elif named == "by pattern":
        # The number of images may follow the shards, as in timm.
        splits = ("photos-train-{0000..0001}.tar|9", "photos-val-{0000..0001}.tar")
    for source, labels in zip(
        open_sources(str(tmp_path), "wds/", splits), LABELS.values(), strict=True
    ):
        assert source.classes == ("0", "1", "2")
        expected = [label for shard in labels for label in shard]
        assert len(source) == len(expected)
        # Images are read out of order, because shards are read by position and not as a stream.
        for index in np.random.default_rng(0).permutation(len(expected)):
            image, label = source.read(index)
            assert image.getpixel((3, 2)) == (index, 0, 0)
            assert label == expected[index]
    assert source.name(2) == f"{tmp_path}/{names['val'][1]}/dir/002.png"


def test_labels_in_json_files(tmp_path: Path) -> None:
    """The label is the field that ``_info.json`` names,
    else "label"; -1 means no label; extensions ignore case.
    """
    contents = [
        {"label": 1, "fine": 0},
        {"label": 0, "fine": 1},
        {"label": 0, "fine": -1},
    ]
    kinds = (("JPG", "jpeg"), ("jpeg", "jpeg"), ("webp", "webp"))
    samples = [
        (f"{n}", {"json": json.dumps(about).encode(), ending: _image(0, kind)})
        for n, (about, (ending, kind)) in enumerate(zip(contents, kinds, strict=True))
    ]
    for split in SPLITS:
        _shard(tmp_path / f"{split}.tar", samples)
    for source in open_sources(str(tmp_path), "wds/", SPLITS):
        assert [source.read(n)[1] for n in range(len(source))] == [1, 0, 0]
    fine = {"filenames": ["train.tar"], "alt_label": "fine"}
    (tmp_path / "info.json").write_text(json.dumps({"splits": dict.fromkeys(SPLITS, fine)}))
    for source in open_sources(str(tmp_path), "wds/", SPLITS):
        assert [source.read(n)[1] for n in range(len(source))] == [0, 1]


GOOD = {"png": _image(0), "cls": b"0"}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [("a", GOOD), ("b", {"cls": b"0"})],
            "expected an image, jpg or jpeg or png or webp, for b in .*, found cls",
        ),
        (
            [("a", {"png": _image(0)})],
            "expected an integer in 'label' of .json for a in .*, found png",
        ),
        (
            [("a", GOOD | {"cls": b"cat"})],
            "expected an integer in .cls for a in .*, found png, cls",
        ),
        ([("a", GOOD | {"cls": b""})], "expected an integer in .cls for a in"),
        ([], "the split 'train' in .* has no images"),
        (None, "train.tar is not a whole, uncompressed tar file"),
    ],
)
def test_invalid_shards_are_refused(
    tmp_path: Path, samples: Sequence[tuple[str, Mapping[str, bytes]]], message: str
) -> None:
    for split in SPLITS:
        _shard(tmp_path / f"{split}.tar", [("a", GOOD)] if samples is None else samples)
    if samples is None:
        content = (tmp_path / "train.tar").read_bytes()
        # The cut is within the first file, after its header of 512 bytes.
        (tmp_path / "train.tar").write_bytes(content[:600])
    with pytest.raises(ValueError, match=message):
        open_sources(str(tmp_path), "wds/", SPLITS)


@pytest.mark.parametrize(
    ("data", "split", "missing"),
    [
        ("", "train", "a split 'train', in _info.json or names of shards"),
        ("", "a-{01..03}.tar", "the shard a-01.tar"),
        (
            "https://host/imagenet",
            "train",
            "a split 'train', in _info.json or names of shards",
        ),
        ("pipe:cat", "train.tar", "the shard train.tar"),
    ],
)
def test_missing_shards_are_refused(tmp_path: Path, data: str, split: str, missing: str) -> None:
    message = (
        f"expected {missing} in the folder .*: shards are read from a disk, so copy them "
        "there first"
    )
    with pytest.raises(ValueError, match=message):
        open_sources(data or str(tmp_path), "wds/", (split, split))


def test_run_on_shards_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes within an epoch has the same images, and names a broken one."""
    for split in LABELS:
        _numbered(tmp_path, split)
    shard = tmp_path / "photos-train-0001.tar"
    shard.write_bytes(
        # The length is unchanged, so that the tar file stays valid.
        shard.read_bytes().replace(_image(6), _image(6)[:30].ljust(len(_image(6))))
    )
    settings = {
        "data": str(tmp_path),
        "dataset": "wds/",
        "limit": None,
        "batch_size": 3,
        "checkpoint_steps": 1,
    }
    named = rf"skipped {shard}/dir/006.png, which cannot be read"
    with pytest.warns(RuntimeWarning, match=named):
        complete = finish(config(tmp_path / "whole", **settings, max_unreadable=0.2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", named)
        cut = config(tmp_path / "cut", **settings, max_unreadable=0.2)
        _cut(monkeypatch, cut, 4)
        assert_same_weights(finish(cut, resume=True), complete)
    # There are three validation images.
    assert complete["history"][1]["top1"] in [n / 3 for n in range(4)]
