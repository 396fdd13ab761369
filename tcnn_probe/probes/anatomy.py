"""The anatomy of heads: its variables, how they follow from sums over images,
and the kernels of the convolutions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern, Sums
from tcnn_probe.attention.sampled_queries import QUERIES
from tcnn_probe.attention.token_order import OTHER_TOKENS
from tcnn_probe.heads.anatomy import (
    Convolution,
    nearest_convolution,
    nearest_prefix,
    parts_of_selectivity,
)
from tcnn_probe.heads.static_pattern import (
    information,
    offsets_of_pairs,
    translation_equivariance,
)
from tcnn_probe.probes.probe import Probe
from tcnn_probe.schema import Variable

__all__ = [
    "ANATOMY",
    "OFFSET_KERNEL",
    "content_information",
    "finish_anatomy",
    "finish_class_queries",
    "finish_information",
    "selectivity",
]

_HEAD = ("layer", "head")
_QUERIES = (
    f"Uses at most {QUERIES} queries of patches of each layer, evenly spread and always the same "
    f"(with padding up to {1024 * QUERIES} divided by the number of keys), each over the images in "
    "which it is real"
)
_SEVERAL = (
    "NaN for a single image, and if images of several sizes were seen since the previous mark."
)
_GRID = "NaN without a common grid of queries and keys, and if masks differ between images."

_CLASS_QUERIES = "the only queries are class tokens: class_content_information has theirs"
_ONE_IMAGE = "it compares images, and only one was seen since the previous mark"
_NO_IMAGE = "the attention of all images was NaN"
_FEW_IMAGES = (
    "it compares halves of the images, and fewer than four were seen since the previous mark"
)
_MASKS = "masks hide other keys, or padding replaces other queries, in other images"
_OTHER_GRIDS = "offsets between queries and keys are no whole numbers of patches"
# Weights far below those that any network gives: a mask of -100, as in shifted windows, hides keys.
_HIDDEN_WEIGHT = np.exp(-40)
_RADIUS = 7  # of kernels, in patches; attention beyond is drawn as nothing on a page of 72 heads
_PARTS = {
    "offset_information": (
        "offset information",
        "KL(T || U), the information of the convolution T inside the head, exp theta(offset from i "
        "to j) / Z_i, over uniform attention U: T is nearest to the mean over images M of A, with "
        "a free number for each offset and for each class and register token. Part of selectivity. "
        f"{_GRID}",
    ),
    "position_information": (
        "position information",
        "KL(M || T), what the mean over images M of A adds to the convolution T that is nearest to "
        "it: dependence on the position in the image. Corrected for the number of images. Part of "
        f"selectivity. {_GRID}",
    ),
    "prefix_information": (
        "prefix information",
        "KL(P || U), the part of offset_information that is no convolution: P is nearest to the "
        "mean over images M of A, with a free number for each class and register token, and even "
        f"over the patches. 0 without such tokens. {_GRID}",
    ),
    "key_content_information": (
        "key content information",
        "I(key; image): how much it depends on the image which keys all queries attend to (those "
        "of a window, in windowed attention). Corrected for the numbers of images and queries. "
        f"Part of selectivity. {_SEVERAL}",
    ),
    "query_key_content_information": (
        "query-key content information",
        "I(image; query given key): how much it depends on the image which queries attend to which "
        "keys, beyond the keys that stand out for all queries. Corrected for the numbers of images "
        f"and queries. Part of selectivity. {_SEVERAL}",
    ),
}


def content_information(attention: str) -> Variable:
    """Describe the variable that measures how strongly a head's attention depends on the image.

    Args:
        attention: Phrase that names the attention and begins with "of".
    """
    return Variable(
        _HEAD,
        "nat",
        f"content information {attention}",
        "Mean over queries of H(mean over images of A_i) - mean over images of H(A_i), "
        f"{attention}, times n / (n - 1) for n images: the mutual information of image and key. It "
        "is 0 if the attention does not depend on the image, and at most the log of the number of "
        "keys; if it depends strongly on the image, the estimate from few images is too low. "
        f"{_QUERIES}. {_SEVERAL}",
    )


def selectivity(attention: str, remark: str = "") -> Variable:
    """Describe the variable that measures how far a head's attention is from uniform.

    Args:
        attention: Phrase that names the attention and begins with "of".
        remark: Sentences that follow the definition.
    """
    return Variable(
        _HEAD,
        "nat",
        f"selectivity {attention}",
        f"Mean over queries and images of log K_i - H(A_i), {attention}, for the K_i keys that no "
        f"mask hides from query i: the information over uniform attention.{remark}",
    )


def _halves_of(part: str) -> str:
    return f"{part}_halves"


ANATOMY: dict[str, Variable] = {
    "content_information": content_information("of attention"),
    "translation_equivariance": Variable(
        _HEAD,
        "1",
        "translation equivariance",
        "Share of the variance of the mean over images of A_ij that depends only on the offset "
        "from i to j, corrected for chance, over the queries of content_information. 1 for a "
        "convolution, 0 for a pattern that does not depend on offsets.",
    ),
    "selectivity": selectivity(
        "of attention",
        " The queries are those of content_information, so that it is not uniform_entropy - "
        "entropy. It is the sum of offset_information, position_information, "
        "key_content_information and query_key_content_information.",
    ),
}
for _name, (_label, _meaning) in _PARTS.items():
    ANATOMY[_name] = Variable(_HEAD, "nat", _label, f"{_meaning} {_QUERIES}.")
    ANATOMY[_halves_of(_name)] = Variable(
        _HEAD,
        "nat",
        f"{_label}, difference of halves",
        f"{_name} of every second image, beginning with the first, minus that of the others: its "
        "uncertainty. NaN for fewer than four images.",
    )

Statistics = Mapping[str, np.ndarray | str]
"""Values of each head by variable, or the reason why there are none."""


def finish_information(name: str, pattern: Pattern) -> Statistics:
    """Return the content information of a pattern."""
    if pattern.reason == OTHER_TOKENS:
        return {name: OTHER_TOKENS}
    sums = pattern.sums()
    if not (sums.images > 1).any():
        return {name: _ONE_IMAGE}
    images = np.maximum(sums.images, 1)  # sums over no image are 0
    mean, entropy = sums.attention / images[..., None], sums.entropy / images
    return {name: information(mean, entropy, sums.images)}


def finish_class_queries(name: str, pattern: Pattern) -> Statistics:
    """Return the reason why attention whose only queries are class tokens has no anatomy."""
    return dict.fromkeys(ANATOMY, _CLASS_QUERIES)


def finish_anatomy(name: str, pattern: Pattern) -> Statistics:
    """Return the parts of selectivity, their differences between halves of the images,
    and the equivariance.
    """
    statistics = dict(finish_information(name, pattern)) | _equivariance(pattern)
    means = _Means.of(pattern)
    if isinstance(means, str):
        parts = ("selectivity", *_PARTS)
        return statistics | dict.fromkeys([*parts, *map(_halves_of, parts[1:])], means)
    convolution = means.convolution()
    statistics |= means.parts(convolution)
    halves = [replace(means, sums=pattern.sums(half)) for half in range(2)]
    even, odd = (half.parts(half.convolution(convolution)) for half in halves)
    for part in _PARTS.keys() & even.keys():
        difference = even[part] - odd[part]
        statistics[_halves_of(part)] = np.where(means.images < 4, np.nan, difference)
    for part in _PARTS.keys() - statistics.keys():
        statistics |= dict.fromkeys((part, _halves_of(part)), pattern.reason)
    return statistics | {
        part: _ONE_IMAGE if part in _PARTS else _FEW_IMAGES
        for part, values in statistics.items()
        if not isinstance(values, str) and np.isnan(values).all()
    }


def _is_by_mask(hidden: np.ndarray, pattern: Pattern, counted: np.ndarray) -> bool:
    """Return whether a mask that a model adds to its logits has hidden keys,
    (heads, queries, keys), in all images.

    Its heads then lack the same keys, and no query its own. Heads that are sharp by themselves lack
    different ones, unless all look at a single token, which is not the query's own.
    """
    if pattern.queries is None or pattern.keys is None or len(hidden) < 2:
        return False
    own = (pattern.queries[counted, None] == pattern.keys).all(-1)
    is_shared = (hidden.all(0) == hidden.any(0)).all()
    return bool(is_shared and not (hidden & own).any())


@dataclass(frozen=True)
class _Means:
    """Means over images of the queries that count.

    Args:
        pattern: Sums over all images, and their grid.
        sums: Sums over these images, or a half of them.
        counted: Whether each query counts; all that do are in the same images.
        seen: Whether each of them sees each key, shape (queries, keys).
    """

    pattern: Pattern
    sums: Sums
    counted: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, pattern: Pattern) -> "_Means | str":
        """Return the means, or the reason why images cannot be compared."""
        if pattern.reason == OTHER_TOKENS:
            return OTHER_TOKENS
        sums = pattern.sums()
        counted = sums.images.max(0) > 0
        if not counted.any():
            return _NO_IMAGE
        by_window = counted.reshape(sums.mean_entropy.shape[1], -1)
        images = sums.images[:, counted]
        visible = np.broadcast_to(pattern.visible, sums.attention.shape[1:])
        visible = visible[counted]
        differ = ((visible > 0) & (visible < pattern.batch)).any()
        if differ or np.ptp(images, 1).any() or np.ptp(by_window.sum(1)):
            return _MASKS
        hidden = sums.attention[:, counted] / images[..., None] <= _HIDDEN_WEIGHT
        seen = visible > 0
        if pattern.shifted or _is_by_mask(hidden, pattern, counted):
            seen = seen & ~hidden.all(0)
        return cls(pattern, sums, counted, seen)

    @property
    def images(self) -> np.ndarray:
        """Number of images of each head."""
        return self.sums.images[:, self.counted].max(1, initial=0)

    @property
    def mean(self) -> np.ndarray:
        """Mean of A, shape (heads, queries, keys)."""
        images = np.maximum(self.images, 1)[:, None, None]
        return self.sums.attention[:, self.counted] / images

    def parts(self, convolution: Convolution | None) -> dict[str, np.ndarray]:
        """Return the parts of selectivity, given the convolutions inside the heads."""
        sums, images = self.sums, np.maximum(self.images, 1)[:, None]
        by_window = len(images), sums.mean_entropy.shape[1], -1
        # Of queries some of which are padding, the others are sampled from as large a share of the
        # real ones.
        population = self.pattern.population * self.counted.sum() // self.counted.size
        mean, prefix = self.mean, None
        if convolution is not None:
            assert self.pattern.keys is not None
            on_grid = ~np.isnan(self.pattern.keys).any(-1)
            prefix = nearest_prefix(mean, on_grid, self.seen)
        return parts_of_selectivity(
            mean.reshape(*by_window, self.seen.shape[1]),
            (sums.entropy[:, self.counted] / images).reshape(by_window),
            sums.mean_entropy / images,
            self.seen.sum(1),
            self.images,
            population,
            convolution,
            prefix,
        )

    def convolution(self, start: Convolution | None = None) -> Convolution | None:
        """Return the convolutions inside the heads,
        fitted from those of other images; None without a grid.
        """
        if self.pattern.queries is None:
            return None
        kernel = None if start is None else start.kernel
        return nearest_convolution(self.mean, self.offsets()[0], self.seen, kernel)

    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each pair's offset,
        and the offsets; tokens off the grid come last.
        """
        assert self.pattern.queries is not None
        assert self.pattern.keys is not None
        return offsets_of_pairs(self.pattern.queries[self.counted], self.pattern.keys)


def _equivariance(pattern: Pattern) -> dict[str, np.ndarray]:
    """Return the translation equivariance over the keys on the grid,
    without padding, unless it is unknown.
    """
    if pattern.queries is None or pattern.keys is None:
        return {}
    sums = pattern.sums()
    counted = (sums.images > 0).all(0)
    real = slice(len(pattern.keys) - pattern.padding)
    images = np.maximum(sums.images, 1)[:, counted, None]
    mean = sums.attention[:, counted, real] / images
    equivariance = translation_equivariance(mean, pattern.queries[counted], pattern.keys[real])
    # It is NaN on a grid of one cell.
    is_known = not np.isnan(equivariance).all()
    return {"translation_equivariance": equivariance} if is_known else {}


def _finish_kernel(_: str, pattern: Pattern) -> Statistics:
    """Return the kernels of the convolutions at offsets of up to seven patches,
    and at class and register tokens.
    """
    means = _Means.of(pattern)
    if isinstance(means, str) or pattern.queries is None:
        reason = means if isinstance(means, str) else pattern.reason
        return dict.fromkeys(_KERNELS, reason)
    convolution = means.convolution()
    offsets = means.offsets()[1]
    assert convolution is not None
    if (offsets % 1).any():
        return dict.fromkeys(_KERNELS, _OTHER_GRIDS)
    kernel = np.full((len(convolution.kernel), *[2 * _RADIUS + 1] * 2), np.nan)
    near = np.flatnonzero((abs(offsets) <= _RADIUS).all(1))
    y, x = offsets[near].astype(int).T + _RADIUS
    kernel[:, y, x] = convolution.kernel[:, near]
    prefix = convolution.kernel[:, len(offsets) :]
    total = np.nansum(kernel, (1, 2)) + prefix.sum(1)
    kernels = {"offset_kernel": kernel / total[:, None, None]}
    return kernels | ({"prefix_kernel": prefix / total[:, None]} if prefix.size else {})


def _kernel_of(attention: Attention) -> Mapping[str, Pattern]:
    pattern = attention.statistics().get("content_information")
    if pattern is None or attention.first_patch_query is None:
        return {}
    return {"offset_kernel": replace(pattern, finish=_finish_kernel)}


_KERNELS = {
    "offset_kernel": Variable(
        (*_HEAD, "offset_y", "offset_x"),
        "1",
        "kernel of the convolution inside the head",
        "exp theta(offset from query to key in patches) of the convolution T of "
        "offset_information, over the images since the previous mark. Sums to one with "
        "prefix_kernel; NaN at offsets that none of the sampled queries has.",
        dtype="float32",
        nan_reason="none of the sampled queries has a key at this offset",
    ),
    "prefix_kernel": Variable(
        (*_HEAD, "prefix_token"),
        "1",
        "weight of tokens off the grid in the kernel",
        "exp theta of each class and register token, see offset_kernel.",
        dtype="float32",
    ),
}
_OFFSETS = range(-_RADIUS, _RADIUS + 1)
OFFSET_KERNEL = Probe(
    "offset-kernel",
    _KERNELS,
    attention=_kernel_of,
    waits=True,
    coords={"offset_y": _OFFSETS, "offset_x": _OFFSETS},
)
