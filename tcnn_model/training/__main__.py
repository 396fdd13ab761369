"""``tcnn-finetune``, or ``python -m tcnn_model.training``.

Options are read before torch and timm are imported, which takes many seconds.
"""

import sys

from tcnn_model.training.config import parse

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit status, as of :func:`tcnn_model.training.command.main`."""
    try:
        parse(arguments)  # prints help, or the option that is wrong, and exits
        from tcnn_model.training import command
    except (ValueError, OSError) as error:
        print(f"tcnn-finetune: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("timm", "torch", "torchvision"):
            raise
        print(f"tcnn-finetune needs {error.name}: pip install torch timm", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tcnn-finetune: interrupted", file=sys.stderr)
        return 130
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
