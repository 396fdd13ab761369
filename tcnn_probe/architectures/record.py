"""The facts that can be known about a class of layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tcnn_probe.architectures.grids import MaskUnits, Tokens, Windows

__all__ = ["HeadParameters", "LayerRecord", "ResidualBranch"]


@dataclass(frozen=True)
class ResidualBranch:
    """A residual branch of a block, ``x' = x + scale * g(x)``.

    Args:
        scale: Name of the LayerScale, a module or a parameter. A module, or the identity that
            replaces it, returns the whole branch. "" if the class has no LayerScale.
        output: Name of the submodule whose output the parameter multiplies; "" for a LayerScale
            module.
        main: Name of the submodule whose input is the main branch; with a leading ":", of the
            submodule whose output is the main branch; or the index of the main branch among the
            block's inputs.
        axis: Axis of the channels in ``output``, or a function of the block that gives it.
        main_axis: Axis of the channels in the main branch.
    """

    scale: str
    output: str
    main: str | int
    axis: int | Callable[[Any], int] = -1
    main_axis: int = -1


@dataclass(frozen=True)
class HeadParameters:
    """Parameters of a layer that belong to single heads, and the order of the heads in them.

    Args:
        rows: Names of linear layers and parameters whose rows are (blocks, heads, d), with their
            number of blocks: 3 for queries, keys and values in one matrix. A class may lack some of
            them.
        output: Name of the output projection, whose columns are (heads, d); "" if there is none.
        taps: Name of a weight (C_out, C_in, k_h, k_w) whose taps are the heads; "" if there is
            none.
    """

    rows: Mapping[str, int]
    output: str = ""
    taps: str = ""


@dataclass(frozen=True)
class LayerRecord:
    """Facts about a class of layers; None where nothing is known.

    A class inherits the facts of its base classes, unless its own record has them.

    Args:
        no_attention_matrix: Reason why the layer has no attention matrix between tokens, though it
            is called attention or computes a softmax.
        heads_axis: Axis of the heads in (..., N_query, N_key), if it is neither identified by the
            number of heads nor axis 1; "merged" if heads are part of the first axis, "one" if there
            is no axis of heads.
        not_in_raster_order: Reason why the tokens are not ordered row by row.
        own_grids: Function of the layer and the number of its keys that returns the grids of
            queries and keys.
        latent_queries: Reason why the queries are not on a grid.
        strided: Function of the layer that returns whether pooled queries or keys are centred at
            the first pixel of their cell, like those of strided 3 x 3 convolutions.
        spread_evenly: Whether the tokens of each window (True), or only those of whole images
            (False), are spread evenly over the image, in layers for which no feature map shows the
            grid.
        mask_units: Function of the model that returns the order of its tokens for each number of
            tokens.
        windows: Function of the layer and its inputs that returns the windows into which it cuts
            its input.
        branches: Residual branches of the block. Used only while ``forward`` is that of the
            recorded class.
        head_parameters: Parameters of single heads. Used only while ``forward`` is that of the
            recorded class.
        mixing: Name of the linear layer that mixes the heads after the softmax, before the values
            are weighted. Used only while ``forward`` is that of the recorded class.
    """

    no_attention_matrix: str | None = None
    heads_axis: int | Literal["merged", "one"] | None = None
    not_in_raster_order: str | None = None
    own_grids: Callable[[Any, int], tuple[Tokens, Tokens]] | None = None
    latent_queries: str | None = None
    strided: Callable[[Any], bool] | None = None
    spread_evenly: bool | None = None
    mask_units: Callable[[Any], Sequence[MaskUnits]] | None = None
    windows: Callable[[Any, Sequence[Any]], Windows] | None = None
    branches: Sequence[ResidualBranch] | None = None
    head_parameters: HeadParameters | None = None
    mixing: str | None = None
