"""Requests that travel together, through the whole loop in virtual time: each gets exactly its own answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dispatcher.core.gateway.outcome import Delivered, Failed, Overloaded, RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.merging.call_size import INITIAL_CHECKS
from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.core.merging.shapes import SHAPES
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.result import ErrorCode, PoppedResult, decode_result
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.dispatch.merging.merger import RequestMerger
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import Submission
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.embedder import Embedder, answer
from tests.dispatch.scene import lease, request

PATH = "/v1/embeddings"
RULE = BatchRule((PATH,), SHAPES["embeddings"], MergeMode.ON, GroupingRule(32, max_delay_s=0.02))
FAR = 10**9


class Scene:
    """A dispatcher with a rule for embeddings, in a pool of so many units."""

    def __init__(self, server: Embedder, rule: BatchRule = RULE, *, limit: int = 64, **retry: Any) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.store = MemoryStore(clock=loop.time)
        self.limiter = Limiter(Policy(max_sys=limit, reserve=0.0, max_age_s=1e9), [Signal.REQUESTS])
        self.limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, limit), 1.0)
        self.options = Options(RetryPolicy(**retry), default_path="/v1/completions", merge_rules=(rule,))
        self.metrics = Metrics()
        self.dispatcher = Dispatcher(
            MemoryQueue(self.store, "a"), server, self.limiter, self.options, Journal(self.metrics)
        )
        self.batching = self.dispatcher.merger
        self.results: dict[str, PoppedResult] = {}
        self.events: list[tuple[Event, Mapping[str, Any]]] = []

    async def submit(self, texts: Mapping[str, Any], *, deadline: int = FAR, **more: Any) -> None:
        """Of each id a request for the embedding of its text, or of its list of them."""
        submissions = []
        for name, text in texts.items():
            payload = msgspec.json.encode({"model": "m", "input": text})
            member = encode_member(name, payload, deadline, endpoint=PATH, token=f"t-{name}", **more)
            submissions.append(Submission(member, float(deadline), name, f"t-{name}", deadline))
        await self.store.submit(submissions)

    async def all_results(self, count: int, within_s: float = 600.0) -> None:
        async with asyncio.timeout(within_s):
            while len(self.results) < count:
                while (popped := self.store.pop_result()) is not None:
                    result = decode_result(popped)
                    assert result.id not in self.results, "answered twice"
                    self.results[result.id] = result
                await asyncio.sleep(0.001)

    def codes(self) -> dict[str, int | str | None]:
        return {name: result.status_code or result.error_code for name, result in self.results.items()}


def perform(scene_of: Callable[[Scene], Awaitable[None]], server: Embedder, **how: Any) -> Scene:
    async def main() -> Scene:
        events: list[tuple[Event, Mapping[str, Any]]] = []
        with divert_events(lambda event, fields: events.append((event, fields))):
            scene = Scene(server, **how)
            scene.events = events
            task = asyncio.create_task(scene.dispatcher.run())
            await scene_of(scene)
            scene.dispatcher.drain(1.0)
            await task
        assert not [fields for event, fields in events if event is Event.INTERNAL_ERROR]
        assert scene.limiter.in_flight == 0
        assert (await scene.store.count_requests()).leased == 0
        assert len(scene.batching.groups) == 0
        return scene

    return run_in_virtual_time(main(), start=2.0)


def ones(count: int, prefix: str = "text") -> dict[str, str]:
    return {f"r-{n}": f"{prefix} {n}" for n in range(count)}


def all_their_own(scene: Scene, texts: Mapping[str, Any]) -> None:
    """Of usage, which is shared out of that of the call, the sum is held in the tests of shapes."""
    for name, text in texts.items():
        got = msgspec.json.decode(scene.results[name].payload)
        alone = msgspec.json.decode(answer([text] if isinstance(text, str) else text, "m"))
        assert got.pop("usage").keys() == alone.pop("usage").keys()
        assert got == alone, name


async def proven(scene: Scene) -> None:
    """Merged calls have been checked often enough to be believed."""
    for n in range(30):
        if n and all(served.size.checked_calls >= INITIAL_CHECKS for served in scene.batching.targets):
            break
        await scene.submit({f"proof-{n}-{k}": f"proof {n} {k}" for k in range(4)})
        await scene.all_results(4 * (n + 1))
    else:
        pytest.fail("merged calls were not believed")
    scene.results.clear()
    scene.server.calls.clear()


def test_requests_travel_together_and_each_gets_its_own_answer() -> None:
    texts = ones(100)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        await scene.all_results(100)

    scene = perform(scene_of, Embedder())
    all_their_own(scene, texts)
    assert len(scene.server.calls) <= 5
    assert max(map(len, scene.server.calls)) == 32
    assert scene.batching.merged_request_count == 100 + 4 * INITIAL_CHECKS


@pytest.mark.parametrize("every", [1, 3])
def test_a_server_that_mixes_up_answers_later_is_found_as_soon_as_the_rule_says(every: int) -> None:
    """With two items per call, each check of a call with mixed-up answers finds them."""
    texts = ones(40)
    rule = replace(RULE, grouping=replace(RULE.grouping, max_size=2), check_every=every)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        for served in scene.batching.targets:
            served.size._calls_since_check = 0
        scene.server.mixes_up = True
        await scene.submit(texts)
        await scene.all_results(40)

    scene = perform(scene_of, Embedder(), rule=rule, limit=2)
    wrong = 0
    for name, text in texts.items():
        got = msgspec.json.decode(scene.results[name].payload)
        wrong += got["data"] != msgspec.json.decode(answer([text], "m"))["data"]
    assert wrong == 2 * (every - 1), "of the calls before the one that was checked"
    assert scene.batching.check_counts["differs"] == 1


def test_the_first_merged_calls_are_compared_with_single_ones_before_they_are_believed() -> None:
    texts = ones(32)

    async def scene_of(scene: Scene) -> None:
        await scene.submit(texts)
        await scene.all_results(32)

    scene = perform(scene_of, Embedder())
    all_their_own(scene, texts)
    assert sorted(map(len, scene.server.calls)) == [*[1] * 32, 32]
    assert scene.batching.check_counts == {"same": 32, "differs": 0, "inconclusive": 0}


def test_a_server_that_answers_merged_calls_wrongly_is_found_out_and_nobody_gets_such_an_answer() -> None:
    texts = ones(200)

    async def scene_of(scene: Scene) -> None:
        await scene.submit(texts)
        await scene.all_results(200)

    scene = perform(scene_of, Embedder(mixes_up=True))
    all_their_own(scene, texts)
    (served,) = scene.batching.targets
    assert served.size.off_reason.startswith(
        "the answer to a merged call differs from the answers to single calls"
    )
    assert [fields["model"] for event, fields in scene.events if event is Event.BATCHING_OFF] == ["m"]
    assert sum(len(call) > 1 for call in scene.server.calls) <= 200 / 32 + 1


def test_an_answer_that_cannot_be_split_has_each_asked_alone_and_merging_ends() -> None:
    texts = ones(64)

    async def scene_of(scene: Scene) -> None:
        await scene.submit(texts)
        await scene.all_results(64)

    scene = perform(scene_of, Embedder(miscounts=True))
    all_their_own(scene, texts)
    (served,) = scene.batching.targets
    assert "could not be split" in served.size.off_reason


def test_one_bad_item_among_32_is_found_in_eleven_calls_and_hurts_nobody() -> None:
    texts = ones(32)
    texts["r-19"] = "bad one"

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        await scene.all_results(32)

    scene = perform(scene_of, Embedder())
    codes = scene.codes()
    assert codes.pop("r-19") == 400
    assert set(codes.values()) == {200}
    all_their_own(scene, {name: text for name, text in texts.items() if name != "r-19"})
    assert len(scene.server.calls) <= 11


def test_nothing_but_bad_items_is_answered_each_by_its_own_refusal() -> None:
    texts = ones(32, "bad")

    async def scene_of(scene: Scene) -> None:
        await scene.submit(texts)
        await scene.all_results(32)

    scene = perform(scene_of, Embedder())
    assert set(scene.codes().values()) == {400}
    assert {name for call in scene.server.calls if len(call) == 1 for name in call} == set(texts.values())


def test_a_call_that_is_too_large_teaches_what_the_server_takes() -> None:
    texts = ones(200)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        await scene.all_results(200)

    scene = perform(scene_of, Embedder(max_limit=8))
    all_their_own(scene, texts)
    (served,) = scene.batching.targets
    assert served.size.server_max_items == 8
    assert served.size.off_reason == ""
    too_large = [call for call in scene.server.calls if len(call) > 8]
    assert len(too_large) <= 3, "those that were under way when it was learned, and their halves"
    assert [fields["max_items"] for event, fields in scene.events if event is Event.BATCHING_LIMIT] == [8]


def test_one_that_crashes_the_server_costs_the_others_one_attempt_and_then_goes_alone() -> None:
    texts = ones(16)
    texts["r-5"] = "deadly"

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        await scene.all_results(16)

    scene = perform(scene_of, Embedder(), max_attempts=3, base_s=0.1, max_s=0.1)
    codes = scene.codes()
    assert codes.pop("r-5") == 500
    assert scene.results["r-5"].error_code == ErrorCode.RETRIES_EXHAUSTED
    assert set(codes.values()) == {200}
    alone = [call for call in scene.server.calls if call == ["deadly"]]
    assert len(alone) == 2, "after the merged call it goes alone"


def test_nothing_ends_as_failed_that_was_not_tried_alone() -> None:
    texts = ones(8)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.scripted.append(Failed("the gateway answered 500", 500, b"x"))
        await scene.submit(texts)
        await scene.all_results(8)

    scene = perform(scene_of, Embedder(), max_attempts=1)
    assert set(scene.codes().values()) == {200}
    assert sorted(map(len, scene.server.calls)) == [*[1] * 8, 8]


def test_a_refusal_for_overload_is_each_ones() -> None:
    texts = ones(8)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.scripted.append(Overloaded(429, "", is_out_of_capacity=True))
        await scene.submit(texts)
        await asyncio.sleep(1.0)
        now = asyncio.get_running_loop().time()
        assert (await scene.store.count_requests()).pending == 8, "the gate is closed until the next reading"
        scene.limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 64), now)
        await scene.all_results(8)

    scene = perform(scene_of, Embedder())
    all_their_own(scene, texts)


def test_company_is_waited_for_no_longer_than_the_rule_says() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.submit({"long": ["a"] * 100}, deadline=FAR + 1)  # something that waits, and does not fit
        began = asyncio.get_running_loop().time()
        await scene.submit(ones(1))
        await scene.all_results(1)
        assert 0.5 <= asyncio.get_running_loop().time() - began < 0.6
        await asyncio.sleep(0)

    rule = replace(RULE, grouping=GroupingRule(32, max_delay_s=0.5))

    async def whole(scene: Scene) -> None:
        await scene_of(scene)
        await scene.all_results(2)

    # The long one counts all of the limit, so it waits until the short one has gone.
    perform(whole, Embedder(), rule=rule, limit=50)


def test_nobody_waits_for_company_where_nobody_can_come() -> None:
    async def scene_of(scene: Scene) -> None:
        began = asyncio.get_running_loop().time()
        await scene.submit(ones(1))
        await scene.all_results(1)
        assert asyncio.get_running_loop().time() - began < 0.1

    perform(scene_of, Embedder(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)))


def test_a_limit_smaller_than_the_batch_sends_what_there_is_room_for() -> None:
    texts = ones(40)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        began = asyncio.get_running_loop().time()
        await scene.submit(texts)
        await scene.all_results(40)
        assert asyncio.get_running_loop().time() - began < 1.0, "nobody waits out the delay"

    scene = perform(
        scene_of, Embedder(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)), limit=4
    )
    assert {len(call) for call in scene.server.calls} == {4}
    all_their_own(scene, texts)


def test_lists_weigh_what_they_hold() -> None:
    texts: dict[str, Any] = {f"r-{n}": [f"{n} {k}" for k in range(n % 7 + 1)] for n in range(40)}
    peaks: list[int] = []

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        waiting = asyncio.create_task(scene.all_results(40))
        while not waiting.done():
            peaks.append(scene.limiter.in_flight)
            await asyncio.sleep(0.0005)
        await waiting

    scene = perform(scene_of, Embedder(), limit=20)
    all_their_own(scene, texts)
    assert 14 <= max(peaks) <= 20
    assert max(map(len, scene.server.calls)) <= 20


def test_who_is_sent_as_another_version_or_elsewhere_travels_apart() -> None:
    ways = [("m-v1", ""), ("m-v2", ""), ("m-v2", "10.0.0.1:80"), ("m-v2", "10.0.0.1:80,10.0.0.2:80")]
    batching = RequestMerger(Options(RetryPolicy(), default_path=PATH, merge_rules=(RULE,)), random.Random(1))
    for entry, (version, endpoints) in enumerate(2 * ways):
        held = InFlightLease(lease(entry))
        payload = b'{"model": "m", "input": "a text"}'
        batching.register_request(held, request(entry, payload=payload, version=version, endpoints=endpoints))
        assert batching.add_to_group(held, 0.0, 600.0)
    tries, _ = batching.take_ready_attempts(1.0, is_complete=True, is_lease_valid=lambda _: True)
    went = [(each.request.version, each.request.endpoints, len(each.leases)) for each in tries]
    assert sorted(went) == [(version, endpoints, 2) for version, endpoints in ways]


def test_only_equals_travel_together() -> None:
    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(ones(4))
        await scene.submit({"h": "with a header"}, headers={"x-mine": "1"})
        await scene.submit({"u": "of a tenant"}, metadata={"userid": "u"})
        payload = b'{"model": "m", "input": "other", "dimensions": 2}'
        member = encode_member("d", payload, FAR, endpoint=PATH)
        await scene.store.submit([Submission(member, float(FAR), "d", "", FAR)])
        await scene.all_results(7)

    scene = perform(scene_of, Embedder(), rule=RULE)
    assert max(map(len, scene.server.calls)) <= 5, "the tenant is none while tenant_from is empty"
    assert ["with a header"] in scene.server.calls
    assert ["other"] in scene.server.calls


def test_what_no_rule_is_for_goes_as_ever() -> None:
    async def scene_of(scene: Scene) -> None:
        member = encode_member("c", b'{"model": "m", "input": "completion"}', FAR)
        await scene.store.submit([Submission(member, float(FAR), "c", "", FAR)])
        odd = encode_member("odd", b'{"model": "m", "input": []}', FAR, endpoint=PATH)
        await scene.store.submit([Submission(odd, float(FAR), "odd", "", FAR)])
        await scene.all_results(2)

    scene = perform(scene_of, Embedder())
    assert scene.server.calls == [["completion"], []] or scene.server.calls == [[], ["completion"]]


def test_cancelling_one_in_a_merged_call_ends_it_at_once_and_leaves_the_others_alone() -> None:
    texts = ones(8)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.call_s = 10.0
        await scene.submit(texts)
        await asyncio.sleep(1.0)
        assert scene.dispatcher.running_count == 8
        await scene.store.cancel_request("r-3")
        await scene.all_results(1, within_s=3.0)
        assert scene.codes() == {"r-3": ErrorCode.CANCELLED}
        assert scene.dispatcher.running_count == 7
        assert scene.limiter.in_flight == 8, "what it counts stays with the call"
        await scene.all_results(8)

    scene = perform(scene_of, Embedder())
    assert [len(call) for call in scene.server.calls] == [8]
    del texts["r-3"]
    all_their_own(scene, texts)


def test_one_whose_deadline_passes_in_a_merged_call_is_told_then_and_the_others_go_on() -> None:
    texts = ones(6)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.call_s = 10.0
        began = asyncio.get_running_loop().time()
        await scene.submit(texts)
        await scene.submit({"short": "text short"}, deadline=int(began) + 4)
        await scene.all_results(1)
        assert scene.codes() == {"short": ErrorCode.DEADLINE_EXCEEDED}
        assert asyncio.get_running_loop().time() < began + 5.1
        await scene.all_results(7)

    scene = perform(scene_of, Embedder())
    assert [len(call) for call in scene.server.calls] == [7]
    all_their_own(scene, texts)


def test_cancelling_all_of_a_merged_call_ends_the_call() -> None:
    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.call_s = 100.0
        await scene.submit(ones(4))
        await asyncio.sleep(1.0)
        for name in ones(4):
            await scene.store.cancel_request(name)
        await scene.all_results(4, within_s=3.0)
        assert scene.server.running == 0

    scene = perform(scene_of, Embedder())
    assert set(scene.codes().values()) == {ErrorCode.CANCELLED}


def test_a_gate_that_closes_has_those_that_wait_for_company_given_back() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.submit({"long": ["a"] * 100}, deadline=FAR + 1)
        await scene.submit(ones(3))
        await asyncio.sleep(0.1)
        assert len(scene.batching.groups) == 3
        scene.limiter.set_paused(True, asyncio.get_running_loop().time())
        scene.dispatcher.wake_up()
        await asyncio.sleep(0.1)
        assert len(scene.batching.groups) == 0
        counts = await scene.store.count_requests()
        assert (counts.pending, counts.leased) == (4, 0)

    scene = perform(
        scene_of, Embedder(), rule=replace(RULE, grouping=GroupingRule(32, max_delay_s=5.0)), limit=50
    )
    assert scene.server.calls == []


def test_a_process_that_stops_gives_back_what_waits_and_ends_what_travels() -> None:
    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.call_s = 0.5
        await scene.submit(ones(8))
        await asyncio.sleep(0.1)

    scene = perform(scene_of, Embedder())
    while (popped := scene.store.pop_result()) is not None:
        result = decode_result(popped)
        scene.results[result.id] = result
    all_their_own(scene, ones(8))


def test_a_list_longer_than_the_server_takes_goes_in_pieces_and_is_answered_once() -> None:
    texts = {"big": [f"item {n}" for n in range(100)]}

    async def scene_of(scene: Scene) -> None:
        await scene.submit(texts)
        await scene.all_results(1)

    scene = perform(scene_of, Embedder(max_limit=16), rule=replace(RULE, max_items=16))
    all_their_own(scene, texts)
    assert [len(call) for call in scene.server.calls] == [16, 16, 16, 16, 16, 16, 4]
    assert scene.server.peak == 1


def test_how_much_the_server_takes_is_learned_from_a_list_that_is_refused() -> None:
    texts = {"big": [f"item {n}" for n in range(100)]}

    async def scene_of(scene: Scene) -> None:
        await scene.submit(texts)
        await scene.all_results(1)

    scene = perform(scene_of, Embedder(max_limit=16), limit=128)
    all_their_own(scene, texts)
    assert [len(call) for call in scene.server.calls] == [100, 16, 16, 16, 16, 16, 16, 4]


def test_answers_to_pieces_are_kept_for_the_next_try() -> None:
    texts = {"big": [f"item {n}" for n in range(64)]}

    async def scene_of(scene: Scene) -> None:
        ok = [Delivered(200, answer(texts["big"][at : at + 16], "m")) for at in (0, 16)]
        scene.server.scripted.extend([*ok, Failed("reset")])
        await scene.submit(texts)
        await scene.all_results(1)

    scene = perform(scene_of, Embedder(), rule=replace(RULE, max_items=16), base_s=0.1)
    all_their_own(scene, texts)
    assert len(scene.server.calls) == 5, "the third piece twice, the first two once"


def test_a_bad_piece_is_the_lists_own_fault() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.submit({"big": [*(f"item {n}" for n in range(40)), "bad"]})
        await scene.all_results(1)

    scene = perform(scene_of, Embedder(), rule=replace(RULE, max_items=16))
    assert scene.codes() == {"big": 400}


async def took(scene: Scene, prefix: str, count: int) -> float:
    """Seconds for so many."""
    began = asyncio.get_running_loop().time()
    await scene.submit({f"{prefix}-{n}": f"{prefix} {n}" for n in range(count)})
    await scene.all_results(len(scene.results) + count)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(
    ("server", "most", "least"),
    [
        pytest.param(Embedder(call_s=0.005, item_s=0.0001), 32, 15.0, id="embeddings"),
        # 400 a second one by one, 1,000 by sixteen: 2.5 ms = a + b, 16 ms = a + 16 b.
        pytest.param(Embedder(call_s=0.0016, item_s=0.0009), 16, 2.2, id="triton"),
    ],
)
def test_merged_calls_pay_where_a_call_costs_something(server: Embedder, most: int, least: float) -> None:
    """Beside the same dispatcher with batching off, in one run."""

    async def scene_of(scene: Scene) -> None:
        rule = replace(RULE, grouping=GroupingRule(most, max_delay_s=0.02))
        rates = {}
        for mode in (MergeMode.OFF, MergeMode.ON, MergeMode.AUTO):
            rules = () if mode is MergeMode.OFF else (replace(rule, mode=mode),)
            scene.dispatcher.reconfigure(replace(scene.options, merge_rules=rules))
            await took(scene, f"warm-{mode}", 100 if mode is MergeMode.OFF else 3000)
            count = 1000 if mode is MergeMode.OFF else 5000
            rates[mode] = count / await took(scene, mode, count)
        print({str(mode): round(rate) for mode, rate in rates.items()})
        assert rates[MergeMode.ON] >= least * rates[MergeMode.OFF]
        assert rates[MergeMode.AUTO] >= 0.9 * least * rates[MergeMode.OFF]
        (served,) = scene.batching.targets
        assert served.size.best_size == most

    perform(scene_of, server, limit=128)


def test_auto_costs_next_to_nothing_where_merging_does_not_pay() -> None:
    """A server that runs 64 calls at once, and takes as long for each item of one."""

    async def scene_of(scene: Scene) -> None:
        scene.dispatcher.reconfigure(replace(scene.options, merge_rules=()))
        await took(scene, "warm", 500)
        off_s = await took(scene, "off", 10_000)
        scene.dispatcher.reconfigure(scene.options)
        auto_s = await took(scene, "auto", 10_000)
        print(f"{off_s:.2f} s, {auto_s:.2f} s")
        assert auto_s <= off_s / 0.95
        (served,) = scene.batching.targets
        assert served.size.best_size == 1

    perform(
        scene_of,
        Embedder(call_s=0.0, item_s=0.02, workers=64),
        rule=replace(RULE, mode=MergeMode.AUTO),
        limit=128,
    )


PER_CALL = replace(RULE, unit_per_call=True)


def test_where_a_call_counts_one_unit_as_many_calls_run_as_there_are_units() -> None:
    texts = ones(1000)
    peaks: list[int] = []

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        waiting = asyncio.create_task(scene.all_results(1000))
        while not waiting.done():
            count = await scene.store.count_requests()
            peaks.append(count.units)
            assert scene.server.running <= 4
            await asyncio.sleep(0.0005)
        await waiting

    scene = perform(scene_of, Embedder(workers=4), rule=PER_CALL, limit=4)
    all_their_own(scene, texts)
    assert max(peaks) <= 4
    sizes = [len(call) for call in scene.server.calls]
    assert sum(sizes) / len(sizes) > 20, "far more requests than units travel at once"


def test_where_a_call_counts_one_unit_the_search_for_a_bad_one_takes_no_more() -> None:
    texts = ones(64)
    texts["r-19"] = "bad one"

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(texts)
        await scene.all_results(64)

    scene = perform(scene_of, Embedder(workers=8), rule=PER_CALL, limit=1)
    assert scene.server.peak == 1
    codes = scene.codes()
    assert codes.pop("r-19") == 400
    assert set(codes.values()) == {200}


def test_where_a_call_counts_one_unit_others_still_count_one_each() -> None:
    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        await scene.submit(ones(200))
        for n in range(20):
            member = encode_member(f"c-{n}", b'{"model": "m", "input": "completion"}', FAR)
            await scene.store.submit([Submission(member, float(FAR), f"c-{n}", "", FAR)])
        waiting = asyncio.create_task(scene.all_results(220))
        while not waiting.done():
            assert scene.server.running <= 3
            await asyncio.sleep(0.0005)
        await waiting

    scene = perform(scene_of, Embedder(workers=8), rule=PER_CALL, limit=3)
    assert set(scene.codes().values()) == {200}


def test_where_a_call_counts_one_unit_a_refusal_gives_all_of_them_back() -> None:
    texts = ones(40)

    async def scene_of(scene: Scene) -> None:
        await proven(scene)
        scene.server.scripted.append(Overloaded(429, "", is_out_of_capacity=True))
        await scene.submit(texts)
        await asyncio.sleep(1.0)
        counts = await scene.store.count_requests()
        assert (counts.leased, counts.units) == (0, 0)
        now = asyncio.get_running_loop().time()
        scene.limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 2), now)
        await scene.all_results(40)

    scene = perform(scene_of, Embedder(), rule=PER_CALL, limit=2)
    all_their_own(scene, texts)
