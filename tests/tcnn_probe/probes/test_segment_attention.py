"""Attention between segments of tokens,
compared pair by pair in float64 with segments written out in the tests.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tcnn_probe
from tcnn_model.kernels import trial
from tcnn_probe.attention import softmax_statistics
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.reconstruction import ProductLogits
from tcnn_probe.probes.segment_attention import SEGMENT_ATTENTION
from tcnn_probe.recording.measured import Measured
from tcnn_probe.recording.sums import EpochSums, RunningSums
from tests.tcnn_model.kernels.conftest import interpreter  # noqa: F401
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.attention.test_kernel_statistics import by_kernel_alone
from tests.tcnn_probe.attention.test_softmax_statistics import GRID, case
from tests.tcnn_probe.contracts.helpers import recorded

SEGMENTS = ["class", "register", "patch", "text", "other"]
VIT: dict[str, Any] = {"embed_dim": 12, "depth": 2, "num_heads": 3}
SIDES = (48, 80)
PATCHES = ["patch"] * 15  # 3 x 5 patches of 16 x 16 pixels


def brute_force(
    weights: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str],
    counted: np.ndarray | None = None,
) -> np.ndarray:
    """Return attention between segments: (images, heads, N_query, N_key) -> (heads, 5, 5).

    Images count alike, however many of their queries are padding, where ``counted``, (images,
    N_query), is False.
    """
    assert weights.shape[2:] == (len(queries), len(keys))
    of_query, of_key = (
        np.array([[name == segment for segment in SEGMENTS] for name in names], dtype=float)
        for names in (queries, keys)
    )
    chosen = of_query * (1 if counted is None else counted[..., None])  # (B or 1, N_query, 5)
    share = chosen / np.maximum(chosen.sum(-2, keepdims=True), 1)
    share = np.broadcast_to(share, (len(weights), *of_query.shape))
    sums = np.einsum("bhij,biq,jk->hqk", weights, share, of_key)
    # A query that sees nothing has a row of zeros and is left out of the average.
    seeing = np.einsum("bhi,biq->hq", weights.any(-1), share)
    with np.errstate(invalid="ignore"):  # no query
        return sums / seeing[..., None]


def check(
    model: nn.Module,
    x: Tensor,
    segments: Sequence[tuple[Sequence[str], Sequence[str]]],
    **options: Any,
) -> tcnn_probe.Recorder:
    """Compare a recording of two uneven batches with brute force;
    segments are of each layer's queries and keys.
    """
    recorder = recorded(model, *x.split([3, 2]), probes="segments", **options)
    ds = recorder.tree["segments"].dataset.isel(epoch=0)
    assert ds["query_segment"].values.tolist() == SEGMENTS
    assert ds["key_segment"].values.tolist() == SEGMENTS
    assert (ds.images == 5).all()
    assert (ds.nonfinite_images == 0).all()
    references = attention_of(model, x)
    assert ds["layer"].values.tolist() == [ref.layer for ref in references]
    for reference, tokens in zip(references, segments, strict=True):
        # Rows of several windows follow each other; all windows of an image have equal weight.
        expected = brute_force(reference.weights.numpy(), *tokens)
        actual = ds.segment_attention.sel(layer=reference.layer)[: len(expected)]
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    return recorder


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("vit_small_patch16_dinov3", ["class"] + ["register"] * 4),
        ("deit_tiny_distilled_patch16_224", ["class"] * 2),
        ("vit_base_patch16_siglip_224", []),
    ],
)
def test_vits(name: str, special: list[str]) -> None:
    torch.manual_seed(0)
    model = sharpen(timm.create_model(name, img_size=SIDES, **VIT))
    tokens = special + PATCHES
    layers = [(tokens, tokens)] * 2
    # The pool's query is a single latent, which counts as a class token.
    if not special:
        layers.append((["class"], tokens))
    recorder = check(model, torch.randn(5, 3, *SIDES), layers)
    assert recorder.missing == {}


def test_class_attention() -> None:
    torch.manual_seed(0)
    options = {"depth": 1, "depth_token_only": 1, "embed_dim": 12, "num_heads": 3}
    model = timm.create_model("cait_xxs24_224", img_size=SIDES, **options)
    segments = [(PATCHES, PATCHES), (["class"], ["class", *PATCHES])]
    check(sharpen(model), torch.randn(5, 3, *SIDES), segments)


def test_windows() -> None:
    torch.manual_seed(0)
    options = {"embed_dim": 6, "depths": (2,), "num_heads": (3,), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=(32, 48), **options)
    tokens = ["patch"] * 16
    check(sharpen(model), torch.randn(5, 3, 32, 48), [(tokens, tokens)] * 2)


class Named(nn.Module):
    """Attention of patches joined to three learned tokens,
    which are a parameter of the given name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.patches = nn.Conv2d(3, 12, 16, 16)
        self.register_parameter(name, nn.Parameter(torch.randn(1, 3, 12)))
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([getattr(self, self.name).expand(len(x), -1, -1), x], 1)
        return self.attend(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(("name", "first"), [("register_tokens", "register"), ("tokens", "class")])
def test_registers_are_recognized_by_name(name: str, first: str) -> None:
    torch.manual_seed(0)
    tokens = [first, "register", "register", *PATCHES]
    check(sharpen(Named(name)), torch.randn(5, 3, *SIDES), [(tokens, tokens)])


class Joint(nn.Module):
    """Attention of patches joined to learned words, or of learned queries to both."""

    def __init__(self, *, cross: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 16, stride=16)
        # The lengths are neither 15 patches nor one more, so they tell words and patches apart.
        self.words = nn.Parameter(torch.randn(1, 17, 12))
        self.asking = nn.Parameter(torch.randn(1, 11, 12)) if cross else None
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        if self.asking is None:
            tokens = asking = torch.cat([self.words.expand(len(x), -1, -1), x], 1)
        else:
            tokens = x
            asking = self.asking.expand(len(x), -1, -1)
        return self.attention(asking, tokens, tokens, need_weights=False)[0]


@pytest.mark.parametrize("cross", [False, True])
def test_tokens_that_do_not_belong_to_the_image(cross: bool) -> None:
    """Words before the patches are neither class tokens nor registers."""
    torch.manual_seed(0)
    keys = PATCHES if cross else ["other"] * 17 + PATCHES
    queries = ["other"] * 11 if cross else keys
    model = sharpen(Joint(cross=cross))
    check(model, torch.randn(5, 3, *SIDES), [(queries, keys)])


def test_bfloat16_attention_between_segments() -> None:
    """Shares in bfloat16 equal those of the same bfloat16 queries and keys,
    which the stream gives in float32.
    """
    torch.manual_seed(0)
    model = sharpen(timm.create_model("vit_small_patch16_dinov3", img_size=SIDES, **VIT))
    model = model.bfloat16()
    x = torch.randn(2, 3, *SIDES).bfloat16()
    weights = {}

    def keep(attention: Attention) -> None:
        weights[attention.name] = attention.weights()[:, 0].double().numpy()

    with tcnn_probe.attention_stream(model, keep), torch.no_grad():
        model(x)
    ds = recorded(model, x, probes="segments").tree["segments"].dataset.isel(epoch=0)
    tokens = ["class"] + ["register"] * 4 + PATCHES
    for layer, values in weights.items():
        expected = brute_force(values, tokens, tokens)
        actual = ds.segment_attention.sel(layer=layer)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "kernel", "words"),
    [
        ("plain", False, 0),
        ("hidden", False, 0),
        ("lowered", False, 0),
        ("swallowed", False, 0),
        pytest.param("lowered", True, 0, marks=pytest.mark.study),
        ("hidden", False, 2),
        pytest.param("hidden", True, 2, marks=pytest.mark.study),
    ],
)
def test_masked_queries_and_keys(
    form: str, kernel: bool, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that see nothing are left out,
    on the path of the kernel and on that of the blocks.
    """
    if kernel:
        monkeypatch.setattr(ProductLogits, "on_kernel", True)
        monkeypatch.setattr(trial, "tried", by_kernel_alone)
        # The path of the blocks would raise if it were taken.
        monkeypatch.setattr(softmax_statistics, "_rows_by_blocks", None)
    attention, _ = case(form, 5)
    # Words follow the special tokens and precede the grid.
    attention = replace(attention, layout=replace(attention.layout, words=words))
    logits = attention.logits(slice(None), slice(None)).double()
    weights = torch.softmax(logits, -1).nan_to_num(0).numpy()
    shares = attention.segment_attention()
    assert shares is not None
    special = ["class"] + ["register"] * (4 - words) + ["text"] * words
    tokens = special + ["patch"] * (GRID[0] * GRID[1])
    total = shares.double().sum(0)
    total = total / total.sum(-1, keepdim=True)
    # The kernel recomputes the logits, sums of up to 80 in absolute terms, with as many eps of
    # error.
    np.testing.assert_allclose(total, brute_force(weights, tokens, tokens), atol=1e-5)


def test_nan_stays_nan() -> None:
    """An image of NaN has no shares, also if patches are the only keys,
    whose share is 1 otherwise.
    """
    x = torch.randn(2, 3, *SIDES)
    x[:] = torch.nan
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        recorder = recorded(Joint(cross=True).eval(), x, probes="segments")
    ds = recorder.tree["segments"].dataset
    assert np.isnan(ds.segment_attention).all()
    assert (ds.nonfinite_images == 2).all()


def test_sums_of_ranks_add_up() -> None:
    """Ranks have several images, one or none; the queries of a segment see nothing in one image."""
    shares = torch.rand(5, 3, 5, 5)
    # No image has registers.
    shares[:, :, 1] = 0
    shares[2, :, 2] = 0
    ranks = []
    for part in shares.split([4, 1]):
        running = RunningSums()
        running.add(
            [
                Measured(
                    layer="layer",
                    module=nn.Identity(),
                    probe=SEGMENT_ATTENTION,
                    values={"segment_attention": part},
                    patterns={},
                )
            ]
        )
        ranks.append(running.read()["layer", SEGMENT_ATTENTION.kind])
    together = EpochSums.together([*ranks, EpochSums()])
    numbers = together.finish(SEGMENT_ATTENTION.variables)
    total = shares.double().sum(0)
    np.testing.assert_allclose(numbers["segment_attention"], total / total.sum(-1, keepdim=True))


class Blind(nn.Module):
    """Attention of tokens whose grid cannot be known."""

    def forward(self, x: Tensor) -> Tensor:
        # 7 keys do not form a grid of 7 x 5 pixels.
        x = x.flatten(1)[:, None, :35].unflatten(-1, (7, 5))
        return scaled_dot_product_attention(x, x, x)


def test_reasons_for_layers_left_out() -> None:
    from tcnn_model import GPSA

    model = nn.ModuleDict({"blind": Blind(), "gated": GPSA(3, 4, 3, padding=1)})
    model.forward = lambda x: (model["blind"](x), model["gated"](x))
    with (
        tcnn_probe.record(model.eval(), probes="segments") as recorder,
        torch.no_grad(),
    ):
        model(torch.randn(2, 3, 7, 5))
        with pytest.raises(RuntimeError, match=r"do not measure.*no grid found"):
            recorder.mark(epoch=0)
    reasons = recorder.missing["segment_attention"]
    assert reasons["gated"] == "its tokens are patches and padding alone"
    assert "7 keys: no grid found" in reasons["blind"]
