"""A study's CNN, its data, its output folder, and the recipe of its trainings."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from common.data import Loaders, chance, digits_loaders, own_model_and_data
from common.ending import refused
from common.models import check_input, own_model, small_resnet
from common.output import RunOutput
from tcnn_model import EpochResult, finetune, reparameterize

__all__ = ["Study", "begin", "model_and_data", "warmup"]


def begin(
    name: str,
    args: argparse.Namespace,
    *,
    stages: int,
    later: tuple[str, ...] = (),
    before: Callable[[nn.Module], Any] = lambda cnn: None,
) -> "Study":
    """Load the CNN and the data and open the output folder,
    or refuse before anything is trained or written.

    Args:
        name: Name of the study.
        args: Command line of the study, settled.
        stages: Number of trainings to come, for the progress bars.
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
    return Study(args, cnn, loaders, output, stages)


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, Loaders]:
    """Return the CNN, and training and validation batches for it."""
    if args.data != "digits":
        return own_model_and_data(args, args.img_size)
    loaders = digits_loaders(
        size=args.img_size,
        batch_size=args.batch_size,
        seed=args.seed,
        limit=args.limit,
        clutter=args.clutter,
    )
    if args.model is None:
        # More threads speed up so small a model little, and slow it down tenfold on a shared
        # machine.
        torch.set_num_threads(1)
        return small_resnet(getattr(args, "small_resnet", "ResNet")), loaders
    digits = [str(digit) for digit in range(10)]
    cnn = own_model(args, digits, in_chans=1)
    # A model that does not take the images is refused now, and not after the first epoch.
    check_input(cnn, loaders[1].dataset[0][0], len(digits))
    return cnn, loaders


def warmup(epochs: int) -> int:
    """Return the epochs of warm-up: the paper's 5 (Sec. 3), fewer in short trainings."""
    return min(5, max(1, epochs // 5), epochs - 1)


@dataclass
class Study:
    """CNN, data and output folder of a study; its trainings resume where a killed run stopped.

    Args:
        args: Command line of the study.
        cnn: CNN, untrained or with the user's weights.
        loaders: Training and validation batches.
        output: Output folder, which keeps the checkpoints.
        stages: Number of trainings, for the progress bars.
    """

    args: argparse.Namespace
    cnn: nn.Module
    loaders: Loaders
    output: RunOutput
    stages: int
    # Shared by the copies of a study with another CNN or other data, so that all its trainings are
    # numbered in a row.
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def validation(self) -> Any:
        """Validation set, with a label for each image."""
        return self.loaders[1].dataset

    @property
    def chance(self) -> float:
        """Accuracy of always naming the validation set's most frequent class."""
        return chance(self.validation)

    def with_cnn(self, args: argparse.Namespace) -> "Study":
        """Return the study with the CNN and the data of another command line;
        raise as :func:`begin` does.
        """
        with refused(ValueError, RuntimeError, OSError):
            cnn, loaders = _convertible_cnn_and_data(args)
        return replace(self, args=args, cnn=cnn, loaders=loaders)

    def train_cnn(self, file: str = "cnn", title: str = "training the CNN") -> list[EpochResult]:
        """Train the CNN to the end; see :meth:`cnn_epochs`."""
        return list(self.cnn_epochs(file, title))

    def cnn_epochs(self, file: str, title: str) -> Iterator[EpochResult]:
        """Train the CNN and yield after each epoch; a CNN that came with weights is left as it is.

        The optimizer is SGD with momentum, as in the T-CNN paper (Sec. 5), and AdamW on the digits:
        in 15 epochs AdamW reached an accuracy of 0.89, and SGD 0.26 at a learning rate of 0.1 and
        0.20 at 0.05 (one run each).
        """
        if self.args.pretrained:
            next(self._numbers)  # the number of stages includes this training
            return
        recipe = {
            "epochs": self.args.cnn_epochs,
            "lr": self.args.cnn_lr,
            "seed": self.args.seed,
        }
        if self.args.data != "digits":
            # The paper's optimizer for the CNN.
            recipe |= {"opt": "momentum", "weight_decay": 1e-4}
        yield from self._train(self.cnn, file, title, **recipe)

    def finetune(
        self,
        model: nn.Module,
        file: str,
        title: str,
        *,
        seed: int | None = None,
        **changes: Any,
    ) -> Iterator[EpochResult]:
        """Fine-tune a model in place with the recipe of the command line;
        see :func:`tcnn_model.finetune`.

        Args:
            model: CNN, or a model that was converted from it.
            file: Name of the checkpoint, from which a killed run resumes.
            title: Title of the progress bar.
            seed: Seed of the training; None for ``--seed``.
            **changes: Options of the recipe to change, such as ``epochs``, where a study compares
                recipes.
        """
        args = self.args
        qk_lr = args.qk_lr
        if qk_lr is None and args.data != "digits":
            # A few steps at the paper's rate would leave queries and keys where they start.
            qk_lr = "papers"
        recipe = {
            "epochs": args.epochs,
            "lr": args.lr,
            "gating_lr": args.gating_lr,
            "gating_min_lr": args.gating_min_lr,
            "qk_lr": qk_lr,
            "drop_path_rate": args.drop_path,
            "seed": args.seed if seed is None else seed,
        }
        return self._train(model, file, title, **{**recipe, **changes})

    def _train(
        self, model: nn.Module, file: str, title: str, *, epochs: int, **recipe: Any
    ) -> Iterator[EpochResult]:
        number = next(self._numbers)
        # Examples are a damaged checkpoint, and a --drop-path outside [0, 1).
        with refused(ValueError):
            yield from finetune(
                model,
                *self.loaders,
                epochs=epochs,
                warmup_epochs=warmup(epochs),
                checkpoint=self.output.checkpoints / f"{file}.pt",
                name=f"{number}/{self.stages} {title}",
                device=self.args.device,
                amp=self.args.amp,
                **recipe,
            )


def _convertible_cnn_and_data(args: argparse.Namespace) -> tuple[nn.Module, Loaders]:
    """Return the CNN of the seed and its data; raise now,
    not after hours, if the CNN cannot be made a T-CNN.
    """
    torch.manual_seed(args.seed)
    cnn, loaders = model_and_data(args)
    reparameterize(cnn.to(args.device))
    return cnn, loaders
