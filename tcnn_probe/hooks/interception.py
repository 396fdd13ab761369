"""Interception of every attention that a layer computes with torch, fused or not.

A :class:`torch.overrides.TorchFunctionMode` sees each call of a torch function with its actual arguments: scale, mask
and bias, and queries and keys after rotary embedding and normalisation. The model gets torch's own result, unless the
observer returns an edit.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tcnn_model.precision import autocast_dtype
from tcnn_probe.hooks.compilation import never_compiled_alone
from tcnn_probe.hooks.hidden_attention import hidden_attention, is_graph_operator
from tcnn_probe.hooks.kernel_calls import is_kernel, read_kernel
from tcnn_probe.hooks.modes import (
    is_function_transformed,
    is_nested,
    is_transformed,
    unseen,
)
from tcnn_probe.hooks.score_modification import ScoreModification

__all__ = [
    "FUSED",
    "NESTED",
    "Answer",
    "Interception",
    "Seen",
    "SeenAttention",
    "SeenCopy",
    "SeenJoin",
    "SeenOperand",
    "SeenProduct",
    "SeenUnmeasured",
    "describe",
    "multihead_arguments",
]

NESTED = "it attends in nested tensors, which have no axis of tokens: pad them, and give a mask"
Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], Any]
"""Edit of a torch function's output: a function (func, args, kwargs, output) -> output."""

_MULTIHEAD = inspect.signature(F.multi_head_attention_forward)
_CAUSAL = "causal: the tokens are a sequence"


@dataclass(frozen=True)
class SeenAttention:
    """Arguments and output of a call of torch that computes attention.

    Args:
        logits: Input of a softmax, shape (..., N_query, N_key); None for fused attention.
        query, key, value: Tensors of fused attention, shapes (..., N_query, d), (..., N_key, d) and
            (..., N_key, d_value); None for a softmax.
        scale: Factor of the products of fused attention.
        mask: Mask of fused attention: numbers to add to the logits, or True where a query may attend to a key.
        modification: Function of flex_attention that changes the products, if there is one.
        output: Output of torch: the attention itself if ``logits`` is given, else the result of ``finish`` for
            attention times values; None if dropout was applied.
        finish: Function from attention times values, shape (..., N_query, d_value), to the output.
        heads: Axis of the heads in (..., N_query, N_key), if the call shows it.
        not_on_grid: Reason why queries or keys cannot lie on an image's grid, if the call shows it.
        read_only: Reason why the output cannot be edited; "" if it can.
        gives_lse: Whether torch returns the log-sum-exp of the logits beside the output.
    """

    logits: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    scale: float = 1.0
    mask: Tensor | None = None
    modification: ScoreModification | None = None
    output: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    heads: int | None = None
    not_on_grid: str = ""
    read_only: str = ""
    gives_lse: bool = False


@dataclass(frozen=True)
class SeenJoin:
    """Concatenation of tokens, with the number of tokens in each part."""

    lengths: tuple[int, ...]


@dataclass(frozen=True)
class SeenOperand:
    """Shape and storage address of a tensor, which itself is not kept.

    Args:
        shape: Shape of the tensor.
        place: Address of its storage.
        shared: Whether the tensor is the same for all images, as a weight is.
    """

    shape: torch.Size
    place: int
    shared: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "SeenOperand":
        """Describe a tensor."""
        # A matrix has no axis of images, and an expanded tensor is the same along that axis.
        shared = tensor.ndim < 3 or (tensor.shape[0] > 1 and tensor.stride(0) == 0)
        # Tensors inside torch.vmap, as in masks of flex_attention, have no address.
        is_mapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        place = id(tensor) if is_mapped else tensor.data_ptr()
        return cls(tensor.shape, place, shared)

    def is_in(self, operand: "SeenOperand", *, heads: bool) -> bool:
        """Return whether an operand is this softmax or, with ``heads``, may be it after dropout or mixing of heads."""
        # An attention sink is an extra logit whose column is cut off; the remaining view has the same address.
        without_sink = (*self.shape[:-1], self.shape[-1] - 1)
        if self.place == operand.place and operand.shape == without_sink:
            return True
        same = (
            self.shape[-2:] == operand.shape[-2:]
            and self.shape.numel() == operand.shape.numel()
        )
        return same and (heads or self.place == operand.place)


@dataclass(frozen=True)
class SeenProduct:
    """A matrix product.

    Args:
        pairs: Pairs of an operand that could be attention and the operand that it would weight.
        output: Weak reference to the product.
    """

    pairs: Sequence[tuple[SeenOperand, SeenOperand]]
    output: weakref.ref[Tensor]


@dataclass(frozen=True)
class SeenCopy:
    """A tensor, ``output``, that was computed by scaling or repeating ``sources``."""

    sources: Sequence[SeenOperand]
    output: weakref.ref[Tensor]

    def scales_rows_of(self, tensor: Tensor) -> bool:
        """Return whether the output is this tensor with each row multiplied or divided by a factor of that row."""
        rows = tensor.numel() // tensor.shape[-1]
        return any(
            source.place == tensor.data_ptr() and source.shape.numel() == tensor.numel()
            for source in self.sources
        ) and any(
            source.shape[-1:] == (1,) and source.shape.numel() == rows
            for source in self.sources
        )


@dataclass(frozen=True)
class SeenUnmeasured:
    """Attention that is not measured, and the reason."""

    reason: str


Seen = SeenAttention | SeenProduct | SeenCopy | SeenJoin | SeenUnmeasured


class Interception(TorchFunctionMode):
    """Mode that passes every attention, matrix product, scaling and concatenation of tokens to a function.

    Args:
        on_request: Function that is called with a description of each such call, without gradients or function modes
            but under the model's autocast. It may return an edit of the output, which runs with the model's gradients.
    """

    def __init__(self, on_request: Callable[[Seen], Answer | None]) -> None:
        super().__init__()
        self._on_request = on_request

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # flex_attention compiles itself under this mode, and its compiled call passes here again when it runs. This
        # test comes first, because guards on later values would make torch.compile recompile in each forward.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if _describer(func) is None:
            return output
        return self._hand_on(func, output, args, kwargs)

    @torch.compiler.disable
    def _hand_on(
        self,
        func: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # Reading a property of a tensor is also a call of a torch function, which outer modes would see.
        with torch._C.DisableTorchFunction():
            reason = _why_unreadable(tree_leaves((args, kwargs)))
        answer = self._ask(reason, func, output, args, kwargs)
        return output if answer is None else answer(func, args, kwargs, output)

    @unseen
    def _ask(
        self,
        reason: str | None,
        func: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Answer | None:
        request = (
            describe(func, output, args, kwargs)
            if reason is None
            else _describe_unreadable(reason, func, output, args, kwargs)
        )
        return None if request is None else self._on_request(request)


def describe(
    func: Callable[..., Any], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Seen | None:
    """Describe a torch call as attention, product, scaled tensor or concatenated tokens; None if it is none of them."""
    describe_call = _describer(func)
    return None if describe_call is None else describe_call(output, *args, **kwargs)


def _fused(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SeenAttention:
    dtype = autocast_dtype(query)  # the dtype in which the fused kernel has computed
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa:
        key, value = (_repeat_for_groups(x, query) for x in (key, value))
    if is_causal:
        # torch aligns a causal mask with the upper left corner, even if there are more keys than queries.
        attn_mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
    return SeenAttention(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=attn_mask,
        output=output if dropout_p == 0 else None,
        not_on_grid=_CAUSAL if is_causal else "",
    )


def _repeat_for_groups(x: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values of grouped-query attention, each of which serves several query heads, for every head."""
    groups = query.shape[-3] // x.shape[-3]
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def _softmax(
    output: Tensor,
    input: Tensor,  # noqa: A002 (torch's name for it)
    dim: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> SeenAttention | None:
    if (
        # Attention has an axis of images, windows or heads in addition to its matrix, unlike a softmax over classes or
        # channels.
        input.ndim < 3
        or dim not in (-1, input.ndim - 1)
        or not input.is_floating_point()
    ):
        return None
    return SeenAttention(logits=input, output=output)


def multihead_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of torch's multi-head attention by name, defaults included."""
    bound = _MULTIHEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _multihead(
    output: tuple[Tensor, Tensor | None], *args: Any, **kwargs: Any
) -> SeenAttention:
    """Describe torch's multi-head attention by repeating its projections; tokens come first, (N, B, d)."""
    arguments = SimpleNamespace(**multihead_arguments(*args, **kwargs))
    tokens, attn_mask = (
        [arguments.query, arguments.key, arguments.value],
        arguments.attn_mask,
    )
    has_no_batch = arguments.query.ndim == 2
    if has_no_batch:
        tokens = [x.unsqueeze(1) for x in tokens]
    if arguments.use_separate_proj_weight or arguments.in_proj_weight is None:
        weights = [
            arguments.q_proj_weight,
            arguments.k_proj_weight,
            arguments.v_proj_weight,
        ]
    else:
        weights = arguments.in_proj_weight.chunk(3)
    biases = (
        [None] * 3
        if arguments.in_proj_bias is None
        else arguments.in_proj_bias.chunk(3)
    )
    q, k, v = (
        F.linear(x, w, b) for x, w, b in zip(tokens, weights, biases, strict=True)
    )
    if arguments.bias_k is not None and arguments.bias_v is not None:
        biased = (k, arguments.bias_k), (v, arguments.bias_v)
        k, v = (
            torch.cat([x, b.to(x.dtype).expand(1, x.shape[1], -1)]) for x, b in biased
        )
    # (N, B, heads * d) to (B, heads, N, d).
    q, k, v = (
        x.unflatten(-1, (arguments.num_heads, -1)).permute(1, 2, 0, 3)
        for x in (q, k, v)
    )
    if arguments.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    # Keys that the layer adds come after those of tokens, and no mask hides them.
    extra = k.shape[2] - len(tokens[1])

    def finish(attended: Tensor) -> Tensor:
        merged = (
            attended.permute(2, 0, 1, 3).flatten(2).to(arguments.out_proj_weight.dtype)
        )
        projected = F.linear(merged, arguments.out_proj_weight, arguments.out_proj_bias)
        return projected.squeeze(1) if has_no_batch else projected

    masks = []
    if attn_mask is not None:
        attn_mask = _additive(F.pad(attn_mask, (0, extra)), q.dtype)
        masks.append(
            # torch accepts masks of shape (N_query, N_key) and (B * heads, N_query, N_key).
            attn_mask.unflatten(0, (-1, arguments.num_heads))
            if attn_mask.ndim == 3
            else attn_mask
        )
    padding = arguments.key_padding_mask
    if padding is not None:
        padding = F.pad(padding.reshape(-1, padding.shape[-1]), (0, extra))[
            :, None, None, :
        ]
        masks.append(_additive(padding, q.dtype))
    not_on_grid = ""
    if arguments.is_causal:
        not_on_grid = _CAUSAL
    elif extra:
        not_on_grid = "keys of the layer's own follow the tokens"
    return SeenAttention(
        query=q,
        key=k,
        value=v,
        scale=q.shape[-1] ** -0.5,
        mask=sum(masks[1:], masks[0]) if masks else None,
        output=output[0]
        if arguments.dropout_p == 0 or not arguments.training
        else None,
        finish=finish,
        heads=1,
        not_on_grid=not_on_grid,
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask in which True hides a key to one that is added to the logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        mask, -torch.inf
    )


def _product(output: Tensor, first: Tensor, *rest: Any, **kwargs: Any) -> SeenProduct:
    # The second argument is "other" in torch.matmul and "mat2" in torch.bmm.
    second = rest[0] if rest else kwargs.get("other", kwargs.get("mat2"))
    # A vector can be neither attention nor values of tokens.
    if not isinstance(second, Tensor) or second.ndim < 2 or first.ndim < 2:
        return SeenProduct([], weakref.ref(output))
    left, right = SeenOperand.of(first), SeenOperand.of(second)
    transposed = SeenOperand(second.mT.shape, right.place)
    # The product is attention times values, or transposed values times transposed attention.
    pairs = [(left, right), (transposed, left)]
    return SeenProduct(pairs, weakref.ref(output))


def _einsum(
    output: Tensor, equation: Any, *operands: Any, **kwargs: Any
) -> SeenProduct:
    flat = (
        operands[0]
        if len(operands) == 1 and isinstance(operands[0], (list, tuple))
        else operands
    )
    pairs = list(
        permutations([SeenOperand.of(x) for x in flat if isinstance(x, Tensor)], 2)
    )
    # If operands and lists of axes are given in place of an equation, any pair could be attention.
    if isinstance(equation, str):
        inputs, _, result = equation.replace(" ", "").partition("->")
        labels = permutations(inputs.split(","), 2)
        # An operand can be attention if the sum runs over its last axis.
        is_summed = [
            left[-1:] in right and left[-1:] not in result for left, right in labels
        ]
        pairs = [pair for pair, summed in zip(pairs, is_summed, strict=True) if summed]
    return SeenProduct(pairs, weakref.ref(output))


def _copy(output: Tensor, *inputs: Any, **kwargs: Any) -> SeenCopy:
    sources = [(x, SeenOperand.of(x)) for x in inputs if isinstance(x, Tensor)]
    # A parameter, such as a temperature, is shared by all images, whatever its shape.
    operands = [
        replace(operand, shared=operand.shared or isinstance(x, nn.Parameter))
        for x, operand in sources
    ]
    return SeenCopy(operands, weakref.ref(output))


def _join(
    output: Tensor, tensors: Sequence[Tensor], dim: int = 0, *args: Any, **kwargs: Any
) -> SeenJoin | None:
    # Tokens have the shape (B, N, C), or (N, B, C) in torch's own layers.
    if output.ndim != 3 or dim not in (0, 1, -2, -3):
        return None
    return SeenJoin(tuple(x.shape[dim] for x in tensors if x.ndim == 3))


def _flex(
    outputs: tuple[Tensor, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> SeenAttention:
    # The outputs are those of the heads, (B, heads, N_query, d_value), the log-sum-exp and the largest logits.
    output = outputs[0]
    # The dtype in which it is computed under autocast depends on torch's version.
    query, key, value = (x.to(output.dtype) for x in (query, key, value))
    modification = ScoreModification(
        score_mod,
        block_mask[-1],  # the mask function, after tables of blocks
        score_buffers,
        mask_buffers,
        torch.arange(query.shape[-2], device=query.device),
        torch.arange(key.shape[-2], device=query.device),
    )
    return SeenAttention(
        query=query,
        key=_repeat_for_groups(key, query),
        value=_repeat_for_groups(value, query),
        scale=scale,
        modification=modification,
        output=output,
        heads=1,
        # On a GPU this is also True if gradients are on, whether or not the model asks for it.
        gives_lse=kernel_options.get("OUTPUT_LOGSUMEXP", False),
    )


FUSED: Mapping[Any, Callable[..., SeenAttention]] = {
    torch.ops.higher_order.flex_attention: _flex,
    F.scaled_dot_product_attention: _fused,
    F.multi_head_attention_forward: _multihead,
}
"""Fused functions, which compute attention times values, with the functions that describe their calls."""

# A mode sees the function that the model calls but not the functions inside it. So each alias needs an entry, and no
# call counts twice.
_DESCRIBE: dict[Any, Callable[..., Seen | None]] = {
    **FUSED,
    **dict.fromkeys(
        (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), _softmax
    ),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
        _product,
    ),
    torch.einsum: _einsum,
    **dict.fromkeys(
        (torch.mul, Tensor.mul, torch.div, Tensor.div, Tensor.repeat, torch.tile), _copy
    ),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _join),
}


def _describer(func: Callable[..., Any]) -> Callable[..., Seen | None] | None:
    """Return the function that describes calls of a torch function; None if these are not needed."""
    if is_kernel(func):
        return partial(_kernel, func)
    if func in _DESCRIBE:
        return _DESCRIBE[func]
    return partial(_graph_operator, func) if is_graph_operator(func) else None


def _kernel(
    func: Callable[..., Any], output: Any, *args: Any, **kwargs: Any
) -> SeenAttention | SeenUnmeasured | None:
    call = read_kernel(func, output, args, kwargs)
    if call is None:
        return None
    if isinstance(call, str):
        return SeenUnmeasured(call)
    return SeenAttention(
        query=call.query,
        key=_repeat_for_groups(call.key, call.query),
        value=_repeat_for_groups(call.value, call.query),
        scale=call.scale,
        mask=call.mask,
        output=None if call.dropout else call.output,
        heads=1,
        not_on_grid=_CAUSAL if call.is_causal else "",
        # The backward pass of the package uses the output that it has saved, not an edited one.
        read_only="the output of a fused kernel that is called directly cannot be edited",
    )


def _graph_operator(
    func: Callable[..., Any], output: Any, *args: Any, **kwargs: Any
) -> SeenUnmeasured | None:
    reason = hidden_attention(func, args)
    return SeenUnmeasured(reason) if reason else None


def _why_unreadable(arguments: Sequence[Any]) -> str | None:
    """Return why the arguments of a call cannot be read: "" if it is only traced; None if they can."""
    if (
        is_function_transformed()
    ):  # which hides the images, or wraps them in other tensors
        return "it attends under torch.vmap or another transform of torch.func"
    if is_transformed(arguments):
        return ""
    # The type is told by its name, because its module takes long to import.
    if any(type(x).__name__ == "DTensor" for x in arguments):
        return "it attends in distributed tensors (DTensor): record a copy of the model that is not split"
    if any(is_nested(x) for x in arguments):
        return NESTED
    return None


def _describe_unreadable(
    reason: str,
    func: Callable[..., Any],
    output: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> SeenUnmeasured | None:
    """Describe attention whose arguments cannot be read."""
    is_softmax = _DESCRIBE.get(func) is _softmax
    attends = func in FUSED or (
        is_softmax and _softmax(output, *args, **kwargs) is not None
    )
    return SeenUnmeasured(reason) if reason and attends else None
