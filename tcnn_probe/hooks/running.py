"""Which call of a module is running, read off Python's stack: true also after an exception that no hook is told of."""

import sys
from types import FrameType

from torch.nn.modules import module as torch_module

__all__ = ["innermost_call", "is_under", "thread_is_under"]

_LOOKS = 100


def innermost_call(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, in which torch calls a module; ``self`` in it is the module."""
    while frame is not None and not _calls_a_module(frame):
        frame = frame.f_back
    return frame


def is_under(frame: FrameType | None, call: FrameType | None) -> bool:
    """Whether a frame was called, directly or not, from the frame of a call: then that call is running."""
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def thread_is_under(thread: int, call: FrameType) -> bool:
    """Whether a thread is in a call; it goes on meanwhile, and so may break off its stack while that is read."""
    for _ in range(_LOOKS):
        if (frame := sys._current_frames().get(thread)) is None:
            return False
        if is_under(frame, call):
            return True
        if _bottom(frame) is _bottom(call):
            return False
    return False  # the call has ended


def _bottom(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _calls_a_module(frame: FrameType) -> bool:
    # By file, as torch.compile resumes _call_impl under other names; not "inner", which ends before the last hooks run.
    return frame.f_code.co_filename == torch_module.__file__ and frame.f_code.co_name != "inner"
