"""Images, and the reference package, patched to run with today's NumPy and scikit-image."""

import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.extras import need


@pytest.fixture
def image() -> NDArray[Any]:
    """Uint8 image (43, 61, 3) with edges, flat regions and all grey levels."""
    from sklearn.datasets import load_sample_image

    return np.ascontiguousarray(load_sample_image("china.jpg")[10:424:9, 5:608:10][:43, :61])


@pytest.fixture
def frost_folder() -> Path:
    """Folder in which the reference package keeps the published pictures of frost."""
    spec = importlib.util.find_spec("imagecorruptions")
    if spec is None or spec.origin is None:
        need("imagecorruptions")
    return Path(spec.origin).parent / "frost"


@pytest.fixture
def reference(frost_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Module ``imagecorruptions.corruptions``; NumPy's global generator is restored afterwards."""
    # Setuptools no longer has this module.
    resources = types.ModuleType("pkg_resources")
    resources.resource_filename = lambda _, name: str(frost_folder.parent / name)  # type: ignore[attr-defined]
    if "pkg_resources" not in sys.modules:
        monkeypatch.setitem(sys.modules, "pkg_resources", resources)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from imagecorruptions import corruptions
        except ImportError as error:  # OpenCV needs system libraries
            pytest.skip(f"the reference package cannot be imported here: {error}")
    gaussian = corruptions.gaussian

    def as_formerly(values: Any, sigma: Any, multichannel: bool = False, **options: Any) -> Any:
        return gaussian(
            # scikit-image 0.19 renamed multichannel.
            values,
            sigma,
            channel_axis=-1 if multichannel else None,
            **options,
        )

    monkeypatch.setattr(corruptions, "resource_filename", resources.resource_filename)
    monkeypatch.setattr(corruptions, "gaussian", as_formerly)
    # NumPy 2 has removed this name.
    if not hasattr(np, "float_"):
        monkeypatch.setattr(np, "float_", np.float64, raising=False)
    state = np.random.get_state()  # noqa: NPY002
    yield corruptions
    np.random.set_state(state)  # noqa: NPY002
