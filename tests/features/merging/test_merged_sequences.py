"""Requests of different sequences in one call to a server that keeps the state of each sequence."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.options import index_options
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.affinity import AffinityOptions
from dispatcher.requests.headers import AFFINITY_TOKEN
from dispatcher.requests.outcomes.outcome import Delivered, Failed, Outcome, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.metrics import Metrics
from dispatcher.wire_format import PoppedResult
from tests.features.memory_queue import MemoryQueue, MemoryStore
from tests.kernel.scene import find_part

PATH = "/v2/models/counter/infer"
CALL_S, ITEM_S = 0.005, 0.0001
RULE = BatchRule(
    (PATH,), SHAPES["kserve"], MergeMode.ON, GroupingRule(64, max_delay_s=0.02), merge_sequences=True
)


def encode_values(name: str, values: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [len(values)], "data": values}


class StatefulModel:
    """Model servers with a running total for each sequence. A call goes to the server that its token names,
    or to the next one."""

    def __init__(self, servers: int = 1) -> None:
        self.totals: list[dict[str, int]] = [{} for _ in range(servers)]
        self.was_called = asyncio.Event()
        self.calls: list[list[str]] = []
        """Sequences of the items of each call."""
        self.requests: list[Request] = []
        self.errors: list[str] = []
        self.outcomes: list[Outcome] = []
        """Outcomes of the next calls, in place of answers."""
        self.rejected_value = 0
        """Value that makes a call fail with 400."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert may_send()
        self.requests.append(request)
        body = msgspec.json.decode(request.payload)
        (tensor,), parameters = body["inputs"], body["parameters"]
        values = tensor["data"]
        ids, starts, ends = (
            each if isinstance(each, list) else [each]
            for each in (parameters[f"sequence_{name}"] for name in ("id", "start", "end"))
        )
        assert len(values) == len(ids) == len(starts) == len(ends)
        self.calls.append(ids)
        self.was_called.set()
        assert request.affinity is not None
        sticky = request.affinity.sticky_token
        server = int(sticky) if sticky else len(self.calls) % len(self.totals)
        await asyncio.sleep(CALL_S + ITEM_S * len(values))
        if self.outcomes:
            return AttemptResult(self.outcomes.pop(0), began, loop.time())
        if self.rejected_value in values:
            return AttemptResult(Delivered(400, b'{"error":"a bad value"}'), began, loop.time())
        answers = [
            self._add_value(self.totals[server], *item)
            for item in zip(ids, values, starts, ends, strict=True)
        ]
        output = msgspec.json.encode({"model_name": "counter", "outputs": [encode_values("total", answers)]})
        return AttemptResult(Delivered(200, output), began, loop.time(), sticky_token=str(server))

    def _add_value(self, totals: dict[str, int], name: str, value: int, is_first: bool, is_last: bool) -> int:
        if not is_first and name not in totals:
            self.errors.append(f"{name}: this server does not know the sequence")
        total = value if is_first else totals.get(name, 0) + value
        totals[name] = total
        if is_last:
            del totals[name]
        return total

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


class Scene:
    def __init__(self, model: StatefulModel, rule: BatchRule, token_header: str, limit: int) -> None:
        self.store = MemoryStore(clock=asyncio.get_running_loop().time)
        limiter = Limiter(Policy(max_sys=limit, reserve=0.0, max_age_s=1e9), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, limit), 1.0)
        retry = RetryPolicy(base_s=0.01, max_s=0.1, max_attempts=3)
        options = Options(
            retry,
            default_path=PATH,
            of_features=index_options(MergeOptions((rule,)), AffinityOptions(token_header)),
        )
        queue = MemoryQueue(self.store, "a")
        self.dispatcher = Dispatcher(queue, model, limiter, options, Journal(Metrics()))
        self.results: dict[str, PoppedResult] = {}

    async def submit(self, values: Mapping[str, list[int]], **turn: Any) -> None:
        """Submit one turn for each value of each sequence."""
        submissions = []
        for name, sequence in values.items():
            for index, value in enumerate(sequence):
                payload = msgspec.json.encode({"inputs": [encode_values("x", [value])]})
                place = Turn(name, index, last=index == len(sequence) - 1, **turn)
                request_id = f"{name}-{index}"
                member = encode_member(request_id, payload, 10**9, extra=place, token=request_id)
                submissions.append(Submission(member, 1e9, request_id, request_id, 10**9))
        await self.store.submit(submissions)

    async def take_results(self, count: int) -> None:
        async with asyncio.timeout(600.0):
            while len(self.results) < count:
                while (popped := self.store.pop_result()) is not None:
                    result = decode_result(popped)
                    assert result.id not in self.results, "answered twice"
                    self.results[result.id] = result
                await asyncio.sleep(0.001)

    def read_total(self, request_id: str) -> int:
        (output,) = msgspec.json.decode(self.results[request_id].payload)["outputs"]
        (total,) = output["data"]
        return int(total)

    def list_errors(self) -> Counter[str]:
        return Counter(str(result.error_code) for result in self.results.values() if result.error_code)


def run_in_scene(
    check: Callable[[Scene], Awaitable[None]],
    model: StatefulModel,
    *,
    rule: BatchRule = RULE,
    token_header: str = AFFINITY_TOKEN,
    limit: int = 64,
) -> None:
    async def main() -> None:
        scene = Scene(model, rule, token_header, limit)
        running = asyncio.create_task(scene.dispatcher.run())
        await check(scene)
        scene.dispatcher.drain(1.0)
        await running
        assert model.errors == []

    run_in_virtual_time(main(), start=2.0)


def make_values(sequences: int, turns: int) -> dict[str, list[int]]:
    return {f"s{n}": [100 * n + turn + 1 for turn in range(turns)] for n in range(sequences)}


def check_totals(scene: Scene, values: Mapping[str, list[int]]) -> None:
    for name, sequence in values.items():
        totals = [scene.read_total(f"{name}-{index}") for index in range(len(sequence))]
        assert totals == [sum(sequence[: index + 1]) for index in range(len(sequence))]


@pytest.mark.parametrize(("sequences", "servers"), [(8, 1), (1000, 4)])
def test_turns_of_different_sequences_share_calls(sequences: int, servers: int) -> None:
    model, values = StatefulModel(servers), make_values(sequences, 10)

    async def check(scene: Scene) -> None:
        await scene.submit(values)
        await scene.take_results(10 * sequences)
        check_totals(scene, values)
        assert all(len(ids) == len(set(ids)) for ids in model.calls), "at most one turn of a sequence"
        assert len(model.calls) <= 10 * sequences / 4

    run_in_scene(check, model)


FOREIGN = [
    b'{"inputs":%b,"parameters":{"sequence_id":"s0","sequence_start":false}}',
    b'{"parameters":{"sequence_id":0},"inputs":%b,"parameters":{"sequence_id":"s0"}}',
    b'{"inputs":%b,"parameters":{"sequence_id":"s0","sequence_id":0}}',
    b'{"inputs":%b,"param\\u0065ters":{"sequence_id":"s0"}}',
    b'{"inputs":%b,"parameters":{"sequence\\u005fid":"s0"}}',
    b'{"inputs":[],"parameters" : {"sequence_end" : true}}',
    b'{"inputs":%b,"parameters":{"\\ud800":1,"sequence_id":"s0"}}',
]


@pytest.mark.parametrize("body", FOREIGN)
@pytest.mark.parametrize("turn", [None, Turn("own", 0)])
def test_body_that_names_a_sequence_is_refused(body: bytes, turn: Turn | None) -> None:
    """Otherwise it would read or change the state of another producer's sequence."""
    model, values = StatefulModel(), make_values(2, 3)

    async def check(scene: Scene) -> None:
        await scene.submit(values)
        tensor = msgspec.json.encode([encode_values("x", [1000])])
        payload = body.replace(b"%b", tensor)
        member = encode_member("foreign", payload, 10**9, extra=turn, token="t")
        await scene.store.submit([Submission(member, 1e9, "foreign", "t", 10**9)])
        await scene.take_results(7)
        check_totals(scene, values)
        assert scene.results["foreign"].error_code == "INVALID_REQUEST"
        assert "parameters" in str(scene.results["foreign"].error_message)
        assert "foreign" not in {request.id for request in model.requests}

    run_in_scene(check, model)


def test_sequences_that_begin_one_after_the_other_share_calls_soon() -> None:
    """A turn waits for the next turns of sequences in flight, although the queue is empty."""
    model, values = StatefulModel(), make_values(8, 10)

    async def check(scene: Scene) -> None:
        for name, sequence in values.items():
            await scene.submit({name: sequence})
            await asyncio.sleep(CALL_S / 4)
        await scene.take_results(80)
        check_totals(scene, values)
        assert len(model.calls) <= 20

    run_in_scene(check, model)


def test_last_turn_of_a_sequence_in_flight_delays_no_other_turn() -> None:
    model = StatefulModel()
    rule = replace(RULE, grouping=GroupingRule(64, max_delay_s=1.0))

    async def check(scene: Scene) -> None:
        began_at = asyncio.get_running_loop().time()
        await scene.submit({"a": [1]})
        await model.was_called.wait()
        await scene.submit({"b": [1]})
        await scene.take_results(2)
        assert asyncio.get_running_loop().time() - began_at < 0.1

    run_in_scene(check, model, rule=rule)


def test_single_request_has_single_values_and_the_header_with_its_id() -> None:
    model = StatefulModel()

    async def check(scene: Scene) -> None:
        await scene.submit({"a": [5, 6]})
        await scene.take_results(2)
        first, second = (msgspec.json.decode(request.payload)["parameters"] for request in model.requests)
        assert first == {"sequence_id": "a", "sequence_start": True, "sequence_end": False}
        assert second == {"sequence_id": "a", "sequence_start": False, "sequence_end": True}
        assert all(
            request.affinity is not None and request.affinity.headers["x-session-id"] == "a"
            for request in model.requests
        )

    run_in_scene(check, model)


def test_merged_call_names_only_the_server() -> None:
    model = StatefulModel(2)

    async def check(scene: Scene) -> None:
        await scene.submit(make_values(4, 3))
        await scene.take_results(12)
        merged = [request for request, ids in zip(model.requests, model.calls, strict=True) if len(ids) > 1]
        assert merged
        for request in merged:
            assert request.affinity is not None
            assert set(request.affinity.headers) <= {"x-session-token"}

    run_in_scene(check, model)


def test_sequences_of_different_servers_do_not_share_a_call() -> None:
    model = StatefulModel(2)

    async def check(scene: Scene) -> None:
        await scene.submit({"a": [1, 2, 3]})
        await model.was_called.wait()
        await scene.submit({"b": [1, 2, 3]})  # its first call goes to the other server
        await scene.take_results(6)
        assert [sorted(ids) for ids in model.calls if len(ids) > 1] == []

    run_in_scene(check, model)


def test_rejected_call_is_halved_down_to_the_turn_that_is_the_cause() -> None:
    model = StatefulModel()
    model.rejected_value = 666

    async def check(scene: Scene) -> None:
        values = make_values(8, 2)
        values["s3"][0] = 666
        await scene.submit(values, on_error=OnError.ABORT)
        await scene.take_results(16)
        assert scene.results["s3-0"].status_code == 400
        assert str(scene.results["s3-1"].error_code) == "SEQUENCE_ABORTED"
        del values["s3"]
        check_totals(scene, values)

    run_in_scene(check, model)


def test_failed_call_is_retried_for_each_sequence() -> None:
    model = StatefulModel()
    model.outcomes = [Failed("the connection was reset")]

    async def check(scene: Scene) -> None:
        values = make_values(4, 3)
        await scene.submit(values)
        await scene.take_results(12)
        check_totals(scene, values)

    run_in_scene(check, model)


def test_answer_that_cannot_be_split_counts_as_a_failed_attempt_of_each_sequence() -> None:
    model = StatefulModel()
    model.outcomes = [Delivered(200, b"not an answer")]

    async def check(scene: Scene) -> None:
        values = make_values(4, 2)
        await scene.submit(values)
        await scene.take_results(8)
        check_totals(scene, values)
        assert not scene.list_errors()
        (target,) = find_part(scene.dispatcher, RequestMerger).targets
        assert "could not be split" in target.size.off_reason
        assert all(len(ids) == 1 for ids in model.calls[1:]), "nothing is merged any more"

    run_in_scene(check, model)


@pytest.mark.parametrize(
    ("rule", "token_header"),
    [
        pytest.param(replace(RULE, merge_sequences=False), AFFINITY_TOKEN, id="rule without sequences"),
        pytest.param(RULE, "", id="servers are chosen by the id header"),
    ],
)
def test_sequences_that_may_not_share_a_call_are_sent_unchanged(rule: BatchRule, token_header: str) -> None:
    model = StatefulModel()
    parameters = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    payload = msgspec.json.encode({"inputs": [encode_values("x", [1])], "parameters": parameters})

    async def check(scene: Scene) -> None:
        members = [
            encode_member(name, payload, 10**9, extra=Turn(name, 0), token=name) for name in ("a", "b")
        ]
        await scene.store.submit([Submission(each, 1e9, "", "", 10**9) for each in members])
        await scene.take_results(2)
        assert [request.payload for request in model.requests] == [payload, payload]

    run_in_scene(check, model, rule=rule, token_header=token_header)


def test_cancelled_turn_leaves_the_call_of_the_others() -> None:
    model = StatefulModel()

    async def check(scene: Scene) -> None:
        values = make_values(3, 1)
        await scene.submit(values)
        await scene.store.cancel_request("s1-0", "s1-0")
        await scene.take_results(3)
        assert scene.list_errors() == {"CANCELLED": 1}
        del values["s1"]
        check_totals(scene, values)

    run_in_scene(check, model)
