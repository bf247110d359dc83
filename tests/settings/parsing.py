"""Settings from text and from the environment."""

from __future__ import annotations

from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings

MINIMAL = "gateway: {url: http://gw}\n"


def parse_valid(text: str = MINIMAL, **environ: str) -> Settings:
    found = parse_settings(text, {f"BATCH_DISPATCHER__{name}": value for name, value in environ.items()})
    assert isinstance(found, Settings), [str(problem) for problem in found]
    return found


def list_problems(text: str, **environ: str) -> list[str]:
    found = parse_settings(text, {f"BATCH_DISPATCHER__{name}": value for name, value in environ.items()})
    assert isinstance(found, list)
    assert found
    return [str(problem) for problem in found]
