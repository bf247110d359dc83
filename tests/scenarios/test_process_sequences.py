"""Sequences by real processes: the order at the gateway, whatever dies, and how soon a turn follows."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.core.requests.request import encode_member
from dispatcher.core.sequences.turns import CarryMode, OnError, Turn
from tests.scenarios.processes import Dispatcher, Entry, Producer, Stage, World
from tests.scenarios.responses_server import responses_server
from tests.support import wait_until_sync

SLOTS = 64
LEASE_S = 1.0
QUICK_S, SLOW_S = 0.1, 3.0
"""What the gateway takes for an answer, and takes while dispatchers are killed."""


def submit(producer: Producer, sequences: int, turns: int, prefix: str = "s") -> None:
    """All turns of all sequences, in no order at all."""
    deadline = int(time.time()) + 3600
    members = {
        encode_member(
            f"{prefix}{sequence}-{turn}",
            b'{"prompt":"hi"}',
            deadline,
            sequence=Turn(f"{prefix}{sequence}", turn),
        ): deadline
        for sequence in range(sequences)
        for turn in range(turns)
    }
    shuffled = list(members.items())
    random.Random(0).shuffle(shuffled)
    producer.put(dict(shuffled))
    producer.submitted += [
        f"{prefix}{sequence}-{turn}" for sequence in range(sequences) for turn in range(turns)
    ]


def transcripts(world: World) -> dict[str, list[Entry]]:
    seen: dict[str, list[Entry]] = defaultdict(list)
    for entry in world.log():
        seen[entry.id.split("-")[0]].append(entry)
    return seen


def disorder(entries: list[Entry], turns: int) -> list[str]:
    """What is wrong with what the gateway saw of one sequence."""
    numbers = [int(entry.id.split("-")[1]) for entry in entries]
    wrong = []
    for before, after in pairwise(numbers):
        if after not in (before, before + 1):
            wrong.append(f"{after} after {before}")
    for one, two in pairwise(entries):
        if one.ended_at is None or one.ended_at > two.arrived_at + 0.05:  # the gateway learns of a death late
            wrong.append(f"{two.id} beside {one.id}")
        if one.status == 0 and two.id != one.id:
            wrong.append(f"{two.id} after {one.id}, which had no answer")
    if numbers[:1] != [0] or set(numbers) != set(range(turns)):
        wrong.append(f"not all: {numbers}")
    return wrong


def running(one: Dispatcher) -> int:
    """How many of its requests are at the gateway."""
    return int(one.status()["running"])


@pytest.mark.parametrize(
    ("sequences", "turns", "kills"),
    [(12, 10, 3), pytest.param(300, 20, 10, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
    ids=["short", "long"],
)
def test_order_is_kept_whatever_dies(own_stage: Stage, sequences: int, turns: int, kills: int) -> None:
    world = own_stage.world(slots=SLOTS, seconds=QUICK_S)
    producer = own_stage.producer
    settings = own_stage.settings(
        world, max_sys=SLOTS, queue={"lease_s": LEASE_S}, retry={"base_s": 0.1, "max_s": 0.5}
    )
    pair = [own_stage.dispatcher(settings), own_stage.dispatcher(settings)]
    submit(producer, sequences, turns)
    for kill in range(kills):
        share = sequences * turns * (kill + 1) // (kills + 2)
        wait_until_sync(lambda share=share: len(world.log()) > share, 60, what="some to be sent")  # type: ignore[misc]
        world.control(seconds=SLOW_S)  # so that some run when they die, and some are left for the next time
        wait_until_sync(lambda: max(map(running, pair)) >= 3, 60, what="some to run")
        if kill == kills // 2:
            own_stage.server.kill()
            own_stage.server.start()
        victims = sorted(pair, key=running, reverse=True)[: 1 + kill % 2]
        for each in victims:
            each.kill()
        for each in victims:
            each.start()
        world.control(seconds=QUICK_S)
    producer.wait_for_all(timeout_s=30 + sequences * turns / 50)
    assert producer.answers() == {"200": sequences * turns}
    assert not producer.twice()
    seen = transcripts(world)
    wrong = {name: found for name, entries in seen.items() if (found := disorder(entries, turns))}
    assert not wrong
    again = sum(len(entries) for entries in seen.values()) - sequences * turns
    print(f"{sequences} sequences of {turns}, {kills} SIGKILLs and a restart of Redis: {again} repeated")
    assert len(seen) == sequences
    assert again >= kills, "nothing ran when they died"


@pytest.mark.serial
def test_next_turn_is_sent_within_milliseconds_of_the_answer(stage: Stage) -> None:
    world = stage.world(slots=SLOTS, seconds=0.02)
    stage.dispatcher(stage.settings(world, max_sys=SLOTS))
    submit(stage.producer, 1, 60)
    stage.producer.wait_for_all()
    entries = transcripts(world)["s0"]
    gaps = [two.arrived_at - one.ended_at for one, two in pairwise(entries) if one.ended_at is not None]
    print(f"median {median(gaps) * 1000:.1f} ms, worst {max(gaps) * 1000:.1f} ms")
    assert median(gaps) < 0.01


def converse(producer: Producer, conversations: int, turn: int) -> None:
    """One turn of each conversation: a long first one, then short ones. The rest is carried on."""
    deadline = int(time.time()) + 3600
    members, ids = {}, [f"c{one}-{turn}" for one in range(conversations)]
    for one, id_ in enumerate(ids):
        said = f"{one} {turn} " * (5 if turn else 1000)
        message = {"role": "assistant", "content": f"answer {one} {turn}"}
        answer = {"body": json.dumps({"choices": [{"message": message}]})}
        body = json.dumps({"messages": [{"role": "user", "content": said}], "sim": answer}).encode()
        members[
            encode_member(id_, body, deadline, sequence=Turn(f"c{one}", turn, carry=CarryMode.MESSAGES))
        ] = deadline
    producer.put(members)
    producer.wait_for_all(ids)


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("x-session-token", 0.95, 1.0), ("", 0.05, 0.5)],
    ids=["with-token", "without"],
)
def test_turns_of_a_conversation_find_what_their_server_keeps(
    stage: Stage, header: str, least: float, most: float
) -> None:
    """Four servers; with the token all turns come to one of them, and where that is gone to another one."""
    conversations = 40
    world = stage.world(slots=SLOTS, seconds=0.01, prefix_blocks=1 << 20, prefix_servers=4)
    one = stage.dispatcher(stage.settings(world, max_sys=SLOTS, sequences={"header": header}))
    converse(stage.producer, conversations, 0)
    world.control(restart=True)
    converse(stage.producer, conversations, 1)
    seen = world.observed()["gateway"]["prefixes"]
    share = seen["hits"] / seen["asked"]
    print(f"{header or 'no token'}: of the blocks {share:.2f} were known")
    assert least <= share <= most
    if not header:
        return
    at = {name: {entry.server for entry in entries} for name, entries in transcripts(world).items()}
    assert all(len(servers) == 1 for servers in at.values())
    (gone,) = at["c0"]
    there = sum(servers == {gone} for servers in at.values())
    world.control(kill_server=gone)
    for turn in (2, 3):
        converse(stage.producer, conversations, turn)
    later = {name: {entry.server for entry in entries[2:]} for name, entries in transcripts(world).items()}
    assert all(len(servers) == 1 and gone not in servers for servers in later.values())
    assert one.status()["sequence_servers"] == {
        "same": 3 * conversations - there,
        "other": there,
        "none": 0,
    }
    assert stage.producer.answers() == {"200": 4 * conversations}


FAILS = b'{"prompt":"hi","sim":{"kind":"status","status":400}}'


def put(producer: Producer, *turns: Turn, fails: int = -1) -> None:
    """Requests `<sequence>-<index>`; the one of that index is answered 400."""
    deadline = int(time.time()) + 3600
    members = {
        encode_member(
            f"{turn.id}-{turn.index}",
            FAILS if turn.index == fails else b'{"prompt":"hi"}',
            deadline,
            sequence=turn,
        ): deadline
        for turn in turns
    }
    producer.put(members)


def sent(world: World, name: str) -> list[int]:
    """Indexes of that sequence, as they came to the gateway."""
    return [int(entry.id.split("-")[1]) for entry in world.log() if entry.id.startswith(f"{name}-")]


def verb(one: Dispatcher, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, "--config", str(one.config)])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_one_that_fails_does_to_the_later_ones_what_was_said(stage: Stage) -> None:
    """By its own word, or by the settings': here they hold, until an operator has decided."""
    world, producer = stage.world(slots=SLOTS, seconds=0.02), stage.producer
    settings = stage.settings(world, max_sys=SLOTS, sequences={"on_error": "hold"})
    one = stage.dispatcher(settings)
    for name, on_error in (("go", OnError.CONTINUE), ("end", OnError.ABORT), ("a", None), ("b", None)):
        put(producer, *(Turn(name, index, on_error=on_error) for index in range(4)), fails=1)
    everyone = [f"{name}-{index}" for name in ("go", "end") for index in range(4)]
    found = producer.wait_for_all([*everyone, "a-0", "a-1", "b-0", "b-1"])
    assert [found[f"go-{n}"][0]["status_code"] for n in range(4)] == [200, 400, 200, 200]
    assert {found[f"end-{n}"][0]["error_code"] for n in (2, 3)} == {"SEQUENCE_ABORTED"}
    assert "end-1" in found["end-2"][0]["error_message"]
    one.wait_for(sequences={"active": 3, "parked": 0, "held": 2, "aborted": 1, "waiting": 4})
    assert one.metrics()["sequences_held"] == 2
    assert "2 sequences are held until an operator decides" in verb(
        one, "explain", "--admin-url", f"http://127.0.0.1:{one.admin_port}"
    )
    listed = verb(one, "sequences", "list", "--status", "held")
    assert ("a-1" in listed, "b-1" in listed, "end" in listed) == (True, True, False)
    assert "that is held until" in verb(one, "describe", "a-2")

    assert verb(one, "sequences", "release", "a") == "a goes on\n"
    assert verb(one, "sequences", "abort", "b", "--why", "no use") == "b is aborted\n"
    everyone += [f"{name}-{index}" for name in "ab" for index in range(4)]
    found = producer.wait_for_all(everyone)
    assert sent(world, "a") == [0, 1, 2, 3]
    assert sent(world, "b") == sent(world, "end") == [0, 1]
    assert {found[f"b-{n}"][0]["error_message"] for n in (2, 3)} == {"no use"}
    assert not producer.twice()

    put(producer, Turn("b", 4))
    assert producer.wait_for_all(["b-4"])["b-4"][0]["error_code"] == "SEQUENCE_ABORTED"
    assert verb(one, "sequences", "forget", "b") == "b is forgotten\n"
    producer.results.clear()
    put(producer, Turn("b", 0))
    assert producer.wait_for_all(["b-0"])["b-0"][0]["status_code"] == 200, "the id begins anew"
    told = [
        {name: event.get(name, 0) for name in ("held", "aborted", "released")}
        for event in one.events()
        if event["event"] in ("sequences-held", "sequences-aborted", "sequences-released")
    ]
    assert sum(each["released"] for each in told) == 1
    assert any(each["held"] for each in told)
    assert any(each["aborted"] for each in told)


def test_changed_settings_of_sequences_hold_for_what_waits(stage: Stage) -> None:
    world, producer = stage.world(slots=SLOTS, seconds=0.02), stage.producer
    first = {"max_active": 1, "gap_s": 3600, "on_error": "abort", "max_waiting": 2}
    one = stage.dispatcher(stage.settings(world, max_sys=SLOTS, sequences=first))
    put(producer, Turn("a", 0))
    producer.wait_for_all(["a-0"])
    put(producer, Turn("a", 2), Turn("b", 0))
    one.wait_for(sequences={"active": 1, "parked": 1, "held": 0, "aborted": 0, "waiting": 2})
    assert "1 have not begun, because sequences.max_active (1) are active" in one.status()["explanation"]

    one.reconfigure(sequences=first | {"max_active": 2, "gap_s": 0.2, "max_waiting": 1000})
    producer.wait_for_all(["b-0"], timeout_s=10)
    assert sent(world, "a") == [0], "a time that runs goes on until something of its sequence happens"
    put(producer, *(Turn("a", index) for index in range(3, 8)))
    producer.wait_for_all([f"a-{index}" for index in range(2, 8)], timeout_s=10)
    assert sent(world, "a") == [0, *range(2, 8)], "the gap has passed, and more may wait"

    one.reconfigure(sequences={"on_error": "continue"})
    one.wait_for(config_generation=3)
    put(producer, *(Turn("b", index) for index in range(1, 4)), fails=2)
    producer.wait_for_all([f"b-{index}" for index in range(1, 4)], timeout_s=10)
    assert sent(world, "b") == [0, 1, 2, 3]
    assert set(producer.answers()) == {"200", "400"}


def test_responses_are_carried_on_by_their_ids_whoever_sends_them(stage: Stage) -> None:
    """The server keeps the conversation: each turn names the answer before it, also after a crash."""
    world, producer = stage.world(slots=SLOTS), stage.producer
    with responses_server() as served:
        settings = stage.settings(
            world, max_sys=SLOTS, gateway={"url": served.url}, sequences={"carry": "messages"}
        )
        one = stage.dispatcher(settings)
        deadline = int(time.time()) + 3600
        for turn in range(4):
            if turn == 2:
                one.kill()
                one.start()
            for name in "ab":
                body = json.dumps({"model": "m", "input": f"{name}{turn}"}).encode()
                place = Turn(name, turn)
                data = encode_member(
                    f"{name}-{turn}", body, deadline, endpoint="/v1/responses", sequence=place
                )
                producer.put({data: deadline})
            producer.wait_for_all([f"{name}-{turn}" for name in "ab"], timeout_s=30)
        assert producer.answers() == {"200": 8}
        answers = [json.loads(producer.results[f"a-{turn}"][0]["payload"]) for turn in range(4)]
        assert [each["output"][0]["content"][0]["text"] for each in answers] == [
            f"{turn + 1} so far" for turn in range(4)
        ]
        last = answers[-1]["id"]
        assert served.known[last] == ["a0", "a1", "a2", "a3"], "nothing of the other one is among it"
        before = answers[-2]["id"]
        assert b'{"previous_response_id":"%s","model": "m", "input": "a3"}' % before.encode() in served.asked


@pytest.mark.serial
@pytest.mark.parametrize(
    ("sequences", "turns", "seconds"), [(128, 3, 0.3), pytest.param(1000, 5, 0.2, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("line", ["turns", "sequences"])
def test_pool_is_as_full_of_sequences_as_of_requests_without(
    stage: Stage, line: str, sequences: int, turns: int, seconds: float
) -> None:
    """Requests a second, where the pool is what bounds them: turn by turn in line, or one sequence behind the
    other. tests/benchmarks/test_sequence_cost.py has what order costs where nothing but CPU does."""
    world = stage.world(slots=SLOTS, seconds=seconds)
    settings = stage.settings(world, max_sys=SLOTS, budget={"reserve": 0.0}, queue={"lease_s": 30})
    one = stage.dispatcher(settings)
    one.wait_for(max_sys=SLOTS)
    producer, count = stage.producer, sequences * turns

    def rate(name: str, *, ordered: bool) -> float:
        deadline = int(time.time()) + 3600
        members = {}
        for sequence in range(sequences):
            for turn in range(turns):
                place = (f"{sequence:05}", f"{turn:03}")
                id_ = "-".join([name, *(place if line == "sequences" else place[::-1])])
                of = Turn(f"{name}-{sequence}", turn) if ordered else None
                members[encode_member(id_, b'{"prompt":"hi"}', deadline, sequence=of)] = deadline
        arrived = len(producer.collect())
        began = time.monotonic()
        producer.put(dict(members))
        wait_until_sync(lambda: len(producer.collect()) == arrived + count, 120, what="all answers")
        return count / (time.monotonic() - began)

    plain = [rate("plain-1", ordered=False)]
    ours = [rate("ours-1", ordered=True)]
    plain.append(rate("plain-2", ordered=False))
    if ours[0] < 0.9 * max(plain):  # the best counts, as it does without
        ours.append(rate("ours-2", ordered=True))
    print(f"{line}: {ours} requests/s in {sequences} sequences, {plain} without")
    assert producer.answers() == {"200": (len(ours) + len(plain)) * count}
    assert max(ours) >= 0.9 * max(plain)
