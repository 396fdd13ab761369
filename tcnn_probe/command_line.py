"""``tcnn-probe``: the command, whose help and refusals answer before anything large is imported."""

from collections.abc import Sequence

from tcnn_probe.command_options import create_parser

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if health finds alarms,
    2 after an error, such as an unusable recording, and else 0.

    3 says that the model of ``look`` has no attention, 130 that it was interrupted: the same
    command then continues.
    """
    options = create_parser().parse_args(arguments)
    from tcnn_probe.commands import run

    return run(options)
