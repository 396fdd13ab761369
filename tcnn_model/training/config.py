"""The settings of a training: their names, groups and defaults, and where they come from."""

import argparse
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["GRAFIT", "Config", "add_options", "as_toml", "read_toml", "recipe_names", "recipe_settings"]


CLASSES, GRAFIT = "classification", "grafit"


def option(group: str, text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class Config:
    """Every setting of a training. A recipe sets some of them, then a TOML file, then the command line."""

    model: str = option("model", "timm's name of it (t_resnetrs50, patchconvnet_s60, ... are registered too)", "")
    recipe: str | None = option("model", "one of RECIPES, or a TOML file: the command takes the settings from it")
    pretrained: bool = option("model", "start from timm's weights", False)
    weights: str | None = option("model", "start from the weights in this file")
    model_options: dict[str, Any] | None = option("model", "further options of timm.create_model")  # noqa: RUF009
    num_classes: int | None = option("model", "outputs (default: as many as the data has classes)")
    img_size: int | None = option("model", "height and width of images (default: the recipe's, else the model's)")
    reparameterize_at: int | None = option("model", "make the CNN a T-CNN after so many epochs; 0: at the beginning")
    keep_optimizer: bool = option("model", "the optimizer keeps its state then, but for new weights", False)
    unstride: bool = option("model", "take the last stage's stride out: the control without attention", False)
    freeze: list[str] | None = option("model", "names or globs of what is not trained")  # noqa: RUF009
    grad_checkpointing: bool = option("model", "keep less memory for the backward, and compute more", False)

    data: str = option(
        "data", "folder (or tar) with the images; digits: scikit-learn's; parity: the same, even or odd", "digits"
    )
    dataset: str = option("data", "timm's kind of data set: hfds/NAME, torch/NAME, wds/ (default: folder or tar)", "")
    train_split: str = option("data", "split to train on, a folder or tar file (default: train/)", "train")
    val_split: str = option("data", "split to validate on (default: val/ or validation/)", "validation")
    limit: int | None = option("data", "use only so many training images, and as many to validate on")
    max_unreadable: float = option("data", "share of images that may be unreadable: named and skipped", 0.0)
    workers: int = option("data", "processes that load images", 0)

    epochs: int = option("optimization", "to train", 10)
    batch_size: int = option("optimization", "images of a step in a process", 64)
    accumulate: int = option("optimization", "steps whose gradients are added up before the weights change", 1)
    paper_batch: int | None = option("optimization", "images that the rates are for: they scale with yours")
    opt: str = option("optimization", "timm's name of an optimizer", "adamw")
    lr: float = option("optimization", "peak learning rate", 1e-4)
    momentum: float = option("optimization", "of SGD", 0.9)
    weight_decay: float = option("optimization", "of matrices and filters", 0.05)
    sched: str = option("optimization", "timm's name of a schedule", "cosine")
    warmup_epochs: int = option("optimization", "of linear warm-up", 5)
    warmup_lr: float = option("optimization", "where it begins", 0.0)
    min_lr: float = option("optimization", "where the schedule ends", 0.0)
    gating_lr: float = option("optimization", "peak rate of the gates of GPSA layers", 0.1)
    qk_lr: float | None = option("optimization", "peak rate of GPSA's queries and keys (default: as the weights)")
    gating_warmup_epochs: int | None = option("optimization", "of the gates (default: as the weights)")
    gating_min_lr: float | None = option("optimization", "rate that the gates end at (default: as the weights)")
    clip_grad: float | None = option("optimization", "largest norm of the gradient")
    ema: float | None = option("optimization", "decay of a moving average of the weights, also validated")

    objective: str = option("objective", "classification, or grafit: fine representations from coarse labels", CLASSES)
    embedding_dim: int = option("objective", "dimensions of Grafit's embeddings", 256)
    temperature: float = option("objective", "of Grafit's neighbours", 0.05)

    loss: str = option("regularization", "ce or bce", "ce")
    label_smoothing: float = option("regularization", "in [0, 1)", 0.1)
    drop_path: float | None = option("regularization", "stochastic depth (default: the model's own)")
    uniform_drop_path: bool = option("regularization", "the same in every block, not a ramp from 0", False)
    mixup: float = option("regularization", "alpha of mixup", 0.0)
    cutmix: float = option("regularization", "alpha of CutMix", 0.0)
    teacher: str | None = option("regularization", "timm's name of a model to distil from")
    teacher_weights: str | None = option("regularization", "its weights (default: timm's)")
    distillation: str = option("regularization", "hard, or token for models that have a distillation token", "hard")

    crop: str = option("augmentation", "rrc: random resized crop; simple: resize, then a crop 4 pixels off", "rrc")
    hflip: float = option("augmentation", "chance of a mirrored image", 0.5)
    auto_augment: str | None = option("augmentation", "timm's RandAugment, 3a, ...")
    color_jitter: float = option("augmentation", "of brightness, contrast and saturation", 0.0)
    random_erasing: float = option("augmentation", "chance of an erased rectangle", 0.0)
    repeated_augmentation: int = option("augmentation", "views of an image in an epoch, of a part of the images", 1)
    crop_pct: float | None = option("augmentation", "share of the image in validation (default: the model's)")

    device: str | None = option("machine", "(default: cuda if there is one)")
    amp: str | None = option("machine", "autocast: bfloat16 or float16")
    channels_last: bool = option("machine", "memory layout", False)
    compile: bool = option("machine", "torch.compile", False)
    distribute: str = option("machine", "over processes: ddp, each has the model; fsdp, each has a part of it", "ddp")
    sync_bn: bool = option("machine", "batch norms over all processes", False)

    out: str = option("run", "folder of the run", "run")
    seed: int = option("run", "of everything that is random", 0)
    checkpoint_steps: int | None = option("run", "a checkpoint each so many steps, beside those of epochs")
    keep: int = option("run", "so many epochs' checkpoints stay", 2)
    tensorboard: bool = option("run", "write the scalars for TensorBoard too", False)
    watcher: str | None = option(
        "run", "module:class that watches; none for nobody", "tcnn_probe.callbacks.finetuning:Recording"
    )

    def __post_init__(self) -> None:
        least = dict.fromkeys(("epochs", "batch_size", "accumulate", "keep", "repeated_augmentation"), 1)
        least |= {"embedding_dim": 1, "workers": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name}: expected {value} or more, got {getattr(self, name)}")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"warmup_epochs: expected fewer than the {self.epochs} epochs, got {self.warmup_epochs}: "
                f"give fewer, or more epochs"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {self.label_smoothing}")
        if self.mixed and self.batch_size % 2:
            raise ValueError(f"batch_size: mixup and CutMix take images in pairs, got {self.batch_size}")
        choices = {"crop": ("rrc", "simple"), "amp": (None, "bfloat16", "float16"), "distribute": ("ddp", "fsdp")}
        choices["objective"] = (CLASSES, GRAFIT)
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")

        if loading := {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"} & set(self.model_options or {}):
            # timm may run code from files that these name; --weights does not.
            raise ValueError(f"model_options: give weights as --weights, not as {', '.join(sorted(loading))}")

        if self.distribute == "fsdp" and self.reparameterize_at:
            raise ValueError(
                f"reparameterize_at: with distribute=fsdp expected 0, got {self.reparameterize_at}: train the CNN "
                f"first, then begin a run of the T-CNN with --weights of its best.pt"
            )

        views, others = self.repeated_augmentation, self.mixed or self.teacher or self.compile or self.reparameterize_at
        fits = self.ema and self.batch_size % views == 0 and self.batch_size > views > 1 and self.temperature > 0
        if self.objective == GRAFIT and (not fits or others):
            raise ValueError(
                f"objective: grafit needs ema, got {self.ema}; repeated_augmentation of 2 or more, got {views}; a "
                f"batch_size of several images with so many views each, got {self.batch_size}; a temperature above "
                f"0, got {self.temperature}; and no mixup, cutmix, teacher, compile or reparameterize_at after an epoch"
            )

    @property
    def mixed(self) -> bool:
        """Whether targets are shares of classes."""
        return self.mixup > 0 or self.cutmix > 0

    def scaled(self, processes: int) -> "Config":
        """With the rates scaled to the images of a step, as DeiT scales them (thesis, Sec. 3.3): linearly."""
        if self.paper_batch is None:
            return self
        share = self.batch_size * self.accumulate * processes / self.paper_batch
        qk_lr = None if self.qk_lr is None else self.qk_lr * share
        return replace(self, lr=self.lr * share, gating_lr=self.gating_lr * share, qk_lr=qk_lr)

    def as_dict(self) -> dict[str, Any]:
        """Every setting that has a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each setting but ``model``, in groups; without a default, so that only what is given is there."""
    groups: dict[str, Any] = {}
    types_ = typing.get_type_hints(Config)
    for each in fields(Config):
        if each.name == "model":
            continue
        group = each.metadata["group"]
        groups[group] = groups.get(group) or parser.add_argument_group(group)
        kind = types_[each.name]
        shown = each.metadata["help"].replace("RECIPES", ", ".join(recipe_names()))
        if "default" not in shown and each.default not in (None, False, ""):
            shown += f" (default: {each.default})"
        groups[group].add_argument(
            f"--{each.name.replace('_', '-')}", default=argparse.SUPPRESS, help=shown, **_reading(kind)
        )


def _reading(kind: Any) -> dict[str, Any]:
    if isinstance(kind, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == list[str]:
        return {"nargs": "+", "metavar": "GLOB"}
    if typing.get_origin(kind) is dict:
        return {"nargs": "+", "type": _pair, "action": _Pairs, "metavar": "NAME=VALUE"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


class _Pairs(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, dict(values))


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a file.

    Raises:
        ValueError: it is no TOML, or has a setting that there is not.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the settings in {path}: {error}") from error
    return _known(settings, path.name)


def _known(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    if unknown := sorted(settings.keys() - {each.name for each in fields(Config)}):
        raise ValueError(f"{where}: no such setting: {', '.join(unknown)}")
    return dict(settings)


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of the recipes of this package."""
    files = resources.files("tcnn_model.training").joinpath("recipes").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def recipe_settings(name: str, model: str) -> dict[str, Any]:
    """The settings of a recipe for a model.

    Args:
        name: of one of this package's, or a TOML file's with ``[settings]``, ``[models]`` and perhaps a ``base``.
        model: timm's name, which the globs of ``[models]`` are for.

    Raises:
        ValueError: no such recipe, or not readable as one.
    """
    chain, names = [_recipe(name)], [name]
    while "base" in chain[0]:
        base = chain[0]["base"]
        if base in names:
            raise ValueError(f"recipe {name}: its bases lead back to it: {' -> '.join([*names, base])}")
        chain.insert(0, _recipe(base))
        names.append(base)
    settings: dict[str, Any] = {}
    for recipe in chain:
        settings |= recipe.get("settings", {})
    for recipe in chain:
        for glob, further in recipe.get("models", {}).items():
            if fnmatchcase(model, glob):
                settings |= further
    return _known(settings, f"recipe {name}")


def _recipe(name: str) -> dict[str, Any]:
    if name.endswith(".toml"):
        text = Path(name).read_text()
    elif name in recipe_names():
        text = resources.files("tcnn_model.training").joinpath("recipes", f"{name}.toml").read_text()
    else:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(recipe_names())}, or give a file *.toml")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {name}: {error}") from error


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as a TOML file."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)  # of text, numbers and truth values TOML's form is JSON's
