"""Variables that several kinds of attention share,
so that their heads can be compared in one dataset.
"""

from tcnn_probe.schema import Variable

__all__ = [
    "CLASS_ENTROPY",
    "DISTANCE",
    "ENTROPY",
    "HEAD",
    "IMAGE_MEAN",
    "LOGIT",
    "MAPS",
    "MAP_DIMS",
    "MEAN",
    "UNIFORM",
]

HEAD = ("layer", "head")
MAP_DIMS = ("layer", "image", "window", "head", "y", "x")
MEAN = (
    "Mean over the images and queries seen since the previous mark. Tokens that a mask hides from "
    "all queries, or that only see and are seen by themselves, are padding and do not count as "
    "queries."
)
IMAGE_MEAN = "Mean over the images seen since the previous mark."

ENTROPY = Variable(
    HEAD,
    "nat",
    "attention entropy",
    "-sum_j A_ij log A_ij over all keys, class tokens and GPSA's padding included: unlike "
    f"attention_distance, which leaves class tokens out. {MEAN}",
)
LOGIT = Variable(
    HEAD,
    "1",
    "largest attention logit",
    "max_ij of the logits that enter the softmax, with scale, bias and mask (in gated layers: q k "
    "/ sqrt(d), the logits of the content part), over the images seen since the previous mark. "
    "With extremely large logits the training of large ViTs diverged (Dehghani et al. 2023, arXiv "
    "2302.05442); Kimi K2 (arXiv 2507.20534) rescales queries and keys above 100.",
    # A single image with huge logits is the warning, and a mean would hide it.
    over_images="largest",
)
CLASS_ENTROPY = Variable(
    HEAD,
    "nat",
    "entropy of class attention",
    "-sum_j A_0j log A_0j of the class token, over all keys; if each class has a token, the mean "
    "over these tokens. " + IMAGE_MEAN,
)
DISTANCE = Variable(
    HEAD,
    "cell",
    "attention distance",
    "sum_j A_ij ||delta_ij|| (ConViT's non-locality), in cells of the finer of the grids of "
    "queries and keys: patches of a vision transformer, pixels of a feature map. GPSA: over real "
    "and padding cells. Softmax attention: between tokens of the grid, each at the centre of its "
    "cell (at its first cell where keys or queries are strided), rows renormalised over these: of "
    f"a head with 99 % of its attention on the class token, the remaining 1 % alone. {MEAN}",
)


UNIFORM = {
    "uniform_entropy": Variable(
        ("layer",),
        "nat",
        "entropy of uniform attention",
        "log N for the N keys that a query sees: the entropy of queries that attend to all of them "
        "equally. N includes class tokens and GPSA's padding, but no key that a mask hides; in "
        f"windowed attention it is the number of keys of one window. {MEAN}",
    ),
    "uniform_distance": Variable(
        ("layer",),
        "cell",
        "distance of uniform attention",
        "The attention_distance of queries that attend equally to all keys that they see: the mean "
        f"distance between the same queries and keys. {MEAN}",
        is_coordinate=True,
    ),
    "cell_pixels": Variable(
        ("layer",),
        "pixel",
        "side of a cell",
        "Height of the model's input divided by the rows of the finer of the grids of queries and "
        "keys: distances times it are in pixels, as in Dosovitskiy et al. (2021); times it and "
        "divided by the image's height, in image sides, as in Walmer et al. (2023). A model that "
        "pads its input has larger patches. "
        f"NaN if the grid does not divide the input into squares. {IMAGE_MEAN}",
        is_coordinate=True,
    ),
}
# Maps take most of a recording's bytes, and colours show fewer than the 11 bits of float16.
MAPS = {
    "attention_received": Variable(
        MAP_DIMS,
        "1",
        "attention received",
        "Mean over the queries of A_ij: the attention that each key on the grid receives.",
        dtype="float16",
    ),
    "center_attention": Variable(
        MAP_DIMS,
        "1",
        "attention of the central query",
        "A_ij over the keys on the grid, for the query at row h // 2 and column w // 2 of its h x "
        "w grid.",
        dtype="float16",
    ),
}
