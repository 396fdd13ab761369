"""The interface of all that listens to attention: recorders, maps, rollout, ablations,
and functions of the user.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_edit import HeadEdit

__all__ = ["AttentionListener"]


class AttentionListener:
    """Listener to attention. Its methods do nothing: override what you need.

    An :class:`~tcnn_probe.attention.stream.AttentionStream` listens to the forwards of a model, one
    at a time, for a listener: :meth:`begins`, :meth:`attends`, :meth:`returned` and :meth:`ends` or
    :meth:`fails`. A :class:`~tcnn_probe.attention.head_editor.HeadEditor` listens to all calls of a
    layer, in all threads and when it is checkpointed: :meth:`gates`, :meth:`expects`,
    :meth:`attends`, :meth:`returned` and :meth:`add_terms`.
    """

    may_edit = False
    """True if :meth:`attends` may return edits to a stream."""

    layer: str
    """Name of the layer, for errors of an editor."""

    def begins(self, entry: nn.Module, inputs: Sequence[Any], *, continues: bool) -> bool:
        """Return whether to follow a call of ``entry``,
        the model or a part of it, which may continue a forward.
        """
        return True

    def gates(self) -> Mapping[int, float]:
        """Return new gates by head, for the call that begins; other heads keep theirs."""
        return {}

    def expects(self, attention: Attention) -> bool:
        """Return whether to be asked about an attention of the layer."""
        return True

    def attends(self, attention: Attention) -> HeadEdit | None:
        """Handle an attention, and return an edit of its heads, or None."""

    def returned(self, call: Any, output: Any) -> None:
        """Handle the return of a watched module, or of the layer.

        Args:
            call: Call of the module, with its ``module`` and ``inputs``.
            output: Its output.
        """

    def add_terms(self, call: Any, output: Tensor) -> Tensor:
        """Return the output of the layer, images first,
        with terms added in place of heads that are zero.
        """
        return output

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Handle the end of a call of the model without an exception.

        Args:
            layers: Names of the layers whose attention was multiplied with values in this call.
            output: Output of the model, or of the part of it that was called.
        """

    def fails(self) -> None:
        """Handle a call of the model that an exception has ended."""
