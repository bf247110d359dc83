from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.mutate import compile_changed, list_changes

CODE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    UNUSED = 1 + 1


def is_allowed(count: "int | None", limit: int = 3 + 1, name: str = "a" + "b") -> bool:
    return count is not None and (count + 1) <= max(limit, 0)
"""


def test_each_change_replaces_one_token(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(CODE)
    assert [(change.old, change.new) for change in list_changes([path])] == [
        ("+", "-"),
        ("and", "or"),
        ("is not", "is"),
        ("<=", "<"),
        ("+", "-"),
        ("max", "min"),
    ]


@pytest.mark.parametrize(
    ("old", "count", "is_allowed"),
    [("<=", 3, False), ("max", 0, False), ("is not", 3, False), ("+", 3, False)],
)
def test_changed_code_has_only_the_new_token(tmp_path: Path, old: str, count: int, is_allowed: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(CODE)
    module: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), module)
    assert module["is_allowed"](count)  # type: ignore[operator]
    change = next(change for change in list_changes([path]) if change.old == old)
    exec(compile_changed(change), module)
    assert module["is_allowed"](count) is is_allowed  # type: ignore[operator]
