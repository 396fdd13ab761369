"""Geometries of convolutions that GPSA must reproduce,
with the sizes (H, W) of feature maps to try them on.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tcnn_model import GPSA


class Case(NamedTuple):
    """Arguments common to ``nn.Conv2d`` and ``GPSA``,
    the size of a feature map, and GPSA's ``qk_dim``.
    """

    arguments: dict[str, Any]
    grid: tuple[int, int]
    qk_dim: int | None = None

    def conv(self, dtype: torch.dtype = torch.float64) -> nn.Conv2d:
        torch.manual_seed(0)
        return nn.Conv2d(**self.arguments, dtype=dtype)

    def gpsa(self, dtype: torch.dtype = torch.float64, **options: Any) -> GPSA:
        torch.manual_seed(0)
        return GPSA(**self.arguments, qk_dim=self.qk_dim, dtype=dtype, **options)


def _case(
    c_in: int,
    c_out: int,
    grid: tuple[int, int],
    qk_dim: int | None = None,
    **arguments: Any,
) -> Case:
    return Case({"in_channels": c_in, "out_channels": c_out, **arguments}, grid, qk_dim)


CASES = {
    "3x3": _case(11, 7, (5, 3), kernel_size=3, padding=1),
    "stride 2": _case(5, 7, (11, 13), kernel_size=3, padding=1, stride=2),
    "stride 2, even map": _case(5, 3, (8, 6), kernel_size=3, padding=1, stride=2),
    "dilation 2": _case(3, 5, (7, 11), kernel_size=3, padding=2, dilation=2),
    "5x5": _case(3, 2, (5, 7), kernel_size=5, padding=2),
    "no padding": _case(3, 5, (5, 7), kernel_size=3, bias=False),
    "3x5, other strides": _case(
        2,
        3,
        (7, 11),
        kernel_size=(3, 5),
        stride=(2, 3),
        padding=(1, 2),
        dilation=(2, 1),
        bias=False,
    ),
    "groups": _case(6, 9, (5, 7), kernel_size=3, padding=1, groups=3),
    "depthwise": _case(5, 5, (5, 3), kernel_size=3, padding=1, groups=5, bias=False),
    "qk_dim": _case(5, 3, (3, 7), kernel_size=3, padding=1, qk_dim=7),
    "queries on padding": _case(3, 5, (5, 7), kernel_size=2, padding=1),
    "1x1 amid padding": _case(3, 2, (2, 3), kernel_size=1, padding=2, stride=(1, 3)),
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
