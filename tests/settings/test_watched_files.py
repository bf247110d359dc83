"""Reading of token files: valid tokens, and errors that never repeat the content of a file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dispatcher.settings.watched_files import TokenFileError, read_token
from tests.structure.source import MODULES

TOKEN = "eyJhbGciOi.J9_~-+/=!"


@pytest.mark.parametrize("template", ["{}", "{}\n", " \t{}\r\n\n"])
def test_white_space_around_a_token_is_removed(tmp_path: Path, template: str) -> None:
    (tmp_path / "token").write_text(template.format(TOKEN))
    assert read_token(tmp_path / "token") == TOKEN


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two secrets", b"se\ncret", b"s\xc3\xa9cret", b"\xff\xfe\x00", b"a\x00b"]
)
def test_invalid_token_file_is_reported_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(TokenFileError) as raised:
        read_token(path)
    assert raised.value.is_readable
    assert str(raised.value).startswith(
        f"{path} {'holds no bearer token' if content.strip() else 'is empty'}"
    )
    assert "cret" not in str(raised.value)


def test_unreadable_token_file_has_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="cannot be read: No such file") as raised:
        read_token(tmp_path / "none")
    assert not raised.value.is_readable


def test_no_other_module_reads_a_token_file() -> None:
    readers = {
        path.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"read_text", "read_bytes", "open"}
        and "token" in ast.unparse(node.value)
    }
    assert readers == set()
