"""The command, run with what it refuses."""

from collections.abc import Callable

import pytest

from tcnn_model.training.command import main


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command with arguments that it must refuse; what it says."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        return capsys.readouterr().err

    return run
