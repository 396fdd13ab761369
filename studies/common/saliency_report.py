"""Table of the saliency study, and its comparison of class attention with Grad-CAM."""

import xarray as xr

from tcnn_probe import evaluation

__all__ = ["report"]


def report(tree: xr.DataTree, tolerance: float) -> str:
    """Return accuracy and every measure at the end, by model and method, with 95 % intervals over images."""
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
        lines.append(
            f"\n{name}: accuracy {float(last.top1):.3f} after epoch {int(last.epoch)}"
        )
        lines.append(
            f"{'':21}" + "".join(f"{columns[measure]:>20}" for measure in measures)
        )
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
    # Without masks or boxes nobody knows where the object is.
    if any("pointing_game" in node for node in tree.children.values()):
        lines.append(
            f"pointing: is the most salient pixel on the object, or within {tolerance:g} pixels of it"
        )
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        if "pointing_game" in last and {"class_attention", "gradcam"} <= set(
            last.attribution.values
        ):
            for measure in ("pointing_game", "pointing_game_exact"):
                lines += [
                    f"{columns[measure]}, {name}: {beside_gradcam(last[measure])}"
                ]
    return "\n".join(lines)


def beside_gradcam(hits: xr.DataArray) -> str:
    """Return a sentence on class attention's hits beside Grad-CAM's, image by image."""
    attention_hits, gradcam_hits = (
        hits.sel(attribution=method) for method in ("class_attention", "gradcam")
    )
    difference = attention_hits - gradcam_hits
    low, high = evaluation.mean_interval(difference).values
    # Zero inside the interval: the images do not tell them apart.
    verdict = (
        "is ahead"
        if low > 0
        else "is behind"
        if high < 0
        else "and Grad-CAM are not distinguishable"
    )
    return (
        f"class attention {float(attention_hits.mean()):.2f}, Grad-CAM {float(gradcam_hits.mean()):.2f}, "
        f"difference {float(difference.mean()):+.2f} [{low:+.2f}, {high:+.2f}]: class attention {verdict}"
    )
