"""A pretrained model and photographs in,
a recording and a page out: names, photographs, measurement.
"""

from tcnn_probe.looking.look import look

__all__ = ["look"]
