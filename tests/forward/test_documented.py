"""docs/forwarding.md says what the code does: every row of its tables is run."""

from __future__ import annotations

import re

import pytest

from dispatcher.core.headers import (
    DOUBTFUL,
    DOUBTFUL_PREFIXES,
    DROP_REASON,
    NOT_PASSED_ON,
    PREFIXES_NOT_PASSED_ON,
)
from dispatcher.core.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    Unreachable,
    classify,
)
from dispatcher.core.request import Request, encode_member, parse
from dispatcher.core.routing import Route
from tests.forward.scripted import options
from tests.pages import DOCS, rows

PAGE = DOCS / "forwarding.md"


def in_words(outcome: Outcome) -> str:
    match outcome:
        case Delivered():
            return "delivered"
        case Unreachable():
            return "unreachable"
        case Overloaded(capacity=capacity):
            return "overloaded, teaches" if capacity else "overloaded"
        case Failed(bare=bare):
            return "failed, bare" if bare else "failed"
        case _:
            return repr(outcome)


@pytest.mark.parametrize(("status", "reason", "body", "expected"), list(rows(PAGE, "status")))
def test_each_answer_leads_where_the_table_says(status: str, reason: str, body: str, expected: str) -> None:
    outcome = classify(int(status), {DROP_REASON: reason} if reason else {}, body.encode(), 0.0)
    assert in_words(outcome) == expected


@pytest.mark.parametrize(("endpoint", "expected"), list(rows(PAGE, "endpoint")))
def test_each_path_is_sent_or_refused_as_the_table_says(endpoint: str, expected: str) -> None:
    path = Route(options("http://gateway"), user_agent="").path(endpoint)
    assert ("INVALID_REQUEST" if isinstance(path, Refused) else "sent") == expected


def test_headers_that_the_settings_allow_are_sent_and_no_others() -> None:
    member = encode_member("r-1", b"{}", 2_000_000_000, headers={"X-Api-Key": "k", "x-own": "1"})
    request = parse(member)
    assert isinstance(request, Request)
    sent = Route(options("http://gateway", allowed_headers=["x-api-*"]), user_agent="").headers_for(
        request, ""
    )
    assert sent.get("x-api-key") == "k"
    assert "x-own" not in sent


def test_the_table_of_headers_left_out_is_complete() -> None:
    left_out = NOT_PASSED_ON | {prefix + "*" for prefix in PREFIXES_NOT_PASSED_ON}
    left_out |= DOUBTFUL | {prefix + "*" for prefix in DOUBTFUL_PREFIXES}
    table = PAGE.read_text().split("\n| left out |", 1)[1].split("\n\n", 1)[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert named == left_out
