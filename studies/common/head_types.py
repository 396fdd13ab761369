"""How the studies call and colour the types that ``tcnn_probe.head_types(..., by="gate")`` gives.

"content" is the name that it has for a gate of at most 1/3. Such a head attends little by position; whether it then
follows what is in the image is another question, so texts and figures say "low-gate".
"""

from tcnn_probe.plot import OKABE_ITO

__all__ = ["COLORS", "PAIR", "WORDS"]

PAIR = ("convolutional", "content")
WORDS = {"convolutional": "convolutional", "mixed": "mixed", "content": "low-gate"}
COLORS = {"convolutional": OKABE_ITO["blue"], "mixed": OKABE_ITO["green"], "content": OKABE_ITO["vermillion"]}
