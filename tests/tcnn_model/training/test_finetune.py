"""One run of the fine-tuning loop: its results, learning rates, epochs and errors."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from tcnn_model import finetune, gpsa_layers, reparameterize
from tcnn_model.training.evaluation import evaluate
from tcnn_model.training.finetune import FinetuningResult
from tcnn_model.training.optimization import papers_qk_lr
from tests.tcnn_model.tiny_models import (
    CLASSES,
    Logits,
    batches,
    disturb,
    tiny_cnn,
    tiny_tcnn,
    validation_batches,
)


def _run(model: nn.Module, **arguments: Any) -> list[FinetuningResult]:
    defaults = {"epochs": 3, "warmup_epochs": 1, "seed": 0, "progress": False}
    return list(finetune(model, batches(), validation_batches(), **{**defaults, **arguments}))


def _log_probabilities(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    logits = model(images).detach().double()
    return logits - logits.exp().sum(1, keepdim=True).log()


def test_epoch_zero_is_the_model_before_training() -> None:
    model = tiny_tcnn()
    before = copy.deepcopy(model.state_dict())
    run = finetune(
        model,
        batches(),
        validation_batches(),
        epochs=2,
        warmup_epochs=0,
        progress=False,
    )
    first = next(run)
    assert first.epoch == 0
    assert math.isnan(first.train_loss)
    assert math.isnan(first.train_top1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (first.val_loss, first.top1) == evaluate(model, validation_batches(), progress=False)


def test_training_learns() -> None:
    model = tiny_tcnn()
    gates = [layer.gate.detach().clone() for layer in gpsa_layers(model).values()]
    results = _run(model, epochs=12, lr=3e-3, label_smoothing=0.0)
    assert [result.epoch for result in results] == list(range(13))
    # Eleven images can be learned by heart: without steps, or with steps uphill, the loss would not
    # fall.
    assert results[-1].train_loss < 0.8 * results[1].train_loss
    for before, layer in zip(gates, gpsa_layers(model).values(), strict=True):
        # At the rate of the weights, the gates would have moved a thirtieth as far.
        assert float((layer.gate - before).abs().max().detach()) > 0.01


def test_models_that_return_an_object_with_logits() -> None:
    """Training and evaluation use its scores like a plain tensor."""
    # Results are compared in printed form, as dataclasses with NaN are not equal from Python 3.13
    # on.
    trained = _run(Logits(tiny_cnn()))[1:]
    expected = _run(tiny_cnn())[1:]
    assert repr(trained) == repr(expected)


def test_training_results_by_hand() -> None:
    """The first step of a warm-up has rate 0,
    so that the first two batches meet the same weights.
    """
    model = tiny_tcnn()
    loader = batches(7, 4, shuffle=False)
    twin = copy.deepcopy(model).train()
    losses = []
    correct = 0
    for images, labels in loader:
        logs = _log_probabilities(twin, images)
        # Label smoothing is 0.3 over three classes.
        target = torch.full_like(logs, 0.3 / 3)
        target[range(len(labels)), labels] += 0.7
        losses += (-(target * logs).sum(1)).tolist()
        correct += int((logs.argmax(1) == labels).sum())
    results = finetune(
        model,
        loader,
        loader,
        epochs=2,
        warmup_epochs=1,
        label_smoothing=0.3,
        progress=False,
    )
    first = list(results)[1]
    # The batches have 4 and 3 images, so that a mean of batch means would differ.
    assert len(losses) == 7
    assert first.train_loss == pytest.approx(sum(losses) / 7, rel=1e-4)
    assert first.train_top1 == pytest.approx(correct / 7)


def test_shares_of_classes_are_used_as_targets_unchanged() -> None:
    """Label smoothing is for indices; mixed targets are smoothed,
    if at all, by the code that mixes them.
    """
    images, labels = next(iter(batches()))
    mixed_in = torch.roll(labels, 1)
    # The only step uses the loss at these weights, with the statistics of this batch.
    model = tiny_cnn().train()
    classes = model.num_classes
    shares = 0.7 * torch.eye(classes)[labels] + 0.3 * torch.eye(classes)[mixed_in]
    result = list(
        finetune(
            copy.deepcopy(model),
            [(images, shares)],
            validation_batches(),
            epochs=1,
            warmup_epochs=0,
            label_smoothing=0.1,
            progress=False,
        )
    )[-1]
    logarithms = _log_probabilities(model, images)
    losses = [
        -(0.7 * row[label] + 0.3 * row[second])
        for row, label, second in zip(logarithms, labels, mixed_in, strict=True)
    ]
    assert result.train_loss == pytest.approx(float(sum(losses)) / len(losses), rel=1e-5)
    right = (logarithms.argmax(1) == labels).double().mean()
    assert result.train_top1 == pytest.approx(float(right))


def test_evaluation_by_hand() -> None:
    model, loader = tiny_tcnn(), batches()  # batches of 4, 4 and 3
    twin = copy.deepcopy(model).eval()
    losses = []
    correct = 0
    for image, label in loader.dataset:
        logs = _log_probabilities(twin, image[None])[0]
        losses.append(-float(logs[label]))
        correct += int(logs.argmax()) == int(label)
    loss, top1 = evaluate(model, loader, progress=False)
    # float32 sums over batches have another order than sums over images.
    assert loss == pytest.approx(sum(losses) / 11, rel=1e-4)
    assert top1 == pytest.approx(correct / 11)


def test_evaluation_restores_every_mode() -> None:
    model = tiny_tcnn().train()
    model.get_submodule("layer1").eval()  # some norms are frozen
    before = {name: module.training for name, module in model.named_modules()}
    buffers = copy.deepcopy(dict(model.named_buffers()))
    evaluate(model, batches(), progress=False)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert {name: module.training for name, module in model.named_modules()} == before
    with pytest.raises(RuntimeError):
        evaluate(
            model,
            # Five channels make the forward fail, and modes must be restored all the same.
            [(torch.zeros(2, 5, 32, 24), torch.zeros(2, dtype=torch.long))],
            progress=False,
        )
    assert {name: module.training for name, module in model.named_modules()} == before


def test_learning_rates_and_their_sums_are_recorded_and_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_tcnn()
    epochs = 4
    steps = 3
    peak = 0.004
    gating_peak = 0.3
    layers = list(gpsa_layers(model).values())
    attention = {id(p) for layer in layers for p in (layer.query, layer.key, layer.gating)}
    weights = [
        p.detach().clone()
        for p in model.parameters()
        # AdamW moves each weight by about its rate, whatever the gradient, so sums are given
        # relative to the size of weights.
        if p.ndim > 1 and id(p) not in attention
    ]
    queries = [p.detach().clone() for layer in layers for p in (layer.query, layer.key)]
    options = {
        "epochs": epochs,
        "warmup_epochs": 1,
        "lr": peak,
        "gating_lr": gating_peak,
        "qk_lr": "papers",
    }
    results = _run(model, progress=True, name="tiny", **options)
    factors = [step / steps for step in range(steps)]  # the warm-up from 0
    for step in range(3 * steps):
        angle = math.pi * step / (3 * steps)
        factors.append(0.5 * (1 + math.cos(angle)))
    assert results[0].lr == 0.0
    for result in results:
        if result.epoch:
            # The rate of an epoch is that of its last step.
            assert result.lr == pytest.approx(peak * factors[result.epoch * steps - 1])
        total = sum(factors[: result.epoch * steps])
        units = [
            torch.cat([p.flatten().double() for p in part]).square().mean().sqrt()
            for part in (weights, queries)
        ]
        assert result.lr_sum == pytest.approx(peak * total / float(units[0]))
        assert result.qk_lr_sum == pytest.approx(
            # The papers' sum is 3.1, and the mean of a cosine is half its peak.
            2 * 3.1 / (epochs * steps) * total / float(units[1])
        )
        assert result.gating_lr_sum == pytest.approx(gating_peak * total)
    printed = capsys.readouterr()
    assert f"queries and keys {results[-1].qk_lr_sum:.3g}" in printed.out + printed.err
    control = _run(tiny_cnn())[-1]
    assert math.isnan(control.qk_lr_sum)
    assert control.lr_sum > 0
    assert _run(tiny_cnn(), epochs=1, warmup_epochs=0, lr=peak)[0].lr == peak


def test_papers_rate_of_queries_and_keys() -> None:
    # The papers train for 50 epochs, each with 1,251 steps of 1,024 images of ImageNet.
    steps = 50 * 1251
    # PAPERS_SUM is rounded to two digits, an error of 0.9 %.
    assert papers_qk_lr(steps) == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(ValueError, match="expected at least one step, got 0"):
        papers_qk_lr(0)


def test_gates_learn_at_their_own_learning_rate() -> None:
    gates = {"layer4.0.conv1.gating", "layer4.0.conv2.gating"}
    for rates, moving in (
        # If one rate is zero, its parameters must not move.
        ({"gating_lr": 0.0, "lr": 1e-3}, False),
        ({"gating_lr": 0.1, "lr": 0.0}, True),
    ):
        model = tiny_tcnn()
        before = copy.deepcopy(model.state_dict())
        _run(model, epochs=2, **rates)
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert changed == gates if moving else not changed & gates
    # Without a trainable gate there is no group of gates, and the rate that is reported is that of
    # the weights.
    model.requires_grad_(False).get_submodule("fc").requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    assert _run(model, epochs=2, lr=0.004, warmup_epochs=0)[0].lr == 0.004
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in gates)


def test_seed_repeats_a_run() -> None:
    first, second, third = tiny_tcnn(), tiny_tcnn(), tiny_tcnn()
    results = _run(first, seed=3, drop_path_rate=0.3)
    torch.manual_seed(17)  # numbers drawn before the run do not matter
    assert repr(_run(second, seed=3, drop_path_rate=0.3)) == repr(results)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    assert repr(_run(third, seed=4, drop_path_rate=0.3)) != repr(results)


def test_each_epoch_has_its_own_order_and_modes() -> None:
    model = tiny_tcnn().eval()
    forwards: list[tuple[bool, torch.Tensor]] = []
    model.register_forward_pre_hook(
        lambda module, inputs: forwards.append((module.training, inputs[0]))
    )
    _run(model, epochs=2, seed=3)
    # Epoch 0 only validates.
    expected = [(False, images) for images, _ in validation_batches()]
    for epoch in (1, 2):
        # The order depends on the seed and the number of the epoch, so that a resumed run has it,
        # too.
        torch.manual_seed(3 + epoch)
        expected += [(True, images) for images, _ in batches()]
        expected += [(False, images) for images, _ in validation_batches()]
    assert [training for training, _ in forwards] == [training for training, _ in expected]
    assert all(
        torch.equal(actual, images)
        for (_, actual), (_, images) in zip(forwards, expected, strict=True)
    )


def test_each_epoch_goes_through_each_loader_once() -> None:
    """tqdm.auto opens a second iterator on its iterable,
    with which workers start twice and load every image twice.
    """
    opened: list[str] = []

    class Counted(DataLoader):
        def __iter__(self) -> Any:
            opened.append("train" if self.batch_size == 4 else "validate")
            return super().__iter__()

    train = Counted(batches().dataset, 4)
    validate = Counted(validation_batches().dataset, 7)
    list(finetune(tiny_cnn(), train, validate, epochs=2, warmup_epochs=0, progress=False))
    assert opened == ["validate", "train", "validate", "train", "validate"]


def test_training_under_bfloat16_autocast() -> None:
    results = _run(tiny_tcnn(), amp=True)
    assert all(math.isfinite(result.val_loss) for result in results)
    # bfloat16 has 8 significant bits, and two epochs of training amplify its rounding.
    assert results[-1].train_loss == pytest.approx(_run(tiny_tcnn())[-1].train_loss, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"epochs": 0},
            "expected 0 <= warmup_epochs < epochs, got warmup_epochs=1, epochs=0",
        ),
        ({"epochs": 3, "warmup_epochs": 3}, "got warmup_epochs=3, epochs=3"),
        ({"warmup_epochs": -1}, "got warmup_epochs=-1"),
        ({"label_smoothing": 1.0}, r"expected label_smoothing in \[0, 1\), got 1\.0"),
        ({"label_smoothing": -0.1}, r"expected label_smoothing in \[0, 1\), got -0\.1"),
        ({"drop_path_rate": 1.0}, r"expected a drop path rate in \[0, 1\), got 1\.0"),
        ({"lr": -1.0}, "lr|learning rate"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    # The error is raised by the call, not by the first use of the iterator.
    with pytest.raises(ValueError, match=message):
        finetune(
            tiny_cnn(),
            batches(),
            batches(),
            **{"epochs": 3, "warmup_epochs": 1, **arguments},
        )


def test_empty_loaders_are_refused() -> None:
    with pytest.raises(ValueError, match="empty loader: 0 training and 3 validation batches"):
        finetune(tiny_cnn(), batches(0, shuffle=False), batches())
    with pytest.raises(ValueError, match="empty loader: 3 training and 0 validation batches"):
        finetune(tiny_cnn(), batches(), batches(0, shuffle=False))
    with pytest.raises(TypeError, match=r"loaders with a length.*'generator'"):
        finetune(tiny_cnn(), (batch for batch in batches()), batches())


def test_drop_path_is_refused_for_a_model_without_it() -> None:
    """A setting without effect is an error."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="drop"):
        _run(model, drop_path_rate=0.1)


def _with_targets(
    change: Callable[[torch.Tensor, torch.Tensor], Any],
) -> DataLoader:
    """Return a loader whose batches are a function of images and labels."""
    samples = list(batches(8, 8, shuffle=False).dataset)

    def collate(pairs: list[Any]) -> Any:
        return change(*default_collate(pairs))

    return DataLoader(samples, 4, collate_fn=collate)


def _one_hot(labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(labels, CLASSES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x, y: {"pixel_values": x, "labels": y},
            TypeError,
            "got a dict of pixel_values, labels",
        ),
        (lambda x, y: (x, y, y), TypeError, "got a tuple of Tensor, Tensor, Tensor"),
        (lambda x, y: x, TypeError, "got a Tensor"),
        (lambda x, y: (x, y.tolist()), TypeError, "got a tuple of Tensor, list"),
        (
            lambda x, y: (x, _one_hot(y) + _one_hot((y + 1) % CLASSES)),
            ValueError,
            "rows sum to 2 to 2: for labels of several classes",
        ),
        (lambda x, y: (x, 0.0 * _one_hot(y)), ValueError, "rows sum to 0 to 0"),
        (lambda x, y: (x, y.float()), ValueError, r"float32 of shape \(4,\): give labels.long\(\)"),
        (lambda x, y: (x, y[:, None]), ValueError, r"shape \(4, 1\).*give labels\[:, 0\]"),
        (
            lambda x, y: (x, 2 * _one_hot(y) - _one_hot((y + 1) % CLASSES)),
            ValueError,
            "rows sum to 1 to 1",
        ),
        (
            lambda x, y: (x, y + CLASSES),
            ValueError,
            f"labels from 0 to {CLASSES - 1}, as the model has {CLASSES} classes, got",
        ),
        (lambda x, y: (x, y - 100), ValueError, r"expected labels from 0 .* got -\d+"),
        (
            lambda x, y: (x, nn.functional.one_hot(y, CLASSES + 1)),
            ValueError,
            "expected targets (for the|to be class indices)",
        ),
    ],
)
@pytest.mark.parametrize("validating", [False, True])
def test_other_batches_are_refused(
    change: Any, error: type[Exception], message: str, validating: bool
) -> None:
    loaders = [batches(), _with_targets(change)]
    run = finetune(
        tiny_cnn(),
        *(loaders if validating else reversed(loaders)),
        epochs=1,
        warmup_epochs=0,
        progress=False,
    )
    if not validating:
        next(run)
    with pytest.raises(error, match=message):
        next(run)


@pytest.mark.parametrize(
    "convert",
    [torch.Tensor.int, lambda y: y.to(torch.uint8), _one_hot],
    ids=["int32", "uint8", "one-hot integers"],
)
def test_labels_of_other_types_train_alike(convert: Any) -> None:
    """One-hot targets are probabilities, which no label smoothing applies to."""
    options: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0, "seed": 0}
    options |= {"label_smoothing": 0.0, "progress": False}
    validation = _with_targets(lambda x, y: (x, y if convert is _one_hot else convert(y)))
    losses = []
    for change in (convert, lambda y: y):
        train = _with_targets(lambda x, y, change=change: (x, change(y)))
        results = list(finetune(tiny_cnn(), train, validation, **options))
        losses.append([results[1].train_loss, results[1].val_loss, results[1].top1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("root_in_eval", [False, True])
def test_norms_that_the_user_put_into_eval_mode_stay(root_in_eval: bool) -> None:
    """In a model that is in eval mode as a whole, all norms are trained."""
    model = tiny_cnn().train(not root_in_eval)
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    frozen, *others = norms
    norms[frozen].eval()
    before = {name: norm.running_mean.clone() for name, norm in norms.items()}
    _run(model)
    for name, norm in norms.items():
        kept = name == frozen and not root_in_eval
        assert torch.equal(norm.running_mean, before[name]) == kept, name
    assert others


def test_gates_without_gradient_are_reported() -> None:
    """In float32 sigma(20) is 1: gates, queries and keys get no gradient, with sigma(4) they do."""
    for gating, sticks in ((20.0, True), ([20.0, *[4.0] * 8], True), (4.0, False)):
        model = reparameterize(tiny_cnn(), input_size=(1, 64, 64), gating=gating)
        layers = gpsa_layers(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = finetune(model, batches(), validation_batches(), progress=False)
        texts = [str(warning.message) for warning in caught]
        assert any("gates are exactly 0 or 1" in text for text in texts) == sticks
        for name in layers:
            heads = 9 if gating == 20 else 1
            assert not sticks or f"{name} ({heads} of 9 heads)" in texts[0]
        run.close()
        disturb(model)
        for layer in layers.values():
            layer.gating.data.copy_(torch.as_tensor(gating).expand(9))
        images, labels = next(iter(batches()))
        nn.functional.cross_entropy(model(images), labels).backward()
        for layer in layers.values():
            gradients = layer.gating.grad
            assert gradients is not None
            stuck = torch.as_tensor(gating).expand(9) == 20
            assert torch.equal(gradients == 0, stuck)
