"""Which layers of other libraries are known by their class: writes ``architectures.md`` beside it.

python docs/architectures.py  # at once; --out says where to
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from tcnn_probe.architectures.lookup import RECORDS
from tcnn_probe.architectures.record import LayerRecord

HEADER = """# Layers that are known

Written by `python docs/architectures.py` from [the records](../tcnn_probe/architectures/timm_layers.py), which have
the reasons beside them.

Most models need no record: [attention is seen where torch is asked for it](recording.md#your-own-model). A class has
one where no call of torch shows what is to be known:

- *not recorded*: it looks like attention and has no matrix of weights between tokens. `recorder.unsupported` has the
  reason.
- *heads*: which axis of (..., N_query, N_key) is that of the heads.
- *grid*: where its queries and keys lie, or why they lie on no grid.
- *windows*: how it cuts them, so that `attention_maps` puts them on the image.
- *layer-scale*, *gradient*: the probes of these names measure it.
"""

HEADS = {
    "merged": "heads: part of the first axis",
    "one": "heads: no axis of their own",
}


def facts(record: LayerRecord) -> Iterable[str]:
    """Yield what a record says, in words."""
    if record.no_attention_matrix:
        yield f"not recorded: {record.no_attention_matrix}"
    if record.heads_axis is not None:
        yield HEADS.get(str(record.heads_axis), f"heads: axis {record.heads_axis}")
    for reason in (record.not_in_raster_order, record.latent_queries):
        if reason:
            yield f"no grid: {reason}"
    if record.own_grids:
        yield "grid: its own"
    if record.strided:
        yield "grid: pooled by strides"
    if record.spread_evenly is not None:
        yield "grid: tokens spread evenly over the image"
    if record.windows:
        yield "windows"
    if record.branches:
        yield "layer-scale"
    if record.head_parameters:
        yield "gradient"


def page() -> str:
    """Return the document: a table for each library."""
    lines = [HEADER]
    for library, names in itertools.groupby(
        sorted(RECORDS), key=lambda name: name.partition(".")[0]
    ):
        lines += [f"## {library}", "", "| class | known |", "|---|---|"]
        lines += [f"| `{name}` | {'; '.join(facts(RECORDS[name]))} |" for name in names]
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Write the table of layers that are known by their class."
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.parse_args(arguments).out.write_text(page())


if __name__ == "__main__":
    main()
