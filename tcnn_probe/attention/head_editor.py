"""Asks listeners what the heads of a layer are to give while it runs, and edits them: no parameter is exchanged."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model import GPSA
from tcnn_probe.architectures.lookup import as_rows, heads_axis
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.gated import (
    GATED_LAYERS,
    ConViTLayer,
    GatedAttention,
    gated_attention_of,
)
from tcnn_probe.attention.head_edit import (
    AttendingCall,
    HeadEdit,
    edit_call,
    edit_gated,
    owned_edits,
)
from tcnn_probe.attention.layout import Layout
from tcnn_probe.attention.reconstruction import (
    ValueProductTracker,
    discrepancy,
    is_between_channels,
    logits_of,
)
from tcnn_probe.attention.softmax import DeferredLogits, SoftmaxAttention
from tcnn_probe.hooks.calls import Call, Calls, add_hook, innermost_call
from tcnn_probe.hooks.interception import (
    FUSED,
    SeenAttention,
    SeenCopy,
    SeenOperand,
    SeenProduct,
    describe,
)
from tcnn_probe.hooks.modes import EDITORS, edited, never_compiled_alone, put_on

__all__ = ["HeadEditor", "HeadListener", "LayerCall", "name_of_gating"]

# Edits need no grids: where queries and keys lie is not looked for.
_UNKNOWN = Layout(None, None, "edits of heads need no grid")
# All spellings of the function that makes gates of lambda, in GPSA, in ConViT and in layers derived from them.
_SIGMOID = {torch.sigmoid, Tensor.sigmoid, torch.special.expit}
# Functions through which lambda may pass before the sigmoid: they keep the order of the heads.
_SAME_NUMBERS = {
    Tensor.view,
    Tensor.reshape,
    Tensor.unsqueeze,
    Tensor.to,
    Tensor.float,
    Tensor.double,
}
# Ablations begin and end in any thread, and may share the editor of a layer.
_LOCK = threading.RLock()


class HeadListener:
    """A listener to the calls of one layer, which may answer each attention with an edit. Override what you need."""

    layer = ""
    """Name of the layer, for errors."""

    def gates(self) -> Mapping[int, float]:
        """Return the gates of heads that are to have another value, for the call that begins."""
        return {}

    def attends(self, attention: Attention) -> HeadEdit | None:
        """Answer an attention of the layer; with an edit of no heads, to say that it is what was waited for."""
        return None

    def returned(self, call: "LayerCall", output: Any) -> None:
        """Hear of the end of a call of the layer."""


@dataclass(eq=False)
class LayerCall(Call):
    """A call of a layer, and what listeners have answered in it.

    Attributes:
        listeners: Listeners, in the order in which they began.
        attentions: How many attentions there were.
        edits: Edits by number of the attention, with an owner for each head.
        answered: Listeners that have answered.
        objection: Why something that was edited is no attention between tokens; "" without a reason.
        waiting: Edited softmaxes that have weighed nothing yet, by number, and whether they have an axis of heads.
        tracker: Products of the call, to tell what softmaxes weigh.
    """

    listeners: Sequence[HeadListener] = ()
    attentions: int = 0
    edits: dict[int, list[HeadEdit]] = field(default_factory=dict)
    answered: set[HeadListener] = field(default_factory=set)
    objection: str = ""
    waiting: dict[int, tuple[SeenOperand, bool]] = field(default_factory=dict)
    tracker: ValueProductTracker = field(default_factory=ValueProductTracker)

    def ask(self, attention: Attention) -> list[HeadEdit]:
        """Ask the listeners once for each attention."""
        if attention.number not in self.edits:
            answers = [
                (listener, listener.attends(attention)) for listener in self.listeners
            ]
            self.answered |= {
                listener for listener, edit in answers if edit is not None
            }
            self.edits[attention.number] = owned_edits(
                [edit for _, edit in answers if edit is not None]
            )
        return self.edits[attention.number]

    def gates(self) -> "_GateEditor | None":
        """Return what edits the gates; None if they stay. Of several listeners the last counts."""
        forced: dict[int, float] = {}
        for listener in self.listeners:
            forced |= listener.gates()
        return (
            _GateEditor(getattr(self.module, name_of_gating(self.module)), forced)
            if forced
            else None
        )


class HeadEditor(Calls[LayerCall]):
    """Edits heads and gates in each call of a layer, for all its listeners together."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, LayerCall)
        self._listeners: tuple[HeadListener, ...] = ()

    @classmethod
    def add(cls, module: nn.Module, listener: HeadListener) -> None:
        """Ask one more listener."""
        with _LOCK:
            editor = EDITORS.setdefault(module, cls(module))
            # A new tuple: calls that are running keep those that they began with.
            editor._listeners = (*editor._listeners, listener)
            if len(editor._listeners) == 1:
                editor.attach()

    @classmethod
    def remove(cls, module: nn.Module, listener: HeadListener) -> None:
        """Ask a listener no longer; may be called in the middle of a forward, and again."""
        with _LOCK:
            editor = EDITORS.get(module)
            if editor is not None and listener in editor._listeners:
                editor._listeners = tuple(
                    entry for entry in editor._listeners if entry is not listener
                )
                if not editor._listeners:
                    del EDITORS[module]
                    editor.detach()

    @classmethod
    @contextmanager
    def attached_to(
        cls, module: nn.Module, listeners: Sequence[HeadListener]
    ) -> Iterator[None]:
        """Ask these listeners, inside."""
        try:
            for listener in listeners:
                cls.add(module, listener)
            yield
        finally:
            for listener in listeners:
                cls.remove(module, listener)

    def attach(self) -> None:
        """Add hooks to the layer and, of a GPSA layer, the seam at which its heads lie side by side."""
        super().attach()
        if isinstance(self.module, GPSA):
            self._handles.append(
                add_hook(self.module.head_outputs, self._edit_head_outputs, after=True)
            )

    def begins(self, call: LayerCall) -> None:
        """Begin to edit."""
        call.listeners = self._listeners
        call.modes = put_on(_EditingMode(call))

    def returns(self, call: LayerCall, output: Any) -> Any:
        """Tell the listeners, and put terms into the output."""
        if call.waiting:
            call.objection = (
                call.objection or "a softmax that weighs no values in a matrix product"
            )
        for listener in call.listeners:
            listener.returned(call, output)
        with_terms = [
            edit
            for edits in call.edits.values()
            for edit in edits
            if edit.terms is not None
        ]
        if not with_terms:
            return None
        edited_output = images_first(
            call.module, first_tensor(output, call.listeners[0].layer)
        )
        for edit in with_terms:
            assert edit.terms is not None
            edited_output = edit.terms(call, edited_output, edit.heads)
        return with_first_tensor(output, images_first(call.module, edited_output))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Treat whatever is computed of the layer inside the ``with`` as computed by its forwards."""
        running, frame = self.current(), sys._getframe()
        # No call is running. One that stays on the stack for as long as the reading is made up, in the outermost frame.
        while frame.f_back is not None:
            frame = frame.f_back  # to the outermost, which outlives the reading
        call = running or LayerCall(
            self.module, (), {}, frame, listeners=self._listeners
        )
        try:
            self._running[threading.get_ident()] = call
            with _EditingMode(call):
                yield
        finally:
            if running is None:
                self._leave()

    def _edit_head_outputs(
        self, module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> Tensor | None:
        call = self.current()
        return None if call is None else _edit_gated_heads(call, output)


class _EditingMode(TorchFunctionMode):
    """Shows the attentions of a call to its listeners, and gives the module what they answer."""

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self._call = call
        self._gates = call.gates()

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, call = kwargs or {}, self._call
        # flex_attention compiles itself, through this mode, and is edited when it runs.
        if call.over or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self._gates is not None and self._gates.is_given_gates(func, args):
            return self._gates(func, args, kwargs)
        if (
            # ConViT has no module between heads and projection: its F.linear is known by its weight. (B, N, heads * d)
            # to (B, heads, N, d), and back.
            isinstance(call.module, ConViTLayer)
            and func is F.linear
            and args[1] is call.module.proj.weight
        ):
            heads = args[0].unflatten(-1, (call.module.num_heads, -1)).transpose(1, 2)
            beside = _edit_gated_heads(call, heads).transpose(1, 2).flatten(2)
            return func(beside, *args[1:], **kwargs)
        # Softmaxes inside of gated attention are parts of A: heads are edited at the seam, once C and P are added up.
        if isinstance(call.module, GATED_LAYERS):
            return func(*args, **kwargs)
        # Not run here: the edit runs them itself, with another projection or as they are.
        if func in FUSED:
            return (
                self._edit(AttendingCall(func, args, kwargs))
                if self._is_asking()
                else func(*args, **kwargs)
            )
        output = func(*args, **kwargs)
        # Describing reads and reshapes tensors, which other function modes would see as the model's own work.
        with torch._C.DisableTorchFunction():
            request = describe(func, output, args, kwargs)
        if isinstance(request, SeenProduct):
            for number, objection in call.tracker.weighed_by(
                request, call.waiting
            ).items():
                del call.waiting[number]
                call.objection = call.objection or objection
        elif isinstance(request, SeenCopy):
            call.tracker.copied(request)
        elif (
            isinstance(request, SeenAttention)
            and not request.read_only
            and self._is_asking()
        ):
            return self._edit(AttendingCall(func, args, kwargs, output))
        return output

    def _edit(self, attending: AttendingCall) -> Any:
        call, module = self._call, self._call.module
        leading, queries = attending.heads.shape[:-2], attending.heads.shape[-2]
        # Attention between channels (XCiT) has heads of another kind; listeners are not asked about it.
        heads = heads_axis(leading, module, attending.known_axis)[1]
        if queries == attending.keys and is_between_channels(
            attending.keys, heads, call.inputs
        ):
            return attending.finish(attending.heads)
        rows = as_rows(attending.heads, module, attending.known_axis)
        shape = (len(rows), heads, queries, attending.keys)
        attention = SoftmaxAttention(
            module=module,
            images=len(rows),
            layout=_UNKNOWN,
            number=call.attentions,
            logits=DeferredLogits(
                shape, rows, lambda: logits_of(attending.request, module)
            ),
            compare=lambda: discrepancy(attending.request, module),
        )
        call.attentions += 1
        edits = call.ask(attention)
        output = edit_call(attending, module, edits)
        # Whether this softmax is attention shows only when it weighs values, in a product that comes later.
        if edits and attending.is_softmax:
            has_heads = heads > 1 or len(leading) > 1
            call.waiting[attention.number] = SeenOperand.of(output), has_heads
        return output

    def _is_asking(self) -> bool:
        """Return whether it is the layer itself that calls torch, and not a layer inside of it."""
        frame: FrameType | None = sys._getframe()
        while (frame := innermost_call(frame)) is not None:
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Softmax | nn.Dropout):
                return module is self._call.module
            frame = frame.f_back
        return False


def _edit_gated_heads(call: LayerCall, heads: Tensor) -> Tensor:
    """Edit the heads of a gated layer, which lie side by side, (B, heads, N_query, d)."""
    x = next((x for x in call.inputs if isinstance(x, Tensor)), heads)[: len(heads)]

    def describe() -> Any:
        with edited(call.module):
            return gated_attention_of(call.module, x).parts

    batch, head_count, queries, _ = heads.shape
    sizes = (batch, head_count, queries)
    attention = GatedAttention(
        module=call.module,
        images=batch,
        layout=_UNKNOWN,
        describe=describe,
        sizes=sizes,
        x=x,
    )
    call.attentions = 1
    return edit_gated(attention, call.ask(attention), heads)


class _GateEditor:
    """Follows the gating parameter of a layer to its sigmoid, and gives the gates of some heads another value.

    The other gates stay differentiable with respect to the parameter, lambda of shape (heads,), which is never touched.

    Args:
        gating: The parameter.
        forced: Gates by head.
    """

    def __init__(self, gating: Tensor, forced: Mapping[int, float]) -> None:
        self._forms = [gating]
        # NaN stands for gates that stay as they are.
        self._forced = torch.full((len(gating),), math.nan)
        self._forced[list(forced)] = torch.tensor(list(forced.values()))

    def is_given_gates(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Return whether a function is given the parameter, in one of its forms, on its way to the sigmoid."""
        if func not in _SIGMOID and func not in _SAME_NUMBERS:
            return False
        return bool(args) and any(args[0] is form for form in self._forms)

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what such a function gives, edited."""
        output = func(*args, **kwargs)
        if func in _SAME_NUMBERS:
            self._forms.append(output)
            return output
        # ConViT gives lambda the shape (1, heads, 1, 1) before its sigmoid.
        forced = self._forced.to(output).view(output.shape)
        return torch.where(forced.isnan(), output, forced)


def name_of_gating(module: nn.Module) -> str:
    """Return the name of a gated layer's parameter lambda."""
    return "gating" if isinstance(module, GPSA) else "gating_param"


def first_tensor(output: Any, layer: str) -> Tensor:
    """Return the output of a layer, or the first of several."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(
            f"expected {layer!r} to return a tensor, or several; got {type(first).__name__}"
        )
    return first


def with_first_tensor(output: Any, first: Tensor) -> Any:
    """Return the output of a layer with another first tensor."""
    return first if isinstance(output, Tensor) else type(output)([first, *output[1:]])


def images_first(module: nn.Module, output: Tensor) -> Tensor:
    """Return a layer's output with the images along its first axis; applied again, as it was."""
    is_swapped = (
        isinstance(module, nn.MultiheadAttention)
        and not module.batch_first
        and output.ndim == 3
    )
    return output.transpose(0, 1) if is_swapped else output
