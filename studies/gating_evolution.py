"""The later layers escape the convolutional configuration (T-CNN paper, Fig. 4).

    python studies/gating_evolution.py

A small ResNet learns real handwritten digits in cluttered scenes. Its last stage is then reparameterized as gated
positional self-attention (GPSA) and fine-tuned, while every head's gate, attention span and entropy are recorded. A
copy of the CNN is fine-tuned as long without attention, as the control.

Takes about 2 minutes, on one CPU core. Writes results/gating_evolution.zarr and results/gating_evolution.png:
A accuracy, B attention span 1 / alpha, C gate sigma(lambda), D entropy of content and positional attention.
Thin lines are heads, thick ones their mean over the layer.

What one should see: all gates start at sigma(1) = 0.73. The first GPSA layer's stay high or rise: it goes on
convolving. The last layer's fall: it turns from position to content, which after so short a training is still spread
almost evenly over the image (D; log 64 = 4.16 nat is even). In between the heads of one layer part ways. The script
ends by checking that the layers did move apart, and that the T-CNN learned something.

On one's own images, here as the papers did on ImageNet with a GPU:

    python studies/gating_evolution.py --model resnetrs50 --pretrained --data path/to/imagenet --img-size 224 \
        --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys
from dataclasses import asdict

import matplotlib as mpl
import timm
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import nn

import tcnn_probe
from common.data import Loaders, digits_loaders, image_loaders
from common.models import small_resnet
from common.options import add_data, add_machine, add_output, fill_in, study_parser
from common.output import OutputError, RunOutput
from tcnn_model import EpochResult, finetune, reparameterize

Run = list[EpochResult]


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 1 if not."""
    args = parse(arguments)
    options = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "overwrite", "device", "workers")}
    torch.manual_seed(args.seed)
    try:
        cnn, loaders = model_and_data(args)
        reparameterize(cnn.to(args.device))  # refuses now, not after the training, and before anything is written
        output = RunOutput(args.out, "gating_evolution", options, resume=args.resume, overwrite=args.overwrite)
    except (OutputError, ValueError, RuntimeError, OSError) as error:
        print(f"gating_evolution.py: {error}", file=sys.stderr)
        return 2
    settings = {"device": args.device, "amp": args.amp, "seed": args.seed}
    training: Run = []
    if not args.pretrained:
        path = output.checkpoints / "cnn.pt"
        recipe = {"epochs": args.cnn_epochs, "lr": args.cnn_lr, "warmup_epochs": args.cnn_warmup}
        training = list(finetune(cnn, *loaders, checkpoint=path, name="1/3 training the CNN", **recipe, **settings))
    settings |= {"epochs": args.epochs, "lr": args.lr, "gating_lr": args.gating_lr, "warmup_epochs": args.warmup}
    settings["drop_path_rate"] = args.drop_path
    control_model = copy.deepcopy(cnn)
    path = output.checkpoints / "control.pt"
    control = list(finetune(control_model, *loaders, checkpoint=path, name="2/3 the CNN goes on (control)", **settings))

    torch.manual_seed(args.seed)  # of the new queries and keys
    tcnn = reparameterize(cnn)
    path = output.checkpoints / "tcnn.pt"
    with tcnn_probe.record(tcnn, output.store) as recorder:
        for result in finetune(tcnn, *loaders, checkpoint=path, name="3/3 the T-CNN", **settings):
            recorder.mark(if_marked="skip", control_top1=control[result.epoch].top1, **asdict(result))
        dataset = recorder.dataset.load()

    draw(dataset, training).savefig(output.figure, dpi=200)
    print(head_table(dataset))
    print(accuracy_report(dataset))
    print(f"wrote {output.store} and {output.figure}")
    return check(dataset, cnn.num_classes)


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, Loaders]:
    """The CNN, and training and validation batches for it."""
    file = args.pretrained if isinstance(args.pretrained, str) else None
    weights = {"pretrained": bool(args.pretrained), "pretrained_cfg_overlay": {"file": file} if file else None}
    if args.data == "digits":
        loaders = digits_loaders(
            size=args.img_size, batch_size=args.batch_size, seed=args.seed, limit=args.limit, clutter=args.clutter
        )
        if args.model is None:
            torch.set_num_threads(1)  # more bring it little, and cost it tenfold where the machine is shared
            return small_resnet(), loaders
        return timm.create_model(args.model, in_chans=1, num_classes=10, **weights), loaders
    keep_classes = {} if args.num_classes is None else {"num_classes": args.num_classes}
    cnn = timm.create_model(args.model, **weights, **keep_classes)
    return cnn, image_loaders(cnn, args.data, size=args.img_size, batch_size=args.batch_size, workers=args.workers)


def draw(dataset: xr.Dataset, training: Run) -> Figure:
    """Fig. 4 of the paper, with a panel for the entropies."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplot_mosaic("AB;CD", sharex=False)
    colors = mpl.colormaps["viridis"].resampled(len(dataset.layer) + 1)

    a = axes["A"]
    if training:
        before = [r.epoch - training[-1].epoch for r in training]
        a.plot(before, [r.top1 for r in training], color="0.6", label="CNN, training")
    a.plot(dataset.epoch, dataset.control_top1, color="0.25", ls="--", label="CNN, fine-tuned (control)")
    a.plot(dataset.epoch, dataset.top1, color="crimson", lw=2, label="T-CNN, fine-tuned")
    a.axvline(0, color="0.8", lw=1, zorder=0)
    a.text(0, 0.03, " reparameterized", transform=a.get_xaxis_transform(), color="0.4")
    a.set(ylabel="validation accuracy", title="accuracy", xlabel="epoch after reparameterization")
    a.legend(frameon=False)

    heads_and_mean(axes["B"], dataset.attention_span, colors)
    axes["B"].set(ylabel=r"attention span $1/\alpha$ (pixel$^2$)", title="size of the receptive field")
    heads_and_mean(axes["C"], dataset.gate, colors)
    axes["C"].set(ylabel=r"gate $\sigma(\lambda)$", title="attention paid to position", ylim=(0, 1))
    heads_and_mean(axes["D"], dataset.content_entropy, colors)
    heads_and_mean(axes["D"], dataset.positional_entropy, colors, ls="--")
    axes["D"].set(ylabel="entropy (nat)", title="entropy: content (solid) and position (dashed)", ylim=(0, None))
    for panel in "BCD":
        axes[panel].set_xlabel("epoch after reparameterization")
    handles = [mpl.lines.Line2D([], [], color=colors(i), lw=2.5) for i in range(len(dataset.layer))]
    figure.legend(handles, dataset.layer.values.tolist(), loc="outside lower center", ncols=4, frameon=False)
    for name, panel in axes.items():
        panel.set_title(name, loc="left", fontweight="bold")
    return figure


def heads_and_mean(axes: mpl.axes.Axes, values: xr.DataArray, colors: mpl.colors.Colormap, ls: str = "-") -> None:
    """One thin line a head, one thick line a layer."""
    for i, layer in enumerate(values.layer.values):
        heads = values.sel(layer=layer)
        axes.plot(values.epoch, heads.values, color=colors(i), lw=0.6, alpha=0.5, ls=ls)
        axes.plot(values.epoch, heads.mean("head"), color=colors(i), lw=2.5, ls=ls)


def head_table(dataset: xr.Dataset) -> str:
    """Every head's gate at the end, by layer."""
    last = dataset.isel(epoch=-1)
    width = max(len(str(name)) for name in last.layer.values)
    heads = " ".join(f"{h:>4}" for h in last["head"].values)
    lines = [f"\ngate of each head after epoch {int(last.epoch)} (1 convolves, 0 attends to content)"]
    lines.append(f"{'layer':<{width}}  {heads}   mean  span  H(content)  H(position)")
    for layer in last.layer.values:
        row = last.sel(layer=layer)
        gates = " ".join(f"{g:4.2f}" if g == g else "    " for g in row.gate.values)
        means = [float(row[v].mean()) for v in ("gate", "attention_span", "content_entropy", "positional_entropy")]
        lines.append(f"{layer:<{width}}  {gates}   {means[0]:4.2f} {means[1]:5.2f}  {means[2]:10.2f}  {means[3]:11.2f}")
    return "\n".join(lines)


def accuracy_report(dataset: xr.Dataset) -> str:
    """Which of the two ended ahead, and by how much against the noise of the validation set."""
    start, last = dataset.isel(epoch=0), dataset.isel(epoch=-1)
    tcnn, control = float(last.top1), float(last.control_top1)
    ahead = "equal" if tcnn == control else "T-CNN ahead" if tcnn > control else "CNN ahead"
    n = float(last.images.isel(layer=0))
    error = ((tcnn * (1 - tcnn) + control * (1 - control)) / n) ** 0.5
    return (
        f"\nvalidation accuracy: CNN {float(start.control_top1):.3f}; reparameterized {float(start.top1):.3f}; "
        f"after fine-tuning T-CNN {tcnn:.3f}, CNN {control:.3f} "
        f"({ahead}: {tcnn - control:+.3f}, standard error about {error:.3f} on {n:.0f} images, one seed)"
    )


def check(dataset: xr.Dataset, classes: int) -> int:
    """Whether the gates of the layers, which start equal, moved apart, in a model that learned something."""
    means = dataset.gate.mean("head")
    first, last = float((means.isel(epoch=0)).max() - means.isel(epoch=0).min()), means.isel(epoch=-1)
    spread = float(last.max() - last.min())
    seen = spread > first + 0.1
    verdict = "moved apart" if seen else "did NOT move apart"
    print(f"check: mean gates of the layers {verdict}: from {first:.2f} to {spread:.2f} between the furthest two")
    accuracy = float(dataset.top1.isel(epoch=-1))
    learned = accuracy > 2 / classes
    if not learned:
        print(f"check: the T-CNN did NOT learn: accuracy {accuracy:.3f}, expected more than {2 / classes:.3f}")
    return 0 if seen and learned else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_data(
        parser,
        model="timm name of a CNN (default: a small ResNet built from timm)",
        pretrained="start from timm's weights, or from those in FILE, instead of training the CNN",
        img_size="height and width of the images (default: 64; 224 for --data)",
    )
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--epochs", type=int, help="of fine-tuning (default: 6; 50 for --data)")
    add("--cnn-epochs", type=int, help="of the CNN before, unless --pretrained (default: 15; --epochs for --data)")
    add("--batch-size", type=int, help="images per step (default: 32; 256 for --data; the paper's is 1024)")
    add("--lr", type=float, help="of fine-tuning (default: 1e-3; for --data 1e-4, the paper's)")
    add("--cnn-lr", type=float, default=1e-2, help="of training the CNN (default: 1e-2)")
    add("--gating-lr", type=float, default=0.1, help="of the gates (default: 0.1, the paper's)")
    add("--drop-path", type=float, help="stochastic depth in fine-tuning (default: the model's own)")
    add_machine(training, small="600 digits without clutter, 4 epochs, half a minute")
    add_output(parser)
    args = parser.parse_args(arguments)

    digits = args.data == "digits"
    if args.model is None and (args.pretrained or not digits):
        parser.error("--pretrained and --data need --model, the name of a timm CNN such as resnet50")
    if not digits and (args.small or args.limit):
        parser.error("--small and --limit are for the digits, not for --data")
    defaults = {"img_size": 64, "epochs": 6, "cnn_epochs": 15, "batch_size": 32, "lr": 1e-3, "clutter": 6}
    if args.small:
        defaults |= {"epochs": 4, "cnn_epochs": 4, "batch_size": 16, "limit": 600, "clutter": 0}
    if not digits:
        defaults = {"img_size": 224, "epochs": 50, "batch_size": 256, "lr": 1e-4}
    fill_in(args, defaults)
    if args.cnn_epochs is None:
        args.cnn_epochs = args.epochs
    if min(args.epochs, args.cnn_epochs) < 1:
        parser.error("--epochs and --cnn-epochs must be at least 1")
    args.warmup, args.cnn_warmup = (min(5, max(1, n // 5), n - 1) for n in (args.epochs, args.cnn_epochs))
    return args


if __name__ == "__main__":
    sys.exit(main())
