"""Arms that separate the effect of content from that
of mixing over the image: their models, rates and training.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from torch import Tensor, nn

from common.stepwise import LABEL_SMOOTHING, rate_factor, take_steps
from tcnn_model import GPSA, gpsa_layers, parameter_groups, reparameterize

__all__ = [
    "ARMS",
    "PROTOCOL",
    "OffsetKernelGPSA",
    "StaticMapGPSA",
    "converted",
    "train_tail",
]

PROTOCOL = {
    "lr": 1e-3,
    "gating_lr": 0.02,
    "papers_lr": 1e-4,
    "papers_gating_lr": 0.1,
    "weight_decay": 0.05,
}
"""Learning rates and weight decay of the protocol."""

QK_STD = 0.02
"""Initial standard deviation of the weights of queries and keys."""


@dataclass(frozen=True)
class Arm:
    """A kind of training in the comparison.

    Attributes:
        title: Title of the arm in tables.
        attends: Whether convolutions are converted to attention.
        papers_rates: Whether all weights share a learning rate and gates are trained from the first
            step, as in the papers.
        static_map: Whether content attention is a learned map, the same for every image.
        by_offset: Whether the learned map of ``static_map`` has one number for each offset from
            query to key.
        gate_at_one: Whether gates are fixed at 1, so that heads attend by position alone.
        uniform_content: Whether keys are fixed at zero, so that the content part is uniform.
        mixes: Whether images are mixed by CutMix and mixup.
    """

    title: str
    attends: bool = True
    papers_rates: bool = False
    static_map: bool = False
    by_offset: bool = False
    gate_at_one: bool = False
    uniform_content: bool = False
    mixes: bool = False

    @property
    def has_content(self) -> bool:
        """Whether attention depends on the image."""
        is_fixed = self.static_map or self.gate_at_one or self.uniform_content
        return self.attends and not is_fixed


ARMS = {
    "A": Arm("the CNN, as long", attends=False),
    "B": Arm("the papers' rates", papers_rates=True),
    "C": Arm("content"),
    "D": Arm("a learned static map", static_map=True),
    "E": Arm("position alone (gate at 1)", gate_at_one=True),
    "F": Arm("content, CutMix and mixup", mixes=True),
    "T": Arm("a learned kernel over offsets", static_map=True, by_offset=True),
    "U": Arm("uniform content (keys at zero)", uniform_content=True),
}


class StaticMapGPSA(GPSA):
    """GPSA with ``C_h = softmax(L_h)`` for its content part:
    a learned N_query x N_key map, the same for every image.

    ``query`` holds L, shape (heads, N_query, N_key), and ``key`` the identity, so that recordings
    and ablations, which multiply queries and keys, see the logits L. The gate, the positional part,
    W_val and W_out are those of GPSA.
    """

    @classmethod
    def of(cls, layer: GPSA, size: tuple[int, int]) -> Self:
        """Return the layer with a uniform map in place of its queries and keys.

        Args:
            layer: Layer whose other parameters are copied.
            size: Height and width of the layer's input.
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
        # The products of L with an identity as keys are L itself.
        static_layer.key = nn.Parameter(torch.eye(keys), requires_grad=False)
        return static_layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, (B, C_in, H, W) -> (B, C_out, H_out, W_out);
        attention is computed once for all images.
        """
        # One image is enough, because neither part of the attention depends on the image.
        attention = self.gated_attention(x[:1])
        content = attention.content()
        rows, cols = attention.factors_on_pixels(content.dtype)
        gate = attention.gate[:, None, None].to(content.dtype)
        values = self.values(x)
        positional = torch.einsum("hyj,hxi->hyxji", rows, cols).flatten(3).flatten(1, 2)
        # CUDA autocast gives the content in float32 and products in half precision.
        mixed = torch.lerp(content, positional.to(content.dtype), gate)[0].to(values.dtype)
        return self.combine(torch.einsum("hqk,bkc->bhqc", mixed, values[:, 0]), attention)

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # GPSA divides products by the square root of the length of queries and keys, which here is
        # the number of keys.
        logits = self._map() * math.sqrt(len(self.key))
        return logits.expand(len(x), -1, -1, -1), self.key.expand(len(x), self.heads, -1, -1)

    def _map(self) -> Tensor:
        """Return L, (heads, N_query, N_key)."""
        return self.query


class OffsetKernelGPSA(StaticMapGPSA):
    """:class:`StaticMapGPSA` with ``L_h(i, j) = theta_h(j - i)``:
    a number for each offset, a convolution of any reach.

    ``query`` holds theta, shape (heads, offsets): 225 numbers a head on a grid of 8 x 8, where a
    map has 4,096.
    """

    @classmethod
    def of(cls, layer: GPSA, size: tuple[int, int]) -> Self:
        """Return the layer with a uniform kernel in place of its queries and keys.

        Args:
            layer: Layer of stride 1 with as many queries as pixels, whose other parameters are
                copied.
            size: Height and width of the layer's input.
        """
        kernel_layer = super().of(layer, size)
        height, width = size
        rows, cols = torch.meshgrid(*map(torch.arange, size), indexing="ij")
        dy = rows.flatten() - rows.flatten()[:, None] + height - 1
        dx = cols.flatten() - cols.flatten()[:, None] + width - 1
        # Offsets are numbered row by row, (N_query, N_key).
        kernel_layer.register_buffer("offsets", dy * (2 * width - 1) + dx)
        kernel_layer.query = nn.Parameter(
            torch.zeros(kernel_layer.heads, (2 * height - 1) * (2 * width - 1))
        )
        return kernel_layer

    def _map(self) -> Tensor:
        return self.query[:, self.offsets]


def converted(tail: nn.Module, arm: Arm, start: float, features: Tensor, seed: int) -> nn.Module:
    """Return a copy of the CNN's tail in the initial state of an arm.

    Args:
        tail: Tail of the CNN.
        arm: Arm that the copy is for.
        start: Initial lambda of the gates.
        features: Batch of the tail's input features, which tells the size of the input.
        seed: Seed of the initial queries and keys.
    """
    # Queries and keys are drawn from torch's global generator.
    torch.manual_seed(seed)
    # Every convolution is named, because reparameterize converts only the last stage by default.
    convolutions = [name for name, module in tail.named_modules() if isinstance(module, nn.Conv2d)]
    size = tuple(features.shape[1:])
    model = reparameterize(tail, layers=convolutions, stride="keep", gating=start, input_size=size)
    if arm.static_map:
        # A map has an entry for each query and key, so its shape depends on the size of the layer's
        # input.
        sizes = input_sizes(model, features)
        for name, layer in gpsa_layers(model).items():
            # torch has no public way to replace a module by its dotted name.
            parent, _, child = name.rpartition(".")
            static = OffsetKernelGPSA if arm.by_offset else StaticMapGPSA
            setattr(model.get_submodule(parent), child, static.of(layer, sizes[name]))
    if arm.gate_at_one:
        for layer in gpsa_layers(model).values():
            # The sigmoid of 40 is 1 in float32.
            nn.init.constant_(layer.gating, 40.0)
            # Content has no weight, so that queries and keys would have no gradient either.
            for parameter in (layer.gating, layer.query, layer.key):
                parameter.requires_grad_(False)
    if arm.uniform_content:
        for layer in gpsa_layers(model).values():
            # With keys at zero, queries have no gradient.
            nn.init.zeros_(layer.key)
            for parameter in (layer.query, layer.key):
                parameter.requires_grad_(False)
    return model


def input_sizes(model: nn.Module, features: Tensor) -> dict[str, tuple[int, int]]:
    """Return the height and width of the input of each GPSA layer."""
    sizes: dict[str, tuple[int, int]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: sizes.update({name: tuple(inputs[0].shape[2:])})
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
        batches: Features and targets of each step: classes (B,) or class probabilities (B, K).
        arm: Arm whose learning rates and targets are used.
        options: Mapping with ``steps``; ``lr`` of the weights; ``qk_sum`` and ``map_sum``, sums
            over the steps of the learning rates of queries and keys, and of static maps;
            ``gating_lr``, ``papers_lr``, ``papers_gating_lr``, ``weight_decay``,
            ``frozen_statistics`` and ``amp``.
        after: Function that is called with the number of steps done, before the first step and
            after each.

    Returns:
        Sum of the learning rates over the steps, by group.
    """
    steps = options["steps"]
    factors = [rate_factor(step, steps) for step in range(steps)]
    groups = _groups(model, arm, options, sum(factors))
    # The fused optimizer makes one pass over all weights, instead of several for each tensor.
    optimizer = torch.optim.AdamW(groups, fused=True)
    peaks = {group["name"]: group["lr"] for group in optimizer.param_groups}
    sums = dict.fromkeys(peaks, 0.0)

    def rate(step: int, group: dict[str, Any]) -> float:
        # The protocol freezes gates for a quarter of the steps, so that content can form first; the
        # papers do not.
        waits = group["name"] == "gates" and not arm.papers_rates and step < steps // 4
        return 0.0 if waits else peaks[group["name"]] * factors[step]

    def loss_of(features: Tensor, targets: Tensor) -> Tensor:
        model.train()
        if options["frozen_statistics"]:
            _freeze_statistics(model)
        with torch.autocast(features.device.type, torch.bfloat16, enabled=options["amp"]):
            scores = model(features)
        # timm's Mixup has smoothed the class probabilities already.
        smoothing = 0.0 if arm.mixes else LABEL_SMOOTHING
        return F.cross_entropy(scores.float(), targets, label_smoothing=smoothing)

    def after_step(step: int, _: Tensor) -> None:
        for group in optimizer.param_groups:
            sums[group["name"]] += group["lr"]
        after(step)

    after(0)
    take_steps(optimizer, batches, loss_of, rate, after=after_step)
    return sums


def mixed_batches(
    batches: Iterator[tuple[Tensor, Tensor]], trunk: nn.Module, classes: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mix images by CutMix or mixup as DeiT does, and yield the trunk's features of them.

    Args:
        batches: Images and classes.
        trunk: Frozen trunk.
        classes: Number of classes.
        seed: Seed of NumPy's global generator, from which timm draws the mixing.
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
    """Return the optimizer's groups; a sum of rates divided by ``total``,
    the sum of the factors, is a peak rate.
    """
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
    """Put batch norms in eval mode, so that they keep the means and variances of the CNN."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
