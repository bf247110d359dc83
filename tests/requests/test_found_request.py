"""Requests that were found in the queue: their order, their ids, and the spellings of a search."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.found_request import FoundRequest, RequestLocation, encode_spellings
from dispatcher.requests.score import compute_score


@given(st.text(max_size=20))
def test_each_spelling_is_the_text_inside_a_json_string(text: str) -> None:
    spellings = encode_spellings(text)
    assert json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="surrogatepass") in spellings
    for spelling in spellings:
        assert json.loads(b'"' + spelling + b'"') == text


def test_escaped_slashes_and_angle_brackets_are_among_the_spellings() -> None:
    spellings = encode_spellings("a/b<c>")
    assert b"a\\/b<c>" in spellings
    assert any(b"\\u003c" in spelling for spelling in spellings)


def test_started_request_ranks_before_all_others_of_its_priority() -> None:
    def rank(location: RequestLocation, deadline: int, priority: int = 5) -> tuple[float, bool]:
        return FoundRequest(location, b"", compute_score(deadline, priority)).rank

    started = rank(RequestLocation.STARTED, 1_900_000_000)
    assert rank(RequestLocation.PENDING, 1_900_000_000, priority=4) < started
    assert (
        started < rank(RequestLocation.PENDING, 1_800_000_000) < rank(RequestLocation.SUSPECT, 1_900_000_000)
    )
    assert started < rank(RequestLocation.STARTED, 1_800_000_000, priority=6)


def test_id_of_a_copy_depends_on_queue_entry_and_member() -> None:
    request = FoundRequest(RequestLocation.DEAD, b"a", 0.0, entry=1)
    others = [
        FoundRequest(RequestLocation.DEAD, b"b", 0.0, entry=1),
        FoundRequest(RequestLocation.DEAD, b"a", 0.0, entry=2),
    ]
    ids = [request.make_copy_id("q"), request.make_copy_id("p"), *(each.make_copy_id("q") for each in others)]
    assert len(set(ids)) == 4
    assert FoundRequest(RequestLocation.LEASED, b"a", 5.0, entry=1, attempts=3).make_copy_id("q") == ids[0]
