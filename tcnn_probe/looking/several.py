"""Many models, each with a page, and a table that leads to these;
here, or on the workers of a dask cluster.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tcnn_probe.extras import needed_for
from tcnn_probe.looking.look import file_name, look
from tcnn_probe.models import first_line
from tcnn_probe.reporting import Report
from tcnn_probe.reporting.table_of_networks import table_of_networks

__all__ = ["look_at_each"]


def look_at_each(
    models: Sequence[tuple[str, str]],
    photographs: Sequence[str],
    folder: Path,
    options: Mapping[str, Any],
    scheduler: str | None = None,
) -> None:
    """Look with each of several models, and write a page for each,
    "index.html" with a table, and "index.json".

    A model that was interrupted is continued when this runs again, and one that is complete is not
    measured again.

    Args:
        models: Names of models, each with its weights.
        photographs: Folders or files, which all workers can read.
        folder: Folder of the pages, to which all workers can write.
        options: Further options of :func:`tcnn_probe.look`.
        scheduler: Address of a dask scheduler; None to look with one model after the other.

    Raises:
        ModuleNotFoundError: dask.distributed is not installed.
        ValueError: Some models failed; the pages of the others and the table are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages = {_page_name(models, number): model for number, model in enumerate(models)}
    places = [str(Path(photograph).resolve()) for photograph in photographs]
    tasks = [
        (*model, places, str((folder / page).resolve()), dict(options))
        for page, model in pages.items()
    ]
    reasons = [*map(_look_at, tasks)] if scheduler is None else _look_on_cluster(tasks, scheduler)
    results = dict(zip(pages, reasons, strict=True))
    facts = {
        page: json.loads((folder / page).with_suffix(".json").read_text(encoding="utf-8"))
        for page, reason in results.items()
        if reason is None
    }
    failures = {pages[page][0]: reason for page, reason in results.items() if reason is not None}
    table = table_of_networks(facts, failures)
    table.save(folder / "index.html")
    Report(json.dumps(table.facts, indent=1, ensure_ascii=False)).save(folder / "index.json")
    if failures:
        listed = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise ValueError(f"{len(failures)} of {len(models)} models failed: {listed}")


def _page_name(models: Sequence[tuple[str, str]], number: int) -> str:
    """Return the name of a model's page, with its checkpoint
    if several models have the same name.
    """
    name, weights = models[number]
    names = [other for other, _ in models]
    stem = name if names.count(name) == 1 else f"{name}.{Path(weights).stem}"
    return f"{file_name(stem)}.html"


def _look_at(task: tuple[str, str, Sequence[str], str, Mapping[str, Any]]) -> str | None:
    """Look with a model, and return why it failed, or None."""
    name, weights, photographs, page, options = task
    try:
        look(name, photographs, page, weights=weights, **options)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        return first_line(error)
    return None


def _look_on_cluster(tasks: Iterable[Any], scheduler: str) -> list[str | None]:
    """Look with each model on a worker; a model whose worker dies is continued by another one."""
    with needed_for("a scheduler"):
        from distributed import Client
    with Client(scheduler) as client:
        # Each call writes files, so that dask must not take two calls for the same.
        results: list[str | None] = client.gather(client.map(_look_at, [*tasks], pure=False))
    return results
