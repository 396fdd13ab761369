"""``convolve()``: heads become the convolutions inside them, the inverse of ``reparameterize``."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tcnn_model.conversion.tracing import carries_hooks, copy_in_its_modes
from tcnn_model.convolved.attention import ConvolvedAttention
from tcnn_model.convolved.gpsa import ConvolvedGPSA
from tcnn_model.convolved.head_convolution import HeadConvolution
from tcnn_model.convolved.head_logits import logits_of_class, projections_of
from tcnn_model.gpsa.layer import GPSA

__all__ = ["convolve"]

Array = NDArray[np.float64]

_LAYERS = (
    "an attention layer of timm's ViT (DeiT, DINOv2), BEiT, EVA (DINOv3), Swin (V1, V2) or ConViT, "
    "or a tcnn_model.GPSA"
)


def convolve(
    model: nn.Module,
    kernels: Any,
    *,
    mass: float = 0.95,
    size: int | None = None,
    grid: tuple[int, int] | None = None,
) -> nn.Module:
    """Return a copy of a model in which the heads
    that have a kernel are depthwise convolutions of their values.

    This is :func:`reparameterize` in reverse, for heads whose attention depends mostly on the
    offset from query to key (large ``offset_information`` in a recording). In place of softmax(q
    k^T) such a head gets the convolution T_i(j) = kernel(j - i) / Z_i, cut to k x k, where Z_i is
    the sum over the keys on the grid and over class and register tokens, which have weights of
    their own. The other heads stay fused attention. Queries and keys of the converted heads are
    dropped, but for class and register tokens, which as queries keep their own attention. In Swin's
    windows Z_i counts the keys that a query sees in its window, under the mask of shifted windows.

    ::

        import timm, torch, tcnn_model, tcnn_probe

        vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
        images = torch.randn(8, 3, 64, 64)
        kernels = tcnn_probe.head_kernels(vit, images, heads={"blocks.0.attn": [0, 2]})
        mixed = tcnn_model.convolve(vit, kernels)
        print(mixed.blocks[0].attn.convolution)  # 2 heads, and the size of their kernels

    Before any training this costs what ``tcnn_probe.ablate(model, heads, mode="convolutional")``
    costs, which equals it if ``mass=1``. :func:`finetune` trains the kernels, too
    (``convolution.theta``, their logarithms). The ``state_dict`` fits every model that is converted
    with the same kernels and options.

    Prior art: DWConv_VFM (arXiv 2605.22132) replaces heads by 3 x 3 depthwise convolutions, and
    SPViT (2111.11802) learns which heads may be convolutions. Both begin with kernels that do not
    come from the heads, and train them.

    Args:
        model: Vision transformer of timm, T-CNN, or any model that contains attention layers of
            timm's ViT (DeiT, DINOv2), BEiT, EVA (EVA-02, DINOv3, with grouped queries too), ConViT
            or Swin (V1, V2), or :class:`GPSA`. A wrapper of torch.compile is left out of the copy.
        kernels: Kernels of heads: the result of ``tcnn_probe.head_kernels``, or a mark of a
            recording with ``probes=["offset-kernel"]``. A Dataset with ``offset_kernel``, dims
            (layer, head, offset_y, offset_x), and for class and register tokens ``prefix_kernel``,
            dims (layer, head, prefix_token). NaN for heads without a kernel, such as those that
            ``kernels.where(types == "convolutional")`` leaves out.
        mass: Least share of the attention of T that the k x k kernels of a layer keep, for each of
            its heads; 1 for whole kernels. In a recording, whose kernels end at seven patches, the
            share of the kernel.
        size: Odd size k, instead of ``mass``.
        grid: Rows and columns of patches; by default those of the model's patch embedding, or a
            square.

    Returns:
        The converted copy, in the mode, on the device and with the dtype of ``model``, which stays
        as it was.

    Raises:
        TypeError: ``model`` is not a module, or ``kernels`` are no such Dataset.
        ValueError: There is no kernel; a kernel is partly NaN, as in recordings of few queries; the
            model lacks a layer or head; the layer is of another class, or its queries, keys and
            values are not plain ``torch.nn.Linear`` (merge adapters first); or an option is out of
            range. Nothing is changed then.
    """
    # The model inside a wrapper of torch.compile has the names of layers in recordings.
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not 0 < mass <= 1:
        raise ValueError(f"expected a share of attention in (0, 1], got mass={mass!r}")
    if size is not None and (size < 1 or size % 2 == 0):
        raise ValueError(f"expected an odd size of at least 1, got {size!r}")
    layers = list(_layers_of(kernels))
    if not layers:
        raise ValueError("expected kernels of at least one head, got NaN for all")
    modules = dict(model.named_modules())
    for layer in layers:
        _check_layer(model, modules.get(layer.name), layer)
    result = copy_in_its_modes(model)
    modules = dict(result.named_modules(remove_duplicate=False))
    if grid is None:
        grids = (
            getattr(getattr(module, "patch_embed", None), "grid_size", None)
            for module in model.modules()
        )
        grid = next((cells for cells in grids if cells is not None), None)
    for layer in layers:
        module: Any = modules[layer.name]
        kernel, prefix = layer.cut(mass, size)
        convolution = HeadConvolution(
            torch.from_numpy(kernel),
            None if prefix is None else torch.from_numpy(prefix),
        ).to(module.weight if isinstance(module, GPSA) else module.proj.weight)
        converted = (
            ConvolvedGPSA(module, layer.heads, convolution)
            if isinstance(module, GPSA)
            else ConvolvedAttention(module, layer.heads, convolution, grid)
        )
        # A layer may be shared under several names.
        for name, candidate in modules.items():
            if candidate is module:
                parent, _, child = name.rpartition(".")
                setattr(result.get_submodule(parent), child, converted)
    return result


class _LayerKernels(NamedTuple):
    """Kernels of the heads of a layer.

    Args:
        name: Name of the layer.
        heads: Indices of the heads.
        kernel: Weights of each offset, shape (heads, offsets_y, offsets_x), with offset 0 in the
            middle.
        prefix: Weights of the tokens off the grid, shape (heads, tokens).
        masses: Attention of T to each offset, like ``kernel``.
        prefix_masses: Attention of T to the tokens off the grid, like ``prefix``.
    """

    name: str
    heads: list[int]
    kernel: Array
    prefix: Array
    masses: Array
    prefix_masses: Array

    def cut(self, mass: float, size: int | None) -> tuple[Array, Array | None]:
        """Return the k x k kernels of this size,
        or of the least size that keeps a share of each head's attention.
        """
        middle = self.kernel.shape[1] // 2, self.kernel.shape[2] // 2
        radius = size // 2 if size is not None else 0
        while True:
            window = tuple(slice(max(0, centre - radius), centre + radius + 1) for centre in middle)
            kept = self.masses[:, window[0], window[1]].sum((1, 2))
            total = self.masses.sum((1, 2)) + self.prefix_masses.sum(1)
            share = (kept + self.prefix_masses.sum(1)) / total
            # The last offsets of a sum may be lost to rounding.
            if size is not None or (share >= mass - 1e-12).all() or radius >= max(middle):
                break
            radius += 1
        prefix = self.prefix if self.prefix.shape[1] else None
        return self.kernel[:, window[0], window[1]].copy(), prefix


def _layers_of(kernels: Any) -> Iterator[_LayerKernels]:
    """Read the kernels of each layer from a Dataset, and check them."""
    if not hasattr(kernels, "data_vars") or "offset_kernel" not in kernels:
        raise TypeError(
            "expected the result of tcnn_probe.head_kernels, or a recording with "
            f"probes=['offset-kernel']: a Dataset with offset_kernel; got {type(kernels).__name__}"
        )
    dims = ("layer", "head", "offset_y", "offset_x")
    for dim in dims[2:]:
        offsets = np.asarray(kernels[dim].values)
        if (
            not (offsets == np.arange(len(offsets)) - len(offsets) // 2).all()
            or len(offsets) % 2 == 0
        ):
            raise ValueError(
                f"expected all offsets from -n to n along {dim}, got {offsets.tolist()}: to cut "
                "kernels use size="
            )
    further = set(kernels["offset_kernel"].dims) - {*dims}
    if further:
        raise ValueError(
            f"expected the kernels of one mark, got the dimensions {sorted(further)}: select, as "
            "in kernels.isel(epoch=-1)"
        )
    kernel = _values(kernels["offset_kernel"], dims)
    prefix = np.full((*kernel.shape[:2], 0), np.nan)
    if "prefix_kernel" in kernels:
        prefix = _values(kernels["prefix_kernel"], (*dims[:2], "prefix_token"))
    masses, prefix_masses = kernel, prefix
    if "offset_mass" in kernels:
        masses = _values(kernels["offset_mass"], dims)
        if "prefix_mass" in kernels:
            prefix_masses = _values(kernels["prefix_mass"], (*dims[:2], "prefix_token"))
    names = np.atleast_1d(kernels["layer"].values)
    numbers = np.atleast_1d(kernels["head"].values)
    for place, name in enumerate(names):
        chosen = np.flatnonzero(np.isfinite(kernel[place]).any((1, 2)))
        if not len(chosen):
            continue
        holes = ~np.isfinite(kernel[place, chosen]).all((1, 2))
        if holes.any():
            raise ValueError(
                "expected whole kernels, got NaN at some offsets of head "
                f"{numbers[chosen[holes][0]]} of {str(name)!r}, which no sampled query has: fit "
                "them with tcnn_probe.head_kernels(model, images)"
            )
        # A layer may have fewer tokens off the grid than others.
        tokens = np.isfinite(prefix[place, chosen]).all(0)
        yield _LayerKernels(
            str(name),
            [int(head) for head in numbers[chosen]],
            kernel[place, chosen],
            prefix[place, chosen][:, tokens],
            masses[place, chosen],
            prefix_masses[place, chosen][:, tokens],
        )


def _values(array: Any, dims: tuple[str, ...]) -> Array:
    missing = [dim for dim in dims[:2] if dim not in array.dims]
    return np.asarray(array.expand_dims(missing).transpose(*dims).values, np.float64)


def _check_layer(model: nn.Module, module: Any, layer: _LayerKernels) -> None:
    """Raise unless heads of a layer can become convolutions."""
    kind = type(module)
    if module is None:
        raise ValueError(
            f"{type(model).__name__} has no layer {layer.name!r}, of which there are kernels"
        )
    family = logits_of_class(kind)
    if family is None and kind is not GPSA:
        raise ValueError(
            f"{layer.name!r} is a {kind.__module__}.{kind.__name__}, whose heads cannot become "
            f"convolutions: expected {_LAYERS}"
        )
    if layer.name == "":
        raise ValueError("expected a model around its attention layer, got the layer")
    count = module.heads if isinstance(module, GPSA) else module.num_heads
    if max(layer.heads) >= count:
        raise ValueError(
            f"{layer.name!r} has {count} heads, from 0 to {count - 1}; got a kernel of head "
            f"{max(layer.heads)}"
        )
    if carries_hooks(module) or "forward" in vars(module):
        raise ValueError(
            f"{layer.name!r} has hooks or a forward of its own, which would be lost: remove them "
            "first"
        )
    if any(nn.utils.parametrize.is_parametrized(part) for part in module.modules()):
        raise ValueError(f"{layer.name!r} is parametrized: remove parametrizations first")
    for name, part in {} if family is None else projections_of(module).items():
        if type(part) is not nn.Linear:
            raise ValueError(
                f"{layer.name}.{name} is a {type(part).__module__}.{type(part).__name__}, whose "
                "rows cannot be divided by heads: expected a torch.nn.Linear; merge adapters first "
                "(merge_and_unload() in peft)"
            )
    if family is not None and family.has_prefix_tokens:
        tokens, names = layer.prefix.shape[1], layer.name.split(".")
        # timm's transformers count these tokens, and so do layers with rotary positions.
        around = (model.get_submodule(".".join(names[:end])) for end in range(len(names), -1, -1))
        counts = (getattr(part, "num_prefix_tokens", None) for part in around)
        expected = next((count for count in counts if count is not None), tokens)
        if tokens != expected:
            raise ValueError(
                f"expected weights of the {expected} class and register tokens of "
                f"{type(model).__name__} in prefix_kernel, got {tokens} for {layer.name!r}"
            )
