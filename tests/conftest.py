"""Settings that must be made before torch, and Triton, are loaded."""

import os

# On a busy machine, threads that spin while they wait make torch ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

if not torch.cuda.is_available():  # the kernels are then tested through Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
