"""``ablate()``: what a model does without some of its heads."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, IterableDataset
from tqdm.auto import tqdm

from tcnn_probe.attention.rebuild import head_count
from tcnn_probe.hooks.modes import put_on, take_off
from tcnn_probe.interventions.edits import Edit, Means, Mode
from tcnn_probe.interventions.gates import keep_locality, put_locality_back
from tcnn_probe.interventions.head_selection import Chosen, HeadSelection, choose
from tcnn_probe.interventions.layer_editor import Editor, Hook
from tcnn_probe.models import layer_names, untouched
from tcnn_probe.recording.options import check_model

__all__ = ["Ablation", "ablate"]


def ablate(
    model: nn.Module,
    heads: HeadSelection = None,
    mode: Mode = "zero",
    *,
    source: nn.Module | None = None,
    images: Tensor | Iterable[Any] | None = None,
    locality_strength: float | None = None,
) -> "Ablation":
    """Change what some heads of a model do, inside of a ``with`` statement.

    ::

        with tcnn_probe.ablate(model, head_types(ds) == "content"):
            accuracy = validate(model)

    ============ ====================================================================================================
    mode         what it does
    ============ ====================================================================================================
    "zero"       The heads give zero, where their outputs lie side by side before the layer's projection; its bias
                 stays. Of talking heads (CaiT) what is zeroed is the softmax, before heads are mixed.
    "mean"       Each query gets what these heads give on average: their mean over the queries of the same image (or
                 window), or with ``images=`` the mean over these of what they add to the layer's output, position by
                 position. Never the mean of the batch that is running: one image's result must not depend on another.
    "positional" Gates are 1: attention is by position alone. For GPSA and timm's ConViT (T-CNN Eq. 7).
    "content"    Gates are 0: attention is by content alone. For GPSA and timm's ConViT.
    "frozen"     Alpha stays what it is, or is ``locality_strength``, whatever training does. For GPSA (ConViT has none
                 of that kind: its positional attention is any linear function of the offsets).
    "replaced"   What the heads add to the layer's output is what the same heads of ``source``'s layer of that name
                 make of the same input.
    ============ ====================================================================================================

    The model runs as it likes: in eval or training mode, under autocast, recorded, explained, trained (go backward
    inside, if it is checkpointed). Nothing is changed between its forwards: parameters, ``state_dict`` and optimizers
    are the user's own, and copies made meanwhile are not ablated. Ablations nest: each head is edited by the last one
    entered that names it, gates, alpha and output apart. Recorders record gates as ablated, and attention as it is
    before heads are zeroed, averaged or replaced.

    Args:
        model: any module with attention that can be recorded; not compiled, nor compiled inside.
        heads: a layer's name as in recordings, or a glob, for all its heads; several; pairs (layer, index); a mapping
            from names or globs to an index, indices or a slice; a boolean DataArray over layer, head or both, and
            perhaps epochs, of which the last counts; None for all heads of all layers that look like attention and can
            do this. Of an empty selection nothing is ablated.
        mode: see above.
        source: of mode "replaced": a model with the same layers. It runs in eval mode, without gradients of its own.
        images: of mode "mean": a batch as the model takes it, floating point, or several (of a loader's pairs the
            first is taken). The model sees them, in eval mode, when the ``with`` first begins; that holds one map of
            the layer's output for every head.
        locality_strength: of mode "frozen": alpha > 0, in 1 / pixel^2, in place of the heads' own meanwhile.

    Returns:
        a context manager, which is what ``with ... as`` gives: :class:`Ablation`.

    Raises:
        ValueError: a layer or head that the model lacks, a layer that cannot do this, a missing or needless option, a
            source without such layers. In a forward: a head that a layer turns out to lack, heads that do not add up,
            images of another size than ``images``.
        TypeError: no module, a compiled one, heads of a kind that is not listed above, or images that are no batches.
        RuntimeError: in a forward, a layer that was named asked for no attention; at the end, it did not run though
            the model did.

    Warns:
        UserWarning: a DataArray that is nowhere True and has none of the model's layers.
    """
    check_model(model)
    if mode not in get_args(Mode):
        raise ValueError(f"expected mode to be one of {', '.join(get_args(Mode))}; got {mode!r}")
    for name, value, of in (
        ("source", source, "replaced"),
        ("images", images, "mean"),
        ("locality_strength", locality_strength, "frozen"),
    ):
        if value is not None and mode != of:
            raise ValueError(f"{name}= is for mode={of!r}, got it with mode={mode!r}")
    if locality_strength is not None and not 0 < locality_strength < float("inf"):
        raise ValueError(f"expected a positive number for locality_strength, got {locality_strength!r}")
    if mode == "replaced" and source is None:
        raise ValueError("mode='replaced' needs source=, the model whose heads are put in")
    _check_images(images)
    chosen = choose(model, heads, mode)
    return Ablation(model, chosen, mode, _layers_of(source, chosen), images, locality_strength)


class Ablation:
    """See :func:`ablate`, which makes one; may be entered again after its end, with the means of the first time."""

    def __init__(
        self,
        model: nn.Module,
        chosen: list[Chosen],
        mode: Mode,
        sources: dict[str, nn.Module],
        images: Tensor | Iterable[Any] | None,
        locality_strength: float | None,
    ) -> None:
        self._model, self._chosen, self._mode, self._images = model, chosen, mode, images
        self._sources, self._locality_strength = sources, locality_strength
        self._edits = self._make_edits()
        self._handles: list[Any] = []
        self._uncompiled: list[Any] = []
        self._entered = self._ran = False
        self._means: list[Means | None] | None = None

    @property
    def mode(self) -> Mode:
        """What is done."""
        return self._mode

    @property
    def heads(self) -> dict[str, tuple[int, ...]]:
        """The heads that are ablated, by layer; of a layer that does not say how many it has, once it has run."""
        found: dict[str, set[int]] = {}
        for edit in self._edits:
            if edit.indices and not (edit.ran and not edit.attended):
                found.setdefault(edit.layer, set()).update(edit.indices)
        return {layer: tuple(sorted(indices)) for layer, indices in found.items()}

    def __repr__(self) -> str:
        return f"Ablation(mode={self._mode!r}, heads={self.heads})"

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("this ablation is entered already; call ablate() again for another")
        self._entered, self._ran, self._edits = True, False, self._make_edits()
        try:
            for edit in self._edits:
                if edit.mode == "frozen":
                    keep_locality(edit, _raw_locality(edit))
                Editor.add(edit)
            if self._images is not None and self._edits:
                self._means = self._means or self._take_means(self._images)
                for edit, means in zip(self._edits, self._means, strict=True):
                    edit.means = means
            if self._mode == "frozen":
                self._handles.append(register_optimizer_step_post_hook(lambda *args: self._put_back()))
            self._handles.append(self._model.register_forward_pre_hook(Hook(act=self._runs)))
            self._handles.append(self._model.register_forward_hook(Hook(act=self._has_run)))
            self._handles.append(self._model.register_forward_hook(Hook(act=self._ends), always_call=True))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()
        if error is not None or not self._ran:
            return
        done = {one.asked for one, edit in zip(self._chosen, self._edits, strict=True) if edit.attended}
        if missed := [one.asked for one in self._chosen if one.asked not in done]:
            raise RuntimeError(
                f"the model ran, and {missed[0]!r} was not ablated: it did not run, or asked for no attention that "
                f"could be edited"
            )

    def _make_edits(self) -> list[Edit]:
        return [
            Edit(
                one.layer,
                one.module,
                one.call,
                one.heads,
                self._mode,
                one.strict,
                self._locality_strength,
                self._sources.get(one.layer),
                one.count,
            )
            for one in self._chosen
        ]

    def _remove(self) -> None:
        for edit in reversed(self._edits):
            Editor.remove(edit)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._ends()
        if self._mode == "frozen" and self._entered:
            self._put_back()
        self._entered = False

    def _runs(self, args: tuple[Any, ...]) -> None:
        """Where something is compiled, have the whole forward run as it is: compiled code passes hooks by."""
        self._ends()
        self._uncompiled = put_on()

    def _ends(self, *call: Any) -> None:
        take_off(self._uncompiled)

    def _has_run(self, args: tuple[Any, ...], output: Any) -> None:
        self._ran = True

    def _put_back(self) -> None:
        for edit in self._edits:
            if edit.kept is not None:
                put_locality_back(edit, _raw_locality(edit))

    def _take_means(self, images: Tensor | Iterable[Any]) -> list[Means | None]:
        several = [images] if isinstance(images, Tensor) else images
        like = next(self._model.parameters(), None)
        for edit in self._edits:
            edit.means = Means()
        with untouched(self._model), torch.no_grad():
            for given in tqdm(several, "ablate: means", leave=False, delay=3, disable=None):
                batch = _as_batch(given)
                for edit in self._edits:
                    assert edit.means is not None
                    edit.means.images = len(batch)
                self._model(batch if like is None else batch.to(like.device))
        for edit in self._edits:
            assert edit.means is not None
            edit.means.images = 0
        return [edit.means for edit in self._edits]


def _check_images(images: Tensor | Iterable[Any] | None) -> None:
    """Refuse, before the model runs, what can be seen to be no batches without going through them."""
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset):
        raise TypeError(
            f"expected batches of images, got single ones: {type(images).__name__}; give a DataLoader of it"
        )
    for given in [images] if isinstance(images, Tensor) else images if isinstance(images, (tuple, list)) else []:
        _as_batch(given)


def _as_batch(given: Any) -> Tensor:
    """Images, or the first of a loader's pair."""
    batch = given[0] if isinstance(given, (tuple, list)) and given else given
    if not isinstance(batch, Tensor) or not batch.numel():
        raise TypeError(f"expected batches of images as the model takes them, got {type(batch).__name__}")
    if batch.ndim < 2 or not batch.is_floating_point():
        raise TypeError(
            f"expected batches of images, floating point; of a pair (images, labels) give the first: got "
            f"{batch.dtype} of shape {tuple(batch.shape)}"
        )
    return batch


def _raw_locality(edit: Edit) -> Tensor:
    raw = edit.module._parameters["raw_locality"]
    assert raw is not None
    return raw


def _layers_of(source: nn.Module | None, chosen: list[Chosen]) -> dict[str, nn.Module]:
    """The layers of the other model, by the names of those that they stand for."""
    if source is None:
        return {}
    check_model(source)
    theirs = {name: module for module, name in layer_names(source).items()}
    found = {}
    for one in chosen:
        module = theirs.get(one.layer.split("#")[0])
        if module is None:
            raise ValueError(f"the source, {type(source).__name__}, has no layer {one.layer!r} to take heads from")
        expected, given = ({n: tuple(p.shape) for n, p in m.named_parameters()} for m in (one.module, module))
        if expected != given or head_count(one.module) != head_count(module):
            different = sorted({*expected.items()} ^ {*given.items()}) or "another number of heads"
            raise ValueError(f"expected {one.layer!r} of the source to have the same shapes, got {different}")
        found[one.layer] = module
    return found
