"""Recording what probes measure, forward by forward, until an epoch is marked."""
