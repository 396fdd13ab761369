"""Whether GPSA heads isolate objects from the background (T-CNN paper, Secs. 4 and 6, where it is a
hypothesis).

    python studies/object_heads.py

Takes about 4 minutes on one CPU core.

The paper sees the shape of the object in attention maps, and supposes that attention helps to
isolate objects from the background. Here the object's place is known: a digit among fragments of
other digits and noise. A cell of the attention grid belongs to it if strokes of the digit cover a
tenth of it.

Measured is the attention on the object, from queries on the object and from those on the
background. Objects are compact, so a head that looks near its query puts much of it there, whatever
is in the image. The control is what the same attention puts on the mask of another scene, from that
mask's queries, and the excess of a head is the first less the second. Over scenes whose masks are
exchanged in a circle, any attention that is the same for every image, a convolution among them, has
an excess of exactly zero. A head that isolates objects has an excess from the object, and none, or
a lack, from the background: its isolation is the difference of the two. The largest that can be had
is that of attention that spreads evenly over the query's own side.

What one should see (object_heads.png): at epoch 0, when heads are convolutions and their content
attention is nearly even, both excesses are nearly zero. Only heads that use content can then leave
it.

How: for each of three seeds a small ResNet learns handwritten digits in cluttered scenes. Its last
stage is then reparameterized as gated positional self-attention (GPSA) and fine-tuned; at each
epoch the attention of every head is measured on validation scenes.

Endpoint, written down after the results: the isolation of each layer at the last epoch, the mean of
its heads over all scenes, with a 95 % t interval over the seeds, not corrected for the number of
layers; a layer isolates the object if its interval lies above zero. Isolation by layer, and the
heads whose interval over scenes lies above zero, were in the code that was committed before the
results. The two excesses, and heads below zero, were added with them.

Writes into results/:
object_heads.png    A isolation by epoch, a line for each layer and seed (mean of its heads); B
                    excess of every head at the end, from the object and from the background; C a
                    scene, its object, and where the most isolating head of the first seed looks
                    from either
object_heads.zarr   attention on the object (seed, epoch, mask, query, layer, head, image), gates,
                    and the largest isolation

It ends by checking that the T-CNNs learned, and that the excess begins near zero, compared with
what could be seen. It is for the digits, whose masks are known; `tcnn-probe look --masks` takes
your own model, photographs and masks.
"""

import argparse
import sys
from functools import partial

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor, nn

import tcnn_probe
from common.data import Probed, probed_images
from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.option_table import training_options
from common.options import Option, digits_alone, from_least, parse_options
from common.output import ended, finish, seeds_of
from common.training import Study, begin
from common.verdicts import all_learned, with_interval
from tcnn_model import gpsa_layers, reparameterize
from tcnn_probe.evaluation import mean_interval

COVERED = 0.1
"""Share of a cell that strokes cover from which it belongs to the object."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    first = begin("object_heads", args)
    by_seed, trained = [], {}
    for seed in seeds_of(args):
        # Each seed has its own split and its own CNN.
        study = first.with_seed(seed)
        study.train_cnn(f"cnn_{seed}")
        torch.manual_seed(seed)  # for the new queries and keys
        trained[seed] = reparameterize(study.model)
        by_seed.append(measure_epochs(study, trained[seed], seed))
    results = xr.concat(by_seed, xr.Variable("seed", list(seeds_of(args))))
    results["images"] = len(first.validation)
    first.output.save(results)
    scenes = probed_images(first.validation, args.images)
    first.output.show(draw(results, trained[args.seed], scenes), table(results))
    return finish(check(results, first.chance), args)


def measure_epochs(study: Study, model: nn.Module, seed: int) -> xr.Dataset:
    """Fine-tune the T-CNN and measure its heads at each epoch."""
    scenes = probed_images(study.validation, study.args.images)
    train = partial(study.finetune, model, f"tcnn_{seed}", f"the T-CNN, seed {seed}")
    _, heads = study.measure_epochs(train, f"heads_{seed}", lambda: measure(model, scenes))
    return heads


def measure(model: nn.Module, scenes: Probed) -> xr.Dataset:
    """Return the attention on the object, (mask, query, layer, head, image),
    gates, and the largest isolation.
    """
    attention, gate = attention_of(model, scenes.images)
    objects = on_grid(scenes, attention.shape[-1])
    # Attention that spreads evenly over the query's own side.
    same = objects[:, :, None] == objects[:, None]
    ideal = same / same.sum(-1, keepdims=True)
    masks = objects, np.roll(objects, 1, 0)
    own, other = (on_object(ideal, mask).mean(-1) for mask in masks)
    heads = "layer", "head"
    return xr.Dataset(
        {
            "on_object": (
                ("mask", "query", *heads, "image"),
                np.stack([on_object(attention, mask) for mask in masks]),
            ),
            "gate": (heads, gate),
            "largest": float(np.subtract(*(own - other))),
        },
        {
            "layer": list(gpsa_layers(model)),
            "mask": ["own", "other"],
            "query": ["object", "background"],
        },
    )


def with_interval_over_seeds(by_seed: xr.DataArray) -> str:
    """Return the mean over seeds with its t interval, if there are several."""
    return (
        with_interval(by_seed, "seed", 4) if by_seed.size > 1 else f"{float(by_seed.mean()):+.4f}"
    )


def attention_of(model: nn.Module, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention of all heads, (layer, head, image, query, key),
    without zero padding, and their gates.
    """
    maps = tcnn_probe.attention_maps(model.eval(), images, progress=False)
    (grid,) = maps.children.values()
    attention = grid.attention.transpose(
        "layer", "head", "image", "query_y", "query_x", "y", "x"
    ).values
    return attention.reshape(*attention.shape[:3], *[grid.y.size * grid.x.size] * 2), (
        grid.gate.values
    )


def on_grid(scenes: Probed, cells: int) -> np.ndarray:
    """Return whether each cell of a square grid belongs to the object, (image, cell)."""
    assert scenes.masks is not None
    side = round(cells**0.5)
    strokes = F.adaptive_avg_pool2d(scenes.masks.double()[:, None], side)
    return (strokes > COVERED).flatten(1).numpy()


def on_object(attention: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """Return the attention on the object from the object and from the background, (2, ..., image).

    Args:
        attention: Attention (..., image, query, key).
        objects: Whether each cell belongs to the object, (image, cell).
    """
    shares = (attention * objects[:, None]).sum(-1)
    means = [(shares * side).sum(-1) / side.sum(-1) for side in (objects, ~objects)]
    return np.stack(means)


def excess(results: xr.Dataset) -> xr.DataArray:
    """Return the attention on the object less that on the mask of another scene,
    (..., query, layer, head, image).
    """
    return results.on_object.sel(mask="own") - results.on_object.sel(mask="other")


def isolation(results: xr.Dataset) -> xr.DataArray:
    """Return the excess from the object less that
    from the background, (..., layer, head, image).
    """
    both = excess(results)
    return both.sel(query="object") - both.sel(query="background")


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset, model: nn.Module, scenes: Probed) -> Figure:
    """Draw isolation by epoch, the excess of every head,
    and the maps of the head with the largest isolation.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    a, b = above.subplots(1, 2, width_ratios=[1, 1.2])
    means = isolation(results).mean("image")
    ends = excess(results).isel(epoch=-1).mean("image")
    colors = ordered_colors(results.sizes["layer"])
    for layer, color in zip(results.layer.values, colors, strict=True):
        of_layer = means.sel(layer=layer)
        for number, curve in enumerate(of_layer.mean("head")):
            a.plot(curve.epoch, curve, color=color, label="" if number else str(layer))
        end = ends.sel(layer=layer)
        b.scatter(end.sel(query="background"), end.sel(query="object"), color=color, s=12)
    a.axhline(0, color="0.7", lw=0.8, zorder=0)
    # Heads above the diagonal isolate, those below it look away from what they are on.
    b.axline((0, 0), slope=1, color="0.7", lw=0.8, zorder=0)
    b.axvline(0, color="0.9", lw=0.8, zorder=0)
    b.axhline(0, color="0.9", lw=0.8, zorder=0)
    a.set(xlabel="epoch after reparameterization", ylabel="isolation, mean of heads")
    whole_ticks(a)
    a.legend(fontsize=8)
    b.set(
        xlabel="excess on the object from the background",
        ylabel="excess from the object",
        title="heads at the end",
    )

    first = means.isel(seed=0, epoch=-1)
    layer, head = np.unravel_index(np.argmax(first.values), first.shape)
    attention, _ = attention_of(model, scenes.images)
    objects = on_grid(scenes, attention.shape[-1])
    clearest = isolation(results).isel(seed=0, epoch=-1, layer=layer, head=head)
    number = int(np.argmax(clearest.values))
    maps, inside = attention[layer, head, number], objects[number]
    side = round(len(inside) ** 0.5)
    pictures = {
        "scene": scenes.images[number, 0].numpy(),
        "object": inside.reshape(side, side),
        "from the object": maps[inside].mean(0).reshape(side, side),
        "from the background": maps[~inside].mean(0).reshape(side, side),
    }
    panels = below.subplots(1, len(pictures))
    for panel, (title, picture) in zip(panels, pictures.items(), strict=True):
        panel.imshow(picture, cmap="gray" if title == "scene" else "viridis")
        panel.set(xticks=[], yticks=[], xlabel=title)
    name = results.layer.values[layer]
    below.suptitle(f"head {head} of {name}", fontsize=9)
    add_letters([a, b, panels[0]])
    return figure


def table(results: xr.Dataset) -> str:
    """Return attention on the object and its excess by layer,
    at the end, with intervals over seeds.
    """
    last = results.isel(epoch=-1)
    shares = last.on_object.mean(["seed", "head", "image"])
    excesses, isolated = (measure(last).mean(["head", "image"]) for measure in (excess, isolation))
    lines = [
        f"\nat the end; {results.sizes['image']} scenes, {results.sizes['seed']} seeds; "
        f"largest isolation that can be had {float(results.largest.mean()):.3f}"
    ]
    for layer in results.layer.values:
        lines.append(f"{layer}")
        for query in results["query"].values:
            own, other = shares.sel(layer=layer, query=query).values
            interval = with_interval_over_seeds(excesses.sel(layer=layer, query=query))
            words = f"from the {query}"
            lines.append(
                f"  {words:24}{own:.3f}, on the mask of another scene {other:.3f}; excess "
                f"{interval}"
            )
        lines.append(f"  {'isolation':24}{with_interval_over_seeds(isolated.sel(layer=layer))}")
    by_head = isolation(last)
    low, high = (mean_interval(by_head).sel(bound=bound) for bound in ("low", "high"))
    lines.append(
        f"isolation of a head {float(by_head.mean('image').min()):+.3f} to "
        f"{float(by_head.mean('image').max()):+.3f}; interval over scenes above zero in "
        f"{int((low > 0).sum())} of {low.size}, below in {int((high < 0).sum())}"
    )
    return "\n".join(lines)


def check(results: xr.Dataset, chance: float) -> bool:
    """Return whether the T-CNNs learned, and the excess begins near zero,
    compared with what could be seen.
    """
    last = results.isel(epoch=-1)
    names = (f"the T-CNN of seed {seed}" for seed in results.seed.values)
    ends = zip(names, last.top1.values, strict=True)
    has_learned = all_learned(ends, int(results.images), chance)
    start = float(abs(excess(results.isel(epoch=0)).mean("image")).max())
    largest = float(results.largest.min())
    small = start < largest / 20
    print(
        f"check: the excess of every head at epoch 0 is {'near' if small else 'NOT near'} zero: at "
        f"most {start:.4f}, where the largest isolation is {largest:.3f}"
    )
    return has_learned and small


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    measurement = [
        Option("--seeds", "number of trainings", from_least(1), 3, small=1),
        Option("--images", "scenes to measure", from_least(2), 96, small=20),
    ]
    groups = {**training_options("one seed, 2 epochs, 10 seconds"), "measurement": measurement}
    return parse_options(
        __doc__,
        "object_heads",
        arguments,
        groups,
        digits_alone("`tcnn-probe look --masks` takes your own"),
    )


if __name__ == "__main__":
    sys.exit(ended(main))
