"""One reader for all token files: what is a token, and that its words never tell what a file holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dispatcher.settings.watched_files import TokenFileError, read_token
from tests.structure.source import MODULES

GOOD = "eyJhbGciOi.J9_~-+/=!"


@pytest.mark.parametrize("around", ["{}", "{}\n", " \t{}\r\n\n"])
def test_white_space_around_a_token_is_none_of_it(tmp_path: Path, around: str) -> None:
    (tmp_path / "token").write_text(around.format(GOOD))
    assert read_token(tmp_path / "token") == GOOD


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two secrets", b"se\ncret", b"s\xc3\xa9cret", b"\xff\xfe\x00", b"a\x00b"]
)
def test_what_is_no_token_is_told_without_what_it_holds(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(TokenFileError) as raised:
        read_token(path)
    assert raised.value.is_readable
    assert str(raised.value).startswith(
        f"{path} {'holds no bearer token' if content.strip() else 'is empty'}"
    )
    assert "cret" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="cannot be read: No such file") as raised:
        read_token(tmp_path / "none")
    assert not raised.value.is_readable


def test_nobody_else_reads_a_token_file() -> None:
    readers = {
        path.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"read_text", "read_bytes", "open"}
        and "token" in ast.unparse(node.value)
    }
    assert readers == set()
