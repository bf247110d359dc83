"""Which sequence a line of a batch file is of."""

from __future__ import annotations

import pytest

from dispatcher.client.files.line_sequences import LineTurn, TurnFaultError, line_turn, turn_by, turn_in
from dispatcher.core.sequences.turns import Carry, OnError


def test_a_line_names_its_sequence_by_an_id_or_says_more() -> None:
    assert line_turn(b'"chat-7"') == LineTurn("chat-7")
    said = b'{"id": "chat-7", "index": 3, "last": true, "on_error": "hold", "carry": "messages"}'
    assert line_turn(said) == LineTurn("chat-7", 3, True, OnError.HOLD, Carry.MESSAGES)
    assert line_turn(b"") is line_turn(b"null") is None


@pytest.mark.parametrize(
    ("said", "why"),
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
def test_what_can_be_no_turn_is_a_fault_that_says_why(said: bytes, why: str) -> None:
    with pytest.raises(TurnFaultError, match=why):
        line_turn(said)


def test_a_field_of_the_line_or_of_its_body_may_name_the_sequence() -> None:
    line = b'{"of": "a", "n": -7, "none": null, "body": {"metadata": {"conversation": "chat-7"}, "user": 5}}'
    assert turn_by("of", line) == LineTurn("a")
    assert turn_by("n", line) == LineTurn("-7")
    assert turn_by("metadata.conversation", line) == LineTurn("chat-7")
    assert turn_by("user", line) == LineTurn("5")
    assert turn_by("none", line) is turn_by("metadata.other", line) is turn_by("of.it", line) is None
    with pytest.raises(TurnFaultError, match="metadata: must be a string or a whole number"):
        turn_by("metadata", line)
    assert turn_in(b'"said"', line, "of") == LineTurn("said")
    assert turn_in(b"", line, "of") == LineTurn("a")
    assert turn_in(b"", line, "") is None
