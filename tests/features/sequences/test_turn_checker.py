"""Requests of sequences in the loop: order, errors, the same server, the conversation, and the terms."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.features.sequences.decisions import SequenceCounts, SequenceTerms
from dispatcher.features.sequences.options import SequenceOptions
from dispatcher.features.sequences.queue.steps import ClaimTurnsResult
from dispatcher.features.sequences.turn_checker import TurnChecker
from dispatcher.features.sequences.turns import CarryMode, OnError, Turn
from dispatcher.kernel import Options
from dispatcher.kernel.loop import FLUSH_DELAY_S
from dispatcher.kernel.options import index_options
from dispatcher.requests.affinity import AffinityOptions
from dispatcher.requests.headers import AFFINITY_TOKEN
from dispatcher.requests.outcomes.outcome import Delivered, Failed, Outcome, RetryPolicy
from dispatcher.requests.queue_timeouts import RuleTimeout, TimeoutAction, TimeoutOptions
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.wire_format import ErrorCode
from tests.features.scene import Scene, run_in_scene
from tests.features.sequences.sequence_scene import SequenceGateway, build_turns, submit_turns
from tests.kernel.scene import find_part, read_results

RETRY = RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3)


def list_sequence_events(scene: Scene) -> list[tuple[str, dict[str, Any]]]:
    """Return the log events about sequences, with their fields."""
    return [
        (event.event_name, {**fields})
        for event, fields in scene.events
        if event.event_name.startswith("sequences-")
    ]


def options(token_header: str = AFFINITY_TOKEN, id_header: str = "x-session-id", **settings: Any) -> Options:
    affinity = AffinityOptions(token_header, id_header)
    return Options(RETRY, of_features=index_options(affinity, SequenceOptions(**settings)))


def test_turns_are_sent_in_order_and_one_at_a_time() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        requests = [*reversed(build_turns("a", 5)), *build_turns("b", 5), ("alone", None)]
        await submit_turns(scene, requests)
        await asyncio.sleep(3)
        assert gateway.list_sent_of("a") == [f"a-{n}" for n in range(5)]
        assert gateway.list_sent_of("b") == [f"b-{n}" for n in range(5)]
        assert "alone" in gateway.sent
        assert gateway.max_running_per_sequence == 1
        assert gateway.sent.index("b-1") < gateway.sent.index("a-4"), (
            "different sequences run at the same time"
        )

    run_in_scene(check, gateway)


def test_next_turn_follows_within_the_flush_delay() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 10))
        await submit_turns(scene, build_turns("b", 10))
        await asyncio.sleep(5)
        answered_at = {request_id: end for request_id, _, end in gateway.spans}
        sent_at = {request_id: start for request_id, start, _ in gateway.spans}
        gaps = [sent_at[f"{s}-{n + 1}"] - answered_at[f"{s}-{n}"] for s in "ab" for n in range(9)]
        assert max(gaps) <= FLUSH_DELAY_S + 1e-6, "the only delay is the wait for other completions"

    run_in_scene(check, gateway)


def test_turns_are_not_checked_for_requests_without_a_sequence() -> None:
    async def check(scene: Scene) -> None:
        async def fail_if_called(*_: object) -> ClaimTurnsResult:
            raise AssertionError("turns were checked")

        scene.queue.claim_turns = fail_if_called  # type: ignore[method-assign, assignment]
        await submit_turns(scene, [("x", None), ("y", None)])
        await asyncio.sleep(1)
        assert sorted(scene.gateway.sent) == ["x", "y"]

    run_in_scene(check)


def test_queue_outage_during_the_turn_check_keeps_the_order() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        claim_turns, call_count = scene.queue.claim_turns, 0

        async def fail_at_first(*args: Any) -> ClaimTurnsResult:
            nonlocal call_count
            call_count += 1
            if call_count < 4:
                raise QueueUnavailableError("Redis did not answer in time")
            return await claim_turns(*args)

        scene.queue.claim_turns = fail_at_first  # type: ignore[method-assign, assignment]
        await submit_turns(scene, build_turns("a", 4))
        await asyncio.sleep(20)
        assert gateway.sent == [f"a-{n}" for n in range(4)]

    run_in_scene(check, gateway)


def test_lost_reply_of_the_turn_check_loses_no_turn() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        claim_turns, call_count = scene.queue.claim_turns, 0

        async def lose_reply(*args: Any) -> ClaimTurnsResult:
            nonlocal call_count
            reply, call_count = await claim_turns(*args), call_count + 1
            if call_count < 3:
                raise QueueUnavailableError("Redis did not answer in time")
            return reply

        scene.queue.claim_turns = lose_reply  # type: ignore[method-assign, assignment]
        await submit_turns(scene, build_turns("a", 6))
        await asyncio.sleep(40)
        assert gateway.sent == [f"a-{n}" for n in range(6)]

    run_in_scene(check, gateway)


@pytest.mark.parametrize(
    ("on_error", "sent"),
    [
        (OnError.CONTINUE, ["a-0", "a-1", "a-2", "a-3"]),
        (OnError.ABORT, ["a-0", "a-1"]),
        (OnError.HOLD, ["a-0", "a-1"]),
    ],
)
def test_failed_turn_affects_later_turns_as_on_error_says(on_error: OnError, sent: list[str]) -> None:
    gateway = SequenceGateway(lambda request: Delivered(400 if request.id == "a-1" else 200, b"{}"))

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 4, on_error=on_error))
        await asyncio.sleep(6)
        assert gateway.sent == sent
        results = await read_results(scene)
        if on_error is OnError.ABORT:
            assert {results[f"a-{n}"]["error_code"] for n in (2, 3)} == {"SEQUENCE_ABORTED"}
            assert "a-1" in results["a-2"]["error_message"]
            assert "400" in results["a-2"]["error_message"]
            assert (await scene.queue.count_requests()).of(SequenceCounts) == SequenceCounts(aborted=1)
            assert list_sequence_events(scene) == [("sequences-aborted", {"aborted": 1, "newest": "a"})]
        elif on_error is OnError.HOLD:
            assert set(results) == {"a-0", "a-1"}
            assert (await scene.queue.count_requests()).of(SequenceCounts) == SequenceCounts(
                active=1, held=1, waiting=2
            )
            assert list_sequence_events(scene) == [("sequences-held", {"held": 1, "newest": "a"})]
        else:
            assert set(results) == {f"a-{n}" for n in range(4)}
            assert list_sequence_events(scene) == []

    run_in_scene(check, gateway)


def test_request_that_waited_too_long_counts_as_a_failure_of_its_sequence() -> None:
    gateway, path = SequenceGateway(), "/v1/completions"
    timeouts = TimeoutOptions((RuleTimeout("a rule", (path,), 30.0, TimeoutAction.REJECT),))

    async def check(scene: Scene) -> None:
        await asyncio.sleep(100)
        now = int(asyncio.get_running_loop().time())
        for number, waited_s in enumerate((42, 5)):
            turn, until = Turn("chat", number), now + 10**6 + number
            member = encode_member(f"r-{number}", b"{}", until, created=now - waited_s, extra=turn)
            scene.store.add_member(member, float(until))
        await asyncio.sleep(30)
        results = await read_results(scene)
        assert results["r-0"]["error_code"] == ErrorCode.DEADLINE_EXCEEDED
        assert results["r-1"]["error_code"] == ErrorCode.SEQUENCE_ABORTED
        assert gateway.sent == []

    run_in_scene(check, gateway, Options(RETRY, default_path=path, of_features=index_options(timeouts)))


def test_turn_is_kept_during_retries_and_exhausted_retries_abort_the_sequence() -> None:
    gateway = SequenceGateway(lambda request: Failed("no") if request.id == "a-1" else Delivered(200, b"{}"))

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 3))
        await asyncio.sleep(20)
        assert gateway.sent == ["a-0", "a-1", "a-1", "a-1"]
        results = await read_results(scene)
        assert results["a-2"]["error_code"] == "SEQUENCE_ABORTED"
        assert results["a-1"]["error_code"] == "RETRIES_EXHAUSTED"

    run_in_scene(check, gateway, options())


def test_request_rejected_by_a_full_sequence_gets_an_error_and_the_order_is_kept() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 6))
        await asyncio.sleep(5)
        results = await read_results(scene)
        rejected_ids = {name for name, each in results.items() if each.get("error_code") == "SEQUENCE_FULL"}
        assert len(rejected_ids) == 3
        assert gateway.sent == [f"a-{n}" for n in range(6) if f"a-{n}" not in rejected_ids]
        assert find_part(scene.dispatcher, TurnChecker).turn_counts["rejected"] == 3

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_waiting=2, gap_s=0.2)))


def test_missing_index_is_waited_for_and_then_skipped() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        await submit_turns(scene, [each for each in build_turns("a", 4) if each[0] != "a-1"])
        await asyncio.sleep(3)
        assert gateway.sent == ["a-0"]
        await asyncio.sleep(10)
        assert gateway.sent == ["a-0", "a-2", "a-3"]

    run_in_scene(check, gateway, options(terms=SequenceTerms(gap_s=5.0)))


def test_at_most_max_active_sequences_run() -> None:
    gateway = SequenceGateway()
    running_counts: list[int] = []

    async def check(scene: Scene) -> None:
        for name in "abcd":
            await submit_turns(scene, [*build_turns(name, 2), (f"{name}-2", Turn(name, 2, last=True))])
        for _ in range(60):
            running_counts.append(sum(1 for running in gateway.running_by_sequence.values() if running))
            await asyncio.sleep(0.05)
        assert sorted(gateway.sent) == sorted(f"{name}-{n}" for name in "abcd" for n in range(3))
        assert max(running_counts) == 2

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_active=2)))


def test_requests_of_sequences_are_not_merged_unless_the_rule_says_so() -> None:
    gateway = SequenceGateway()
    rule = BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(max_size=8, max_delay_s=0.02)
    )
    merging = Options(RETRY, default_path="/v1/embeddings", of_features=index_options(MergeOptions((rule,))))

    async def check(scene: Scene) -> None:
        turns = [("a-0", Turn("a", 0)), ("b-0", Turn("b", 0))]
        await submit_turns(scene, turns, b'{"model":"m","input":["x"]}')
        await asyncio.sleep(2)
        assert sorted(gateway.sent) == ["a-0", "b-0"]
        assert all(each.payload == b'{"model":"m","input":["x"]}' for each in gateway.requests)

    run_in_scene(check, gateway, merging)


def get_session_headers(request: Request) -> dict[str, str]:
    assert request.affinity is not None
    return dict(request.affinity.headers)


def test_session_token_of_an_answer_is_sent_with_the_next_turns() -> None:
    gateway = SequenceGateway(token="pod-1")

    async def check(scene: Scene) -> None:
        await submit_turns(scene, [*build_turns("a", 3), ("alone", None)])
        await asyncio.sleep(3)
        sent = {each.id: each for each in gateway.requests}
        assert sent["alone"].affinity is None
        assert get_session_headers(sent["a-0"]) == {"x-session-id": "a"}
        assert get_session_headers(sent["a-1"]) == {"x-session-id": "a", "x-session-token": "pod-1"}
        assert get_session_headers(sent["a-2"]) == get_session_headers(sent["a-1"])
        gateway.session_token = "pod-2"
        await submit_turns(scene, [("a-3", Turn("a", 3)), ("a-4", Turn("a", 4))])
        await asyncio.sleep(2)
        assert get_session_headers(gateway.requests[-2])["x-session-token"] == "pod-1"
        assert get_session_headers(gateway.requests[-1])["x-session-token"] == "pod-2"
        assert find_part(scene.dispatcher, TurnChecker).server_counts == {"same": 3, "other": 1, "none": 0}
        await submit_turns(scene, [("a-5", Turn("a", reset=True))])
        await asyncio.sleep(2)
        assert get_session_headers(gateway.requests[-1]) == {"x-session-id": "a"}

    run_in_scene(check, gateway)


def test_session_token_is_dropped_after_two_failures_of_the_server() -> None:
    def fail_with_token(request: Request) -> Outcome:
        has_token = request.affinity is not None and "x-session-token" in request.affinity.headers
        return Failed("503", status=503) if has_token else Delivered(200, b"{}")

    gateway = SequenceGateway(fail_with_token, token="pod-1")

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 2))
        await asyncio.sleep(10)
        tokens = [get_session_headers(each).get("x-session-token") for each in gateway.requests]
        assert gateway.sent == ["a-0", "a-1", "a-1", "a-1"]
        assert tokens == [None, "pod-1", "pod-1", None]

    run_in_scene(check, gateway, options())


def test_session_token_that_is_no_valid_header_value_is_ignored() -> None:
    gateway = SequenceGateway(token="a b\r\n")

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 2))
        await asyncio.sleep(3)
        assert get_session_headers(gateway.requests[1]) == {"x-session-id": "a"}

    run_in_scene(check, gateway)


def build_message_body(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def answer_conversation(request: Request) -> Outcome:
    messages = json.loads(request.payload)["messages"]
    message = {"role": "assistant", "content": f"{len(messages)} so far"}
    return Delivered(200, json.dumps({"choices": [{"index": 0, "message": message}]}).encode())


def test_conversation_is_inserted_into_the_next_turns() -> None:
    gateway = SequenceGateway(answer_conversation)

    async def check(scene: Scene) -> None:
        for number in range(3):
            await submit_turns(
                scene,
                [(f"a-{number}", Turn("a", number, carry=CarryMode.MESSAGES))],
                build_message_body(f"q{number}"),
            )
        await asyncio.sleep(3)
        contents = [each["content"] for each in json.loads(gateway.requests[-1].payload)["messages"]]
        assert contents == ["q0", "1 so far", "q1", "3 so far", "q2"]

    run_in_scene(check, gateway)


def test_conversation_that_is_too_long_fails_the_turn_and_aborts_the_sequence() -> None:
    gateway = SequenceGateway(answer_conversation)

    async def check(scene: Scene) -> None:
        for number in range(4):
            await submit_turns(scene, [(f"a-{number}", Turn("a", number))], build_message_body("q" * 100))
        await asyncio.sleep(5)
        results = await read_results(scene)
        assert gateway.sent == ["a-0"]
        assert results["a-1"]["error_code"] == "INVALID_REQUEST"
        assert "sequences.max_carry_bytes is 200" in results["a-1"]["error_message"]
        assert results["a-2"]["error_code"] == results["a-3"]["error_code"] == "SEQUENCE_ABORTED"

    run_in_scene(check, gateway, options(carry=CarryMode.MESSAGES, max_carry_bytes=200))


def test_many_waiting_turns_do_not_delay_completions() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        claim_turns = scene.queue.claim_turns

        async def claim_slowly(*args: Any) -> ClaimTurnsResult:
            await asyncio.sleep(0.02)
            return await claim_turns(*args)

        scene.queue.claim_turns = claim_slowly  # type: ignore[method-assign, assignment]
        await submit_turns(scene, build_turns("a", 300))
        await asyncio.sleep(0.45)
        assert len(gateway.sent) >= 3, "other requests of the sequence are still being claimed"
        assert gateway.sent == [f"a-{n}" for n in range(len(gateway.sent))]

    run_in_scene(check, gateway)


def test_requests_of_a_cancelled_sequence_are_completed_without_being_sent() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        gateway.answer_after_s = 3.0
        await submit_turns(scene, build_turns("a", 4))
        await asyncio.sleep(1)
        await scene.store.cancel_sequence("a")
        await asyncio.sleep(6)
        results = await read_results(scene)
        assert {results[f"a-{n}"]["error_code"] for n in (1, 2, 3)} == {"CANCELLED"}
        assert gateway.sent == ["a-0"]

    run_in_scene(check, gateway)


@pytest.mark.parametrize(
    "sequences", [200, pytest.param(1000, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_many_sequences_use_the_pool_as_well_as_requests_without_sequences(sequences: int) -> None:
    """Time is virtual; a benchmark measures the CPU time of sequences."""
    duration_s: dict[bool, float] = {}
    for in_sequences in (False, True):
        gateway = SequenceGateway()

        async def check(
            scene: Scene, gateway: SequenceGateway = gateway, in_sequences: bool = in_sequences
        ) -> None:
            started_at = asyncio.get_running_loop().time()
            turns = [each for number in range(sequences) for each in build_turns(f"s{number}", 3)]
            await submit_turns(scene, [(name, turn if in_sequences else None) for name, turn in turns])
            while len(gateway.spans) < 3 * sequences:  # noqa: ASYNC110 -- in virtual time
                await asyncio.sleep(0.05)
            duration_s[in_sequences] = asyncio.get_running_loop().time() - started_at

        run_in_scene(check, gateway)
    print(f"{sequences} sequences: {duration_s[True]:.2f} s, without: {duration_s[False]:.2f} s")
    assert duration_s[False] >= 0.9 * duration_s[True]


def test_new_settings_apply_from_the_next_claim_on() -> None:
    gateway = SequenceGateway(answer_conversation)

    async def check(scene: Scene) -> None:
        await submit_turns(scene, [("a-0", Turn("a", 0))], build_message_body("x"))
        await asyncio.sleep(1)
        terms = SequenceTerms(gap_s=0.5)
        new_options = options(carry=CarryMode.MESSAGES, token_header="", id_header="x-chat", terms=terms)
        scene.dispatcher.reconfigure(new_options)
        await submit_turns(scene, [("a-2", Turn("a", 2))], build_message_body("y"))
        await asyncio.sleep(5)
        assert gateway.sent == ["a-0", "a-2"], "the gap is waited for only as long as the new terms say"
        assert get_session_headers(gateway.requests[1]) == {"x-chat": "a"}

    run_in_scene(check, gateway)


def test_new_terms_apply_to_waiting_requests_without_a_new_request() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        for name in "abc":
            await submit_turns(scene, [(f"{name}-0", Turn(name, 0))])
            await asyncio.sleep(1)
        assert gateway.sent == ["a-0"], (
            "the other sequences may not start, although no request of the first one runs"
        )
        scene.dispatcher.reconfigure(options(terms=SequenceTerms(max_active=2)))
        await asyncio.sleep(2.5)
        assert gateway.sent == ["a-0", "b-0"]
        scene.dispatcher.reconfigure(options())
        await asyncio.sleep(2.5)
        assert gateway.sent == ["a-0", "b-0", "c-0"]

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_active=1)))


def test_new_terms_are_sent_again_until_the_queue_has_them() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        for name in "ab":
            await submit_turns(scene, [(f"{name}-0", Turn(name, 0))])
            await asyncio.sleep(1)
        claim_turns, call_count = scene.queue.claim_turns, 0

        async def fail_at_first(*args: Any) -> ClaimTurnsResult:
            nonlocal call_count
            call_count += 1
            if call_count < 3:
                raise QueueUnavailableError("Redis did not answer in time")
            return await claim_turns(*args)

        scene.queue.claim_turns = fail_at_first  # type: ignore[method-assign, assignment]
        scene.dispatcher.reconfigure(options())
        await asyncio.sleep(10)
        assert gateway.sent == ["a-0", "b-0"]
        calls_before = call_count
        await asyncio.sleep(10)
        assert call_count == calls_before, "no more calls after the queue has the terms"

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_active=1)))


SWEEP_DELAY_S = 1.2
"""Upper bound on the time from the end of a run to the sweep that ends it."""


@pytest.mark.parametrize(
    ("at_s", "is_new_run"), [(99.0, False), (99.9, False), (100.0 + SWEEP_DELAY_S, True)], ids=str
)
def test_sequence_run_ends_after_max_idle_s_and_not_earlier(at_s: float, is_new_run: bool) -> None:
    """A later request starts a new run, without the session token of the old one."""
    gateway = SequenceGateway(token="pod-1")

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 1))
        ended_at = await wait_for_first_answer(gateway)
        await asyncio.sleep(ended_at + at_s - asyncio.get_running_loop().time())
        await submit_turns(scene, [("a-next", Turn("a"))])
        await asyncio.sleep(1)
        assert gateway.sent == ["a-0", "a-next"]
        assert ("x-session-token" not in get_session_headers(gateway.requests[1])) is is_new_run
        ended_events = [fields for name, fields in list_sequence_events(scene) if name == "sequences-ended"]
        assert ended_events == ([{"idle": 1}] if is_new_run else [])

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_idle_s=100)))


@pytest.mark.parametrize(("step_s", "reaches_max_age"), [(9.99, False), (10.01, True)], ids=str)
def test_sequence_run_ends_by_age_after_the_running_request(step_s: float, reaches_max_age: bool) -> None:
    """Ten turns of `step_s` each: a run of at most 100 s ends with the tenth if they take longer together."""
    gateway = SequenceGateway(token="pod-1")

    async def check(scene: Scene) -> None:
        gateway.answer_after_s = step_s
        await submit_turns(scene, build_turns("a", 11))
        while len(gateway.sent) < 11:  # noqa: ASYNC110 -- in virtual time
            await asyncio.sleep(0.05)
        with_token = ["x-session-token" in get_session_headers(each) for each in gateway.requests]
        assert gateway.sent == [f"a-{n}" for n in range(11)], "waiting requests continue in order"
        assert with_token == [False, *[True] * 9, not reaches_max_age]
        await asyncio.sleep(2)
        ended_events = [fields for name, fields in list_sequence_events(scene) if name == "sequences-ended"]
        assert ended_events == ([{"aged": 1}] if reaches_max_age else [])

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_age_s=100)))


@pytest.mark.parametrize("after_s", [4.9, 5.0], ids=["index arrives", "index does not arrive"])
def test_missing_index_can_arrive_until_gap_s_has_passed(after_s: float) -> None:
    """The index arrives just before the end of the gap, or not at all."""
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        await submit_turns(scene, [("a-1", Turn("a", 1))])
        sequence = None
        while sequence is None or sequence.gap_since is None:
            await asyncio.sleep(0.001)
            sequence = await scene.store.get_sequence("a")
        missing_since = sequence.gap_since - scene.store.pool.unix_origin
        await asyncio.sleep(missing_since + after_s - 0.05 - asyncio.get_running_loop().time())
        assert gateway.sent == [], "not before gap_s has passed"
        if after_s < 5.0:
            await submit_turns(scene, [("a-0", Turn("a", 0))])
        await asyncio.sleep(3)
        assert gateway.sent == (["a-0", "a-1"] if after_s < 5.0 else ["a-1"])
        gap_events = [fields for name, fields in list_sequence_events(scene) if name == "sequences-gaps"]
        assert gap_events == ([] if after_s < 5.0 else [{"gaps": 1}])

    run_in_scene(check, gateway, options(terms=SequenceTerms(gap_s=5.0)))


async def wait_for_first_answer(gateway: SequenceGateway) -> float:
    """Return the time of the first answer."""
    while not gateway.spans:  # noqa: ASYNC110 -- in virtual time
        await asyncio.sleep(0.001)
    return gateway.spans[0][2]


@pytest.mark.parametrize(("waiting_count", "rejected_count"), [(3, 0), (4, 0), (5, 1)], ids=str)
def test_at_most_max_waiting_requests_of_a_sequence_wait(waiting_count: int, rejected_count: int) -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        gateway.answer_after_s = 5.0
        await submit_turns(scene, build_turns("a", 1))
        await asyncio.sleep(1)
        await submit_turns(scene, build_turns("a", 1 + waiting_count)[1:])
        await asyncio.sleep(2)
        results = await read_results(scene)
        assert [each["error_code"] for each in results.values()] == ["SEQUENCE_FULL"] * rejected_count
        assert (await scene.queue.count_requests()).of(
            SequenceCounts
        ).waiting == waiting_count - rejected_count

    run_in_scene(check, gateway, options(terms=SequenceTerms(max_waiting=4)))
