"""Recording what probes measure, forward by forward, until an epoch is marked.

``recorder`` parses its arguments (``options``) and has a ``collector`` listen to the attention stream of the model
(:mod:`tcnn_probe.attention.stream`). Probes measure each attention, an ``accumulator`` adds up. At a mark the collector
closes the epoch: its report is checked (``epoch``) and laid out as arrays (``groups``), which the storage keeps.
"""
