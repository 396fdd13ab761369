"""Fixture that runs the command with arguments that it refuses."""

from collections.abc import Callable

import pytest

from tcnn_model.training.command import main


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command,
    asserts that it refuses its arguments, and returns its message.
    """

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        return capsys.readouterr().err

    return run
