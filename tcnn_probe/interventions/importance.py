"""``head_importance()``: what each part of every head's attention contributes,
to first order, in one backward pass.

If the output o of a head becomes that of a rung, o + d, then a loss changes by <dL/do, d> to first
order, and the model's output by J d. The gradients dL/do of all heads come from one backward pass,
in which the change d of each head and rung is computed where its gradient arrives.
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_edit import HeadEdit, HeadWatch
from tcnn_probe.attention.head_editor import LayerCall
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.interventions.ablation_kinds import Ablated, Mode
from tcnn_probe.interventions.edited_forwards import edited_model
from tcnn_probe.interventions.evaluated_images import (
    Batch,
    Measure,
    as_measure,
    attributes_of_change,
    batches_of,
    changes_of,
    outputs_of,
    reread,
)
from tcnn_probe.interventions.head_selection import HeadSelection, select_heads
from tcnn_probe.interventions.references import GivenImages
from tcnn_probe.interventions.rungs import RUNGS, Rungs
from tcnn_probe.models import (
    check_model,
    layer_names,
    progress_bar,
    untouched,
    whole_number,
)
from tcnn_probe.probes.probe import Probe
from tcnn_probe.schema import Variable

__all__ = ["head_importance", "importance_probe"]


def head_importance(
    model: nn.Module,
    images: GivenImages,
    loss: Any = None,
    *,
    modes: Collection[Mode] = RUNGS,
    heads: HeadSelection = None,
    reference: GivenImages | None = None,
    radius: float | None = None,
    queries: Literal["patches"] | None = "patches",
    directions: int = 8,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool | None = None,
) -> xr.DataArray:
    """Estimate the cost of every head at every rung
    of the ladder of :func:`ablate`, to first order.

    ::

        cost = tcnn_probe.head_importance(model, images, labels, reference=training_images)
        print(cost.mean("image").sel(mode="static").to_pandas())

    With a loss, the cost is its change to first order if the heads are ablated, which can be
    negative. It takes one forward and one backward for all heads and modes (Michel et al. 2019,
    arXiv 1905.10650; attribution patching, Syed et al. 2023, arXiv 2310.10348). Without one, the
    cost is the norm ``|J d|`` of the change of the model's output, which is estimated from random
    directions of the output, with one backward for each. Fused attention stays on, and the
    attention of the images is computed one layer at a time. First order can be far from the exact
    cost, see :func:`head_costs`.

    Args:
        model: Model as for :func:`ablate`. It runs in eval mode.
        images: Images to evaluate: a batch, several, pairs with a target, or pictures.
        loss: None; the classes of all images, for the cross entropy; or a function (output, target)
            that returns the loss of each image, (B,), where the target is the second item of a
            loader's pair, or None.
        modes: Modes of :func:`ablate` that edit the outputs of heads.
        heads: Heads as for :func:`ablate`.
        reference: Images over which attention is averaged; None for ``images``, of which each has a
            share of one over their number in the mean, so that the cost of "static" is too small by
            this share.
        radius: Distance for modes "local" and "distant".
        queries: "patches" to leave class and register tokens as queries their own attention in all
            modes, so that the rungs can be compared; None to ablate all queries in modes "zero",
            "mean" and "static". In the last layer of a model that reads its class token only,
            ablated patches cost nothing.
        directions: Number of random directions. The standard error of the cost of a head for one
            image is about one over the root of twice their number, 25 % for 8.
        seed: Seed of the directions.
        batch_size: Largest number of images that run at once.
        progress: Whether to show a progress bar; None to show it on a terminal after some seconds.

    Returns:
        Costs, dims (mode, layer, head, image), for means and
        :func:`tcnn_probe.evaluation.mean_interval`; NaN where a layer cannot be ablated in a mode.

    Raises:
        TypeError, ValueError: The arguments are not as above.
    """
    check_model(model)
    directions = whole_number(directions, "directions", 1)
    measure, classes = as_measure(loss)
    images = reread(images)
    rungs = Rungs.of(model, heads, modes, reference, images, radius, seed, queries)
    generator = torch.Generator().manual_seed(whole_number(seed, "seed"))
    # Tensors that are made in inference mode cannot be saved for gradients.
    with untouched(model):
        batches = list(batches_of(images, model, batch_size, classes))
    total = len(batches) * (directions if measure is None else 1)
    parts = []
    with (
        untouched(model),
        progress_bar(total, "head_importance", progress, "backward") as bar,
    ):
        for batch in batches:
            if measure is None:
                squares = _squares(rungs, batch, directions, generator, bar)
                parts.append(np.sqrt(squares) / _mean_of_root(directions))
            else:
                parts.append(_changes(rungs, batch, measure))
                bar.update()
    table = rungs.table(sum(part.shape[-1] for part in parts))
    table.values[:] = np.concatenate(parts, -1)
    about = attributes_of_change(measure)
    table.attrs = {**about, "long_name": f"{about['long_name']}, to first order"}
    return table.rename("cost")


def importance_probe(
    model: nn.Module,
    images: GivenImages,
    loss: Any = None,
    *,
    modes: Collection[Mode] = RUNGS,
    heads: HeadSelection = None,
    **options: Any,
) -> Probe:
    """Record the result of :func:`head_importance` at each mark, as a variable of the recording.

    ::

        import timm, torch, tcnn_probe

        vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
        images, classes = torch.randn(4, 3, 64, 64), [0, 1, 2, 3]
        importance = tcnn_probe.importance_probe(vit, images, classes, modes=["static", "zero"])
        with tcnn_probe.record(vit, probes=["softmax", importance]) as recorder:
            for epoch in range(2):
                vit(images)  # train and validate here
                recorder.mark(epoch=epoch)
        cost = recorder.tree["importance"].dataset.importance
        print(cost.sel(mode="static", epoch=1).to_pandas())

    Each mark then runs the model on these images, forward and backward. Other measurements do not
    see that, and gradients of the training stay as they are.

    Args:
        model: Model as for :func:`head_importance`.
        images: The same images for all marks; a loader is read again at each of them.
        loss: Loss as for :func:`head_importance`.
        modes: Modes as for :func:`head_importance`.
        heads: Heads as for :func:`head_importance`.
        **options: Further options of :func:`head_importance`.

    Returns:
        A probe with the variable ``importance``, dims (layer, head, mode), the mean over images, in
        the group "importance".

    Raises:
        TypeError, ValueError: As in :func:`head_importance`, at the first mark; at once, if no
            layer has such heads.
    """
    check_model(model)
    names = layer_names(model)
    layers = {entry.layer for entry in select_heads(model, heads, "zero")}
    images = reread(images)
    waiting: set[str] = set()
    costs: list[xr.DataArray] = []

    def read(module: nn.Module) -> dict[str, Tensor]:
        name = names[module]
        if name not in waiting:  # a mark reads each layer once, and this is the first one
            table = head_importance(model, images, loss, modes=modes, heads=heads, **options)
            costs[:] = [table.mean("image")]
            waiting.update(layers)
        waiting.remove(name)
        [table] = costs
        if name not in table.layer:
            return {}
        by_head = table.sel(layer=name).reindex(head=range(int(table["head"].max()) + 1))
        return {"importance": torch.from_numpy(by_head.transpose("head", "mode").values)}

    return Probe(
        "importance",
        {
            "importance": Variable(
                ("layer", "head", "mode"),
                "1",
                "cost of a head, to first order",
                "Change of the loss, or of the output, to first order if a head becomes that of a "
                "mode of ablate, see head_importance; mean over its images, at the mark.",
                nan_reason="the head was not selected, or cannot be ablated in this mode",
            )
        },
        lambda module: names.get(module) in layers,
        state=read,
        coords={"mode": list(modes)},
    )


def _changes(rungs: Rungs, batch: Batch, measure: Measure) -> np.ndarray:
    """Return the change of a loss to first order, (modes, layers, heads, B)."""
    with _Watches(rungs, batch) as watches:
        losses = changes_of(measure(watches.output, batch.target), len(batch.images))
        return watches.changes(losses.sum())


def _squares(
    rungs: Rungs, batch: Batch, directions: int, generator: torch.Generator, bar: Any
) -> np.ndarray:
    """Return the mean over random directions r of the square of <r,
    J d>, (modes, layers, heads, B).
    """
    with _Watches(rungs, batch) as watches:
        outputs = outputs_of(watches.output, len(batch.images))
        squares = []
        for number in range(directions):
            random = torch.randn(outputs.shape, generator=generator).to(outputs)
            is_last = number == directions - 1
            change = watches.changes((outputs * random).sum(), is_last=is_last)
            squares.append(change**2)
            bar.update()
        return np.mean(squares, 0)


def _mean_of_root(directions: int) -> float:
    """Return the expected root of the mean of squares of independent standard normal numbers."""
    half = directions / 2
    return math.exp(math.lgamma(half + 0.5) - math.lgamma(half)) / math.sqrt(half)


class _Watches:
    """A forward of a batch in which the gradients of all heads will be received.

    Attributes:
        output: Output of the model.
    """

    def __init__(self, rungs: Rungs, batch: Batch) -> None:
        self._table = rungs.table(len(batch.images))
        # The gradient with respect to the images passes through all layers, also if parameters are
        # frozen.
        self._images = batch.images.detach().clone().requires_grad_()
        self._watches: dict[nn.Module, _Watch] = {}
        for mode, entries in rungs.entries.items():
            for entry in entries:
                watch = _Watch(entry.layer, self.add)
                watch = self._watches.setdefault(entry.module, watch)
                watch.entries[mode, entry.layer] = entry
        self._editing = edited_model(
            rungs.model, rungs.all, {watch: x for x, watch in self._watches.items()}
        )
        self._model = rungs.model

    def __enter__(self) -> "_Watches":
        with self._editing, torch.enable_grad():
            self.output = self._model(self._images)
        return self

    def __exit__(self, *error: Any) -> None:
        # Gradients would keep what they were computed from.
        del self.output

    def changes(self, total: Tensor, *, is_last: bool = True) -> np.ndarray:
        """Return <gradient of a sum over images,
        d> of all heads and modes, (modes, layers, heads, B).
        """
        self._table.values[:] = np.nan
        torch.autograd.grad(total, self._images, retain_graph=not is_last, allow_unused=True)
        for watch in self._watches.values():
            if watch.objection:
                layers = [layer for _, layer in watch.entries]
                self._table.loc[{"layer": layers}] = np.nan
        return self._table.values.copy()

    def add(self, mode: Mode, layer: str, heads: list[int], products: Tensor) -> None:
        """Add products of some heads, (rows, heads), to those of their images."""
        images = self._table.sizes["image"]
        by_image = products.unflatten(0, (images, -1)).sum(1).T.cpu().numpy()
        where = {"mode": mode, "layer": layer, "head": heads}
        # A layer that is called again for the same images adds to its first call.
        before = np.nan_to_num(self._table.loc[where].values)
        self._table.loc[where] = before + by_image


class _Watch(AttentionListener):
    """Listener to a layer that computes the changes of its heads once their gradients arrive.

    Args:
        layer: Name of the layer, for messages.
        add: Function that takes the products of gradients and changes.
    """

    def __init__(self, layer: str, add: Callable[[Mode, str, list[int], Tensor], None]) -> None:
        self.entries: dict[tuple[Mode, str], Ablated] = {}
        self.layer = layer
        self.objection = ""
        self._add = add

    def attends(self, attention: Attention) -> HeadEdit:
        """Return a watch of the outputs of the heads."""
        return HeadWatch((), watch=partial(self._watch, attention))

    def returned(self, call: LayerCall, output: Any) -> None:
        """Note whether the layer's softmax turned out to be no attention."""
        self.objection = self.objection or call.objection

    def _watch(
        self,
        attention: Attention,
        outputs: Tensor,
        edit: Callable[[HeadEdit], Tensor],
    ) -> Tensor:
        changes: dict[tuple[Mode, str], Tensor] = {}
        before = outputs.detach()
        # The outputs of a softmax that is not fused are matrices of queries and keys, which are not
        # kept.
        is_kept = outputs.shape[-1] != attention.keys

        @torch.no_grad()
        def receive(gradient: Tensor) -> None:
            dtype = at_least_float32(gradient.dtype)
            for key, entry in self.entries.items():
                heads = list(entry.indices)
                if key in changes:
                    change = changes[key]
                else:
                    if not entry.expects(attention):
                        continue
                    answer = entry.attends(attention)
                    if answer is None:
                        continue
                    heads = list(answer.heads)
                    change = (edit(answer) - before)[:, heads].to(dtype)
                    if is_kept:
                        changes[key] = change
                of_heads = gradient[:, heads].to(dtype)
                self._add(*key, heads, (of_heads * change).sum((-1, -2)))

        if outputs.requires_grad:  # not in a part of the model that runs under torch.no_grad
            outputs.register_hook(receive)
        return outputs
