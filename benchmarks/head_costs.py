"""(l) The processor time of ablations and of costs of heads, relative to a plain forward.

    python benchmarks/head_costs.py      DeiT-S, batch 4 at 224; about 4 minutes on one core

Prints the ratios that docs/ablation.md quotes. Statistics over other images are collected
beforehand and not counted, for ``head_importance`` and ``head_costs`` by the difference between
calls with eight images and with four.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch

import tcnn_probe


def seconds(act: Callable[[], Any], rounds: int) -> float:
    """Return the median processor time of some rounds, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        act()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    size, count = arguments.size, arguments.images
    model: Any = timm.create_model(arguments.model, img_size=size).eval()
    images = torch.randn(2 * count, 3, size, size)
    reference = torch.randn(3, 3, size, size)
    with torch.no_grad():
        plain = seconds(lambda: model(images[:count]), arguments.rounds)
        for mode in ("zero", "uniform", "convolutional", "static", "salient", "local"):
            options: dict[str, Any] = {}
            if mode in ("convolutional", "static", "salient"):
                options["images"] = reference
            if mode == "local":
                options["radius"] = 3
            with tcnn_probe.ablate(model, mode=mode, **options):
                ablated = seconds(lambda: model(images[:count]), arguments.rounds)
            print(f"all heads {mode}: {ablated / plain:.2f} plain forwards")

    def report(name: str, call: Callable[[Any], Any], heads: int = 1) -> None:
        both = [seconds(lambda n=n: call(images[:n]), 1) for n in (count, 2 * count)]
        ratio = (both[1] - both[0]) / plain / heads
        print(f"{name}: {ratio:.2f} plain forwards")

    options = {"reference": reference, "batch_size": count}
    report(
        "head_importance with a loss, five modes",
        lambda x: tcnn_probe.head_importance(model, x, [0] * len(x), **options),
    )
    report(
        "head_importance, eight directions, five modes",
        lambda x: tcnn_probe.head_importance(model, x, **options),
    )
    for layer in ("blocks.0.attn", f"blocks.{len(model.blocks) - 1}.attn"):
        of_layer = {**options, "heads": {layer: [0, 1]}, "modes": ["static", "zero"]}
        report(
            f"head_costs in {layer}, by head and mode",
            lambda x, kept=of_layer: tcnn_probe.head_costs(model, x, **kept),
            heads=4,
        )


if __name__ == "__main__":
    main()
