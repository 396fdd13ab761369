"""The first hour: each stumble of a new user, tried again as the documents say it. A try is a function and its number.

``@stumble(4)`` puts a function into the table of tries; it may ask for ``tmp_path``, as any test. Tries are shallow:
numbers are checked where the parts are tested.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tcnn_model
import tcnn_probe
from tcnn_probe.command_line import main

TRIES: list[Any] = []
ARRAY = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def stumble(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A try of a numbered stumble."""

    def add(attempt: Callable[..., None]) -> Callable[..., None]:
        TRIES.append(pytest.param(attempt, id=f"{number}-{attempt.__name__}"))
        return attempt

    return add


def vit(**options: Any) -> nn.Module:
    small = {"patch_size": 8, "img_size": (32, 48), "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **small | options).eval()


def recorded(model: nn.Module, path: Path | None = None, *, images: Tensor = IMAGES, **options: Any) -> Any:
    """A recorder of one validation, and one mark."""
    with tcnn_probe.record(model.eval(), path, **options) as recorder, torch.no_grad():
        model(images)
        recorder.mark(epoch=0, top1=0.5)
    return recorder


class Mixer(nn.Module):
    """Written by hand: patches, other tokens, and what is made of them."""

    def __init__(self, way: Callable[["Mixer", Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.qkv, self.way = nn.Conv2d(3, 12, 8, 8), nn.Linear(12, 36), way
        self.more, self.codes = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(7, 12))

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).flatten(2).mT

    def heads(self, tokens: Tensor) -> Tensor:
        return self.qkv(tokens).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def class_token_last(m: Mixer, x: Tensor) -> Tensor:
    return scaled_dot_product_attention(*m.heads(torch.cat([m.tokens(x), m.more.expand(len(x), -1, -1)], 1)))


def linear_attention(m: Mixer, x: Tensor) -> Tensor:
    q, k, v = m.heads(m.tokens(x))
    return q.softmax(-1) @ (k.transpose(-2, -1) @ v)


def soft_assignment(m: Mixer, x: Tensor) -> Tensor:
    return (m.tokens(x) @ m.codes.T).softmax(-1) @ m.codes


def written(m: Mixer, x: Tensor) -> Tensor:
    """Five tokens and the patches, written into one array: nothing shows which is which."""
    tokens = x.new_zeros(len(x), 29, 12)
    tokens[:, 5:] = m.tokens(x)
    return scaled_dot_product_attention(*m.heads(tokens))


# 1. Attention maps of any model, now


@stumble(1)
def from_photograph_to_picture_in_three_lines() -> None:
    maps = tcnn_probe.attention_maps(vit(), ARRAY, queries=[(16, 24)])
    assert len(tcnn_probe.plot.attention_maps(maps).axes) == 1 + 2 * 3


@stumble(1)
def maps_of_fused_attention_are_not_empty_and_sum_to_one() -> None:
    node = tcnn_probe.attention_maps(model := vit(), IMAGES)["3x4x6"]
    assert model.blocks[0].attn.fused_attn
    assert (node.attention.sum(("y", "x")) < 1).all()  # the rest goes to the class token
    assert node.attention.sizes == {"image": 2, "layer": 2, "head": 3, "query_y": 4, "query_x": 6, "y": 4, "x": 6}


@stumble(1)
def the_class_token_has_maps_and_a_picture() -> None:
    maps = tcnn_probe.attention_maps(vit(), IMAGES, queries="class")
    assert set(maps["3x4x6"].data_vars) == {"class_attention"}
    tcnn_probe.plot.attention_maps(maps)


@stumble(1)
def windows_of_swin_lie_in_the_image() -> None:
    options = {"patch_size": 4, "embed_dim": 8, "depths": (2,), "num_heads": (2,), "img_size": 28, "window_size": 3}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **options)
    node = tcnn_probe.attention_maps(swin, torch.randn(1, 3, 28, 28), queries=[(0, 0)])["2x7x7"]
    assert node.attention[0, 0, 0, 0, 3:].sum() == 0  # outside of the first window
    assert node.attention[0, 0, 0, 0, :3, :3].sum() == pytest.approx(1, abs=1e-5)


@stumble(1)
def what_is_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match="GB: give queries="):
        tcnn_probe.attention_maps(vit(), IMAGES, max_bytes=1000)


@stumble(1)
def a_cnn_has_no_maps_and_says_so() -> None:
    with pytest.raises(ValueError, match="no layer of this ResNet has attention maps"):
        tcnn_probe.attention_maps(timm.create_model("resnet10t"), IMAGES)


# 2. Models of transformers and torchvision


def of_transformers(kind: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 8}
    config |= {"image_size": 32, "patch_size": 8}
    return getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config | options))


@stumble(2)
def a_vit_of_transformers_called_by_keyword() -> None:
    model = of_transformers("ViT").eval()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(pixel_values=torch.randn(2, 3, 32, 32))
        recorder.mark(epoch=0)
    assert recorder.dataset.attention_distance.notnull().all()


@stumble(2)
def what_an_image_processor_gives() -> None:
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
    assert "3x4x4" in tcnn_probe.attention_maps(of_transformers("ViT"), inputs)


@stumble(2)
def dinov2_with_registers() -> None:
    model = of_transformers("Dinov2WithRegisters", num_register_tokens=4)
    assert "class_attention" in tcnn_probe.attention_maps(model, torch.randn(1, 3, 32, 32))["3x4x4"]


@stumble(2)
def a_vit_of_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(32, 8, num_layers=1, num_heads=3, hidden_dim=12, mlp_dim=8)
    assert recorded(model, images=torch.randn(2, 3, 32, 32)).dataset.attention_distance.notnull().all()


# 3. What is missing is said once, with the remedy


@stumble(3)
def a_grid_that_was_not_found_is_a_warning_with_the_remedy() -> None:
    with pytest.warns(RuntimeWarning, match=r"29 keys: no grid found; prefix_tokens=5 would make it 4 x 6"):
        assert recorded(Mixer(written)).dataset.attention_distance.isnull().all()


@stumble(3)
def the_remedy_helps() -> None:
    assert recorded(Mixer(written), prefix_tokens=5).dataset.attention_distance.notnull().all()
    assert "3x4x6" in tcnn_probe.attention_maps(Mixer(written), IMAGES, prefix_tokens=5)


@stumble(3)
def a_class_token_at_the_end_is_found() -> None:
    model = Mixer(class_token_last)
    found, said = (tcnn_probe.attention_maps(model, IMAGES, class_token=said)["3x4x6"] for said in (None, "last"))
    xr.testing.assert_identical(found.to_dataset(), said.to_dataset())
    assert "class_attention" in found


# 4. Keys are tokens


@stumble(4)
def linear_attention_is_no_attention_between_tokens() -> None:
    with pytest.raises(ValueError, match="softmax over channels"):
        tcnn_probe.attention_maps(Mixer(linear_attention), IMAGES)


@stumble(4)
def soft_assignment_is_no_attention_between_tokens() -> None:
    with pytest.raises(RuntimeError, match="the same for all images"):
        recorded(Mixer(soft_assignment))


# 7. Images as people have them


@stumble(7)
def pil_arrays_names_and_many_of_them_give_the_same_maps(tmp_path: Path) -> None:
    picture = Image.fromarray(ARRAY)
    picture.save(name := tmp_path / "a photograph.png")
    chw = torch.from_numpy(ARRAY).permute(2, 0, 1)
    model = vit()
    expected = tcnn_probe.attention_maps(model, picture)["3x4x6"].attention
    for images in (ARRAY, ARRAY[None], chw, name, str(name), [picture], [str(name)]):
        np.testing.assert_array_equal(tcnn_probe.attention_maps(model, images)["3x4x6"].attention, expected)


@stumble(7)
def bytes_as_floats_are_refused_everywhere() -> None:
    images, model, label = torch.full((1, 3, 32, 48), 200.0), vit(), torch.tensor([1])
    for use in (
        lambda: tcnn_probe.attention_maps(model, images),
        lambda: tcnn_probe.saliency(model, images, method="rollout"),
        lambda: tcnn_probe.corrupt(images, "fog", 1),
        lambda: tcnn_probe.fgsm(model, images, label),
    ):
        with pytest.raises(ValueError, match="200"):
            use()


@stumble(7)
def saliency_and_corrupt_take_a_picture() -> None:
    assert tcnn_probe.saliency(vit(), ARRAY, method="rollout").sizes["image"] == 1
    assert tcnn_probe.corrupt(Image.fromarray(ARRAY), "fog", 1).size == (56, 40)


@stumble(7)
def a_picture_for_somebody_elses_model_names_the_convention() -> None:
    with pytest.raises(TypeError, match=r"give a floating-point tensor \(B, C, H, W\), normalised"):
        tcnn_probe.attention_maps(Mixer(class_token_last), ARRAY)


# 11. A shell, and loggers


@stumble(11)
def show_prints_layers_epochs_and_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(vit(), path := tmp_path / "of a run.zarr")
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("1 marks, epoch 0 to 0", "blocks.1.attn", "top1 0.5", "types of heads"))


@stumble(11)
def two_runs_are_compared_and_one_is_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(tmp_path / f"{name}.zarr") for name in "ab")
    cnn = tcnn_model.reparameterize(timm.create_model("resnet10t", num_classes=5))
    for path in (first, second):
        recorded(cnn, Path(path), images=torch.randn(1, 3, 64, 64))
    assert main(["compare", first, second]) == 0
    assert "top1 0.5 - 0.5 = 0" in capsys.readouterr().out
    assert main(["plot", first, "gate", "-o", str(tmp_path / "gate.png")]) == 0
    assert (tmp_path / "gate.png").stat().st_size > 1000


@stumble(11)
def what_is_no_store_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no store")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "nowhere"):
        assert main(["show", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@stumble(11)
def scalars_are_flat_numbers_for_a_logger(tmp_path: Path) -> None:
    recorded(vit(), path := tmp_path / "run.zarr")
    flat = tcnn_probe.scalars(xr.open_zarr(path))
    assert flat["top1"] == 0.5
    assert all(type(value) is float for value in flat.values())


# 5. Run it twice


@stumble(5)
def a_script_runs_twice(tmp_path: Path) -> None:
    for _ in range(2):
        recorded(vit(), tmp_path / "run.zarr", mode="w")
    assert xr.open_zarr(tmp_path / "run.zarr").epoch.values.tolist() == [0]


@stumble(5)
def what_is_there_is_known_before_work_and_named_with_the_remedy(tmp_path: Path) -> None:
    recorded(model := vit(), tmp_path / "run.zarr")
    recorder = tcnn_probe.record(model, tmp_path / "run.zarr")
    assert recorder.epochs == (0,)
    model(IMAGES)
    with pytest.raises(ValueError, match=r"already marked.*mode='w'.*recorder\.epochs.*if_marked='skip'"):
        recorder.mark(epoch=0)
    recorder.mark(epoch=0, if_marked="skip")
    recorder.remove()


@stumble(5)
def a_recording_is_not_continued_by_mistake(tmp_path: Path) -> None:
    recorded(vit(), tmp_path / "run.zarr")
    with pytest.raises(tcnn_probe.StoreError, match="mode"):
        tcnn_probe.record(vit(), tmp_path / "run.zarr", mode="x")


# 6. Forgetting


@stumble(6)
def forwards_that_nobody_marked_are_told_of() -> None:
    with pytest.warns(RuntimeWarning, match="mark"), tcnn_probe.record(model := vit()):
        model(IMAGES)


@stumble(6)
def ablate_acts_without_with_until_it_is_removed() -> None:
    model = vit()
    with torch.no_grad():
        before = model(IMAGES)
        ablation = tcnn_probe.ablate(model, {"blocks.0.attn": [0]})
        assert not torch.equal(model(IMAGES), before)
        ablation.remove()
        assert torch.equal(model(IMAGES), before)


@stumble(6)
def a_second_evaluation_is_paused() -> None:
    with tcnn_probe.record(model := vit()) as recorder, torch.no_grad():
        model(IMAGES)
        with recorder.pause():
            model(IMAGES)
        recorder.mark(epoch=0)
    assert (recorder.dataset.images == len(IMAGES)).all()


@stumble(6)
def maps_of_shuffled_images_are_told_of() -> None:
    with tcnn_probe.record(model := vit(), images=1) as recorder, torch.no_grad():
        model(IMAGES)
        recorder.mark(epoch=0)
        model(IMAGES.flip(0))
        with pytest.warns(RuntimeWarning, match="images"):
            recorder.mark(epoch=1)


# 8. Saliency where it belongs


@stumble(8)
def gradcam_of_a_vision_transformer_and_of_swin() -> None:
    options = {"patch_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "img_size": 28, "window_size": 7}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **options)
    for model, images in ((vit(), IMAGES), (swin, torch.randn(2, 3, 28, 28))):
        maps = tcnn_probe.saliency(model, images, method="gradcam")
        assert maps.shape == (2, *images.shape[2:])


@stumble(8)
def one_method_of_several_is_left_out_with_the_reason() -> None:
    cnn = timm.create_model("resnet10t", num_classes=5)
    with pytest.warns(RuntimeWarning, match="class_attention"):
        maps = tcnn_probe.saliency(cnn, IMAGES, method=["class_attention", "gradcam"])
    assert set(maps.data_vars) == {"gradcam"}


# 10. What one sees


@stumble(10)
def a_recorder_shows_itself(tmp_path: Path) -> None:
    recorder = recorded(vit(), tmp_path / "run.zarr")
    for shown in (repr(recorder), recorder._repr_html_()):
        assert all(text in shown for text in ("blocks.1.attn", "run.zarr"))


@stumble(10)
def there_is_a_version_and_plot_lists_plots() -> None:
    assert tcnn_probe.__version__
    assert set(dir(tcnn_probe.plot)) == set(tcnn_probe.plot.__all__)


@stumble(10)
def epochs_are_whole_on_the_axis() -> None:
    with tcnn_probe.record(model := vit()) as recorder, torch.no_grad():
        for epoch in range(3):
            model(IMAGES)
            recorder.mark(epoch=epoch)
    axes = tcnn_probe.plot.evolution(recorder.dataset.entropy)
    assert axes.get_title()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


# 12. Messages


@stumble(12)
def a_mark_along_something_else_names_it() -> None:
    recorder = tcnn_probe.record(vit())
    with pytest.raises(TypeError, match="along='step'"):
        recorder.mark(step=1)
    recorder.remove()


@stumble(12)
def few_epochs_say_what_to_change() -> None:
    loader = [(IMAGES, torch.tensor([0, 1]))]
    with pytest.raises(ValueError, match="warmup_epochs"):
        next(iter(tcnn_model.finetune(vit(), loader, loader, epochs=2)))


@stumble(12)
def a_layer_without_attention_is_no_reason_to_convert_a_cnn() -> None:
    recorder = tcnn_probe.record(model := vit(), layers="blocks.0.mlp")
    model(IMAGES)
    with pytest.raises((ValueError, RuntimeError)) as error:
        recorder.mark(epoch=0)
    recorder.remove()
    assert "reparameterize" not in str(error.value)


@stumble(12)
def a_target_of_a_model_without_a_classifier() -> None:
    with pytest.raises(ValueError, match="features"):
        tcnn_probe.saliency(vit(num_classes=0), IMAGES, target=313, method="gradcam")


# 13. Whatever trains the model


@stumble(13)
def a_loop_of_somebody_elses_is_recorded_where_its_validation_ends(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("tcnn_probe.callbacks.huggingface", reason="transformers is not installed")
    callback, state = callbacks.RecordCallback(tmp_path / "run.zarr"), SimpleNamespace(global_step=7)
    callback.on_train_begin(None, state, None, model=(model := vit()))
    model(IMAGES)
    callback.on_evaluate(None, state, None, metrics={"eval_loss": 0.25, "eval/top-1": 0.5, "note": "text"})
    callback.on_train_end(None, state, None)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert (ds.step.values, ds.eval_loss.values, ds.eval_top_1.values) == ([7], [0.25], [0.5])
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("attempt", TRIES)
def test_stumble(attempt: Callable[..., None], request: pytest.FixtureRequest) -> None:
    attempt(**{name: request.getfixturevalue(name) for name in inspect.signature(attempt).parameters})
