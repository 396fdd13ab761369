"""Recording what probes measure, forward by forward, until an epoch is marked.

The way of a model: ``recorder`` checks what it is told (``options``, ``checks``) and has a ``collector`` follow the
attention stream (``attention/stream``, which rebuilds what ``hooks/forwards`` and ``hooks/interception`` see). Probes
measure each attention, an ``accumulator`` adds up, and at a mark ``dataset`` makes arrays of it, for ``storage``.
"""
