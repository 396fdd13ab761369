"""``tcnn-finetune MODEL --data FOLDER --recipe NAME``: train a model of timm as the papers do."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from torch import nn

from tcnn_model.class_folders import describe
from tcnn_model.gpsa.layer import gpsa_layers
from tcnn_model.training.build import build_model, build_training, convert
from tcnn_model.training.config import Config, parse
from tcnn_model.training.data import Images, create_transforms
from tcnn_model.training.distributed import joined
from tcnn_model.training.evaluation import EpochResult, best_result
from tcnn_model.training.loop import NonFiniteLossError, StopRequested, Training, run
from tcnn_model.training.session import RunFolder, Stopping, say
from tcnn_model.training.sources import Source, open_sources
from tcnn_model.training.watching import Watching

__all__ = ["main", "train"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 if the training ended or was stopped by a signal, 130 if it was stopped
        by Ctrl-C, 2 if settings, data or the disk do not allow it to continue, 3 if the loss is not
        finite.
    """
    folder: Path | None = None
    try:
        config, resume = parse(arguments)
        folder = Path(config.out)
        for _ in train(config, resume=resume):
            pass
    except (ValueError, OSError) as error:
        print(f"tcnn-finetune: {error}", file=sys.stderr)
        return 2
    except NonFiniteLossError as error:
        print(f"tcnn-finetune: {error}", file=sys.stderr)
        return 3
    except StopRequested as stop:
        print(
            f"stopped {stop}; go on with: {_command()} --resume --out {folder}",
            file=sys.stderr,
        )
        # 130 is the status that shells give after Ctrl-C. A job that a scheduler asked to stop has
        # not failed.
        return 130 if stop.signal == signal.SIGINT else 0
    except KeyboardInterrupt:
        begun = folder is not None and (folder / "config.toml").exists()
        hint = (
            f"; go on from the last checkpoint with: {_command()} --resume --out {folder}"
            if begun
            else ""
        )
        print(f"tcnn-finetune: interrupted{hint}", file=sys.stderr)
        return 130
    return 0


def _command() -> str:
    """Return the command without its options; a run of several processes goes on with as many."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return "torchrun ... -m tcnn_model.training" if processes > 1 else "tcnn-finetune"


def train(config: Config, *, resume: bool = False, progress: bool = True) -> Iterator[EpochResult]:
    """Run a training in its folder; yield each result after the watcher has received it.

    Args:
        config: Settings, with learning rates that are not scaled yet.
        resume: Whether to resume the run that is in the folder.
        progress: Whether to show progress bars.

    Raises:
        ValueError: The settings, the data and the folder do not fit together.
        OSError: More images are unreadable than ``max_unreadable`` allows, or a checkpoint cannot
            be written.
        NonFiniteLossError: The loss is not finite; the batch is then saved in the folder.
        StopRequested: SIGTERM, SIGUSR1 or Ctrl-C was received, and a checkpoint was written.
    """
    with joined(config.device) as processes, ExitStack() as stack:
        folder = RunFolder(config, processes)
        stopping = Stopping(processes)
        if not resume:
            folder.check_free()  # before images are opened, which may take minutes
        training, images = _prepare(config, folder)
        stack.enter_context(folder.locked())
        if resume:
            folder.load(training, images.per_epoch // config.accumulate)
        else:
            folder.check_free()  # another process may have begun a run since
        folder.begin()
        progress = progress and processes.first
        stack.enter_context(stopping.listening())
        yield from _epochs(training, images, config, folder, stopping, progress)
        _summary(training, images, folder)


def _prepare(config: Config, folder: RunFolder) -> tuple[Training, Images]:
    processes = folder.processes
    sources = open_sources(
        config.data,
        config.dataset,
        (config.train_split, config.val_split),
        config.coarse_labels,
    )
    for use, source in zip(("training", "validation"), sources, strict=True):
        say(f"{use}: {describe(source)}", processes)
    classes = sources[0].classes
    folder.classes = None if classes is None else [*classes]
    model, data = build_model(
        config,
        _count(sources[0], config),
        len(sources[0]),
        report=lambda text: say(text, processes),
        names=folder.classes,
    )
    images = Images(*sources, create_transforms(config, data), config, processes)
    steps = images.per_epoch // config.accumulate
    _say_rates(folder, model, len(sources[0]))
    return build_training(folder.scaled, model, steps, processes), images


def _say_rates(folder: RunFolder, model: nn.Module, images: int) -> None:
    """Print all learning rates as they are used, and how to keep those of the paper."""
    config, count = folder.config, folder.processes.count
    gated = config.reparameterize_at is not None or gpsa_layers(model)
    rates = [
        f"{name} {rate:g}"
        for name, rate in folder.rates.items()
        if gated or name not in ("qk_lr", "gating_lr", "gating_min_lr")
    ]
    say(f"learning rates as used: {', '.join(rates)}", folder.processes)
    batch = config.batch_size * config.accumulate * count
    if config.paper_batch in (None, batch):
        return
    largest = min(config.paper_batch, config.limit or images, images)
    accumulate = max(largest // (config.batch_size * count), 1)
    advice = [f"--paper-batch {batch} keeps the paper's rates"]
    if accumulate != config.accumulate:
        step = accumulate * config.batch_size * count
        images_allow = ", the most that the data allow" if step < config.paper_batch else ""
        advice.append(f"--accumulate {accumulate} makes steps of {step} images{images_allow}")
    say(
        f"{batch} images a step ({config.batch_size} x {config.accumulate} accumulated x "
        f"{count} processes), {config.paper_batch} in the paper: rates are scaled by "
        f"{batch / config.paper_batch:.3g}, except that of the gates; {'; '.join(advice)}",
        folder.processes,
    )


def _count(source: Source, config: Config) -> int:
    if source.classes is not None:
        return len(source.classes)
    if config.num_classes is None:
        raise ValueError("num_classes: the data does not say how many classes it has")
    return config.num_classes


def _epochs(
    training: Training,
    images: Images,
    config: Config,
    folder: RunFolder,
    stopping: Stopping,
    progress: bool,
) -> Iterator[EpochResult]:
    steps = images.per_epoch // config.accumulate

    def before_epoch(epoch: int) -> None:
        due = config.reparameterize_at is not None and epoch > config.reparameterize_at
        if due and convert(training, folder.scaled, steps, folder.processes):
            # The GPSA layers are new modules, which have no hooks yet.
            watching.attach()

    watching = Watching(training, config, folder)
    results = run(
        training,
        images,
        config.epochs,
        before_epoch=before_epoch,
        after_step=lambda: folder.after_step(training, stopping),
        while_validating=lambda: folder.while_validating(training, stopping),
        after_epoch=lambda: folder.after_epoch(training, stopping),
        progress=progress,
        name=config.model,
    )
    try:
        for result in results:
            watching(asdict(result))
            yield result
    except NonFiniteLossError as error:
        path = folder.keep_batch(error.images, error.targets, str(error))
        raise NonFiniteLossError(
            f"{error}; the batch is in {path}", error.images, error.targets
        ) from error
    finally:
        watching.close()


def _summary(training: Training, images: Images, folder: RunFolder) -> None:
    best = best_result(training.history)
    last = training.history[-1]
    weights = "lost"
    if folder.has_best(training):
        weights = f"{folder.path / 'best.pt'} (--weights takes them)"
    lines = [
        f"epoch {last.epoch}: top-1 {last.top1:.4f}; best in epoch {best.epoch}: {best.top1:.4f}",
        f"its weights: {weights}; all epochs: {folder.path / 'epochs.csv'}",
    ]
    if images.unreadable:
        lines.append(f"{len(images.unreadable)} images were skipped, as they cannot be read")
    say("\n".join(lines), folder.processes)
