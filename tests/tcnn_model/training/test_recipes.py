"""Recipes match the papers, and train a small model of their family."""

import dataclasses
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import register_model
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock

from tcnn_model.training import build
from tcnn_model.training.command import main
from tcnn_model.training.config import (
    Config,
    as_toml,
    parse,
    read_toml,
    recipe_names,
    recipe_settings,
)

# Models are the narrowest and shallowest of each family, as a recipe does not depend on the size.
RESNET = ["--model-options", "layers=[1,1,1,1]", "channels=[8,8,16,16]"]
VIT = ["--model-options", "embed_dim=24", "depth=2", "num_heads=3"]
CONVNET = ["--model-options", "embed_dim=16", "depth=2"]


@register_model
def resmlp_tiny(pretrained: bool = False, **options: Any) -> MlpMixer:
    """Build a small ResMLP, as timm has no options that make its own smaller."""
    shape = {"patch_size": 8, "num_blocks": 2, "embed_dim": 16, "mlp_ratio": 4}
    shape |= {name: options[name] for name in ("num_classes", "img_size")}
    return MlpMixer(**shape, block_layer=ResBlock, norm_layer=Affine)


# These values are typed from the papers: thesis Sec. 2.5.1, Tables 3.9, 3.16, 6.1, 6.14, and the
# texts that the recipes name.
DEIT = {
    "opt": "adamw",
    # DeiT states a rate for a batch of 512, which is scaled in proportion to the batch size.
    "lr": 5e-4 * 1024 / 512,
    "paper_batch": 1024,
    "weight_decay": 0.05,
    "epochs": 300,
    "warmup_epochs": 5,
    "label_smoothing": 0.1,
    "drop_path": 0.1,
    "repeated_augmentation": 3,
    "mixup": 0.8,
    "cutmix": 1.0,
    "random_erasing": 0.25,
    "clip_grad": None,
    "auto_augment": "rand-m9-mstd0.5-mmax9-inc1",
    "hflip": 0.5,
    "crop": "rrc",
    "loss": "ce",
    "sched": "cosine",
    "ema": None,
    "img_size": 224,
}
AUGMENTATION = {
    name: DEIT[name] for name in ("repeated_augmentation", "mixup", "cutmix", "random_erasing")
}
CONV = {
    "opt": "lamb",
    "lr": 3e-3,
    "paper_batch": 2048,
    "random_erasing": 0.0,
    "mixup": 0.8,
    "cutmix": 1.0,
}
CONV |= {"uniform_drop_path": True, "clip_grad": None, "label_smoothing": 0.1}
DEIT3 = {
    "opt": "lamb",
    "lr": 3e-3,
    "paper_batch": 2048,
    "weight_decay": 0.02,
    "warmup_epochs": 5,
    "clip_grad": 1.0,
}
DEIT3 |= {
    "auto_augment": "3a",
    "color_jitter": 0.3,
    "cutmix": 1.0,
    "crop_pct": 1.0,
    "uniform_drop_path": True,
}
DEIT3 |= {
    "random_erasing": 0.0,
    "hflip": 0.5,
    "sched": "cosine",
    "layer_scale": 1e-4,
    "img_size": 224,
}
CONV |= {
    "auto_augment": DEIT["auto_augment"],
    "sched": "cosine",
    "loss": "ce",
    "ema": None,
    "crop": "rrc",
}
# DeiT, CaiT and DeiT III share this fine-tuning at a larger size.
HIGHRES = {"lr": 1e-5, "paper_batch": 512, "img_size": 384}

FAMILIES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "deit": ("deit_tiny_patch16_224", VIT, DEIT),
    "deit_distilled": (
        "deit_tiny_distilled_patch16_224",
        VIT,
        {**DEIT, "distillation": "token"},
    ),
    "deit_384": ("deit_base_patch16_384", VIT, {**DEIT, **HIGHRES, "epochs": 25}),
    "cait": (
        "cait_s36_384",
        VIT,
        {
            **DEIT,
            "lr": 1e-3,
            "epochs": 400,
            "drop_path": 0.2,
            "uniform_drop_path": True,
            "crop_pct": 1.0,
        },
    ),
    "cait_384": (
        "cait_s36_384",
        VIT,
        {
            **DEIT,
            **HIGHRES,
            "epochs": 25,
            "drop_path": 0.2,
            "uniform_drop_path": True,
            "crop_pct": 1.0,
        },
    ),
    "cait_transfer": (
        "cait_s36_384",
        VIT,
        {
            **DEIT,
            # A tenth of the rate of training (thesis Sec. 3.7.1.3).
            "lr": 1e-3 / 10,
            "epochs": 1000,
            "drop_path": 0.2,
            "uniform_drop_path": True,
            "crop_pct": 1.0,
        },
    ),
    "resmlp": (
        "resmlp_tiny",
        [],
        {**DEIT, "opt": "lamb", "lr": 5e-3, "weight_decay": 0.2, "epochs": 400},
    ),
    "deit3": (
        "deit3_base_patch16_224",
        VIT,
        DEIT3
        | {"epochs": 400, "loss": "bce", "mixup": 0.8, "repeated_augmentation": 3}
        | {"label_smoothing": 0.0, "drop_path": 0.1, "crop": "rrc"},
    ),
    "deit3_21k": (
        "deit3_large_patch16_224",
        VIT,
        DEIT3
        | {
            "epochs": 90,
            "loss": "ce",
            "mixup": 0.0,
            "repeated_augmentation": 1,
            "drop_path": 0.3,
        }
        | {"crop": "simple", "label_smoothing": 0.1},
    ),
    "deit3_21k_to_1k": (
        "deit3_large_patch16_224",
        VIT,
        DEIT3
        | {
            "lr": 3e-4,
            "epochs": 50,
            "loss": "ce",
            "mixup": 0.0,
            "repeated_augmentation": 1,
            "drop_path": 0.3,
        }
        | {"crop": "simple", "label_smoothing": 0.1},
    ),
    "deit3_highres": (
        "deit3_large_patch16_384",
        VIT,
        {
            **DEIT,
            **HIGHRES,
            "epochs": 20,
            "weight_decay": 0.1,
            "repeated_augmentation": 1,
        }
        | {"drop_path": 0.4, "uniform_drop_path": True},
    ),
    "rsb_a2": (
        "resnet18",
        RESNET,
        {
            "opt": "lamb",
            "lr": 5e-3,
            "paper_batch": 2048,
            "weight_decay": 0.02,
            "epochs": 300,
            "warmup_epochs": 5,
        }
        | {
            "loss": "bce",
            "cutmix": 1.0,
            "repeated_augmentation": 3,
            "crop_pct": 0.95,
            "label_smoothing": 0.0,
        },
    ),
    "tcnn_finetune": (
        "resnet18",
        RESNET,
        {
            **AUGMENTATION,
            "opt": "adamw",
            "paper_batch": 1024,
            "lr": 1e-4,
            "gating_lr": 0.1,
            "epochs": 50,
        }
        | {
            "warmup_epochs": 5,
            "drop_path": 0.1,
            "img_size": 224,
            "reparameterize_at": 0,
            "keep_optimizer": False,
        },
    ),
    "tcnn_scratch": (
        "resnet18",
        RESNET,
        {
            **AUGMENTATION,
            "opt": "momentum",
            "momentum": 0.9,
            "paper_batch": 1024,
            "epochs": 400,
            "warmup_epochs": 5,
        }
        | {"reparameterize_at": 100, "keep_optimizer": True},
    ),
    "patchconvnet": (
        "patchconvnet_s60",
        CONVNET,
        CONV
        | {"epochs": 400, "weight_decay": 0.01, "drop_path": 0.15}
        | {"repeated_augmentation": 3},
    ),
    "patchconvnet_highres": (
        "patchconvnet_b60",
        CONVNET,
        CONV
        | {
            "lr": 1e-5,
            "paper_batch": 1024,
            "weight_decay": 0.01,
            "epochs": 10,
            "drop_path": 0.2,
        }
        | {"repeated_augmentation": 1},
    ),
    "patchconvnet_21k": (
        "patchconvnet_b60",
        CONVNET,
        CONV
        | {"epochs": 90, "weight_decay": 0.01, "drop_path": 0.3}
        | {"repeated_augmentation": 1},
    ),
    "patchconvnet_21k_to_1k": (
        "patchconvnet_s60",
        CONVNET,
        CONV
        | {
            "lr": 5e-4,
            "paper_batch": 1024,
            "epochs": 100,
            "drop_path": 0.05,
            "img_size": 224,
        },
    ),
    "grafit": (
        "resnet18",
        [*RESNET, "--embedding-dim", "8"],
        {
            "objective": "grafit",
            "repeated_augmentation": 4,
            "temperature": 0.05,
            "embedding_dim": 256,
            "epochs": 600,
        }
        | {
            "opt": "sgd",
            # 0.1 for every 256 images of a batch of 1,024, each of which is seen four times.
            "lr": 0.1 * 1024 / 256,
            "paper_batch": 4 * 1024,
            "random_erasing": 0.25,
            "img_size": 224,
        },
    ),
    "patchconvnet_specialise": (
        "patchconvnet_s60_multi",
        CONVNET,
        {"lr": 1e-5, "paper_batch": 512, "epochs": 10},
    ),
}


def test_every_recipe_is_tested() -> None:
    assert set(FAMILIES) == {*recipe_names()}


@pytest.mark.parametrize("name", FAMILIES)
def test_recipe_matches_the_paper(name: str) -> None:
    model, _, expected = FAMILIES[name]
    config = Config(model=model, **recipe_settings(name, model))
    actual = {setting: getattr(config, setting) for setting in expected}
    # Rates are floating-point products; all other settings are exactly equal.
    assert actual == pytest.approx(expected)


# Each model, objective, loss, crop and optimizer occurs once; the other recipes differ from these
# only in numbers.
TRAINED = [
    "deit_distilled",
    "cait",
    "resmlp",
    "deit3",
    "deit3_21k",
    "rsb_a2",
    "tcnn_finetune",
    "tcnn_scratch",
]
TRAINED += ["patchconvnet", "patchconvnet_specialise", "grafit"]


@pytest.mark.study(but=["deit3", "tcnn_finetune", "patchconvnet"])
@pytest.mark.parametrize("name", TRAINED)
def test_recipe_trains_a_small_model_of_its_family(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, options, _ = FAMILIES[name]
    # A distilled model needs a teacher, and a hybrid an epoch of conversion; the recipe's own
    # values would take hours.
    further = ["--teacher", "tiny"] if name == "deit_distilled" else []
    further += ["--reparameterize-at", "1"] if name == "tcnn_scratch" else []
    # A stand-in teacher saves downloading the papers' teachers.
    monkeypatch.setattr(
        build, "_teacher", lambda config, _: _tiny_teacher() if config.teacher else None
    )
    # At 32 pixels the last stage of a ResNet has a single pixel, which is too few to tell stages
    # apart.
    size = "64" if "tcnn" in name else "32"
    # 16 images in batches of 8 are two steps an epoch, so that schedules by step and by epoch
    # differ.
    small = f"--epochs 2 --warmup-epochs 1 --batch-size 8 --limit 16 --img-size {size}"
    out = ["--out", str(tmp_path), "--watcher", "none"]
    arguments = [model, "--recipe", name, *small.split(), *options, *further, *out]
    assert main(arguments) == 0
    lines = (tmp_path / "epochs.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2"]
    # Epoch 0 has no training loss, but the last line is complete.
    assert "nan" not in lines[-1]
    messages = capfd.readouterr().err
    assert "x 1 processes)" in messages
    assert "rates are scaled" in messages


def _tiny_teacher() -> Any:
    return timm.create_model(
        "resnet18", layers=[1, 1, 1, 1], channels=[8, 8, 16, 16], num_classes=10
    )


# Sources: T-CNN paper, Tables 1 and 5; PatchConvNet, Table B.3; CaiT, thesis Table 3.16; DeiT III,
# Table 6.14.
BY_MODEL: dict[str, dict[str, tuple[float, int | None]]] = {
    "tcnn_finetune": {
        "t_resnet50d": (0.1, 320),
        "t_resnet101d": (0.1, 384),
        "t_resnet152d": (0.2, 384),
        "t_resnet200d": (0.2, 384),
        "t_resnetrs50": (0.1, 224),
        "t_resnetrs101": (0.1, 224),
        "t_resnetrs152": (0.2, 320),
        "t_resnetrs200": (0.2, 320),
        "t_resnetrs270": (0.2, 320),
        "t_resnetrs350": (0.2, 320),
    },
    "patchconvnet": {
        "patchconvnet_s20": (0.0, 224),
        "patchconvnet_s36": (0.05, 224),
        "patchconvnet_s60_multi": (0.15, 224),
        "patchconvnet_s120": (0.2, 224),
        "patchconvnet_b36": (0.2, 224),
        "patchconvnet_b60": (0.3, 224),
        "patchconvnet_b120": (0.4, 224),
    },
    "cait": {
        "cait_xxs24_224": (0.05, 224),
        "cait_xxs36_224": (0.1, 224),
        "cait_xs24_384": (0.05, 224),
        "cait_s24_224": (0.1, 224),
        "cait_s36_384": (0.2, 224),
        "cait_m36_384": (0.3, 224),
        "cait_m48_448": (0.4, 224),
    },
    "deit3": {
        "deit3_small_patch16_224": (0.0, 224),
        "deit3_base_patch16_224": (0.1, 224),
        "deit3_large_patch16_224": (0.4, 224),
        "deit3_huge_patch14_224": (0.5, 224),
    },
}


def test_settings_that_differ_between_models() -> None:
    for recipe, models in BY_MODEL.items():
        for model, (drop_path, size) in models.items():
            settings = recipe_settings(recipe, model)
            assert (settings["drop_path"], settings["img_size"]) == (drop_path, size), (
                recipe,
                model,
            )
            assert timm.is_model(model)


# Sources: CaiT, thesis Table 3.16; ResMLP follows CaiT's rule, Sec. 3.5.1: 0.1 up to 18 layers,
# 1e-5 for 24, 1e-6 for more.
LAYER_SCALES = {
    "cait": {
        "cait_xxs24_224": 1e-5,
        "cait_xxs36_224": 1e-6,
        "cait_xs24_384": 1e-5,
        "cait_s24_224": 1e-5,
        "cait_s36_384": 1e-6,
        "cait_m36_384": 1e-6,
        "cait_m48_448": 1e-6,
    },
    "resmlp": {
        "resmlp_12_224": 0.1,
        "resmlp_24_224": 1e-5,
        "resmlp_36_224": 1e-6,
        "resmlp_big_24_224": 1e-5,
    },
    "deit3": {"deit3_small_patch16_224": 1e-4, "deit3_huge_patch14_224": 1e-4},
}


def test_initial_layer_scale() -> None:
    """Models have the published setting, and small ones its value
    in each block and in class attention.
    """
    for recipe, models in LAYER_SCALES.items():
        for model, value in models.items():
            assert recipe_settings(recipe, model)["layer_scale"] == value, (
                recipe,
                model,
            )
    shape = {"embed_dim": 24, "depth": 2, "num_heads": 3}
    for model, options, count in (
        ("cait_xxs36_224", shape, 8),
        ("deit3_small_patch16_224", shape, 4),
    ):
        # float32 holds this power of two exactly, and no other parameter starts with it.
        settings = Config(model, layer_scale=0.0625, model_options=options, img_size=32)
        parameters = build.build_model(settings, 10)[0].parameters()
        assert sum(bool((parameter == 0.0625).all()) for parameter in parameters) == count
    parameters = build.build_model(Config("resmlp_tiny", layer_scale=0.0625, img_size=32), 10)[
        0
    ].parameters()
    assert sum(bool((parameter == 0.0625).all()) for parameter in parameters) == 4
    with pytest.raises(ValueError, match=r"layer_scale=0\.0625, but ResNet has no LayerScale"):
        build.build_model(Config("resnet18", layer_scale=0.0625), 10)


def test_options_override_a_file_and_a_file_overrides_the_recipe(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.toml").write_text('lr = 3e-4\nepochs = 7\nfreeze = ["stem"]\n')
    recipe = ["resnet18", "--recipe", "tcnn_finetune", "--config"]
    arguments = [*recipe, str(tmp_path / "own.toml"), "--epochs", "9"]
    config, resume = parse(
        [*arguments, "--no-channels-last", "--model-options", "layers=[1,1]", "a=b"]
    )
    assert config.lr == 3e-4
    assert config.epochs == 9
    assert config.weight_decay == 0.05
    assert not resume
    # Options of the model are merged by name: those that only the file has are kept.
    (tmp_path / "options.toml").write_text("model_options = {layers = [1], b = 1}")
    options = [str(tmp_path / "options.toml"), "--model-options", "layers=[2]"]
    merged, _ = parse([*recipe, *options])
    assert merged.model_options == {"layers": [2], "b": 1}
    assert config.freeze == ["stem"]
    assert config.model_options == {"layers": [1, 1], "a": "b"}
    (tmp_path / "kept.toml").write_text(as_toml(config.as_dict()))
    assert Config(**read_toml(tmp_path / "kept.toml")) == config


def test_options_that_a_file_cannot_store_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no others, got \{'stem': \[1, None\]\}"):
        parse(["resnet18", "--model-options", "stem=[1,null]"])


def test_every_recipe_names_its_paper() -> None:
    for file in (Path(build.__file__).parent / "recipes").iterdir():
        assert "arXiv:" in tomllib.loads(file.read_text())["paper"], file.name


def test_options_are_read_before_torch_is_imported() -> None:
    """Help, an unknown option and a wrong value are each tested in a new process."""
    cases = [
        ("--help", 0, "--batch-size"),
        ("--nonsense", 2, "--nonsense"),
        ("--crop=square", 2, "expected one of"),
    ]
    program = (
        "import sys\nfrom tcnn_model.training.__main__ import main\n"
        "try:\n    status = main(['resnet18', sys.argv[1]])\n"
        "except SystemExit as end:\n    status = end.code\n"
        # torch takes two seconds to import, which should not delay help or the report of a typing
        # error.
        "print(status, 'torch' in sys.modules)"
    )
    for option, status, text in cases:
        done = subprocess.run(
            [sys.executable, "-c", program, option],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == f"{status} False"
        assert text in done.stdout + done.stderr


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for setting in dataclasses.fields(Config)[1:]:
        assert f"--{setting.name.replace('_', '-')}" in shown
        assert f"\n{setting.metadata['group']}:\n" in shown


def test_circular_bases_of_a_recipe_are_refused(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    first = tmp_path / "first.toml"
    second = tmp_path / "second.toml"
    first.write_text(f'base = "{second}"')
    second.write_text(f'base = "{first}"')
    said = refusal("resnet18", "--recipe", first, "--out", tmp_path / "run")
    assert f"its bases lead back to it: {first} -> {second} -> {first}" in said


def test_files_may_not_import_a_watcher(tmp_path: Path, refusal: Callable[..., str]) -> None:
    """The command line may name a watcher; a recipe,
    settings or a run may come from somebody else.
    """
    recipe = tmp_path / "recipe.toml"
    settings = tmp_path / "settings.toml"
    run = tmp_path / "run"
    run.mkdir()
    # This module's import would show.
    recipe.write_text('[settings]\nwatcher = "antigravity:fly"')
    for file in (settings, run / "config.toml"):
        file.write_text('model = "resnet18"\nwatcher = "antigravity:fly"')
    beginnings: list[list[str]] = [
        ["resnet18", "--recipe", str(recipe)],
        ["--config", str(settings)],
    ]
    for arguments in [*beginnings, ["--resume", "--out", str(run)]]:
        message = "a file may not name 'antigravity:fly', which would be imported"
        assert message in refusal(*arguments)
        assert parse([*arguments, "--watcher", "none"])[0].watcher == "none"


def test_files_may_not_name_weights_of_unknown_kind(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """Old versions of timm unpickle such weights; the command line may name them."""
    recipe = tmp_path / "recipe.toml"
    settings = tmp_path / "settings.toml"
    recipe.write_text('[settings]\nteacher = "local-dir:folder"')
    # A simple comparison with "hf-hub:" would miss this spelling.
    settings.write_text('model = "HF_hub:somebody/model"\npretrained = true')
    for arguments in (
        ["resnet18", "--recipe", str(recipe)],
        ["--config", str(settings)],
    ):
        assert "whose weights could run code" in refusal(*arguments)
    options = ["resnet18", "--recipe", str(recipe), "--teacher", "local-dir:folder"]
    assert parse(options)[0].teacher == "local-dir:folder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["resnet18", "--recipe", "nobodys"],
            "no recipe 'nobodys'; there are cait, cait_384, cait_transfer, deit",
        ),
        (["nobodys_net"], "timm cannot make the model 'nobodys_net'"),
        (
            ["resnet18", "--epochs", "5"],
            "expected fewer than the 5 epochs, got 5: give fewer, or more epochs",
        ),
        (
            ["resnet18", "--mixup", "0.8", "--batch-size", "9"],
            "take images in pairs, got 9",
        ),
        (
            ["resnet18", "--batch-size", "2000"],
            "is more than the 1347 to train on: give a batch_size of at most ",
        ),
        (
            ["resnet18", "--crop", "square"],
            "crop: expected one of rrc, simple, got 'square'",
        ),
        (["resnet18", "--auto-augment", "foo"], "auto_augment: Unknown AA policy foo"),
        (["resnet18", "--auto-augment", "rand-x9"], "auto_augment: Unknown RandAugment"),
        (["resnet18", "--freeze", "nothing"], "no parameters match 'nothing'"),
        (["resnet18", "--resume"], "there is no run in"),
        (
            ["--resume", "--recipe", "deit"],
            "with the settings of the run: leave out --recipe and --config",
        ),
        (["resnet18", "--num-classes", "3"], "the data has 10 classes, got 3"),
        (
            ["resnet18", "--img-size", "32", "--reparameterize-at", "3"],
            "the image is too small to tell stages apart",
        ),
        (["resnet18", "--weights", "none.pt"], "weights: there is no file none.pt"),
        pytest.param(
            ["resnet18", "--device", "cuda"],
            "expected cpu, as torch finds no GPU with CUDA on this machine, got cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_settings_that_do_not_fit_are_reported(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    refusal: Callable[..., str],
) -> None:
    assert message in refusal(*arguments, "--out", tmp_path / "run")
    # The refusal comes before anything is written.
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epochs = 2.5", "epochs: expected a whole number, got 2.5"),
        # True is an integer in Python.
        ("epochs = true", "epochs: expected a whole number, got True"),
        ('lr = "fast"', "lr: expected a number, got 'fast'"),
        ("lr = 1979-05-27", r"lr: expected a number, got datetime\.date"),
        ("drop_path = [0.1]", r"drop_path: expected a number, got \[0\.1\]"),
        ("pretrained = 1", "pretrained: expected true or false, got 1"),
        ('opt = ["sgd"]', r"opt: expected a string, got \['sgd'\]"),
        ('freeze = "stem"', "freeze: expected a list of strings, got 'stem'"),
        (
            'freeze = ["stem", 3]',
            r"freeze: expected a list of strings, got \['stem', 3\]",
        ),
        ("model_options = 3", "model_options: expected a table, got 3"),
        (
            "model_options = {layers = [3, {since = 1979-05-27}]}",
            r"model_options: expected no dates or times, got \{'layers'",
        ),
        ("model = {}", r"model: expected a string, got \{\}"),
    ],
)
def test_values_of_a_wrong_type_are_named(line: str, message: str, tmp_path: Path) -> None:
    """Settings are checked in a file, in a recipe,
    in a recipe's settings for some models, and in a run.
    """
    file = tmp_path / "own.toml"
    run = tmp_path / "config.toml"
    run.write_text(line)
    with pytest.raises(ValueError, match=rf"config\.toml: {message}"):
        parse(["--resume", "--out", str(tmp_path)])
    for content, option, where in (
        (line, "--config", ""),
        (f"[settings]\n{line}", "--recipe", ""),
        (f"[models.'nobody*']\n{line}", "--recipe", r": models: nobody\*"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"own\.toml{where}: {message}"):
            parse(["resnet18", option, str(file)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base = 3", "base: expected a string, got 3"),
        ("settings = 3", "settings: expected a table, got 3"),
        ("models = [1]", r"models: expected a table, got \[1\]"),
        ("models.a = 3", "models: a: expected a table, got 3"),
        ("settings.lrr = 3", "no such setting: lrr"),
    ],
)
def test_parts_of_a_recipe_of_a_wrong_type_are_named(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.toml").write_text(content)
    with pytest.raises(ValueError, match=rf"own\.toml: .*{message}"):
        recipe_settings(str(tmp_path / "own.toml"), "resnet18")


def test_written_settings_can_be_read(tmp_path: Path) -> None:
    """JSON and TOML write some numbers and strings differently; integers are valid for numbers."""
    # JSON writes Infinity, and splits a character beyond 16 bits into two escapes; TOML accepts
    # neither.
    settings = {"clip_grad": math.inf, "out": "läufe/🜚", "lr": 1, "min_lr": 1e-30}
    (tmp_path / "config.toml").write_text(as_toml(settings), encoding="utf-8")
    assert read_toml(tmp_path / "config.toml") == settings
    (tmp_path / "config.toml").write_bytes(b'out = "\xff"')
    with pytest.raises(ValueError, match=r"cannot read the settings in .*config\.toml"):
        read_toml(tmp_path / "config.toml")
