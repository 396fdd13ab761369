"""(l) What the default statistics cost, relative to the least that they could.

    python benchmarks/statistics_floor.py      DeiT-S, batch 8 at 224; about 3 minutes on one core

The floor is written in plain lines, for one attention: the products of queries and keys, the
exponential and the sums that entropy, distance, class attention and the anatomy of heads need.
Plain forwards, recorded ones and floors take turns.
"""

import random
import time
from collections.abc import Callable, Mapping

import numpy as np
import timm
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import contest
import tcnn_probe

SAMPLED = 64  # queries whose attention is summed over images


def floor(query: Tensor, key: Tensor, distances: Tensor) -> tuple[Tensor, ...]:
    """Return the sums of an attention, image by image, so that its logits stay in the cache.

    Args:
        query, key: Queries, scaled, and keys, shape (B, heads, N, d); the first is a class token.
        distances: Distance between tokens, 0 to and from the class token, shape (N, N).
    """
    rows, pattern = [], query.new_zeros(2, key.shape[1], SAMPLED, key.shape[2])
    logits, product = (query.new_empty(*query.shape[1:3], key.shape[2]) for _ in "ab")
    for image in range(len(query)):
        torch.matmul(query[image], key[image].mT, out=logits)
        top = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits.sub_(top), out=product)
        total = weights.sum(-1, keepdim=True)
        pattern[image % 2] += weights[:, -SAMPLED:] / total[:, -SAMPLED:]
        expected = logits.mul_(weights).sum(-1)
        distance = torch.mul(weights, distances, out=logits).sum(-1)
        rows.append(torch.stack([top[..., 0], total[..., 0], expected, distance]))
    return torch.stack(rows), pattern


def seconds(action: Callable[[], object]) -> float:
    """Return the processor time of an action; on a GPU, the time until it is done."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> np.ndarray:
    """Return the seconds of each way, shape (rounds, ways)."""
    order = random.Random(0)  # seeded, so that every run has the same turns
    measured = []
    for _ in tqdm(range(rounds + 2), disable=None, leave=False):
        times = {name: seconds(ways[name]) for name in order.sample([*ways], len(ways))}
        measured.append([times[name] for name in ways])
    return np.array(measured[2:])  # the first rounds warm up


def costs(measured: np.ndarray) -> tuple[float, float, float]:
    """Return the floor and the cost in plain forwards,
    and the cost in floors, by medians over (rounds, 3).
    """
    plain, recorded, least = measured.T
    cost = np.median(recorded - plain)
    forward, least = np.median(plain), np.median(least)
    return least / forward, cost / forward, cost / least


def recorded_turns(
    model: nn.Module,
    twin: nn.Module,
    images: Tensor,
    least: Callable[[], object],
    rounds: int,
) -> np.ndarray:
    """Return the seconds of a plain forward of the twin,
    a recorded one of the model, and the floor, in turns.
    """
    ways = {"plain": lambda: twin(images), "recorded": lambda: model(images)}
    with tcnn_probe.record(model) as recorder, torch.inference_mode():
        measured = turns(ways | {"floor": least}, rounds)
        recorder.mark(epoch=0)
    return measured


def main() -> None:
    """Print the cost of the statistics and of the floor."""
    parser = contest.options(__doc__)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=8)
    parser.set_defaults(rounds=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model, twin = (timm.create_model(arguments.model).eval().to(arguments.device) for _ in range(2))
    size = model.default_cfg["input_size"]
    images = torch.randn(arguments.batch, *size, device=arguments.device)
    attention, grid = model.blocks[0].attn, model.patch_embed.grid_size
    shape = arguments.batch, attention.num_heads, 1 + grid[0] * grid[1]
    query, key = torch.randn(2, *shape, attention.head_dim, device=arguments.device)
    places = torch.cartesian_prod(*(torch.arange(float(side)) for side in grid))
    distances = torch.zeros(shape[2], shape[2])
    distances[1:, 1:] = torch.cdist(places, places)
    distances = distances.to(images.device)

    def least() -> list[tuple[Tensor, ...]]:
        return [floor(query, key, distances) for _ in model.blocks]

    roles = ((model, twin), (twin, model))
    halves = [recorded_turns(*role, images, least, arguments.rounds // 2) for role in roles]
    measured = np.concatenate(halves)
    in_forwards, cost, in_floors = costs(measured)
    draws = np.random.default_rng(0).integers(len(measured), size=(2000, len(measured)))
    drawn = [costs(measured[rounds])[2] for rounds in draws]
    low, high = np.quantile(drawn, [0.025, 0.975])
    plain, recorded, floors = np.mean([half.min(0) for half in halves], axis=0)
    print(
        f"{arguments.model}, batch {arguments.batch}: a recorded forward takes {1 + cost:.3f} "
        f"times as long as a plain one, with the floor alone {1 + in_forwards:.3f}; the cost is "
        f"{in_floors:.2f} times the floor (95 % interval over {len(measured)} turns: {low:.2f} to "
        f"{high:.2f}; by least times: {(recorded - plain) / floors:.2f})"
    )


if __name__ == "__main__":
    main()
