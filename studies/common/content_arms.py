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
        title: in tables.
        attends: whether convolutions become attention.
        papers_rates: one rate for all weights, and 0.1 for gates from the first step.
        static_map: content attention is a learned map, the same for every image.
        gate_at_one: position alone; the gate is not trained.
        mixes: CutMix and mixup of the images.
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
            layer: whose other parameters are copied.
            size: height and width of its input.
        """
        shape = (
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
        )
        new = cls(*shape, layer.groups, layer.bias is not None)
        y, x = layer.axes(*size)
        keys = y.length * x.length
        kept = {
            name: value
            for name, value in layer.state_dict().items()
            if name not in ("query", "key")
        }
        new.load_state_dict(kept, strict=False)
        new.query = nn.Parameter(torch.zeros(new.heads, y.queries * x.queries, keys))
        new.key = nn.Parameter(torch.eye(keys), requires_grad=False)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H_out, W_out); attention is formed once for all images."""
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
        tail: of the CNN.
        arm: which training.
        start: initial lambda of the gates.
        features: a batch of what the tail takes, for its size.
        seed: of queries and keys.
    """
    torch.manual_seed(seed)
    convolutions = [
        name for name, module in tail.named_modules() if isinstance(module, nn.Conv2d)
    ]
    size = tuple(features.shape[1:])
    model = reparameterize(
        tail, layers=convolutions, stride="keep", gating=start, input_size=size
    )
    if arm.static_map:
        sizes = input_sizes(model, features)
        for name, layer in gpsa_layers(model).items():
            parent, _, child = name.rpartition(".")
            setattr(
                model.get_submodule(parent), child, StaticMapGPSA.of(layer, sizes[name])
            )
    if arm.gate_at_one:
        for layer in gpsa_layers(model).values():
            nn.init.constant_(layer.gating, 40.0)  # whose sigmoid is 1 in float32
            layer.gating.requires_grad_(False)
    return model


def input_sizes(model: nn.Module, features: Tensor) -> dict[str, tuple[int, int]]:
    """Height and width of the input of each GPSA layer."""
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
    """Train the tail in place.

    Args:
        model: the tail.
        batches: features and targets of each step: classes (B,) or shares of classes (B, K).
        arm: which training.
        options: ``steps``, ``lr`` of the weights, ``qk_sum`` of the rates of queries and keys, ``map_sum`` of static
            maps, ``gating_lr``, ``papers_lr``, ``papers_gating_lr``, ``weight_decay``, ``frozen_statistics``, ``amp``.
        after: called with the number of steps done, before the first step and after each.

    Returns:
        the sum of the learning rates of each group.
    """
    steps = options["steps"]
    factors = [rate_factor(step, steps) for step in range(steps)]
    groups = _groups(model, arm, options, sum(factors))
    optimizer = torch.optim.AdamW(groups, fused=True)
    peaks = {group["name"]: group["lr"] for group in optimizer.param_groups}
    sums = dict.fromkeys(peaks, 0.0)
    after(0)
    for step, (features, targets) in enumerate(batches):
        model.train()
        if options["frozen_statistics"]:
            _freeze_statistics(model)
        for group in optimizer.param_groups:
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
            label_smoothing=0.0 if arm.mixes else LABEL_SMOOTHING,
        ).backward()
        optimizer.step()
        after(step + 1)
    return sums


def mixed_batches(
    batches: Iterator[tuple[Tensor, Tensor]], trunk: nn.Module, classes: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mix images by CutMix or mixup as DeiT does, and give the trunk's features of them.

    Args:
        batches: images and classes.
        trunk: frozen.
        classes: their number.
        seed: of the mixing; timm draws it from NumPy's global generator.
    """
    mix = Mixup(
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
    """Optimizer groups; ``total`` is the sum of the schedule's factors, by which a sum of rates becomes a peak."""
    decay = options["weight_decay"]
    if arm.papers_rates:
        lr, gating_lr, qk_lr = (
            options["papers_lr"],
            options["papers_gating_lr"],
            options["papers_lr"],
        )
    else:
        lr, gating_lr = options["lr"], options["gating_lr"]
        qk_lr = options["map_sum" if arm.static_map else "qk_sum"] / total
    return parameter_groups(model, lr, gating_lr, decay, qk_lr=qk_lr)


def _freeze_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
