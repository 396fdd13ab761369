"""Whether GPSA heads isolate objects from the background (T-CNN paper, Secs. 4 and 6, where it is a hypothesis).

    python studies/object_heads.py

Takes about 4 minutes on one CPU core.

The paper sees the shape of the object in attention maps, and supposes that attention helps to isolate objects from the
background. Here the object's place is known: a digit among fragments of other digits and noise. A cell of the attention
grid belongs to it if strokes of the digit cover a tenth of it.

The contrast of a head is the attention on the object from queries on the object, less that from queries on the
background. Objects are compact, so a head that looks near its query has contrast as well, whatever is in the image. The
control is the contrast that the same attention has with the mask of another scene; the isolation of a head is its
contrast less the control. Over scenes whose masks are exchanged in a circle, any attention that is the same for every
image, a convolution among them, has an isolation of exactly zero. The largest that can be had is that of attention that
spreads evenly over the query's own side, measured with it.

What one should see (object_heads.png): at epoch 0, when heads are convolutions and their content attention is nearly
even, isolation is nearly zero. Only heads that use content can then rise above it.

How: for each of three seeds a small ResNet learns handwritten digits in cluttered scenes. Its last stage is then
reparameterized as gated positional self-attention (GPSA) and fine-tuned; at each epoch the attention of every head is
measured on validation scenes.

Writes into results/:
object_heads.png    A isolation by epoch, a line for each layer and seed (mean of its heads); B isolation of every head
                    at the end, by its gate; C a scene, its object, and where the most isolating head of the first seed
                    looks from the object and from the background
object_heads.zarr   contrast, control and isolation (seed, epoch, layer, head, image), gates, and the largest isolation

It ends by checking that the T-CNNs learned, and that isolation begins near zero and could have been seen. It is for the
digits, whose masks are known; `tcnn-probe look --masks` asks the same of your own model, photographs and masks.
"""

import argparse
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor, nn

import tcnn_probe
from common.data import Probed, probed_images
from common.ending import ended, finish, learned
from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.options import add_output, fill_in, from_least, parsed, study_parser
from common.training import Study, begin
from common.training_options import add_training, settle
from tcnn_model import gpsa_layers, reparameterize
from tcnn_probe.evaluation import mean_interval

COVERED = 0.1
"""Share of a cell that strokes cover from which it belongs to the object."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return 0 if its checks hold, else 3."""
    args = parse(arguments)
    first = begin("object_heads", args, stages=2 * args.seeds)
    seeds = range(args.seed, args.seed + args.seeds)
    by_seed, trained = [], {}
    for seed in seeds:
        # Each seed has its own split and its own CNN.
        study = first.with_cnn(argparse.Namespace(**{**vars(args), "seed": seed}))
        study.train_cnn(f"cnn_{seed}")
        torch.manual_seed(seed)  # for the new queries and keys
        trained[seed] = reparameterize(study.cnn)
        by_seed.append(measure_epochs(study, trained[seed], seed))
    results = xr.concat(by_seed, xr.Variable("seed", list(seeds)))
    results["images"] = len(first.validation)
    first.output.save(results)
    scenes = probed_images(first.validation, args.images)
    draw(results, trained[args.seed], scenes).savefig(first.output.figure, dpi=200)
    print(table(results))
    first.output.print_files()
    return finish(check(results, first.chance), args.data)


def measure_epochs(study: Study, model: nn.Module, seed: int) -> xr.Dataset:
    """Fine-tune the T-CNN and measure its heads at each epoch; a resumed run keeps the epochs that it has."""
    scenes = probed_images(study.validation, study.args.images)
    by_epoch = []
    for result in study.finetune(model, f"tcnn_{seed}", f"the T-CNN, seed {seed}"):
        file = study.output.checkpoints / f"heads_{seed}-{result.epoch:04d}.npz"
        # A resumed run has the numbers of its first epochs, and not their weights.
        if not file.exists():
            save(measure(model, scenes), file)
        with np.load(file) as saved:
            arrays = dict(saved)
        heads = "layer", "head"
        by_epoch.append(
            xr.Dataset(
                {
                    "contrast": ((*heads, "image"), arrays["contrast"]),
                    "control": ((*heads, "image"), arrays["control"]),
                    "gate": (heads, arrays["gate"]),
                    "largest": float(arrays["largest"]),
                    "top1": result.top1,
                },
                {"epoch": result.epoch, "layer": list(gpsa_layers(model))},
            )
        )
    results = xr.concat(by_epoch, "epoch")
    return results.assign(isolation=results.contrast - results.control)


def save(arrays: dict[str, np.ndarray], file: Path) -> None:
    """Write arrays atomically: a run may be killed while it writes."""
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.replace(file)


def measure(model: nn.Module, scenes: Probed) -> dict[str, np.ndarray]:
    """Return contrast and control of each head, (layer, head, image), its gate, and the largest isolation."""
    attention, gate = attention_of(model, scenes.images)
    objects = on_grid(scenes, attention.shape[-1])
    # Attention that spreads evenly over the query's own side.
    same = objects[:, :, None] == objects[:, None]
    ideal = same / same.sum(-1, keepdims=True)
    return {
        "contrast": contrast(attention, objects),
        "control": contrast(attention, np.roll(objects, 1, 0)),
        "gate": gate,
        "largest": np.mean(
            contrast(ideal, objects) - contrast(ideal, np.roll(objects, 1, 0))
        ),
    }


def attention_of(model: nn.Module, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention of all heads, (layer, head, image, query, key), without zero padding, and their gates."""
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


def contrast(attention: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """Return attention on the object from the object, less that from the background, (..., image).

    Args:
        attention: Attention (..., image, query, key).
        objects: Whether each cell belongs to the object, (image, cell).
    """
    on_object = (attention * objects[:, None]).sum(-1)
    inside, outside = (
        (on_object * side).sum(-1) / side.sum(-1) for side in (objects, ~objects)
    )
    return inside - outside


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset, model: nn.Module, scenes: Probed) -> Figure:
    """Draw isolation by epoch and by gate, and the maps of the head with the largest isolation."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    a, b = above.subplots(1, 2, width_ratios=[1, 1.2])
    means = results.isolation.mean("image")
    colors = ordered_colors(results.sizes["layer"])
    for layer, color in zip(results.layer.values, colors, strict=True):
        of_layer = means.sel(layer=layer)
        for number, curve in enumerate(of_layer.mean("head")):
            a.plot(curve.epoch, curve, color=color, label="" if number else str(layer))
        end = of_layer.isel(epoch=-1)
        gates = results.gate.sel(layer=layer).isel(epoch=-1)
        b.scatter(gates, end, color=color, s=12)
    for panel in (a, b):
        panel.axhline(0, color="0.7", lw=0.8, zorder=0)
    a.set(xlabel="epoch after reparameterization", ylabel="isolation, mean of heads")
    whole_ticks(a)
    a.legend(frameon=False, fontsize=8)
    b.set(xlabel=r"gate $\sigma(\lambda)$ at the end", ylabel="isolation of a head")
    largest = float(results.largest.mean())
    b.set_title(f"largest that can be had: {largest:.2f}", fontsize=9)

    first = means.isel(seed=0, epoch=-1)
    layer, head = np.unravel_index(np.argmax(first.values), first.shape)
    attention, _ = attention_of(model, scenes.images)
    objects = on_grid(scenes, attention.shape[-1])
    clearest = results.isolation.isel(seed=0, epoch=-1, layer=layer, head=head)
    number = int(np.argmax(clearest.values))
    maps, inside = attention[layer, head, number], objects[number]
    side = round(len(inside) ** 0.5)
    pictures = {
        "scene": scenes.images[number, 0],
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
    """Return contrast, control and isolation by layer at the start and at the end, with intervals over seeds."""
    means = results[["contrast", "control", "isolation"]].mean(["image", "head"])
    lines = [
        f"\nmeans of heads, {results.sizes['image']} scenes, {results.sizes['seed']} seeds; "
        f"largest isolation {float(results.largest.mean()):.3f}",
        f"{'layer':<16}{'contrast':>10}{'control':>10}   isolation at the end [95 %]   at epoch 0",
    ]
    for layer in results.layer.values:
        row = means.sel(layer=layer)
        start, end = row.isel(epoch=0), row.isel(epoch=-1)
        lines.append(
            f"{layer!s:<16}{float(end.contrast.mean()):10.3f}{float(end.control.mean()):10.3f}   "
            f"{with_interval(end.isolation):30}{float(start.isolation.mean()):+.4f}"
        )
    per_head = results.isolation.isel(epoch=-1)
    low = mean_interval(per_head).sel(bound="low")
    lines.append(
        f"heads whose interval over scenes lies above zero: {int((low > 0).sum())} of {low.size}; "
        f"largest isolation of a head {float(per_head.mean('image').max()):.3f}"
    )
    return "\n".join(lines)


def with_interval(by_seed: xr.DataArray) -> str:
    """Return the mean over seeds with its t interval, if there are several."""
    mean = f"{float(by_seed.mean()):+.4f}"
    if by_seed.size < 2:
        return mean
    low, high = mean_interval(by_seed, "seed").values
    return f"{mean} [{low:+.4f}, {high:+.4f}]"


def check(results: xr.Dataset, chance: float) -> bool:
    """Return whether the T-CNNs learned, and isolation begins near zero and could have been seen."""
    last = results.isel(epoch=-1)
    images = int(results.images)
    has_learned = True
    for seed, top1 in zip(results.seed.values, last.top1.values, strict=True):
        # All are judged, so that each that has not learned is named.
        has_learned &= learned(f"the T-CNN of seed {seed}", float(top1), images, chance)
    start = float(abs(results.isolation.isel(epoch=0).mean("image")).max())
    largest = float(results.largest.min())
    small = start < largest / 20
    print(
        f"check: isolation of every head at epoch 0 is {'near' if small else 'NOT near'} zero: at most {start:.4f}, "
        f"where even attention over the query's own side has {largest:.3f}"
    )
    return has_learned and small


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = study_parser(__doc__)
    add_training(parser, small="one seed, 4 epochs, 10 seconds")
    add = parser.add_argument_group("measurement").add_argument
    add("--seeds", type=from_least(1), help="number of trainings (default: 3)")
    add("--images", type=from_least(2), help="scenes to measure (default: 96)")
    add_output(parser)
    args = parsed(parser, arguments, "object_heads")
    # Masks of strokes are known for the digits alone, and no pretrained weights are made for the digits.
    if args.data != "digits" or args.pretrained:
        words = "the masks are those of the digits, which a CNN has to learn; `tcnn-probe look --masks` takes your own"
        parser.error(f"--data, --pretrained: {words}")
    settle(parser, args)
    if args.small:
        fill_in(args, {"seeds": 1, "images": 20})
    fill_in(args, {"seeds": 3, "images": 96})
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
