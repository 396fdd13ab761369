"""LayerScale's weights and the share of residual branches,
compared with each block written out in float64.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.efficientformer import EfficientFormer
from timm.models.focalnet import FocalNet
from timm.models.maxxvit import MaxxVitTransformerCfg, PartitionAttentionCl
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.probes.scattered_models import (
    VIT,
    images,
    inputs_in_float64,
    recorded,
    scattered,
    small,
)

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore:.*for the probe .layer-scale. to read"),
]

Pairs = Sequence[tuple[Tensor, Tensor]]
"""What each branch adds, and what it is added to."""


def vit(block: Any, x: Tensor, **rest: Any) -> Pairs:
    # The block is written out, as the probe reads timm's own forward.
    first = block.ls1(block.attn(block.norm1(x)))
    then = x + first
    return [(first, x), (block.ls2(block.mlp(block.norm2(then))), then)]


def cait(block: Any, x: Tensor, x_cls: Tensor | None = None) -> Pairs:
    main = x if x_cls is None else x_cls
    first = block.gamma_1 * block.attn(
        # Class attention looks at the patches but adds to the class token only.
        block.norm1(x if x_cls is None else torch.cat((x_cls, x), 1))
    )
    return [
        (first, main),
        (block.gamma_2 * block.mlp(block.norm2(main + first)), main + first),
    ]


def xcit(block: Any, x: Tensor, height: int, width: int) -> Pairs:
    first = block.gamma1 * block.attn(block.norm1(x))
    then = x + first
    # XCiT adds a third branch between the other two.
    local = block.gamma3 * block.local_mp(block.norm3(then), height, width)
    last = then + local
    return [
        (first, x),
        (block.gamma2 * block.mlp(block.norm2(last)), last),
        (local, then),
    ]


def convnext(block: Any, x: Tensor) -> Pairs:
    y = block.conv_dw(x)
    # The layers are linear on the last axis, or convolutions on the first.
    y = (
        block.mlp(block.norm(y))
        if block.use_conv_mlp
        else block.mlp(block.norm(y.movedim(1, -1))).movedim(-1, 1)
    )
    return [
        (
            y * (1 if block.gamma is None else block.gamma[:, None, None]),
            block.shortcut(x),
        )
    ]


def expected(
    model: nn.Module, batch: Tensor, oracle: Callable[..., Pairs], *classes: str
) -> dict[str, np.ndarray]:
    """Return, for each block, the mean over images of each branch's ratio,
    computed pixel by pixel in float64.
    """
    calls = inputs_in_float64(model, batch, lambda module: type(module).__name__ in classes)
    ratios = {}
    with torch.no_grad():
        for name, (block, args, kwargs) in calls.items():
            rows = [
                [
                    (branch.square().sum() / x.square().sum()).sqrt().item()
                    for branch, x in zip(added, main, strict=True)
                ]
                for added, main in oracle(block, *args, **kwargs)
            ]
            # This is the mean of ratios, not the ratio of means.
            ratios[name] = np.array(rows).mean(1)
    return ratios


class Windows(nn.Module):
    """One block of MaxViT on windows of 3 x 5 tokens."""

    def __init__(self) -> None:
        super().__init__()
        cfg = MaxxVitTransformerCfg(
            # With one channel per head, three channels are three heads.
            dim_head=1,
            window_size=(3, 5),
            grid_size=(3, 5),
            init_values=0.3,
        )
        self.block = PartitionAttentionCl(3, "grid", cfg)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.movedim(1, 3))


def mlp_model(block: type) -> nn.Module:
    about = {"mlp_ratio": 4, "norm_layer": Affine} if block is ResBlock else {}
    return MlpMixer(3, img_size=(32, 48), num_blocks=2, embed_dim=7, block_layer=block, **about)


def focal_net() -> nn.Module:
    return FocalNet(
        depths=(1, 1),
        embed_dim=6,
        layerscale_value=0.2,
        focal_levels=(2, 2),
        focal_windows=(3, 3),
    )


def former() -> nn.Module:
    return EfficientFormer((1, 1, 1, 1), embed_dims=(4, 6, 10, 14), num_vit=1)


def timms(name: str, **about: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, **VIT | about)


SMALL = (32, 48)
SCALED = {"init_values": 0.3}
# Every stage has a different width, so that no stage can be mistaken for another.
CONVNEXT = partial(timm.create_model, "convnext_tiny", depths=(1, 1, 2, 1), dims=(5, 7, 11, 13))
BLOCKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Pairs], Any]] = {
    "vit": (timms("vit_tiny_patch16_224", **SCALED), vit, SMALL),
    "cait": (timms("cait_xxs24_224"), cait, SMALL),
    "xcit": (timms("xcit_nano_12_p16_224"), xcit, SMALL),
    "convnext": (CONVNEXT, convnext, (64, 96)),
}
CLASSES = [
    "Block",
    "LayerScaleBlock",
    "LayerScaleBlockClassAttn",
    "XCABlock",
    "ConvNeXtBlock",
]


@pytest.mark.study(but=["vit", "convnext", "xcit"])
@pytest.mark.parametrize("family", BLOCKS)
def test_ratio_equals_that_of_the_block_written_out(family: str) -> None:
    make, oracle, size = BLOCKS[family]
    torch.manual_seed(0)
    # The initial LayerScale weights are all alike, so a wrong branch or block would have the right
    # ratio.
    model = scattered(make().eval())
    batch = images(3, *size)
    # Batches have different sizes: one image, then two.
    ds = recorded(model, "layer-scale", batch[:1], batch[1:])
    truth = expected(model, batch, oracle, *CLASSES)
    assert list(ds["layer"].values) == list(truth)
    np.testing.assert_array_equal(ds.images, 3)
    for layer, ratios in truth.items():
        # Branches of a float32 model carry a relative error of about 1e-6, which norms average.
        np.testing.assert_allclose(
            ds.residual_ratio.sel(layer=layer)[: len(ratios)], ratios, rtol=1e-4
        )
        assert np.isnan(ds.residual_ratio.sel(layer=layer)[len(ratios) :]).all()
    if family == "convnext":  # channels beyond a stage's width are NaN
        assert ds.scale.dims == ("layer", "branch", "channel")
        # The stages have one, one, two and one block.
        widths = np.isfinite(ds.scale.values).sum((1, 2))
        assert widths.tolist() == [5, 7, 11, 11, 13]


# Models, and the numbers of their blocks and of the blocks' branches.
OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, int, bool]] = {
    "relpos": (timms("vit_relpos_small_patch16_224", **SCALED), SMALL, 2, True),
    "beit": (timms("beit_base_patch16_224", **SCALED), SMALL, 2, True),
    # Patches have 14 x 14 pixels.
    "eva": (
        timms("eva02_tiny_patch14_224", img_size=(28, 42), embed_dim=24),
        (28, 42),
        2,
        False,
    ),
    "resmlp": (lambda: mlp_model(ResBlock), SMALL, 2, True),
    "mixer": (lambda: mlp_model(MixerBlock), SMALL, 2, False),
    "channels first": (focal_net, (64, 96), 2, True),
    # EfficientFormer fixes the size of its grid.
    "two kinds of blocks": (former, (224, 224), 4, True),
    "windows": (Windows, (6, 10), 1, True),
}


@pytest.mark.study(but=["windows"])
@pytest.mark.parametrize("family", OTHERS)
def test_the_branches_of_other_blocks_add_up_to_their_outputs(family: str) -> None:
    """The recorder raises an error if main and residual branches differ
    from the output of the first image.
    """
    make, size, blocks, has_scale = OTHERS[family]
    torch.manual_seed(0)
    ds = recorded(scattered(make().eval()), "layer-scale", images(2, *size))
    assert ds.residual_ratio.shape == (blocks, 2)
    assert (ds.residual_ratio > 0).all()
    assert ("scale" in ds) == has_scale


def test_scale_is_read_at_the_mark_and_is_1_for_branches_without_one() -> None:
    model = small("vit_tiny_patch16_224", **VIT | {"init_values": 0.3})
    batch = images(1)
    # A branch without LayerScale counts as 1.
    model.blocks[0].ls2 = nn.Identity()
    with tcnn_probe.record(model, probes="layer-scale") as recorder, torch.no_grad():
        for epoch in range(2):
            model(batch)
            # The weight changes between the forward and the mark, and the value at the mark is
            # recorded.
            model.blocks[0].ls1.gamma.mul_(2)
            recorder.mark(epoch=epoch)
    ds = recorder.tree["layer-scale"].to_dataset().load()
    final = model.blocks[0].ls1.gamma.detach().double()
    np.testing.assert_allclose(ds.scale.sel(epoch=1, layer="blocks.0")[0], final, rtol=0)
    np.testing.assert_allclose(ds.scale.sel(epoch=0, layer="blocks.0")[0], final / 2, rtol=0)
    np.testing.assert_array_equal(ds.scale.sel(layer="blocks.0")[:, 1], 1)
    np.testing.assert_allclose(
        ds.scale.sel(epoch=1, layer="blocks.1")[1],
        model.blocks[1].ls2.gamma.detach(),
        rtol=0,
    )


def test_layer_scale_in_place() -> None:
    model = small("vit_tiny_patch16_224", **VIT | {"init_values": 0.3})
    batch = images(3)
    before = recorded(model, "layer-scale", batch)
    for block in model.blocks:
        block.ls1.inplace = block.ls2.inplace = True
    # LayerScale in place overwrites the branch before the sum, so the ratio must be computed before
    # that.
    np.testing.assert_array_equal(
        recorded(model, "layer-scale", batch).residual_ratio, before.residual_ratio
    )


# The tolerance allows ten roundings in a row.
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_half_precision(dtype: torch.dtype, rtol: float) -> None:
    """The model's own rounding, 2^-9 or 2^-12 per operation,
    is the only error, as norms are taken in float32.
    """
    model = small("vit_tiny_patch16_224", **VIT | {"init_values": 0.3}).to(dtype)
    with torch.no_grad():
        # The sum of squares of such values overflows in float16.
        model.pos_embed.mul_(80000)  # a norm of these is beyond the range of float16
    batch = images(3).to(dtype)
    truth = expected(model, batch, vit, "Block")
    np.testing.assert_allclose(
        recorded(model, "layer-scale", batch).residual_ratio,
        list(truth.values()),
        rtol=rtol,
    )


def test_branches_in_training_are_measured_before_stochastic_depth() -> None:
    """Branches of CaiT, which calls one DropPath twice,
    are measured undropped, relative to what they are added to.
    """
    # The model has one block and drops half of the branches, so that eleven images contain both
    # cases.
    model = small("cait_xxs24_224", **VIT | {"drop_path_rate": 0.5, "depth": 1}).train()
    block = model.blocks[0]
    calls = {}
    for name in ("norm1", "norm2", "attn", "mlp"):
        getattr(block, name).register_forward_hook(
            lambda m, x, y, name=name: calls.update({name: (x[0], y)})
        )
    torch.manual_seed(3)
    ds = recorded(model, "layer-scale", images(11), when="train")
    first = block.gamma_1 * calls["attn"][1]
    # A dropped branch leaves its input as it was.
    dropped = (calls["norm2"][0] == calls["norm1"][0]).flatten(1).all(1)
    # Without both cases the test would pass with the wrong branch.
    assert 0 < dropped.sum() < 11
    pairs = (
        (first, calls["norm1"][0]),
        (block.gamma_2 * calls["mlp"][1], calls["norm2"][0]),
    )
    truth = [(a.flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).mean().item() for a, b in pairs]
    np.testing.assert_allclose(ds.residual_ratio.sel(layer="blocks.0"), truth, rtol=1e-5)


def test_block_with_another_forward_is_left_alone() -> None:
    class Other(timm.models.vision_transformer.Block):
        def forward(self, x: Tensor, **rest: Any) -> Tensor:
            # The class is a Block with a different sum, which would silently be read as that of a
            # Block.
            return super().forward(2 * x)

    model = small("vit_tiny_patch16_224", **VIT | {"block_fn": Other})
    with pytest.raises(
        ValueError,
        match=r"VisionTransformer has no layer for the probes \['layer-scale'\]",
    ):
        tcnn_probe.record(model, probes="layer-scale")
    assert not model._forward_hooks


def test_block_whose_sum_is_changed_by_a_hook_is_not_recorded() -> None:
    model = small("vit_tiny_patch16_224", **VIT)
    # A foreign hook changes the branch that is added, so the sum no longer is that of the branches.
    model.blocks[1].drop_path2.register_forward_hook(lambda m, x, y: 3 * y)
    with (
        tcnn_probe.record(model, probes="layer-scale"),
        pytest.raises(tcnn_probe.ReconstructionError, match=r"blocks\.1"),
        torch.no_grad(),
    ):
        model(images(1))


def test_labels_of_branches_and_resuming(tmp_path: Path) -> None:
    """A recording has as many labels of branches as the layers have, also after resuming."""
    for name, labels in (
        ("xcit_nano_12_p16_224", ["mixer", "mlp", "local"]),
        ("vit_tiny_patch16_224", ["mixer", "mlp"]),
    ):
        model = small(name, **VIT)
        path = tmp_path / f"{name}.zarr"
        for epoch in range(2):
            with tcnn_probe.record(
                model, path, probes="layer-scale", layers="blocks.1"
            ) as recorder:
                with torch.no_grad():
                    model(images(2))
                recorder.mark(epoch=epoch)
        ds = tcnn_probe.open(path)["layer-scale"].to_dataset()
        # The second run, with the same model and images, must keep the order of branches.
        np.testing.assert_array_equal(ds.residual_ratio[0], ds.residual_ratio[1])
        assert ds.branch.values.tolist() == labels
        assert "Fig. 3.6" in ds.residual_ratio.attrs["description"]
