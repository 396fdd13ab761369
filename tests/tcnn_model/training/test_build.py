"""Models and trainings built from the settings of a run."""

import copy
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from tcnn_model import gpsa_layers
from tcnn_model.training.build import build_model, build_training, convert
from tcnn_model.training.config import Config
from tcnn_model.training.data import create_transforms
from tcnn_model.training.distributed import Processes
from tcnn_model.training.loop import Training
from tcnn_model.training.optimization import create_optimizer, create_schedules
from tcnn_model.training.task import create_criterion, create_task
from tests.tcnn_model.tiny_models import Logits, tiny_cnn, tiny_tcnn
from tests.tcnn_model.training.runs import config

ALONE = Processes(0, 1, torch.device("cpu"))


def _training(settings: Config, steps: int = 3) -> Training:
    return build_training(settings, build_model(settings, 10)[0], steps, ALONE)


def _batch(count: int, size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, size, size), torch.arange(count) % 10


def test_gates_have_their_own_schedule() -> None:
    """The schedule is a linear warm-up and a cosine;
    that of the gates has its own warm-up, and ends at a floor.
    """
    optimizer = create_optimizer(tiny_tcnn(), "adamw", lr=4e-3, gating_lr=0.2, weight_decay=0.1)
    gate_settings = {
        "warmup_epochs": 1,
        "gating_warmup_epochs": 3,
        "gating_min_lr": 0.05,
    }
    schedules = create_schedules(optimizer, epochs=5, steps=7, **gate_settings)
    for step in range(35):
        for schedule in schedules:
            schedule.step_update(step)
        for group in optimizer.param_groups:
            gates = group["name"] == "gates"
            peak, warmup, floor = (0.2, 21, 0.05) if gates else (4e-3, 7, 0.0)
            share = (1 + math.cos(math.pi * step / 35)) / 2
            expected = floor + (peak - floor) * share
            if step < warmup:
                expected = peak * step / warmup
            assert group["lr"] == pytest.approx(expected)
    # Without their own warm-up or floor, the rate of the gates stays proportional to the other
    # rates.
    joint_schedules = create_schedules(optimizer, epochs=5, steps=7, warmup_epochs=2)
    for schedule in joint_schedules:
        schedule.step_update(34)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["gates"] / rates["decayed"] == pytest.approx(0.2 / 4e-3)


def test_accumulated_batches_equal_one_batch(tmp_path: Path) -> None:
    # The model is a transformer, because batch norms would use the statistics of each part.
    settings = config(
        tmp_path,
        "deit_tiny_patch16_224",
        model_options={"embed_dim": 24, "depth": 1, "num_heads": 3},
    )
    images, labels = _batch(6)
    trainings = [_training(settings) for _ in range(2)]
    for training, parts in zip(trainings, (1, 3), strict=True):
        training.train_mode()
        pieces = tuple(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        # Update 0, the first of the warm-up, has a rate of 0.
        training.make_step(pieces, update=2)
        assert float(training.total[2]) == 6
    for actual, expected in zip(
        *(training.model.parameters() for training in trainings), strict=True
    ):
        # The sum over three parts has another order than that of one batch, in float32.
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_clipped_gradient_has_the_given_norm(tmp_path: Path) -> None:
    # The limit is far below the norm of any gradient of a new model.
    training = _training(config(tmp_path, clip_grad=1e-3))
    training.make_step((_batch(4),), update=2)
    norm = torch.stack(
        [p.grad.double().square().sum() for p in training.model.parameters() if p.grad is not None]
    )
    # torch divides by the norm plus 1e-6.
    assert float(norm.sum().sqrt()) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.study(but=["bfloat16", "channels_last"])
@pytest.mark.parametrize(
    ("ways", "eps"),
    [
        ({"grad_checkpointing": True}, torch.finfo(torch.float32).eps),
        ({"compile": True}, torch.finfo(torch.float32).eps),
        ({"channels_last": True}, torch.finfo(torch.float32).eps),
        ({"amp": "bfloat16"}, torch.finfo(torch.bfloat16).eps),
        ({"amp": "float16"}, torch.finfo(torch.float16).eps),
    ],
    ids=["grad_checkpointing", "compile", "channels_last", "bfloat16", "float16"],
)
def test_equivalent_ways_to_compute_the_gradient(
    ways: dict[str, Any], eps: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compile uses a backend that runs the captured graph eagerly;
    float16 uses a gradient scaler, even on the CPU.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tiny = {
        "model_options": {"embed_dim": 24, "depth": 2, "num_heads": 3},
        # This limit is never reached, but with it float16 must undo its scaling before the norm is
        # computed.
        "clip_grad": 1e9,
    }
    batch = _batch(4)
    gradients = []
    for further in ({}, ways):
        training = _training(config(tmp_path, "deit_tiny_patch16_224", **tiny, **further))
        training.train_mode()
        training.make_step((batch,), update=2)
        gradients.append(
            torch.cat([p.grad.flatten() for p in training.model.parameters() if p.grad is not None])
        )
        assert set(training.model.state_dict()) == {
            name for name, _ in training.model.named_parameters()
        }
    plain, changed = gradients
    # The ways differ only in the number of roundings and in their order.
    assert float((changed - plain).norm() / plain.norm()) < 8 * eps


def test_batch_norms_are_synchronized_on_gpus_only(tmp_path: Path) -> None:
    settings = config(tmp_path, sync_bn=True)
    with pytest.raises(ValueError, match=r"sync_bn: .* between GPUs only, got the CPU"):
        build_training(
            settings, build_model(settings, 10)[0], 3, Processes(0, 2, torch.device("cpu"))
        )


def test_frozen_parameters_and_statistics_stay(tmp_path: Path) -> None:
    """The running statistics of frozen batch norms stay as well."""
    training = _training(
        # A part, a layer and a pattern are frozen; some biases remain trainable.
        config(tmp_path, freeze=["layer1", "bn1", "*.weight"], lr=1e-2)
    )
    before = copy.deepcopy(training.model.state_dict())
    training.train_mode()
    training.make_step((_batch(4),), update=2)
    changed = {
        name
        for name, value in training.model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed
    assert not [n for n in changed if n.startswith(("layer1", "bn1")) or n.endswith(".weight")]


def test_moving_average_of_the_weights(tmp_path: Path) -> None:
    training = _training(config(tmp_path, ema=0.75, lr=0.1))
    before = training.model.get_parameter("fc.weight").detach().clone()
    training.make_step((_batch(4),), update=2)
    assert training.ema is not None
    expected = 0.75 * before + 0.25 * training.model.get_parameter("fc.weight").detach()
    torch.testing.assert_close(training.ema.module.get_parameter("fc.weight").detach(), expected)


@pytest.mark.parametrize("keep", [True, False])
def test_conversion_keeps_the_optimizer_state_of_surviving_weights(
    keep: bool, tmp_path: Path
) -> None:
    # At 32 pixels, the last stage of a ResNet has a single pixel, which is too few to tell stages
    # apart.
    training = _training(
        settings := config(tmp_path, img_size=64, opt="momentum", keep_optimizer=keep, ema=0.5)
    )
    assert not training.optimizer.param_groups[0].get("nesterov")
    training.make_step((_batch(4, 64),), update=2)
    momenta = {
        name: training.optimizer.state[parameter]["momentum_buffer"].clone()
        for name, parameter in training.model.named_parameters()
    }
    assert convert(training, settings, 3, ALONE)
    # A resumed run converts again, which must change nothing.
    assert not convert(training, settings, 3, ALONE)
    assert len(gpsa_layers(training.model)) == 2
    names = dict(training.model.named_parameters())
    survivors = [name for name in names if name in momenta]
    assert set(momenta) == set(survivors)
    for name in survivors:
        state = training.optimizer.state.get(names[name], {})
        assert torch.equal(state["momentum_buffer"], momenta[name]) if keep else not state
    assert {group["name"] for group in training.optimizer.param_groups} == {
        "gates",
        "decayed",
        "undecayed",
    }
    assert training.ema is not None
    for name in names.keys() - momenta.keys():
        assert torch.equal(training.ema.module.get_parameter(name), names[name])


def test_learning_rates_scale_with_the_images_of_a_step() -> None:
    settings = Config(
        "resnet18",
        lr=1e-4,
        qk_lr=1e-2,
        gating_lr=0.1,
        paper_batch=1024,
        batch_size=64,
        accumulate=2,
    )
    # 64 x 2 x 4 = 512 images in a step are half of the paper's batch.
    scaled = settings.scaled(processes=4)
    assert (scaled.lr, scaled.qk_lr) == pytest.approx((0.5e-4, 0.5e-2))
    assert scaled.gating_lr == 0.1
    assert Config("resnet18", batch_size=64).scaled(4).lr == 1e-4


def test_simple_random_crop_shifts_by_at_most_four_pixels() -> None:
    """Each pixel holds its own position, so the output shows the shift and the reflected border."""
    places = np.stack(
        [
            np.arange(32)[:, None].repeat(32, 1),
            np.arange(32)[None].repeat(32, 0),
            np.zeros((32, 32)),
        ],
        2,
    )
    data = resolve_model_data_config(tiny_cnn()) | {
        "input_size": (3, 32, 32),
        "mean": (0,) * 3,
        "std": (1,) * 3,
    }
    settings = Config("resnet18", crop="simple", hflip=0.0)
    train, _ = create_transforms(settings, data)
    torch.manual_seed(0)
    shifts = set()
    # With this seed, sixty draws reach all nine shifts.
    for _ in range(30):
        rows, columns = (
            # The red and green values of a pixel are its row and column.
            (train(Image.fromarray(places.astype(np.uint8)))[:2] * 255).round().long()
        )
        y = int(rows[16, 0]) - 16
        x = int(columns[0, 16]) - 16
        # Reflection is about the last pixel, 31, which is not repeated.
        mirrored = torch.as_tensor([min(abs(n), 62 - abs(n)) for n in range(x, x + 32)])
        assert torch.equal(columns[0], mirrored)
        shifts |= {y, x}
    assert shifts == set(range(-4, 5))


class _Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        return F.one_hot(torch.full((len(images),), 2), 5).float() * self.scale


def test_teacher_with_other_classes_is_refused(tmp_path: Path) -> None:
    """timm would draw its classifier anew, and the student would learn from random decisions."""
    pytest.importorskip("timm.task")
    teacher = timm.create_model("resnet10t", num_classes=21)
    weights = {"state_dict": teacher.state_dict()}
    torch.save(weights, tmp_path / "best.pt")
    # timm finds this description where the teacher's own weights are.
    description = {"architecture": "resnet10t", "num_classes": 21}
    (tmp_path / "config.json").write_text(json.dumps(description))
    save_file(teacher.state_dict(), tmp_path / "model.safetensors")
    for settings in (
        {"teacher": "resnet10t", "teacher_weights": str(tmp_path / "best.pt")},
        {"teacher": f"local-dir:{tmp_path}"},
    ):
        stage = config(tmp_path / "run", **settings)
        with pytest.raises(
            ValueError,
            match="teacher: expected the 10 classes of the model, got 21 of",
        ):
            build_training(stage, build_model(stage, 10)[0], 3, ALONE)
        # The same teacher is accepted by a student with its classes.
        build_training(stage, build_model(stage, 21)[0], 3, ALONE)


def test_transformer_teaches_at_the_students_image_size(tmp_path: Path) -> None:
    pytest.importorskip("timm.task")
    weights = tmp_path / "best.pt"
    torch.save(timm.create_model("deit_tiny_patch16_224").state_dict(), weights)
    settings = config(
        tmp_path / "run",
        img_size=96,
        teacher="deit_tiny_patch16_224",
        teacher_weights=str(weights),
    )
    model, _ = build_model(settings, 1000)
    training = build_training(settings, model, 3, ALONE)
    images = torch.randn(2, 3, 96, 96)  # the teacher was made for 224 pixels a side
    loss = training.task(images, torch.tensor([3, 5]))["loss"]
    assert loss.isfinite()


@pytest.mark.parametrize("distillation", ["hard", "soft"])
@pytest.mark.parametrize("returns_object", [False, True])
def test_distillation_by_hand(returns_object: bool, distillation: str) -> None:
    """The loss combines those of labels and teacher;
    the teacher sees images with its own normalisation.
    """
    pytest.importorskip("timm.task")
    teacher = _Teacher()
    model = timm.create_model("resnet18", layers=[1, 1, 1, 1], channels=[8] * 4, num_classes=5)
    judge = Logits(teacher) if returns_object else teacher
    # The teacher's normalisation differs from the student's.
    judge.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    images = torch.randn(4, 3, 32, 32)
    labels = torch.tensor([0, 1, 2, 3])
    criterion = create_criterion("ce", label_smoothing=0.0, mixed=False)
    task = create_task(model, model.eval(), criterion, teacher=judge, distillation=distillation)
    result = task(images, labels)
    scores = model(images).detach().double()
    logs = scores.log_softmax(1)
    of_labels = -logs[range(4), labels].mean()
    if distillation == "hard":
        expected = (of_labels - logs[:, 2].mean()) / 2
    else:
        # tau = 3, lambda = 0.1; the teacher's logits are 1 for class 2, and 0 for the four others.
        powers = np.exp(np.array([0, 0, 1, 0, 0]) / 3)
        target = torch.from_numpy(powers / powers.sum())
        distances = (target * (target.log() - (scores / 3).log_softmax(1))).sum(1)
        expected = 0.9 * of_labels + 0.1 * 9 * distances.mean()
    # The loss is computed in float32.
    assert float(result["loss"].detach()) == pytest.approx(float(expected), rel=1e-5)
    mean, std = (
        torch.tensor(model.pretrained_cfg[name]).view(1, 3, 1, 1) for name in ("mean", "std")
    )
    torch.testing.assert_close(teacher.seen[0], (images * std + mean - 0.5) / 0.5)
    # The optimizer must not train the weights of the teacher.
    assert not teacher.scale.requires_grad


@pytest.mark.parametrize("mixed", [True, False])
def test_losses_by_hand(mixed: bool) -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    labels = torch.tensor([1, 4, 0])
    shares = torch.full((3, 5), 0.2 / 5, dtype=torch.float64)
    shares += 0.8 * F.one_hot(labels, 5)
    targets: Any = shares if mixed else labels
    cross = create_criterion("ce", label_smoothing=0.2, mixed=mixed)(scores, targets)
    terms = shares * scores.log_softmax(1)
    assert float(cross) == pytest.approx(float(-terms.sum(1).mean()))
    binary = create_criterion("bce", label_smoothing=0.2, mixed=mixed)(scores, targets)
    terms = shares * F.logsigmoid(scores) + (1 - shares) * F.logsigmoid(-scores)
    assert float(binary) == pytest.approx(float(-terms.mean()))
    with pytest.raises(ValueError, match="expected loss 'ce' or 'bce', got 'mse'"):
        create_criterion("mse", label_smoothing=0.0, mixed=mixed)


def test_options_reach_the_model(tmp_path: Path) -> None:
    settings = config(tmp_path, img_size=64, unstride=True, drop_path=0.2, uniform_drop_path=True)
    model: Any = build_model(settings, 10)[0]
    assert model.layer4[0].conv1.stride == (1, 1)
    assert [
        block.drop_path.drop_prob for stage in (model.layer1, model.layer4) for block in stage
    ] == [0.2, 0.2]
    # Weights are drawn from the seed of the run, whatever was drawn before.
    torch.manual_seed(5)
    assert torch.equal(build_model(settings, 10)[0].fc.weight, model.fc.weight)
    with pytest.raises(ValueError, match="vgg11 has no block with a drop_path"):
        build_model(
            SimpleNamespace(
                **{
                    **vars(settings),
                    "model": "vgg11",
                    "model_options": {"mlp_ratio": 0.01},
                    "unstride": False,
                }
            ),
            10,
        )
