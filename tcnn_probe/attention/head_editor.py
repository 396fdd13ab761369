"""Editing of a layer's heads and gates while it runs,
as listeners decide, without changing any parameter.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
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
from tcnn_probe.attention.head_edit import edit_call, edit_gated
from tcnn_probe.attention.layout import Layout
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.logits import DeferredLogits
from tcnn_probe.attention.reconstruction import (
    ValueProductTracker,
    discrepancy,
    is_between_channels,
    logits_of,
    tokens_if_channels,
)
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.token_order import PlaceTracker
from tcnn_probe.hooks.calls import Call, Calls, innermost_call
from tcnn_probe.hooks.compilation import never_compiled_alone
from tcnn_probe.hooks.forwards import ModuleCall
from tcnn_probe.hooks.interception import (
    Answer,
    SeenAttention,
    SeenCopy,
    SeenProduct,
    TorchCall,
    owned,
)
from tcnn_probe.hooks.modes import is_nested, run_in_modes, run_unseen
from tcnn_probe.images import input_tensors

__all__ = [
    "HeadEditor",
    "LayerCall",
    "is_edited",
    "name_of_gating",
    "next_order",
    "run_with_gates",
]

Result = TypeVar("Result")

# Edits need no grids, so that the grids of queries and keys are not determined.
_UNKNOWN = Layout(None, None, "edits of heads need no grid")
# Aliases of the function that computes gates from lambda, in GPSA, in ConViT and in layers derived
# from them.
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
# Ablations may begin and end in any thread and share the editor of a layer. Copies of a layer have
# no editor.
_LOCK = threading.RLock()
_EDITORS: WeakKeyDictionary[nn.Module, "HeadEditor"] = WeakKeyDictionary()

next_order = count().__next__
"""Return the position of a new listener that edits among all:
the most recent one that names a head edits it.
"""


@dataclass(eq=False)
class LayerCall(Call):
    """A call of a layer, with the edits that listeners have returned in it.

    Attributes:
        listeners: Listeners with their positions among all, in the order in which they began.
        attentions: Number of attentions so far.
        answers: Edits by number of the attention; each head belongs to one edit.
        answered: Listeners that expected an attention of this call.
        objection: Reason why an edited softmax is not attention between tokens; "" if there is
            none.
        tracker: Products of the call, which show what edited softmaxes, by number, are multiplied
            with.
        sizes: Sizes of the inputs, without that of the batch.
        places: Tracker of the places of the layer's tokens, in its first call with such inputs.
        channels: Sizes of attentions and of inputs with which it has seen channels, not tokens.
    """

    listeners: Sequence[tuple[int, AttentionListener]] = ()
    attentions: int = 0
    answers: dict[int, Sequence[Answer]] = field(default_factory=dict)
    answered: set[AttentionListener] = field(default_factory=set)
    objection: str = ""
    tracker: ValueProductTracker[int] = field(default_factory=ValueProductTracker)
    sizes: tuple[torch.Size, ...] = ()
    places: PlaceTracker | None = None
    channels: set[Any] = field(default_factory=set)

    def ask(self, attention: Attention) -> list[Answer]:
        """Return the edits of an attention."""
        answers = []
        for order, listener in self.listeners:
            if listener.expects(attention):
                self.answered.add(listener)
                edit = listener.attends(attention)
                if edit is not None:
                    apply = partial(edit_call, module=self.module)
                    answers.append(Answer(order, listener, edit, apply))
        self.attentions += 1
        return answers

    @property
    def gates(self) -> dict[int, float]:
        """New gates by head."""
        return _gates_of(self.listeners)

    def heads_of(self, listener: AttentionListener) -> dict[int, Sequence[int]]:
        """Return the heads that a listener has edited, by number of the attention."""
        return {
            number: answer.edit.heads
            for number, answers in self.answers.items()
            for answer in answers
            if answer.listener is listener
        }

    # The following methods implement tcnn_probe.hooks.interception.Observer.

    def may_edit(self) -> bool:
        """Return whether the layer itself calls torch, not a layer inside it."""
        frame: FrameType | None = sys._getframe()
        while not self.over and (frame := innermost_call(frame)) is not None:
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Softmax | nn.Dropout):
                return module is self.module
            frame = frame.f_back
        return False

    def sees(self, call: TorchCall) -> Sequence[Answer]:
        """Return edits of an attention, or check whether an edited softmax is multiplied
        with values.
        """
        if self.over:
            return ()
        if call.is_fused:
            return self._edits(call) if self.may_edit() else ()
        # describe() reads and reshapes tensors, which other function modes would take for
        # operations of the model.
        with torch.DisableTorchFunction():
            seen = call.describe()
        if isinstance(seen, SeenProduct):
            for objection in self.tracker.multiplied(seen).values():
                self.objection = self.objection or objection
        elif isinstance(seen, SeenCopy):
            self.tracker.copied(seen)
        elif isinstance(seen, SeenAttention) and not seen.read_only:
            return self._edits(call) if self.may_edit() else ()
        return ()

    def _edits(self, call: TorchCall) -> Sequence[Answer]:
        module = self.module
        leading, queries = call.heads.shape[:-2], call.heads.shape[-2]
        heads = heads_axis(leading, module, call.heads_axis)[1]
        rows = as_rows(call.heads, module, call.heads_axis)
        shape = (len(rows), heads, queries, call.keys)
        kind = shape[1:], self.sizes
        if self.places is not None and self.places.are_channels:
            self.channels.add(kind)
        columns = rows.shape[-1] if call.is_fused else None
        around = [ModuleCall(module, self.inputs)]
        # Attention between channels (XCiT) has heads of another kind: listeners are not asked, and
        # nothing is edited.
        if kind in self.channels or is_between_channels(shape, columns, around):
            return ()

        def described() -> SeenAttention:
            seen = call.describe()
            assert isinstance(seen, SeenAttention)
            return seen

        attention = SoftmaxAttention(
            module=module,
            images=len(rows),
            layout=_UNKNOWN,
            number=self.attentions,
            logits=DeferredLogits(shape, rows, lambda: logits_of(described(), module)),
            compare=lambda: discrepancy(described(), module),
        )
        return self.ask(attention)

    def ran(self, call: TorchCall, output: Any, answers: Sequence[Answer]) -> None:
        """Note which heads are whose, and wait until an edited softmax is multiplied
        with values.
        """
        own = {listener for _, listener in self.listeners}
        answers = [answer for answer in answers if answer.listener in own]
        if not answers:
            return
        number = self.attentions - 1
        self.answers[number] = answers
        if not call.is_fused:
            rows, heads, queries, keys = as_rows(call.heads, self.module).shape
            around = [ModuleCall(self.module, self.inputs)]
            tokens = tokens_if_channels((rows, heads, queries, keys), around)
            self.tracker.wait(number, output, has_heads=heads > 1, tokens=tokens)


class HeadEditor(Calls[LayerCall]):
    """Editor of heads and gates in each call of a layer, shared by all listeners to the layer.

    Attributes:
        has_edited: Whether heads of a gated layer have been edited.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, LayerCall)
        self._listeners: tuple[tuple[int, AttentionListener], ...] = ()
        self.has_edited = False
        self._tracked: set[Any] = set()
        self._channels: set[Any] = set()

    @classmethod
    def add(cls, module: nn.Module, listener: AttentionListener, order: int | None = None) -> None:
        """Add a listener to a layer, the last one unless ``order`` is its position among all."""
        order = next_order() if order is None else order
        with _LOCK:
            editor = _EDITORS.setdefault(module, cls(module))
            # The tuple is replaced, so that running calls keep the listeners with which they began.
            editor._listeners = (*editor._listeners, (order, listener))
            if len(editor._listeners) == 1:
                editor.attach()

    @classmethod
    def remove(cls, module: nn.Module, listener: AttentionListener) -> None:
        """Remove a listener. This may be called during a forward, and more than once."""
        with _LOCK:
            editor = _EDITORS.get(module)
            if editor is None:
                return
            editor._listeners = tuple(
                entry for entry in editor._listeners if entry[1] is not listener
            )
            if not editor._listeners:
                # It is forgotten last, so that this can be repeated after Ctrl-C.
                editor.detach()
                _EDITORS.pop(module, None)

    @classmethod
    @contextmanager
    def listening(cls, listeners: Mapping[AttentionListener, nn.Module]) -> Iterator[None]:
        """Add listeners to their layers inside the ``with``."""

        def remove() -> None:
            for listener, module in listeners.items():
                cls.remove(module, listener)

        try:
            for listener, module in listeners.items():
                cls.add(module, listener)
            yield
        finally:
            try:
                remove()
            except KeyboardInterrupt:
                remove()  # Ctrl-C interrupted the first attempt
                raise

    def attach(self) -> None:
        """Add hooks to the layer and, in a gated layer,
        to the submodules between which the heads are separate.
        """
        super().attach()
        if isinstance(self.module, GPSA):
            # It forms the outputs of single heads only if a hook asks for them, which is not before
            # the first edit.
            self._add(self.module.head_keys, self._ask_before_heads, after=True)
            # A class with a forward of its own may not let keys pass there.
            if type(self.module).forward is not GPSA.forward:
                self._edit_outputs(self.module)
        elif isinstance(self.module, ConViTLayer):
            self._add(self.module.proj, self._edit_projected)

    def enter_call(self, call: LayerCall) -> None:
        """Start editing in this call."""
        call.listeners = self._listeners
        gates = self._gate_editors(call.gates)
        # The softmaxes of gated attention are only parts of it: heads are edited after these are
        # combined.
        is_gated = isinstance(self.module, GATED_LAYERS)
        # Attention in nested tensors cannot be edited, and torch's fast path for it needs that
        # there is no mode.
        if any(map(is_nested, call.args)):
            return
        if is_gated:
            call.scope.open(self.module, None, gates)
            return
        run_unseen(self._track, call)
        call.scope.open(self.module, call, [] if call.places is None else [call.places])

    def _track(self, call: LayerCall) -> None:
        """Let the first call with inputs of some sizes show
        whether its attention is between channels, as it does to recorders.
        """
        tokens = input_tensors(call.inputs)
        call.sizes = tuple(x.shape[1:] for x in tokens)
        call.channels = self._channels
        if call.sizes not in self._tracked:
            patches = next((x.shape[1] for x in tokens if x.ndim == 3), None)
            call.places = PlaceTracker(tokens, patches=patches)

    def gate_editors(self) -> "list[_GateEditor]":
        """Return the mode that changes gates, if the present listeners change any."""
        return self._gate_editors(_gates_of(self._listeners))

    def _gate_editors(self, gates: Mapping[int, float]) -> "list[_GateEditor]":
        if not gates:
            return []
        return [_GateEditor(getattr(self.module, name_of_gating(self.module)), gates)]

    def edit_output(self, call: LayerCall, output: Any) -> Any:
        """Notify the listeners, which may add terms to the output."""
        if call.places is not None:
            self._tracked.add(call.sizes)
        if call.tracker.waiting:
            call.objection = call.objection or "a softmax that is not multiplied with values"
        for _, listener in call.listeners:
            listener.returned(call, output)
        adding = [
            answer.listener
            for answers in call.answers.values()
            for answer in answers
            if type(answer.listener).add_terms is not AttentionListener.add_terms
        ]
        if not adding:
            return None
        edited = images_first(call.module, first_tensor(output, adding[0].layer))
        for listener in dict.fromkeys(adding):
            edited = listener.add_terms(call, edited)
        return with_first_tensor(output, images_first(call.module, edited))

    def _ask_before_heads(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Ask the listeners about a GPSA layer's attention, once its keys are known."""
        call, layer = self.current(), self.module
        if call is None:
            return
        assert isinstance(layer, GPSA)
        x = _first_input(call)
        y, x_axis = layer.axes(x.shape[2], x.shape[3])
        answers = _ask_once(call, (len(x), layer.heads, y.queries * x_axis.queries))
        with self._lock:
            if answers and self._attached and not self.has_edited:
                self._edit_outputs(layer)

    def _edit_outputs(self, layer: GPSA) -> None:
        self.has_edited = True
        self._add(layer.head_outputs, self._edit_head_outputs, after=True)

    def _edit_head_outputs(
        self, module: nn.Module, args: Any, kwargs: Any, heads: Tensor
    ) -> Tensor | None:
        call = self.current()
        return None if call is None else _edit_gated_heads(call, heads)

    def _edit_projected(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Any) -> Any:
        """Edit heads of ConViT, which are side by side
        where they are projected: (B, N, heads * d).
        """
        call = self.current()
        if call is None or not args:
            return None
        heads = args[0].unflatten(-1, (self.module.num_heads, -1)).transpose(1, 2)
        edited = _edit_gated_heads(call, heads)
        if edited is None:
            return None
        self.has_edited = True
        return (edited.transpose(1, 2).flatten(2), *args[1:]), kwargs


def is_edited(layer: nn.Module) -> bool:
    """Return whether heads of a gated layer have been edited since a listener to it was added."""
    editor = _EDITORS.get(layer)
    return editor is not None and editor.has_edited


def run_with_gates(layer: nn.Module, function: Callable[[], Result]) -> Result:
    """Call a function that computes with a layer's parameters,
    with the gates that listeners force in its calls.

    Only modes that this enters see the function, even where torch functions are hidden from all
    modes.
    """
    editor = _EDITORS.get(layer)
    gates = [] if editor is None else editor.gate_editors()
    return run_in_modes(function, *gates) if gates else function()


def _gates_of(listeners: Iterable[tuple[int, AttentionListener]]) -> dict[int, float]:
    """Return new gates by head; the last listener takes precedence."""
    gates: dict[int, float] = {}
    for _, listener in listeners:
        gates |= listener.gates()
    return gates


def _first_input(call: LayerCall) -> Tensor:
    return next(x for x in call.inputs if isinstance(x, Tensor))


def _gated_attention(layer: nn.Module, x: Tensor, sizes: tuple[int, int, int]) -> GatedAttention:
    def describe() -> Any:
        return run_with_gates(layer, lambda: gated_attention_of(layer, x).parts)

    return GatedAttention(
        module=layer,
        images=sizes[0],
        layout=_UNKNOWN,
        describe=describe,
        sizes=sizes,
        x=x,
    )


def _ask_once(call: LayerCall, sizes: tuple[int, int, int]) -> Sequence[Answer]:
    """Return the edits of a gated layer's attention
    of these sizes (B, heads, N_query), and ask for them at first.
    """
    if 0 not in call.answers:
        x = _first_input(call)[: sizes[0]]
        call.answers[0] = owned(call.ask(_gated_attention(call.module, x, sizes)))
    return call.answers[0]


def _edit_gated_heads(call: LayerCall, heads: Tensor) -> Tensor | None:
    """Edit the outputs of a gated layer's heads, (B, heads, N_query, d); None without edits."""
    images, head_count, queries, _ = heads.shape
    sizes = (images, head_count, queries)
    answers = _ask_once(call, sizes)
    if not answers:
        return None
    attention = _gated_attention(call.module, _first_input(call)[:images], sizes)
    return edit_gated(attention, [answer.edit for answer in answers], heads)


class _GateEditor(TorchFunctionMode):
    """Mode that follows the gating parameter of a layer to its sigmoid,
    and replaces the gates of some heads.

    The other gates stay differentiable with respect to the parameter, lambda of shape (heads,),
    which is not changed.

    Args:
        gating: The parameter lambda.
        forced: New gates by head.
    """

    def __init__(self, gating: Tensor, forced: Mapping[int, float]) -> None:
        super().__init__()
        self._forms = [gating]
        # NaN marks gates that are not changed.
        self._forced = torch.full((len(gating),), math.nan)
        self._forced[list(forced)] = torch.tensor(list(forced.values()))

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _SIGMOID and func not in _SAME_NUMBERS:
            return output
        # The parameter, or a view or cast of it, is on its way to the sigmoid.
        if not args or not any(args[0] is form for form in self._forms):
            return output
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
    """Return a layer's output with the images along its first axis;
    a second call restores the original axes.
    """
    is_swapped = (
        isinstance(module, nn.MultiheadAttention) and not module.batch_first and output.ndim == 3
    )
    return output.transpose(0, 1) if is_swapped else output
