"""The training loop, which ``finetune``, the command ``tcnn-finetune`` and the studies share.

Random number generators are seeded in each step with the run's seed, the epoch and the step. Their
state therefore need not be saved, and a run that is resumed at any step gives the same results as
one that was not interrupted.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from tqdm.auto import tqdm

from tcnn_model.training.evaluation import AveragedResult, EpochResult, evaluate, totals
from tcnn_model.training.seeding import seed_everything, seed_of
from tcnn_model.training.sharding import gather_state, shard_optimizer, shard_state

__all__ = ["Batches", "NonFiniteLossError", "StopRequested", "Training", "run"]

Batch = tuple[Tensor, Tensor]


class StopRequested(Exception):  # noqa: N818 (nothing went wrong)
    """The training was asked to stop, and a checkpoint to resume it is on disk;
    ``signal`` is the signal's number.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class NonFiniteLossError(ArithmeticError):
    """The loss is infinite or NaN; ``images`` and ``targets`` are the batch with this loss."""

    def __init__(self, message: str, images: Tensor, targets: Tensor) -> None:
        super().__init__(message)
        self.images = images
        self.targets = targets


class Batches(Protocol):
    """Batches of images for training and validation."""

    per_epoch: int
    """Number of batches in an epoch."""

    def begin(self, epoch: int) -> None:
        """Prepare an epoch before its batches are drawn."""

    def training(self, first: int) -> Iterable[Batch]:
        """Return the epoch's batches from batch number ``first`` on."""

    def validation(self) -> Iterable[Batch]:
        """Return the validation batches, which are the same in each epoch."""


@dataclass
class Training:
    """A model, its optimizer and task, and its progress.

    Args:
        model: Model without wrappers.
        task: Function from images and targets to a mapping with "loss", "output" (the class scores)
            and, if they differ from the batch's, "targets".
        optimizer: Optimizer of the model's parameters.
        schedules: Learning-rate schedules of timm, updated before each step of the optimizer.
        device: Device of the model.
        amp: Dtype of autocast; None for no autocast.
        accumulate: Number of batches in a step of the optimizer.
        clip_grad: Largest norm of the gradient; None for no limit.
        mix: Function that mixes the images of a batch and turns class indices into class
            probabilities (timm's ``Mixup``).
        seed: Seed of the random numbers in each step; None to leave the generators alone.
        ema: Moving average of the weights.
        frozen: Modules that stay in eval mode, so that their running statistics stay as they are.
        channels_last: Whether images have this memory layout.
        no_sync: Context manager that suspends the synchronisation of gradients; entered for all
            batches of a step but the last.
        gathered: Context manager that gathers the parameters of a sharded model for validation.
        over_ranks: Function that sums totals over processes.
        agree: Function that gives a model in all processes the running statistics of the first
            process.
        rank: Rank of this process.
        history: Results so far.
        epoch, step: The epoch that is being trained, and the number of optimizer steps made in it.
        total: [sum of losses, number correct, number of images] in this epoch.
    """

    model: nn.Module
    task: Callable[[Tensor, Tensor], Mapping[str, Tensor]]
    optimizer: torch.optim.Optimizer
    schedules: list[Any]
    device: torch.device
    amp: torch.dtype | None = None
    accumulate: int = 1
    clip_grad: float | None = None
    mix: Callable[[Tensor, Tensor], Batch] | None = None
    seed: int | None = None
    ema: ModelEmaV3 | None = None
    frozen: list[nn.Module] = field(default_factory=list)
    channels_last: bool = False
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    gathered: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    over_ranks: Callable[[Tensor], Tensor] = lambda total: total
    agree: Callable[[nn.Module], object] = lambda model: None
    rank: int = 0
    history: list[EpochResult] = field(default_factory=list)
    epoch: int = 0
    step: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def __post_init__(self) -> None:
        # Gradients in float16 underflow without scaling; bfloat16 has the range of float32.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp == torch.float16)

    @property
    def lr(self) -> float:
        """Current learning rate of the weights; NaN if only gates are trained."""
        names = ("decayed", "undecayed")
        rates = [group["lr"] for group in self.optimizer.param_groups if group["name"] in names]
        return rates[0] if rates else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training as tensors and plain values;
        all processes must call this together.
        """
        return {
            "model": gather_state(self.model.state_dict()),
            "optimizer": gather_state(self.optimizer.state_dict()),
            "schedules": [_plain(schedule.state_dict()) for schedule in self.schedules],
            "scaler": self.scaler.state_dict(),
            "ema": None if self.ema is None else gather_state(self.ema.module.state_dict()),
            "history": [asdict(result) for result in self.history],
            "epoch": self.epoch,
            "step": self.step,
            "total": self.over_ranks(self.total).cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.model.load_state_dict(shard_state(state["model"], self.model))
        # torch casts the state to the dtype and device of the parameters but does not shard it.
        self.optimizer.load_state_dict(state["optimizer"])
        shard_optimizer(self.optimizer)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.module.load_state_dict(shard_state(state["ema"], self.ema.module))
        kind = EpochResult if self.ema is None else AveragedResult
        self.history = [kind(**result) for result in state["history"]]
        self.epoch = state["epoch"]
        self.step = state["step"]
        # The saved total is the sum over processes, so only the first process takes it.
        self.total = state["total"].to("cpu") * (self.rank == 0)

    def train_mode(self) -> None:
        """Set training mode, except for frozen modules."""
        self.model.train()
        for module in self.frozen:
            module.eval()

    def validate(
        self,
        model: nn.Module,
        batches: "Batches",
        progress: bool,
        after_batch: Callable[[], None] = lambda: None,
    ) -> tuple[float, float]:
        """Compute the validation loss and accuracy of the model,
        or of the moving average of its weights.
        """
        # Batch norms of each process have seen different images. Checkpoints keep the statistics of
        # the first process, so every process validates with these.
        self.agree(model)
        with self.gathered(model):
            return evaluate(
                model,
                batches.validation(),
                device=self.device,
                amp=self.amp,
                progress=progress,
                over_ranks=self.over_ranks,
                after_batch=after_batch,
            )

    def make_step(self, batches: tuple[Batch, ...], update: int) -> None:
        """Make one optimizer step with the mean gradient of these batches."""
        for schedule in self.schedules:
            schedule.step_update(update)
        self.optimizer.zero_grad(set_to_none=True)
        for number, (images, targets) in enumerate(batches):
            if self.seed is not None:
                seed_everything(
                    # The rank is included, as otherwise mixup and dropout would be the same in all
                    # processes.
                    seed_of(self.seed, self.epoch, self.step, number, self.rank)
                )
            last = number == len(batches) - 1
            # Gradients are synchronised once per step, in the backward pass of the last batch.
            with nullcontext() if last else self.no_sync():
                self._backward(images, targets, len(batches))
        if self.clip_grad is not None:
            # The limit applies to the true gradient, not to the scaled one.
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # The average is updated after the step, so that it includes the newest weights.
        if self.ema is not None:
            self.ema.update(self.model)
        self.step += 1

    def _backward(self, images: Tensor, targets: Tensor, parts: int) -> None:
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        images = images.to(self.device, non_blocking=True, memory_format=layout)
        targets = targets.to(self.device, non_blocking=True)
        if self.mix is not None:
            images, targets = self.mix(images, targets)
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            result = self.task(images, targets)
        loss = result["loss"]
        logits = result["output"]
        # All processes stop together, because the others would wait for the gradient of one that
        # stops alone.
        total_loss = float(self.over_ranks(loss.detach()))
        if not math.isfinite(total_loss):
            place = f"epoch {self.epoch}, step {self.step + 1}"
            raise NonFiniteLossError(f"the loss is {total_loss:g} in {place}", images, targets)
        # After the division the accumulated gradient is a mean, so that clipping sees the norm that
        # one large batch would have.
        self.scaler.scale(loss / parts).backward()
        self.total += totals(logits, loss, result.get("targets", targets)).cpu()


def run(
    training: Training,
    batches: Batches,
    epochs: int,
    *,
    before_epoch: Callable[[int], None] = lambda epoch: None,
    after_step: Callable[[], None] = lambda: None,
    while_validating: Callable[[], None] = lambda: None,
    after_epoch: Callable[[], None] = lambda: None,
    progress: bool = True,
    name: str = "training",
) -> Iterator[EpochResult]:
    """Train and validate epoch by epoch, starting from the state of the training; yield results.

    Results in the history are yielded again without training, the last one after a new validation,
    which recorders need.

    Args:
        training: Training, changed in place.
        batches: Batches of images.
        epochs: Number of the last epoch.
        before_epoch: Function that is called with the number of an epoch before its training begins
            or is resumed.
        after_step: Function that is called after each step of the optimizer.
        while_validating: Function that is called after each validation batch.
        after_epoch: Function that is called after an epoch's result is added to the history.
        progress: Whether to show progress bars.
        name: Name of the progress bar.
    """
    # In the middle of an epoch, the model is no longer that of the last result in the history.
    within = training.step > 0
    first = max(len(training.history) - (not within), 0)
    yield from training.history[:first]
    with tqdm(total=epochs, initial=first, desc=name, unit="epoch", disable=not progress) as bar:
        for epoch in range(first, epochs + 1):
            known = training.history[epoch] if epoch < len(training.history) else None
            if known is not None:
                batches.begin(epoch)
                trained = (known.train_loss, known.train_top1)
            elif epoch == 0:
                batches.begin(epoch)
                trained = (math.nan, math.nan)
            else:
                before_epoch(epoch)
                _train_epoch(training, batches, epoch, after_step, progress)
                trained = _means(training)
            validated = training.validate(training.model, batches, progress, while_validating)
            result = EpochResult(epoch, *trained, *validated, training.lr)
            if training.ema is not None:
                average = training.validate(
                    training.ema.module, batches, progress, while_validating
                )
                result = AveragedResult(
                    **asdict(result), ema_val_loss=average[0], ema_top1=average[1]
                )
            bar.set_postfix(top1=f"{result.top1:.3f}", refresh=False)
            # The first epoch here is in the history, which `initial` counts, or is epoch 0, which
            # has no training.
            bar.update(epoch > first)
            if known is None:
                training.history.append(result)
                training.epoch = epoch + 1
                training.step = 0
                training.total = torch.zeros_like(training.total)
                after_epoch()
            yield result


def _train_epoch(
    training: Training,
    batches: Batches,
    epoch: int,
    after_step: Callable[[], None],
    progress: bool,
) -> None:
    training.epoch = epoch
    training.train_mode()
    steps = math.ceil(batches.per_epoch / training.accumulate)
    batches.begin(epoch)
    images = iter(batches.training(training.step * training.accumulate))
    with tqdm(
        total=steps,
        initial=training.step,
        desc=f"epoch {epoch}",
        leave=False,
        disable=not progress,
    ) as bar:
        while group := tuple(islice(images, training.accumulate)):
            training.make_step(group, (epoch - 1) * steps + training.step)
            bar.update()
            rate = bar.format_dict["rate"]  # steps per second; None at first
            if rate and progress:
                loss, top1, _ = (training.total / training.total[2]).tolist()
                images_a_step = sum(len(targets) for _, targets in group)
                figures = {
                    "images/s": f"{rate * images_a_step:.0f}",
                    "loss": f"{loss:.3f}",
                    "top1": f"{top1:.3f}",
                }
                bar.set_postfix(figures, refresh=False)
            after_step()


def _means(training: Training) -> tuple[float, float]:
    # Sums are added over processes, not means, as processes may have seen different numbers of
    # images.
    loss, correct, count = training.over_ranks(training.total).tolist()
    return loss / count, correct / count


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    # Checkpoints are read with weights_only=True, which refuses other objects that a schedule may
    # hold.
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, bool | int | float | str | list | None)
    }
