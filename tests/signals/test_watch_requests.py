"""What the Kubernetes watch costs the API server, and how it waits when it is asked to: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dispatcher.signals.mirror import (
    SILENCE_S,
    UNSERVED_S,
    WATCH_LEAST_S,
    WATCH_MOST_S,
)
from dispatcher.signals.rewrites import RewriteWatch
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
                    assert LONG_S / WATCH_MOST_S <= len(watches) <= LONG_S / WATCH_LEAST_S + 1
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


class TestACollectionThatIsNotServed:
    def test_is_asked_for_a_few_times_and_then_seldom(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with rewrites(tmp_path) as (server, watch):
                server.faults.unserved = {REWRITES}
                await asyncio.sleep(220.0)
                assert watch.settled
                assert len(server.asked(REWRITES, watch=False)) <= 6
                before = len(server.requests)
                await asyncio.sleep(LONG_S)
                asked = [each for each in list(server.requests)[before:] if each.collection == REWRITES]
                assert LONG_S / UNSERVED_S - 1 <= len(asked) <= 2 * LONG_S / UNSERVED_S

        run(scenario())

    def test_is_seen_within_minutes_of_its_installation(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with rewrites(tmp_path) as (server, watch):
                server.faults.unserved = {REWRITES, OLD_REWRITES}
                await asyncio.sleep(UNSERVED_S + 1.0)
                server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                server.faults.unserved = {OLD_REWRITES}
                await asyncio.sleep(UNSERVED_S + 1.0)
                assert watch.aliases.exact == {"chat": ("v1",)}

        run(scenario())

    def test_is_asked_for_at_once_when_its_objects_may_have_moved_there(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with rewrites(tmp_path) as (server, watch):
                server.faults.unserved = {REWRITES}
                server.put(OLD_REWRITES, rewrite("a", (["chat"], ["v1"])))
                await asyncio.sleep(UNSERVED_S)
                server.put(REWRITES, rewrite("a", (["chat"], ["v1"])))
                server.faults.unserved = set()
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
