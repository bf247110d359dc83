"""How often the Kubernetes watch sends requests, and how it obeys Retry-After. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

from dispatcher.signals.kubernetes.mirror import (
    HOLD_S,
    MAX_RETRY_AFTER_S,
    MAX_UNSERVED_PAUSE_S,
    MAX_WATCH_S,
    MIN_WATCH_S,
    SILENCE_S,
)
from dispatcher.signals.kubernetes.rewrites import RewriteWatch
from dispatcher.telemetry.events import Event, divert_events
from tests.signals.apiserver import (
    OLD_REWRITES,
    PODS,
    POOLS,
    REWRITES,
    SLICES,
    ApiServer,
    access,
    pod,
    rewrite,
)
from tests.signals.capacity_recorder import QWEN
from tests.signals.virtual_time import run_in_virtual_time, run_watch

LONG_S = 1_200.0


class TestHealthyWatch:
    def test_healthy_watch_sends_a_request_every_few_minutes_and_reports_no_problem(
        self, tmp_path: Path
    ) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as running:
                await running.wait_until_complete(3, 5.0)
                before = len(running.recorder.history)
                await running.pause(LONG_S)
                assert running.recorder.history[before:] == []
                for collection in (POOLS, PODS, SLICES):
                    assert len(running.server.requests_for(collection, watch=False)) == 1
                    watches = running.server.requests_for(collection, watch=True)
                    assert LONG_S / MAX_WATCH_S <= len(watches) <= LONG_S / MIN_WATCH_S + 1
                    # Random durations keep replicas that were started together from returning together.
                    assert len({each.query["timeoutSeconds"] for each in watches}) > 1

        run_in_virtual_time(scenario())

    def test_watch_without_bookmarks_is_restarted_and_reports_no_problem(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as running:
                running.server.faults.no_bookmarks = True
                await running.wait_until_complete(3, 5.0)
                before = len(running.recorder.history)
                await running.pause(10 * SILENCE_S)
                assert running.recorder.history[before:] == []
                assert len(running.server.requests_for(PODS, watch=True)) in (10, 11)
                assert len(running.server.requests_for(PODS, watch=False)) in (10, 11)

        run_in_virtual_time(scenario())


def test_changes_behind_a_silent_stream_are_found_after_the_silence_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_watch(tmp_path) as running:
            running.server.faults.silent_watches = True
            await running.wait_for_ready(3, 5.0)
            for number in (4, 5):
                running.server.put(PODS, pod(f"p{number}"))
                await running.wait_for_ready(number, SILENCE_S + 1.0)
            assert running.recorder.latest.problems == ()

    run_in_virtual_time(scenario())


class TestRetryAfter:
    """Answers 429 with Retry-After, as API Priority and Fairness and a stopping server send them."""

    def test_throttling_is_no_problem_while_the_known_endpoints_count(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            events: list[Event] = []
            with divert_events(lambda event, fields: events.append(event)):
                async with run_watch(tmp_path) as running:
                    await running.wait_until_complete(3, 5.0)
                    running.server.faults.retry_after_s = 8
                    running.server.cut_watches()
                    await running.wait_until(lambda: running.recorder.latest.notices, 1.0)
                    (notice,) = running.recorder.latest.notices
                    assert notice.what == "the Kubernetes API server asks to wait 8 s"
                    await running.pause(HOLD_S - 5.0)
                    assert (running.recorder.latest.ready, running.recorder.latest.problems) == (3, ())
                    running.server.faults.retry_after_s = None
                    await running.wait_until_complete(3, 8.0 + 1.0)
                    refused_at = [
                        each.at
                        for each in running.server.requests_with_status(429)
                        if each.collection == PODS
                    ]
                    assert all(after - before >= 8.0 for before, after in pairwise(refused_at))
            assert events == [Event.KUBERNETES_THROTTLED, Event.KUBERNETES_RECOVERED]

        run_in_virtual_time(scenario())

    def test_throttling_is_a_problem_when_the_known_endpoints_stop_counting(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as running:
                await running.wait_until_complete(3, 5.0)
                running.server.faults.retry_after_s = 5
                running.server.cut_watches()
                await running.wait_for_ready(None, HOLD_S + 1.0)
                assert "the Kubernetes API server asks to wait 5 s" in str(running.recorder.latest.problems)
                assert "no longer counts" in str(running.recorder.latest.problems)
                assert running.recorder.latest.notices == ()

        run_in_virtual_time(scenario())

    def test_retry_after_is_limited(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_watch(tmp_path) as running:
                await running.wait_until_complete(3, 5.0)
                running.server.faults.retry_after_s = 100_000
                running.server.cut_watches()
                await running.pause(2.0)
                running.server.faults.retry_after_s = None
                await running.wait_until_complete(3, MAX_RETRY_AFTER_S)

        run_in_virtual_time(scenario())

    def test_throttling_keeps_the_known_rewrites_without_a_warning_at_first(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            events: list[Event] = []
            with divert_events(lambda event, fields: events.append(event)):
                async with run_rewrite_watch(tmp_path) as (server, watch):
                    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                    await asyncio.sleep(1.0)
                    server.faults.retry_after_s = 8
                    server.cut_watches()
                    await asyncio.sleep(HOLD_S - 5.0)
                    assert server.requests_with_status(429)
                    assert (watch.problems, events) == ((), [])
                    assert watch.aliases.exact == {"chat": ("v1",)}
                    await asyncio.sleep(15.0)
                    (problem,) = watch.problems
                    assert problem.what == "the Kubernetes API server asks to wait 8 s"
                    assert events == [Event.KUBERNETES_PROBLEM]

        run_in_virtual_time(scenario())


class TestCollectionThatIsNotServed:
    def test_requests_are_sent_a_few_times_and_then_rarely(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_rewrite_watch(tmp_path) as (server, watch):
                server.faults.not_served = {REWRITES}
                await asyncio.sleep(220.0)
                assert watch.is_settled
                assert len(server.requests_for(REWRITES, watch=False)) <= 6
                before = len(server.requests)
                await asyncio.sleep(LONG_S)
                requests = [each for each in list(server.requests)[before:] if each.collection == REWRITES]
                assert LONG_S / MAX_UNSERVED_PAUSE_S - 1 <= len(requests) <= 2 * LONG_S / MAX_UNSERVED_PAUSE_S

        run_in_virtual_time(scenario())

    def test_new_collection_is_found_within_minutes_of_its_installation(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_rewrite_watch(tmp_path) as (server, watch):
                server.faults.not_served = {REWRITES, OLD_REWRITES}
                await asyncio.sleep(MAX_UNSERVED_PAUSE_S + 1.0)
                server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                server.faults.not_served = {OLD_REWRITES}
                await asyncio.sleep(MAX_UNSERVED_PAUSE_S + 1.0)
                assert watch.aliases.exact == {"chat": ("v1",)}

        run_in_virtual_time(scenario())

    def test_collection_is_requested_at_once_when_objects_may_have_moved_there(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with run_rewrite_watch(tmp_path) as (server, watch):
                server.faults.not_served = {REWRITES}
                server.put(OLD_REWRITES, rewrite("a", (["chat"], ["v1"])))
                await asyncio.sleep(MAX_UNSERVED_PAUSE_S)
                server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                server.faults.not_served = set()
                server.delete(OLD_REWRITES, "a")
                await asyncio.sleep(1.0)
                assert watch.aliases.exact == {"chat": ("v1",)}

        run_in_virtual_time(scenario())


@asynccontextmanager
async def run_rewrite_watch(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, RewriteWatch]]:
    async with ApiServer().serve(tmp_path) as server:
        watch = RewriteWatch(QWEN, lambda: None, access=access(server))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watch.run())
            try:
                yield server, watch
            finally:
                task.cancel()
