"""Table of the saliency study, and its comparisons: with Grad-CAM, and of one head with several."""

import xarray as xr

from common.ending import side_of_zero
from tcnn_probe import evaluation

__all__ = ["report", "several_heads"]

SINGLE = "PatchConvNet"


def report(tree: xr.DataTree, tolerance: float) -> str:
    """Return accuracy and every measure at the end,
    by model and method, with 95 % intervals over images.
    """
    columns = {
        "pointing_game": f"pointing ({tolerance:g} px)",
        "pointing_game_exact": "pointing (0 px)",
        "energy_inside": "energy inside",
        "deletion_auc": "deletion AUC",
        "insertion_auc": "insertion AUC",
    }
    lines = []
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        measures = [measure for measure in columns if measure in last]
        lines.append(f"\n{name}: accuracy {float(last.top1):.3f} after epoch {int(last.epoch)}")
        lines.append(f"{'':21}" + "".join(f"{columns[measure]:>20}" for measure in measures))
        for method in last.attribution.values:
            cells = []
            for measure in measures:
                values = last[measure].sel(attribution=method)
                low, high = evaluation.mean_interval(values).values
                cells.append(f"{float(values.mean()):.2f} [{low:.2f}, {high:.2f}]")
            lines.append(f"{method:21}" + "".join(f"{cell:>20}" for cell in cells))
    # All models explain the same images.
    count = next(iter(tree.children.values())).sizes["image"]
    lines.append(f"\nmeans over {count} images, 95 % intervals over them; one seed")
    # Without masks or boxes the place of the object is not known.
    if any("pointing_game" in node for node in tree.children.values()):
        lines.append(
            f"pointing: is the most salient pixel on the object, or within {tolerance:g} pixels of "
            "it"
        )
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        if "pointing_game" in last and {"class_attention", "gradcam"} <= set(
            last.attribution.values
        ):
            for measure in ("pointing_game", "pointing_game_exact"):
                lines += [f"{columns[measure]}, {name}: {beside_gradcam(last[measure])}"]
    for name, node in tree.children.items():
        if name.startswith(SINGLE) and name.endswith("heads"):
            single = tree[SINGLE].dataset.isel(epoch=-1)
            lines += beside_one_head(single, node.dataset.isel(epoch=-1), name)
    return "\n".join(lines)


def several_heads(number: int) -> str:
    """Return the name of the PatchConvNet whose pooling has several heads."""
    return f"{SINGLE}, {number} heads"


def beside_one_head(single: xr.Dataset, multiple: xr.Dataset, name: str) -> list[str]:
    """Return sentences that compare the class attention
    of one head with that of several, image by image.

    Insertion depends on the model, so that each model's gain over a map of chance is compared.
    """
    lines = [f"\nclass attention of one head, minus that of {name}, by image:"]
    measures = {
        "pointing_game": "the most salient pixel is near the object",
        "energy_inside": "share of the map on the object",
        "insertion_auc": "insertion AUC, above that of chance",
    }
    for measure, words in measures.items():
        if measure not in single:
            continue
        values = []
        for scores in (single, multiple):
            of_attention = scores[measure].sel(attribution="class_attention")
            chance = scores[measure].sel(attribution="chance")
            # Pointing and energy depend on the map and the object alone, insertion also on the
            # scores of the model.
            values.append(of_attention - chance * (measure == "insertion_auc"))
        difference = values[0] - values[1]
        low, high = evaluation.mean_interval(difference).values
        verdict = "one head is better" if low > 0 else "not distinguishable"
        if high < 0:
            verdict = "several heads are better"
        mean = float(difference.mean())
        lines.append(f"  {words}: {mean:+.2f} [{low:+.2f}, {high:+.2f}]: {verdict}")
    return lines


def beside_gradcam(hits: xr.DataArray) -> str:
    """Return a sentence that compares the hits
    of class attention with those of Grad-CAM, image by image.
    """
    attention_hits, gradcam_hits = (
        hits.sel(attribution=method) for method in ("class_attention", "gradcam")
    )
    difference = attention_hits - gradcam_hits
    low, high = evaluation.mean_interval(difference).values
    # If the interval contains zero, the images do not tell the methods apart.
    verdict = side_of_zero(
        (low, high), "is ahead", "is behind", "and Grad-CAM are not distinguishable"
    )
    return (
        f"class attention {float(attention_hits.mean()):.2f}, Grad-CAM "
        f"{float(gradcam_hits.mean()):.2f}, difference {float(difference.mean()):+.2f} "
        f"[{low:+.2f}, {high:+.2f}]: class attention {verdict}"
    )
