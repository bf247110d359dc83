"""Merged calls through the whole loop in virtual time: each request gets exactly its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging import hooks as merging
from dispatcher.features.merging.call_size import INITIAL_CHECKS
from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks, join_hooks
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.loop import build_feature_hooks
from dispatcher.kernel.options import index_options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.outcome import Delivered, Failed, Overloaded, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from dispatcher.wire_format import ErrorCode, PoppedResult
from tests.features.merging.embedding_gateway import REJECTED_TEXT, EmbeddingGateway, build_answer
from tests.kernel import readme_example
from tests.kernel.scene import find_part, lease, request
from tests.memory_queue import MemoryStore

PATH = "/v1/embeddings"
RULE = BatchRule((PATH,), SHAPES["embeddings"], MergeMode.ON, GroupingRule(32, max_delay_s=0.02))
FAR_DEADLINE = 10**9


class MergingScene:
    """A dispatcher with a merge rule for embeddings, in a pool of `limit` units."""

    def __init__(
        self,
        server: EmbeddingGateway,
        rule: BatchRule = RULE,
        *,
        limit: int = 64,
        build_hooks: Callable[[KernelContext], Hooks] = build_feature_hooks,
        **retry: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.store = MemoryStore(clock=loop.time)
        self.limiter = Limiter(Policy(max_sys=limit, reserve=0.0, max_age_s=1e9), [Signal.REQUESTS])
        self.limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, limit), 1.0)
        self.options = Options(
            RetryPolicy(**retry),
            default_path="/v1/completions",
            of_features=index_options(MergeOptions((rule,))),
        )
        self.metrics = Metrics()
        self.dispatcher = Dispatcher(
            MemoryQueue(self.store, "a"),
            server,
            self.limiter,
            self.options,
            Journal(self.metrics),
            build_hooks=build_hooks,
        )
        self.merger = find_part(self.dispatcher, RequestMerger)
        self.results: dict[str, PoppedResult] = {}
        self.events: list[tuple[Event, Mapping[str, Any]]] = []

    async def submit(
        self,
        texts: Mapping[str, Any],
        *,
        deadline: int = FAR_DEADLINE,
        priorities: Mapping[str, int] = {},
        **fields: Any,
    ) -> None:
        """Submit a request for the embedding of each text, or list of texts, under its id. Without a
        priority, it has the best one."""
        submissions = []
        for name, text in texts.items():
            payload = msgspec.json.encode({"model": "m", "input": text})
            member = encode_member(name, payload, deadline, endpoint=PATH, token=f"t-{name}", **fields)
            score = compute_score(deadline, priorities.get(name))
            submissions.append(Submission(member, score, name, f"t-{name}", deadline))
        await self.store.submit(submissions)

    async def wait_for_results(self, count: int, within_s: float = 600.0) -> None:
        async with asyncio.timeout(within_s):
            while len(self.results) < count:
                while (popped := self.store.pop_result()) is not None:
                    result = decode_result(popped)
                    assert result.id not in self.results, "the request has two results"
                    self.results[result.id] = result
                await asyncio.sleep(0.001)

    def get_codes(self) -> dict[str, int | str | None]:
        return {name: result.status_code or result.error_code for name, result in self.results.items()}


def run_in_scene(
    check: Callable[[MergingScene], Awaitable[None]], server: EmbeddingGateway, **settings: Any
) -> MergingScene:
    async def main() -> MergingScene:
        events: list[tuple[Event, Mapping[str, Any]]] = []
        with divert_events(lambda event, fields: events.append((event, fields))):
            scene = MergingScene(server, **settings)
            scene.events = events
            task = asyncio.create_task(scene.dispatcher.run())
            await check(scene)
            scene.dispatcher.drain(1.0)
            await task
        assert not [fields for event, fields in events if event is Event.INTERNAL_ERROR]
        assert scene.limiter.in_flight == 0
        assert (await scene.store.count_requests()).leased == 0
        assert len(scene.merger.groups) == 0
        return scene

    return run_in_virtual_time(main(), start=2.0)


def build_texts(count: int, prefix: str = "text") -> dict[str, str]:
    return {f"r-{n}": f"{prefix} {n}" for n in range(count)}


def assert_own_answers(scene: MergingScene, texts: Mapping[str, Any]) -> None:
    """Check that each request has the answer to its own texts. The tests of shapes check the usage."""
    for name, text in texts.items():
        result = msgspec.json.decode(scene.results[name].payload)
        expected = msgspec.json.decode(build_answer([text] if isinstance(text, str) else text, "m"))
        assert result.pop("usage").keys() == expected.pop("usage").keys()
        assert result == expected, name


async def pass_parity_checks(scene: MergingScene) -> None:
    """Submit requests until the parity checks of the first merged calls have passed."""
    for n in range(30):
        if n and all(target.size.checked_calls >= INITIAL_CHECKS for target in scene.merger.targets):
            break
        await scene.submit({f"proof-{n}-{k}": f"proof {n} {k}" for k in range(4)})
        await scene.wait_for_results(4 * (n + 1))
    else:
        pytest.fail("the parity checks did not pass")
    scene.results.clear()
    scene.server.calls.clear()


def test_requests_are_merged_and_each_gets_its_own_answer() -> None:
    texts = build_texts(100)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        await scene.wait_for_results(100)

    scene = run_in_scene(check, EmbeddingGateway())
    assert_own_answers(scene, texts)
    assert len(scene.server.calls) <= 5
    assert max(map(len, scene.server.calls)) == 32
    assert scene.merger.merged_request_count == 100 + 4 * INITIAL_CHECKS


@pytest.mark.parametrize("check_every", [1, 3])
def test_swapped_answers_are_found_by_the_next_parity_check(check_every: int) -> None:
    """With two items per call, each check of a call with swapped answers finds them."""
    texts = build_texts(40)
    rule = replace(RULE, grouping=replace(RULE.grouping, max_size=2))

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        for target in scene.merger.targets:
            target.size._calls_since_check = 0
            target.size.check_every = check_every
        scene.server.swaps_first_items = True
        await scene.submit(texts)
        await scene.wait_for_results(40)

    scene = run_in_scene(check, EmbeddingGateway(), rule=rule, limit=2)
    wrong_count = 0
    for name, text in texts.items():
        result = msgspec.json.decode(scene.results[name].payload)
        wrong_count += result["data"] != msgspec.json.decode(build_answer([text], "m"))["data"]
    assert wrong_count == 2 * (check_every - 1), "the answers of the calls before the checked one are wrong"
    assert scene.merger.check_counts["differs"] == 1


def test_first_merged_calls_are_compared_with_single_calls() -> None:
    texts = build_texts(32)

    async def check(scene: MergingScene) -> None:
        await scene.submit(texts)
        await scene.wait_for_results(32)

    scene = run_in_scene(check, EmbeddingGateway())
    assert_own_answers(scene, texts)
    assert sorted(map(len, scene.server.calls)) == [*[1] * 32, 32]
    assert scene.merger.check_counts == {"same": 32, "differs": 0, "inconclusive": 0}


def test_wrong_merged_answers_turn_merging_off_and_reach_no_request() -> None:
    texts = build_texts(200)

    async def check(scene: MergingScene) -> None:
        await scene.submit(texts)
        await scene.wait_for_results(200)

    scene = run_in_scene(check, EmbeddingGateway(swaps_first_items=True))
    assert_own_answers(scene, texts)
    (target,) = scene.merger.targets
    assert target.size.off_reason.startswith(
        "the answer to a merged call differs from the answers to single calls"
    )
    assert [fields["model"] for event, fields in scene.events if event is Event.BATCHING_OFF] == ["m"]
    assert sum(len(call) > 1 for call in scene.server.calls) <= 200 / 32 + 1


def test_answer_that_cannot_be_split_turns_merging_off_and_requests_are_sent_alone() -> None:
    texts = build_texts(64)

    async def check(scene: MergingScene) -> None:
        await scene.submit(texts)
        await scene.wait_for_results(64)

    scene = run_in_scene(check, EmbeddingGateway(drops_last_item=True))
    assert_own_answers(scene, texts)
    (target,) = scene.merger.targets
    assert "could not be split" in target.size.off_reason


def test_rejected_item_among_32_is_found_in_eleven_calls_without_harm_to_others() -> None:
    texts = build_texts(32)
    texts["r-19"] = "bad one"

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        await scene.wait_for_results(32)

    scene = run_in_scene(check, EmbeddingGateway())
    codes = scene.get_codes()
    assert codes.pop("r-19") == 400
    assert set(codes.values()) == {200}
    assert_own_answers(scene, {name: text for name, text in texts.items() if name != "r-19"})
    assert len(scene.server.calls) <= 11


def test_each_rejected_item_gets_the_answer_to_its_own_call() -> None:
    texts = build_texts(32, "bad")

    async def check(scene: MergingScene) -> None:
        await scene.submit(texts)
        await scene.wait_for_results(32)

    scene = run_in_scene(check, EmbeddingGateway())
    assert set(scene.get_codes().values()) == {400}
    assert {text for call in scene.server.calls if len(call) == 1 for text in call} == set(texts.values())


def test_maximum_items_of_the_server_are_learned_from_a_call_that_is_too_large() -> None:
    texts = build_texts(200)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        await scene.wait_for_results(200)

    scene = run_in_scene(check, EmbeddingGateway(max_items=8))
    assert_own_answers(scene, texts)
    (target,) = scene.merger.targets
    assert target.size.server_max_items == 8
    assert target.size.off_reason == ""
    too_large = [call for call in scene.server.calls if len(call) > 8]
    assert len(too_large) <= 3, "only calls in flight when the limit was learned, and their halves"
    assert [fields["max_items"] for event, fields in scene.events if event is Event.BATCHING_LIMIT] == [8]


def test_request_that_crashes_the_server_is_sent_alone_after_one_merged_call() -> None:
    texts = build_texts(16)
    texts["r-5"] = "deadly"

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        await scene.wait_for_results(16)

    scene = run_in_scene(check, EmbeddingGateway(), max_attempts=3, base_s=0.1, max_s=0.1)
    codes = scene.get_codes()
    assert codes.pop("r-5") == 500
    assert scene.results["r-5"].error_code == ErrorCode.RETRIES_EXHAUSTED
    assert set(codes.values()) == {200}
    single_calls = [call for call in scene.server.calls if call == ["deadly"]]
    assert len(single_calls) == 2, "it is sent alone after the merged call"


def test_request_fails_only_after_it_was_sent_alone() -> None:
    texts = build_texts(8)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.next_outcomes.append(Failed("the gateway answered 500", 500, b"x"))
        await scene.submit(texts)
        await scene.wait_for_results(8)

    scene = run_in_scene(check, EmbeddingGateway(), max_attempts=1)
    assert set(scene.get_codes().values()) == {200}
    assert sorted(map(len, scene.server.calls)) == [*[1] * 8, 8]


def test_merged_call_that_raises_an_exception_fails_only_requests_that_raise_it_alone() -> None:
    """The cause may be one of its requests."""
    texts = build_texts(8)

    class RaisingGateway(EmbeddingGateway):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
        ) -> AttemptResult:
            if texts["r-5"].encode() in request.payload:
                raise ValueError(request.id)
            return await super().forward(request, token=token, deadline=deadline, may_send=may_send)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        await scene.wait_for_results(8)
        scene.events.clear()  # the exceptions are expected

    scene = run_in_scene(check, RaisingGateway(), max_attempts=1)
    codes = scene.get_codes()
    assert scene.results["r-5"].error_code == ErrorCode.RETRIES_EXHAUSTED
    del codes["r-5"]
    assert set(codes.values()) == {200}


def test_overload_refusal_of_a_merged_call_releases_every_request() -> None:
    texts = build_texts(8)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.next_outcomes.append(Overloaded(429, "", is_out_of_capacity=True))
        await scene.submit(texts)
        await asyncio.sleep(1.0)
        now = asyncio.get_running_loop().time()
        assert (await scene.store.count_requests()).pending == 8, "the gate is closed until the next reading"
        scene.limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 64), now)
        await scene.wait_for_results(8)

    scene = run_in_scene(check, EmbeddingGateway())
    assert_own_answers(scene, texts)


def test_request_waits_for_others_no_longer_than_max_delay_s() -> None:
    async def check(scene: MergingScene) -> None:
        # The long list waits, because it does not fit.
        await scene.submit({"long": ["a"] * 100}, deadline=FAR_DEADLINE + 1)
        started_at = asyncio.get_running_loop().time()
        await scene.submit(build_texts(1))
        await scene.wait_for_results(1)
        assert 0.5 <= asyncio.get_running_loop().time() - started_at < 0.6
        await asyncio.sleep(0)

    rule = replace(RULE, grouping=GroupingRule(32, max_delay_s=0.5))

    async def check_all(scene: MergingScene) -> None:
        await check(scene)
        await scene.wait_for_results(2)

    # The long list counts the whole limit, so it waits until the short request has been answered.
    run_in_scene(check_all, EmbeddingGateway(), rule=rule, limit=50)


def test_request_does_not_wait_if_no_other_can_arrive() -> None:
    async def check(scene: MergingScene) -> None:
        started_at = asyncio.get_running_loop().time()
        await scene.submit(build_texts(1))
        await scene.wait_for_results(1)
        assert asyncio.get_running_loop().time() - started_at < 0.1

    run_in_scene(check, EmbeddingGateway(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)))


def test_calls_are_as_large_as_a_small_limit_allows() -> None:
    texts = build_texts(40)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        started_at = asyncio.get_running_loop().time()
        await scene.submit(texts)
        await scene.wait_for_results(40)
        assert asyncio.get_running_loop().time() - started_at < 1.0, "no request waits for the whole delay"

    scene = run_in_scene(
        check, EmbeddingGateway(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)), limit=4
    )
    assert {len(call) for call in scene.server.calls} == {4}
    assert_own_answers(scene, texts)


def test_requests_of_a_rule_with_better_priority_are_in_earlier_calls() -> None:
    texts = build_texts(12)
    priorities = {name: number % 3 for number, name in enumerate(texts)}
    rule = replace(RULE, grouping=replace(RULE.grouping, max_size=4))

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts, priorities=priorities)
        await scene.wait_for_results(12)

    scene = run_in_scene(check, EmbeddingGateway(), rule=rule, limit=4)
    priority_by_text = {texts[name]: priority for name, priority in priorities.items()}
    assert [{priority_by_text[text] for text in call} for call in scene.server.calls] == [{0}, {1}, {2}]


def test_units_of_lists_are_their_items() -> None:
    texts: dict[str, Any] = {f"r-{n}": [f"{n} {k}" for k in range(n % 7 + 1)] for n in range(40)}
    unit_counts: list[int] = []

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        waiting = asyncio.create_task(scene.wait_for_results(40))
        while not waiting.done():
            unit_counts.append(scene.limiter.in_flight)
            await asyncio.sleep(0.0005)
        await waiting

    scene = run_in_scene(check, EmbeddingGateway(), limit=20)
    assert_own_answers(scene, texts)
    assert 14 <= max(unit_counts) <= 20
    assert max(map(len, scene.server.calls)) <= 20


def test_requests_for_different_versions_or_endpoints_are_not_merged() -> None:
    destinations = [("m-v1", ""), ("m-v2", ""), ("m-v2", "10.0.0.1:80"), ("m-v2", "10.0.0.1:80,10.0.0.2:80")]
    nothing: Any = None
    options = Options(RetryPolicy(), default_path=PATH, of_features=index_options(MergeOptions((RULE,))))
    merger = RequestMerger(KernelContext(nothing, nothing, nothing, nothing, options))
    for entry_id, (version, endpoints) in enumerate(2 * destinations):
        entry = InFlightLease(lease(entry_id))
        payload = b'{"model": "m", "input": "a text"}'
        merger.register_request(
            entry, request(entry_id, payload=payload, chosen_model=version, endpoints=endpoints)
        )
        merger.add_to_group(entry, 0.0, 600.0)
    ready, _ = merger.groups.take_ready(1.0, is_complete=True, is_lease_valid=lambda _: True)
    attempts = [merger.prepare_first_attempt(members, max_items) for members, max_items in ready]
    sent_calls = [(each.request.chosen_model, each.request.endpoints, len(each.leases)) for each in attempts]
    assert sorted(sent_calls) == [(version, endpoints, 2) for version, endpoints in destinations]


def test_only_requests_with_equal_terms_are_merged() -> None:
    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(build_texts(4))
        await scene.submit({"h": "with a header"}, headers={"x-mine": "1"})
        await scene.submit({"u": "of a tenant"}, metadata={"userid": "u"})
        payload = b'{"model": "m", "input": "other", "dimensions": 2}'
        member = encode_member("d", payload, FAR_DEADLINE, endpoint=PATH)
        await scene.store.submit([Submission(member, float(FAR_DEADLINE), "d", "", FAR_DEADLINE)])
        await scene.wait_for_results(7)

    scene = run_in_scene(check, EmbeddingGateway(), rule=RULE)
    assert max(map(len, scene.server.calls)) <= 5, (
        "metadata names no tenant while the tenant attribute is empty"
    )
    assert ["with a header"] in scene.server.calls
    assert ["other"] in scene.server.calls


def test_requests_without_a_rule_or_with_an_invalid_list_are_sent_unchanged() -> None:
    async def check(scene: MergingScene) -> None:
        member = encode_member("c", b'{"model": "m", "input": "completion"}', FAR_DEADLINE)
        await scene.store.submit([Submission(member, float(FAR_DEADLINE), "c", "", FAR_DEADLINE)])
        invalid = encode_member("invalid", b'{"model": "m", "input": []}', FAR_DEADLINE, endpoint=PATH)
        await scene.store.submit([Submission(invalid, float(FAR_DEADLINE), "invalid", "", FAR_DEADLINE)])
        await scene.wait_for_results(2)

    scene = run_in_scene(check, EmbeddingGateway())
    assert scene.server.calls == [["completion"], []] or scene.server.calls == [[], ["completion"]]


def test_cancelled_request_in_a_merged_call_is_completed_immediately_and_the_call_continues() -> None:
    texts = build_texts(8)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.call_s = 10.0
        await scene.submit(texts)
        await asyncio.sleep(1.0)
        assert scene.dispatcher.running_count == 8
        await scene.store.cancel_request("r-3")
        await scene.wait_for_results(1, within_s=3.0)
        assert scene.get_codes() == {"r-3": ErrorCode.CANCELLED}
        assert scene.dispatcher.running_count == 7
        assert scene.limiter.in_flight == 8, "its unit stays with the call"
        await scene.wait_for_results(8)

    scene = run_in_scene(check, EmbeddingGateway())
    assert [len(call) for call in scene.server.calls] == [8]
    del texts["r-3"]
    assert_own_answers(scene, texts)


def test_request_whose_deadline_passes_in_a_merged_call_is_completed_and_the_call_continues() -> None:
    texts = build_texts(6)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.call_s = 10.0
        started_at = asyncio.get_running_loop().time()
        await scene.submit(texts)
        await scene.submit({"short": "text short"}, deadline=int(started_at) + 4)
        await scene.wait_for_results(1)
        assert scene.get_codes() == {"short": ErrorCode.DEADLINE_EXCEEDED}
        assert asyncio.get_running_loop().time() < started_at + 5.1
        await scene.wait_for_results(7)

    scene = run_in_scene(check, EmbeddingGateway())
    assert [len(call) for call in scene.server.calls] == [7]
    assert_own_answers(scene, texts)


def test_merged_call_is_cancelled_when_all_its_requests_are_cancelled() -> None:
    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.call_s = 100.0
        await scene.submit(build_texts(4))
        await asyncio.sleep(1.0)
        for name in build_texts(4):
            await scene.store.cancel_request(name)
        await scene.wait_for_results(4, within_s=3.0)
        assert scene.server.running_count == 0

    scene = run_in_scene(check, EmbeddingGateway())
    assert set(scene.get_codes().values()) == {ErrorCode.CANCELLED}


def test_requests_in_batch_groups_are_returned_when_the_gate_closes() -> None:
    async def check(scene: MergingScene) -> None:
        await scene.submit({"long": ["a"] * 100}, deadline=FAR_DEADLINE + 1)
        await scene.submit(build_texts(3))
        await asyncio.sleep(0.1)
        assert len(scene.merger.groups) == 3
        scene.limiter.set_paused(True, asyncio.get_running_loop().time())
        scene.dispatcher.wake_up()
        await asyncio.sleep(0.1)
        assert len(scene.merger.groups) == 0
        counts = await scene.store.count_requests()
        assert (counts.pending, counts.leased) == (4, 0)

    scene = run_in_scene(
        check, EmbeddingGateway(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)), limit=50
    )
    assert scene.server.calls == []


def test_request_cancelled_in_a_batch_group_is_completed_as_cancelled_and_not_sent() -> None:
    texts = build_texts(3)

    async def check(scene: MergingScene) -> None:
        # The long list waits, because it does not fit, so more requests may join the group.
        await scene.submit({"long": ["a"] * 100}, deadline=FAR_DEADLINE + 1)
        await scene.submit(texts)
        await asyncio.sleep(0.1)
        assert len(scene.merger.groups) == 3
        await scene.store.cancel_request("r-1")
        await scene.wait_for_results(4, within_s=10.0)

    scene = run_in_scene(
        check, EmbeddingGateway(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)), limit=50
    )
    codes = scene.get_codes()
    assert codes.pop("r-1") == ErrorCode.CANCELLED
    assert set(codes.values()) == {200}
    assert not any("text 1" in call for call in scene.server.calls)


def test_drain_lets_merged_calls_finish() -> None:
    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.call_s = 0.5
        await scene.submit(build_texts(8))
        await asyncio.sleep(0.1)

    scene = run_in_scene(check, EmbeddingGateway())
    while (popped := scene.store.pop_result()) is not None:
        result = decode_result(popped)
        scene.results[result.id] = result
    assert_own_answers(scene, build_texts(8))


def test_list_longer_than_the_server_accepts_is_sent_in_pieces_and_answered_once() -> None:
    texts = {"big": [f"item {n}" for n in range(100)]}

    async def check(scene: MergingScene) -> None:
        await scene.submit(texts)
        await scene.wait_for_results(1)

    scene = run_in_scene(check, EmbeddingGateway(max_items=16), rule=replace(RULE, max_items=16))
    assert_own_answers(scene, texts)
    assert [len(call) for call in scene.server.calls] == [16, 16, 16, 16, 16, 16, 4]
    assert scene.server.max_running_count == 1


def test_maximum_items_of_the_server_are_learned_from_a_list_that_is_too_long() -> None:
    texts = {"big": [f"item {n}" for n in range(100)]}

    async def check(scene: MergingScene) -> None:
        await scene.submit(texts)
        await scene.wait_for_results(1)

    scene = run_in_scene(check, EmbeddingGateway(max_items=16), limit=128)
    assert_own_answers(scene, texts)
    assert [len(call) for call in scene.server.calls] == [100, 16, 16, 16, 16, 16, 16, 4]


def test_answers_to_pieces_are_kept_for_the_next_attempt() -> None:
    texts = {"big": [f"item {n}" for n in range(64)]}

    async def check(scene: MergingScene) -> None:
        ok = [Delivered(200, build_answer(texts["big"][at : at + 16], "m")) for at in (0, 16)]
        scene.server.next_outcomes.extend([*ok, Failed("reset")])
        await scene.submit(texts)
        await scene.wait_for_results(1)

    scene = run_in_scene(check, EmbeddingGateway(), rule=replace(RULE, max_items=16), base_s=0.1)
    assert_own_answers(scene, texts)
    assert len(scene.server.calls) == 5, "the third piece is sent twice, the first two once"


def test_rejected_piece_is_the_answer_to_the_list() -> None:
    async def check(scene: MergingScene) -> None:
        await scene.submit({"big": [*(f"item {n}" for n in range(40)), "bad"]})
        await scene.wait_for_results(1)

    scene = run_in_scene(check, EmbeddingGateway(), rule=replace(RULE, max_items=16))
    assert scene.get_codes() == {"big": 400}


async def measure_duration_s(scene: MergingScene, prefix: str, count: int) -> float:
    """Return the time until `count` new requests are answered."""
    started_at = asyncio.get_running_loop().time()
    await scene.submit({f"{prefix}-{n}": f"{prefix} {n}" for n in range(count)})
    await scene.wait_for_results(len(scene.results) + count)
    return asyncio.get_running_loop().time() - started_at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "max_size", "min_gain"),
    [
        pytest.param(EmbeddingGateway(call_s=0.005, item_s=0.0001), 32, 15.0, id="embeddings"),
        # 400 requests a second alone: call_s + item_s = 2.5 ms.
        # 1,000 a second in calls of 16: call_s + 16 item_s = 16 ms.
        pytest.param(EmbeddingGateway(call_s=0.0016, item_s=0.0009), 16, 2.2, id="triton"),
    ],
)
def test_merged_calls_increase_the_rate_if_each_call_has_a_fixed_cost(
    server: EmbeddingGateway, max_size: int, min_gain: float
) -> None:
    """The same dispatcher in the same run, with merging off, on and auto."""

    async def check(scene: MergingScene) -> None:
        rule = replace(RULE, grouping=GroupingRule(max_size, max_delay_s=0.02))
        rates = {}
        for mode in (MergeMode.OFF, MergeMode.ON, MergeMode.AUTO):
            rules = () if mode is MergeMode.OFF else (replace(rule, mode=mode),)
            scene.dispatcher.reconfigure(
                replace(scene.options, of_features=index_options(MergeOptions(rules)))
            )
            await measure_duration_s(scene, f"warm-{mode}", 100 if mode is MergeMode.OFF else 3000)
            count = 1000 if mode is MergeMode.OFF else 5000
            rates[mode] = count / await measure_duration_s(scene, mode, count)
        print({str(mode): round(rate) for mode, rate in rates.items()})
        assert rates[MergeMode.ON] >= min_gain * rates[MergeMode.OFF]
        assert rates[MergeMode.AUTO] >= 0.9 * min_gain * rates[MergeMode.OFF]
        (target,) = scene.merger.targets
        assert target.size.best_size == max_size

    run_in_scene(check, server, limit=128)


@pytest.mark.slow
def test_auto_mode_costs_at_most_five_percent_where_merging_brings_nothing() -> None:
    """The server runs 64 calls at once, and each item takes the same time, merged or not."""

    async def check(scene: MergingScene) -> None:
        scene.dispatcher.reconfigure(replace(scene.options, of_features=index_options(MergeOptions(()))))
        await measure_duration_s(scene, "warm", 500)
        off_duration_s = await measure_duration_s(scene, "off", 10_000)
        scene.dispatcher.reconfigure(scene.options)
        auto_duration_s = await measure_duration_s(scene, "auto", 10_000)
        print(f"{off_duration_s:.2f} s, {auto_duration_s:.2f} s")
        assert auto_duration_s <= off_duration_s / 0.95
        (target,) = scene.merger.targets
        assert target.size.best_size == 1

    run_in_scene(
        check,
        EmbeddingGateway(call_s=0.0, item_s=0.02, workers=64),
        rule=replace(RULE, mode=MergeMode.AUTO),
        limit=128,
    )


RULE_UNIT_PER_CALL = replace(RULE, unit_per_call=True)


def test_with_one_unit_per_call_as_many_calls_run_as_there_are_units() -> None:
    texts = build_texts(1000)
    unit_counts: list[int] = []

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        waiting = asyncio.create_task(scene.wait_for_results(1000))
        while not waiting.done():
            counts = await scene.store.count_requests()
            unit_counts.append(counts.units)
            assert scene.server.running_count <= 4
            await asyncio.sleep(0.0005)
        await waiting

    scene = run_in_scene(check, EmbeddingGateway(workers=4), rule=RULE_UNIT_PER_CALL, limit=4)
    assert_own_answers(scene, texts)
    assert max(unit_counts) <= 4
    sizes = [len(call) for call in scene.server.calls]
    assert sum(sizes) / len(sizes) > 20, "merged calls hold far more requests than there are units"


def test_with_one_unit_per_call_the_search_for_a_rejected_item_uses_one_unit() -> None:
    texts = build_texts(64)
    texts["r-19"] = "bad one"

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(texts)
        await scene.wait_for_results(64)

    scene = run_in_scene(check, EmbeddingGateway(workers=8), rule=RULE_UNIT_PER_CALL, limit=1)
    assert scene.server.max_running_count == 1
    codes = scene.get_codes()
    assert codes.pop("r-19") == 400
    assert set(codes.values()) == {200}


def test_with_one_unit_per_call_requests_without_a_rule_count_one_each() -> None:
    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        await scene.submit(build_texts(200))
        for n in range(20):
            member = encode_member(f"c-{n}", b'{"model": "m", "input": "completion"}', FAR_DEADLINE)
            await scene.store.submit([Submission(member, float(FAR_DEADLINE), f"c-{n}", "", FAR_DEADLINE)])
        waiting = asyncio.create_task(scene.wait_for_results(220))
        while not waiting.done():
            assert scene.server.running_count <= 3
            await asyncio.sleep(0.0005)
        await waiting

    scene = run_in_scene(check, EmbeddingGateway(workers=8), rule=RULE_UNIT_PER_CALL, limit=3)
    assert set(scene.get_codes().values()) == {200}


def test_with_one_unit_per_call_a_refusal_releases_all_requests() -> None:
    texts = build_texts(40)

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        scene.server.next_outcomes.append(Overloaded(429, "", is_out_of_capacity=True))
        await scene.submit(texts)
        await asyncio.sleep(1.0)
        counts = await scene.store.count_requests()
        assert (counts.leased, counts.units) == (0, 0)
        now = asyncio.get_running_loop().time()
        scene.limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 2), now)
        await scene.wait_for_results(40)

    scene = run_in_scene(check, EmbeddingGateway(), rule=RULE_UNIT_PER_CALL, limit=2)
    assert_own_answers(scene, texts)


@dataclass
class TenantGateway(EmbeddingGateway):
    """Gateway that notes the header `x-tenant` of each call."""

    tenants: list[str | None] = field(default_factory=list)

    async def forward(self, request: Request, **how: Any) -> AttemptResult:
        self.tenants.append(request.headers.get("x-tenant"))
        return await super().forward(request, **how)


def test_feature_of_the_kernels_readme_is_right_for_merged_calls_and_those_that_follow() -> None:
    """One text of each tenant is rejected, which is found by halving the call."""
    server = TenantGateway()

    def build_hooks(context: KernelContext) -> Hooks:
        return join_hooks([readme_example.build_hooks(context), merging.build_hooks(context)])

    async def check(scene: MergingScene) -> None:
        await pass_parity_checks(scene)
        server.tenants.clear()
        for tenant in ("red", "blue"):
            texts = {f"{tenant}-{n}": f"{tenant} {n}" for n in range(7)} | {
                tenant: f"{REJECTED_TEXT} {tenant}"
            }
            await scene.submit(texts, metadata={"tenant": tenant})
        await scene.wait_for_results(16)
        feature, _ = scene.dispatcher.context.hooks.lease_parts
        assert vars(feature)["counts"] == {"red": 8, "blue": 8}
        assert not vars(feature)["leases"]

    run_in_scene(check, server, build_hooks=build_hooks)
    assert max(map(len, server.calls)) == 8
    assert len(server.calls) > 4, "calls follow from those that were rejected"
    for tenant, texts in zip(server.tenants, server.calls, strict=True):
        assert all(str(tenant) in text for text in texts)
