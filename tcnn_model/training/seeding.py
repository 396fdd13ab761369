"""Every source of random numbers that a training run draws from, set to one seed."""

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
    """Seed Python, NumPy, torch, and the generators that the loaders and their samplers have of their own.

    Workers of a loader follow: torch seeds them from the loader's generator, or else from its own, when an epoch
    begins.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what augmentation draws from is the global generator)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same, without the stack trace that torch keeps for each kind of device that is not there
        torch.default_generator.manual_seed(seed)
    for loader in loaders:
        for part in (loader, loader.sampler):  # often one generator for both
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)


def seed_of(*parts: int) -> int:
    """Derive a seed of 63 bits from numbers, such as a run's seed, an epoch and a step; others from other numbers."""
    # A sum of the numbers would give step 1 of epoch 2 the randomness of step 2 of epoch 1.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Draw from generators of this seed, on the CPU, and leave the global ones as they were."""
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
        ValueError: Its workers live longer than an epoch, and draw from generators that are not seeded again.
    """
    if loader.num_workers and loader.persistent_workers:
        raise ValueError(
            "with seed= a resumed run repeats what an uninterrupted one would have done, which persistent workers "
            "cannot: give a loader with persistent_workers=False, or no seed"
        )
