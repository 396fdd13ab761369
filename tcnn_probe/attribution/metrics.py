"""The measures by name: what each is, and how to read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True)
class Metric:
    """A measure of a map.

    Args:
        long_name: for a plot's axis.
        range: of its values.
        better: "higher", "lower", or "neither".
        definition: in a sentence or two.
        source: where it comes from.
        options: of :func:`tcnn_probe.faithfulness`, that it depends on.
        units: of its values.
    """

    long_name: str
    range: str
    better: str
    definition: str
    source: str
    options: tuple[str, ...] = field(default=())
    units: str = "1"

    @property
    def attrs(self) -> dict[str, str]:
        """All but the options."""
        return {name: value for name, value in vars(self).items() if isinstance(value, str)}


_RISE = "Petsiuk et al. 2018, RISE: Randomized Input Sampling for Explanation of Black-box Models"
_YEH = "Yeh et al. 2019, On the (In)fidelity and Sensitivity of Explanations; by captum"
METRICS: Mapping[str, Metric] = {
    "deletion_auc": Metric(
        "area under the deletion curve",
        "0 to 1",
        "lower",
        "Mean probability of the target while pixels are replaced by the baseline, the most salient first; equal ones "
        "in random order.",
        _RISE,
        ("steps", "baseline", "seed"),
    ),
    "insertion_auc": Metric(
        "area under the insertion curve",
        "0 to 1",
        "higher",
        "Mean probability of the target while pixels are put into a blurred image, the most salient first; equal ones "
        "in random order.",
        _RISE,
        ("steps", "start", "seed"),
    ),
    "energy_inside": Metric(
        "positive saliency inside the mask",
        "0 to 1",
        "higher",
        "Share of the positive saliency that lies inside the mask; the mask's share of the image if there is none.",
        "Wang et al. 2020, Score-CAM",
    ),
    "pointing_game": Metric(
        "most salient pixel on the mask",
        "0 to 1",
        "higher",
        "Whether the most salient pixel lies on the mask; the share that does of several.",
        "Zhang et al. 2018, Top-down Neural Attention by Excitation Backprop",
        ("tolerance",),
    ),
    "infidelity": Metric(
        "infidelity",
        "from 0",
        "lower",
        "Mean squared difference between the saliency in a random square, each map scaled as suits it best, and the "
        "fall of the target's score when the square is covered.",
        _YEH,
        ("baseline", "samples", "seed"),
        units="score of the class, squared",
    ),
    "sensitivity": Metric(
        "sensitivity",
        "from 0",
        "lower",
        "Largest relative change of the map under small random changes of the image.",
        _YEH,
        ("radius", "samples", "seed"),
    ),
    "rank_correlation": Metric(
        "rank correlation between methods",
        "-1 to 1",
        "neither",
        "Spearman's correlation between the maps of two methods, over pixels; NaN with a constant map.",
        "Adebayo et al. 2018, Sanity Checks for Saliency Maps",
    ),
}
