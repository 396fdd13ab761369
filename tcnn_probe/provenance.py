"""What a recording says about where it comes from. No paths, no host names."""

import hashlib
import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["provenance", "versions", "weights_fingerprint"]

# Values of each parameter that tell one state of a model from another. A step of an optimizer moves nearly all values,
# so a few would do; more cost no more.
_SAMPLED = 16


def provenance(model: "nn.Module", *packages: str) -> dict[str, str]:
    """Attributes of what was found in a model: when, by which versions (of further packages too), of which model."""
    from tcnn_probe.models import unwrap

    inner = unwrap(model)
    config = getattr(inner, "pretrained_cfg", None) or {}
    attrs = versions(*packages) | {"model_class": _class(inner).__name__}
    architecture = config.get("architecture")
    return attrs | ({"model_architecture": architecture} if architecture else {})


def weights_fingerprint(model: "nn.Module") -> str:
    """Return a hash of the parameters' names and shapes and one of a sample of their values, joined by a dash.

    "" where parameters are spread over processes, or of a kind whose values cannot be sampled, such as quantised ones.
    """
    import torch
    from torch import nn

    # Both kinds of FSDP: wrappers, and fully_shard, which gives modules a class of such a name.
    names = [type(module).__name__ for module in model.modules()]
    sharded = any(name.startswith(("FSDP", "FullySharded")) for name in names)
    parameters = dict(model.named_parameters())
    types = {type(parameter) for parameter in parameters.values()}
    if sharded or types != {nn.Parameter}:
        return ""
    shapes = hashlib.sha256()
    values = hashlib.sha256()
    for name, parameter in parameters.items():
        shapes.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().reshape(-1)
        sample = flat[:: 1 + flat.numel() // _SAMPLED].to("cpu", torch.float32)
        values.update(sample.numpy().tobytes())
    return f"{shapes.hexdigest()[:16]}-{values.hexdigest()[:16]}"


def versions(*packages: str) -> dict[str, str]:
    """Attributes of what was made: when, and by which versions (of further packages too)."""
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
    """The user's own, of which torch's fully_shard makes a subclass."""
    return next(
        cls
        for cls in type(model).__mro__
        if not cls.__module__.startswith("torch.distributed")
    )


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
