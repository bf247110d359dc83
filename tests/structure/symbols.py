"""Names of code that documents mention: `core.limit.limiter.Limiter.poll` is there, or it is not."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from tests.paths import ROOT

PACKAGE = ROOT / "dispatcher"
SYMBOL = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*\.[A-Za-z_]+(?:\.[A-Za-z_]+)*)`")
"""In backticks, with a dot: rooms and modules below `dispatcher`, then what is in the module."""


def symbols(text: str) -> list[str]:
    """Those that a text names; file names and settings are none."""
    rooms = {path.stem for path in PACKAGE.iterdir()}
    return [name for name in SYMBOL.findall(text) if name.partition(".")[0] in rooms and is_no_file(name)]


def is_no_file(name: str) -> bool:
    return name.rpartition(".")[2] not in {"lua", "md", "py", "yaml"}


def exists(symbol: str) -> bool:
    """Whether a module, class, function, method, field or constant of this name is there."""
    found: object = importlib.import_module("dispatcher")
    for part in symbol.split("."):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return part in getattr(found, "__annotations__", {})
    return True
