"""Logits of flex_attention, block by block, against its functions called entry by entry."""

import itertools

import pytest
import torch
from torch import Tensor

from tcnn_probe.hooks.score_modification import ScoreModification

IMAGES, HEADS, QUERIES, KEYS = 3, 2, 5, 7
SCORES = torch.randn(IMAGES, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(1))


def biased(
    score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor, bias: Tensor
) -> Tensor:
    # Each index has its own weight, so that exchanged indices would show.
    return score + bias[query, key] + 10 * image + 100 * head


def visible(image: Tensor, head: Tensor, query: Tensor, key: Tensor, shift: Tensor) -> Tensor:
    return (query + key + shift * image) % 3 != head


MODIFICATION = ScoreModification(
    biased,
    visible,
    (BIAS,),
    (torch.tensor(2),),
    torch.arange(QUERIES),
    # Keys are in another order than the user's indices, as if the class token came last.
    torch.arange(KEYS).flip(0),
)


@pytest.mark.parametrize(
    ("rows", "queries", "keys"),
    [
        (slice(None), slice(None), slice(None)),
        (slice(1, 3), slice(2, 4), slice(None)),
        (slice(2, 3), slice(4, 5), slice(3, 6)),
    ],
    ids=["whole", "rows of queries", "block"],
)
def test_logits_of_blocks_equal_those_of_entries(rows: slice, queries: slice, keys: slice) -> None:
    block = MODIFICATION(SCORES[rows, :, queries, keys], rows, queries, keys)
    expected = torch.full_like(SCORES, -torch.inf)
    for place in itertools.product(*map(range, SCORES.shape)):
        image, head, query, key = map(torch.tensor, place)
        index = KEYS - 1 - key
        if visible(image, head, query, index, torch.tensor(2)):
            score = SCORES[place]
            expected[place] = biased(score, image, head, query, index, BIAS)
    assert torch.equal(block, expected[rows, :, queries, keys])
    assert torch.isinf(expected).any()
