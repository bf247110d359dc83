"""The turn of a request is read from its member."""

from __future__ import annotations

import pytest

from dispatcher.features.sequences.turns import Turn, digest_owner
from dispatcher.requests.request import Rejection, Request, parse_member

CREATED = 1_764_044_000
OWNER = digest_owner("", "list")


def parse(fields: str, token: str = "tok") -> Request | Rejection:
    """Parse a member with these further fields in its data."""
    internal = f'{{"request_token":"{token}","result_queue_name":"list"}}'
    data = f'{{"id":"r","deadline":1,"payload":{{}},{fields}}}'
    return parse_member(f'{{"internal":{internal},"request_kind":"redis","data":{data}}}'.encode())


@pytest.mark.parametrize(
    ("fields", "turn"),
    [
        ('"sequence":{"id":"s","index":3}', Turn("s", 3, owner=OWNER, submitted_at=CREATED)),
        ('"metadata":{"sequence_id":"s"}', Turn("s", owner=OWNER, submitted_at=CREATED)),
        (
            '"sequence":{"id":"s"},"metadata":{"sequence_id":"other"}',
            Turn("s", owner=OWNER, submitted_at=CREATED),
        ),
        ('"metadata":{"sequence":"s"}', None),
        ('"metadata":{}', None),
    ],
    ids=["sequence", "metadata", "both", "other metadata", "none"],
)
def test_turn_belongs_to_the_result_list_and_was_submitted_when_the_request_was_created(
    fields: str, turn: Turn | None
) -> None:
    assert parse(f'"created":{CREATED},{fields}').extra == turn


def test_exact_time_of_submission_is_that_in_the_token() -> None:
    token = f"{CREATED * 10**9 + 250_000_000:016x}-rest"
    turn = parse(f'"created":{CREATED},"sequence":{{"id":"s"}}', token).extra
    assert turn is not None
    assert turn.submitted_at == pytest.approx(CREATED + 0.25, abs=1e-5)
    assert parse('"created":100000000000,"sequence":{"id":"s"}').extra == Turn("s", owner=OWNER)


def test_sequence_id_of_too_many_bytes_is_rejected() -> None:
    assert parse('"sequence":{"id":"%s"}' % ("é" * 128)).extra is not None
    rejected = parse('"sequence":{"id":"%s"}' % ("é" * 129))
    assert isinstance(rejected, Rejection)
    assert "data.sequence.id: longer than 256 bytes" in rejected.message
