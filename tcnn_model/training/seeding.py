"""Seeding of all random number generators that a training run uses."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["check_repeatable", "own_randomness", "seed_everything", "seed_of"]

Batches = DataLoader[tuple[Tensor, Tensor]]


def seed_everything(seed: int, *loaders: Batches) -> None:
    """Seed the global generators of Python, NumPy and torch,
    and those of the loaders and their samplers.

    Workers need no seeding: torch seeds them when an epoch begins, from the loader's generator or
    else its global one.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (augmentations draw from NumPy's global generator)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # manual_seed without the stack trace that torch keeps for each absent type of device
        torch.default_generator.manual_seed(seed)
    for loader in loaders:
        for part in (loader, loader.sampler):  # they often share one generator
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)


def seed_of(*parts: int) -> int:
    """Hash numbers, such as a run's seed, an epoch and a step, to a seed of 63 bits."""
    # With a sum, step 1 of epoch 2 would have the same seed as step 2 of epoch 1.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed the global CPU generators inside the ``with``, and restore their states afterwards."""
    python, array, tensor = (
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002 (the state that is put back)
        torch.default_generator.get_state(),
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (NumPy takes 32 bits)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        torch.default_generator.set_state(tensor)


def check_repeatable(loader: Batches) -> None:
    """Refuse a loader that cannot repeat an epoch.

    Raises:
        ValueError: The loader's workers persist over epochs, so that their generators are not
            seeded again.
    """
    if loader.num_workers and loader.persistent_workers:
        raise ValueError(
            "with seed= a resumed run repeats what an uninterrupted one would have done, which "
            "persistent workers cannot: give a loader with persistent_workers=False, or no seed"
        )
