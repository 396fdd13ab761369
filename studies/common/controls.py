"""Controls for a T-CNN: CNNs without its attention,
and a T-CNN with another start, fine-tuned for as long.
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import nn

from common.options import Option
from common.training import Study
from tcnn_model import EpochResult, reparameterize, unstride

__all__ = [
    "CNN",
    "CONTROLS",
    "TCNN",
    "TRAINING_TITLES",
    "control_models",
    "control_options",
    "finetune_controls",
    "finetuned_models",
]

CNN, TCNN = "CNN", "T-CNN, fine-tuned"

CONTROLS = {
    "control": "CNN, fine-tuned",
    "unstrided": "CNN at stride 1, fine-tuned",
    "matched": "T-CNN from near the CNN at stride 1, fine-tuned",
}
"""Names of the models of :func:`control_models` in figures and tables."""

TRAINING_TITLES = {
    "control": "the CNN, trained further (control)",
    "unstrided": "the CNN at stride 1, trained further (control)",
    "matched": "the T-CNN from near the CNN at stride 1 (control)",
}
"""Titles of the controls' progress bars."""

# At 20 and 20 the T-CNN would equal the CNN exactly, and stay a convolution: sigma(20) is 1 in
# float32, so that gates, queries and keys would have no gradient.
NEAR_START = {"locality_strength": 5.0, "gating": 4.0}
"""Start near the CNN at stride 1 from which attention can learn:
0.97 of position on the kernel tap, gates of 0.98.
"""


def control_options() -> dict[str, list[Option]]:
    """Return the options for a second and a third control."""
    grid = (
        "a second control: the CNN with its last stage at stride 1 like the T-CNN's, without "
        "attention"
    )
    start = "a third control: the T-CNN that starts near the CNN at stride 1, on the same grid"
    return {
        "controls": [
            Option("--unstrided", grid, bool),
            Option("--matched-start", start, bool),
        ]
    }


def control_models(cnn: nn.Module, args: argparse.Namespace) -> dict[str, nn.Module]:
    """Return a copy of the CNN, "control", and the models
    that ``--unstrided`` and ``--matched-start`` ask for.

    The CNN shows the effect of longer training, "unstrided" that of the T-CNN's finer grid, and
    "matched" that of its attention where the grid is the same and the start nearly so.
    """
    # The CNN is copied, since models are trained in place.
    models = {"control": copy.deepcopy(cnn)}
    if args.unstrided:
        models["unstrided"] = unstride(cnn)
    if args.matched_start:
        # The same seed gives the same initial queries and keys as in the T-CNN of the study.
        torch.manual_seed(args.seed)
        models["matched"] = reparameterize(cnn, **NEAR_START)
    return models


def finetune_controls(
    study: Study,
) -> tuple[dict[str, nn.Module], dict[str, list[EpochResult]]]:
    """Fine-tune the controls of a study, and return them and their results, by name."""
    models = control_models(study.model, study.args)
    results = {
        name: study.finetune(model, name, TRAINING_TITLES[name]) for name, model in models.items()
    }
    return models, results


def finetuned_models(study: Study, store: Path) -> dict[str, nn.Module]:
    """Train the CNN of a study, fine-tune its controls and its T-CNN for as long, with every head
    recorded, and return all by their names in figures.

    Args:
        study: Study.
        store: Store of the recording.
    """
    study.train_cnn()
    controls, _ = finetune_controls(study)
    tcnn, _ = study.record_tcnn(store)
    named = {CONTROLS[name]: model for name, model in controls.items()}
    return {CNN: study.model, **named, TCNN: tcnn}
