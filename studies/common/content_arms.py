"""The arms that tell content from mixing over the image: what is trained, at which rates, and for how long."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from torch import Tensor, nn

from common.small_trainings import LABEL_SMOOTHING, rate_factor
from tcnn_model import GPSA, gpsa_layers, parameter_groups, reparameterize

__all__ = ["ARMS", "Arm", "StaticMapGPSA", "converted", "train_tail"]

QK_STD = 0.02
"""Initial standard deviation of the weights of queries and keys."""


@dataclass(frozen=True)
class Arm:
    """A training of the comparison.

    Attributes:
        title: Title of the arm in tables.
        attends: Whether convolutions become attention.
        papers_rates: Whether all weights have one rate, and gates 0.1 from the first step.
        static_map: Whether content attention is a learned map, the same for every image.
        gate_at_one: Whether heads attend by position alone; the gate is not trained.
        mixes: Whether images are mixed by CutMix and mixup.
    """

    title: str
    attends: bool = True
    papers_rates: bool = False
    static_map: bool = False
    gate_at_one: bool = False
    mixes: bool = False


ARMS = {
    "A": Arm("the CNN, as long", attends=False),
    "B": Arm("the papers' rates", papers_rates=True),
    "C": Arm("content"),
    "D": Arm("a learned static map", static_map=True),
    "E": Arm("position alone (gate at 1)", gate_at_one=True),
    "F": Arm("content, CutMix and mixup", mixes=True),
}


class StaticMapGPSA(GPSA):
    """GPSA with ``C_h = softmax(L_h)`` for its content part: a learned N_query x N_key map, the same for every image.

    ``query`` holds L, shape (heads, N_query, N_key), and ``key`` the identity, so that what records or ablates a GPSA
    layer sees the logits L as products of queries and keys. All else is GPSA's: gate, positional part, W_val, W_out.
    """

    @classmethod
    def of(cls, layer: GPSA, size: tuple[int, int]) -> Self:
        """Return the layer with an even map in place of its queries and keys.

        Args:
            layer: Layer whose other parameters are copied.
            size: Height and width of its input.
        """
        shape = (
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
        )
        static_layer = cls(*shape, layer.groups, layer.bias is not None)
        y, x = layer.axes(*size)
        keys = y.length * x.length
        shared_state = {
            name: value
            for name, value in layer.state_dict().items()
            if name not in ("query", "key")
        }
        static_layer.load_state_dict(shared_state, strict=False)
        static_layer.query = nn.Parameter(
            torch.zeros(static_layer.heads, y.queries * x.queries, keys)
        )
        # Products with the identity are the map's own logits.
        static_layer.key = nn.Parameter(torch.eye(keys), requires_grad=False)
        return static_layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to images, (B, C_in, H, W) -> (B, C_out, H_out, W_out), with attention formed once."""
        # One image will do: neither part depends on it.
        attention = self.gated_attention(x[:1])
        content = attention.content()
        rows, cols = attention.factors_on_pixels(content.dtype)
        gate = attention.gate[:, None, None].to(content.dtype)
        values = self.values(x)
        positional = torch.einsum("hyj,hxi->hyxji", rows, cols).flatten(3).flatten(1, 2)
        mixed = torch.lerp(content, positional, gate)[0].to(values.dtype)
        return self.combine(
            torch.einsum("hqk,bkc->bhqc", mixed, values[:, 0]), attention
        )

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # GPSA divides products by the root of their length, which here is the number of keys.
        logits = self.query * math.sqrt(self.query.shape[-1])
        return logits.expand(len(x), -1, -1, -1), self.key.expand(
            len(x), self.heads, -1, -1
        )


def converted(
    tail: nn.Module, arm: Arm, start: float, features: Tensor, seed: int
) -> nn.Module:
    """Return a copy of the CNN's tail as the arm begins with it.

    Args:
        tail: Tail of the CNN.
        arm: Arm that the copy is for.
        start: Initial lambda of the gates.
        features: Batch of features as the tail takes them, for its size.
        seed: Seed of queries and keys.
    """
    # Queries and keys are drawn from torch's global generator.
    torch.manual_seed(seed)
    # Named one by one: without names only the last stage of a known model would be converted.
    convolutions = [
        name for name, module in tail.named_modules() if isinstance(module, nn.Conv2d)
    ]
    size = tuple(features.shape[1:])
    model = reparameterize(
        tail, layers=convolutions, stride="keep", gating=start, input_size=size
    )
    if arm.static_map:
        # A map belongs to positions, so its size is that of the layer's input.
        sizes = input_sizes(model, features)
        for name, layer in gpsa_layers(model).items():
            # torch has no public way to replace a module by its dotted name.
            parent, _, child = name.rpartition(".")
            setattr(
                model.get_submodule(parent), child, StaticMapGPSA.of(layer, sizes[name])
            )
    if arm.gate_at_one:
        for layer in gpsa_layers(model).values():
            # The sigmoid of 40 is 1 in float32.
            nn.init.constant_(layer.gating, 40.0)
            layer.gating.requires_grad_(False)
    return model


def input_sizes(model: nn.Module, features: Tensor) -> dict[str, tuple[int, int]]:
    """Return the height and width of the input of each GPSA layer."""
    sizes: dict[str, tuple[int, int]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: sizes.update(
                {name: tuple(inputs[0].shape[2:])}
            )
        )
        for name, layer in gpsa_layers(model).items()
    ]
    try:
        with torch.no_grad():
            model.eval()(features[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def train_tail(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    arm: Arm,
    options: Mapping[str, Any],
    after: Callable[[int], None],
) -> dict[str, float]:
    """Train the tail in place, and return the sum of the learning rates of each group.

    Args:
        model: Tail of the network.
        batches: Features and targets of each step: classes (B,) or shares of classes (B, K).
        arm: Arm whose rates and targets are used.
        options: Mapping with ``steps``, ``lr`` of the weights, ``qk_sum`` of the rates of queries and keys, ``map_sum``
            of static maps, ``gating_lr``, ``papers_lr``, ``papers_gating_lr``, ``weight_decay``, ``frozen_statistics``,
            ``amp``.
        after: Function of the number of steps done, called before the first step and after each.

    Returns:
        Sum of the learning rates over the steps, by group.
    """
    steps = options["steps"]
    factors = [rate_factor(step, steps) for step in range(steps)]
    groups = _groups(model, arm, options, sum(factors))
    # Fused: one pass over all weights instead of several for each tensor.
    optimizer = torch.optim.AdamW(groups, fused=True)
    peaks = {group["name"]: group["lr"] for group in optimizer.param_groups}
    sums = dict.fromkeys(peaks, 0.0)
    after(0)
    for step, (features, targets) in enumerate(batches):
        model.train()
        if options["frozen_statistics"]:
            _freeze_statistics(model)
        for group in optimizer.param_groups:
            # The protocol freezes gates for a quarter of the steps, so that content can form first; the papers do not.
            waits = (
                group["name"] == "gates" and not arm.papers_rates and step < steps // 4
            )
            group["lr"] = 0.0 if waits else peaks[group["name"]] * factors[step]
            sums[group["name"]] += group["lr"]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options["amp"]):
            scores = model(features)
        F.cross_entropy(
            scores.float(),
            targets,
            # timm's Mixup has already smoothed class probabilities.
            label_smoothing=0.0 if arm.mixes else LABEL_SMOOTHING,
        ).backward()
        optimizer.step()
        after(step + 1)
    return sums


def mixed_batches(
    batches: Iterator[tuple[Tensor, Tensor]], trunk: nn.Module, classes: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mix images by CutMix or mixup as DeiT does, and yield the trunk's features of them.

    Args:
        batches: Images and classes.
        trunk: Frozen trunk.
        classes: Number of classes.
        seed: Seed of the mixing; timm draws it from NumPy's global generator.
    """
    mix = Mixup(
        # DeiT's values.
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
        label_smoothing=LABEL_SMOOTHING,
        num_classes=classes,
    )
    np.random.seed(seed)  # noqa: NPY002 (timm's Mixup draws from it)
    for images, labels in batches:
        images, shares = mix(images, labels)
        with torch.no_grad():
            features = trunk(images)
        yield features, shares.float()


def _groups(
    model: nn.Module, arm: Arm, options: Mapping[str, Any], total: float
) -> list[dict[str, Any]]:
    """Return the optimizer's groups; ``total``, the sum of the schedule's factors, makes a peak of a sum of rates."""
    decay = options["weight_decay"]
    if arm.papers_rates:
        lr = options["papers_lr"]
        gating_lr = options["papers_gating_lr"]
        qk_lr = options["papers_lr"]
    else:
        lr, gating_lr = options["lr"], options["gating_lr"]
        qk_lr = options["map_sum" if arm.static_map else "qk_sum"] / total
    return parameter_groups(model, lr, gating_lr, decay, qk_lr=qk_lr)


def _freeze_statistics(model: nn.Module) -> None:
    """Keep the means and variances that batch norm learned with the CNN."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
