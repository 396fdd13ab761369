"""Attention on objects and its excess: sums by hand,
and the zero of attention that ignores the image.
"""

import numpy as np

import object_heads

RANDOM = np.random.default_rng(0)
SCENES, CELLS = 7, 11
ATTENTION = RANDOM.dirichlet(np.ones(CELLS), (3, SCENES, CELLS))
OBJECTS = np.arange(CELLS) < RANDOM.integers(2, CELLS - 1, SCENES)[:, None]
OBJECTS = RANDOM.permuted(OBJECTS, axis=1)


def test_attention_on_objects_is_that_of_sums_by_hand() -> None:
    expected = np.zeros((2, 3, SCENES))
    for head in range(3):
        for scene in range(SCENES):
            by_side: dict[bool, list[float]] = {True: [], False: []}
            for query in range(CELLS):
                keys = [key for key in range(CELLS) if OBJECTS[scene, key]]
                share = sum(ATTENTION[head, scene, query, key] for key in keys)
                by_side[bool(OBJECTS[scene, query])].append(share)
            expected[:, head, scene] = np.mean(by_side[True]), np.mean(by_side[False])
    np.testing.assert_allclose(object_heads.on_object(ATTENTION, OBJECTS), expected, rtol=1e-12)


def test_excess_is_zero_for_attention_that_is_the_same_for_every_image() -> None:
    def excess(attention: np.ndarray) -> np.ndarray:
        own, other = (
            object_heads.on_object(attention, objects)
            for objects in (OBJECTS, np.roll(OBJECTS, 1, 0))
        )
        return (own - other).mean(-1)

    same = np.broadcast_to(ATTENTION[:, :1], ATTENTION.shape)
    np.testing.assert_allclose(excess(same), 0, atol=1e-15)
    assert abs(excess(ATTENTION)).min() > 1e-3
