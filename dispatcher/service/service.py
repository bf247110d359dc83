"""Composition root: builds the parts, starts them, and stops them in order.

    start   imports and TLS → queue → gateway → limiter and loop → signals → admin port
    stop    The loop drains first, while everything it needs still runs: signals, so that the gate stays
            right; the queue, for the last completions; the admin port, for probes and metrics. Then the rest.

SIGTERM and SIGINT drain; a second one stops at once and returns the leases. SIGHUP reads the configuration
again, as a change of the file does.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import hashlib
import platform
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from dispatcher import __version__
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.kernel import Dispatcher, Journal
from dispatcher.kernel.error_guard import start_task
from dispatcher.limit.budget import Reason
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.utilization import WorkState
from dispatcher.queue.embedded import embedded_valkey
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.owners import register_owner
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import QueueOptions, RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.service.admin import AdminServer, AdminViews
from dispatcher.service.loop_options import build_options
from dispatcher.service.pool_sharing import PoolSharing, get_pool_identity
from dispatcher.service.status_builder import build_status
from dispatcher.settings import effective
from dispatcher.settings.load import (
    ReloadRejection,
    config_directory,
    config_name,
    read_config,
    reload_settings,
)
from dispatcher.settings.model import Settings
from dispatcher.settings.watch import preload_watcher as prepare_watch
from dispatcher.settings.watch import watch_config
from dispatcher.settings.yaml_source import Problem
from dispatcher.signals.kubernetes import capacity
from dispatcher.signals.kubernetes.capacity import CapacityWatch, Endpoints
from dispatcher.signals.kubernetes.cluster import find_cluster_access
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.readings import list_possible_signals
from dispatcher.signals.sources import build_sources
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry import logs, otlp
from dispatcher.telemetry.events import Event, add_sink, emit
from dispatcher.telemetry.loop_lag import LoopLagWatch
from dispatcher.telemetry.metrics import PAGE_MAX_AGE_S, Metrics
from dispatcher.telemetry.status import ProcessStatus, Status

WATCH_START_S = 2.0
"""Longest time for which the first poll waits for the watch of the pool."""
MAX_ROUND_AGE_S = 30.0
"""Longest time since the last round of a live process. The loop runs each second; a call to Redis may delay a
round by a few seconds."""
MMAP_THRESHOLD_BYTES = 262_144
"""Size from which memory is returned to the system when it is freed."""
MAX_DESCRIPTORS = 1 << 20
"""Default limit of Linux for the file descriptors of one process."""
_M_MMAP_THRESHOLD = -3
"""Constant of malloc.h of glibc."""


def _get_seconds_since_boot() -> float:
    """Return the seconds since boot, including sleep if the system counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Service:
    """One dispatcher process for one pool."""

    def __init__(
        self,
        settings: Settings,
        text: str,
        queue: RedisQueue,
        queue_admin: RedisQueueAdmin,
        gateway: HttpGateway,
        *,
        observe: bool,
    ) -> None:
        self.settings = settings
        self.config_generation = 1
        self._config_hash = _hash_text(text)
        self.config_problem: str | None = None
        """Error of the newest configuration. `None` if it is in use."""
        self._observe = observe
        self._started_at = time.time()
        self._queue = queue
        self._queue_admin = queue_admin
        self._gateway = gateway
        self.metrics = Metrics(settings.pool.name, page_max_age_s=PAGE_MAX_AGE_S)
        self.journal = Journal(self.metrics)
        self._poll: SourcePoll | None = None
        self.limiter = Limiter(settings.limit_policy(), list_possible_signals(settings.signals.use))
        options = build_options(settings, observe=observe)
        self.dispatcher = Dispatcher(
            queue,
            gateway,
            self.limiter,
            options,
            self.journal,
            clock=_get_seconds_since_boot,
        )
        self.poller = Poller(
            build_sources(settings),
            settings.signals,
            settings.limit_policy(),
            self._handle_poll,
            batch_share=self._compute_batch_share,
        )
        self.watch = self._build_watch(settings)
        self._watch_changed = asyncio.Event()
        self.loop_lag = LoopLagWatch(self._report_slow_loop)
        self._pool_sharing = PoolSharing(
            queue, lambda: get_pool_identity(self.settings, self._known_endpoints), observe=observe
        )
        self.metrics.set_status_source(self.get_status)
        self._known_endpoints = Endpoints()
        self._watch_settled = asyncio.Event()
        """Set once the watch of the pool has shown everything, or why it cannot."""

    def build_views(self) -> AdminViews:
        return AdminViews(
            self._check_liveness,
            self._check_readiness,
            self.get_status,
            self.metrics.render_page,
            settings=lambda: effective.settings_as_json(self.settings),
            results=self._count_results,
            dead=self._queue_admin.list_newest_dead,
        )

    def _count_results(self) -> dict[str, float]:
        return {code: self.metrics.get_value(series.RESULTS, code) for code in series.RESULT_CODES}

    async def run(self) -> None:
        """Work until drained."""
        async with asyncio.TaskGroup() as tasks:
            background_tasks = [
                start_task(tasks, self._run_poller, "signals"),
                start_task(tasks, self._run_watch, "capacity"),
                start_task(tasks, self.loop_lag.watch_loop, "loop-lag"),
                start_task(tasks, self._pool_sharing.run, "pool-sharing"),
            ]
            try:
                await self.dispatcher.run()
            finally:
                for task in background_tasks:
                    task.cancel()

    async def _run_poller(self) -> None:
        """Poll the signals as soon as the watch has shown the endpoint picker.

        An earlier poll would warn at each start that no endpoint picker is known.
        """
        if _needs_watched_picker(self.settings):
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_START_S):
                    await self._watch_settled.wait()
        await self.poller.run()

    def _build_watch(self, settings: Settings) -> CapacityWatch:
        return CapacityWatch(
            settings.pool, settings.signals.epp, self._handle_endpoints, access=find_cluster_access(settings)
        )

    async def _run_watch(self) -> None:
        """Watch the endpoints of the pool, and start again when the watch is replaced."""
        while True:
            self._watch_changed.clear()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self.watch.run())
                await self._watch_changed.wait()
                watching.cancel()

    def apply_settings(self, settings: Settings, text: str) -> None:
        """Use a new configuration that was read from `text`, without losing a request. Raises OSError and
        changes nothing if a file that it names cannot be used."""
        # First build everything that is new, which can raise, so that a bad file changes nothing.
        before, now = self.settings, _get_loop_time()
        new_sources, policy = build_sources(settings), settings.limit_policy()
        options = build_options(settings, observe=self._observe)
        # A pool that is watched needs another watch than one whose endpoints are not watched.
        is_other_pool = settings.signals.watches_pool != before.signals.watches_pool
        new_watch = self._build_watch(settings) if is_other_pool else None
        self.settings = settings
        self.config_generation += 1
        self._config_hash = _hash_text(text)
        self.config_problem = None
        self.limiter.set_policy(policy, now)
        self._update_capacity(now)
        self.dispatcher.reconfigure(options)
        subset_header, headers = settings.endpoints_header, tuple(settings.reserved_headers.values())
        if (settings.gateway, subset_header, headers) != (
            before.gateway,
            before.endpoints_header,
            tuple(before.reserved_headers.values()),
        ):
            self._gateway.reconfigure(settings.gateway, subset_header=subset_header, reserved_headers=headers)
        if settings.signals != before.signals or settings.budget != before.budget:
            self.poller.reconfigure(new_sources, settings.signals, policy)
        if new_watch is None:
            self.watch.reconfigure(settings.signals.epp)
        else:
            self.watch = new_watch
            self._handle_endpoints(Endpoints())  # known endpoints belong to the old kind of pool
            self._watch_changed.set()
        if settings.log != before.log:
            logs.configure_logging(settings.log.level, settings.log.format)
        self.metrics.count(series.CONFIG_RELOADS, "applied")
        self.dispatcher.wake_up()

    def reject_settings(self, refusal: ReloadRejection) -> None:
        """Keep the configuration that is in use, because the changed file is invalid."""
        self.config_problem = str(refusal)
        self.metrics.count(series.CONFIG_RELOADS, "refused")

    def drain(self) -> None:
        """Let running requests finish. A second call stops them now."""
        emit(Event.DRAINING, running=self.dispatcher.running_count)
        is_draining = self.limiter.get_allowance(_get_loop_time()).reason is Reason.DRAINING
        self.dispatcher.drain(0.0 if is_draining else self.settings.shutdown.drain_s)

    # ── called by the parts ──────────────────────────────────────────────────────────────────────────────

    def _handle_poll(self, poll: SourcePoll) -> None:
        self._poll = poll
        self.metrics.count(
            series.POLLS, poll.source, str(poll.worst_failure.reason) if poll.worst_failure else "ok"
        )
        self._update_capacity(_get_loop_time())
        self.limiter.set_loop_delay(self.loop_lag.lag.longest_lag_s)
        self.dispatcher.apply_poll(poll)

    def _compute_batch_share(self) -> float | None:
        """Return the batch requests in flight of all replicas, as a share of the capacity."""
        budget = self.limiter.get_allowance(_get_loop_time()).budget
        return self.limiter.in_flight / budget.max_sys if budget is not None and budget.max_sys > 0 else None

    def _handle_endpoints(self, endpoints: Endpoints) -> None:
        self._known_endpoints = endpoints
        if endpoints.is_complete:
            self._watch_settled.set()
        self._update_capacity(_get_loop_time())
        self.poller.update_from_watch(endpoints.epp_addresses, endpoints.ready)
        for on_endpoints in self.dispatcher.context.hooks.on_endpoints:
            on_endpoints(endpoints)
        self.dispatcher.wake_up()

    def _report_slow_loop(self) -> None:
        share, cores = self.loop_lag.throttling
        emit(
            Event.EVENT_LOOP_SLOW,
            why=self.loop_lag.problem,
            behind_share=round(self.loop_lag.lag.lag_share, 2),
            longest_s=round(self.loop_lag.lag.longest_lag_s, 2),
            throttled_share=share,
            limit_cores=cores,
        )

    def _update_capacity(self, now: float) -> None:
        """Set the capacity bound of the endpoint watch: 0 if no endpoint is ready, else only if the capacity
        of one endpoint is known."""
        ready, per_endpoint = self._known_endpoints.ready, self.settings.budget.per_endpoint
        if per_endpoint is None and self._poll is not None:
            per_endpoint = self._poll.per_endpoint or self._poll.picker_k
        is_known = ready is not None and (not ready or per_endpoint is not None)
        self.limiter.set_capacity_bound((ready or 0) * (per_endpoint or 0.0) if is_known else None, now)

    # ── status ───────────────────────────────────────────────────────────────────────────────────────────

    def _check_liveness(self) -> str | None:
        late = _get_loop_time() - self.dispatcher.last_round_at
        return None if late < MAX_ROUND_AGE_S else f"the loop has not run for {late:.0f} s"

    def _check_readiness(self) -> str | None:
        if self.dispatcher.view.problem is not None:
            return f"queue: {self.dispatcher.view.problem}"
        allowance = self.dispatcher.get_allowance()
        if self.dispatcher.view.counts is None:
            return "queue: not asked yet"
        return allowance.detail if allowance.reason is Reason.STARTING else None

    def get_status(self) -> Status:
        now = _get_loop_time()
        self._update_series()
        self.dispatcher.health.assess_health(now)
        return build_status(
            now,
            self.dispatcher.context,
            process=ProcessStatus(
                version=__version__,
                python=platform.python_version(),
                pool=self.settings.pool.name,
                queue=self.settings.queue.name,
                owner=self._queue.owner,
                observe=self._observe,
                started_at=self._started_at,
                config_generation=self.config_generation,
                config_hash=self._config_hash,
                config_problem=self.config_problem,
                loop_lag_s=round(self.loop_lag.lag.longest_lag_s, 3),
            ),
            settings=self.settings,
            health=self.dispatcher.health.record,
            poll=self._poll,
            endpoints=self._known_endpoints,
            loop_problem=self.loop_lag.problem,
            sharing_problem=self._pool_sharing.problem,
        )

    def _update_series(self) -> None:
        """Copy the counters of the loop to the metrics."""
        meter = self.dispatcher.measure_utilization()
        for reason, seconds in meter.reason_s.items():
            self.metrics.set_total(series.GATE_SECONDS, str(reason), total=seconds)
        for work in WorkState:
            self.metrics.set_total(series.USED_SECONDS, str(work), total=meter.used_unit_s[work])
            self.metrics.set_total(series.FREE_SECONDS, str(work), total=meter.free_unit_s[work])


async def serve(
    settings: Settings, text: str, path: Path | None, environ: Mapping[str, str], *, observe: bool
) -> None:
    """Run a dispatcher until a signal ends it.

    `text` is the content of the file at `path` from which `settings` were read. Without a file, the settings
    come from the environment alone.
    """
    logs.configure_logging(settings.log.level, settings.log.format)
    _raise_descriptor_limit()
    await _import_early(path, settings)
    async with AsyncExitStack() as stack:
        queue, queue_admin = await stack.enter_async_context(open_queue(settings))
        gateway = HttpGateway(
            settings.gateway,
            subset_header=settings.endpoints_header,
            reserved_headers=settings.reserved_headers.values(),
        )
        await gateway.prepare()
        # Callbacks run in reverse order: the gateway closes after the service, the queue last.
        stack.push_async_callback(gateway.aclose)
        service = Service(settings, text, queue, queue_admin, gateway, observe=observe)
        stack.enter_context(add_sink(service.metrics.count_event))
        admin = settings.admin
        views = service.build_views()
        feed = views.make_feed(time.time)
        stack.enter_context(add_sink(feed.record_event))
        # After the event sinks, so that they receive the events about lost spans.
        service.journal.tracing = await stack.enter_async_context(otlp.start_tracing(settings, queue.owner))
        server = AdminServer(
            views,
            feed,
            host=admin.host,
            port=admin.port,
            token_file=admin.token_file,
            allowed_hosts=admin.allowed_hosts,
        )
        try:
            await stack.enter_async_context(server)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"admin.host, admin.port: {error.strerror or error}") from error
            why = "is taken: another dispatcher on this machine? Each needs an admin.port of its own"
            raise OSError(f"admin.port: {admin.port} {why}") from error
        reloader = _Reloader(service, text, path, environ)
        _tune_memory()
        with _handle_signals(
            {signal.SIGTERM: service.drain, signal.SIGINT: service.drain, signal.SIGHUP: reloader.reload_now}
        ):
            emit(
                Event.STARTED,
                version=__version__,
                pool=settings.pool.name,
                gateway=str(settings.gateway.url),
                config="the environment alone" if path is None else str(path.absolute()),  # noqa: ASYNC240
                queue=str(settings.queue.url) or await _describe_embedded_queue(settings, queue_admin),
                owner=queue.owner,
                admin_port=server.port,
                observe=observe,
            )
            async with asyncio.TaskGroup() as tasks:
                background_tasks = [
                    tasks.create_task(reloader.run(), name="configuration"),
                    tasks.create_task(feed.run(), name="feed"),
                ]
                await service.run()
                for task in background_tasks:
                    task.cancel()
        emit(Event.STOPPED)
    logs.log_remaining_repeats()


async def _describe_embedded_queue(settings: Settings, queue_admin: RedisQueueAdmin) -> str:
    """Describe where the embedded queue is stored and what it contains: an empty queue may be in the wrong
    directory."""
    location = f"embedded in {Path(settings.queue.data_dir).absolute()}"  # noqa: ASYNC240 - does not access the disk
    try:
        counts = await queue_admin.count_requests()
    except QueueUnavailableError as error:
        return f"{location}: {error}"
    if not any((counts.pending, counts.leased, counts.delayed, counts.dead)):
        return f"{location}: empty"
    return (
        f"{location}: {counts.pending} pending, {counts.leased} leased, {counts.delayed} delayed, "
        f"{counts.dead} dead"
    )


async def _import_early(path: Path | None, settings: Settings) -> None:
    """Import modules now that are otherwise imported at first use.

    Under a CPU limit, such imports take seconds, and time limits would blame the peers that are called
    meanwhile.
    """
    # The first use of this codec imports its tables.
    "localhost".encode("idna")
    capacity.import_cluster_client()
    otlp.import_opentelemetry(settings)
    if path is not None:
        await prepare_watch(path.parent)


@asynccontextmanager
async def open_queue(settings: Settings) -> AsyncIterator[tuple[RedisQueue, RedisQueueAdmin]]:
    """Open the queue of the settings. With an empty queue.url, run a Valkey server during the block."""
    queue_settings = settings.queue
    async with AsyncExitStack() as stack:
        url = queue_settings.url.reveal() if queue_settings.url else ""
        owner_presence = stack.enter_context(register_owner(is_embedded=not url))
        if not url:
            url = await stack.enter_async_context(
                embedded_valkey(Path(queue_settings.data_dir), fsync=queue_settings.fsync)
            )
        client, names = (
            connect(url),
            QueueNames(queue_settings.name, queue_settings.results, queue_settings.result_lists),
        )
        queue = RedisQueue(
            client,
            names,
            owner_presence.owner,
            QueueOptions(
                lease_s=queue_settings.lease_s,
                owner_timeout_s=queue_settings.effective_owner_timeout_s(),
                poll_s=queue_settings.poll_s,
                result_ttl_s=round(queue_settings.result_ttl_s),
                dead_max=queue_settings.dead_max,
                max_pending=queue_settings.max_pending,
                max_payload_bytes=queue_settings.max_payload_bytes,
            ),
            dead_owner_detector=owner_presence,
        )
        stack.push_async_callback(queue.aclose)
        yield queue, RedisQueueAdmin(client, names)


class _Reloader:
    """Follows the configuration file, and reads it again on request."""

    def __init__(self, service: Service, text: str, path: Path | None, environ: Mapping[str, str]) -> None:
        self._service = service
        self._text = text
        self._path = path
        self._environ = environ

    async def run(self) -> None:
        if self._path is not None:
            async for found in watch_config(self._path, self._text):
                self._handle_file(found)

    def reload_now(self) -> None:
        self._handle_file(read_config(self._path))

    def _handle_file(self, found: str | Problem) -> None:
        service = self._service
        before = service.settings
        refusal = ReloadRejection((str(found),)) if isinstance(found, Problem) else self._apply_text(found)
        if refusal is None:
            changed = effective.describe_changes(before, service.settings)
            emit(Event.CONFIG_RELOADED, generation=service.config_generation, changed=changed)
        else:
            service.reject_settings(refusal)
            emit(Event.CONFIG_REFUSED, reasons=list(refusal.reasons))

    def _apply_text(self, text: str) -> ReloadRejection | None:
        """Apply new content of the file. Return why that is impossible."""
        name, directory = config_name(self._path), config_directory(self._path)
        new = reload_settings(self._service.settings, text, self._environ, name=name, directory=directory)
        if isinstance(new, ReloadRejection):
            return new
        try:
            self._service.apply_settings(new, text)
        except OSError as error:
            return ReloadRejection((f"{name}: {error}",))
        except Exception as error:  # it must not end the process
            emit(Event.INTERNAL_ERROR, where="reload", error=repr(error))
            return ReloadRejection((f"{name}: the dispatcher failed: {error!r}",))
        return None


def _raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors as far as the system allows, because each request in flight has a
    connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    with suppress(OSError, ValueError):  # some systems allow less than their limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _tune_memory() -> None:
    """Tune garbage collector and allocator.

    Objects that exist now live as long as the process: scanning them again and again costs a tenth of each
    request. And payloads are large and short-lived: by default, glibc would keep their memory in its heap.
    """
    gc.collect()
    # Moves all objects out of the collector's generations.
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


@contextmanager
def _handle_signals(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Handle signals on the running loop during the block."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _needs_watched_picker(settings: Settings) -> bool:
    """Return whether only the watch shows which endpoint picker to read."""
    signals = settings.signals
    return signals.watches_pool and signals.source != "prometheus" and capacity.finds_epp(signals.epp)


def _hash_text(text: str) -> str:
    """Return the start of the SHA-256 of a configuration file."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _get_loop_time() -> float:
    return asyncio.get_running_loop().time()
