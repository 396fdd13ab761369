"""Interception of every attention that a layer computes with torch, fused or not.

A :class:`torch.overrides.TorchFunctionMode` sees each call of a torch function with its actual
arguments: scale, mask and bias, and queries and keys after rotary embedding and normalisation.
There is one such mode in a thread, which tells all calls of modules that are followed there. The
model gets torch's own result, unless one of them answers.
"""

import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model.precision import autocast_dtype
from tcnn_probe.hooks.compilation import never_compiled, never_compiled_alone
from tcnn_probe.hooks.hidden_attention import hidden_attention, is_graph_operator
from tcnn_probe.hooks.kernel_calls import is_kernel, read_kernel
from tcnn_probe.hooks.modes import (
    is_function_transformed,
    is_transformed,
    leave_mode,
    leaves_of,
)
from tcnn_probe.hooks.private_torch import (
    _get_current_function_mode_stack,
)
from tcnn_probe.hooks.score_modification import ScoreModification

__all__ = [
    "FUSED",
    "NESTED",
    "Answer",
    "Interception",
    "Observer",
    "Seen",
    "SeenAttention",
    "SeenCopy",
    "SeenJoin",
    "SeenOperand",
    "SeenProduct",
    "SeenUnmeasured",
    "TorchCall",
    "owned",
]

NESTED = "it attends in nested tensors, which have no axis of tokens: pad them, and give a mask"

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
        mask: Mask of fused attention: numbers to add to the logits, or True where a query may
            attend to a key; of a softmax, the mask that its logits contain, in their shape.
        modification: Function of flex_attention that changes the products, if there is one.
        output: Output of torch: the attention itself if ``logits`` is given, else the result of
            ``finish`` for attention times values; None if dropout was applied.
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
        try:
            place = tensor.data_ptr()
        except RuntimeError:  # inside torch.vmap, as in masks of flex_attention
            place = id(tensor)
        return cls(tensor.shape, place, shared)

    def is_in(self, operand: "SeenOperand", *, heads: bool) -> bool:
        """Return whether an operand is this softmax or,
        with ``heads``, may be it after dropout or mixing of heads.
        """
        # An attention sink is an extra logit whose column is cut off; the remaining view has the
        # same address.
        without_sink = (*self.shape[:-1], self.shape[-1] - 1)
        if self.place == operand.place and operand.shape == without_sink:
            return True
        same = self.shape[-2:] == operand.shape[-2:] and self.shape.numel() == operand.shape.numel()
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
        """Return whether the output is this tensor
        with each row multiplied or divided by a factor of that row.
        """
        rows = tensor.numel() // tensor.shape[-1]
        return any(
            source.place == tensor.data_ptr() and source.shape.numel() == tensor.numel()
            for source in self.sources
        ) and any(
            source.shape[-1:] == (1,) and source.shape.numel() == rows for source in self.sources
        )


@dataclass(frozen=True)
class SeenUnmeasured:
    """Attention that is not measured, and the reason."""

    reason: str


Seen = SeenAttention | SeenProduct | SeenCopy | SeenJoin | SeenUnmeasured


class TorchCall:
    """A call of a torch function that may compute attention.

    Attributes:
        func, args, kwargs: The call.
        output: What the function has returned; None if it has not run yet.
    """

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.output: Any = None
        self._project: Callable[[Tensor], Any] | None = None

    @property
    def is_fused(self) -> bool:
        """Whether the function computes attention times values."""
        return self.func in FUSED

    @property
    def is_multihead(self) -> bool:
        """Whether the function is torch's multi-head attention, which also projects the heads."""
        return self.func is F.multi_head_attention_forward

    @cached_property
    def heads(self) -> Tensor:
        """Outputs of the heads of an attention, (..., N_query, d).

        For a softmax, this is the attention itself, (..., N_query, N_key): its edits carry over to
        attention times values, as this is linear.
        """
        heads = self._run_unprojected() if self.is_multihead else self._first_output
        # A single head without images, (N_query, d), gets an axis of heads.
        return heads if heads.ndim > 2 else heads[None]

    @property
    def _first_output(self) -> Tensor:
        # flex_attention also returns statistics of its logits' rows, which are not edited.
        return self.output[0] if isinstance(self.output, tuple) else self.output

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        """Arguments of multi-head attention by name."""
        return _multihead_arguments(*self.args, **self.kwargs)

    def _run_unprojected(self) -> Tensor:
        """Run multi-head attention without the projection of its heads,
        and return these, (B, heads, N_query, d).
        """
        arguments = {**self._arguments}
        weight, bias = arguments["out_proj_weight"], arguments["out_proj_bias"]
        # With the identity as projection, the output is the concatenation of heads.
        arguments["out_proj_weight"] = torch.eye(
            weight.shape[1], dtype=weight.dtype, device=weight.device
        )
        arguments["out_proj_bias"] = None
        side_by_side, weights = self.func(**arguments)  # (N, B, heads * d), or no B
        heads = side_by_side.unflatten(-1, (arguments["num_heads"], -1)).movedim(0, -2)

        def project(edited: Tensor) -> tuple[Tensor, Any]:
            merged = edited.reshape(heads.shape).movedim(-2, 0).flatten(-2)
            return F.linear(merged, weight, bias), weights

        self._project = project
        return heads

    def with_heads(self, edited: Tensor) -> Any:
        """Return what the function would return with edited outputs of the heads."""
        if self._project is not None:
            return self._project(edited)
        output = self._first_output
        edited = edited.view(output.shape)
        if not self.is_fused and not output.requires_grad:
            # The softmax is edited in place, because its memory address identifies it in the
            # product with the values.
            return output.copy_(edited)
        return (edited, *self.output[1:]) if isinstance(self.output, tuple) else edited

    def unedited(self) -> Any:
        """Return what the function returns without edits, and run it unless it has run."""
        if self.output is None and self._project is not None:
            self.output = self._project(self.heads)
        elif self.output is None:
            self.output = self.func(*self.args, **self.kwargs)
        return self.output

    @property
    def heads_axis(self) -> int | None:
        """Axis of the heads, if the function determines it."""
        return 1 if self.is_multihead else None

    @property
    def keys(self) -> int:
        """Number of keys of an attention."""
        if self.is_multihead:
            arguments = self._arguments
            # torch appends a key for each of these options.
            has_bias, adds_zero = arguments["bias_k"], arguments["add_zero_attn"]
            return len(arguments["key"]) + (has_bias is not None) + bool(adds_zero)
        if not self.is_fused:
            return self.output.shape[-1]
        key = self.args[1] if len(self.args) > 1 else self.kwargs["key"]
        return key.shape[-2]

    @cached_property
    def objection(self) -> str | None:
        """Why the arguments cannot be read: "" if the call is only traced; None if they can."""
        # Reading a property of a tensor is also a call of a torch function, which outer modes would
        # see.
        with torch.DisableTorchFunction():
            return _why_unreadable(self.args, self.kwargs)

    def describe(self) -> "Seen | None":
        """Describe the call as attention, product,
        scaling or concatenation; None if it is none of them.
        """
        describe_call = _describer(self.func)
        if describe_call is None:
            return None
        return describe_call(self.output, *self.args, **self.kwargs)

    def unread(self, objection: str) -> "SeenUnmeasured | None":
        """Describe an attention whose arguments cannot be read."""
        is_softmax = _DESCRIBE.get(self.func) is _softmax
        attends = self.is_fused or (is_softmax and self.describe() is not None)
        return SeenUnmeasured(objection) if objection and attends else None


class Answer(NamedTuple):
    """Edit of the heads of an attention, which a listener has returned.

    Attributes:
        order: Position of the listener among all, in the order in which they began.
        listener: The listener.
        edit: A ``HeadEdit``.
        apply: Function (call, edits) -> what torch's function returns with these edits, of all
            listeners.
    """

    order: int
    listener: Any
    edit: Any
    apply: Callable[[TorchCall, Sequence[Any]], Any]


def owned(answers: Sequence[Answer]) -> list[Answer]:
    """Restrict edits so that each head belongs only to the most recent listener that names it."""
    answers = sorted(answers, key=lambda answer: answer.order)
    owners = {head: answer for answer in answers for head in answer.edit.heads}
    restricted = []
    for answer in answers:
        heads = [head for head in answer.edit.heads if owners[head] is answer]
        if heads:
            restricted.append(answer._replace(edit=answer.edit.only(heads)))
    # A HeadWatch names no heads, and gets the edited ones.
    return [*restricted, *(answer for answer in answers if not answer.edit.heads)]


class Observer(Protocol):
    """A followed call of a module, which is told of the calls of torch in its thread."""

    def may_edit(self) -> bool:
        """Return whether this may answer the call of torch that is about to run."""

    def sees(self, call: TorchCall) -> Sequence[Answer]:
        """Handle a call of torch, and return edits
        of its heads. Multi-head attention may run only afterwards.
        """

    def ran(self, call: TorchCall, output: Any, answers: Sequence[Answer]) -> None:
        """Handle the output, with the edits of all listeners,
        of a call that is edited or had not run before.
        """


class Interception(TorchFunctionMode):
    """Mode that passes every attention, matrix product,
    scaling and concatenation of tokens to observers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._observers: list[Observer] = []

    @classmethod
    def of_this_thread(cls) -> "Interception":
        """Return the mode that is on in this thread, or a new one."""
        modes = _get_current_function_mode_stack()
        return next((mode for mode in modes if isinstance(mode, cls)), None) or cls()

    def join(self, observer: Observer) -> None:
        """Add an observer, and enter the mode with the first one."""
        self._observers.append(observer)
        if self not in _get_current_function_mode_stack():
            self.__enter__()

    def leave(self, observer: Observer) -> bool:
        """Remove an observer, and leave the mode with the last one;
        return False if the mode stays on without any.
        """
        with suppress(ValueError):
            self._observers.remove(observer)
        return bool(self._observers) or leave_mode(self)

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # flex_attention compiles itself under this mode, and its compiled call passes here again
        # when it runs. This test comes first, because guards on later values would make
        # torch.compile recompile in each forward.
        if torch.compiler.is_compiling() or _describer(func) is None:
            return func(*args, **kwargs)
        call = TorchCall(func, args, kwargs)
        # Multi-head attention runs once it is known whether its heads have to be kept apart, for
        # edits.
        if not call.is_multihead or not any(x.may_edit() for x in self._observers):
            call.output = func(*args, **kwargs)
        return self._hand_on(call)

    @never_compiled
    def _hand_on(self, call: TorchCall) -> Any:
        observers = list(self._observers)
        answers = owned([answer for x in observers for answer in x.sees(call)])
        if answers:
            output = answers[0].apply(call, [answer.edit for answer in answers])
        elif call.output is None:
            output = call.unedited()
        else:
            return call.output
        for observer in observers:
            observer.ran(call, output, answers)
        return output


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
        # torch aligns a causal mask with the upper left corner, even if there are more keys than
        # queries.
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
    """Repeat keys or values of grouped-query attention,
    each of which serves several query heads, for every head.
    """
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
        # Attention has an axis of images, windows or heads in addition to its matrix, unlike a
        # softmax over classes or channels.
        input.ndim < 3 or dim not in (-1, input.ndim - 1) or not input.is_floating_point()
    ):
        return None
    return SeenAttention(logits=input, output=output)


def _multihead_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of torch's multi-head attention by name, defaults included."""
    bound = _MULTIHEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _multihead(
    output: tuple[Tensor, Tensor | None] | None, *args: Any, **kwargs: Any
) -> SeenAttention:
    """Describe torch's multi-head attention by repeating its projections;
    tokens come first, (N, B, d).
    """
    arguments = SimpleNamespace(**_multihead_arguments(*args, **kwargs))
    has_dropout = arguments.training and arguments.dropout_p > 0
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
    biases = [None] * 3 if arguments.in_proj_bias is None else arguments.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(tokens, weights, biases, strict=True))
    if arguments.bias_k is not None and arguments.bias_v is not None:
        biased = (k, arguments.bias_k), (v, arguments.bias_v)
        k, v = (torch.cat([x, b.to(x.dtype).expand(1, x.shape[1], -1)]) for x, b in biased)
    # (N, B, heads * d) to (B, heads, N, d).
    q, k, v = (x.unflatten(-1, (arguments.num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    if arguments.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    # Keys that the layer adds come after those of tokens, and no mask hides them.
    extra = k.shape[2] - len(tokens[1])

    def finish(attended: Tensor) -> Tensor:
        merged = attended.permute(2, 0, 1, 3).flatten(2).to(arguments.out_proj_weight.dtype)
        projected = F.linear(merged, arguments.out_proj_weight, arguments.out_proj_bias)
        return projected.squeeze(1) if has_no_batch else projected

    masks = []
    if attn_mask is not None:
        attn_mask = _additive(F.pad(attn_mask, (0, extra)), q.dtype)
        masks.append(
            # torch accepts masks of shape (N_query, N_key) and (B * heads, N_query, N_key).
            attn_mask.unflatten(0, (-1, arguments.num_heads)) if attn_mask.ndim == 3 else attn_mask
        )
    padding = arguments.key_padding_mask
    if padding is not None:
        padding = F.pad(padding.reshape(-1, padding.shape[-1]), (0, extra))[:, None, None, :]
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
        output=output[0] if output and not has_dropout else None,
        finish=finish,
        heads=1,
        not_on_grid=not_on_grid,
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask in which True hides a key to one that is added to the logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


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


def _einsum(output: Tensor, equation: Any, *operands: Any, **kwargs: Any) -> SeenProduct:
    flat = (
        operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    )
    pairs = list(permutations([SeenOperand.of(x) for x in flat if isinstance(x, Tensor)], 2))
    # If operands and lists of axes are given in place of an equation, any pair could be attention.
    if isinstance(equation, str):
        inputs, _, result = equation.replace(" ", "").partition("->")
        labels = permutations(inputs.split(","), 2)
        # An operand can be attention if the sum runs over its last axis.
        is_summed = [left[-1:] in right and left[-1:] not in result for left, right in labels]
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
    # The outputs are those of the heads, (B, heads, N_query, d_value), the log-sum-exp and the
    # largest logits.
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
"""Fused functions, which compute attention times values,
with the functions that describe their calls.
"""

# A mode sees the function that the model calls but not the functions inside it. So each alias needs
# an entry, and no call counts twice.
_DESCRIBE: dict[Any, Callable[..., Seen | None]] = {
    **FUSED,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), _softmax),
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


# Types of nearly all functions, which are told faster than those of operators.
_NO_OPERATORS = (
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


def _describer(func: Callable[..., Any]) -> Callable[..., Seen | None] | None:
    """Return the function that describes calls of a torch function;
    None if these are not needed.
    """
    describe_call = _DESCRIBE.get(func)
    if describe_call is not None or isinstance(func, _NO_OPERATORS):
        return describe_call
    if is_kernel(func):
        return partial(_kernel, func)
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


def _why_unreadable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why the arguments of a call cannot be read:
    "" if it is only traced; None if they can.
    """
    if is_function_transformed():  # which hides the images, or wraps them in other tensors
        return "it attends under torch.vmap or another transform of torch.func"
    arguments = leaves_of((*args, *kwargs.values()))
    if is_transformed(arguments):
        return ""
    for tensor in (x for x in arguments if isinstance(x, Tensor)):
        # The type is told by its name, because its module takes long to import.
        if type(tensor).__name__ == "DTensor":
            return (
                "it attends in distributed tensors (DTensor): record a copy of the model that is "
                "not split"
            )
        if tensor.is_nested:
            return NESTED
    return None
