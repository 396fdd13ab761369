"""Class, distillation and register tokens, which stand before the grid: what a model says of them."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["Prefix", "prefix_of"]


@dataclass(frozen=True)
class Prefix:
    """Tokens before the grid.

    Args:
        count: how many, None if nobody says.
        class_token: whether the first, if there is any, is a class token.
        distillation_token: whether the second is a distillation token, as in DeiT.
    """

    count: int | None = None
    class_token: bool = True
    distillation_token: bool = False


def prefix_of(modules: Iterable[nn.Module], count: int | None) -> Prefix:
    """As far as the user or the model says.

    Args:
        modules: of the model.
        count: as the user says, if he does.
    """
    modules = list(modules)
    model = next((m for m in modules if hasattr(m, "num_prefix_tokens")), None)
    count = getattr(model, "num_prefix_tokens", None) if count is None else count
    has_class_token = getattr(model, "has_class_token", getattr(model, "cls_token", True) is not None)
    distilled = any(isinstance(getattr(m, "dist_token", None), Tensor) for m in modules)
    return Prefix(count if isinstance(count, int) else None, bool(has_class_token), distilled)
