"""Agreement of maps with masks of the object, and with the maps of other methods."""

import torch
from torch import Tensor

from tcnn_probe.extras import needed_for

__all__ = ["energy_inside", "pointing_game", "rank_correlation"]


def energy_inside(maps: Tensor, masks: Tensor) -> Tensor:
    """Compute the share of the positive saliency that lies inside the mask:
    sum_M max(s, 0) / sum max(s, 0).

    A map without positive saliency is as uninformative as a constant map and gets the same score,
    the mask's share of the image. (Wang et al. 2020, Score-CAM, §4.3, the energy-based pointing
    game.)

    Args:
        maps: Saliency, shape (B, H, W).
        masks: Masks, shape (B, H, W), bool, True on the object.

    Returns:
        Shape (B,), 0 to 1, float64; NaN for a map with a NaN and for an empty mask.
    """
    _check(maps, masks)
    positive = maps.double().clamp_min(0).flatten(1)
    inside = masks.flatten(1)
    total = positive.sum(1)
    share = (positive * inside).sum(1) / total
    # With 0 / 0, means over images would leave out such maps, which would favour methods that
    # return them.
    share = torch.where(total == 0, inside.double().mean(1), share)
    return share.masked_fill(~inside.any(1), torch.nan)


def pointing_game(maps: Tensor, masks: Tensor, tolerance: float = 0.0) -> Tensor:
    """Test if the most salient pixel lies on the object,
    as 1 or 0; of several such pixels, take the share that does.

    A constant map therefore scores the mask's share of the image, as pointing at random does.
    (Zhang et al. 2018, Top-down Neural Attention by Excitation Backprop, §4.1, where the tolerance
    is 15 pixels.)

    Args:
        maps: Saliency, shape (B, H, W).
        masks: Masks, shape (B, H, W), bool, True on the object.
        tolerance: Distance in pixels; a maximum no further than this from the object counts as a
            hit.

    Returns:
        Shape (B,), 0 to 1, float64; NaN for a map with a NaN and for an empty mask.

    Raises:
        ValueError: Masks have another shape or dtype.
    """
    _check(maps, masks)
    near = torch.stack([_within(mask, tolerance) for mask in masks])
    flat = maps.flatten(1)
    best = flat == flat.amax(1, keepdim=True)
    # A map with a NaN has no maximum, so that its score is 0 / 0.
    hits = (best & near.flatten(1)).sum(1).double() / best.sum(1)
    return hits.masked_fill(~masks.flatten(1).any(1), torch.nan)


def rank_correlation(maps: Tensor, others: Tensor) -> Tensor:
    """Compute Spearman's correlation over pixels of two maps of each image;
    equal values share their mean rank.

    Values keep their sign. (Adebayo et al. 2018, Sanity Checks for Saliency Maps, §4.)

    Args:
        maps: Maps, shape (B, H, W).
        others: Maps of the same images, shape (B, H, W).

    Returns:
        Shape (B,), -1 to 1, float64; NaN if one of the two maps is constant or has a NaN.
    """
    with needed_for("rank correlation"):
        from scipy.stats import rankdata

    ranks = []
    for tensor in (maps, others):
        values = tensor.flatten(1).double().cpu().numpy()
        rank = torch.from_numpy(rankdata(values, axis=1, nan_policy="propagate"))
        ranks.append(rank - rank.mean(1, keepdim=True))
    first, second = ranks
    # Pearson's correlation of the ranks; scipy's spearmanr takes two maps at a time, or correlates
    # all images with all.
    return (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))


def _within(mask: Tensor, distance: float) -> Tensor:
    """Return the pixels no further than a distance from the mask, (H, W)."""
    # scipy is imported here because its import takes a quarter of a second.
    with needed_for("the tolerance"):
        from scipy.ndimage import distance_transform_edt

    return torch.from_numpy(distance_transform_edt(~mask.cpu().numpy()) <= distance).to(mask.device)


def _check(maps: Tensor, masks: Tensor) -> None:
    if masks.dtype != torch.bool or masks.shape != maps.shape:
        raise ValueError(
            f"expected masks of the maps' shape {tuple(maps.shape)}, bool; got "
            f"{tuple(masks.shape)}, {masks.dtype}"
        )
