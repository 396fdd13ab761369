"""The settings of a training: their names, groups, defaults and sources.

Only the standard library is imported here, so that ``tcnn-finetune --help`` need not import torch.
"""

import argparse
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "GRAFIT",
    "Config",
    "as_toml",
    "parse",
    "read_toml",
    "recipe_names",
    "recipe_settings",
]


_RECIPES = Path(__file__).with_name("recipes")

CLASSES, GRAFIT = "classification", "grafit"

_MINIMA = {
    "epochs": 1,
    "batch_size": 1,
    "accumulate": 1,
    "keep": 1,
    "repeated_augmentation": 1,
    "embedding_dim": 1,
    "workers": 0,
}

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "crop": ("rrc", "simple"),
    "amp": (None, "bfloat16", "float16"),
    "distribute": ("ddp", "fsdp"),
    "objective": (CLASSES, GRAFIT),
    "projector": ("mlp", "linear"),
    "attention_pool": (None, "single", "class"),
    "loss": ("ce", "bce"),
    "distillation": ("hard", "soft", "token"),
}


_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list of strings",
    dict: "a table",
}
"""Types of settings, as error messages call them."""


def _option(group: str, text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class Config:
    """Every setting of a training. A recipe sets some of them,
    then a TOML file, then the command line.
    """

    model: str = _option(
        "model",
        "timm's name of the model; t_resnetrs50, patchconvnet_s60 and others are registered too",
        "",
    )
    recipe: str | None = _option(
        "model",
        "recipe that the settings come from: RECIPES, or a TOML file",
    )
    pretrained: bool = _option("model", "start from timm's weights", False)
    weights: str | None = _option("model", "start from the weights in this file")
    model_options: dict[str, Any] | None = _option(  # noqa: RUF009 (a field, which is made once)
        "model", "further arguments of timm.create_model"
    )
    num_classes: int | None = _option(
        "model", "number of outputs (default: the number of classes in the data)"
    )
    img_size: int | None = _option(
        "model",
        "height and width of the images (default: the recipe's, else the model's)",
    )
    layer_scale: float | None = _option(
        "model", "initial value of every LayerScale (default: the model's own)"
    )
    attention_pool: str | None = _option(
        "model", "pool by attention: with a single token, or with one for each class"
    )
    reparameterize_at: int | None = _option(
        "model",
        "number of epochs after which the CNN becomes a T-CNN; 0: from the beginning",
    )
    keep_optimizer: bool = _option(
        "model",
        "keep the optimizer's state of all other weights when the CNN becomes a T-CNN",
        False,
    )
    unstride: bool = _option(
        "model",
        "remove the stride of the last stage: the control without attention",
        False,
    )
    freeze: list[str] | None = _option(  # noqa: RUF009 (as above)
        "model", "names or globs of parameters that are not trained"
    )
    grad_checkpointing: bool = _option(
        "model", "save memory: compute activations again in the backward pass", False
    )

    data: str = _option(
        "data",
        "folder or tar file of images; digits: those of scikit-learn; parity: the same, as even or "
        "odd",
        "digits",
    )
    dataset: str = _option(
        "data",
        "kind of data set, as in timm: hfds/NAME, torch/NAME, wds/ (default: folder or tar file)",
        "",
    )
    train_split: str = _option(
        "data", "split to train on, a folder or tar file (default: train/)", "train"
    )
    val_split: str = _option(
        "data", "split to validate on (default: val/ or validation/)", "validation"
    )
    coarse_labels: str | None = _option(
        "data",
        "file with a line class,coarse for each class; the model is trained on the coarse ones",
    )
    limit: int | None = _option(
        "data", "use only this many training images, and this many for validation"
    )
    max_unreadable: float = _option(
        "data",
        "share of images that may be unreadable; they are named and skipped",
        0.0,
    )
    workers: int = _option("data", "number of processes that load images", 0)

    epochs: int = _option("optimization", "number of epochs", 10)
    batch_size: int = _option("optimization", "number of images in a batch of one process", 64)
    accumulate: int = _option(
        "optimization",
        "number of batches whose gradients are averaged in one update of the weights",
        1,
    )
    paper_batch: int | None = _option(
        "optimization",
        "batch size that the learning rates are given for; all but the gates' are scaled to yours",
    )
    opt: str = _option("optimization", "optimizer, by timm's name", "adamw")
    lr: float = _option("optimization", "peak learning rate", 1e-4)
    momentum: float = _option("optimization", "momentum of SGD", 0.9)
    weight_decay: float = _option("optimization", "weight decay of matrices and filters", 0.05)
    sched: str = _option("optimization", "learning-rate schedule, by timm's name", "cosine")
    warmup_epochs: int = _option("optimization", "epochs of linear warm-up", 5)
    warmup_lr: float = _option("optimization", "learning rate at which the warm-up begins", 0.0)
    min_lr: float = _option("optimization", "learning rate at which the schedule ends", 0.0)
    gating_lr: float = _option(
        "optimization", "peak learning rate of the gates of GPSA layers", 0.1
    )
    qk_lr: float | None = _option(
        "optimization",
        "peak learning rate of the queries and keys of GPSA layers (default: that of the weights)",
    )
    gating_warmup_epochs: int | None = _option(
        "optimization", "epochs of warm-up of the gates (default: those of the weights)"
    )
    gating_min_lr: float | None = _option(
        "optimization",
        "learning rate at which the gates end (default: that of the weights)",
    )
    clip_grad: float | None = _option(
        "optimization",
        "largest norm of the gradient; a larger one is scaled down (default: no limit)",
    )
    ema: float | None = _option(
        "optimization",
        "decay of a moving average of the weights, which is validated too (default: none is kept)",
    )

    objective: str = _option(
        "objective",
        "classification, or Grafit: fine representations from coarse labels",
        CLASSES,
    )
    embedding_dim: int = _option("objective", "dimension of Grafit's embeddings", 256)
    temperature: float = _option("objective", "temperature of Grafit's neighbours", 0.05)
    projector: str = _option(
        "objective", "Grafit's projector: an MLP, or linear (Grafit FC)", "mlp"
    )
    instance_weight: float = _option(
        "objective", "weight of Grafit's instance loss; 0 is SNCA+", 1.0
    )

    loss: str = _option(
        "regularization",
        "cross-entropy, or the binary cross-entropy of each class",
        "ce",
    )
    label_smoothing: float = _option("regularization", "label smoothing, in [0, 1)", 0.1)
    drop_path: float | None = _option(
        "regularization", "rate of stochastic depth (default: the model's own)"
    )
    uniform_drop_path: bool = _option(
        "regularization",
        "use the same rate of stochastic depth in every block, not a ramp from 0",
        False,
    )
    mixup: float = _option("regularization", "alpha of mixup", 0.0)
    cutmix: float = _option("regularization", "alpha of CutMix", 0.0)
    teacher: str | None = _option(
        "regularization",
        "model to distil from, by timm's name; it has the same classes",
    )
    teacher_weights: str | None = _option(
        "regularization", "file of the teacher's weights (default: timm's)"
    )
    distillation: str = _option(
        "regularization",
        "kind of distillation; token: for models that have a distillation token",
        "hard",
    )

    crop: str = _option(
        "augmentation",
        "rrc: random resized crop; simple: resize, pad by 4 pixels, crop",
        "rrc",
    )
    hflip: float = _option("augmentation", "probability of mirroring an image", 0.5)
    auto_augment: str | None = _option(
        "augmentation", "policy in timm's notation, such as rand-m9-mstd0.5-inc1 or 3a"
    )
    color_jitter: float = _option(
        "augmentation",
        "strength of random changes of brightness, contrast and saturation",
        0.0,
    )
    random_erasing: float = _option("augmentation", "probability of erasing a rectangle", 0.0)
    repeated_augmentation: int = _option(
        "augmentation",
        "number of views of each image in an epoch, which then covers a part of the images",
        1,
    )
    crop_pct: float | None = _option(
        "augmentation",
        "share of the image that validation crops (default: the model's)",
    )

    device: str | None = _option(
        "machine", "device to train on (default: cuda if there is one, else cpu)"
    )
    amp: str | None = _option("machine", "dtype of autocast (default: no autocast)")
    channels_last: bool = _option("machine", "use the channels_last memory format", False)
    compile: bool = _option("machine", "compile the model with torch.compile", False)
    distribute: str = _option(
        "machine",
        "how processes share the model: each has all of it (ddp) or a part of it (fsdp)",
        "ddp",
    )
    sync_bn: bool = _option("machine", "synchronise batch norms over all processes", False)

    out: str = _option("run", "folder of the run", "run")
    seed: int = _option("run", "seed of everything that is random", 0)
    checkpoint_steps: int | None = _option("run", "also write a checkpoint every so many steps")
    keep: int = _option("run", "number of epochs whose checkpoints are kept", 2)
    tensorboard: bool = _option("run", "also write the scalars for TensorBoard", False)
    health: bool = _option(
        "run", "also record the health of attention layers, and warn of new alarms", False
    )
    images: int | None = _option(
        "run", "number of validation images whose attention is recorded as maps (default: none)"
    )
    watcher: str | None = _option(
        "run",
        "what watches the training, as module:class; none for nothing",
        "tcnn_probe.callbacks.finetuning:Recording",
    )

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}: expected {minimum} or more, got {getattr(self, name)}")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"warmup_epochs: expected fewer than the {self.epochs} epochs, got "
                f"{self.warmup_epochs}: give fewer, or more epochs"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing: expected a number in [0, 1), got {self.label_smoothing}"
            )
        if self.mixed and self.batch_size % 2:
            raise ValueError(
                f"batch_size: mixup and CutMix take images in pairs, got {self.batch_size}"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(str, choices))}, got "
                    f"{getattr(self, name)!r}"
                )

        # timm may run code from the files that these arguments name; --weights does not.
        loading = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"} & set(
            self.model_options or {}
        )
        if loading:
            raise ValueError(
                f"model_options: give weights as --weights, not as {', '.join(sorted(loading))}"
            )
        if not _is_plain(self.model_options or {}):
            raise ValueError(
                "model_options: expected strings, numbers and booleans, as a run's config.toml can "
                f"hold no others, got {self.model_options}"
            )

        # The conversion cannot replace parameters that FSDP has sharded.
        if self.distribute == "fsdp" and self.reparameterize_at:
            raise ValueError(
                "reparameterize_at: with distribute=fsdp expected 0, got "
                f"{self.reparameterize_at}: train the CNN first, then begin a run of the T-CNN "
                "with --weights of its best.pt"
            )

        if self.objective == GRAFIT:
            self._check_grafit()

    def _check_grafit(self) -> None:
        views = self.repeated_augmentation
        whole_images = self.batch_size % views == 0 and self.batch_size > views > 1
        excluded = self.mixed or self.teacher or self.compile or self.reparameterize_at
        if not self.ema or not whole_images or self.temperature <= 0 or excluded:
            raise ValueError(
                f"objective: grafit needs ema, got {self.ema}; repeated_augmentation of 2 or more, "
                f"got {views}; a batch_size of several images with so many views each, got "
                f"{self.batch_size}; a temperature above 0, got {self.temperature}; and no mixup, "
                "cutmix, teacher, compile or reparameterize_at after an epoch"
            )

    @property
    def mixed(self) -> bool:
        """True if mixup or CutMix is on, so that targets are class probabilities."""
        return self.mixup > 0 or self.cutmix > 0

    def scaled(self, processes: int) -> "Config":
        """Scale the learning rates linearly with the number
        of images in a step, as DeiT does (thesis, Sec. 3.3).

        That of the gates is not scaled: they are few, their rate is in units of lambda, and with a
        hundredth of it they would not move.
        """
        if self.paper_batch is None:
            return self
        share = self.batch_size * self.accumulate * processes / self.paper_batch
        qk_lr = None if self.qk_lr is None else self.qk_lr * share
        return replace(self, lr=self.lr * share, qk_lr=qk_lr)

    def as_dict(self) -> dict[str, Any]:
        """Return every setting that has a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def parse(arguments: list[str] | None) -> tuple[Config, bool]:
    """Return the settings of a command line, and whether it resumes a run.

    Options take precedence over the file of ``--config``, which takes precedence over the recipe.

    Raises:
        ValueError: A setting does not exist, or has a value that is out of range.
    """
    parser = argparse.ArgumentParser(
        "tcnn-finetune",
        allow_abbrev=False,
        usage="%(prog)s MODEL [--data FOLDER] [--recipe NAME] [options]",
        description="Train a model of timm as the papers do.",
    )
    text = Config.__dataclass_fields__["model"].metadata["help"]
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--config",
        type=Path,
        help="TOML file with settings, named as the options with _ for -",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out, with its settings",
    )
    _add_options(parser)
    options = vars(parser.parse_args(arguments))
    file = options.pop("config")
    resume = options.pop("resume")
    if resume:
        if "recipe" in options or file:
            raise ValueError(
                "--resume continues with the settings of the run: leave out --recipe and --config"
            )
        run_settings = Path(options.get("out", Config.out)) / "config.toml"
        if not run_settings.exists():
            raise ValueError(f"--resume: there is no run in {run_settings.parent}")
        return _trusted(read_toml(run_settings), options), True
    settings = read_toml(file) if file else {}
    model = options.get("model") or settings.get("model")
    if not model:
        parser.error("expected the name of a model, such as t_resnetrs50")
    recipe = options.get("recipe") or settings.get("recipe")
    if recipe:
        settings = {**recipe_settings(recipe, model), **settings}
    return _trusted(settings, options), False


def _trusted(settings: dict[str, Any], options: dict[str, Any]) -> Config:
    """Merge options of the command line into settings from files.

    A file may come from somebody else: it may not name code to import, or a source of weights that
    could run code.
    """
    watcher = settings.get("watcher")
    if "watcher" not in options and watcher not in (None, "none", Config.watcher):
        raise ValueError(
            f"watcher: a file may not name {watcher!r}, which would be imported: give it as "
            "--watcher"
        )
    for name in ("model", "teacher"):
        source = str(settings.get(name) or "")
        # A colon ends a source such as local-dir: or hf-hub:, in any case. timm 1.0.20 unpickles
        # the weights there.
        if name not in options and ":" in source:
            raise ValueError(
                f"{name}: a file may not name {source!r}, whose weights could run code: give it on "
                "the command line"
            )
    further = {**settings.get("model_options", {}), **options.get("model_options", {})}
    return Config(**{**settings, **options, "model_options": further or None})


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting but ``model``, in groups.

    The options have no defaults, because parsed options take precedence over files, which a default
    must not do.
    """
    groups: dict[str, Any] = {}
    kinds = typing.get_type_hints(Config)
    for setting in fields(Config):
        if setting.name == "model":
            continue
        group = setting.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        text = setting.metadata["help"].replace("RECIPES", ", ".join(recipe_names()))
        argument = _argument(kinds[setting.name])
        if setting.name in _CHOICES:
            choices = filter(None, _CHOICES[setting.name])
            argument["metavar"] = "{" + ",".join(choices) + "}"
        if "default" not in text and setting.default not in (None, False, ""):
            text += f" (default: {setting.default})"
        flag = f"--{setting.name.replace('_', '-')}"
        groups[group].add_argument(flag, default=argparse.SUPPRESS, help=text, **argument)


def _argument(kind: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting of this type."""
    # In a type such as "int | None", None is only the default, and cannot be given as an option.
    if isinstance(kind, types.UnionType):
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind == list[str]:
        return {"nargs": "+", "metavar": "GLOB"}
    if typing.get_origin(kind) is dict:
        return {"nargs": "+", "type": _pair, "action": _Pairs, "metavar": "NAME=VALUE"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


class _Pairs(argparse.Action):
    def __call__(
        self,
        parser: Any,
        namespace: argparse.Namespace,
        values: Any,
        option_string: Any = None,
    ) -> None:
        setattr(namespace, self.dest, dict(values))


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:  # a string without quotation marks, which the shell removes
        return name, value


def read_toml(path: Path) -> dict[str, Any]:
    """Read the settings of a file.

    Raises:
        ValueError: The file is not TOML, or has an unknown setting or a value of a wrong type.
    """
    return _known(_load(path), str(path))


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: not TOML, or not UTF-8
        raise ValueError(f"cannot read the settings in {path}: {error}") from error


def _known(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a file after checking
    that they exist and that their values have the right types.
    """
    kinds = typing.get_type_hints(Config)
    unknown = sorted(settings.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"{source}: no such setting: {', '.join(unknown)}")
    for name, value in settings.items():
        _check_type(value, kinds[name], f"{source}: {name}")
        if isinstance(value, dict) and not _is_plain(value):
            raise ValueError(f"{source}: {name}: expected no dates or times, got {value!r}")
    return dict(settings)


def _check_type(value: Any, kind: Any, setting: str) -> None:
    """Check that a value of a TOML file has the type of its setting.

    Raises:
        ValueError: The message names the setting, what was expected and what was given.
    """
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    classes = tuple(typing.get_origin(member) or member for member in kinds)
    if float in classes:
        classes += (int,)  # a user may write 1 for 1.0
    # In Python True is an int, but no setting takes it for 1.
    fits = bool in classes if isinstance(value, bool) else isinstance(value, classes)
    if list in classes and isinstance(value, list):
        fits = all(isinstance(element, str) for element in value)
    if not fits:
        names = [_TYPES[member] for member in classes if member in _TYPES]
        raise ValueError(f"{setting}: expected {names[0]}, got {value!r}")


def _is_plain(value: Any) -> bool:
    # No argument of a model is a date or time, and TOML has no null.
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


@cache
def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes of this package."""
    return tuple(sorted(path.stem for path in _RECIPES.glob("*.toml")))


def recipe_settings(name: str, model: str) -> dict[str, Any]:
    """Return the settings of a recipe for a model.

    Args:
        name: Name of a recipe of this package, or of a TOML file with ``[settings]``, ``[models]``
            and perhaps a ``base``.
        model: timm's name of the model, which the globs of ``[models]`` are for.

    Raises:
        ValueError: There is no such recipe, or it cannot be read as one.
    """
    chain = [_recipe(name)]
    names = [name]
    while "base" in chain[0]:
        base = chain[0]["base"]
        if base in names:
            raise ValueError(
                f"recipe {name}: its bases lead back to it: {' -> '.join([*names, base])}"
            )
        chain.insert(0, _recipe(base))
        names.append(base)
    settings: dict[str, Any] = {}
    for recipe in chain:
        settings |= recipe.get("settings", {})
    # A rule for this model takes precedence over a setting for all models, even if the rule is in a
    # base.
    for recipe in chain:
        for glob, further in recipe.get("models", {}).items():
            if fnmatchcase(model, glob):
                settings |= further
    return settings


def _recipe(name: str) -> dict[str, Any]:
    """Read a recipe, and check the types of all its values."""
    if name.endswith(".toml"):
        path = Path(name)
    elif name in recipe_names():
        path = _RECIPES / f"{name}.toml"
    else:
        raise ValueError(
            f"no recipe {name!r}; there are {', '.join(recipe_names())}, or give a file *.toml"
        )
    recipe = _load(path)
    for part, kind in {"base": str, "settings": dict, "models": dict}.items():
        if part in recipe:
            _check_type(recipe[part], kind, f"recipe {name}: {part}")
    _known(recipe.get("settings", {}), f"recipe {name}")
    for glob, further in recipe.get("models", {}).items():
        _check_type(further, dict, f"recipe {name}: models: {glob}")
        _known(further, f"recipe {name}: models: {glob}")
    return recipe


def as_toml(settings: Mapping[str, Any]) -> str:
    """Write settings as TOML."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{json.dumps(name)} = {_value(content)}" for name, content in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # JSON has no inf and nan
    # TOML writes text, integers and truth values as JSON does.
    return json.dumps(value, ensure_ascii=False)
