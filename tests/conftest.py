"""Settings made before torch and Triton are imported,
marks, and time saved on garbage collection and fsync.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extras import ABSENT

# pytest runs on all cores, so each of its processes needs one thread: the networks are tiny, and
# several threads would change the order of sums. Threads that spin while they wait make torch ten
# times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Where no bytecode may be written, as in most containers, each worker and each new interpreter
# would compile torch and timm again, which takes ten seconds. Pytest's folder keeps it.
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch

# Without a GPU, the kernels are tested through Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# During collection: each run would visit half a million objects that stay, and take 0.3 s.
gc.disable()
# The collector sees all objects again as the process ends, lest extensions report them as leaks;
# not before, as pytest's last collections would visit them, and take 0.7 s each.
atexit.register(gc.unfreeze)


TESTS = Path(__file__).parent


MARKS = "study", "document", "browser"  # of tests outside the core
CORE = f"not ({' or '.join(MARKS)})"
EXPERIMENTS = {
    f"test_{name}.py"
    for name in (
        *("crash", "soak"),  # kills and crashes at random or at every step
        *("kills", "resume", "checkpoint", "shards"),  # trainings that end early and are resumed
        *("callbacks", "finetuning"),  # trainings that are recorded
        *("processes", "s3"),  # several processes; a server
        *("compile", "flex"),  # dynamo, whose first graph takes seconds
    )
}


def mark_of(path: Path) -> str | None:
    """Return the mark of a file whose tests do not belong to the core."""
    if path.is_relative_to(TESTS / "studies") or path.parent.name == "benchmarks":
        return "study"
    if path.name in EXPERIMENTS:
        return "study"
    if path.name in ("test_browser.py", "test_explorer.py"):
        return "browser"
    # Files beside this one test what all packages share: imports and public names belong to the
    # core.
    if path.parent == TESTS and path.name not in (
        "test_imports.py",
        "test_public_surface.py",
    ):
        return "document"
    return None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return one worker more than cores, because experiments wait for the disk or a process;
    without them, as many as cores.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return cores + (config.option.markexpr != CORE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests outside the core, run them first,
    and skip tests that the installed timm is too old for.
    """
    for item in items:
        if mark := mark_of(item.path):
            item.add_marker(mark)
        # study(but=[...]) names cases that stay in the core.
        for mark in [*item.iter_markers("study")]:
            if mark.kwargs and item.callspec.id in mark.kwargs["but"]:
                item.own_markers.remove(mark)
    # Files with experiments take longest. A worker that began one at the end would keep the others
    # waiting.
    long = {item.path for item in items if {*MARKS} & {mark.name for mark in item.iter_markers()}}
    items.sort(key=lambda item: item.path not in long)
    # This import loads timm and with it Triton, so it comes after the settings above.
    from tests.older_packages import skip_what_cannot_pass

    skip_what_cannot_pass(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Give all skips for absent packages one place, so that the summary counts them in one line."""
    if report.skipped and ABSENT in str(report.longrepr):
        report.longrepr = (str(TESTS / "extras.py"), None, ABSENT)


pytest_collectreport = pytest_runtest_logreport


def pytest_collection_finish() -> None:
    """Enable garbage collection again after collection, without the objects that stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _collections_of_new_objects() -> None:
    """Spare the garbage collector what earlier files have imported, 0.2 s each time."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _disk_without_waiting() -> Iterator[None]:
    """Replace fsync by a no-op: no test cuts the power,
    and the system keeps everything that a killed process wrote.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
