"""Estimates of the hours and memory of the papers' trainings on today's GPUs,
from counted products and bytes.

    python benchmarks/training_budget.py

Nothing is trained, and models are on the meta device, so that it takes about a minute. Hours = 6 x
multiply-adds x images x epochs / (GPUs x peak x utilisation): a multiply-add is 2 FLOPs, and the
backward needs twice the products of the forward. Peaks are those of dense bfloat16 products in the
vendors' data sheets. The utilisation is ASSUMED. Memory = 16 bytes per parameter (weight, gradient
and two moments in float32) + bytes that autograd saves in an image's forward in bfloat16 x images
per GPU.
"""

import argparse

import timm
import torch
from torch import nn

import contest
import tcnn_model.models  # noqa: F401  (registers its models with timm)
from tcnn_model.training.config import recipe_settings
from tcnn_probe import evaluation

IMAGES = {"ImageNet": 1_281_167, "ImageNet-21k": 14_197_122}
PEAK = {"A100": 312e12, "H100": 989e12}
# Recipe, model and data set.
SETTINGS = [
    ("tcnn_finetune", "t_resnetrs50", "ImageNet"),
    ("tcnn_finetune", "t_resnetrs350", "ImageNet"),
    ("patchconvnet", "patchconvnet_s60", "ImageNet"),
    ("patchconvnet", "patchconvnet_b60", "ImageNet"),
    ("patchconvnet_21k", "patchconvnet_b60", "ImageNet-21k"),
    ("deit", "deit_small_patch16_224", "ImageNet"),
    ("cait", "cait_s24_224", "ImageNet"),
    ("deit3", "deit3_base_patch16_224", "ImageNet"),
]


def model_on_paper(name: str) -> nn.Module:
    """Create a timm model on the meta device, where parameters have no values."""
    with torch.device("meta"):
        return timm.create_model(name)


def hours(multiply_adds: float, images: int, epochs: int, peak: float, utilisation: float) -> float:
    """Estimate the hours on a single GPU, with a forward
    and a backward of each image in each epoch.
    """
    return 3 * 2 * multiply_adds * images * epochs / (peak * utilisation) / 3600


def kept_bytes(model: nn.Module, size: int) -> int:
    """Count the bytes that autograd saves in an image's training forward,
    in 16 bits and without the parameters.
    """
    parameters = {parameter.untyped_storage() for parameter in model.parameters()}
    storages = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages.add(tensor.untyped_storage())
        return tensor

    # Batch norms raise on a single image.
    images = torch.randn(2, 3, size, size, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(images)
    return sum(storage.nbytes() for storage in storages - parameters) // 2 // len(images)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.2,
        help="share of the peak that is assumed to be reached",
    )
    arguments = parser.parse_args()
    rows = []
    for recipe, name, data in SETTINGS:
        settings = recipe_settings(recipe, name)
        size, epochs = settings.get("img_size", 224), settings["epochs"]
        model = model_on_paper(name)
        cost = evaluation.cost(model, size, batch_size=1, rounds=1, progress=False).isel(model=0)
        adds, parameters = float(cost.multiply_adds), float(cost.parameters)
        times = [
            hours(adds, IMAGES[data], epochs, peak, arguments.utilisation) for peak in PEAK.values()
        ]
        memory = (
            16 * parameters + kept_bytes(model, size) * settings["paper_batch"] / arguments.gpus
        ) / 2**30
        hours_per_gpu = [f"{time / arguments.gpus:.2g}" for time in times]
        rows.append(
            (
                recipe,
                name,
                str(size),
                str(epochs),
                f"{adds / 1e9:.1f}",
                *hours_per_gpu,
                f"{memory:.0f}",
            )
        )
    columns = [f"hours, {arguments.gpus} x {name}" for name in PEAK]
    contest.print_table(
        (
            "recipe",
            "model",
            "pixels",
            "epochs",
            "10^9 multiply-adds",
            *columns,
            "GiB per GPU",
        ),
        rows,
    )
    print(f"\nESTIMATES, at {arguments.utilisation:.0%} of the peak; nothing was trained")


if __name__ == "__main__":
    main()
