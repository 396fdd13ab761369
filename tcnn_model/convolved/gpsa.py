"""GPSA layers in which some heads are convolutions of their values."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tcnn_model.convolved.head_convolution import HeadConvolution
from tcnn_model.gpsa.functional import attend
from tcnn_model.gpsa.layer import GPSA
from tcnn_model.gpsa.positional import Axis

__all__ = ["AttendingHeads", "ConvolvedGPSA"]

_BY_HEAD = ("query", "key", "raw_locality", "center", "gating")


class AttendingHeads(GPSA):
    """The heads of a GPSA layer that still attend,
    with W_val and W_out of all; never called as a whole.
    """


class ConvolvedGPSA(nn.Module):
    """Gated attention of fewer heads, beside heads that are convolutions,
    whose values and W_out stay as they were.

    Args:
        layer: GPSA layer, which is not changed.
        heads: Indices of the heads that become convolutions.
        convolution: Their kernels, in the same order, over the grid extended by the padding.

    Attributes:
        convolved, attending: Indices of the heads that are convolutions, and of the others.
        convolution: The :class:`HeadConvolution`.
        gpsa: W_val and W_out of all heads, and queries, keys, gates and positions of the attending
            ones.

    Shape:
        (B, C_in, H, W) -> (B, C_out, H_out, W_out), as in :class:`~tcnn_model.GPSA`.
    """

    def __init__(self, layer: GPSA, heads: Sequence[int], convolution: HeadConvolution) -> None:
        super().__init__()
        self.convolved = tuple(heads)
        self.attending = tuple(i for i in range(layer.heads) if i not in self.convolved)
        self.convolution = convolution
        # Parameters that are not divided by heads stay the layer's own, which keeps ties.
        self.gpsa = copy.copy(layer)
        self.gpsa.__class__ = AttendingHeads
        self.gpsa._parameters = layer._parameters.copy()
        self.gpsa._modules = layer._modules.copy()
        self.gpsa.heads = len(self.attending)
        for name in _BY_HEAD:
            parameter = getattr(layer, name)
            by_head = parameter.detach().unflatten(0, (layer.heads, -1))
            kept = by_head[list(self.attending)].flatten(0, 1)
            setattr(self.gpsa, name, nn.Parameter(kept.clone(), parameter.requires_grad))
        order = torch.tensor([*self.attending, *self.convolved]).argsort()
        self.register_buffer("_order", order.to(layer.weight.device), False)
        self._order: Tensor
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C_in, H, W) -> (B, C_out, H_out, W_out)."""
        y, x_axis = self.gpsa.axes(x.shape[2], x.shape[3])
        values = self.gpsa.values(x)
        maps = values[:, 0].mT.unflatten(2, x.shape[2:])
        convolved = self.convolution(maps.repeat(1, len(self.convolved), 1, 1), y, x_axis)
        by_head = convolved.unflatten(1, (len(self.convolved), -1))
        outputs = [by_head.flatten(3).transpose(2, 3)]
        if self.attending:
            outputs.insert(0, attend(self.gpsa.gated_attention(x), values))
        heads = torch.cat(outputs, 1).index_select(1, self._order)
        return self.project(heads, y, x_axis)

    def project(self, heads: Tensor, y: Axis, x: Axis) -> Tensor:
        """Return the layer's output for outputs of all heads, (B, heads, N_query, C_in)."""
        axes: Any = _Axes(y, x)
        return self.gpsa.combine(heads, axes)

    @torch.no_grad()
    def attention(self, x: Tensor) -> Tensor:
        """Return the attention of all heads in their original order, for recorders and tests.

        Returns:
            Shape (B, heads, N_query, N_key), as from :meth:`tcnn_model.GPSA.attention`.
        """
        logits = self.convolution.logits(*self.gpsa.axes(x.shape[2], x.shape[3]))
        convolved = torch.softmax(logits, -1).expand(len(x), -1, -1, -1)
        attention = [convolved]
        if self.attending:
            attention.insert(0, self.gpsa.attention(x).to(convolved))
        return torch.cat(attention, 1).index_select(1, self._order)


class _Axes(NamedTuple):
    """Axes in place of an attention, which may have no heads left."""

    y: Axis
    x: Axis
