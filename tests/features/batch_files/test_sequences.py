"""Batch files whose lines belong to sequences: order, validation, and recovery after an interruption."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dispatcher.features.batch_files import run as running
from dispatcher.features.batch_files.input_check import BadInputError
from dispatcher.features.batch_files.line_sequences import LineTurn
from dispatcher.features.batch_files.lines import BadLine, BatchLine, LineRules, parse_line
from dispatcher.features.batch_files.order import MAX_OPEN_PER_SEQUENCE
from dispatcher.features.batch_files.run_options import FilePaths
from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.turns import OnError
from dispatcher.requests.request import Request
from dispatcher.requests.result import encode_failure
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import NAMES, echo
from tests.features.batch_files.files import (
    get_errors_path,
    get_output_path,
    get_source_path,
    interrupt_run,
    make_line,
    read_custom_ids,
    read_records,
    run_batch_file,
    write_lines,
)
from tests.features.sequences.fake_sequence_dispatcher import FakeSequenceDispatcher
from tests.queue.factories import OwnerAndAdmin, queues
from tests.queue.servers import Server


@pytest.fixture
async def queue(one_redis: Server) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(one_redis.url, "a", names=NAMES) as (created,):
        yield created


@pytest.fixture
def dispatcher(queue: OwnerAndAdmin) -> FakeSequenceDispatcher:
    return FakeSequenceDispatcher(queue)


def make_sequence_line(custom_id: str, sequence: Any, **fields: Any) -> bytes:
    """Return a line with a sequence and further fields."""
    return json.dumps(
        json.loads(make_line(custom_id, system=custom_id)) | {"sequence": sequence} | fields
    ).encode()


def get_answered_ids(dispatcher: FakeSequenceDispatcher) -> dict[str, list[str]]:
    """Return the custom_ids of each sequence in the order in which they were answered."""
    return {
        name: [json.loads(body)["messages"][0]["content"] for body in bodies]
        for name, bodies in dispatcher.answered.items()
    }


@pytest.mark.parametrize("group", ["prefix", "none"])
async def test_lines_of_a_sequence_run_in_the_order_of_the_file(
    one_redis: Server, dispatcher: FakeSequenceDispatcher, paths: FilePaths, group: str
) -> None:
    """Each line has its own system prompt, so grouping alone would change the order."""
    write_lines(
        get_source_path(paths),
        *[make_sequence_line(f"{n % 3}-{n}", f"chat-{n % 3}") for n in range(30)],
        make_line("alone"),
    )
    async with dispatcher.answer_continuously():
        progress = await run_batch_file(one_redis, paths, group=group)
    assert (progress.done, progress.failed) == (31, 0)
    for at in range(3):
        assert get_answered_ids(dispatcher)[f"chat-{at}"] == [f"{at}-{n}" for n in range(at, 30, 3)]
        assert dispatcher.indexes[f"chat-{at}"] == [*range(10)]
    page = await dispatcher.queue.list_sequences(100)
    assert not page.sequences, "each sequence has ended with its last line"


async def test_long_sequence_is_sent_in_parts(
    one_redis: Server, queue: OwnerAndAdmin, paths: FilePaths
) -> None:
    dispatcher = FakeSequenceDispatcher(queue, SequenceTerms(max_waiting=MAX_OPEN_PER_SEQUENCE))
    write_lines(
        get_source_path(paths),
        *[make_sequence_line(f"c-{n}", "long") for n in range(MAX_OPEN_PER_SEQUENCE + 120)],
    )
    async with dispatcher.answer_continuously():
        progress = await run_batch_file(one_redis, paths)
    assert (progress.done, progress.failed) == (MAX_OPEN_PER_SEQUENCE + 120, 0)
    assert get_answered_ids(dispatcher)["long"] == [f"c-{n}" for n in range(MAX_OPEN_PER_SEQUENCE + 120)]


async def test_configured_field_names_the_sequence_unless_the_line_does(
    one_redis: Server, dispatcher: FakeSequenceDispatcher, paths: FilePaths
) -> None:
    lines_with_field = [
        make_line(f"c-{n}", system=f"c-{n}", metadata={"chat": f"x-{n % 2}"}) for n in range(6)
    ]
    write_lines(
        get_source_path(paths),
        *lines_with_field,
        make_line("alone"),
        make_sequence_line("other", "own", metadata={"chat": "x-0"}),
    )
    async with dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths, sequence_by="metadata.chat")
    assert get_answered_ids(dispatcher) == {
        "x-0": ["c-0", "c-2", "c-4"],
        "x-1": ["c-1", "c-3", "c-5"],
        "own": ["other"],
    }


async def test_lines_with_indexes_run_in_index_order_and_do_not_end_the_sequence(
    one_redis: Server, dispatcher: FakeSequenceDispatcher, paths: FilePaths
) -> None:
    write_lines(
        get_source_path(paths),
        *[make_sequence_line(f"c-{n}", {"id": "s", "index": 4 - n}) for n in range(5)],
    )
    async with dispatcher.answer_continuously():
        await run_batch_file(one_redis, paths)
    assert get_answered_ids(dispatcher)["s"] == [f"c-{n}" for n in (4, 3, 2, 1, 0)]
    status = await dispatcher.queue.get_sequence("s")
    assert (status and status.expected_index) == 5


async def test_failed_line_aborts_the_later_lines_of_its_sequence(
    one_redis: Server, dispatcher: FakeSequenceDispatcher, paths: FilePaths
) -> None:
    def fail_second_line(request: Request) -> bytes:
        if b"c-1" in request.payload:
            return encode_failure(request.id, ErrorCode.RETRIES_EXHAUSTED, "no luck", token=request.token)
        return echo(request)

    continuing = [make_sequence_line(f"k-{n}", {"id": "kept", "on_error": "continue"}) for n in range(2)]
    write_lines(
        get_source_path(paths),
        *[make_sequence_line(f"c-{n}", "s") for n in range(4)],
        *continuing,
    )
    async with dispatcher.answer_continuously(fail_second_line):
        await run_batch_file(one_redis, paths)
    error_codes = {each["custom_id"]: each["error"]["code"] for each in read_records(get_errors_path(paths))}
    assert error_codes == {"c-1": "retries_exhausted", "c-2": "sequence_aborted", "c-3": "sequence_aborted"}
    assert "no luck" in read_records(get_errors_path(paths))[-1]["error"]["message"]


async def test_interrupted_run_keeps_its_indexes(
    one_redis: Server, dispatcher: FakeSequenceDispatcher, paths: FilePaths
) -> None:
    write_lines(get_source_path(paths), *[make_sequence_line(f"c-{n}", "s") for n in range(40)])
    for _ in range(3):
        await interrupt_run(one_redis, paths, max_pending=10)
        await dispatcher.answer_once()  # one request runs
    async with dispatcher.answer_continuously():
        progress = await run_batch_file(one_redis, paths)
    assert (progress.done, progress.failed) == (40, 0)
    assert dispatcher.indexes["s"] == [*range(40)]
    assert sorted(read_custom_ids(get_output_path(paths))) == sorted(f"c-{n}" for n in range(40))


LINES_WITHOUT_TURN = {
    "index twice": (
        [{"id": "s", "index": 0}, {"id": "s", "index": 0}],
        2,
        "line 1 of this sequence has the same",
    ),
    "some with an index": ([{"id": "s", "index": 0}, "s"], 2, "other lines of it have an index"),
    "after the last": ([{"id": "s", "last": True}, "s"], 2, "it ends with line 1"),
    "index after the last": (
        [{"id": "s", "index": 1}, {"id": "s", "index": 0, "last": True}],
        1,
        "it ends with line 2",
    ),
}


@pytest.mark.parametrize(
    ("sequences", "line_number", "expected"), LINES_WITHOUT_TURN.values(), ids=LINES_WITHOUT_TURN
)
async def test_line_without_a_valid_turn_is_an_error(
    one_redis: Server,
    dispatcher: FakeSequenceDispatcher,
    paths: FilePaths,
    sequences: list[Any],
    line_number: int,
    expected: str,
) -> None:
    lines = [make_sequence_line(f"c-{at}", sequence) for at, sequence in enumerate(sequences)]
    write_lines(get_source_path(paths), *lines, make_sequence_line("good", "t"))
    with pytest.raises(BadInputError) as raised:
        await run_batch_file(one_redis, paths)
    [bad] = raised.value.faulty
    assert (bad.line_number, bad.code) == (line_number, "invalid_sequence")
    assert expected in bad.message
    async with dispatcher.answer_continuously():
        progress = await run_batch_file(one_redis, paths, skip_bad=True)
    assert (progress.done, progress.bad) == (3, 1)


INVALID_SEQUENCES = {
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


@pytest.mark.parametrize("raw", INVALID_SEQUENCES)
def test_invalid_sequence_is_a_fault_of_its_line(raw: str) -> None:
    text = make_line("x")[:-1] + b', "sequence": ' + raw.encode() + b"}"
    found = parse_line(text, LineRules())
    assert isinstance(found, BadLine)
    assert [fault.code for fault in found.faults] == ["invalid_sequence"]
    assert INVALID_SEQUENCES[raw] in found.faults[0].message
    assert found.custom_id == "x"


VALID_SEQUENCES = {
    '"s"': LineTurn("s"),
    "null": None,
    '{"id": "s", "index": 3, "last": true, "on_error": "hold"}': LineTurn(
        "s", 3, last=True, on_error=OnError.HOLD
    ),
    '{"id": "s", "index": null, "reset": false}': LineTurn("s"),
}


@pytest.mark.parametrize("raw", VALID_SEQUENCES)
def test_sequence_is_an_id_or_an_object(raw: str) -> None:
    found = parse_line(make_line("x")[:-1] + b', "sequence": ' + raw.encode() + b"}", LineRules())
    assert isinstance(found, BatchLine)
    assert found.turn == VALID_SEQUENCES[raw]


SEQUENCE_FIELD_VALUES = {"7": "7", '"s"': "s", "null": None, "-3": "-3"}


@pytest.mark.parametrize("raw", SEQUENCE_FIELD_VALUES)
def test_field_that_names_the_sequence_is_a_string_or_an_integer(raw: str) -> None:
    text = make_line("x")[:-1] + b', "chat": {"id": ' + raw.encode() + b"}}"
    found = parse_line(text, LineRules(sequence_by="chat.id"))
    assert isinstance(found, BatchLine)
    assert (None if found.turn is None else found.turn.id) == SEQUENCE_FIELD_VALUES[raw]
    assert found.unknown_fields == (), "the field is used"


@pytest.mark.parametrize("raw", ["1.5", "{}", "[]", "true", '""'])
def test_other_value_of_the_sequence_field_is_a_fault(raw: str) -> None:
    found = parse_line(
        make_line("x")[:-1] + b', "chat": ' + raw.encode() + b"}", LineRules(sequence_by="chat")
    )
    assert isinstance(found, BadLine)
    assert found.faults[0].message.startswith("chat: ")


async def test_line_of_a_full_sequence_is_sent_again(
    one_redis: Server, queue: OwnerAndAdmin, paths: FilePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator allows fewer waiting requests than the run sends at a time."""
    monkeypatch.setattr(running, "LOST_CHECK_INTERVAL_S", 0.2)
    dispatcher = FakeSequenceDispatcher(queue, SequenceTerms(max_waiting=3))
    write_lines(get_source_path(paths), *[make_sequence_line(f"c-{n}", "s") for n in range(12)])
    async with dispatcher.answer_continuously():
        progress = await run_batch_file(one_redis, paths)
    assert (progress.done, progress.failed) == (12, 0)
    assert dispatcher.indexes["s"] == [*range(12)]
