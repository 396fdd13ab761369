"""Recording of a model: probes measure its forwards until an epoch is marked and stored.

``recorder`` parses its arguments (``options``) and creates a ``collector``, which listens to the
attention stream of the model (:mod:`tcnn_probe.attention.stream`). A number has three forms on its
way to disk: values of a forward (``measured``), sums of an epoch (``sums``), and a dataset, by its
groups (``groups``), which are checked (``checks``) and stored.
"""
