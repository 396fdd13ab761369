"""LayerScale, the class token and ResMLP,
ablated in small (Touvron's thesis, Tables 3.12, 3.13 and 4.3).

    python studies/ablations.py

Takes about 5 minutes on one CPU core.

What one should see (ablations.png): a ResMLP whose patches do not communicate is far less accurate
than one with a matrix between them, as in the thesis (56.5 % in place of 76.6 % on ImageNet).
Differences between the other variants, 2 % and less in the thesis, are mostly below what so few
trainings on digits can tell; they are printed with intervals, and some have the opposite sign.

How: small networks of four blocks learn handwritten digits of 8 x 8 pixels in the same way, each
with several seeds. The first variant of each table is what the others are compared with, seed by
seed.

LayerScale (Sec. 3.5.3), in a vision transformer without class token: weights that begin at 0.1,
none at all, weights that begin at 0, weights drawn evenly from 0 to 0.2, one weight for all
channels of a branch, and weights that were trained before and are not trained again.

Class token (Sec. 3.6): it enters before the first block, as in ViT, before the third or the last;
there is none, and patches are averaged; or the last block is one of class attention, which leaves
the patches unchanged (CaiT).

ResMLP (Sec. 4.3): the layer between patches is a matrix, nothing, an MLP, or a 3 x 3 convolution,
also depth-wise or depth-separable; LayerNorm in place of affine layers; and, in place of the
average of the patches, two layers of a class token that aggregate them by learned weights
(class-MLP, built here from the paragraph in Sec. 4.2).

Writes into results/:
ablations.png     accuracy of each variant, a point for each seed and the mean
ablations.zarr    accuracy by (variant, seed): xarray.open_zarr

It ends by checking that the networks learned, and that a ResMLP whose patches communicate is more
accurate than one whose patches do not.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial

import matplotlib as mpl
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.vision_transformer import LayerScale, VisionTransformer
from torch import Tensor, nn

from common.figures import STYLE, add_letters
from common.models import widened
from common.option_table import LIMIT_OPTION, SEED_OPTION, small_option
from common.options import Option, from_least, parse_options
from common.output import RunOutput, ended, finish
from common.stepwise import SHAPE, accuracy, decisions, digits_learned, fit
from common.verdicts import compared
from tcnn_probe.plot import OKABE_ITO

DEPTH, HEADS = 4, 3
EPSILON = 0.1
"""Initial weight of LayerScale, the thesis' number for up to 18 blocks."""
GRID = 4
"""Rows and columns of patches."""

Models = Mapping[str, nn.Module]


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    torch.set_num_threads(1)
    output = RunOutput.from_args(args, "ablations")
    results = output.by_seed(args, lambda seed: measure_seed(seed, args))
    output.save(results)
    output.show(draw(results.top1), table(results.top1))
    return finish(check(results.top1), args)


def measure_seed(seed: int, args: argparse.Namespace) -> xr.Dataset:
    """Train every variant with one seed, and return their accuracies."""
    models: dict[str, nn.Module] = {}
    for variants in TABLES.values():
        for name, build in variants.items():
            # Variants of a table begin with the same weights, as far as they have the same layers.
            torch.manual_seed(seed)
            model = build(models)
            # Two tables have a variant in common, which is trained once.
            if model not in models.values():
                fit(model, args.epochs, seed, limit=args.limit)
            models[name] = model
    values = [accuracy(decisions(model)) for model in models.values()]
    names = np.array(list(models), object)
    return xr.Dataset({"top1": (("seed", "variant"), [values])}, {"variant": names, "seed": [seed]})


def scaled_vit(
    models: Models,
    init: Callable[[Tensor], Tensor] = lambda gamma: gamma,
    *,
    scalar: bool = False,
    epsilon: float | None = EPSILON,
) -> nn.Module:
    """Return a vision transformer with LayerScale.

    Args:
        models: Networks that were trained before, which are not used.
        init: Function that sets the weights of a branch, in place.
        scalar: Whether a branch has one weight for all its channels.
        epsilon: Initial weights, before ``init``; None for no LayerScale.
    """
    pool = {"class_token": False, "global_pool": "avg"}
    model = widened(
        VisionTransformer(**SHAPE, **pool, depth=DEPTH, num_heads=HEADS, init_values=epsilon)
    )
    for layer in layer_scales(model):
        if scalar:
            layer.gamma = nn.Parameter(layer.gamma.detach()[:1].clone())
        with torch.no_grad():
            init(layer.gamma)
    return model


def layer_scales(model: nn.Module) -> list[nn.Module]:
    """Return the LayerScale of every branch that has one."""
    return [part for part in model.modules() if isinstance(part, LayerScale)]


def with_trained_scales(models: Models) -> nn.Module:
    """Return a new transformer whose LayerScale is frozen at the weights
    that another transformer learned.
    """
    model = scaled_vit(models)
    trained = layer_scales(models[SCALED])
    for layer, source in zip(layer_scales(model), trained, strict=True):
        layer.gamma = nn.Parameter(source.gamma.detach().clone(), requires_grad=False)
    return model


class LateTokenViT(VisionTransformer):
    """Vision transformer whose class token enters before a later block.

    Args:
        entry: Number of blocks before the class token.
        class_attention: Whether later blocks leave the patches unchanged (class attention of CaiT,
            with LayerScale that begins at 1).
    """

    def __init__(self, entry: int, *, class_attention: bool = False) -> None:
        # A class token has no position embedding.
        super().__init__(**SHAPE, depth=DEPTH, num_heads=HEADS, no_embed_class=True)
        self.entry = entry
        self.class_blocks = nn.ModuleList()
        if class_attention:
            options = {"init_values": 1.0, "qkv_bias": True}
            self.class_blocks.extend(
                LayerScaleBlockClassAttn(self.embed_dim, HEADS, **options)
                for _ in self.blocks[entry:]
            )
            self.blocks = self.blocks[:entry]

    def forward(self, x: Tensor) -> Tensor:
        """Compute class scores of images: (B, 1, 8, 8) -> (B, K)."""
        x = self.patch_embed(x) + self.pos_embed
        for block in self.blocks[: self.entry]:
            x = block(x)
        token = self.cls_token.expand(len(x), -1, -1)
        for block in self.class_blocks:
            token = block(x, token)
        x = torch.cat([token, x], 1)
        for block in self.blocks[self.entry :]:
            x = block(x)
        return self.forward_head(self.norm(x))


def late_token(models: Models, entry: int, *, class_attention: bool = False) -> nn.Module:
    """Return a vision transformer whose class token enters after ``entry`` blocks."""
    return widened(LateTokenViT(entry, class_attention=class_attention))


class ClassMLPBlock(nn.Module):
    """Layer of class-MLP: a weighted sum of all tokens is added to the class token,
    and then the output of an MLP.

    Class attention weighs tokens by their content; here the weights are learned, and the same for
    every image.
    """

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Affine(dim), Affine(dim)
        self.aggregate = nn.Linear(tokens, 1)
        self.project = nn.Linear(dim, dim)
        hidden = 4 * dim
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, patches: Tensor, token: Tensor) -> Tensor:
        """Return the token after the layer: (B, N, D) and (B, 1, D) -> (B, 1, D)."""
        tokens = self.norm1(torch.cat([token, patches], 1))
        aggregated = self.aggregate(tokens.transpose(1, 2)).transpose(1, 2)
        token = token + self.project(aggregated)
        return token + self.mlp(self.norm2(token))


class ClassMLP(nn.Module):
    """Two layers of class-MLP: patches (B, N, D) to the class token (B, 1, D)."""

    def __init__(self, dim: int, patches: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers = nn.ModuleList(ClassMLPBlock(dim, patches + 1) for _ in range(2))

    def forward(self, patches: Tensor) -> Tensor:
        """Return the class token, (B, 1, D)."""
        token = self.token.expand(len(patches), -1, -1)
        for layer in self.layers:
            token = layer(patches, token)
        return token


class NoCommunication(nn.Module):
    """Layer that adds nothing to the patches."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros, (B, D, N)."""
        return torch.zeros_like(x)


def resmlp(
    models: Models,
    between: Callable[[], nn.Module] | None = None,
    *,
    class_mlp: bool = False,
    norm: Callable[[int], nn.Module] = Affine,
) -> nn.Module:
    """Return a ResMLP.

    Args:
        models: Networks that were trained before, which are not used.
        between: Function that makes a layer between patches, (B, D, N) -> (B, D, N); None for a
            matrix.
        class_mlp: Whether a class token takes the place of the average.
        norm: Layer at the beginning of each branch and after the last block, made from a number of
            channels.
    """
    model = MlpMixer(
        **SHAPE,
        num_blocks=DEPTH,
        mlp_ratio=4,
        # LayerScale begins at 1, so that branches count in full from the start of so short a
        # training.
        block_layer=partial(ResBlock, init_values=1.0),
        norm_layer=norm,
    )
    for block in model.blocks:
        if between is not None:
            block.linear_tokens = between()
        if between is NoCommunication:
            # What a branch of zeros is scaled by has no gradient.
            block.norm1.requires_grad_(False)
            block.ls1.requires_grad_(False)
    if class_mlp:
        # ClassMLP returns a single token, so that the average that follows has no effect.
        model.norm = nn.Sequential(ClassMLP(model.embed_dim, GRID**2), model.norm)
    return widened(model)


def mlp_between() -> nn.Module:
    """Return an MLP between patches, whose hidden layer is four times as wide,
    as in that on channels.
    """
    patches = GRID**2
    return nn.Sequential(
        nn.Linear(patches, 4 * patches), nn.GELU(), nn.Linear(4 * patches, patches)
    )


def convolution(groups: int, *, pointwise: bool = False) -> nn.Module:
    """Return a 3 x 3 convolution of patches: (B, D, N) -> (B, D, N).

    Args:
        groups: Groups of channels; as many as channels for a depth-wise convolution.
        pointwise: Whether a 1 x 1 convolution follows, which makes a depth-wise convolution
            depth-separable.
    """
    dim = SHAPE["embed_dim"]
    return nn.Sequential(
        nn.Unflatten(2, (GRID, GRID)),
        nn.Conv2d(dim, dim, 3, padding=1, groups=groups),
        nn.Conv2d(dim, dim, 1) if pointwise else nn.Identity(),
        nn.Flatten(2),
    )


SCALED, UNSCALED = "from 0.1", "no LayerScale"
MATRIX, SEPARATE = "a matrix", "nothing"
TABLES: dict[str, dict[str, Callable[[Models], nn.Module]]] = {
    "LayerScale": {
        SCALED: scaled_vit,
        UNSCALED: partial(scaled_vit, epsilon=None),
        "from 0": partial(scaled_vit, init=Tensor.zero_),
        "drawn from 0 to 0.2": partial(
            scaled_vit, init=lambda gamma: gamma.uniform_(0, 2 * EPSILON)
        ),
        "one weight a branch": partial(scaled_vit, scalar=True),
        "trained before, frozen": with_trained_scales,
    },
    "class token": {
        "before the first block": partial(late_token, entry=0),
        "before the third": partial(late_token, entry=2),
        "before the last": partial(late_token, entry=3),
        "mean of patches": lambda models: models[UNSCALED],
        "class attention": partial(late_token, entry=3, class_attention=True),
    },
    "ResMLP": {
        MATRIX: resmlp,
        SEPARATE: partial(resmlp, between=NoCommunication),
        "an MLP": partial(resmlp, between=mlp_between),
        "3 x 3 convolution": partial(resmlp, between=partial(convolution, 1)),
        "the same, depth-wise": partial(resmlp, between=partial(convolution, SHAPE["embed_dim"])),
        "the same, depth-separable": partial(
            resmlp,
            between=partial(convolution, SHAPE["embed_dim"], pointwise=True),
        ),
        "a matrix, and LayerNorm": partial(resmlp, norm=nn.LayerNorm),
        "a matrix, and class-MLP": partial(resmlp, class_mlp=True),
    },
}
"""Variants of each table; the first is what the others are compared with."""


@mpl.rc_context(STYLE)
def draw(top1: xr.DataArray) -> Figure:
    """Draw a panel for each table, and in it a row for each variant."""
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    panels = figure.subplots(1, len(TABLES), sharex=True)
    for panel, (title, variants) in zip(panels, TABLES.items(), strict=True):
        for row, name in enumerate(variants):
            values = top1.sel(variant=name).values
            color = OKABE_ITO["vermillion" if row == 0 else "blue"]
            panel.plot(values, np.full(values.size, row), "o", color=color, alpha=0.5)
            panel.plot(values.mean(), row, "|", color="k", ms=14)
        panel.set_yticks(range(len(variants)), list(variants))
        panel.invert_yaxis()
        panel.set(xlabel="accuracy", title=title)
    add_letters(panels)
    return figure


def table(top1: xr.DataArray) -> str:
    """Return accuracies, and differences from the first variant
    of each table with 95 % intervals over seeds.
    """
    lines = []
    for title, (first, *variants) in TABLES.items():
        reference = top1.sel(variant=first)
        lines.append(f"\n{title}\n  {first:26}{float(reference.mean()):.3f}")
        for name in variants:
            values = top1.sel(variant=name)
            difference = compared(values - reference, "seed", "better", "worse")
            lines.append(f"  {name:26}{float(values.mean()):.3f}   {difference}")
    return "\n".join(lines)


def check(top1: xr.DataArray) -> bool:
    """Return whether all networks learned, and a ResMLP needs patches that communicate."""
    worst = top1.min("seed")
    has_learned = digits_learned(
        (str(name), float(worst.sel(variant=name))) for name in worst.variant.values
    )
    matrix, nothing = (float(top1.sel(variant=name).mean()) for name in (MATRIX, SEPARATE))
    verdict = "more" if matrix > nothing else "NOT more"
    print(
        f"check: a ResMLP is {verdict} accurate if its patches communicate: {matrix:.3f}, without "
        f"{nothing:.3f}"
    )
    return has_learned and matrix > nothing


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--epochs", "epochs of each network", from_least(1), 6, small=1),
        Option("--seeds", "trainings of each network", from_least(1), 5, small=1),
        LIMIT_OPTION,
        SEED_OPTION,
        small_option("1 seed, 1 epoch, few digits"),
    ]
    return parse_options(__doc__, "ablations", arguments, {"training": options})


if __name__ == "__main__":
    sys.exit(ended(main))
