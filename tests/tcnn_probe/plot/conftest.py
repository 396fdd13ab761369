"""Plots without a screen, which leave no figure open."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def no_screen() -> Iterator[None]:
    plt.close("all")  # closes what other tests left open
    before = mpl.get_backend()
    plt.switch_backend("Agg")
    settings = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == settings  # plots must not change the user's settings
    plt.close("all")
    plt.switch_backend(before)
