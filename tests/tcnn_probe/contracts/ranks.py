"""Scenarios that each process of test_processes.py runs, as one function each."""

import os
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import tcnn_probe
from tcnn_probe.probes.anatomy import ANATOMY
from tests.tcnn_probe.contracts.helpers import (
    check_entropies,
    clean,
    entropies,
    entropy,
    images,
    vit,
)
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.probes.class_attention_models import (
    classes_of,
    network,
    pictures,
    truth,
)

# Unequal numbers of images make a mean of the ranks' means differ from the mean.
COUNTS = 3, 2  # images of rank 0 and of rank 1


def images_of_rank(x: Tensor, rank: int) -> Tensor:
    return x.split(COUNTS)[rank]


def raises(action: Any, what: str) -> None:
    """Assert that an action raises on this rank with the given words."""
    with pytest.raises(Exception, match=re.escape(what)):
        action()


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    if kind == "fully_shard":
        # Blocks are wrapped before the whole, as in torch's own guide.
        for block in model.children() if isinstance(model, Chain) else model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    # Without use_orig_params, parameters are flattened, and heads cannot be separated in them.
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def values(rank: int, folder: Path) -> None:
    """Check that sums over the ranks' images equal those of one process,
    and that layers have the model's names.
    """
    # The second epoch has other images, and must not include sums of the first one.
    x = images(5)
    second = images(5, seed=1)
    expected = [entropies(vit(), batch) for batch in (x, second)]
    for kind in ("ddp", "fully_shard", "fsdp"):
        model = wrapped(kind, vit()).eval()
        with tcnn_probe.record(model, folder / f"{kind}.zarr") as recorder:
            for epoch, batch in enumerate((x, second)):
                with torch.no_grad():
                    model(images_of_rank(batch, rank))
                recorder.mark(epoch=epoch, top1=0.5)
            assert recorder.layers == ("blocks.0.attn", "blocks.1.attn"), (
                kind,
                recorder.layers,
            )
            assert recorder.epochs == (0, 1)
            if rank == 0:
                assert recorder.dataset.images.values.tolist() == [[5, 5]] * 2, kind
                for mark in range(2):
                    check_entropies(recorder, expected[mark], mark)
            else:
                raises(
                    lambda recorder=recorder: recorder.dataset,
                    "rank 0 has the recording",
                )
        assert clean()
    for kind in ("ddp", "fully_shard"):
        model = wrapped(kind, vit()).train()
        with tcnn_probe.record(model, when="train") as recorder:
            # There are two steps before a mark, so that images count twice.
            for _ in range(2):
                model(images_of_rank(x, rank)).sum().backward()
            recorder.mark(epoch=0)
            if rank == 0:
                assert recorder.dataset.images.values.tolist() == [[10, 10]], kind


def resume(rank: int, folder: Path) -> None:
    """Check that two ranks resume a recording, whatever the model was wrapped in before."""
    x = images(5)
    # One process without ranks starts the recording, and two ranks resume it.
    if rank == 0:
        model = vit()
        with tcnn_probe.record(model, folder / "run.zarr", distributed=False) as recorder:
            model(x)
            recorder.mark(epoch=0)
    # Rank 1 must not open a store that rank 0 is still writing.
    dist.barrier()
    for epoch, kind in enumerate(("ddp", "fully_shard"), 1):
        model = wrapped(kind, vit()).eval()
        with tcnn_probe.record(model, folder / "run.zarr") as recorder:
            assert recorder.epochs == tuple(range(epoch)), recorder.epochs
            recorder.mark(epoch=0, if_marked="skip")
            model(images_of_rank(x, rank))
            recorder.mark(epoch=epoch)
            if rank == 0:
                check_entropies(recorder, torch.as_tensor(recorder.dataset.entropy.values[0]))
                assert recorder.dataset.images.values.tolist() == [[5, 5]] * (epoch + 1)
                parts = recorder.dataset[[*ANATOMY]]
                assert bool(parts.offset_information.notnull().all())
                # Images alternate between the halves across ranks as they do in one process.
                xr.testing.assert_allclose(
                    parts.isel(epoch=0, drop=True),
                    parts.isel(epoch=epoch, drop=True),
                    rtol=1e-5,
                    atol=1e-5,
                )
    if rank == 0:
        with tcnn_probe.record(vit(), folder / "run.zarr", distributed=False) as recorder:
            assert recorder.epochs == (0, 1, 2)


def parameters(rank: int, folder: Path) -> None:
    """Check statistics of sharded parameters, which all ranks compute together."""
    x = torch.randn(5, 2, 7, 11, generator=torch.Generator().manual_seed(0))
    alone = Chain()
    # The reference is recorded by a single process.
    with tcnn_probe.record(alone, distributed=False) as recorder:
        alone(x)
        recorder.mark(epoch=0)
    expected = recorder.dataset
    for kind in ("fully_shard", "fsdp"):
        model = wrapped(kind, Chain()).eval()
        with tcnn_probe.record(model) as recorder:
            with torch.no_grad():
                model(images_of_rank(x, rank))
            recorder.mark(epoch=0)
            if rank == 0:
                for name in expected.data_vars:
                    actual, reference = (
                        torch.as_tensor(ds[name].values) for ds in (recorder.dataset, expected)
                    )
                    # Ranks have other batches than one process, so float32 sums have another order.
                    torch.testing.assert_close(
                        actual,
                        reference,
                        rtol=1e-5,
                        atol=1e-6,
                        equal_nan=True,
                        msg=f"{kind}: {name}",
                    )


def classes(rank: int, folder: Path) -> None:
    """Check that maps of the best classes are of rank 0's images, and entropies of all images."""
    x = pictures(5)
    maps, scores = truth(network(), x)
    model = wrapped("fully_shard", network()).eval()
    with tcnn_probe.record(model, images=4) as recorder:
        with torch.no_grad():
            model(images_of_rank(x, rank))
        recorder.mark(epoch=0)
        if rank == 0:
            ds = classes_of(recorder.tree).isel(epoch=0)
            # Rank 0 has three of the four requested images, and the fourth stays empty.
            best = scores[:3].argmax(1)
            assert ds.class_index.isel(**{"class": 0}).values.tolist() == [*best, -1]
            attention = torch.tensor(ds.attention_by_class[:3, 0].values).flatten(1)
            expected = torch.tensor(maps[range(3), best]).float()
            torch.testing.assert_close(attention, expected, rtol=0, atol=1e-5)
            entropy = -(maps * np.log(maps)).sum(-1).mean()
            assert abs(float(recorder.dataset.class_entropy.squeeze()) - entropy) < 1e-4


def errors(rank: int, folder: Path) -> None:
    """Check that an error on one rank is raised on all, and that no rank waits for ever."""
    x = images_of_rank(images(5), rank)
    (folder / "notes").mkdir(exist_ok=True)
    # Both ranks write the same file, so that their order does not matter.
    (folder / "notes" / "mine.txt").write_text("mine")
    # A folder that is not a store must never be written into, and the error must reach both ranks.
    raises(lambda: tcnn_probe.record(vit(), folder / "notes"), "mine.txt")

    chain = folder / "chain.zarr"
    if rank == 0:
        model = Chain()
        with tcnn_probe.record(model, chain, distributed=False) as recorder:
            model(torch.randn(2, 2, 5, 7))
            recorder.mark(epoch=0)
    dist.barrier()
    # Both ranks must raise, whichever of them read the store.
    raises(lambda: tcnn_probe.record(vit(), chain), "another model")

    model = vit()
    with tcnn_probe.record(model, folder / "run.zarr") as recorder:
        raises(lambda: recorder.mark(epoch=0), "nothing to mark")
        model(x)
        raises(
            # Only one rank has a bad value.
            lambda: recorder.mark(epoch=0, top1=None if rank else 0.5),
            "expected a number for 'top1'",
        )
        raises(
            lambda: recorder.mark(epoch=0, entropy=1.0),
            "is the name of something else in the recording",
        )
        # The ranks are out of step with each other.
        raises(lambda: recorder.mark(epoch=rank), "on all ranks, got [0, 1]")
        recorder.mark(epoch=0)
        model(x)
        raises(lambda: recorder.mark(epoch=0), "already marked")
        put, recorder._store.append = (
            recorder._store.append,
            # Only rank 0 writes, and its disk is full.
            full if rank == 0 else recorder._store.append,
        )
        raises(lambda: recorder.mark(epoch=1), "No space left")
        recorder._store.append = put
        recorder.mark(epoch=1)
        assert recorder.epochs == (0, 1)
        model(x)
        model.register_forward_hook(lambda *_: 1 / 0)
    assert clean()


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def uneven(rank: int, folder: Path) -> None:
    """Check a rank without images, and a rank that records by itself."""
    model, x = vit(), images()
    expected = entropies(model, x)
    # Each of the two ranks in turn has no images.
    for idle in range(2):
        with tcnn_probe.record(model) as recorder:
            if rank != idle:
                model(x)
            recorder.mark(epoch=0)
            if rank == 0:
                assert recorder.dataset.images.values.tolist() == [[3, 3]], idle
                check_entropies(recorder, expected)
    if rank == 1:
        with tcnn_probe.record(model, folder / "alone.zarr", distributed=False) as recorder:
            model(x)
            recorder.mark(epoch=0)
            assert recorder.dataset.images.values.tolist() == [[3, 3]]


def tensor_parallel(rank: int, folder: Path) -> None:
    """Heads that ranks share are refused, with the reason;
    the images of other layers count once.
    """
    x = images(3)
    expected = entropies(vit(), x)
    model = vit()
    split = {"qkv": ColwiseParallel(), "proj": RowwiseParallel()}
    attention = model.blocks[0].attn
    # The ranks' halves of this module's queries, keys and values are not those of whole heads, so
    # only its two layers are split, and it runs as it is.
    parallelize_module(attention, init_device_mesh("cpu", (2,)), split)
    attention.qkv.register_forward_hook(_gather)
    attention.proj.register_forward_pre_hook(_cut)
    with tcnn_probe.record(model.eval(), folder / "tensor.zarr") as recorder:
        with torch.no_grad():
            model(x)
        recorder.mark(epoch=0)
        assert recorder.layers == ("blocks.1.attn",)
        assert "tensor parallelism" in recorder.unsupported["blocks.0.attn"]
    if rank == 0:
        ds = recorder.dataset
        assert (ds.images == len(x)).all()
        np.testing.assert_allclose(ds.entropy[0, 0], expected[1], 1e-5)


def _gather(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    parts = [torch.empty_like(output) for _ in range(2)]
    dist.all_gather(parts, output.contiguous())
    return torch.cat(parts, -1)


def _cut(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].chunk(2, -1)[dist.get_rank()]


def layers(rank: int, folder: Path) -> None:
    """Check layers that ran on one of the ranks only, and one that joins later, on rank 1."""
    model, x = vit(), images(5)
    mine = images_of_rank(x, rank)
    model.blocks.append(vit(seed=1).blocks[0])
    blocks, norms = model.blocks, [block.norm1 for block in model.blocks]
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(x))
        mine = model._pos_embed(model.patch_embed(mine))
    with tcnn_probe.record(model, folder / "run.zarr") as recorder:
        # The blocks that each rank runs, by mark.
        for epoch, numbers in enumerate([((0,), (0, 1)), ((0, 1), (2,))]):
            with torch.no_grad():
                for number in numbers[rank]:
                    blocks[number](mine)
            recorder.mark(epoch=epoch)
        if rank == 0:
            ds = recorder.dataset
            assert ds.layer.values.tolist() == [f"blocks.{n}.attn" for n in range(3)]
            assert ds.images.fillna(0).values.tolist() == [[5, 2, 0], [3, 3, 2]]
            parts = [slice(0, 5), slice(3, 5)], [slice(0, 3), slice(0, 3), slice(3, 5)]
            for epoch, slices in enumerate(parts):
                for number, part in enumerate(slices):
                    inputs = norms[number](tokens[part])
                    expected = entropy(blocks[number].attn, inputs).mean(0)
                    actual = torch.as_tensor(ds.entropy.values[epoch, number])
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


SCENARIOS = [
    values,
    resume,
    parameters,
    classes,
    errors,
    uneven,
    tensor_parallel,
    layers,
]


def main(rank: int, folder: Path) -> None:
    """Run every scenario in each of two processes."""
    # Warnings of torch's wrappers are ignored, but errors are not.
    warnings.simplefilter("ignore")
    # gloo looks up an interface by the host's name, which may not resolve.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Two ranks share the cores with other tests.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        # A file as meeting point needs no free port.
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=2,
        # A rank that waits for another one must fail soon.
        timeout=timedelta(seconds=20),
    )
    try:
        for scenario in SCENARIOS:
            place = folder / scenario.__name__
            place.mkdir(exist_ok=True)
            scenario(rank, place)
            dist.barrier()
    finally:
        dist.destroy_process_group()
