"""End of a study: checks, refusals, and the exit code for each."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

__all__ = ["InputError", "ended", "finish", "learned", "refused", "side_of_zero"]

REFUSED, NOT_SEEN, INTERRUPTED = 2, 3, 130  # 1 is Python's own, for a crash


class InputError(Exception):
    """Input of a user that a study cannot use. The message says what to do."""


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these types, which the user's input caused, into refusals."""
    try:
        yield
    except kinds as error:
        raise InputError(str(error) or type(error).__name__) from error


def ended(main: Any, arguments: list[str] | None = None) -> int:
    """Run a study and return the exit code of ``main``,
    or 2 for a refusal, with a message but no traceback.
    """
    try:
        return main(arguments)
    except InputError as error:
        # The message of an error in a loading process begins with its traceback.
        reason = str(error).rpartition("InputError: ")[2].strip()
        print(f"{Path(main.__code__.co_filename).name}: {reason}", file=sys.stderr)
        # argparse exits with the same code for wrong options.
        return REFUSED
    except KeyboardInterrupt:
        print("\ninterrupted; the same command with --resume continues", file=sys.stderr)
        return INTERRUPTED


def finish(passed: bool, data: str) -> int:
    """Return the exit code after the checks:
    on the user's own data a check that fails is a finding, not an error.
    """
    if passed:
        return 0
    # On the digits a check that fails is a fault in the code or a matter of chance to look into.
    if data == "digits":
        return NOT_SEEN
    print("The checks say what the digits show. On your own data they are findings, not errors.")
    return 0


def side_of_zero(
    interval: Iterable[float], above: str, below: str, neither: str = "undecided"
) -> str:
    """Return the word for an interval that lies above zero, lies below it, or contains it."""
    low, high = interval
    if low > 0:
        return above
    return below if high < 0 else neither


def learned(model: str, accuracy: float, images: int, chance: float) -> bool:
    """Return whether accuracy is above chance (one-sided binomial test, 1 %);
    print a line if it is not.

    Args:
        model: Name of the model.
        accuracy: Accuracy on the images.
        images: Number of images.
        chance: Accuracy of always naming the most frequent class.
    """
    if binomtest(round(accuracy * images), images, chance, alternative="greater").pvalue < 0.01:
        return True
    print(
        f"check: {model} did NOT learn: accuracy {accuracy:.3f} on {images} images is not "
        f"significantly above the {chance:.3f} of always naming the most frequent class"
    )
    return False
