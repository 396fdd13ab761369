"""``cost()``: parameters, multiply-adds, memory and speed of models, as a dataset."""

import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from tcnn_probe.hooks.modes import leaves_of
from tcnn_probe.hooks.private_torch import TorchDispatchMode
from tcnn_probe.models import (
    check_module,
    for_model,
    progress_bar,
    untouched,
    unwrap,
    whole_number,
)
from tcnn_probe.provenance import versions

__all__ = ["cost"]

_ABOUT = {
    "parameters": ("1", "number of parameters, without buffers"),
    "multiply_adds": (
        "1",
        "multiply-adds of matrix products and convolutions in a forward pass of one image, half of "
        "their FLOPs",
    ),
    "peak_memory": (
        "MiB",
        "memory that a forward pass of a batch needs at its peak, in addition to parameters, "
        "buffers and images",
    ),
    "images_per_second": (
        "s-1",
        "batch size divided by the median time of a forward pass in eval mode, without gradients",
    ),
    "training_images_per_second": (
        "s-1",
        "batch size divided by the median time of a forward and backward pass in training mode",
    ),
}


def cost(
    models: nn.Module | Mapping[str, nn.Module],
    size: int | tuple[int, ...] | None = None,
    *,
    batch_size: int = 32,
    rounds: int = 5,
    training: bool = False,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure the cost of models on their devices,
    in their precision, and with the current number of threads.

    ::

        cost = tcnn_probe.evaluation.cost({"cnn": cnn, "tcnn": tcnn}, 224)
        # ds is the result of tcnn_probe.evaluation.robustness
        print(xr.merge([ds[["clean_accuracy"]], cost]).to_pandas())

    Products that the implementation computes are counted, but not sums, activations, normalisations
    and the softmax. The thesis prints multiply-adds as "FLOPs" (Tables 3.15 and 5.1): 4.1e9 for a
    ResNet-50, 4.6e9 for a DeiT-S at 224. So does Table 2 of the T-CNN paper for these two, but its
    4.6e9 for ResNet50-RS at 160 is twice the multiply-adds.

    Args:
        models: A model that takes images, or several, by name. Each is restored afterwards.
        size: Size of the images in pixels, (height, width) or a number for both; or (channels,
            height, width); None for that of timm's configuration.
        batch_size: Batch size of the forwards whose time and memory are measured.
        rounds: Number of timed forwards, after one that is not timed; models take turns.
        training: Whether to time training, too: forward and backward, without the optimizer's step.
        progress: Whether to show a progress bar; None to show it after three seconds, on a terminal
            or in a notebook.

    Returns:
        A dataset over ``model``: ``parameters``, ``multiply_adds``, ``peak_memory`` in MiB (on the
        CPU without the workspace of operators) and ``images_per_second``; with ``training`` also
        ``training_images_per_second``.

    Raises:
        TypeError: A model is not a module, or a size is not an integer.
        ValueError: A size is out of range, or is missing and unknown to timm.
    """
    members = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not members:
        raise ValueError("expected at least one model, got none")
    batch_size, rounds = (
        whole_number(batch_size, "batch_size", 1),
        whole_number(rounds, "rounds", 1),
    )
    for model in members.values():
        check_module(model)
    images = {name: _images(model, size, batch_size) for name, model in members.items()}
    costs: defaultdict[str, list[float]] = defaultdict(list)
    speeds = {"images_per_second": _forward}
    if training:
        speeds["training_images_per_second"] = _training_step
    with progress_bar(
        len(members) * (2 + len(speeds) * (rounds + 1)), "cost", progress, "forward"
    ) as bar:
        for name, model in members.items():
            with untouched(model), FlopCounterMode(display=False) as counter:
                # A single image is used, because multiply-adds are counted for each image of a
                # batch.
                model(images[name][:1])
            costs["parameters"].append(sum(parameter.numel() for parameter in model.parameters()))
            # torch counts two operations for each multiply-add.
            costs["multiply_adds"].append(counter.get_total_flops() / 2)
            costs["peak_memory"].append(_peak(model, images[name]) / 2**20)
            bar.update(2)
        for speed, run in speeds.items():
            # Models take turns, so that a slow moment of the machine affects all of them. The first
            # round is a warm-up, in which caches are filled and cuDNN chooses its kernels.
            seconds: dict[str, list[float]] = {name: [] for name in members}
            for _ in range(rounds + 1):
                for name, model in members.items():
                    seconds[name].append(run(model, images[name]))
                    bar.update()
            costs[speed] = [batch_size / statistics.median(times[1:]) for times in seconds.values()]
    ds = xr.Dataset(
        {name: ("model", values) for name, values in costs.items()},
        {"model": list(members)},
    )
    for name in costs:
        units, description = _ABOUT[name]
        ds[name].attrs.update(
            units=units, long_name=name.replace("_", " "), description=description
        )
    batch = next(iter(images.values()))
    device = (
        torch.cuda.get_device_name(batch.device)
        if batch.is_cuda
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return ds.assign_attrs(
        versions() | {"device": device, "dtype": str(batch.dtype), "batch_size": batch_size}
    )


def _images(model: nn.Module, size: int | tuple[int, ...] | None, batch_size: int) -> Tensor:
    config = getattr(unwrap(model), "pretrained_cfg", None) or {}
    if size is None and "input_size" not in config:
        raise ValueError(f"timm does not know the image size of {type(model).__name__}: give size=")
    channels, *sides = config.get("input_size", (3, size, size))
    if size is not None:
        sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) == 3:
        channels, *sides = sides
    for side in (channels, *sides):
        whole_number(side, "size", 1)
    return for_model(torch.randn(batch_size, channels, *sides), model)


def _forward(model: nn.Module, images: Tensor) -> float:
    """Time a forward in eval mode, in seconds."""
    with untouched(model), torch.no_grad():
        return _seconds(lambda: model(images), images.device)


def _training_step(model: nn.Module, images: Tensor) -> float:
    """Time a forward in training mode and its backward,
    in seconds; restore random numbers and buffers.
    """
    # Batch norms update their statistics in place, so functional_call gets copies of the buffers.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def step() -> None:
        outputs = leaves_of([functional_call(model, buffers, images)])
        trained = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        # Gradients start from ones, because a loss would add its own cost.
        torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])

    random = torch.random.fork_rng([images.device] if images.is_cuda else [])
    with untouched(model), random, torch.enable_grad():
        model.train()
        return _seconds(step, images.device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        # CUDA calls return before the computation is finished.
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _peak(model: nn.Module, images: Tensor) -> int:
    """Measure the bytes that a forward adds at its peak."""
    if images.is_cuda:
        # The first forward allocates workspaces and caches, which stay and are not a cost of
        # further forwards.
        _forward(model, images)
        before = torch.cuda.memory_allocated(images.device)
        torch.cuda.reset_peak_memory_stats(images.device)
        _forward(model, images)
        return torch.cuda.max_memory_allocated(images.device) - before
    with _PeakMemory([images, *model.parameters(), *model.buffers()]) as memory:
        _forward(model, images)
    return memory.peak


class _PeakMemory(TorchDispatchMode):
    """Peak size in bytes of all live storages that operators allocate,
    which torch does not count on a CPU.
    """

    def __init__(self, uncounted: list[Tensor]) -> None:
        super().__init__()
        # Storages are counted instead of tensors, because views and reshaped tensors share memory.
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in uncounted)
        self._now = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in leaves_of([output]):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()) not in self._known
            ):
                self._known.add(storage)
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                # The storage is freed with the last tensor that shares it, even in the middle of a
                # forward.
                weakref.finalize(storage, self._freed, storage.nbytes())
        return output

    def _freed(self, count: int) -> None:
        self._now -= count
