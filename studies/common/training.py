"""A study's model, its data, its output folder, and the recipe of its trainings."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from common.data import Loaders, chance, loaders_for, own_model_and_data
from common.models import check_input, own_model, pretrained_model, small_resnet
from common.output import RunOutput, refused
from common.verdicts import learned
from tcnn_model import EpochResult, finetune, reparameterize
from tcnn_probe.images import as_images

__all__ = ["Study", "begin", "begin_single", "model_and_data", "small_loaders", "warmup"]

RECIPE = {
    "epochs": "epochs",
    "lr": "lr",
    "gating_lr": "gating_lr",
    "gating_min_lr": "gating_min_lr",
    "qk_lr": "qk_lr",
    "drop_path_rate": "drop_path",
    "seed": "seed",
}
"""Arguments of :func:`tcnn_model.finetune`, and the names of their options."""


def begin(
    name: str,
    args: argparse.Namespace,
    *,
    later: tuple[str, ...] = (),
    before: Callable[[nn.Module], Any] = lambda cnn: None,
) -> "Study":
    """Load the CNN and the data and open the output folder,
    or refuse before anything is trained or written.

    Args:
        name: Name of the study.
        args: Command line of the study.
        later: Options that do not affect training, and so may change when a run is resumed.
        before: Function of the CNN, called before anything is written; its ValueErrors and OSErrors
            are refusals.

    Raises:
        InputError: The CNN, the data or the output folder cannot be used; the message says why.
    """
    with refused(ValueError, RuntimeError, OSError):
        cnn, loaders = _convertible_cnn_and_data(args)
        before(cnn)
        output = RunOutput.from_args(args, name, later=later)
    return Study(args, cnn, output, loaders)


def begin_single(
    name: str,
    args: argparse.Namespace,
    small_model: Callable[[int], nn.Module],
    *,
    before: Callable[[nn.Module], Any] = lambda model: None,
) -> "Study":
    """Load the trained model that the user named and its images, or a small model and the digits,
    as :func:`begin` does.

    Args:
        name, args, before: Arguments of :func:`begin`.
        small_model: Function that builds the small model for scenes of a height and width.
    """
    # Initial weights and scenes are drawn from torch's global generator.
    torch.manual_seed(args.seed)
    loaders = images = None
    with refused(ValueError, RuntimeError, OSError):
        if args.model:
            # A trained model is examined as it classifies, in eval mode.
            model = pretrained_model(args).eval()
            images = as_images(args.image, model) if getattr(args, "image", None) else None
        else:
            loaders = small_loaders(args)
            model = small_model(args.img_size)
        before(model)
        output = RunOutput.from_args(args, name)
    return Study(args, model, output, loaders, images)


def warmup(epochs: int) -> int:
    """Return the epochs of warm-up: the paper's 5 (Sec. 3), fewer in short trainings."""
    return min(5, max(1, epochs // 5), epochs - 1)


@dataclass(frozen=True)
class Study:
    """Model, data and output folder of a study; its trainings resume where a killed run stopped.

    Args:
        args: Command line of the study.
        model: CNN, or the only model of the study, untrained or with the user's weights.
        output: Output folder, which keeps the checkpoints.
        loaders: Training and validation batches; None for a trained model.
        images: Images of the user, as the trained model takes them, shape (B, C, H, W).
    """

    args: argparse.Namespace
    model: Any
    output: RunOutput
    loaders: Loaders | None
    images: Tensor | None = None

    @property
    def validation(self) -> Any:
        """Validation set, with a label for each image."""
        assert self.loaders is not None
        return self.loaders[1].dataset

    @property
    def chance(self) -> float:
        """Accuracy of always naming the validation set's most frequent class."""
        return chance(self.validation)

    def learned(self, name: str, accuracy: float) -> bool:
        """Return whether a model beats chance, or was not trained here;
        print a line if it does not.
        """
        if self.loaders is None:
            return True
        return learned(name, accuracy, len(self.validation), self.chance)

    def with_cnn(self, args: argparse.Namespace) -> "Study":
        """Return the study with the CNN and the data of another command line;
        raise as :func:`begin` does.
        """
        with refused(ValueError, RuntimeError, OSError):
            cnn, loaders = _convertible_cnn_and_data(args)
        return replace(self, args=args, model=cnn, loaders=loaders)

    def with_seed(self, seed: int) -> "Study":
        """Return the study with the CNN of another seed, and its split of the data."""
        return self.with_cnn(argparse.Namespace(**{**vars(self.args), "seed": seed}))

    def train_cnn(
        self,
        file: str = "cnn",
        title: str = "training the CNN",
        after_epoch: Callable[[EpochResult], None] = lambda result: None,
    ) -> list[EpochResult]:
        """Train the CNN, and return the result of each epoch;
        a CNN that came with weights is left as it is.

        The optimizer is SGD with momentum, as in the T-CNN paper (Sec. 5), and AdamW on the digits:
        in 15 epochs AdamW reached an accuracy of 0.89, and SGD 0.26 at a learning rate of 0.1 and
        0.20 at 0.05 (one run each).
        """
        args = self.args
        if args.pretrained:
            return []
        recipe = {"epochs": args.cnn_epochs, "lr": args.cnn_lr, "seed": args.seed}
        if args.data != "digits":
            # The paper's optimizer for the CNN.
            recipe |= {"opt": "momentum", "weight_decay": 1e-4}
        return _exhausted(self._train(self.model, file, title, **recipe), after_epoch)

    def finetune(
        self,
        model: nn.Module,
        file: str,
        title: str,
        *,
        after_epoch: Callable[[EpochResult], None] = lambda result: None,
        **changes: Any,
    ) -> list[EpochResult]:
        """Fine-tune a model in place with the recipe of the command line, and return the result of
        each epoch; see :func:`tcnn_model.finetune`.

        Args:
            model: CNN, or a model that was converted from it.
            file: Name of the checkpoint, from which a killed run resumes.
            title: Title of the progress bar.
            after_epoch: Function that is called after each epoch's validation. A resumed run
                calls it for its first epochs too, with the last weights.
            **changes: Options of the recipe to change, such as ``epochs``, where a study compares
                recipes.
        """
        args = self.args
        recipe = {key: getattr(args, name) for key, name in RECIPE.items() if name in args}
        if getattr(args, "data", "digits") != "digits" and recipe.get("qk_lr") is None:
            # A few steps at the paper's rate would leave queries and keys where they start.
            recipe["qk_lr"] = "papers"
        return _exhausted(self._train(model, file, title, **recipe | changes), after_epoch)

    def record(
        self,
        model: nn.Module,
        store: Path,
        file: str,
        title: str,
        *,
        also: Callable[[EpochResult], Mapping[str, Any]] = lambda result: {},
        after_epoch: Callable[[EpochResult], None] | None = None,
        probes: Any = None,
        images: Any = None,
        **changes: Any,
    ) -> xr.Dataset:
        """Fine-tune a model with every head recorded, and return the recording.

        Args:
            model, file, title, after_epoch, changes: Arguments of :meth:`finetune`. The recorder
                does not count what ``after_epoch`` shows the model.
            store: Store of the recording.
            also: Function of an epoch's result that returns further values to mark.
            probes, images: Arguments of :func:`tcnn_probe.record`.
        """
        options = {} if images is None else {"images": images}
        with tcnn_probe.record(model, store, probes=probes, **options) as recorder:

            def mark(result: EpochResult) -> None:
                # A resumed run has marked its first epochs already.
                recorder.mark(if_marked="skip", **also(result), **asdict(result))
                if after_epoch is not None:
                    with recorder.pause():
                        after_epoch(result)

            self.finetune(model, file, title, after_epoch=mark, **changes)
            return recorder.dataset.load()

    def record_tcnn(
        self,
        store: Path,
        file: str = "tcnn",
        title: str = "the T-CNN",
        *,
        seed: int | None = None,
        start: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[nn.Module, xr.Dataset]:
        """Convert the CNN to a T-CNN and fine-tune it, with every head recorded;
        return it and the recording.

        Args:
            store, file, title, options: Arguments of :meth:`record`.
            seed: Seed of the new queries and keys, and of the training; None for ``--seed``.
            start: Options of :func:`tcnn_model.reparameterize`.
        """
        seed = self.args.seed if seed is None else seed
        torch.manual_seed(seed)
        tcnn = reparameterize(self.model, **start or {})
        return tcnn, self.record(tcnn, store, file, title, seed=seed, **options)

    def measure_epochs(
        self,
        train: Callable[..., Any],
        part: str,
        measure: Callable[[], xr.Dataset],
    ) -> tuple[Any, xr.Dataset]:
        """Run a training and measure after each epoch; return the result of the training,
        and the numbers with the accuracy along ``epoch``.

        A resumed run has the numbers of its first epochs, and not their weights.

        Args:
            train: Function that takes ``after_epoch``, such as a partial of :meth:`finetune`.
            part: Name of the numbers among the checkpoints.
            measure: Function that returns the numbers.
        """
        by_epoch = []

        def after_epoch(result: EpochResult) -> None:
            numbers = self.output.once(f"{part}-{result.epoch:04d}", measure)
            by_epoch.append(numbers.assign(top1=result.top1).assign_coords(epoch=result.epoch))

        trained = train(after_epoch=after_epoch)
        return trained, xr.concat(by_epoch, "epoch")

    def _train(
        self, model: nn.Module, file: str, title: str, *, epochs: int, **recipe: Any
    ) -> Iterator[EpochResult]:
        assert self.loaders is not None
        # Examples are a damaged checkpoint, and a --drop-path outside [0, 1).
        with refused(ValueError):
            yield from finetune(
                model,
                *self.loaders,
                epochs=epochs,
                warmup_epochs=warmup(epochs),
                checkpoint=self.output.checkpoints / f"{file}.pt",
                name=title,
                device=self.args.device,
                amp=self.args.amp,
                **recipe,
            )


def _exhausted(
    results: Iterator[EpochResult], after_epoch: Callable[[EpochResult], None]
) -> list[EpochResult]:
    history = []
    for result in results:
        after_epoch(result)
        history.append(result)
    return history


def small_loaders(args: argparse.Namespace) -> Loaders:
    """Return batches of digits for a small model, and let torch use a single thread."""
    # More threads speed up so small a model little, and slow it down tenfold on a shared machine.
    torch.set_num_threads(1)
    return loaders_for(args)


def _convertible_cnn_and_data(args: argparse.Namespace) -> tuple[nn.Module, Loaders]:
    """Return the CNN of the seed and its data; raise now,
    not after hours, if the CNN cannot be made a T-CNN.
    """
    torch.manual_seed(args.seed)
    cnn, loaders = model_and_data(args)
    reparameterize(cnn.to(args.device))
    return cnn, loaders


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, Loaders]:
    """Return the CNN, and training and validation batches for it."""
    if args.data != "digits":
        return own_model_and_data(args, args.img_size)
    if args.model is None:
        loaders = small_loaders(args)
        return small_resnet(getattr(args, "small_resnet", "ResNet")), loaders
    loaders = loaders_for(args)
    digits = [str(digit) for digit in range(10)]
    cnn = own_model(args, digits, in_chans=1)
    # A model that does not take the images is refused now, and not after the first epoch.
    check_input(cnn, loaders[1].dataset[0][0], len(digits))
    return cnn, loaders
