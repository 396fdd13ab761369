"""Direct calls of fused attention kernels of flash-attn, xformers and torch.

The packages call these operators inside their autograd functions. Arguments are read by the names
in the operator's schema, which change less from version to version than their positions do. A call
with an unknown option is not described; the reason names the option.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["KernelCall", "OpOverload", "OpOverloadPacket", "is_kernel", "read_kernel"]

# Types of operators, whose module is private.
OpOverloadPacket: type[Any] = type(torch.ops.aten.add)
OpOverload: type[Any] = type(torch.ops.aten.add.Tensor)

# Operators of flash-attn 2.7 and later, also under the names of the package "kernels", of xformers
# and of torch. Earlier versions of flash-attn call an extension module that modes cannot see.
_KERNELS = re.compile(
    r"(\w*flash_?attn\w*\.\w*|xformers\w*\.\w*|aten\._(efficient|flash)_attention_)(fwd|forward)"
    # Operators behind torch.nn.attention.varlen and behind scaled_dot_product_attention.
    r"|torch_attn\._varlen_attn|aten\._scaled_dot_product_(?!\w*backward)"
)
# Options that do not change the attention: sizes for allocation, further return values, and hints.
_HARMLESS = re.compile(
    r"max_\w+|return_\w+|compute_log_?sumexp|num_splits|\w+_gqa|\w*_margin|backend"
)
_OFF = (None, False, 0, -1)


@dataclass(frozen=True)
class KernelCall:
    """Arguments of a kernel. Query, key, value and output have the shape (B, heads, N, d).

    Args:
        query, key, value, output: Tensors; key and value may have fewer heads than query.
        scale: Factor of the products.
        mask: Numbers to add to the logits, or True where a query may attend to a key; None for no
            mask.
        dropout: Probability of dropout.
        is_causal: Whether queries attend to no later keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    mask: Tensor | None
    dropout: float
    is_causal: bool


def is_kernel(func: Callable[..., Any]) -> bool:
    """Return whether a function is an operator with the name of an attention kernel's forward."""
    is_operator = isinstance(func, (OpOverload, OpOverloadPacket))
    return is_operator and _KERNELS.match(str(func)) is not None


class _UnknownError(Exception):
    """A call has an option that is not known here; the message names it."""


def read_kernel(
    func: Any, output: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> KernelCall | str | None:
    """Read a call; return a reason if the call cannot be interpreted,
    or None if it is not attention.

    Args:
        func: Operator, see :func:`is_kernel`.
        output: Tensor that the operator returned, or a sequence of tensors.
        args, kwargs: Arguments of the call.
    """
    overload = func.default if isinstance(func, OpOverloadPacket) else func
    names = [argument.name for argument in overload._schema.arguments]
    values = {argument.name: argument.default_value for argument in overload._schema.arguments}
    values |= dict(zip(names, args, strict=False)) | kwargs

    def take(*spellings: str) -> Any:
        """Return the argument that has one of these names,
        and count it as known; None if there is none.
        """
        present = [values.pop(name) for name in spellings if name in values]
        return present[0] if present else None

    tokens = take("query", "q"), take("key", "k"), take("value", "v")
    if not all(isinstance(x, Tensor) for x in tokens):
        return None
    try:
        lengths = [
            (
                take(f"cu_seqlens_{side}", f"cum_seq_{side}", f"cu_seq_{side}"),
                take(f"max_seqlen_{side}", f"max_{side}"),
            )
            for side in "qk"
        ]
        first = output if isinstance(output, Tensor) else output[0]
        query, key, value, attended = (*tokens, first)
        if "scaled_dot_product" not in str(func):  # which has (B, heads, N, d) already
            query, key, value, attended = (
                _by_head(x, *lengths[side])
                for x, side in zip((*tokens, first), (0, 1, 1, 0), strict=True)
            )
        scale, dropout = take("softmax_scale", "scale"), take("dropout_p", "p")
        is_causal = bool(take("causal", "is_causal") or take("custom_mask_type"))
        left = take("window_size_left", "window_left")
        right = take("window_size_right", "window_right")
        if isinstance(values.get("window_size"), Sequence):
            left, right = take("window_size")
        mask = _visible(
            query,
            key,
            before=_reach(left),
            behind=0 if is_causal else _reach(right),
            # In flash-attn's documentation the last query sees the last key; in others this depends
            # on version and mask.
            is_aligned=re.search("flash_?attn", str(func)) is not None,
        )
        bias = take("bias", "attn_bias", "attn_mask")
        if bias is not None:
            if bias.ndim != 4:
                raise _UnknownError(f"a bias of shape {tuple(bias.shape)}")
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        for name, option in values.items():
            is_off = not isinstance(option, Tensor) and option in _OFF
            if not is_off and not _HARMLESS.fullmatch(name):
                raise _UnknownError(f"the option {name}")
    except _UnknownError as reason:
        package = str(func).split(".")[0]
        return (
            f"a kernel of {package} with {reason}, which is not read: use "
            "scaled_dot_product_attention"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return KernelCall(query, key, value, attended, scale, mask, dropout or 0.0, is_causal)


def _by_head(x: Tensor, ends: Tensor | None, longest: int | None) -> Tensor:
    """Return tokens (B, N, heads, d), or B packed sequences of equal length,
    as (B, heads, N, d).
    """
    if ends is not None:
        sequences = ends.numel() - 1
        packed = x[0] if x.ndim == 4 and len(x) == 1 else x
        # If all sequences together have the number of tokens of as many longest ones, all are
        # equally long. This check does not read lengths from the device.
        if packed.ndim != 3 or len(packed) != sequences * int(longest or 0):
            raise _UnknownError("sequences of several lengths")
        x = packed.unflatten(0, (sequences, -1))
    if x.ndim != 4:
        raise _UnknownError(f"tokens of shape {tuple(x.shape)}")
    return x.transpose(1, 2)


def _reach(size: int | None) -> int | None:
    """Return the number of neighbours that are visible on one side; None for all."""
    return None if size is None or size < 0 else size


def _visible(
    query: Tensor,
    key: Tensor,
    *,
    before: int | None,
    behind: int | None,
    is_aligned: bool,
) -> Tensor | None:
    """Return a mask (N_query, N_key), True where a query may attend to a key;
    None if all may attend to all.
    """
    if before is None and behind is None:
        return None
    queries, keys = query.shape[-2], key.shape[-2]
    if queries != keys and not is_aligned:
        raise _UnknownError(f"a causal mask of {queries} queries and {keys} keys")
    delta = torch.arange(keys, device=query.device) - (
        torch.arange(queries, device=query.device)[:, None] + keys - queries
    )
    visible = torch.ones_like(delta, dtype=torch.bool)
    if before is not None:
        visible &= delta >= -before
    if behind is not None:
        visible &= delta <= behind
    return visible
