"""Obstacles of a new user's first hour that belong to no single part, tested as documented."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tcnn_probe
from tcnn_probe import evaluation
from tcnn_probe.command_line import main

# PIL and imageio give images of bytes like this one.
ARRAY = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def vit(**options: Any) -> nn.Module:
    small = {
        "patch_size": 8,
        "img_size": (32, 48),
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 5,
    }
    return timm.create_model("vit_tiny_patch16_224", **small | options).eval()


class Written(nn.Module):
    """Five tokens and the patches written into one array, which does not show where the patches are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 8, 8)
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.new_zeros(len(x), 29, 12)
        tokens[:, 5:] = self.stem(x).flatten(2).mT
        return scaled_dot_product_attention(
            *self.qkv(tokens).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        )


def test_output_of_an_image_processor_is_accepted() -> None:
    transformers = pytest.importorskip("transformers")
    config = {
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 8,
    }
    model = transformers.ViTModel(
        transformers.ViTConfig(image_size=32, patch_size=8, **config)
    )
    # Image processors return a dictionary like this one.
    assert "3x4x4" in tcnn_probe.attention_maps(
        model, {"pixel_values": torch.randn(1, 3, 32, 32)}
    )


def test_option_named_by_a_warning_is_accepted_by_maps() -> None:
    # The warning for this model recommends the option prefix_tokens.
    assert "3x4x6" in tcnn_probe.attention_maps(Written(), IMAGES, prefix_tokens=5)


def test_bytes_as_floats_are_refused() -> None:
    # An image in [0, 1], normalized or not, is below 200, which can only be a byte.
    images = torch.full((1, 3, 32, 48), 200.0)
    model = vit()
    label = torch.tensor([1])
    for use in (
        lambda: tcnn_probe.attention_maps(model, images),
        lambda: tcnn_probe.saliency(model, images, method="rollout"),
        lambda: evaluation.corrupt(images, "fog", 1),
        lambda: evaluation.fgsm(model, images, label),
    ):
        with pytest.raises(ValueError, match="200"):
            use()


def test_saliency_accepts_a_picture() -> None:
    assert tcnn_probe.saliency(vit(), ARRAY, method="rollout").sizes["image"] == 1


def test_a_target_for_a_model_without_a_classifier_is_refused() -> None:
    # 313 is a class of ImageNet, as users copy it from an example.
    with pytest.raises(ValueError, match="features"):
        tcnn_probe.saliency(vit(num_classes=0), IMAGES, target=313, method="gradcam")


def test_a_path_without_a_store_is_answered_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no store")
    # argparse uses 2 for wrong usage.
    assert main(["show", str(tmp_path / "notes.txt")]) == 2
    # The output is a single line, without a traceback.
    assert capsys.readouterr().err.count("\n") == 1


def test_ticks_of_epochs_are_whole_numbers() -> None:
    gates = xr.DataArray(
        # For three epochs, matplotlib would choose ticks at halves.
        np.ones((3, 2, 2)),
        {"epoch": range(3), "layer": ["a", "b"]},
        ("epoch", "layer", "head"),
    )
    assert all(
        float(tick).is_integer()
        for tick in tcnn_probe.plot.evolution(gates.rename("gate")).get_xticks()
    )


def test_a_training_loop_is_recorded_at_the_end_of_its_validation(
    tmp_path: Path,
) -> None:
    callbacks = pytest.importorskip(
        "tcnn_probe.callbacks.huggingface", reason="transformers is not installed"
    )
    callback = callbacks.RecordCallback(tmp_path / "run.zarr")
    state = SimpleNamespace(global_step=7)
    callback.on_train_begin(None, state, None, model=(model := vit()))
    model(IMAGES)
    callback.on_evaluate(
        None,
        state,
        None,
        # Other loops' names have slashes and hyphens, and values may not be numbers.
        metrics={"eval_loss": 0.25, "eval/top-1": 0.5, "note": "text"},
    )
    callback.on_train_end(None, state, None)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.step.values == [7]
    assert ds.eval_loss.values == [0.25]
    assert ds.eval_top_1.values == [0.5]
    assert not model._forward_pre_hooks
