"""Recording of a model's pooling while it trains, with saliency by every method scored at some epochs."""

import argparse
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from common.data import Loaders, Probed
from common.ending import refused
from common.output import RunOutput, write_whole
from common.training import warmup
from tcnn_model import EpochResult, finetune

__all__ = ["Follower", "Models", "Run"]

METHODS = (
    "class_attention",
    "rollout",
    "gradcam",
    "integrated_gradients",
    "input_x_gradient",
    "occlusion",
)
MEASURES = ("deletion_auc", "insertion_auc")
OF_MASKS = ("pointing_game", "energy_inside")
Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Run:
    """Model and its training; ``make`` builds it from the models trained before."""

    name: str
    make: Callable[[Models], nn.Module]
    epochs: int
    lr: float = 0.0
    probed: bool = True

    @property
    def slug(self) -> str:
        """Name for files."""
        return self.name.lower().replace(",", "").replace(" ", "_").replace("/", "_")


def chance(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """Return a map that says nothing: the same everywhere, with which every measure comes out as chance has it."""
    return torch.zeros(len(images), *images.shape[2:])


@dataclass(frozen=True)
class Follower:
    """Trainer, recorder and scorer of the study's runs; ``args`` is its command line."""

    loaders: Loaders
    probed: Probed
    output: RunOutput
    args: argparse.Namespace

    def follow(self, run: Run, model: nn.Module, title: str) -> xr.Dataset | None:
        """Train a model, record its pooling, and score all methods at some epochs: (epoch, attribution, image)."""
        results = self.epochs(run, model, title)
        if not run.probed:
            for _ in results:
                pass
            return None
        methods = usable_methods(model, self.probed.images[:1])
        # Indices of images in what is validated: the validation set in training, else the probed images alone.
        numbers = (
            self.probed.numbers if run.epochs else list(range(len(self.probed.images)))
        )[: self.args.show]
        recording: Any = nullcontext()
        if "class_attention" in methods:
            recording = tcnn_probe.record(
                model, self.output.beside(f"_{run.slug}.zarr"), images=numbers
            )
        parts = []
        with recording as recorder:
            for result in results:
                if recorder is not None:
                    recorder.mark(if_marked="skip", **asdict(result))
                if result.epoch % self.args.every == 0 or result.epoch == run.epochs:
                    part = (
                        self.output.checkpoints / f"{run.slug}-{result.epoch:04d}.zarr"
                    )
                    if not part.exists():
                        write_whole(self.score(model, methods, result), part)
                    parts.append(xr.open_zarr(part, consolidated=False).load())
        return xr.concat(parts, "epoch", data_vars="all", combine_attrs="override")

    def epochs(self, run: Run, model: nn.Module, title: str) -> Iterator[EpochResult]:
        """Train the model; without epochs, look at the probed images as it is."""
        if run.epochs:
            with refused(ValueError):
                yield from finetune(
                    model,
                    *self.loaders,
                    epochs=run.epochs,
                    lr=run.lr,
                    warmup_epochs=warmup(run.epochs),
                    checkpoint=self.output.checkpoints / f"{run.slug}.pt",
                    device=self.args.device,
                    amp=self.args.amp,
                    seed=self.args.seed,
                    name=title,
                )
            return
        logits, labels = self.logits(model.eval()), self.probed.labels
        right = float((logits.argmax(1) == labels).float().mean())
        yield EpochResult(
            0,
            math.nan,
            math.nan,
            float(F.cross_entropy(logits, labels)),
            right,
            math.nan,
        )

    def score(
        self, model: nn.Module, methods: list[str], result: EpochResult
    ) -> xr.Dataset:
        """Return every measure of every method, the maps, and the probabilities of all classes, at this epoch."""
        images, labels, masks = (
            self.probed.images,
            self.probed.labels,
            self.probed.masks,
        )
        side = max(2, images.shape[-1] // 4)
        covers = {"window": side, "stride": side if self.args.small else side // 2}
        options = {
            "integrated_gradients": {"n_steps": self.args.steps},
            "occlusion": covers,
        }
        options = {
            name: of_method for name, of_method in options.items() if name in methods
        }
        batch = {"batch_size": self.args.batch_size}
        maps = tcnn_probe.saliency(
            model, images, labels, method=methods, **batch, **options
        )
        scored = {name: maps[name] for name in methods} | {"chance": chance}
        measures = [*MEASURES, *(OF_MASKS if masks is not None else ())]
        scores = tcnn_probe.faithfulness(
            model,
            images,
            scored,
            labels,
            masks=masks,
            metrics=[*measures, "rank_correlation"],
            steps=self.args.steps,
            tolerance=self.args.tolerance,
            **batch,
        )
        if masks is not None:
            exact = tcnn_probe.faithfulness(
                model,
                images,
                scored,
                labels,
                masks=masks,
                metrics="pointing_game",
                **batch,
            )
            scores["pointing_game_exact"] = exact.pointing_game  # without tolerance
        scores["saliency"] = (
            maps.to_dataarray("attribution")
            .reindex(attribution=scores.attribution)
            .astype("float32")
        )
        # A forward of the model itself would be recorded as one of validation.
        unrecorded = copy.deepcopy(model).eval()
        scores["probability"] = (
            ("image", "class"),
            self.logits(unrecorded).softmax(1).numpy(),
        )
        scores["top1"] = result.top1
        return scores.expand_dims(epoch=[result.epoch])

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        """Return the model's scores of the probed images, shape (B, K)."""
        batches = self.probed.images.split(self.args.batch_size)
        return torch.cat(
            [model(images.to(self.args.device)).float().cpu() for images in batches]
        )


def usable_methods(model: nn.Module, image: Tensor) -> list[str]:
    """Return the methods that fit this model: attention that leads to no class token, say, has no map."""
    usable, side = [], image.shape[-1] // 2
    quick: Any = {
        "integrated_gradients": {"n_steps": 1},
        "occlusion": {"window": side, "stride": side},
    }
    for method in METHODS:
        try:
            tcnn_probe.saliency(
                model, image, method=method, progress=False, **quick.get(method, {})
            )
            usable.append(method)
        except ValueError as error:
            print(f"{type(model).__name__}: without {method} ({error})")
    return usable
