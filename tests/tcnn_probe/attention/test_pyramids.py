"""Networks with stages and pooled queries or keys: what is recorded of each equals brute force in float64."""

from collections.abc import Callable

import pytest
import timm
from timm.layers import AttentionPool2d
from timm.models.crossvit import CrossVit
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.efficientvit_msra import EfficientVitMsra
from timm.models.levit import Levit
from timm.models.metaformer import Attention, LayerNormNoBias, MetaFormer
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.tiny_vit import TinyVit
from torch import Tensor, nn

from tests.tcnn_probe.attention.bruteforce import Layout, Place, grid, pooled
from tests.tcnn_probe.attention.checking import Family, check_family
from tests.tcnn_probe.attention.sharpen import sharpen


def same(tokens: list[Place]) -> Layout:
    return Layout(tokens, tokens, class_query=tokens[0] is None)


def timms(
    model: str, size: tuple[int, int], shapes: dict[str, tuple[int, int]], *, gain: float = 1.7, **options: object
) -> Family:
    """Global attention in stages, by the beginning of the layer's name."""

    def layout(layer: str, module: nn.Module) -> Layout:
        shape = next(shape for begins, shape in shapes.items() if layer.startswith(begins))
        return same(grid(*shape))

    build = lambda: sharpen(timm.create_model(model, num_classes=5, **options), gain)  # noqa: E731
    return Family(model, build, size, layout, flattest=0.95)


def mvit(*, class_token: bool) -> Family:
    """Strided 3 x 3 convolutions pool: token i stands for pixel ``stride * i``, in cells of the finer grid."""
    options = {"depths": (1, 1), "embed_dim": (16, 32), "num_heads": (2, 4), "use_cls_token": class_token}
    strides = {"stride_q": ((1, 1), (2, 2)), "stride_kv": ((4, 4), (1, 1)), "expand_attn": False}
    coarse = {"prefix": int(class_token), "spacing": (4, 4)}

    def layout(layer: str, module: nn.Module) -> Layout:
        if layer.startswith("stages.0"):  # 16 x 16 queries
            tokens = grid(16, 16, prefix=int(class_token)), grid(4, 4, **coarse)
        else:  # 8 x 8 of them, of 16 x 16 keys
            tokens = grid(8, 8, prefix=int(class_token), spacing=(2, 2)), grid(16, 16, prefix=int(class_token))
        return Layout(*tokens, class_query=class_token)

    cfg = MultiScaleVitCfg(**options, **strides)
    name = "mvitv2_cls" if class_token else "mvitv2"
    return Family(name, lambda: sharpen(MultiScaleVit(cfg, img_size=(64, 64), num_classes=5), 2.2), (64, 64), layout)


def levit(*, use_conv: bool) -> Family:
    """Of 14 x 14 tokens every second row and column ask in the first downsampling, of 7 x 7 in the second: 4 x 4."""
    options = {"embed_dim": (32, 48, 64), "depth": (1, 1, 1), "key_dim": 8, "num_heads": (2, 3, 4)}

    def layout(layer: str, module: nn.Module) -> Layout:
        stage = int(layer.split(".")[1])
        if "downsample" in layer:
            side, all_of_them = (7, 14) if stage == 1 else (4, 7)
            return Layout(grid(side, side, spacing=(2, 2)), grid(all_of_them, all_of_them))
        return same(grid(*[(14, 14), (7, 7), (4, 4)][stage]))

    return Family(
        f"levit{'_conv' * use_conv}",
        lambda: sharpen(Levit(use_conv=use_conv, num_classes=5, **options), 2.2),
        (224, 224),
        layout,
        images=4,
        flattest=0.97,
    )


def efficientformer_v2() -> Family:
    """4 x 6 tokens, of which the blocks make 2 x 3; in the downsampling every second row and column asks."""

    def layout(layer: str, module: nn.Module) -> Layout:
        return Layout(grid(2, 3, spacing=(2, 2)), grid(4, 6)) if "downsample" in layer else same(grid(2, 3))

    options = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 32), "mlp_ratios": ((1,),) * 4, "num_vit": 1}
    build = lambda: sharpen(EfficientFormerV2(img_size=(64, 96), num_classes=5, **options), 2.2)  # noqa: E731
    return Family("efficientformerv2", build, (64, 96), layout)


def pvt(*, linear: bool) -> Family:
    """16 x 24 and 8 x 12 queries; keys pooled 8 x 8 and 4 x 4 in one, or to 7 x 7 whatever the size (``linear``)."""

    def layout(layer: str, module: nn.Module) -> Layout:
        rows, columns = (16, 24) if layer.startswith("stages.0") else (8, 12)
        if linear:
            return Layout(None, None)
        return Layout(grid(rows, columns), pooled(2, 3, rows // 2))

    options = {"depths": (1, 1), "embed_dims": (16, 16), "num_heads": (2, 4), "sr_ratios": (8, 4), "mlp_ratios": (1, 1)}
    return Family(
        f"pvt_v2{'_linear' * linear}",
        lambda: sharpen(PyramidVisionTransformerV2(num_classes=5, linear=linear, **options), 2.5),
        (64, 96),
        layout,
    )


def crossvit() -> Family:
    """Two grids of the same image, whose class tokens look at each other's patches."""
    options = {"img_size": 48, "patch_size": (8, 12), "embed_dim": (16, 24), "depth": ((1, 1, 0),), "num_heads": (2, 4)}

    def layout(layer: str, module: nn.Module) -> Layout:
        branch = int(layer.split(".")[3])
        own = grid(6, 6, prefix=1) if branch == 0 else grid(4, 4, prefix=1)
        other = grid(4, 4, prefix=1) if branch == 0 else grid(6, 6, prefix=1)
        return Layout(None, other, class_query=True) if "fusion" in layer else same(own)

    return Family("crossvit", lambda: sharpen(CrossVit(num_classes=5, **options)), (48, 48), layout)


def efficientvit() -> Family:
    """Heads run one after another: each is a layer of one head. 14 x 14 tokens in windows of 7 x 7, then 7 x 7."""
    options = {"embed_dim": (16, 16), "key_dim": (8, 8), "depth": (1, 1), "num_heads": (2, 2), "window_size": (7, 7)}

    def layout(layer: str, module: nn.Module) -> Layout:
        tokens = grid(7, 7)
        return Layout(tokens, tokens, arrange=lambda weights, images: weights.unflatten(0, (images, -1)).unsqueeze(2))

    down = (("", 1), ("subsample", 2))
    build = lambda: sharpen(EfficientVitMsra(num_classes=5, kernels=(3, 3), down_ops=down, **options), 2.5)  # noqa: E731
    return Family("efficientvit_msra", build, (224, 224), layout, images=4)


class Pool(nn.Module):
    """CLIP's convnets end so: a token, the mean of all features, looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 8, 8)
        self.pool = AttentionPool2d(24, out_features=5, feat_size=(3, 5), head_dim=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.stem(x))


def clip() -> Family:
    return Family(
        "attention_pool2d", lambda: sharpen(Pool(), 2.2), (24, 40), lambda layer, module: same(grid(3, 5, prefix=1))
    )


def shvit() -> Family:
    """One head, and no axis for it."""
    shapes = {"stages.1": (4, 6), "stages.2": (2, 3)}

    def layout(layer: str, module: nn.Module) -> Layout:
        tokens = grid(*shapes[layer[:8]])
        return Layout(tokens, tokens, arrange=lambda weights, images: weights[:, None, None])

    return Family("shvit", lambda: sharpen(timm.create_model("shvit_s1", num_classes=5)), (128, 192), layout)


def mobilenetv4() -> Family:
    """Multi-query attention: strided 3 x 3 convolutions make 2 x 3 keys of 4 x 6 pixels."""

    def layout(layer: str, module: nn.Module) -> Layout:
        early = layer.startswith("blocks.2")
        keys = grid(2, 3, spacing=(2, 2)) if early else grid(2, 3)
        # (B, heads, N_query, N_key) in the layer, where the keys have one head
        return Layout(grid(4, 6) if early else grid(2, 3), keys)

    return Family(
        "mobilenetv4",
        lambda: sharpen(timm.create_model("mobilenetv4_hybrid_medium"), 1.5),
        (64, 96),
        layout,
        flattest=0.95,
    )


def caformer() -> Family:
    options = {"depths": (1, 1), "dims": (32, 64), "token_mixers": (Attention,) * 2, "norm_layers": LayerNormNoBias}
    shapes = {"stages.0": (16, 24), "stages.1": (8, 12)}
    return Family(
        "caformer",
        lambda: sharpen(MetaFormer(num_classes=5, **options), 2.2),
        (64, 96),
        lambda layer, module: same(grid(*shapes[layer[:8]])),
    )


def tiny_vit() -> Family:
    """16 x 24, 8 x 12 and 4 x 6 pixels in windows of 4 x 4."""
    options = {"embed_dims": (16, 16), "depths": (1, 2), "num_heads": (2, 4), "window_sizes": (7, 4)}
    return Family(
        "tiny_vit",
        lambda: sharpen(TinyVit(num_classes=5, **options), 2.2),
        (64, 96),
        lambda layer, module: same(grid(4, 4)),
    )


def coatnet(model: str) -> Family:
    options = {"img_size": (64, 96), "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 64), "stem_width": 16}
    return timms(model, (64, 96), {"stages.2": (4, 6), "stages.3": (2, 3)}, gain=2.2, **options)


def botnet() -> Family:
    """Heads are merged into the batch."""
    shapes = {"stages.2": (4, 6), "stages.3.0": (4, 6), "stages.3.1": (2, 3)}

    def layout(layer: str, module: nn.Module) -> Layout:
        tokens = grid(*next(shape for begins, shape in shapes.items() if layer.startswith(begins)))
        return Layout(tokens, tokens, arrange=lambda weights, images: weights.unflatten(0, (images, 1, 4)))

    model = "botnet26t_256"
    return Family(model, lambda: sharpen(timm.create_model(model, img_size=(64, 96)), 2.0), (64, 96), layout)


def visformer() -> Family:
    options = {"img_size": (64, 96), "embed_dim": 64, "depth": (1, 1, 1), "init_channels": 16, "num_heads": 4}
    return timms("visformer_tiny", (64, 96), {"stage2": (4, 6), "stage3": (2, 3)}, **options)


FAMILIES: list[Callable[[], Family]] = [
    lambda: mvit(class_token=False),
    lambda: mvit(class_token=True),
    lambda: levit(use_conv=False),
    lambda: levit(use_conv=True),
    efficientformer_v2,
    lambda: pvt(linear=False),
    lambda: pvt(linear=True),
    crossvit,
    efficientvit,
    clip,
    tiny_vit,
    shvit,
    mobilenetv4,
    caformer,
    lambda: coatnet("coatnet_pico_rw_224"),
    lambda: coatnet("coatnet_0_224"),
    botnet,
    visformer,
]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda make: make().name)
def test_equals_brute_force(case: Callable[[], Family]) -> None:
    check_family(case())
