"""How long what the Kubernetes watch saw counts, and how soon it is back: hours of it in virtual time.

Watch, client and API server are the real ones of the other tests, on real sockets of one event loop. Time
jumps to the next timer only when no socket has anything.
"""

from __future__ import annotations

import asyncio
import fcntl
import selectors
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dispatcher.settings import EppSettings
from dispatcher.signals import kube
from dispatcher.signals.capacity import HOLD_S, CapacityWatch
from dispatcher.signals.mirror import LATE_S, SOON_FOR_S, SOON_S, WATCH_S
from tests.signals.apiserver import (
    OLD_POOLS,
    PODS,
    POOLS,
    SLICES,
    ApiServer,
    Request,
    access,
    old_pool,
    pod,
    pool,
    populate,
)
from tests.signals.told import QWEN, Seen

LOOK_S = 0.05
"""So often a test looks, and so exact it knows when."""


class _Jump(selectors.DefaultSelector):
    """What the loop would have waited is added to its time, once nothing is on its way."""

    now = 0.0
    threads = 0
    """At work for the loop."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        # What is still on its way through a busy kernel must not become a time-out.
        patience = 100
        while patience and not ready and (self.threads or any(map(_on_its_way, self.get_map().values()))):
            ready, patience = super().select(0.01), patience - 1
        # In small steps, and looking longer before a long one.
        step_s = 2.0 if timeout is None else min(timeout, 2.0)
        ready = ready or super().select(0.000_3 if step_s < 0.5 else 0.008)
        if not ready:
            self.now += step_s
        return ready


def _on_its_way(key: selectors.SelectorKey) -> bool:
    """A connection that is being made, or bytes (an end among them) that have not reached the other side."""
    if key.events & selectors.EVENT_WRITE:
        return True
    unsent = bytearray(4)
    try:
        fcntl.ioctl(key.fd, termios.TIOCOUTQ, unsent)
    except OSError:  # a listener
        return False
    return any(unsent)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self._jump.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self._jump.threads -= 1


def run(main: Coroutine[Any, Any, None]) -> None:
    kube.prepare()  # no thread is waited for in virtual time
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main)


class Stage:
    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.seen = Seen()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, condition: Callable[[], Any], within_s: float) -> float:
        """When it came true; it must before `within_s` are over."""
        end = self.now + within_s
        while not condition():
            assert self.now < end, f"not within {within_s:g} s: {self.seen.now}"
            await asyncio.sleep(LOOK_S)
        return self.now

    async def ready(self, number: int | None, within_s: float) -> float:
        return await self.until(lambda: bool(self.seen.history) and self.seen.now.ready == number, within_s)

    async def fine(self, ready: int, within_s: float) -> float:
        return await self.until(lambda: self.seen.fine(ready, "10.0.0.1"), within_s)

    def pause(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)


@asynccontextmanager
async def stage(tmp_path: Path, pods: int = 3) -> AsyncIterator[Stage]:
    async with ApiServer().serve(tmp_path) as server:
        made = Stage(server)
        if pods:
            populate(server, pods)
        watch = CapacityWatch(QWEN, EppSettings(), made.seen, access=access(server))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watch.run())
            try:
                yield made
            finally:
                server.thaw()
                task.cancel()


async def kill(server: ApiServer) -> None:
    await server.down()


async def freeze(server: ApiServer) -> None:
    server.freeze()


async def expire(server: ApiServer) -> None:
    server.tokens = set()


async def forbid(server: ApiServer) -> None:
    server.faults.rules = []


async def revive(server: ApiServer) -> None:
    """Undo any of these."""
    server.thaw()
    server.faults.rules = None
    server.tokens = {"t0"}
    if not server.running:
        await server.up()


LOSSES = {"killed": kill, "frozen": freeze, "token expired": expire, "rule removed": forbid}
WAYS = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES.keys())


def last_watch_ended(server: ApiServer) -> float:
    """When the last watch of pods that was allowed came to its agreed end."""
    good = [each for each in server.asked(PODS, watch=True) if each.status == 200]
    return good[-1].at + float(good[-1].query["timeoutSeconds"])


class TestALostWatch:
    @WAYS
    def test_bounds_for_the_stated_time_after_it_was_heard_last(
        self, tmp_path: Path, lose: Callable[[ApiServer], Awaitable[None]]
    ) -> None:
        """Whichever way it is lost."""

        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await on.pause(47.0)
                assert on.seen.fine(3, "10.0.0.1")
                on.server.put(PODS, pod("p3"))
                heard_at = lost_at = await on.ready(4, 1.0)
                await lose(on.server)
                given_up_at = await on.ready(None, 2 * HOLD_S)
                if lose in (expire, forbid):
                    # The server went on with the watches that ran, and ended them as agreed.
                    heard_at = last_watch_ended(on.server)
                    assert heard_at <= on.server.asked(PODS, watch=True)[-1].at
                # Pool and pods are watched by themselves: what was heard first of them is given up first.
                assert HOLD_S - 1.25 * WATCH_S <= given_up_at - heard_at <= HOLD_S + 1.0
                assert given_up_at - lost_at <= 85.0 + 1.0, "what the documentation says"
                assert on.seen.now.unsure_since is not None
                assert given_up_at - on.seen.now.unsure_since == pytest.approx(HOLD_S, abs=2 * LOOK_S)
                assert "no longer counts" in str(on.seen.now.problems)

        run(scenario())

    @WAYS
    def test_is_told_before_it_stops_to_bound(
        self, tmp_path: Path, lose: Callable[[ApiServer], Awaitable[None]]
    ) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await lose(on.server)
                await on.until(lambda: on.seen.now.unsure_since is not None, HOLD_S)
                assert on.seen.now.problems
                assert on.seen.now.ready == 3

        run(scenario())

    @WAYS
    @pytest.mark.parametrize("away_s", [40.0, 200.0])
    def test_is_back_within_five_seconds_of_its_cause_mended(
        self, tmp_path: Path, lose: Callable[[ApiServer], Awaitable[None]], away_s: float
    ) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await lose(on.server)
                await on.pause(away_s)
                on.server.put(PODS, pod("p3"))
                await revive(on.server)
                await on.fine(4, 5.0)

        run(scenario())

    def test_is_asked_for_seldom_after_some_minutes_and_still_comes_back(self, tmp_path: Path) -> None:
        """Each refusal is a line in the cluster's audit log."""

        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                on.server.faults.rules = []
                await on.pause(SOON_FOR_S + WATCH_S + LATE_S)
                on.server.requests.clear()
                await on.pause(300.0)
                # The pool in both versions, pods and slices; pauses are half of LATE_S at least.
                assert 4 * (300 / LATE_S - 1) <= len(on.server.requests) <= 4 * (300 / (LATE_S / 2) + 1)
                on.server.faults.rules = None
                await on.fine(3, LATE_S + 1.0)

        run(scenario())

    def test_is_never_asked_for_in_a_hurry(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await forbid(on.server)
                await on.pause(WATCH_S * 1.25 + 10.0)
                on.server.requests.clear()
                await on.pause(100.0)
                per_collection = len(on.server.asked(PODS, watch=True))
                assert per_collection <= 100 / (SOON_S / 2) + 1

        run(scenario())


class TestNewCredentials:
    """A pause ends when the files with the credentials change, however long it is."""

    def test_end_the_pause_at_once(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await expire(on.server)
                await on.pause(SOON_FOR_S + 60.0)
                on.server.tokens = {"t1"}
                on.server.put(PODS, pod("p3"))
                on.server.write_kubeconfig("t1")
                await on.fine(4, 2.0)

        run(scenario())

    def test_in_a_file_that_the_kubeconfig_names_do_as_well(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                on.server.write_kubeconfig(token_file="token")
                (tmp_path / "token").write_text("t0")
                await on.fine(3, 5.0)
                await expire(on.server)
                await on.pause(SOON_FOR_S + 60.0)
                on.server.tokens = {"another"}
                (tmp_path / "token").write_text("another")
                await on.fine(3, 2.0)
                assert on.server.requests[-1].token == "another"

        run(scenario())


class TestTheOlderApi:
    def test_is_not_asked_while_the_newer_has_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path) as on:
                await on.fine(3, 5.0)
                await on.pause(300.0)
                assert not [each for each in on.server.requests if each.collection == OLD_POOLS]

        run(scenario())

    def test_is_left_when_the_newer_gets_the_pool(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with stage(tmp_path, pods=0) as on:
                on.server.faults.unserved = {POOLS}
                on.server.put(OLD_POOLS, old_pool())
                on.server.put(PODS, pod("p0"))
                on.server.put(PODS, pod("n0", app="newer"))
                on.server.put(PODS, pod("n1", app="newer"))
                await on.ready(1, 5.0)
                await on.pause(100.0)
                on.server.faults.unserved = set()
                on.server.put(POOLS, pool(app="newer"))
                await on.ready(2, 5.0)
                await on.pause(1.0)
                on.server.requests.clear()
                await on.pause(100.0)
                assert not [each for each in on.server.requests if each.collection == OLD_POOLS]
                on.server.delete(POOLS, "qwen")
                await on.ready(1, 1.0)

        run(scenario())


def test_a_healthy_watch_is_sure_for_ever_and_costs_little(tmp_path: Path) -> None:
    """A quarter of an hour in which nothing happens: no doubt, no list, a watch each 20 s a collection."""

    async def scenario() -> None:
        async with stage(tmp_path) as on:
            await on.fine(3, 5.0)
            before = len(on.seen.history)
            await on.pause(900.0)
            assert on.seen.history[before:] == []
            for collection in (POOLS, PODS, SLICES):
                lists: list[Request] = on.server.asked(collection, watch=False)
                assert len(lists) == 1
                assert (
                    900 / (1.25 * WATCH_S)
                    <= len(on.server.asked(collection, watch=True))
                    <= 900 / (0.7 * WATCH_S)
                )

    run(scenario())
