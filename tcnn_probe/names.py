"""Names of layers: those of the user's model, whatever it is wrapped in."""

from torch import nn

__all__ = ["layer_names", "unwrap"]

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside wrappers such as DistributedDataParallel."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and len(list(model.children())) == 1:
        if not type(model).__module__.startswith("torch."):
            break
        model = inner
    return model


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of each module, in the model's order: without ``module.`` and other wrappers' parts; once if shared."""
    inner = unwrap(model)
    names = {}
    for name, module in inner.named_modules():
        names[module] = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return {module: names.get(module, "") for module in (*names, *model.modules())}
