"""Masks that a model adds to the logits of a softmax, such as -100 for each hidden key.

In the logits such a mask cannot be told from a peaked head, so the addition itself is followed.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_probe.attention.place_rules import Call
from tcnn_probe.attention.visibility import HIDDEN, HIDDEN_BY_MASK

__all__ = ["AddedMasks"]

_ADDITIONS = {"add", "add_", "__add__", "__iadd__", "__radd__"}
_SUBTRACTIONS = {"sub", "sub_", "__sub__", "__isub__"}
_FILLS = {"masked_fill", "masked_fill_"}
# Between the mask and the softmax, logits are scaled, as by 1 / sqrt(d), cast and reshaped.
_KEEPING = {
    *_ADDITIONS, *_SUBTRACTIONS, *_FILLS,
    *("mul", "mul_", "__mul__", "__imul__", "__rmul__", "div", "div_", "__truediv__"),
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("to", "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone"),
}  # fmt: skip


class AddedMasks:
    """Table of the keys that masks hide in tensors of a forward."""

    def __init__(self) -> None:
        # Tensors are weak keys, so that none lives longer than in the model.
        self._hidden: Any = WeakTensorKeyDictionary()

    def of(self, logits: Tensor) -> Tensor | None:
        """Return where keys are hidden, in the shape of the logits; None without a mask."""
        return self._hidden.get(logits)

    def follow(self, name: str, call: Call) -> None:
        """Note where the output of a function has hidden keys."""
        for output in call.outputs[:1]:
            masks = [self._hidden[x] for x in call.inputs if x in self._hidden]
            self._hidden.pop(output, None)  # of an in-place function
            # alpha= scales a summand, which may then hide nothing.
            if name not in _KEEPING or "alpha" in call.kwargs:
                continue
            if name in _ADDITIONS and len(call.inputs) == 2:
                masks += [_keys_hidden_by(x, output) for x in call.inputs]
            if name in _SUBTRACTIONS and len(call.inputs) == 2:
                masks.append(_keys_hidden_by(-call.inputs[1], output))
            if name in _FILLS and HIDDEN < call.argument(2, "value") <= HIDDEN_BY_MASK:
                masks.append(call.argument(1, "mask"))
            for mask in masks:
                if mask is not None and mask.shape[-1] == output.shape[-1]:
                    is_reshaped = mask.numel() == output.numel()
                    mask = mask.reshape(output.shape) if is_reshaped else mask.expand(output.shape)
                    self._hidden[output] = mask | self._hidden.get(output, mask)


def _keys_hidden_by(summand: Tensor, total: Tensor) -> Tensor | None:
    """Return where a summand hides keys; None if it is no mask, all of whose numbers are 0 or far
    below, or one that is seen in the logits.
    """
    if summand.ndim < 2 or not summand.is_floating_point() or summand.requires_grad:
        return None
    hidden = summand <= HIDDEN_BY_MASK
    if not bool((hidden | (summand == 0)).all()) or bool((summand <= HIDDEN).any()):
        return None
    # A mask of zeros hides keys in other forwards, but so does no branch that is zero at first.
    is_branch = summand.shape == total.shape and not bool(hidden.any())
    return None if is_branch else hidden
