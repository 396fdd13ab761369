"""Options that the studies refuse before they train or write;
killed runs; a user's own models and images.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from matplotlib.figure import Figure

import attention_maps
import class_attention_saliency
import representations
from common.output import ended
from tcnn_probe.images import as_images
from tests.studies.test_small_forms import STUDIES

MODEL_FIRST = "need --model, the name of a timm CNN"
SINGLE = ("cait_attention", "layer_scale", "resmlp_weights")
NOT_ONE_CNN = (
    *SINGLE,
    "class_attention_saliency",
    "coarse_labels",
    "ablations",
    "content_control",
    "content_or_mixing",
    "cutmix_locality",
    "dense_features",
    "distillation",
    "object_heads",
    "pretrained_heads",
    "segmentation_attention",
    "training_health",
)
TOGETHER = "--data and --model belong together"
FEW = ["--workers", "0", "--device", "cpu"]
QUICK = [*FEW, "--images", "2", "--steps", "3", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no figures, which take long; test_small_forms.py writes those of every study."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **options: None)
    monkeypatch.setattr(attention_maps, "draw", lambda *_: Figure())


@pytest.mark.parametrize(
    ("study", "options", "message"),
    [
        *((name, "--data .", MODEL_FIRST) for name in STUDIES if name not in NOT_ONE_CNN),
        *((name, "--pretrained", "--model and --pretrained belong together") for name in SINGLE),
        (
            "layer_scale",
            "--model test_vit --pretrained",
            "--model and --image belong together",
        ),
        (
            "resmlp_weights",
            "--model resmlp_12_224 --pretrained no.pth",
            "no file 'no.pth'",
        ),
        ("gating_evolution", "--pretrained", MODEL_FIRST),
        (
            "gating_evolution",
            "--data no/where --model resnet18",
            "--data: there is no folder 'no/where'",
        ),
        ("gating_evolution", "--data . --model resnet18", "found in .: "),
        ("gating_evolution", "--num-classes 3", "goes with --data"),
        ("gating_evolution", "--device abacus", "no device 'abacus' here"),
        # An option without effect would seem to have one.
        ("ablations", "--device cpu", "unrecognized arguments: --device cpu"),
        (
            "gating_evolution",
            "--batch-size 0",
            "--batch-size: expected an integer from 1, got 0",
        ),
        ("gating_evolution", "--lr -1", "--lr: expected a number above 0, got -1"),
        ("gating_evolution", "--img-size 27", "28 pixels or more"),
        (
            "gating_evolution",
            f"--model resnet18 --pretrained {__file__}",
            "holds no weights",
        ),
        ("gating_evolution", "--data . --model resnet18 --small", "for the digits"),
        ("gating_evolution", "--model nope", "nope"),
        (
            "gating_evolution",
            "--limit 39",
            "gating_evolution.py: expected a limit of 40 digits or more",
        ),
        (
            "gating_evolution",
            "--model botnet26t_256 --limit 120",
            "no convolution to reparameterize",
        ),
        ("gating_evolution", "--resume --overwrite", "not allowed with"),
        (
            "attention_maps",
            "--small --epoch 3",
            "--epoch: expected 0 to 2, the epochs of fine-tuning, got 3",
        ),
        (
            "attention_maps",
            "--query 64,3",
            "--query: expected a pixel inside 64 x 64, got (64, 3)",
        ),
        ("attention_maps", "--query 3", "argument --query: invalid pixel value: '3'"),
        ("attention_maps", f"--image {__file__}", "argument --image: no image: "),
        (
            "dense_features",
            "--data .",
            "--data, --pretrained: the masks are those of the digits",
        ),
        (
            "object_heads",
            "--data .",
            "--data, --pretrained: the masks are those of the digits",
        ),
        ("disagreement", "--pretrained", MODEL_FIRST),
        ("robustness", "--augment light", "--augment goes with --data"),
        ("robustness", "--images 1", "--images: expected an integer from 2"),
        ("robustness", "--variant imagenet-a", "expected NAME=FOLDER with a folder"),
        (
            "robustness",
            f"--variant imagenet-a={Path(__file__).parent}",
            "goes with --data",
        ),
        ("class_attention_saliency", "--data .", TOGETHER),
        ("class_attention_saliency", "--pretrained", TOGETHER),
        (
            "class_attention_saliency",
            "--data no/where --model test_resnet",
            "no folder 'no/where'",
        ),
        (
            "class_attention_saliency",
            "--data . --model test_resnet --small",
            "for the digits",
        ),
        ("class_attention_saliency", "--epochs 0", "is for a trained model"),
        (
            "class_attention_saliency",
            "--data FOLDER --model test_resnet --pretrained no.pth",
            "no file 'no.pth'",
        ),
        (
            "class_attention_saliency",
            "--data FOLDER --model test_resnet --num-classes 1",
            "integer from 2, got 1",
        ),
        (
            "class_attention_saliency",
            "--data FOLDER --model test_vit --img-size 33",
            "no images of 33 x 33 pixels",
        ),
        (
            "robustness",
            "--data FOLDER --model test_resnet --variant imagenet-a=.",
            "1000 classes, this has 2",
        ),
    ],
)
def test_wrong_options_say_so_and_write_nothing(
    study: str,
    options: str,
    message: str,
    tmp_path: Path,
    image_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = [str(image_folder) if word == "FOLDER" else word for word in options.split()]
    if "FOLDER" in options:
        arguments += ["--workers", "0"]
    try:
        # argparse refuses by exiting, the study itself by returning a code.
        code = ended(importlib.import_module(study).main, [*arguments, "--out", str(out)])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_killed_run_resumes_to_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = "--limit 40 --img-size 32 --batch-size 16 --epochs 2 --cnn-epochs 1"
    tiny = [*small.split(), "--device", "cpu", "--seed", "3"]
    uninterrupted = tmp_path / "whole"
    killed = tmp_path / "killed"
    attention_maps.main([*tiny, "--out", str(uninterrupted)])
    save = torch.save

    def dies(state: object, path: Path) -> None:
        # Ctrl-C comes after the loop's checkpoint and the recorder's mark of epoch 1, but before
        # this file is written.
        if path.name.startswith("tcnn-0001"):
            raise KeyboardInterrupt
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dies)
        # 128 + SIGINT is the exit status of a program that Ctrl-C ended.
        assert ended(attention_maps.main, [*tiny, "--out", str(killed)]) == 130
    assert ended(attention_maps.main, ["--resume", "--epochs", "3", "--out", str(killed)]) == 2
    # All other options are read from the run.
    attention_maps.main(["--resume", "--out", str(killed)])
    stores = [
        xr.open_zarr(out / "attention_maps_recording.zarr").load()
        for out in (killed, uninterrupted)
    ]
    xr.testing.assert_allclose(*stores, rtol=1e-6)
    for epoch in (0, 1, 2):
        name = f"attention_maps_checkpoints/tcnn-{epoch:04d}.pt"
        torch.testing.assert_close(
            *(torch.load(out / name, weights_only=True) for out in (killed, uninterrupted))
        )


def test_a_users_own_weights_data_and_image(tmp_path: Path, image_folder: Path) -> None:
    torch.save(
        timm.create_model("test_resnet", num_classes=2).state_dict(),
        tmp_path / "own.pth",
    )
    weights = tmp_path / "own.pth"
    image = image_folder / "val" / "dog" / "1.png"
    options = f"--model test_resnet --pretrained {weights} --data {image_folder}"
    options += f" --image {image} --epoch 0 1 --out {tmp_path / 'out'}"
    # The query is in the last row and first column of the image.
    options += " --img-size 64 --epochs 1 --batch-size 4 --query 63,0"
    attention_maps.main([*options.split(), *FEW])
    ds = xr.open_zarr(tmp_path / "out" / "attention_maps.zarr").load()
    assert ds.epoch.values.tolist() == [0, 1]
    assert ds.name.values.tolist() == ["1.png"]
    assert (ds.query_y == ds.sizes["y"] - 1).all()
    assert (ds.query_x == 0).all()
    xr.testing.assert_allclose(ds.attention.sum(["y", "x"]) + ds.outside, xr.ones_like(ds.outside))
    assert (xr.open_zarr(tmp_path / "out" / "attention_maps_recording.zarr").images == 8).all()


def scores(out: Path) -> xr.DataTree:
    with xr.open_datatree(out / "class_attention_saliency.zarr", engine="zarr") as tree:
        return tree.load()


def test_saliency_of_a_trained_transformer(
    tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "vit.pth")
    weights = tmp_path / "vit.pth"
    out = tmp_path / "out"
    options = f"--model test_vit --pretrained {weights} --data {image_folder}"
    class_attention_saliency.main([*options.split(), *QUICK, "--out", str(out)])
    ds = scores(tmp_path / "out")["test_vit"].dataset
    methods = [
        "class_attention",
        "rollout",
        "gradcam",
        "integrated_gradients",
        "input_x_gradient",
        "occlusion",
        "chance",
    ]
    assert ds.attribution.values.tolist() == methods
    assert "pointing_game" not in ds
    # This is the image size that test_vit was made for.
    assert dict(ds.sizes)["y"] == 160
    assert "did NOT learn" not in capsys.readouterr().out  # nothing was trained


# After one epoch Grad-CAM may be zero everywhere.
@pytest.mark.filterwarnings("ignore:constant maps:RuntimeWarning")
def test_a_convnet_gets_an_attention_pool(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # test_saliency_of_a_trained_transformer draws them.
    for draw in ("draw_faithfulness", "draw_maps"):
        monkeypatch.setattr(class_attention_saliency, draw, lambda *_: Figure())
    small = f"--model test_resnet --data {image_folder} --img-size 32 --epochs 1"
    options = [*small.split(), *QUICK]
    class_attention_saliency.main([*options, "--out", str(tmp_path / "out")])
    tree = scores(tmp_path / "out")
    assert set(tree.children) == {"test_resnet", "test_resnet, attention pooling"}
    plans = [
        class_attention_saliency.plan(class_attention_saliency.parse([*options, "--seed", "7"]))
        for _ in "ab"
    ]
    # Fine-tuning mixes images as in the papers: the targets are shares of the two classes.
    _, shares = next(iter(plans[0][1][0]))
    assert shares.shape == (4, 2)
    # The new classifier is drawn from the seed.
    first, second = (runs[0].make({}) for runs, _ in plans)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_few_images_have_few_neighbours(tmp_path: Path, image_folder: Path) -> None:
    """Each of eight validation images has seven neighbours,
    and the study does not fail after its trainings.
    """
    small = f"--model test_resnet --data {image_folder} --img-size 32 --epochs 1"
    representations.main([*small.split(), *FEW, "--out", str(tmp_path / "out")])
    ds = xr.open_zarr(tmp_path / "out" / "representations.zarr").load()
    assert ds.knn_correct.isin([0, 1]).all()


def test_the_trunk_behind_an_attention_pool_is_frozen() -> None:
    model = timm.create_model("test_resnet", num_classes=2)
    pooled = class_attention_saliency.with_attention_pool(model).train()
    assert {name.split(".")[0] for name, p in pooled.named_parameters() if p.requires_grad} == {
        "global_pool",
        "fc",
    }
    before = {name: buffer.clone() for name, buffer in pooled.named_buffers()}
    # In training mode, batch norms that are not frozen would update their statistics.
    pooled(torch.randn(4, 3, 32, 32))
    torch.testing.assert_close(dict(pooled.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("study", ["cait_attention", "layer_scale"])
def test_a_trained_model_is_analysed_unchanged(
    study: str,
    tmp_path: Path,
    image_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The model has the name of a published one, whose weights must not be downloaded here.
    create = timm.create_model
    narrow = {"embed_dim": 12, "depth": 1}
    model = create("cait_xxs24_224", **narrow).eval()
    weights = str(tmp_path / "own.pth")
    torch.save(model.state_dict(), weights)
    monkeypatch.setattr(
        timm, "create_model", lambda name, **options: create(name, **narrow, **options)
    )
    image = image_folder / "val" / "dog" / "1.png"
    main = importlib.import_module(study).main
    files = f"--pretrained {weights} --image {image} --device cpu"
    options = f"--model cait_xxs24_224 {files} --out {tmp_path / 'out'}"
    assert ended(main, options.split()) == 0
    results = xr.open_zarr(tmp_path / "out" / f"{study}.zarr")
    if study == "cait_attention":
        with torch.no_grad():
            expected = model(as_images([image], model)).softmax(1)
        # The study runs batches of another size, so float32 sums have another order.
        np.testing.assert_allclose(results.probability, expected, rtol=1e-4)
        # CaiT has two blocks of class attention, and 224 / 16 = 14 patches a side.
        assert dict(results.class_attention.sizes) == {
            "image": 1,
            "layer": 2,
            "head": 4,
            "y": 14,
            "x": 14,
        }
    else:
        assert results.layer.values.tolist() == [
            "blocks.0",
            "blocks_token_only.0",
            "blocks_token_only.1",
        ]
        assert (results.residual_ratio < 1e-2).all()  # LayerScale begins at 1e-5
    # This model has neither class attention nor LayerScale.
    torch.save(create("test_resnet").state_dict(), weights)
    monkeypatch.setattr(timm, "create_model", create)
    options = f"--model test_resnet {files} --out {tmp_path / 'other'}"
    assert ended(main, options.split()) == 2
    assert "ResNet" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
