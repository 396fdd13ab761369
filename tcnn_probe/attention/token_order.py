"""Tracking of images and their pixels through a forward,
which shows the rows and the order of the tokens of attention.

The number of tokens does not show their order: a masked autoencoder shuffles its tokens, Hiera
orders them by mask unit, and DETR can have as many object queries as there are cells. So each
tensor of a forward gets a tensor of places of the same shape. The place of an element is the
row-major number of the pixel from which it was computed, the mean of the numbers if there are
several pixels, or NaN if it was computed from parameters only. Functions that move elements move
their places, convolutions average them, and a token keeps its place in attention and residual
connections. Places are computed from shapes and indices; the model itself runs only once. Words
that a model gets beside images have the places -1, -2, and so on.

In the same way, each row of a batch has a number, which shows the image of each row of an
attention: layers may see some images only, or in another order, and models may show their layers
several views of an image. What enters the patch embedding is a view; its pixels are numbered there,
because its tokens can be in order although it was cropped or flipped.

A tensor without places is unknown: it comes from elsewhere, or from a function that is not tracked.
Unknown places never raise an objection; images in unknown rows have no maps. If such a tensor is
concatenated with a tensor that has places, its elements get infinity.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tcnn_probe.architectures.lookup import as_rows
from tcnn_probe.attention.added_masks import AddedMasks
from tcnn_probe.attention.carried_numbers import CHANNELS, CarriedNumbers
from tcnn_probe.attention.layout import Arrangement, Tokens
from tcnn_probe.attention.place_rules import (
    ATTENTION_FUNCTIONS,
    Call,
    Places,
    are_channels,
    function_name,
    pixel_numbers,
    places_of_tokens,
    tensors_in,
    unexpanded,
)
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.hooks.calls import innermost_call, is_running
from tcnn_probe.hooks.compilation import never_compiled, never_compiled_alone
from tcnn_probe.hooks.kernel_calls import is_kernel
from tcnn_probe.hooks.modes import is_transformed, unseen
from tcnn_probe.images import channel_axis

__all__ = [
    "LOST_IMAGES",
    "OTHER_TOKENS",
    "PlaceTracker",
    "View",
    "are_words",
    "arrangement_of",
    "images_of_views",
    "objection_to_order",
]

# A wrong order gives a step of -1 pixel or less; rounding errors of places are far below half a
# pixel.
_LEAST_STEP = -0.5
LOST_IMAGES = "which images of the batch reach this layer could not be followed"
# A masked autoencoder keeps other patches of each image, so that the same index means another one.
OTHER_TOKENS = "images have different patches at the same places in the sequence"
# Means of equal numbers differ from them by rounding; random numbers of rows are further apart.
_ROUNDING = 1e-9


def objection_to_order(places: Places, tokens: Tokens) -> str:
    """Return the reason why tokens are not in row-by-row order on a grid;
    "" if they are, or if it is unknown.

    Args:
        places: Places of the tokens, shape (N,), those beside the grid first; None if these are
            unknown.
        tokens: Grid on which the tokens are assumed to lie.
    """
    if places is None or len(places) != tokens.count:
        return ""
    beside, grid = places[: tokens.prefix], places[tokens.prefix :]
    on_image = grid[grid.isfinite()]  # without padding
    if grid.isnan().all():
        return "the tokens come from parameters, not from the image"
    # As in SAM's decoder, prompts of unknown origin and learnt tokens can together be as many as
    # the cells of a map.
    if grid.isnan().any() and grid.isinf().any():
        return "some of the tokens come from parameters, not from the image"
    if bool((on_image < 0).any()):
        return "some of the tokens are words, not patches"
    if bool((on_image.diff() < _LEAST_STEP).any()):
        return "the tokens are not in the order of the image's rows"
    # One such token is allowed, because the mean of all patches can replace a class token.
    if (beside[beside.isfinite()] >= 0).sum() > 1:
        return "some of the tokens beside the grid are patches"
    return ""


def arrangement_of(places: Places) -> Arrangement | None:
    """Return the positions of words and patches;
    None if one kind is missing, or if the patches are not contiguous.
    """
    if places is None or not bool((places < 0).any()) or bool(places.isinf().any()):
        return None
    patches = (places >= 0).nonzero()[:, 0].tolist()
    # If there are other tokens between the patches, they are fewer than the indices from the first
    # to the last one.
    if not patches or len(patches) <= patches[-1] - patches[0]:
        return None
    words = (places < 0).nonzero()[:, 0].tolist()
    specials = places.isnan().nonzero()[:, 0].tolist()
    return Arrangement(
        before=patches[0],
        after=len(places) - 1 - patches[-1],
        order=[*specials, *words, *patches],
        words=len(words),
        class_token=bool(specials),
    )


def are_words(places: Places) -> bool:
    """Return whether all tokens are known to be words."""
    return places is not None and bool((places < 0).all())


class View(NamedTuple):
    """A picture that enters the patch embedding.

    Args:
        image: Number of the image in the model's batch; -1 if it could not be followed.
        is_whole: Whether the view shows the image upright and to its borders.
        size: Height and width of the grid of its numbered pixels; None if they are not those of an
            image.
    """

    image: int
    is_whole: bool = True
    size: tuple[int, int] | None = None


def images_of_views(views: Sequence[View], images: int) -> tuple[Sequence[int] | None, str]:
    """Return the number in the batch of each image of an attention;
    or None and the reason why it has no maps.

    Args:
        views: Views of the rows, which are the windows of all images.
        images: Number of images of the attention.
    """
    numbers = [view.image for view in views]
    windows = len(views) // images
    by_image = [set(numbers[start : start + windows]) for start in range(0, len(numbers), windows)]
    if -1 in numbers or any(len(shown) > 1 for shown in by_image):
        return None, LOST_IMAGES
    numbers = numbers[::windows]
    if len(set(numbers)) < images:
        return None, "the model turns each image into several: views, crops or copies"
    if not all(view.is_whole for view in views):
        return None, "the model crops, flips or turns images before it embeds patches"
    return numbers, ""


class PlaceTracker(TorchFunctionMode):
    """Mode that tracks images and their pixels through torch functions.

    Attributes:
        failure: The last function of torch that could not be tracked because of an error, and the
            error; "" if none.
        queries, keys: Places of the queries and keys of the attention that torch is computing,
            shapes (N_query,) and (N_key,), for the first image and head; None if these are unknown.
        differ: Whether they have other places in other rows of the batch.
        are_channels: Whether these queries and keys are channels, whose products are sums over
            tokens.
        hidden: Where a mask hides keys in the logits of the softmax that torch is computing, in
            their shape; None if none was added.

    Args:
        inputs: Tensors among the inputs of the model. Tensors (B, C, H, W) are images, and tensors
            with five axes videos.
        images: Images of the batch, (B, C, H, W) or a list of (C, H, W).
        patches: Number of patches if the model gets patches, (B, patches, C), in place of an image.
        numbers_pixels: Whether inputs are images, not maps that were computed from them.
        fields: Receptive fields of feature maps to fill; None if they are not needed.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        images: Tensor | list[Tensor] | tuple[()] = (),
        patches: int | None = None,
        *,
        numbers_pixels: bool = True,
        fields: ReceptiveFields | None = None,
    ) -> None:
        super().__init__()
        # The call of the model, as this is created in one of its hooks.
        self._frame = innermost_call(sys._getframe())
        self._fields = fields
        self.failure = ""
        self.queries: Places = None
        self.keys: Places = None
        self.differ = self.are_channels = False
        self.hidden: Tensor | None = None
        self._masks = AddedMasks()
        self._rows: Places = None
        self._pixels = CarriedNumbers()
        # Each view has a random number here, so that a mean over several views is the number of
        # none.
        self._views_of = CarriedNumbers(of_rows=True)
        self._generator = torch.Generator().manual_seed(0)
        self._numbers = torch.empty(0, dtype=torch.float64)
        self._views: list[View] = []
        for number, image in enumerate(images if isinstance(images, list) else ()):
            view = self._enter([View(number, size=_size_of(image[None]))])
            self._views_of[image] = view[0].expand(image.shape)
            self._pixels[image] = _pixels_of(image[None])[0]
        for tensor in inputs:
            if tensor in self._views_of:
                continue
            if tensor.ndim and len(tensor) == len(images):
                rows = range(len(tensor))
                views = [View(row, size=_size_of(tensor)) for row in rows]
                by_row = self._enter(views).view(-1, *(1 for _ in tensor.shape[1:]))
                self._views_of[tensor] = by_row.expand(tensor.shape)
            if not numbers_pixels:
                continue
            if tensor.ndim in (4, 5):
                self._pixels[tensor] = _pixels_of(tensor)
            elif tensor.ndim == 3 and tensor.shape[1] == patches:
                places = pixel_numbers(tensor.shape[1])[:, None]
                self._pixels[tensor] = places.expand(tensor.shape)
        # If there is no image, integers and vectors can represent one, for example as codes of its
        # patches.
        if len(self._pixels):
            self._follow_words(inputs)

    def _enter(self, views: Sequence[View]) -> Tensor:
        """Add views, and return their numbers, shape (views,)."""
        numbers = torch.rand(
            len(views), generator=self._generator, dtype=torch.float64, device="cpu"
        )
        self._numbers = torch.cat([self._numbers, numbers])
        self._views += views
        return numbers

    @unseen
    def see(self, image: Tensor) -> None:
        """Give numbers to the views (n, C, H, W) that enter the patch embedding, and their pixels.

        Tokens are then in order if they are in that of the view, whatever the model did to the
        image before.
        """
        with self._noting_failures("the patch embedding"):
            sources = self.views_of(image)
            pixels = self._pixels.of(image)
            views = [
                View(
                    source.image,
                    source.is_whole and _is_whole(pixels, row, source.size),
                    _size_of(image),
                )
                for row, source in enumerate(sources)
            ]
            numbers = self._enter(views)
            self._views_of[image] = numbers.view(-1, 1, 1, 1).expand(image.shape)
            self._pixels[image] = _pixels_of(image)

    def views_of(self, tensor: Tensor) -> Sequence[View]:
        """Return the views that the rows of a tensor show."""
        return self._views_with(self._views_of.of(tensor), len(tensor))

    def shows_whole_images(self, inputs: Sequence[Any]) -> bool:
        """Return whether all rows of a layer's tokens show the same pixels,
        so that they are no windows.
        """
        tokens = next((x for x in inputs if isinstance(x, Tensor)), None)
        places = None if tokens is None else self._pixels.of(tokens)
        if places is None:
            return False
        rows = unexpanded(places)
        is_same = rows.isclose(rows[:1], rtol=0, atol=_ROUNDING, equal_nan=True)
        return bool(rows.isfinite().any()) and bool(is_same.all())

    def views_of_rows(self, rows: int, module: nn.Module, heads: int | None) -> Sequence[View]:
        """Return the views of the rows of the attention that torch is computing.

        Args:
            rows: Number of rows.
            module: Module that attends.
            heads: Axis of the heads in torch's arguments, if the call shows it.
        """
        numbers = self._rows
        with self._noting_failures("attention"):
            if numbers is not None:
                numbers = numbers[None, ..., :1] if numbers.ndim < 3 else numbers[..., :1]
                if numbers.shape[:-2].numel() == rows:
                    numbers = numbers.flatten(0, -3)
                else:
                    numbers = as_rows(numbers, module, heads)[:, 0]
            return self._views_with(numbers, rows)
        return [View(-1, False)] * rows

    def _views_with(self, numbers: Places, rows: int) -> Sequence[View]:
        """Return the view of each row, whose number all of the row has,
        except for what comes from parameters.
        """
        lost = View(-1, False)
        if numbers is None or not self._views:
            return [lost] * rows
        by_row = unexpanded(numbers).expand(rows, *[-1] * (numbers.ndim - 1))
        by_row = by_row.flatten(1)
        least = by_row.nan_to_num(torch.inf, posinf=torch.inf).amin(1)
        most = by_row.nan_to_num(-torch.inf, posinf=torch.inf).amax(1)
        distances, indices = (least[:, None] - self._numbers).abs().min(1)
        is_known = (distances < _ROUNDING) & (most - least < _ROUNDING)
        return [
            self._views[index] if known else lost
            for index, known in zip(indices.tolist(), is_known.tolist(), strict=True)
        ]

    def _follow_words(self, inputs: Sequence[Tensor]) -> None:
        """Assign places to words, (B, N), and to vectors of words, (B, N, C)."""
        for tensor in inputs:
            if tensor in self._pixels:
                continue
            # Integers that are only 0 and 1 are a mask of words.
            is_ids = tensor.ndim == 2 and tensor.dtype in (torch.int32, torch.int64)
            if is_ids and bool((tensor > 1).any()):
                self._pixels[tensor] = (-1 - pixel_numbers(tensor.shape[1])).expand(tensor.shape)
            elif tensor.ndim == 3 and tensor.is_floating_point():
                places = -1 - pixel_numbers(tensor.shape[1])
                self._pixels[tensor] = places[:, None].expand(tensor.shape)

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        # After Ctrl-C, other code of the thread may run under this mode.
        if self._frame is not None and not is_running(self._frame):
            return func(*args, **kwargs)
        tracked = _first_by_position(args, kwargs)
        self._find_sides(func, *tracked)
        output = func(*args, **kwargs)
        self._follow(func, output, *tracked)
        return output

    @contextmanager
    def _noting_failures(self, function: str) -> Iterator[None]:
        """Note an error of tracking, which must never end the user's forward,
        as what then is unknown.
        """
        try:
            yield
        except Exception as error:
            self.failure = f"{function}: {error!r}"

    # The following methods are not compiled, because torch.compile would also compile the functions
    # on places.

    @never_compiled
    @unseen
    def _find_sides(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Find the places of queries and keys before torch computes attention."""
        self.queries = self.keys = self._rows = self.hidden = None
        self.differ = self.are_channels = False
        name = function_name(func)
        if name != "softmax" and name not in ATTENTION_FUNCTIONS and not is_kernel(func):
            return
        with self._noting_failures(name):
            inputs = tensors_in((*args, *kwargs.values()))
            self.hidden = self._masks.of(inputs[0]) if name == "softmax" else None
            queries, keys = self._pixels.sides(func, inputs)
            is_fused = name != "softmax"
            self._rows = self._views_of.sides(func, inputs)[0]
            if keys is CHANNELS or (is_fused and are_channels(queries)):
                # Vectors of whole views or frames, which can be tokens, have all cells, too.
                self.are_channels = not _are_of_views(self._rows)
                return
            self.queries, self.keys = places_of_tokens(queries), places_of_tokens(keys)
            self.differ = _differ(queries) or _differ(keys)

    @never_compiled
    @unseen
    def _follow(
        self,
        func: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Track a function that has run."""
        name = function_name(func)
        with self._noting_failures(name):
            inputs = tensors_in((*args, *kwargs.values()))
            if is_transformed(inputs):
                return
            outputs = tensors_in((output,))
            if self._fields is not None and inputs and outputs:
                with self._noting_failures(name):
                    self._fields.follow(Call(func, args, kwargs, inputs, (), outputs))
            with self._noting_failures(name):
                self._masks.follow(name, Call(func, args, kwargs, inputs, (), outputs))
            for table in (self._pixels, self._views_of):
                with self._noting_failures(name):
                    places = [table.of(tensor) for tensor in inputs]
                    table.follow(Call(func, args, kwargs, inputs, places, outputs))


def _first_by_position(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a torch function with those
    that rules expect first by position, as conv2d(weight=w, input=x) may give them by name.
    """
    names = [name for name in ("input", "query", "key", "value") if name in kwargs]
    if args or not names:
        return args, kwargs
    others = {name: value for name, value in kwargs.items() if name not in names}
    return tuple(kwargs[name] for name in names), others


def _differ(places: Places) -> bool:
    """Return whether some of the tokens (B, ..., N, d) have other places in other rows,
    apart from mask tokens and unknown ones.
    """
    if places is None or places.ndim < 3:
        return False
    rows = unexpanded(places)
    least = rows.nan_to_num(torch.inf).amin(0)
    most = rows.nan_to_num(-torch.inf, posinf=-torch.inf).amax(0)
    return bool((most - least > _ROUNDING).any())


def _are_of_views(numbers: Places) -> bool:
    """Return whether the vectors (..., N, d) of the first image and head are of several views."""
    while numbers is not None and numbers.ndim > 2:
        numbers = numbers[0]
    if numbers is None:
        return False
    slim = unexpanded(numbers).nan_to_num(-1)
    return bool(((slim - slim[:1]).abs() > _ROUNDING).any())


def _pixels_of(image: Tensor) -> Tensor:
    """Return the numbers of the pixels of images or videos."""
    # All images and channels have equal places, so these are expanded; unexpanded() finds strides
    # of 0.
    pixels = image[:1].narrow(channel_axis(image), 0, 1)
    return pixel_numbers(pixels.numel()).view(pixels.shape).expand(image.shape)


def _size_of(images: Tensor) -> tuple[int, int] | None:
    """Return height and width of images, (B, C, H, W) or (B, H, W, C); None for other tensors."""
    if images.ndim != 4:
        return None
    sides = list(images.shape[1:])
    del sides[channel_axis(images) - 1]
    return sides[0], sides[1]


def _is_whole(pixels: Places, row: int, size: tuple[int, int] | None) -> bool:
    """Return whether a row of (n, C, H, W) shows an image
    of this size upright and as a whole, as far as is known.
    """
    if pixels is None or size is None:
        return True
    height, width = size
    corners = pixels[row, 0][[0, 0, -1], [0, -1, 0]].tolist()
    across = width, corners[1] - corners[0], pixels.shape[3]
    down = height, (corners[2] - corners[0]) / width, pixels.shape[2]
    for side, distance, cells in (across, down):
        # The centres of the first and the last cell lie half a cell inside. A pixel is lost where a
        # side is no multiple of the cell's. Padding is NaN, and says nothing.
        missing = side - distance
        if missing <= 0 or missing > 1 + 1.5 * max(1, side / cells):
            return False
    return True
