"""The recording that comes with the package."""

from importlib.resources import files

import xarray as xr
from zarr.storage import ZipStore

from tcnn_probe.storage.place import run
from tcnn_probe.storage.reading import open_recording

__all__ = ["load_example"]


def load_example() -> xr.DataTree:
    """Open a recording of a Transformed CNN that was fine-tuned on photographs, to try plots on.

    EfficientNet-Lite0 with ImageNet's weights was reparameterized and fine-tuned on 1,200 photographs of Imagenette, at
    128 x 128 pixels. Numbers of heads are from 400 other photographs, and from the one whose maps are kept,
    scikit-learn's ``china.jpg``. ``docs/example.py`` made it; its attributes say with which options.

    Returns:
        A tree of lazily loaded groups, as :func:`tcnn_probe.open` gives it.
    """
    path = files("tcnn_probe.storage") / "example.zip"
    return open_recording(run(ZipStore.open(str(path), mode="r")))
