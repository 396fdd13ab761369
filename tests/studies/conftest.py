"""Images of one's own, as the studies take them, what the studies refuse, and their small forms, each run once."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path.stem for path in (ROOT / "studies").glob("*.py"))


class Done(NamedTuple):
    """A study's small form has run."""

    code: int
    printed: str
    out: Path


SmallRun = Callable[[str], Done]


@pytest.fixture(scope="session")
def small_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallRun]:
    """Gives what ``python studies/NAME.py --small`` left; it runs once a session, whoever asks.

    The studies of which there are tests in this session all start with the first question, two at a time: each takes
    one core.
    """
    folder = tmp_path_factory.mktemp("small")
    here = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": here}

    def run(study: str) -> Done:
        command = [sys.executable, f"studies/{study}.py", "--small", "--device", "cpu", "--out", str(folder / study)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout + done.stderr, folder / study)

    with ThreadPoolExecutor(2) as pool:
        runs: dict[str, Future[Done]] = {}

        def wanted(study: str) -> Done:
            for name in [study, *STUDIES]:
                if name not in runs and (name == study or any(name in item.nodeid for item in request.session.items)):
                    runs[name] = pool.submit(run, name)
            return runs[study].result()

        yield wanted
        for future in runs.values():
            future.cancel()


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of four noise images each, no two sides alike, in train/ and val/."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for n in range(4):
                pixels = rng.integers(0, 255, (71, 83, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / label / f"{n}.png")
    return tmp_path / "images"


Refusal = Callable[[Any, list[str]], str]


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a study with options that it has to refuse, with nothing written; gives what it says."""

    def of(study: Any, options: list[str]) -> str:
        try:
            code = study.main([*options, "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return of
