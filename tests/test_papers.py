"""The commands, models and functions that docs/papers.md names exist."""

import importlib
import re
import shlex
from pathlib import Path

import timm

from tcnn_model.training.config import parse

ROOT = Path(__file__).parent.parent
# tests/test_documents.py runs the blocks of code.
PAGE = re.sub(r"```.*?```", "", (ROOT / "docs" / "papers.md").read_text(), flags=re.DOTALL)


def named(pattern: str) -> list[str]:
    """Return the texts between backquotes that match a pattern."""
    spans = set(re.findall(r"`([^`]+)`", PAGE))
    return sorted(span for span in spans if re.fullmatch(pattern, span))


def test_commands_of_studies_exist() -> None:
    commands = named("python studies/.*")
    # Without this, an expression that matches no command would pass; the same holds below.
    assert len(commands) > 12
    common = [path.read_text() for path in ROOT.glob("studies/common/*.py")]
    for command in commands:
        script, *options = shlex.split(command)[1:]
        texts = "".join([(ROOT / script).read_text(), *common])
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in texts, command


def test_models_of_studies_have_weights() -> None:
    """Models of DINO have weights besides the supervised ones (Table 4.2); a tag names them."""
    names = set()
    for command in named("python studies/.*"):
        values = re.search(r"--models? ([^-]+)", command)
        names |= set(values[1].split() if values else [])
    assert {"resmlp_24_224.fb_dino", "resmlp_24_224.fb_in1k", "resnetrs101"} <= names
    for name in names:
        assert timm.models.is_model_pretrained(name), name


def test_trainings_are_understood_by_the_command() -> None:
    commands = named("tcnn-finetune .*")
    assert len(commands) > 40
    for command in commands:
        config, _ = parse(shlex.split(command)[1:])
        assert timm.is_model(config.model), command
        assert config.teacher is None or timm.is_model(config.teacher), command
        # No paper trains on the command's default.
        assert config.data != "digits", command


def test_functions_exist() -> None:
    names = named(r"tcnn_(model|probe)\.[\w.]+")
    assert len(names) > 15
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
