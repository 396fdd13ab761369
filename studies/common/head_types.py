"""Names and colours of the types of heads that ``tcnn_probe.head_types`` gives."""

from tcnn_probe.plot import OKABE_ITO

__all__ = ["BY_GATE", "COLORS", "PAIR"]

PAIR = ("convolutional", "content")
COLORS = {
    "convolutional": OKABE_ITO["blue"],
    "mixed": OKABE_ITO["green"],
    "averaging": OKABE_ITO["purple"],
    "positional": OKABE_ITO["sky blue"],
    # Of salient heads, too.
    "content": OKABE_ITO["vermillion"],
}

BY_GATE = {"convolutional": "convolutional", "mixed": "mixed", "content": "low-gate"}
"""Words for the types of ``by="gate"``. Type "content" then means a gate of at most 1/3: such a
head attends little by position, which does not tell whether it follows the content of the image.
"""
