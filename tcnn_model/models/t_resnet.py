"""The papers' Transformed CNNs in timm's registry:
``timm.create_model("t_resnetrs50", num_classes=10)``.

``pretrained=True`` loads the CNN's own weights through timm and then converts the CNN. Keyword
arguments of :func:`~tcnn_model.reparameterize` (``stride``, ``locality_strength``, ``gating``,
``qk_dim``, ``backend``) are accepted in addition to those of the CNN.
"""

from collections.abc import Callable
from typing import Any

import timm
from timm.models import generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models.resnet import default_cfgs as resnet_cfgs
from torch import nn

from tcnn_model.conversion.reparameterize import reparameterize

# Tables 1 and 2.
_RS = (
    "resnetrs50",
    "resnetrs101",
    "resnetrs152",
    "resnetrs200",
    "resnetrs270",
    "resnetrs350",
)
_D = ("resnet50d", "resnet101d", "resnet152d", "resnet200d")  # Table 5
_BASES = (*_RS, *_D, "resnet50")  # Table 3

__all__ = [f"t_{base}" for base in _BASES]  # pyright: ignore

_CONVERSION_ARGUMENTS = ("stride", "locality_strength", "gating", "qk_dim", "backend")


def _tagged(base: str, tag: str) -> str:
    return f"{base}.{tag}" if tag else base


# The CNN's own pretrained configurations, which locate its weights, are registered under the
# T-CNN's name, because timm looks up a configuration by the name with which a model is created.
default_cfgs = generate_default_cfgs(
    {
        _tagged(f"t_{base}", tag): get_pretrained_cfg(_tagged(base, tag))
        for base in _BASES
        for tag in resnet_cfgs[base].tags
    }
)


def _entrypoint(base: str) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        options = {name: kwargs.pop(name) for name in _CONVERSION_ARGUMENTS if name in kwargs}
        cnn: Any = timm.models.model_entrypoint(base)(pretrained=pretrained, **kwargs)
        # The stage is given by name, because with output_stride several stages have the last
        # resolution, and the papers' models convert the last stage only.
        model: Any = reparameterize(cnn, layers="layer4", inplace=True, **options)
        # timm's push_to_hf_hub writes this architecture, by which the checkpoint is loaded again.
        config: dict[str, Any] = {**cnn.pretrained_cfg, "architecture": create.__name__}
        model.pretrained_cfg = model.default_cfg = config
        return model

    create.__name__ = create.__qualname__ = f"t_{base}"
    create.__doc__ = (
        f"timm's ``{base}`` with the 3 x 3 convolutions of its last stage reparameterized as GPSA."
    )
    return create


for _base in _BASES:
    globals()[f"t_{_base}"] = register_model(_entrypoint(_base))
