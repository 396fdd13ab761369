"""The attentions on the path from the image to a model's output,
and which of them run side by side.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_model.outputs import scores_of
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.place_rules import function_name
from tcnn_probe.attention.stream import AttentionStream
from tcnn_probe.attribution.layer_choice import (
    WITHOUT_CLASS_TOKEN,
    UnsupportedMethodError,
)
from tcnn_probe.hooks.compilation import never_compiled_alone
from tcnn_probe.hooks.forwards import ModuleCall
from tcnn_probe.hooks.modes import unseen
from tcnn_probe.images import input_tensors
from tcnn_probe.models import check_model, layer_names

__all__ = ["PathLayer", "attention_path"]

# Sources of a tensor other than attentions, which are counted from 0 in the order of their calls. A
# tensor has an unknown source if no function of torch has made it, as in kernels in C++ and in
# TorchScript.
_IMAGE, _UNKNOWN = -1, -2
Sources = frozenset[int]
_NOTHING: Sources = frozenset()


@dataclass
class PathLayer:
    """An attention of a forward.

    Args:
        layer: Name of its layer.
        module: The layer.
        queries: Number of its queries.
        sources: Sources of its input.
        beside: Number of an earlier attention that reads the same tokens and adds to the same sum;
            None without one.
        on_path: Whether the tokens that it mixes come from the image and reach the model's output.
    """

    layer: str
    module: nn.Module
    queries: int
    sources: Sources
    beside: int | None = None
    on_path: bool = False


def attention_path(model: nn.Module, images: Tensor) -> list[PathLayer]:
    """Find the attentions through which tokens pass one
    after another from the images to the model's output.

    The model runs once. Each tensor of this forward carries its sources: the attentions from whose
    results it was computed. So a teacher beside a student, or a tower of text beside one of images,
    is told from the layers above.

    Returns:
        All attentions of a forward, in the order of their calls.

    Raises:
        UnsupportedMethodError: Attentions on the path run side by side, or it is unknown whether
            they do.
    """
    check_model(model)
    sources = _SourceTracker(model, images)
    # The tracker is entered before the stream's own modes, so that it has seen a function before
    # the stream reports that this function was an attention.
    with sources:
        stream = AttentionStream(model, sources.listener, watched=layer_names(model))
        with stream.following():
            model(images)
    _check(sources.listener)
    return sources.listener.layers


class _SourceTracker(TorchFunctionMode):
    """Mode that tracks from which attentions each tensor was computed."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.listener = _PathListener(self)
        # Sources and outputs of the function that torch has just run.
        self.last: tuple[Sources, list[Tensor]] = _NOTHING, []
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._sources: Any = WeakTensorKeyDictionary()
        self._sources[images] = frozenset({_IMAGE})

    def of(self, values: Any) -> Sources:
        """Return the sources of all tensors among values, nested in any way."""
        return _NOTHING.union(*map(self._of_tensor, input_tensors(values)))

    def add(self, tensors: Iterable[Tensor], sources: Sources) -> None:
        """Add sources to tensors, and forget that those of new tensors were unknown."""
        for tensor in tensors:
            self._sources[tensor] = self._sources.get(tensor, _NOTHING) | sources

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the tensor's sources are known."""
        return self._of_tensor(tensor) != {_UNKNOWN}

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self._note(function_name(func), (args, kwargs), output)
        return output

    @unseen
    def _note(self, name: str, inputs: Any, output: Any) -> None:
        outputs, sources = input_tensors(output), self.of(inputs)
        if name == "__setitem__":
            outputs = [inputs[0][0]]
        # Writing into a view changes the tensor behind it, and all its other views.
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            memory = {tensor.untyped_storage().data_ptr() for tensor in outputs}
            outputs += [
                tensor for tensor in self._sources if tensor.untyped_storage().data_ptr() in memory
            ]
        self.add(outputs, sources)
        self.last = sources, outputs

    def _of_tensor(self, tensor: Tensor) -> Sources:
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._buffers:
            return _NOTHING
        # Integers of unknown origin are the words or the mask of a text, which come in beside the
        # image.
        unknown = {_UNKNOWN} if tensor.is_floating_point() else _NOTHING
        return self._sources.get(tensor, frozenset(unknown))


class _PathListener(AttentionListener):
    """Listener that numbers the attentions of a forward
    and adds them to the sources of what they return.

    Attributes:
        layers: The attentions.
        without_values: Names of softmaxes that were not multiplied with values.
        output: Sources of the model's scores.
    """

    def __init__(self, tracker: _SourceTracker) -> None:
        self.layers: list[PathLayer] = []
        self.without_values: set[str] = set()
        self.output = _NOTHING
        self._tracker = tracker

    def attends(self, attention: Attention) -> None:
        """Add an attention, as a source of what it returns."""
        sources, outputs = self._tracker.last
        self._tracker.add(outputs, frozenset({len(self.layers)}))
        self.layers.append(PathLayer(attention.name, attention.module, attention.queries, sources))

    def returned(self, call: ModuleCall, output: Any) -> None:
        """Note attentions that a module has run side by side on its input,
        and sources that were lost in a module.
        """
        inputs = call.inputs
        tracker = self._tracker
        lost = [tensor for tensor in input_tensors(output) if not tracker.knows(tensor)]
        tracker.add(lost, tracker.of(inputs) | {_UNKNOWN})
        tokens = next((x for x in inputs if isinstance(x, Tensor)), None)
        if tokens is None or tokens.ndim != 3:
            return
        before = _known(tracker.of(tokens))
        new = sorted(number for number in tracker.of(output) - before if number >= 0)
        branches = [self.layers[number] for number in new]
        # Two softmaxes in one call of a layer may be subtracted (differential attention), or act on
        # different tokens.
        if len({branch.module for branch in branches}) < len(branches):
            return
        if all(
            _known(branch.sources) == before and branch.queries == tokens.shape[1]
            for branch in branches
        ):
            for branch in branches[1:]:
                branch.beside = new[0]

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Note the sources of the scores, and the attentions on the path."""
        self.output = self._tracker.of(scores_of(output))
        for number, layer in enumerate(self.layers):
            layer.on_path = number in self.output and _IMAGE in layer.sources
            if layer.beside is not None and not self.layers[layer.beside].on_path:
                layer.beside = None
        self.without_values = {layer.layer for layer in self.layers} - {*layers}


def _check(forward: _PathListener) -> None:
    """Raise an error unless each attention on the path follows
    from all earlier ones, or runs beside the last.
    """
    on_path = [number for number, layer in enumerate(forward.layers) if layer.on_path]
    names = [forward.layers[number].layer for number in on_path]
    without_values = [name for name in names if name in forward.without_values]
    if without_values:
        raise UnsupportedMethodError(
            f"rollout followed a softmax that is not multiplied with values: {without_values}"
        )
    for number, layer in enumerate(forward.layers):
        is_lost = number in forward.output and _IMAGE not in layer.sources
        is_lost = is_lost and _UNKNOWN in layer.sources
        # An unfollowed function may hide that the output depends on this layer.
        is_left_out = number not in forward.output and _UNKNOWN in forward.output
        if is_lost or (is_left_out and layer.layer not in forward.without_values):
            raise UnsupportedMethodError(
                "rollout follows tokens through functions of torch, and lost them around "
                f"{layer.layer!r}, in a kernel of another library, TorchScript or NumPy. "
                f"{WITHOUT_CLASS_TOKEN}"
            )
    earlier: set[int] = set()
    for number in on_path:
        layer = forward.layers[number]
        if layer.beside is None and not earlier <= layer.sources:
            tower = forward.layers[max(earlier - layer.sources)].layer
            raise UnsupportedMethodError(
                "rollout multiplies layers that follow each other, and the output depends on "
                f"{tower!r} and {layer.layer!r}, which run side by side, as in ensembles and in "
                f"models of two views: give one of the towers as the model. {WITHOUT_CLASS_TOKEN}"
            )
        earlier.add(number)


def _known(sources: Sources) -> Sources:
    return sources - {_UNKNOWN}
