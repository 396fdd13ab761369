"""The measures by name: what each is, how to read it, and how it is computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tcnn_probe.attribution.deletion import deletion_curve, insertion_curve
from tcnn_probe.attribution.localization import energy_inside, pointing_game
from tcnn_probe.attribution.perturbation import infidelity, sensitivity
from tcnn_probe.attribution.rank_correlation import rank_correlation

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True)
class Metric:
    """What a measure of maps is."""

    function: Callable[..., Any]  # gives a number for each image, (B,), or a curve: shares and values
    takes: str  # "maps", or "method" that computes them, of a model, images and targets; maps and "masks", or "others"
    long_name: str
    range: str
    better: str  # "higher", "lower" or "neither"
    definition: str
    source: str
    units: str = "1"
    packages: tuple[str, ...] = ()  # that take part in it

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of its variable."""
        names = ("long_name", "units", "range", "better", "definition", "source")
        return {name: getattr(self, name) for name in names}


_RISE = "Petsiuk et al. 2018, RISE: Randomized Input Sampling for Explanation of Black-box Models"
_YEH = "Yeh et al. 2019, On the (In)fidelity and Sensitivity of Explanations; by captum"
METRICS: Mapping[str, Metric] = {
    "deletion_auc": Metric(
        deletion_curve,
        "maps",
        "area under the deletion curve",
        "0 to 1",
        "lower",
        "Mean probability of the target while pixels are replaced by the baseline, the most salient first; equal ones "
        "in random order.",
        _RISE,
    ),
    "insertion_auc": Metric(
        insertion_curve,
        "maps",
        "area under the insertion curve",
        "0 to 1",
        "higher",
        "Mean probability of the target while pixels are put into a blurred image, the most salient first; equal ones "
        "in random order.",
        _RISE,
    ),
    "energy_inside": Metric(
        energy_inside,
        "masks",
        "positive saliency inside the mask",
        "0 to 1",
        "higher",
        "Share of the positive saliency that lies inside the mask; the mask's share of the image if there is none.",
        "Wang et al. 2020, Score-CAM",
    ),
    "pointing_game": Metric(
        pointing_game,
        "masks",
        "most salient pixel on the mask",
        "0 to 1",
        "higher",
        "Whether the most salient pixel lies on the mask; the share that does of several.",
        "Zhang et al. 2018, Top-down Neural Attention by Excitation Backprop",
    ),
    "infidelity": Metric(
        infidelity,
        "maps",
        "infidelity",
        "from 0",
        "lower",
        "Mean squared difference between the saliency in a random square, each map scaled as suits it best, and the "
        "fall of the target's score when the square is covered.",
        _YEH,
        units="score of the class, squared",
        packages=("captum",),
    ),
    "sensitivity": Metric(
        sensitivity,
        "method",
        "sensitivity",
        "from 0",
        "lower",
        "Largest relative change of the map under small random changes of the image.",
        _YEH,
        packages=("captum",),
    ),
    "rank_correlation": Metric(
        rank_correlation,
        "others",
        "rank correlation between methods",
        "-1 to 1",
        "neither",
        "Spearman's correlation between the maps of two methods, over pixels; NaN with a constant map.",
        "Adebayo et al. 2018, Sanity Checks for Saliency Maps",
    ),
}
