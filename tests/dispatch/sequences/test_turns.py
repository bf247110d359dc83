"""Requests of sequences in the loop: the order at the gateway, errors, the same server, the conversation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import Delivered, Failed, Outcome, RetryPolicy
from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.core.merging.shapes import SHAPES
from dispatcher.core.requests.request import Request
from dispatcher.core.sequences.decisions import SequenceCounts, SequenceTerms
from dispatcher.core.sequences.turns import CarryMode, OnError, Turn
from dispatcher.dispatch import Options
from dispatcher.dispatch.loop import FLUSH_DELAY_S
from dispatcher.dispatch.options import SequenceOptions
from dispatcher.ports import ClaimTurnsResult, QueueUnavailableError
from tests.dispatch.scene import Scene, perform
from tests.dispatch.turns import Servers, results, submit, turns

RETRY = RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3)


def happened(scene: Scene) -> list[tuple[str, dict[str, Any]]]:
    """What the log and the page are told of sequences."""
    return [
        (event.event_name, {**fields})
        for event, fields in scene.events
        if event.event_name.startswith("sequences-")
    ]


def options(**how: Any) -> Options:
    return Options(RETRY, sequences=SequenceOptions(**how))


def test_turns_go_in_order_one_at_a_time_beside_others() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        mixed = [*reversed(turns("a", 5)), *turns("b", 5), ("alone", None)]
        await submit(scene, mixed)
        await asyncio.sleep(3)
        assert gateway.of("a") == [f"a-{n}" for n in range(5)]
        assert gateway.of("b") == [f"b-{n}" for n in range(5)]
        assert "alone" in gateway.sent
        assert gateway.most_at_once == 1
        assert gateway.sent.index("b-1") < gateway.sent.index("a-4"), "sequences run beside each other"

    perform(scene_of, gateway)


def test_next_turn_follows_within_five_milliseconds() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 10))
        await submit(scene, turns("b", 10))
        await asyncio.sleep(5)
        ends = {name: ended for name, _, ended in gateway.spans}
        begins = {name: began for name, began, _ in gateway.spans}
        gaps = [begins[f"{s}-{n + 1}"] - ends[f"{s}-{n}"] for s in "ab" for n in range(9)]
        assert max(gaps) <= FLUSH_DELAY_S + 1e-6, "nothing but the wait for others to be handed in with it"

    perform(scene_of, gateway)


def test_no_request_of_a_sequence_no_call() -> None:
    async def scene_of(scene: Scene) -> None:
        async def never(*_: object) -> ClaimTurnsResult:
            raise AssertionError("asked")

        scene.queue.claim_turns = never  # type: ignore[method-assign, assignment]
        await submit(scene, [("x", None), ("y", None)])
        await asyncio.sleep(1)
        assert sorted(scene.gateway.sent) == ["x", "y"]

    perform(scene_of)


def test_queue_away_while_lining_up_sends_nothing_out_of_turn() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        line_up, times = scene.queue.claim_turns, 0

        async def away(*args: Any) -> ClaimTurnsResult:
            nonlocal times
            times += 1
            if times < 4:
                raise QueueUnavailableError("Redis did not answer in time")
            return await line_up(*args)

        scene.queue.claim_turns = away  # type: ignore[method-assign, assignment]
        await submit(scene, turns("a", 4))
        await asyncio.sleep(20)
        assert gateway.sent == [f"a-{n}" for n in range(4)]

    perform(scene_of, gateway)


def test_reply_of_line_up_that_is_lost_costs_no_turn() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        line_up, times = scene.queue.claim_turns, 0

        async def lost(*args: Any) -> ClaimTurnsResult:
            nonlocal times
            told, times = await line_up(*args), times + 1
            if times < 3:
                raise QueueUnavailableError("Redis did not answer in time")
            return told

        scene.queue.claim_turns = lost  # type: ignore[method-assign, assignment]
        await submit(scene, turns("a", 6))
        await asyncio.sleep(40)
        assert gateway.sent == [f"a-{n}" for n in range(6)]

    perform(scene_of, gateway)


@pytest.mark.parametrize(
    ("on_error", "sent"),
    [
        (OnError.CONTINUE, ["a-0", "a-1", "a-2", "a-3"]),
        (OnError.ABORT, ["a-0", "a-1"]),
        (OnError.HOLD, ["a-0", "a-1"]),
    ],
)
def test_failed_turn_does_to_the_later_ones_what_on_error_says(on_error: OnError, sent: list[str]) -> None:
    gateway = Servers(lambda request: Delivered(400 if request.id == "a-1" else 200, b"{}"))

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 4, on_error=on_error))
        await asyncio.sleep(6)
        assert gateway.sent == sent
        told = await results(scene)
        if on_error is OnError.ABORT:
            assert {told[f"a-{n}"]["error_code"] for n in (2, 3)} == {"SEQUENCE_ABORTED"}
            assert "a-1" in told["a-2"]["error_message"]
            assert "400" in told["a-2"]["error_message"]
            assert (await scene.queue.count_requests()).sequences == SequenceCounts(aborted=1)
            assert happened(scene) == [("sequences-aborted", {"aborted": 1, "newest": "a"})]
        elif on_error is OnError.HOLD:
            assert set(told) == {"a-0", "a-1"}
            assert (await scene.queue.count_requests()).sequences == SequenceCounts(
                active=1, held=1, waiting=2
            )
            assert happened(scene) == [("sequences-held", {"held": 1, "newest": "a"})]
        else:
            assert set(told) == {f"a-{n}" for n in range(4)}
            assert happened(scene) == []

    perform(scene_of, gateway)


def test_turn_is_kept_over_retries_and_dead_requests_abort() -> None:
    gateway = Servers(lambda request: Failed("no") if request.id == "a-1" else Delivered(200, b"{}"))

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 3))
        await asyncio.sleep(20)
        assert gateway.sent == ["a-0", "a-1", "a-1", "a-1"]
        told = await results(scene)
        assert told["a-2"]["error_code"] == "SEQUENCE_ABORTED"
        assert told["a-1"]["error_code"] == "RETRIES_EXHAUSTED"

    perform(scene_of, gateway, options())


def test_refused_by_a_sequence_that_is_full_ends_with_its_code_and_passes_nobody() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 6))
        await asyncio.sleep(5)
        told = await results(scene)
        full = {name for name, each in told.items() if each.get("error_code") == "SEQUENCE_FULL"}
        assert len(full) == 3
        assert gateway.sent == [f"a-{n}" for n in range(6) if f"a-{n}" not in full]
        assert scene.dispatcher.turn_checker.turn_counts["rejected"] == 3

    perform(scene_of, gateway, options(terms=SequenceTerms(max_waiting=2, gap_s=0.2)))


def test_index_that_is_missing_is_waited_for_and_then_passed() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        await submit(scene, [each for each in turns("a", 4) if each[0] != "a-1"])
        await asyncio.sleep(3)
        assert gateway.sent == ["a-0"]
        await asyncio.sleep(10)
        assert gateway.sent == ["a-0", "a-2", "a-3"]

    perform(scene_of, gateway, options(terms=SequenceTerms(gap_s=5.0)))


def test_at_most_max_active_sequences_are_alive() -> None:
    gateway = Servers()
    alive: list[int] = []

    async def scene_of(scene: Scene) -> None:
        for name in "abcd":
            await submit(scene, [*turns(name, 2), (f"{name}-2", Turn(name, 2, last=True))])
        for _ in range(60):
            alive.append(sum(1 for running in gateway.at_once.values() if running))
            await asyncio.sleep(0.05)
        assert sorted(gateway.sent) == sorted(f"{name}-{n}" for name in "abcd" for n in range(3))
        assert max(alive) == 2

    perform(scene_of, gateway, options(terms=SequenceTerms(max_active=2)))


def test_one_of_a_sequence_never_travels_in_a_merged_call() -> None:
    gateway = Servers()
    rule = BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(max_size=8, max_delay_s=0.02)
    )
    asked = Options(RETRY, default_path="/v1/embeddings", merge_rules=(rule,))

    async def scene_of(scene: Scene) -> None:
        both = [("a-0", Turn("a", 0)), ("b-0", Turn("b", 0))]
        await submit(scene, both, b'{"model":"m","input":["x"]}')
        await asyncio.sleep(2)
        assert sorted(gateway.sent) == ["a-0", "b-0"]
        assert all(each.payload == b'{"model":"m","input":["x"]}' for each in gateway.requests)

    perform(scene_of, gateway, asked)


def session(request: Request) -> dict[str, str]:
    assert request.session is not None
    return dict(request.session.headers)


def test_token_of_the_first_answer_goes_out_with_the_next_ones() -> None:
    gateway = Servers(token="pod-1")

    async def scene_of(scene: Scene) -> None:
        await submit(scene, [*turns("a", 3), ("alone", None)])
        await asyncio.sleep(3)
        sent = {each.id: each for each in gateway.requests}
        assert sent["alone"].session is None
        assert session(sent["a-0"]) == {"x-session-id": "a"}
        assert session(sent["a-1"]) == {"x-session-id": "a", "x-session-token": "pod-1"}
        assert session(sent["a-2"]) == session(sent["a-1"])
        gateway.token = "pod-2"
        await submit(scene, [("a-3", Turn("a", 3)), ("a-4", Turn("a", 4))])
        await asyncio.sleep(2)
        assert session(gateway.requests[-2])["x-session-token"] == "pod-1"
        assert session(gateway.requests[-1])["x-session-token"] == "pod-2"
        assert scene.dispatcher.turn_checker.server_counts == {"same": 3, "other": 1, "none": 0}
        await submit(scene, [("a-5", Turn("a", reset=True))])
        await asyncio.sleep(2)
        assert session(gateway.requests[-1]) == {"x-session-id": "a"}

    perform(scene_of, gateway)


def test_server_that_fails_twice_is_left() -> None:
    def how(request: Request) -> Outcome:
        gone = request.session is not None and "x-session-token" in request.session.headers
        return Failed("503", status=503) if gone else Delivered(200, b"{}")

    gateway = Servers(how, token="pod-1")

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 2))
        await asyncio.sleep(10)
        tokens = [session(each).get("x-session-token") for each in gateway.requests]
        assert gateway.sent == ["a-0", "a-1", "a-1", "a-1"]
        assert tokens == [None, "pod-1", "pod-1", None]

    perform(scene_of, gateway, options())


def test_token_that_cannot_go_back_as_it_came_is_none() -> None:
    gateway = Servers(token="a b\r\n")

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 2))
        await asyncio.sleep(3)
        assert session(gateway.requests[1]) == {"x-session-id": "a"}

    perform(scene_of, gateway)


def says(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def answered(request: Request) -> Outcome:
    said = json.loads(request.payload)["messages"]
    message = {"role": "assistant", "content": f"{len(said)} so far"}
    return Delivered(200, json.dumps({"choices": [{"index": 0, "message": message}]}).encode())


def test_conversation_is_carried_on() -> None:
    gateway = Servers(answered)

    async def scene_of(scene: Scene) -> None:
        for number in range(3):
            await submit(
                scene, [(f"a-{number}", Turn("a", number, carry=CarryMode.MESSAGES))], says(f"q{number}")
            )
        await asyncio.sleep(3)
        told = [each["content"] for each in json.loads(gateway.requests[-1].payload)["messages"]]
        assert told == ["q0", "1 so far", "q1", "3 so far", "q2"]

    perform(scene_of, gateway)


def test_conversation_that_is_too_long_ends_with_a_word() -> None:
    gateway = Servers(answered)

    async def scene_of(scene: Scene) -> None:
        for number in range(4):
            await submit(scene, [(f"a-{number}", Turn("a", number))], says("q" * 100))
        await asyncio.sleep(5)
        told = await results(scene)
        assert gateway.sent == ["a-0"]
        assert told["a-1"]["error_code"] == "INVALID_REQUEST"
        assert "sequences.max_carry_bytes is 200" in told["a-1"]["error_message"]
        assert told["a-2"]["error_code"] == told["a-3"]["error_code"] == "SEQUENCE_ABORTED"

    perform(scene_of, gateway, options(carry=CarryMode.MESSAGES, max_carry_bytes=200))


def test_many_that_wait_keep_nobody_from_being_handed_in() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        line_up = scene.queue.claim_turns

        async def slow(*args: Any) -> ClaimTurnsResult:
            await asyncio.sleep(0.02)
            return await line_up(*args)

        scene.queue.claim_turns = slow  # type: ignore[method-assign, assignment]
        await submit(scene, turns("a", 300))
        await asyncio.sleep(0.45)
        assert len(gateway.sent) >= 3, "while others of it are still claimed"
        assert gateway.sent == [f"a-{n}" for n in range(len(gateway.sent))]

    perform(scene_of, gateway)


def test_cancelled_sequence_is_answered_without_being_sent() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        gateway.takes_s = 3.0
        await submit(scene, turns("a", 4))
        await asyncio.sleep(1)
        await scene.store.cancel_sequence("a")
        await asyncio.sleep(6)
        told = await results(scene)
        assert {told[f"a-{n}"]["error_code"] for n in (1, 2, 3)} == {"CANCELLED"}
        assert gateway.sent == ["a-0"]

    perform(scene_of, gateway)


@pytest.mark.parametrize(
    "sequences", [200, pytest.param(1000, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_many_side_by_side_keep_the_pool_as_full_as_requests_of_none(sequences: int) -> None:
    """In virtual time: what it costs a process is measured elsewhere."""
    took_s: dict[bool, float] = {}
    for of_sequences in (False, True):
        gateway = Servers()

        async def scene_of(
            scene: Scene, gateway: Servers = gateway, of_sequences: bool = of_sequences
        ) -> None:
            began = asyncio.get_running_loop().time()
            every = [each for number in range(sequences) for each in turns(f"s{number}", 3)]
            await submit(scene, [(name, turn if of_sequences else None) for name, turn in every])
            while len(gateway.spans) < 3 * sequences:  # noqa: ASYNC110 -- in virtual time
                await asyncio.sleep(0.05)
            took_s[of_sequences] = asyncio.get_running_loop().time() - began

        perform(scene_of, gateway)
    print(f"{sequences} sequences: {took_s[True]:.2f} s, without: {took_s[False]:.2f} s")
    assert took_s[False] >= 0.9 * took_s[True]


def test_other_terms_hold_from_the_next_claim_on() -> None:
    gateway = Servers(answered)

    async def scene_of(scene: Scene) -> None:
        await submit(scene, [("a-0", Turn("a", 0))], says("x"))
        await asyncio.sleep(1)
        terms = SequenceTerms(gap_s=0.5)
        new = options(carry=CarryMode.MESSAGES, token_header="", id_header="x-chat", terms=terms)
        scene.dispatcher.reconfigure(new)
        await submit(scene, [("a-2", Turn("a", 2))], says("y"))
        await asyncio.sleep(5)
        assert gateway.sent == ["a-0", "a-2"], "the gap is waited for no longer"
        assert session(gateway.requests[1]) == {"x-chat": "a"}

    perform(scene_of, gateway)


def test_changed_terms_hold_for_what_waits_though_nothing_else_comes() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        for name in "abc":
            await submit(scene, [(f"{name}-0", Turn(name, 0))])
            await asyncio.sleep(1)
        assert gateway.sent == ["a-0"], "the others may not begin, and nothing of this one runs"
        scene.dispatcher.reconfigure(options(terms=SequenceTerms(max_active=2)))
        await asyncio.sleep(2.5)
        assert gateway.sent == ["a-0", "b-0"]
        scene.dispatcher.reconfigure(options())
        await asyncio.sleep(2.5)
        assert gateway.sent == ["a-0", "b-0", "c-0"]

    perform(scene_of, gateway, options(terms=SequenceTerms(max_active=1)))


def test_changed_terms_are_told_again_until_the_queue_has_heard_them() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        for name in "ab":
            await submit(scene, [(f"{name}-0", Turn(name, 0))])
            await asyncio.sleep(1)
        line_up, asked = scene.queue.claim_turns, 0

        async def away(*args: Any) -> ClaimTurnsResult:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise QueueUnavailableError("Redis did not answer in time")
            return await line_up(*args)

        scene.queue.claim_turns = away  # type: ignore[method-assign, assignment]
        scene.dispatcher.reconfigure(options())
        await asyncio.sleep(10)
        assert gateway.sent == ["a-0", "b-0"]
        asked_by_then = asked
        await asyncio.sleep(10)
        assert asked == asked_by_then, "and no more when it has"

    perform(scene_of, gateway, options(terms=SequenceTerms(max_active=1)))


EDGE_S = 1.2
"""What ends by time is seen by the next sweep, a second later at most."""


@pytest.mark.parametrize(
    ("at_s", "begins_anew"), [(99.0, False), (99.9, False), (100.0 + EDGE_S, True)], ids=str
)
def test_sequence_ends_when_it_was_idle_for_so_long_and_no_sooner(at_s: float, begins_anew: bool) -> None:
    """Who comes later begins anew: nobody remembers the server of the life before."""
    gateway = Servers(token="pod-1")

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 1))
        ended_at = await first_end(gateway)
        await asyncio.sleep(ended_at + at_s - asyncio.get_running_loop().time())
        await submit(scene, [("a-next", Turn("a"))])
        await asyncio.sleep(1)
        assert gateway.sent == ["a-0", "a-next"]
        assert ("x-session-token" not in session(gateway.requests[1])) is begins_anew
        told = [fields for name, fields in happened(scene) if name == "sequences-ended"]
        assert told == ([{"idle": 1}] if begins_anew else [])

    perform(scene_of, gateway, options(terms=SequenceTerms(max_idle_s=100)))


@pytest.mark.parametrize(("step_s", "grows_old"), [(9.99, False), (10.01, True)], ids=str)
def test_sequence_ends_by_age_with_the_request_that_runs(step_s: float, grows_old: bool) -> None:
    """Ten turns behind each other, each of so many seconds, of a life of 100 s: the tenth ends it, or not."""
    gateway = Servers(token="pod-1")

    async def scene_of(scene: Scene) -> None:
        gateway.takes_s = step_s
        await submit(scene, turns("a", 11))
        while len(gateway.sent) < 11:  # noqa: ASYNC110 -- in virtual time
            await asyncio.sleep(0.05)
        with_token = ["x-session-token" in session(each) for each in gateway.requests]
        assert gateway.sent == [f"a-{n}" for n in range(11)], "what waits goes on in its order"
        assert with_token == [False, *[True] * 9, not grows_old]
        await asyncio.sleep(2)
        told = [fields for name, fields in happened(scene) if name == "sequences-ended"]
        assert told == ([{"aged": 1}] if grows_old else [])

    perform(scene_of, gateway, options(terms=SequenceTerms(max_age_s=100)))


@pytest.mark.parametrize("after_s", [4.9, 5.0], ids=["just before", "at"])
def test_missing_index_may_come_until_its_time_is_up(after_s: float) -> None:
    """Who claims it in the very moment finds it late: the sweep of that moment may have been before."""
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        await submit(scene, [("a-1", Turn("a", 1))])
        found = None
        while found is None or found.gap_since is None:
            await asyncio.sleep(0.001)
            found = await scene.store.get_sequence("a")
        missing_since = found.gap_since - scene.store.pool.unix_origin
        await asyncio.sleep(missing_since + after_s - 0.05 - asyncio.get_running_loop().time())
        assert gateway.sent == [], "not sooner"
        if after_s < 5.0:
            await submit(scene, [("a-0", Turn("a", 0))])
        await asyncio.sleep(3)
        assert gateway.sent == (["a-0", "a-1"] if after_s < 5.0 else ["a-1"])
        passed = [fields for name, fields in happened(scene) if name == "sequences-gaps"]
        assert passed == ([] if after_s < 5.0 else [{"gaps": 1}])

    perform(scene_of, gateway, options(terms=SequenceTerms(gap_s=5.0)))


async def first_end(gateway: Servers) -> float:
    """When the first answer came."""
    while not gateway.spans:  # noqa: ASYNC110 -- in virtual time
        await asyncio.sleep(0.001)
    return gateway.spans[0][2]


@pytest.mark.parametrize(("waiting", "refused"), [(3, 0), (4, 0), (5, 1)], ids=str)
def test_as_many_wait_as_may_and_not_one_more(waiting: int, refused: int) -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        gateway.takes_s = 5.0
        await submit(scene, turns("a", 1))
        await asyncio.sleep(1)
        await submit(scene, turns("a", 1 + waiting)[1:])
        await asyncio.sleep(2)
        told = await results(scene)
        assert [each["error_code"] for each in told.values()] == ["SEQUENCE_FULL"] * refused
        assert (await scene.queue.count_requests()).sequences.waiting == waiting - refused

    perform(scene_of, gateway, options(terms=SequenceTerms(max_waiting=4)))
