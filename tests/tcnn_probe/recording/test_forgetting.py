"""Warnings about forgotten marks, other images and second evaluations,
and the representation of a recorder.
"""

import gc
import time
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from zarr.core.sync import sync

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, check_entropies, entropies, images, vit
from tests.tcnn_probe.probes.scattered_models import VIT, small, step


def leave(
    model: nn.Module, count: int, *, marks: bool = False, error: type[Exception] | None = None
) -> None:
    with tcnn_probe.record(model) as recorder:
        if marks:
            model(images())
            recorder.mark(epoch=0)
        if count:
            model(images(count))
        if error is not None:
            raise error


def test_leaving_without_a_mark_warns() -> None:
    model = vit()
    with pytest.warns(
        RuntimeWarning, match=r"^3 images measured and nothing was marked: .*call mark\(epoch="
    ):
        leave(model, 3)
    with pytest.warns(
        RuntimeWarning, match=r"^2 images measured since the last mark: .*recorder\.pause\(\)"
    ) as warnings:
        leave(model, 2, marks=True)
    assert warnings[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="nothing was recorded, as nothing was marked"):
        leave(model.train(), 1)
    model.eval()
    leave(model, 0)
    leave(model, 0, marks=True)
    with pytest.raises(ZeroDivisionError):  # without the warning
        leave(model, 1, error=ZeroDivisionError)


def test_forwards_in_a_pause_are_not_measured() -> None:
    model = vit()

    def fail(recorder: tcnn_probe.Recorder) -> None:
        with recorder.pause():
            # A batch nine times as large and with other images would change the count and the
            # entropies if measured.
            model(9 * images(5))
            raise ZeroDivisionError

    with torch.no_grad(), tcnn_probe.record(model, images=1) as recorder:
        model(images())
        with pytest.raises(ZeroDivisionError):
            fail(recorder)
        # The end of the inner pause must not end the outer one.
        with recorder.pause(), recorder.pause():
            model(images(5))
        recorder.mark(epoch=0)
        with recorder.pause():
            model(images())
    check_entropies(recorder, entropies(model, images()), images=3)


def test_gradients_in_a_pause_and_of_saliency_are_not_measured() -> None:
    model = small("vit_tiny_patch16_224", **VIT)
    batch = torch.rand(1, 3, *VIT["img_size"])

    def backward(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        model(x).square().sum().backward()
        return torch.ones(len(x), *x.shape[2:])

    norms = []
    for interrupted in (False, True):
        with tcnn_probe.record(model, probes="gradient") as recorder:
            step(model, batch)
            if interrupted:
                tcnn_probe.saliency(model, batch, 0, backward)
                with recorder.pause():
                    # These gradients differ greatly from those of the batch.
                    step(model, 5 * batch)
            recorder.mark(epoch=0)
        norms.append(torch.as_tensor(recorder.tree["gradient"].gradient_norm.values))
    # Norms are equal to the bit, as both measure the same step.
    assert torch.equal(*norms)


def test_other_images_than_in_earlier_epochs_are_warned_about(tmp_path: Path) -> None:
    """A run warns once, and a later run again;
    neither the split into batches nor changes of other images matter.
    """
    model = vit()
    path = tmp_path / "run.zarr"
    x = images(6)
    with torch.no_grad(), tcnn_probe.record(model, path, images=[1, 4]) as recorder:
        for epoch, sizes in enumerate(((6,), (3, 3), (1, 5))):
            # Image 0 is not among the chosen images and may change.
            x[0] += 1
            for batch in x.split(sizes):
                model(batch)
            recorder.mark(epoch=epoch)
    with torch.no_grad(), tcnn_probe.record(model, path, images=[1, 4]) as recorder:
        # Images 4 and 5 swap places.
        model(x[[0, 1, 2, 3, 5, 4]])
        with pytest.warns(
            RuntimeWarning, match=r"the images \[4\] of this epoch are not .* shuffle=False"
        ) as warnings:
            recorder.mark(epoch=3)
        model(x.flip(0))
        recorder.mark(epoch=4)  # the warning is not repeated
    assert warnings[0].filename == __file__


def test_repr_of_a_recorder(tmp_path: Path) -> None:
    model = timm.create_model(
        "xcit_nano_12_p16_224", depth=1, cls_attn_layers=1, img_size=32
    ).eval()
    with torch.no_grad(), tcnn_probe.record(model, tmp_path / "a.zarr") as recorder:
        # More than three epochs are abbreviated.
        for epoch in range(5):
            model(torch.randn(1, 3, 32, 32))
            recorder.mark(epoch=epoch)
    shown = repr(recorder)
    for part in (
        "Recorder of Xcit, removed\n  layers: 1 (cls_attn_blocks.0.attn)\n  epochs: 5 (0, 1, ..., "
        "4)\n",
        "  since the last epoch: 0 images\n",
        "  unsupported: blocks.0.attn: ",
        f"  kept in: {tmp_path}/a.zarr",
    ):
        assert part in shown, shown


def test_a_probe_that_finds_only_some_layers() -> None:
    model = vit()
    with torch.no_grad(), tcnn_probe.record(model, probes="layer-scale") as recorder:
        model(images())
        with pytest.warns(
            RuntimeWarning,
            match=r"VisionTransformer has no \['scale'\] for the probe 'layer-scale'",
        ):
            recorder.mark(epoch=0)


def test_a_dropped_recorder_leaves_no_hooks(tmp_path: Path) -> None:
    model = vit()
    before = Trace(model)
    recorder = tcnn_probe.record(model, tmp_path / "run.zarr")
    model(images())
    recorder.mark(epoch=0)
    del recorder
    gc.collect()
    assert before == Trace(model)
    # The lock is free as well.
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        assert recorder.epochs == (0,)


def test_a_recorder_collected_in_zarrs_thread_frees_its_lock(tmp_path: Path) -> None:
    """The garbage collector runs in whichever thread allocates memory,
    which may be the thread in which zarr reads.
    """
    model = vit()
    place = tmp_path / "run.zarr"
    held = [tcnn_probe.record(model, place)]
    model(images())
    held[0].mark(epoch=0)

    async def drop() -> None:
        held.clear()
        gc.collect()

    sync(drop())
    for _ in range(100):
        try:
            with tcnn_probe.record(model, place) as recorder:
                assert recorder.epochs == (0,)
            return
        except tcnn_probe.StoreError:  # still locked by the thread that frees it
            time.sleep(0.1)
    raise AssertionError("the lock was never free")
