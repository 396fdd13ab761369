"""add_attention_pool and specialize: the rest of the model is unchanged,
and so is timm's interface.
"""

import copy
import itertools
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tcnn_model import (
    AttentionPool2d,
    add_attention_pool,
    parameter_groups,
    reparameterize,
    specialize,
)
from tcnn_model.pooling.attention_pool import ClassScores, PatchAttention
from tests.tcnn_model.numerics import (
    assert_same,
    on_meta,
    random,
    saved_and_loaded,
    snapshot,
)
from tests.tcnn_model.tiny_models import (
    CLASSES,
    POOL_SIZE,
    Plain,
    pooled_cnn,
    tiny_cnn,
    tiny_tcnn,
)


def _images(batch: int = 2) -> torch.Tensor:
    # The size differs from that with which the pool was found.
    return random(batch, 1, 48, 80, dtype=torch.float32)


@torch.no_grad()
def test_pooled_model_keeps_the_weights_and_pools_by_attention() -> None:
    cnn = tiny_cnn().eval()
    x = _images()
    before = snapshot(cnn)
    pooled = pooled_cnn(cnn)
    assert snapshot(cnn) == before
    new = {name for name in pooled.state_dict() if name.startswith("global_pool.attention.")}
    assert set(pooled.state_dict()) == set(cnn.state_dict()) | new
    assert all(
        torch.equal(pooled.state_dict()[name], value) for name, value in cnn.state_dict().items()
    )
    features = pooled.forward_features(x)
    assert torch.equal(features, cnn.forward_features(x))
    expected = pooled.global_pool.attention(features)
    assert torch.equal(pooled.forward_head(features, pre_logits=True), expected)
    assert torch.equal(pooled(x), cnn.fc(expected))


def test_conversion_in_place_and_of_a_copy() -> None:
    cnn = tiny_cnn()
    weights = dict(cnn.named_parameters())
    assert add_attention_pool(cnn, input_size=POOL_SIZE) is not cnn
    assert add_attention_pool(cnn, input_size=POOL_SIZE, per_class=True, inplace=True) is cnn
    after = dict(cnn.named_parameters())
    assert all(after[name] is parameter for name, parameter in weights.items())


def test_modes_dtype_and_class() -> None:
    cnn = tiny_cnn().eval().to(torch.bfloat16)
    cnn.get_submodule("layer1").train()
    # The new pool takes its mode from the old one, even if the model is in another mode.
    for per_class, training_pool in itertools.product((False, True), (False, True)):
        cnn.get_submodule("global_pool").train(training_pool)
        pooled = add_attention_pool(cnn, input_size=POOL_SIZE, per_class=per_class)
        assert {module.training for module in pooled.get_submodule("global_pool").modules()} == {
            training_pool
        }
        modes = {
            name: module.training
            for name, module in cnn.named_modules()
            if "global_pool" not in name
        }
        assert {name: pooled.get_submodule(name).training for name in modes} == modes
        assert {p.dtype for p in pooled.parameters()} == {torch.bfloat16}
        assert isinstance(pooled, type(cnn))


def test_trial_draws_no_random_numbers_and_arguments_reach_the_pool() -> None:
    options: Any = {"num_heads": 2, "mlp_ratio": 2, "init_values": 0.5, "drop": 0.25}
    cnn = tiny_cnn()
    torch.manual_seed(3)
    # This pool is built first: the conversion may draw its random numbers and no others.
    attention = AttentionPool2d(16, **options)
    expected = torch.rand(2)
    torch.manual_seed(3)
    pooled: Any = add_attention_pool(cnn, input_size=POOL_SIZE, **options)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(pooled.global_pool.attention.cls_token, attention.cls_token)
    assert repr(pooled.global_pool.attention) == repr(attention)
    assert pooled.global_pool.attention.block.gamma_1.unique().tolist() == [0.5]
    assert pooled.global_pool.attention.num_heads == 2


@torch.no_grad()
def test_gflops_of_the_papers_resnet() -> None:
    """Thesis, Sec. 5.3: 4.6 billion multiply-adds, against 4.1 without the pool."""
    model = add_attention_pool(on_meta("resnet50"), inplace=True)
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.empty(1, 3, 224, 224, device="meta"))
    # The thesis gives one decimal, so the tolerance is 0.05, and a little more.
    assert counter.get_total_flops() / 2e9 == pytest.approx(4.6, abs=0.06)


# Copies


@pytest.mark.parametrize("per_class", [False, True])
@torch.no_grad()
def test_copies_keep_the_interface(per_class: bool) -> None:
    pooled = pooled_cnn(per_class=per_class)
    x = _images()
    for duplicate in (
        copy.deepcopy(pooled),
        pickle.loads(pickle.dumps(pooled)),
        saved_and_loaded(pooled),
    ):
        assert type(duplicate) is type(pooled)
        assert torch.equal(duplicate(x), pooled(x))
        # If the copy's methods were bound to the original, this call would change the original.
        duplicate.reset_classifier(4)
        assert duplicate(x).shape == (2, 4)
        assert isinstance(duplicate.global_pool.attention, AttentionPool2d)
    assert pooled(x).shape == (2, CLASSES)


@pytest.mark.study
@torch.no_grad()
def test_model_compiles_and_traces_as_one_graph() -> None:
    """The model compiles without a graph break, and torch.fx traces it."""
    pooled = pooled_cnn(per_class=True)
    x = _images()
    compiled = torch.compile(pooled, backend="eager", fullgraph=True)
    assert_same(compiled(x), pooled(x))
    tracer = torch.fx.Tracer()
    traced = torch.fx.GraphModule(pooled, tracer.trace(pooled))
    assert_same(traced(x), pooled(x))


# timm's interface


@torch.no_grad()
def test_reset_keeps_the_pool() -> None:
    pooled = pooled_cnn()
    x = _images()
    features = pooled.forward_head(pooled.forward_features(x), pre_logits=True)
    attention = pooled.global_pool.attention
    # timm's models keep their pool if None is given; the pool's own name must do the same.
    for keep in (None, "attn"):
        pooled.reset_classifier(4, keep)
        assert pooled.global_pool.attention is attention
        assert torch.equal(pooled(x), pooled.get_classifier()(features))
        assert pooled.num_classes == 4
    pooled.reset_classifier(0)
    assert torch.equal(pooled(x), features)
    pooled.reset_classifier(5)
    assert pooled(x).shape == (2, 5)


@torch.no_grad()
def test_reset_with_a_token_per_class_makes_new_tokens() -> None:
    pooled = pooled_cnn(per_class=True)
    x = _images()
    block = pooled.global_pool.attention.block
    tokens = pooled.forward_head(pooled.forward_features(x), pre_logits=True)
    pooled.reset_classifier(0)
    assert torch.equal(pooled(x), tokens)
    pooled.reset_classifier(4)
    assert pooled.global_pool.attention.block is block
    assert pooled.global_pool.attention.cls_token.shape == (1, 4, 16)
    assert pooled(x).shape == (2, 4)
    assert isinstance(pooled.get_classifier(), ClassScores)


@pytest.mark.parametrize("per_class", [False, True])
@torch.no_grad()
def test_reset_to_another_pool_gives_timms_model_back(per_class: bool) -> None:
    cnn = tiny_cnn().eval()
    x = _images()
    # The pool is timm's own again, and nothing of ours is left on the model.
    for pool in ("avg", "max", ""):
        pooled = pooled_cnn(cnn, per_class=per_class)
        classes = 0 if pool == "" else 4
        pooled.reset_classifier(classes, pool)
        expected: Any = copy.deepcopy(cnn)
        expected.reset_classifier(classes, pool)
        assert type(pooled) is type(cnn)
        assert sorted(vars(pooled)) == sorted(vars(expected))
        assert [name for name, _ in pooled.named_modules()] == [
            name for name, _ in expected.named_modules()
        ]
        assert type(pooled.fc) is type(expected.fc)
        expected.load_state_dict(pooled.state_dict())
        assert torch.equal(pooled(x), expected(x))


def test_failed_reset_keeps_the_pool() -> None:
    pooled = pooled_cnn()
    with pytest.raises(AssertionError, match="Invalid pool type"):
        # The number of classes differs as well, and must not be changed by a failed reset.
        pooled.reset_classifier(CLASSES + 2, "median")
    assert pooled.num_classes == CLASSES
    assert isinstance(pooled.global_pool.attention, AttentionPool2d)
    assert pooled(_images()).shape == (2, CLASSES)


def test_pool_of_a_cnn_that_is_converted_before_or_afterwards() -> None:
    x = _images()
    for model in (
        pooled_cnn(tiny_tcnn()),
        reparameterize(pooled_cnn(), input_size=POOL_SIZE),
    ):
        assert model(x).shape == (2, CLASSES)
        model(x).sum().backward()
        assert all(
            p.grad is not None for name, p in model.named_parameters() if "attention" in name
        )
        names = {id(p): name for name, p in model.named_parameters()}
        groups = {
            group["name"]: {names[id(p)] for p in group["params"]}
            for group in parameter_groups(model)
        }
        assert "global_pool.attention.cls_token" in groups["undecayed"]
        assert groups["gates"]


@torch.no_grad()
def test_pool_of_a_vgg() -> None:
    vgg: Any = timm.create_model("vgg11", num_classes=3, mlp_ratio=0.01).eval()
    for per_class in (False, True):
        pooled: Any = add_attention_pool(vgg, per_class=per_class)
        x = torch.randn(2, 3, 64, 96)
        features = pooled.forward_features(x)
        attention = pooled.head.global_pool.attention
        assert not any(module.training for module in pooled.modules())
        assert attention.channels == pooled.head_hidden_size == 512
        assert torch.equal(pooled.forward_head(features, pre_logits=True), attention(features))
        assert pooled(x).shape == (2, 3)
        # VGG's initialisation has a standard deviation of 0.01, and torch's default for this Linear
        # has 0.026.
        assert 0 < float(pooled.head.fc.weight.std()) < 0.015
        pooled.reset_classifier(5)
        assert pooled(x).shape == (2, 5)
        pooled.reset_classifier(4, "avg")
        assert torch.equal(pooled(x), pooled.head.fc(features.mean((2, 3))))
    # The copy's attribute became 512; the original must keep its own.
    assert vgg.head_hidden_size == 4096
    headless: Any = add_attention_pool(timm.create_model("vgg11", num_classes=0, mlp_ratio=0.01))
    assert headless(x).shape == (2, 512)


@torch.no_grad()
def test_pool_of_a_model_outside_timm() -> None:
    model = Plain()
    x = torch.randn(2, 3, 48, 80)
    pooled: Any = add_attention_pool(model)
    assert type(pooled) is Plain
    assert torch.equal(pooled(x), model.classifier(pooled.pool.attention(model.trunk(x))))
    # If a model begins with its pool, no module before it gives the number of channels.
    only_a_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert add_attention_pool(only_a_pool)(x).shape == (2, 3)
    with pytest.raises(
        ValueError,
        match=r"Plain does not say which layer is its classifier: no get_classifier\(\)",
    ):
        add_attention_pool(model, per_class=True)


# Specialized


@torch.no_grad()
def test_specialized_model_equals_one_built_per_class() -> None:
    pooled = pooled_cnn()
    x = _images()
    before = snapshot(pooled)
    special: Any = specialize(pooled)
    assert snapshot(pooled) == before
    expected = pooled_cnn(per_class=True)
    # Loading is strict: the keys must be those of a model that is built with a token per class.
    expected.load_state_dict(special.state_dict())
    assert torch.equal(expected(x), special(x))
    assert isinstance(special.global_pool.attention.block.attn, PatchAttention)
    tokens = special.forward_head(special.forward_features(x), pre_logits=True)
    assert_same(tokens, tokens[:, :1].expand_as(tokens))
    assert_same(special(x), pooled.fc(tokens[:, 0]))
    special.reset_classifier(4)
    assert special(x).shape == (2, 4)
    assert specialize(pooled, inplace=True) is pooled
    assert pooled.global_pool.attention.per_class


def test_specialized_tokens_are_trained_separately() -> None:
    special: Any = specialize(pooled_cnn())
    token = special.global_pool.attention.cls_token
    before = token.detach().clone()
    special(_images())[:, 1].sum().backward()
    torch.optim.SGD([token], 0.1).step()
    # Only the token of the class with the differentiated score moves.
    moved = (token != before).any(2)
    assert moved.tolist() == [[False, True, False]]
