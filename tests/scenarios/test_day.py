"""A day in the life of a dispatcher, told alike on every surface, and seen whole by a real Prometheus.

At each step the gauge (as Prometheus has scraped it), the log, /status, `explain`, /events and the page in a
browser must name one and the same reason. At the day's end every panel and rule must return data, and every
series must have moved.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.core.requests.request import encode_member
from tests.browser import Browser, Page
from tests.monitoring.prometheus import Prometheus, moved_of_catalogue
from tests.scenarios.cluster import Cluster
from tests.scenarios.processes import POOL, Dispatcher, Stage, World, merged
from tests.signals.apiserver import PODS, pod
from tests.support import wait_until, wait_until_sync

LONG_S = 8.0
"""Long enough for a full pool to stay so while everybody is asked."""
REFUSAL = {"kind": "status", "status": 429, "reason": "rejected-saturated", "retry_after": "8"}
UNMOVED = {"batch_dispatcher_build_info", "batch_dispatcher_observing"}
"""What stands still as long as a process lives."""
OF_NO_DAY = (
    "batch_dispatcher_merge",
    "batch_dispatcher_sequence",
    "batch_dispatcher_model_",
    "batch_dispatcher_warm_",
    "batch_dispatcher_picker_wait_",
)
"""Prefixes of series that do not move on this day, which has no merged calls, no sequences and no watched
models (tests/monitoring has these). The stand-in does not report the wait in the picker."""


class Listener:
    """Somebody who follows /events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.status: dict[str, Any] = {}
        self.reasons: list[str] = []
        """Of the gate's own events, in order."""
        self._ended = threading.Event()

    @contextmanager
    def following(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(10)

    def _follow(self) -> None:
        name = ""
        with httpx.Client(timeout=60.0) as http, http.stream("GET", f"{self._url}/events") as answer:
            try:
                for line in answer.iter_lines():
                    if self._ended.is_set():
                        return
                    if line.startswith("event:"):
                        name = line.partition(":")[2].strip()
                    elif line.startswith("data:"):
                        self._take(name, json.loads(line.partition(":")[2]))
            except httpx.TransportError:
                return  # the dispatcher has ended

    def _take(self, name: str, told: Any) -> None:
        if name == "status":
            self.status = told
        events = [told] if name == "event" else told["events"] if name == "history" else []
        self.reasons += [each["fields"]["reason"] for each in events if each["event"] == "gate"]


class Day:
    """Everybody who looks at one dispatcher."""

    def __init__(self, one: Dispatcher, prometheus: Prometheus, page: Page, listener: Listener) -> None:
        self.one = one
        self._prometheus = prometheus
        self._page = page
        self._listener = listener
        asked = merged(one.settings, {"admin": {"port": one.admin_port}})
        self.empty: set[tuple[str, str]] | None = None
        """Expressions of dashboard, rules and runbook that returned nothing at any look."""
        self.wrong: list[str] = []
        self.config = one.folder / "asked.yaml"
        self.config.write_text(json.dumps(asked))

    async def run_batch(self, verb: str, *options: str) -> str:
        """What a command prints; it has a loop of its own."""
        command = [verb, "--config", str(self.config), *options]
        done = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert done.exit_code == 0, done.output
        return done.stdout

    async def told(self, *, queue: bool = True) -> dict[str, str]:
        """The reason by each surface."""
        gauge = self._prometheus.query("batch_dispatcher_gate == 1")
        found = {
            "status": str(self.one.status()["reason"]),
            "log": str(self.one.events("gate")[-1]["reason"]),
            "events": self._listener.reasons[-1] if self._listener.reasons else "",
            "stream": str(self._listener.status.get("reason")),
            "gauge": gauge[0].labels["reason"] if gauge else "",
            "page": (await self._page.text("#badge")).partition(": ")[2].removesuffix("."),
        }
        if queue:
            found["explain"] = json.loads(await self.run_batch("explain", "--json"))["dispatcher"]["reason"]
        return found

    def look(self) -> None:
        """Ask every expression. One that speaks of what is rare (a ceiling, a lost watch) has its moment."""
        found = self._prometheus.findings(pool=POOL, namespace="batch", instance="a")
        empty = {(each.query.where, each.query.expr) for each in found if each.problem == "no data"}
        self.empty = empty if self.empty is None else self.empty & empty
        self.wrong += [str(each) for each in found if each.problem != "no data"]

    def has_seen_all(self) -> bool:
        """Query every expression. Return whether each that this day can move has returned a value by now."""
        self.look()
        missing = {each for each in self.empty or () if not any(name in each[1] for name in OF_NO_DAY)}
        if missing:
            print(f"no data yet: {sorted(where for where, _ in missing)}")
        return not missing

    async def says(self, reason: str, *, queue: bool = True, timeout_s: float = 30.0) -> None:
        """Every surface names this reason, at one moment."""
        seen: dict[str, str] = {}

        async def alike() -> bool:
            nonlocal seen
            seen = await self.told(queue=queue)
            return set(seen.values()) == {reason}

        try:
            await wait_until(alike, timeout_s, what=reason, every_s=0.2)
        except BaseException:
            print(f"wanted {reason}: {seen}")
            raise
        sentence = str(self.one.status()["explanation"])
        closed = not self.one.status()["open"]
        if closed and self.one.status()["reason"] == reason:
            assert sentence.startswith(f"Nothing is sent: {reason}, ")
        print(f"{time.monotonic():.1f} {reason}: {sentence}")


@asynccontextmanager
async def day(one: Dispatcher, prometheus: Prometheus, browser: Browser) -> AsyncIterator[Day]:
    url = f"http://127.0.0.1:{one.admin_port}"
    listener = Listener(url)
    async with browser.page() as page:
        await page.open(url)
        with listener.following():
            yield Day(one, prometheus, page, listener)


def learned(one: Dispatcher, world: World) -> bool:
    world.control(realtime=(world.observed()["pool"]["realtime"]["now"] + 5) % 17)
    return bool(one.status()["picker_max_concurrency"] == 16)


def submit(stage: Stage, count: int, **more: Any) -> list[str]:
    return stage.producer.submit(count, b'{"prompt":"hi","max_tokens":8}', created=int(time.time()), **more)


def is_busy(world: World) -> bool:
    return world.in_flight() >= 20


async def trouble(stage: Stage, world: World, cluster: Cluster, today: Day, prometheus: Prometheus) -> None:
    """What else can befall requests, replicas and the watch, until Prometheus has seen all of it."""
    one = today.one
    poison = b'{"prompt":"hi","sim":{"kind":"status","status":500,"body":"boom"}}'
    deadline = int(time.time()) + 3600
    stage.producer.put({encode_member(f"poison-{n}", poison, deadline): 0.0 for n in range(5)})
    one.reconfigure(retry={"max_attempts": 2, "base_s": 3}, budget={"reserve": 0.1})
    prometheus.wait_for("batch_dispatcher_delayed > 0")
    prometheus.wait_for("batch_dispatcher_dead > 0")

    # One stands still, another takes over, and is killed.
    two = stage.dispatcher(one.settings, KUBECONFIG=str(cluster.server.kubeconfig))
    prometheus.scrape({"a": one.admin_port, "b": two.admin_port})
    prometheus.wait_for("batch_dispatcher_replicas == 2")
    world.control(seconds=4 * LONG_S)  # they still run when it wakes
    began = time.monotonic()
    wait_until_sync(lambda: time.monotonic() > began + LONG_S and is_busy(world), 30, what="long ones to run")
    one.send(signal.SIGSTOP)
    prometheus.wait_for('batch_dispatcher_reclaims_total{instance="b"} > 0')
    one.send(signal.SIGCONT)
    prometheus.wait_for('batch_dispatcher_leases_lost_total{instance="a"} > 0')
    today.look()
    one.reconfigure(budget={"max_in_flight": 4})  # so that the other finds room as soon as the long ones end
    wait_until_sync(lambda: two.status()["running"] > 0, 60, what="the other to hold work")
    two.kill()
    one.reconfigure(budget={"max_in_flight": None})
    prometheus.wait_for('batch_dispatcher_reclaims_total{instance="a"} > 0')
    prometheus.scrape({"a": one.admin_port})

    # More than can be done in time, and some that are late before their turn comes.
    world.control(seconds=0.5)
    submit(stage, 1500, deadline_s=12)
    prometheus.wait_for("batch_dispatcher_deadline_at_risk > 0")
    await today.run_batch("pause")
    submit(stage, 50, deadline_s=2)
    prometheus.wait_for("batch_dispatcher_expired_total > 0")
    await today.run_batch("resume")

    cluster.do(lambda server: setattr(server, "tokens", set()))
    cluster.do(lambda server: server.cut())
    prometheus.wait_for("batch_dispatcher_watch_failing == 1 and batch_dispatcher_watch_stale_seconds > 0")
    today.look()
    cluster.do(lambda server: setattr(server, "tokens", {"t0"}))
    cluster.do(lambda server: server.put(PODS, pod("p2")))
    prometheus.wait_for("batch_dispatcher_watch_endpoints == 3")
    for name in ("p1", "p2"):
        cluster.do(lambda server, name=name: server.delete(PODS, name))  # type: ignore[misc]
    prometheus.wait_for('batch_dispatcher_max_sys_source{source="watch"} == 1')
    cluster.do(lambda server: server.put(PODS, pod("p1")))
    one.reconfigure(signals={"use": "requests"})
    prometheus.wait_for('batch_dispatcher_signal{signal="requests"} == 1')
    one.reconfigure(signals={"use": "saturation"})
    submit(stage, 600)


@pytest.mark.first
@pytest.mark.timeout(400)
async def test_every_surface_names_one_reason_through_a_day(
    own_stage: Stage, cluster: Cluster, browser: Browser, tmp_path: Path
) -> None:
    stage = own_stage
    cluster.do(lambda server: server.delete(PODS, "p2"))  # two pods, as the picker has them
    world = stage.world(slots=32, endpoints=2, seconds=0.3, realtime_seconds=0.2)
    base = merged(
        stage.settings(world, max_sys=None),
        {"signals": {"interval_s": 0.3, "use": "saturation"}, "retry": {"max_s": 3}},
    )
    (tmp_path / "prometheus").mkdir()
    picker = {
        "job_name": "picker",
        "scrape_interval": "20s",  # one that finds the metrics gone is made good within a minute
        "static_configs": [{"targets": [world.metrics.removeprefix("http://").removesuffix("/metrics")]}],
    }
    one = stage.dispatcher(base, KUBECONFIG=str(cluster.server.kubeconfig))
    with Prometheus(tmp_path / "prometheus", scrape_s=0.5, hurry=100, also=[picker]) as prometheus:
        prometheus.scrape({"a": one.admin_port})
        async with day(one, prometheus, browser) as today:
            await today.says("idle")

            # It learns what the picker counts with, from pages with more and less on them.
            submit(stage, 300)
            wait_until_sync(lambda: learned(one, world), 60, what="maxConcurrency", every_s=0.1)
            world.control(realtime=4)

            # Full: more work than slack.
            world.control(seconds=LONG_S)
            submit(stage, 900)
            await today.says("full")

            # Saturated: realtime grows while ours still run. No room: it takes all but the reserve.
            world.control(realtime=24)
            await today.says("saturated")
            world.control(realtime=40)
            await today.says("no-room")
            world.control(realtime=4)
            await today.says("full")

            # The metrics: gone, and back.
            world.control(metrics="gone")
            await today.says("unreadable")
            today.look()
            world.control(metrics="ok")
            await today.says("full")

            # Too old: through a Prometheus that scrapes the picker every 20 s.
            url = f"http://127.0.0.1:{prometheus.port}"
            one.reconfigure(signals={"source": "prometheus", "max_age_s": 3, "prometheus": {"url": url}})
            await today.says("stale", timeout_s=60)
            one.write("budget: {reserve: 2}")
            prometheus.wait_for("batch_dispatcher_config_refused == 1")
            one.reconfigure(signals={"source": "epp", "max_age_s": None})
            await today.says("full")
            assert one.status()["config_problem"] is None

            # A storm of 429s, with a Retry-After.
            world.control(gateway={"answer": REFUSAL})
            await today.says("backpressure")
            today.look()
            world.control(gateway=None)
            await today.says("full")

            # No gateway.
            world.control(gateway={"listener": "refuse"})
            await today.says("gateway-unreachable")
            world.control(gateway=None)
            await today.says("full")

            # No endpoint.
            world.control(endpoints=0)
            await today.says("no-endpoints")
            world.control(endpoints=2)
            await today.says("full")

            # No Redis.
            stage.server.kill()
            await today.says("queue-unreachable", queue=False)
            stage.server.start()
            await today.says("full")

            # An operator's hand.
            await today.run_batch("pause")
            await today.says("paused")
            await today.run_batch("resume")
            await today.says("full")

            # What else can happen to requests, replicas, the watch.
            await trouble(stage, world, cluster, today, prometheus)
            assert prometheus.rule_errors() == {}
            wait_until_sync(today.has_seen_all, 60, what="data in every panel", every_s=0.5)
            moved = moved_of_catalogue(prometheus, "a")

            # The end: what runs may finish, and until then every surface says so.
            world.control(seconds=LONG_S)
            ending_at = time.monotonic() + 2
            wait_until_sync(
                lambda: time.monotonic() > ending_at and is_busy(world), 10, what="long ones to run"
            )
            one.send(signal.SIGTERM)
            await today.says("draining")
        assert one.child.wait(60) == 0
    assert today.wrong == []
    still = {name for name, has in moved.items() if not has}
    assert {name for name in still if not name.startswith(OF_NO_DAY)} == UNMOVED
