"""The variables of a recording: their dimensions, units and meanings."""

from dataclasses import dataclass

__all__ = ["COORDINATES", "SCHEMA_VERSION", "VARIABLES", "Variable"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Variable:
    """A recorded variable.

    Args:
        dims: names of its dimensions, "epoch" first.
        units: "1", "nat", "pixel" (input pixels of the layer) or powers of these.
        long_name: short label, for plots.
        description: what it is, with its source.
    """

    dims: tuple[str, ...]
    units: str
    long_name: str
    description: str

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of the stored array."""
        return {"units": self.units, "long_name": self.long_name, "description": self.description}


_HEAD = ("epoch", "layer", "head")
_LAYER = ("epoch", "layer")
_MEAN = "Mean over the images and queries seen since the previous mark."

VARIABLES: dict[str, Variable] = {
    "gate": Variable(_HEAD, "1", "gate", "sigma(lambda), share of positional attention (T-CNN Eq. 7), as marked."),
    "locality_strength": Variable(
        _HEAD,
        "pixel-2",
        "locality strength",
        "alpha of the positional attention (T-CNN Eq. 4), as marked.",
    ),
    "attention_span": Variable(_HEAD, "pixel2", "attention span", "1 / alpha (T-CNN Fig. 4B), as marked."),
    "center_y": Variable(
        _HEAD,
        "pixel",
        "centre of attention, y",
        "Delta_y, relative to the query (T-CNN Eq. 4), as marked.",
    ),
    "center_x": Variable(
        _HEAD,
        "pixel",
        "centre of attention, x",
        "Delta_x, relative to the query (T-CNN Eq. 4), as marked.",
    ),
    "entropy": Variable(
        _HEAD,
        "nat",
        "attention entropy",
        f"-sum_j A_ij log A_ij over real and padding pixels (A in T-CNN Eq. 7). {_MEAN}",
    ),
    "content_entropy": Variable(
        _HEAD, "nat", "entropy of content attention", f"Entropy of softmax(q k / sqrt(d)) over real pixels. {_MEAN}"
    ),
    "positional_entropy": Variable(
        _HEAD,
        "nat",
        "entropy of positional attention",
        f"Entropy of softmax(-alpha ||delta - Delta||^2) over real and padding pixels. {_MEAN}",
    ),
    "attention_distance": Variable(
        _HEAD,
        "pixel",
        "attention distance",
        f"sum_j A_ij ||delta_ij|| over real and padding pixels (ConViT's non-locality). {_MEAN}",
    ),
    "images": Variable(_LAYER, "1", "images", "Images that the layer saw since the previous mark."),
    "nonfinite_images": Variable(
        _LAYER,
        "1",
        "images with non-finite input",
        "Of these, how many reached the layer with a NaN or infinity; its means are then NaN.",
    ),
}

COORDINATES: dict[str, dict[str, str]] = {
    "epoch": {"long_name": "epoch", "description": "As given to mark()."},
    "layer": {"long_name": "layer", "description": "Name of the module in the model."},
    "head": {
        "long_name": "head",
        "description": "Index of the head; for a reparameterized convolution its kernel tap, row-major. "
        "NaN beyond a layer's own number of heads.",
    },
}
