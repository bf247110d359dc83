"""What others wrote, as it may be printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.printable import escape_unprintable


@pytest.mark.parametrize(
    ("text", "shown"),
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
def test_controls_are_shown_as_escapes(text: str, shown: str) -> None:
    assert escape_unprintable(text) == shown


def test_what_is_to_be_kept_stays() -> None:
    assert escape_unprintable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@given(st.text(st.characters()))
def test_law_nothing_unprintable_is_left_and_nothing_printable_changed(text: str) -> None:
    shown = escape_unprintable(text)
    assert shown.isprintable()
    assert escape_unprintable(shown) == shown
    assert shown == text or not text.isprintable()
