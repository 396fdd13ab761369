"""Every study in its small form, as a user would run it: it ends well, and leaves figures and numbers."""

import pytest
import xarray as xr
from PIL import Image

from tests.studies.conftest import STUDIES, SmallRun


def test_there_are_studies() -> None:
    assert len(STUDIES) >= 2


@pytest.mark.parametrize("study", STUDIES)
def test_small_form(study: str, small_run: SmallRun) -> None:
    done = small_run(study)
    assert done.code == 0, done.printed
    assert "check: " in done.printed
    figures = sorted(done.out.glob(f"{study}*.png"))
    assert figures, "no figure"
    for path in figures:
        with Image.open(path) as figure:
            assert min(figure.size) > 400, path.name
    with xr.open_datatree(done.out / f"{study}.zarr", engine="zarr", consolidated=False) as tree:
        assert any(node.data_vars for node in tree.subtree), "no numbers"
