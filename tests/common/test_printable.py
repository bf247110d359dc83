"""Text from other programs is escaped before it is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.printable import escape_unprintable


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a plain id, é, 日本, 🙂", "a plain id, é, 日本, 🙂"),
        ("\x1b]0;pwned\x07\x1b[31mRED", "\\x1b]0;pwned\\x07\\x1b[31mRED"),
        ("one\r\ntwo\ttabs", "one\\r\\ntwo\\ttabs"),
        ("\x9b31m \x7f \x00", "\\x9b31m \\x7f \\x00"),
        ("back\u202eward \u2066in\u2069 \u2028 line", "back\\u202eward \\u2066in\\u2069 \\u2028 line"),
        ("half \ud800", "half \\ud800"),
        ("", ""),
    ],
)
def test_control_characters_are_escaped(text: str, escaped: str) -> None:
    assert escape_unprintable(text) == escaped


def test_characters_to_keep_are_not_escaped() -> None:
    assert escape_unprintable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@given(st.text(st.characters()))
def test_escaped_text_is_printable_and_printable_text_is_unchanged(text: str) -> None:
    escaped = escape_unprintable(text)
    assert escaped.isprintable()
    assert escape_unprintable(escaped) == escaped
    assert escaped == text or not text.isprintable()
