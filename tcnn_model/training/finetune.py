"""The fine-tuning of the T-CNN paper (Sec. 3, "Training details"), as an iterator over epochs."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from tcnn_model.training.checkpoint import read_checkpoint, write_checkpoint
from tcnn_model.training.evaluation import EpochResult
from tcnn_model.training.loop import Training, run
from tcnn_model.training.optimization import (
    create_optimizer,
    create_schedules,
    papers_qk_lr,
    rate_sums,
    set_drop_path,
    warn_of_stuck_gates,
)
from tcnn_model.training.seeding import check_repeatable, seed_everything
from tcnn_model.training.task import Classification, Criterion

__all__ = ["FinetuningResult", "finetune"]

Loader = DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FinetuningResult(EpochResult):
    """Result of an epoch, with the sums of learning rates over all steps so far.

    Adam and its variants move a weight by no more than about the sum of its learning rates.
    ``lr_sum`` is the sum for filters and matrices and ``qk_lr_sum`` the sum for GPSA's queries and
    keys, both in units of the weights' standard deviation before training; ``gating_lr_sum`` is the
    sum for the gates, in units of lambda. A sum is NaN if the model has no such weights.
    """

    lr_sum: float
    qk_lr_sum: float
    gating_lr_sum: float


def finetune(
    model: nn.Module,
    train_loader: Loader,
    val_loader: Loader,
    *,
    epochs: int = 50,
    opt: str = "adamw",
    lr: float = 1e-4,
    gating_lr: float = 0.1,
    qk_lr: float | Literal["papers"] | None = None,
    weight_decay: float = 0.05,
    warmup_epochs: int = 5,
    gating_warmup_epochs: int | None = None,
    gating_min_lr: float | None = None,
    label_smoothing: float = 0.1,
    drop_path_rate: float | None = None,
    device: torch.device | str | None = None,
    amp: bool = False,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    name: str = "fine-tuning",
) -> Iterator[FinetuningResult]:
    """Train ``model`` in place with AdamW, warm-up and cosine decay;
    yield a result after each epoch's validation.

    The model is validated in eval mode just before each yield, so that a recorder of eval-mode
    forwards has then seen exactly that epoch::

        with tcnn_probe.record(model, "run.zarr") as recorder:
            for result in finetune(model, train_loader, val_loader):
                recorder.mark(**dataclasses.asdict(result))

    Epoch 0, before any training, is yielded first. The defaults are the paper's, except for the
    weight decay, which the paper does not state (0.05 is that of DeiT, whose recipe the paper
    follows). The paper's learning rates are for 1,024 images per step: use smaller ones for smaller
    batches. The command ``tcnn-finetune``, which runs the same loop, also has the papers' recipes,
    data loading and augmentation.

    Args:
        model: Any classifier, which is trained in place. GPSA layers have gates, which get their
            own learning rate. In a model in training mode, modules that you have set to eval mode,
            such as batch norms, stay in it.
        train_loader, val_loader: Batches of images (B, C, H, W) and class indices (B,). Targets for
            training may also be class probabilities (B, K) that sum to 1, as timm's ``Mixup``
            returns them; ``label_smoothing`` does not apply to them.
        epochs: Number of training epochs.
        opt: timm's name of an optimizer. The paper has "momentum", SGD with momentum 0.9, for CNNs
            (Sec. 5).
        lr, gating_lr: Peak learning rates of the weights and of the gates, reached at the end of
            the warm-up, where the cosine begins.
        qk_lr: Peak learning rate of GPSA's queries and keys; None for ``lr``, as in the paper;
            "papers" for the rate with which the rates of all steps sum to 3.1, as in the paper's
            training, however short this one is (``papers_qk_lr`` of
            ``tcnn_model.training.optimization``).
        weight_decay: Weight decay of matrices and filters, see
            :func:`~tcnn_model.parameter_groups`.
        warmup_epochs: Epochs of linear warm-up from 0; must be fewer than ``epochs``.
        gating_warmup_epochs, gating_min_lr: Warm-up epochs and final learning rate of the gates;
            None for those of the weights.
        label_smoothing: Probability that is spread over all classes, in [0, 1), if targets are
            class indices.
        drop_path_rate: Rate of stochastic depth, increasing linearly over the blocks
            (``tcnn_model.training.optimization.set_drop_path``); None to leave the model's as it
            is.
        device: Device to train on; None for the model's.
        amp: Whether to use bfloat16 autocast.
        seed: Seed of the global generators of Python, NumPy and torch and of the loaders'
            generators. They are seeded in each epoch, so that a resumed run repeats an
            uninterrupted one. None leaves them alone.
        checkpoint: File that is replaced atomically after each epoch. If it exists, the run resumes
            from it: epochs that are done are yielded again without training, the last one after a
            new validation.
        progress: Whether to show progress bars.
        name: Name of the progress bar.

    Yields:
        :class:`FinetuningResult`, epochs 0 to ``epochs``.

    Raises:
        TypeError: A batch is not a pair of tensors.
        ValueError: Targets are neither indices of the model's classes nor class probabilities, as
            labels of several classes (multi-hot) are not; a setting is out of range; the checkpoint
            is damaged or belongs to a run with other settings; a loader has no batches; ``seed`` is
            given and the training loader has persistent workers.
    """
    if epochs < 1 or not 0 <= warmup_epochs < epochs:
        raise ValueError(
            f"expected 0 <= warmup_epochs < epochs, got warmup_epochs={warmup_epochs}, "
            f"epochs={epochs}: give fewer warmup_epochs, or more epochs"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"expected label_smoothing in [0, 1), got {label_smoothing}")
    try:
        steps, val_batches = len(train_loader), len(val_loader)
    except TypeError as error:
        raise TypeError(
            "expected loaders with a length, of which schedules are made, as DataLoader has one "
            f"unless its data set is an IterableDataset without __len__: {error}"
        ) from error
    if not steps or not val_batches:
        raise ValueError(f"empty loader: {steps} training and {val_batches} validation batches")
    if seed is not None:
        check_repeatable(train_loader)
    rates: dict[str, Any] = {
        "warmup_epochs": warmup_epochs,
        "gating_warmup_epochs": gating_warmup_epochs,
    }
    rates |= {"gating_min_lr": gating_min_lr, "epochs": epochs}
    optimizing: dict[str, Any] = {
        "opt": opt,
        "lr": lr,
        "gating_lr": gating_lr,
        "weight_decay": weight_decay,
    }
    optimizing["qk_lr"] = papers_qk_lr(epochs * len(train_loader)) if qk_lr == "papers" else qk_lr
    settings: dict[str, Any] = {
        **rates,
        **optimizing,
        "label_smoothing": label_smoothing,
        "seed": seed,
    }
    settings |= {"drop_path_rate": drop_path_rate, "steps_per_epoch": len(train_loader)}
    target = next(model.parameters()).device if device is None else torch.device(device)
    saved = None if checkpoint is None else read_checkpoint(checkpoint, settings, target)
    if (
        drop_path_rate is not None
        and set_drop_path(model, drop_path_rate) == 0
        and drop_path_rate > 0
    ):
        raise ValueError(
            f"drop_path_rate={drop_path_rate}, but {type(model).__name__} has no block with a "
            "drop_path"
        )
    model.to(target)
    optimizer = create_optimizer(model, **optimizing)
    warn_of_stuck_gates(model)
    # In a model in eval mode, it is unknown which modules the user wants to stay in it.
    frozen = [m for m in model.modules() if model.training and not m.training]
    training = Training(
        model=model,
        task=Classification(model, _criterion(label_smoothing)),
        optimizer=optimizer,
        schedules=create_schedules(optimizer, steps=len(train_loader), reaching_peak=True, **rates),
        device=target,
        amp=torch.bfloat16 if amp else None,
        seed=seed,
        frozen=frozen,
    )
    marks = [epoch * len(train_loader) for epoch in range(epochs + 1)]
    sums = rate_sums(model, optimizer, training.schedules, marks)
    if saved is not None:
        training.load_state_dict(saved)

    def save() -> None:
        if checkpoint is not None:
            write_checkpoint(checkpoint, {"settings": settings, **training.state_dict()})

    loaders = _Loaders(train_loader, val_loader, seed)
    results = run(training, loaders, epochs, after_epoch=save, progress=progress, name=name)
    return _with_sums(results, sums, name if progress else None)


def _criterion(label_smoothing: float) -> Criterion:
    """Return a loss that smooths class indices (B,),
    and takes class probabilities (B, K) as they are.
    """
    of_indices = LabelSmoothingCrossEntropy(label_smoothing)
    of_shares = SoftTargetCrossEntropy()

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        criterion: Criterion = of_indices if targets.ndim == 1 else of_shares
        return criterion(scores, targets)

    return loss


def _with_sums(
    results: Iterator[EpochResult], sums: list[dict[str, float]], name: str | None
) -> Iterator[FinetuningResult]:
    """Add the sums of learning rates to the results;
    if there is a name, print the final sums after it.
    """
    for result in results:
        yield FinetuningResult(**(asdict(result) | sums[result.epoch]))
    if name is not None:
        words = {
            "lr_sum": "weights",
            "qk_lr_sum": "queries and keys",
            "gating_lr_sum": "gates (in lambda)",
        }
        known = [
            f"{words[key]} {value:.3g}" for key, value in sums[-1].items() if not math.isnan(value)
        ]
        said = "sums of learning rates, in initial standard deviations"
        tqdm.write(f"{name}: {said}: {', '.join(known)}")


class _Loaders:
    """The user's loaders, whose generators are seeded in each epoch."""

    def __init__(self, train: Loader, validate: Loader, seed: int | None) -> None:
        self.per_epoch = len(train)
        self._train = train
        self._validate = validate
        self._seed = seed

    def begin(self, epoch: int) -> None:
        if self._seed is not None:
            seed_everything(self._seed + epoch, self._train, self._validate)

    def training(self, first: int) -> Iterable[tuple[Tensor, Tensor]]:
        assert first == 0  # finetune() writes checkpoints only at the end of an epoch
        return _Pairs(self._train, soft=True)

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        return _Pairs(self._validate, soft=False)


@dataclass(frozen=True)
class _Pairs:
    """A loader whose batches are checked.

    Args:
        loader: The user's loader.
        soft: Whether targets may be class probabilities.
    """

    loader: Loader
    soft: bool

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            yield _checked(batch, self.soft)


def _checked(batch: Any, soft: bool) -> tuple[Tensor, Tensor]:
    """Return images and targets of a batch, class indices as int64."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not pair or not all(isinstance(part, Tensor) for part in batch):
        content = type(batch).__name__
        if isinstance(batch, Mapping):
            content += f" of {', '.join(map(str, batch))}"
        elif isinstance(batch, (tuple, list)):
            content += f" of {', '.join(type(part).__name__ for part in batch)}"
        raise TypeError(
            f"expected batches of two tensors, images and labels, got a {content}: let the "
            "loader's collate_fn return such pairs"
        )
    images, targets = batch
    if targets.ndim == 1 and not targets.is_floating_point():
        return images, targets.long()
    sums = targets.float().sum(1) if targets.ndim == 2 else targets.new_zeros(1)
    # Mixup in bfloat16 has an error of up to 2^-8 in the sum.
    is_distribution = bool(((sums - 1).abs() < 0.01).all()) and bool((targets >= 0).all())
    if soft and is_distribution:
        return images, targets if targets.is_floating_point() else targets.float()
    expected = "class indices (B,)"
    if soft:
        expected += " or class probabilities (B, K) that sum to 1"
    given = f"{targets.dtype} of shape {tuple(targets.shape)}"
    if targets.ndim == 2:
        given += f", whose rows sum to {sums.min():g} to {sums.max():g}"
    if targets.ndim == 1:
        advice = "give labels.long()"
    elif targets.ndim == 2 and targets.shape[1] == 1:
        advice = "give labels[:, 0].long()"
    else:
        advice = (
            "for labels of several classes (multi-hot), which need a binary cross-entropy, use a "
            "loop of your own with tcnn_model.parameter_groups"
        )
    raise ValueError(f"expected targets to be {expected}, got {given}: {advice}")
