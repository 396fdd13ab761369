"""Signs of health: collapsed queries, sinks,
similar heads and queries, silent heads, and outlier tokens.

In gated layers (GPSA, ConViT) all of these measure the content part C, which depends on the images:
the positional part is the same for all images, and its state is recorded as gate, locality strength
and centre.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tcnn_model.precision import at_least_float32
from tcnn_probe.attention.attention import Attention, ContentRows
from tcnn_probe.attention.sampled_queries import QUERIES
from tcnn_probe.probes.probe import NotMeasuredError, Probe
from tcnn_probe.probes.shared_variables import HEAD, IMAGE_MEAN, LOGIT
from tcnn_probe.representation.token_similarity import mean_cosine
from tcnn_probe.schema import Variable

__all__ = ["ENTROPY_BINS", "HEALTH", "OUTLIER", "TOKEN_KINDS"]

ENTROPY_BINS = 20
"""Number of bins of the histogram of entropies:
with a width of 0.05, quantiles have an error of at most 0.05.
"""
TOKEN_KINDS = ("class", "register", "border", "inner", "text")
"""Kinds of keys that can be a sink; distillation tokens count as class tokens,
border and inner tokens are patches.
"""
OUTLIER = 3.0
"""Norm above which a token is an outlier, as a multiple of the median norm. Darcet et al. (arXiv
2309.16588) use a norm of 150 for DINOv2-g, between its two modes, which differ by a factor of ten;
a multiple of the median, which is our choice, applies to models of any scale.
"""


def _measure(attention: Attention) -> Mapping[str, Tensor]:
    rows, means = attention.content_rows(), attention.statistics()
    if rows is None:
        raise NotMeasuredError("its rows are not measured one by one")
    measured = {
        "max_logit": means["max_logit"],
        **_of_entropy(attention, rows),
        **_of_sink(attention, rows.received),
        **_of_outputs(attention),
        **_of_tokens(attention),
    }
    if attention.queries > 1:
        measured["query_diversity"] = _query_diversity(attention, rows)
    if attention.heads > 1:
        measured["head_similarity"] = rows.similarity
    return measured


def _of_entropy(attention: Attention, rows: ContentRows) -> dict[str, Tensor]:
    """Count the queries of each image by their entropy
    as a share of the log of the number of keys that they see.
    """
    if attention.content_keys < 2:
        return {}
    largest: float | Tensor = math.log(attention.content_keys)
    counted = torch.ones_like(rows.entropy)
    if (visibility := attention.visibility) is not None:
        # A query that sees a single key has no choice.
        has_choice = visibility.queries & (visibility.seen > 1)
        counted *= has_choice[:, :, None]
        largest = visibility.seen.clamp_min(2).to(counted.dtype).log()[:, :, None]
    normalised = (rows.entropy / largest).where(counted > 0, 0)
    normalised, counted = (x.transpose(1, 2).flatten(2) for x in (normalised, counted))
    # Values that exceed 1 by rounding belong to the last bin.
    index = (normalised * ENTROPY_BINS).long().clamp(0, ENTROPY_BINS - 1)
    counts = normalised.new_zeros(*normalised.shape[:2], ENTROPY_BINS)
    counts.scatter_add_(2, index, counted)
    shares = counts / counted.sum(2, keepdim=True)
    # A NaN belongs to no bin, so it makes the histogram NaN.
    return {"entropy_histogram": shares + 0 * normalised.mean(2, keepdim=True)}


def _over_windows(attention: Attention, values: Tensor) -> Tensor:
    """Average (B, windows, ...) over windows, of which those of padding do not count: (B, ...)."""
    if attention.visibility is None:
        return values.mean(1)
    return attention.visibility.mean_over_windows(values)


def _of_sink(attention: Attention, received: Tensor) -> dict[str, Tensor]:
    """Measure the key that receives the most attention:
    its share, its kind, and the relative norm of its value.
    """
    # (B, windows, heads): each window has its own sink.
    share, index = received.max(-1)
    measured = {"sink": _over_windows(attention, share)}
    kinds = _token_kinds(attention)
    if kinds is not None:
        is_kind = one_hot(kinds[index], len(TOKEN_KINDS))
        # The key of the largest share is meaningless if the shares are NaN.
        measured["sink_kind"] = _over_windows(
            attention, is_kind.to(share.dtype) + 0 * share[..., None]
        )
    values = attention.values()
    if values is None or received.shape[-1] < 2:
        return measured
    dtype = at_least_float32(values.dtype)
    norms = torch.linalg.vector_norm(values, dim=-1, dtype=dtype)
    norms = norms.unflatten(0, received.shape[:2]).expand_as(received)
    sink_norm = norms.gather(-1, index[..., None])
    # NaN excludes padding and the sink from the median.
    if attention.visibility is not None:
        is_real = attention.visibility.keys[:, :, None]
        norms = norms.where(is_real, torch.nan)
    without_sink = norms.scatter(-1, index[..., None], torch.nan)
    median = without_sink.nanmedian(-1).values
    ratio = sink_norm[..., 0] / median
    # If most values vanish, the ratio has no meaning.
    ratio = torch.where(median == 0, 0, ratio)
    measured["sink_value_norm"] = _over_windows(attention, ratio)
    return measured


def _token_kinds(attention: Attention) -> Tensor | None:
    """Return the kind of each key as an index into TOKEN_KINDS,
    shape (N_key,), or None if the grid is unknown.
    """
    if attention.map_size is None:
        return None
    height, width = attention.map_size
    prefix = attention.content_keys - height * width
    kinds = torch.ones(prefix + height * width, dtype=torch.long)
    kinds[: attention.class_tokens] = TOKEN_KINDS.index("class")
    kinds[prefix - attention.layout.words : prefix] = TOKEN_KINDS.index("text")
    frames = attention.layout.keys.frames if attention.layout.keys else 1
    grid = kinds[prefix:].view(frames, -1, width)
    grid.fill_(TOKEN_KINDS.index("border"))
    grid[:, 1:-1, 1:-1] = TOKEN_KINDS.index("inner")
    return kinds.to(attention.device)


def _query_diversity(attention: Attention, rows: ContentRows) -> Tensor:
    """Return H(mean over queries of A_i) - mean over queries of H(A_i), shape (B, heads)."""
    smallest = torch.finfo(rows.received.dtype).tiny  # 0 log 0 is 0
    logarithms = rows.received.clamp_min(smallest).log()
    entropy_of_mean = -(rows.received * logarithms).sum(-1)
    if (visibility := attention.visibility) is None:
        mean_entropy = rows.entropy.mean(-1)
    else:
        counted = visibility.queries[:, :, None]
        total = rows.entropy.where(counted, 0).sum(-1)
        mean_entropy = total / counted.sum(-1).clamp_min(1)
    return _over_windows(attention, entropy_of_mean - mean_entropy)


def _of_outputs(attention: Attention) -> dict[str, Tensor]:
    """Measure the norm of the heads' outputs, and the effective number of their directions."""
    outputs = attention.head_outputs()
    if outputs is None:
        return {}
    by_image = outputs.unflatten(0, (attention.images, -1))
    queries: int | Tensor = attention.windows * attention.queries
    counted = None
    if attention.visibility is not None:
        counted = attention.visibility.queries.flatten(1)[:, None, :, None]
        queries = counted.sum(2)[..., 0]
    # On a CPU image by image, because products of all images would first copy the outputs.
    step = 1 if outputs.device.type == "cpu" else attention.images
    sums = []
    for start in range(0, attention.images, step):
        images = slice(start, start + step)
        # All windows of an image together: (images, heads, windows * N_query, d).
        part = by_image[images].transpose(1, 2).flatten(2, 3)
        part = part.to(at_least_float32(part.dtype))
        if counted is not None:
            part = part.where(counted[images], 0)
        sums.append(_sums_of_powers(part))
    squares, fourth_powers = map(torch.cat, zip(*sums, strict=True))
    rank = torch.where(squares == 0, 0, 1 / fourth_powers)
    return {
        "output_norm": (squares / queries).sqrt(),
        "output_rank": rank,
    }


def _sums_of_powers(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_k s_k^2 and sum_k s_k^4 / (sum_k s_k^2)^2
    of the singular values of outputs (B, heads, N, d).
    """
    # These are the trace and the squared norm of o^T o, or of o o^T where that is smaller: no
    # decomposition is needed.
    is_wide = outputs.shape[2] < outputs.shape[3]
    products = outputs @ outputs.mT if is_wide else outputs.mT @ outputs
    squares = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    # They are divided first, so that fourth powers stay in the range of float32.
    scale = squares.clamp_min(torch.finfo(squares.dtype).tiny)
    return squares, (products / scale[..., None, None]).square().sum((2, 3))


def _of_tokens(attention: Attention) -> dict[str, Tensor]:
    """Measure the norms and the similarity of the tokens that enter the block."""
    tokens = None if attention.residual is None else attention.residual()
    if tokens is None:
        return {}
    tokens = tokens.to(at_least_float32(tokens.dtype))
    queries = attention.layout.queries
    prefix = 0 if queries is None else queries.prefix
    specials = prefix - attention.layout.words
    classes = min(specials, attention.class_tokens)
    norms = torch.linalg.vector_norm(tokens, dim=-1)
    patches, real = norms[:, prefix:], torch.ones_like(norms[:, prefix:]) > 0
    if attention.visibility is not None and attention.windows == 1:
        real = attention.visibility.queries[:, 0, prefix:]
    count = real.sum(1)
    # Medians and maxima below leave NaN out, which is right for padding alone.
    nothing = 0 * patches.where(real, 0).sum(1)
    # The reference is the median, because a mean would grow with the outliers.
    median = patches.where(real, torch.nan).nanmedian(1).values + nothing
    outliers = ((patches > OUTLIER * median[:, None]) & real).sum(1) / count
    measured = {
        "token_norm": median,
        "token_norm_max": patches.where(real, -torch.inf).amax(1) + nothing,
        "token_outliers": outliers.to(norms.dtype) + nothing,
    }
    if patches.shape[1] > 1:
        # A token of zeros has the cosine 0 with all others, and those of padding are no pairs.
        inner, lengths = tokens[:, prefix:], patches
        if attention.visibility is not None:
            inner, lengths = inner.where(real[..., None], 0), lengths.where(real, 0)
        cosine = mean_cosine(inner, lengths)
        pairs = patches.shape[1] * (patches.shape[1] - 1)
        measured["token_cosine"] = cosine * pairs / (count * (count - 1))
    if classes:
        measured["class_token_norm"] = norms[:, :classes].mean(1)
    if specials > classes:
        measured["register_norm"] = norms[:, classes:specials].mean(1)
    return measured


_LAYER = ("layer",)
_ENTERING = "of the tokens that enter the layer's block, before it normalises them. " + IMAGE_MEAN
_OF_CONTENT = f"In gated layers: of the content part C. {IMAGE_MEAN}"

HEALTH = Probe(
    "health",
    {
        "max_logit": LOGIT,
        "entropy_histogram": Variable(
            (*HEAD, "entropy_bin"),
            "1",
            "share of queries by entropy",
            "Share of the queries in bin k, whose entropy divided by the log of the number of keys "
            f"that they see is from k / {ENTROPY_BINS} to (k + 1) / {ENTROPY_BINS}. A few "
            "collapsed queries are visible here, but not in a mean (entropy collapse: Zhai et al. "
            f"2023, arXiv 2303.06296). {_OF_CONTENT}",
        ),
        "sink": Variable(
            HEAD,
            "1",
            "share of the sink",
            "max_j of the mean over queries of A_ij: the share of the attention of all queries "
            "that the most attended key receives; the mean over windows in windowed attention "
            "(attention sink: Xiao et al. 2023, arXiv 2309.17453; Gu et al. 2024, arXiv "
            f"2410.10781, call a share above 0.3 a sink). {_OF_CONTENT}",
        ),
        "sink_kind": Variable(
            (*HEAD, "token_kind"),
            "1",
            "kind of the sink",
            "Share of images in which the most attended key is a class (or distillation) token, a "
            "register, a patch at the border of the grid (of the window), another patch, or a "
            f"word. {_OF_CONTENT}",
        ),
        "sink_value_norm": Variable(
            HEAD,
            "1",
            "norm of the sink's value",
            "||v_j|| of the most attended key, divided by the median of the other keys' norms (the "
            "lower one for an even number); 0 if the median is 0. A sink with a vanishing value "
            "does nothing (arXiv 2606.08105). NaN for a softmax that is not part of fused "
            f"attention. {_OF_CONTENT}",
        ),
        "query_diversity": Variable(
            HEAD,
            "nat",
            "diversity of queries",
            "H(mean over queries of A_i) - mean over queries of H(A_i), within each window: "
            "I(query; key), given the image. 0 if all queries attend alike, at most the log of "
            "their number. Divided by the root of that log times H(mean over queries of A_i), it "
            "is the normalised mutual information of Park et al. 2023 (arXiv 2305.00729). "
            f"{_OF_CONTENT}",
        ),
        "head_similarity": Variable(
            HEAD,
            "1",
            "similarity to other heads",
            "Mean cosine between a head's rows A_i and those of the layer's other heads, for the "
            "same image and query (DeepViT, arXiv 2103.11886, compares layers in this way; Li et "
            f"al. 2018, arXiv 1810.10183, regularise the same products). Uses at most {QUERIES} "
            f"queries of patches, evenly spread. {_OF_CONTENT}",
        ),
        "output_norm": Variable(
            HEAD,
            "1",
            "norm of the head's output",
            "Root mean square over queries of ||o_i||, o = A v, before the output projection. NaN "
            f"for a softmax that is not part of fused attention. {IMAGE_MEAN}",
        ),
        "output_rank": Variable(
            HEAD,
            "1",
            "rank of the head's output",
            "(sum_k s_k^2)^2 / sum_k s_k^4 of the singular values s of the outputs o = A v of an "
            "image (queries, d): the participation ratio of Gao et al. 2017, uncentred, so that it "
            "is 1 if all outputs are alike (rank collapse: Dong et al. 2021, arXiv 2103.03404), 0 "
            f"if all are zero. NaN for a softmax that is not part of fused attention. {IMAGE_MEAN}",
        ),
        "token_norm": Variable(
            _LAYER,
            "1",
            "median norm of patch tokens",
            f"Median of ||x|| (the lower one for an even number) {_ENTERING}",
        ),
        "token_norm_max": Variable(
            _LAYER,
            "1",
            "largest norm of patch tokens",
            "max ||x|| of the patch tokens that enter the layer's block, over the images seen "
            "since the previous mark.",
            over_images="largest",
        ),
        "token_outliers": Variable(
            _LAYER,
            "1",
            "share of outlier tokens",
            f"Share of patch tokens with more than {OUTLIER:g} times the median norm (registers: "
            "Darcet et al. 2023, arXiv 2309.16588, count those of the model's output tokens, above "
            f"a fixed norm), {_ENTERING}",
        ),
        "class_token_norm": Variable(
            _LAYER,
            "1",
            "norm of class tokens",
            f"Mean ||x|| of class and distillation tokens, {_ENTERING}",
        ),
        "register_norm": Variable(
            _LAYER,
            "1",
            "norm of registers",
            f"Mean ||x|| of register tokens, {_ENTERING}",
        ),
        "token_cosine": Variable(
            _LAYER,
            "1",
            "cosine between patch tokens",
            "Mean cosine between different patch tokens of an image (Touvron's thesis, Section "
            f"3.3; over-smoothing: Wang et al. 2022, arXiv 2203.05962), {_ENTERING}",
        ),
    },
    group="",
    attention=_measure,
    coords={"token_kind": TOKEN_KINDS},
    detailed=True,
)
