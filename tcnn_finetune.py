"""The command ``tcnn-finetune``. Options are read before torch and timm are imported, which takes many seconds."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit status, as of :func:`tcnn_model.training.command.main`."""
    try:
        # Prints help, or the option that is wrong, and exits.
        _settings().parse(arguments)
        from tcnn_model.training import command
    except (ValueError, OSError) as error:
        print(f"tcnn-finetune: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("timm", "torch", "tqdm"):
            raise
        hint = "pip install 'tcnn-probe[torch]'"
        print(f"tcnn-finetune: there is no {error.name}: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tcnn-finetune: interrupted", file=sys.stderr)
        return 130
    return command.main(arguments)


def _settings() -> ModuleType:
    """Run ``tcnn_model/training/config.py`` by itself: to import it from its package would be to import torch."""
    package = importlib.util.find_spec("tcnn_model")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "training" / "config.py"
    spec = importlib.util.spec_from_file_location("tcnn_finetune_settings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
