"""Descriptions of calls of torch functions:
a computation from the description gives torch's output.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tcnn_probe.attention.head_edit import HeadEdit
from tcnn_probe.hooks.interception import (
    Answer,
    Interception,
    Seen,
    SeenAttention,
    SeenCopy,
    SeenJoin,
    SeenOperand,
    SeenProduct,
    TorchCall,
)

B, HEADS, QUERIES, KEYS, SIZE = 2, 4, 5, 7, 3


def tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Observer:
    """Observer that keeps descriptions of calls, and gives an answer to each."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.shown: list[Seen] = []
        self.outputs: list[Any] = []

    def may_edit(self) -> bool:
        return bool(self.answers)

    def sees(self, call: TorchCall) -> Sequence[Answer]:
        request = call.describe() if call.objection is None else None
        if request is None:
            return ()
        self.shown.append(request)
        return self.answers

    def ran(self, call: TorchCall, output: Any, answers: Sequence[Answer]) -> None:
        self.outputs.append(output)


def requests(run: Callable[[], object]) -> list[Seen]:
    """Return all calls that are reported while a function runs."""
    observer, interception = Observer(), Interception.of_this_thread()
    interception.join(observer)
    run()
    assert interception.leave(observer)
    return observer.shown


def by_formula(attention: SeenAttention) -> Tensor:
    """Compute softmax(scale Q K^T + mask) V from a description."""
    assert attention.query is not None
    assert attention.key is not None
    assert attention.value is not None
    logits = attention.scale * attention.query @ attention.key.mT
    if attention.mask is not None and attention.mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention.mask, -torch.inf)
    elif attention.mask is not None:
        logits = logits + attention.mask
    attended = logits.softmax(-1) @ attention.value
    return attended if attention.finish is None else attention.finish(attended)


VISIBLE = tensor(QUERIES, KEYS) > -0.5
# Every query sees a key, or its row would be NaN.
VISIBLE[:, 0] = True


@pytest.mark.parametrize(
    ("options", "key_heads"),
    [
        ({}, HEADS),
        ({"scale": 0.3}, HEADS),
        ({"attn_mask": VISIBLE}, HEADS),
        ({"attn_mask": tensor(HEADS, QUERIES, KEYS, seed=4)}, HEADS),
        # There are fewer queries than keys, so that the corner in which the causal triangle starts
        # matters.
        ({"is_causal": True}, HEADS),
        ({"enable_gqa": True}, 2),
    ],
    ids=["plain", "scale", "bool", "float", "causal", "grouped"],
)
def test_description_of_fused_attention(options: dict[str, Any], key_heads: int) -> None:
    query = tensor(B, HEADS, QUERIES, SIZE, seed=1)
    key, value = (tensor(B, key_heads, KEYS, SIZE, seed=seed) for seed in (2, 3))
    (attention,) = requests(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    assert isinstance(attention, SeenAttention)
    torch.testing.assert_close(attention.output, by_formula(attention))
    assert bool(attention.not_on_grid) == ("is_causal" in options)


HIDDEN = torch.zeros(B, KEYS, dtype=torch.bool)
HIDDEN[1, 4:] = True


@pytest.mark.parametrize(
    ("layer_options", "call_options"),
    [
        ({}, {}),
        ({"bias": False}, {}),
        # The layer adds its own key, which no mask hides.
        ({"add_bias_kv": True}, {"key_padding_mask": HIDDEN}),
        ({"add_zero_attn": True}, {"attn_mask": ~VISIBLE}),
        ({"kdim": 6, "vdim": 5}, {}),
        ({}, {"attn_mask": tensor(B * HEADS, QUERIES, KEYS, seed=4)}),
    ],
    ids=["plain", "no bias", "key of its own", "key of zeros", "widths", "per head"],
)
def test_description_of_multihead_attention(
    layer_options: dict[str, Any], call_options: dict[str, Any]
) -> None:
    width = HEADS * SIZE
    layer = nn.MultiheadAttention(
        width, HEADS, batch_first=True, dtype=torch.float64, **layer_options
    )
    query = tensor(B, QUERIES, width, seed=1)
    key = tensor(B, KEYS, layer_options.get("kdim", width), seed=2)
    value = tensor(B, KEYS, layer_options.get("vdim", width), seed=3)
    shown = requests(lambda: layer(query, key, value, **call_options))
    (attention,) = (entry for entry in shown if isinstance(entry, SeenAttention))
    torch.testing.assert_close(attention.output, by_formula(attention))
    adds_keys = "add_bias_kv" in layer_options or "add_zero_attn" in layer_options
    assert bool(attention.not_on_grid) == adds_keys
    assert attention.heads == 1


def test_attention_with_dropout_has_no_output_to_compare_with() -> None:
    x = tensor(B, HEADS, QUERIES, SIZE)
    (attention,) = requests(lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert isinstance(attention, SeenAttention)
    assert attention.output is None


SQUARE = tensor(B, QUERIES, QUERIES)


@pytest.mark.parametrize(
    ("softmax", "is_attention"),
    [
        (lambda: SQUARE.softmax(-1), True),
        (lambda: torch.softmax(SQUARE, dim=2), True),
        (lambda: F.softmax(SQUARE, -1), True),
        (lambda: SQUARE.softmax(1), False),
        # The softmax is over classes, (B, C).
        (lambda: SQUARE[0].softmax(-1), False),
    ],
    ids=["method", "function", "functional", "other axis", "no images"],
)
def test_softmax_over_keys_is_described(softmax: Callable[[], Tensor], is_attention: bool) -> None:
    shown = requests(softmax)
    assert [isinstance(entry, SeenAttention) for entry in shown] == [True] * is_attention


WEIGHTS = tensor(B, QUERIES, KEYS)
VALUES = tensor(B, KEYS, SIZE, seed=1)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda: WEIGHTS @ VALUES,
        lambda: torch.bmm(WEIGHTS, mat2=VALUES),
        lambda: torch.matmul(WEIGHTS, other=VALUES),
        lambda: VALUES.mT @ WEIGHTS.mT,
        lambda: torch.einsum("bqk,bkd->bqd", WEIGHTS, VALUES),
        lambda: torch.einsum("bkd,bqk->bdq", [VALUES, WEIGHTS]),
    ],
    ids=["operator", "bmm", "matmul", "transposed", "einsum", "einsum, list"],
)
def test_products_name_candidates_for_attention(
    multiply: Callable[[], Tensor],
) -> None:
    (product,) = requests(multiply)
    assert isinstance(product, SeenProduct)
    weights = SeenOperand.of(WEIGHTS)
    values = SeenOperand.of(VALUES)
    candidates = [
        weighed for candidate, weighed in product.pairs if weights.is_in(candidate, heads=False)
    ]
    assert [weighed.place for weighed in candidates] == [values.place]


@pytest.mark.parametrize("equation", ["bqk,bqd->bkd", "bqk,bqk->bqk"])
def test_product_that_does_not_sum_over_the_last_axis_weighs_nothing(
    equation: str,
) -> None:
    (product,) = requests(lambda: torch.einsum(equation, WEIGHTS, WEIGHTS))
    assert isinstance(product, SeenProduct)
    assert not product.pairs


def test_copies_and_joins() -> None:
    scaled, joined = requests(lambda: (WEIGHTS * 0.5, torch.cat([VALUES, VALUES[:, :2]], 1)))
    assert isinstance(scaled, SeenCopy)
    assert scaled.sources == [SeenOperand.of(WEIGHTS)]
    # Nothing holds the product any more, not even its description.
    assert scaled.output() is None
    assert joined == SeenJoin((KEYS, 2))


def test_operands_that_all_images_share() -> None:
    weight = tensor(KEYS, SIZE)
    assert SeenOperand.of(weight).shared
    assert SeenOperand.of(weight.expand(B, -1, -1)).shared
    assert not SeenOperand.of(VALUES).shared
    # The stride along an axis of a single image does not matter.
    assert not SeenOperand.of(weight.expand(B, -1, -1)[:1]).shared


def test_the_last_answers_replace_the_output_for_all_observers() -> None:
    """One mode serves both; each head belongs to the last edit that names it,
    whichever observer joined last.
    """
    edits: list[list[HeadEdit]] = []

    def double(call: TorchCall, of_all: Sequence[HeadEdit]) -> Tensor:
        edits.append([*of_all])
        return 2 * call.output

    late = Observer(Answer(5, "late", HeadEdit([1, 2]), double))
    early = Observer(Answer(3, "early", HeadEdit([0, 1]), double))
    modes = []
    for observer in (late, early):
        modes.append(Interception.of_this_thread())
        modes[-1].join(observer)
    doubled = WEIGHTS.softmax(-1)
    plain = WEIGHTS.exp()
    assert modes[0].leave(early)
    # The mode stays on for the other observer, and sees one call more.
    assert torch.equal(WEIGHTS.softmax(-1), doubled)
    assert modes[1].leave(late)
    assert not _get_current_function_mode_stack()
    assert modes[0] is modes[1]
    assert torch.equal(doubled, 2 * WEIGHTS.softmax(-1))
    assert torch.equal(plain, WEIGHTS.exp())
    assert edits == [[HeadEdit([0]), HeadEdit([1, 2])], [HeadEdit([1, 2])]]
    assert [x is doubled for x in early.outputs] == [True]
    assert len(late.outputs) == 2


def test_multihead_attention_runs_once_whether_or_not_it_is_edited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(HEADS * SIZE, HEADS, dtype=torch.float64)
    x = tensor(QUERIES, B, HEADS * SIZE)
    expected = layer(x, x, x)[0]
    runs = []
    # Torch's function calls this one inside, out of sight of the mode.
    fused = F.scaled_dot_product_attention

    def count(*args: Any, **options: Any) -> Tensor:
        runs.append(1)
        return fused(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)

    def first_head(call: TorchCall, edits: Sequence[HeadEdit]) -> Any:
        assert call.heads.shape == (B, HEADS, QUERIES, SIZE)
        return call.with_heads(call.heads * (torch.arange(HEADS) < 1)[:, None, None])

    for answers in ([], [Answer(0, None, HeadEdit([1]), first_head)]):
        observer, interception = Observer(*answers), Interception.of_this_thread()
        interception.join(observer)
        output = layer(x, x, x, need_weights=False)[0]
        interception.leave(observer)
        if not answers:
            torch.testing.assert_close(output, expected)
            continue
        # The layer without the weights that project the other heads.
        layer.out_proj.weight.data[:, SIZE:] = 0
        torch.testing.assert_close(output, layer(x, x, x)[0])
    assert len(runs) == 2


def test_other_functions_are_not_described() -> None:
    assert TorchCall(torch.exp, (WEIGHTS,), {}).describe() is None
    assert not requests(lambda: WEIGHTS.exp())
    # Tensors on the meta device have no values, as in a trace of shapes.
    assert not requests(lambda: torch.empty(B, QUERIES, KEYS, device="meta").softmax(-1))
