"""Gated positional self-attention that replaces a convolution (T-CNN paper, Eqs. 4-7)."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tcnn_model.conversion.convolution import Convolution, describe
from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.functional import Backend, attend, attend_weighted, check_backend
from tcnn_model.gpsa.positional import Axis, axes, gaussian_position, traces_sizes
from tcnn_model.precision import widen, widest

__all__ = ["GPSA", "gpsa_layers", "inverse_softplus"]

# From footnote 1 of the paper, which prints e^{-beta a}: that would be decreasing, and is a
# misprint for e^{+beta a}.
_SOFTPLUS_BETA = 5.0
# Size C * H * W of a feature map from which a depthwise layer is faster if values are weighted
# before attention gathers them (benchmarks/depthwise_layer.py).
_WEIGHTED_FROM = 2**14


class GPSA(nn.Module):
    """Gated positional self-attention with the shapes of the ``nn.Conv2d`` that it replaces.

    A ``k_h x k_w`` convolution becomes ``k_h * k_w`` heads, one per kernel tap in row-major order.
    With ``g_h = sigma(lambda_h)``, base pixel ``b = stride * (y, x)`` of a query and offset
    ``delta`` of a key from it::

        A_h    = (1 - g_h) softmax(q k^T / sqrt(d))
                 + g_h softmax(-alpha_h ||delta - Delta_h||^2)     (Eq. 7)
        output = sum_h A_h X W_val W_out^h + bias                  (Eq. 5)

    The layer starts from W_val = I, W_out^h = tap h of ``weight`` (Eq. 6) and Delta_h = the offset
    of tap h (Eq. 4). It equals the convolution in the limit of large alpha and lambda
    (``locality_strength=20, gating=20`` is exact up to float32 rounding). The papers start
    fine-tuning at 1 and 1, "on the verge of locality", where the two differ.

    Positional attention covers the real pixels and the zero padding, content attention real pixels
    only. A query that itself falls on the padding (possible only if the kernel exceeds ``padding +
    1`` on one side) has zero features and attends uniformly by content.

    Args:
        in_channels, out_channels, kernel_size, stride, dilation, bias: The arguments of
            ``nn.Conv2d``.
        padding: Number of zeros on either side; "same" is possible with any stride, as in
            TensorFlow.
        groups: The argument of ``nn.Conv2d``. With several groups, W_out^h is block-diagonal.
        qk_dim: Channels d of queries and keys per head; ``max(1, in_channels // heads)`` by
            default.
        locality_strength: Initial alpha > 0, after the softplus, in 1 / pixel^2: one number, or one
            per head.
        gating: Initial lambda, before the sigmoid (``gate`` is after it): one number, or one per
            head.
        qk_scale: Initial scale of the weights of queries and keys, whose standard deviation is 0.02
            times this factor. The papers use 1, with which content attention is uniform over the
            image at first; its logits grow with the square of the factor.
        backend: Algorithm of attention, as in :func:`~tcnn_model.gpsa`. The attribute may be
            changed later.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        weight, bias: Weight and bias of the convolution, (C_out, C_in / groups, k_h, k_w) and
            (C_out,): W_out of all heads. A checkpoint of the CNN therefore fills them under their
            old names.
        query, key: W_qry and W_key, shape (heads * d, C_in), head-major.
        value: W_val, shape (C_in, C_in), shared by the heads.
        center: Delta as (dy, dx) in input pixels, shape (heads, 2).
        gating: lambda, shape (heads,).
        raw_locality: alpha before the softplus, shape (heads,).
        head_queries, head_keys: ``nn.Identity`` modules through which the queries of all heads
            pass, shape (B, heads, N_query, d), and the keys, (B, heads, H * W, d). Register a
            forward hook here to read them. If a hook returns a tensor, the layer uses it instead,
            but a recorder of tcnn_probe does not see it.
        head_outputs: ``nn.Identity`` module through which A_h X W_val of all heads pass, shape (B,
            heads, N_query, C_in), before W_out. Register a forward hook here to read or edit heads.

    Shape: (B, C_in, H, W) -> (B, C_out, H_out, W_out), any H and W at least as large as the kernel
        after padding.

    Raises:
        ValueError: If an argument is out of range; in the forward, if an input is not (B, C_in, H,
            W) or is smaller than the kernel.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | Literal["same"] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        qk_dim: int | None = None,
        locality_strength: float | Sequence[float] = 1.0,
        gating: float | Sequence[float] = 1.0,
        qk_scale: float = 1.0,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(padding, str) and padding != "same":
            raise ValueError(f"padding must be one integer, two, or 'same'; got {padding!r}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups must divide in_channels and out_channels; got groups={groups}, "
                f"in_channels={in_channels}, out_channels={out_channels}"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.groups = groups
        self.kernel_size = _pair("kernel_size", kernel_size, minimum=1)
        self.stride = _pair("stride", stride, minimum=1)
        self.padding: tuple[int, int] | Literal["same"] = (
            "same" if isinstance(padding, str) else _pair("padding", padding, minimum=0)
        )
        self.dilation = _pair("dilation", dilation, minimum=1)
        self.heads = math.prod(self.kernel_size)
        self.qk_dim = max(1, in_channels // self.heads) if qk_dim is None else qk_dim
        if not isinstance(self.qk_dim, int) or self.qk_dim < 1:
            raise ValueError(f"qk_dim must be an integer of at least 1; got {qk_dim}")
        alpha = _per_head("locality_strength", locality_strength, self.heads)
        if not bool((alpha > 0).all()):
            raise ValueError(f"locality_strength must be positive; got {locality_strength}")
        initial_gating = _per_head("gating", gating, self.heads)
        if not 0 <= qk_scale < math.inf:
            raise ValueError(f"qk_scale must be a finite number of at least 0; got {qk_scale}")
        self.backend: Backend = check_backend(backend)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.weight = parameter(out_channels, in_channels // groups, *self.kernel_size)
        self.bias = parameter(out_channels) if bias else None
        self.query = parameter(self.heads * self.qk_dim, in_channels)
        self.key = parameter(self.heads * self.qk_dim, in_channels)
        self.value = parameter(in_channels, in_channels)
        self.raw_locality = parameter(self.heads)
        self.center = parameter(self.heads, 2)
        self.gating = parameter(self.heads)
        self.head_queries = nn.Identity()
        self.head_keys = nn.Identity()
        self.head_outputs = nn.Identity()
        self._initialise(alpha, initial_gating, qk_scale)

    @torch.no_grad()
    def _initialise(self, alpha: Tensor, gating: Tensor, qk_scale: float) -> None:
        # Weight and bias are drawn as in nn.Conv2d.reset_parameters.
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.weight.shape[1:]))
            nn.init.uniform_(self.bias, -bound, bound)
        # Queries and keys are initialised like linear layers of vision transformers, as in the
        # papers.
        nn.init.trunc_normal_(self.query, std=0.02).mul_(qk_scale)
        nn.init.trunc_normal_(self.key, std=0.02).mul_(qk_scale)
        nn.init.eye_(self.value)
        # alpha and gating are float64 on the CPU up to here, so that they are rounded only once, to
        # the layer's dtype.
        self.raw_locality.copy_(inverse_softplus(alpha))
        # With "same" padding, queries are at the centre of the kernel for every image size.
        center = [d * (k - 1) // 2 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        first_y, first_x = center if isinstance(self.padding, str) else self.padding
        dy, dx = self.dilation
        height, width = self.kernel_size
        y = torch.arange(height) * dy - first_y
        x = torch.arange(width) * dx - first_x
        self.center.copy_(torch.cartesian_prod(y, x))
        self.gating.copy_(gating)

    @classmethod
    def from_conv(
        cls,
        conv: nn.Module | Convolution,
        *,
        qk_dim: int | None = None,
        locality_strength: float | Sequence[float] = 1.0,
        gating: float | Sequence[float] = 1.0,
        qk_scale: float = 1.0,
        backend: Backend = "auto",
    ) -> Self:
        """Create the layer that replaces ``conv``,
        with copies of its weight and bias (Eq. 6), device, dtype and mode.

        ``weight`` and ``bias`` require gradients if those of the convolution do; the parameters
        that attention adds are trainable. From a weight-standardised convolution the layer takes
        the standardised weight, which is not standardised again in training.

        Args:
            conv: A convolution, or its ``tcnn_model.conversion.convolution.Convolution``: an
                ``nn.Conv2d``, or a subclass whose forward is one convolution with zero or
                TensorFlow's "same" padding.
            qk_dim, locality_strength, gating, qk_scale, backend: The arguments of :class:`GPSA`.

        Raises:
            TypeError: If ``conv`` is not an ``nn.Conv2d``.
            ValueError: If ``conv`` pads with anything but zeros, has a parametrized weight, or does
                not compute a plain convolution.
        """
        description = conv if isinstance(conv, Convolution) else describe(conv)
        weight, bias = description.weight, description.bias
        layer = cls(
            weight.shape[1] * description.groups,
            weight.shape[0],
            description.kernel_size,
            description.stride,
            description.padding,
            description.dilation,
            description.groups,
            bias is not None,
            qk_dim=qk_dim,
            locality_strength=locality_strength,
            gating=gating,
            qk_scale=qk_scale,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
        )
        trainable_weight, trainable_bias = description.trainable
        with torch.no_grad():
            layer.weight.copy_(weight).requires_grad_(trainable_weight)
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias).requires_grad_(trainable_bias)
        return layer.train(description.training)

    @property
    def locality_strength(self) -> Tensor:
        """Locality strength alpha = softplus(raw_locality),
        in 1 / pixel^2, shape (heads,), float32 at least.
        """
        return F.softplus(widen(self.raw_locality), beta=_SOFTPLUS_BETA)

    @property
    def gate(self) -> Tensor:
        """Share of positional attention, sigma(lambda), shape (heads,), float32 at least."""
        return torch.sigmoid(widen(self.gating))

    @property
    def position(self) -> Tensor:
        """The papers' v_pos = -alpha (1, -2 Delta_1, -2 Delta_2),
        shape (heads, 3), float64 where supported.
        """
        if torch.onnx.is_in_onnx_export():  # ONNX Runtime has no softplus in float64
            alpha = widest(self.locality_strength)
        else:
            alpha = F.softplus(widest(self.raw_locality), beta=_SOFTPLUS_BETA)
        return gaussian_position(alpha, widest(self.center))

    def axes(self, height: int, width: int) -> tuple[Axis, Axis]:
        """Describe the two spatial axes of an input of height x width pixels.

        Raises:
            ValueError: If the padded input is smaller than the kernel.
        """
        y, x = axes((height, width), self.kernel_size, self.stride, self.padding, self.dilation)
        if traces_sizes():
            return y, x
        if y.queries < 1 or x.queries < 1 or height < 1 or width < 1:
            raise ValueError(
                f"feature map smaller than the kernel: expected at least {y.extent} x {x.extent} "
                f"pixels after padding {self.padding!r}, got a feature map of {height} x {width}"
            )
        return y, x

    def gated_attention(self, x: Tensor) -> GatedAttention:
        """Describe the attention for an input (B, C_in, H, W):
        queries, keys, positions and gates.
        """
        query, key = self._queries_and_keys(x)
        return self.attention_between(query, key, (x.shape[2], x.shape[3]))

    def attention_between(
        self, query: Tensor, key: Tensor, size: tuple[int, int]
    ) -> GatedAttention:
        """Describe the attention of queries (B, heads, N_query, d) to keys (B, heads, H * W, d) on
        a map of (H, W).
        """
        y, x = self.axes(*size)
        return GatedAttention(query, key, self.position, self.gate, y, x)

    def attention(self, x: Tensor) -> Tensor:
        """Return the dense attention A of Eq. (7), for pictures and tests.

        Args:
            x: Input, shape (B, C_in, H, W).

        Returns:
            Attention of shape (B, heads, N_query, N_key): queries row-major over the output grid,
            keys row-major over the input grid extended by the padding, (H + 2 p_y) x (W + 2 p_x).
            Rows sum to one.
        """
        return self.gated_attention(x).dense()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, Eq. (5): (B, C_in, H, W) -> (B, C_out, H_out, W_out)."""
        if isinstance(x, fx.Proxy):
            return self._as_leaf(x)
        query, key = self._queries_and_keys(x)
        query = self.head_queries(query)
        key = self.head_keys(key)
        attention = self.attention_between(query, key, (x.shape[2], x.shape[3]))
        values = self.values(x)
        if self._weights_first(x):
            output = self._weighted(attention, values)
        else:
            gathered = attend(attention, values, backend=self.backend)
            output = self.combine(gathered, attention)
        # A convolution's output has the memory format of its input, and later layers may rely on it
        # (channels_last).
        return output.contiguous(memory_format=_memory_format(x))

    def _as_leaf(self, x: fx.Proxy) -> Any:
        """Return the layer's output in a symbolic trace,
        whose graph calls the layer as a whole, like a convolution.
        """
        # A proxy has no sizes, on which attention depends.
        tracer: Any = x.tracer
        name = tracer.path_of_module(self)
        if not name:
            raise ValueError(
                "torch.fx shows a GPSA layer as a single node: trace a module that contains the "
                "layer"
            )
        return tracer.create_proxy("call_module", name, (x,), {})

    def values(self, x: Tensor) -> Tensor:
        """Return X W_val, shared by the heads: (B, C_in, H, W) -> (B, 1, H * W, C_in)."""
        return _project(x, self.value).flatten(2).transpose(1, 2)[:, None]

    def combine(self, gathered: Tensor, attention: GatedAttention) -> Tensor:
        """Apply W_out of all heads and the bias:
        (B, heads, N_query, C_in) -> (B, C_out, H_out, W_out).
        """
        grid = (attention.y.queries, attention.x.queries)
        gathered = self.head_outputs(gathered)
        gathered = gathered.reshape(*gathered.shape[:2], *grid, gathered.shape[3])
        if self.groups == 1:
            # (C_out, C_in, k_h, k_w) to (C_out, heads * C_in).
            taps = self.weight.permute(0, 2, 3, 1).flatten(1)
            # (B, heads, H_out, W_out, C_in) to (B, H_out, W_out, heads * C_in).
            side_by_side = gathered.permute(0, 2, 3, 1, 4).flatten(3)
            return F.linear(side_by_side, taps, self.bias).permute(0, 3, 1, 2)
        # With channels before heads this is the "soft" counterpart of F.unfold, and fits the
        # convolution's weight.
        unfolded = gathered.permute(0, 4, 1, 2, 3).flatten(1, 2)
        # The weight of a 1 x 1 convolution.
        taps = self.weight.flatten(1)[:, :, None, None]
        return F.conv2d(unfolded, taps, self.bias, groups=self.groups)

    def _weights_first(self, x: Tensor) -> bool:
        """Return whether W_out is applied to the values before attention gathers them.

        This is done only in a depthwise layer, on a CPU and for large inputs, where it is faster,
        and only if no hook needs the outputs of single heads, which are never formed in this order.
        """
        if traces_sizes():
            return False
        seam = self.head_outputs
        hooked = type(seam) is not nn.Identity or seam._forward_hooks or seam._forward_pre_hooks
        on_cpu = x.device.type == "cpu"
        large = x.shape[0] > 0 and x[0].numel() >= _WEIGHTED_FROM
        depthwise = self.groups == self.in_channels
        return depthwise and self.backend == "auto" and on_cpu and large and not hooked

    def _weighted(self, attention: GatedAttention, values: Tensor) -> Tensor:
        """Return the result of :meth:`combine` without forming the outputs of single heads."""
        # (C_out, 1, k_h, k_w) to (C_in, C_out / C_in, heads), and heads first.
        by_channel = self.weight.flatten(1).unflatten(0, (self.in_channels, -1))
        taps = by_channel.permute(2, 0, 1)
        output = attend_weighted(attention, values, taps)
        if self.bias is not None:
            output = output + self.bias
        grid = (attention.y.queries, attention.x.queries)
        return output.transpose(1, 2).unflatten(2, grid)

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys of all heads, (B, heads, N_query, d) and (B, heads, H * W, d)."""
        if not traces_sizes() and (x.ndim != 4 or x.shape[1] != self.in_channels):
            raise ValueError(
                f"expected an input of shape (B, {self.in_channels}, H, W), got {tuple(x.shape)}"
            )
        y_axis, x_axis = self.axes(x.shape[2], x.shape[3])
        query_pixels = _at_queries(x, y_axis, x_axis)
        query = _project(query_pixels, self.query)
        key = _project(x, self.key)
        return self._split_heads(query), self._split_heads(key)

    def _split_heads(self, features: Tensor) -> Tensor:
        """Split the heads of (B, heads * d, H, W) into (B, heads, H * W, d)."""
        tokens = features.flatten(2)
        by_head = tokens.unflatten(1, (self.heads, self.qk_dim))
        return by_head.transpose(2, 3)

    def extra_repr(self) -> str:
        """Return the arguments, as ``print(model)`` shows them."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding!r}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias is not None}, heads={self.heads}, "
            f"qk_dim={self.qk_dim}"
        )


def gpsa_layers(model: nn.Module) -> dict[str, GPSA]:
    """Return the :class:`GPSA` layers of a model by their module names, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GPSA)}


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a matrix (C_out, C_in) to the channels of (B, C_in, H, W)."""
    return F.conv2d(x, weight[:, :, None, None])


def _at_queries(x: Tensor, y_axis: Axis, x_axis: Axis) -> Tensor:
    """Return the pixels of (B, C, H, W) at the queries,
    which are stride apart; queries on the padding are zero.
    """
    for dim, axis in ((2, y_axis), (3, x_axis)):
        # The number of pixels after the last that may hold a query; negative if the last pixels
        # cannot. It does not depend on the image's size, so that a traced graph holds for any.
        # "same" padding leaves it at 0.
        behind = 0 if axis.padding == "same" else 2 * axis.padding + 1 - axis.extent
        if behind > 0:
            # Features on the padding are zero.
            x = F.pad(x, (0, behind) if dim == 3 else (0, 0, 0, behind))
        pixels = slice(axis.first_query, min(behind, 0) or None, axis.stride)
        x = x[:, :, :, pixels] if dim == 3 else x[:, :, pixels]
    return x


def _memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of ``x`` (B, C, H, W)."""
    # A map of one channel or one pixel is contiguous in both formats; torch's convolution then
    # takes the standard one.
    if x.is_contiguous():
        return torch.contiguous_format
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def inverse_softplus(y: Tensor) -> Tensor:
    """Return the ``raw_locality`` of a locality strength ``y`` > 0, of the same shape."""
    # log(exp(beta y) - 1) / beta, in a form that neither overflows for large y nor loses the
    # precision of small y.
    return y + torch.log(-torch.expm1(-_SOFTPLUS_BETA * y)) / _SOFTPLUS_BETA


def _per_head(name: str, values: float | Sequence[float], heads: int) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if tensor.shape not in ((), (heads,)) or not bool(tensor.isfinite().all()):
        raise ValueError(
            f"{name} must be one finite number or one for each of the {heads} heads; got {values}"
        )
    return tensor.expand(heads).clone()


def _pair(name: str, value: int | tuple[int, int], *, minimum: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair):
        raise ValueError(f"{name} must be one integer or two; got {value!r}")
    if min(pair) < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}")
    return int(pair[0]), int(pair[1])
