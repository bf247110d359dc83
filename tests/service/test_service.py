"""The service as a whole: what a reload changes, answers to probes, and how the parts are connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, cast

import pytest

from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.versions import FamilyTerms
from dispatcher.features.models.warm_up_runner import WarmUpRunner
from dispatcher.features.models.watch import ModelWatch
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Reading, Reason, Signal
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.service.service import MAX_ROUND_AGE_S, WATCH_START_S, Service, _Reloader
from dispatcher.settings.load import ReloadRejection
from dispatcher.settings.load import parse_settings as parse_settings
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import NO_KUBERNETES, Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, divert_events
from tests.features.memory_queue import MemoryQueue, MemoryStore
from tests.kernel.scene import find_part

START_S = 2.0
CONFIG = """
pool: {name: qwen}
gateway: {url: "http://gateway:8080", headers: {host: pool.example}}
budget: {max_sys: 64, reserve: 0.05}
"""


class FakeGateway:
    """The methods of a gateway that a service uses."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.options: list[object] = []
        self.subset_header = ""
        self.reserved_headers: tuple[str, ...] = ()

    def resize_connection_pool(self, max_requests: int) -> None:
        self.sizes.append(max_requests)

    def reconfigure(self, options: object, *, subset_header: str, reserved_headers: tuple[str, ...]) -> None:
        self.options.append(options)
        self.subset_header, self.reserved_headers = subset_header, reserved_headers


class UnstartedService:
    """A service that is built and not started, with a queue in memory."""

    def __init__(self, text: str = CONFIG) -> None:
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.gateway = FakeGateway()
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        self.service = Service(
            parse(text),
            text,
            cast(RedisQueue, MemoryQueue(store, "a")),  # a service uses only the methods of the port
            cast(RedisQueueAdmin, store),
            cast(HttpGateway, self.gateway),
            observe=False,
        )

    def handle_poll(self, **changes: Any) -> None:
        """Handle a poll of now that shows a pool of 64 that is half full."""
        now = asyncio.get_running_loop().time()
        reading = Reading(Signal.REQUESTS, now, now, 0.5, 0.0, 64)
        poll = SourcePoll(completed_at=now, source="epp", signals=(Signal.REQUESTS,), readings=(reading,))
        self.service._handle_poll(replace(poll, **changes))

    async def read_limit(self) -> int:
        await asyncio.sleep(0.1)  # a reading counts once requests in transit have arrived
        return self.service.dispatcher.get_allowance().limit


def parse(text: str) -> Settings:
    found = parse_settings(text, {})
    assert isinstance(found, Settings)
    return found


def run_check(check: Callable[[UnstartedService], Awaitable[None]], text: str = CONFIG) -> None:
    async def main() -> None:
        unstarted = UnstartedService(text)
        with divert_events(lambda event, fields: unstarted.events.append((event, fields))):
            await check(unstarted)

    run_in_virtual_time(main(), start=START_S)


def test_results_of_warm_ups_are_counted() -> None:
    async def check(unstarted: UnstartedService) -> None:
        find_part(unstarted.service.dispatcher, WarmUpRunner).result_counts["errors"] = 2
        page = unstarted.service.metrics.render_page()[0].decode()
        assert 'batch_dispatcher_warm_ups_total{pool="qwen",result="errors"} 2.0' in page
        assert 'batch_dispatcher_warm_ups_total{pool="qwen",result="warm"} 0.0' in page

    run_check(check)


# Changes of the configuration


def test_changed_settings_reach_each_part() -> None:
    async def check(unstarted: UnstartedService) -> None:
        service = unstarted.service
        unstarted.handle_poll()
        assert await unstarted.read_limit() == 28
        text = CONFIG.replace("0.05", "0.25").replace("pool.example", "other.example")
        more = "retry: {max_attempts: 2}\nserving: {subset_header: x-subset}\n"
        changed = parse(text + more)
        service.apply_settings(changed, text)
        assert await unstarted.read_limit() == 16, "the change applies to the current reading"
        assert service.dispatcher.context.options.retry.max_attempts == 2
        assert unstarted.gateway.options == [changed.gateway]
        assert unstarted.gateway.subset_header == "x-subset"
        assert service.config_generation == 2
        assert service.metrics.get_value(series.CONFIG_RELOADS, "applied") == 1
        assert service.get_status().process.config_generation == 2

    run_check(check)


def test_changed_names_of_headers_reach_the_gateway() -> None:
    async def check(unstarted: UnstartedService) -> None:
        text = CONFIG + "serving: {subset_header: x-subset}\nsequences: {session_id_header: x-chat}\n"
        unstarted.service.apply_settings(parse(text), text)
        assert unstarted.gateway.subset_header == "x-subset"
        assert unstarted.gateway.reserved_headers == ("x-session-token", "x-chat")
        unstarted.service.apply_settings(parse(text + "retry: {max_attempts: 2}\n"), text)
        assert len(unstarted.gateway.options) == 1, "unrelated changes do not reach the gateway"

    run_check(check)


IN_CLUSTER = 'pool: {name: qwen}\ngateway: {url: "http://gateway"}'


@pytest.mark.parametrize(
    ("signals", "waits_s"),
    [
        ("", 0.3),
        ('signals: {epp: {urls: ["http://picker:9090"]}}', 0.0),
        ('signals: {source: prometheus, prometheus: {url: "http://prometheus"}}', 0.0),
    ],
)
def test_first_poll_waits_for_the_watch_if_only_the_watch_shows_the_picker(
    signals: str, waits_s: float
) -> None:
    async def check(unstarted: UnstartedService) -> None:
        service, started_at = unstarted.service, list[float]()

        async def record_start() -> None:
            started_at.append(asyncio.get_running_loop().time() - START_S)

        service.poller.run = record_start  # type: ignore[method-assign]
        task = asyncio.create_task(service._run_poller())
        await asyncio.sleep(0.1)
        service._handle_endpoints(Endpoints())
        await asyncio.sleep(0.2)
        service._handle_endpoints(Endpoints(epp_addresses=("10.0.0.1",), is_complete=True))
        await task
        assert started_at == [pytest.approx(waits_s)]

    run_check(check, f"{IN_CLUSTER}\n{signals}")


def test_first_poll_does_not_wait_long_for_a_watch_that_shows_nothing() -> None:
    async def check(unstarted: UnstartedService) -> None:
        started_at: list[float] = []

        async def record_start() -> None:
            started_at.append(asyncio.get_running_loop().time() - START_S)

        unstarted.service.poller.run = record_start  # type: ignore[method-assign]
        await unstarted.service._run_poller()
        assert started_at == [pytest.approx(WATCH_START_S)]

    run_check(check, IN_CLUSTER)


class RaiseOnce:
    """A task that raises an exception at its first start."""

    def __init__(self, run_again: Callable[[], Awaitable[None]]) -> None:
        self._run_again = run_again
        self.start_count = 0

    async def __call__(self) -> None:
        self.start_count += 1
        if self.start_count == 1:
            raise RuntimeError("not expected")
        await self._run_again()


async def run_past_exception(unstarted: UnstartedService, failing: RaiseOnce, task: str) -> None:
    """Run the service, and check that the task is started again."""
    running = asyncio.create_task(unstarted.service.run())
    await asyncio.sleep(5.0)
    assert not running.done(), running
    assert failing.start_count == 2
    assert task in {fields["where"] for event, fields in unstarted.events if event is Event.INTERNAL_ERROR}
    unstarted.service.dispatcher.drain(1.0)
    await running


@pytest.mark.parametrize(
    ("part", "method", "task"),
    [
        ("poller", "run", "signals"),
        ("watch", "run", "capacity"),
        ("loop_lag", "watch_loop", "loop-lag"),
    ],
)
def test_part_that_has_raised_an_exception_starts_again(part: str, method: str, task: str) -> None:
    async def check(unstarted: UnstartedService) -> None:
        owner = getattr(unstarted.service, part)
        failing = RaiseOnce(getattr(owner, method))
        setattr(owner, method, failing)
        await run_past_exception(unstarted, failing, task)

    run_check(check, f"{IN_CLUSTER}\nsignals: {{source: fixed}}\nbudget: {{max_in_flight: 4}}")


def test_task_of_a_feature_that_has_raised_an_exception_starts_again() -> None:
    async def check(unstarted: UnstartedService) -> None:
        context = unstarted.service.dispatcher.context
        failing = RaiseOnce(dict(context.hooks.tasks)["models"])
        context.hooks = replace(context.hooks, tasks=(("models", failing),))
        await run_past_exception(unstarted, failing, "models")

    run_check(check, f"{IN_CLUSTER}\nsignals: {{source: fixed}}\nbudget: {{max_in_flight: 4}}")


def test_unexpected_reply_to_a_shared_pool_identity_ends_nothing() -> None:
    async def check(unstarted: UnstartedService) -> None:
        service = unstarted.service

        async def reply_with_a_number(identity: bytes, valid_s: float) -> int:
            return 5

        service._queue.share_pool_identity = reply_with_a_number  # type: ignore[assignment, method-assign]
        running = asyncio.create_task(service.run())
        await asyncio.sleep(5.0)
        assert not running.done(), running
        assert (Event.INTERNAL_ERROR, "pool-sharing") in {
            (event, fields.get("where")) for event, fields in unstarted.events
        }
        service.dispatcher.drain(1.0)
        await running

    run_check(check, f"{IN_CLUSTER}\nsignals: {{source: fixed}}\nbudget: {{max_in_flight: 4}}")


def find_model_watch(service: Service) -> ModelWatch:
    (on_endpoints,) = service.dispatcher.context.hooks.on_endpoints
    return cast(ModelWatch, cast(MethodType, on_endpoints).__self__)


def test_endpoints_of_the_pool_are_asked_for_their_models() -> None:
    async def check(unstarted: UnstartedService) -> None:
        unstarted.service._handle_endpoints(Endpoints(addresses=("10.0.0.1:8000",)))
        assert find_model_watch(unstarted.service)._endpoints.addresses == ("10.0.0.1:8000",)

    run_check(check, IN_CLUSTER)


def test_pool_watch_ends_with_configured_model_servers_and_starts_again_without_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Configured model servers are in no InferencePool. A watch would not find the pool and would close the
    gate."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    servers = CONFIG + "signals: {vllm: {urls: [http://a:8000]}}\n"

    async def check(unstarted: UnstartedService) -> None:
        service = unstarted.service
        model_watch = find_model_watch(service)

        def is_waiting_for_rewrites() -> bool:
            return not model_watch._rewrites.is_settled

        assert is_waiting_for_rewrites()
        watching = asyncio.create_task(service._run_watch())
        await asyncio.sleep(1.0)
        assert service._known_endpoints.problems, "the kubeconfig does not exist"
        service._handle_endpoints(Endpoints(ready=0))
        service.apply_settings(parse(servers), servers)
        await asyncio.sleep(1.0)
        assert service._known_endpoints == NO_KUBERNETES
        assert not is_waiting_for_rewrites(), "rewrites belong to a pool, too"
        other = servers.replace("a:8000", "b:8000")
        watch = service.watch
        service.apply_settings(parse(other), other)
        assert service.watch is watch
        service.apply_settings(parse(CONFIG), CONFIG)
        assert service._known_endpoints == Endpoints(), "the new watch knows nothing yet"
        assert is_waiting_for_rewrites()
        await asyncio.sleep(1.0)
        assert service._known_endpoints.problems
        watching.cancel()
        await asyncio.wait([watching])

    run_check(check)


def test_invalid_warmup_file_rejects_the_configuration(
    tmp_path: Path,
) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text("{}")
    text = CONFIG.replace("0.05", "0.25") + f"models: [{{name: qwen, warmup: {file}}}]\n"

    async def check(unstarted: UnstartedService) -> None:
        before = unstarted.service.settings
        with pytest.raises(OSError, match=r"models\[0\]\.warmup: .*line 1: body: is missing"):
            unstarted.service.apply_settings(parse(text), text)
        assert unstarted.service.settings is before
        assert unstarted.service.config_generation == 1
        file.write_text('{"body": {"model": "qwen"}}')
        unstarted.service.apply_settings(parse(text), text)
        assert unstarted.service.config_generation == 2
        families.extend(unstarted.service.dispatcher.context.options.of(ModelOptions).families)

    families: list[FamilyTerms] = []
    run_check(check)
    (load_warmup,) = (each.load_warmup for each in families)

    async def count_requests() -> int:
        assert load_warmup is not None
        requests, _ = await load_warmup()
        return len(requests)

    assert asyncio.run(count_requests()) == 1


def test_gateway_is_not_reconfigured_without_a_change_of_its_settings() -> None:
    async def check(unstarted: UnstartedService) -> None:
        text = CONFIG.replace("0.05", "0.25")
        unstarted.service.apply_settings(parse(text), text)
        assert unstarted.gateway.options == []

    run_check(check)


def test_missing_ca_file_rejects_the_configuration(tmp_path: Path) -> None:
    async def check(unstarted: UnstartedService) -> None:
        service = unstarted.service
        before = service.settings, service.config_generation, service._config_hash
        ca = tmp_path / "missing.pem"
        source = f'signals: {{epp: {{tls: {{ca_file: "{ca}"}}}}}}\n'
        with pytest.raises(OSError, match="No such file"):
            service.apply_settings(parse(CONFIG + source), CONFIG + source)
        assert (service.settings, service.config_generation, service._config_hash) == before
        assert service.metrics.get_value(series.CONFIG_RELOADS, "applied") == 0

    run_check(check)


def test_rejected_configuration_is_shown_until_a_valid_one_is_applied() -> None:
    async def check(unstarted: UnstartedService) -> None:
        service = unstarted.service
        service.reject_settings(ReloadRejection(("config.yaml: budget.reserv: unknown key",)))
        assert service.get_status().process.config_problem == "config.yaml: budget.reserv: unknown key"
        assert service.metrics.get_value(series.CONFIG_RELOADS, "refused") == 1
        service.apply_settings(parse(CONFIG), CONFIG)
        assert service.get_status().process.config_problem is None

    run_check(check)


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
def test_changed_file_is_applied_or_rejected_with_the_reason(tmp_path: Path, text: str, event: Event) -> None:
    async def check(unstarted: UnstartedService) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        _Reloader(unstarted.service, CONFIG, path, {}).reload_now()
        ((emitted, fields),) = [each for each in unstarted.events if each[0].event_name.startswith("config")]
        assert emitted is event
        assert unstarted.service.config_generation == (2 if event is Event.CONFIG_RELOADED else 1)
        if event is Event.CONFIG_REFUSED:
            assert all(reason.startswith("config.yaml") for reason in fields["reasons"])
            assert unstarted.service.config_problem == "; ".join(fields["reasons"])
            assert unstarted.service.settings.budget.reserve == 0.05

    run_check(check)


def test_reload_that_raises_an_exception_is_rejected(tmp_path: Path) -> None:
    async def check(unstarted: UnstartedService) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.replace("0.05", "0.1"))
        del unstarted.service.watch
        _Reloader(unstarted.service, CONFIG, path, {}).reload_now()
        assert "AttributeError" in str(unstarted.service.config_problem)
        assert Event.INTERNAL_ERROR in [event for event, _ in unstarted.events]

    run_check(check)


# Connections between the parts


def test_poll_is_counted_and_reaches_limiter_and_gateway() -> None:
    async def check(unstarted: UnstartedService) -> None:
        unstarted.handle_poll()
        assert await unstarted.read_limit() == 28
        assert unstarted.service.metrics.get_value(series.POLLS, "epp", "ok") == 1
        assert unstarted.gateway.sizes == [0], "the reading does not count at once"
        assert unstarted.service.get_status().signals.source == "epp"

    run_check(check)


WITHOUT_MAX_SYS = CONFIG.replace("max_sys: 64, ", "")


@pytest.mark.parametrize(
    ("budget", "ready", "poll_fields", "expected_bound"),
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
def test_ready_endpoints_bound_the_capacity(
    budget: str, ready: int | None, poll_fields: dict[str, float], expected_bound: float | None
) -> None:
    async def check(unstarted: UnstartedService) -> None:
        bounds: list[float | None] = []

        def record_bound(max_requests: float | None, now: float) -> None:
            bounds.append(max_requests)

        unstarted.service.limiter.set_capacity_bound = record_bound  # type: ignore[method-assign]
        unstarted.handle_poll(**poll_fields)
        unstarted.service._handle_endpoints(Endpoints(ready=ready))
        assert bounds[-1] == expected_bound

    run_check(check, WITHOUT_MAX_SYS.replace("budget: {", f"budget: {{{budget}"))


def test_removed_endpoints_count_before_the_next_reading() -> None:
    async def check(unstarted: UnstartedService) -> None:
        unstarted.handle_poll()
        assert await unstarted.read_limit() == 28
        unstarted.service.dispatcher._access.wake.clear()
        unstarted.service._handle_endpoints(Endpoints(ready=0))
        assert unstarted.service.dispatcher.get_allowance().reason is Reason.NO_ENDPOINTS
        assert unstarted.service.dispatcher._access.wake.is_set()

    run_check(check, WITHOUT_MAX_SYS.replace("budget: {", "budget: {per_endpoint: 32, "))


def test_batch_share_is_known_once_the_pool_is_known() -> None:
    async def check(unstarted: UnstartedService) -> None:
        assert unstarted.service._compute_batch_share() is None
        unstarted.handle_poll()
        await unstarted.read_limit()
        for key in range(16):
            unstarted.service.limiter.record_send(key, START_S)
        assert unstarted.service._compute_batch_share() == 0.25

    run_check(check)


# Probes, shutdown and counters


def test_service_is_ready_once_queue_and_pool_have_been_read() -> None:
    async def check(unstarted: UnstartedService) -> None:
        service, view = unstarted.service, unstarted.service.dispatcher.view
        assert service._check_readiness() == "queue: not asked yet"
        view.counts = QueueCounts(0, 0, 0, 0)
        assert str(service._check_readiness()).startswith("no reading yet")
        unstarted.handle_poll()
        await unstarted.read_limit()
        assert service._check_readiness() is None
        view.problem = "Redis refuses connections"
        assert service._check_readiness() == "queue: Redis refuses connections"

    run_check(check)


def test_service_is_live_while_the_dispatch_loop_runs() -> None:
    async def check(unstarted: UnstartedService) -> None:
        unstarted.service.dispatcher.last_round_at = START_S
        await asyncio.sleep(MAX_ROUND_AGE_S - 0.1)
        assert unstarted.service._check_liveness() is None
        await asyncio.sleep(1.0)
        assert unstarted.service._check_liveness() == "the loop has not run for 31 s"

    run_check(check)


def test_first_signal_drains_and_the_second_stops_at_once() -> None:
    async def check(unstarted: UnstartedService) -> None:
        times: list[float] = []
        drain = unstarted.service.dispatcher.drain

        def record_drain(within_s: float) -> None:
            times.append(within_s)
            drain(within_s)

        unstarted.service.dispatcher.drain = record_drain  # type: ignore[method-assign]
        unstarted.service.drain()
        unstarted.service.drain()
        assert times == [unstarted.service.settings.shutdown.drain_s, 0.0]
        assert [event for event, _ in unstarted.events] == [Event.DRAINING] * 2

    run_check(check)


def test_seconds_of_each_gate_reason_are_counted() -> None:
    async def check(unstarted: UnstartedService) -> None:
        unstarted.handle_poll()
        await unstarted.read_limit()
        unstarted.service.get_status()
        await asyncio.sleep(3.0)
        unstarted.service.get_status()
        seconds = {
            reason: unstarted.service.metrics.get_value(series.GATE_SECONDS, reason)
            for reason in series.REASONS
        }
        assert seconds["open"] == pytest.approx(3.0)
        assert sum(seconds.values()) == pytest.approx(3.0, abs=0.2)

    run_check(check)
