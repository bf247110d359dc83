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
from dispatcher.admin import AdminServer, Views
from dispatcher.app.loop_options import options_of
from dispatcher.app.status_builder import overview
from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.utilization import Work
from dispatcher.dispatch import Dispatcher, Journal
from dispatcher.forward import DirectServers, HttpGateway
from dispatcher.ports import QueueUnavailableError
from dispatcher.queue.embedded import embedded_valkey
from dispatcher.queue.keys import Names
from dispatcher.queue.owners import presence
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.queue_admin import RedisDesk
from dispatcher.settings import Settings, effective
from dispatcher.settings.load import Refusal, directory_of, name_of, read, reload
from dispatcher.settings.warmups import WarmupFiles
from dispatcher.settings.watch import prepare as prepare_watch
from dispatcher.settings.watch import watch
from dispatcher.settings.yaml_source import Problem
from dispatcher.signals.kubernetes import capacity
from dispatcher.signals.kubernetes.capacity import CapacityWatch, Endpoints
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER, ClusterAccess
from dispatcher.signals.models.watch import ModelWatch
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.readings import at_most
from dispatcher.signals.sources import sources
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry import logs, otlp
from dispatcher.telemetry.events import Event, emit, heard_by
from dispatcher.telemetry.loop_lag import PaceWatch
from dispatcher.telemetry.metrics import PAGE_KEPT_S, Metrics
from dispatcher.telemetry.status import ProcessStatus, Status

LIVE_WITHIN_S = 30.0
"""Longest time since the last turn of a live process. The loop turns each second; a call to Redis may delay a
turn by a few seconds."""
LARGE_BYTES = 262_144
"""Size from which memory is returned to the system when it is freed."""
DESCRIPTORS_MOST = 1 << 20
"""Default limit of Linux for the file descriptors of one process."""
_M_MMAP_THRESHOLD = -3
"""Constant of malloc.h of glibc."""


def _seconds_since_boot() -> float:
    """Return the seconds since boot, including sleep if the system counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Service:
    """One dispatcher process for one pool."""

    def __init__(
        self,
        settings: Settings,
        text: str,
        queue: RedisQueue,
        desk: RedisDesk,
        gateway: HttpGateway,
        *,
        observe: bool,
    ) -> None:
        self.settings = settings
        self.warmups = WarmupFiles.usable(settings)
        self.generation = 1
        self._config_hash = _digest(text)
        self.problem: str | None = None
        """Error of the newest configuration. `None` if it is in use."""
        self._observe = observe
        self._started_at = time.time()
        self._queue = queue
        self._desk = desk
        self._gateway = gateway
        self.metrics = Metrics(settings.pool.name, kept_s=PAGE_KEPT_S)
        self.journal = Journal(self.metrics)
        self._poll: SourcePoll | None = None
        self.limiter = Limiter(settings.policy(), at_most(settings.signals.use))
        options = options_of(settings, self.warmups, observe=observe)
        self.servers = DirectServers(
            # Created below; a reload replaces the settings, so both are looked up at each call.
            lambda endpoint: self.model_watch.server(endpoint),
            lambda: self.settings.gateway.max_response_bytes,
        )
        self.dispatcher = Dispatcher(
            queue,
            gateway,
            self.limiter,
            options,
            self.journal,
            clock=_seconds_since_boot,
            servers=self.servers,
        )
        self.poller = Poller(
            sources(settings),
            settings.signals,
            settings.policy(),
            self._polled,
            batch_share=self._batch_share,
        )
        self.watch = self._watch_of(settings)
        self._watch_changed = asyncio.Event()
        self.model_watch = ModelWatch(settings, self.dispatcher.models.heard, access=_access(settings))
        self.pace = PaceWatch(self._slow)
        self.metrics.show(self.status)
        self._watched = Endpoints()

    def views(self) -> Views:
        return Views(
            self._live,
            self._ready,
            self.status,
            self.metrics.page,
            settings=lambda: effective.as_json(self.settings),
            results=self._results,
            dead=self._desk.dead_newest,
        )

    def _results(self) -> dict[str, float]:
        return {code: self.metrics.value(series.RESULTS, code) for code in series.CODES}

    async def run(self) -> None:
        """Work until drained."""
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self.poller.run(), name="signals"),
                tasks.create_task(self._watching(), name="capacity"),
                tasks.create_task(self.model_watch.run(), name="models"),
                tasks.create_task(self.pace.run(), name="pace"),
            ]
            try:
                await self.dispatcher.run()
            finally:
                for task in beside:
                    task.cancel()

    def _watch_of(self, settings: Settings) -> CapacityWatch:
        return CapacityWatch(settings.pool, settings.signals.epp, self._endpoints, access=_access(settings))

    async def _watching(self) -> None:
        """Watch the endpoints of the pool, and start again when the watch is replaced."""
        while True:
            self._watch_changed.clear()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self.watch.run())
                await self._watch_changed.wait()
                watching.cancel()

    def apply(self, settings: Settings, text: str) -> None:
        """Use a new configuration that was read from `text`, without losing a request. Raises OSError and
        changes nothing if a file that it names cannot be used."""
        # First everything that can raise, so that a bad file changes nothing.
        asked, self.warmups = sources(settings), WarmupFiles.usable(settings)
        before, self.settings = self.settings, settings
        self.generation += 1
        self._config_hash = _digest(text)
        self.problem = None
        now = _now()
        self.limiter.settings(settings.policy(), now)
        self._tell_capacity(now)
        self.dispatcher.reconfigure(options_of(settings, self.warmups, observe=self._observe))
        self.model_watch.reconfigure(settings, _access(settings))
        subset_header = settings.serving.subset_header
        if settings.gateway != before.gateway or subset_header != before.serving.subset_header:
            self._gateway.reconfigure(settings.gateway, subset_header=subset_header)
        if settings.signals != before.signals or settings.budget != before.budget:
            self.poller.reconfigure(asked, settings.signals, settings.policy())
        # A pool that is watched needs another watch than one whose endpoints are not watched.
        if settings.signals.watches_pool == before.signals.watches_pool:
            self.watch.reconfigure(settings.signals.epp)
        else:
            self.watch = self._watch_of(settings)
            self._endpoints(Endpoints())  # known endpoints belong to the old kind of pool
            self._watch_changed.set()
        if settings.log != before.log:
            logs.configure(settings.log.level, settings.log.format)
        self.metrics.count(series.RELOADS, "applied")
        self.dispatcher.poke()

    def refuse(self, why: Refusal) -> None:
        """Keep the configuration that is in use, because the changed file is invalid."""
        self.problem = str(why)
        self.metrics.count(series.RELOADS, "refused")

    def drain(self) -> None:
        """Let running requests finish. A second call stops them now."""
        emit(Event.DRAINING, running=self.dispatcher.running)
        again = self.limiter.allowance(_now()).reason is Reason.DRAINING
        self.dispatcher.drain(0.0 if again else self.settings.shutdown.drain_s)

    # ── called by the parts ──────────────────────────────────────────────────────────────────────────────

    def _polled(self, poll: SourcePoll) -> None:
        self._poll = poll
        self.metrics.count(series.READ, poll.source, str(poll.worst.reason) if poll.worst else "ok")
        self._tell_capacity(_now())
        self.limiter.looped(self.pace.pace.longest_s)
        self.dispatcher.read(poll)

    def _batch_share(self) -> float | None:
        """Return the batch requests in flight of all replicas, as a share of the capacity."""
        budget = self.limiter.allowance(_now()).budget
        return self.limiter.in_flight / budget.max_sys if budget is not None and budget.max_sys > 0 else None

    def _endpoints(self, endpoints: Endpoints) -> None:
        self._watched = endpoints
        self._tell_capacity(_now())
        self.poller.discovered(endpoints.epp_addresses, endpoints.ready)
        self.model_watch.discovered(endpoints)
        self.dispatcher.poke()

    def _slow(self) -> None:
        share, cores = self.pace.throttled
        emit(
            Event.SLOW,
            why=self.pace.problem,
            behind_share=round(self.pace.pace.share, 2),
            longest_s=round(self.pace.pace.longest_s, 2),
            throttled_share=share,
            limit_cores=cores,
        )

    def _tell_capacity(self, now: float) -> None:
        """Set the capacity bound of the endpoint watch: 0 if no endpoint is ready, else only if the capacity
        of one endpoint is known."""
        ready, per_endpoint = self._watched.ready, self.settings.budget.per_endpoint
        if per_endpoint is None and self._poll is not None:
            per_endpoint = self._poll.per_endpoint or self._poll.picker_k
        known = ready is not None and (not ready or per_endpoint is not None)
        self.limiter.capacity((ready or 0) * (per_endpoint or 0.0) if known else None, now)

    # ── status ───────────────────────────────────────────────────────────────────────────────────────────

    def _live(self) -> str | None:
        late = _now() - self.dispatcher.turned_at
        return None if late < LIVE_WITHIN_S else f"the loop has not turned for {late:.0f} s"

    def _ready(self) -> str | None:
        if self.dispatcher.view.problem is not None:
            return f"queue: {self.dispatcher.view.problem}"
        allowance = self.dispatcher.allowance()
        if self.dispatcher.view.counts is None:
            return "queue: not asked yet"
        return allowance.because if allowance.reason is Reason.STARTING else None

    def status(self) -> Status:
        now = _now()
        self._count()
        self.dispatcher.health.assess(now)
        return overview(
            now,
            process=ProcessStatus(
                version=__version__,
                python=platform.python_version(),
                pool=self.settings.pool.name,
                queue=self.settings.queue.name,
                owner=self._queue.owner,
                observe=self._observe,
                started_at=self._started_at,
                config_generation=self.generation,
                config_hash=self._config_hash,
                config_problem=self.problem,
                loop_lag_s=round(self.pace.pace.longest_s, 3),
            ),
            settings=self.settings,
            limiter=self.limiter,
            running=self.dispatcher.running,
            queue=self.dispatcher.view,
            poll=self._poll,
            watched=self._watched,
            slow=self.pace.problem,
            recent=self.journal.recent,
            batching=self.dispatcher.batching,
            lineup=self.dispatcher.lineup,
            models=self.dispatcher.models,
            health=self.dispatcher.health.record,
        )

    def _count(self) -> None:
        """Copy the counters of the loop to the metrics."""
        meter = self.dispatcher.measure()
        for reason, seconds in meter.reason_s.items():
            self.metrics.set_total(series.GATE_SECONDS, str(reason), to=seconds)
        for work in Work:
            self.metrics.set_total(series.USED_SECONDS, str(work), to=meter.used_s[work])
            self.metrics.set_total(series.FREE_SECONDS, str(work), to=meter.free_s[work])
        batching, lineup = self.dispatcher.batching, self.dispatcher.lineup
        self.metrics.set_total(series.MERGED_REQUESTS, to=batching.requests)
        for counted, by in (
            (series.MERGED_CALLS, batching.calls),
            (series.MERGE_CHECKS, batching.checks),
            (series.SEQUENCE_TURNS, lineup.turns),
            (series.SEQUENCE_SERVERS, lineup.servers),
            (series.MODEL_REQUESTS, self.dispatcher.models.requests),
            (series.WARM_UPS, self.dispatcher.warming.done),
        ):
            for result, times in by.items():
                self.metrics.set_total(counted, result, to=times)


async def serve(
    settings: Settings, text: str, path: Path | None, environ: Mapping[str, str], *, observe: bool
) -> None:
    """Run a dispatcher until a signal ends it.

    `text` is the content of the file at `path` from which `settings` were read. Without a file, the settings
    come from the environment alone.
    """
    logs.configure(settings.log.level, settings.log.format)
    _take_descriptors()
    await _prepare(path, settings)
    async with AsyncExitStack() as stack:
        queue, desk = await stack.enter_async_context(open_queue(settings))
        gateway = HttpGateway(settings.gateway, subset_header=settings.serving.subset_header)
        await gateway.prepare()
        # Callbacks run in reverse order: the gateway closes after the service, the queue last.
        stack.push_async_callback(gateway.aclose)
        service = Service(settings, text, queue, desk, gateway, observe=observe)
        stack.push_async_callback(service.servers.aclose)
        stack.enter_context(heard_by(service.metrics.heard))
        admin = settings.admin
        views = service.views()
        feed = views.feed(time.time)
        stack.enter_context(heard_by(feed.heard))
        # After the event sinks, so that they receive the events about lost spans.
        service.journal.tracing = await stack.enter_async_context(otlp.tracing(settings, queue.owner))
        server = AdminServer(views, feed, host=admin.host, port=admin.port, token_file=admin.token_file)
        try:
            await stack.enter_async_context(server)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"admin.host, admin.port: {error.strerror or error}") from error
            why = "is taken: another dispatcher on this machine? Each needs an admin.port of its own"
            raise OSError(f"admin.port: {admin.port} {why}") from error
        reloader = _Reloader(service, text, path, environ)
        _settle_memory()
        with _signals(
            {signal.SIGTERM: service.drain, signal.SIGINT: service.drain, signal.SIGHUP: reloader.now}
        ):
            emit(
                Event.STARTED,
                version=__version__,
                pool=settings.pool.name,
                gateway=str(settings.gateway.url),
                config="the environment alone" if path is None else str(path.absolute()),  # noqa: ASYNC240
                queue=str(settings.queue.url) or await _embedded(settings, desk),
                owner=queue.owner,
                admin_port=server.port,
                observe=observe,
            )
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(reloader.run(), name="configuration"),
                    tasks.create_task(feed.run(), name="feed"),
                ]
                await service.run()
                for task in beside:
                    task.cancel()
        emit(Event.STOPPED)
    logs.finish()


async def _embedded(settings: Settings, desk: RedisDesk) -> str:
    """Describe where the embedded queue is stored and what it contains: an empty queue may be in the wrong
    directory."""
    place = f"embedded in {Path(settings.queue.data_dir).absolute()}"  # noqa: ASYNC240 - does not access the disk
    try:
        counts = await desk.counts()
    except QueueUnavailableError as error:
        return f"{place}: {error}"
    if not any((counts.pending, counts.leased, counts.delayed, counts.dead)):
        return f"{place}: empty"
    return (
        f"{place}: {counts.pending} pending, {counts.leased} leased, {counts.delayed} delayed, "
        f"{counts.dead} dead"
    )


async def _prepare(path: Path | None, settings: Settings) -> None:
    """Import modules now that are otherwise imported at first use.

    Under a CPU limit, such imports take seconds, and time limits would blame the peers that are called
    meanwhile.
    """
    # The first use of this codec imports its tables.
    "localhost".encode("idna")
    capacity.prepare()
    otlp.prepare(settings)
    if path is not None:
        await prepare_watch(path.parent)


@asynccontextmanager
async def open_queue(settings: Settings) -> AsyncIterator[tuple[RedisQueue, RedisDesk]]:
    """Open the queue of the settings. With an empty queue.url, run a Valkey server during the block."""
    wanted = settings.queue
    async with AsyncExitStack() as stack:
        url = wanted.url.reveal() if wanted.url else ""
        present = stack.enter_context(presence(alone=not url))
        if not url:
            url = await stack.enter_async_context(embedded_valkey(Path(wanted.data_dir), fsync=wanted.fsync))
        client, names = connect(url), Names(wanted.name, wanted.results, wanted.result_lists)
        queue = RedisQueue(
            client,
            names,
            present.owner,
            lease_s=wanted.lease_s,
            owner_timeout_s=wanted.timeout_s(),
            prover=present,
            poll_s=wanted.poll_s,
            result_ttl_s=round(wanted.result_ttl_s),
            dead_max=wanted.dead_max,
            max_pending=wanted.max_pending,
            max_payload_bytes=wanted.max_payload_bytes,
        )
        stack.push_async_callback(queue.aclose)
        yield queue, RedisDesk(client, names)


class _Reloader:
    """Follows the configuration file, and reads it again on request."""

    def __init__(self, service: Service, text: str, path: Path | None, environ: Mapping[str, str]) -> None:
        self._service = service
        self._text = text
        self._path = path
        self._environ = environ

    async def run(self) -> None:
        if self._path is not None:
            async for found in watch(self._path, self._text):
                self._take(found)

    def now(self) -> None:
        self._take(read(self._path))

    def _take(self, found: str | Problem) -> None:
        service = self._service
        before = service.settings
        why = Refusal((str(found),)) if isinstance(found, Problem) else self._refused(found)
        if why is None:
            changed = effective.changes(before, service.settings)
            emit(Event.RELOADED, generation=service.generation, changed=changed)
        else:
            service.refuse(why)
            emit(Event.RELOAD_REFUSED, reasons=list(why.reasons))

    def _refused(self, text: str) -> Refusal | None:
        """Apply new content of the file. Return why that is impossible."""
        name, directory = name_of(self._path), directory_of(self._path)
        new = reload(self._service.settings, text, self._environ, name=name, directory=directory)
        if isinstance(new, Refusal):
            return new
        try:
            self._service.apply(new, text)
        except OSError as error:
            return Refusal((f"{name}: {error}",))
        return None


def _take_descriptors() -> None:
    """Raise the limit of file descriptors as far as the system allows, because each request in flight has a
    connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_MOST if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MOST)
    with suppress(OSError, ValueError):  # some systems allow less than their limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _settle_memory() -> None:
    """Tune garbage collector and allocator.

    Objects that exist now live as long as the process: scanning them again and again costs a tenth of each
    request. And payloads are large and short-lived: by default, glibc would keep their memory in its heap.
    """
    gc.collect()
    # Moves all objects out of the collector's generations.
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


@contextmanager
def _signals(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Handle signals on the running loop during the block."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _digest(text: str) -> str:
    """Return the start of the SHA-256 of a configuration file."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _access(settings: Settings) -> ClusterAccess:
    return ClusterAccess() if settings.signals.watches_pool else NO_CLUSTER


def _now() -> float:
    return asyncio.get_running_loop().time()
