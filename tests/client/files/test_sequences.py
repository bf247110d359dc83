"""Batch files whose lines are of sequences: their order, what is checked, and what a crash leaves of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dispatcher.client.files import BadInputError, FilePaths
from dispatcher.client.files import run as running
from dispatcher.client.files.line_sequences import LineTurn
from dispatcher.client.files.lines import BadLine, BatchLine, LineRules, parse_line
from dispatcher.client.files.order import MAX_OPEN_PER_SEQUENCE
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.result import ErrorCode, encode_failure
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.core.sequences.turns import OnError
from tests.batchfiles import broken_off, errors, ids, line, output, read, run, source, write
from tests.client.answering import NAMES, echo
from tests.client.turns import TurnTaking
from tests.queue.made import OwnerAndDesk, queues
from tests.queue.servers import Server


@pytest.fixture
async def queue(one_redis: Server) -> AsyncIterator[OwnerAndDesk]:
    async with queues(one_redis.url, "a", names=NAMES) as (made,):
        yield made


@pytest.fixture
def taking(queue: OwnerAndDesk) -> TurnTaking:
    return TurnTaking(queue)


def turn(custom_id: str, sequence: Any, **fields: Any) -> bytes:
    """A line with a sequence; fields stand beside it."""
    return json.dumps(
        json.loads(line(custom_id, system=custom_id)) | {"sequence": sequence} | fields
    ).encode()


def questions(taking: TurnTaking) -> dict[str, list[str]]:
    """The custom_ids of each sequence, in the order in which they went."""
    return {
        name: [json.loads(body)["messages"][0]["content"] for body in bodies]
        for name, bodies in taking.served.items()
    }


@pytest.mark.parametrize("group", ["prefix", "none"])
async def test_the_order_of_the_file_is_that_of_each_sequence(
    one_redis: Server, taking: TurnTaking, paths: FilePaths, group: str
) -> None:
    """Each line has a system prompt of its own, so groups alone would have them in any order."""
    write(source(paths), *[turn(f"{n % 3}-{n}", f"chat-{n % 3}") for n in range(30)], line("alone"))
    async with taking.always():
        progress = await run(one_redis, paths, group=group)
    assert (progress.done, progress.failed) == (31, 0)
    for at in range(3):
        assert questions(taking)[f"chat-{at}"] == [f"{at}-{n}" for n in range(at, 30, 3)]
        assert taking.indexes[f"chat-{at}"] == [*range(10)]
    page = await taking.queue.list_sequences(100)
    assert not page.sequences, "each has ended with its last line"


async def test_a_long_one_is_sent_as_it_goes(
    one_redis: Server, queue: OwnerAndDesk, paths: FilePaths
) -> None:
    taking = TurnTaking(queue, SequenceTerms(max_waiting=MAX_OPEN_PER_SEQUENCE))
    write(source(paths), *[turn(f"c-{n}", "long") for n in range(MAX_OPEN_PER_SEQUENCE + 120)])
    async with taking.always():
        progress = await run(one_redis, paths)
    assert (progress.done, progress.failed) == (MAX_OPEN_PER_SEQUENCE + 120, 0)
    assert questions(taking)["long"] == [f"c-{n}" for n in range(MAX_OPEN_PER_SEQUENCE + 120)]


async def test_a_field_of_the_body_or_the_line_names_the_sequence(
    one_redis: Server, taking: TurnTaking, paths: FilePaths
) -> None:
    named = [line(f"c-{n}", system=f"c-{n}", metadata={"chat": f"x-{n % 2}"}) for n in range(6)]
    write(source(paths), *named, line("alone"), turn("other", "own", metadata={"chat": "x-0"}))
    async with taking.always():
        await run(one_redis, paths, sequence_by="metadata.chat")
    assert questions(taking) == {"x-0": ["c-0", "c-2", "c-4"], "x-1": ["c-1", "c-3", "c-5"], "own": ["other"]}


async def test_indexes_of_the_file_count_and_end_nothing(
    one_redis: Server, taking: TurnTaking, paths: FilePaths
) -> None:
    write(source(paths), *[turn(f"c-{n}", {"id": "s", "index": 4 - n}) for n in range(5)])
    async with taking.always():
        await run(one_redis, paths)
    assert questions(taking)["s"] == [f"c-{n}" for n in (4, 3, 2, 1, 0)]
    seen = await taking.queue.get_sequence("s")
    assert (seen and seen.expected_index) == 5


async def test_what_failed_ends_the_lines_behind_it(
    one_redis: Server, taking: TurnTaking, paths: FilePaths
) -> None:
    def second_fails(request: Request) -> bytes:
        if b"c-1" in request.payload:
            return encode_failure(request.id, ErrorCode.RETRIES_EXHAUSTED, "no luck", token=request.token)
        return echo(request)

    kept = [turn(f"k-{n}", {"id": "kept", "on_error": "continue"}) for n in range(2)]
    write(source(paths), *[turn(f"c-{n}", "s") for n in range(4)], *kept)
    async with taking.always(second_fails):
        await run(one_redis, paths)
    told = {each["custom_id"]: each["error"]["code"] for each in read(errors(paths))}
    assert told == {"c-1": "retries_exhausted", "c-2": "sequence_aborted", "c-3": "sequence_aborted"}
    assert "no luck" in read(errors(paths))[-1]["error"]["message"]


async def test_a_run_that_was_broken_off_keeps_its_indexes(
    one_redis: Server, taking: TurnTaking, paths: FilePaths
) -> None:
    write(source(paths), *[turn(f"c-{n}", "s") for n in range(40)])
    for _ in range(3):
        await broken_off(one_redis, paths, max_pending=10)
        await taking.once()  # one of them goes
    async with taking.always():
        progress = await run(one_redis, paths)
    assert (progress.done, progress.failed) == (40, 0)
    assert taking.indexes["s"] == [*range(40)]
    assert sorted(ids(output(paths))) == sorted(f"c-{n}" for n in range(40))


MISPLACED = {
    "index twice": (
        [{"id": "s", "index": 0}, {"id": "s", "index": 0}],
        2,
        "line 1 of this sequence has the same",
    ),
    "some with an index": ([{"id": "s", "index": 0}, "s"], 2, "other lines of it have an index"),
    "behind the last": ([{"id": "s", "last": True}, "s"], 2, "it ends with line 1"),
    "index behind the last": (
        [{"id": "s", "index": 1}, {"id": "s", "index": 0, "last": True}],
        1,
        "it ends with line 2",
    ),
}


@pytest.mark.parametrize(("sequences", "n", "told"), MISPLACED.values(), ids=MISPLACED)
async def test_a_line_without_a_turn_is_named(
    one_redis: Server, taking: TurnTaking, paths: FilePaths, sequences: list[Any], n: int, told: str
) -> None:
    lines = [turn(f"c-{at}", sequence) for at, sequence in enumerate(sequences)]
    write(source(paths), *lines, turn("good", "t"))
    with pytest.raises(BadInputError) as raised:
        await run(one_redis, paths)
    [bad] = raised.value.faulty
    assert (bad.line_number, bad.code) == (n, "invalid_sequence")
    assert told in bad.message
    async with taking.always():
        progress = await run(one_redis, paths, skip_bad=True)
    assert (progress.done, progress.bad) == (3, 1)


BAD = {
    '""': "sequence: an id of 1 to 256 bytes, not of 0",
    json.dumps("é" * 129): "not of 258",
    "7": "sequence: must be an id or an object",
    "[]": "sequence: must be an id or an object",
    "{}": "sequence: object missing required field id",
    '{"id": ""}': "sequence.id: an id of 1 to 256 bytes",
    '{"id": "s", "index": -1}': "sequence.index: expected int >= 0",
    '{"id": "s", "index": 1.5}': "sequence.index: expected int",
    '{"id": "s", "reset": true}': "sequence.reset: not in a file",
    '{"id": "s", "on_error": "stop"}': "sequence.on_error: invalid enum value",
    '{"id": "s", "indx": 1}': "unknown field",
}


@pytest.mark.parametrize("raw", BAD)
def test_a_sequence_that_can_be_none_is_a_fault_of_its_line(raw: str) -> None:
    text = line("x")[:-1] + b', "sequence": ' + raw.encode() + b"}"
    found = parse_line(text, LineRules())
    assert isinstance(found, BadLine)
    assert [fault.code for fault in found.faults] == ["invalid_sequence"]
    assert BAD[raw] in found.faults[0].message
    assert found.custom_id == "x"


GOOD = {
    '"s"': LineTurn("s"),
    "null": None,
    '{"id": "s", "index": 3, "last": true, "on_error": "hold"}': LineTurn(
        "s", 3, last=True, on_error=OnError.HOLD
    ),
    '{"id": "s", "index": null, "reset": false}': LineTurn("s"),
}


@pytest.mark.parametrize("raw", GOOD)
def test_a_sequence_is_an_id_or_an_object(raw: str) -> None:
    found = parse_line(line("x")[:-1] + b', "sequence": ' + raw.encode() + b"}", LineRules())
    assert isinstance(found, BatchLine)
    assert found.turn == GOOD[raw]


BY = {"7": "7", '"s"': "s", "null": None, "-3": "-3"}


@pytest.mark.parametrize("raw", BY)
def test_a_field_that_names_it_is_a_string_or_a_whole_number(raw: str) -> None:
    text = line("x")[:-1] + b', "chat": {"id": ' + raw.encode() + b"}}"
    found = parse_line(text, LineRules(sequence_by="chat.id"))
    assert isinstance(found, BatchLine)
    assert (None if found.turn is None else found.turn.id) == BY[raw]
    assert found.unknown_fields == (), "it means something"


@pytest.mark.parametrize("raw", ["1.5", "{}", "[]", "true", '""'])
def test_or_a_fault(raw: str) -> None:
    found = parse_line(line("x")[:-1] + b', "chat": ' + raw.encode() + b"}", LineRules(sequence_by="chat"))
    assert isinstance(found, BadLine)
    assert found.faults[0].message.startswith("chat: ")


async def test_what_found_no_room_in_its_sequence_is_sent_again(
    one_redis: Server, queue: OwnerAndDesk, paths: FilePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator lets fewer wait than are sent at a time."""
    monkeypatch.setattr(running, "LOST_CHECK_INTERVAL_S", 0.2)
    taking = TurnTaking(queue, SequenceTerms(max_waiting=3))
    write(source(paths), *[turn(f"c-{n}", "s") for n in range(12)])
    async with taking.always():
        progress = await run(one_redis, paths)
    assert (progress.done, progress.failed) == (12, 0)
    assert taking.indexes["s"] == [*range(12)]
