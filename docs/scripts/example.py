r"""Make the recording that ``tcnn_probe.load_example`` opens,
from the weights of every epoch of a study.

    python studies/attention_maps.py --model tf_efficientnet_lite0 --pretrained \
        --data imagenette2-160 --img-size 128 --limit 1600 --epochs 5 --batch-size 32 \
        --augment light --lr 1e-4 --qk-lr 1e-4 --gating-lr 0.1 --out results/photos
    python docs/scripts/example.py results/photos

At each epoch a photograph whose maps are saved is recorded first, and then the validation
photographs of the study.
"""

import argparse
import sys
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import tcnn_model
import tcnn_probe

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "studies"))

from common.output import saved_options  # noqa: E402
from common.training import model_and_data  # noqa: E402

PHOTOGRAPH = "china.jpg"


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="--out of the study")
    parser.add_argument("--out", type=Path, default=ROOT / "tcnn_probe" / "storage" / "example.zip")
    given = parser.parse_args(arguments)
    options = saved_options(given.run, "attention_maps")
    cnn, (_, validation) = model_and_data(Namespace(**options, workers=0, device="cpu"))
    model = tcnn_model.reparameterize(cnn).eval()
    trained = tcnn_probe.open(given.run / "attention_maps_recording.zarr")
    store = given.run / "example.zarr"
    photograph = validation.dataset.transform(Image.fromarray(load_sample_image(PHOTOGRAPH)))[None]
    kept = {
        name: options[name]
        for name in (
            "model",
            "img_size",
            "limit",
            "batch_size",
            "lr",
            "gating_lr",
            "seed",
        )
    }
    with tcnn_probe.record(
        model, store, mode="w", images=[0], attrs=kept | {"photograph": PHOTOGRAPH}
    ) as recorder:
        for epoch in trained.epoch.values.tolist():
            weights = given.run / "attention_maps_checkpoints" / f"tcnn-{epoch:04d}.pt"
            model.load_state_dict(torch.load(weights, weights_only=True))
            model(photograph)
            for images, _ in validation:
                model(images)
            recorder.mark(
                epoch=epoch,
                **{
                    name: float(values.sel(epoch=epoch))
                    for name, values in trained.data_vars.items()
                },
            )
    pack(store, given.out)


def pack(store: Path, out: Path) -> None:
    """Write a recording to the zip file of the package."""
    files = [path for path in store.rglob("*") if path.is_file()]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(files):
            # The lock and other files of the writer are left out.
            if not file.name.startswith("."):
                packed.write(file, file.relative_to(store))
    print(f"wrote {out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
