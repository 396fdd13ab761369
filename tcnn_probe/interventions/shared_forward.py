"""Repeated forwards of the same images in which what comes before a layer is computed once."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.hooks.calls import add_hook
from tcnn_probe.hooks.modes import leaves_of
from tcnn_probe.images import input_tensors

__all__ = ["SharedForward"]


class SharedForward:
    """Forwards of a model on one batch, in eval mode and without gradients.

    Modules that return before a layer is called, and are called once, give their outputs of the
    first forward again.

    Args:
        model: The model.
        images: The batch.

    Attributes:
        output: Output of the model.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self._model = model
        self._images = images
        self._kept: dict[nn.Module, Any] = {}
        self._before: dict[nn.Module, list[nn.Module]] = {}
        self._calls: Counter[nn.Module] = Counter()
        # Modules that run, each with the modules inside that have returned.
        running: list[list[nn.Module]] = [[]]

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[module] += 1
            done = [other for inside in running for other in inside]
            self._before.setdefault(module, done)
            running.append([])

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            running.pop()
            running[-1].append(module)

        with _hooked(model, enter, leave):
            self.output = model(images)

    def in_order(self, layers: Mapping[str, nn.Module]) -> list[str]:
        """Return names of layers in the order of their calls,
        and last those that were not called.
        """
        place = {module: number for number, module in enumerate(self._before)}
        return sorted(layers, key=lambda name: place.get(layers[name], len(place)))

    @contextmanager
    def until(self, layer: nn.Module) -> Iterator[None]:
        """Share what comes before a layer in the forwards inside the ``with``. Layers have to come
        in order.
        """
        shared = [x for x in self._before.get(layer, []) if self._calls[x] == 1]
        self._kept = {x: kept for x, kept in self._kept.items() if x in shared}

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module in shared and module not in self._kept:
                self._kept[module] = _copied(output)

        with _replaced_forwards(self._kept), _hooked(self._model, None, keep):
            again = self._model(self._images)
        # A model that depends on more than what its modules return, or that is random, has nothing
        # to share.
        if not _equal(again, self.output):
            self._kept = {}
        with _replaced_forwards(self._kept):
            yield


@contextmanager
def _hooked(model: nn.Module, enter: Any, leave: Any) -> Iterator[None]:
    handles = []
    try:
        for module in model.modules():
            if enter is not None:
                handles.append(add_hook(module, enter))
            handles.append(add_hook(module, leave, after=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced_forwards(outputs: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Let modules return given outputs inside the ``with``."""
    own = {module: vars(module).get("forward") for module in outputs}
    try:
        for module, output in outputs.items():
            # The model may change an output in place.
            vars(module)["forward"] = lambda *_, _output=output, **__: _copied(_output)
        yield
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def _copied(output: Any) -> Any:
    # deepcopy() refuses tensors with a graph, as of a model that enables gradients itself.
    return deepcopy(output, {id(x): x.detach().clone() for x in input_tensors(output)})


def _equal(output: Any, other: Any) -> bool:
    pairs = zip(leaves_of([output]), leaves_of([other]), strict=True)
    return all(not isinstance(x, Tensor) or torch.equal(x, y) for x, y in pairs)
