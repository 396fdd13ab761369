"""Two processes that record together: what each of them does is in ranks.py. CPU and gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

SCENARIOS = ["values", "resume", "parameters", "classes", "errors", "uneven"]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.tcnn_probe.contracts.ranks", "all", str(rank), str(tmp_path)],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
    assert [line.split()[1] for line in told[0].splitlines() if line.startswith("passed")] == SCENARIOS
