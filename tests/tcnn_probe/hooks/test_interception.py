"""Descriptions of calls of torch functions, and answers that replace their outputs.

That descriptions of attention are right is tested in attention/test_torch_attention.py.
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


def test_attention_with_dropout_has_no_output_to_compare_with() -> None:
    x = tensor(B, HEADS, QUERIES, SIZE)
    (attention,) = requests(lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert isinstance(attention, SeenAttention)
    assert attention.output is None


def test_a_causal_mask_begins_in_the_upper_left_corner_if_there_are_more_keys() -> None:
    query, key, value = tensor(B, HEADS, QUERIES, SIZE), *tensor(2, B, HEADS, KEYS, SIZE, seed=1)
    (attention,) = requests(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    )
    logits = (query @ key.mT / SIZE**0.5).masked_fill(~attention.mask, -torch.inf)
    torch.testing.assert_close(attention.output, logits.softmax(-1) @ value)


SQUARE = tensor(B, QUERIES, QUERIES)


@pytest.mark.parametrize(
    ("softmax", "is_attention"),
    [
        (lambda: torch.softmax(SQUARE, dim=2), True),
        (lambda: SQUARE.softmax(1), False),
        # The softmax is over classes, (B, C).
        (lambda: SQUARE[0].softmax(-1), False),
    ],
    ids=["function", "other axis", "no images"],
)
def test_softmax_over_keys_is_described(softmax: Callable[[], Tensor], is_attention: bool) -> None:
    shown = requests(softmax)
    assert [isinstance(entry, SeenAttention) for entry in shown] == [True] * is_attention


WEIGHTS = tensor(B, QUERIES, KEYS)
VALUES = tensor(B, KEYS, SIZE, seed=1)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda: torch.bmm(WEIGHTS, mat2=VALUES),
        lambda: torch.matmul(WEIGHTS, other=VALUES),
        lambda: torch.einsum("bkd,bqk->bdq", [VALUES, WEIGHTS]),
    ],
    ids=["bmm", "matmul", "einsum, list"],
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
