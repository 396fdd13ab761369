"""The fine-tuning loop of the T-CNN paper (Sec. 3, "Training details"), as an iterator over epochs."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from tcnn_model.training.checkpoint import read_checkpoint, write_checkpoint
from tcnn_model.training.optimization import parameter_groups, set_drop_path
from tcnn_model.training.seeding import check_repeatable, seed_everything

__all__ = ["EpochResult", "evaluate", "finetune"]

Batches = DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EpochResult:
    """Losses and accuracies of an epoch. Accuracies are top-1 in [0, 1]; losses are means per image in nats.

    ``lr`` is that of the weights, not of the gates, at the epoch's last step.

    Epoch 0 is the model as it was given: nothing was trained, and its training figures are NaN.
    """

    epoch: int
    train_loss: float
    train_top1: float
    val_loss: float
    top1: float
    lr: float


def finetune(
    model: nn.Module,
    train_loader: Batches,
    val_loader: Batches,
    *,
    epochs: int = 50,
    lr: float = 1e-4,
    gating_lr: float = 0.1,
    weight_decay: float = 0.05,
    warmup_epochs: int = 5,
    label_smoothing: float = 0.1,
    drop_path_rate: float | None = None,
    device: torch.device | str | None = None,
    amp: bool = False,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    name: str = "fine-tuning",
) -> Iterator[EpochResult]:
    """Train ``model`` in place with AdamW, warm-up and cosine decay; yield after each epoch's validation.

    The model is validated in eval mode just before each yield, so whatever records eval-mode forwards has then seen
    exactly that epoch::

        with tcnn_probe.record(model, "run.zarr") as recorder:
            for result in finetune(model, train_loader, val_loader):
                recorder.mark(**dataclasses.asdict(result))

    Epoch 0, before any training, is yielded first. The defaults are the paper's, but for the weight decay, which it
    does not state (0.05 is DeiT's, whose recipe it follows).

    Args:
        model: any classifier; gates are looked for in its GPSA layers. Trained in place.
        train_loader, val_loader: batches of images (B, C, H, W) and class indices (B,).
        epochs: number of training epochs.
        lr, gating_lr: peak learning rates of the weights and of the gates.
        weight_decay: of matrices and filters, see :func:`~tcnn_model.parameter_groups`.
        warmup_epochs: epochs of linear warm-up from 0; must be fewer than ``epochs``.
        label_smoothing: in [0, 1).
        drop_path_rate: stochastic depth (:func:`~tcnn_model.training.optimization.set_drop_path`); None: its own.
        device: to train on; the model's own unless given.
        amp: bfloat16 autocast.
        seed: each epoch seeds Python's, NumPy's and torch's global generators with ``seed + epoch``, and those that
            the loaders have of their own, so a resumed run repeats what an uninterrupted one would have done. None
            leaves them alone.
        checkpoint: file written to the disk after each epoch, whole or not at all. If it exists the run resumes from
            it: its epochs are yielded again without being trained, the last one after a fresh validation.
        progress: show progress bars.
        name: of the progress bar.

    Yields:
        :class:`EpochResult`, epochs 0 to ``epochs``.

    Raises:
        ValueError: settings out of range; a checkpoint that is damaged or of a run with other settings; a loader
            without batches; with a seed, a training loader whose workers persist.
    """
    if epochs < 1 or not 0 <= warmup_epochs < epochs:
        raise ValueError(
            f"expected 0 <= warmup_epochs < epochs, got warmup_epochs={warmup_epochs}, epochs={epochs}: "
            f"give fewer warmup_epochs, or more epochs"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"expected label_smoothing in [0, 1), got {label_smoothing}")
    if len(train_loader) == 0 or len(val_loader) == 0:
        raise ValueError(f"empty loader: {len(train_loader)} training and {len(val_loader)} validation batches")
    if seed is not None:
        check_repeatable(train_loader)
    settings = {
        "epochs": epochs,
        "lr": lr,
        "gating_lr": gating_lr,
        "weight_decay": weight_decay,
        "warmup_epochs": warmup_epochs,
        "label_smoothing": label_smoothing,
        "drop_path_rate": drop_path_rate,
        "seed": seed,
        "steps_per_epoch": len(train_loader),
    }
    target = next(model.parameters()).device if device is None else torch.device(device)
    saved = None if checkpoint is None else read_checkpoint(checkpoint, settings, target)
    if drop_path_rate is not None and set_drop_path(model, drop_path_rate) == 0 and drop_path_rate > 0:
        raise ValueError(f"drop_path_rate={drop_path_rate}, but {type(model).__name__} has no block with a drop_path")
    model.to(target)
    optimizer = create_optimizer_v2(parameter_groups(model, lr, gating_lr, weight_decay), opt="adamw", lr=lr)
    steps = len(train_loader)
    schedule = CosineLRScheduler(optimizer, epochs * steps, warmup_t=warmup_epochs * steps, t_in_epochs=False)
    history: list[EpochResult] = []
    if saved is not None:  # after the schedule, which sets the learning rates back to their start
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        history = [EpochResult(**result) for result in saved["history"]]

    def train(epoch: int) -> tuple[float, float]:
        return _train_epoch(model, train_loader, optimizer, schedule, epoch, label_smoothing, target, amp, progress)

    def state() -> dict[str, Any]:
        weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return weights | {"settings": settings, "history": [asdict(result) for result in history]}

    def run() -> Iterator[EpochResult]:
        yield from history[:-1]
        # The last epoch of the checkpoint is validated again, for those who record.
        first = max(len(history) - 1, 0)
        with tqdm(total=epochs, initial=first, desc=name, unit="epoch", disable=not progress) as bar:
            for epoch in range(first, epochs + 1):
                if seed is not None:
                    seed_everything(seed + epoch, train_loader, val_loader)
                if epoch < len(history):
                    trained = (history[epoch].train_loss, history[epoch].train_top1)
                else:
                    trained = train(epoch) if epoch else (math.nan, math.nan)
                val_loss, top1 = evaluate(model, val_loader, device=target, amp=amp, progress=progress)
                rate = next((group["lr"] for group in optimizer.param_groups if group["name"] != "gates"), math.nan)
                result = EpochResult(epoch, *trained, val_loss, top1, rate)
                bar.set_postfix(top1=f"{top1:.3f}")
                bar.update(epoch > first)
                if epoch == len(history):
                    history.append(result)
                    if checkpoint is not None:
                        write_checkpoint(checkpoint, state())
                yield result

    return run()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Batches,
    *,
    device: torch.device | str | None = None,
    amp: bool = False,
    progress: bool = True,
) -> tuple[float, float]:
    """Mean cross-entropy (nats) and top-1 accuracy of ``model``, in eval mode; each module's mode is restored."""
    target = next(model.parameters()).device if device is None else torch.device(device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        total = torch.zeros(3, dtype=torch.float64, device=target)
        for images, labels in _with_bar(loader, "validating", progress):
            images, labels = images.to(target, non_blocking=True), labels.to(target, non_blocking=True)
            with torch.autocast(target.type, torch.bfloat16, enabled=amp):
                logits = model(images)
            total += _totals(logits, F.cross_entropy(logits.float(), labels), labels)
    finally:
        for module, training in modes.items():
            module.training = training
    loss, correct, count = total.tolist()
    return loss / count, correct / count


def _train_epoch(
    model: nn.Module,
    loader: Batches,
    optimizer: torch.optim.Optimizer,
    schedule: CosineLRScheduler,
    epoch: int,
    label_smoothing: float,
    device: torch.device,
    amp: bool,
    progress: bool,
) -> tuple[float, float]:
    criterion = LabelSmoothingCrossEntropy(label_smoothing)
    total = torch.zeros(3, dtype=torch.float64, device=device)
    model.train()
    for step, (images, labels) in enumerate(_with_bar(loader, f"epoch {epoch}", progress)):
        schedule.step_update((epoch - 1) * len(loader) + step)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        loss = criterion(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += _totals(logits, loss, labels)
    mean_loss, correct, count = total.tolist()
    return mean_loss / count, correct / count


def _with_bar(loader: Batches, description: str, progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
    # Not tqdm(loader): tqdm.auto opens a second iterator on what it wraps, and every image would be loaded twice.
    with tqdm(total=len(loader), desc=description, leave=False, disable=not progress) as bar:
        for batch in loader:
            yield batch
            bar.update()


@torch.no_grad()
def _totals(logits: Tensor, loss: Tensor, labels: Tensor) -> Tensor:
    """[sum of losses, number correct, number of images]."""
    correct = (logits.argmax(1) == labels).sum()
    return torch.stack([loss.double() * len(labels), correct.double(), correct.new_tensor(len(labels)).double()])
