"""A recorder in words: what a notebook shows of it, and what is said where its epochs were forgotten."""

from collections.abc import Mapping, Sequence

__all__ = ["described", "forgotten"]


def described(
    layers: Sequence[str],
    along: str,
    marks: Sequence[int | float],
    images: int,
    missing: Mapping[str, Mapping[str, str]],
    unsupported: Mapping[str, str],
    place: str,
) -> str:
    """What to show of a recorder, a line each."""
    lacking = {f"{name} of {_count(len(why), 'layer')}": next(iter(why.values())) for name, why in missing.items()}
    shown = {
        "layers": f"{len(layers)} ({_ends(layers)})" if layers else "none yet: attention is found in the first forward",
        f"{along}s": f"{len(marks)} ({_ends(marks)})" if marks else "none yet",
        f"since the last {along}": _count(images, "image"),
        "missing": "; ".join(f"{what}: {why}" for what, why in lacking.items()) or "nothing",
        "unsupported": "; ".join(f"{layer}: {why}" for layer, why in unsupported.items()) or "nothing",
        "kept in": place,
    }
    return "\n".join(f"  {name}: {text}" for name, text in shown.items())


def forgotten(along: str, *, marked: bool, images: int, training: int) -> str:
    """What to warn of when the recording ends, if anything, after so many images and forwards in training mode."""
    advice = f"call mark({along}=...) after each validation"
    if images:
        since = "since the last mark" if marked else "and nothing was marked"
        return (
            f"{_count(images, 'image')} measured {since}: they are not in the recording. To keep them, {advice}; for "
            f"forwards that do not belong to it there is recorder.pause()"
        )
    if training and not marked:
        return f"nothing was recorded, as nothing was marked: {advice}"
    return ""


def _ends(items: Sequence[object]) -> str:
    return ", ".join(map(str, items if len(items) < 4 else (items[0], items[1], "...", items[-1])))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
