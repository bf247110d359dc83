"""What `check` finds behind the addresses of a configuration: all tried at the same time, told in order.

Nothing is changed or consumed, and what is not there costs no time: a client library takes longer to import
than a connection to be refused. Nor does what is imported cost anybody else time, in a container that gets a
tenth of a core, say. Hence three steps, and while a time limit runs nothing is imported or built:

    reach     a bare connection to every address, all at once
    prepare   for what answered, one after the other: client libraries, TLS
    ask       all at once

A peer is blamed only for what it did while our own event loop kept pace.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import dispatcher
from dispatcher.pace import PaceWatch
from dispatcher.peer import reason
from dispatcher.settings import SecretUrl, Settings
from dispatcher.signals.cluster import Access

CONNECT_S = 1.5
ANSWER_S = 3.0
WHOLE_S = 10.0
"""No try of a probe takes longer, whatever it waits for."""
BEGINNING_BYTES = 1000
"""So much of an answer's body is looked at."""
STEP_S = 0.05
BEHIND_SHARE = 0.2
"""A loop that was behind for so much of a probe's time may be why it failed."""
BEHIND_LEAST_S = 0.2
"""Less makes nothing late: every time limit here is several times longer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried, and what came of it."""

    level: Literal["ok", "warning", "failed"]
    where: str
    """The setting it is about."""
    what: str
    hint: str = ""
    """What to look at, or to do."""
    certain: bool = field(default=False, compare=False)
    """No clock had a say in it: a connection that was refused is so, however late our own loop is."""

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}" + (f" (look at: {self.hint})" if self.hint else "")


class Slow(Finding):
    """A peer that accepted the connection and took too long to answer: it is there."""


Findings = list[Finding]
Address = tuple[str, int]
Probe = Callable[[], Awaitable[Findings]]
T = TypeVar("T")


async def connections(settings: Settings, tell: Callable[[Finding], None]) -> None:
    """Try the gateway, the queue, Kubernetes and the signals; each is told once those before it are."""
    await ask(prepare(settings, await reach(settings)), tell)


async def reach(settings: Settings) -> dict[Address, str]:
    """The addresses that accept no connection, each with what is wrong."""
    asked = _addresses([settings.gateway.url], 80) | _addresses(_signal_urls(settings), 80)
    if settings.queue.url:
        asked |= _addresses([settings.queue.url], _queue_port(settings.queue.url))
    if settings.tracing.endpoint:
        asked |= _addresses([settings.tracing.endpoint], 80)

    async def one(address: Address) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
        except OSError as error:
            return f"{address[0]}:{address[1]}: {_words(error)}"
        writer.transport.abort()
        return None

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(one(address) for address in asked))

    async with _watched() as watch:
        told, _ = await _fairly(watch, all_of_them, lambda told: not any(told))
    return {address: why for address, why in zip(asked, told, strict=True) if why is not None}


def prepare(settings: Settings, away: Mapping[Address, str]) -> dict[str, Probe]:
    """The probe of each part, with all that it needs imported and built; what is `away` needs nothing."""
    probes = {
        "gateway.url": _gateway(settings, away),
        "queue.url": _queue(settings, away) if settings.queue.url else _embedded(settings),
        "signals": _signals(settings, away),
    }
    return probes | ({"tracing.endpoint": _traces(settings, away)} if settings.tracing.endpoint else {})


async def ask(probes: Mapping[str, Probe], tell: Callable[[Finding], None]) -> None:
    """Run the probes, all at the same time, and tell what each found, in their order."""
    async with _watched() as watch, asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_judged_fairly(watch, *probe)) for probe in probes.items()]
        for task in started:
            for finding in await task:
                tell(finding)


async def _judged_fairly(watch: PaceWatch, where: str, probe: Probe) -> Findings:
    async def bounded() -> Findings:
        try:
            async with asyncio.timeout(WHOLE_S):
                return await probe()
        except TimeoutError:
            return [Finding("failed", where, f"no answer within {WHOLE_S:g} s")]

    findings, behind = await _fairly(watch, bounded, lambda found: not any(map(_blames, found)))
    if not behind:
        return findings
    return [_unknown(each, behind) if _blames(each) else each for each in findings]


def _blames(finding: Finding) -> bool:
    """Whether it may be our own loop that was late."""
    return isinstance(finding, Slow) or (finding.level == "failed" and not finding.certain)


def _unknown(finding: Finding, behind: str) -> Finding:
    what = f"not known ({finding.what}): this process gets too little CPU: {behind}"
    return Finding(finding.level, finding.where, what)


async def _fairly(
    watch: PaceWatch, act: Callable[[], Awaitable[T]], good: Callable[[T], bool]
) -> tuple[T, str]:
    """What the act comes to; once more where that is not good, and our own loop may be why.

    And in words how far the loop was behind, where it was the second time too; else nothing.
    """
    found, behind = await _timed(watch, act)
    if not good(found) and behind:
        found, behind = await _timed(watch, act)
    return found, "" if good(found) else behind


async def _timed(watch: PaceWatch, act: Callable[[], Awaitable[T]]) -> tuple[T, str]:
    """What the act comes to, and how far the loop was behind meanwhile, where that is too far."""
    clock = asyncio.get_running_loop().time
    began_at, behind_s = clock(), watch.pace.behind_s
    found = await act()
    await asyncio.sleep(2 * watch.step_s)  # what is late now is counted by then
    behind_s, took_s = watch.pace.behind_s - behind_s, clock() - began_at
    if behind_s < max(BEHIND_SHARE * took_s, BEHIND_LEAST_S):
        return found, ""
    return found, f"its event loop was behind for {behind_s:.1f} of {took_s:.1f} s; {watch.cause()}"


@asynccontextmanager
async def _watched() -> AsyncIterator[PaceWatch]:
    """A watch on the loop's pace for the length of the block."""
    watch = PaceWatch(step_s=STEP_S)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        yield watch
        watching.cancel()


# The gateway: an HTTP GET, for which no gateway computes anything.


def _gateway(settings: Settings, away: Mapping[Address, str]) -> Probe:
    gateway = settings.gateway
    [address] = _addresses([gateway.url], 80)
    if address in away:
        return _known(Finding("failed", "gateway.url", away[address]))
    try:
        tls = gateway.tls.context() if gateway.url.scheme == "https" else None
    except OSError as error:
        return _known(Finding("failed", "gateway.tls", f"cannot be used: {error}"))
    return lambda: _get_once(settings, address, tls)


async def _get_once(settings: Settings, address: Address, tls: ssl.SSLContext | None) -> Findings:
    where, parts = "gateway.url", urlsplit(settings.gateway.url.bare)
    host, port = address
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except OSError as error:  # of which time-outs and what TLS has to say
        hint = "gateway.tls" if isinstance(error, ssl.SSLError) else ""
        refused = isinstance(error, ConnectionRefusedError)
        return [Finding("failed", where, f"{host}:{port}: {_words(error)}", hint, certain=refused)]
    path = parts.path.rstrip("/") + settings.gateway.path
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(_get(settings, f"{host}:{port}" if parts.port else host, path))
            status, start, allow = await _answer(reader)
    except TimeoutError:
        what = f"{host}:{port} accepted the connection; GET {path} was not answered within {ANSWER_S:g} s"
        return [Slow("warning", where, what, "gateway.url: its port, and http or https; else it is slow")]
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        what = f"{host}:{port} accepts connections, but does not answer HTTP: {_words(error)}"
        return [Finding("failed", where, what, "gateway.url: its port, and http or https")]
    finally:
        writer.transport.abort()
    what = f"connected ({'TCP' if tls is None else 'TLS'}); GET {path} was answered {status}"
    return [replace(_judged(where, what, status, start, allow, plain=tls is None), certain=True)]


def _judged(where: str, what: str, status: int, start: bytes, allow: str, *, plain: bool) -> Finding:
    """The dispatcher takes these for an unreachable gateway; anything else shows that a route is there. A 405
    does too, for who takes POST alone answers a GET so; unless it says that it takes no POST."""
    if status in (401, 403, 407):
        return Finding("failed", where, f"{what}: it does not accept our credentials", "gateway.token_file")
    if status == 400 and plain and b"HTTPS" in start.upper():  # as nginx and Go's servers put it
        return Finding("failed", where, f"{what}: that port speaks TLS", "gateway.url: https")
    if status == 400:
        hint = "gateway.url, gateway.path and gateway.headers, if requests are answered so too"
        return Finding("ok", where, what, hint)
    if status == 404 and not start:
        hint = "gateway.path, the HTTPRoute, or a Host in gateway.headers"
        return Finding("failed", where, f"{what} with an empty body: it has no such route", hint)
    if status == 404 or (status == 405 and allow and "POST" not in allow.upper()):
        took = "has nothing at this path" if status == 404 else f"takes {allow[:40]!r} there, and no POST"
        hint = "gateway.url, gateway.path"
        return Finding("failed", where, f"{what}: it {took}, and may be no inference gateway", hint)
    if 300 <= status < 400:
        return Finding("warning", where, f"{what}: redirects are not followed", where)
    if status >= 500:
        hint = "the gateway's endpoint picker and model servers"
        return Finding("warning", where, what + ("" if start else " with an empty body"), hint)
    return Finding("ok", where, what)


def _get(settings: Settings, host: str, path: str) -> bytes:
    gateway = settings.gateway
    headers = {"host": host, "user-agent": f"batch-dispatcher/{dispatcher.__version__}", "accept": "*/*"}
    headers |= {name.lower(): value for name, value in gateway.headers.items()} | {"connection": "close"}
    if gateway.token_file and (token := _text(gateway.token_file)):
        headers["authorization"] = f"Bearer {token}"
    elif gateway.url.credentials:
        given = base64.b64encode(":".join(gateway.url.credentials).encode()).decode()
        headers["authorization"] = f"Basic {given}"
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, str]:
    """Status, how the body begins, the methods that are allowed. Raises ValueError for what is not HTTP."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    match = re.match(r"HTTP/1\.[01] (\d{3})\b", head)
    if match is None:
        raise ValueError("its first line is none of HTTP/1")
    allowed = re.search(r"^allow: *(.*?) *\r?$", head, re.IGNORECASE | re.MULTILINE)
    status, allow = int(match[1]), "" if allowed is None else allowed[1]
    length = re.search(r"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
    if length is not None:
        return status, await reader.read(min(int(length[1]), BEGINNING_BYTES)), allow
    start = await reader.read(BEGINNING_BYTES)
    return status, b"" if start.startswith(b"0\r\n") else start, allow  # the empty last chunk


# The queue.


def _queue(settings: Settings, away: Mapping[Address, str]) -> Probe:
    url = settings.queue.url
    why = _all_away(_addresses([url], _queue_port(url)), away)
    if why is not None:
        return _known(Finding("failed", "queue.url", why))
    return _survey("queue.url", url.reveal(), settings)


def _queue_port(url: SecretUrl) -> int:
    return 26379 if "sentinel" in url.scheme else 6379


def _traces(settings: Settings, away: Mapping[Address, str]) -> Probe:
    """Whether the endpoint is there; no span is made up to try it."""
    missing = _all_away(_addresses([settings.tracing.endpoint], 80), away)
    if missing is None:
        return _known(Finding("ok", "tracing.endpoint", "accepts connections"))
    return _known(Finding("warning", "tracing.endpoint", f"{missing}: traces are lost, and nothing else"))


def _embedded(settings: Settings) -> Probe:
    """The Valkey of our own: the one that runs, else whether one could."""
    from dispatcher.queue.embedded import EmbeddedError, find_server, running_url

    data_dir = Path(settings.queue.data_dir).absolute()
    running = running_url(data_dir)
    if running is not None:
        return _survey("queue.data_dir", running, settings)
    try:
        find_server()
    except EmbeddedError as error:
        return _known(Finding("failed", "queue.url", str(error)))
    there = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        hint = "a directory on a writable volume, or a Redis in queue.url"
        return _known(Finding("failed", "queue.data_dir", f"{there} cannot be written", hint))
    what = f"{data_dir} can be written; an embedded Valkey runs there while a dispatcher does, none now"
    return _known(Finding("ok", "queue.data_dir", what))


def _survey(where: str, url: str, settings: Settings) -> Probe:
    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.keys import Names, QueueNameError
    from dispatcher.queue.redis.connect import QueueUrlError
    from dispatcher.queue.redis.survey import OLDEST, Survey, survey

    def told(found: Survey) -> Iterator[Finding]:
        server, counts = found.server, found.counts
        named = f"{server.name} {server.version}" if server else "a server that does not show its version"
        yield Finding("ok", where, f"{named} answers in {found.answer_s * 1000:.1f} ms")
        if server is not None:
            yield from _doubts(where, server.name, server, OLDEST)
        if not found.wakes:
            what = "this user may not hear of new work: it is noticed within queue.poll_s"
            yield Finding("warning", where, what, "docs/security.md")
        what = (
            f"{counts.pending} pending, {counts.leased} leased, {counts.delayed} delayed, {counts.dead} dead"
        )
        yield Finding("ok", "queue.name", f"{settings.queue.name}: {what}")
        if found.paused is not None:
            by, why = found.paused
            yield Finding("warning", "queue.name", f"paused by {by}: {why}", "batch-dispatcher resume")

    async def asked() -> Findings:
        queue = settings.queue
        try:
            return list(told(await survey(url, Names(queue.name, queue.results, queue.result_lists))))
        except (QueueUnavailableError, QueueUrlError, QueueNameError) as error:
            return [Finding("failed", where, str(error))]

    return asked


def _doubts(where: str, name: str, server: Any, oldest: dict[str, tuple[int, int]]) -> Iterable[Finding]:
    if server.too_old:
        least = ".".join(map(str, oldest[name]))
        yield Finding("failed", where, f"{name} {server.version} is too old: {least} or newer is needed")
    if server.replica:
        yield Finding("failed", where, "this is a replica: it takes no writes", "the primary, or Sentinel")
    if server.evicts:
        what = f"when its memory is full it drops keys ({server.evicts}): accepted requests are lost"
        yield Finding("warning", where, what, "maxmemory-policy noeviction in the server's configuration")
    if not server.durable:
        what = "no append-only file: when it dies, what it accepted since its last snapshot is lost"
        yield Finding("warning", where, what, "appendonly yes in the server's configuration")


# Kubernetes and the signals: what the first finds is where the second looks.


def _signals(settings: Settings, away: Mapping[Address, str]) -> Probe:
    signals, urls = settings.signals, _signal_urls(settings)
    direct, watched = signals.source != "prometheus", bool(Access())
    by_watch = direct and not signals.epp.urls and not signals.epp.service
    if by_watch and not watched and not urls:
        what = "nothing says where the endpoint picker is: no URL, no service, no Kubernetes to ask"
        return _known(Finding("failed", "signals", what, _WHERE))
    # A service's name is the source's own to resolve.
    why = _all_away(_addresses(urls, 80), away) if urls and not (direct and signals.epp.service) else None
    look_around = _watch(settings) if watched else None
    ask_sources = _sources(settings) if why is None or (by_watch and watched) else None

    async def asked() -> Findings:
        findings, replicas = await look_around() if look_around is not None else ([], None)
        if by_watch and replicas is None and not urls:
            what = "nothing says where the endpoint picker is: no URL, no service, and Kubernetes does not"
            return [*findings, Finding("failed", "signals", what, _WHERE)]
        if ask_sources is None or (why is not None and replicas is None):
            return [*findings, Finding("failed", "signals", why or "", _WHERE, certain=True)]
        return [*findings, *await ask_sources(replicas)]

    return asked


def _sources(settings: Settings) -> Callable[[tuple[str, ...] | None], Awaitable[Findings]]:
    """What asks the sources, given what Kubernetes says of the endpoint picker."""
    from dispatcher.signals.sources import probe, sources

    try:
        made = sources(settings)
    except OSError as error:
        refused = Finding("failed", "signals.epp.tls", f"cannot be used: {error}")

        async def refuse(_: tuple[str, ...] | None) -> Findings:
            return [refused]

        return refuse

    async def asked(replicas: tuple[str, ...] | None) -> Findings:
        return [_finding(each) for each in await probe(settings, replicas, made)]

    return asked


_WHERE = "signals.epp.urls, signals.epp.service or signals.prometheus.url"


def _signal_urls(settings: Settings) -> list[SecretUrl]:
    """The addresses that the settings give for the signals."""
    signals = settings.signals
    through = signals.source == "prometheus" or (signals.source == "auto" and signals.prometheus.url)
    direct = signals.epp.urls if signals.source != "prometheus" else ()
    return [*direct, *([signals.prometheus.url] if through else [])]


def _watch(settings: Settings) -> Callable[[], Awaitable[tuple[Findings, tuple[str, ...] | None]]]:
    """What looks around in the cluster: what it finds, and where the endpoint picker is."""
    from dispatcher.signals import kube
    from dispatcher.signals.capacity import describe, look
    from dispatcher.telemetry.events import diverted

    kube.prepare()
    pool, epp = settings.pool, settings.signals.epp

    async def look_around() -> tuple[Findings, tuple[str, ...] | None]:
        with diverted(lambda _event, _fields: None):  # what it would log, the findings say
            found = await look(pool, epp, timeout_s=ANSWER_S)
        return [_finding(each) for each in describe(pool, epp, found)], found.epp_addresses

    return look_around


def _finding(told: Any) -> Finding:
    """What a signals probe found, in the terms of `check`."""
    level: Literal["ok", "warning", "failed"] = (
        "failed" if not told.ok else "warning" if told.doubtful else "ok"
    )
    return Finding(level, told.name, told.detail, told.hint)


# Reaching.


def _addresses(urls: Sequence[SecretUrl], usual_port: int) -> set[Address]:
    """Host and port of each host of each URL."""
    found = set()
    for url in urls:
        port = 443 if url.scheme == "https" else usual_port
        for host in url.hosts:
            parts = urlsplit(f"//{host}")
            found.add((parts.hostname or "", parts.port or port))
    return found


def _all_away(asked: Iterable[Address], away: Mapping[Address, str]) -> str | None:
    """What is wrong with each; None where one at least accepts connections, or none is asked (a socket)."""
    told = [away.get(address) for address in sorted(asked)]
    return None if None in told or not told else "; ".join(filter(None, told))


def _known(finding: Finding) -> Probe:
    """For what needs no asking."""

    async def told() -> Findings:
        return [replace(finding, certain=True)]

    return told


def _words(error: Exception) -> str:
    """An error as an operator would say it."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed"
    return reason(error) if isinstance(error, OSError) else str(error)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""  # a finding of its own
