"""Helpers of the tests: distances between tensors,
gradients, disturbed parameters, and checks on models.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tcnn_model import gpsa_layers

# GPSA then equals the convolution up to float64 rounding: other pixels and content have a factor of
# exp(-40) = 4e-18.
SHARP = {"locality_strength": 40.0, "gating": 40.0}
# GPSA then equals the convolution up to float32 rounding.
CONVOLUTIONAL = {"locality_strength": 20.0, "gating": 20.0}

M = TypeVar("M", bound=nn.Module)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, divided by the largest absolute value expected."""
    assert actual.shape == expected.shape
    actual = actual.detach().double()
    expected = expected.detach().double()
    assert bool(expected.isfinite().all())
    return float((actual - expected).abs().max() / expected.abs().max())


# Bounds relative to the largest value: a hundred times the usual rounding errors.
_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that two results of the same function, computed in two ways in the same dtype, agree.

    Rounding stays a hundred times below the bound, even in whole networks, and an error in any term
    far exceeds it.
    """
    error = relative_error(actual, expected)
    assert error <= _SAME[expected.dtype], f"{what}: off by {error:.2g} of the largest value"


def assert_rounding(
    actual: Tensor,
    exact: Tensor,
    terms: Tensor,
    c: float,
    dtype: torch.dtype,
    what: str,
) -> None:
    """Assert that every element is finite and at most ``c * eps * terms`` from the exact one.

    Args:
        exact: Result of an independent computation in float64.
        terms: Sums of the absolute terms of ``exact``, in float64.
        dtype: Dtype of the computation, which sets eps.
    """
    assert actual.shape == exact.shape == terms.shape, what
    assert bool(actual.isfinite().all()), what
    error = (actual.detach().double() - exact.detach()).abs()
    # A sum without terms has to be exact; the smallest bound only avoids a division by zero.
    allowed = (torch.finfo(dtype).eps * terms.detach()).clamp(min=1e-300)
    worst = float((error / allowed).max())
    assert worst <= c, f"{what}: off by {worst:.3g} eps sum|terms|, expected at most {c}"


def assert_same_gradients(output: Tensor, expected: Tensor, leaves: dict[str, Tensor]) -> None:
    """Assert that two outputs have the same gradients,
    none of them zero, for the same random upstream gradient.
    """
    upstream = random(*output.shape, seed=1)
    tensors = list(leaves.values())
    actual_gradients = torch.autograd.grad(output, tensors, upstream)
    expected_gradients = torch.autograd.grad(expected, tensors, upstream)
    for name, actual, exact in zip(leaves, actual_gradients, expected_gradients, strict=True):
        # A gradient of zero would also pass for a layer that is cut off.
        assert float(exact.abs().max()) > 0, f"{name} gets no gradient in the reference"
        assert_same(actual, exact, name)


def assert_refused(
    change: Callable[..., nn.Module], model: nn.Module, message: str, **options: Any
) -> None:
    """Assert that a change raises a ValueError and leaves the model as it was.

    The change is made in place, where it could stop half-way; making it on a copy of the model
    takes the same steps.
    """
    before = snapshot(model)
    kind = type(model)
    with pytest.raises(ValueError, match=message):
        change(model, **{"inplace": True, **options})
    assert snapshot(model) == before
    assert type(model) is kind


def saved_and_loaded(model: M) -> M:
    """Return the model after a round trip through ``torch.save``."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def on_meta(name: str, **options: Any) -> nn.Module:
    """Create a timm model on the meta device;
    before timm 1.0.21, it is created on the CPU and moved there.
    """
    try:
        return timm.create_model(name, device="meta", **options)
    except TypeError:
        return timm.create_model(name, **options).to("meta")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, in which timm
    before 1.0.21 computes ConViT's positions whatever the model's dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    # Numbers are drawn in float64, so that all dtypes get the same numbers up to rounding.
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def disturb(model: M, seed: int = 0, *, scale: float = 0.3, part: str = "") -> M:
    """Move every parameter well away from its initial value,
    so that none is zero, one or the identity.

    Args:
        model: Model or layer, changed in place.
        seed: Seed of the random numbers.
        scale: Standard deviation of the change.
        part: Text in the names of the parameters to move; all by default.
    """
    generator = seeded(seed)
    for name, parameter in model.named_parameters():
        if part in name:
            change = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += scale * change.to(parameter.dtype)
    return model


@torch.no_grad()
def randomise_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomise the weights, biases and running statistics of norms, and other scales of a model.

    timm initialises the last norm of each residual branch with zeros, so that a new model hides its
    converted layers; LayerScale near zero and the zero gains of normalisation-free networks do so,
    too.
    """
    generator = seeded(seed)

    def uniform(like: Tensor) -> Tensor:
        # Values are between 0.5 and 1.5, so that no scale or variance is near zero.
        return 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    def normal(like: Tensor) -> Tensor:
        return 0.2 * torch.randn(like.shape, generator=generator, dtype=torch.float64).to(
            like.dtype
        )

    disturbed = 0
    for module in model.modules():
        norm = isinstance(module, nn.GroupNorm | nn.LayerNorm) or hasattr(module, "running_mean")
        for name, parameter in module.named_parameters(recurse=False):
            if norm and name == "bias":
                parameter.copy_(normal(parameter))
            elif norm or (name != "bias" and bool((parameter == parameter.flatten()[0]).all())):
                parameter.copy_(uniform(parameter))
                disturbed += 1
        for name, buffer in module.named_buffers(recurse=False):
            if name in ("running_mean", "running_var"):
                buffer.copy_(normal(buffer) if name == "running_mean" else uniform(buffer))
    assert disturbed
    return model


@torch.no_grad()
def assert_every_layer_counts(model: nn.Module, x: Tensor) -> None:
    """Assert that each GPSA layer affects the output:
    if a layer has no effect, its equivalence proves nothing.
    """
    layers = gpsa_layers(model)
    assert layers
    before = model(x)
    for name, layer in layers.items():
        original = layer.weight.clone()
        # The filters are assigned to other output channels.
        layer.weight.copy_(original.roll(1, dims=0))
        assert relative_error(model(x), before) > 1e-3, f"{name} does not reach the output"
        layer.weight.copy_(original)


def snapshot(model: nn.Module) -> dict[str, object]:
    """Return everything that a conversion could change:
    modules, attributes, hooks, modes, parameters, values.
    """
    state: dict[str, object] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [list(v) for k, v in vars(module).items() if k.endswith("hooks")]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        # torch's _version counts writes in place, so that a value that was changed and restored
        # shows as well.
        identities = [
            (key, id(t), None if t is None else (t.requires_grad, t._version)) for key, t in tensors
        ]
        geometry = [getattr(module, key, None) for key in ("stride", "padding", "dilation")]
        state[name] = (
            id(module),
            module.training,
            hooks,
            identities,
            str(geometry),
            sorted(vars(module)),
        )
    state["feature_info"] = repr(vars(model).get("feature_info"))
    values = [
        t.detach().double().sum() for t in model.state_dict().values() if t.device.type != "meta"
    ]
    return state | {"sums": torch.stack(values).tolist() if values else []}


class LargestTensor(TorchDispatchMode):
    """Mode that records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result
