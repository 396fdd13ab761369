"""``look``: the numbers of the page, a process that is killed, masks, and errors of a line each."""

import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from PIL import Image
from torch import nn

import tcnn_probe
from tcnn_probe.command_line import main
from tcnn_probe.heads import TYPES
from tcnn_probe.images import prepare
from tcnn_probe.looking.costs import class_labels
from tcnn_probe.looking.named_models import find_model
from tcnn_probe.looking.photographs import find_photographs
from tcnn_probe.looking.unfinished import continue_measuring, keep_measurements
from tests.extras import need
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.reporting.made import held

SIZE = (48, 80)
GRID = (3, 5)


def vit(depth: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {
        "img_size": SIZE,
        "embed_dim": 21,
        "num_heads": 7,
        "depth": depth,
    } | options
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **options)
    # Random queries and keys of this size attend nearly evenly.
    for block in model.blocks:
        block.attn.qkv.weight.data *= 9
    return model.eval()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 11 photographs of noise in two folders, one of them unreadable."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for name, count in (("cats", 7), ("dogs", 4)):
        (folder / name).mkdir()
        for number in range(count):
            low = Image.fromarray(rng.integers(0, 256, (3, 5, 3), dtype=np.uint8))
            low.resize((97, 61)).save(folder / name / f"{number}.png")
    (folder / "dogs" / "broken.jpg").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def looked(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[xr.DataTree, Path]:
    """Return a recording, and the path of its page."""
    page = tmp_path_factory.mktemp("page") / "page.html"
    return tcnn_probe.look(vit(), photographs, page, batch_size=3, shown=2), page


def test_page_and_facts_say_what_the_recording_holds(
    looked: tuple[xr.DataTree, Path],
) -> None:
    tree, page = looked
    heads = tree["heads"].dataset.isel(epoch=0)
    facts = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    (network,) = facts["networks"]
    assert len(network["heads"]) == 14
    names = [
        name
        for name, values in heads.data_vars.items()
        # Differences of halves make types uncertain, and are not shown themselves.
        if values.dims == ("layer", "head") and not name.endswith("_halves")
    ]
    for row in network["heads"]:
        at = {"layer": row["layer"], "head": row["head"]}
        for name in names:
            value = heads[name].sel(at).item()
            assert row[name] == value if np.isfinite(value) else name not in row
    types = tcnn_probe.head_types(heads)
    assert [row["head_type"] for row in network["heads"]] == types.values.ravel().tolist()
    counts = {row["type"]: row["count"] for row in network["types"]}
    assert counts == {name: int((types == name).sum()) for name in TYPES if (types == name).any()}
    # The program of the page has the same numbers, in float32.
    about, numbers, _ = held(page.read_text(encoding="utf-8"))
    for variable in about["variables"]:
        if variable["name"] in names:
            start = variable["starts"][0]
            expected = heads[variable["name"]].values.ravel().astype(np.float32)
            np.testing.assert_array_equal(numbers[start : start + 14], expected)
    assert len(about["pictures"]) == len(about["images"]) == 2
    assert json.loads(tree.attrs["photographs"])[:2] == ["cats/0.png", "dogs/3.png"]
    assert "dogs/broken.jpg could not be read: it is no picture" in facts["missing"]
    # The model has no classes, and so no map of Grad-CAM.
    (reason,) = (x for x in facts["missing"] if x.startswith("attention on objects"))
    assert "Grad-CAM says nothing: " in reason
    assert network["chosen"] == "11 of 12 photographs: cats 7, dogs 4 of 5"


def test_a_recording_of_the_same_is_not_made_again(
    looked: tuple[xr.DataTree, Path], photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, page = looked
    model = vit()
    monkeypatch.setattr(model, "forward", None)
    again = tcnn_probe.look(model, photographs, page, shown=2)
    xr.testing.assert_identical(again["heads"].dataset.load(), tree["heads"].dataset.load())
    monkeypatch.undo()
    model.blocks[0].attn.qkv.weight.data *= 1.5
    changed = tcnn_probe.look(model, photographs, shown=2)
    assert not changed["heads"].dataset.entropy.equals(tree["heads"].dataset.entropy)


@pytest.mark.study
def test_random_weights_are_the_same_in_each_process(photographs: Path) -> None:
    """Otherwise ranks would look at different networks, and a killed run could not be continued."""
    entropies = []
    for seed in range(2):  # processes differ in their random state
        torch.manual_seed(seed)
        tree = tcnn_probe.look("test_vit", photographs, weights="random", shown=0, limit=2)
        entropies.append(tree["heads"].entropy)
    np.testing.assert_array_equal(*entropies)


@pytest.mark.study
@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_killed_process_is_continued(
    killed_at: int,
    looked: tuple[xr.DataTree, Path],
    photographs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, _ = looked
    module = sys.modules["tcnn_probe.looking.look"]
    monkeypatch.setattr(module, "_SECONDS", -1)
    # Costs come first, and are measured again.
    monkeypatch.setattr(module, "_costs_of", lambda *args: (None, ""))
    seen: list[int] = []

    def count(module: nn.Module, args: Any) -> None:
        seen.append(len(args[0]))
        if len(seen) == killed_at + 1:
            raise KeyboardInterrupt

    model = vit()
    handle = model.register_forward_pre_hook(count)
    page = tmp_path / "page.html"
    with pytest.raises(KeyboardInterrupt):
        tcnn_probe.look(model, photographs, page, batch_size=3, shown=2)
    assert not page.exists()
    handle.remove()
    before = sum(seen[:-1])
    seen.clear()
    killed_at = -1
    handle = model.register_forward_pre_hook(count)
    continued = tcnn_probe.look(model, photographs, page, batch_size=3, shown=2)
    handle.remove()
    assert sum(seen) == 11 - before
    for path in ("heads", "maps", "offset-kernel"):
        for node in tree[path].subtree:
            # Sums of 11 numbers below 10 are in another order.
            xr.testing.assert_allclose(
                continued[node.path].to_dataset(),
                node.to_dataset(),
                rtol=0,
                atol=1e3 * np.finfo(float).eps,
            )
    assert continued.attrs["image_hashes"] == tree.attrs["image_hashes"]
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [
        ".html",
        ".json",
        ".zarr",
    ]
    # Interrupted measurements of other photographs are not taken up.
    assert not model._forward_pre_hooks


def test_no_code_runs_from_unfinished_measurements(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("code ran",)

    path = tmp_path / "page.unfinished"
    with tcnn_probe.record(vit(1)) as recorder:
        for content in (pickle.dumps({"about": Evil()}), b"", pickle.dumps(3)):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="holds no measurements"):
                continue_measuring(recorder, path, lambda about: True)
        keep_measurements(recorder, path, "cats")
        assert continue_measuring(recorder, path, lambda about: about == "dogs") is None
        assert continue_measuring(recorder, path, lambda about: about == "cats") == "cats"


def _attention(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Compute the attention of each block in float64: (images, heads, queries, keys)."""
    weights = []

    def keep(module: Any, args: Any) -> None:
        (tokens,) = args
        q, k, _ = module.qkv(tokens).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights.append((q * module.scale @ k.mT).softmax(-1))

    model = model.double()
    handles = [block.attn.register_forward_pre_hook(keep) for block in model.blocks]
    with torch.no_grad():
        model(images.double())
    for handle in handles:
        handle.remove()
    return weights


def test_sinks_and_cosines_equal_an_explicit_computation() -> None:
    """Queries that are nearly alike make sinks, in some of the images."""
    model = vit().double()
    for block in model.blocks:
        query, key = block.attn.qkv.weight.data.chunk(3)[:2]
        query *= 0.1
        block.attn.qkv.bias.data[:21] = torch.linspace(-9, 9, 21)
        key *= 0.7
    images = torch.rand(5, 3, *SIZE, dtype=torch.float64)
    recorder = recorded(model, images, probes=["redundancy"])
    ds = recorder.dataset.isel(epoch=0)
    shares = []
    for layer, attention in enumerate(_attention(model, images)):
        rows = attention[:, :, 1:].numpy()  # 15 patches are all queries that count
        sinks = ((rows >= 0.5).mean(2) >= 0.9).any(-1).mean(0)
        lengths = np.linalg.norm(rows, axis=-1)
        cosines = np.einsum("bhqk,bgqk->bqhg", rows, rows)
        cosines /= np.einsum("bhq,bgq->bqhg", lengths, lengths)
        np.testing.assert_array_equal(ds.sink_images.isel(layer=layer), sinks)
        # A cosine of 16 terms, which add up to at most 1.
        np.testing.assert_allclose(
            ds.head_cosine.isel(layer=layer),
            cosines.mean((0, 1)),
            rtol=0,
            atol=100 * np.finfo(float).eps,
        )
        shares += sinks.tolist()
    assert 0 < np.mean(shares) < 1
    assert any(0 < share < 1 for share in shares)


def test_attention_on_masks_equals_an_explicit_computation(
    photographs: Path, tmp_path: Path
) -> None:
    masks = tmp_path / "masks"
    (masks / "cats").mkdir(parents=True)
    rng = np.random.default_rng(1)
    # Of the first three cats; one is empty.
    for number in range(3):
        mask = np.repeat(np.repeat(rng.random((3, 5)) > 0.4, 16, 0), 16, 1) * (number != 1)
        Image.fromarray(mask).save(masks / "cats" / f"{number}.png")
    paths = sorted((photographs / "cats").iterdir())[:3]
    model = vit().double()
    model.pretrained_cfg |= {"crop_pct": 1.0, "crop_mode": "squash"}
    tree = tcnn_probe.look(model, paths, masks=masks, shown=0)
    ds = tree["objects"].dataset.isel(epoch=0)
    images = tcnn_probe.images.as_images([str(path) for path in paths], model)
    inside = np.stack(
        [np.asarray(Image.open(masks / "cats" / f"{n}.png"))[::16, ::16] for n in (0, 2)]
    )
    inside = inside.reshape(2, -1)
    for layer, attention in enumerate(_attention(model, images)):
        patches = attention[[0, 2]].numpy()[..., 1:]
        for name, maps in (
            ("object_attention", patches.mean(2)),
            ("class_object_attention", patches[:, :, 0]),
        ):
            expected = ((maps * inside[:, None]).sum(-1) / maps.sum(-1)).mean(0)
            # The mask is resized in eight bits without loss, and the model takes images in float32.
            np.testing.assert_allclose(ds[name].isel(layer=layer), expected, rtol=1e-12)
        np.testing.assert_allclose(ds.object_area.isel(layer=layer), inside.mean(), rtol=1e-12)


def test_photographs_are_spread_over_folders(photographs: Path) -> None:
    chosen = find_photographs(photographs, 5)
    assert [chosen.names[path] for path in chosen.paths] == [
        "cats/0.png", "cats/3.png", "cats/6.png", "dogs/0.png",
    ]  # fmt: skip
    assert chosen.unreadable == {"dogs/broken.jpg": "it is no picture"}
    assert chosen.describe() == "4 of 12 photographs: cats 3 of 7, dogs 1 of 5"


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["look", *arguments])
        lines = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("tcnn-probe")
        ]
        assert len(lines) == 1
        return code, lines[0]

    return run


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_folder_of_hugging_face_says_how_it_takes_pictures(
    normalizes: bool, photographs: Path, tmp_path: Path
) -> None:
    transformers = need("transformers")
    config = transformers.Dinov2Config(
        image_size=28, hidden_size=12, num_hidden_layers=1, num_attention_heads=3
    )
    transformers.Dinov2Model(config).save_pretrained(tmp_path)
    processor = transformers.BitImageProcessor(
        # What is cropped is even, as libraries round odd numbers differently.
        size={"shortest_edge": 38},
        crop_size={"height": 28, "width": 28},
        do_normalize=normalizes,
        image_mean=[0.4, 0.5, 0.6],
        image_std=[0.3, 0.2, 0.1],
    )
    processor.save_pretrained(tmp_path)
    _, preparation = find_model(str(tmp_path))
    assert preparation.pop("guessed") is False
    picture = Image.open(photographs / "cats" / "0.png")
    expected = processor(picture, return_tensors="pt")["pixel_values"]
    # Both round to 256 levels, of which resizing may differ by one.
    level = 1 / 255 / (0.1 if normalizes else 1)
    torch.testing.assert_close(prepare([picture], preparation), expected, atol=1.01 * level, rtol=0)


def test_a_crop_that_a_processor_of_detectors_does_not_make_is_said(
    photographs: Path, tmp_path: Path
) -> None:
    transformers = need("transformers")
    config = transformers.Dinov2Config(
        image_size=28, hidden_size=12, num_hidden_layers=1, num_attention_heads=3
    )
    transformers.Dinov2Model(config).save_pretrained(tmp_path / "model")
    processor = transformers.DetrImageProcessor(size={"shortest_edge": 38, "longest_edge": 50})
    processor.save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")
    with pytest.warns(RuntimeWarning, match="they are cropped to 28 x 28 pixels .size="):
        tcnn_probe.look(name, photographs, tmp_path / "page.html", shown=1, limit=2)
    tcnn_probe.look(name, photographs, tmp_path / "other.html", shown=1, limit=2, size=42)


@pytest.mark.study
def test_errors_are_a_line_each(errors: Any, photographs: Path, tmp_path: Path) -> None:
    folder, page = str(photographs), str(tmp_path / "page.html")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "a.png").write_bytes(b"no")
    code, text = errors("resnet10t", folder, "-o", str(tmp_path / "empty"), "--random")
    assert code == 2
    assert "expected the file of a page, such as page.html, got the folder" in text
    assert not (tmp_path / "empty.zarr").exists()
    code, text = errors("resnet10t", folder, "-o", str(tmp_path / "new" / "page.html"), "--random")
    assert code == 2
    assert "there is no folder" in text
    (tmp_path / "models.txt").write_text("# none yet")
    code, text = errors(folder, "-o", page, "--models", str(tmp_path / "models.txt"))
    assert code == 2
    assert "names no model" in text
    code, text = errors("resnet10t", folder, "-o", page, "--random", "--limit", "2")
    assert code == 3
    assert "reparameterize" in text
    assert "not equal" in text
    for arguments, words in (
        (("vit_tny_patch16_224", folder), "did you mean vit_tiny_patch16_224"),
        (("nowhere:build", folder), "nowhere:build cannot be imported"),
        (("torch:ones_like", folder), ""),
        (
            ("vit_tiny_patch16_224", str(tmp_path / "empty")),
            "no pictures in .*found nothing",
        ),
        (("vit_tiny_patch16_224", str(tmp_path / "absent")), "no file or folder"),
        (
            ("vit_tiny_patch16_224", str(tmp_path / "unreadable")),
            "no picture can be read: .*a.png: it is no picture",
        ),
        (
            ("vit_tiny_patch16_224", folder, "--weights", str(tmp_path / "absent.pt")),
            "no file .*absent.pt",
        ),
        (
            ("vit_tiny_patch16_224", folder, "--masks", str(tmp_path / "empty")),
            "has the stem of a photograph",
        ),
        (
            (f"{__name__}:build", folder, "--size", "32"),
            "does not take images of shape .*Input height",
        ),
        (
            (f"{__name__}:build", folder, "--weights", str(tmp_path / "any.pt")),
            "a function returns its model with weights",
        ),
        ((folder,), "expected a model and photographs, got photographs only"),
    ):
        code, text = errors(
            *arguments, "-o", page, *([] if "--weights" in arguments else ["--random"])
        )
        assert code == 2
        assert re.search(words, text), text
    assert not Path(page).exists()


def build() -> nn.Module:
    """Return a model for "module:function"."""
    return vit(1)


def build_deeper() -> nn.Module:
    return vit(2, patch_size=8)


@pytest.mark.study
def test_command_compares_two_models(
    photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "two.html"
    names = [f"{__name__}:build", f"{__name__}:build_deeper"]
    assert main(["look", *names, str(photographs), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    facts = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert [network["name"] for network in facts["networks"]] == names
    stores = [*tmp_path.glob("two.*.zarr")]
    assert len(stores) == 2
    for store in stores:
        assert tcnn_probe.open(store).attrs["weights_from"] == "as the function returns them"


@pytest.mark.study
@pytest.mark.parametrize("scheduler", [False, True])
def test_many_models_have_a_table_and_pages(
    scheduler: bool,
    photographs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here, and on a cluster; a model that fails leaves the others alone."""
    names = [f"{__name__}:{name}" for name in ("build", "build_deeper", "nothing")]
    (tmp_path / "list.txt").write_text("\n".join(["# models", *names, ""]))
    arguments = [
        "look",
        "--models",
        str(tmp_path / "list.txt"),
        str(photographs),
        "-o",
        str(tmp_path / "pages"),
    ]
    if not scheduler:
        assert main(arguments) == 2
    else:
        with need("distributed").LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            dashboard_address=None,
            protocol="tcp",
        ) as cluster:
            assert main([*arguments, "--scheduler", cluster.scheduler_address]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"tcnn-probe: 1 of 3 models failed: {names[2]}: ")
    rows = json.loads((tmp_path / "pages" / "index.json").read_text())["networks"]
    assert [row["model"] for row in rows] == names
    assert [row.get("heads") for row in rows] == [7, 14, None]
    table = (tmp_path / "pages" / "index.html").read_text()
    for row in rows[:2]:
        assert f'<a href="{row["page"]}">' in table
        page = json.loads((tmp_path / "pages" / row["page"]).with_suffix(".json").read_text())
        (network,) = page["networks"]
        for kind in TYPES:
            assert row[kind] == sum(head["head_type"] == kind for head in network["heads"])


def test_costs_are_those_of_the_function(
    looked: tuple[xr.DataTree, Path], photographs: Path, tmp_path: Path
) -> None:
    """With 11 photographs all of them count;
    ImageNet's classes are known by the names of their folders.
    """
    tree, page = looked
    model = vit()
    paths = sorted((photographs / "cats").iterdir()) + sorted((photographs / "dogs").glob("*.png"))
    # The order in which look reads them: those with maps first.
    order = [str(photographs / name) for name in json.loads(tree.attrs["photographs"])]
    assert sorted(order) == sorted(map(str, paths))
    images = tcnn_probe.images.as_images(order, model)
    expected = tcnn_probe.head_importance(model, list(images.split(3)), queries=None).mean("image")
    ds = tree["costs"].dataset.isel(epoch=0)
    for mode in expected.mode.values:
        np.testing.assert_allclose(ds[f"cost_{mode}"], expected.sel(mode=mode), rtol=1e-5)
    row = json.loads(page.with_suffix(".json").read_text())["networks"][0]["heads"][9]
    assert row["cost_zero"] == ds.cost_zero.values.ravel()[9]
    classifier = timm.create_model("vit_tiny_patch16_224", depth=1)
    known = [Path("n01440764/a.png"), Path("n02102040/b.png")]
    assert class_labels(classifier, known).tolist() == [
        0,
        217,
    ]  # tench, English springer
    assert class_labels(classifier, [*known, Path("cats/c.png")]) is None
    assert class_labels(model, known) is None
