"""(m) Attention rollout at high resolution: the class token's row alone, or products of matrices.

    # ViT-S/16 at 512 and 1,024 pixels; about 5 minutes on one core
    python benchmarks/rollout.py

"matrices multiplied" is rollout as it is usually written: the means over heads of all layers, N x
N, one after the other, of which the class token's row is read.
"""

import argparse
from collections.abc import Mapping

import timm
import torch
from torch import Tensor, nn

import contest
from tcnn_probe import attention_stream
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attribution.rollout import rollout


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    result = {}
    for size in arguments.sizes:
        torch.manual_seed(0)
        model = timm.create_model("vit_small_patch16_224", img_size=size).eval()
        model = model.to(arguments.device)
        image = torch.randn(1, 3, size, size, device=arguments.device)
        target = torch.zeros(1, dtype=torch.long, device=arguments.device)
        result[f"{size} x {size}"] = {
            "forward": lambda model=model, x=image: _forward(model, x),
            "tcnn_probe's rollout": lambda model=model, x=image, target=target: (
                lambda: rollout(model, x, target)
            ),
            "matrices multiplied": lambda model=model, x=image: lambda: _multiplied(model, x),
        }
    return result


def _forward(model: nn.Module, x: Tensor) -> contest.Step:
    return torch.inference_mode()(lambda: model(x))


@torch.inference_mode()
def _multiplied(model: nn.Module, x: Tensor) -> Tensor:
    product: list[Tensor] = []

    def follow(attention: Attention) -> None:
        layer = (attention.weights()[0, 0].mean(0) + eye) / 2
        product[:] = [layer @ product[0] if product else layer]

    tokens = 1 + model.patch_embed.num_patches
    eye = torch.eye(tokens, device=x.device)
    with attention_stream(model, follow):
        model(x)
    return product[0][0, 1:]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024])
    parser.set_defaults(rounds=3)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
