"""How much of each head's attention lies on objects:
in masks, or else where the model's own saliency is high.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attribution import saliency
from tcnn_probe.models import first_line
from tcnn_probe.probes import NotMeasuredError, Probe
from tcnn_probe.probes.shared_variables import HEAD
from tcnn_probe.schema import Variable

__all__ = ["Objects", "salient_quarter", "why_no_saliency"]


_MEAN = "Mean over the images with a mask that is not empty."


class Objects:
    """Masks of the photographs of a forward, and the probe that compares attention with them.

    Attributes:
        masks: Masks of the next forward's images, (B, H, W), 0 for images without one, or None for
            no masks; set them before the forward.
        meaning: What the masks are.
        probe: The probe, for ``record``.

    Args:
        meaning: What the masks are, for the descriptions of the variables.
    """

    def __init__(self, meaning: str) -> None:
        self.masks: Tensor | None = None
        self.meaning = meaning
        share = (
            "sum_j a_j m_j / sum_j a_j over the patches j, for the share m_j of patch j in "
            f"{meaning}"
        )
        self.probe = Probe(
            "objects",
            {
                "object_attention": Variable(
                    HEAD,
                    "1",
                    "attention on objects",
                    f"{share}, and the mean a_j over queries of A_ij. Compare with object_area. "
                    f"{_MEAN}",
                ),
                "class_object_attention": Variable(
                    HEAD,
                    "1",
                    "class token's attention on objects",
                    f"{share}, and the attention a_j of the class token. Compare with object_area. "
                    f"{_MEAN}",
                ),
                "object_area": Variable(
                    ("layer",),
                    "1",
                    "area of objects",
                    f"Share of the image in {meaning}: what attention on objects is by chance. "
                    f"{_MEAN}",
                ),
            },
            attention=self._measure,
        )

    def _measure(self, attention: Attention) -> Mapping[str, Tensor]:
        if attention.map_size is None:
            raise NotMeasuredError(attention.layout.reason or "its grid is unknown")
        if attention.windows > 1:
            raise NotMeasuredError("it attends in windows, each of which has a share of its own")
        if self.masks is None:
            return {}
        if not attention.shows_batch:
            raise NotMeasuredError("its images are not those of the batch")
        masks = self.masks.to(attention.device, attention.dtype)
        on_patches = adaptive_avg_pool2d(masks[:, None], attention.map_size)[:, 0]
        # An image without a mask, or with an empty one, says nothing.
        has_mask = on_patches.amax((1, 2)) > 0
        on_patches = on_patches[has_mask]
        rows = attention.content_rows() if attention.gate is None else None
        received = attention.received(range(attention.images)) if rows is None else rows.received
        measured = {
            "object_attention": _share(attention.on_grid(received[has_mask, 0]), on_patches),
            "object_area": on_patches.mean((1, 2)),
        }
        query = attention.class_query
        if query is not None:
            row = attention.weights(slice(query, query + 1))[has_mask, 0, :, 0]
            measured["class_object_attention"] = _share(attention.on_grid(row), on_patches)
        return measured


def _share(maps: Tensor, masks: Tensor) -> Tensor:
    """Return the share of maps (B, heads, height, width) inside masks (B, height, width):
    (B, heads).
    """
    inside = (maps * masks[:, None]).sum((2, 3))
    return inside / maps.sum((2, 3))


def why_no_saliency(model: nn.Module, images: Tensor) -> str:
    """Return why Grad-CAM cannot say where a model finds the class that it predicts; "" if it can.

    Attention rollout, which needs no classes, is made of the attention that it would judge.
    """
    try:
        salient_quarter(model, images)
    # A method refuses a model with many types of errors, whose first line says why.
    except Exception as error:
        return f"no masks were given, and Grad-CAM says nothing: {first_line(error)}"
    return ""


@torch.enable_grad()
def salient_quarter(model: nn.Module, images: Tensor) -> Tensor:
    """Return the quarter of each image's pixels in which Grad-CAM is highest,
    (B, H, W); nothing of a constant map.
    """
    with warnings.catch_warnings():
        # Of maps that show nothing; they do not count.
        warnings.simplefilter("ignore", RuntimeWarning)
        maps = saliency(model, images, method="gradcam", progress=False).values
    flat = torch.from_numpy(maps).flatten(1).double()
    least = flat.quantile(0.75, dim=1, keepdim=True)
    return (flat > least).view(maps.shape).float()
