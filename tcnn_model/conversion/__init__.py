"""From convolutions to GPSA layers that compute the same function."""
