"""The examples of the documents run."""

import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import timm
import torch
import xarray as xr
from sources import examples, listed_names, unlisted_names
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tcnn_model.models.patchconvnet import PatchConvNet
from tests.extras import need

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run examples in a temporary folder, with ResNets,
    ViTs and PatchConvNets narrowed to few channels, at full depth.
    """
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    create = timm.create_model

    def narrow(name: str, **options: Any) -> nn.Module:
        few = {"channels": (32, 32, 64, 64)} if name.startswith("resnet") else {"embed_dim": 48}
        # Other models, such as T-ResNets, are made of these or have no such options.
        narrowed = name.startswith(("resnet", "vit_", "deit", "patchconvnet"))
        return create(name, **(few if narrowed else {}) | options)

    monkeypatch.setattr(timm, "create_model", narrow)


# A model that has seen six images of noise may lack heads of the type that an example removes.
@pytest.mark.filterwarnings("ignore:no head is selected")
def test_readme_examples_run() -> None:
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    images = torch.randn(8, 3, 64, 64)
    loader = DataLoader(TensorDataset(images, torch.arange(8) % 3), batch_size=4)

    @torch.no_grad()
    def validate(model: nn.Module, loader: DataLoader[Any]) -> None:
        for batch, _ in loader:
            model(batch)

    names: dict[str, object] = {"train_loader": loader, "val_loader": loader}
    names |= {"train": lambda *_: None, "validate": validate}
    # A script runs twice.
    for block in [*blocks, *(block for block in blocks if '"run.zarr", mode' in block)]:
        exec(
            block.replace(
                "epochs=10, warmup_epochs=2",
                "epochs=2, warmup_epochs=1, progress=False",
            ),
            names,
        )
    assert xr.open_zarr("run.zarr").epoch.values.tolist() == [0, 1]
    assert xr.open_zarr("tcnn.zarr").epoch.values.tolist() == [0, 1, 2]


def check_mixed_heads(block: str, names: dict[str, Any]) -> None:
    """Record again with random instead of zero biases and compare with the maps."""
    with torch.no_grad():
        for layer in names["cait"].blocks:
            layer.attn.proj_w.bias.uniform_(-0.1, 0.1)
    exec("with " + block.partition("\nwith ")[2], names)
    maps = names["tcnn_probe"].attention_maps(
        names["cait"], names["images"], queries=[(112, 112)], mixed=True
    )
    expected = maps["4x14x14"].attention.mean("image").squeeze("query")
    mixed = names["mixed"].squeeze(["epoch", "query"]).transpose("layer", "sum", ...)
    # Numbers are near 0.1, in float32.
    difference = mixed.values - expected.transpose("layer", "head", ...).values
    assert abs(difference).max() < 1e-6


@pytest.mark.filterwarnings("ignore:no head is selected")
@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("ablation.md", 4),
        ("architectures.md", 1),
        ("attention_maps.md", 4),
        ("coming_from.md", 9),
        ("comparison.md", 1),
        ("contracts.md", 1),
        ("corruptions.md", 4),
        ("families.md", 1),
        ("first_hour.md", 1),
        ("health.md", 3),
        ("heads.md", 5),
        ("how_it_works.md", 1),
        ("look.md", 1),
        ("models.md", 1),
        ("papers.md", 1),
        ("plots.md", 5),
        ("recipes.md", 4),
        ("recording.md", 8),
        ("report.md", 3),
        ("representation.md", 3),
        ("robustness.md", 5),
        ("saliency.md", 4),
        ("training.md", 1),
        ("transformed_cnns.md", 4),
    ],
)
def test_examples_of_the_documents_run(name: str, minimum: int) -> None:
    if name in ("attention_maps.md", "coming_from.md"):
        need("transformers")
    names: dict[str, object] = {}
    blocks = python_blocks(ROOT / "docs" / name)
    # A page in which no block is found would pass.
    assert len(blocks) >= minimum
    for block in blocks:
        plt.figure()
        exec(block, names)
        plt.close("all")
    if name == "attention_maps.md":
        check_mixed_heads(blocks[-1], names)
    if name == "recording.md":
        assert xr.open_zarr("vit.zarr").top1.values.tolist() == [
            0.5,
            0.5,
            0.5,
            0.6,
            0.6,
        ]


def test_examples_of_functions_run_alone() -> None:
    for block in python_blocks(ROOT / "docs" / "examples.md"):
        plt.figure()
        exec(block, {})
        plt.close("all")


def test_every_public_name_is_in_the_reference() -> None:
    names = listed_names(ROOT / "docs/site/api.md")
    assert unlisted_names(names) == []


def test_each_function_has_an_example_that_runs_alone() -> None:
    names = listed_names(ROOT / "docs/site/api.md")
    # The callbacks are classes, whose frameworks take seconds to import.
    located = (name for name in names if not name.startswith("tcnn_probe.callbacks."))
    functions = {name for name in located if inspect.isfunction(pydoc.locate(name))}
    examples_by_name = examples(ROOT, names)
    alone = {name for name in functions & examples_by_name.keys() if examples_by_name[name].alone}
    # These need another package, or images on disk, or are deprecated.
    assert functions - alone == {
        "tcnn_probe.heads.fit_mixture",
        "tcnn_probe.log_to_tensorboard",
        "tcnn_probe.log_to_wandb",
        "tcnn_probe.evaluation.imagenet_c",
        "tcnn_probe.evaluation.imagenet_variant",
    }


def test_examples_of_aggregation_run() -> None:
    small = '"patchconvnet_s60", embed_dim=16, depth=2'
    names: dict[str, object] = {}
    blocks = [
        block.replace('"patchconvnet_s60"', small)
        for block in python_blocks(ROOT / "docs" / "aggregation.md")
    ]
    assert blocks
    torch.save(
        timm.create_model("patchconvnet_s60", embed_dim=16, depth=2).state_dict(),
        "s60.pth",
    )
    for block in blocks:
        exec(block, names)
    special = names["special"]
    assert isinstance(special, PatchConvNet)
    assert special.per_class


def test_examples_of_dense_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    need("transformers")  # builds UperNet
    create = timm.create_model
    small = {"embed_dim": 16, "depth": 4}

    def narrow(name: str, **options: Any) -> nn.Module:
        few = small if name.startswith("patchconvnet") else {}
        return create(name, **few | options)

    monkeypatch.setattr(timm, "create_model", narrow)
    names: dict[str, object] = {}
    blocks = python_blocks(ROOT / "docs" / "dense_tasks.md")
    assert len(blocks) == 3
    for block in blocks:
        # The narrow model has four blocks instead of sixty.
        exec(block.replace("[14, 29, 44, 59]", "[0, 1, 2, 3]"), names)
    gates = xr.open_zarr("segmenter.zarr").gate
    assert gates.notnull().any("head").sum("layer").values.tolist() == [3]
    assert len(names["losses"]) == 5


PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "studies/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
    if "generated" not in page.parts
)


def without_code(path: Path) -> str:
    """Return a document without its blocks of code,
    in which ``#`` is a comment and ``](`` no link.
    """
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub and MyST give to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", without_code(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    # Code between single backticks has no links either.
    text = re.sub("`[^`]*`", "", without_code(path))
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        page = path.parent / target if target else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_no_two_documents_use_one_store() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    names = [
        name
        for page in pages
        for name in set(re.findall(r'record\(\s*\w+, "([^":]+)"', "".join(python_blocks(page))))
    ]
    # The expression must find some stores.
    assert len(names) > 5
    assert len({*names}) == len(names), names


def test_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert 'pip install -e ".[test]" && pytest' in readme
    assert (ROOT / "studies" / "gating_evolution.py").exists()


def test_every_study_has_its_row_and_its_page() -> None:
    studies = ROOT / "studies"
    names = {path.stem for path in studies.glob("*.py")}
    rows = (studies / "README.md").read_text()
    assert [name for name in names if f"`python studies/{name}.py`" not in rows] == []
    assert [name for name in names if f"](pages/{name}.md" not in rows] == []
    assert {page.stem for page in studies.glob("pages/*.md")} - names <= {"photographs"}
