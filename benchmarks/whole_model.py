"""(c) T-ResNet50 against ResNet50 at the same image size, forward and backward.

    python benchmarks/whole_model.py           batch 4 at 224; about 3 minutes on one core

"keep" leaves the last stage's stride, and "unit" (the papers') takes it out: that stage then has
four times the tokens. For comparison there is a ResNet50 whose last stage is un-strided too.
"""

import argparse
import copy
from collections.abc import Callable, Mapping
from functools import partial

import timm
import torch
from torch import nn

import contest
from tcnn_model import reparameterize, unstride


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    torch.manual_seed(0)
    size = (arguments.size, arguments.size)
    cnn = timm.create_model("resnet50")
    x = torch.randn(
        arguments.batch,
        3,
        *size,
        device=arguments.device,
        dtype=getattr(torch, arguments.dtype),
    )

    def step(convert: Callable[[nn.Module], nn.Module]) -> Callable[[], contest.Step]:
        def prepare() -> contest.Step:
            # The model is converted here, so that a child process, which measures memory, converts
            # one model only.
            model = convert(cnn).to(x)

            def train() -> None:
                model(x).square().sum().backward()
                # Gradients that are kept would count as in use before the next step, and not as
                # part of its peak.
                model.zero_grad()

            return train

        return prepare

    ways = {
        "ResNet50": step(copy.deepcopy),
        "T-ResNet50, keep": step(lambda model: reparameterize(model, stride="keep")),
        "ResNet50, last stage un-strided": step(unstride),
        "T-ResNet50, unit": step(reparameterize),
    }
    if arguments.device == "cuda":
        ways["T-ResNet50, unit, kernels"] = step(partial(reparameterize, backend="triton"))
    return {f"{arguments.size} x {arguments.size}": ways}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=4)
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
