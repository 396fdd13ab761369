"""Agreement of two methods about the order of the pixels."""

import torch
from torch import Tensor

__all__ = ["rank_correlation"]


def rank_correlation(maps: Tensor, others: Tensor) -> Tensor:
    """Spearman's correlation between two maps of each image, over pixels; equal values share their mean rank.

    Values keep their sign. (Adebayo et al. 2018, Sanity Checks for Saliency Maps, §4.)

    Args:
        maps, others: shape (B, H, W).

    Returns:
        shape (B,), -1 to 1, float64; NaN where one of the two is constant or has a NaN.
    """
    from scipy.stats import rankdata

    ranks = []
    for given in (maps, others):
        values = given.flatten(1).double().cpu().numpy()
        rank = torch.from_numpy(rankdata(values, axis=1, nan_policy="propagate"))
        ranks.append(rank - rank.mean(1, keepdim=True))
    one, other = ranks
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))
