"""Rungs of the ladder on layers with a grid,
against dense attention in float64 that is written out slowly.
"""

from typing import Any

import numpy as np
import pytest
import torch
from timm.layers import Attention
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.interventions.salience import scale_keys
from tests.tcnn_probe.interventions.ablations import chain_images
from tests.tcnn_probe.interventions.softmax_models import MODELS, wide
from tests.tcnn_probe.interventions.test_given_attention import (
    HEADS,
    ROUNDINGS,
    LayerCall,
    close,
    gated_layer,
    of_softmax,
)
from tests.tcnn_probe.networks import Chain

pytestmark = pytest.mark.numerical

MODES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "convolutional": {"images": True},
    "salient": {"images": True},
    "local": {"radius": 1},
    "distant": {"radius": 1.5},
}
# Convolutions are fitted until the cross entropy decreases by less than 1e-13 nat, and an attention
# that is so near to another one in nat differs from it by at most the root of twice that (Pinsker's
# inequality); keys of salient attention receive what they should to a similar share.
FITTED = 1e-6
# Of the slow computations. After 200 of these, all sums are as they should be but for rounding.
ROUNDS = 500


def cells(height: int, width: int, prefix: int = 0) -> np.ndarray:
    """Return row and column of each token, NaN for those before the grid."""
    grid = np.indices((height, width)).reshape(2, -1).T.astype(float)
    return np.concatenate([np.full((prefix, 2), np.nan), grid])


def rung(
    mode: str,
    own: Tensor,
    mean: Tensor,
    queries: np.ndarray,
    keys: np.ndarray,
    seen: Tensor,
    radius: float = 0,
) -> Tensor:
    """Return the attention of a rung, (images, windows, heads, N_query, N_key).

    Args:
        mode: Mode of the ablation.
        own: Attention of the images.
        mean: Mean attention of other images, (windows, heads, N_query, N_key).
        queries, keys: Rows and columns, NaN for class tokens.
        seen: Whether each query sees each key, (windows, N_query, N_key).
        radius: Radius of "local" and "distant".
    """
    patches = np.isfinite(queries[:, 0])
    new = own.clone()
    if mode == "uniform":
        uniform = seen.double() / seen.sum(-1, keepdim=True)
        new[..., patches, :] = uniform[:, None, patches].expand_as(own[..., patches, :])
    elif mode in ("local", "distant"):
        far = np.hypot(*np.moveaxis(keys - queries[:, None], -1, 0)) > radius
        off_grid = np.isnan(keys[:, 0])
        hidden = far & ~off_grid if mode == "local" else ~far & ~off_grid
        kept = own.masked_fill(torch.from_numpy(hidden), 0)
        kept = kept / kept.sum(-1, keepdim=True).clamp_min(1e-300)
        new[..., patches, :] = kept[..., patches, :]
    elif mode == "convolutional":
        new[..., patches, :] = slow_convolution(
            mean[..., patches, :], queries[patches], keys, seen[:, patches]
        ).expand_as(own[..., patches, :])
    else:
        for image, of_image in enumerate(own):
            target = of_image[..., patches, :].sum(-2)
            new[image][..., patches, :] = slow_scaling(mean[..., patches, :], target)
    return new


def slow_convolution(mean: Tensor, queries: np.ndarray, keys: np.ndarray, seen: Tensor) -> Tensor:
    """Return the nearest convolution, by hundreds of rounds over a table of all offsets."""
    offsets: dict[Any, int] = {}
    index = np.empty((len(queries), len(keys)), dtype=int)
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            name = ("token", j) if np.isnan(key[0]) else tuple(key - query)
            index[i, j] = offsets.setdefault(name, len(offsets))
    table = nn.functional.one_hot(torch.from_numpy(index)).double()
    theta = torch.zeros(mean.shape[1], len(offsets), dtype=torch.float64)
    wanted = torch.einsum("whij,ijd->hd", mean, table)
    for _ in range(ROUNDS):
        weights = theta.exp() @ table.flatten(0, 1).T
        weights = weights.view(1, -1, *index.shape) * seen[:, None]
        fitted = weights / weights.sum(-1, keepdim=True)
        masses = torch.einsum("whij,ijd->hd", fitted, table)
        theta += (wanted / masses.clamp_min(1e-300)).clamp_min(1e-300).log()
    return fitted


def slow_scaling(mean: Tensor, target: Tensor) -> Tensor:
    """Return M_i(j) g(j) / Z_i with given column sums, by hundreds of rounds."""
    scaled = mean.clone()
    for _ in range(ROUNDS):
        scaled = scaled * (target / scaled.sum(-2).clamp_min(1e-300))[..., None, :]
        scaled = scaled / scaled.sum(-1, keepdim=True).clamp_min(1e-300)
    return scaled


def options_of(mode: str, references: Tensor) -> dict[str, Any]:
    options = dict(MODES[mode])
    if "images" in options:
        options["images"] = [references[:1], references[1:]]
    return options


def share_of(mode: str) -> float:
    """Return the error of rounding or of the fit, as a share of the terms."""
    return FITTED if "images" in MODES[mode] else ROUNDINGS


@pytest.mark.study(
    but=[
        "vit-True-convolutional",
        "vit-True-distant",
        "swin-False-local",
        "beit-True-salient",
        "vit-True-uniform",
    ]
)
@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "fused"),
    [(n, True) for n in ("vit", "beit", "swin")] + [("swin", False)],
    indirect=["fused"],
)
def test_softmax_attention_by_hand(name: str, mode: Any, fused: bool) -> None:
    """Windows are shifted and masked in Swin;
    class tokens as queries keep their attention in ViT and BEiT.
    """
    make, shape, path, projection = MODELS[name]
    model = wide(make())
    layer: Any = model.get_submodule(path)
    x = torch.randn(4, *shape).double()
    references = torch.randn(3, *shape).double()
    with tcnn_probe.ablate(model, {path: HEADS}, mode, **options_of(mode, references)):
        output = LayerCall(model, layer, x).output
    call = LayerCall(model, layer, references)
    attention, _ = of_softmax(layer, call)
    mean = attention.unflatten(0, (3, -1)).mean(0)
    attention, values = of_softmax(layer, LayerCall(model, layer, x))
    own = attention.unflatten(0, (4, -1))
    places = cells(2, 2) if name == "swin" else cells(3, 5, 1)
    # Swin's mask of -100 leaves some e-44 of attention to hidden keys.
    seen = (mean > 1e-30).all(1)
    new = rung(mode, own, mean, places, places, seen, MODES[mode].get("radius", 0))
    kept = [head for head in range(own.shape[2]) if head not in HEADS]
    new[:, :, kept] = own[:, :, kept]
    close(output, new.flatten(0, 1), values, layer.get_submodule(projection), share_of(mode))
    assert mode == "uniform" or (output - call.output[:1]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_gated_attention_by_hand(mode: Any) -> None:
    """Keys are those of the extended grid, whose padding keeps its share."""
    gated = gated_layer()
    own = gated.attention[:, None]
    mean = gated.of_references.mean(0)[None]
    keys = cells(7, 9) - 1
    queries = cells(3, 7) * [2, 1]
    seen = torch.ones(1, *mean.shape[-2:], dtype=torch.bool)
    new = rung(mode, own, mean, queries, keys, seen, MODES[mode].get("radius", 0))
    kept = [head for head in range(6) if head not in HEADS]
    new[:, :, kept] = own[:, :, kept]
    with tcnn_probe.ablate(gated.layer, {"": HEADS}, mode, **options_of(mode, gated.references)):
        output = gated.layer(gated.images).flatten(2).mT
    close(output, new[:, 0], gated.values, gated.taps, share_of(mode))


@torch.no_grad()
def test_constant_queries_are_salient_attention() -> None:
    """With the same query everywhere, the image decides which keys all queries attend to."""
    make, shape, path, _ = MODELS["vit"]
    model = make().double()
    qkv: Any = model.get_submodule(path).qkv
    qkv.weight[: len(qkv.weight) // 3] = 0
    x, references = torch.randn(4, *shape).double(), torch.randn(3, *shape).double()
    plain = model(x)
    errors = {}
    for mode in ("static", "salient"):
        with tcnn_probe.ablate(model, path, mode, images=references):
            errors[mode] = (model(x) - plain).abs().max() / plain.abs().max()
    assert errors["salient"] < 1e-12
    assert errors["static"] > 1e-3


@pytest.mark.study
def test_gradients_are_those_of_the_ablated_model() -> None:
    """The factors of keys depend on the image, and local attention on its queries and keys."""
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 2, 2, 5).double().requires_grad_()
    mean = torch.randn(1, 1, 2, 2, 5).double().softmax(-1)

    def salient(logits: Tensor) -> Tensor:
        return scale_keys(mean, logits.softmax(-1).sum(-2))

    assert torch.autograd.gradcheck(salient, logits, rtol=1e-5, atol=1e-7)
    make, shape, path, _ = MODELS["vit"]
    model = wide(make())
    layer: Any = model.get_submodule(path)
    call = LayerCall(model, layer, torch.randn(4, *shape).double())
    tokens = call.args[0].detach().requires_grad_()
    call.args = (tokens,)
    places = cells(3, 5, 1)
    own, values = of_softmax(layer, call)
    seen = torch.ones(1, 16, 16, dtype=torch.bool)
    kept = rung("local", own[:, None], own[:1], places, places, seen, 1)[:, 0]
    weights = torch.cat([kept[:, :1], own[:, 1:]], 1)
    gathered = layer.proj((weights @ values).transpose(1, 2).flatten(2))
    (expected,) = torch.autograd.grad(gathered.pow(2).sum(), tokens)
    with tcnn_probe.ablate(model, {path: 0}, "local", radius=1):
        model(torch.randn(1, *shape).double())  # shows the grid
        (gradient,) = torch.autograd.grad(layer(tokens).pow(2).sum(), tokens)
    torch.testing.assert_close(gradient, expected)


@torch.no_grad()
def test_images_of_several_sizes() -> None:
    """Each size of the images has its own grid."""
    model = Chain()
    x = chain_images()
    with tcnn_probe.ablate(model, {"near": [1, 3]}, "local", radius=1):
        both = [model(images) for images in (x, x.mT, x)]
    with tcnn_probe.ablate(model, {"near": [1, 3]}, "local", radius=1):
        turned = model(x.mT)
    assert torch.equal(both[0], both[2])
    assert torch.equal(both[1], turned)


class Packed(nn.Module):
    """Attention between patches that are given with their rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attention(12, 3)

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        return self.attend(patches)


@torch.no_grad()
def test_patches_of_several_grids() -> None:
    """Patches of upright images are as many as those of wide ones."""
    torch.manual_seed(0)
    model, x = Packed(), torch.randn(2, 15, 12)
    wide, upright = (
        torch.cartesian_prod(torch.arange(rows), torch.arange(15 // rows)) for rows in (3, 5)
    )
    with tcnn_probe.ablate(model, {"attend": [1, 2]}, "local", radius=1):
        both = [model(x, positions) for positions in (wide, upright, wide)]
    with tcnn_probe.ablate(model, {"attend": [1, 2]}, "local", radius=1):
        turned = model(x, upright)
    assert torch.equal(both[0], both[2])
    assert torch.equal(both[1], turned)


class Masked(nn.Module):
    """Model whose mask has a row for each image, as the pixel masks of DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        return self.chain(images * mask[:, None])


@torch.no_grad()
def test_grids_are_found_beside_masks() -> None:
    model, x = Masked(), torch.cat([chain_images()] * 2)
    mask = torch.ones(len(x), *x.shape[2:])
    with tcnn_probe.ablate(model.chain, {"near": [1, 3]}, "local", radius=1):
        expected = model.chain(x)
    with tcnn_probe.ablate(model, {"chain.near": [1, 3]}, "local", radius=1):
        assert torch.equal(model(x, mask=mask), expected)


@torch.no_grad()
def test_layers_without_a_grid() -> None:
    """They are left out, unless they are named; special tokens alone have nothing to edit."""
    make, shape, path, _ = MODELS["cait"]
    model, x = make(), torch.randn(3, *shape)
    with tcnn_probe.ablate(model, mode="uniform") as ablation:
        model(x)
        assert path not in ablation.heads
        assert set(ablation.heads) == {"blocks.0.attn", "blocks.1.attn"}
    with (
        pytest.raises(ValueError, match="only queries are class tokens or latents"),
        tcnn_probe.ablate(model, path, "uniform"),
    ):
        model(x)
    plain = MODELS["torch"][0]()
    with (
        pytest.raises(ValueError, match="needs the grid of 'attn': 7 keys: no grid"),
        tcnn_probe.ablate(plain, "att*", "uniform"),
    ):
        plain(torch.randn(3, 7, 4))
    chain = Chain()
    with tcnn_probe.ablate(chain, mode="uniform"):
        with pytest.raises(RuntimeError, match="'near' with 77 queries is unknown"):
            chain.near(chain_images())
        chain(chain_images())
        chain.near(chain_images())


def test_radius() -> None:
    for radius in (None, -1.0, float("nan")):
        with pytest.raises(ValueError, match="needs radius=, a distance of at least 0"):
            tcnn_probe.ablate(Chain(), mode="local", radius=radius)
    with pytest.raises(ValueError, match="radius= is for mode='local' or 'distant'"):
        tcnn_probe.ablate(Chain(), mode="uniform", radius=1)
