r"""Content or mixing: whether attention
that replaces convolutions gains from content, or only from mixing.

    python studies/content_or_mixing.py

Takes some minutes on one CPU core with the digits, which only show that the code works. On
photographs, such as CIFAR-10 as folders of images, from a ResNet-20 that was trained on them:

    python studies/content_or_mixing.py --data cifar10 --weights resnet20.safetensors --amp \
        --out results/content

The T-CNN paper leaves a question open (Secs. 4 and 6): whether what content attention adds to a
convolution is content. Content attention does two things at once. It lets the image decide where a
head looks, and it mixes over the whole image, which a learned map that is the same for every image
could do too. Arm D has such a map.

The protocol, committed before any arm was trained:

Images. CIFAR-10 as JPEG files, 32 x 32 pixels, in the original split. 5,000 training images, drawn
at random, are held out of all trainings here; what is recorded comes from 500 of these. (The
published weights have seen them. So accuracies on them are too high, and serve no endpoint.) Test
images serve the endpoints only: all 10,000 clean, and 1,000 of them, spread evenly over the
classes, under each of the 15 corruptions of ImageNet-C at severity 3. Network. The published
ResNet-20, all of its weights first fine-tuned on the 45,000 images to a plateau: 8 epochs of AdamW
at a peak rate of 2e-3, batches of 128, crops and flips. Then its last blocks are converted with
stride="keep", so that grid and stride are the CNN's own. First table: the last block, layer3.2 (18
heads, 64 tokens). Second table: all of layer3 (54 heads). Trainings. What lies before the converted
blocks (the trunk) is frozen; the blocks and the classifier are trained. Features of the trunk are
computed once, for as many random crops and flips of every image as there are epochs, and kept in
half precision; arm F, which mixes pixels, computes them at each step. 1,400 steps of 64 images (two
epochs), AdamW, weight decay 0.05, label smoothing 0.1, 5 % linear warm-up, cosine to 0, bfloat16
autocast in training and float32 in evaluation. The same seed gives all arms the same images, and
views of them, in the same order. Statistics of batch norm are frozen; a second variant has them
free. Budget. One thread of a shared machine. A step of C takes 65 ms of processor time (140 ms in
float32), of D 37 ms, of A 13 ms; with evaluation, the first table of three seeds takes about an
hour of it. 4,000 steps, which were intended, would take three. The sum of the learning rates of
queries and keys does not depend on the number of steps. Arms, each from lambda = 1 and from lambda
= -1 (gates of 0.73 and 0.27), with seeds 0, 1 and 2:
  A  the CNN, trained as long.
  B  the papers' rates: 1e-4, and 0.1 for the gates.
  C  queries and keys at the peak rate for which their learning rates sum to 3, as those of the
     papers' 62,550 steps do (150 times their initial standard deviation); gates frozen for the
     first quarter, then 0.02; all else 1e-3.
  D  as C, but content attention is softmax(L), with a learned map L of N x N logits for each head
     that is the same for every image. It starts even, as content attention does in effect. Its
     rates sum to 30: logits are not products of weights, and with 3 they could not leave [-3, 3].
  E  as C, with all gates at 1: position alone.
  F  as C, with CutMix and mixup, as the papers train.
  T  (added after all runs, exploratory) as D, but L has one number for each offset from query to
     key: 225 for each head where D has 4,096. In all, D has 73,728 logits, T 4,050, and queries and
     keys have 16,128 weights.
  U  (added after all runs, exploratory) as C, with keys at zero: content attention is uniform over
     the image.
Endpoints, for each start: (1) accuracy C - D, clean, and corrupted (mean of the 15); (2) C minus C
with static attention (tcnn_probe.ablate, the mean over 500 training images), clean and corrupted;
and, of single heads of C on 2,000 clean images, this cost against recorded gate, content
information and type; (3) C - A, clean and corrupted. Statistics. Trainings and images are both
samples. The variance of a mean over S seeds and N images is s_seeds^2 / S + s_images^2 / N, of
sample variances of the means by seed and by image; degrees of freedom are Satterthwaite's
(common/verdicts.py). A difference below 0.01 is of no interest. For each of the three
endpoints the four p-values (two starts, clean and corrupted) are adjusted by Holm; so are those of
the four families of corruptions.
  "no"         the 95 % interval lies below 0.01: what is asked for is worth less than that, or
               harms.
  "yes"        the difference is positive, its adjusted p-value below 0.05, and "no" does not hold.
  "undecided"  neither; then the number of seeds is printed with which this mean and these variances
               would decide.
An endpoint is "yes" if any of its four is, "no" if all are, else "undecided". Order of the runs: A,
C and D of seeds 0 to 2; then B, E and F; then A, C and D of seeds 3 and 4; then A, C and D with
free statistics of batch norm; then A, C and D of all of layer3. Nothing is stopped for what it
shows. The verdict is that of the seeds that are complete when a page is written, and says how many
these are. Changed since, before any run of arm C or D of the second table was seen: single heads
are asked of the first table alone, as they took as long as all else that is measured of a run with
54 heads. Changed after all runs: a difference that is "no" by the margin, and also above zero by
its interval and its adjusted p-value, is printed as "yes, by less than 0.01", because "no" reads as
its absence. An endpoint without a plain "yes" or "undecided" is called so if any of its four is.
And queries and keys of arm E, which have no gradient, are not given to the optimizer, so that it
prints no sum of their rates; the function that E computes is the same. Static attention is also
flatter than an image's own, so C is measured with the attention of another image ("shuffled") as
well. The positive control, a task that needs content, is content_control.py. Pilot, seen before
this was written: 400 steps from the published weights themselves on 16,000 images, a seed that is
not among these, judged by 2,500 of the held-out images: A 0.892; D from lambda = -1 with rates that
sum to 3 0.870, to 30 0.878, hence 30; C from lambda = -1 0.850. With 1e-4 for all else A had 0.885,
D 0.864 and C 0.838, hence 1e-3. No test image was looked at. The CNN was fine-tuned while this was
written.

Writes into results/:
content_or_mixing.png   gates and content information by step, accuracy by arm, endpoints with their
                        intervals
content_or_mixing.txt   the tables, and the verdicts
content_or_mixing.zarr  every answer and every recording: xarray.open_datatree
content_or_mixing_checkpoints/  a file for each run; a killed command continues with --resume

It ends by checking what holds by construction: learned maps carry no content, and fixed gates do
not move.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.content_arms import ARMS, PROTOCOL
from common.content_data import Features, Images, load_images
from common.content_report import check, draw, report, tree_of
from common.content_runs import Run, answers, train_and_measure
from common.option_table import small_option
from common.options import Option, from_least, parse_options, positive_number, torch_device
from common.output import InputError, RunOutput, ended, finish, refused
from common.resnet20 import ResNet20, Tail, Trunk, load_weights
from common.small_images import normalized, views
from common.stepwise import LABEL_SMOOTHING, order_of_images, take_steps, warm_up_and_anneal

LATER = ("arms", "starts", "seeds", "blocks", "batch_norm")
"""Options that choose runs without a change to any of them."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    # With one thread a run has the same numbers whatever else the machine does.
    torch.set_num_threads(1)
    output = RunOutput.from_args(args, "content_or_mixing", later=LATER, unsaved=("report",))
    # Each run has a file: a resumed command trains those that are missing, and any number can be
    # tabulated.
    if not args.report:
        train(args, output.checkpoints)
    tree = tree_of(output.checkpoints)
    output.save(tree)
    text = report(tree)
    output.beside(".txt").write_text(text + "\n")
    output.show(draw(tree), text, files=[output.beside(".txt")])
    return finish(check(tree), args)


def train(args: argparse.Namespace, folder: Path) -> None:
    """Train the CNN and then each run, unless their files exist."""
    options = {
        "held_out": args.held_out,
        "corrupted": args.corrupted,
        "limit": args.limit,
        "seed": 0,
    }
    with refused(ValueError):
        images = load_images(args.data, folder / "images", **options)
    cnn = fine_tuned_cnn(args, images, folder / "cnn.pt")
    for blocks in args.blocks:
        # Features take minutes and gigabytes, so they are computed only if runs are missing.
        runs = [run for run in planned(args, blocks) if not run.file(folder).exists()]
        if not runs:
            continue
        # One view of every image for each epoch; a GPU computes features at each step.
        epochs = -(-args.steps * args.batch_size // len(images.train))
        views = epochs if args.device == "cpu" else 0
        cache = folder / f"features_{blocks}"
        sizes = {"reference": args.reference, "probed": args.probed}
        trunk = Trunk(cnn, blocks).to(args.device)
        features = Features(trunk, images, cache, count=views, **sizes)
        for run in runs:
            train_and_measure(
                # Each arm starts from the CNN in eval mode, in which accuracy is measured.
                run,
                Tail(cnn, blocks).eval(),
                features,
                PROTOCOL | vars(args),
                folder,
            )
            print(f"done: {run}", flush=True)


def planned(args: argparse.Namespace, blocks: int) -> list[Run]:
    """Return the runs that are asked for, seed by seed,
    so that arms are compared as early as possible.
    """
    runs = []
    for batch_norm, seed, arm in itertools.product(args.batch_norm, args.seeds, args.arms):
        # An arm without trained gates has no choice of start.
        has_gates = ARMS[arm].attends and not ARMS[arm].gate_at_one
        runs += [
            Run(arm, start, seed, blocks, batch_norm)
            for start in (args.starts if has_gates else [0.0])
        ]
    return runs


def fine_tuned_cnn(args: argparse.Namespace, images: Images, file: Path) -> ResNet20:
    """Fine-tune the whole CNN on the training images, once."""
    classes = int(images.train.labels.max()) + 1
    # All runs continue one CNN, whatever their seeds.
    torch.manual_seed(0)
    model = ResNet20(args.width, classes)
    if not file.exists():
        if args.weights is not None:
            load_weights(model, args.weights)
        curve = fine_tune(model, images, args)
        # A file of this name is complete, even if the run is killed now.
        temporary = file.with_name(f"{file.name}.tmp")
        torch.save({"model": model.cpu().state_dict(), "held_out": curve}, temporary)
        temporary.replace(file)
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return model.eval().requires_grad_(True)


def fine_tune(model: ResNet20, images: Images, args: argparse.Namespace) -> list[float]:
    """Fine-tune the CNN in place, and return the accuracy on held-out images after each epoch."""
    # The values of this recipe are the protocol's.
    batch_size, peak = 2 * args.batch_size, 2e-3
    train, held_out = images.train, images.held_out
    # Convolutions on the CPU are faster in this layout.
    model.to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.05, fused=True)
    per_epoch = max(1, len(train) // batch_size)
    steps = args.cnn_epochs * per_epoch
    batches = (
        (
            normalized(views(train, rows, view)).to(args.device),
            torch.from_numpy(train.labels[rows]).to(args.device),
        )
        for rows, view in order_of_images(len(train), steps, batch_size, seed=0)
    )
    curve: list[float] = []

    def loss_of(pixels: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=args.amp):
            scores = model.train()(pixels)
        # The loss is computed in float32, because that of bfloat16 scores has three digits.
        return F.cross_entropy(scores.float(), labels, label_smoothing=LABEL_SMOOTHING)

    def after(step: int, _: Tensor) -> None:
        if step % per_epoch:
            return
        right = answers(model, normalized(held_out.pixels), 250) == held_out.labels
        curve.append(float(right.mean()))
        print(
            f"CNN, epoch {len(curve)}: {curve[-1]:.4f} of {len(held_out)} held-out images",
            flush=True,
        )

    take_steps(optimizer, batches, loss_of, warm_up_and_anneal(peak, steps), after=after)
    return curve


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and photographs have different defaults."""
    # There are 1,797 digits in all. The small form has the fewest with which every step of the code
    # runs.
    model_and_data = [
        Option(
            "--data",
            "folder with train/ and val/, in each a folder for every class",
            default="digits",
        ),
        Option("--weights", "weights of a ResNet-20 to start from (default: random)"),
        Option("--width", "channels of the first stage", from_least(1), 8, small=4, data=16),
        Option(
            "--limit",
            "number of digits to use (default: all)",
            from_least(40),
            small=80,
            data=None,
            only="digits",
        ),
        Option(
            "--held-out",
            "training images that no training sees",
            from_least(1),
            200,
            small=10,
            data=5000,
        ),
        Option("--corrupted", "test images to corrupt", from_least(2), 100, small=6, data=1000),
    ]
    training = [
        Option("--cnn-epochs", "epochs of the CNN", from_least(1), 20, small=2, data=8),
        Option("--steps", "steps of each arm", from_least(4), 200, small=4, data=1400),
        Option("--batch-size", "images of a step", from_least(2), 64, small=16),
        Option("--qk-sum", "sum of the rates of queries and keys", positive_number, 3.0),
        Option("--map-sum", "sum of the rates of the static map", positive_number, 30.0),
        Option("--amp", "train in bfloat16 autocast", bool),
    ]
    runs = [
        Option(
            "--arms",
            "arms to train (default: all)",
            default=list(ARMS),
            choices=ARMS,
        ),
        Option(
            "--starts",
            "initial lambda of the gates",
            float,
            [1.0, -1.0],
            small=[1.0],
        ),
        Option("--seeds", "seeds of the runs", from_least(0), [0, 1, 2], small=[0, 1]),
        Option(
            "--blocks",
            "last blocks to convert",
            int,
            [1],
            # The last stage has three blocks.
            choices=(1, 2, 3),
        ),
        Option(
            "--batch-norm",
            "statistics of batch norm",
            default=["frozen"],
            choices=("frozen", "free"),
        ),
        Option(
            "--report",
            "train nothing, and tabulate the runs that exist",
            bool,
        ),
        Option("--device", "device of torch; the protocol's is the CPU", torch_device, "cpu"),
        small_option("few digits, a narrow network, few steps, 15 seconds", only="digits"),
    ]
    groups = {"model and data": model_and_data, "training": training, "runs": runs}
    args = parse_options(__doc__, "content_or_mixing", arguments, groups)
    # A missing file is refused now, before images are decoded.
    if args.weights is not None and not Path(args.weights).is_file():
        raise InputError(f"--weights: there is no file {args.weights!r}")
    # Images over which static attention is a mean, and held-out images that are recorded.
    args.reference = args.probed = min(500, args.held_out)
    args.head_images = 20 if args.small else 2000
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
