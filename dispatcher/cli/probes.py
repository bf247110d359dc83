"""What `check` finds behind the addresses of a configuration: all tried at the same time, told in order.

Nothing is changed or consumed, and what is not there costs no time: a client library takes longer to import
than a connection to be refused, so each is imported only once something accepts a connection.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import dispatcher
from dispatcher.settings import SecretUrl, Settings

CONNECT_S = 1.5
ANSWER_S = 3.0
WHOLE_S = 10.0
"""No probe takes longer, whatever it waits for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried, and what came of it."""

    level: Literal["ok", "warning", "failed"]
    where: str
    """The setting it is about."""
    what: str
    hint: str = ""
    """What to look at, or to do."""

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}" + (f" (look at: {self.hint})" if self.hint else "")


Findings = list[Finding]


async def connections(settings: Settings, tell: Callable[[Finding], None]) -> None:
    """Try the gateway, the queue, Kubernetes and the signals; each is told once those before it are."""
    probes: dict[str, Coroutine[Any, Any, Findings]] = {
        "gateway.url": _gateway(settings),
        "queue.url": _queue(settings) if settings.queue.url else _embedded(settings),
        "signals": _signals(settings),
    }
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_bounded(where, probe)) for where, probe in probes.items()]
        for task in started:
            for finding in await task:
                tell(finding)


async def _bounded(where: str, probe: Coroutine[Any, Any, Findings]) -> Findings:
    try:
        async with asyncio.timeout(WHOLE_S):
            return await probe
    except TimeoutError:
        return [Finding("failed", where, f"no answer within {WHOLE_S:g} s")]


# The gateway: an HTTP GET, for which no gateway computes anything.


async def _gateway(settings: Settings) -> Findings:
    gateway = settings.gateway
    where, address = "gateway.url", urlsplit(gateway.url.bare)
    secure = address.scheme == "https"
    host, port = address.hostname or "", address.port or (443 if secure else 80)
    try:
        tls = gateway.tls.context() if secure else None
    except OSError as error:
        return [Finding("failed", "gateway.tls", f"cannot be used: {error}")]
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except OSError as error:  # of which time-outs and what TLS has to say
        hint = "gateway.tls" if isinstance(error, ssl.SSLError) else ""
        return [Finding("failed", where, f"{host}:{port}: {_words(error)}", hint)]
    path = address.path.rstrip("/") + gateway.path
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(_get(settings, f"{host}:{port}" if address.port else host, path))
            status, empty = await _answer(reader)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        what = f"{host}:{port} accepts connections, but does not answer HTTP: {_words(error)}"
        return [Finding("failed", where, what, "gateway.url: its port, and http or https")]
    finally:
        writer.transport.abort()
    kind = "TLS" if secure else "TCP"
    what = f"connected ({kind}); GET {path} was answered {status}"
    return [_judged(where, what, status, empty)]


def _judged(where: str, what: str, status: int, empty: bool) -> Finding:
    """The dispatcher takes these for an unreachable gateway; anything else shows that a route is there."""
    if status in (401, 403, 407):
        return Finding("failed", where, f"{what}: it does not accept our credentials", "gateway.token_file")
    if status == 404 and empty:
        hint = "gateway.path, the HTTPRoute, or a Host in gateway.headers"
        return Finding("failed", where, f"{what} with an empty body: it has no such route", hint)
    if 300 <= status < 400:
        return Finding("warning", where, f"{what}: redirects are not followed", where)
    if status >= 500:
        hint = "the gateway's endpoint picker and model servers"
        return Finding("warning", where, what + (" with an empty body" if empty else ""), hint)
    return Finding("ok", where, what)


def _get(settings: Settings, host: str, path: str) -> bytes:
    gateway = settings.gateway
    headers = {"host": host, "user-agent": f"batch-dispatcher/{dispatcher.__version__}", "accept": "*/*"}
    headers |= {name.lower(): value for name, value in gateway.headers.items()}
    if gateway.token_file and (token := _text(gateway.token_file)):
        headers["authorization"] = f"Bearer {token}"
    elif gateway.url.credentials:
        given = base64.b64encode(":".join(gateway.url.credentials).encode()).decode()
        headers["authorization"] = f"Basic {given}"
    headers["connection"] = "close"
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the body is empty. Raises ValueError for what is not HTTP."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    match = re.match(r"HTTP/1\.[01] (\d{3})\b", head)
    if match is None:
        raise ValueError("its first line is none of HTTP/1")
    length = re.search(r"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
    if length is not None:
        return int(match[1]), int(length[1]) == 0
    return int(match[1]), (await reader.read(1)) in (b"", b"0")  # its end, or the empty last chunk


# The queue.


async def _queue(settings: Settings) -> Findings:
    url = settings.queue.url
    usual = 26379 if "sentinel" in url.scheme else 6379
    if (why := await _unreachable(_addresses([url], usual))) is not None:
        return [Finding("failed", "queue.url", why)]
    return await _survey("queue.url", url.reveal(), settings)


async def _embedded(settings: Settings) -> Findings:
    """The Valkey of our own: the one that runs, else whether one could."""
    from dispatcher.queue.embedded import EmbeddedError, find_server, running_url

    data_dir = Path(settings.queue.data_dir).absolute()  # noqa: ASYNC240 - asks the process, not a disk
    running = running_url(data_dir)
    if running is not None:
        return await _survey("queue.data_dir", running, settings)
    try:
        find_server()
    except EmbeddedError as error:
        return [Finding("failed", "queue.url", str(error))]
    there = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        hint = "a directory on a writable volume, or a Redis in queue.url"
        return [Finding("failed", "queue.data_dir", f"{there} cannot be written", hint)]
    what = f"{data_dir} can be written; an embedded Valkey runs there while a dispatcher does, none now"
    return [Finding("ok", "queue.data_dir", what)]


async def _survey(where: str, url: str, settings: Settings) -> Findings:
    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.connect import QueueUrlError
    from dispatcher.queue.keys import Names, QueueNameError
    from dispatcher.queue.survey import OLDEST, survey

    try:
        found = await survey(url, Names(settings.queue.name, settings.queue.results))
    except (QueueUnavailableError, QueueUrlError, QueueNameError) as error:
        return [Finding("failed", where, str(error))]
    server, counts = found.server, found.counts
    named = f"{server.name} {server.version}" if server else "a server that does not show its version"
    findings = [Finding("ok", where, f"{named} answers in {found.answer_s * 1000:.1f} ms")]
    if server is not None:
        findings += _doubts(where, server.name, server, OLDEST)
    what = f"{counts.pending} pending, {counts.leased} leased, {counts.delayed} delayed, {counts.dead} dead"
    findings.append(Finding("ok", "queue.name", f"{settings.queue.name}: {what}"))
    if found.paused is not None:
        by, why = found.paused
        findings.append(Finding("warning", "queue.name", f"paused by {by}: {why}", "batch-dispatcher resume"))
    return findings


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


async def _signals(settings: Settings) -> Findings:
    signals = settings.signals
    findings: Findings = []
    replicas: tuple[str, ...] | None = None
    if _kubernetes():
        findings, replicas = await _look_around(settings)
    direct = signals.source != "prometheus"
    through = signals.source == "prometheus" or bool(signals.source == "auto" and signals.prometheus.url)
    # A service's name and what Kubernetes found are the source's own to resolve.
    asked: list[SecretUrl] = [signals.prometheus.url] if through else []
    if direct and replicas is None and not signals.epp.service:
        if not signals.epp.urls and not through:
            what = "nothing says where the endpoint picker is: no URL, no service, no Kubernetes to ask"
            hint = "signals.epp.urls, signals.epp.service or signals.prometheus.url"
            return [*findings, Finding("failed", "signals", what, hint)]
        asked += signals.epp.urls
        if (why := await _unreachable(_addresses(asked, 80))) is not None:
            return [*findings, Finding("failed", "signals", why, "signals.epp.urls, signals.prometheus.url")]
    from dispatcher.signals.sources import probe

    return [*findings, *map(_finding, await probe(settings, replicas))]


def _kubernetes() -> bool:
    """Whether it is worth two seconds of imports to look for a cluster; the watch then looks itself."""
    usual = Path.home() / ".kube" / "config"
    return any(name in os.environ for name in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG")) or usual.exists()


async def _look_around(settings: Settings) -> tuple[Findings, tuple[str, ...] | None]:
    from dispatcher.signals.capacity import describe, look

    pool, epp = settings.pool, settings.signals.epp
    found = await look(pool, epp, timeout_s=ANSWER_S)
    return [_finding(each) for each in describe(pool, epp, found)], found.epp_addresses


def _finding(told: Any) -> Finding:
    """What a signals probe found, in the terms of `check`."""
    level: Literal["ok", "warning", "failed"] = (
        "failed" if not told.ok else "warning" if told.doubtful else "ok"
    )
    return Finding(level, told.name, told.detail, told.hint)


# Reaching.


def _addresses(urls: Sequence[SecretUrl], usual_port: int) -> list[tuple[str, int]]:
    """Host and port of each host of each URL."""
    found = []
    for url in urls:
        port = 443 if url.scheme == "https" else usual_port
        for host in url.hosts:
            parts = urlsplit(f"//{host}")
            found.append((parts.hostname or "", parts.port or port))
    return found


async def _unreachable(addresses: Sequence[tuple[str, int]]) -> str | None:
    """None when any address accepts a connection, else what is wrong with each."""

    async def reach(host: str, port: int) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            return f"{host}:{port}: {_words(error)}"
        writer.transport.abort()
        return None

    told = await asyncio.gather(*(reach(*address) for address in addresses))
    return None if None in told or not told else "; ".join(filter(None, told))


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
    # One for each address of the name, with its number, where there are several.
    numbers = re.findall(r"Errno (\d+)", str(error))
    return os.strerror(int(numbers[0])).lower() if numbers else str(error)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""  # a finding of its own
