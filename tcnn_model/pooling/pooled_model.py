"""The pool of a timm model that pools by attention,
and the methods of its class that depend on the pool.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn

from tcnn_model.conversion.tracing import carries_hooks
from tcnn_model.pooling.attention_pool import AttentionPool2d, ClassScores

__all__ = [
    "AttentionPooled",
    "GlobalAttentionPool",
    "exchange_classifier",
    "pooled_class",
]


class GlobalAttentionPool(nn.Module):
    """An :class:`~tcnn_model.AttentionPool2d` that replaces timm's ``SelectAdaptivePool2d``.

    Args:
        attention: The pool.
        replaced: The module that is replaced.
        flatten: Whether the output of the replaced module was (B, d) instead of (B, d, 1, 1).
    """

    pool_type = "attn"

    def __init__(self, attention: AttentionPool2d, replaced: nn.Module, flatten: bool) -> None:
        super().__init__()
        self.attention = attention
        # The tuple prevents that the replaced module, which does not run, becomes a submodule.
        self.replaced = (replaced,)
        self.flatten = flatten

    def is_identity(self) -> bool:
        """Return False, because features are pooled (timm's interface of a pool)."""
        return False

    def feat_mult(self) -> int:
        """Return 1, the ratio of output to input channels (timm's interface of a pool)."""
        return 1

    def forward(self, x: Tensor) -> Tensor:
        """Pool a feature map: (B, d, H, W) -> (B, d) or (B, d, 1, 1).

        With a token per class the K tokens of an image follow one another, shape (B K, d) or (B K,
        d, 1, 1), so that the layers between the pool and the classifier treat each token like the
        features of an image.
        """
        y = self.attention(x)
        if self.attention.per_class:
            y = y.flatten(0, 1)
        return y if self.flatten else y[:, :, None, None]


class AttentionPooled(nn.Module):
    """Methods of a timm model that depend on its :class:`GlobalAttentionPool`;
    all others are of the model's class.
    """

    num_classes: int
    _base: type[nn.Module]
    _pooled_at: str  # the pool's name, of each model

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return class scores, (B, K), as timm does;
        with ``pre_logits`` and a token per class, features (B, K, d).
        """
        # super() has arguments because torch 2.15 cannot compile it without arguments on Python
        # 3.14.
        base: Any = super(AttentionPooled, self)  # noqa: UP008
        y = base.forward_head(x, pre_logits=pre_logits)
        attention = self._pool.attention
        if attention.per_class and (pre_logits or not self.num_classes):
            return y.reshape(x.shape[0], attention.num_classes, -1)
        return y

    def reset_classifier(
        self, num_classes: int, global_pool: str | None = None, **options: Any
    ) -> None:
        """Replace the classifier, as timm does; the attention pool stays,
        with new tokens if there is one per class.

        Args:
            num_classes: Number of classes, 0 for no classifier; tokens of classes are then left
                unchanged.
            global_pool: None or "attn" to keep the pool. Any other pool is created by timm's own
                method, and the model has its original class again, as before
                :func:`~tcnn_model.add_attention_pool`.
            options: Further arguments of timm's method.
        """
        name = self._pooled_at
        pool = self._pool
        original = pool.replaced[0]
        keep = global_pool in (None, pool.pool_type)
        pool_type = getattr(original, "pool_type", "avg") if keep else global_pool
        base: Any = super()
        classes = self.num_classes
        # timm's method changes or replaces its own pool, so the original is put back for the
        # duration of the call.
        self.set_submodule(name, original.train(pool.training))
        try:
            base.reset_classifier(num_classes, pool_type, **options)
        except BaseException:
            self.set_submodule(name, pool)
            self.num_classes = classes
            raise
        if not keep:
            # The model has timm's own pool again, so it gets timm's own class back.
            del self._pooled_at
            self.__class__ = self._base  # type: ignore[assignment]
            return
        pool.replaced = (self.get_submodule(name),)
        self.set_submodule(name, pool)
        if pool.attention.per_class and num_classes:
            pool.attention.reset_tokens(num_classes)
            exchange_classifier(self)

    @property
    def _pool(self) -> GlobalAttentionPool:
        pool = self.get_submodule(self._pooled_at)
        assert isinstance(pool, GlobalAttentionPool)
        return pool

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created at run time, so pickle cannot import it: the base class is pickled
        # instead, from which _restore creates it again. From protocol 2 on, the state is separate
        # from the class in the result.
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return (_restore, (self._base,), *reduced[2:])


# The cache gives a model and its copies the same class.
@cache
def pooled_class(base: Any) -> Any:
    """Return the subclass of a timm model's class that pools by attention;
    return any other class unchanged.
    """
    if not hasattr(base, "reset_classifier") or not hasattr(base, "forward_head"):
        return base
    return type(f"AttentionPooled{base.__name__}", (AttentionPooled, base), {"_base": base})


def _restore(base: Any) -> nn.Module:
    cls = pooled_class(base)
    return cls.__new__(cls)


def exchange_classifier(model: Any) -> None:
    """Replace the classifier by :class:`ClassScores` with the classifier's rows.

    Raises:
        ValueError: If the model has no ``get_classifier``, or its classifier is not linear or has
            hooks.
    """
    if not hasattr(model, "get_classifier"):
        raise ValueError(
            f"{type(model).__name__} does not say which layer is its classifier: no "
            "get_classifier()"
        )
    classifier = model.get_classifier()
    name = next((name for name, module in model.named_modules() if module is classifier), None)
    if name is None:
        raise ValueError(
            f"expected one classifier, got {type(classifier).__name__} from get_classifier()"
        )
    if carries_hooks(classifier):
        raise ValueError(
            f"{name} carries hooks, which would be lost: remove them first and attach them "
            "afterwards"
        )
    model.set_submodule(name, ClassScores.of(classifier))
