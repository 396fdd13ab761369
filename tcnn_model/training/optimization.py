"""Optimizers, learning-rate schedules and stochastic depth."""

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath
from timm.models.cait import ClassAttn
from timm.models.volo import ClassAttention as VOLOClassAttention
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn

from tcnn_model.convolved.head_convolution import HeadConvolution
from tcnn_model.gpsa.layer import gpsa_layers
from tcnn_model.pooling.attention_pool import AttentionPool2d, PatchAttention

__all__ = [
    "create_optimizer",
    "create_schedules",
    "papers_qk_lr",
    "parameter_groups",
    "rate_sums",
    "set_drop_path",
    "warn_of_stuck_gates",
]

PAPERS_SUM = 3.1
"""Sum of the learning rates in the T-CNN paper's training: 50 epochs of 1,251 steps, with half of
the peak rate 1e-4 on average (cosine). This is 156 times the standard deviation with which queries
and keys are initialised, 0.02.
"""


_FUSED = ("adam", "adamw")
"""Optimizers whose fused form is used: it is six times as fast for small models on a CPU. Fused SGD
cannot mix weights with and without a momentum buffer, as there are after a conversion that keeps
the optimizer's state.
"""


def parameter_groups(
    model: nn.Module,
    lr: float = 1e-4,
    gating_lr: float = 0.1,
    weight_decay: float = 0.05,
    *,
    qk_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return the optimizer groups of a T-CNN (paper, Sec. 3),
    with a separate, much larger learning rate for gates.

    Gates, locality strengths, centres of attention, kernels of heads (:func:`convolve`), tokens of
    attention pools, norms, biases and the parameters that the model's ``no_weight_decay()`` names
    have no weight decay.

    Args:
        model: Any module; without GPSA layers there is no group of gates.
        lr: Learning rate of all parameters but the gates.
        gating_lr: Learning rate of the gating parameters lambda.
        weight_decay: Weight decay of matrices and filters.
        qk_lr: Learning rate of GPSA's queries and keys, which then form a group; None for ``lr``,
            as in the papers. AdamW moves a weight by no more than about the sum of its learning
            rates. With the papers' rate and a hundredth of their steps, heads therefore cannot
            learn to attend to content: use ``papers_qk_lr(steps)`` of
            ``tcnn_model.training.optimization``.

    Returns:
        Groups for any optimizer of torch or timm, each with "params", "lr", "weight_decay" and a
        "name". Every parameter that requires a gradient is in exactly one group; empty groups are
        left out.
    """
    layers = gpsa_layers(model)
    gates = [layer.gating for layer in layers.values() if layer.gating.requires_grad]
    undecayed = {
        f"{name}.{p}" if name else p
        for name in layers
        for p in ("gating", "raw_locality", "center")
    }
    pools = (name for name, module in model.named_modules() if isinstance(module, AttentionPool2d))
    undecayed |= {f"{name}.cls_token" if name else "cls_token" for name in pools}
    # Decay would make convolutions wider.
    undecayed |= {
        f"{name}.{p}"
        for name, module in model.named_modules()
        if isinstance(module, HeadConvolution)
        for p in ("theta", "prefix_theta")
    }
    undecayed |= set(getattr(model, "no_weight_decay", set)())
    groups: list[dict[str, Any]] = [
        {"name": "gates", "params": gates, "weight_decay": 0.0, "lr": gating_lr}
    ]
    queries_and_keys = [
        p for layer in layers.values() for p in (layer.query, layer.key) if p.requires_grad
    ]
    if qk_lr is not None:
        groups.append(
            {
                "name": "queries and keys",
                "params": queries_and_keys,
                "weight_decay": weight_decay,
                "lr": qk_lr,
            }
        )
    grouped = {id(p) for group in groups for p in group["params"]}
    for group in param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed):
        params = [p for p in group["params"] if id(p) not in grouped]
        decay = group["weight_decay"]
        groups.append(
            {
                "name": "decayed" if decay else "undecayed",
                "params": params,
                "weight_decay": decay,
                "lr": lr,
            }
        )
    return [group for group in groups if group["params"]]


def warn_of_stuck_gates(model: nn.Module) -> None:
    """Warn of GPSA layers with gates that have no gradient,
    and so can never learn to attend to content.

    The derivative of the sigmoid is gate (1 - gate). In float32 sigma(17) is exactly 1, so that the
    gradients of lambda and of queries and keys, whose attention has the weight 1 - gate, are
    exactly 0.
    """
    stuck = []
    for name, layer in gpsa_layers(model).items():
        gate = layer.gate.detach()
        heads = int((gate * (1 - gate) == 0).sum())
        if layer.gating.requires_grad and heads:
            stuck.append(f"{name or 'the model'} ({heads} of {len(gate)} heads)")
    if stuck:
        warnings.warn(
            "gates are exactly 0 or 1 and have no gradient, so these heads stay as they are: "
            f"{', '.join(stuck)}; gating=4 is a start near a convolution that can learn "
            "(reparameterize(..., gating=4))",
            RuntimeWarning,
            stacklevel=3,
        )


def papers_qk_lr(steps: int) -> float:
    """Return the peak rate of queries and keys with
    which a cosine schedule sums to the paper's 3.1.

    Args:
        steps: Number of steps in the whole training.
    """
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    return PAPERS_SUM / (0.5 * steps)


def rate_sums(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedules: Sequence[Any],
    marks: Sequence[int],
) -> list[dict[str, float]]:
    """Sum the learning rates of a training in advance,
    in units of the weights' initial standard deviation.

    Adam and its variants move a weight by no more than about the sum of its learning rates. If this
    sum is far below 1, the weights cannot have learned much.

    Args:
        model: Model before the training.
        optimizer: Optimizer of :func:`create_optimizer`.
        schedules: Schedules of :func:`create_schedules`.
        marks: Numbers of steps, ascending, after which to return the sums.

    Returns:
        For each mark, ``lr_sum`` of filters and matrices, ``qk_lr_sum`` of GPSA's queries and keys,
        and ``gating_lr_sum`` of the gates, which is in units of lambda; NaN for parameters that the
        model lacks.
    """
    layers = gpsa_layers(model).values()
    gates = [layer.gating for layer in layers]
    queries_and_keys = [parameter for layer in layers for parameter in (layer.query, layer.key)]
    attention = {id(parameter) for parameter in (*gates, *queries_and_keys)}
    weights = [
        p for p in model.parameters() if p.ndim > 1 and p.requires_grad and id(p) not in attention
    ]
    parts = {"lr_sum": weights, "qk_lr_sum": queries_and_keys, "gating_lr_sum": gates}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = {
        name: groups[id(part[0])] for name, part in parts.items() if part and id(part[0]) in groups
    }
    units = {name: 1.0 if name == "gating_lr_sum" else _deviation(parts[name]) for name in trained}
    before = [group["lr"] for group in optimizer.param_groups]
    # This is a dry run: the schedules set the rates of each step, and no weight is updated.
    totals = dict.fromkeys(trained, 0.0)
    sums = []
    for step in range(marks[-1] + 1):
        # The sum is read before the rate of this step is added, so that mark n sums the rates of n
        # steps.
        if step in marks:
            known = {
                name: total / units[name] if units[name] else math.nan
                for name, total in totals.items()
            }
            sums.append(dict.fromkeys(parts, math.nan) | known)
        for schedule in schedules:
            schedule.step_update(step)
        for name, group in trained.items():
            totals[name] += group["lr"]
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr
    return sums


def _deviation(parameters: Sequence[Tensor]) -> float:
    """Compute the root mean square of all elements of several tensors."""
    squares = sum(float(parameter.detach().double().square().sum()) for parameter in parameters)
    return math.sqrt(squares / sum(parameter.numel() for parameter in parameters))


def create_optimizer(
    model: nn.Module,
    opt: str,
    *,
    lr: float,
    gating_lr: float,
    weight_decay: float,
    qk_lr: float | None = None,
    momentum: float = 0.9,
) -> torch.optim.Optimizer:
    """Create an optimizer by timm's name, with the groups of :func:`parameter_groups`.

    "momentum" is SGD with classical momentum, not with Nesterov momentum.
    """
    groups = parameter_groups(model, lr, gating_lr, weight_decay, qk_lr=qk_lr)
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = {"fused": True} if opt in _FUSED and kinds <= {"cpu", "cuda"} else {}
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        groups, opt=opt, lr=lr, momentum=momentum, **fused
    )
    return optimizer


class _Groups:
    """View of an optimizer for a scheduler: only the group of gates, or only the other groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, gates: bool) -> None:
        self._optimizer = optimizer
        self._gates = gates

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [
            group
            for group in self._optimizer.param_groups
            if (group["name"] == "gates") == self._gates
        ]


def create_schedules(
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    steps: int,
    warmup_epochs: float,
    sched: str = "cosine",
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    gating_warmup_epochs: float | None = None,
    gating_min_lr: float | None = None,
    reaching_peak: bool = False,
) -> list[Any]:
    """Create timm's schedules for the weights and for the gates, to be updated before every step.

    The T-CNN paper gives the gates a learning rate of 0.1 and does not say how it changes. By
    default it follows the schedule of the weights, so that gates hardly move in the last steps;
    with a floor (``gating_min_lr``) they do.

    Args:
        optimizer: Optimizer of :func:`create_optimizer`.
        epochs, steps: Number of epochs, and number of steps in an epoch.
        warmup_epochs, warmup_lr, min_lr: Epochs of linear warm-up, its initial rate, and the
            schedule's final rate.
        sched: timm's name of a schedule.
        gating_warmup_epochs, gating_min_lr: Warm-up epochs and final rate of the gates; None for
            those of the weights.
        reaching_peak: Whether the schedule starts after the warm-up, at the peak. By default in
            timm, and so in the published recipes, it starts with the first step, and the warm-up
            hides its first part: a training of few epochs then never reaches the peak.
    """
    weights = (warmup_epochs, min_lr)
    gates = (
        warmup_epochs if gating_warmup_epochs is None else gating_warmup_epochs,
        min_lr if gating_min_lr is None else gating_min_lr,
    )
    # A schedule of timm has one warm-up and one floor for all groups of an optimizer, so the gates
    # need another one.
    schedules = []
    for view, (warmup, floor) in (
        (_Groups(optimizer, False), weights),
        (_Groups(optimizer, True), gates),
    ):
        if view.param_groups:
            schedule, _ = create_scheduler_v2(
                view,
                sched=sched,
                num_epochs=epochs - warmup if reaching_peak else epochs,
                warmup_epochs=warmup,
                warmup_prefix=reaching_peak,
                warmup_lr=warmup_lr,
                min_lr=floor,
                step_on_epochs=False,
                updates_per_epoch=steps,
            )
            schedules.append(schedule)
    return [schedule for schedule in schedules if schedule is not None]


def set_drop_path(model: nn.Module, rate: float, *, uniform: bool = False) -> int:
    """Set stochastic depth: the probability of dropping a residual branch for an image in training.

    "We adopt a uniform drop rate for all layers" (PatchConvNet paper, Sec. 3.3; also CaiT, thesis
    Table 3.16, and DeiT III, Sec. 6.2.1). The T-CNN paper gives one number per model and builds on
    timm, in whose ResNets the rate increases linearly from 0 at the first residual block to
    ``rate`` at the last. Attention pools and class-attention blocks keep 0: there are only one or
    two of them, and without them the class token would see nothing of the image.

    Args:
        model: Model to change in place; timm's blocks carry a ``drop_path`` (also ``drop_path1``,
            ``drop_path2``).
        rate: Rate of the last block, or of every block, in [0, 1).
        uniform: Whether every block gets the same rate.

    Returns:
        The number of residual blocks that were set; 0 if the model has none, and is unchanged.

    Raises:
        ValueError: The rate is outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"expected a drop path rate in [0, 1), got {rate}")
    modules = [(module, _drop_paths(module)) for module in model.modules()]
    blocks = [(block, names) for block, names in modules if names]
    trunk = [block for block, _ in blocks if not _is_class_attention(block)]
    # A single block gets 0, the rate of the first block; max(..., 1) avoids a division by zero.
    last = max(len(trunk) - 1, 1)
    rates = {
        id(block): rate if uniform else rate * number / last for number, block in enumerate(trunk)
    }
    for block, names in blocks:
        p = rates.get(id(block), 0.0)
        for name in names:
            # A new module starts in training mode, even if the model is in eval mode.
            setattr(block, name, DropPath(p).train(block.training) if p else nn.Identity())
    return len(trunk)


def _drop_paths(block: nn.Module) -> list[str]:
    """Return the names of a block's attributes for stochastic depth,
    even if unset (None in timm's ResNets).
    """
    names = [
        name
        # torch keeps an attribute that is None in __dict__, but modules in _modules.
        for name in {**vars(block), **block._modules}
        if re.fullmatch(r"drop_path\d?", name)
    ]
    return [
        name for name in names if isinstance(getattr(block, name), DropPath | nn.Identity | None)
    ]


def _is_class_attention(block: nn.Module) -> bool:
    """Return True if the block's attention updates class tokens only (CaiT, XCiT, VOLO and
    attention pools).
    """
    return any(
        isinstance(child, ClassAttn | VOLOClassAttention | PatchAttention)
        for child in block.children()
    )
