"""Scores of models with one output, with several labels,
and without a head; maps that show nothing.
"""

from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attribution import deletion_curve
from tests.tcnn_probe.attribution.models import SIZE, Linear, transformer

GENERATOR = torch.Generator().manual_seed(3)
IMAGES = torch.randn(3, 2, 7, 11, dtype=torch.float64, generator=GENERATOR)
MAPS = torch.randn(3, 7, 11, dtype=torch.float64, generator=GENERATOR)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_saliency_explains_the_probability(score: Any) -> None:
    model = Linear()
    logits = model(IMAGES).detach()
    p = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    slope = (p * (1 - p))[:, 2]
    maps = tcnn_probe.saliency(model, IMAGES, 2, method="input_x_gradient", score=score)
    gradient = slope[:, None, None, None] * model.weight[2]
    if score == "softmax":  # dp_2 / dz_k = -p_2 p_k
        for k in (0, 1):
            factor = -(p[:, 2] * p[:, k])[:, None, None, None]
            gradient = gradient + factor * model.weight[k]
    np.testing.assert_allclose(maps, (IMAGES * gradient.detach()).sum(1), atol=1e-12)
    assert (maps.units, maps.score) == (f"{score} of the class", score)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_softmax_of_probabilities_is_refused(dtype: torch.dtype) -> None:
    plain, model = Linear().to(dtype), Linear().to(dtype)
    model.forward = lambda x: plain(x).softmax(1)
    images, targets = IMAGES.to(dtype), torch.full((3,), 2)
    with pytest.raises(ValueError, match=r"gives probabilities.*score=.logit"):
        deletion_curve(model, images, MAPS, targets, steps=3)
    with pytest.raises(ValueError, match=r"score= to be one of .*'logit'\), got 'sofmax'"):
        deletion_curve(model, images, MAPS, targets, steps=3, score="sofmax")  # type: ignore[arg-type]
    for options in ({}, {"score": "softmax"}):
        with pytest.raises(ValueError, match=r"gives probabilities.*score=.logit"):
            tcnn_probe.faithfulness(model, images, {"mine": MAPS}, steps=3, **options)
    _, curves = deletion_curve(model, images, MAPS, targets, steps=3, score="logit")
    _, expected = deletion_curve(plain, images, MAPS, targets, steps=3)
    rounding = 8 * torch.finfo(dtype).eps
    np.testing.assert_allclose(curves, expected, atol=rounding)


def without_head() -> nn.Module:
    return transformer("deit_tiny_patch16_224", num_classes=0)


def with_an_identity() -> nn.Module:
    """A user's wrapper of a model whose head was taken away."""
    wrapper = nn.Module()
    wrapper.net = transformer("deit_tiny_patch16_224")
    wrapper.net.head = nn.Identity()
    wrapper.forward = wrapper.net.forward
    return wrapper


def with_one_output() -> nn.Module:
    return transformer("deit_tiny_patch16_224", num_classes=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_head, "gives features"),
        (with_an_identity, "'head' is an identity"),
        (with_one_output, "one number for each image.*score='sigmoid'"),
    ],
)
def test_models_without_scores_are_refused_where_a_score_is_needed(make: Any, message: str) -> None:
    model, images = make(), torch.randn(2, 3, *SIZE)
    for score in (None, "softmax"):
        with pytest.raises(ValueError, match=f"'deletion_auc'.*{message}.*'pointing_game', 'rank"):
            tcnn_probe.faithfulness(model, images, "rollout", score=score)
        with pytest.raises(ValueError, match=message):
            tcnn_probe.saliency(model, images, method="gradcam", score=score)
    with pytest.warns(RuntimeWarning, match="'gradcam' is left out"):
        maps = tcnn_probe.saliency(model, images, method=["rollout", "gradcam"])
    assert {*maps} == {"rollout"}
    assert "target" not in maps.coords
    masks = torch.zeros(2, *SIZE, dtype=torch.bool)
    masks[:, 3:11, 5:19] = True
    options: Any = {"masks": masks, "metrics": "pointing_game"}
    scores = tcnn_probe.faithfulness(model, images, maps, **options)
    assert scores.pointing_game.notnull().all()
    with pytest.warns(RuntimeWarning, match="'gradcam' is left out"):
        beside = tcnn_probe.faithfulness(model, images, ["gradcam", "rollout"], **options)
    xr.testing.assert_equal(beside.pointing_game, scores.pointing_game)
    with pytest.raises(ValueError, match=f"'gradcam': .*{message}"):
        tcnn_probe.faithfulness(model, images, "gradcam", **options)
    # Who names an output and its meaning wants it explained as it is.
    chosen = tcnn_probe.saliency(model, images, 0, method="gradcam")
    assert chosen.score == "logit"
    tcnn_probe.faithfulness(model, images, {"x": chosen}, score="logit", steps=2)


@pytest.mark.parametrize("layer", ["blocks.1", "blocks.1.mlp", "norm"])
def test_a_layer_that_does_not_matter_is_said(layer: str) -> None:
    model, images = transformer("deit_tiny_patch16_224"), torch.randn(2, 3, *SIZE)
    with pytest.warns(RuntimeWarning, match=f"does not depend on the map of '{layer}'"):
        maps = tcnn_probe.saliency(model, images, method="gradcam", layer=layer)
    assert not maps.any()
    before = tcnn_probe.saliency(model, images, method="gradcam", layer="blocks.0")
    assert before.any()
    with pytest.warns(RuntimeWarning, match="not scored: 2 of 'late'"):
        scores = tcnn_probe.faithfulness(model, images, {"late": maps, "early": before}, steps=3)
    for name, values in scores.data_vars.items():
        if "other" not in values.dims:
            assert values.sel(attribution="late").isnull().all(), name
            assert values.sel(attribution="early").notnull().all(), name


def test_a_score_that_depends_on_no_layer_is_said() -> None:
    model, images = transformer("deit_tiny_patch16_224"), torch.randn(2, 3, *SIZE)
    nn.init.zeros_(model.head.weight)
    with pytest.warns(RuntimeWarning, match="it depends on no layer"):
        assert not tcnn_probe.saliency(model, images, method="gradcam").any()


def test_layer_maps_of_views_are_refused() -> None:
    model, images = transformer("deit_tiny_patch16_224"), torch.randn(2, 3, *SIZE)
    forward = model.forward
    model.forward = lambda x: forward(torch.cat([x, x.flip(-1)])).unflatten(0, (2, -1)).mean(0)
    with pytest.raises(ValueError, match=r"4 maps of 2 images.*turns each image into several"):
        tcnn_probe.saliency(model, images, method="gradcam")


@pytest.mark.parametrize("method", ["class_attention", "rollout"])
def test_attention_needs_no_tensor_of_scores(method: str) -> None:
    model, images = without_head(), torch.randn(2, 3, *SIZE)
    expected = tcnn_probe.saliency(model, images, method=method)
    forward = model.forward
    model.forward = lambda x: SimpleNamespace(pooler_output=forward(x))
    maps = tcnn_probe.saliency(model, images, method=method)
    np.testing.assert_array_equal(maps, expected)
    with pytest.raises(TypeError, match="pass Scores"):
        tcnn_probe.saliency(model, images, 1, method=method)


@pytest.mark.parametrize(
    "output",
    [
        lambda scores: {"masks": scores[:, :, None, None], "scores": scores},
        lambda scores: (scores[:, None].expand(-1, 7, -1),),
        lambda scores: scores[:, :, None, None].expand(-1, -1, 5, 3),
        lambda scores: SimpleNamespace(logits=scores[:, :, None, None]),
        lambda scores: SimpleNamespace(loss=None, prediction=scores),
        lambda scores: {"loss": None, "heads": [{"class": scores}]},
    ],
)
def test_other_outputs_are_refused_with_a_wrapper_that_works(output: Any) -> None:
    plain, model = Linear(), Linear()
    model.forward = lambda x: output(plain(x))
    with pytest.raises(TypeError, match="pass Scores") as refusal:
        tcnn_probe.saliency(model, IMAGES, method="occlusion")
    names: dict[str, Any] = {"torch": torch}
    exec(dedent(str(refusal.value).partition("\n\n")[2]), names)
    wrapped = tcnn_probe.saliency(names["Scores"](model), IMAGES, method="occlusion")
    np.testing.assert_allclose(
        wrapped, tcnn_probe.saliency(plain, IMAGES, method="occlusion"), atol=1e-12
    )


class Frozen(nn.Module):
    """Head on a trunk that runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformer("deit_tiny_patch16_224", num_classes=0)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.net(x)
        return self.head(features)


def test_methods_without_gradients_are_not_lost_with_the_others() -> None:
    model, images = Frozen(), torch.randn(2, 3, *SIZE)
    methods = ["rollout", "gradcam", "integrated_gradients", "Saliency", "occlusion"]
    with pytest.warns(RuntimeWarning) as caught:
        maps = tcnn_probe.saliency(model, images, method=methods)
    assert {*maps} == {"rollout", "occlusion"}
    assert len(caught) == 3
    assert all("under torch.no_grad" in str(warning.message) for warning in caught)
    with pytest.raises(ValueError, match="'rollout' and 'occlusion' need none"):
        tcnn_probe.saliency(model, images, method="gradcam", layer="net.blocks.0")
