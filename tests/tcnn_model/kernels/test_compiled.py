"""The kernel of softmax statistics as compiled for compute capability 9.0, by Triton's own compiler and assembler.

In a process of its own: this one has Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tcnn_model.kernels import softmax

ROOT = Path(__file__).parents[3]
# Head sizes in each dtype: one that is padded, and the widest that recorders leave to the kernel. The command
# benchmarks/kernel_resources.py compiles all that models have.
HEADS = {"bfloat16": [80, 256], "float32": [128]}
# Shared memory of a program on the GPUs of compute capability 8.6 and 8.9, the least since 8.0.
SHARED = 99 * 1024

COMPILE = f"""
import json, kernel_resources, torch
for name, dims in {HEADS}.items():
    resources = kernel_resources.compiled(dims, getattr(torch, name))
    print(json.dumps([name, {{key: list(r) for key, r in resources.items()}}]))
"""


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list]]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    cache = str(tmp_path_factory.mktemp("triton"))
    settings = {
        "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": path,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def test_no_spills_and_shared_memory_of_any_gpu(
    resources: dict[str, dict[str, list]],
) -> None:
    for name, dims in HEADS.items():
        assert len(resources[name]) == 2 * len(dims)
        for kind, (registers, spilled, shared) in resources[name].items():
            assert 0 < registers <= 255
            # Products in full float32 have no tensor cores, and take more registers.
            assert spilled == 0 or name == "float32", (name, kind)
            assert shared <= SHARED, (name, kind)


def test_the_widest_head_is_compiled() -> None:
    widest = {name: max(dims) for name, dims in HEADS.items()}
    assert {d * getattr(torch, name).itemsize for name, d in widest.items()} == {
        softmax._WIDEST_HEAD
    }
