"""Train the vision transformer whose recording ``tcnn_probe.load_example("vit")`` opens.

    python docs/scripts/example_vit.py

This takes two minutes on one core. A ViT of four blocks of four heads, with a class token, learns
scikit-learn's handwritten digits, 8 x 8 pixels in 4 x 4 patches. Four fifths of the digits are for
training and the others are recorded, three of them with their maps. The seed fixes images and
initial weights; on another processor the training ends with other digits of the accuracy.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from example import pack
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import tcnn_probe

ROOT = Path(__file__).parents[2]
SIDE = 8
VIT = {"img_size": SIDE, "patch_size": 2, "in_chans": 1, "num_classes": 10}
VIT |= {"embed_dim": 32, "depth": 4, "num_heads": 4, "mlp_ratio": 2}
BATCH, LR, WEIGHT_DECAY = 64, 3e-3, 0.05
# Epochs that are recorded, denser where training is fast: maps of every epoch would make the
# package too large.
MARKS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 22, 30, 40)
KEPT = 3
"""Number of images with saved maps."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "tcnn_probe" / "storage" / "example_vit.zip"
    )
    parser.add_argument("--epochs", type=int, default=MARKS[-1])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    data = load_digits()
    # scikit-learn's pixels are from 0 to 16.
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images))
    border = len(order) * 4 // 5
    train, held_out = order[:border], order[border:]
    model = VisionTransformer(**VIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    steps = given.epochs * math.ceil(len(train) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, pct_start=0.1)
    attrs = {
        "model": "VisionTransformer(" + ", ".join(f"{k}={v}" for k, v in VIT.items()) + ")",
        "data": "scikit-learn's load_digits, 1437 digits to train and 360 to record",
        "digits": held_out[:KEPT].tolist(),
        "seed": given.seed,
        "batch_size": BATCH,
        "lr": LR,
    }
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "vit.zarr"
        with tcnn_probe.record(model, store, images=range(KEPT), attrs=attrs) as recorder:
            for epoch in range(given.epochs + 1):
                if epoch > 0:
                    loss = train_epoch(model, images[train], labels[train], optimizer, schedule)
                if epoch in MARKS:
                    top1 = accuracy(model, images[held_out], labels[held_out])
                    scalars = {} if epoch == 0 else {"train_loss": loss}
                    recorder.mark(epoch=epoch, top1=top1, **scalars)
                    print(f"epoch {epoch}: accuracy {top1:.3f}", flush=True)
            types = tcnn_probe.head_types(recorder.dataset).isel(epoch=-1)
        pack(store, given.out)
    print(types.to_pandas())


def train_epoch(
    model: VisionTransformer,
    images: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> float:
    """Train on every image once; return the mean loss."""
    model.train()
    losses = []
    for rows in torch.randperm(len(images)).split(BATCH):
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: VisionTransformer, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model classifies correctly;
    the recorder sees these forward passes.
    """
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
