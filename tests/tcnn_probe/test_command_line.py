"""Shell commands, which print what the recording holds and refuse bad input in a sentence."""

import importlib.metadata
import json
import platform
import re
import shutil
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import timm
import torch
import xarray as xr
import zarr
from torch import nn

import tcnn_model
import tcnn_probe
from tcnn_probe.command_line import main
from tests.crafted import Crafted

LAYERS = ["layer4.0.conv1", "layer4.0.conv2"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return two runs of a T-CNN with different gates, one of them an epoch longer."""
    folder = tmp_path_factory.mktemp("stores")
    for name, gating, epochs in (("a", 1.0, 2), ("b", 3.0, 3)):
        torch.manual_seed(0)
        model = tcnn_model.reparameterize(
            timm.create_model("resnet10t", num_classes=5, channels=(8, 16, 16, 32)), gating=gating
        ).eval()
        images = torch.randn(8, 3, 64, 96)
        with (
            tcnn_probe.record(model, folder / f"{name}.zarr", images=1) as recorder,
            torch.no_grad(),
        ):
            for epoch in range(epochs):
                model(images)
                recorder.mark(epoch=epoch, top1=0.5 + epoch / 10)
    return [str(folder / f"{name}.zarr") for name in "ab"]


def test_printed_names_contain_no_terminal_commands(
    stores: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(stores[0], tmp_path / "a\x1b[2J.zarr")
    # Zarr writes all names anew, as it would refuse a chunk with another checksum.
    (copy / "layer" / "c" / "0").unlink()
    zarr.open_group(copy, mode="r+")["layer"][:] = ["\x1b]0;title\x07", "слой"]
    for arguments in (
        ["show", str(copy)],
        ["compare", str(copy), stores[1]],
        ["show", str(tmp_path / "\x1b[2J")],
    ):
        main(arguments)
        printed = "".join(capsys.readouterr())
        assert r"\x1b[2J" in printed
        assert "\x1b" not in printed
        assert (
            arguments[0] == "compare"
            or str(copy) not in arguments
            or r"\x1b]0;title\x07" in printed
        )


@pytest.mark.filterwarnings("always:Glyph")
def test_characters_that_a_figure_lacks_are_printed_without_terminal_commands(
    stores: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(stores[0], tmp_path / "a.zarr")
    (copy / "layer" / "c" / "0").unlink()
    zarr.open_group(copy, mode="r+")["layer"][:] = ["\x1b]0;title\x07", "conv"]
    assert main(["plot", str(copy), "entropy", "-o", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().err
    assert r"tcnn-probe: Glyph 27 (\x1b) missing" in printed
    assert "\x1b" not in printed


def test_info_lists_versions_threads_and_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "13")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    # No machine that runs this test has this name and processor.
    system = platform.uname_result("Linux", "a-host", "6.1-a-host", "#1 a-host", "z80")
    monkeypatch.setattr(platform, "uname", lambda: system)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # The name of a driver is printed too and could also contain terminal commands.
    monkeypatch.setattr(torch.cuda, "get_device_name", "card {}\x1b".format)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == f"tcnn-probe {tcnn_probe.__version__}"
    assert lines[1].startswith(f"Python {sys.version.split()[0]} ")
    for package in ("torch", "timm", "numpy", "xarray", "zarr"):
        assert f"{package} {importlib.metadata.version(package)}" in lines
    assert "OMP_NUM_THREADS: 13" in lines
    assert "MKL_NUM_THREADS: not set" in lines
    assert (
        f"torch's threads: {torch.get_num_threads()}, between operators "
        f"{torch.get_num_interop_threads()}" in lines
    )
    assert lines[-1] == r"device: card 0\x1b, card 1\x1b"
    assert lines[2].startswith("platform: Linux z80, ")
    assert "a-host" not in printed


def test_scalars_are_flat_numbers(stores: list[str]) -> None:
    ds = tcnn_probe.open(stores[0])
    ds = ds["heads"].to_dataset().assign(ds.to_dataset().data_vars).assign_attrs(ds.attrs)
    flat = tcnn_probe.scalars(ds)
    assert flat["top1"] == 0.6
    entropies = ds.entropy.sel(epoch=1, layer=LAYERS[1])
    assert flat[f"entropy/{LAYERS[1]}"] == pytest.approx(entropies.mean().item())
    by_head = tcnn_probe.scalars(ds.sel(epoch=[0]), heads=True)
    assert by_head["top1"] == 0.5
    assert by_head[f"gate/{LAYERS[0]}/8"] == ds.gate.sel(epoch=0, layer=LAYERS[0], head=8)
    assert all(
        isinstance(value, float) and np.isfinite(value) for value in (flat | by_head).values()
    )
    with pytest.raises(ValueError, match="expected a recording"):
        tcnn_probe.scalars(ds.drop_attrs())


def test_show_prints_the_recording(stores: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", stores[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ResNet, 2 marks, epoch 0 to 1")
    assert lines[1] == "also recorded: maps/9x4x6"
    assert "  top1 0.6" in lines
    row = next(line.split() for line in lines if line.startswith(LAYERS[0]))
    header = next(line.split() for line in lines if "locality_strength" in line)
    gate = torch.sigmoid(torch.tensor(1.0)).item()
    # The table prints four digits.
    assert float(row[1 + header.index("gate")]) == pytest.approx(gate, abs=1e-4)
    assert any(line.startswith("types of heads (from ") for line in lines)


def test_compare_prints_differences(stores: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *stores]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"at epoch 1: {stores[1]} minus {stores[0]}")
    assert "top1 0.6 - 0.6 = 0" in out
    gates = torch.sigmoid(torch.tensor([1.0, 3.0])).diff().item()
    row = next(line.split() for line in out.splitlines() if line.startswith(LAYERS[0]))
    # The table prints four digits.
    assert float(row[1]) == pytest.approx(gates, abs=1e-4)


def test_compare_without_common_layers(
    stores: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        tcnn_probe.record(model := vit(), tmp_path / "vit.zarr") as recorder,
        torch.no_grad(),
    ):
        model(torch.randn(7, 3, 32, 32))
        recorder.mark(epoch=1)
    assert main(["compare", stores[0], str(tmp_path / "vit.zarr")]) == 0
    out = capsys.readouterr().out
    assert "\n  of 7 and 8 images: " in out
    assert out.endswith("vit.zarr: blocks.0.attn\n")


def vit() -> torch.nn.Module:
    options = {
        "patch_size": 8,
        "img_size": 32,
        "embed_dim": 6,
        "depth": 1,
        "num_heads": 2,
    }
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


def test_plot_writes_a_figure(
    stores: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "plot",
                stores[1],
                "entropy",
                "-o",
                str(tmp_path / "entropy.png"),
                "--layers",
                "*conv2",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == f"wrote {tmp_path / 'entropy.png'}\n"
    picture = matplotlib.image.imread(tmp_path / "entropy.png")
    # An empty pair of axes has fewer colours.
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 10


@pytest.fixture(scope="module")
def anatomies(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return recordings of the same ViT with the kernels of its heads, of one mark and of two."""
    folder = tmp_path_factory.mktemp("anatomies")
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(48, 80), depth=2, embed_dim=15
    ).eval()
    for marks in (1, 2):
        probes = [*tcnn_probe.DEFAULT, "offset-kernel"]
        with (
            tcnn_probe.record(model, folder / f"{marks}.zarr", probes=probes) as recorder,
            torch.no_grad(),
        ):
            for epoch in range(marks):
                model(9 * torch.randn(8, 3, 48, 80))
                recorder.mark(epoch=epoch)
    return [str(folder / f"{marks}.zarr") for marks in (1, 2)]


@pytest.mark.parametrize(
    ("variable", "marks", "function"),
    [
        ("anatomy", 1, "anatomy"),
        ("anatomy", 2, "anatomy"),
        ("offset_kernel", 2, "offset_kernels"),
        ("attention_distance", 1, "depth"),
        ("attention_distance", 2, "evolution"),
    ],
)
def test_plot_chooses_the_drawing_and_its_values(
    variable: str,
    marks: int,
    function: str,
    anatomies: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    draw = getattr(tcnn_probe.plot, function)

    def seen(values: xr.Dataset | xr.DataArray, *arguments: object, **options: object) -> object:
        drawn.append((values.load(), draw(values, *arguments, **options)))
        return drawn[0][1]

    monkeypatch.setattr(tcnn_probe.plot, function, seen)
    store, out = anatomies[marks - 1], tmp_path / "drawn.png"
    layer = "blocks.1.attn"
    command = ["plot", store, variable, "-o", str(out), "--layers", "*.1.*"]
    assert main(command) == 0
    ((values, axes),) = drawn
    tree = tcnn_probe.open(store)
    if variable == "anatomy":
        expected = tree["heads/selectivity"].sel(layer=[layer])
        values = values.selectivity
    elif variable == "offset_kernel":
        expected = tree["offset-kernel/offset_kernel"].sel(layer=[layer], epoch=1)
    else:
        expected = tree["heads/attention_distance"].sel(layer=[layer])
    xr.testing.assert_equal(values, expected)
    assert axes.has_data()
    assert matplotlib.image.imread(out).std() > 0.05


def test_show_counts_types_and_names_the_kernels(
    anatomies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(anatomies[1], tmp_path / "a.zarr")
    # Halves of the images that differ by more than a part's whole disagree on the type.
    zarr.open_group(copy, mode="r+")["offset_information_halves"][1, 0] = 90
    assert main(["show", str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "also recorded: offset-kernel"
    types = tcnn_probe.head_types(tcnn_probe.open(copy)["heads"].dataset)
    last = types.isel(epoch=-1)
    counts = [f"{(last == name).sum().item()} {name}" for name in sorted({*last.values.flat})]
    uncertain = last.uncertain.sum().item()
    assert uncertain > 0
    counts.append(f"{uncertain} of these uncertain")
    (line,) = (line for line in lines if line.startswith("types of heads"))
    assert line == f"types of heads (from {types.attrs['images']} images): " + ", ".join(counts)


@pytest.mark.filterwarnings("ignore:this recording is of an earlier version")
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_show_reads_a_recording_of_an_earlier_version(
    anatomies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ds = xr.open_zarr(anatomies[0])
    parts = [name for name in ds if str(name).endswith(("information", "selectivity"))]
    old = ds.drop_vars(parts).assign(content_information=ds.content_information)
    lacking = dict.fromkeys(ds.layer.values.tolist(), "it began without")
    old.attrs["missing"] = json.dumps(dict.fromkeys(["gate", "selectivity"], lacking))
    old.to_zarr(tmp_path / "old.zarr")
    assert main(["show", str(tmp_path / "old.zarr")]) == 0
    printed = capsys.readouterr().out
    assert "\ntypes of heads: " in printed
    assert printed.endswith(
        "\nmissing: gate, selectivity of blocks.0.attn, blocks.1.attn: it began without\n"
    )


def test_plot_draws_the_learned_filters_beside_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tcnn_model.reparameterize(
        timm.create_model("resnet10t", num_classes=5, channels=(8, 16, 16, 32))
    ).eval()
    store = tmp_path / "t.zarr"
    with tcnn_probe.record(model, store, probes=["gpsa", "offset-kernel"]) as recorder:
        model(torch.randn(2, 3, 64, 96))
        recorder.mark(epoch=0)
    draw, rows = tcnn_probe.plot.offset_kernels, []

    def seen(*arguments: object, **options: object) -> object:
        axes = draw(*arguments, **options)
        rows.extend(label.get_text() for label in axes.get_yticklabels())
        return axes

    monkeypatch.setattr(tcnn_probe.plot, "offset_kernels", seen)
    assert main(["plot", str(store), "offset_kernel", "-o", str(tmp_path / "k.png")]) == 0
    assert rows == ["conv1", "conv1 learned", "conv2", "conv2 learned"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "{tmp}/nowhere.zarr"], "nowhere.zarr"),
        (["show", "{tmp}"], "{tmp}"),
        (
            ["plot", "{store}", "entropie", "-o", "x.png"],
            "has no 'entropie'; it has ",
        ),
        (
            ["plot", "{store}", "entropy", "-o", "x.png", "--layers", "blocks*"],
            "matches 'blocks*'; it has layer4",
        ),
        (["plot", "{store}", "entropy", "-o", "{tmp}/no/x.png"], "there is no folder {tmp}/no"),
        # Before the recording is read, which is not there.
        (["plot", "{tmp}/no", "entropy", "-o", "{tmp}"], "a figure, such as entropy.png, got"),
        (["report", "{tmp}/no", "-o", "{tmp}"], "a page, such as page.html, got the folder {tmp}"),
        (["maps", "no_such_model", "{tmp}/no", "-o", "{tmp}"], "such as maps.html, got the folder"),
        (["compare", "{store}", "{tmp}"], "{tmp}"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(
    arguments: list[str],
    message: str,
    stores: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([text.format(tmp=tmp_path, store=stores[0]) for text in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tcnn-probe: ")
    assert message.format(tmp=tmp_path) in error
    assert error.count("\n") == 1


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "noise.png"
    matplotlib.image.imsave(path, np.random.default_rng(0).random((60, 90, 3)))
    return str(path)


@pytest.mark.parametrize(
    "options", [[], ["--query", "9", "47", "--scale", "common", "--heads", "0", "1"]]
)
def test_maps_of_a_picture(
    options: list[str], picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "maps.png")
    name = ["maps", "test_vit", picture, "-o", out, "--random"]
    assert main([*name, "--layers", "blocks.5.*", *options]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    # A figure of a single colour has a standard deviation of zero.
    assert matplotlib.image.imread(out).std() > 0.05


def test_maps_that_cannot_be_drawn(
    picture: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = str(tmp_path / "maps.png")
    name = ["maps", "test_vit", picture, "-o", out]
    assert main([*name, "--random", "--layers", "neck"]) == 2
    assert "no such maps of the layer 'neck'" in capsys.readouterr().err
    misspelt = ["maps", "deit_tiny_patch16_22", picture, "-o", out]
    assert main(misspelt) == 2
    assert "did you mean deit_tiny_patch16_224?" in capsys.readouterr().err

    def offline(*_: object, **__: object) -> None:
        raise FileNotFoundError("cannot find the requested files")

    monkeypatch.setattr("timm.create_model", offline)
    assert main(name) == 2
    assert "--weights FILE), or use random ones (--random)" in capsys.readouterr().err


def test_maps_as_an_interactive_page(picture: str, tmp_path: Path) -> None:
    out = tmp_path / "maps.html"
    name = ["maps", "test_vit", picture, "-o", str(out), "--random"]
    assert main([*name, "--layers", "blocks.5.*", "--heads", "0", "1"]) == 0
    about = re.search('id="about">(.*?)</script>', out.read_text(encoding="utf-8"))
    assert about is not None
    (layer,) = json.loads(about[1])["layers"]
    assert layer["name"] == "blocks.5.attn"
    assert layer["heads"] == [0, 1]
    # A side has 160 / 16 patches.
    assert layer["maps"]["attention"]["queries"] == [10, 10]


def test_maps_with_weights_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of the file, and a file
    that holds more than weights is refused and runs no code.
    """
    weights = tmp_path / "a.pt"
    ran = tmp_path / "ran"
    # The weights are those of a fine-tuned model, with as many classes as its data have.
    expected = timm.create_model("test_vit", num_classes=7).state_dict()
    torch.save(expected, weights)
    models: list[nn.Module] = []

    def attention_maps(model: nn.Module, *_: object, **__: object) -> None:
        models.append(model)
        raise ValueError("seen")

    monkeypatch.setattr(tcnn_probe, "attention_maps", attention_maps)
    command = ["maps", "test_vit", "a.png", "-o", "b.png", "--weights", str(weights)]
    assert main(command) == 2
    assert capsys.readouterr().err == "tcnn-probe: seen\n"
    (model,) = models
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)

    # torch has two file formats, which are read by different code.
    for legacy in (True, False):
        torch.save(
            {"state_dict": Crafted(ran)},
            weights,
            _use_new_zipfile_serialization=not legacy,
        )
        assert main(command) == 2
        assert "a.pt is damaged, or holds more than weights" in capsys.readouterr().err
    assert not ran.exists()
    for name in ("empty.pt", "empty.safetensors"):
        (tmp_path / name).touch()
        assert main([*command[:-1], str(tmp_path / name)]) == 2
        assert f"{name} is damaged, or holds more" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path / "none.pt")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["maps", "test_vi", *command[2:]]) == 2
    assert "timm has no model test_vi; did you mean" in capsys.readouterr().err
    assert models == [model]


def test_maps_with_weights_of_a_t_cnn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "best.pt"
    torch.save(tcnn_model.reparameterize(timm.create_model("resnet10t")).state_dict(), weights)
    assert main(["maps", "resnet10t", "a.png", "-o", "b.png", "--weights", str(weights)]) == 2
    assert "those of a T-CNN: load them into tcnn_model.reparameter" in capsys.readouterr().err
