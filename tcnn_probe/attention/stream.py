"""Each attention of a model's forwards, rebuilt and on its grid, handed to whoever wants to look at it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tcnn_model.gpsa.precision import without_autocast
from tcnn_probe.architectures.lookup import known, looks_like_attention
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import GivenTokens, special_tokens
from tcnn_probe.attention.rebuild import NoTokenAttentionError, Verification, discrepancy, rebuild
from tcnn_probe.hooks.forwards import Forwards, Running
from tcnn_probe.hooks.interception import Seen, SeenJoin
from tcnn_probe.hooks.products import SeenCopy, SeenOperand, SeenProduct, Weighed
from tcnn_probe.models import check_model, layer_names, named_in_errors

__all__ = ["AttentionListener", "AttentionStream", "attention_stream"]


@contextmanager
def attention_stream(model: nn.Module, on_attention: Callable[[AttentionCall], object]) -> Iterator["AttentionStream"]:
    """Show ``on_attention`` every softmax attention of the forwards that run inside, in whatever module it is.

    ::

        largest = {}

        def look(call):
            largest[call.name] = call.weights(slice(None)).amax((0, 1, 3, 4))  # (heads,)

        with tcnn_probe.attention_stream(model, look) as stream:
            model(images)
        print({name: largest[name] for name in stream.layers}, stream.unsupported)

    Fused attention is left on, and what the model computes is not changed. Each layer's reconstruction is compared
    once with what the model got. Nothing is kept: the tensors behind a call are the model's own.

    Args:
        model: any module, not compiled.
        on_attention: called with each attention while the forward runs, without gradients. Of a softmax it is not
            known yet whether it will weigh values; :attr:`AttentionStream.layers` says so afterwards.

    Yields:
        :class:`AttentionStream`, with the names of the ``layers`` and of what is ``unsupported``.

    Raises:
        ReconstructionError: by a forward whose attention is not what it is taken for.
    """
    check_model(model)
    with closing(AttentionStream(model, _Callback(on_attention))) as stream:
        yield stream


class AttentionListener:
    """What a stream tells of forwards, of one at a time. Does nothing: override what you need."""

    def wants(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Whether to follow the forward that begins with a call of ``entry``, the model or a part of it."""
        return True

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> None:
        """A forward begins."""

    def attends(self, call: AttentionCall) -> Any:
        """An attention; what is returned is handed to :meth:`ends`."""

    def watches(self, module: nn.Module) -> bool:
        """Whether :meth:`ran` is to be called after each call of this module."""
        return False

    def ran(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """A module that is watched has returned."""

    def ends(self, kept: Sequence[Any], output: Any) -> None:
        """A forward has ended, without an exception.

        Args:
            kept: what :meth:`attends` returned of each attention that has weighed values.
            output: of the model, or of the part of it that was called.
        """

    def fails(self) -> None:
        """A forward has ended by an exception."""


class _Callback(AttentionListener):
    def __init__(self, on_attention: Callable[[AttentionCall], object]) -> None:
        self._on_attention = on_attention

    def attends(self, call: AttentionCall) -> None:
        self._on_attention(call)


@dataclass(eq=False)
class _Seen:
    layer: str
    module: nn.Module
    kept: Any  # by the listener
    softmax: SeenOperand | None  # of which it is not known yet whether it weighs values
    heads: bool  # whether it has an axis of heads
    objection: str = ""  # why it is no attention between tokens


class AttentionStream:
    """Follows the forwards of a model, from its making until :meth:`close`.

    Attributes:
        layers: names of the layers that have attended, {name: their module}, in the order in which they did. The second
            attention within one call of a module is called ``name#1``.
        unsupported: {name: why} of layers that look like attention and are none between tokens.

    Args:
        model: any module, not compiled.
        listener: is told of each attention.
        layers: names of the layers to look at; None for all.
        skipped: modules whose attention is not to be rebuilt.
        tokens: what the user says of them.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: AttentionListener,
        *,
        layers: Collection[str] | None = None,
        skipped: Collection[nn.Module] = (),
        tokens: GivenTokens | None = None,
    ) -> None:
        self.layers: dict[str, nn.Module] = {}
        self.unsupported: dict[str, str] = {}
        self.verification = Verification()
        self._model, self._listener, self._wanted, self._skipped = model, listener, layers, frozenset(skipped)
        self._names = layer_names(model)
        self._maps = FeatureMaps(special_tokens(self._names, tokens or GivenTokens()))
        self._explained: set[nn.Module] = set()
        self._reset()
        self._forwards = Forwards(model, self)

    @property
    def attached(self) -> bool:
        """Whether forwards are still followed."""
        return self._forwards.attached

    def close(self) -> None:
        """Detach; may be called more than once, also in the middle of a forward."""
        self._forwards.detach()

    def around(self, count: int) -> tuple[int, int] | None:
        """How many of so many tokens the model has before its grid, and after it; None if nothing shows it."""
        return self._maps.around(count)

    # What Forwards tells: see tcnn_probe.hooks.forwards.Listener.

    def wants(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Ask the listener; a forward of no images shows nothing."""
        if any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs):
            return False
        return self._listener.wants(entry, inputs)

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> None:
        """Begin anew."""
        self._reset()
        self.verification.begin()
        self._maps.enter(inputs, whole_model=entry is self._model)
        self._listener.begins(entry, inputs)

    def asked(self, running: Running, seen: Seen) -> None:
        """Rebuild an attention, or see whether a softmax weighs values."""
        if isinstance(seen, SeenJoin):
            self._maps.joins(seen.lengths)
            return
        if isinstance(seen, SeenProduct):
            self._confirm(seen)
            return
        if isinstance(seen, SeenCopy):
            self._weighed.copied(seen)
            return
        module = running[-1][0]
        name = self._names[module]
        if module in self._skipped or not self._wants(name):
            return
        number = self._asked[module] = self._asked.get(module, -1) + 1
        layer = f"{name}#{number}" if number else name
        with named_in_errors(layer):
            try:
                call = rebuild(seen, layer, running, self._maps)
            except NoTokenAttentionError as reason:
                self.unsupported[layer] = str(reason)
                return
            with without_autocast(call.logits.source):
                if self.verification.needed(layer) and (compared := discrepancy(seen, module)) is not None:
                    self.verification.add(layer, *compared)
                kept = self._listener.attends(call)
        softmax = None if seen.logits is None or seen.output is None else SeenOperand.of(seen.output)
        several = call.heads > 1 or (softmax is not None and len(softmax.shape) > 3)
        self._seen.append(_Seen(layer, module, kept, softmax, several))

    def returned(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> bool:
        """Take note of feature maps."""
        self._asked.pop(module, None)
        self._ran.add(module)
        self._maps.passes([*inputs, output])
        return self._listener.watches(module)

    def ran(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """Tell the listener."""
        self._listener.ran(module, inputs, output)

    def ends(self, *, whole: bool, output: Any = None) -> None:
        """Settle what is known now, and tell the listener."""
        seen, ran = self._seen, self._ran
        self._reset()
        if not whole:
            self.verification.begin()
            self._listener.fails()
            return
        self.verification.settle()
        confirmed = [one for one in seen if one.softmax is None and not one.objection]
        for one in confirmed:
            self.layers[one.layer] = one.module
            self.unsupported.pop(one.layer, None)
        for one in seen:
            if one.layer not in self.layers:
                self.unsupported[one.layer] = one.objection or "a softmax that weighs no values in a matrix product"
        self._explain(ran)
        self._listener.ends([one.kept for one in confirmed], output)

    def _reset(self) -> None:
        self._seen: list[_Seen] = []
        self._asked: dict[nn.Module, int] = {}
        self._ran: set[nn.Module] = set()
        self._weighed = Weighed()

    def _wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _confirm(self, product: SeenProduct) -> None:
        """A softmax is attention once its result, mixed among heads perhaps, multiplies values."""
        waiting = {one: (one.softmax, one.heads) for one in self._seen if one.softmax is not None}
        for one, objection in self._weighed.by(product, waiting).items():
            one.softmax, one.objection = None, objection

    def _explain(self, ran: Collection[nn.Module]) -> None:
        """Say why modules that look like attention showed none while they ran; once for each."""
        new = set(ran) - self._explained
        self._explained |= new
        told = {layer.split("#")[0] for layer in (*self.layers, *self.unsupported)}
        told |= {self._names[module] for module in self._skipped}
        for module, name in self._names.items() if new else ():
            if module not in new or name in told or not self._wants(name):
                continue
            if reason := known(module).no_attention_matrix:
                self.unsupported[name] = reason
            elif looks_like_attention(module) and not any(not name or x.startswith(f"{name}.") for x in told):
                self.unsupported[name] = "no softmax between tokens was seen while it ran"
