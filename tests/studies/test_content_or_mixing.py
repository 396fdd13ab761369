"""Comparison of content and mixing: its arms, its intervals and verdicts."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats
from torch import nn

import content_control
from common.content_arms import (
    ARMS,
    OffsetKernelGPSA,
    StaticMapGPSA,
    converted,
    train_tail,
)
from common.content_data import Features, Images
from common.content_report import _together
from common.resnet20 import ResNet20, Tail, Trunk
from common.small_images import SmallImages, views
from common.stepwise import order_of_images, rate_factor
from common.verdicts import (
    Effect,
    crossed_effect,
    holm,
    seeds_to_decide,
    verdict,
)
from tcnn_model import GPSA, gpsa_layers
from tcnn_probe.evaluation import mean_interval


@pytest.fixture
def network() -> ResNet20:
    torch.manual_seed(0)
    return ResNet20(width=3, classes=7, blocks=2).eval()


@pytest.mark.parametrize("blocks", [1, 2])
def test_trunk_and_tail_compose_to_the_network(network: ResNet20, blocks: int) -> None:
    images = torch.randn(2, 3, 20, 28)
    scores = Tail(network, blocks)(Trunk(network, blocks)(images))
    # Equal bit for bit, as both run the same operations in the same order.
    torch.testing.assert_close(scores, network(images), rtol=0, atol=0)


def test_the_shortcut_has_no_parameters_and_takes_every_second_pixel(
    network: ResNet20,
) -> None:
    block = network.layer2[0]
    x = torch.randn(2, 3, 6, 10)
    # The residual branch is zero, so that only the shortcut remains.
    nn.init.zeros_(block.bn2.weight)
    y = block(x)
    assert y.shape == (2, 6, 3, 5)
    # There are 3 new channels: 1 before the old ones, and 2 after them.
    torch.testing.assert_close(y[:, 1:4], x[:, :, ::2, ::2].relu())
    assert (y[:, [0, 4, 5]] == 0).all()


def static_layer(size: tuple[int, int], stride: int = 1) -> StaticMapGPSA:
    torch.manual_seed(1)
    # Each head has another gate, so that exchanged heads would show.
    layer = GPSA(5, 7, 3, stride, 1, gating=[0.1 * n for n in range(9)])
    static = StaticMapGPSA.of(layer, size)
    # New queries are zeros, which would give a uniform map.
    nn.init.normal_(static.query, std=2)
    return static.double()


@pytest.mark.parametrize("stride", [1, 2])
def test_a_static_map_is_mixed_as_defined(stride: int) -> None:
    size = 4, 6
    layer = static_layer(size, stride)
    x = torch.randn(3, 5, *size, dtype=torch.float64)
    height, width = -(-size[0] // stride), -(-size[1] // stride)
    expected = torch.zeros(3, 7, height, width, dtype=torch.float64)
    expected += layer.bias[:, None, None]
    values = torch.einsum("oc,bcyx->boyx", layer.value, x)
    for head in range(9):
        alpha = layer.locality_strength[head]
        gate = layer.gate[head]
        center = layer.center[head]
        tap = layer.weight[:, :, head // 3, head % 3]
        for y, x_ in itertools.product(range(height), range(width)):
            # Keys include one ring of padding; offsets are counted from the query and the head's
            # centre.
            dy = torch.arange(-1, size[0] + 1)[:, None] - y * stride - center[0]
            dx = torch.arange(-1, size[1] + 1) - x_ * stride - center[1]
            near = torch.exp(-alpha * (dy**2 + dx**2))
            position = near / near.sum()
            static = torch.softmax(layer.query[head, y * width + x_], 0).view(size)
            mixed = (1 - gate) * static + gate * position[1:-1, 1:-1]
            expected[:, :, y, x_] += (values * mixed).sum((2, 3)) @ tap.T
    # The layer computes gates and strengths in float32.
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(x), GPSA.forward(layer, x))


def test_a_kernel_over_offsets_has_a_number_for_each_offset() -> None:
    size = 4, 6
    torch.manual_seed(2)
    layer = OffsetKernelGPSA.of(GPSA(5, 7, 3, 1, 1), size)
    kernel = torch.randn(9, 7, 11)
    layer.query.data = kernel.flatten(1)
    static = StaticMapGPSA.of(layer, size)
    logits = torch.empty(9, 24, 24)
    for (y, x), (v, u) in itertools.product(np.ndindex(size), np.ndindex(size)):
        logits[:, 6 * y + x, 6 * v + u] = kernel[:, v - y + 3, u - x + 5]
    static.query.data = logits
    x = torch.randn(2, 5, *size)
    torch.testing.assert_close(layer(x), static(x))
    torch.testing.assert_close(layer(x), GPSA.forward(layer, x))


def test_scenes_tell_the_class_only_as_the_dose_says() -> None:
    """The class is the value of the item with the cue's code;
    the cue shows it in the other scenes.
    """
    images, labels = content_control.scenes(400, 0.3, seed=5)
    tokens = images.flatten(2).mT
    shown = 0
    for scene, label in zip(tokens, labels, strict=True):
        cue = scene[scene[:, 0] == 1]
        items = scene[scene[:, 1] == 1]
        assert (len(cue), len(items)) == (1, 6)
        assert len(items[:, 2:9].unique(dim=0)) == 6
        match = (items[:, 2:9] == cue[:, 2:9]).all(1)
        assert items[match, 9:13].tolist() == [[float(n == label) for n in range(4)]]
        if cue[:, 9:13].any():
            assert cue[0, 9:13].argmax() == label
            shown += 1
        assert not scene[(scene[:, :2] == 0).all(1)].any()
    # Three standard deviations of 400 draws are 0.07.
    assert abs(shown / 400 - 0.7) < 0.07


@pytest.mark.parametrize(("sharpness", "solved"), [(30, True), (0, False)])
def test_key_content_of_one_head_tells_every_class(sharpness: float, solved: bool) -> None:
    """Where all queries look at the cue, single tokens can compare the codes;
    with uniform attention they cannot.
    """
    images, labels = content_control.scenes(200, 1.0, seed=5)
    tokens = images.flatten(2).mT
    weights = (sharpness * tokens[..., 0]).softmax(1)
    seen = torch.einsum("ij,ijc->ic", weights, tokens)[:, None]
    difference = tokens[..., 2:9] - seen[..., 2:9]
    hidden = torch.cat([difference.relu(), (-difference).relu()], -1)
    values = tokens[..., 9:13].relu()
    scores = (values - hidden.sum(-1, keepdim=True)).relu().mean(1)
    assert bool((scores.argmax(1) == labels).all()) is solved


def steps_of(features: torch.Tensor, count: int):
    for _ in range(count):
        yield features, torch.arange(len(features)) % 7


@pytest.mark.parametrize("arm", ["B", "C", "D", "E", "T", "U"])
def test_learning_rates_of_an_arm(network: ResNet20, arm: str) -> None:
    tail = Tail(network, 1)
    features = torch.randn(4, 12, 5, 3)
    model = converted(tail, ARMS[arm], -1.0, features, seed=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {
        "steps": 8,
        "lr": 1e-3,
        "qk_sum": 3.0,
        "map_sum": 30.0,
        "gating_lr": 0.02,
        "papers_lr": 1e-4,
    }
    options |= {
        "papers_gating_lr": 0.1,
        "weight_decay": 0.05,
        "frozen_statistics": True,
        "amp": False,
    }
    gates: list[torch.Tensor] = []

    def after(step: int) -> None:
        by_layer = [layer.gating.detach() for layer in gpsa_layers(model).values()]
        gates.append(torch.cat(by_layer))

    sums = train_tail(model, steps_of(features, 8), ARMS[arm], options, after)
    factors = [rate_factor(step, 8) for step in range(8)]
    assert factors[0] == 1  # the warm-up is one step
    expected = {"B": 1e-4 * sum(factors), "C": 3.0, "D": 30.0, "T": 30.0}
    if arm == "E":
        assert not sums.keys() & {"gates", "queries and keys"}
        assert all((layer.gate == 1).all() for layer in gpsa_layers(model).values())
    else:
        # With uniform content, neither queries nor keys are trained.
        assert sums.get("queries and keys") == pytest.approx(expected.get(arm))
        waits = [bool((now == gates[0]).all()) for now in gates[1:]]
        # In the arms that learn content, the gates are fixed for the first quarter of the steps.
        assert waits == ([False] * 8 if arm == "B" else [True] * 2 + [False] * 6)
    buffers = dict(model.named_buffers())
    # The running statistics of batch norms are frozen.
    for name, buffer in tail.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)
    assert not torch.equal(before["linear.weight"], model.linear.weight)


def test_arms_see_the_same_images_and_each_image_once_an_epoch() -> None:
    # Batches of 4 do not divide 10 images: one batch spans the end of an epoch and the beginning of
    # the next.
    steps = list(order_of_images(10, 5, 4, seed=2))
    rows, view = (np.concatenate([part[n] for part in steps]) for n in (0, 1))
    assert sorted(rows[:10]) == list(range(10))
    assert view.tolist() == [0] * 10 + [1] * 10
    again = next(order_of_images(10, 50, 4, seed=2))[0]
    np.testing.assert_array_equal(again, steps[0][0])


def test_a_view_is_a_reproducible_crop_of_the_padded_image() -> None:
    rng = np.random.default_rng(0)
    images = SmallImages(
        # Pixels start at 1, as padding is 0.
        rng.integers(1, 255, (6, 11, 13, 3), dtype=np.uint8),
        np.arange(6),
    )
    rows = np.array([4, 2, 4, 0])
    number = np.array([0, 1, 2, 0])
    crops_taken = views(images, rows, number)
    np.testing.assert_array_equal(crops_taken, views(images, rows, number))
    np.testing.assert_array_equal(crops_taken[1:2], views(images, rows[1:2], number[1:2]))
    padded = np.pad(images.pixels, ((0, 0), (4, 4), (4, 4), (0, 0)))
    for row, view in zip(rows, crops_taken, strict=True):
        crops = [padded[row, y : y + 11, x : x + 13] for y, x in np.ndindex(9, 9)]
        mirrored = [crop[:, ::-1] for crop in crops]
        # The view matches exactly one of the crops and their mirror images.
        assert sum(np.array_equal(view, crop) for crop in crops + mirrored) == 1


def test_features_of_each_step_are_those_that_a_cache_holds(
    network: ResNet20, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    shown = [
        SmallImages(rng.integers(0, 255, (count, 20, 28, 3), dtype=np.uint8), np.arange(count) % 7)
        for count in (11, 5, 3)
    ]
    images = Images(*shown, rng.integers(0, 255, (2, 3, 20, 28, 3), dtype=np.uint8), np.arange(3))
    trunk = Trunk(network, 2).eval()
    cached, computed = (
        Features(trunk, images, tmp_path / f"{count}", count=count, reference=4, probed=4)
        for count in (2, 0)
    )
    pairs = itertools.zip_longest(*(part.batches(5, 4, seed=1) for part in (cached, computed)))
    for (features, labels), (again, same_labels) in pairs:
        # Batches of other sizes may be summed in another order: one unit of half precision.
        torch.testing.assert_close(features, again, rtol=2**-10, atol=2**-20)
        assert torch.equal(labels, same_labels)


def difference_of_two_models(
    rng: np.random.Generator, seeds: int, images: int, spread: float
) -> np.ndarray:
    """Return differences -1, 0 and 1 with mean 0.

    Trainings differ from each other, and on most images two models agree.
    """
    shift = rng.normal(0, spread, seeds)[:, None] / 2
    differ = rng.beta(0.15, 1.7, images)  # 8 % of the images on average
    share = (1 + rng.normal(0, 0.5, images).clip(-1, 1)) / 2
    up = np.clip(differ * share + shift, 0, 1)
    draw = rng.random((seeds, images))
    down = np.clip(differ * (1 - share) - shift, 0, 1 - up)
    return (draw < up).astype(float) - ((draw >= up) & (draw < up + down))


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.004, 0.02])
def test_intervals_have_their_nominal_coverage(seeds: int, spread: float) -> None:
    """Coverage is nearly 95 %; at that coverage,
    fewer than 0.93 of 600 intervals cover in one of 70 tests.
    """
    rng = np.random.default_rng(seeds)
    effects = [
        crossed_effect(difference_of_two_models(rng, seeds, 1000, spread)) for _ in range(600)
    ]
    assert np.mean([effect.low <= 0 <= effect.high for effect in effects]) >= 0.93


def test_an_effect_that_varies_by_seed_alone_is_a_t_test() -> None:
    by_seed = np.array([0.5, 0.25, 0.125])
    effect = crossed_effect(np.repeat(by_seed[:, None], 11, 1))
    expected = stats.ttest_1samp(by_seed, 0)
    interval = expected.confidence_interval(0.95)
    np.testing.assert_allclose(
        [effect.low, effect.high, effect.p_value], [*interval, expected.pvalue]
    )
    values = by_seed[:, None] * np.arange(11)
    bounds = mean_interval(xr.DataArray(values, dims=("seed", "image")), ("seed", "image"))
    effect = crossed_effect(values)
    np.testing.assert_allclose([effect.low, effect.high], bounds)
    alone = crossed_effect(np.ones((1, 5)))
    assert alone.low == -np.inf
    assert alone.high == np.inf
    assert alone.p_value == 1


def test_holm_adjusts_p_values() -> None:
    # P-values in ascending order are multiplied by 4, 3, 2 and 1, and are never below the previous
    # one.
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.5]), [0.04, 0.09, 0.09, 0.5])


def effect_of(mean: float, half: float, p_value: float, seed_variance: float = 1e-5) -> Effect:
    return Effect(mean, mean - half, mean + half, p_value, seed_variance, 0.05, 3, 10_000)


@pytest.mark.parametrize(
    ("effect", "adjusted", "answer"),
    [
        (effect_of(0.02, 0.005, 1e-4), 1e-3, "yes"),
        # The interval is above the margin of 0.01, but the p-value is not significant after Holm's
        # correction.
        (effect_of(0.02, 0.005, 0.03), 0.06, "undecided"),
        # There is an effect, but its whole interval is below the margin.
        (effect_of(0.005, 0.004, 0.02), 0.02, "yes, by less than 0.01"),
        # The same, not significant after Holm's correction.
        (effect_of(0.005, 0.004, 0.02), 0.06, "no"),
        (effect_of(-0.05, 0.005, 1e-4), 1e-3, "no"),
        (effect_of(0.005, 0.006, 0.1), 0.1, "undecided"),
    ],
)
def test_verdict_on_one_effect(effect: Effect, adjusted: float, answer: str) -> None:
    assert verdict(effect, 0.01, adjusted) == answer


def test_verdict_on_several_effects() -> None:
    assert _together(["no", "yes"]) == "YES"
    assert _together(["no", "undecided"]) == "UNDECIDED"
    assert _together(["no", "no"]) == "NO"
    small = "yes, by less than 0.01"
    assert _together(["no", small]) == small.upper()
    assert _together(["undecided", small]) == "UNDECIDED"
    assert _together([small, "yes"]) == "YES"


def test_number_of_seeds_that_would_decide() -> None:
    effect = effect_of(0.02, 0.05, 0.3, seed_variance=4e-4)
    seeds = seeds_to_decide(effect, 0.01)
    assert seeds is not None
    for count, decided in ((seeds, True), (seeds - 1, False)):
        parts = np.array([4e-4 / count, 0.05 / 10_000])
        freedom = parts.sum() ** 2 / (parts**2 / [count - 1, 9_999]).sum()
        assert (stats.t.ppf(0.975, freedom) * np.sqrt(parts.sum()) < 0.02) == decided
    # The variance between images alone is too large, and more seeds do not reduce it.
    few_images = Effect(0.0095, -0.1, 0.12, 0.9, 1e-4, 0.05, 3, 1000)
    assert seeds_to_decide(few_images, 0.01) is None
