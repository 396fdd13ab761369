"""``ablate()``: run a model without some of its heads, or with different attention."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self, get_args

from torch import Tensor, nn

from tcnn_probe.architectures.lookup import head_count
from tcnn_probe.interventions.ablation_kinds import (
    Ablated,
    Mode,
    kind_of,
    use_grids,
)
from tcnn_probe.interventions.edited_forwards import (
    ModelCalls,
    collect_references,
    edited_model,
)
from tcnn_probe.interventions.head_selection import HeadSelection, select_heads
from tcnn_probe.interventions.references import GivenImages, as_batches
from tcnn_probe.models import check_model, layer_names, module_name, whole_number

__all__ = ["Ablation", "ablate"]

_MODES_OVER_IMAGES = tuple(
    mode for mode in get_args(Mode) if kind_of(mode, with_images=True).takes_images
)
_MODES_WITH_RADIUS = ("local", "distant")


def ablate(
    model: nn.Module,
    heads: HeadSelection = None,
    mode: Mode = "zero",
    *,
    source: nn.Module | None = None,
    images: GivenImages | None = None,
    seed: int | None = 0,
    radius: float | None = None,
    queries: Literal["patches"] | None = None,
) -> "Ablation":
    """Ablate heads of a model, from this call to the end
    of a ``with`` statement or to :meth:`Ablation.remove`.

    ::

        with tcnn_probe.ablate(model, head_types(ds) == "content"):
            accuracy = validate(model)

    =============== ================================================================================
    mode            effect
    =============== ================================================================================
    "zero"          The outputs of the heads are zero where they are concatenated, before the
                    layer's projection, whose bias stays. With talking heads (CaiT) the softmax is
                    set to zero, before heads are mixed.
    "mean"          Each query gets the mean output of these heads over the queries of the same
                    image (or window), or with ``images=`` the mean over these images of the term
                    that the heads add to the layer's output at each position. The running batch is
                    never averaged: the result of an image must not depend on others.
    "uniform"       U: attention is 1 / K to each of the K visible keys. ("mean" over queries is not
                    uniform: it keeps the keys that stand out in an image.)
    "convolutional" T: attention is a convolution, exp theta(offset from query to key) / Z_query
                    with one more number for each class and register token; the one that is nearest
                    to the mean over ``images=``.
    "static"        M: attention is replaced by its mean over ``images=``, the same for every image.
                    A head whose attention does not depend on the image, such as a convolution, does
                    not change.
    "salient"       S: the mean over ``images=`` times a factor of each key, M_i(j) g(j) / Z_i, such
                    that keys receive what they receive in the evaluated image: which keys stand out
                    for all queries (of a window) depends on the image, and nothing else does.
    "local"         Keys farther than ``radius`` patches are hidden from each query; class and
                    register tokens are not.
    "distant"       Keys within ``radius`` patches are hidden from each query.
    "shuffled"      Attention is that of another image: image i of a batch gets the attention of
                    image o(i) of ``images=``, where o is a random cycle given by ``seed``, or o(i)
                    = i if ``seed`` is None. In batches larger than ``images=``, i starts again at
                    0. Attention is as peaked as before, but for wrong content.
    "positional"    Gates are 1: attention is by position only. For GPSA and timm's ConViT (T-CNN
                    Eq. 7).
    "content"       Gates are 0: attention is by content only. For GPSA and timm's ConViT.
    "replaced"      The term that the heads add to the layer's output is computed by the same heads
                    of the layer of ``source`` with the same name, from the same input.
    =============== ================================================================================

    "uniform", "convolutional", "static" and "salient" form a ladder, whose last rung is the head as
    it is. Each rung knows more of the image than the one before, by the parts of selectivity that a
    recording has:

    =============== ================================== =================================
    mode            attention that knows               adds
    =============== ================================== =================================
    "uniform"       nothing
    "convolutional" the offset from query to key       ``offset_information``
    "static"        where the query is                 ``position_information``
    "salient"       which keys stand out in the image  ``key_content_information``
    (not ablated)   everything                         ``query_key_content_information``
    =============== ================================== =================================

    "uniform", "convolutional", "salient", "local" and "distant" need a grid, and edit only the
    queries of patches: class and register tokens keep their own attention. In gated layers the grid
    includes the padding, whose values are zero. The other modes edit all queries, unless
    ``queries="patches"``, which makes "static" and "zero" comparable.

    The model may run in eval or training mode, under autocast and in several threads at once, and
    may be recorded, explained and trained (with checkpointing, call backward before the ablation
    ends). Parameters, ``state_dict``, methods and optimizers are never changed, and copies of the
    model are not ablated. Ablations can be nested: each head is edited by the most recent ablation
    that names it, separately for gates and outputs. Recorders record gates as ablated, but
    attention as it is before heads are zeroed, averaged or replaced.

    Args:
        model: Any module with attention that can be recorded. If it is compiled, its forwards run
            uncompiled.
        heads: A layer's name as in recordings, or a glob, for all its heads; several of these; a
            mapping from names or globs to an index, indices, a slice or None for all; a boolean
            DataArray over layer, head or both, and possibly epochs, of which the last is used; None
            for all heads of all layers that look like attention and support the mode. An empty
            selection ablates nothing, with a warning.
        mode: Name of a mode in the table above.
        source: Model with the same layers, for mode "replaced". It runs in eval mode, and its
            parameters get no gradients.
        images: Images for modes "mean", "convolutional", "static", "salient" and "shuffled": a
            floating-point batch as the model takes it, several batches (the first item of a
            loader's pairs is used), or pictures as :func:`tcnn_probe.images.as_images` takes them.
            The model runs on them during this call, in eval mode. They should not be evaluated: a
            RuntimeWarning is given if an image gets its own attention. For every head "mean" stores
            one map of the layer's output, "convolutional", "static" and "salient" one attention
            (windows x N_query x N_key), and "shuffled" one for each image.
        seed: Seed of mode "shuffled".
        radius: Distance in patches for modes "local" and "distant" (cells of the finer grid of
            queries and keys).
        queries: "patches" to leave class and register tokens as queries their own attention in
            modes "zero", "mean" over queries, "static" and "shuffled", too.

    Returns:
        :class:`Ablation`, a context manager that returns itself.

    Raises:
        ValueError: The model lacks a layer or head, a layer does not support the mode, an option is
            missing or unused, or the source has no such layers. In a forward: a layer turns out to
            lack a head, heads do not add up, or images have another size than ``images``.
        TypeError: ``model`` is not a module; ``heads`` have a type that is not listed above; or
            ``images`` are not batches.
        RuntimeError: In a forward, a layer that was named computed no attention; at the end, it did
            not run although the model did.
    """
    check_model(model)
    if mode not in get_args(Mode):
        raise ValueError(f"expected mode to be one of {', '.join(get_args(Mode))}; got {mode!r}")
    for name, value, modes in (
        ("source", source, ("replaced",)),
        ("images", images, _MODES_OVER_IMAGES),
        ("radius", radius, _MODES_WITH_RADIUS),
    ):
        if value is not None and mode not in modes:
            raise ValueError(
                f"{name}= is for mode={' or '.join(map(repr, modes))}, got it with mode={mode!r}"
            )
    if mode == "replaced" and source is None:
        raise ValueError("mode='replaced' needs source=, the model whose heads are put in")
    if kind_of(mode, with_images=False).takes_images and images is None:
        raise ValueError(f"mode={mode!r} needs images=, the images whose attention is used")
    seed = None if seed is None else whole_number(seed, "seed")
    batches = None if images is None else as_batches(images, model)
    ablated = select_heads(model, heads, mode, with_images=images is not None)
    if source is not None:
        check_model(source)
        layers = {name: module for module, name in layer_names(source).items()}
        for entry in ablated:
            entry.source = _layer_of_source(entry, source, layers)
    use_grids(model, ablated, queries, radius)
    return Ablation(model, ablated, mode, batches, seed)


class Ablation:
    """Handle of :func:`ablate`, which is active at once,
    and again when it is entered after its end.
    """

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
        self._forwards: ModelCalls | None = None
        self._exits = ExitStack()
        self._entered = False
        self._begin()

    @property
    def mode(self) -> Mode:
        """Mode of the ablation."""
        return self._mode

    @property
    def entries(self) -> Sequence[Ablated]:
        """Ablated heads of each layer, with the statistics over ``images=``."""
        return self._ablated

    @property
    def heads(self) -> dict[str, tuple[int, ...]]:
        """Ablated heads by layer; if a layer does not state its number of heads,
        they are known once it has run.
        """
        heads: dict[str, set[int]] = {}
        for entry in self._ablated:
            if entry.indices and not (entry.has_run and not entry.has_attended):
                heads.setdefault(entry.layer, set()).update(entry.indices)
        return {layer: tuple(sorted(indices)) for layer, indices in heads.items()}

    def __repr__(self) -> str:
        return f"Ablation(mode={self._mode!r}, heads={self.heads})"

    def remove(self) -> None:
        """End the ablation. Further calls do nothing."""
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
        # After an exception, or without a forward, it is not known which layers would have run.
        if error is not None or forwards is None or not forwards.has_run:
            return
        # Patterns are checked instead of layers, because some layers of a glob may not run.
        attended = {entry.pattern for entry in self._ablated if entry.has_attended}
        missed = [entry for entry in self._ablated if entry.pattern not in attended]
        if missed:
            reason = missed[0].reason
            raise RuntimeError(
                f"the model ran, and {missed[0].pattern!r} was not ablated: "
                f"{reason or 'it did not run, or computed no attention that can be edited'}"
            )

    def _begin(self) -> None:
        # Earlier runs do not count when the ablation is entered again.
        self._ablated = [entry.fresh() for entry in self._ablated]
        if (
            # Statistics over images are collected once, and kept when the ablation is entered
            # again.
            self._images is not None and self._ablated and self._ablated[0].reference is None
        ):
            collect_references(self._model, self._ablated, self._images, self._seed)
            # A layer that ran for the references need not run in the user's forwards.
            self._ablated = [entry.fresh() for entry in self._ablated]
        self._forwards = self._exits.enter_context(edited_model(self._model, self._ablated))


def _layer_of_source(entry: Ablated, source: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """Return the layer of the source model whose heads are used."""
    layer = layers.get(module_name(entry.layer))
    if layer is None:
        raise ValueError(
            f"the source, {type(source).__name__}, has no layer {entry.layer!r} to take heads from"
        )
    expected, got = (
        {name: tuple(p.shape) for name, p in m.named_parameters()} for m in (entry.module, layer)
    )
    # Equal shapes of parameters do not imply equal numbers of heads, into which channels are split.
    if expected != got or head_count(entry.module) != head_count(layer):
        different = sorted({*expected.items()} ^ {*got.items()}) or "another number of heads"
        raise ValueError(
            f"expected {entry.layer!r} of the source to have the same shapes, got {different}"
        )
    return layer
