"""What a store raises."""

__all__ = ["StoreError", "WriteError"]


class StoreError(ValueError):
    """A place that holds something else, or a recording of something else."""


class WriteError(RuntimeError):
    """A mark that was handed to the background writer could not be written; the cause is the error it met."""
