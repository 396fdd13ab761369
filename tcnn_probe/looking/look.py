"""``look()``: what the heads of a pretrained model do on photographs, as a recording and a page."""

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor, nn

from tcnn_model.pictures import read_picture
from tcnn_probe.attention.reconstruction import ReconstructionError
from tcnn_probe.images import prepare, prepare_pixels
from tcnn_probe.looking.costs import class_labels, costs_of_heads
from tcnn_probe.looking.named_models import Weights, find_model, find_preparation, is_function
from tcnn_probe.looking.objects import Objects, salient_quarter, why_no_saliency
from tcnn_probe.looking.photographs import (
    Paths,
    find_masks,
    find_photographs,
    prepare_mask,
)
from tcnn_probe.looking.unfinished import continue_measuring, keep_measurements
from tcnn_probe.models import first_line, for_model, progress_bar, untouched, whole_number
from tcnn_probe.probes import DEFAULT, Probe
from tcnn_probe.provenance import provenance
from tcnn_probe.recording.fingerprints import weights_fingerprint
from tcnn_probe.recording.recorder import Recorder, record
from tcnn_probe.reporting import Report, report
from tcnn_probe.reporting.report import output_file
from tcnn_probe.storage import StoreError, open_recording

__all__ = ["NoAttentionError", "compare", "file_name", "is_first_rank", "look"]

_PROBES = (*DEFAULT, "health", "offset-kernel", "redundancy")
# Between two writings of what was measured so far, which take about a second for a large model.
_SECONDS = 20
_PAGE_MB = 5.0
# Photographs over which costs are measured, with a backward pass for each of several directions.
_COSTED = 16
_JUDGED = 64  # photographs whose saliency is computed, which takes several forwards of each


class NoAttentionError(ValueError):
    """A model has no attention that can be recorded."""

    exit_code = 3  # of ``tcnn-probe look``


def look(
    model: nn.Module | str,
    photographs: Paths,
    path: str | os.PathLike[str] | None = None,
    *,
    weights: Weights = "pretrained",
    size: int | None = None,
    limit: int = 256,
    shown: int = 6,
    masks: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int = 16,
    max_mb: float = _PAGE_MB,
    progress: bool | None = None,
) -> xr.DataTree:
    """Look at photographs with a pretrained model, and say what each of its heads does.

    ::

        tree = tcnn_probe.look("vit_small_patch14_dinov2", "photographs", "page.html")
        tree["heads"].dataset.selectivity.isel(epoch=0).to_pandas()

    The model runs once over the photographs. The recording has the anatomy of each head, the kernel
    of the convolution inside it, signs of heads that do nothing or the same as another, and maps of
    some photographs. With ``path``, the recording is stored beside the page, with the ending
    ".zarr", and what the page says with the ending ".json". A process that was killed is continued
    when it is started again; a recording of the same weights and photographs is not made again.

    Args:
        model: A module, which stays as it is; or a name: of timm or torchvision, a folder or name
            of Hugging Face, or "module:function", which is imported and called.
        photographs: A folder, files, or several of them; of a folder, all pictures below it.
        path: Path of the page, "page.html"; None for no files.
        weights: Weights of a named model: "pretrained", "random", or a checkpoint. A function's
            model keeps its own.
        size: Side of the images in pixels; None for the model's own.
        limit: Largest number of photographs, spread evenly over folders. Types of heads need 8.
        shown: Number of photographs whose maps the page shows.
        masks: Folder of masks of the objects in the photographs, white on black, with the same
            stems.
        device, dtype: Device and dtype to which a named model is moved.
        batch_size: Number of photographs at a time.
        max_mb: Largest size of the page, in 10⁶ bytes: maps are left out until it fits.
        progress: Whether to show a progress bar; None to show it after three seconds, on a terminal
            or in a notebook.

    Returns:
        The recording, as :func:`tcnn_probe.open` returns it, marked as epoch 0. Its attributes name
        the photographs.

    Raises:
        ValueError: There is no such model, or it has no attention; there are no photographs, or
            none can be read.
        FileNotFoundError: There is no such file or folder.
        TypeError: ``model`` is neither a module nor a name, or a module is to be moved.
    """
    page = None if path is None else output_file(path)
    subject = _Subject.of(model, photographs, weights, size, limit, shown, masks, device, dtype)
    tree = _recording(subject, page, whole_number(batch_size, "batch_size", 1), progress)
    if page is not None and is_first_rank():
        _write_page({subject.name: tree}, page, subject, max_mb)
    return tree


def compare(
    models: Sequence[tuple[nn.Module | str, Weights]],
    photographs: Paths,
    path: str | os.PathLike[str],
    *,
    batch_size: int = 16,
    max_mb: float = _PAGE_MB,
    progress: bool | None = None,
    **options: Any,
) -> dict[str, xr.DataTree]:
    """Look at photographs with up to four models, and show them side by side on a page.

    Args:
        models: Models, each with its weights.
        photographs, path, batch_size, max_mb, progress: See :func:`look`.
        **options: Further options of :func:`look`.

    Returns:
        The recordings by name.
    """
    page = output_file(path)
    trees: dict[str, xr.DataTree] = {}
    for model, weights in models:
        subject = _Subject.of(model, photographs, weights, **options)
        name = subject.name
        if name in trees:
            name = f"{name} {Path(weights).stem}"
        beside = page.with_name(f"{page.stem}.{file_name(name)}{page.suffix}")
        trees[name] = _recording(subject, beside, batch_size, progress)
    if is_first_rank():
        _write_page(trees, page, subject, max_mb)
    return trees


def file_name(name: str) -> str:
    """Return a model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "_", name)


def _recording(
    subject: "_Subject", page: Path | None, batch_size: int, progress: bool | None
) -> xr.DataTree:
    """Return the recording beside a page if it is
    of the same model and photographs, else make it.
    """
    store = None if page is None else page.with_suffix(".zarr")
    tree = None if store is None else _earlier(store, subject.key())
    return _measure(subject, store, batch_size, progress) if tree is None else tree


def _write_page(
    trees: Mapping[str, xr.DataTree], path: Path, subject: "_Subject", max_mb: float
) -> None:
    """Write the page of recordings of the same photographs,
    and beside it what the page says, in JSON.
    """
    shown = subject.paths[: subject.shown]
    images = (
        prepare_pixels([read_picture(path) for path in shown], subject.config) if shown else None
    )
    page = report(dict(trees), images=images, max_mb=max_mb)
    page.save(path)
    Report(json.dumps(page.facts, indent=1, ensure_ascii=False)).save(path.with_suffix(".json"))


@dataclass(frozen=True)
class _Subject:
    """A model and the photographs that it looks at.

    Args:
        name: Name of the model.
        model: The model.
        config: Options of timm's transform.
        paths: Files of photographs, those whose maps are kept first.
        shown: Number of photographs whose maps are kept.
        masks: Files of masks, by photograph.
        about: Attributes of the recording.
    """

    name: str
    model: nn.Module
    config: Mapping[str, Any]
    paths: Sequence[Path]
    shown: int
    masks: Mapping[Path, Path]
    about: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: nn.Module | str,
        photographs: Paths,
        weights: Weights = "pretrained",
        size: int | None = None,
        limit: int = 256,
        shown: int = 6,
        masks: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "_Subject":
        """Find a model and photographs, see :func:`look`."""
        chosen = find_photographs(photographs, whole_number(limit, "limit", 1))
        mask_paths = {} if masks is None else find_masks(masks, chosen.paths)
        if isinstance(model, str):
            name = model
            is_own = is_function(model)
            weights_from = "as the function returns them" if is_own else Path(weights).name
            # Random weights are the same in all processes, and in one that continues another.
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(0)
                network, config = find_model(model, weights, size)
            network = network.eval().to(device, dtype)
        elif isinstance(model, nn.Module):
            if device is not None or dtype is not None:
                raise TypeError(
                    "device= and dtype= are for models that are given by name: move your model "
                    "yourself"
                )
            facts = provenance(model)
            name = facts.get("model_architecture", facts["model_class"])
            network, config = model, find_preparation(model, size)
            weights_from = "a module"
        else:
            raise TypeError(f"expected a torch.nn.Module or a name, got {type(model).__name__}")
        config = dict(config)
        height, width = config["input_size"][1:]
        if config.pop("guessed", False):
            warnings.warn(
                f"the size of pictures that {name} takes is unknown: they are cropped to {height} "
                f"x {width} pixels (size=, --size sets another), and normalised by the mean "
                f"{config['mean']} and the standard deviation {config['std']}",
                RuntimeWarning,
                stacklevel=3,
            )
        shown = min(whole_number(shown, "shown"), len(chosen.paths))
        paths = _shown_first(chosen.paths, shown)
        about = {
            "finished": True,
            "model": name,
            "weights_from": weights_from,
            "photographs": [chosen.names[path] for path in paths],
            # A page that is sent alone says whose masks they are.
            **({} if masks is None else {"masks_from": Path(masks).name}),
            "photographs_chosen": chosen.describe(),
            "photographs_unreadable": json.dumps(chosen.unreadable),
            "preparation": json.dumps(config),
        }
        return cls(name, network, config, paths, shown, mask_paths, about)

    def key(self) -> str:
        """Return a hash of all that the numbers depend on."""
        dtype = next((str(parameter.dtype) for parameter in self.model.parameters()), "")
        files = [*self.paths, *self.masks.values()]
        facts = (
            weights_fingerprint(self.model), dtype, sorted(map(str, self.config.items())),
            [(str(path.resolve()), path.stat().st_size) for path in files], self.shown, _PROBES,
        )  # fmt: skip
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def of_rank(self) -> Sequence[Path]:
        """Return the photographs of this process,
        of several the share of its rank; rank 0 has those with maps.
        """
        if not _is_distributed():
            return self.paths
        others = self.paths[self.shown :]
        share = others[dist.get_rank() :: dist.get_world_size()]
        return [*self.paths[: self.shown], *share] if dist.get_rank() == 0 else share

    def images(self, paths: Sequence[Path]) -> Tensor:
        """Return photographs as the model takes them, (B, C, H, W)."""
        pictures = prepare([read_picture(path) for path in paths], self.config)
        return for_model(pictures, self.model)

    def run(self, paths: Sequence[Path]) -> None:
        """Run the model; raise ValueError if it does not take the images."""
        images = self.images(paths)
        try:
            self.model(images)
        except ReconstructionError:
            raise
        # Models raise all kinds of errors for images of another size, or for inputs that are
        # lacking.
        except Exception as error:
            raise ValueError(
                f"{self.name} does not take images of shape {tuple(images.shape)} (size=, --size "
                f"sets another): {first_line(error)}"
            ) from error

    def masks_of(self, paths: Sequence[Path]) -> Tensor:
        """Return the masks of photographs, (B, H, W), 0 for those that have none."""
        nothing = torch.zeros(tuple(self.config["input_size"][1:]))
        return torch.stack(
            [
                prepare_mask(self.masks[path], self.config).float()
                if path in self.masks
                else nothing
                for path in paths
            ]
        )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Return whether this process writes the page."""
    return not _is_distributed() or dist.get_rank() == 0


def _shown_first(paths: Sequence[Path], shown: int) -> list[Path]:
    """Put some photographs, evenly spread, before the others."""
    places = np.linspace(0, len(paths) - 1, min(shown, len(paths))).round().astype(int)
    first = [paths[place] for place in np.unique(places)]
    return [*first, *(path for path in paths if path not in first)]


def _earlier(store: Path, key: str) -> xr.DataTree | None:
    """Return a stored recording of the same model and photographs, if there is one."""
    try:
        tree = open_recording(store)
    except (StoreError, OSError):
        return None
    return tree if tree.attrs.get("looked_at") == key else None


def _measure(
    subject: _Subject, store: Path | None, batch_size: int, progress: bool | None
) -> xr.DataTree:
    """Record the model over the photographs; go on where a process that was killed had stopped."""
    model, paths, key = subject.model, subject.of_rank(), subject.key()
    about = {**subject.about, "looked_at": key}
    objects, reason, masks_of = _objects_of(subject)
    if objects is None:
        about["without_objects"] = reason
    else:
        about["objects"] = objects.meaning
    probes: list[str | Probe] = [*_PROBES, *([objects.probe] if objects else [])]
    costs, about["costs"] = _costs_of(subject, batch_size, progress)
    probes += [] if costs is None else [costs]
    unfinished = None if store is None else _unfinished(store)
    with (
        untouched(model),
        torch.no_grad(),
        record(
            model, store, mode="w", probes=probes, images=subject.shown, attrs=about
        ) as recorder,
        progress_bar(len(paths), subject.name, progress) as bar,
    ):
        done = 0 if unfinished is None else _continue(recorder, unfinished, key)
        bar.initial = bar.n = done
        written = time.monotonic()
        while done < len(paths):
            batch = paths[done : done + batch_size]
            if objects is not None:
                objects.masks = masks_of(batch)
            subject.run(batch)
            done += len(batch)
            if not recorder.layers:
                raise NoAttentionError(_without_attention(subject.name, recorder))
            bar.update(len(batch))
            if unfinished is not None and time.monotonic() - written > _SECONDS:
                keep_measurements(recorder, unfinished, (key, done))
                written = time.monotonic()
        recorder.mark(epoch=0)
        tree = recorder.tree if is_first_rank() else xr.DataTree()
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)
    return tree


def _costs_of(
    subject: _Subject, batch_size: int, progress: bool | None
) -> tuple[Probe | None, str]:
    """Measure the costs of heads over some of the photographs, evenly spread."""
    every = max(1, len(subject.paths) // _COSTED)
    paths = subject.paths[::every][:_COSTED]
    batches = [
        subject.images(paths[start : start + batch_size])
        for start in range(0, len(paths), batch_size)
    ]
    labels = class_labels(subject.model, paths)
    return costs_of_heads(subject.model, batches, labels, progress)


def _objects_of(
    subject: _Subject,
) -> tuple[Objects | None, str, Callable[[Sequence[Path]], Tensor | None]]:
    """Return the probe of attention on objects,
    why there is none, and a function that says where objects are.
    """
    if subject.masks:
        meaning = f"the masks in {subject.about['masks_from']!r}"
        return Objects(meaning), "", subject.masks_of
    if reason := why_no_saliency(subject.model, subject.images(subject.paths[:2])):
        return None, reason, lambda paths: None
    judged = frozenset(subject.paths[:_JUDGED])

    def salient(paths: Sequence[Path]) -> Tensor | None:
        if not judged.issuperset(paths):
            return None
        return salient_quarter(subject.model, subject.images(paths))

    meaning = "the quarter of a photograph that decides on the model's class (Grad-CAM)"
    return Objects(meaning), "", salient


def _unfinished(store: Path) -> Path:
    """Return the file of what a process has measured
    before it was killed; each rank has its own.
    """
    rank = f".rank{dist.get_rank()}" if _is_distributed() else ""
    return store.with_suffix(f"{rank}.unfinished")


def _continue(recorder: Recorder, unfinished: Path, key: str) -> int:
    """Take up what an earlier process has measured
    of the same photographs, and return their number.
    """
    if not unfinished.exists():
        return 0
    kept = continue_measuring(recorder, unfinished, lambda about: about[0] == key)
    return 0 if kept is None else int(kept[1])


def _without_attention(name: str, recorder: Recorder) -> str:
    reasons = "; ".join(f"{layer}: {reason}" for layer, reason in recorder.unsupported.items())
    if reasons:
        return f"no attention of {name} can be recorded: {reasons}"
    return (
        f"{name} has no attention; if it is a CNN, tcnn_model.reparameterize turns its last "
        "convolutions into attention heads, by default near the CNN's function and not equal to it "
        "(docs/transformed_cnns.md)"
    )
