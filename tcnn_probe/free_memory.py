"""Memory that a process may still use."""

from pathlib import Path

__all__ = ["available_bytes"]

# Of the control group of a container (version 2, Linux).
_GROUP = "/sys/fs/cgroup/memory"


def available_bytes() -> int | None:
    """Return how much memory is free on the machine
    and within the container's limit; None where it is unknown.
    """
    machine = _number("/proc/meminfo", "MemAvailable:")
    amounts = [] if machine is None else [1024 * machine]
    limit = _number(f"{_GROUP}.max")  # "max" if there is none
    used = _number(f"{_GROUP}.current")
    if limit is not None and used is not None:
        # Files that were read count as used until their place is needed.
        files = _number(f"{_GROUP}.stat", "inactive_file") or 0
        amounts.append(limit - used + files)
    return min(amounts, default=None)


def _number(path: str, name: str = "") -> int | None:
    """Return the number behind a name in a file of lines "name number",
    or the file's only number.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number = line.removeprefix(name).split()[:1]
        if line.startswith(name) and number and number[0].isdigit():
            return int(number[0])
    return None
