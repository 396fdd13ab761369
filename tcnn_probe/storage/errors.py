"""What a store raises."""

__all__ = ["StoreError"]


class StoreError(ValueError):
    """The store holds something else, is damaged, or is being written by another recorder."""
