"""Warm-up in the loop: what is cold is sent its recorded requests before any work, and by whom."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from dispatcher.core.gateway.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    RetryPolicy,
    TooLate,
    Unreachable,
)
from dispatcher.core.limit.budget import Reason
from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.core.merging.shapes import SHAPES
from dispatcher.core.models.availability import Listing, ModelTerms, WhenNotServed
from dispatcher.core.models.versions import FamilyTerms
from dispatcher.core.models.warmup import WarmupRequest
from dispatcher.core.requests.request import Request
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.dispatch.models.warm_up import (
    CHECK_INTERVAL_S,
    ERROR_RETRY_S,
    MAX_PARALLEL_WARM_UPS,
    RETRY_SOON_S,
)
from dispatcher.dispatch.options import FamilyOptions, VersionOptions
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.ports import AttemptResult, Permit, QueueUnavailableError, Release
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.pool import EACH_S, GONE, states, submit, told
from tests.dispatch.scene import Answers, Scene, open_limiter, perform

T = TypeVar("T")
CHAT = "/v1/chat/completions"
LIMIT = 9
"""Of a pool of ten, less the reserve."""
LINES = (
    WarmupRequest(CHAT, b'{"model":"x","messages":["short"]}', 3),
    WarmupRequest("/v1/completions", b'{"model":"x","prompt":"long"}'),
)


class Pool(Answers):
    """A gateway and the model servers behind it: `calls` has each warm-up call as (endpoint, path, body);
    `work` the rest, in the order in which they began."""

    takes_s = 0.1
    answer: Outcome = Delivered(200, b"{}")
    """To warm-up calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, bytes]] = []
        self.work: list[tuple[str, str]] = []
        self.under_way = self.max_limit = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        forwarded = await self._one(
            super().forward(request, token=token, deadline=deadline, may_send=may_send)
        )
        if "warm-up" in request.id:
            self.calls.append((request.endpoints, request.endpoint, request.payload))
            return forwarded.copy_with(outcome=self.answer)
        self.work.append((json.loads(request.payload)["model"], request.endpoints))
        return forwarded

    async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
        async def answered() -> Outcome:
            await asyncio.sleep(self.takes_s)
            return self.answer

        self.calls.append((endpoint, path, body))
        return await self._one(answered())

    async def _one(self, call: Awaitable[T]) -> T:
        self.under_way += 1
        self.max_limit = max(self.max_limit, self.under_way)
        try:
            return await call
        finally:
            self.under_way -= 1


def options(
    *,
    required: bool = False,
    steered: bool = False,
    straight: bool | None = None,
    warm_s: float = 300.0,
    lines: Sequence[WarmupRequest] = LINES,
    problem: str = "",
    observe: bool = False,
    batching: Sequence[BatchRule] = (),
    **terms: Any,
) -> Options:
    async def read() -> tuple[Sequence[WarmupRequest], str]:
        return lines, problem

    family = FamilyTerms("qwen", re.compile(r"qwen-v(?P<version>\d+)"), has_warm_up=True, **terms)
    return Options(
        RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3),
        model_terms=ModelTerms({"qwen": WhenNotServed.WAIT}),
        versions=VersionOptions((FamilyOptions(family, read, required),), steered, straight, warm_s),
        observe=observe,
        merge_rules=batching,
    )


async def began(scene: Scene) -> None:
    """What the owners share is known."""
    await asyncio.sleep(EACH_S + CHECK_INTERVAL_S)


def warmed(scene: Scene) -> list[dict[str, Any]]:
    """What was told of warm-ups; a warning where there were errors."""
    told = [each for each in scene.events if each[0] in (Event.WARM_UP, Event.WARM_UP_FAILED)]
    assert all((event is Event.WARM_UP_FAILED) is bool(fields["errors"]) for event, fields in told)
    return [dict(fields) for _, fields in told]


def play(scene_of: Any, pool: Pool, given: Options) -> None:
    perform(scene_of, pool, given, servers=pool)


def test_each_endpoint_is_warm_before_work_comes() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        await submit(scene, *(f"r{number}" for number in range(20)))
        told(scene, a="qwen-v1", b="qwen-v1")
        await asyncio.sleep(20)
        expected = [
            (path, body.replace(b'"x"', b'"qwen-v1"'))
            for path, body, repeat in ((each.url, each.body, each.repeat) for each in LINES)
            for _ in range(repeat)
        ]
        for endpoint in "ab":
            assert [each[1:] for each in pool.calls if each[0] == endpoint] == expected
        assert len(pool.work) == 20
        assert states(scene, "qwen-v1") == ["cold", "open"]
        assert [(each["endpoint"], each["calls"], each["is_used"]) for each in warmed(scene)] == [
            ("a", 4, True),
            ("b", 4, True),
        ]
        assert scene.dispatcher.warm_ups.result_counts == {"warm": 2, "errors": 0, "retry": 0}
        assert pool.max_limit <= LIMIT

    play(scene_of, pool, options())


def test_endpoint_that_comes_later_gets_no_work_before_it_is_warm_where_requests_are_steered() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await began(scene)
        await submit(scene, "r1")
        await asyncio.sleep(1)
        assert pool.work == [("qwen-v1", "a")]
        pool.takes_s = 3.0
        told(scene, a="qwen-v1", b="qwen-v1")
        await submit(scene, "r2")
        await asyncio.sleep(1)
        told(scene, a="qwen-v1", b="qwen-v1")
        await asyncio.sleep(30)
        await submit(scene, "r3")
        await asyncio.sleep(10)
        assert pool.work == [("qwen-v1", "a"), ("qwen-v1", "a"), ("qwen-v1", "a,b")]
        assert {endpoint for endpoint, _, _ in pool.calls} == {"a", "b"}

    play(scene_of, pool, options(steered=True))


@pytest.mark.parametrize("straight", [True, False])
def test_way_of_a_warm_up_is_chosen(straight: bool) -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await began(scene)
        assert {endpoint for endpoint, _, _ in pool.calls} == {"a"}
        assert bool(pool.sent) is not straight

    play(scene_of, pool, options(steered=True, straight=straight))


def test_through_a_gateway_that_lists_for_all_there_is_no_endpoint_to_name() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        told(scene, gateway="qwen-v1")
        await began(scene)
        await submit(scene, "r1")
        await asyncio.sleep(1)
        assert [endpoint for endpoint, _, _ in pool.calls] == [""] * 4
        assert pool.work == [("qwen-v1", "")]

    play(scene_of, pool, options(steered=True))


def test_old_version_serves_until_the_new_one_is_warm() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await began(scene)
        pool.takes_s = 1.0
        told(scene, a="qwen-v1", b="qwen-v2")
        for number in range(10):
            await submit(scene, f"r{number}")
            await asyncio.sleep(1)
        models = [model for model, _ in pool.work]
        assert models == sorted(models)
        assert set(models) == {"qwen-v1", "qwen-v2"}
        assert states(scene, "qwen-v2") == ["cold", "open"]
        assert states(scene, "qwen-v1")[:3] == ["cold", "open", "draining"]

    play(scene_of, pool, options())


def test_errors_open_it_all_the_same_unless_the_warm_up_is_required() -> None:
    pool = Pool()
    pool.answer = Failed("the server answered 500", 500)

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1")
        await began(scene)
        assert states(scene, "qwen-v1") == ["cold", "open"]
        assert len(pool.work) == 1
        (event,) = warmed(scene)
        assert (event["errors"], event["is_used"]) == (4, True)
        assert event["why"] == "500: the server answered 500"

    play(scene_of, pool, options())


def test_required_warm_up_is_tried_again_until_it_is_answered() -> None:
    pool = Pool()
    pool.answer = Delivered(400, b'{"error":"bad \x1b[31m"}')

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1")
        await began(scene)
        assert len(pool.calls) == 4
        assert "\x1b" not in warmed(scene)[0]["why"]
        for _ in range(20):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1")
        # Again after 30 s, and 60 s after that: not each second.
        assert ERROR_RETRY_S[0] == 30.0
        assert len(pool.calls) == 12
        assert pool.work == []
        ((_, _, why),) = scene.dispatcher.model_router.list_held_back()
        assert "'qwen-v1' is being warmed up" in why
        pool.answer = Delivered(200, b"{}")
        for _ in range(30):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1")
        assert pool.work == [("qwen-v1", "")]
        assert scene.dispatcher.warm_ups.result_counts == {"warm": 1, "errors": 0, "retry": 3}

    play(scene_of, pool, options(required=True))


@pytest.mark.parametrize(
    "answer", [Unreachable("nobody listens"), Delivered(404, GONE % b"qwen-v1")], ids=["away", "not yet"]
)
def test_who_cannot_answer_yet_is_asked_again_soon_and_is_not_warm_by_that(answer: Outcome) -> None:
    pool = Pool()
    pool.answer = answer

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1")
        await began(scene)
        await asyncio.sleep(2 * RETRY_SOON_S)
        told(scene, a="qwen-v1")
        assert 2 <= len(pool.calls) <= 4
        assert (pool.work, warmed(scene)) == ([], [])
        pool.answer = Delivered(200, b"{}")
        await asyncio.sleep(2 * RETRY_SOON_S)
        assert pool.work == [("qwen-v1", "")]

    play(scene_of, pool, options())


def test_refusal_of_the_pool_is_waited_out() -> None:
    pool = Pool()
    pool.answer = Overloaded(429, "", is_out_of_capacity=True, retry_after_s=0.5)

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(10)
        refused = len(pool.calls)
        assert 5 <= refused <= 12
        pool.answer = Delivered(200, b"{}")
        await asyncio.sleep(5)
        assert len(pool.calls) == refused + 4
        assert warmed(scene)[0]["errors"] == 0

    play(scene_of, pool, options())


def test_no_answer_in_time_is_an_error_and_so_is_a_warm_up_that_takes_too_long() -> None:
    pool = Pool()
    pool.takes_s = 4.0

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(60)
        (event,) = warmed(scene)
        assert (event["calls"], event["errors"], event["why"]) == (3, 1, "not done within 10 s")
        pool.answer = TooLate()
        told(scene, b="qwen-v1")
        await asyncio.sleep(60)
        assert warmed(scene)[1]["why"] == "no answer in time"

    play(scene_of, pool, options(warm_s=10.0))


def test_nothing_is_sent_while_the_gate_is_closed() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        await scene.store.pause("ada", "")
        await asyncio.sleep(5)
        told(scene, a="qwen-v1")
        await asyncio.sleep(30)
        assert pool.calls == []
        await scene.store.resume()
        await asyncio.sleep(5)
        assert len(pool.calls) == 4

    play(scene_of, pool, options())


def test_work_makes_room_for_a_warm_up_and_the_limit_holds() -> None:
    pool = Pool()
    pool.takes_s = 0.5

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1", b="other")
        await began(scene)
        await submit(scene, *(f"r{number}" for number in range(300)))
        await asyncio.sleep(2)
        assert pool.max_limit == LIMIT
        before = len(pool.calls)
        told(scene, a="qwen-v1", b="qwen-v1", c="qwen-v1", d="qwen-v1", e="qwen-v1", f="qwen-v1")
        await asyncio.sleep(12)
        assert len(pool.calls) == before + 20
        assert pool.max_limit <= LIMIT
        assert len(pool.work) >= 150

    play(scene_of, pool, options(steered=True, straight=True))


def test_one_owner_warms_what_others_wait_for() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        assert await other.take_warm_up_lock("qwen-v1", "a")
        told(scene, a="qwen-v1")
        await began(scene)
        assert pool.calls == []
        await other.mark_warm("qwen-v1", "a")
        await asyncio.sleep(2 * EACH_S)
        assert states(scene, "qwen-v1") == ["cold", "open"]
        assert pool.calls == []

    play(scene_of, pool, options())


def test_right_to_warm_is_kept_for_as_long_as_it_takes_and_then_given_back() -> None:
    pool = Pool()
    pool.takes_s = 25.0

    async def scene_of(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        told(scene, a="qwen-v1")
        for _ in range(18):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1")
            assert not await other.take_warm_up_lock("qwen-v1", "a")
        await asyncio.sleep(30)
        assert states(scene, "qwen-v1") == ["cold", "open"]
        assert await other.take_warm_up_lock("qwen-v1", "a")

    play(scene_of, pool, options())


def test_endpoint_that_stops_listing_it_or_is_another_process_is_cold_again() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await began(scene)
        assert len(pool.calls) == 4
        told(scene, a="")
        told(scene, a="qwen-v1")
        await began(scene)
        assert len(pool.calls) == 8
        at = asyncio.get_running_loop().time()
        scene.dispatcher.model_router.update_listings(
            [Listing("a", at, None, problem="refused", is_down=True)]
        )
        await began(scene)
        told(scene, a="qwen-v1")
        await began(scene)
        assert len(pool.calls) in (12, 16)  # it is asked while it is away, too
        scene.dispatcher.model_router.update_listings([Listing("a", at, None, problem="it took too long")])
        told(scene, a="qwen-v1")
        before = len(pool.calls)
        await began(scene)
        assert len(pool.calls) == before

    play(scene_of, pool, options())


def test_version_that_is_wanted_no_more_is_not_warmed_to_the_end() -> None:
    pool = Pool()
    pool.takes_s = 3.0

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(5)
        told(scene, a="qwen-v2")
        await asyncio.sleep(30)
        first = [body for _, _, body in pool.calls if b"qwen-v1" in body]
        assert 1 <= len(first) < 4
        assert states(scene, "qwen-v1") == ["cold", "gone"]
        assert states(scene, "qwen-v2") == ["cold", "open"]

    play(scene_of, pool, options())


def test_where_batching_merges_the_path_preferred_sizes_are_warmed_too() -> None:
    pool = Pool()
    rule = BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(8, preferred_sizes=(4, 8))
    )
    line = WarmupRequest("/v1/embeddings", b'{"model":"x","input":"a"}')

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await began(scene)
        sizes = [
            len(found) if isinstance(found, list) else 1
            for found in (json.loads(body)["input"] for _, _, body in pool.calls)
        ]
        assert sizes == [1, 4, 8]

    play(scene_of, pool, options(lines=(line,), batching=(rule,)))


def test_file_that_is_out_of_date_is_told() -> None:
    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await began(scene)
        assert warmed(scene)[0]["why"] == "warmup.jsonl cannot be read"

    play(scene_of, Pool(), options(problem="warmup.jsonl cannot be read"))


def test_who_only_observes_warms_nothing() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(30)
        assert pool.calls == []

    play(scene_of, pool, options(observe=True))


def without_families(given: Options) -> Options:
    return replace(given, versions=VersionOptions())


async def right_is_free(scene: Scene, endpoint: str = "a") -> bool:
    return await MemoryQueue(scene.store, "b").take_warm_up_lock("qwen-v1", endpoint)


def test_model_that_the_settings_drop_in_the_middle_of_its_warm_up_ends_that_and_nothing_else() -> None:
    pool = Pool()
    pool.takes_s, pool.answer = 2.0, Failed("it broke", 500)

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 other")
        await asyncio.sleep(2)
        assert len(pool.calls) == 1
        scene.dispatcher.reconfigure(without_families(options()))
        await submit(scene, "r1", payload=b'{"model":"other"}')
        await asyncio.sleep(10)
        assert (len(pool.calls), pool.work) == (1, [("other", "")])
        assert await right_is_free(scene)

    play(scene_of, pool, options(required=True))


def test_surprise_in_a_warm_up_ends_nothing_else() -> None:
    class Odd(Pool):
        async def post(self, endpoint: str, path: str, body: bytes, *, deadline: float) -> Outcome:
            raise ValueError(f"what is {endpoint}?")

    pool = Odd()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1")
        await began(scene)
        assert pool.work == [("qwen-v1", "")]
        (event,) = warmed(scene)
        assert (event["is_used"], event["why"]) == (
            True,
            "the dispatcher failed: ValueError('what is a?')",
        )

    play(scene_of, pool, options())


def test_drain_gives_the_right_to_warm_to_another() -> None:
    pool = Pool()
    pool.takes_s = 2.0

    async def scene_of(scene: Scene) -> None:
        pool.takes_s = 60.0
        told(scene, a="qwen-v1 other")
        await submit(scene, "r1", payload=b'{"model":"other"}')
        await asyncio.sleep(0.5)
        assert pool.under_way == 2
        assert not await right_is_free(scene)
        scene.dispatcher.drain(600.0)
        await asyncio.sleep(65)
        assert len(pool.calls) == 1
        assert await right_is_free(scene)

    play(scene_of, pool, options())


def test_process_that_ends_in_the_middle_of_a_call_gives_the_right_back() -> None:
    pool = Pool()
    pool.takes_s = 200.0

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(5)
        at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(1.0)
        await scene.record_completion()
        assert asyncio.get_running_loop().time() < at + 2
        assert await right_is_free(scene)

    play(scene_of, pool, options())


def test_queue_that_is_away_holds_up_no_end() -> None:
    pool = Pool()
    pool.takes_s = 200.0

    async def scene_of(scene: Scene) -> None:
        async def hangs(_model: str, _endpoint: str) -> None:
            await asyncio.sleep(3600)

        told(scene, a="qwen-v1")
        await asyncio.sleep(5)
        scene.queue.release_warm_up_lock = hangs  # type: ignore[method-assign,assignment]
        at = asyncio.get_running_loop().time()
        scene.dispatcher.drain(1.0)
        await scene.record_completion()
        assert asyncio.get_running_loop().time() < at + 4

    play(scene_of, pool, options())


def test_who_cannot_go_on_leaves_the_right_to_others_and_sends_nothing_twice() -> None:
    pool = Pool()
    pool.takes_s = 2.0

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(3)
        before = len(pool.calls)
        assert 1 <= before < 4
        await scene.store.pause("ada", "")
        for _ in range(6):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1")
        other = MemoryQueue(scene.store, "b")
        assert await other.take_warm_up_lock("qwen-v1", "a")
        await other.release_warm_up_lock("qwen-v1", "a")
        assert len(pool.calls) <= before + 1
        await scene.store.resume()
        await asyncio.sleep(15)
        assert len(pool.calls) == 4
        assert states(scene, "qwen-v1") == ["cold", "open"]

    play(scene_of, pool, options())


class Hung:
    """An owner that warms `qwen-v1` at `a` up, and by whose clock time may be lost."""

    def __init__(self, scene: Scene, pool: Pool, given: Options) -> None:
        self.ahead_s = 0.0
        self.calls = pool.calls
        self.board = scene.store.pool.model_registry
        loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(
            MemoryQueue(scene.store, "hung"),
            pool,
            open_limiter(),
            given,
            Journal(Metrics()),
            clock=lambda: loop.time() + self.ahead_s,
            servers=pool,
        )
        self.task = asyncio.create_task(self.dispatcher.run())
        self.dispatcher.model_router.update_listings([Listing("a", loop.time(), ("qwen-v1",))])

    async def hang(self, *, notices: bool = True) -> None:
        """With one call sent, until its right has lapsed."""
        await asyncio.sleep(2)
        assert len(self.calls) == 1
        self.lose(31, notices=notices)

    def lose(self, seconds: float, *, notices: bool) -> None:
        """So much time has passed for the queue. `notices`: by the owner's clock as well."""
        self.board.lock_until = {name: until - seconds for name, until in self.board.lock_until.items()}
        self.ahead_s += seconds if notices else 0.0

    async def record_completion(self) -> None:
        self.dispatcher.drain(1.0)
        await self.task


@pytest.mark.parametrize("notices", [True, False])
def test_owner_that_hung_until_another_took_over_begins_nothing_more(notices: bool) -> None:
    """By its own clock at once; else when it renews its right, which is another's."""
    slow, pool = Pool(), Pool()
    slow.takes_s = pool.takes_s = 7.0

    async def scene_of(scene: Scene) -> None:
        hung = Hung(scene, slow, given)
        await hung.hang(notices=notices)
        told(scene, a="qwen-v1")
        await asyncio.sleep(60)
        assert len(hung.calls) == (1 if notices else 2)
        assert len(pool.calls) == 4
        assert hung.dispatcher.warm_ups.result_counts == {"warm": 0, "errors": 0, "retry": 1}
        assert scene.dispatcher.warm_ups.result_counts == {"warm": 1, "errors": 0, "retry": 0}
        assert set((await scene.store.read_model_registry()).warm_markers) == {("qwen-v1", "a")}
        assert hung.board.lock_until == {}
        await hung.record_completion()

    given = options()
    play(scene_of, pool, given)


def test_owner_that_hung_while_it_waited_for_room_begins_nothing_more() -> None:
    slow = Pool()

    async def scene_of(scene: Scene) -> None:
        await scene.store.pause("ada", "so that nobody else claims")
        await submit(scene, *(f"r{number}" for number in range(LIMIT)), payload=b'{"model":"other"}')
        await scene.store.resume()
        other = MemoryQueue(scene.store, "b")
        full = await other.claim(LIMIT, "n", Permit(LIMIT, asyncio.get_running_loop().time(), 0))
        assert len(full.leases) == LIMIT
        hung = Hung(scene, slow, given)
        await asyncio.sleep(4)
        assert (hung.calls, len(hung.board.lock_until)) == ([], 1)
        hung.lose(31, notices=True)
        assert await scene.queue.take_warm_up_lock("qwen-v1", "a")
        await other.release([Release(lease, delay_s=1000.0) for lease in full.leases])
        await asyncio.sleep(20)
        assert hung.calls == []
        await hung.record_completion()

    given = options()
    play(scene_of, Pool(), given)


def test_owner_whose_right_lapsed_and_nobody_took_it_goes_on_with_it_anew() -> None:
    slow = Pool()
    slow.takes_s = 3.0

    async def scene_of(scene: Scene) -> None:
        hung = Hung(scene, slow, given)
        await hung.hang()
        await asyncio.sleep(3)
        assert len(hung.calls) == 2
        assert not await scene.queue.take_warm_up_lock("qwen-v1", "a")
        await asyncio.sleep(12)
        assert len(hung.calls) == 4
        assert hung.dispatcher.warm_ups.result_counts == {"warm": 1, "errors": 0, "retry": 0}
        await hung.record_completion()

    given = options()
    play(scene_of, Pool(), given)


def test_owner_that_hung_while_another_warmed_it_up_sends_nothing_more() -> None:
    slow = Pool()
    slow.takes_s = 3.0

    async def scene_of(scene: Scene) -> None:
        hung = Hung(scene, slow, given)
        await hung.hang()
        assert await scene.queue.take_warm_up_lock("qwen-v1", "a")
        await scene.queue.mark_warm("qwen-v1", "a")
        await asyncio.sleep(20)
        assert len(hung.calls) == 1
        assert hung.board.lock_until == {}
        await hung.record_completion()

    given = options()
    play(scene_of, Pool(), given)


@pytest.mark.parametrize("straight", [True, False])
def test_gateway_that_was_away_is_found_again_though_all_work_waits_for_what_is_cold(straight: bool) -> None:
    """Else the warm-up waits for the gate, the gate for a probe, and each probe for the warm-up."""

    class Away(Pool):
        away = True

        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            if self.away:
                at = asyncio.get_running_loop().time()
                self.sent.append(request.id)
                return AttemptResult(Unreachable("nobody listens"), at, at)
            return await super().forward(request, token=token, deadline=deadline, may_send=may_send)

    pool = Away()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="other")
        await submit(scene, "o1", payload=b'{"model":"other"}', within_s=3)
        await asyncio.sleep(5)
        assert scene.dispatcher.get_allowance().reason is Reason.GATEWAY_UNREACHABLE
        told(scene, a="qwen-v1")
        await submit(scene, "r1", "r2")
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        assert len(pool.sent) <= 60 + at  # nobody knocks faster than probes do
        pool.away = False
        for _ in range(12):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1")
        assert pool.work == [("qwen-v1", "")] * 2
        assert scene.dispatcher.get_allowance().reason is Reason.IDLE

    play(scene_of, pool, options(straight=straight))


def test_endpoint_that_only_another_owner_sees_stays_warm() -> None:
    async def scene_of(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        await other.mark_warm("qwen-v1", "x")
        await other.mark_warm("qwen-v1", "down")
        at = asyncio.get_running_loop().time()
        away = Listing("down", at, None, problem="refused", is_down=True)
        for listings in ([], [Listing("a", at, ("qwen-v1",)), away], [Listing("gateway", at, ("qwen-v1",))]):
            scene.dispatcher.model_router.update_listings(listings)
            await asyncio.sleep(EACH_S)
        assert {("qwen-v1", "x"), ("qwen-v1", "down")} < (
            await other.refresh_warm_markers([], [], [])
        ).warm_markers

    play(scene_of, Pool(), options())


def test_warm_up_of_which_the_queue_could_not_be_told_is_not_done_again() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        async def away(_model: str, _endpoint: str) -> None:
            raise QueueUnavailableError("Redis did not answer in time")

        scene.queue.mark_warm = away  # type: ignore[method-assign,assignment]
        for _ in range(6):
            told(scene, a="qwen-v1")
            await asyncio.sleep(EACH_S)
        assert (len(pool.calls), states(scene, "qwen-v1")) == (4, ["cold", "open"])
        del scene.queue.mark_warm
        await asyncio.sleep(2 * EACH_S)
        assert ("qwen-v1", "a") in (
            await MemoryQueue(scene.store, "b").refresh_warm_markers([], [], [])
        ).warm_markers
        told(scene, a="")
        told(scene, a="qwen-v1")
        await began(scene)
        assert len(pool.calls) == 8

    play(scene_of, pool, options())


@pytest.mark.parametrize("owners", [2, 3])
def test_owner_without_work_of_its_own_leaves_a_warm_up_to_one_that_can_make_room(owners: int) -> None:
    """Else what he began is never warm, as long as the others fill the limit."""
    pool = Pool()
    pool.takes_s = 0.5
    given = options(steered=True, straight=True)

    async def scene_of(scene: Scene) -> None:
        every = [scene.dispatcher]
        others: list[asyncio.Task[None]] = []
        for number in range(owners - 1):
            queue = MemoryQueue(scene.store, f"other-{number}")
            one = Dispatcher(queue, pool, open_limiter(), given, Journal(Metrics()), servers=pool)
            every.append(one)
            others.append(asyncio.create_task(one.run()))
        await submit(scene, *(f"r{number}" for number in range(6000)), payload=b'{"model":"other"}')
        names = dict.fromkeys((f"e{number}" for number in range(12)), "qwen-v1")
        for _ in range(30):
            at = asyncio.get_running_loop().time()
            listings = [Listing(name, at, (model,)) for name, model in ({"a": "other"} | names).items()]
            for each in every:
                each.model_router.update_listings(listings)
            await asyncio.sleep(EACH_S)
        assert len({endpoint for endpoint, _, _ in pool.calls}) == 12
        assert len(pool.calls) == 48
        assert len(pool.work) > 2000
        assert pool.max_limit <= LIMIT + 1
        for each in every[1:]:
            each.drain(1.0)
        await asyncio.gather(*others)

    play(scene_of, pool, given)


def test_warm_ups_of_all_owners_and_their_work_share_one_limit() -> None:
    """Within those that an owner has begun since others asked last, at the most a second ago."""
    pool = Pool()
    pool.takes_s = 3.0
    given = options(steered=True, straight=True)

    async def scene_of(scene: Scene) -> None:
        every = [scene.dispatcher]
        others: list[asyncio.Task[None]] = []
        for number in range(4):
            queue = MemoryQueue(scene.store, f"other-{number}")
            one = Dispatcher(queue, pool, open_limiter(), given, Journal(Metrics()), servers=pool)
            every.append(one)
            others.append(asyncio.create_task(one.run()))
        await submit(scene, *(f"r{number}" for number in range(900)), payload=b'{"model":"other"}')
        names = dict.fromkeys((f"e{number}" for number in range(24)), "qwen-v1")
        for _ in range(40):
            at = asyncio.get_running_loop().time()
            listings = [Listing(name, at, (model,)) for name, model in ({"a": "other"} | names).items()]
            for each in every:
                each.model_router.update_listings(listings)
            await asyncio.sleep(EACH_S)
        assert len({endpoint for endpoint, _, _ in pool.calls}) == 24
        assert len(pool.work) > 400
        assert pool.max_limit <= LIMIT + MAX_PARALLEL_WARM_UPS
        for each in every[1:]:
            each.drain(1.0)
        await asyncio.gather(*others)

    play(scene_of, pool, given)


def test_work_leaves_room_for_what_other_owners_warm() -> None:
    pool = Pool()
    pool.takes_s = 1.0

    async def scene_of(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        for number in range(4):
            assert await other.take_warm_up_lock("elsewhere", f"e{number}")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, *(f"r{number}" for number in range(100)), payload=b'{"model":"other"}')
        told(scene, a="other")
        await asyncio.sleep(5)
        assert pool.max_limit == scene.dispatcher.running_count == LIMIT - 4
        for number in range(4):
            await other.release_warm_up_lock("elsewhere", f"e{number}")
        await asyncio.sleep(EACH_S + 1)
        assert pool.max_limit == LIMIT

    play(scene_of, pool, options())


@pytest.mark.parametrize(("others", "first"), [("elsewhere", False), ("somewhere", True)])
def test_where_there_are_more_warm_ups_than_units_owners_agree_whose_turn_it_is(
    others: str, first: bool
) -> None:
    """The order is that of the names. Whoever hangs before it has his turn holds nobody up for ever."""
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        other = MemoryQueue(scene.store, "b")
        for number in range(LIMIT):
            assert await other.take_warm_up_lock(others, f"e{number}")
        told(scene, a="qwen-v1")
        await asyncio.sleep(EACH_S)
        assert len(pool.calls) == (4 if first else 0)
        for _ in range(8):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1")
        assert len(pool.calls) == 4

    play(scene_of, pool, options())


def test_queue_that_was_away_for_minutes_makes_nothing_cold_that_stayed_where_it_was() -> None:
    pool = Pool()

    async def scene_of(scene: Scene) -> None:
        async def away(*_: object) -> None:
            raise QueueUnavailableError("Redis did not answer in time")

        told(scene, a="qwen-v1", b="qwen-v1")
        await began(scene)
        assert len(pool.calls) == 8
        scene.queue.refresh_warm_markers = away  # type: ignore[method-assign,assignment]
        for number in range(24):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1", b="" if number == 10 else "qwen-v1")
        del scene.queue.refresh_warm_markers
        for _ in range(4):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1", b="qwen-v1")
        assert [endpoint for endpoint, _, _ in pool.calls[8:]] == ["b"] * 4
        assert states(scene, "qwen-v1") == ["cold", "open"]
        assert (
            len((await MemoryQueue(scene.store, "other").refresh_warm_markers([], [], [])).warm_markers) == 2
        )

    play(scene_of, pool, options())
