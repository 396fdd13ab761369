"""Attention-based aggregation for any convnet (PatchConvNet paper, §3; thesis, 5.3):
replacement of its pooling module.

The change is planned and tried on a copy without storage first, so that an error leaves the model
unchanged.
"""

from typing import Any, NamedTuple

import torch
from timm.layers import ClassifierHead, SelectAdaptivePool2d
from timm.models.vgg import VGG, ConvMlp
from torch import Tensor, nn

from tcnn_model.conversion.tracing import (
    FAILURES,
    InputSize,
    Shapes,
    carries_hooks,
    copy_in_its_modes,
    find_input_size,
    meta_copy,
)
from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_model.pooling.pooled_model import (
    GlobalAttentionPool,
    exchange_classifier,
    pooled_class,
)

__all__ = ["add_attention_pool", "specialize"]


def add_attention_pool(
    model: nn.Module,
    *,
    per_class: bool = False,
    num_heads: int = 1,
    mlp_ratio: float = 3.0,
    init_values: float = 1e-4,
    drop: float = 0.0,
    input_size: InputSize | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Replace the pooling of a convnet by :class:`~tcnn_model.AttentionPool2d`,
    and keep all other weights.

    The model is a timm model, or any other in which a module without parameters pools the last
    feature map. The pool is new and has to be trained. With ``per_class`` there is a token and a
    map for each class: the layers of the head between pool and classifier are applied to each
    token, and each row of the classifier scores the token of its class.

    timm's methods still work, by a subclass of the model's own class: ``forward_features``,
    ``forward_head``, whose features with ``pre_logits`` and ``per_class`` have shape (B, K, d),
    ``get_classifier``, and ``reset_classifier``, which keeps the pool (unless called as
    ``reset_classifier(n, "avg")``) and with ``per_class`` creates new tokens.

    In a VGG the first fully connected layer is a 7 x 7 convolution, after which an image of 224 x
    224 has a single pixel. The pool is therefore inserted before this layer, at 7 x 7 pixels; both
    fully connected layers are removed, and the classifier after them is new.

    Args:
        model: A convnet with a pooling module.
        per_class: Whether each class gets a token.
        num_heads, mlp_ratio, init_values, drop: The arguments of
            :class:`~tcnn_model.AttentionPool2d`.
        input_size: Size (C, H, W) of the image with which the pool is located; by default that of
            timm's ``pretrained_cfg``, or 3 x 224 x 224.
        inplace: Whether to change ``model`` itself rather than a copy.

    Returns:
        The model with the new pool, in the mode, on the device and with the dtype of ``model``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If the model does not pool a feature map (B, d, H, W), such as a transformer; it
            pools by attention already; ``num_heads`` does not divide its channels; or ``per_class``
            is set for a model without classes or with a classifier that is not linear. The model is
            then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__} {model!r}")
    for name, module in model.named_modules():
        if isinstance(module, AttentionPool2d):
            raise ValueError(
                f"{type(model).__name__} pools by attention already: {name or 'itself'}"
            )
    if per_class and getattr(model, "num_classes", None) == 0:
        raise ValueError(
            "tokens for each class need classes, and num_classes is 0: call reset_classifier first"
        )
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "mlp_ratio": mlp_ratio,
        "init_values": init_values,
        "drop": drop,
    }
    # The change is tried and checked on the rehearsal before the user's model is changed.
    rehearsal = meta_copy(model)
    size = find_input_size(rehearsal, input_size)
    _without_conv_mlp(rehearsal)
    place = _find_pool(rehearsal, size)
    before = _shapes(rehearsal, size)
    # On the meta device the rehearsal's pool draws no random numbers, so that it does not change
    # the random state.
    with torch.device("meta"):
        _install(rehearsal, place, per_class, options)
    _check(rehearsal, size, before, per_class)
    _check_hooks(model, place, per_class)
    result = model if inplace else copy_in_its_modes(model)
    _without_conv_mlp(result)
    _install(result, place, per_class, options)
    return result


def specialize(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Turn a trained single token into one token for each class,
    to be fine-tuned (PatchConvNet paper, §3.1).

    Each class gets a copy of the token, which the classifier's row of this class scores; all other
    weights stay. The maps of all classes are the same until they are trained. The output changes at
    once, because with a token per class only patches are among the keys: if the single token gave a
    share w₀ of its attention to itself, its weights w_j of the patches become w_j / (1 − w₀), and
    its output moves from v to v + (v − v₀) w₀ / (1 − w₀), where v₀ is its own value.

    Args:
        model: A PatchConvNet, or a result of :func:`add_attention_pool`.
        inplace: Whether to change ``model`` itself rather than a copy.

    Returns:
        The model with a token for each class.

    Raises:
        ValueError: If the model has no :class:`~tcnn_model.AttentionPool2d`, has a token for each
            class already, or has no linear classifier. The model is then unchanged.
    """
    pools = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AttentionPool2d)
    }
    if len(pools) != 1:
        raise ValueError(
            f"expected a model with one AttentionPool2d, got {type(model).__name__} with "
            f"{len(pools)}"
        )
    ((name, pool),) = pools.items()
    if pool.per_class:
        raise ValueError(f"{name} has a token for each of {pool.num_classes} classes already")
    result = model if inplace else copy_in_its_modes(model)
    exchange_classifier(result)
    attention: Any = result.get_submodule(name)
    attention.specialize(_classes(result))
    return result


class _Place(NamedTuple):
    """Name of the module that pools, channels of its input,
    and whether its output is (B, d), not (B, d, 1, 1).
    """

    name: str
    channels: int
    flatten: bool


def _find_pool(model: nn.Module, size: InputSize) -> _Place:
    """Return the last module that pools a feature map;
    raise if a later module works on a feature map again.
    """
    places: list[_Place] = []
    later: list[str] = []  # modules with a feature map as output after the last pool
    idle: list[str] = []  # pools after the last one, whose input is 1 x 1 already
    names = {module: name for name, module in model.named_modules()}

    def observe(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        name = names[module]
        spatial = x.ndim == 4 and max(x.shape[2:]) > 1
        pooled = output.shape in (x.shape[:2], (*x.shape[:2], 1, 1))
        # A layer with weights may also reduce a map to 1 x 1, like the 7 x 7 convolution of a VGG,
        # but is not a pool.
        if spatial and pooled and not module.state_dict():
            contains_pool = places and (not name or places[-1].name.startswith(f"{name}."))
            # A module ends after the modules inside it. timm's SelectAdaptivePool2d is replaced as
            # a whole; any other module around a pool is a head without a classifier, or a model
            # that consists of the pool.
            if contains_pool and not isinstance(module, SelectAdaptivePool2d):
                return
            places.append(_Place(name, x.shape[1], output.ndim == 2))
            later.clear()
            idle.clear()
        elif "Pool" in type(module).__name__ and x.ndim == 4 and not spatial:
            idle.append(name)
            later.clear()
        elif output.ndim == 4 and max(output.shape[2:]) > 1:
            later.append(name)

    handles = [module.register_forward_hook(observe) for module in names]
    try:
        with torch.no_grad(), Shapes():
            model(_images(model, size))
    except FAILURES as error:
        raise ValueError(
            f"could not run {type(model).__name__}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if idle and not later:
        raise ValueError(
            f"the image is too small to tell pools apart: {idle[0]} works on 1 x 1; give larger "
            "images (input_size=, or --img-size)"
        )
    if not places or later or not places[-1].name:
        raise ValueError(
            f"no module of {type(model).__name__} pools its last feature map (B, d, H, "
            f"W){_why(model)}"
        )
    return places[-1]


def _why(model: nn.Module) -> str:
    """Guess, for an error, why no module pools the last feature map."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "Att" in kind:
            return (
                f": it already has attention ({name}, {kind}), but attention pooling is for "
                "convnets"
            )
    pool_types = [getattr(module, "pool_type", None) for module in model.modules()]
    if "" in pool_types:
        return ": it was made without a pool, with global_pool='' or for features only"
    if any("cat" in str(pool_type) for pool_type in pool_types):
        return ": 'catavgmax' gives twice the channels; make it with global_pool='avg'"
    return ": it may pool in a function, or not at all"


def _without_conv_mlp(model: nn.Module) -> None:
    """Remove the two fully connected layers of a VGG, which are convolutions."""
    if not isinstance(model, VGG) or not isinstance(model.pre_logits, ConvMlp):
        return
    old = model.head
    head = ClassifierHead(
        model.num_features, model.num_classes, old.global_pool.pool_type, old.drop.p
    )
    if model.num_classes:
        nn.init.normal_(head.fc.weight, 0, 0.01)  # as timm's VGG._init_weights
        nn.init.zeros_(head.fc.bias)
    model.head = head.to(_like(model)).train(old.training)
    model.pre_logits = nn.Identity().train(old.training)
    # In timm this is the width of the fully connected layers.
    model.head_hidden_size = model.num_features


def _check_hooks(model: Any, place: _Place, per_class: bool) -> None:
    """Raise if a module that is removed has hooks, which would be lost."""
    # Hooks are not moved to the new modules, because they may depend on the outputs of the old
    # ones.
    removed = list(model.get_submodule(place.name).modules())
    if per_class:
        removed.append(model.get_classifier())
    if isinstance(model, VGG) and isinstance(model.pre_logits, ConvMlp):
        removed += [*model.pre_logits.modules(), *model.head.modules()]
    for name, module in model.named_modules():
        if module in removed and carries_hooks(module):
            raise ValueError(
                f"{name} carries hooks, which would be lost: remove them first, attach them "
                "afterwards"
            )


def _install(model: nn.Module, place: _Place, per_class: bool, options: dict[str, Any]) -> None:
    classes = None
    if per_class:
        exchange_classifier(model)
        classes = _classes(model)
    replaced = model.get_submodule(place.name)
    attention = AttentionPool2d(place.channels, classes, **options).to(_like(model))
    pool = GlobalAttentionPool(attention, replaced, place.flatten).train(replaced.training)
    model.set_submodule(place.name, pool)
    base: Any = type(model)
    pooled = pooled_class(base)
    if pooled is not base:
        model.__class__ = pooled
        model._pooled_at = place.name  # type: ignore[assignment]


def _classes(model: Any) -> int:
    return len(model.get_classifier().weight)


def _like(model: nn.Module) -> Tensor:
    """Return a tensor with the model's device and dtype."""
    return next(model.parameters(), torch.empty(0))


def _images(model: nn.Module, size: InputSize) -> Tensor:
    # With two images, wrong shapes show if images and tokens are mixed up.
    return torch.empty(2, *size, dtype=_like(model).dtype, device="meta")


@torch.no_grad()
def _shapes(model: Any, size: InputSize) -> list[tuple[int, ...]]:
    """Return the shapes of a model's output,
    and of its features before the classifier, for two images.
    """
    with Shapes():
        outputs = [model(_images(model, size))]
        if hasattr(model, "forward_head"):
            features = model.forward_features(_images(model, size))
            outputs.append(model.forward_head(features, pre_logits=True))
    if not all(isinstance(output, Tensor) for output in outputs):
        kinds = [type(output).__name__ for output in outputs]
        raise ValueError(f"expected a model that gives one tensor, got {kinds}")
    return [tuple(output.shape) for output in outputs]


def _check(
    model: nn.Module, size: InputSize, before: list[tuple[int, ...]], per_class: bool
) -> None:
    """Run the rehearsal again; raise unless all shapes are as before,
    except that each token has features.
    """
    expected = list(before)
    if per_class and len(before) > 1:
        features = torch.Size(before[1][1:]).numel()
        # (B, K, d): each token has the features that an image had.
        expected[1] = (2, before[0][1], features)
    try:
        after = _shapes(model, size)
    except FAILURES as error:
        raise ValueError(
            f"with attention as its pool {type(model).__name__} does not run: {error}"
        ) from error
    if after != expected:
        raise ValueError(
            f"with attention as its pool the model gives shapes {after}, where {expected} were "
            "expected"
        )
