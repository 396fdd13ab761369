"""A timm model that pools by attention: its pool, and a class whose methods know of the pool."""

from functools import cache
from typing import Any

from torch import Tensor, nn

from tcnn_model.pooling.attention_pool import AttentionPool2d, ClassScores

__all__ = ["AttentionPooled", "GlobalAttentionPool", "exchange_classifier", "pooled_class"]


class GlobalAttentionPool(nn.Module):
    """An :class:`~tcnn_model.AttentionPool2d` in the place of timm's ``SelectAdaptivePool2d``.

    Args:
        attention: the pool.
        replaced: the module in whose place it stands.
        flatten: whether that gave (B, d), not (B, d, 1, 1).
    """

    pool_type = "attn"

    def __init__(self, attention: AttentionPool2d, replaced: nn.Module, flatten: bool) -> None:
        super().__init__()
        self.attention = attention
        self.replaced = (replaced,)  # in a tuple: it does not run, and so is no submodule
        self.flatten = flatten

    def is_identity(self) -> bool:
        """Whether features stay unpooled, as timm asks: they do not."""
        return False

    def feat_mult(self) -> int:
        """How many times as many channels come out, as timm asks: once."""
        return 1

    def forward(self, x: Tensor) -> Tensor:
        """A feature map, shape (B, d, H, W), to (B, d) or (B, d, 1, 1).

        With a token a class the K tokens of an image follow one another, shape (B K, d) or (B K, d, 1, 1): what stands
        between the pool and the classifier, whatever it is, takes each of them as it took an image's features.
        """
        y = self.attention(x)
        y = y.flatten(0, 1) if self.attention.per_class else y
        return y if self.flatten else y[:, :, None, None]


class AttentionPooled(nn.Module):
    """The methods of a timm model that know of its :class:`GlobalAttentionPool`; the rest is the model's own class."""

    num_classes: int
    _base: type[nn.Module]
    _pooled_at: str  # the pool's name, of each model

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Class scores, (B, K), as timm's; with ``pre_logits`` and a token a class, features (B, K, d)."""
        base: Any = super()
        y = base.forward_head(x, pre_logits=pre_logits)
        attention = self._pool.attention
        tokens = attention.per_class and (pre_logits or not self.num_classes)
        return y.reshape(x.shape[0], attention.num_classes, -1) if tokens else y

    def reset_classifier(self, num_classes: int, global_pool: str | None = None, **options: Any) -> None:
        """Replace the classifier, as timm does; the attention pool stays, with new tokens where there is one a class.

        Args:
            num_classes: 0 for none; the tokens, if there is one a class, are then left as they are.
            global_pool: None or "attn" to keep the pool; another one is timm's business, and its model is then
                what it was before :func:`~tcnn_model.add_attention_pool`.
            options: timm's own.
        """
        name, ours = self._pooled_at, self._pool
        replaced = ours.replaced[0]
        keep = global_pool in (None, ours.pool_type)
        wanted = getattr(replaced, "pool_type", "avg") if keep else global_pool
        base: Any = super()
        classes = self.num_classes
        self.set_submodule(name, replaced.train(ours.training))
        try:
            base.reset_classifier(num_classes, wanted, **options)
        except BaseException:
            self.set_submodule(name, ours)
            self.num_classes = classes
            raise
        if not keep:
            del self._pooled_at
            self.__class__ = self._base  # type: ignore[assignment]
            return
        ours.replaced = (self.get_submodule(name),)
        self.set_submodule(name, ours)
        if ours.attention.per_class and num_classes:
            ours.attention.reset_tokens(num_classes)
            exchange_classifier(self)

    @property
    def _pool(self) -> GlobalAttentionPool:
        pool = self.get_submodule(self._pooled_at)
        assert isinstance(pool, GlobalAttentionPool)
        return pool

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made when it is needed, so it is the base that is pickled.
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return (_restore, (self._base,), *reduced[2:])


@cache
def pooled_class(base: Any) -> Any:
    """The subclass of a timm model's class that pools by attention; the class itself if it is no timm model's."""
    if not hasattr(base, "reset_classifier") or not hasattr(base, "forward_head"):
        return base
    return type(f"AttentionPooled{base.__name__}", (AttentionPooled, base), {"_base": base})


def _restore(base: Any) -> nn.Module:
    cls = pooled_class(base)
    return cls.__new__(cls)


def exchange_classifier(model: Any) -> None:
    """Replace the classifier by the scores of one token a class, with the classifier's rows.

    Raises:
        ValueError: the model does not say which layer is its classifier, or it is one without rows.
    """
    if not hasattr(model, "get_classifier"):
        raise ValueError(f"{type(model).__name__} does not say which layer is its classifier: no get_classifier()")
    classifier = model.get_classifier()
    name = next((name for name, module in model.named_modules() if module is classifier), None)
    if name is None:
        raise ValueError(f"expected one classifier, got {type(classifier).__name__} from get_classifier()")
    if classifier._forward_hooks or classifier._forward_pre_hooks:
        raise ValueError(f"{name} carries hooks, which would be lost: remove them first and attach them afterwards")
    model.set_submodule(name, ClassScores.of(classifier))
