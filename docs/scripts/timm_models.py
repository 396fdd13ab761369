"""Write ``timm_models.md``, the table of the layers
that are recorded in every kind of model that timm registers.

    python docs/scripts/timm_models.py                 # all names, about ten minutes on one core
    python docs/scripts/timm_models.py --models cait_m36  # names with a word; --out names a file

Weights are random and nothing is downloaded. Names are of one kind if timm builds them from the
same class with the same switches, and only numbers differ: widths, heads, blocks, sizes of images.
The smallest model of each kind runs once, on one image of its own size, with at most two blocks in
a row if timm can build such a model. ``--rows`` names a file to which each row is written when it
is done, and from which an interrupted run resumes.
"""

import argparse
import collections
import dataclasses
import functools
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

import tcnn_probe
from tcnn_probe.architectures.lookup import known, looks_like_attention
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.reconstruction import (
    ReconstructionError,
    Verification,
    tolerance,
)

HEADER = """# Attention in timm

Look up whether the attention of a model of timm is recorded, or why it is not: search this page for
the model's name. [One forward](models.md) says the same of a model with your own options.

Written by `python docs/scripts/timm_models.py` with timm {timm} and torch {torch}, from random
weights.

Names are of the same kind if timm builds their models from the same class with the same switches,
and only numbers differ: widths, heads, blocks, sizes of images. The smallest model of each kind
ran: one forward of one image, with at most two blocks in a row if timm can build such a model. The
others of its kind, in the last column, did not run.

- *layers*: number of attention layers that are recorded; in brackets, the number of those whose
  keys lie on a grid.
- *difference*: largest difference between the reconstruction and the model's own result, divided by
  the largest value of the latter, over these layers, in float32. The recorder refuses a layer if
  the difference is above {tolerance}.
- *not recorded*: reasons, with the number of layers if there are several.

{recorded} of the {kinds} kinds below ({names} names) have layers that are recorded. The other
{others} names that timm registers have no module that computes a softmax or is named like
attention.

| model | class | image | layers | difference | not recorded | the same kind |
|---|---|---|---|---|---|---|"""

# There are two blocks, because Swin's windows are shifted in every second block.
BLOCKS = 2
# The names of timm's arguments for numbers of blocks, and of the fields of its configurations.
DEPTHS = (
    *("depth", "depths", "depth_list", "layers"),
    *("serial_depths", "parallel_depth", "transformer_depths"),
)

Row = Mapping[str, str]
Build = Callable[..., nn.Module]


class Differences(Verification):
    """Verification that keeps the comparisons of a forward pass.

    Attributes:
        by_layer: {layer: largest difference}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_layer: dict[str, float] = {}

    def add(self, layer: str, compared: tuple[Tensor, float] | None) -> None:
        """Keep a comparison."""
        super().add(layer, compared)
        if compared is not None:
            self.by_layer[layer] = float(compared[0])


class ArgumentsError(Exception):
    """Raised with the class of a model that timm would build,
    and the arguments of the class by name.
    """


@contextmanager
def built_by(make: Callable[[Build], Build]) -> Iterator[None]:
    """Build timm's models in the block by the function
    that ``make`` returns for timm's own function.
    """
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("timm.models.") and hasattr(module, "build_model_with_cfg")
    ]
    build = modules[0].build_model_with_cfg
    try:
        for module in modules:
            module.build_model_with_cfg = make(build)
        yield
    finally:
        for module in modules:
            module.build_model_with_cfg = build


def show_arguments(build: Build) -> Build:
    """Return a function that raises the arguments instead of building a model."""

    def raise_arguments(
        model_class: Any, variant: str, pretrained: bool = False, **arguments: Any
    ) -> nn.Module:
        for name in [name for name in arguments if "cfg" in name and "pretrained" in name]:
            del arguments[name]
        raise ArgumentsError(model_class, arguments)

    return raise_arguments


def build_shallow(build: Build) -> Build:
    """Return a function that builds a model with few blocks."""

    def build_with_few_blocks(model_class: Any, *args: Any, **kwargs: Any) -> nn.Module:
        parameters = inspect.signature(model_class).parameters
        # SAM lists the blocks with global attention; there must be enough blocks to include the
        # first of them.
        blocks = max(BLOCKS, 1 + min(kwargs.get("global_attn_indexes") or [0]))
        few = {}
        for name in DEPTHS:
            default = parameters[name].default if name in parameters else None
            if kwargs.get(name, default) is not None:
                few[name] = at_most(blocks, kwargs.get(name, default))
        for name in ("model_cfg", "cfg"):
            configuration = kwargs.get(name)
            if dataclasses.is_dataclass(configuration):
                fields = {
                    field: at_most(blocks, getattr(configuration, field))
                    for field in DEPTHS
                    if hasattr(configuration, field)
                }
                few[name] = dataclasses.replace(configuration, **fields)
        try:
            return build(model_class, *args, **kwargs | few)
        except (AssertionError, IndexError):
            # Some models need all their blocks: IFormer's come in threes, and NextViT's channels
            # are listed by stage.
            return build(model_class, *args, **kwargs)

    return build_with_few_blocks


def at_most(blocks: int, number: Any) -> Any:
    """Return the number of blocks, or the numbers by stage, limited to ``blocks``."""
    if isinstance(number, (list, tuple)):
        return type(number)(at_most(blocks, entry) for entry in number)
    return min(blocks, number) if isinstance(number, int) else number


def switches(value: Any) -> Any:
    """Return arguments with each number replaced by whether it is positive,
    so that kinds of models can be compared.
    """
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return sorted((name, switches(entry)) for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return sorted({repr(switches(entry)) for entry in value})
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value > 0
    if isinstance(value, functools.partial):
        return value.func.__name__, switches(value.keywords)
    return getattr(value, "__name__", str(value))


def size(value: Any) -> float:
    """Return the sum of the numbers in arguments."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return value if isinstance(value, (int, float)) else 0


def kinds_of(names: Sequence[str]) -> list[list[str]]:
    """Return the names of each kind of model, the smallest first."""
    kinds = collections.defaultdict(list)
    with built_by(show_arguments):
        for name in names:
            try:
                timm.create_model(name)
            except ArgumentsError as error:
                model_class, arguments = error.args
                kind = repr((model_class.__name__, switches(arguments)))
                kinds[kind].append((size(arguments), name))
    return [[name for _, name in sorted(entries)] for entries in kinds.values()]


@functools.cache
def may_attend(module_class: type[nn.Module]) -> bool:
    """Return whether the code of a class computes a softmax or attends."""
    if module_class.__module__.startswith("torch."):
        return module_class in (nn.MultiheadAttention, nn.Softmax)
    source = inspect.getsource(module_class)
    return "softmax" in source or "scaled_dot_product_attention" in source


def has_candidates(model: nn.Module) -> bool:
    """Return whether a model has a module that could attend."""
    return any(
        may_attend(type(module))
        or looks_like_attention(module)
        or known(module).no_attention_matrix
        for module in model.modules()
    )


def describe(name: str) -> Row | None:
    """Return the row of a model after one forward pass;
    None if it has no module that could attend.
    """
    with built_by(build_shallow):
        with torch.device("meta"):
            shapes = timm.create_model(name)
        if not has_candidates(shapes):
            return None
        torch.manual_seed(0)
        model = timm.create_model(name).eval()
    channels, height, width = model.pretrained_cfg["input_size"]
    on_grid: dict[str, bool] = {}

    def look(attention: Attention) -> None:
        on_grid[attention.name] = attention.layout.keys is not None

    differences = Differences()
    with tcnn_probe.attention_stream(model, look) as stream, torch.no_grad():
        stream.verification = differences
        try:
            model(torch.randn(1, channels, height, width))
            reasons = [*stream.unsupported.values()]
        except ReconstructionError:
            reasons = ["what is rebuilt differs from what the model computed"]
        except Exception as error:  # one model must not end the table
            reasons = [f"its forward raises {type(error).__name__}: {error}"]
    layers = list(stream.layers)
    counts = collections.Counter(reasons)
    texts = [
        f"{reason} ({count} layers)" if count > 1 else reason for reason, count in counts.items()
    ]
    largest = max((differences.by_layer[layer] for layer in layers), default=None)
    return {
        "class": type(model).__name__,
        "image": f"{height} x {width}",
        "layers": f"{len(layers)} ({sum(on_grid[layer] for layer in layers)})" if layers else "0",
        "difference": "" if largest is None else f"{largest:.1e}",
        "not recorded": "; ".join(texts),
    }


def page(rows: Mapping[str, Row | None], kinds: Sequence[Sequence[str]]) -> str:
    """Return the document.

    Args:
        rows: Row of the first model of each kind; None if it has no module that could attend.
        kinds: Names of each kind.
    """
    attending = [kind for kind in kinds if rows[kind[0]] is not None]
    lines = [
        HEADER.format(
            timm=timm.__version__,
            torch=torch.__version__.split("+")[0],
            tolerance=tolerance(torch.float32),
            recorded=sum(rows[kind[0]]["layers"] != "0" for kind in attending),
            kinds=len(attending),
            names=sum(map(len, attending)),
            others=sum(map(len, kinds)) - sum(map(len, attending)),
        )
    ]
    for model, *others in attending:
        cells = [model, *rows[model].values(), ", ".join(others)]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Write the table of timm's models and what is recorded of them."
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=[""],
        help="use models whose names contain one of these words; default: all",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "timm_models.md")
    parser.add_argument("--rows", type=Path, help="file of finished rows, to resume from")
    options = parser.parse_args(arguments)
    names = [name for name in timm.list_models() if any(word in name for word in options.models)]
    if not names:
        parser.error(f"expected words of names of timm's models, got {options.models}")
    warnings.simplefilter("ignore")  # models warn about their own arguments
    rows: dict[str, Row | None] = {}
    if options.rows is not None and options.rows.exists():
        rows = dict(map(json.loads, options.rows.read_text().splitlines()))
    kinds = kinds_of(names)
    for kind in tqdm(kinds):
        model = kind[0]
        if model not in rows:
            rows[model] = describe(model)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(f"{json.dumps([model, rows[model]])}\n")
    options.out.write_text(page(rows, kinds))


if __name__ == "__main__":
    main()
