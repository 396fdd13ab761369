"""What a store raises."""

__all__ = ["StoreError"]


class StoreError(ValueError):
    """A place that holds something else, is damaged, or is being written by another recorder."""
