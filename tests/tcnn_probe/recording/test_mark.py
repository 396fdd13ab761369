"""mark(): what it accepts, what it refuses, and that a refusal changes nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tcnn_probe
from tests.tcnn_probe.networks import Branches
from tests.tcnn_probe.oracle import gpsa_statistics

NEAR, FAR = torch.randn(2, 3, 2, 5, 7, generator=torch.Generator().manual_seed(0))


class Session:
    """A recorder in a directory, with what it has been shown."""

    def __init__(self, path: Path) -> None:
        self.model, self.path = Branches(), path
        self.recorder = tcnn_probe.record(self.model, path)
        self.mark = self.recorder.mark

    def forward(self, near: Tensor = NEAR, far: Tensor = FAR) -> None:
        with torch.no_grad():
            self.model(near=near, far=far)

    def files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.path)): p.read_bytes() for p in sorted(self.path.rglob("*")) if p.is_file()}

    def scalar(self, name: str) -> list[float]:
        return self.recorder.dataset[name].values.tolist()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path / "run.zarr")
    yield session
    session.recorder.remove()


class NotANumber:
    def __float__(self) -> float:
        raise ValueError("no")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "marked already": ({"epoch": 3}, ValueError, "epoch 3 is already marked"),
    "going back": ({"epoch": 2}, ValueError, "later than the last one marked, 3, got 2"),
    "before the first": ({"epoch": -1}, ValueError, "later than the last one marked, 3, got -1"),
    "float epoch": ({"epoch": 4.0}, TypeError, "an integer for epoch, got 4.0"),
    "numpy float epoch": ({"epoch": np.float64(4)}, TypeError, "an integer for epoch"),
    "string epoch": ({"epoch": "4"}, TypeError, "an integer for epoch"),
    "none epoch": ({"epoch": None}, TypeError, "expected an integer for epoch, got None"),
    "no epoch": ({"top1": 0.5}, TypeError, r"needs the epoch: mark\(epoch=\.\.\., top1=\.\.\.\)"),
    "epoch beyond int64": ({"epoch": 2**70, "fresh": 1.0}, (ValueError, OverflowError), "fits in 64 bits"),
    "list": ({"epoch": 4, "top1": [0.5]}, TypeError, r"number for 'top1', got \[0.5\]"),
    "word": ({"epoch": 4, "top1": "good"}, TypeError, "number for 'top1', got 'good'"),
    "numeral": ({"epoch": 4, "top1": "0.5"}, TypeError, "number for 'top1', got '0.5'"),
    "none": ({"epoch": 4, "top1": None}, TypeError, "number for 'top1', got None"),
    "complex": ({"epoch": 4, "top1": 1j}, TypeError, "number for 'top1', got 1j"),
    "vector": ({"epoch": 4, "top1": torch.ones(2)}, TypeError, r"number for 'top1', got tensor\(\[1., 1.\]\)"),
    "failing": ({"epoch": 4, "top1": NotANumber()}, TypeError, "number for 'top1'"),
    "second scalar": ({"epoch": 4, "fresh": 1.0, "top1": "good"}, TypeError, "number for 'top1'"),
    "variable": ({"epoch": 4, "gate": 1.0}, ValueError, "'gate' is the name of a recorded variable"),
    "coordinate": ({"epoch": 4, "layer": 1.0}, ValueError, "'layer' is the name of a coordinate"),
    "slash": ({"epoch": 4, "val/top1": 1.0}, ValueError, "'val/top1'"),
    "empty name": ({"epoch": 4, "": 1.0}, ValueError, "''"),
    "dots": ({"epoch": 4, "..": 1.0}, ValueError, "'..'"),
    "reserved name": ({"epoch": 4, "zarr.json": 1.0}, ValueError, "zarr.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_changed(session: Session, case: str) -> None:
    arguments, error, message = REFUSED[case]
    session.forward()
    session.mark(epoch=3, top1=0.25)
    files, dataset = session.files(), session.recorder.dataset.load()
    session.forward(2 * NEAR)
    with pytest.raises(error, match=message):
        session.mark(**arguments)
    assert session.files() == files
    assert session.recorder.epochs == (3,)
    session.forward(3 * NEAR)
    session.mark(epoch=4, top1=0.5)

    after = session.recorder.dataset.load()
    assert after.isel(epoch=slice(1)).identical(dataset)
    assert set(after) == set(dataset)
    assert session.scalar("top1") == [0.25, 0.5]
    assert after.images.values.tolist() == [[3, 3], [6, 6]]
    seen = gpsa_statistics(session.model.near, torch.cat([2 * NEAR, 3 * NEAR]))
    for name, expected in seen.items():
        got = after[name].sel(layer="near", epoch=4)[:9]
        np.testing.assert_allclose(got, expected.mean(0), rtol=1e-5, atol=1e-5, err_msg=name)


def test_nothing_recorded(session: Session) -> None:
    files = session.files()
    with pytest.raises(RuntimeError, match=r"\['near', 'far'\].* run the validation, with model\.eval\(\)"):
        session.mark(epoch=0)
    session.model.train()
    session.forward()
    with pytest.raises(RuntimeError, match=r"1 forwards in training mode.*model\.eval\(\)"):
        session.mark(epoch=0)
    assert session.files() == files
    session.model.eval()
    session.forward()
    session.mark(epoch=0)
    with pytest.raises(RuntimeError, match=r"since the previous mark \(0 forwards in training mode\)"):
        session.mark(epoch=1)


def test_one_layer_not_reached(session: Session) -> None:
    session.model.near(NEAR)
    with pytest.raises(RuntimeError, match=r"no image in eval mode reached \['far'\]"):
        session.mark(epoch=0)
    session.model.far(FAR)
    session.mark(epoch=0)
    assert session.recorder.dataset.images.values.tolist() == [[3, 3]]


def test_after_removal(session: Session) -> None:
    session.forward()
    session.mark(epoch=0)
    session.forward()
    session.recorder.remove()
    with pytest.raises(RuntimeError, match="removed"):
        session.mark(epoch=1)
    assert session.recorder.epochs == (0,)


def test_skip_drops_what_was_seen_for_a_marked_epoch(session: Session) -> None:
    session.forward()
    session.mark(epoch=1, top1=0.25, if_marked="skip")
    files = session.files()
    session.forward(2 * NEAR, 2 * FAR)
    session.mark(epoch=1, top1=0.5, if_marked="skip")
    assert session.files() == files
    session.forward()
    session.mark(epoch=2, if_marked="skip")
    np.testing.assert_array_equal(*session.recorder.dataset.entropy.values)
    with pytest.raises(ValueError, match="later than"):
        session.mark(epoch=0, if_marked="skip")


def test_scalars_come_and_go(session: Session) -> None:
    for epoch, scalars in enumerate([{"top1": 0.1}, {"lr": 0.2}, {"top1": 0.3, "lr": 0.4}, {"loss": 5}, {}]):
        session.forward()
        session.mark(epoch=epoch, **scalars)
    nan = np.nan
    np.testing.assert_array_equal(session.scalar("top1"), [0.1, nan, 0.3, nan, nan])
    np.testing.assert_array_equal(session.scalar("lr"), [nan, 0.2, 0.4, nan, nan])
    np.testing.assert_array_equal(session.scalar("loss"), [nan, nan, nan, 5.0, nan])
    assert session.recorder.dataset.loss.dims == ("epoch",)


KINDS = [int, np.int16, np.uint8, torch.tensor, np.array, bool]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_epochs_of_any_integer_kind(session: Session, kind: Callable[[int], Any]) -> None:
    session.forward()
    session.mark(epoch=kind(1))
    assert session.recorder.epochs == (1,)
    assert session.recorder.dataset.epoch.dtype == np.int64


@pytest.mark.parametrize(
    "value",
    [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([[0.5]]), torch.tensor(0.5).bfloat16()],
    ids=repr,
)
def test_scalars_of_any_number_kind(session: Session, value: Any) -> None:
    session.forward()
    session.mark(epoch=0, top1=value, top5=np.int64(3), best=True, worst=-np.inf)
    assert [session.scalar(name) for name in ("top1", "top5", "best", "worst")] == [[0.5], [3.0], [1.0], [-np.inf]]


def test_scalar_with_a_gradient(session: Session) -> None:
    session.forward()
    session.mark(epoch=0, loss=session.model.near.gating.sum() * 0 + 0.5)
    assert session.scalar("loss") == [0.5]


def test_epochs_may_be_negative_and_far_apart(session: Session) -> None:
    for epoch in (-5, -1, 0, 1000):
        session.forward()
        session.mark(epoch=epoch)
    assert session.recorder.dataset.epoch.values.tolist() == [-5, -1, 0, 1000]
    session.forward()
    with pytest.raises(ValueError, match="later than the last one marked, 1000, got 500"):
        session.mark(epoch=500)


def test_unknown_if_marked(session: Session) -> None:
    session.forward()
    with pytest.raises(ValueError, match="overwrite"):
        session.mark(epoch=0, if_marked="overwrite")  # type: ignore[arg-type]
