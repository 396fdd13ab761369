"""What a recording says about where it comes from. No paths, no host names."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from torch import nn

__all__ = ["provenance"]


def provenance(model: nn.Module) -> dict[str, str]:
    """Attributes of a new recording: when, by which versions, of which model."""
    config = getattr(model, "pretrained_cfg", None) or {}
    attrs = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "creation_library": "tcnn_probe",
        "creation_library_version": _version("tcnn-probe"),
        "python_version": platform.python_version(),
        **{f"{package}_version": _version(package) for package in ("torch", "timm", "xarray", "zarr")},
        "model_class": type(model).__name__,
    }
    architecture = config.get("architecture")
    return attrs | ({"model_architecture": architecture} if architecture else {})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
