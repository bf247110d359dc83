"""The sequence that a line of a batch file belongs to."""

from __future__ import annotations

import pytest

from dispatcher.features.batch_files.line_sequences import (
    LineTurn,
    TurnFaultError,
    parse_named_field,
    parse_sequence_field,
    parse_turn,
)
from dispatcher.features.sequences.turns import CarryMode, OnError


def test_sequence_field_is_an_id_or_an_object() -> None:
    assert parse_sequence_field(b'"chat-7"') == LineTurn("chat-7")
    text = b'{"id": "chat-7", "index": 3, "last": true, "on_error": "hold", "carry": "messages"}'
    assert parse_sequence_field(text) == LineTurn("chat-7", 3, True, OnError.HOLD, CarryMode.MESSAGES)
    assert parse_sequence_field(b"") is parse_sequence_field(b"null") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"7", "must be an id or an object"),
        (b'""', "of 1 to 256 bytes, not of 0"),
        (b'{"id": "s", "index": -1}', r"sequence\.index"),
        (b'{"id": "s", "carry": "all"}', r"sequence\.carry"),
        (b'{"id": "s", "indx": 1}', "indx"),
        (b'{"id": "s", "reset": true}', "an id of its own"),
        (b'{"id": "%s"}' % (b"x" * 257), "not of 257"),
    ],
)
def test_invalid_turn_is_a_fault_with_the_reason(text: bytes, why: str) -> None:
    with pytest.raises(TurnFaultError, match=why):
        parse_sequence_field(text)


def test_field_of_the_line_or_its_body_can_name_the_sequence() -> None:
    line = b'{"of": "a", "n": -7, "none": null, "body": {"metadata": {"conversation": "chat-7"}, "user": 5}}'
    assert parse_named_field("of", line) == LineTurn("a")
    assert parse_named_field("n", line) == LineTurn("-7")
    assert parse_named_field("metadata.conversation", line) == LineTurn("chat-7")
    assert parse_named_field("user", line) == LineTurn("5")
    assert (
        parse_named_field("none", line)
        is parse_named_field("metadata.other", line)
        is parse_named_field("of.it", line)
        is None
    )
    with pytest.raises(TurnFaultError, match="metadata: must be a string or a whole number"):
        parse_named_field("metadata", line)
    assert parse_turn(b'"said"', line, "of") == LineTurn("said")
    assert parse_turn(b"", line, "of") == LineTurn("a")
    assert parse_turn(b"", line, "") is None
