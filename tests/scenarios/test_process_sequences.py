"""Sequences by real processes: the order at the gateway, whatever dies, and how soon a turn follows."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest

from dispatcher.core.request import encode_member
from dispatcher.core.turns import Carry, Turn
from tests.scenarios.processes import Entry, Producer, Stage, World
from tests.support import wait_until_sync

SLOTS = 64
LEASE_S = 1.0


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


@pytest.mark.parametrize(
    ("sequences", "turns", "kills"),
    [(12, 10, 3), pytest.param(300, 20, 10, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
    ids=["short", "long"],
)
def test_order_is_kept_whatever_dies(own_stage: Stage, sequences: int, turns: int, kills: int) -> None:
    world = own_stage.world(slots=SLOTS, seconds=0.2)
    producer = own_stage.producer
    settings = own_stage.settings(
        world, max_sys=SLOTS, queue={"lease_s": LEASE_S}, retry={"base_s": 0.1, "max_s": 0.5}
    )
    pair = [own_stage.dispatcher(settings), own_stage.dispatcher(settings)]
    submit(producer, sequences, turns)
    for kill in range(kills):
        share = sequences * turns * (kill + 1) // (kills + 2)
        wait_until_sync(lambda share=share: len(world.log()) > share, 60, what="some to be sent")  # type: ignore[misc]
        if kill == kills // 2:
            own_stage.server.kill()
            own_stage.server.start()
        victims = pair[: 1 + kill % 2]
        for each in victims:
            each.kill()
        for each in victims:
            each.start()
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
        members[encode_member(id_, body, deadline, sequence=Turn(f"c{one}", turn, carry=Carry.MESSAGES))] = (
            deadline
        )
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
        "lost": 0,
    }
    assert stage.producer.answers() == {"200": 4 * conversations}
