"""Write ``families.md``, the table of timm's convnets that can be reparameterized, with the errors.

    python docs/scripts/families.py                        # all, about ten minutes on one core
    python docs/scripts/families.py --families vgg resnet  # some of them; --out names another file

A family is a module of timm. Its smallest member is tested, in full width and with random weights,
norms, layer scales and gains: with ``stride="keep"`` and locality strength and gating at 20 the
T-CNN must have the outputs of the CNN. The table also has members of large families that are built
differently.
"""

import argparse
import collections
import re
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcnn_model import GPSA, gpsa_layers, reparameterize
from tcnn_model.conversion.tracing import InputSize, find_input_size, meta_copy, trace

PIXELS = 96  # size of the image in the comparison, if the model takes it
NO_CONVOLUTION = "no convolution to reparameterize"
FURTHER = (
    "resnext50_32x4d",
    "regnetx_032",
    "regnety_032",
    "efficientnet_b0",
    "tf_efficientnetv2_s",
    "mobilenetv3_large_100",
    "convnext_tiny",
    "resnetv2_50x1_bit",
    "nf_resnet50",
    "resnetaa50",
    "resnetblur50",
    "res2net50_26w_4s",
    "skresnet50",
    "resnest50d",
    "repvgg_b0",
    "mobileone_s1",
    "hrnet_w18",
    "xception41",
    "ghostnet_100",
    "botnet26t_256",
    "coatnet_nano_cc_224",
)
HEADER = """# Convnets of timm

Any of these becomes a [T-CNN](transformed_cnns.md), or says why not:

```python
import timm, torch, tcnn_model

cnn = timm.create_model("regnety_002").eval()
tcnn = tcnn_model.reparameterize(cnn, stride="keep", locality_strength=20, gating=20)
with torch.no_grad():
    expected, output = (model(torch.ones(1, 3, 96, 96)) for model in (cnn, tcnn))
print((output - expected).abs().max() / expected.abs().max())  # the error below
```

Written by `python docs/scripts/families.py` with timm {version}. The table has the smallest member,
in full width, of every module of timm that holds models, and members of large families that are
built differently.

- *layers*: the convolutions that `reparameterize` selects by default, which are those of the last
  stage.
- *heads*: the number of heads of each of these layers.
- *grid*: rows x columns at the last of these layers, for this image, at `stride="keep"` -> at
  `stride="unit"`. "keep only" means that the stride cannot be removed, and is followed by the
  reason.
- *error*: the largest difference between the outputs of T-CNN and CNN, divided by the largest
  output of the CNN. It is measured at `stride="keep", locality_strength=20, gating=20`, in float32,
  with random weights, norms and layer scales.

| family | model | image | layers | heads | grid | error |
|---|---|---|---|---|---|---|"""


class Row(NamedTuple):
    """One line of the table, or the ``reason`` why there is none."""

    family: str
    model: str
    image: str = ""
    layers: str = ""
    heads: str = ""
    grid: str = ""
    error: str = ""
    reason: str = ""


def timm_families() -> list[str]:
    """Return the modules of timm that hold models, without models that other packages register."""
    return [m for m in timm.list_modules() if hasattr(timm.models, m)]


def smallest_member(family: str) -> str:
    """Return the name of the model of a family with the fewest parameters,
    except timm's own test models.
    """

    def parameters(name: str) -> int:
        return sum(
            p.numel() for p in timm.create_model(name, num_classes=10, device="meta").parameters()
        )

    return min(
        (n for n in timm.list_models(module=family) if not n.startswith("test_")),
        key=parameters,
    )


@torch.no_grad()
def randomise(model: nn.Module, images: Tensor) -> nn.Module:
    """Randomise norms, layer scales and gains in place,
    so that no converted layer is hidden behind a zero.

    Running statistics are set, one norm after the other, to those of the activations of random
    images, with a random disturbance. With unrelated statistics, activations would grow so much in
    deep networks that float32 could not reproduce the CNN's own function.
    """
    norms = [m for m in model.modules() if hasattr(m, "running_mean")]
    for module in model.modules():
        norm = module in norms or isinstance(module, nn.GroupNorm | nn.LayerNorm)
        for name, p in module.named_parameters(recurse=False):
            if norm and name == "bias":
                p.normal_(std=0.2)
            elif norm or (name != "bias" and bool((p == p.flatten()[0]).all())):
                p.uniform_(0.5, 1.5)

    def calibrate(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        variance, mean = torch.var_mean(inputs[0].transpose(0, 1).flatten(1), dim=1)
        norm.running_mean.copy_(mean + 0.2 * variance.sqrt() * torch.randn_like(mean))
        norm.running_var.copy_(variance * (0.5 + torch.rand_like(variance)))

    handles = [module.register_forward_pre_hook(calibrate) for module in norms]
    model.eval()(images)
    for handle in handles:
        handle.remove()
    return model


def image_size(model: nn.Module) -> InputSize:
    """Return the size of a small image if the model takes it,
    or else the size that the model is made for.
    """
    meta = meta_copy(model)
    size = find_input_size(meta)
    try:
        return find_input_size(meta, (size[0], PIXELS, PIXELS))
    except ValueError:
        return size


@torch.no_grad()
def same_function_error(cnn: nn.Module, x: Tensor) -> float:
    """Return the largest difference from the CNN's outputs,
    divided by the largest output of the CNN.
    """
    tcnn = reparameterize(cnn, stride="keep", locality_strength=20.0, gating=20.0)
    expected = cnn(x)
    return float((tcnn(x) - expected).abs().max() / expected.abs().max())


def last_grid(tcnn: nn.Module, image: InputSize) -> str:
    """Return the resolution at which the last GPSA layer works."""
    grids = [
        call.outputs for call in trace(meta_copy(tcnn), image) if isinstance(call.module, GPSA)
    ]
    return "{} x {}".format(*grids[-1])


def unit_grid(model: nn.Module, image: InputSize) -> str:
    """Return the resolution of the last GPSA layer at unit stride,
    or the reason why there is none.
    """
    try:
        return last_grid(reparameterize(model), image)
    except ValueError as error:
        return "keep only: " + _brief(str(error))


def describe(family: str, name: str) -> Row:
    """Return the line of a model in the table."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=10)
    try:
        tcnn = reparameterize(meta_copy(model), stride="keep")
    except ValueError as error:
        return Row(family, name, reason=_brief(str(error)))
    image = image_size(model)
    model = randomise(model, torch.randn(4, *image))
    meta = meta_copy(model)
    grid = f"{last_grid(tcnn, image)} -> {unit_grid(meta, image)}"
    layers = gpsa_layers(tcnn)
    kinds = collections.Counter(_kind(layer) for layer in layers.values())
    return Row(
        family,
        name,
        "{} x {}".format(*image[1:]),
        ", ".join(f"{count} of {kind}" for kind, count in kinds.items()),
        ", ".join(map(str, sorted({layer.heads for layer in layers.values()}))),
        grid,
        f"{same_function_error(model, torch.randn(1, *image)):.0e}",
    )


def _kind(layer: GPSA) -> str:
    kernel = "{} x {}".format(*layer.kernel_size)
    depthwise = layer.groups == layer.in_channels
    return kernel + (
        " depthwise" if depthwise else f" in {layer.groups} groups" if layer.groups > 1 else ""
    )


def _brief(message: str) -> str:
    """Shorten an error message to a cell of a table,
    without the exception that it quotes, which can be long.
    """
    message = re.sub(r" \(\w+Error: .*\)", "", message, flags=re.DOTALL).replace(
        "; use stride='keep'", ""
    )
    return message.replace("|", "\\|")


def table(rows: Sequence[Row]) -> str:
    """Return the document."""
    shown = [row for row in rows if NO_CONVOLUTION not in row.reason]
    without = [row for row in rows if NO_CONVOLUTION in row.reason]
    names = ", ".join(f"{row.family} ({row.model})" for row in without)
    lines = [
        HEADER.format(version=timm.__version__),
        *(
            f"| {r.family} | {r.model} | {r.image} | {r.layers} "
            f"| {r.heads} | {r.grid} | {r.error or r.reason} |"
            for r in shown
        ),
        "",
        *textwrap.wrap(
            f'These raise "{NO_CONVOLUTION}": their last stage has no k x k convolution '
            f"outside of attention layers. {names}.",
            width=100,
            break_on_hyphens=False,
        ),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write the table of timm's convnets.")
    parser.add_argument(
        "--families",
        nargs="+",
        help="modules of timm, or names of models; default: all",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "families.md")
    options = parser.parse_args(arguments)
    families = timm_families()
    names = options.families or [*families, *FURTHER]
    if unknown := [name for name in names if name not in families and not timm.is_model(name)]:
        parser.error(f"neither a module of timm nor a model: {', '.join(unknown)}")
    warnings.simplefilter("ignore")  # timm's models warn about their own arguments
    rows = {}
    progress = tqdm(names)
    for name in progress:
        progress.set_postfix_str(name)
        family = next(f for f in families if name == f or name in timm.list_models(module=f))
        model = smallest_member(name) if name in families else name
        rows[family, model] = describe(family, model)
    options.out.write_text(table([rows[key] for key in sorted(rows)]))


if __name__ == "__main__":
    main()
