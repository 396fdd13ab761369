"""Attributes that describe the origin of a recording, without paths and host names."""

import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["provenance", "versions"]


def provenance(model: "nn.Module", *packages: str) -> dict[str, str]:
    """Return attributes with the time, the versions (also of further packages)
    and the class of the model.
    """
    from tcnn_probe.models import unwrap

    inner = unwrap(model)
    config = getattr(inner, "pretrained_cfg", None) or {}
    attrs = versions(*packages) | {"model_class": _class(inner).__name__}
    architecture = config.get("architecture")
    return attrs | ({"model_architecture": architecture} if architecture else {})


def versions(*packages: str) -> dict[str, str]:
    """Return attributes with the time and the versions, also of further packages."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "creation_library": "tcnn_probe",
        "creation_library_version": _version("tcnn-probe"),
        "python_version": platform.python_version(),
        **{
            f"{package}_version": _version(package)
            for package in ("torch", "timm", "xarray", "zarr", *packages)
        },
    }


def _class(model: "nn.Module") -> type:
    """Return the user's own class of a model, from which torch's fully_shard creates a subclass."""
    return next(
        cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed")
    )


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
