"""Students of a CNN and of a transformer: decisions and heads (DeiT, thesis, Tables 3.3 and 3.4).

    python studies/distillation.py

Takes about 3 minutes on one CPU core.

What one should see (distillation.png): with a CNN as its teacher a transformer is more accurate
than with another transformer, as in the thesis (Table 3.2). Whether it is also more accurate than
by labels alone is printed. The thesis also finds that the CNN's student more often decides as a CNN
does (Table 3.4), and supposes that it "benefits more from the inductive bias of convnets" (Sec.
3.3). The study prints whether it does here, and whether its heads are more convolutional than those
of a transformer's student, with intervals over trainings. studies/pages/distillation.md has the
answers.

How: with each seed a small CNN and a small vision transformer learn handwritten digits of 8 x 8
pixels, as teachers. Vision transformers are trained from the same weights by labels alone, by the
CNN's scores (Eq. 3.2, soft), and with DeiT's distillation token by the decisions of either teacher
(Eq. 3.3, hard; timm's model). The attention of the trained students is recorded on the validation
images. A head is more convolutional if its mean attention depends more on the offset between query
and key alone (translation equivariance, 1 for a convolution), and if it looks at nearer places.

Writes into results/:
distillation.png    A accuracy, B share of images decided differently from each teacher, C
                    translation equivariance and D distance of attention, as a share of that of
                    uniform attention; a point for each seed
distillation.zarr   the same by (arm, seed), and heads by (arm, seed, layer, head): xarray.open_zarr

It ends by checking that all teachers and students learned.
"""

import argparse
import sys
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from timm.models.deit import VisionTransformerDistilled
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tcnn_probe
from common.figures import STYLE, add_letters
from common.models import widened
from common.option_table import LIMIT_OPTION, SEED_OPTION, small_option
from common.options import Option, from_least, parse_options
from common.output import RunOutput, ended, finish
from common.stepwise import SHAPE, accuracy, decisions, digits_learned, fit
from common.verdicts import difference, difference_lines
from tcnn_probe.plot import OKABE_ITO

TEMPERATURE, SOFT_WEIGHT = 3.0, 0.1
"""Thesis, Sec. 3.4: tau = 3, and lambda = 0.1, the weight of the teacher."""
LABELS, SOFT, OF_CNN, OF_VIT = (
    "labels alone",
    "soft, of a CNN",
    "token, of a CNN",
    "token, of a transformer",
)
COLORS = {
    LABELS: "0.5",
    SOFT: OKABE_ITO["sky blue"],
    OF_CNN: OKABE_ITO["blue"],
    OF_VIT: OKABE_ITO["vermillion"],
}
TEACHERS = {LABELS: None, SOFT: "CNN", OF_CNN: "CNN", OF_VIT: "transformer"}
"""Teacher of each kind of student."""
SIZES = {**SHAPE, "depth": 3, "num_heads": 3}


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    torch.set_num_threads(1)
    output = RunOutput.from_args(args, "distillation")

    # Each seed has teachers of its own, so that intervals over seeds cover the whole chain of
    # trainings.
    results = output.by_seed(args, lambda seed: measure_seed(seed, args))
    output.save(results)
    output.show(draw(results), table(results))
    return finish(check(results), args)


def measure_seed(seed: int, args: argparse.Namespace) -> xr.Dataset:
    """Train the two teachers and a student of each kind,
    and return the students' measurements and the accuracies.
    """
    recipe = {"epochs": args.epochs, "seed": seed, "limit": args.limit}
    torch.manual_seed(seed)
    teachers = {"CNN": small_cnn(), "transformer": small_vit()}
    for teacher in teachers.values():
        fit(teacher, **recipe)
    decided = {name: decisions(teacher) for name, teacher in teachers.items()}

    students = []
    for arm, name in TEACHERS.items():
        # All students of a seed begin with the same weights, which none of the teachers had.
        torch.manual_seed(seed + 1000)
        model: nn.Module = small_vit()
        if name is None:
            fit(model, **recipe)
        else:
            if arm != SOFT:
                model = with_distillation_token(model)
            learn_from(teachers[name], model, soft=arm == SOFT, **recipe)
        students.append(measured(model, decided))
    results = xr.concat(students, xr.Variable("arm", np.array(list(TEACHERS), object)))
    results["teacher_top1"] = "teacher", [accuracy(d) for d in decided.values()]
    return results.assign_coords(teacher=list(teachers)).expand_dims(seed=[seed])


def small_cnn() -> nn.Module:
    """Return a ResNet of one block in each stage, for 8 x 8 pixels."""
    shape = {"channels": (16, 24, 32, 32), "stem_type": "deep", "stem_width": 8}
    model = ResNet(BasicBlock, (1, 1, 1, 1), in_chans=1, num_classes=10, **shape)
    # The stem halves the resolution already.
    model.maxpool = nn.Identity()
    return model


def small_vit() -> VisionTransformer:
    """Return a vision transformer of three blocks of three heads, on 4 x 4 patches."""
    return widened(VisionTransformer(**SIZES))


@torch.no_grad()
def with_distillation_token(model: VisionTransformer) -> VisionTransformerDistilled:
    """Return the transformer with a second token and its classifier,
    and otherwise the same weights.
    """
    distilled = VisionTransformerDistilled(**SIZES)
    weights = model.state_dict()
    places = weights.pop("pos_embed")
    distilled.load_state_dict(weights, strict=False)
    distilled.head_dist.load_state_dict(model.head.state_dict())
    distilled.pos_embed.copy_(torch.cat([places[:, :1], places], 1))
    return distilled


def measured(model: nn.Module, decided: dict[str, Tensor]) -> xr.Dataset:
    """Return a student's accuracy, its disagreement with each teacher, and its heads.

    Args:
        model: Student, trained.
        decided: Decisions of each teacher, (N,).
    """
    with tcnn_probe.record(model) as recorder:
        answers = decisions(model)
        recorder.mark(epoch=0)
    heads = recorder.dataset.isel(epoch=0, drop=True).load()
    disagreements = [
        float((answers != of_teacher).float().mean()) for of_teacher in decided.values()
    ]
    return xr.Dataset(
        {
            "top1": accuracy(answers),
            "disagreement": ("teacher", disagreements),
            "equivariance": heads.translation_equivariance,
            "distance": heads.attention_distance / heads.uniform_distance,
            "head_type": tcnn_probe.head_types(heads).astype(object),
        }
    ).reset_coords(drop=True)


def learn_from(teacher: nn.Module, model: nn.Module, *, soft: bool, **recipe: Any) -> None:
    """Train a student in place, by labels and by a teacher's scores (soft) or decisions;
    ``recipe`` are arguments of :func:`fit`.
    """
    if isinstance(model, VisionTransformerDistilled):
        # In this mode the model returns the scores of both tokens.
        model.set_distilled_training(True)

    def loss(student: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            taught = teacher(images)
        return loss_of(student(images), labels, taught, soft=soft)

    fit(model, loss_of=loss, **recipe)


def loss_of(
    scores: Tensor | tuple[Tensor, Tensor],
    labels: Tensor,
    taught: Tensor,
    *,
    soft: bool,
) -> Tensor:
    """Return the loss of a student.

    Args:
        scores: Scores of the student, (B, K); those of the class token and of the distillation
            token, if it has one.
        labels: Classes, (B,).
        taught: Scores of the teacher, (B, K).
        soft: Whether the student learns the teacher's scores (Eq. 3.2), and not its decisions (Eq.
            3.3).
    """
    if isinstance(scores, tuple):
        of_class, of_token = scores
        by_teacher = F.cross_entropy(of_token, taught.argmax(1))
        return (F.cross_entropy(of_class, labels) + by_teacher) / 2
    by_labels = F.cross_entropy(scores, labels)
    student, teacher = ((part / TEMPERATURE).log_softmax(1) for part in (scores, taught))
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    # lerp is (1 - lambda) of the first and lambda of the second.
    return torch.lerp(by_labels, TEMPERATURE**2 * divergence, SOFT_WEIGHT)


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset) -> Figure:
    """Draw four measures by arm, a point for each seed."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).ravel()
    heads = ["layer", "head"]
    draw_points(panels[0], results.top1, "accuracy", "o")
    for teacher, marker in (("CNN", "o"), ("transformer", "x")):
        draw_points(panels[1], results.disagreement.sel(teacher=teacher), "", marker)
    panels[1].set_xlabel("share decided differently from the CNN (o), the transformer (x)")
    draw_points(
        panels[2],
        results.equivariance.mean(heads),
        "translation equivariance of attention",
        "o",
    )
    draw_points(
        panels[3],
        results.distance.mean(heads),
        "distance, as a share of uniform attention's",
        "o",
    )
    panels[0].set_yticks(range(results.sizes["arm"]), results.arm.values)
    panels[0].invert_yaxis()
    add_letters(panels)
    return figure


def draw_points(panel: Axes, values: xr.DataArray, words: str, marker: str) -> None:
    """Draw a row for each arm."""
    for row, arm in enumerate(values.arm.values):
        of_arm = values.sel(arm=arm).values
        panel.plot(
            of_arm,
            np.full(of_arm.size, row),
            marker,
            color=COLORS[arm],
            ms=5,
            alpha=0.8,
        )
    panel.set_xlabel(words)


def differences(results: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the differences that the thesis expects to be above zero, by seed."""
    heads = ["layer", "head"]
    top1, from_cnn = results.top1, results.disagreement.sel(teacher="CNN")
    equivariance, nearness = (
        results.equivariance.mean(heads),
        -results.distance.mean(heads),
    )
    return {
        "decides as the CNN, token less labels alone": difference(from_cnn, LABELS, OF_CNN),
        "decides as the CNN, soft less labels alone": difference(from_cnn, LABELS, SOFT),
        "equivariance, of a CNN less of a transformer": difference(equivariance, OF_CNN, OF_VIT),
        "equivariance, token of a CNN less labels alone": difference(equivariance, OF_CNN, LABELS),
        "equivariance, soft less labels alone": difference(equivariance, SOFT, LABELS),
        "nearness, of a CNN less of a transformer": difference(nearness, OF_CNN, OF_VIT),
        "nearness, token of a CNN less labels alone": difference(nearness, OF_CNN, LABELS),
        "accuracy, token of a CNN less labels alone": difference(top1, OF_CNN, LABELS),
        "accuracy, of a CNN less of a transformer": difference(top1, OF_CNN, OF_VIT),
    }


def table(results: xr.Dataset) -> str:
    """Return means of each arm, and each difference
    with its interval over trainings and a verdict.
    """
    teachers = ", ".join(
        f"{name} {float(results.teacher_top1.sel(teacher=name).mean()):.3f}"
        for name in results.teacher.values
    )
    lines = [f"\naccuracy of the teachers: {teachers}"]
    lines.append(
        f"{'':26}accuracy  other than CNN  than transformer  equivariance  distance  convolutional "
        "heads"
    )
    for arm in results.arm.values:
        of_arm = results.sel(arm=arm)
        disagreements = of_arm.disagreement.mean("seed")
        lines.append(
            f"{arm:26}{float(of_arm.top1.mean()):8.3f}"
            f"{float(disagreements.sel(teacher='CNN')):16.3f}"
            f"{float(disagreements.sel(teacher='transformer')):18.3f}"
            f"{float(of_arm.equivariance.mean()):14.3f}"
            f"{float(of_arm.distance.mean()):10.3f}"
            f"{int((of_arm.head_type == 'convolutional').sum()):12d} of "
            f"{of_arm.head_type.size}"
        )
    return "\n".join([*lines, *difference_lines(differences(results))])


def check(results: xr.Dataset) -> bool:
    """Return whether all teachers and students learned; the other questions may have any answer."""
    worst = [
        (str(name), float(of_name.min()))
        for values, dim in ((results.top1, "arm"), (results.teacher_top1, "teacher"))
        for name, of_name in values.groupby(dim)
    ]
    has_learned = digits_learned(worst)
    lowest = min(top1 for _, top1 in worst)
    print(f"check: the least accurate of all networks has {lowest:.3f}")
    return has_learned


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--epochs", "epochs of each network", from_least(1), 10, small=1),
        Option("--seeds", "students of each kind, from --seed on", from_least(1), 5, small=1),
        LIMIT_OPTION,
        SEED_OPTION,
        small_option("1 seed, 1 epoch, few digits"),
    ]
    return parse_options(__doc__, "distillation", arguments, {"training": options})


if __name__ == "__main__":
    sys.exit(ended(main))
