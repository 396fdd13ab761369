"""(h) What recording costs in a whole epoch with ImageNet's proportions: 25.6 training images to one to validate on.

    python benchmarks/recording_epoch.py       T-ResNet50 at 224; about 5 minutes on one core

Two copies of a model take turns, one of them recorded to disk: a training step with AdamW, and a validation batch of as
many images. An epoch has 25.6 of the former to one of the latter. On the CPU it is the processor's time that counts, so
that nobody else's load does. mark() comes once an epoch; its time is printed beside.
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

import contest
import tcnn_model  # noqa: F401  (registers t_resnet50 with timm)
import tcnn_probe

PROPORTION = 1_281_167 / 50_000
"""Training images of ImageNet for each one to validate on."""


class Training:
    """A model that is trained and validated, on made images.

    Args:
        model: trained in place.
        images: of a batch, shape (B, 3, H, W).
        store: where to record; None for nowhere.
    """

    def __init__(self, model: nn.Module, images: Tensor, store: Path | None) -> None:
        self._model, self._images = model, images
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._recorder = None if store is None else tcnn_probe.record(model, store)
        self._clock = time.perf_counter if images.is_cuda else time.process_time

    def step(self) -> float:
        """Train on a batch; the seconds that it takes."""
        labels = torch.zeros(len(self._images), dtype=torch.long, device=self._images.device)
        start = self._clock()
        self._optimizer.zero_grad()
        F.cross_entropy(self._model.train()(self._images), labels).backward()
        self._optimizer.step()
        return self._since(start)

    def validate(self) -> float:
        """Validate on a batch; the seconds that it takes."""
        start = self._clock()
        with torch.no_grad():
            self._model.eval()(self._images)
        return self._since(start)

    def mark(self, epoch: int) -> float:
        """Close an epoch; the seconds that it takes, waiting for the disk among them."""
        start = time.perf_counter()
        if self._recorder is not None:
            self._recorder.mark(epoch=epoch)
        return time.perf_counter() - start

    def _since(self, start: float) -> float:
        if self._images.is_cuda:
            torch.cuda.synchronize()
        return self._clock() - start


def compare(arguments: argparse.Namespace, folder: Path) -> tuple[np.ndarray, float]:
    """Seconds of a step and of a validation batch, plain and recorded, (round, 2, 2); and those of a mark."""
    torch.manual_seed(0)
    model = timm.create_model(arguments.model).to(arguments.device)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=arguments.device)
    both = [Training(copy.deepcopy(model), images, None), Training(model, images, folder / "run.zarr")]
    seconds, marks = np.zeros((arguments.rounds + 1, 2, 2)), []
    for number in tqdm(range(arguments.rounds + 1), disable=None, leave=False):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[number, 0, which] = both[which].step()
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[number, 1, which] = both[which].validate()
        marks.append(both[1].mark(number))
    return seconds[1:], statistics.median(marks[1:])  # the first warms up


def longer(seconds: np.ndarray) -> float:
    """By which share an epoch is longer, with 25.6 steps to a validation batch, from the median ratios of a turn."""
    times = np.array([PROPORTION, 1]) * np.median(seconds[:, :, 0], axis=0)
    ratios = np.median(seconds[:, :, 1] / seconds[:, :, 0], axis=0)
    return float(times @ ratios / times.sum() - 1)


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = contest.options(__doc__)
    parser.add_argument("--model", default="t_resnet50")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.set_defaults(rounds=50)
    return parser


def main() -> None:
    """Print by how much a recorded epoch is longer."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        seconds, mark = compare(arguments, Path(folder))
    random = np.random.default_rng(0)
    again = [longer(seconds[random.integers(0, len(seconds), len(seconds))]) for _ in range(2000)]
    low, high = np.quantile(again, [0.025, 0.975])
    step, validation = np.median(seconds[:, :, 1] / seconds[:, :, 0], axis=0)
    print(
        f"{arguments.model} at {arguments.size}: a recorded epoch takes {longer(seconds):+.2%} longer "
        f"[{low:+.2%}, {high:+.2%}] (95 % interval over {len(seconds)} rounds); a training step takes "
        f"{step:.3f} of its time without a recorder, a validation batch {validation:.3f}, a mark {mark * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
