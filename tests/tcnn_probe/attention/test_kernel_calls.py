"""Stand-ins for the operators of flash-attn and xformers,
called as these packages do, against loops in float64.

The packages need a GPU. The stand-ins have the signatures of flash-attn 2.7 and of the two kinds of
kernels of xformers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_edit import HeadEdit

Kernel = Callable[..., Tensor]

# Schemas are copied from the packages, as calls are read by the names of their arguments.
_TOKENS = "Tensor q, Tensor k, Tensor v"
_LENGTHS = "int max_seqlen_q, int max_seqlen_k"
_OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, int "
    "window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax"
)
FOUR = "(Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = {
    "flash_attn": [
        f"_flash_attn_forward({_TOKENS}, {_OPTIONS}) -> {FOUR}",
        f"_flash_attn_varlen_forward({_TOKENS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        f"{_LENGTHS}, {_OPTIONS}, Tensor? block_table=None) -> {FOUR}",
    ],
    "xformers_flash": [
        "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? "
        f"cu_seqlens_k, {_LENGTHS}, float p, float softmax_scale, bool is_causal, bool "
        "return_softmax) -> (Tensor, Tensor)"
    ],
    "xformers": [
        "efficient_attention_forward_cutlass(Tensor query, Tensor key, Tensor value, Tensor? "
        "attn_bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_seqlen_q, float "
        f"dropout_p, bool compute_logsumexp, bool causal, float? scale) -> {FOUR}",
        "rms_norm_forward(Tensor x) -> Tensor",
    ],
    # The package kernels gives loaded kernels such names; here for gpt-oss, where sinks are an
    # option.
    "_vllm_flash_attn3_1a2b3c": [
        f"fwd({_TOKENS}, float? softmax_scale=None, bool is_causal=False, Tensor? s_aux=None) -> "
        "(Tensor, Tensor)"
    ],
    # This is torch.nn.attention.varlen in torch 2.15, which runs only on a GPU.
    "torch_attn": [
        "_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, "
        "SymInt max_q, SymInt max_k, bool is_causal=False, float? scale=None, SymInt[]? "
        "window_size=None, bool enable_gqa=False, Tensor? seqused_k=None, Tensor? "
        "block_table=None, SymInt? num_splits=None, SymInt backend=1) -> (Tensor, Tensor, Tensor)"
    ],
}
# 16 tokens are a class token and 3 x 5 patches; 5 channels are not a multiple of 8, so that
# flash-attn pads them.
B, N, HEADS, D = 2, 16, 3, 5


def weights_of(
    q: Tensor,
    k: Tensor,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bias: Tensor | None = None,
) -> np.ndarray:
    """Return weights (B, heads, N_query, N_key) of tokens (B, N, heads, d), in float64."""
    queries, keys = q.shape[1], k.shape[1]
    # Neighbouring heads share a key in grouped-query attention.
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    if bias is not None:
        logits = logits + bias
    # The last query is at the position of the last key.
    behind = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    # The two sides of a window are counted from the query's position, and -1 means no bound.
    before, after = (side if side >= 0 else keys for side in window)
    hidden = (behind < -before) | (behind > (0 if causal else after))
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).numpy()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> Tensor:
    weights = torch.from_numpy(weights_of(q, k, scale, **options))
    # The product is computed in float64, and rounded to the dtype of the model only at the end.
    v = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)


def flash(q, k, v, p, scale, causal, left, right, softcap, alibi, softmax):  # type: ignore[no-untyped-def]
    output = attend(q, k, v, scale, causal=causal, window=(left, right))
    return output, *(q.new_zeros(1) for _ in range(3))


def flash_varlen(q, k, v, q_ends, k_ends, q_max, k_max, p, scale, causal, left, right, *rest):  # type: ignore[no-untyped-def]
    outputs = []
    for q_from, q_to, k_from, k_to in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        tokens = (q[None, q_from:q_to], k[None, k_from:k_to], v[None, k_from:k_to])
        outputs.append(attend(*tokens, scale, causal=causal, window=(left, right))[0])
    return torch.cat(outputs), *(q.new_zeros(1) for _ in range(3))


def xformers_flash(q, k, v, q_ends, k_ends, q_max, k_max, p, scale, causal, softmax):  # type: ignore[no-untyped-def]
    # The kernel of xformers is flash-attn's packed kernel without a window and softcap.
    return flash_varlen(q, k, v, q_ends, k_ends, q_max, k_max, p, scale, causal, -1, -1)[:2]


def loaded_flash(q, k, v, scale=None, causal=False, sinks=None):  # type: ignore[no-untyped-def]
    # The effect of sinks does not matter here, as such a call is not read.
    return attend(q, k, v, scale, causal=causal), q.new_zeros(1)


def torch_varlen(q, k, v, q_ends, k_ends, q_max, k_max, causal, scale, window, *rest):  # type: ignore[no-untyped-def]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return flash_varlen(q, k, v, q_ends, k_ends, q_max, k_max, 0.0, scale, causal, *window)[:3]


def cutlass(q, k, v, bias, q_ends, k_ends, q_max, p, lse, causal, scale):  # type: ignore[no-untyped-def]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, k, v, scale, causal=causal, bias=bias), *(q.new_zeros(1) for _ in range(3))


# Operators are registered for one test at a time, as the real packages may be installed as well.
@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    implementations = {
        "flash_attn": (flash, flash_varlen),
        "xformers_flash": (xformers_flash,),
        "xformers": (cutlass, torch.clone),
        "_vllm_flash_attn3_1a2b3c": (loaded_flash,),
        "torch_attn": (torch_varlen,),
    }
    with ExitStack() as stack:
        for package, schemas in SCHEMAS.items():
            # "FRAGMENT" adds to a namespace that may exist. This function is private in torch 2.15,
            # and removes its additions.
            library = stack.enter_context(torch.library._scoped_library(package, "FRAGMENT"))
            for schema, implementation in zip(schemas, implementations[package], strict=True):
                name = schema.split("(")[0]
                # torch has its own operator once its caller has been imported; older versions have
                # none.
                if not hasattr(getattr(torch.ops, package), name):
                    library.define(schema)
                library.impl(name, implementation, "CPU")
        yield


class Flash(torch.autograd.Function):
    """Outline of the package's own function:
    it pads heads to eight channels and calls the operator in its forward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        scale = options.get("scale", q.shape[-1] ** -0.5)
        left, right = options.get("window", (-1, -1))
        # The package passes the scale for the channels before padding.
        padded = [nn.functional.pad(x, [0, 8 - x.shape[-1] % 8]) for x in (q, k, v)]
        output = torch.ops.flash_attn._flash_attn_forward(
            *padded,
            options.get("dropout", 0.0),
            scale,
            causal=options.get("causal", False),
            window_size_left=left,
            window_size_right=right,
            softcap=options.get("softcap", 0.0),
            alibi_slopes=None,
            return_softmax=False,
        )[0]
        return output[..., : q.shape[-1]]


def call_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return Flash.apply(q, k, v, options)


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def call_varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None = None, **options: Any
) -> Tensor:
    lengths = lengths or [q.shape[1]] * len(q)
    ends = ends_of(lengths)
    # Sequences are packed one after another, without an axis of images.
    packed = (x.flatten(0, 1) for x in (q, k, v))
    sizes = (ends, ends, max(lengths), max(lengths))
    scale = options.get("scale", q.shape[-1] ** -0.5)
    operator = torch.ops.flash_attn._flash_attn_varlen_forward
    output = operator(
        *packed,
        *sizes,
        0.0,
        scale,
        options.get("causal", False),
        -1,
        -1,
        0.0,
        None,
        False,
    )
    return output[0].unflatten(0, q.shape[:2])


def call_xformers_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    ends = ends_of([q.shape[1]] * len(q))
    packed = (x.flatten(0, 1) for x in (q, k, v))
    operator = torch.ops.xformers_flash.flash_fwd.default
    scale = options.get("scale", q.shape[-1] ** -0.5)
    output = operator(*packed, ends, ends, q.shape[1], q.shape[1], 0.0, scale, False, False)
    return output[0].unflatten(0, q.shape[:2])


def call_loaded_flash(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options: Any
) -> Tensor:
    operator = torch.ops._vllm_flash_attn3_1a2b3c.fwd
    scale = options.get("scale", q.shape[-1] ** -0.5)
    return operator(q, k, v, scale, options.get("causal", False), sinks)[0]


def call_torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1), **options: Any
) -> Tensor:
    ends = ends_of([q.shape[1]] * len(q))
    packed = (x.flatten(0, 1) for x in (q, k, v))
    output = torch.ops.torch_attn._varlen_attn(
        *packed,
        *(ends, ends, q.shape[1], q.shape[1]),
        window == (-1, 0),
        options.get("scale"),
        list(window),
        True,  # Grouped queries need no further argument.
    )
    return output[0].unflatten(0, q.shape[:2])


def call_aten(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Call the CPU operator behind scaled_dot_product_attention, which has heads before tokens."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *by_head, attn_mask=mask, scale=options.get("scale")
    )
    return output[0].transpose(1, 2)


def call_cutlass(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return torch.ops.xformers.efficient_attention_forward_cutlass(
        query=q,
        key=k,
        value=v,
        attn_bias=bias,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=-1,
        dropout_p=0.0,
        compute_logsumexp=False,
        causal=options.get("causal", False),
        scale=options.get("scale"),
    )[0]


class Mixer(nn.Module):  # a name that does not say attention
    def __init__(self, kernel: Kernel, key_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(15, h * D) for h in (HEADS, key_heads, key_heads))
        self.kernel = kernel
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, D)) for layer in (self.q, self.k, self.v))
        # The oracle gets the kernel's queries and keys, and nothing else of the model.
        self.computes = q, k
        return self.kernel(q, k, v, **self.options).flatten(2)


class Model(nn.Module):
    """Two blocks on a class token and 3 x 5 patches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 15, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 15))
        self.blocks = nn.Sequential(Mixer(*args, **kwargs), Mixer(*args, **kwargs))
        with torch.no_grad():
            for block in self.blocks:
                # Initially, logits are so small that all attention is uniform, whatever the scale.
                block.q.weight *= 8

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        return self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def model_of(*args: Any, **kwargs: Any) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(*args, **kwargs).eval(), torch.randn(B, 3, 48, 80)


# The bias differs between images and heads, so that a broadcast by mistake would show.
BIAS = torch.randn(B, HEADS, N, N, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kernel", "options", "of_weights"),
    [
        (call_flash, {}, {}),
        # The two sides of the window differ, and the scale differs from the default.
        (call_flash, {"scale": 0.7, "window": (4, 2)}, {"window": (4, 2)}),
        (
            call_flash,
            {"causal": True, "window": (6, -1)},
            {"causal": True, "window": (6, -1)},
        ),
        # Three heads share one key head: multi-query attention.
        (call_flash, {"key_heads": 1}, {}),
        (call_varlen, {}, {}),
        (call_varlen, {"causal": True}, {"causal": True}),
        (call_xformers_flash, {"scale": 0.3}, {}),
        (call_loaded_flash, {"key_heads": 1}, {}),
        (call_torch_varlen, {"key_heads": 1, "scale": 0.3}, {}),
        (call_torch_varlen, {"window": (4, 2)}, {"window": (4, 2)}),
        (
            call_torch_varlen,
            {"window": (-1, 0), "causal": True},
            {"causal": True},
        ),
        (call_aten, {"scale": 0.7}, {}),
        (call_aten, {"mask": BIAS}, {"bias": BIAS}),
        (call_cutlass, {}, {}),
        (call_cutlass, {"bias": BIAS}, {"bias": BIAS}),
        (call_cutlass, {"causal": True, "bias": BIAS}, {"causal": True, "bias": BIAS}),
    ],
)
def test_kernel_calls_are_read(
    kernel: Kernel, options: dict[str, Any], of_weights: dict[str, Any]
) -> None:
    model, x = model_of(kernel, **options)
    with torch.no_grad():
        alone = model(x)
    rebuilt = {}

    def keep(attention: Attention) -> None:
        rebuilt[attention.name] = (
            attention.weights()[:, 0],
            attention.layout,
            attention.values(),
        )

    with tcnn_probe.attention_stream(model, keep) as stream, torch.no_grad():
        # Exactly equal, as recording reads the call without replacing it.
        torch.testing.assert_close(model(x), alone, rtol=0, atol=0)
    assert list(stream.layers) == ["blocks.0", "blocks.1"]
    assert not stream.unsupported
    for name, (weights, layout, values) in rebuilt.items():
        q, k = model.get_submodule(name).computes
        scale = options.get("scale", D**-0.5)
        # The model runs in float32, the oracle in float64.
        np.testing.assert_allclose(weights, weights_of(q, k, scale, **of_weights), atol=1e-5)
        assert values.shape[:3] == (B, HEADS, N)
        if options.get("causal"):
            # Under a causal mask, tokens are a sequence and not a grid.
            assert layout.keys is None
        else:
            assert (layout.keys.prefix, *layout.keys.size) == (1, 3, 5)


def test_causal_masks_of_fewer_queries_than_keys() -> None:
    """The last query of flash-attn sees the last key;
    for xformers this depends on the class of the mask.
    """

    class Cross(nn.Module):
        def __init__(self, kernel: Kernel) -> None:
            super().__init__()
            self.kernel = kernel

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(2).mT.unflatten(-1, (3, 1))
            # There are seven queries and twelve keys, a case in which the packages differ.
            self.computes = x[:, :7], x
            return self.kernel(x[:, :7], x, x, causal=True)

    x = torch.randn(B, 3, 3, 4)
    rebuilt = []
    model = Cross(call_flash)
    with (
        tcnn_probe.attention_stream(model, lambda a: rebuilt.append(a.weights()[:, 0])),
        torch.no_grad(),
    ):
        model(x)
    np.testing.assert_allclose(rebuilt[0], weights_of(*model.computes, 1.0, causal=True), atol=1e-5)
    with (
        tcnn_probe.attention_stream(Cross(call_cutlass), pytest.fail) as stream,
        torch.no_grad(),
    ):
        # A guess would be right for one of xformers' causal masks and wrong for the other, so the
        # layer is refused.
        stream._model(x)
    assert stream.unsupported[""].startswith(
        "a kernel of xformers with a causal mask of 7 queries and 12 keys"
    )


@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        (call_flash, {"softcap": 30.0}, "flash_attn with the option softcap"),
        (
            call_loaded_flash,
            {"sinks": torch.ones(HEADS)},
            "_vllm_flash_attn3_1a2b3c with the option s_aux",
        ),
        # The lengths 19 and 13 add up to the model's 2 x 16 tokens, so that only the lengths
        # differ.
        (
            call_varlen,
            {"lengths": [19, 13]},
            "flash_attn with sequences of several lengths",
        ),
    ],
)
def test_calls_with_unknown_options_are_refused_with_their_names(
    kernel: Kernel, options: dict[str, Any], reason: str
) -> None:
    model, x = model_of(kernel, **options)
    with tcnn_probe.attention_stream(model, pytest.fail) as stream, torch.no_grad():
        model(x)
    assert not stream.layers
    assert stream.unsupported["blocks.0"].startswith(f"a kernel of {reason}, which is not read")


def test_other_operators_of_the_packages_are_ignored() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    model.forward = lambda x: torch.ops.xformers.rms_norm_forward(model[0](x))
    with tcnn_probe.attention_stream(model, pytest.fail) as stream, torch.no_grad():
        model(torch.randn(2, 3, 7, 5))
    assert not stream.unsupported


def test_edits_are_refused() -> None:
    model, x = model_of(call_flash)
    with (
        tcnn_probe.attention_stream(model, lambda attention: HeadEdit([1])),
        pytest.raises(RuntimeError, match=r"blocks\.0.*cannot be edited"),
    ):
        model(x)
