"""All surfaces show the same reason while it changes, and a real Prometheus scrapes the dispatcher.

At each step the gauge (as scraped by Prometheus), the log, /status, `explain`, /events and the page in a
browser must show the same reason. At the end every panel and rule must return data, and every series must
have changed.
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
from dispatcher.requests.request import encode_member
from tests.browser import Browser, Page
from tests.monitoring.prometheus import Prometheus, find_changed_series
from tests.scenarios.cluster import Cluster
from tests.scenarios.processes import POOL, Dispatcher, Stage, World, merge_settings
from tests.signals.apiserver import PODS, pod
from tests.support import wait_until, wait_until_sync

pytestmark = pytest.mark.slow

LONG_REQUEST_S = 8.0
"""Duration of requests that keep the pool full while all surfaces are read."""
REFUSAL = {"kind": "status", "status": 429, "reason": "rejected-saturated", "retry_after": "8"}
CONSTANT_SERIES = {"batch_dispatcher_build_info", "batch_dispatcher_observing"}
"""Series that do not change while a process runs."""
UNUSED_PREFIXES = (
    "batch_dispatcher_merge",
    "batch_dispatcher_sequence",
    "batch_dispatcher_model_",
    "batch_dispatcher_warm_",
    "batch_dispatcher_picker_wait_",
    "batch_dispatcher_slice",
    "batch_dispatcher_revoked_slices",
    "batch_dispatcher_started",
    "batch_dispatcher_rule_timeouts",
    "batch_dispatcher_kv_",
    "batch_dispatcher_token_",
)
"""Prefixes of series that do not change in this test, which has no merged calls, sequences, watched models
or token budget.

tests/monitoring covers them. The stand-in does not report the wait in the picker.
"""


class EventListener:
    """Client of /events in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.status: dict[str, Any] = {}
        self.reasons: list[str] = []
        """Reasons of the gate events in their order."""
        self._stopped = threading.Event()

    @contextmanager
    def follow(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(10)

    def _follow(self) -> None:
        event_name = ""
        with httpx.Client(timeout=60.0) as http, http.stream("GET", f"{self._url}/events") as answer:
            try:
                for line in answer.iter_lines():
                    if self._stopped.is_set():
                        return
                    if line.startswith("event:"):
                        event_name = line.partition(":")[2].strip()
                    elif line.startswith("data:"):
                        self._handle_message(event_name, json.loads(line.partition(":")[2]))
            except httpx.TransportError:
                return  # the dispatcher has ended

    def _handle_message(self, event_name: str, message: Any) -> None:
        if event_name == "status":
            self.status = message
        events = [message] if event_name == "event" else message["events"] if event_name == "history" else []
        self.reasons += [each["fields"]["reason"] for each in events if each["event"] == "gate"]


class Surfaces:
    """All surfaces of one dispatcher."""

    def __init__(
        self, dispatcher: Dispatcher, prometheus: Prometheus, page: Page, listener: EventListener
    ) -> None:
        self.dispatcher = dispatcher
        self._prometheus = prometheus
        self._page = page
        self._listener = listener
        settings = merge_settings(dispatcher.settings, {"admin": {"port": dispatcher.admin_port}})
        self.empty: set[tuple[str, str]] | None = None
        """Expressions that have never returned data; `None` before the first check."""
        self.failures: list[str] = []
        self.config = dispatcher.folder / "client.yaml"
        self.config.write_text(json.dumps(settings))

    async def run_command(self, command: str, *options: str) -> str:
        """Run a command, which has its own event loop, and return its output."""
        arguments = [command, "--config", str(self.config), *options]
        completed = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert completed.exit_code == 0, completed.output
        return completed.stdout

    async def read_reasons(self, *, queue: bool = True) -> dict[str, str]:
        """Return the reason that each surface shows."""
        gauge = self._prometheus.query("batch_dispatcher_gate == 1")
        reasons = {
            "status": str(self.dispatcher.status()["reason"]),
            "log": str(self.dispatcher.events("gate")[-1]["reason"]),
            "events": self._listener.reasons[-1] if self._listener.reasons else "",
            "stream": str(self._listener.status.get("reason")),
            "gauge": gauge[0].labels["reason"] if gauge else "",
            "page": (await self._page.get_text("#badge")).partition(": ")[2].removesuffix("."),
        }
        if queue:
            reasons["explain"] = json.loads(await self.run_command("explain", "--json"))["dispatcher"][
                "reason"
            ]
        return reasons

    def check_expressions(self) -> None:
        """Evaluate every expression. Those about rare events return data at some moments only."""
        findings = self._prometheus.check_queries(pool=POOL, namespace="batch", instance="a")
        empty = {(each.query.location, each.query.expr) for each in findings if each.problem == "no data"}
        self.empty = empty if self.empty is None else self.empty & empty
        self.failures += [str(each) for each in findings if each.problem != "no data"]

    def has_data_everywhere(self) -> bool:
        """Evaluate every expression.

        Return whether each that this test can change has returned data by now.
        """
        self.check_expressions()
        missing = {each for each in self.empty or () if not any(name in each[1] for name in UNUSED_PREFIXES)}
        if missing:
            print(f"no data yet: {sorted(where for where, _ in missing)}")
        return not missing

    async def wait_for_reason(self, reason: str, *, queue: bool = True, timeout_s: float = 30.0) -> None:
        """Wait until all surfaces show this reason at the same time."""
        reasons: dict[str, str] = {}

        async def all_agree() -> bool:
            nonlocal reasons
            reasons = {"status": str(self.dispatcher.status()["reason"])}
            if reasons["status"] != reason:
                return False  # reading all others would only cost CPU
            reasons = await self.read_reasons(queue=queue)
            return set(reasons.values()) == {reason}

        try:
            await wait_until(all_agree, timeout_s, what=reason, every_s=0.2)
        except BaseException:
            print(f"expected {reason}: {reasons}")
            raise
        sentence = str(self.dispatcher.status()["explanation"])
        closed = not self.dispatcher.status()["open"]
        if closed and self.dispatcher.status()["reason"] == reason:
            assert sentence.startswith(f"Nothing is sent: {reason}, ")
        print(f"{time.monotonic():.1f} {reason}: {sentence}")


@asynccontextmanager
async def open_surfaces(
    dispatcher: Dispatcher, prometheus: Prometheus, browser: Browser
) -> AsyncIterator[Surfaces]:
    url = f"http://127.0.0.1:{dispatcher.admin_port}"
    listener = EventListener(url)
    async with browser.page() as page:
        await page.open(url)
        with listener.follow():
            yield Surfaces(dispatcher, prometheus, page, listener)


def is_capacity_learned(dispatcher: Dispatcher, world: World) -> bool:
    world.control(realtime=(world.observed()["pool"]["realtime"]["now"] + 5) % 17)
    return bool(dispatcher.status()["picker_max_concurrency"] == 16)


def submit(stage: Stage, count: int, **options: Any) -> list[str]:
    return stage.producer.submit(
        count, b'{"prompt":"hi","max_tokens":8}', created=int(time.time()), **options
    )


def is_pool_busy(world: World) -> bool:
    return world.in_flight() >= 20


async def cause_faults(
    stage: Stage, world: World, cluster: Cluster, surfaces: Surfaces, prometheus: Prometheus
) -> None:
    """Cause faults of requests, replicas and the watch, and wait until Prometheus has scraped each."""
    dispatcher = surfaces.dispatcher
    poison = b'{"prompt":"hi","sim":{"kind":"status","status":500,"body":"boom"}}'
    deadline = int(time.time()) + 3600
    stage.producer.add_members({encode_member(f"poison-{n}", poison, deadline): 0.0 for n in range(5)})
    dispatcher.reconfigure(retry={"max_attempts": 2, "base_s": 3}, budget={"reserve": 0.1})
    prometheus.wait_for("batch_dispatcher_delayed > 0")
    prometheus.wait_for("batch_dispatcher_dead > 0")

    # One replica is stopped; the other takes over and is killed.
    other = stage.dispatcher(dispatcher.settings, KUBECONFIG=str(cluster.server.kubeconfig))
    prometheus.scrape({"a": dispatcher.admin_port, "b": other.admin_port})
    prometheus.wait_for("batch_dispatcher_replicas == 2")
    world.control(seconds=4 * LONG_REQUEST_S)  # they still run when the stopped replica continues
    started_at = time.monotonic()
    wait_until_sync(
        lambda: time.monotonic() > started_at + LONG_REQUEST_S and is_pool_busy(world),
        30,
        what="long requests to run",
    )
    dispatcher.send_signal(signal.SIGSTOP)
    prometheus.wait_for('batch_dispatcher_reclaims_total{instance="b"} > 0')
    dispatcher.send_signal(signal.SIGCONT)
    prometheus.wait_for('batch_dispatcher_leases_lost_total{instance="a"} > 0')
    surfaces.check_expressions()
    dispatcher.reconfigure(
        budget={"max_in_flight": 4}
    )  # so the other replica gets room as soon as the long requests end
    wait_until_sync(lambda: other.status()["running"] > 0, 60, what="the other replica to run requests")
    other.kill()
    dispatcher.reconfigure(budget={"max_in_flight": None})
    prometheus.wait_for('batch_dispatcher_reclaims_total{instance="a"} > 0')
    prometheus.scrape({"a": dispatcher.admin_port})

    # More requests than can be answered in time, and some whose deadline passes while they wait.
    world.control(seconds=0.5)
    submit(stage, 1500, deadline_s=12)
    prometheus.wait_for("batch_dispatcher_deadline_at_risk > 0")
    await surfaces.run_command("pause")
    submit(stage, 50, deadline_s=2)
    prometheus.wait_for("batch_dispatcher_expired_total > 0")
    await surfaces.run_command("resume")

    cluster.run_on_server(lambda server: setattr(server, "tokens", set()))
    cluster.run_on_server(lambda server: server.cut_watches())
    prometheus.wait_for("batch_dispatcher_watch_failing == 1 and batch_dispatcher_watch_stale_seconds > 0")
    surfaces.check_expressions()
    cluster.run_on_server(lambda server: setattr(server, "tokens", {"t0"}))
    cluster.run_on_server(lambda server: server.put(PODS, pod("p2")))
    prometheus.wait_for("batch_dispatcher_watch_endpoints == 3")
    for name in ("p1", "p2"):
        cluster.run_on_server(lambda server, name=name: server.delete(PODS, name))  # type: ignore[misc]
    prometheus.wait_for('batch_dispatcher_max_sys_source{source="watch"} == 1')
    cluster.run_on_server(lambda server: server.put(PODS, pod("p1")))
    dispatcher.reconfigure(signals={"use": "requests"})
    prometheus.wait_for('batch_dispatcher_signal{signal="requests"} == 1')
    dispatcher.reconfigure(signals={"use": "saturation"})
    submit(stage, 600)


@pytest.mark.first
@pytest.mark.timeout(400)
async def test_all_surfaces_show_the_same_reason_while_it_changes(
    own_stage: Stage, cluster: Cluster, browser: Browser, tmp_path: Path
) -> None:
    stage = own_stage
    cluster.run_on_server(
        lambda server: server.delete(PODS, "p2")
    )  # two pods, as many endpoints as the picker has
    world = stage.world(slots=32, endpoints=2, seconds=0.3, realtime_seconds=0.2)
    settings = merge_settings(
        stage.settings(world, max_sys=None),
        {"signals": {"interval_s": 0.3, "use": "saturation"}, "retry": {"max_s": 3}},
    )
    (tmp_path / "prometheus").mkdir()
    picker = {
        "job_name": "picker",
        "scrape_interval": "20s",  # a scrape during the outage is replaced within a minute
        "static_configs": [{"targets": [world.metrics.removeprefix("http://").removesuffix("/metrics")]}],
    }
    dispatcher = stage.dispatcher(settings, KUBECONFIG=str(cluster.server.kubeconfig))
    with Prometheus(
        tmp_path / "prometheus", scrape_s=0.5, speedup=100, extra_scrape_configs=[picker]
    ) as prometheus:
        prometheus.scrape({"a": dispatcher.admin_port})
        async with open_surfaces(dispatcher, prometheus, browser) as surfaces:
            await surfaces.wait_for_reason("idle")

            # The capacity that the picker counts with is learned from pages with different loads.
            submit(stage, 300)
            wait_until_sync(
                lambda: is_capacity_learned(dispatcher, world), 60, what="maxConcurrency", every_s=0.1
            )
            world.control(realtime=4)

            # Full: more requests than idle capacity.
            world.control(seconds=LONG_REQUEST_S)
            submit(stage, 900)
            await surfaces.wait_for_reason("full")

            # Saturated: realtime load grows while batch requests run. No room: it takes all but the reserve.
            world.control(realtime=24)
            await surfaces.wait_for_reason("saturated")
            world.control(realtime=40)
            await surfaces.wait_for_reason("no-room")
            world.control(realtime=4)
            await surfaces.wait_for_reason("full")

            # The metrics page fails and recovers.
            world.control(metrics="gone")
            await surfaces.wait_for_reason("unreadable")
            surfaces.check_expressions()
            world.control(metrics="ok")
            await surfaces.wait_for_reason("full")

            # Stale: readings come from a Prometheus that scrapes the picker every 20 s.
            url = f"http://127.0.0.1:{prometheus.port}"
            dispatcher.reconfigure(
                signals={"source": "prometheus", "max_age_s": 3, "prometheus": {"url": url}}
            )
            await surfaces.wait_for_reason("stale", timeout_s=60)
            dispatcher.write_config("budget: {reserve: 2}")
            prometheus.wait_for("batch_dispatcher_config_refused == 1")
            dispatcher.reconfigure(signals={"source": "epp", "max_age_s": None})
            await surfaces.wait_for_reason("full")
            assert dispatcher.status()["config_problem"] is None

            # All requests are refused with 429 and Retry-After.
            world.control(gateway={"answer": REFUSAL})
            await surfaces.wait_for_reason("backpressure")
            surfaces.check_expressions()
            world.control(gateway=None)
            await surfaces.wait_for_reason("full")

            # The gateway refuses connections.
            world.control(gateway={"listener": "refuse"})
            await surfaces.wait_for_reason("gateway-unreachable")
            world.control(gateway=None)
            await surfaces.wait_for_reason("full")

            # The pool has no endpoint.
            world.control(endpoints=0)
            await surfaces.wait_for_reason("no-endpoints")
            world.control(endpoints=2)
            await surfaces.wait_for_reason("full")

            # Redis is down.
            stage.server.kill()
            await surfaces.wait_for_reason("queue-unreachable", queue=False)
            stage.server.start()
            await surfaces.wait_for_reason("full")

            # An operator pauses the queue.
            await surfaces.run_command("pause")
            await surfaces.wait_for_reason("paused")
            await surfaces.run_command("resume")
            await surfaces.wait_for_reason("full")

            # Other faults of requests, replicas and the watch.
            await cause_faults(stage, world, cluster, surfaces, prometheus)
            assert prometheus.read_rule_errors() == {}
            wait_until_sync(surfaces.has_data_everywhere, 60, what="data in every panel", every_s=0.5)
            changed = find_changed_series(prometheus, "a")

            # Drain: running requests may finish, and until then all surfaces show the drain.
            world.control(seconds=LONG_REQUEST_S)
            ending_at = time.monotonic() + 2
            wait_until_sync(
                lambda: time.monotonic() > ending_at and is_pool_busy(world), 10, what="long requests to run"
            )
            dispatcher.send_signal(signal.SIGTERM)
            await surfaces.wait_for_reason("draining")
        assert dispatcher.child.wait(60) == 0
    assert surfaces.failures == []
    unchanged = {name for name, has in changed.items() if not has}
    assert {name for name in unchanged if not name.startswith(UNUSED_PREFIXES)} == CONSTANT_SERIES
