"""Runs of the comparison: training of an arm, its measurements,
and the file of its results, written atomically.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tcnn_probe
from common.content_arms import ARMS, QK_STD, converted, mixed_batches, train_tail
from common.content_data import Features
from common.folder import spread
from common.small_images import atomic_save
from tcnn_model import gpsa_layers

__all__ = ["RECORDED", "Run", "answers", "train_and_measure"]

RECORDED = (
    "gate",
    "content_information",
    "content_part_information",
    "selectivity",
    "key_content_information",
    "query_key_content_information",
    "entropy",
    "content_entropy",
    "positional_entropy",
    "attention_distance",
    "attention_span",
    "center_y",
    "center_x",
)
"""Variables of a recording that are saved."""


@dataclass(frozen=True)
class Run:
    """A training of the comparison.

    Attributes:
        arm: Key of :data:`ARMS`.
        start: Initial lambda of the gates; 0 for arms without a choice of start.
        seed: Seed of queries, keys and the order of images.
        blocks: Number of blocks at the end of the last stage that are converted.
        batch_norm: Statistics of batch norm, "frozen" or "free".
    """

    arm: str
    start: float
    seed: int
    blocks: int
    batch_norm: str

    def file(self, folder: Path) -> Path:
        """Return the path of the run's results."""
        return (
            folder / f"{self.blocks}_{self.batch_norm}_{self.arm}_{self.start:+g}_{self.seed}.npz"
        )


def train_and_measure(
    run: Run,
    tail: nn.Module,
    features: Features,
    options: Mapping[str, Any],
    folder: Path,
) -> None:
    """Train the run and write its results.

    The file tells whether each test image is classified correctly: ``clean`` (N,) and ``corrupted``
    (corruptions, n). Arms with content have the same with static attention, ``clean_static`` and
    ``corrupted_static``, with the attention of another image, ``clean_shuffled``, with that to what
    stands out in the image, ``clean_salient``, and with the positional part alone,
    ``clean_positional``; arms with a static map have ``clean_static`` only.
    Arm C in the first table also has ``heads_static`` (layer, head, m), with static attention in
    one head, for the m images ``heads_rows``. Data without corrupted images have none of their
    variables.

    Recorded variables have shape (mark, layer, head); ``marks`` are the steps, and ``held_out`` is
    the accuracy on held-out images at these. ``rate_sums`` are the sums of the learning rates of
    ``rate_groups``, and ``rate_stds`` the initial standard deviations of their weights.
    """
    arm = ARMS[run.arm]
    steps, batch_size = options["steps"], options["batch_size"]
    model = (
        converted(tail, arm, run.start, features.probed[:1].cpu(), run.seed)
        if arm.attends
        else copy.deepcopy(tail)
    ).to(features.probed.device)
    # Sums of learning rates are reported in units of these, so they are taken before training.
    stds = _initial_stds(model, tail)
    if arm.mixes:
        # CutMix and mixup change the pixels, so that cached features cannot be used.
        images = features.pixel_batches(steps, batch_size, run.seed)
        batches = mixed_batches(images, features.trunk, model.linear.out_features, run.seed)
    else:
        batches = features.batches(steps, batch_size, run.seed)
    # Five marks show the course of training; each costs an evaluation.
    marks = {round(share * steps): share for share in (0, 0.25, 0.5, 0.75, 1)}
    results: dict[str, NDArray[Any]] = {}
    held_out: list[float] = []
    # The CNN has no heads; its accuracy is recorded all the same.
    with tcnn_probe.record(model, probes=None if arm.attends else []) as recorder:

        def after(step: int) -> None:
            if step in marks:
                held_out.append(
                    float((answers(model, features.probed) == features.probed_labels).mean())
                )
                recorder.mark(epoch=step, held_out=held_out[-1])

        training = options | {"frozen_statistics": run.batch_norm == "frozen"}
        # The recorder sees the forward passes of the evaluations in ``after``.
        sums = train_tail(model, batches, arm, training, after)
        dataset = recorder.dataset.load()
    results["marks"], results["held_out"] = np.array(list(marks)), np.array(held_out)
    results["rate_groups"] = np.array(list(sums))
    results["rate_sums"] = np.array(list(sums.values()))
    results["rate_stds"] = np.array([stds[name] for name in sums])
    if arm.attends:
        results |= {name: dataset[name].values for name in RECORDED}
        types = tcnn_probe.head_types(dataset)
        results["head_type"] = types.values.astype(str)
        results["layer"] = dataset.layer.values.astype(str)
    results |= _measured(
        model,
        arm.has_content,
        run,
        features,
        options,
    )
    # The content part of arm D is static by construction, which the study checks at its end.
    if arm.static_map:
        with tcnn_probe.ablate(model, mode="static", images=features.reference):
            results["clean_static"] = _right(model, features.test, features.images.test.labels)
    atomic_save(run.file(folder), **results)


def _measured(
    model: nn.Module,
    has_content: bool,
    run: Run,
    features: Features,
    options: Mapping[str, Any],
) -> dict[str, NDArray[Any]]:
    """Return whether each test image is classified correctly,
    with unchanged and with ablated attention.
    """
    labels = features.images.test.labels
    is_corrupted = features.corrupted is not None
    results = {"clean": _right(model, features.test, labels)}
    if is_corrupted:
        results["corrupted"] = _right_corrupted(model, features)
    if not has_content:
        return results
    with tcnn_probe.ablate(model, mode="static", images=features.reference):
        results["clean_static"] = _right(model, features.test, labels)
        if is_corrupted:
            results["corrupted_static"] = _right_corrupted(model, features)
    # A mean over images is also flatter than any image's attention; another image's is as peaked.
    with tcnn_probe.ablate(model, mode="shuffled", images=features.reference):
        results["clean_shuffled"] = _right(model, features.test, labels)
    # Each image keeps the keys that stand out in it, but not which query they match.
    with tcnn_probe.ablate(model, mode="salient", images=features.reference):
        results["clean_salient"] = _right(model, features.test, labels)
    # The mode sets gates to 1, so that only the positional part of attention remains.
    with tcnn_probe.ablate(model, mode="positional"):
        results["clean_positional"] = _right(model, features.test, labels)
    # Single heads are ablated in the first table only: the 54 of the second would take as long as
    # all its trainings.
    first_table = run.blocks == 1 and run.batch_norm == "frozen"
    if run.arm == "C" and first_table and options["head_images"]:
        rows = np.array(spread(len(labels), options["head_images"]))
        features_of_rows = features.test[rows]
        by_layer = []
        for name, layer in gpsa_layers(model).items():
            by_head = []
            for head in range(layer.heads):
                with tcnn_probe.ablate(
                    model, {name: head}, mode="static", images=features.reference
                ):
                    by_head.append(_right(model, features_of_rows, labels[rows]))
            by_layer.append(np.stack(by_head))
        results["heads_static"], results["heads_rows"] = np.stack(by_layer), rows
    return results


def _initial_stds(model: nn.Module, tail: nn.Module) -> dict[str, float]:
    """Return the standard deviation of each group's weights before training;
    1 for gates, in the unit of lambda.
    """
    # Weight decay is for matrices and filters, not for biases and norms.
    filters = [p.detach().flatten() for p in tail.parameters() if p.ndim > 1]
    vectors = [p.detach().flatten() for p in tail.parameters() if p.ndim == 1]
    return {
        "gates": 1.0,
        "queries and keys": QK_STD,
        "decayed": float(torch.cat(filters).std()),
        "undecayed": float(torch.cat(vectors).std()),
    }


@torch.inference_mode()
def answers(
    model: nn.Module, features: Tensor | NDArray[np.float16], batch_size: int = 125
) -> NDArray[np.int64]:
    """Return the most probable class of each image."""
    model.eval()
    device = next(model.parameters()).device
    classes = []
    for start in range(0, len(features), batch_size):
        part = features[start : start + batch_size]
        given = part if isinstance(part, Tensor) else Features.as_given(part)
        classes.append(model(given.to(device)).argmax(1).cpu().numpy())
    return np.concatenate(classes)


def _right(
    model: nn.Module, features: NDArray[np.float16], labels: NDArray[np.int64]
) -> NDArray[np.bool_]:
    return answers(model, features) == labels


def _right_corrupted(model: nn.Module, features: Features) -> NDArray[np.bool_]:
    """Return whether images are classified correctly under each corruption,
    shape (corruptions, n).
    """
    parts = features.corrupted
    labels = features.images.test.labels[features.images.corrupted_rows]
    # All corruptions are evaluated in one list, so that batches are full even with few images.
    images = parts.reshape(-1, *parts.shape[2:])
    return _right(model, images, np.tile(labels, len(parts))).reshape(parts.shape[:2])
