"""``ablate()``: run a model without some of its heads, or with other attention."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from tcnn_probe.architectures.lookup import head_count
from tcnn_probe.attention.head_editor import HeadEditor
from tcnn_probe.hooks.calls import Call, Calls
from tcnn_probe.hooks.modes import is_transformed, put_on
from tcnn_probe.interventions.ablation_kinds import Ablated, Mode, kind_of
from tcnn_probe.interventions.head_selection import HeadSelection, select_heads
from tcnn_probe.interventions.references import (
    GivenImages,
    ReferenceStatistics,
    as_batches,
    fingerprints,
)
from tcnn_probe.models import check_model, layer_names, untouched, whole_number

__all__ = ["Ablation", "ablate"]

_MODES_OVER_IMAGES = tuple(
    mode for mode in get_args(Mode) if kind_of(mode, with_images=True).takes_images
)


def ablate(
    model: nn.Module,
    heads: HeadSelection = None,
    mode: Mode = "zero",
    *,
    source: nn.Module | None = None,
    images: GivenImages | None = None,
    seed: int | None = 0,
) -> "Ablation":
    """Change what some heads of a model do, from this call to the end of a ``with``, or to :meth:`Ablation.remove`.

    ::

        with tcnn_probe.ablate(model, head_types(ds) == "content"):
            accuracy = validate(model)

    ============ ====================================================================================================
    mode         what it does
    ============ ====================================================================================================
    "zero"       The heads give zero, where their outputs lie side by side before the layer's projection; its bias
                 stays. With talking heads (CaiT) the softmax is zeroed, before heads are mixed.
    "mean"       Each query gets what these heads give on average: their mean over the queries of the same image (or
                 window), or with ``images=`` the mean over these of what they add to the layer's output, position by
                 position. Never the mean of the batch that is running: one image's result must not depend on another.
    "positional" Gates are 1: attention is by position alone. For GPSA and timm's ConViT (T-CNN Eq. 7).
    "content"    Gates are 0: attention is by content alone. For GPSA and timm's ConViT.
    "static"     Attention is its mean over ``images=``: each query looks where it does on average, whatever the image.
                 The loss of accuracy is what it is worth that these heads look at content. A head whose attention does
                 not depend on the image, such as a convolution, stays as it is.
    "shuffled"   Attention is that of another image. The image at place i of a batch gets the attention of image o(i) of
                 ``images=``: o is a random cycle given by ``seed``, or o(i) = i if ``seed`` is None. In batches larger
                 than ``images=``, places begin again at 0. So attention is as peaked as before, with wrong content.
    "replaced"   What the heads add to the layer's output is what the same heads of ``source``'s layer of that name
                 make of the same input.
    ============ ====================================================================================================

    The model runs as it likes: in eval or training mode, under autocast, recorded, explained, trained (go backward
    inside, if it is checkpointed), in several threads at once. Parameters, ``state_dict``, methods and optimizers stay
    the user's own at all times, and copies made meanwhile are not ablated. Ablations nest: each head is edited by the
    last one begun that names it, gates and output apart. Recorders record gates as ablated, and attention as it is
    before heads are zeroed, averaged or replaced.

    Args:
        model: Any module with attention that can be recorded; not compiled, nor compiled inside.
        heads: A layer's name as in recordings, or a glob, for all its heads; several of these; a mapping from names or
            globs to an index, indices, a slice or None for all; a boolean DataArray over layer, head or both, and
            perhaps epochs, of which the last counts; None for all heads of all layers that look like attention and can
            do this. An empty selection ablates nothing, with a warning.
        mode: Name of a mode in the table above.
        source: Model with the same layers, for mode "replaced". It runs in eval mode, without gradients of its own.
        images: Images for modes "mean", "static" and "shuffled": a batch as the model takes it, floating point, or
            several (of a loader's pairs the first is taken), or pictures as :func:`tcnn_probe.images.as_images` takes
            them. The model sees them at this call, in eval mode. Take them from images that are not evaluated: a
            RuntimeWarning tells where an image gets back its own attention. For every head "mean" holds one map of the
            layer's output, "static" one attention (windows x N_query x N_key), and "shuffled" one for each image.
        seed: Seed of mode "shuffled".

    Returns:
        :class:`Ablation`, a context manager, which ``with ... as`` gives.

    Raises:
        ValueError: The model lacks a layer or head, a layer cannot do this, an option is missing or needless, or the
            source has no such layers. In a forward: a layer turns out to lack a head, heads do not add up, or images
            have another size than ``images``.
        TypeError: ``model`` is no module, or compiled; ``heads`` are of a kind that is not listed above; or ``images``
            are no batches.
        RuntimeError: In a forward, a layer that was named asked for no attention; at the end, it did not run though
            the model did.
    """
    check_model(model)
    if mode not in get_args(Mode):
        raise ValueError(
            f"expected mode to be one of {', '.join(get_args(Mode))}; got {mode!r}"
        )
    for name, value, modes in (
        ("source", source, ("replaced",)),
        ("images", images, _MODES_OVER_IMAGES),
    ):
        if value is not None and mode not in modes:
            raise ValueError(
                f"{name}= is for mode={' or '.join(map(repr, modes))}, got it with mode={mode!r}"
            )
    if mode == "replaced" and source is None:
        raise ValueError(
            "mode='replaced' needs source=, the model whose heads are put in"
        )
    if kind_of(mode, with_images=False).takes_images and images is None:
        raise ValueError(
            f"mode={mode!r} needs images=, the images whose attention is used"
        )
    seed = None if seed is None else whole_number(seed, "seed")
    batches = None if images is None else as_batches(images, model)
    ablated = select_heads(model, heads, mode, with_images=images is not None)
    if source is not None:
        check_model(source)
        layers = {name: module for module, name in layer_names(source).items()}
        for entry in ablated:
            entry.source = _layer_of_source(entry, source, layers)
    return Ablation(model, ablated, mode, batches, seed)


class Ablation:
    """The handle of :func:`ablate`. It acts at once, and again when it is entered after its end."""

    def __init__(
        self,
        model: nn.Module,
        ablated: list[Ablated],
        mode: Mode,
        images: Iterable[Tensor] | None,
        seed: int | None,
    ) -> None:
        self._model = model
        self._ablated = ablated
        self._mode = mode
        self._images = images
        self._seed = seed
        self._forwards: _ModelCalls | None = None
        self._exits = ExitStack()
        self._entered = False
        self._begin()

    @property
    def mode(self) -> Mode:
        """The mode that was chosen."""
        return self._mode

    @property
    def heads(self) -> dict[str, tuple[int, ...]]:
        """The heads that are ablated, by layer; of a layer that does not say how many it has, once it has run."""
        heads: dict[str, set[int]] = {}
        for entry in self._ablated:
            if entry.indices and not (entry.has_run and not entry.has_attended):
                heads.setdefault(entry.layer, set()).update(entry.indices)
        return {layer: tuple(sorted(indices)) for layer, indices in heads.items()}

    def __repr__(self) -> str:
        return f"Ablation(mode={self._mode!r}, heads={self.heads})"

    def remove(self) -> None:
        """End it; may be called again."""
        self._forwards = None
        self._entered = False
        self._exits.close()

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError(
                "this ablation is already active; call ablate() again for another one"
            )
        if self._forwards is None:
            self._begin()
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        forwards = self._forwards
        self.remove()
        # After an exception, or without a forward, it is unknown which layers would have run.
        if error is not None or forwards is None or not forwards.has_run:
            return
        # This is checked by pattern, because some of the layers that a glob matches may not run.
        attended = {entry.pattern for entry in self._ablated if entry.has_attended}
        missed = [
            entry.pattern for entry in self._ablated if entry.pattern not in attended
        ]
        if missed:
            raise RuntimeError(
                f"the model ran, and {missed[0]!r} was not ablated: it did not run, or computed no attention that "
                f"can be edited"
            )

    def _begin(self) -> None:
        # Calls from before the ablation is entered again are not counted.
        self._ablated = [entry.fresh() for entry in self._ablated]
        if (
            # References are computed once, and kept if the ablation is entered again.
            self._images is not None
            and self._ablated
            and self._ablated[0].reference is None
        ):
            _collect_references(self._model, self._ablated, self._images, self._seed)
            # Calls for the references do not show that the user's forwards reach a layer, so they are not counted.
            self._ablated = [entry.fresh() for entry in self._ablated]
        self._forwards = self._exits.enter_context(
            _edited_model(self._model, self._ablated)
        )


class _ModelCalls(Calls[Call]):
    """Forwards of the whole model: uncompiled where something is compiled, as compiled code heeds no hooks."""

    has_run = False

    def __init__(self, model: nn.Module, ablated: Sequence[Ablated]) -> None:
        super().__init__(model, Call)
        self._reference = ablated[0].reference if ablated else None
        self._has_warned = False

    def begins(self, call: Call) -> None:
        if self._reference is not None:
            self._reference.check(call.inputs)
            self._warn_of_overlap(self._reference, call.inputs)
        # No mode of its own; but where something is compiled, one that keeps torch from running compiled code, without
        # hooks.
        call.modes = put_on()

    def _warn_of_overlap(
        self, reference: ReferenceStatistics, inputs: Sequence[Any]
    ) -> None:
        """Warn once, where images come again over which attention was taken."""
        # Inputs with a single axis are labels or lengths.
        images = next((x for x in inputs if isinstance(x, Tensor) and x.ndim > 1), None)
        # While statistics are taken, the images are the given ones.
        if not reference.is_finished or self._has_warned or images is None:
            return
        # Reading the images is no work of the model's, which function modes watch.
        with torch._C.DisableTorchFunction():
            reason = "" if is_transformed(inputs) else reference.overlap(images)
        if reason:
            self._has_warned = True
            warnings.warn(reason, RuntimeWarning, stacklevel=2)

    def returns(self, call: Call, output: Any) -> None:
        self.has_run = True


@contextmanager
def _edited_model(
    model: nn.Module, ablated: Sequence[Ablated]
) -> Iterator[_ModelCalls]:
    forwards = _ModelCalls(model, ablated)
    try:
        for entry in ablated:
            HeadEditor.add(entry.module, entry)
        forwards.attach()
        yield forwards
    finally:
        for entry in ablated:
            HeadEditor.remove(entry.module, entry)
        forwards.detach()


def _collect_references(
    model: nn.Module,
    ablated: Sequence[Ablated],
    images: Iterable[Tensor],
    seed: int | None,
) -> None:
    """Run the model on the given images, and collect the statistics that each mode needs."""
    references = []
    for entry in ablated:
        entry.reference = entry.new_reference(seed)
        references.append(entry.reference)
    size = None
    with _edited_model(model, ablated), untouched(model), torch.no_grad():
        # disable=None shows no bar where the output is no terminal, such as in a log.
        for batch in tqdm(images, "ablate: images", leave=False, delay=3, disable=None):
            prints = fingerprints(batch)
            for reference in references:
                # This comes before the model runs, because its additions belong to these images.
                reference.begin(len(batch))
                reference.fingerprints += prints
            model(batch)
            size = batch.shape[1:]
    for reference in references:
        reference.finish(size)


def _layer_of_source(
    entry: Ablated, source: nn.Module, layers: dict[str, nn.Module]
) -> nn.Module:
    """Return the layer of another model whose heads replace those of this model."""
    layer = layers.get(entry.layer.split("#")[0])
    if layer is None:
        raise ValueError(
            f"the source, {type(source).__name__}, has no layer {entry.layer!r} to take heads from"
        )
    expected, got = (
        {name: tuple(p.shape) for name, p in m.named_parameters()}
        for m in (entry.module, layer)
    )
    # Equal shapes of parameters do not tell the number of heads, by which channels are cut.
    if expected != got or head_count(entry.module) != head_count(layer):
        different = (
            sorted({*expected.items()} ^ {*got.items()}) or "another number of heads"
        )
        raise ValueError(
            f"expected {entry.layer!r} of the source to have the same shapes, got {different}"
        )
    return layer
