"""Names of code in documents, such as `limit.limiter.Limiter.poll`, and whether they exist."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from tests.paths import ROOT

PACKAGE = ROOT / "dispatcher"
SYMBOL = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*\.[A-Za-z_]+(?:\.[A-Za-z_]+)*)`")
"""A name in backticks with a dot: folders and modules below `dispatcher`, then a name in the module."""


def find_symbols(text: str) -> list[str]:
    """Return the symbols that a text names, without file names and settings."""
    folders = {path.stem for path in PACKAGE.iterdir()}
    return [
        name for name in SYMBOL.findall(text) if name.partition(".")[0] in folders and is_not_a_file(name)
    ]


def is_not_a_file(name: str) -> bool:
    return name.rpartition(".")[2] not in {"lua", "md", "py", "yaml"}


def symbol_exists(symbol: str) -> bool:
    """Return True if a module, class, function, method, field or constant with this name exists."""
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
