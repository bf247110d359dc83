"""Turns of different sequences in one call, with two dispatchers that are killed again and again."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

from dispatcher.features.sequences.turns import Turn
from dispatcher.requests.request import encode_member
from tests.scenarios.processes import Producer, Stage
from tests.scenarios.stateful_server import StatefulServer, run_stateful_server
from tests.support import wait_until_sync

PATH = "/v2/models/counter/infer"
SLOTS = 64


def make_value(sequence: int, turn: int) -> int:
    return 1000 * sequence + turn + 1


def submit_sequences(producer: Producer, sequences: int, turns: int) -> None:
    deadline = int(time.time()) + 3600
    members = {}
    for sequence in range(sequences):
        for turn in range(turns):
            tensors = [
                {"name": name, "datatype": "INT64", "shape": [1], "data": [number]}
                for name, number in (("index", turn), ("x", make_value(sequence, turn)))
            ]
            request_id = f"s{sequence}-{turn}"
            place = Turn(f"s{sequence}", turn, last=turn == turns - 1)
            body = json.dumps({"inputs": tensors}).encode()
            members[encode_member(request_id, body, deadline, endpoint=PATH, extra=place)] = deadline
            producer.submitted.append(request_id)
    producer.add_members(members)


def find_wrong_totals(producer: Producer, sequences: int, turns: int) -> list[str]:
    """Return the requests whose answer is not the sum of all values of their sequence so far."""
    results = producer.collect()
    wrong = []
    for sequence in range(sequences):
        total = 0
        for turn in range(turns):
            total += make_value(sequence, turn)
            (result,) = results[f"s{sequence}-{turn}"]
            (output,) = json.loads(result["payload"])["outputs"]
            if output["data"] != [total]:
                wrong.append(f"s{sequence}-{turn}: {output['data']}, expected {total}")
    return wrong


def has_more_calls(server: StatefulServer, items: int) -> bool:
    return sum(server.item_counts) > items


@pytest.mark.parametrize(
    ("sequences", "turns", "kills"),
    [
        (8, 10, 0),
        (60, 10, 3),
        pytest.param(1000, 10, 20, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_states_are_right_and_turns_share_calls_while_dispatchers_are_killed(
    own_stage: Stage, sequences: int, turns: int, kills: int
) -> None:
    with run_stateful_server(2) as server:
        world = own_stage.world(slots=SLOTS)
        settings = own_stage.settings(
            world,
            max_sys=SLOTS,
            queue={"lease_s": 1.0},
            retry={"base_s": 0.1, "max_s": 0.5},
            gateway={"url": server.url, "allowed_paths": [PATH]},
            batching={
                "mode": "on",
                "rules": [{"paths": [PATH], "max_size": 64, "max_delay_s": 0.1, "sequences": True}],
            },
        )
        dispatchers = [own_stage.dispatcher(settings) for _ in range(2)]
        submit_sequences(own_stage.producer, sequences, turns)
        for kill in range(kills):
            threshold = sequences * turns * (kill + 1) // (kills + 2)
            wait_until_sync(partial(has_more_calls, server, threshold), 120, what="some turns to be sent")
            victim = dispatchers[kill % 2]
            victim.kill()
            victim.start()
        own_stage.producer.wait_for_all(timeout_s=60 + sequences * turns / 50)
        assert own_stage.producer.count_results() == {"200": sequences * turns}
        assert not own_stage.producer.find_duplicates()
        assert server.errors == []
        assert find_wrong_totals(own_stage.producer, sequences, turns) == []
        calls, items = len(server.item_counts), sum(server.item_counts)
        print(f"{sequences} sequences of {turns}, {kills} SIGKILLs: {calls} calls of {items} items")
        assert calls <= sequences * turns / 4
