"""Whether attention that replaces convolutions gains from content, or only from mixing over the image.

    python studies/content_or_mixing.py --data cifar10 --weights resnet20.safetensors --out results/content_or_mixing

This first commit holds only the preparation: a ResNet-20 fine-tuned to its plateau on the images at hand. The protocol
of the comparison follows before any arm of it is trained.
"""

import argparse
import sys
from pathlib import Path

import torch

from common.ending import ended
from common.resnet20 import ResNet20, load_weights
from common.small_images import decoded, split
from common.small_trainings import fine_tune_cnn
from tcnn_model.training.checkpoint import write_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Fine-tune the CNN."""
    args = parse(arguments)
    torch.set_num_threads(1)
    out = Path(args.out)
    train, held_out = split(decoded(args.data, out / "images")[0], args.held_out)
    model = load_weights(ResNet20(), args.weights)
    curve: list[float] = []

    def report(epoch: int, accuracy: float) -> None:
        curve.append(accuracy)
        print(f"CNN, epoch {epoch}: {accuracy:.4f} of {len(held_out)} held-out training images", flush=True)

    torch.manual_seed(0)
    options = {"epochs": args.cnn_epochs, "batch_size": 128, "lr": 2e-3, "weight_decay": 0.05, "amp": True}
    fine_tune_cnn(model, train, held_out, report=report, **options)
    write_checkpoint(out / "cnn.pt", {"model": model.state_dict(), "held_out": curve, "options": options})
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", default="results")
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--cnn-epochs", type=int, default=8)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(ended(main))
