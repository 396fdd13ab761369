"""Two processes that record together: what each of them does is in ranks.py. CPU and gloo."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.tcnn_probe.contracts import ranks
from tests.tcnn_probe.contracts.helpers import fresh_processes


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_processes(2) as pool:
        told = pool.starmap_async(ranks.main, [(rank, tmp_path) for rank in range(2)], chunksize=1).get(timeout=300)
    assert told == [[scenario.__name__ for scenario in ranks.SCENARIOS]] * 2
