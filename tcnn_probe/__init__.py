"""See, while a vision model trains, which of its heads convolve and which attend to content."""

from tcnn_probe.recorder import Recorder, record

__all__ = ["Recorder", "record"]
