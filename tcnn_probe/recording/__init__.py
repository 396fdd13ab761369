"""Recording of a model: probes measure its forwards until an epoch is marked and stored.

``recorder`` parses its arguments (``options``) and creates a ``collector``, which listens to the attention stream of
the model (:mod:`tcnn_probe.attention.stream`). Probes measure each attention, and an ``accumulator`` sums up their
measurements. At a mark the collector closes the epoch: its report is checked (``epoch``) and laid out as arrays
(``groups``), which the storage keeps.
"""
