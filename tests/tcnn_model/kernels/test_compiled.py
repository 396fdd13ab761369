"""The kernel of softmax statistics, compiled
for compute capability 9.0 by Triton's compiler and assembler.

Compilation runs in another process, because this one uses Triton's interpreter.
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
# In each dtype, the widest heads that recorders give to the kernel, which need the most of both.
# The command benchmarks/kernel_resources.py compiles all sizes that models have.
HEADS = {"bfloat16": 256, "float32": 128}
# GPUs of compute capability 8.6 and 8.9 have the least shared memory per program of all since 8.0.
SHARED = 99 * 1024

COMPILE = f"""
import json, kernel_resources, torch
for name, width in {HEADS}.items():
    resources = kernel_resources.compiled([width], getattr(torch, name))
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


@pytest.mark.study
def test_kernels_do_not_spill_and_fit_the_shared_memory_of_any_gpu(
    resources: dict[str, dict[str, list]],
) -> None:
    for name in HEADS:
        assert len(resources[name]) == 2
        for kind, (registers, spilled, shared) in resources[name].items():
            assert 0 < registers <= 255
            # Products in full float32 do not use tensor cores, and need more registers.
            assert spilled == 0 or name == "float32", (name, kind)
            assert shared <= SHARED, (name, kind)


def test_the_widest_head_is_compiled() -> None:
    assert {d * getattr(torch, name).itemsize for name, d in HEADS.items()} == {
        softmax._WIDEST_HEAD
    }
