"""Records of this project's own layers."""

from collections.abc import Mapping

from tcnn_probe.architectures.record import HeadParameters, LayerRecord

__all__ = ["OWN_LAYERS"]

_GPSA_ROWS = ("query", "key", "raw_locality", "center", "gating")

OWN_LAYERS: Mapping[str, LayerRecord] = {
    # The output projection of a head is a tap of the weight, instead of columns of a matrix as in
    # other layers.
    "tcnn_model.gpsa.layer.GPSA": LayerRecord(
        head_parameters=HeadParameters(dict.fromkeys(_GPSA_ROWS, 1), taps="weight"),
    ),
    # Their attention is described as a whole, which records it but edits no heads.
    **dict.fromkeys(
        (
            "tcnn_model.convolved.attention.ConvolvedAttention",
            "tcnn_model.convolved.gpsa.ConvolvedGPSA",
            "tcnn_model.convolved.gpsa.AttendingHeads",
        ),
        LayerRecord(
            no_attention_matrix="some of its heads are convolutions: edit heads of the model "
            "before tcnn_model.convolve"
        ),
    ),
}
