"""Mean attention maps of selected queries,
which are the static pattern of each head on the layer's grid.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tcnn_probe.attention.attention import Attention
from tcnn_probe.probes.probe import Probe
from tcnn_probe.schema import Variable

__all__ = ["MEAN_ATTENTION", "mean_attention"]


def mean_attention(queries: Sequence[tuple[float, float]] = ((0.5, 0.5),)) -> Probe:
    """Record the mean over images of the attention of selected queries,
    which is the static pattern of each head.

    ::

        probes = [*tcnn_probe.DEFAULT, tcnn_probe.mean_attention([(0.5, 0.5), (0.1, 0.9)])]
        with tcnn_probe.record(model, probes=probes) as recorder:
            ...
        recorder.tree["mean-attention"].mean_attention.sel(query="0.1, 0.9")

    The group "mean-attention" has ``mean_attention`` (epoch, layer, head, query, y, x) over the
    keys on the grid, and ``images``, the number of images in the mean. Rows sum to one minus the
    attention to class and register tokens or to padding. Layers with smaller grids than others have
    NaN beyond their grids. Layers with attention in windows are left out. All images must have the
    same size.

    Args:
        queries: Rows and columns, as fractions of height and width: (0.5, 0.5) is the middle in all
            layers.

    Returns:
        A probe, for ``record(probes=)``.

    Raises:
        ValueError: There is no query, or a query is not a pair or is outside of the grid.
    """
    places = np.asarray(queries, dtype=float)
    if not places.size or places.shape[1:] != (2,) or not ((places >= 0) & (places < 1)).all():
        raise ValueError(
            f"expected queries=[(row, column), ...], from 0 and below 1, got {queries!r}"
        )

    def measure(attention: Attention) -> dict[str, Tensor]:
        grid = attention.layout.queries
        # A query in a window attends to this window only, so there is no map of the image.
        if grid is None or attention.map_size is None or attention.in_windows:
            return {}
        # Fractions are below 1, so every token is on the grid.
        tokens = [grid.index(row, column) for row, column in places.tolist()]
        rows = [attention.weights(slice(token, token + 1))[:, 0] for token in tokens]
        maps = attention.on_grid(torch.cat(rows, 2))
        if attention.visibility is not None:
            # In an image in which a query is padding, it does not count.
            counted = attention.visibility.queries[:, 0, tokens]
            maps = maps.where(counted[:, None, :, None, None], torch.nan)
        return {"mean_attention": maps}

    meaning = (
        "Mean over the images seen since the previous mark of A_ij, for selected queries i "
        "and the keys j on the grid."
    )
    variable = Variable(
        ("layer", "head", "query", "y", "x"),
        "1",
        "mean attention",
        meaning,
        dtype="float32",
    )
    labels = [f"{row:g}, {column:g}" for row, column in places.tolist()]
    return Probe(
        "mean-attention",
        {"mean_attention": variable},
        attention=measure,
        waits=True,
        coords={"query": labels},
    )


MEAN_ATTENTION = mean_attention()
