"""The trainings of the studies of Transformed CNNs: a CNN, the CNN for longer, and its T-CNN."""

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import nn
from torch.utils.data import DataLoader

import tcnn_probe
from common.data import Loaders, chance, digits_loaders, own_model_and_data
from common.ending import refused
from common.models import check_input, own_model, small_resnet, small_vit
from common.options import (
    NOT_SAVED,
    add_data,
    add_machine,
    check_data_options,
    fill_in,
    from_least,
    need_model,
    positive_number,
)
from common.output import RunOutput
from tcnn_model import EpochResult, finetune, reparameterize, unstride

__all__ = [
    "CONTROLS",
    "Training",
    "add_controls",
    "add_training",
    "begin",
    "count_controls",
    "settle",
    "warmup",
]

PAPER_BATCH = 1024
"""Images of a step that the paper's rates of 1e-4 and 0.1 are for."""

CONTROLS = {
    "control": "CNN, fine-tuned",
    "unstrided": "CNN at stride 1, fine-tuned",
    "matched": "T-CNN from the CNN at stride 1, fine-tuned",
}
"""What figures and tables call the models of :meth:`Training.controls`."""


def add_training(
    parser: argparse.ArgumentParser, *, small: str, several: str = ""
) -> None:
    """Options for the model, the data and the training.

    Args:
        parser: of the study.
        small: what else ``--small`` changes.
        several: what the study does with several models; empty if it takes one.
    """
    add_data(
        parser,
        model=f"timm name of a CNN (default: a small ResNet built from timm){several}",
        pretrained="start from timm's weights, or from those in FILE, instead of training the CNN",
        img_size="height and width of the images (default: 64; 224 for --data)",
        several=bool(several),
    )
    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--epochs",
        type=from_least(1),
        help="of fine-tuning (default: 6; 50 for --data)",
    )
    add(
        "--cnn-epochs",
        type=from_least(1),
        help="of the CNN before, unless --pretrained (default: 15; --epochs for --data)",
    )
    add(
        "--batch-size",
        type=from_least(1),
        help="images per step (default: 32; 256 for --data; the paper's is 1024)",
    )
    add(
        "--lr",
        type=positive_number,
        help="of fine-tuning (default: 1e-3; for --data the paper's, 1e-4 for batches of 1024, less for smaller ones)",
    )
    add(
        "--cnn-lr",
        type=positive_number,
        help="of training the CNN (default: 1e-2; for --data 0.1 for batches of 256)",
    )
    qk_lr = "of queries and keys (default: --lr; for --data what sums to the paper's 3.1, however few the steps)"
    add("--qk-lr", type=positive_number, help=qk_lr)
    add(
        "--gating-lr",
        type=positive_number,
        help="of the gates (default: 0.1; for --data the paper's, as --lr)",
    )
    add(
        "--gating-min-lr",
        type=positive_number,
        help="rate that the gates end at (default: annealed as the weights')",
    )
    add(
        "--drop-path",
        type=float,
        help="stochastic depth in fine-tuning (default: the model's own)",
    )
    add_machine(group, small=small)


def add_controls(parser: argparse.ArgumentParser) -> None:
    """The option for a second control."""
    help_ = "a second control: the CNN with its last stage at stride 1 like the T-CNN's, without attention"
    group = parser.add_argument_group("controls")
    group.add_argument("--unstrided", action="store_true", help=help_)
    help_ = "a third control: the T-CNN that starts as the CNN at stride 1, so that start and grid are both the same"
    group.add_argument("--matched-start", action="store_true", help=help_)


def count_controls(args: argparse.Namespace) -> int:
    """Return the number of trainings beside that of the T-CNN that :meth:`Training.controls` does."""
    return 1 + args.unstrided + args.matched_start


def settle(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *,
    digits: Mapping[str, Any] | None = None,
) -> None:
    """Refuse options that do not go together, and set those that the user did not give.

    Args:
        parser, args: of the study.
        digits: the study's own defaults for the digits.
    """
    on_digits = args.data == "digits"
    if args.pretrained or not on_digits:
        need_model(parser, args)
    check_data_options(parser, args)
    defaults = {
        "img_size": 64,
        "epochs": 6,
        "cnn_epochs": 15,
        "batch_size": 32,
        "clutter": 6,
    }
    defaults |= {"lr": 1e-3, "gating_lr": 0.1, "cnn_lr": 1e-2}
    defaults |= digits or {}
    if args.small:
        defaults |= {
            "img_size": 32,
            "epochs": 4,
            "cnn_epochs": 4,
            "batch_size": 16,
            "limit": 280,
            "clutter": 0,
        }
        defaults |= {"lr": 3e-3, "cnn_lr": 2e-2}
    if not on_digits:
        defaults = {"img_size": 224, "epochs": 50, "batch_size": 256}
        share = (args.batch_size or defaults["batch_size"]) / PAPER_BATCH
        defaults |= {
            "lr": 1e-4 * share,
            "gating_lr": 0.1 * share,
            "cnn_lr": 0.4 * share,
        }
    fill_in(args, defaults)
    if args.cnn_epochs is None:
        args.cnn_epochs = args.epochs


def begin(
    study: str,
    args: argparse.Namespace,
    *,
    stages: int,
    later: tuple[str, ...] = (),
    before: Callable[[nn.Module], Any] = lambda cnn: None,
) -> "Training":
    """Model, data and output folder; refuses what is not possible before anything is trained or written.

    Args:
        study: its name.
        args: its command line, settled.
        stages: how many trainings there will be, for the progress bars.
        later: options that leave the training as it is, and so may change when a run is resumed.
        before: called with the CNN before anything is written; its ValueErrors and OSErrors are refusals.

    Raises:
        InputError: with the reason.
    """
    options = {
        name: value for name, value in vars(args).items() if name not in NOT_SAVED
    }
    torch.manual_seed(args.seed)
    with refused(ValueError, RuntimeError, OSError):
        cnn, loaders = model_and_data(args)
        reparameterize(cnn.to(args.device))
        before(cnn)
        output = RunOutput(
            args.out,
            study,
            options,
            later=later,
            resume=args.resume,
            overwrite=args.overwrite,
        )
    return Training(args, cnn, loaders, output, stages)


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, Loaders]:
    """The CNN, and training and validation batches for it."""
    if args.data != "digits":
        return own_model_and_data(args, args.img_size)
    size, batch_size = args.img_size, args.batch_size
    loaders = digits_loaders(
        size=size,
        batch_size=batch_size,
        seed=args.seed,
        limit=args.limit,
        clutter=args.clutter,
    )
    if args.model is None:
        torch.set_num_threads(
            1
        )  # more bring it little, and cost it tenfold where the machine is shared
        return small_resnet(getattr(args, "small_resnet", "ResNet")), loaders
    digits = [str(digit) for digit in range(10)]
    cnn = own_model(args, digits, in_chans=1)
    check_input(cnn, loaders[1].dataset[0][0], len(digits))
    return cnn, loaders


def warmup(epochs: int) -> int:
    """Epochs of warm-up: the paper's 5 (Sec. 3), less of short trainings."""
    return min(5, max(1, epochs // 5), epochs - 1)


@dataclass
class Training:
    """A study's trainings, each continued where a killed run left it.

    Args:
        args: the study's command line.
        cnn: untrained or with the user's weights.
        loaders: training and validation batches.
        output: where checkpoints go.
        stages: how many trainings there will be.
    """

    args: argparse.Namespace
    cnn: nn.Module
    loaders: Loaders
    output: RunOutput
    stages: int
    _numbers: Iterator[int] = field(
        default_factory=lambda: count(1)
    )  # of all trainings of the study

    @property
    def chance(self) -> float:
        """The accuracy of always naming the validation set's most frequent class."""
        return chance(self.loaders[1].dataset)

    def other(self, args: argparse.Namespace) -> "Training":
        """Trainings of the same study from another CNN; refused as by :func:`begin`."""
        torch.manual_seed(args.seed)
        with refused(ValueError, RuntimeError, OSError):
            cnn, loaders = model_and_data(args)
            reparameterize(cnn.to(args.device))
        return replace(self, args=args, cnn=cnn, loaders=loaders)

    def train_cnn(
        self, file: str = "cnn", title: str = "training the CNN"
    ) -> list[EpochResult]:
        """Train the CNN to the end; see :meth:`cnn_epochs`."""
        return list(self.cnn_epochs(file, title))

    def cnn_epochs(self, file: str, title: str) -> Iterator[EpochResult]:
        """Train the CNN; if it came with weights, it is taken as it is and nothing is yielded.

        With SGD and momentum, as the T-CNN paper has it (Sec. 5). On the digits with AdamW: in 15 epochs it came to an
        accuracy of 0.89, SGD to 0.26 at a rate of 0.1 and to 0.20 at 0.05 (one run each).
        """
        if self.args.pretrained:
            next(self._numbers)
            return
        recipe = {
            "epochs": self.args.cnn_epochs,
            "lr": self.args.cnn_lr,
            "seed": self.args.seed,
        }
        if self.args.data != "digits":
            recipe |= {"opt": "momentum", "weight_decay": 1e-4}
        yield from self._train(self.cnn, file, title, **recipe)

    def fine_tune(
        self,
        model: nn.Module,
        file: str,
        title: str,
        *,
        seed: int | None = None,
        **changed: Any,
    ) -> Iterator[EpochResult]:
        """Fine-tune a model, the CNN or what was made of it, with the recipe that all have.

        Args:
            model: trained in place.
            file: name of its checkpoint.
            title: of the progress bar.
            seed: ``--seed`` unless given.
            **changed: of the recipe, such as ``epochs``, if a study compares recipes.
        """
        recipe = {
            "epochs": self.args.epochs,
            "lr": self.args.lr,
            "gating_lr": self.args.gating_lr,
        }
        recipe |= {
            "qk_lr": self.args.qk_lr
            or (None if self.args.data == "digits" else "papers"),
            "gating_min_lr": self.args.gating_min_lr,
            "drop_path_rate": self.args.drop_path,
            "seed": self.args.seed if seed is None else seed,
        }
        return self._train(model, file, title, **{**recipe, **changed})

    def controls(self) -> dict[str, tuple[nn.Module, list[EpochResult]]]:
        """Fine-tune the CNN as it is, "control", and what ``--unstrided`` and ``--matched-start`` ask for.

        The last is the T-CNN in its limit of strong locality, where it is the CNN at stride 1 up to rounding.
        """
        models = {"control": ("the CNN goes on (control)", copy.deepcopy(self.cnn))}
        if self.args.unstrided:
            models["unstrided"] = (
                "the CNN goes on at stride 1 (control)",
                unstride(self.cnn),
            )
        if self.args.matched_start:
            torch.manual_seed(self.args.seed)
            limit = reparameterize(self.cnn, locality_strength=20.0, gating=20.0)
            models["matched"] = ("the T-CNN from the CNN at stride 1 (control)", limit)
        return {
            name: (model, list(self.fine_tune(model, name, title)))
            for name, (title, model) in models.items()
        }

    def both(self, name: str, title: str, **changed: Any) -> list[list[EpochResult]]:
        """The CNN as it is (control) and its T-CNN, fine-tuned with one recipe; nothing is recorded.

        Args:
            name: of the recipe, for the checkpoints.
            title: of the recipe, for the progress bars.
            **changed: of the recipe, as for :meth:`fine_tune`.
        """
        torch.manual_seed(self.args.seed)
        models = {
            "control": ("the CNN", copy.deepcopy(self.cnn)),
            "tcnn": ("the T-CNN", reparameterize(self.cnn)),
        }
        return [
            list(
                self.fine_tune(model, f"{file}_{name}", f"{words}, {title}", **changed)
            )
            for file, (words, model) in models.items()
        ]

    def tcnn(
        self,
        store: Path,
        *,
        file: str = "tcnn",
        title: str = "the T-CNN",
        seed: int | None = None,
        probes: Any = None,
        start: Mapping[str, Any] | None = None,
        scalars: Callable[[EpochResult], Mapping[str, float]] = lambda result: {},
        after: Callable[[nn.Module, EpochResult], None] = lambda model, result: None,
        **changed: Any,
    ) -> tuple[nn.Module, xr.Dataset]:
        """The CNN reparameterized and fine-tuned, every head recorded.

        Args:
            store: of the recording.
            file, title, seed: as for :meth:`fine_tune`; the seed is also that of the new queries and keys.
            start: options of :func:`tcnn_model.reparameterize`.
            probes: what else to record of heads, as :func:`tcnn_probe.record` takes it.
            scalars: what to record of an epoch beside its accuracies and losses.
            after: called after each epoch.
            **changed: of the recipe, as for :meth:`fine_tune`.
        """
        torch.manual_seed(self.args.seed if seed is None else seed)
        model = reparameterize(self.cnn, **start or {})
        results = self.fine_tune(model, file, title, seed=seed, **changed)
        return model, _recorded(model, store, results, probes, scalars, after)

    def vit(self, store: Path) -> xr.Dataset:
        """Train plain attention on the stages of the small ResNet before its last one, every head recorded."""
        torch.manual_seed(self.args.seed)
        model = small_vit(self.cnn, self.args.img_size)
        return _recorded(
            model, store, self.fine_tune(model, "vit", "a vision transformer")
        )

    def on_shuffled_labels(self, seed: int) -> "Training":
        """The same, of digits whose labels are dealt out anew, so that nothing in an image tells its label."""
        train, validation = self.loaders
        dataset = copy.copy(train.dataset)
        dataset.labels = dataset.labels[
            torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
        ]
        shuffled = DataLoader(dataset, train.batch_size, shuffle=True, drop_last=True)
        return replace(self, loaders=(shuffled, validation))

    def _train(
        self, model: nn.Module, file: str, title: str, *, epochs: int, **recipe: Any
    ) -> Iterator[EpochResult]:
        number = next(self._numbers)
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


def _recorded(
    model: nn.Module,
    store: Path,
    results: Iterator[EpochResult],
    probes: Any = None,
    scalars: Callable[[EpochResult], Mapping[str, float]] = lambda result: {},
    after: Callable[[nn.Module, EpochResult], None] = lambda model, result: None,
) -> xr.Dataset:
    """What is recorded while a model trains; see :meth:`Training.tcnn`."""
    with tcnn_probe.record(model, store, probes=probes) as recorder:
        for result in results:
            recorder.mark(if_marked="skip", **scalars(result), **asdict(result))
            after(model, result)
        dataset = recorder.dataset.load()
    return dataset.assign_coords(
        layer=dataset.layer.astype(object)
    )  # zarr warns of fixed-width text
