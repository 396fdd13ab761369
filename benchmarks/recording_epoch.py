"""(h) What recording costs in a whole epoch with ImageNet's proportions: 25.6 training images to one to validate on.

    python benchmarks/recording_epoch.py       T-ResNet50 at 224, 52 + 2 images an epoch; about 15 minutes on one core

Two epochs take turns, one of them recorded to disk: training steps with AdamW, the validation, and mark(). On the CPU
it is the processor's time that counts, so that nobody else's load does; mark() waits for the disk besides.
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path

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


class Epoch:
    """A model that is trained and validated, on made images.

    Args:
        model: trained in place.
        images: to train on, shape (N, 3, H, W); so many to validate on as ImageNet has for as many.
        batch: images of a step.
        store: where to record; None for nowhere.
    """

    def __init__(self, model: nn.Module, images: Tensor, batch: int, store: Path | None) -> None:
        self._model, self._batches = model, images.split(batch)
        self._validation = images[: max(1, round(len(images) / PROPORTION))]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._recorder = None if store is None else tcnn_probe.record(model, store)
        self._number = 0

    def run(self, steps: int | None = None) -> float:
        """Train and validate once; the seconds that it takes. ``steps`` makes it shorter."""
        clock = time.perf_counter if self._validation.is_cuda else time.process_time
        start = clock()
        self._model.train()
        for images in self._batches[:steps]:
            labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
            self._optimizer.zero_grad()
            F.cross_entropy(self._model(images), labels).backward()
            self._optimizer.step()
        with torch.no_grad():
            self._model.eval()(self._validation)
        if self._recorder is not None:
            self._recorder.mark(epoch=self._number)
        if self._validation.is_cuda:
            torch.cuda.synchronize()
        self._number += 1
        return clock() - start


def compare(arguments: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    """Seconds of an epoch, plain and recorded, in each round."""
    torch.manual_seed(0)
    model = timm.create_model(arguments.model).to(arguments.device)
    images = torch.randn(arguments.images, 3, arguments.size, arguments.size, device=arguments.device)
    plain = Epoch(copy.deepcopy(model), images, arguments.batch, None)
    recorded = Epoch(model, images, arguments.batch, folder / "run.zarr")
    for each in (plain, recorded):
        each.run(1)  # warms up
    rounds = []
    for number in tqdm(range(arguments.rounds), disable=None, leave=False):
        seconds = {each: each.run() for each in ((plain, recorded) if number % 2 else (recorded, plain))}
        rounds.append((seconds[plain], seconds[recorded]))
    return rounds


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = contest.options(__doc__)
    parser.add_argument("--model", default="t_resnet50")
    parser.add_argument("--images", type=int, default=52, help="to train on in an epoch")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=224)
    parser.set_defaults(rounds=3)
    return parser


def main() -> None:
    """Print by how much a recorded epoch is longer."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        rounds = compare(arguments, Path(folder))
    more = [100 * (recorded / plain - 1) for plain, recorded in rounds]
    print(
        f"{arguments.model} at {arguments.size}, {arguments.images} training images an epoch: a recorded epoch takes "
        f"{statistics.median(more):+.2f} % longer ({min(more):+.2f} to {max(more):+.2f} % in {len(more)} rounds)"
    )


if __name__ == "__main__":
    main()
