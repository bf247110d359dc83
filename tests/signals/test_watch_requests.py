"""The Kubernetes watch asks the API server seldom, and waits when it is asked to: in virtual time."""

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
from tests.signals.told import QWEN
from tests.signals.virtual import run, stage

LONG_S = 1_200.0


class TestAHealthyWatch:
    def test_costs_a_request_in_some_minutes_and_is_never_in_doubt(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                before = len(on.seen.history)
                await on.pause(LONG_S)
                assert on.seen.history[before:] == []
                for collection in (POOLS, PODS, SLICES):
                    assert len(on.server.asked(collection, watch=False)) == 1
                    watches = on.server.asked(collection, watch=True)
                    assert LONG_S / MAX_WATCH_S <= len(watches) <= LONG_S / MIN_WATCH_S + 1
                    # As replicas that were started together, which must not come back together.
                    assert len({each.query["timeoutSeconds"] for each in watches}) > 1

        run(scenario())

    def test_without_bookmarks_is_begun_anew_and_never_in_doubt(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                on.server.faults.no_bookmarks = True
                await on.fine(3, 5.0)
                before = len(on.seen.history)
                await on.pause(10 * SILENCE_S)
                assert on.seen.history[before:] == []
                assert len(on.server.asked(PODS, watch=True)) in (10, 11)
                assert len(on.server.asked(PODS, watch=False)) in (10, 11)

        run(scenario())


def test_what_a_stream_holds_back_is_seen_when_it_was_silent_for_too_long(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as on:
            on.server.faults.deaf = True
            await on.ready(3, 5.0)
            for number in (4, 5):
                on.server.put(PODS, pod(f"p{number}"))
                await on.ready(number, SILENCE_S + 1.0)
            assert on.seen.now.problems == ()

    run(scenario())


class TestAServerThatAsksToWait:
    """429 with Retry-After, as of API Priority and Fairness and of a server that stops."""

    def test_is_no_problem_while_what_was_seen_counts(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            told: list[Event] = []
            with divert_events(lambda event, fields: told.append(event)):
                async with stage(tmp_path) as on:
                    await on.fine(3, 5.0)
                    on.server.faults.busy_s = 8
                    on.server.cut()
                    await on.until(lambda: on.seen.now.notices, 1.0)
                    (notice,) = on.seen.now.notices
                    assert notice.what == "the Kubernetes API server asks to wait 8 s"
                    await on.pause(HOLD_S - 5.0)
                    assert (on.seen.now.ready, on.seen.now.problems) == (3, ())
                    on.server.faults.busy_s = None
                    await on.fine(3, 8.0 + 1.0)
                    refused = [each.at for each in on.server.refused(429) if each.collection == PODS]
                    assert all(after - before >= 8.0 for before, after in pairwise(refused))
            assert told == [Event.KUBERNETES_THROTTLED, Event.KUBERNETES_RECOVERED]

        run(scenario())

    def test_is_one_when_it_no_longer_counts(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                on.server.faults.busy_s = 5
                on.server.cut()
                await on.ready(None, HOLD_S + 1.0)
                assert "the Kubernetes API server asks to wait 5 s" in str(on.seen.now.problems)
                assert "no longer counts" in str(on.seen.now.problems)
                assert on.seen.now.notices == ()

        run(scenario())

    def test_is_not_waited_for_longer_than_the_bound(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                on.server.faults.busy_s = 100_000
                on.server.cut()
                await on.pause(2.0)
                on.server.faults.busy_s = None
                await on.fine(3, MAX_RETRY_AFTER_S)

        run(scenario())

    def test_leaves_the_rewrites_as_they_were_without_a_warning(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            told: list[Event] = []
            with divert_events(lambda event, fields: told.append(event)):
                async with rewrites(tmp_path) as (server, watch):
                    server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                    await asyncio.sleep(1.0)
                    server.faults.busy_s = 8
                    server.cut()
                    await asyncio.sleep(HOLD_S - 5.0)
                    assert server.refused(429)
                    assert (watch.problems, told) == ((), [])
                    assert watch.aliases.exact == {"chat": ("v1",)}
                    await asyncio.sleep(15.0)
                    (problem,) = watch.problems
                    assert problem.what == "the Kubernetes API server asks to wait 8 s"
                    assert told == [Event.KUBERNETES_PROBLEM]

        run(scenario())


class TestACollectionThatIsNotServed:
    def test_is_asked_for_a_few_times_and_then_seldom(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with rewrites(tmp_path) as (server, watch):
                server.faults.not_served = {REWRITES}
                await asyncio.sleep(220.0)
                assert watch.is_settled
                assert len(server.asked(REWRITES, watch=False)) <= 6
                before = len(server.requests)
                await asyncio.sleep(LONG_S)
                asked = [each for each in list(server.requests)[before:] if each.collection == REWRITES]
                assert LONG_S / MAX_UNSERVED_PAUSE_S - 1 <= len(asked) <= 2 * LONG_S / MAX_UNSERVED_PAUSE_S

        run(scenario())

    def test_is_seen_within_minutes_of_its_installation(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with rewrites(tmp_path) as (server, watch):
                server.faults.not_served = {REWRITES, OLD_REWRITES}
                await asyncio.sleep(MAX_UNSERVED_PAUSE_S + 1.0)
                server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                server.faults.not_served = {OLD_REWRITES}
                await asyncio.sleep(MAX_UNSERVED_PAUSE_S + 1.0)
                assert watch.aliases.exact == {"chat": ("v1",)}

        run(scenario())

    def test_is_asked_for_at_once_when_its_objects_may_have_moved_there(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with rewrites(tmp_path) as (server, watch):
                server.faults.not_served = {REWRITES}
                server.put(OLD_REWRITES, rewrite("a", (["chat"], ["v1"])))
                await asyncio.sleep(MAX_UNSERVED_PAUSE_S)
                server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                server.faults.not_served = set()
                server.delete(OLD_REWRITES, "a")
                await asyncio.sleep(1.0)
                assert watch.aliases.exact == {"chat": ("v1",)}

        run(scenario())


@asynccontextmanager
async def rewrites(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, RewriteWatch]]:
    async with ApiServer().serve(tmp_path) as server:
        watch = RewriteWatch(QWEN, lambda: None, access=access(server))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watch.run())
            try:
                yield server, watch
            finally:
                task.cancel()
