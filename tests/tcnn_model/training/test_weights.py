"""Second stages start with all weights of the first,
at another size or with other classes or tokens.
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tcnn_model import gpsa_layers
from tcnn_model.training.build import build_model
from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tests.crafted import Crafted
from tests.tcnn_model.training.runs import TINY, config, finish

VIT = {"embed_dim": 24, "depth": 2, "num_heads": 3}
CONVNET = {"embed_dim": 16, "depth": 2}
# One step at a large rate makes the weights differ from initial ones, which would be those of a
# stage that loads nothing.
FIRST: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0, "limit": 8, "lr": 1e-2}


def _first(out: Path, model: str, options: dict[str, Any], **settings: Any) -> dict[str, Tensor]:
    """Train a first stage, and return its best weights."""
    finish(config(out, model, **{**FIRST, "model_options": options, **settings}))
    return torch.load(out / "best.pt", weights_only=True)["state_dict"]


def _second(out: Path, model: str, options: dict[str, Any], **settings: Any) -> Config:
    weights = {"weights": str(out / "best.pt")}
    return config(
        out / "second",
        model,
        **{**FIRST, "model_options": options, **weights, **settings},
    )


def _assert_loaded(
    model: nn.Module,
    weights: dict[str, Tensor],
    *,
    new: tuple[str, ...],
    resized: str = "",
) -> None:
    """Assert that the second stage has all weights of the first,
    except those of a new classifier.
    """
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        if name.startswith(new):
            assert state[name].shape != value.shape or not torch.equal(state[name], value), name
        elif name == resized:
            # The tokens for the class and for distillation precede a grid of 2 x 2.
            tokens = value.shape[1] % 4
            grid = value[:, tokens:].mT.unflatten(2, (2, 2))
            larger = F.interpolate(grid, (4, 4), mode="bicubic", antialias=True).flatten(2).mT
            torch.testing.assert_close(state[name], torch.cat([value[:, :tokens], larger], 1))
        else:
            assert torch.equal(state[name], value), name


def _assert_named(report: str, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Assert that the report names exactly the weights that differ from the file's."""
    state = model.state_dict()
    assert weights.keys() == state.keys()
    changed = {name for name in state if not torch.equal(state[name], weights[name])}
    assert {word for word in re.split(r"[ ,:]+", report) if word in state} == changed


# 21 and 10 classes stand for ImageNet-21k and ImageNet-1k.
CHAINS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], tuple[str, ...], str]] = {
    "DeiT distilled, low to high": (
        "deit_tiny_distilled_patch16_224",
        {},
        "deit_tiny_distilled_patch16_224",
        {"img_size": 64},
        (),
        "pos_embed",
    ),
    "DeiT III, 21k to 1k at a larger size": (
        "deit3_small_patch16_224",
        {"num_classes": 21},
        "deit3_small_patch16_224",
        {"img_size": 64},
        ("head.",),
        "pos_embed",
    ),
    "CaiT, low to high": (
        "cait_xxs24_224",
        {},
        "cait_xxs24_384",
        {"img_size": 64},
        (),
        "pos_embed",
    ),
    "PatchConvNet, 21k to 1k at a larger size": (
        "patchconvnet_s60",
        {"num_classes": 21},
        "patchconvnet_s60",
        {"img_size": 64},
        ("head.",),
        "",
    ),
    "T-CNN, transferred": (
        "resnet18",
        {"img_size": 64, "reparameterize_at": 0, "num_classes": 21},
        "resnet18",
        {"img_size": 64, "reparameterize_at": 0},
        ("fc.",),
        "",
    ),
    "T-CNN, larger": (
        "resnet18",
        {"img_size": 64, "reparameterize_at": 0},
        "resnet18",
        {"img_size": 96},
        (),
        "",
    ),
}


def _options(model: str) -> dict[str, Any]:
    return TINY if model == "resnet18" else CONVNET if "convnet" in model else VIT


@pytest.mark.study(but=["CaiT, low to high", "T-CNN, transferred"])
@pytest.mark.parametrize("chain", CHAINS)
def test_second_stage_has_all_weights_of_the_first(
    chain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, settings, second, further, new, resized = CHAINS[chain]
    weights = _first(tmp_path, first, _options(first), **settings)
    stage = _second(tmp_path, second, _options(second), **further)
    model, _ = build_model(stage, 10)
    _assert_loaded(model, weights, new=new, resized=resized)
    assert model.num_classes == 10
    assert "state_dict" not in model.pretrained_cfg or model.pretrained_cfg["state_dict"] is None
    # The stage can be trained as it was built, and first reports weights that differ from the
    # file's.
    capsys.readouterr()
    assert next(train(stage, progress=False)).epoch == 0
    _assert_named(capsys.readouterr().err, model, weights)


def test_single_token_becomes_a_token_for_each_class(tmp_path: Path) -> None:
    weights = _first(tmp_path, "patchconvnet_s60", CONVNET)
    model, _ = build_model(_second(tmp_path, "patchconvnet_s60_multi", CONVNET), 10)
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(state[name], value.expand_as(state[name])), name
    assert state["pool.cls_token"].shape[1] == 10


def test_single_token_is_copied_for_other_classes(tmp_path: Path) -> None:
    """A model of 21k classes starts one with tokens for other classes:
    only the classifier is new.
    """
    weights = _first(tmp_path, "patchconvnet_s60", CONVNET, num_classes=21)
    stage = _second(tmp_path, "patchconvnet_s60_multi", CONVNET)
    reports: list[str] = []
    model, _ = build_model(stage, 10, report=reports.append)
    state = model.state_dict()
    tokens = state["pool.cls_token"]
    assert torch.equal(tokens, weights["pool.cls_token"].expand(1, 10, -1))
    _assert_named(" ".join(reports), model, weights)
    assert any(report.startswith("weights: head.weight, head.bias are new") for report in reports)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)

    # Trained tokens belong to their classes, so other classes get new tokens.
    with torch.no_grad():
        model.pool.cls_token.copy_(torch.randn(1, 10, 16))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "best.pt")
    reports.clear()
    again, _ = build_model(stage, 3, report=reports.append)
    assert again.pool.cls_token.shape == (1, 3, 16)
    assert any("pool.cls_token" in report and "are new" in report for report in reports)


def test_tcnn_starts_with_the_weights_of_its_cnn(tmp_path: Path) -> None:
    """The weights are loaded before the conversion, where each tap of a filter becomes a head."""
    weights = _first(tmp_path, "resnet18", TINY, img_size=64)
    model, _ = build_model(
        _second(tmp_path, "resnet18", TINY, img_size=64, reparameterize_at=0), 10
    )
    state = model.state_dict()
    # These are the two convolutions of the only block of the last stage.
    assert len(gpsa_layers(model)) == 2
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def _lightning(state: dict[str, Tensor]) -> dict[str, Any]:
    """Return a checkpoint of a LightningModule with the model as ``net``,
    a weighted loss and a metric.
    """
    entries = {f"net.{name}": value for name, value in state.items()}
    entries |= {"loss.weight": torch.ones(3), "accuracy.correct": torch.tensor(5)}
    return {"state_dict": entries, "epoch": 3, "pytorch-lightning_version": "2.5"}


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    return torch.optim.swa_utils.AveragedModel(model).state_dict()


WRAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "averaged": (_averaged, "n_averaged of .* left out"),
    "compiled": (lambda m: torch.compile(m).state_dict(), ""),
    "a compiled stage": (
        lambda m: {
            re.sub(r"^layer1\.", "layer1._orig_mod.", name): value
            for name, value in m.state_dict().items()
        },
        "names of wrappers",
    ),
    "an average of compiled": (
        lambda m: _averaged(torch.compile(m)),
        "n_averaged of .* left out",
    ),
    "lightning": (
        lambda m: _lightning(m.state_dict()),
        "'net.' is taken off .*loss.weight, accuracy.correct of .* left out",
    ),
    "lightning of compiled": (
        lambda m: _lightning(torch.compile(m).state_dict()),
        "names of wrappers.*'net.' is taken off",
    ),
    "nested": (
        lambda m: nn.ModuleDict({"a": nn.ModuleDict({"b": m})}).state_dict(),
        "'a.b.' is taken off",
    ),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_weights_of_wrapped_models(kind: str, tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=3, **TINY)
    wrap, message = WRAPPED[kind]
    torch.save(wrap(model), tmp_path / "w.pt")
    reports: list[str] = []
    settings = config(tmp_path, weights=str(tmp_path / "w.pt"), img_size=None)
    loaded, _ = build_model(settings, 3, report=reports.append)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    assert re.search(message, " ".join(reports))
    assert bool(reports) == bool(message)


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_with_two_models_is_refused(nested: bool, tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=3, **TINY)
    models = nn.ModuleDict({"student": model, "teacher": model})
    content = {name: part.state_dict() for name, part in models.items()}
    torch.save(content if nested else models.state_dict(), tmp_path / "w.pt")
    settings = config(tmp_path, weights=str(tmp_path / "w.pt"), img_size=None)
    with pytest.raises(ValueError, match="holds several models, student, teacher: "):
        build_model(settings, 3)


def test_a_classifier_of_other_classes_is_reported(tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=2, **TINY)
    content = {"state_dict": model.state_dict(), "classes": ["cat", "dog"]}
    torch.save(content, tmp_path / "w.pt")
    settings = config(tmp_path, weights=str(tmp_path / "w.pt"), img_size=None)
    for names, expected in ((["cat", "dog"], 0), (["dog", "cat"], 1), (None, 0)):
        reports: list[str] = []
        build_model(settings, 2, report=reports.append, names=names)
        assert len(reports) == expected
    # Of other numbers of classes, the classifier is new.
    build_model(settings, 3, report=reports.append, names=["a", "b", "c"])
    assert "is kept, though" not in " ".join(reports)


@pytest.mark.study
@pytest.mark.parametrize("reparameterize_at", [None, 0])
def test_attention_pool_is_trained_and_specialised(
    reparameterize_at: int | None, tmp_path: Path
) -> None:
    """A CNN or T-CNN pools by one token, then by a token per class, then with other classes."""
    size = {"img_size": 64, "reparameterize_at": reparameterize_at}
    weights = _first(tmp_path, "resnet18", TINY, attention_pool="single", **size)
    (token,) = [name for name in weights if name.endswith("attention.cls_token")]
    # The token has the 16 channels of the last stage.
    assert weights[token].shape == (1, 1, 16)
    again, _ = build_model(_second(tmp_path, "resnet18", TINY, img_size=64), 10)
    _assert_loaded(again, weights, new=())

    stage = _second(tmp_path, "resnet18", TINY, attention_pool="class", **size)
    model, _ = build_model(stage, 10)
    state = model.state_dict()
    assert all(
        torch.equal(state[name], value.expand_as(state[name])) for name, value in weights.items()
    )
    assert state[token].shape == (1, 10, 16)
    finish(stage)
    transferred, _ = build_model(_second(Path(stage.out), "resnet18", TINY, img_size=64), 3)
    assert transferred(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    with pytest.raises(
        ValueError, match="attention_pool: the model has a token for each class already"
    ):
        build_model(
            _second(Path(stage.out), "resnet18", TINY, img_size=64, attention_pool="single"),
            10,
        )


def test_trunk_of_grafit_starts_a_classifier(tmp_path: Path) -> None:
    grafit = {
        "objective": "grafit",
        "embedding_dim": 8,
        "ema": 0.9,
        "repeated_augmentation": 2,
        "data": "parity",
    }
    finish(config(tmp_path, **{**FIRST, **grafit}))
    saved = torch.load(tmp_path / "best.pt", weights_only=True)["state_dict_ema"]
    reports: list[str] = []
    stage = _second(tmp_path, "resnet18", TINY)
    model, _ = build_model(stage, 10, report=reports.append)
    state = model.state_dict()
    trunk = {
        name.removeprefix("trunk."): value
        for name, value in saved.items()
        if name.startswith("trunk.")
    }
    # Grafit's own heads are left out, and the classifier is new.
    assert state.keys() - trunk.keys() == {"fc.weight", "fc.bias"}
    assert all(torch.equal(state[name], value) for name, value in trunk.items())
    heads = {name.partition(".")[0] for name in saved} - {"trunk"}
    assert heads > {"memory", "predictor"}
    assert f"{', '.join(sorted(heads))} are left out" in reports[0]
    assert "fc.weight, fc.bias are new" in reports[1]


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        ("deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", VIT),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", {**VIT, "depth": 1}),
        ("patchconvnet_s60", "patchconvnet_s60", {**CONVNET, "depth": 1}),
        ("patchconvnet_s60", "resnet18", TINY),
    ],
)
def test_weights_of_another_model_are_refused(
    first: str, second: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The same holds if the classes differ,
    where timm itself would leave out weights that do not fit.
    """
    model, _ = build_model(config(tmp_path, first, model_options=_options(first)), 21)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "best.pt")
    with pytest.raises(ValueError, match=rf"weights: those in .*best\.pt do not fit {second}: "):
        build_model(_second(tmp_path, second, options), 10)


def test_crafted_file_runs_no_code(tmp_path: Path, refusal: Callable[..., str]) -> None:
    """Neither weights nor a teacher's weights run code, in torch's old and new formats."""
    ran = tmp_path / "ran"
    evil = tmp_path / "evil.pt"
    small = f"--out {tmp_path / 'run'} --batch-size 8 --limit 8".split()
    for legacy in (True, False):
        torch.save(
            {"state_dict": Crafted(ran)},
            evil,
            _use_new_zipfile_serialization=not legacy,
        )
        for option in ("--weights", "--teacher-weights"):
            teacher = ["--teacher", "resnet18"] if "teacher" in option else []
            said = refusal("resnet18", option, evil, *teacher, *small)
            assert "evil.pt is damaged, or holds more than weights" in said
    evil.write_bytes(pickle.dumps(Crafted(ran)))
    refusal("resnet18", "--weights", evil, *small)
    # timm would unpickle files that it gets by these names.
    for name in ("checkpoint_path", "pretrained_cfg_overlay"):
        said = refusal("resnet18", "--model-options", f"{name}={evil}")
        assert f"give weights as --weights, not as {name}" in said
    assert not ran.exists()


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """A single bit of one weight is flipped."""
    model, _ = build_model(config(tmp_path), 10)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "best.pt")
    content = bytearray((tmp_path / "best.pt").read_bytes())
    # A low bit of the second weight is flipped, so that the number looks like any other.
    content[content.index(model.state_dict()["fc.weight"].numpy().tobytes()) + 5] ^= 4
    (tmp_path / "best.pt").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"best\.pt is damaged, or holds more than weights: the checksum of",
    ):
        build_model(_second(tmp_path, "resnet18", TINY), 10)


def test_weights_in_safetensors_format(tmp_path: Path) -> None:
    model, _ = build_model(config(tmp_path), 10)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded, _ = build_model(
        # The seed differs, so that weights that were not loaded would differ, too.
        config(tmp_path, weights=str(tmp_path / "weights.safetensors"), seed=1),
        10,
    )
    assert all(
        torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items()
    )
