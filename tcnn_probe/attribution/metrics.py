"""The measures by name: what each is, how to read it, and how it is computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tcnn_probe.attribution.deletion import deletion_curve, insertion_curve
from tcnn_probe.attribution.localization import energy_inside, pointing_game
from tcnn_probe.attribution.methods import first_paragraph
from tcnn_probe.attribution.perturbation import infidelity, sensitivity
from tcnn_probe.attribution.rank_correlation import rank_correlation

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True)
class Metric:
    """What a measure of maps is. Its definition is the first paragraph of its function's docstring."""

    function: Callable[..., Any]  # gives a number for each image, (B,), or a curve: shares and values
    takes: Literal["maps", "masks", "others", "method"]  # maps of a model; and masks; or other maps; or what makes maps
    long_name: str
    range: str
    better: Literal["higher", "lower", "neither"]
    source: str
    units: str = "1"

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of its variable."""
        names = ("long_name", "units", "range", "better", "source")
        return {name: getattr(self, name) for name in names} | {"definition": first_paragraph(self.function)}


_RISE = "Petsiuk et al. 2018, RISE: Randomized Input Sampling for Explanation of Black-box Models"
_YEH = "Yeh et al. 2019, On the (In)fidelity and Sensitivity of Explanations; by captum"
_ZHANG = "Zhang et al. 2018, Top-down Neural Attention by Excitation Backprop"
METRICS: Mapping[str, Metric] = {
    "deletion_auc": Metric(deletion_curve, "maps", "area under the deletion curve", "0 to 1", "lower", _RISE),
    "insertion_auc": Metric(insertion_curve, "maps", "area under the insertion curve", "0 to 1", "higher", _RISE),
    "energy_inside": Metric(
        energy_inside, "masks", "positive saliency inside the mask", "0 to 1", "higher", "Wang et al. 2020, Score-CAM"
    ),
    "pointing_game": Metric(pointing_game, "masks", "most salient pixel on the mask", "0 to 1", "higher", _ZHANG),
    "infidelity": Metric(
        infidelity, "maps", "infidelity", "from 0", "lower", _YEH, units="score of the class, squared"
    ),
    "sensitivity": Metric(sensitivity, "method", "sensitivity", "from 0", "lower", _YEH),
    "rank_correlation": Metric(
        rank_correlation,
        "others",
        "rank correlation between methods",
        "-1 to 1",
        "neither",
        "Adebayo et al. 2018, Sanity Checks for Saliency Maps",
    ),
}
