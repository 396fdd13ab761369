"""(h) The cost of recording a whole epoch with ImageNet's proportions:
25.6 training images per validation image.

    python benchmarks/recording_epoch.py       T-ResNet50 at 224; about 5 minutes on one core

Two copies of a model, the second recorded to disk, take turns: a training step with AdamW, and a
validation batch of the same number of images. An epoch has 25.6 training steps for each validation
batch. On the CPU the processor time is measured, so that other load on the machine does not count.
mark() is called once per epoch; its time is printed too.
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
import tcnn_model.models  # noqa: F401  (registers t_resnet50 with timm)
import tcnn_probe

PROPORTION = 1_281_167 / 50_000  # ImageNet's training images for each validation image


class Training:
    """Training and validation of a model on synthetic images.

    Args:
        model: The model, trained in place.
        images: Images of a batch, shape (B, 3, H, W).
        store: Path of the recording; None for no recording.
    """

    def __init__(self, model: nn.Module, images: Tensor, store: Path | None) -> None:
        self._model = model
        self._images = images
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._recorder = None if store is None else tcnn_probe.record(model, store)
        self._clock = time.perf_counter if images.is_cuda else time.process_time

    def step(self) -> float:
        """Train on a batch and return the seconds."""
        labels = torch.zeros(len(self._images), dtype=torch.long, device=self._images.device)
        start = self._clock()
        self._optimizer.zero_grad()
        F.cross_entropy(self._model.train()(self._images), labels).backward()
        self._optimizer.step()
        return self._since(start)

    def validate(self) -> float:
        """Validate on a batch and return the seconds."""
        start = self._clock()
        with torch.no_grad():
            self._model.eval()(self._images)
        return self._since(start)

    def mark(self, epoch: int) -> float:
        """Close an epoch and return the seconds, including the wait for the disk."""
        start = time.perf_counter()
        if self._recorder is not None:
            self._recorder.mark(epoch=epoch)
        return time.perf_counter() - start

    def _since(self, start: float) -> float:
        if self._images.is_cuda:
            torch.cuda.synchronize()
        return self._clock() - start


def compare(arguments: argparse.Namespace, folder: Path) -> tuple[np.ndarray, float]:
    """Measure plain and recorded training.

    Returns:
        Seconds of (step, validation batch) x (plain, recorded) in each round, shape (rounds, 2, 2),
        and the median seconds of a mark.
    """
    torch.manual_seed(0)
    model = timm.create_model(arguments.model).to(arguments.device)
    images = torch.randn(
        arguments.batch, 3, arguments.size, arguments.size, device=arguments.device
    )
    plain = Training(copy.deepcopy(model), images, None)
    recorded = Training(model, images, folder / "run.zarr")
    seconds = np.zeros((arguments.rounds + 1, 2, 2))
    marks = []
    for turn in tqdm(range(arguments.rounds + 1), disable=None, leave=False):
        trainings = [(0, plain), (1, recorded)]
        order = trainings if turn % 2 else trainings[::-1]
        for column, training in order:
            seconds[turn, 0, column] = training.step()
        for column, training in order:
            seconds[turn, 1, column] = training.validate()
        marks.append(recorded.mark(turn))
    return seconds[1:], statistics.median(marks[1:])  # the first turn warms up


def longer(seconds: np.ndarray) -> float:
    """Return the share by which an epoch is longer,
    with 25.6 steps per validation batch, from median ratios.
    """
    times = np.array([PROPORTION, 1]) * np.median(seconds[:, :, 0], axis=0)
    ratios = np.median(seconds[:, :, 1] / seconds[:, :, 0], axis=0)
    return float(times @ ratios / times.sum() - 1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--model", default="t_resnet50")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.set_defaults(rounds=50)
    return parser


def main() -> None:
    """Print the share by which a recorded epoch is longer."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        seconds, mark = compare(arguments, Path(folder))
    random = np.random.default_rng(0)
    # Rounds are resampled, as the four times of a round share the load on the machine.
    resampled = [
        longer(seconds[random.integers(0, len(seconds), len(seconds))]) for _ in range(2000)
    ]
    low, high = np.quantile(resampled, [0.025, 0.975])
    step, validation = np.median(seconds[:, :, 1] / seconds[:, :, 0], axis=0)
    print(
        f"{arguments.model} at {arguments.size}: a recorded epoch takes {longer(seconds):+.2%} "
        f"longer [{low:+.2%}, {high:+.2%}] (95 % interval over {len(seconds)} rounds); a training "
        f"step takes {step:.3f} of its time without a recorder, a validation batch "
        f"{validation:.3f}, a mark {mark * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
