"""PatchConvNet: its published sizes, and timm's interface."""

from typing import Any

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tcnn_model import AttentionPool2d, parameter_groups
from tcnn_model.pooling.attention_pool import ClassScores
from tests.tcnn_model.numerics import assert_same, disturb

D, DEPTH, K = 16, 3, 5
SMALL = {"embed_dim": D, "depth": DEPTH, "num_classes": K}
KINDS = ["patchconvnet_s60", "patchconvnet_s60_multi"]


def _small(name: str = KINDS[0], **options: Any) -> Any:
    return disturb(timm.create_model(name, **SMALL | options), scale=0.2).eval()


@pytest.mark.study
@pytest.mark.parametrize(
    ("name", "millions", "billions"),
    [("s60", 25.2, 4.0), ("b60", 99.4, 15.8), ("s60_multi", 25.6, 5.3)],
)
def test_sizes_as_published(name: str, millions: float, billions: float) -> None:
    """Sizes are those of Table 1, and for "s60_multi" those of the original repository."""
    with torch.device("meta"):
        model = timm.create_model(f"patchconvnet_{name}").eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 224, 224))
    # The paper gives them to a tenth of a million.
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.051)
    # torch counts a multiply-add as two operations, but the paper counts it as one.
    assert counter.get_total_flops() / 2e9 == pytest.approx(billions, rel=0.01)


def test_models_are_in_timms_registry() -> None:
    sizes = ("s20", "s36", "s60", "s120", "b36", "b60", "b120", "l60", "l120")
    assert set(timm.list_models("patchconvnet_*")) == {
        f"patchconvnet_{s}{k}" for s in sizes for k in ("", "_multi")
    }
    with torch.device("meta"):
        for size, width in (("s20", 384), ("b36", 768), ("l60", 1024)):
            model = timm.create_model(f"patchconvnet_{size}")
            assert model.embed_dim == width
            assert len(model.blocks) == int(size[1:])


@pytest.mark.parametrize(
    ("name", "scale"), [("s60", 1e-4), ("s120", 1e-6), ("b36", 1e-6), ("l60", 1e-6)]
)
def test_initial_layer_scales(name: str, scale: float) -> None:
    model = timm.create_model(f"patchconvnet_{name}", embed_dim=8, depth=2)
    gammas = [parameter for name, parameter in model.named_parameters() if "gamma" in name]
    # There is one in each block of the trunk, and two in the pooling block.
    assert len(gammas) == 2 + 2
    assert {round(value, 9) for gamma in gammas for value in gamma.tolist()} == {scale}


@pytest.mark.parametrize("kind", KINDS)
# The images consist of whole patches or end within a patch; the smallest is one patch and one pixel
# high.
@pytest.mark.parametrize("size", [(48, 80), (50, 71), (17, 33)])
@torch.no_grad()
def test_images_of_any_size(kind: str, size: tuple[int, int]) -> None:
    model = _small(kind)
    x = torch.randn(2, 3, *size)
    features = model.forward_features(x)
    assert features.shape == (2, D, -(-size[0] // 16), -(-size[1] // 16))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == ((2, K, D) if model.per_class else (2, D))
    assert model(x).shape == (2, K)
    assert torch.equal(model(x), model.get_classifier()(pooled))


def test_a_patch_is_centred_on_the_first_pixel_of_its_cell() -> None:
    """The stem's four convolutions of 3 x 3,
    stride 2 and padding 1 see 15 pixels on either side of pixel 16 i.
    """
    # There are no blocks, as their 3 x 3 convolutions would see further; in float32 small gradients
    # could be 0.
    model = _small(depth=0).double()
    image = torch.randn(1, 3, 80, 112, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(model.stem(image)[0, :, 2, 3].sum(), image)[0].abs().sum((0, 1))
    rows, columns = (gradient.sum(dim).nonzero()[:, 0].tolist() for dim in (1, 0))
    assert rows[0] == 16 * 2 - 15
    assert rows[-1] == 16 * 2 + 15
    assert columns[0] == 16 * 3 - 15
    assert columns[-1] == 16 * 3 + 15


@torch.no_grad()
def test_transposed_network_gives_the_same_scores_for_transposed_images() -> None:
    model = _small()
    x = torch.randn(2, 3, 48, 80)
    expected = model(x)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # If axes were exchanged somewhere, as in the original, this would fail on 48 x 80
            # pixels.
            module.weight.copy_(module.weight.transpose(2, 3).clone())
    assert_same(model(x.transpose(2, 3)), expected)


def test_norms_of_the_trunk() -> None:
    batch = _small(norm_layer="batchnorm2d")
    assert all(isinstance(block.norm, nn.BatchNorm2d) for block in batch.blocks)
    assert all(
        isinstance(block.norm, nn.LayerNorm) and block.norm.eps == 1e-6 for block in _small().blocks
    )
    assert isinstance(batch.pool.norm, nn.LayerNorm)
    before = batch.blocks[0].norm.running_mean.clone()
    # The running averages change, so the norm uses the statistics of its batch.
    batch.train()(torch.randn(3, 3, 48, 80)).sum().backward()
    assert not torch.equal(batch.blocks[0].norm.running_mean, before)


@torch.no_grad()
def test_average_pooling() -> None:
    """Table 5: patches are averaged and normalised,
    without attention; the pool stays with the classifier.
    """
    model = _small(global_pool="avg")
    x = torch.randn(2, 3, 48, 80)
    features = model.forward_features(x)
    mean = torch.stack([image.flatten(1).mean(1) for image in features])
    pooled = nn.functional.layer_norm(
        mean, (D,), model.pool.norm.weight, model.pool.norm.bias, 1e-6
    )
    assert_same(model.forward_head(features, pre_logits=True), pooled)
    assert_same(model(x), model.head(pooled))
    assert not any(isinstance(module, AttentionPool2d) for module in model.modules())
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), features)


@torch.no_grad()
def test_linear_stem() -> None:
    """Table 5: one layer on the pixels of each patch;
    pixels beyond the last whole patch are left out.
    """
    model = _small(stem="linear")
    x = torch.randn(2, 3, 50, 71)
    (layer,) = model.stem
    expected = torch.empty(2, D, 3, 4)
    for row in range(3):
        for column in range(4):
            patch = x[:, :, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            vectors = patch.flatten(1) @ layer.weight.flatten(1).T
            expected[:, :, row, column] = vectors + layer.bias
    torch.testing.assert_close(model.stem(x), expected, rtol=1e-4, atol=1e-4)
    assert model(x).shape == (2, K)
    # 50 x 71 pixels hold 3 x 4 whole patches.
    assert torch.equal(model(x), model(x[:, :, :48, :64]))


@pytest.mark.parametrize("kind", KINDS)
def test_several_heads_have_the_parameters_of_one(kind: str) -> None:
    """Table 5: only the division of channels among heads differs."""
    single = _small(kind)
    multiple = timm.create_model(kind, **SMALL, num_heads=4).eval()
    multiple.load_state_dict(single.state_dict())
    assert single.pool.num_heads == 1
    assert multiple.pool.num_heads == 4
    x = torch.randn(2, 3, 48, 80)
    # The weights are equal, so the difference must come from the heads.
    assert not torch.allclose(single(x), multiple(x), atol=1e-3)


def test_stochastic_depth_is_uniform() -> None:
    model = timm.create_model("patchconvnet_s36", **SMALL, drop_path_rate=0.3)
    assert [block.drop_path.drop_prob for block in model.blocks] == [0.3] * DEPTH


# timm's interface


@torch.no_grad()
def test_intermediates_equal_those_of_a_loop() -> None:
    model = _small()
    x = torch.randn(2, 3, 48, 80)
    y = model.stem(x)
    expected = []
    for block in model.blocks:
        y = block(y)
        expected.append(y)
    features, intermediates = model.forward_intermediates(x)
    assert torch.equal(features, y)
    assert all(torch.equal(a, b) for a, b in zip(intermediates, expected, strict=True))
    assert len(model.forward_intermediates(x, indices=2, intermediates_only=True)) == 2
    # timm may stop early to save time: the blocks after the last requested one must not run.
    model.blocks[2].register_forward_pre_hook(lambda *_: pytest.fail("the last block ran"))
    (second,) = model.forward_intermediates(
        x, indices=[1], stop_early=True, intermediates_only=True
    )
    assert torch.equal(second, expected[1])
    with pytest.raises(ValueError, match="expected output_fmt='NCHW', got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_features_only(kind: str) -> None:
    x = torch.randn(2, 3, 48, 80)
    last = timm.create_model(kind, features_only=True, embed_dim=D, depth=DEPTH)
    assert [tuple(y.shape) for y in last(x)] == [(2, D, 3, 5)]
    extractor = timm.create_model(
        kind, features_only=True, out_indices=(0, 1), embed_dim=D, depth=DEPTH
    )
    assert extractor.feature_info.channels() == [D, D]
    assert extractor.feature_info.reduction() == [16, 16]
    assert [tuple(y.shape) for y in extractor(x)] == [(2, D, 3, 5)] * 2
    names = dict(extractor.named_modules())
    assert "model.blocks.1" in names
    assert "model.blocks.2" not in names
    assert not any(isinstance(module, AttentionPool2d) for module in names.values())
    model = _small(kind)
    expected = model.forward_intermediates(x, indices=[1], intermediates_only=True)
    assert torch.equal(FeatureGetterNet(model, out_indices=[1])(x)[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_gradients_are_the_same(kind: str) -> None:
    model = _small(kind).train()
    x = torch.randn(2, 3, 48, 80)
    gradients = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        # Gradients are near 1.
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-4)
    runs: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    model(x).sum().backward()
    assert len(runs) == 2  # the backward runs it a second time
    model.forward_intermediates(x)[0].sum().backward()
    assert len(runs) == 4


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_reset_of_the_classifier(kind: str) -> None:
    model = _small(kind)
    x = torch.randn(2, 3, 48, 80)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    pool = model.pool
    block = model.pool.block
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    assert model.num_classes == 7
    assert not model.head.training
    assert model.pool is pool
    assert model.pool.block is block
    assert model.pool.cls_token.shape == (1, 7 if model.per_class else 1, D)
    assert isinstance(model.get_classifier(), ClassScores) == model.per_class
    model.reset_classifier(0, "")
    assert not model.per_class
    assert torch.equal(model(x), model.forward_features(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"embed_dim": 12},
            "expected a width that is a multiple of 8, got embed_dim=12",
        ),
        (
            {"global_pool": "max"},
            "expected global_pool='attn', 'avg' or '', got 'max'",
        ),
        ({"stem": "mlp"}, "expected stem='conv' or 'linear', got 'mlp'"),
        ({"num_heads": 3}, "heads that divides 16 channels, got num_heads=3"),
        (
            {"per_class": True, "global_pool": "avg"},
            "need classes and attention, got num_classes=5, global_pool='avg'",
        ),
        ({"global_pool": ""}, "there is no classifier: expected num_classes=0, got 5"),
        (
            {"per_class": True, "num_classes": 0},
            "tokens for each class need classes and attention, got num_classes=0",
        ),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timm.create_model("patchconvnet_s20", **SMALL | options)


@pytest.mark.parametrize(("classes", "pool"), [(3, ""), (3, "avg"), (0, "max")])
def test_invalid_resets_are_refused(classes: int, pool: str) -> None:
    model = _small()
    with pytest.raises(
        ValueError,
        match=f"cannot have {classes} classes with global_pool='{pool}', from 'attn'",
    ):
        model.reset_classifier(classes, pool)
    assert model(torch.randn(1, 3, 48, 32)).shape == (1, K)


def test_parameter_groups_for_training() -> None:
    model = _small(KINDS[1])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for groups in (
        parameter_groups(model),
        # These groups are ours, and those of timm, which calls ``no_weight_decay()``.
        create_optimizer_v2(model, weight_decay=0.1).param_groups,
    ):
        decay = {
            names[id(parameter)]: group["weight_decay"]
            for group in groups
            for parameter in group["params"]
        }
        assert decay["pool.cls_token"] == 0 < decay["pool.block.attn.q.weight"]
    scales = {
        names[id(parameter)]: group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.5)
        for parameter in group["params"]
    }
    blocks = [f"blocks.{i}.conv1.weight" for i in range(DEPTH)]
    order = [scales[name] for name in ("stem.0.weight", *blocks, "pool.cls_token", "head.weight")]
    # The pool is in the group of the last block.
    assert order == [0.5**n for n in (4, 3, 2, 1, 1, 0)]


@pytest.mark.study
def test_exports_with_a_dynamic_batch_size() -> None:
    model = _small(KINDS[1])
    x = torch.randn(2, 3, 32, 48)
    program = torch.export.export(
        model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    )
    # The traced batch had another size.
    larger = torch.randn(3, 3, 32, 48)
    assert_same(program.module()(larger), model(larger))
