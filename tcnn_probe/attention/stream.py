"""Each attention of a model's forwards, rebuilt and on its grid, handed to whoever wants to look at it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attention.call import AttentionCall

__all__ = ["attention_stream"]


@contextmanager
def attention_stream(model: nn.Module, on_attention: Callable[[AttentionCall], None]) -> Iterator[Any]:
    """Every attention of the forwards inside is shown to ``on_attention``, fused attention left on.

    Args:
        model: any module.
        on_attention: called with each attention while the forward runs, without gradients.

    Yields:
        what knows afterwards, as ``.layers``, which layers did attend: a softmax counts once it has weighed values.
    """
    from tcnn_probe.probes import Probe
    from tcnn_probe.recording.recorder import record
    from tcnn_probe.schema import Variable

    def show(call: AttentionCall) -> dict[str, Tensor]:
        on_attention(call)
        return {"seen": torch.ones(call.images)}

    seen = Variable(("layer",), "1", "seen", "Whether attention was seen.")
    with record(model, probes=Probe("stream", {"seen": seen}, attention=show), when="always", distributed=False) as r:
        yield r
