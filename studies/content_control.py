"""Positive control of content_or_mixing: a task of which a known share of images needs content.

    python studies/content_control.py

About two hours on one CPU core (not measured whole); --small takes seconds and shows only that the
code works.

The verdict of content_or_mixing is "no". A "no" means something only if the same tail, arms, rates
and steps say "yes" where content is needed, so they are asked here how small a need they can see.

The protocol, committed before these runs:

Task. 8 x 8 tokens of 64 channels, as the tail of content_or_mixing takes them. Seven tokens at
random places are not empty: a red cue with a code of 7 bits, and six blue items with codes that
differ from each other and values from 0 to 3. One item has the code of the cue, and the class is
its value. In a share of the scenes, the dose, nothing else tells: to find the item, a query has to
be compared with keys of the same image. In the others the cue shows the class itself, and no token
needs any other. Whoever cannot match codes may count values: the most frequent of six is right in
about 0.46. 45,000 scenes for training, 10,000 for tests. Trainings. As in the first table of
content_or_mixing: 1,400 steps of 64 scenes, the tail of a ResNet-20 (layer3.2, 18 heads, from
random weights), the same rates. Arms A, C and D of content_or_mixing, and its T (a learned kernel
over offsets) and U (uniform content). Gates start at lambda = 1; doses 0, 0.1, 0.3 and 1; seeds 0,
1 and 2. Endpoint. C - D, by the rule of content_or_mixing: "yes" if the difference is positive and
its p-value, adjusted by Holm over the doses, below 0.05, and its interval not below 0.01. The
smallest dose with "yes" is the sensitivity of the assay; a dose of 0 has to be "no". Recorded with
it: content information and its two parts, key content and query-key content. The task needs the
second. (Seen since: it does not, key content would be enough; the page says how. Salient attention
in place of C's was measured after all other runs.) Pilot, seen before this was written: dose 1,
seed 0, from lambda = 1: A 0.47, C 1.00.

Writes into results/:
content_control.png   accuracy and content information by dose
content_control.txt   the table and the verdicts
content_control.zarr  every answer and every recording: xarray.open_datatree
content_control_checkpoints/  a file for each run; a killed command continues with --resume
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from common.content_arms import ARMS, PROTOCOL
from common.content_report import COLORS, MARGIN, difference_by_seed, stacked, tree_of
from common.content_runs import Run, train_and_measure
from common.option_table import small_option
from common.options import Option, from_least, parse_options
from common.output import RunOutput, ended, finish
from common.resnet20 import ResNet20, Tail
from common.stepwise import order_of_images
from common.verdicts import crossed_effect, holm, verdict

VALUES, ITEMS, BITS, GRID, CHANNELS = 4, 6, 7, 8, 64
RED, BLUE = 0, 1
CODE = slice(2, 2 + BITS)
VALUE = slice(2 + BITS, 2 + BITS + VALUES)
"""Channels of a token: the flags of cue and item, the code as -1 and 1, and the value, one-hot."""
START = 1.0
"""Initial lambda of the gates."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    torch.set_num_threads(1)
    output = RunOutput.from_args(args, "content_control", later=("doses", "seeds", "arms"))
    # Arms come first in this order, so that the endpoint is known before the exploratory arms are
    # trained.
    for arm, seed, dose in itertools.product(args.arms, args.seeds, args.doses):
        train(
            Run(arm, START if ARMS[arm].attends else 0.0, seed, 1, "frozen"),
            dose,
            args,
            output,
        )
    trees = {f"{dose:g}": tree_of(folder(output, dose)) for dose in args.doses}
    output.save(xr.DataTree.from_dict({f"/{name}": tree for name, tree in trees.items()}))
    runs = {
        dose: [run.to_dataset() for run in tree["1_frozen"].children.values()]
        for dose, tree in trees.items()
    }
    text, passed = report(runs)
    output.beside(".txt").write_text(text + "\n")
    output.show(draw(runs), text)
    return finish(passed, args)


def train(run: Run, dose: float, args: argparse.Namespace, output: RunOutput) -> None:
    """Train and measure a run, unless its file exists."""
    if run.file(folder(output, dose)).exists():
        return
    folder(output, dose).mkdir(exist_ok=True)
    # All arms and seeds begin from one tail.
    torch.manual_seed(0)
    tail = Tail(ResNet20(CHANNELS // 4, VALUES), 1).eval()
    options = PROTOCOL | {"qk_sum": 3.0, "map_sum": 30.0}
    options |= {"steps": args.steps, "batch_size": args.batch_size, "amp": True}
    # Single heads are not ablated.
    options |= {"head_images": 0}
    scenes = Scenes(args.scenes, args.test_scenes, dose)
    train_and_measure(run, tail, scenes, options, folder(output, dose))
    print(f"done: dose {dose:g}, {run}", flush=True)


def folder(output: RunOutput, dose: float) -> Path:
    """Return the folder of the runs of a dose."""
    return output.checkpoints / f"dose_{dose:g}"


class Scenes:
    """Training and test scenes of a dose, with the attributes that a run takes from ``Features``.

    Args:
        count, test_count: Numbers of scenes for training and for tests.
        dose: Share of the scenes in which the class is found only by matching codes.
    """

    # Tokens stand for features, and have no pixels that could be corrupted.
    corrupted = None

    def __init__(self, count: int, test_count: int, dose: float) -> None:
        self._train, self._labels = scenes(count, dose, seed=0)
        test, labels = scenes(test_count, dose, seed=1)
        self.test = test.half().numpy()
        self.images = SimpleNamespace(test=SimpleNamespace(labels=labels.numpy()))
        held_out, held_out_labels = scenes(min(500, test_count), dose, seed=2)
        self.probed, self.probed_labels = held_out, held_out_labels.numpy()
        # Means and other images' attention are those of scenes that are not evaluated.
        self.reference, _ = scenes(min(500, test_count), dose, seed=3)

    def batches(self, steps: int, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scenes and classes of each step."""
        for rows, _ in order_of_images(len(self._train), steps, batch_size, seed):
            yield self._train[rows], self._labels[rows]


def scenes(count: int, dose: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return scenes (count, 64, 8, 8) and their classes (count,)."""
    rng = torch.Generator().manual_seed(seed)
    every = torch.arange(count)
    codes = torch.rand(count, 2**BITS, generator=rng).argsort(1)[:, :ITEMS]
    bits = ((codes[..., None] >> torch.arange(BITS)) & 1) * 2.0 - 1
    values = torch.randint(VALUES, (count, ITEMS), generator=rng)
    shown = F.one_hot(values, VALUES).float()
    target = torch.randint(ITEMS, (count,), generator=rng)
    needs_content = torch.rand(count, generator=rng) < dose
    cue, items = torch.zeros(count, 1, CHANNELS), torch.zeros(count, ITEMS, CHANNELS)
    cue[..., RED], items[..., BLUE] = 1, 1
    cue[:, 0, CODE], items[..., CODE] = bits[every, target], bits
    items[..., VALUE] = shown
    cue[:, 0, VALUE] = shown[every, target] * ~needs_content[:, None]
    places = torch.rand(count, GRID**2, generator=rng).argsort(1)[:, : ITEMS + 1]
    tokens = torch.zeros(count, GRID**2, CHANNELS)
    tokens[every[:, None], places] = torch.cat([cue, items], 1)
    images = tokens.transpose(1, 2).unflatten(2, (GRID, GRID)).contiguous()
    return images, values[every, target]


def report(runs: dict[str, list[xr.Dataset]]) -> tuple[str, bool]:
    """Return a table of accuracies, content and verdicts by dose,
    and whether the assay can say both "no" and "yes".
    """
    lines = [
        "accuracy on test scenes, mean over seeds; "
        "content information in nat, mean of heads and largest head",
        "dose  arm                                  seeds  accuracy  static  shuffled  salient  "
        "key content   query-key content",
    ]
    effects = {}
    for dose, of_dose in runs.items():
        for arm in ARMS:
            of_arm = [run for run in of_dose if run.attrs["arm"] == arm]
            if not of_arm:
                continue
            row = f"{dose:5s} {arm} {ARMS[arm].title:36s}{len(of_arm):4d}"
            for name in ("clean", "clean_static", "clean_shuffled", "clean_salient"):
                values = [float(run[name].mean()) for run in of_arm if name in run]
                row += f"{np.mean(values):9.4f}" if values else " " * 9
            if ARMS[arm].has_content:
                for name in (
                    "key_content_information",
                    "query_key_content_information",
                ):
                    last = [run[name].isel(mark=-1) for run in of_arm]
                    mean = np.mean([float(values.mean()) for values in last])
                    row += f"    {mean:.2f} ({max(float(v.max()) for v in last):.2f})"
            lines.append(row)
        if (difference := c_minus_d(of_dose)) is not None:
            effects[dose] = crossed_effect(difference)
    adjusted = holm([effect.p_value for effect in effects.values()])
    answers = {}
    lines.append(f"C - D [95 % interval over seeds and scenes]; margin {MARGIN}")
    for (dose, effect), p_value in zip(effects.items(), adjusted, strict=True):
        answers[dose] = verdict(effect, MARGIN, p_value)
        lines.append(f"  dose {dose:5s}{effect}  p (Holm) {p_value:.3f}  {answers[dose]}")
    seen = [float(dose) for dose, answer in answers.items() if answer == "yes"]
    lines.append(f"sensitivity: {f'a dose of {min(seen):g}' if seen else 'no dose is seen'}")
    passed = answers.get("1", "yes") == "yes" and answers.get("0", "no") != "yes"
    lines.append(
        f"check: the assay says no at dose 0 and yes at dose 1: {'yes' if passed else 'NO'}"
    )
    return "\n".join(lines), passed


def c_minus_d(runs: list[xr.Dataset]) -> NDArray[np.floating] | None:
    """Return the difference in being right, (seeds, scenes),
    of the seeds that both arms have; None without any.
    """
    return difference_by_seed(*(stacked(runs, arm, START, "clean") for arm in "CD"))


def draw(runs: dict[str, list[xr.Dataset]]) -> Figure:
    """Draw accuracy of each arm, and the parts of content information of arm C, by dose."""
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    accuracy, content = figure.subplots(1, 2)
    places = np.arange(len(runs))
    for arm in ARMS:
        points = [
            [float(run.clean.mean()) for run in of_dose if run.attrs["arm"] == arm]
            for of_dose in runs.values()
        ]
        if all(points):
            accuracy.plot(
                places,
                [np.mean(p) for p in points],
                color=COLORS[arm],
                label=f"{arm}: {ARMS[arm].title}",
            )
            for place, values in zip(places, points, strict=True):
                accuracy.plot(
                    [place] * len(values),
                    values,
                    "o",
                    color=COLORS[arm],
                    ms=4,
                    mfc="none",
                )
    for name, style in (
        ("key_content_information", "--"),
        ("query_key_content_information", "-"),
    ):
        values = [
            [float(run[name].isel(mark=-1).max()) for run in of_dose if run.attrs["arm"] == "C"]
            for of_dose in runs.values()
        ]
        label = (
            name.removesuffix("_information").replace("query_key", "query-key").replace("_", " ")
        )
        if all(values):
            content.plot(
                places,
                [np.mean(v) for v in values],
                style,
                color=COLORS["C"],
                label=label,
            )
    accuracy.set(ylabel="accuracy, test scenes")
    content.set(ylabel="largest head of C (nat)")
    for panel in (accuracy, content):
        panel.set_xticks(places, list(runs))
        panel.set_xlabel("dose: share of scenes that need content")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7, frameon=False)
    return figure


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option(
            "--doses",
            "shares of scenes that need content",
            share,
            [0.0, 0.1, 0.3, 1.0],
            small=[1.0],
        ),
        Option("--seeds", "seeds of the runs", from_least(0), [0, 1, 2], small=[0]),
        Option(
            "--arms",
            "arms to train (default: all)",
            default=list("ACDTU"),
            small=list("ACD"),
            choices="ACDTU",
        ),
        Option("--steps", "steps of each arm", from_least(4), 1400, small=4),
        Option("--device", "only the CPU", default="cpu", choices=["cpu"]),
        small_option("few scenes and steps, 3 arms, one dose, 10 seconds"),
    ]
    args = parse_options(__doc__, "content_control", arguments, {"runs": options})
    args.scenes, args.test_scenes = (96, 16) if args.small else (45_000, 10_000)
    args.batch_size = 16 if args.small else 64
    return args


def share(text: str) -> float:
    """Parse a share from 0 to 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(ended(main))
