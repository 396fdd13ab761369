"""The stream of all attentions in a model's forwards, which listeners can read and edit."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_model.precision import without_autocast
from tcnn_probe.architectures.lookup import known, looks_like_attention
from tcnn_probe.attention.attention import Attention, WholeLayers
from tcnn_probe.attention.convolved import CONVOLVED
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.gated import GATED, GATED_LAYERS, GatedAttention
from tcnn_probe.attention.head_edit import HeadEdit, edit_call
from tcnn_probe.attention.head_editor import (
    HeadEditor,
    is_edited,
    next_order,
    run_with_gates,
)
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.reconstruction import (
    NoTokenAttentionError,
    ValueProductTracker,
    Verification,
    discrepancy,
    softmax_attention_of,
    tokens_if_channels,
)
from tcnn_probe.attention.token_finder import TokenFinder
from tcnn_probe.hooks.calls import without_nested
from tcnn_probe.hooks.forwards import Forward, Forwards, ModuleCall, Running
from tcnn_probe.hooks.interception import (
    Answer,
    Seen,
    SeenAttention,
    SeenCopy,
    SeenJoin,
    SeenProduct,
    SeenUnmeasured,
    TorchCall,
)
from tcnn_probe.hooks.modes import named_in_errors
from tcnn_probe.images import input_tensors
from tcnn_probe.models import check_model, layer_names, module_name

__all__ = ["WHOLE_LAYERS", "AttentionStream", "attention_stream"]

WHOLE_LAYERS: tuple[WholeLayers, ...] = (GATED, CONVOLVED)
"""Layers whose attention is described as a whole."""


@contextmanager
def attention_stream(
    model: nn.Module, on_attention: Callable[[Attention], HeadEdit | None]
) -> Iterator["AttentionStream"]:
    """Call ``on_attention`` with every attention
    of the forwards inside the ``with``, in any module.

    ::

        largest = {}

        def look(attention):
            largest[attention.name] = attention.weights().amax((0, 1, 3, 4))  # (heads,)

        with tcnn_probe.attention_stream(model, look) as stream:
            model(images)
        print({name: largest[name] for name in stream.layers}, stream.unsupported)

    This covers softmax attention, fused or not, and gated attention (GPSA, timm's ConViT), which is
    passed as a whole. Fused attention is left on, and the model's outputs do not change unless
    ``on_attention`` returns a :class:`~tcnn_probe.attention.head_edit.HeadEdit`. Streams can be
    nested: each head is edited by the innermost stream that names it. The reconstruction of each
    layer is compared once with the model's own output. Nothing is stored: the tensors of an
    attention belong to the model.

    Args:
        model: Any module.
        on_attention: Function that is called with each attention while the forward runs, without
            gradients. It is not known by then whether a softmax will be multiplied with values:
            :attr:`AttentionStream.layers` has the layers for which it was.

    Yields:
        :class:`AttentionStream`, with ``layers`` and, for those that cannot be shown,
        ``unsupported``.

    Raises:
        ReconstructionError: The reconstructed attention of a forward differs from the model's own.
    """
    check_model(model)
    with AttentionStream(model, _Callback(on_attention)).following() as stream:
        yield stream


class _Callback(AttentionListener):
    may_edit = True

    def __init__(self, on_attention: Callable[[Attention], HeadEdit | None]) -> None:
        self._on_attention = on_attention

    def attends(self, attention: Attention) -> HeadEdit | None:
        edit = self._on_attention(attention)
        if isinstance(edit, (list, tuple)):
            raise TypeError(f"expected a HeadEdit or None from the function, got {edit!r}")
        if not isinstance(edit, HeadEdit):
            return None
        edit.check(attention)
        return edit if edit.heads else None


@dataclass(eq=False)
class _ShownSoftmax:
    """A softmax that was passed to the listener.

    Args:
        layer: Name of the layer.
        module: Module that called the softmax.
        objection: Reason why the softmax does not count as attention; "" if there is none.
        output: Output of attention if the model also gets the log-sum-exp, with which it may
            renormalise the output.
    """

    layer: str
    module: nn.Module
    objection: str = ""
    output: Tensor | None = None

    def note_copy(self, copy: SeenCopy) -> None:
        """Note an objection if the model renormalises the output,
        because its softmax then includes other logits.
        """
        # transformers and torchtitan do this to apply the logit of a sink (s_aux) to the output of
        # flex_attention.
        if self.output is not None and copy.scales_rows_of(self.output):
            self.objection = (
                "its output is scaled afterwards by a factor for each query, as for a sink, so its "
                "softmax is seen only in part"
            )


class AttentionStream:
    """The attentions of a model's forwards, from :meth:`attach` to :meth:`close`.

    Attributes:
        layers: Layers with attention, {name: module}, in the order of their calls. The second
            attention within one call of a module is called ``name#1``.
        unsupported: {name: reason} of layers that look like attention but cannot be measured.
        verification: Comparisons of reconstructed attention with the model's own.

    Args:
        model: Any module.
        listener: Listener to the attentions.
        layers: Names of the layers whose attention is passed to the listener; None for all.
        watched: Modules whose calls are reported to the listener.
        tokens: Facts about the tokens that the user gives.
        fields: Receptive fields to fill in the forwards in which tokens are tracked, such as the
            first one.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: AttentionListener,
        *,
        layers: Collection[str] | None = None,
        watched: Collection[nn.Module] = (),
        tokens: GivenTokens | None = None,
        fields: ReceptiveFields | None = None,
    ) -> None:
        self.layers: dict[str, nn.Module] = {}
        self.unsupported: dict[str, str] = {}
        self.verification = Verification()
        self._model = model
        self._listener = listener
        self._wanted = layers
        self._watched = frozenset(watched)
        self._names = layer_names(model)
        self._whole: dict[nn.Module, WholeLayers] = {}
        self._seams: dict[nn.Module, tuple[nn.Module, str]] = {}
        for kind in WHOLE_LAYERS:
            for layer in self._names:
                if isinstance(layer, kind.classes):
                    self._whole[layer] = kind
                    for seam, role in kind.seams(layer).items():
                        self._seams[seam] = layer, role
        # Modules whose return is more than that of a feature map.
        self._noted = {*self._watched, *self._whole, *self._seams}
        self._tokens = TokenFinder(self._names, tokens or GivenTokens(), fields)
        self._explained: set[nn.Module] = set()
        # The attention of the running call of torch, if it was shown.
        self._last: _ShownSoftmax | None = None
        # Modules in which attention was seen.
        self.attending: set[nn.Module] = set()
        self._reset()
        self.may_edit = listener.may_edit
        self._order = next_order()
        self._forwards = Forwards(model, self, self._names, self.attending)
        # Heads of gated layers are separate only inside of the layers, where editors have hooks.
        self._edited_layers: dict[nn.Module, AttentionListener] = {}
        for layer in self._whole if self.may_edit else ():
            if isinstance(layer, GATED_LAYERS):
                self._edited_layers[layer] = _GatedLayer(self)

    @contextmanager
    def following(self) -> Iterator["AttentionStream"]:
        """Follow the forwards inside the ``with``."""
        try:
            self.attach()
            yield self
        finally:
            try:
                self.close()
            except KeyboardInterrupt:
                self.close()  # Ctrl-C interrupted the first attempt
                raise

    def attach(self) -> None:
        """Attach to the model; :meth:`close` detaches, also if this was interrupted."""
        self._forwards.attach()
        for layer, listener in self._edited_layers.items():
            HeadEditor.add(layer, listener, self._order)

    @property
    def attached(self) -> bool:
        """True while forwards are followed."""
        return self._forwards.attached

    def close(self) -> None:
        """Detach from the model. This may be called more than once, and during a forward."""
        self._forwards.detach()
        for layer, listener in self._edited_layers.items():
            HeadEditor.remove(layer, listener)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the images that were embedded last; None if unknown."""
        return None if self.maps.patches else self.maps.size

    @property
    def maps(self) -> FeatureMaps:
        """Evidence of grids in the forward so far."""
        return self._tokens.maps

    # The following methods implement tcnn_probe.hooks.forwards.ForwardListener.

    def call_begins(self, entry: nn.Module, inputs: Sequence[Any], *, continues: bool) -> bool:
        """Ask the listener whether to follow the call; one with an empty batch is not followed."""
        if any(x.numel() == 0 for x in input_tensors(inputs)):
            return False
        if not self._listener.begins(entry, inputs, continues=continues):
            return False
        self._reset()
        self.verification.begin()
        is_whole = self._names[entry] == ""
        self._tokens.begin_call(entry, inputs, whole_model=is_whole, continues=continues)
        return True

    def modes(self) -> Sequence[TorchFunctionMode]:
        """Return a mode that tracks the places of tokens, in the first forward of each kind."""
        return self._tokens.modes

    def module_called(self, module: nn.Module, args: Sequence[Any]) -> None:
        """Note the image that enters the patch embedding."""
        maps = self._tokens.maps
        if maps.is_seeking or module is maps.embedding:
            self._tokens.note_image(module, args)

    def torch_computes(self, forward: Forward, seen: Seen) -> Sequence[Answer]:
        """Reconstruct a softmax attention, or check whether a softmax is multiplied with values."""
        self._last = None
        if isinstance(seen, SeenJoin):
            self.maps.joins(seen.lengths)
        elif isinstance(seen, SeenCopy):
            self._tracker.copied(seen)
            for shown in self._shown:
                shown.note_copy(seen)
        elif isinstance(seen, SeenUnmeasured):
            name = self._names[forward.innermost]
            if self._wants(name):
                self.unsupported[name] = seen.reason
        elif isinstance(seen, SeenProduct):
            for shown, objection in self._tracker.multiplied(seen).items():
                shown.objection = objection
        else:
            return self._show_softmax(forward, seen)
        return ()

    def torch_ran(self, call: TorchCall, output: Any) -> None:
        """Verify an attention that was shown before it ran,
        and note the tensor with which the model goes on.
        """
        shown = self._last
        if shown is None:
            return
        if shown in self._tracker.waiting:
            self._tracker.replace(shown, output)
        if call.is_multihead and self.verification.needed(shown.layer):
            call.unedited()
            seen = call.describe()
            assert isinstance(seen, SeenAttention)
            self._verify(shown.layer, seen, discrepancy(seen, shown.module))

    def _verify(
        self,
        layer: str,
        seen: SeenAttention,
        difference: tuple[Tensor, float] | None,
    ) -> None:
        source = seen.query if seen.logits is None else seen.logits
        mask, odd = seen.mask, ""
        if mask is not None and source is not None and mask.is_floating_point():
            dtypes = f"{mask.dtype}, {source.dtype}"
            odd = dtypes if mask.dtype != source.dtype else ""
        self.verification.add(layer, difference, odd)

    def module_returned(
        self, forward: Forward, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> None:
        """Note feature maps and outputs of seams,
        and describe the attention of layers with whole attention.
        """
        self._counts.pop(module, None)
        self._ran.add(module)
        self._tokens.maps.passes(inputs, output)
        if module not in self._noted:
            return
        if module in self._seams:
            layer, role = self._seams[module]
            self._formed.setdefault(layer, {}).setdefault(role, []).append(output)
        call = ModuleCall(module, without_nested(*inputs))
        [output] = without_nested(output)
        if module in self._watched:
            forward.run_unseen(self._listener.returned, call, output)
        if module in self._whole:
            self.attending.add(module)
            if self._wants(self._names[module]):
                self._verify_whole(forward, call, output)

    def call_ends(self, output: Any) -> None:
        """Update ``layers`` and ``unsupported``, and notify the listener."""
        shown, ran, waiting = self._shown, self._ran, self._tracker.waiting
        self._tokens.end_call()
        self._reset()
        # settle() may raise, so the state of the forward is cleared before.
        try:
            self.verification.settle()
        except BaseException:
            self._listener.fails()
            raise
        confirmed = {}
        for softmax in shown:
            if softmax not in waiting and not softmax.objection:
                confirmed[softmax.layer] = softmax.module
        self.layers |= confirmed
        for softmax in shown:
            if softmax.layer in confirmed:
                # An earlier forward may have ended before this softmax was multiplied, or taken
                # another branch.
                self.unsupported.pop(softmax.layer, None)
            # A layer needs to attend in only one forward; others may skip the product with the
            # values.
            elif softmax.layer not in self.layers:
                self.unsupported[softmax.layer] = (
                    softmax.objection or "a softmax that is not multiplied with values"
                )
        self._explain(ran)
        self._listener.ends(confirmed.keys(), output)

    def call_fails(self) -> None:
        """Discard the forward, and notify the listener."""
        self._reset()
        self.verification.begin()
        self._listener.fails()

    def _reset(self) -> None:
        self._shown: list[_ShownSoftmax] = []
        # Numbers of attentions so far in the calls of running modules.
        self._counts: Counter[nn.Module] = Counter()
        self._ran: set[nn.Module] = set()
        self._tracker = ValueProductTracker[_ShownSoftmax]()
        self._formed: dict[nn.Module, dict[str, list[Any]]] = {}
        # Whole attentions that were shown before their layers have returned.
        self._described: dict[nn.Module, Attention] = {}
        self._tokens.forget_forward()
        self._last = None

    def _wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _show_softmax(self, forward: Forward, seen: SeenAttention) -> Sequence[Answer]:
        running = forward.running
        if any(module in self._whole for module, _ in running):
            return ()  # a part of an attention that is described as a whole
        module = running[-1].module
        name = self._names[module]
        self.attending.add(module)
        source = seen.query if seen.logits is None else seen.logits
        # A layer may see none of the images, as after an early exit.
        if not self._wants(name) or source is None or source.numel() == 0:
            return ()
        number = self._counts[module]
        self._counts[module] += 1
        layer = f"{name}#{number}" if number else name
        tokens, heads = self._tokens, seen.heads
        queries_are_words = tokens.queries_are_words(layer)
        layout_of = partial(tokens.layout_of, layer, running, seen.not_on_grid)
        with named_in_errors(layer):
            try:
                images = tokens.images_of(layer, running, source)
                attention = softmax_attention_of(
                    seen, layer, number, running, images, layout_of, tokens.with_mask
                )
            except NoTokenAttentionError as reason:
                # A reason that is known for the class holds for all attentions of the module.
                known_reason = known(module).no_attention_matrix
                self.unsupported[name if known_reason else layer] = str(reason)
                return ()
            with without_autocast(attention.source):
                rows = attention.rows
                attention = tokens.complete(
                    attention,
                    None
                    if queries_are_words
                    else lambda tracker: tracker.views_of_rows(rows, module, heads),
                )
                if self.verification.needed(layer):
                    self._verify(layer, seen, attention.discrepancy())
                edit = self._listener.attends(attention)
        # Fused attention includes the product with values; a plain softmax has to wait for it.
        shown = _ShownSoftmax(layer, module)
        if seen.logits is not None and seen.output is not None:
            channels = tokens_if_channels(attention.shape, running)
            self._tracker.wait(shown, seen.output, has_heads=attention.heads > 1, tokens=channels)
        if seen.gives_lse and seen.output is not None:
            # The output is kept until the forward ends, because otherwise its memory could be
            # reused by another tensor.
            shown.output = seen.output
        self._shown.append(shown)
        self._last = shown
        if edit is None:
            return ()
        if seen.read_only:
            raise RuntimeError(f"{layer!r}: {seen.read_only}")
        if attention.order is not None:
            edit = edit.in_order(*(order.argsort() for order in attention.order))
        apply = partial(edit_call, module=module)
        return [Answer(self._order, self, edit, apply)]

    def edit_of(self, layer: nn.Module, x: Tensor) -> HeadEdit | None:
        """Show the attention of a gated layer for an input
        before its heads are combined, and return an edit.
        """
        forward = self._forwards.followed
        if forward is None or not forward.is_listening() or not self._wants(self._names[layer]):
            return None
        modules = [module for module, _ in forward.running]
        if layer not in modules:
            return None
        around = forward.running[: modules.index(layer)]
        return self._show_whole(forward, ModuleCall(layer, [x]), around)

    def _show_whole(self, forward: Forward, call: ModuleCall, running: Running) -> HeadEdit | None:
        """Pass the whole attention of a layer to the listener, and return an edit."""
        layer, name = call.module, self._names[call.module]
        formed = self._formed.pop(layer, None)

        def show() -> HeadEdit | None:
            attention = self._whole[layer].describe(layer, call.inputs[0], formed, name, running)
            attention = self._tokens.complete(
                attention, lambda tracker: tracker.views_of(call.inputs[0])
            )
            self._described[layer] = attention
            return self._listener.attends(attention)

        with named_in_errors(name):
            edit = forward.run_unseen(run_with_gates, layer, show)
        self._shown.append(_ShownSoftmax(name, layer))
        return edit

    def _verify_whole(self, forward: Forward, call: ModuleCall, output: Any) -> None:
        """Compare the whole attention of a layer with its output;
        show it, unless this was done before for edits.
        """
        layer, name = call.module, self._names[call.module]
        if layer not in self._described:
            edit = self._show_whole(forward, call, forward.running)
            if edit is not None:
                kind = type(self._described[layer]).__name__
                raise TypeError(f"expected no edit of {name!r}: {kind} cannot be edited")
        attention = self._described.pop(layer)
        # An edited output cannot be compared with the attention before the edit.
        if not self.verification.needed(name) or is_edited(layer):
            return

        def verify() -> None:
            self.verification.add(name, attention.discrepancy(output))

        with named_in_errors(name):
            forward.run_unseen(run_with_gates, layer, verify)

    def _explain(self, ran: Collection[nn.Module]) -> None:
        """Note once for each module that looks like attention why none was seen while it ran."""
        new = set(ran) - self._explained
        self._explained |= new
        named = {module_name(layer) for layer in (*self.layers, *self.unsupported)}
        named |= {self._names[layer] for layer in self._whole}
        # After the first forwards there are no new modules, and the loop over all names is skipped.
        for module, name in self._names.items() if new else ():
            if module not in new or name in named or not self._wants(name):
                continue
            if reason := known(module).no_attention_matrix:
                self.unsupported[name] = reason
            # A wrapper needs no reason if a layer inside it attends, or if the model itself, named
            # "", does.
            elif looks_like_attention(module) and not any(
                not name or x.startswith(f"{name}.") for x in named
            ):
                self.unsupported[name] = "no softmax between tokens was seen while it ran"


class _GatedLayer(AttentionListener):
    """Listener to a gated layer, which passes its attention to the listener of a stream."""

    def __init__(self, stream: AttentionStream) -> None:
        self._stream = stream

    def attends(self, attention: Attention) -> HeadEdit | None:
        assert isinstance(attention, GatedAttention)
        return self._stream.edit_of(attention.module, attention.x)
