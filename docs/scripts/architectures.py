"""Write ``architectures.md``, the table of layers of other libraries that are known by their class.

python docs/scripts/architectures.py  # at once; --out names another file
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from tcnn_probe.architectures.lookup import RECORDS
from tcnn_probe.architectures.record import LayerRecord

HEADER = """# Layers with a record

Some layers need more than what is [seen where a model calls torch](recording.md#your-own-model).
What they need stands in a record of their class, such as the reason why XCiT has no attention
between tokens:

```python
import timm
from tcnn_probe.architectures.lookup import known

xcit = timm.create_model("xcit_nano_12_p8_224", depth=1)
print(known(xcit.blocks[0].attn).no_attention_matrix)
```

Written by `python docs/scripts/architectures.py` from [the
records](../tcnn_probe/architectures/timm_layers.py), which also give the reasons.

A record holds:

- *no attention matrix*: the layer looks like attention but has no matrix between tokens;
  `recorder.unsupported` says why. The layers of `convolve` are recorded, as what their heads are.
- *heads*: which axis of (..., N_query, N_key) holds the heads.
- *grid*: where queries and keys lie, or why they lie on no grid.
- *windows*: how the layer divides the image into windows, so that `attention_maps` can put them on
  the image.
- *layer-scale*, *gradient*: the probes of these names measure the layer.
"""

HEADS = {
    "merged": "heads: part of the first axis",
    "one": "heads: no axis of their own",
}


def facts(record: LayerRecord) -> Iterable[str]:
    """Yield the facts of a record in words."""
    if record.no_attention_matrix:
        yield f"no attention matrix: {record.no_attention_matrix}"
    if record.heads_axis is not None:
        yield HEADS.get(str(record.heads_axis), f"heads: axis {record.heads_axis}")
    for reason in (record.not_in_raster_order, record.latent_queries):
        if reason:
            yield f"no grid: {reason}"
    if record.own_grids:
        yield "grid: its own"
    if record.mask_units:
        yield "grid: that of its mask units"
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
        lines += [f"## {library}", "", "| class | record |", "|---|---|"]
        lines += [f"| `{name}` | {'; '.join(facts(RECORDS[name]))} |" for name in names]
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Write the table of layers that are known by their class."
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "architectures.md")
    parser.parse_args(arguments).out.write_text(page())


if __name__ == "__main__":
    main()
