"""Check the queue: a server, asked through the dispatcher's own client, or the embedded Valkey."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dispatcher.check.addresses import Address, explain_all_unreachable, list_addresses
from dispatcher.check.finding import Finding, Findings, Probe, make_known_probe
from dispatcher.limit.health import describe_pause
from dispatcher.queue.pool_identity import describe_different_pools
from dispatcher.settings.model import Settings
from dispatcher.settings.values import SecretUrl

if TYPE_CHECKING:
    from dispatcher.queue.redis.server_report import ServerFacts, ServerReport


def list_queue_addresses(settings: Settings) -> set[Address]:
    """Return the addresses of the queue's servers. Empty for the embedded Valkey."""
    url = settings.queue.url
    return list_addresses([url], _get_default_port(url)) if url else set()


def build_probe(settings: Settings, unreachable: Mapping[Address, str]) -> Probe:
    """Return the probe of the queue. The probe of an unreachable queue only reports that."""
    url = settings.queue.url
    if not url:
        return _build_embedded_probe(settings)
    why = explain_all_unreachable(list_queue_addresses(settings), unreachable)
    if why is not None:
        return make_known_probe(Finding("failed", "queue.url", why))
    return _build_survey_probe("queue.url", url.reveal(), settings)


def _get_default_port(url: SecretUrl) -> int:
    return 26379 if "sentinel" in url.scheme else 6379


def _build_embedded_probe(settings: Settings) -> Probe:
    """Return a probe of the embedded Valkey: of the running one, or of whether one could run."""
    from dispatcher.queue.embedded import EmbeddedError, find_server, running_url

    data_dir = Path(settings.queue.data_dir).absolute()
    running = running_url(data_dir)
    if running is not None:
        return _build_survey_probe("queue.data_dir", running, settings)
    try:
        find_server()
    except EmbeddedError as error:
        return make_known_probe(Finding("failed", "queue.url", str(error)))
    # The directory is created at the first start. Until then its nearest parent decides.
    there = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        hint = "a directory on a writable volume, or a Redis in queue.url"
        return make_known_probe(Finding("failed", "queue.data_dir", f"{there} cannot be written", hint))
    what = f"{data_dir} can be written; an embedded Valkey runs there while a dispatcher does, none now"
    return make_known_probe(Finding("ok", "queue.data_dir", what))


def _build_survey_probe(where: str, url: str, settings: Settings) -> Probe:
    from dispatcher.queue.keys import QueueNameError, QueueNames
    from dispatcher.queue.redis.connect import QueueUrlError
    from dispatcher.queue.redis.server_report import inspect_server
    from dispatcher.requests.submission import QueueUnavailableError

    queue = settings.queue

    async def run_survey() -> Findings:
        try:
            found = await inspect_server(url, QueueNames(queue.name, queue.results, queue.result_lists))
        except (QueueUnavailableError, QueueUrlError, QueueNameError) as error:
            return [Finding("failed", where, str(error))]
        return list(_report_survey(where, queue.name, found))

    return run_survey


def _report_survey(where: str, name: str, surveyed_queue: ServerReport) -> Iterator[Finding]:
    server, counts = surveyed_queue.server, surveyed_queue.counts
    shown = f"{server.name} {server.release}" if server else "a server that does not show its version"
    yield Finding("ok", where, f"{shown} answers in {surveyed_queue.ping_s * 1000:.1f} ms")
    if server is not None:
        yield from _find_server_problems(where, server)
    if not surveyed_queue.can_subscribe:
        what = "this user may not hear of new work: it is noticed within queue.poll_s"
        yield Finding("warning", where, what, "docs/explanation/security.md")
    what = f"{counts.pending} pending, {counts.leased} leased, {counts.delayed} delayed, {counts.dead} dead"
    yield Finding("ok", "queue.name", f"{name}: {what}")
    if what := describe_different_pools(surveyed_queue.pools):
        yield Finding("warning", "queue.name", what, "a queue of its own for each pool")
    if surveyed_queue.paused is not None:
        by, why = surveyed_queue.paused
        yield Finding("warning", "queue.name", describe_pause(by, why), "batch-dispatcher resume")


def _find_server_problems(where: str, server: ServerFacts) -> Iterator[Finding]:
    from dispatcher.queue.redis.server_report import OLDEST_SERVERS

    if server.is_too_old:
        least = ".".join(map(str, OLDEST_SERVERS[server.name]))
        yield Finding(
            "failed", where, f"{server.name} {server.release} is too old: {least} or newer is needed"
        )
    if server.is_replica:
        yield Finding("failed", where, "this is a replica: it takes no writes", "the primary, or Sentinel")
    if server.eviction_policy:
        what = f"when its memory is full it drops keys ({server.eviction_policy}): accepted requests are lost"
        yield Finding("warning", where, what, "maxmemory-policy noeviction in the server's configuration")
    if not server.is_durable:
        what = "no append-only file: when it dies, what it accepted since its last snapshot is lost"
        yield Finding("warning", where, what, "appendonly yes in the server's configuration")
