"""Editing a layer while it runs, and only then: between forwards the model is the user's own."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.hooks.edits import add_edit, remove_edit
from tcnn_probe.hooks.forwards import call_of_a_module
from tcnn_probe.interventions.contributions import (
    Call,
    check_adding_up,
    first_tensor,
    images_first,
    term,
    with_first_tensor,
)
from tcnn_probe.interventions.edits import Edit, Means
from tcnn_probe.interventions.gates import edited_parameters
from tcnn_probe.interventions.hook_points import Plan, Seam, seam_of

__all__ = ["Editor", "Hook"]


class Hook:
    """What is registered on a module. A copy of it, in a copy of the model, does nothing but go away when called."""

    def __init__(self, editor: "Editor | None" = None, act: Callable[..., Any] | None = None) -> None:
        self.editor, self._act = editor, act

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """See ``torch.nn.Module.register_forward_hook``."""
        if self._act is not None:
            return self._act(args, *rest)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook is self]:
                del hooks[number]
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook()

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


class _Running:
    """A call of the layer: what was exchanged for it."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame
        self.depth = 0
        self.seam: Seam | None = None
        self.originals: dict[str, Tensor | None] = {}
        self.attended: list[tuple[Edit, int]] = []  # and which attention of the call it was
        self.terms: list[tuple[Edit, int, tuple[int, ...]]] = []  # and whose terms are to be added


class Editor:
    """Of one layer, for all ablations of it together; what is entered later goes before what was entered earlier.

    A pre-hook puts edited tensors where the layer looks for its parameters and opens its seam; hooks close it, add the
    terms that take the place of others, and put the very parameters back, also after an exception. What torch tells no
    hook of (Ctrl-C) is made good when the layer is called again, or at the end of the ablation.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._edits: list[Edit] = []
        self._running: _Running | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @classmethod
    def of(cls, module: nn.Module) -> "Editor | None":
        """The one that a layer has now."""
        hooks = module._forward_pre_hooks.values()
        return next((hook.editor for hook in hooks if isinstance(hook, Hook) and hook.editor is not None), None)

    @classmethod
    def add(cls, edit: Edit) -> None:
        """One more thing to do."""
        editor = cls.of(edit.module) or cls(edit.module)
        editor._edits.append(edit)
        if not editor._handles:
            editor._attach()

    @classmethod
    def remove(cls, edit: Edit) -> None:
        """No longer; may be called in the middle of a forward, and again."""
        editor = cls.of(edit.module)
        if editor is None or edit not in editor._edits:
            return
        editor._leave()
        editor._edits.remove(edit)
        if not editor._edits:
            editor._detach()

    def _attach(self) -> None:
        module, handles = self._module, self._handles
        try:
            add_edit(module, self.edited)
            handles.append(module.register_forward_pre_hook(Hook(self, self._begin), with_kwargs=True))
            handles.append(module.register_forward_hook(Hook(self, self._done), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(Hook(self, self._end), always_call=True))
        except BaseException:
            self._detach()
            raise

    def _detach(self) -> None:
        remove_edit(self._module, self.edited)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # What hooks do.

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = call_of_a_module(sys._getframe())
        if self._running is not None:
            if _is_under(self._running.frame, frame):  # the layer calls itself
                self._running.depth += 1
                return
            self._leave()  # it was interrupted
        self._running = running = _Running(frame)
        try:
            self._exchange(edited_parameters(self._module, self._edits))
            running.seam = seam_of(self._module, self._plan(running), [*args, *kwargs.values()])
            running.seam.enter()
            hooks: Any = self._module._forward_hooks
            hooks.move_to_end(self._handles[-1].id)  # others' hooks are to see what ran
        except BaseException:
            self._leave()
            raise

    def _done(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        running = self._running
        if running is None or running.depth:
            return None
        assert running.seam is not None
        running.seam.leave()
        self._check(running, running.seam)
        for edit, number in running.attended:
            if edit.means is not None and edit.means.images and edit.indices:
                self._collect(edit, edit.means, Call(edit.layer, number, args, kwargs))
        if not running.terms:
            return None
        whole = images_first(self._module, first_tensor(output, self._edits[0].layer))
        for edit, number, heads in running.terms:
            whole = self._add_term(whole, edit, heads, Call(edit.layer, number, args, kwargs))
        return with_first_tensor(output, images_first(self._module, whole))

    def _end(self, args: tuple[Any, ...], *rest: Any) -> None:
        if self._running is not None and self._running.depth:
            self._running.depth -= 1
        else:
            self._leave()

    def _leave(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if running.seam is not None:
            running.seam.leave()
        self._module._parameters.update(running.originals)  # type: ignore[arg-type]

    # What is done.

    def _exchange(self, edited: Mapping[str, Tensor]) -> None:
        assert self._running is not None
        for name, tensor in edited.items():
            self._running.originals[name] = self._module._parameters[name]
            self._module._parameters[name] = tensor  # type: ignore[assignment]

    def _plan(self, running: _Running) -> Plan:
        def plan(number: int, count: int, queries: int) -> tuple[Sequence[int], Sequence[int]]:
            owners: dict[int, Edit] = {}
            for edit in self._edits:
                if edit.call not in (None, number) or not _can_average(edit, queries):
                    continue
                edit.heads.of(count, edit.layer)
                edit.count = count
                running.attended.append((edit, number))
                if edit.acts_on_output:
                    owners |= dict.fromkeys(edit.indices, edit)
            for edit in dict.fromkeys(owners.values()):
                if edit.gives_terms:
                    running.terms.append((edit, number, tuple(head for head in owners if owners[head] is edit)))
            averaged = [head for head, edit in owners.items() if edit.mode == "mean" and not edit.gives_terms]
            return [head for head in owners if head not in averaged], averaged

        return plan

    def _check(self, running: _Running, seam: Seam) -> None:
        """Whether all that was asked for was done."""
        if wrong := seam.check():
            raise RuntimeError(f"{self._edits[0].layer!r} {wrong}: choose other layers")
        attended = {edit for edit, _ in running.attended}
        for edit in self._edits:
            edit.ran = True
            edit.attended |= edit in attended
            if edit.strict and edit not in attended:
                several = f" of this number, only {seam.asked}" if edit.call else ""
                raise RuntimeError(f"{edit.layer!r} ran and asked for no attention between tokens{several}")

    def _collect(self, edit: Edit, means: Means, call: Call) -> None:
        """Terms of single heads, of which means are being taken."""
        if not edit.additive:
            check_adding_up(call, edit.module, edit.indices[:1])
            edit.additive = True
        terms = [images_first(edit.module, term(call, edit.module, [head])) for head in edit.indices]
        means.add(call.number, terms, edit.layer)

    def _add_term(self, output: Tensor, edit: Edit, heads: tuple[int, ...], call: Call) -> Tensor:
        if edit.means is not None:
            return edit.means.add_to(output, call.number, [edit.indices.index(head) for head in heads], edit.layer)
        assert edit.source is not None
        if not edit.additive:
            check_adding_up(call, edit.module, heads)
        with self._unedited():
            if not edit.additive:
                check_adding_up(call, edit.source, heads)
            put_in = term(call, edit.source, heads, frozen=True)
        edit.additive = True
        return output + images_first(edit.source, put_in).to(output.dtype)

    @contextmanager
    def _unedited(self) -> Iterator[None]:
        """The layer's own, as another layer's heads may be its own."""
        running = self._running
        edited = {} if running is None else {name: self._module._parameters[name] for name in running.originals}
        try:
            if running is not None:
                self._module._parameters.update(running.originals)  # type: ignore[arg-type]
            yield
        finally:
            self._module._parameters.update(edited)

    @contextmanager
    def edited(self) -> Iterator[None]:
        """The layer's parameters as its forwards see them."""
        if self._running is not None:
            yield
            return
        self._running = _Running(None)
        try:
            self._exchange(edited_parameters(self._module, self._edits))
            yield
        finally:
            self._leave()


def _can_average(edit: Edit, queries: int) -> bool:
    """Whether there are several queries, where it takes their mean.

    Raises:
        ValueError: there is one only, in a layer that the user named.
    """
    alone = edit.mode == "mean" and edit.means is None and queries == 1
    if alone and edit.strict:
        raise ValueError(f"{edit.layer!r} has a single query, whose mean is itself; give images= to take means over")
    return not alone


def _is_under(frame: FrameType | None, running: FrameType | None) -> bool:
    """Whether a call is still running."""
    while running is not None and running is not frame:
        running = running.f_back
    return running is not None
