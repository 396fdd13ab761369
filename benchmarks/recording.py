"""(e) The cost of recording: a recorded forward against a plain one,
and against other ways to observe attention.

    # DeiT-S and T-ResNet50, batch 8 at 224; about 6 minutes on one core
    python benchmarks/recording.py

"idle" is a training step while a recorder that waits for validation is attached. The time of mark()
as the number of epochs grows is printed last.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import timm
import torch
from timm.layers import set_fused_attn
from timm.utils import AttentionExtract
from torch import nn
from tqdm.auto import tqdm

import contest
import tcnn_model.models  # noqa: F401  (registers t_resnet50 with timm)
import tcnn_probe


def contests(arguments: argparse.Namespace) -> Mapping[str, contest.Contest]:
    """Return the contests."""
    torch.manual_seed(0)
    x = torch.randn(
        arguments.batch,
        3,
        224,
        224,
        device=arguments.device,
        dtype=getattr(torch, arguments.dtype),
    )
    if arguments.size:
        x = x[..., : arguments.size, : arguments.size]
    result = {}
    for name in arguments.models:
        model = _model(name, arguments).to(x)
        ways: dict[str, Callable[[], contest.Step]] = {
            "forward": lambda model=model: _forward(model, x),
            "recorded": lambda model=model: _recorded(model, x),
            "a hook that does nothing": lambda model=model: _hooked(model, x, _nothing),
        }
        if "vit" in name or "deit" in name:
            # Both read the matrix of attention, which torch's fused attention never forms.
            ways["every softmax kept"] = lambda name=name: _kept(
                _model(name, arguments, fused=False).to(x), x
            )
            ways["timm's AttentionExtract"] = lambda name=name: _extracted(
                _model(name, arguments, fused=False), x
            )
        result[f"{name}, forward"] = ways
        result[f"{name}, training"] = {
            # Each step has a copy, as training changes the running statistics of batch norms in
            # place.
            "step": lambda model=model: _training(copy.deepcopy(model), x, record=False),
            "step, recorder idle": lambda model=model: _training(
                copy.deepcopy(model), x, record=True
            ),
        }
    return result


def _model(name: str, arguments: argparse.Namespace, *, fused: bool = True) -> nn.Module:
    # ViTs are built for one image size, ResNets take any.
    options = {"img_size": arguments.size} if arguments.size and "resnet" not in name else {}
    # timm's layers read the switch when they are made.
    set_fused_attn(fused)
    try:
        return timm.create_model(name, **options).eval()
    finally:
        set_fused_attn(True)


def _forward(model: nn.Module, x: torch.Tensor) -> contest.Step:
    @torch.inference_mode()
    def step() -> None:
        model(x)

    return step


def _recorded(model: nn.Module, x: torch.Tensor) -> contest.Step:
    model = copy.deepcopy(model)
    return _keeping(tcnn_probe.record(model), _forward(model, x))


def _keeping(recorder: tcnn_probe.Recorder, step: contest.Step) -> contest.Step:
    """Return a step that keeps the recorder,
    as one that nothing refers to is released from its model.
    """

    def recorded(recorder: tcnn_probe.Recorder = recorder) -> None:
        step()

    return recorded


def _hooked(model: nn.Module, x: torch.Tensor, hook: Callable[..., None]) -> contest.Step:
    model = copy.deepcopy(model)
    # Every module has a hook, as in a tool that does not know where attention is computed.
    for module in model.modules():
        module.register_forward_hook(hook)
    return _forward(model, x)


def _nothing(*_: object) -> None:
    pass


def _kept(model: nn.Module, x: torch.Tensor) -> contest.Step:
    """Keep the attention of every layer, as a matrix,
    until the forward has ended, as nnsight does.
    """
    attentions: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("attn_drop"):
            module.register_forward_hook(lambda module, args, output: attentions.append(output))

    @torch.inference_mode()
    def step() -> None:
        model(x)
        for attention in attentions:
            torch.special.entr(attention).sum(-1).mean((0, 2))
        attentions.clear()

    return step


def _extracted(model: nn.Module, x: torch.Tensor) -> contest.Step:
    extractor = AttentionExtract(model.to(x), method="fx")

    @torch.inference_mode()
    def step() -> None:
        for attention in extractor(x).values():
            torch.special.entr(attention).sum(-1).mean((0, 2))

    return step


def _training(model: nn.Module, x: torch.Tensor, *, record: bool) -> contest.Step:
    model.train()
    step = contest.training_step(model, x)
    return _keeping(tcnn_probe.record(model), step) if record else step


def marking(epochs: int) -> None:
    """Print the time of mark() with 12 layers of 6 heads,
    in the first and in the last tenth of the epochs.
    """
    model = timm.create_model(
        # With a single patch and one channel per head, the forward between two marks costs next to
        # nothing.
        "vit_tiny_patch16_224",
        img_size=16,
        num_heads=6,
        embed_dim=6,
    ).eval()
    print(
        "\nmark(), 12 layers of 6 heads, in milliseconds: median of the first and of the last "
        "tenth of the epochs"
    )
    with tempfile.TemporaryDirectory() as folder:
        for place, store in (
            ("in memory", None),
            ("on disk", Path(folder) / "run.zarr"),
        ):
            with tcnn_probe.record(model, store) as recorder, torch.inference_mode():
                milliseconds = []
                for epoch in tqdm(range(epochs), disable=None, leave=False):
                    model(torch.randn(1, 3, 16, 16))
                    start = time.perf_counter()
                    recorder.mark(epoch=epoch, top1=0.5)
                    milliseconds.append(1e3 * (time.perf_counter() - start))
            # Medians are used, as one slow write to a busy disk would dominate a mean.
            tenth = max(1, epochs // 10)
            first = statistics.median(milliseconds[:tenth])
            last = statistics.median(milliseconds[-tenth:])
            print(
                f"{place}: {first:.1f} and {last:.1f}, ratio {last / first:.2f}, at {epochs} epochs"
            )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = contest.options(__doc__)
    parser.add_argument("--models", nargs="+", default=["deit_small_patch16_224", "t_resnet50"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, help="side of the images, if not 224")
    parser.add_argument("--epochs", type=int, default=1000, help="epochs to mark")
    return parser


if __name__ == "__main__":
    contest.main(parser(), contests)
    if not parser().parse_args().child:
        marking(parser().parse_args().epochs)
