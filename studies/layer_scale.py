r"""Share that each residual branch adds to the main branch,
with and without LayerScale (Touvron's thesis, Fig. 3.6).

    python studies/layer_scale.py

Takes about a minute on one CPU core.

What one should see (layer_scale.png): for each block the norm of a residual branch, divided by the
norm of the main branch that it is added to. With LayerScale the ratio starts seven to eleven times
smaller, and training decides how far each branch opens. The last lines that are printed say how
much the ratio varies over the blocks, which in the thesis is less with LayerScale;
studies/pages/layer_scale.md says what several seeds agree on.

How: two vision transformers of 12 blocks learn handwritten digits from the same initial weights and
the same images. One has LayerScale, whose weights start at 0.1, the thesis' number for up to 18
blocks. After each epoch the probe "layer-scale" measures the ratio on the validation images, before
stochastic depth.

Writes into results/:
layer_scale.png             the ratio by block, darker with each epoch: attention at the top, the
                            MLP at the bottom; without LayerScale on the left, with LayerScale on
                            the right, on scales of their own
layer_scale.zarr            the numbers behind it, (model, epoch, layer, branch): xarray.open_zarr
layer_scale_*.zarr          the recording of each model

It ends by checking that both models learned, and that at the start the first branch with LayerScale
is 0.1 times that without, as it must be.

With timm's weights nothing is trained, and one model is shown your own images:

    python studies/layer_scale.py --model cait_xxs24_224 --pretrained \
        --image photograph.jpg another.jpg
"""

import argparse
import sys
import warnings

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import tcnn_probe
from common.figures import STYLE, whole_ticks
from common.models import widened
from common.option_table import single_model_options
from common.options import Option, check_single, parse_options, positive_number
from common.output import ended, finish
from common.training import Study, begin_single

WITHOUT, WITH = "without LayerScale", "with LayerScale"
COLORS = {WITHOUT: "Reds", WITH: "Blues"}
BRANCHES = {"mixer": "attention", "mlp": "MLP"}
ROUNDING = 1e-4  # relative rounding of norms in float32


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    study = begin_single("layer_scale", args, lambda size: small_vit(size, args), before=has_blocks)
    scores = record_trained(study) if args.model else record_training(study)
    study.output.save(scores)
    study.output.show(draw(scores.residual_ratio), table(scores.residual_ratio))
    return finish(check(scores, study), args)


def small_vit(size: int, args: argparse.Namespace, *, scaled: bool = False) -> nn.Module:
    """Return a transformer of width 48 with four heads,
    on 4 x 4 patches: 3 blocks in the small form, else 12.
    """
    model = VisionTransformer(
        img_size=size,
        patch_size=size // 4,
        in_chans=1,
        num_classes=10,
        embed_dim=48,
        # The thesis' initial value of 0.1 is for up to 18 blocks.
        depth=3 if args.small else 12,
        num_heads=4,
        mlp_ratio=2,
        init_values=args.init_values if scaled else None,
    )
    return widened(model)


def has_blocks(model: nn.Module) -> None:
    """Raise ValueError for a model without blocks that the probe knows."""
    tcnn_probe.record(model, probes="layer-scale").remove()


def record_training(study: Study) -> xr.Dataset:
    """Train both models, and return their ratios at each epoch and their accuracy."""
    args, by_model = study.args, []
    for name, slug in ((WITHOUT, "without"), (WITH, "with")):
        # LayerScale draws no random numbers, so that both models have the same initial weights.
        torch.manual_seed(args.seed)
        model = small_vit(args.img_size, args, scaled=name == WITH)
        store = study.output.beside(f"_{slug}.zarr")
        with warnings.catch_warnings():
            # The probe warns that one of the models has no LayerScale for it to read.
            warnings.filterwarnings("ignore", ".*for the probe 'layer-scale' to read")
            study.record(model, store, slug, name, probes="layer-scale")
        tree = tcnn_probe.open(store)
        by_model.append(xr.Dataset({"residual_ratio": ratio(tree), "top1": tree.dataset.top1}))
    return xr.concat(by_model, xr.Variable("model", [WITHOUT, WITH]), combine_attrs="override")


def record_trained(study: Study) -> xr.Dataset:
    """Return the ratios of a trained model, mean over the user's images."""
    args, model = study.args, study.model.to(study.args.device)
    with tcnn_probe.record(model, probes="layer-scale") as recorder, torch.no_grad():
        model(study.images.to(args.device))
        recorder.mark(epoch=0)
    return ratio(recorder.tree).expand_dims(model=[args.model]).to_dataset()


def ratio(tree: xr.DataTree) -> xr.DataArray:
    """Return the ratios of the branches that are drawn, (epoch, layer, branch)."""
    return tree["layer-scale"].dataset.residual_ratio.sel(branch=list(BRANCHES)).load()


@mpl.rc_context(STYLE)
def draw(ratios: xr.DataArray) -> Figure:
    """Draw a row for each branch, a column for each model, and a line for each epoch."""
    models = ratios.model.values
    figure = Figure(figsize=(1 + 4 * len(models), 5), layout="constrained")
    panels = figure.subplots(len(BRANCHES), len(models), squeeze=False, sharex=True)
    for column, model in zip(panels.T, models, strict=True):
        # Colours start at a quarter of the map, because the first epochs would be white on white.
        colors = mpl.colormaps[COLORS.get(model, "Blues")](
            np.linspace(0.25, 1, ratios.sizes["epoch"])
        )
        for axes, (branch, words) in zip(column, BRANCHES.items(), strict=True):
            for color, epoch in zip(colors, ratios.epoch.values, strict=True):
                curve = ratios.sel(model=model, branch=branch, epoch=epoch)
                axes.plot(curve, color=color, marker="o", ms=3, lw=1.5, label=f"epoch {epoch}")
            axes.set(title=f"{words}, {model}", ylim=(0, None))
            whole_ticks(axes)
        handles, labels = column[0].get_legend_handles_labels()
        column[0].legend(
            # The legend has the first and the last epoch only; the shades between explain
            # themselves.
            handles[:: len(handles) - 1 or 1],
            labels[:: len(labels) - 1 or 1],
            fontsize=8,
        )
        column[-1].set_xlabel("block")
    for axes in panels[:, 0]:
        axes.set_ylabel("residual branch / main branch")
    return figure


def table(ratios: xr.DataArray) -> str:
    """Return the first and the last epoch as a table:
    the mean over blocks, and how much the blocks vary.
    """
    lines = [f"\n{'':22}{'branch':12}{'mean ratio':>16}{'largest':>10}{'deviation / mean':>20}"]
    for model in ratios.model.values:
        for branch, words in BRANCHES.items():
            of_branch = ratios.sel(model=model, branch=branch)
            first, last = of_branch.isel(epoch=0), of_branch.isel(epoch=-1)
            change = f"{float(first.mean()):.3f} -> {float(last.mean()):.3f}"
            lines.append(
                f"{model:22}{words:12}{change:>16}{float(last.max()):10.3f}"
                f"{float(variation(of_branch)):20.2f}"
            )
    return "\n".join(lines)


def variation(ratios: xr.DataArray) -> xr.DataArray:
    """Return the standard deviation over blocks divided by the mean, at the end."""
    last = ratios.isel(epoch=-1)
    return last.std("layer") / last.mean("layer")


def check(scores: xr.Dataset, study: Study) -> bool:
    """Return whether both models learned, and LayerScale multiplied the first branch
    by its initial weight.
    """
    if study.args.model:
        return True
    have_learned = all(
        study.learned(str(accuracy.model.item()), float(accuracy))
        for accuracy in scores.top1.isel(epoch=-1)
    )
    # Only before the first block do both models have the same input.
    first = scores.residual_ratio.isel(epoch=0, layer=0).sel(branch="mixer")
    share = float(first.sel(model=WITH) / first.sel(model=WITHOUT))
    expected = study.args.init_values
    # The tolerance is relative to the weight, which is small.
    scaled = abs(share - expected) < ROUNDING * expected
    print(
        f"check: at the start the first branch with LayerScale is {share:.6g} times that without: "
        f"{'the' if scaled else 'NOT the'} initial weight {expected:g}"
    )
    for branch, words in BRANCHES.items():
        variations = variation(scores.residual_ratio.sel(branch=branch))
        numbers = ", ".join(
            f"{name} {float(variations.sel(model=name)):.2f}" for name in scores.model.values
        )
        print(f"variation over the blocks of {words}, at the end: {numbers}")
    return have_learned and scaled


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    weights = Option("--init-values", "initial weights of LayerScale", positive_number, 0.1)
    groups = {
        "options": [weights],
        **single_model_options("cait_xxs24_224", 1e-3, (10, 3), size=32),
    }
    return parse_options(__doc__, "layer_scale", arguments, groups, check_single)


if __name__ == "__main__":
    sys.exit(ended(main))
