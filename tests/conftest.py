"""Loaded before torch is: on a busy machine, threads that spin while they wait make it ten times slower."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
