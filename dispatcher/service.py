"""The composition root: build the parts, start them, stop them in order.

    start   imports and TLS → queue → gateway → limiter and loop → signals → admin port
    stop    the loop drains first, while everything it needs still runs: signals, so that the gate stays
            right; the queue, to hand in; the admin port, so that probes and metrics see it. Then the rest.

SIGTERM and SIGINT drain, a second one stops at once and gives the leases back; SIGHUP reads the
configuration again, as a change of the file does.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dispatcher import __version__
from dispatcher.admin import AdminServer, Views
from dispatcher.core.allowance import Allowance, explain
from dispatcher.core.budget import Budget, Reason
from dispatcher.core.limiter import Limiter
from dispatcher.core.outcome import RetryPolicy
from dispatcher.dispatch import Dispatcher, Options
from dispatcher.forward import HttpGateway
from dispatcher.pace import PaceWatch
from dispatcher.queue.connect import connect
from dispatcher.queue.embedded import embedded_valkey
from dispatcher.queue.keys import Names
from dispatcher.queue.owners import presence
from dispatcher.queue.redis import RedisQueue
from dispatcher.settings import Settings
from dispatcher.settings.load import Refusal, read, reload
from dispatcher.settings.source import Problem
from dispatcher.settings.watch import prepare as prepare_watch
from dispatcher.settings.watch import watch
from dispatcher.signals import capacity
from dispatcher.signals.capacity import CapacityWatch, Endpoints
from dispatcher.signals.poller import Poll, Poller
from dispatcher.signals.series import at_most
from dispatcher.signals.sources import sources
from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, emit
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.status import Status

LIVE_WITHIN_S = 30.0
"""The loop turns each second; a call to Redis may hold one turn up for a few."""
LARGE_BYTES = 262_144
"""Memory in pieces this large goes back to the system when it is free."""
_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


class Service:
    """One dispatcher process for one pool."""

    def __init__(self, settings: Settings, queue: RedisQueue, gateway: HttpGateway, *, observe: bool) -> None:
        self.settings = settings
        self.generation = 1
        self.problem: str | None = None
        """What is wrong with the newest configuration; None when it is in force."""
        self._observe = observe
        self._queue = queue
        self._gateway = gateway
        self._metrics = Metrics()
        self._poll: Poll | None = None
        self.limiter = Limiter(settings.policy(), at_most(settings.signals.use))
        self.dispatcher = Dispatcher(queue, gateway, self.limiter, _options(settings, observe), self._metrics)
        self.poller = Poller(
            sources(settings),
            settings.signals,
            settings.policy(),
            self._polled,
            batch_share=self._batch_share,
        )
        self.watch = CapacityWatch(settings.pool, settings.signals.epp, self._endpoints)
        self.pace = PaceWatch(self._slow)
        self._metrics.show(self.status, tuple(str(reason) for reason in Reason))
        self._watched = Endpoints()

    def views(self) -> Views:
        return Views(self._live, self._ready, self.status, self._metrics.page)

    async def run(self) -> None:
        """Work until drained."""
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self.poller.run(), name="signals"),
                tasks.create_task(self.watch.run(), name="capacity"),
                tasks.create_task(self.pace.run(), name="pace"),
            ]
            try:
                await self.dispatcher.run()
            finally:
                for task in beside:
                    task.cancel()

    def apply(self, settings: Settings) -> None:
        """A new configuration takes effect, without losing a request. Raises OSError, and nothing has
        changed, where a file that it names cannot be used."""
        asked = sources(settings)
        before, self.settings = self.settings, settings
        self.generation += 1
        self.problem = None
        now = _now()
        self.limiter.settings(settings.policy(), now)
        self._tell_capacity(now)
        self.dispatcher.reconfigure(_options(settings, self._observe))
        if settings.gateway != before.gateway:
            self._gateway.reconfigure(settings.gateway)
        if settings.signals != before.signals or settings.budget != before.budget:
            self.poller.reconfigure(asked, settings.signals, settings.policy())
        self.watch.reconfigure(settings.signals.epp)
        if settings.log != before.log:
            logs.configure(settings.log.level, settings.log.format)
        self.dispatcher.poke()

    def drain(self) -> None:
        """The first signal: let running requests finish. A second one: stop now."""
        emit(Event.DRAINING, running=self.dispatcher.running)
        again = self.limiter.allowance(_now()).reason is Reason.DRAINING
        self.dispatcher.drain(0.0 if again else self.settings.shutdown.drain_s)

    # What the parts tell.

    def _polled(self, poll: Poll) -> None:
        now = _now()
        self._poll = poll
        self.limiter.uses(poll.signals)
        policy = self.settings.policy()
        if poll.max_age_s != policy.max_age_s:
            policy = replace(policy, max_age_s=poll.max_age_s)
        self.limiter.settings(policy, now)
        self._tell_capacity(now)
        for reading in poll.readings:
            self.limiter.reading(reading, now)
        if poll.unread:
            worst = min(poll.unread, key=lambda unread: unread.reason.rank)
            why = f"{worst.why} (look at: {worst.hint})" if worst.hint else worst.why
            self.limiter.reading_failed(worst.reason, why, poll.at)
        self._gateway.resize(self.limiter.allowance(now).limit)
        self.dispatcher.readings_came()

    def _batch_share(self) -> float | None:
        """Our requests in flight, all replicas together, as a share of the capacity."""
        budget = self.limiter.allowance(_now()).budget
        return self.limiter.in_flight / budget.max_sys if budget is not None and budget.max_sys > 0 else None

    def _endpoints(self, endpoints: Endpoints) -> None:
        self._watched = endpoints
        self._tell_capacity(_now())
        self.poller.discovered(endpoints.epp_addresses)
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
        """What the watch bounds: all where nothing is ready, else only by what is known of an endpoint."""
        ready, per_endpoint = self._watched.ready, self.settings.budget.per_endpoint
        if per_endpoint is None and self._poll is not None:
            per_endpoint = self._poll.per_endpoint or self._poll.picker_k
        if ready is None or (ready and per_endpoint is None):
            self.limiter.capacity(None, now)
        else:
            self.limiter.capacity(ready * (per_endpoint or 0.0), now)

    def _capacity_from(self) -> Literal["setting", "picker", "assumption"] | None:
        """Where the requests per endpoint come from; None where nothing is reckoned with them."""
        poll = self._poll
        if poll is None or poll.per_endpoint is None:
            return None
        if self.settings.budget.per_endpoint is not None:
            return "setting"
        return "picker" if poll.picker_k is not None else "assumption"

    # What is shown.

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

    def _explanation(self, allowance: Allowance) -> str:
        told = explain(allowance, self.limiter.in_flight)
        if self._observe:
            told = f"Observing only, nothing is claimed by this process. It would be: {told}"
        told = " ".join([told, *(f"Kubernetes: {problem}." for problem in self._watched.problems)])
        slow = self.pace.problem
        return f"{told} Beware: {slow}." if slow else told

    def _max_sys(self, budget: Budget | None) -> tuple[float | None, str | None]:
        """The capacity that counts, and whose word it is."""
        if budget is None:
            return None, None
        if budget.fault is Reason.NO_ENDPOINTS and self._watched.ready == 0:
            return 0.0, "watch"
        setting = self.settings.budget.max_sys
        if setting is not None and budget.max_sys >= setting:
            return budget.max_sys, "setting"
        reading = next(each for each in self.limiter.readings if each.signal is budget.signal)
        if budget.max_sys < reading.max_sys:
            return budget.max_sys, "watch"
        return budget.max_sys, "query" if "queries.capacity" in reading.raw else "picker"

    def status(self) -> Status:
        now = _now()
        allowance = self.limiter.allowance(now)
        budget, view, counts = allowance.budget, self.dispatcher.view, self.dispatcher.view.counts
        readings = self.limiter.readings
        watched = self._watched
        max_sys, max_sys_by = self._max_sys(budget)
        return Status(
            version=__version__,
            pool=self.settings.pool.name,
            queue=self.settings.queue.name,
            owner=self._queue.owner,
            observe=self._observe,
            reason=str(allowance.reason),
            open=not allowance.reason.closed,
            explanation=self._explanation(allowance),
            limit=allowance.limit,
            in_flight=self.limiter.in_flight,
            running=self.dispatcher.running,
            signal=str(allowance.signal) if allowance.signal else None,
            f_sys=budget.f_sys if budget else None,
            f_epp=budget.f_epp if budget else None,
            reserve=self.settings.budget.reserve,
            budget=budget.d if budget and budget.fault is None else None,
            headroom=budget.headroom if budget and budget.fault is None else None,
            max_sys=max_sys,
            max_sys_by=max_sys_by,
            ceiling=allowance.ceiling,
            reading_age_s=now - max(r.closed_at for r in readings) if readings else None,
            source=self._poll.source if self._poll else None,
            detector=self._poll.detector if self._poll else None,
            per_endpoint=self._poll.per_endpoint if self._poll else None,
            per_endpoint_from=self._capacity_from(),
            picker_max_concurrency=self._poll.picker_k if self._poll else None,
            readings=[
                {
                    "signal": str(reading.signal),
                    "age_s": round(now - reading.closed_at, 3),
                    "window_s": round(reading.closed_at - reading.opened_at, 3),
                    "f_sys": reading.f_sys,
                    "f_epp": reading.f_epp,
                    "max_sys": reading.max_sys,
                    "source": reading.source,
                    "raw": dict(reading.raw),
                }
                for reading in readings
            ],
            watch_endpoints=watched.ready,
            watch_unsure_s=None if watched.unsure_since is None else round(now - watched.unsure_since, 3),
            watch_problems=[str(problem) for problem in watched.problems],
            pending=counts.pending if counts else None,
            leased=counts.leased if counts else None,
            delayed=counts.delayed if counts else None,
            dead=counts.dead if counts else None,
            paused=view.shared.paused if view.shared else False,
            queue_problem=view.problem,
            config_generation=self.generation,
            config_problem=self.problem,
            loop_lag_s=round(self.pace.pace.longest_s, 3),
        )


async def serve(
    settings: Settings, text: str, path: Path, environ: Mapping[str, str], *, observe: bool
) -> None:
    """Run a dispatcher until a signal ends it. `text`: what the file said that `settings` were read from."""
    logs.configure(settings.log.level, settings.log.format)
    await _prepare(path)
    async with AsyncExitStack() as stack:
        queue = await stack.enter_async_context(open_queue(settings))
        gateway = HttpGateway(settings.gateway)
        gateway.prepare()
        stack.push_async_callback(gateway.aclose)
        service = Service(settings, queue, gateway, observe=observe)
        admin = settings.admin
        server = AdminServer(service.views(), host=admin.host, port=admin.port, token_file=admin.token_file)
        try:
            await stack.enter_async_context(server)
        except OSError as error:
            raise OSError(f"admin.host, admin.port: {error.strerror or error}") from error
        emit(
            Event.STARTED,
            version=__version__,
            pool=settings.pool.name,
            gateway=str(settings.gateway.url),
            queue=str(settings.queue.url) or f"embedded in {settings.queue.data_dir}",
            owner=queue.owner,
            admin_port=server.port,
            observe=observe,
        )
        reloader = _Reloader(service, text, path, environ)
        _settle_memory()
        with _signals(
            {signal.SIGTERM: service.drain, signal.SIGINT: service.drain, signal.SIGHUP: reloader.now}
        ):
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(reloader.run(), name="configuration")
                await service.run()
                watching.cancel()
        emit(Event.STOPPED)


async def _prepare(path: Path) -> None:
    """Import what is otherwise imported when it is first used.

    That is much of a second's computing, and several seconds under a CPU limit: time limits of peers that ran
    meanwhile would blame them for it.
    """
    "localhost".encode("idna")
    capacity.prepare()
    await prepare_watch(path.parent)


@asynccontextmanager
async def open_queue(settings: Settings) -> AsyncIterator[RedisQueue]:
    """The queue of the settings; with an empty queue.url in a Valkey of our own, for as long as the block."""
    wanted = settings.queue
    async with AsyncExitStack() as stack:
        url = wanted.url.reveal() if wanted.url else ""
        present = stack.enter_context(presence(alone=not url))
        if not url:
            url = await stack.enter_async_context(embedded_valkey(Path(wanted.data_dir), fsync=wanted.fsync))
        queue = RedisQueue(
            connect(url),
            Names(wanted.name, wanted.results),
            present.owner,
            lease_s=wanted.lease_s,
            owner_timeout_s=wanted.timeout_s(),
            prover=present,
            poll_s=wanted.poll_s,
            result_ttl_s=round(wanted.result_ttl_s),
            dead_max=wanted.dead_max,
        )
        stack.push_async_callback(queue.aclose)
        yield queue


class _Reloader:
    """Follows the configuration file, and reads it again when told to."""

    def __init__(self, service: Service, text: str, path: Path, environ: Mapping[str, str]) -> None:
        self._service = service
        self._text = text
        self._path = path
        self._environ = environ

    async def run(self) -> None:
        async for found in watch(self._path, self._text):
            self._take(found)

    def now(self) -> None:
        self._take(read(self._path))

    def _take(self, found: str | Problem) -> None:
        service = self._service
        new = Refusal((str(found),)) if isinstance(found, Problem) else self._reload(found)
        if isinstance(new, Settings):
            try:
                service.apply(new)
            except OSError as error:
                new = Refusal((f"{self._path.name}: {error}",))
        if isinstance(new, Refusal):
            service.problem = str(new)
            emit(Event.RELOAD_REFUSED, reasons=list(new.reasons))
        else:
            emit(Event.RELOADED, generation=service.generation)

    def _reload(self, text: str) -> Settings | Refusal:
        return reload(self._service.settings, text, self._environ, name=self._path.name)


def _settle_memory() -> None:
    """Tell the collectors what they cannot know.

    What was imported and built by now lives as long as the process: looking at it again and again is a tenth
    of the cost of a request. And large payloads come and go: glibc, left alone, keeps them in its heap.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


@contextmanager
def _signals(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Signal handlers on the running loop, for the length of the block."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _options(settings: Settings, observe: bool) -> Options:
    retry = settings.retry
    return Options(
        retry=RetryPolicy(retry.base_s, retry.max_s, retry.max_attempts, retry.max_deliveries),
        lease_s=settings.queue.lease_s,
        owner_timeout_s=settings.queue.timeout_s(),
        max_payload_bytes=settings.queue.max_payload_bytes,
        tenant_from=settings.gateway.fairness_from,
        observe=observe,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
