"""One process put together: what a reload changes, what probes are told, how the parts hear of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dispatcher.app.service import MAX_TURN_AGE_S, Service, _Reloader
from dispatcher.core.limit.budget import Reading, Reason, Signal
from dispatcher.forward import HttpGateway
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import QueueCounts
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.settings import Settings
from dispatcher.settings.load import ReloadRejection
from dispatcher.settings.load import parse_settings as parse_settings
from dispatcher.signals.kubernetes.capacity import NO_KUBERNETES, Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, divert_events

START_S = 2.0
CONFIG = """
pool: {name: qwen}
gateway: {url: "http://gateway:8080", headers: {host: pool.example}}
budget: {max_sys: 64, reserve: 0.05}
"""


class GatewayOfNobody:
    """What of a gateway a service touches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.options: list[object] = []
        self.subset_header = ""

    def resize_connection_pool(self, max_requests: int) -> None:
        self.sizes.append(max_requests)

    def reconfigure(self, options: object, *, subset_header: str) -> None:
        self.options.append(options)
        self.subset_header = subset_header


class Bench:
    """A service that is built and not started, on a queue in memory."""

    def __init__(self, text: str = CONFIG) -> None:
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.gateway = GatewayOfNobody()
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        self.service = Service(
            settings(text),
            text,
            cast(RedisQueue, MemoryQueue(store, "a")),  # as the port has it: all that a service uses of it
            cast(RedisQueueAdmin, store),
            cast(HttpGateway, self.gateway),
            observe=False,
        )

    def polled(self, **changes: Any) -> None:
        """The pool was read now: half full, of 64."""
        now = asyncio.get_running_loop().time()
        reading = Reading(Signal.REQUESTS, now, now, 0.5, 0.0, 64)
        poll = SourcePoll(completed_at=now, source="epp", signals=(Signal.REQUESTS,), readings=(reading,))
        self.service._handle_poll(replace(poll, **changes))

    async def limit(self) -> int:
        await asyncio.sleep(0.1)  # a reading counts when what was on the way has arrived
        return self.service.dispatcher.get_allowance().limit


def settings(text: str) -> Settings:
    found = parse_settings(text, {})
    assert isinstance(found, Settings)
    return found


def at_bench(check: Callable[[Bench], Awaitable[None]], text: str = CONFIG) -> None:
    async def main() -> None:
        bench = Bench(text)
        with divert_events(lambda event, fields: bench.events.append((event, fields))):
            await check(bench)

    run_in_virtual_time(main(), start=START_S)


def test_what_became_of_warm_ups_is_counted() -> None:
    async def check(bench: Bench) -> None:
        bench.service.dispatcher.warm_ups.result_counts["errors"] = 2
        bench.service.get_status()
        counted = [
            bench.service.metrics.get_value(series.WARM_UPS, name) for name in ("warm", "errors", "retry")
        ]
        assert counted == [0, 2, 0]

    at_bench(check)


# A changed configuration.


def test_changed_settings_reach_each_part() -> None:
    async def check(bench: Bench) -> None:
        service = bench.service
        bench.polled()
        assert await bench.limit() == 28
        text = CONFIG.replace("0.05", "0.25").replace("pool.example", "other.example")
        more = "retry: {max_attempts: 2}\nqueue: {lease_s: 60}\nserving: {subset_header: x-subset}\n"
        changed = settings(text + more)
        service.apply_settings(changed, text)
        assert await bench.limit() == 16, "for the reading at hand, too"
        assert service.dispatcher._options.retry.max_attempts == 2
        assert service.dispatcher._options.lease_s == 60
        assert bench.gateway.options == [changed.gateway]
        assert bench.gateway.subset_header == "x-subset"
        assert service.config_generation == 2
        assert service.metrics.get_value(series.CONFIG_RELOADS, "applied") == 1
        assert service.get_status().process.config_generation == 2

    at_bench(check)


def test_a_subset_header_that_alone_has_changed_reaches_the_gateway() -> None:
    async def check(bench: Bench) -> None:
        text = CONFIG + "serving: {subset_header: x-subset}\n"
        bench.service.apply_settings(settings(text), text)
        assert bench.gateway.subset_header == "x-subset"
        bench.service.apply_settings(settings(text + "retry: {max_attempts: 2}\n"), text)
        assert len(bench.gateway.options) == 1, "it is told of no change that is none of its"

    at_bench(check)


def test_model_servers_that_are_named_end_the_watch_of_a_pool_and_the_picker_begins_it_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are in no InferencePool, which the watch would find missing, and close the gate."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    servers = CONFIG + "signals: {vllm: {urls: [http://a:8000]}}\n"

    async def check(bench: Bench) -> None:
        service = bench.service

        def awaits_rewrites() -> bool:
            return not service.model_watch._rewrites.is_settled

        assert awaits_rewrites()
        watching = asyncio.create_task(service._run_watch())
        await asyncio.sleep(1.0)
        assert service._known_endpoints.problems, "there is no such file"
        service._handle_endpoints(Endpoints(ready=0))
        service.apply_settings(settings(servers), servers)
        await asyncio.sleep(1.0)
        assert service._known_endpoints == NO_KUBERNETES
        assert not awaits_rewrites(), "which are of a pool, too"
        other = servers.replace("a:8000", "b:8000")
        watch = service.watch
        service.apply_settings(settings(other), other)
        assert service.watch is watch
        service.apply_settings(settings(CONFIG), CONFIG)
        assert service._known_endpoints == Endpoints(), "nothing is known yet"
        assert awaits_rewrites()
        await asyncio.sleep(1.0)
        assert service._known_endpoints.problems
        watching.cancel()
        await asyncio.wait([watching])

    at_bench(check)


def test_a_warmup_file_that_cannot_be_used_refuses_the_configuration_and_changes_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text("{}")
    text = CONFIG.replace("0.05", "0.25") + f"models: [{{name: qwen, warmup: {file}}}]\n"

    async def check(bench: Bench) -> None:
        before = bench.service.settings
        with pytest.raises(OSError, match=r"models\[0\]\.warmup: .*line 1: body: is missing"):
            bench.service.apply_settings(settings(text), text)
        assert bench.service.settings is before
        assert bench.service.config_generation == 1
        file.write_text('{"body": {"model": "qwen"}}')
        bench.service.apply_settings(settings(text), text)
        assert bench.service.config_generation == 2
        assert len(bench.service.warmups.requests_for("qwen")[0]) == 1

    at_bench(check)


def test_gateway_is_left_alone_where_nothing_of_it_changed() -> None:
    async def check(bench: Bench) -> None:
        text = CONFIG.replace("0.05", "0.25")
        bench.service.apply_settings(settings(text), text)
        assert bench.gateway.options == []

    at_bench(check)


def test_configuration_that_names_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    async def check(bench: Bench) -> None:
        service = bench.service
        before = service.settings, service.config_generation, service._config_hash
        ca = tmp_path / "missing.pem"
        source = f'signals: {{epp: {{tls: {{ca_file: "{ca}"}}}}}}\n'
        with pytest.raises(OSError, match="No such file"):
            service.apply_settings(settings(CONFIG + source), CONFIG + source)
        assert (service.settings, service.config_generation, service._config_hash) == before
        assert service.metrics.get_value(series.CONFIG_RELOADS, "applied") == 0

    at_bench(check)


def test_refused_configuration_is_told_until_a_good_one_comes() -> None:
    async def check(bench: Bench) -> None:
        service = bench.service
        service.reject_settings(ReloadRejection(("config.yaml: budget.reserv: unknown key",)))
        assert service.get_status().process.config_problem == "config.yaml: budget.reserv: unknown key"
        assert service.metrics.get_value(series.CONFIG_RELOADS, "refused") == 1
        service.apply_settings(settings(CONFIG), CONFIG)
        assert service.get_status().process.config_problem is None

    at_bench(check)


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (CONFIG.replace("0.05", "0.1"), Event.CONFIG_RELOADED),
        (CONFIG.replace("reserve", "reserv"), Event.CONFIG_REFUSED),
        (CONFIG.replace("qwen", "llama"), Event.CONFIG_REFUSED),
        ("{", Event.CONFIG_REFUSED),
        (CONFIG + "signals: {epp: {tls: {ca_file: /no/such.pem}}}\n", Event.CONFIG_REFUSED),
    ],
)
def test_changed_file_is_taken_or_refused_with_the_reason(tmp_path: Path, text: str, event: Event) -> None:
    async def check(bench: Bench) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        _Reloader(bench.service, CONFIG, path, {}).reload_now()
        ((told, fields),) = [each for each in bench.events if each[0].event_name.startswith("config")]
        assert told is event
        assert bench.service.config_generation == (2 if event is Event.CONFIG_RELOADED else 1)
        if event is Event.CONFIG_REFUSED:
            assert all(reason.startswith("config.yaml") for reason in fields["reasons"])
            assert bench.service.config_problem == "; ".join(fields["reasons"])
            assert bench.service.settings.budget.reserve == 0.05

    at_bench(check)


# What the parts tell each other.


def test_what_a_poll_tells_is_counted_and_reaches_the_limiter_and_the_gateway() -> None:
    async def check(bench: Bench) -> None:
        bench.polled()
        assert await bench.limit() == 28
        assert bench.service.metrics.get_value(series.POLLS, "epp", "ok") == 1
        assert bench.gateway.sizes == [0], "before the reading could be acted upon"
        assert bench.service.get_status().signals.source == "epp"

    at_bench(check)


WITHOUT_MAX_SYS = CONFIG.replace("max_sys: 64, ", "")


@pytest.mark.parametrize(
    ("budget", "ready", "told", "bound"),
    [
        ("per_endpoint: 16, ", 2, {}, 32),
        ("per_endpoint: 16, ", 0, {}, 0),
        ("per_endpoint: 16, ", None, {}, None),
        ("", 2, {"per_endpoint": 8.0}, 16),
        ("", 2, {"picker_k": 10.0}, 20),
        ("", 2, {}, None),
        ("", 0, {}, 0),
    ],
)
def test_capacity_is_bounded_by_what_is_ready_and_known_of_an_endpoint(
    budget: str, ready: int | None, told: dict[str, float], bound: float | None
) -> None:
    async def check(bench: Bench) -> None:
        bounds: list[float | None] = []

        def capacity(max_requests: float | None, now: float) -> None:
            bounds.append(max_requests)

        bench.service.limiter.set_capacity_bound = capacity  # type: ignore[method-assign]
        bench.polled(**told)
        bench.service._handle_endpoints(Endpoints(ready=ready))
        assert bounds[-1] == bound

    at_bench(check, WITHOUT_MAX_SYS.replace("budget: {", f"budget: {{{budget}"))


def test_endpoints_that_went_count_before_the_next_reading() -> None:
    async def check(bench: Bench) -> None:
        bench.polled()
        assert await bench.limit() == 28
        bench.service.dispatcher._access.wake.clear()
        bench.service._handle_endpoints(Endpoints(ready=0))
        assert bench.service.dispatcher.get_allowance().reason is Reason.NO_ENDPOINTS
        assert bench.service.dispatcher._access.wake.is_set()

    at_bench(check, WITHOUT_MAX_SYS.replace("budget: {", "budget: {per_endpoint: 32, "))


def test_share_of_the_pool_that_is_ours_is_known_when_the_pool_is() -> None:
    async def check(bench: Bench) -> None:
        assert bench.service._compute_batch_share() is None
        bench.polled()
        await bench.limit()
        for key in range(16):
            bench.service.limiter.record_send(key, START_S)
        assert bench.service._compute_batch_share() == 0.25

    at_bench(check)


# What probes and people are told.


def test_ready_means_that_queue_and_pool_have_been_read() -> None:
    async def check(bench: Bench) -> None:
        service, view = bench.service, bench.service.dispatcher.view
        assert service._check_readiness() == "queue: not asked yet"
        view.counts = QueueCounts(0, 0, 0, 0)
        assert str(service._check_readiness()).startswith("no reading yet")
        bench.polled()
        await bench.limit()
        assert service._check_readiness() is None
        view.problem = "Redis refuses connections"
        assert service._check_readiness() == "queue: Redis refuses connections"

    at_bench(check)


def test_live_means_that_the_loop_turns() -> None:
    async def check(bench: Bench) -> None:
        bench.service.dispatcher.last_turn_at = START_S
        await asyncio.sleep(MAX_TURN_AGE_S - 0.1)
        assert bench.service._check_liveness() is None
        await asyncio.sleep(1.0)
        assert bench.service._check_liveness() == "the loop has not turned for 31 s"

    at_bench(check)


def test_first_signal_drains_and_the_second_stops_now() -> None:
    async def check(bench: Bench) -> None:
        times: list[float] = []
        drain = bench.service.dispatcher.drain

        def seen(within_s: float) -> None:
            times.append(within_s)
            drain(within_s)

        bench.service.dispatcher.drain = seen  # type: ignore[method-assign]
        bench.service.drain()
        bench.service.drain()
        assert times == [bench.service.settings.shutdown.drain_s, 0.0]
        assert [event for event, _ in bench.events] == [Event.DRAINING] * 2

    at_bench(check)


def test_integrals_over_time_are_on_the_page() -> None:
    async def check(bench: Bench) -> None:
        bench.polled()
        await bench.limit()
        bench.service.get_status()
        await asyncio.sleep(3.0)
        bench.service.get_status()
        seconds = {
            reason: bench.service.metrics.get_value(series.GATE_SECONDS, reason) for reason in series.REASONS
        }
        assert seconds["open"] == pytest.approx(3.0)
        assert sum(seconds.values()) == pytest.approx(3.0, abs=0.2)

    at_bench(check)
