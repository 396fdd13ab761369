"""The model, the optimizer and the task of a run, from its settings."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from timm.data import Mixup, resolve_model_data_config
from timm.utils import ModelEmaV3, distribute_bn
from torch import nn

from tcnn_model.conversion.reparameterize import reparameterize, unstride
from tcnn_model.conversion.selection import matching
from tcnn_model.conversion.tracing import InputSize
from tcnn_model.gpsa.layer import gpsa_layers
from tcnn_model.models import patchconvnet, t_resnet  # noqa: F401 (timm then has them)
from tcnn_model.pooling.add import add_attention_pool, specialize
from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_model.training.config import GRAFIT, Config
from tcnn_model.training.distributed import Processes
from tcnn_model.training.grafit import Grafit, GrafitTask
from tcnn_model.training.loop import Training
from tcnn_model.training.optimization import (
    create_optimizer,
    create_schedules,
    set_drop_path,
    warn_of_stuck_gates,
)
from tcnn_model.training.seeding import seed_everything, seed_of
from tcnn_model.training.sharding import gathered, shard, without_sync
from tcnn_model.training.sources import DIGITS
from tcnn_model.training.task import create_criterion, create_task
from tcnn_model.training.weights import create_from_weights, create_of_size

__all__ = ["build_model", "build_training", "convert"]


def build_model(
    config: Config,
    classes: int,
    images: int = 0,
    report: Callable[[str], None] = lambda text: None,
    names: Sequence[str] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a run; return it with timm's data configuration.

    Args:
        config: Settings of the run.
        classes: Number of classes in the data.
        images: Number of training images, all of which Grafit remembers.
        report: Function that is called with a line of text for weights of the file that are not
            used as they are.
        names: Names of the classes, with which those of the file of weights are compared.

    Raises:
        ValueError: timm has no such model, the model would have fewer outputs than the data have
            classes, or a setting has no effect on the model.
    """
    if config.num_classes is not None and config.num_classes < classes:
        raise ValueError(f"num_classes: the data has {classes} classes, got {config.num_classes}")
    options = config.model_options or {}
    outputs = config.num_classes or classes
    seed_everything(config.seed)
    try:
        if config.weights is not None:
            model = create_from_weights(
                config.model,
                config.weights,
                outputs,
                img_size=config.img_size,
                report=report,
                names=names,
                **options,
            )
        else:
            model = create_of_size(
                config.model,
                config.img_size,
                pretrained=config.pretrained,
                num_classes=outputs,
                **options,
            )
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"timm cannot make the model {config.model!r}: {error}") from error
    if config.layer_scale is not None and config.weights is None and not config.pretrained:
        _set_layer_scale(model, config.layer_scale)
    data = resolve_model_data_config(model)
    # The digits are 8 x 8 pixels; they are enlarged so that a CNN's last stage still has a few
    # pixels to attend to.
    size = config.img_size or (64 if config.data in DIGITS else data["input_size"][-1])
    data["input_size"] = (data["input_size"][0], size, size)
    if config.data in DIGITS and config.crop_pct is None:
        data["crop_pct"] = 1.0  # digits fill their images
    if config.unstride:
        model = unstride(model, input_size=data["input_size"], inplace=True)
    if config.attention_pool is not None:
        model = _pool_by_attention(model, config.attention_pool, data["input_size"])
    if config.drop_path is not None:
        blocks = set_drop_path(model, config.drop_path, uniform=config.uniform_drop_path)
        if not blocks and config.drop_path:
            raise ValueError(
                f"drop_path={config.drop_path}, but {config.model} has no block with a drop_path"
            )
    if config.reparameterize_at is not None and not gpsa_layers(model):
        # A copy is converted now, so that a model that cannot be converted at this size is refused
        # before training.
        _reparameterize(model if config.reparameterize_at == 0 else copy.deepcopy(model), config)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    if config.objective == GRAFIT:
        model = Grafit(
            model,
            _outputs(model),
            images,
            dim=config.embedding_dim,
            temperature=config.temperature,
            projector=config.projector,
        )
    return model, data


def _pool_by_attention(model: nn.Module, tokens: str, input_size: InputSize) -> nn.Module:
    """Add attention pooling with one token, or with one per class;
    a trained single token is copied to each class.
    """
    pools = [module for module in model.modules() if isinstance(module, AttentionPool2d)]
    if not pools:
        return add_attention_pool(
            model, per_class=tokens == "class", input_size=input_size, inplace=True
        )
    if pools[0].per_class and tokens == "single":
        raise ValueError(
            "attention_pool: the model has a token for each class already, and cannot have a "
            "single one"
        )
    return model if pools[0].per_class or tokens == "single" else specialize(model, inplace=True)


def _set_layer_scale(model: nn.Module, value: float) -> None:
    """Initialise every LayerScale with this value.

    Raises:
        ValueError: The model has no LayerScale.
    """
    # Names of LayerScale in timm: a layer's gamma (ViT, ConvNeXt, PatchConvNet), gamma_1 (CaiT),
    # ls1 (ResMLP).
    names = re.compile(r"(.*\.)?(gamma(_\d)?|ls\d)")
    scales = [parameter for name, parameter in model.named_parameters() if names.fullmatch(name)]
    if not scales:
        raise ValueError(f"layer_scale={value:g}, but {type(model).__name__} has no LayerScale")
    for scale in scales:
        nn.init.constant_(scale, value)


def build_training(config: Config, model: nn.Module, steps: int, processes: Processes) -> Training:
    """Build the training of a model; learning rates are taken from the settings without scaling.

    Args:
        config: Settings of the run, with learning rates that are scaled already.
        model: Model of :func:`build_model`.
        steps: Number of the optimizer's steps in an epoch.
        processes: The processes that train together.

    Raises:
        ValueError: A setting does not work on this device, or with several processes.
    """
    if config.objective == GRAFIT and processes.count > 1:
        raise ValueError(
            f"objective: grafit has one memory and runs on one process, got {processes.count}"
        )
    model.to(processes.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    # torch implements SyncBatchNorm for GPUs only.
    if config.sync_bn and processes.count > 1:
        if processes.device.type == "cpu":
            raise ValueError(
                "sync_bn: torch shares the statistics of batch norms between GPUs only, got the CPU"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    frozen = _freeze(model, config.freeze or [])
    sharded = config.distribute == "fsdp" and processes.count > 1
    # torch's foreach functions refuse lists that mix sharded weights with the unsharded buffers of
    # batch norms.
    ema = ModelEmaV3(model, decay=config.ema, foreach=not sharded) if config.ema else None
    if sharded:
        # Sharding comes after the moving average, because torch refuses to copy a sharded model,
        # and before the optimizer, because sharding replaces the parameters.
        for module in _with_average(model, ema):
            shard(module)
    mix = None
    if config.mixed:
        mix = Mixup(
            config.mixup,
            config.cutmix,
            label_smoothing=config.label_smoothing,
            num_classes=_outputs(model),
        )
    training = Training(
        model=model,
        task=lambda images, targets: {},
        optimizer=_optimizer(config, model),
        schedules=[],
        device=processes.device,
        amp=getattr(torch, config.amp) if config.amp else None,
        accumulate=config.accumulate,
        clip_grad=config.clip_grad,
        mix=mix,
        seed=config.seed,
        ema=ema,
        frozen=frozen,
        channels_last=config.channels_last,
        no_sync=partial(without_sync, model) if sharded else nullcontext,
        gathered=gathered if sharded else nullcontext,
        over_ranks=processes.total,
        agree=partial(distribute_bn, world_size=processes.count)
        if processes.count > 1
        else lambda model: None,
        rank=processes.rank,
    )
    _attach(training, config, steps, processes)
    return training


def convert(training: Training, config: Config, steps: int, processes: Processes) -> bool:
    """Convert the CNN to a T-CNN in place; return False,
    without a change, if it is a T-CNN already.

    With ``keep_optimizer``, weights that survive the conversion keep their optimizer state: "we
    keep the same optimizer and learning rate after the reparametrization" (T-CNN paper, Sec. 5).
    Otherwise the optimizer starts anew, as in fine-tuning.
    """
    if gpsa_layers(training.model):
        return False
    for model in _with_average(training.model, training.ema):
        # Both use the same seed, so that the moving average gets the same new weights as the model.
        _reparameterize(model, config)
    state = training.optimizer.state
    training.optimizer = _optimizer(config, training.model)
    if config.keep_optimizer:
        for parameter in training.model.parameters():
            # State is looked up by the parameter object, which the conversion keeps except in
            # replaced convolutions.
            if parameter in state:
                training.optimizer.state[parameter] = state[parameter]
    _attach(training, config, steps, processes)
    return True


def _with_average(model: nn.Module, ema: ModelEmaV3 | None) -> list[nn.Module]:
    return [model] if ema is None else [model, ema.module]


def _reparameterize(model: nn.Module, config: Config) -> None:
    seed_everything(seed_of(config.seed, -1))
    size = (3, config.img_size, config.img_size) if config.img_size else None
    reparameterize(model, input_size=size, inplace=True)


def _optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    return create_optimizer(
        model,
        config.opt,
        lr=config.lr,
        gating_lr=config.gating_lr,
        qk_lr=config.qk_lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
    )


def _attach(training: Training, config: Config, steps: int, processes: Processes) -> None:
    """Set the schedules, the wrapped model and the task of a training,
    from its current model and optimizer.
    """
    warn_of_stuck_gates(training.model)
    training.schedules = create_schedules(
        training.optimizer,
        epochs=config.epochs,
        steps=steps,
        warmup_epochs=config.warmup_epochs,
        sched=config.sched,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        gating_warmup_epochs=config.gating_warmup_epochs,
        gating_min_lr=config.gating_min_lr,
    )
    if isinstance(training.model, Grafit):
        assert training.ema is not None  # Config._check_grafit demands ema
        training.task = GrafitTask(
            training.model,
            training.ema.module,
            config.repeated_augmentation,
            instance_weight=config.instance_weight,
        )
        return
    forward: Any = torch.compile(training.model) if config.compile else training.model
    if processes.count > 1 and config.distribute == "ddp":
        forward = nn.parallel.DistributedDataParallel(
            forward, device_ids=[processes.device] if processes.device.type == "cuda" else None
        )
        training.no_sync = forward.no_sync
    criterion = create_criterion(
        config.loss, label_smoothing=config.label_smoothing, mixed=config.mixed
    )
    training.task = create_task(
        training.model,
        forward,
        criterion,
        teacher=_teacher(config, training.model),
        distillation=config.distillation,
    )


def _teacher(config: Config, model: nn.Module) -> nn.Module | None:
    if config.teacher is None:
        return None
    teacher: nn.Module
    # The teacher sees the same images as the student, so it is created for their size.
    size = config.img_size
    if config.teacher_weights is not None:
        weights = config.teacher_weights
        teacher = create_from_weights(config.teacher, weights, None, img_size=size)
    else:
        teacher = create_of_size(config.teacher, size, pretrained=True)
    # timm could give the teacher a classifier with the student's classes, but its weights would be
    # random.
    if _outputs(teacher) != _outputs(model):
        raise ValueError(
            f"teacher: expected the {_outputs(model)} classes of the model, got "
            f"{_outputs(teacher)} of {config.teacher}"
        )
    return teacher


def _outputs(model: Any) -> int:
    return int(model.num_classes)


def _freeze(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """Freeze parameters.

    Returns:
        Modules in which every parameter is frozen; their running statistics must stay fixed, too.
    """
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    for pattern in patterns:
        names = matching(parameters, pattern)
        if not names:
            raise ValueError(
                f"freeze: no parameters match {pattern!r}; there are "
                f"{', '.join([*parameters][:3])}, ..."
            )
        for name in names:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError("freeze: no parameters are left to train")
    frozen = []
    for module in model.modules():
        trainable = [parameter.requires_grad for parameter in module.parameters()]
        if trainable and not any(trainable):
            frozen.append(module)
    return frozen
