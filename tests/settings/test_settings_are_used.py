"""Every documented setting is read by the program."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from dispatcher.settings.load import key_paths
from dispatcher.settings.model import Settings
from tests.paths import PACKAGE
from tests.structure.source import MODULES, name_of


@cache
def find_attributes_read() -> set[str]:
    """Return the names of attributes that any module but the model of the settings reads."""
    return {
        node.attr
        for path in MODULES
        if not name_of(path).startswith("dispatcher.lab") and path != PACKAGE / "settings" / "model.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("path", list(key_paths(Settings)))
def test_setting_is_read(path: str) -> None:
    assert path.rpartition(".")[2] in find_attributes_read()
