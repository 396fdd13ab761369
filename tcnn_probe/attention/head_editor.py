"""Editing of a layer's heads while it runs, as listeners decide, without changing any parameter."""

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
    tokens_if_channels,
)
from tcnn_probe.attention.softmax import DeferredLogits, SoftmaxAttention
from tcnn_probe.hooks.calls import Call, Calls, add_hook, innermost_call
from tcnn_probe.hooks.compilation import never_compiled_alone
from tcnn_probe.hooks.interception import (
    FUSED,
    SeenAttention,
    SeenCopy,
    SeenOperand,
    SeenProduct,
    describe,
)
from tcnn_probe.hooks.modes import EDITORS, is_nested, run_edited, run_in_modes

__all__ = ["HeadEditor", "HeadListener", "LayerCall", "name_of_gating"]

# Edits need no grids, so that the grids of queries and keys are not determined.
_UNKNOWN = Layout(None, None, "edits of heads need no grid")
# Aliases of the function that computes gates from lambda, in GPSA, in ConViT and in layers derived from them.
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
# Ablations may begin and end in any thread and share the editor of a layer.
_LOCK = threading.RLock()


class HeadListener:
    """Listener to the calls of one layer, which may return an edit of each attention. Override what you need."""

    layer = ""
    """Name of the layer, for errors."""

    def gates(self) -> Mapping[int, float]:
        """Return new gates by head, for the call that begins; other heads keep theirs."""
        return {}

    def attends(self, attention: Attention) -> HeadEdit | None:
        """Return an edit of an attention, or None. An edit without heads means that the expected attention was seen."""
        return None

    def returned(self, call: "LayerCall", output: Any) -> None:
        """Handle the end of a call of the layer."""


@dataclass(eq=False)
class LayerCall(Call):
    """A call of a layer, with the edits that listeners have returned in it.

    Attributes:
        listeners: Listeners, in the order in which they began.
        attentions: Number of attentions so far.
        edits: Edits by number of the attention; each head belongs to one edit.
        answered: Listeners that have returned an edit.
        objection: Reason why an edited softmax is not attention between tokens; "" if there is none.
        waiting: Edited softmaxes that were not multiplied with values yet, by number, as in
            :meth:`ValueProductTracker.weighed_by`.
        tracker: Products of the call, which show what softmaxes are multiplied with.
    """

    listeners: Sequence[HeadListener] = ()
    attentions: int = 0
    edits: dict[int, list[HeadEdit]] = field(default_factory=dict)
    answered: set[HeadListener] = field(default_factory=set)
    objection: str = ""
    waiting: dict[int, tuple[SeenOperand, bool, frozenset[int]]] = field(
        default_factory=dict
    )
    tracker: ValueProductTracker = field(default_factory=ValueProductTracker)

    def ask(self, attention: Attention) -> list[HeadEdit]:
        """Return the edits of an attention, for which each listener is asked once."""
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
        """Return the editor of the gates; None if they are not changed. The last listener takes precedence."""
        forced: dict[int, float] = {}
        for listener in self.listeners:
            forced |= listener.gates()
        return (
            _GateEditor(getattr(self.module, name_of_gating(self.module)), forced)
            if forced
            else None
        )


class HeadEditor(Calls[LayerCall]):
    """Editor of heads and gates in each call of a layer, shared by all listeners to the layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, LayerCall)
        self._listeners: tuple[HeadListener, ...] = ()

    @classmethod
    def add(cls, module: nn.Module, listener: HeadListener) -> None:
        """Add a listener to a layer."""
        with _LOCK:
            editor = EDITORS.setdefault(module, cls(module))
            # The tuple is replaced, so that running calls keep the listeners with which they began.
            editor._listeners = (*editor._listeners, listener)
            if len(editor._listeners) == 1:
                editor.attach()

    @classmethod
    def remove(cls, module: nn.Module, listener: HeadListener) -> None:
        """Remove a listener. This may be called during a forward, and more than once."""
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
        """Add listeners to a layer inside the ``with``."""
        try:
            for listener in listeners:
                cls.add(module, listener)
            yield
        finally:
            for listener in listeners:
                cls.remove(module, listener)

    def attach(self) -> None:
        """Add hooks to the layer and, in a GPSA layer, to the submodule that outputs its separate heads."""
        super().attach()
        if isinstance(self.module, GPSA):
            self._handles.append(
                add_hook(self.module.head_outputs, self._edit_head_outputs, after=True)
            )

    def begins(self, call: LayerCall) -> None:
        """Start editing in this call."""
        call.listeners = self._listeners
        # Attention in nested tensors cannot be edited, and torch's fast path for it needs that there is no mode.
        if not any(map(is_nested, call.args)):
            call.scope.open(self.module, _EditingMode(call))

    def returns(self, call: LayerCall, output: Any) -> Any:
        """Notify the listeners, and add terms to the output."""
        if call.waiting:
            call.objection = (
                call.objection or "a softmax that is not multiplied with values"
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

    def read(self, function: Callable[[], Any]) -> Any:
        """Call a function that computes with the layer's parameters, under the edits of a call."""
        running, frame = self.current(), sys._getframe()
        # If no call is running, one is made up in the outermost frame, which stays on the stack during the reading.
        while frame.f_back is not None:
            frame = frame.f_back
        call = running or LayerCall(
            self.module, (), {}, frame, listeners=self._listeners
        )
        try:
            self._running[threading.get_ident()] = call
            return run_in_modes(function, _EditingMode(call))
        finally:
            if running is None:
                self._leave()

    def _edit_head_outputs(
        self, module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> Tensor | None:
        call = self.current()
        return None if call is None else _edit_gated_heads(call, output)


class _EditingMode(TorchFunctionMode):
    """Mode that passes the attentions of a call to its listeners, and returns edited outputs to the module."""

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
        # flex_attention compiles itself under this mode, and is edited when it runs.
        if call.over or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self._gates is not None and self._gates.is_given_gates(func, args):
            return self._gates(func, args, kwargs)
        if (
            # ConViT has no module between heads and projection, whose F.linear is recognised by its weight. The heads
            # are reshaped from (B, N, heads * d) to (B, heads, N, d), and back.
            isinstance(call.module, ConViTLayer)
            and func is F.linear
            and args[1] is call.module.proj.weight
        ):
            heads = args[0].unflatten(-1, (call.module.num_heads, -1)).transpose(1, 2)
            edited_heads = _edit_gated_heads(call, heads)
            side_by_side = edited_heads.transpose(1, 2).flatten(2)
            return func(side_by_side, *args[1:], **kwargs)
        # Softmaxes inside gated attention are only parts of A: its heads are edited after C and P are combined.
        if isinstance(call.module, GATED_LAYERS):
            return func(*args, **kwargs)
        # Fused functions are run by AttendingCall, perhaps with the identity as projection.
        if func in FUSED:
            return (
                self._edit(AttendingCall(func, args, kwargs))
                if self._is_asking()
                else func(*args, **kwargs)
            )
        output = func(*args, **kwargs)
        # describe() reads and reshapes tensors, which other function modes would take for operations of the model.
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
        # Attention between channels (XCiT) has heads of another kind: listeners are not asked, and nothing is edited.
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
        # A later product with values will show whether this softmax is attention.
        if edits and attending.is_softmax:
            has_heads = heads > 1 or len(leading) > 1
            tokens = tokens_if_channels(shape, [(module, call.inputs)])
            call.waiting[attention.number] = SeenOperand.of(output), has_heads, tokens
        return output

    def _is_asking(self) -> bool:
        """Return whether the layer itself calls torch, not a layer inside it."""
        frame: FrameType | None = sys._getframe()
        while (frame := innermost_call(frame)) is not None:
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Softmax | nn.Dropout):
                return module is self._call.module
            frame = frame.f_back
        return False


def _edit_gated_heads(call: LayerCall, heads: Tensor) -> Tensor:
    """Edit the outputs of a gated layer's heads, (B, heads, N_query, d)."""
    x = next((x for x in call.inputs if isinstance(x, Tensor)), heads)[: len(heads)]

    def describe() -> Any:
        layer = call.module
        return run_edited(layer, lambda: gated_attention_of(layer, x).parts)

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
    """Follows the gating parameter of a layer to its sigmoid, and replaces the gates of some heads.

    The other gates stay differentiable with respect to the parameter, lambda of shape (heads,), which is not changed.

    Args:
        gating: The parameter lambda.
        forced: New gates by head.
    """

    def __init__(self, gating: Tensor, forced: Mapping[int, float]) -> None:
        self._forms = [gating]
        # NaN marks gates that are not changed.
        self._forced = torch.full((len(gating),), math.nan)
        self._forced[list(forced)] = torch.tensor(list(forced.values()))

    def is_given_gates(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Return whether a function gets the parameter, or a view or cast of it, on its way to the sigmoid."""
        if func not in _SIGMOID and func not in _SAME_NUMBERS:
            return False
        return bool(args) and any(args[0] is form for form in self._forms)

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run such a function, and replace the gates in the output of a sigmoid."""
        output = func(*args, **kwargs)
        if func in _SAME_NUMBERS:
            self._forms.append(output)
            return output
        # ConViT reshapes lambda to (1, heads, 1, 1) before its sigmoid.
        forced = self._forced.to(output).view(output.shape)
        return torch.where(forced.isnan(), output, forced)


def name_of_gating(module: nn.Module) -> str:
    """Return the name of a gated layer's parameter lambda."""
    return "gating" if isinstance(module, GPSA) else "gating_param"


def first_tensor(output: Any, layer: str) -> Tensor:
    """Return the output of a layer, or the first of several outputs."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(
            f"expected {layer!r} to return a tensor, or several; got {type(first).__name__}"
        )
    return first


def with_first_tensor(output: Any, first: Tensor) -> Any:
    """Return the output of a layer with its first tensor replaced."""
    return first if isinstance(output, Tensor) else type(output)([first, *output[1:]])


def images_first(module: nn.Module, output: Tensor) -> Tensor:
    """Return a layer's output with the images along its first axis; a second call restores the original axes."""
    is_swapped = (
        isinstance(module, nn.MultiheadAttention)
        and not module.batch_first
        and output.ndim == 3
    )
    return output.transpose(0, 1) if is_swapped else output
