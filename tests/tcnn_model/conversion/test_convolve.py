"""``convolve``: heads as convolutions of their values, against dense attention in float64."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_model
from tests.tcnn_model.conversion.convertible import FAMILIES, GRID, HEADS, transformer

CHOSEN = {"blocks.0.attn": [0, 2], "blocks.1.attn": [0, 1, 2]}


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 20, 28, dtype=torch.float64)


def random_kernels(
    chosen: dict[str, list[int]], size: tuple[int, int], heads: int, tokens: int
) -> xr.Dataset:
    draw = np.random.default_rng(0)
    shape = len(chosen), heads
    on_grid, off_grid = (draw.uniform(0.1, 1, (*shape, *rest)) for rest in (size, (tokens,)))
    for place, indices in enumerate(chosen.values()):
        others = [head for head in range(heads) if head not in indices]
        on_grid[place, others] = off_grid[place, others] = np.nan
    offsets = {f"offset_{axis}": np.arange(n) - n // 2 for axis, n in zip("yx", size, strict=True)}
    variables = {"offset_kernel": (("layer", "head", *offsets), on_grid)}
    if tokens:
        variables["prefix_kernel"] = (("layer", "head", "prefix_token"), off_grid)
    coords = {"layer": [*chosen], "head": range(heads), **offsets}
    return xr.Dataset(variables, coords)


def dense(
    kernel: xr.DataArray, prefix: np.ndarray, grid: tuple[int, int], seen: np.ndarray
) -> Tensor:
    """T of the patches' queries from its definition, pair by pair, (N_query, tokens + N_query).

    ``seen`` is whether a query sees a key, (N_query, N_query).
    """
    cells = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    known = dict(kernel.to_series())
    rows = []
    for (y, x), visible in zip(cells, seen, strict=True):
        weights = visible * [known.get((v - y, u - x), 0.0) for v, u in cells]
        rows.append(np.array([*prefix, *weights]) / (sum(prefix) + sum(weights)))
    return torch.from_numpy(np.array(rows))


class Replacement(nn.Module):
    """In place of the dropout of timm's attention, which gets the matrix of all heads."""

    def __init__(self, patterns: dict[int, Tensor], tokens: int) -> None:
        super().__init__()
        self.patterns, self.tokens = patterns, tokens
        self.p = 0.0

    def forward(self, attention: Tensor) -> Tensor:
        attention = attention.clone()
        for head, pattern in self.patterns.items():
            # (windows, N_query, N_key), for each image
            copies = len(attention) // len(pattern)
            attention[:, head, self.tokens :] = pattern.repeat(copies, 1, 1)
        return attention


def replaced(model: nn.Module, kernels: xr.Dataset) -> nn.Module:
    """The model with dense attention in place of the chosen heads, in timm's own layers."""
    model = copy.deepcopy(model)
    for name in kernels.layer.values:
        block = model.get_submodule(name.removesuffix(".attn"))
        ds, grid = kernels.sel(layer=name), GRID
        if type(model).__name__ == "ConVit":
            grid = 5, 5
        masks = getattr(block, "attn_mask", None)
        seen = [np.ones((grid[0] * grid[1],) * 2)] if masks is None else masks.numpy() == 0
        patterns = {}
        for head in np.flatnonzero(ds.offset_kernel.notnull().any(("offset_y", "offset_x"))):
            prefix = ds.prefix_kernel[head].values if "prefix_kernel" in ds else np.zeros(0)
            prefix = prefix[np.isfinite(prefix)]
            of_windows = [dense(ds.offset_kernel[head], prefix, grid, pairs) for pairs in seen]
            patterns[int(head)] = torch.stack(of_windows)
        block.attn.fused_attn = False
        block.attn.attn_drop = Replacement(patterns, len(prefix))
    return model


def kernels_for(model: Any, size: tuple[int, int], tokens: int) -> xr.Dataset:
    """Random kernels of two heads of a first layer, and of all heads of a second."""
    names = [name for name, _ in model.named_modules() if name.endswith(".attn")]
    heads = model.get_submodule(names[0]).num_heads
    chosen = dict(zip(names, ([0, 2], [*range(heads)]), strict=True))
    kernels = random_kernels(chosen, size, heads, tokens)
    if type(model).__name__ == "ConVit":
        # The class token comes after the first layer.
        kernels["prefix_kernel"] = kernels.prefix_kernel.where(kernels.layer != names[0])
    return kernels


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_positions_and_temperatures_do_not_decay(family: str) -> None:
    make, tokens = FAMILIES[family]
    model = make()
    convolved = tcnn_model.convolve(model, kernels_for(model, (3, 5), tokens), mass=1)
    decayed = {
        id(parameter)
        for group in tcnn_model.parameter_groups(convolved)
        for parameter in group["params"]
        if group["weight_decay"]
    }
    names = [name for name, p in convolved.named_parameters() if id(p) in decayed]
    assert [name for name in names if not name.endswith(".weight") or "cpb_mlp" in name] == []


@pytest.mark.parametrize(
    "size",
    [pytest.param((9, 13), marks=pytest.mark.study, id="whole"), pytest.param((3, 5), id="cut")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_convolved_heads_equal_dense_attention(family: str, size: tuple[int, int]) -> None:
    make, tokens = FAMILIES[family]
    model = make()
    sides = model.patch_embed.img_size
    x = torch.randn(2, 3, *sides, dtype=torch.float64)
    before, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    kernels = kernels_for(model, size, tokens)
    convolved = tcnn_model.convolve(model, kernels, mass=1)
    with torch.no_grad():
        expected = replaced(model, kernels)(x)
        torch.testing.assert_close(convolved(x), expected, rtol=1e-11, atol=1e-11)
        # The test could not fail if the heads did not matter.
        assert (model(x) - expected).abs().max() > 1e-5
    # The given model is as it was.
    assert [type(m) for m in model.modules()] == classes
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    # Each parameter is used, is trained, and can be loaded.
    convolved.train()(x).square().sum().backward()
    unused = [name for name, p in convolved.named_parameters() if p.grad is None]
    assert unused == [name for name, p in model.named_parameters() if not p.requires_grad]
    again = tcnn_model.convolve(model, kernels, mass=1)
    with torch.no_grad():
        for parameter in convolved.parameters():
            parameter.mul_(1.1)
    again.load_state_dict(convolved.state_dict())
    assert torch.equal(again(x), convolved.eval()(x))


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"padding": 2, "stride": 2},
        {"padding": "same", "stride": 3},
        {"padding": (0, 2), "dilation": 2},
        {"padding": 1, "groups": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [[1, 5], range(6)], ids=["some", "all"])
def test_heads_of_a_tcnn_equal_dense_attention(options: dict[str, Any], heads: list[int]) -> None:
    torch.manual_seed(0)
    layer = tcnn_model.GPSA(
        6, 12, (2, 3), qk_scale=60, gating=0.5, locality_strength=0.4, **options
    ).double()
    model = nn.Sequential(nn.Conv2d(2, 6, 1), layer).double()
    kernels = random_kernels({"1": [*heads]}, (7, 11), 6, 0)
    convolved = tcnn_model.convolve(model, kernels, mass=1)
    x = torch.randn(2, 2, 7, 11, dtype=torch.float64)
    with torch.no_grad():
        features = model[0](x)
        y, across = layer.axes(7, 11)
        attention = layer.attention(features).unflatten(2, (y.queries, across.queries))
        for head in heads:
            kernel = kernels.offset_kernel.sel(layer="1", head=head)
            padded = kernel.pad(offset_y=30, offset_x=30, constant_values=0).values
            for row in range(y.queries):
                for column in range(across.queries):
                    # The first key, in the padding, seen from this query.
                    top = -y.before - (y.first_query + row * y.stride)
                    left = -across.before - (across.first_query + column * across.stride)
                    weights = padded[33 + top :, 35 + left :][: y.keys, : across.keys]
                    attention[:, head, row, column] = torch.from_numpy(
                        (weights / weights.sum()).ravel()
                    )
        attention = attention.flatten(2, 3)
        torch.testing.assert_close(convolved[1].attention(features), attention)
        keys = attention.unflatten(3, (y.keys, across.keys))
        real = keys[..., y.before :, across.before :][..., :7, :11].flatten(3)
        expected = layer.combine(real @ layer.values(features), layer.gated_attention(features))
        torch.testing.assert_close(convolved(x), expected, rtol=1e-11, atol=1e-11)


def test_the_inverse_of_reparameterize() -> None:
    torch.manual_seed(0)
    cnn = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 7, 3, padding=1)).double()
    tcnn = tcnn_model.reparameterize(
        cnn, layers="1", locality_strength=40, gating=40, input_size=(3, 11, 13)
    )
    taps = np.zeros((1, 9, 3, 3))
    # Head h of GPSA is tap h of the convolution.
    taps[0, np.arange(9), np.arange(9) // 3, np.arange(9) % 3] = 1
    offsets = {"offset_y": [-1, 0, 1], "offset_x": [-1, 0, 1]}
    coords = {"layer": ["1"], "head": range(9), **offsets}
    kernels = xr.Dataset({"offset_kernel": (("layer", "head", *offsets), taps)}, coords)
    x = torch.randn(2, 3, 11, 13, dtype=torch.float64)
    back = tcnn_model.convolve(tcnn, kernels)
    torch.testing.assert_close(back(x), cnn(x), rtol=1e-9, atol=1e-9)
    assert sum(p.numel() for p in back.parameters()) < sum(p.numel() for p in tcnn.parameters())


def test_sizes_follow_the_mass_that_they_keep() -> None:
    kernels = random_kernels({"blocks.1.attn": [1]}, (9, 13), HEADS, 1)
    # Shares of attention within radius 0, 1, 2, ...: 0.2 (with the class token's 0.1), 0.6, 0.9, 1.
    rings = np.zeros((9, 13))
    for radius, share in enumerate([0.1, 0.4, 0.3, 0.1]):
        rings[4 + radius, 6] = share
    kernels["offset_mass"] = kernels.offset_kernel.copy(data=np.full((1, 3, 9, 13), np.nan))
    kernels["offset_mass"][0, 1] = rings
    kernels["prefix_mass"] = kernels.prefix_kernel * 0 + 0.1
    for mass, size in ((0.2, 1), (0.21, 3), (0.6, 3), (0.9, 5), (0.95, 7), (1, 7)):
        convolved = tcnn_model.convolve(transformer(), kernels, mass=mass)
        theta = convolved.blocks[1].attn.convolution.theta
        assert theta.shape == (1, size, size), mass
    largest = tcnn_model.convolve(transformer(), kernels, size=11)
    assert largest.blocks[1].attn.convolution.theta.shape == (1, 9, 11)


def test_queries_and_keys_of_convolved_heads_are_dropped() -> None:
    model = transformer(class_token=False, global_pool="avg")
    kernels = random_kernels(CHOSEN, (9, 13), HEADS, 0)
    convolved = tcnn_model.convolve(model, kernels, size=3)
    dropped = 5 * 2 * 12 * (36 + 1)  # queries and keys of five heads, with biases
    kept = sum(p.numel() for p in model.parameters()) - dropped + 5 * 9
    assert sum(p.numel() for p in convolved.parameters()) == kept
    assert convolved.blocks[1].attn.attending == ()


def test_other_sizes_of_images_keep_the_proportions() -> None:
    model = transformer(dynamic_img_size=True)
    kernels = random_kernels({"blocks.0.attn": [1]}, (3, 3), HEADS, 1)
    convolved = tcnn_model.convolve(model, kernels)
    assert convolved(torch.randn(1, 3, 40, 56, dtype=torch.float64)).shape == (1, 2)
    with pytest.raises(ValueError, match="proportions of 5 x 7, got 36"):
        convolved(torch.randn(1, 3, 24, 24, dtype=torch.float64))
    within = kernels.assign_coords(layer=["0.blocks.0.attn"])
    wrapped = tcnn_model.convolve(nn.Sequential(model), within)
    x = images()
    torch.testing.assert_close(wrapped(x), convolved(x))
    square = tcnn_model.convolve(model, kernels, grid=(1, 1))
    assert square(torch.randn(1, 3, 24, 24, dtype=torch.float64)).shape == (1, 2)


def _two_marks(kernels: xr.Dataset) -> xr.Dataset:
    return xr.concat([kernels] * 2, "epoch")


def _with_a_hole(kernels: xr.Dataset) -> xr.Dataset:
    hole = (kernels.offset_y == 2) & (kernels.offset_x == 1)
    return kernels.assign(offset_kernel=kernels.offset_kernel.where(~hole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_two_marks, r"kernels of one mark.*isel\(epoch=-1\)"),
        (_with_a_hole, r"NaN at some offsets of head 0 of 'blocks.0.attn'"),
        (lambda ds: ds * np.nan, "NaN for all"),
        (lambda ds: ds.sel(offset_y=slice(-1, 2)), r"offset_y, got \[-1, 0, 1, 2\]"),
        (lambda ds: ds.drop_vars("prefix_kernel"), "1 class and register tokens"),
        (lambda ds: ds.assign_coords(head=[7, 8, 9]), "3 heads, from 0 to 2.*head 9"),
        (lambda ds: ds.assign_coords(layer=["a", "b"]), "has no layer 'a'"),
        (
            lambda ds: ds.assign_coords(layer=["norm", "b"]),
            r"'norm' is a .*LayerNorm, whose",
        ),
    ],
)
def test_kernels_that_do_not_fit_are_refused(
    change: Callable[[xr.Dataset], xr.Dataset], message: str
) -> None:
    kernels = random_kernels(CHOSEN, (9, 13), HEADS, 1)
    with pytest.raises(ValueError, match=message):
        tcnn_model.convolve(transformer(), change(kernels))


class Adapter(nn.Module):
    """A linear layer with an addition of low rank, like those of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features


def test_other_arguments_are_refused() -> None:
    kernels, model = random_kernels(CHOSEN, (9, 13), HEADS, 1), transformer()
    with pytest.raises(TypeError, match="a Dataset with offset_kernel; got DataArray"):
        tcnn_model.convolve(model, kernels.offset_kernel)
    for options in ({"mass": 0}, {"size": 4}):
        with pytest.raises(ValueError, match=r"expected (a share|an odd size)"):
            tcnn_model.convolve(model, kernels, **options)
    mixer = timm.create_model("cait_xxs24_224", depth=1, embed_dim=12, num_heads=HEADS)
    with pytest.raises(ValueError, match=r"is a timm\.models\.cait\.TalkingHeadAttn, whose"):
        tcnn_model.convolve(mixer, kernels)
    adapted = copy.deepcopy(model)
    adapted.blocks[0].attn.qkv = Adapter(adapted.blocks[0].attn.qkv)
    with pytest.raises(ValueError, match=r"blocks.0.attn.qkv is a .*Adapter.*merge adapters"):
        tcnn_model.convolve(adapted, kernels)
    model.blocks[1].attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"'blocks.1.attn' has hooks"):
        tcnn_model.convolve(model, kernels)
    masked = tcnn_model.convolve(transformer(), kernels).blocks[0].attn
    with pytest.raises(ValueError, match="no attention mask"):
        masked(torch.zeros(1, 36, 36).double(), attn_mask=torch.ones(36, 36).bool())


@pytest.mark.study
@pytest.mark.parametrize("family", ["registers and norms", "swin"])
def test_compiled_models_are_converted_and_trained(family: str) -> None:
    make, tokens = FAMILIES[family]
    model = make()
    kernels = kernels_for(model, (3, 5), tokens)
    convolved, of_wrapper = (
        tcnn_model.convolve(network, kernels) for network in (model, torch.compile(model))
    )
    x = torch.randn(2, 3, *model.patch_embed.img_size, dtype=torch.float64)
    assert torch.equal(of_wrapper(x), convolved(x))
    torch.compiler.reset()
    compiled = torch.compile(convolved, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    of_compiled = [p.grad for p in convolved.parameters()]
    of_wrapper(x).sum().backward()
    for actual, parameter in zip(of_compiled, of_wrapper.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-9, atol=1e-9)
