"""Signals from the metrics pages of the model servers, for pools without endpoint picker and Prometheus.

Each page shows the requests that run and wait at its server now. Without a picker no other queue is visible,
so F_SYS is everything that runs and waits, and F_EPP is 0. Few servers show how many requests they run at
once. Unless all servers do, the number comes from `budget.per_endpoint`, or the dispatcher searches for it.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dispatcher.core.limit.poll import Unread
from dispatcher.signals.epp.series import View, largest, total
from dispatcher.signals.exposition import Page, Sample
from dispatcher.signals.scrape import Scraper, ScrapeTarget, Sought, Targets, unread


class ModelServer(Enum):
    """Names of the gauges of one kind of model server.

    The gauges are, in order: running requests, waiting requests, share of the KV cache in use, and largest
    number of requests that run at once. Each has all its names, the newest first, or none if no server shows
    it.
    """

    VLLM = (
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:max_num_seqs",),  # not in vLLM 0.11; custom builds and newer versions may show it
    )
    SGLANG = (
        ("sglang:num_running_reqs",),
        ("sglang:num_queue_reqs",),
        ("sglang:token_usage",),
        ("sglang:max_running_requests_under_SLO",),
    )
    TENSORRT_LLM = (
        ("trtllm_num_requests_running",),
        ("trtllm_num_requests_waiting",),
        ("trtllm_kv_cache_utilization",),
        (),
    )


_SWAPPED = "vllm:num_requests_swapped"
"""Requests that were swapped out and wait to continue. Only in vLLM before its engine V1."""
_BY_REASON = "vllm:num_requests_waiting_by_reason"
"""Series of newer versions of vLLM with the waiting requests by reason. Requests with the reason `capacity`
wait because the server is full. Requests with the reason `deferred` wait for a grammar, a remote KV cache or
a LoRA adapter."""
_GRAMMAR = "sglang:num_grammar_queue_reqs"
"""Requests that SGLang counts neither as running nor as waiting, because their grammar is not ready."""
_PAGE = Sought(
    frozenset(name for kind in ModelServer for names in kind.value for name in names)
    | {_SWAPPED, _BY_REASON, _GRAMMAR}
)
_RANKS = ("tp_rank", "pp_rank")
"""Labels of the processes that serve the same requests together. SGLang may show each of them; only the
first one (rank 0) is counted."""


@dataclass(frozen=True, slots=True)
class _ServerPage:
    opened_at: float
    closed_at: float
    running: float
    waiting: float
    deferred: float
    """Part of `waiting` that would also wait in an empty server."""
    kv_cache: float | None
    limit: float | None
    """Requests that the server runs at once. `None` if its page does not show a usable number."""


class ServersSource:
    """Scrapes every model server of a pool. Only one poll may run at a time."""

    name: Final = "vllm"
    interval_least_s: Final = 0.0

    def __init__(
        self, targets: Targets, *, timeout_s: float, token_file: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        token = "signals.vllm.token_file"  # noqa: S105 -- the name of a setting
        self._scraper = Scraper(
            "signals.vllm",
            "model server",
            targets,
            timeout_s=timeout_s,
            token_file=token_file,
            refused=(f"{token}: the servers refuse this one", token),
            tls=tls,
        )

    def discovered(self, addresses: tuple[str, ...] | None) -> None:
        """Ignore the endpoint picker's pods: this source scrapes model servers."""

    async def poll(self) -> tuple[View, ...] | Unread:
        """Scrape every server now and return one view of all of them.

        If one server cannot be read, the load of the pool is not known, and the result is an Unread.
        """
        found = await self._scraper.ask(_PAGE, _served)
        return found if isinstance(found, Unread) else (_together(found),)

    async def latency(self) -> None:
        """Return `None`: the histograms of a page are those of one server. Prometheus aggregates them."""

    async def close(self) -> None:
        await self._scraper.close()


def _served(target: ScrapeTarget, page: Page, opened_at: float, closed_at: float) -> _ServerPage | Unread:
    for kind in ModelServer:
        running, waiting, kv_cache, limits = (_of(page.samples, names) for names in kind.value)
        if not running and not waiting:
            continue  # the page of another kind of server
        if not running or not waiting:
            missing = kind.value[1 if running else 0][0]
            return unread(target, f"{missing} is not there", "a model server that shows both")
        used = largest(kv_cache) if kv_cache else None
        queued, deferred = total(waiting), 0.0
        # In vLLM the deferred requests are a part of the waiting ones. In SGLang they come on top.
        if kind is ModelServer.VLLM:
            deferred = _deferred(page.samples, queued)
            queued = total([queued, *_of(page.samples, (_SWAPPED,))])
        elif kind is ModelServer.SGLANG:
            deferred = total(_of(page.samples, (_GRAMMAR,)))
            queued = total([queued, deferred])
        return _ServerPage(opened_at, closed_at, total(running), queued, deferred, used, _limit(limits))
    return unread(
        target,
        "none of the series of vLLM, SGLang or TensorRT-LLM is there",
        "signals.vllm: the address must be a model server's metrics page (SGLang: --enable-metrics)",
    )


def _of(samples: Sequence[Sample], names: Sequence[str]) -> list[float]:
    """Return the values of a gauge under its newest name on the page, one for each engine and model."""
    for name in names:
        values = [
            sample.value
            for sample in samples
            if sample.name == name
            and all(sample.labels.get(rank, "0") == "0" for rank in _RANKS)
            # With priority scheduling SGLang shows the total under an empty priority, and one part of it for
            # each priority.
            and not sample.labels.get("priority")
        ]
        if values:
            return values
    return []


def _deferred(samples: Sequence[Sample], waiting: float) -> float:
    """Return the number of waiting requests that do not wait for the server's capacity.

    The two reasons are separate gauges and may disagree. The smaller number counts then: at most all waiting
    requests less those that wait for capacity. The result is 0 if one of the numbers is impossible.
    """
    reasons = [sample for sample in samples if sample.name == _BY_REASON]
    deferred = total(each.value for each in reasons if each.labels.get("reason") == "deferred")
    capacity = total(each.value for each in reasons if each.labels.get("reason") == "capacity")
    if not (0.0 <= deferred <= waiting < math.inf and 0.0 <= capacity < math.inf):
        return 0.0
    return min(deferred, max(0.0, waiting - capacity))


def _limit(limits: Sequence[float]) -> float | None:
    """Return the sum of the limits of a server's engines.

    `None` if no limit is shown, or one of them is no positive number.
    """
    if not limits or not all(math.isfinite(limit) and limit > 0 for limit in limits):
        return None
    return total(limits)


def _together(servers: Sequence[_ServerPage]) -> View:
    count = len(servers)
    running, waiting = total(each.running for each in servers), total(each.waiting for each in servers)
    used = [each.kv_cache for each in servers if each.kv_cache is not None]
    deferred = total(each.deferred for each in servers)
    raw = {"servers": float(count), "running": running, "waiting": waiting}
    if deferred:
        raw["deferred"] = deferred
    if used:
        raw["kv_cache_most"] = largest(used)
    limits = [each.limit for each in servers if each.limit is not None]
    # A server that does not show its limit may run any number of requests, so the sum would be too small.
    limit = total(limits) if len(limits) == count else None
    if limit is not None:
        raw["limit"] = limit
    # Means per server, because a view has the same form for the picker, whose averages are means.
    return View(
        min(each.opened_at for each in servers),
        max(each.closed_at for each in servers),
        running=running / count,
        waiting=waiting / count,
        deferred=deferred / count,
        kv_cache=total(used) / len(used) if used else None,
        ready=float(count),
        per_endpoint=None if limit is None else limit / count,
        of_now=True,
        raw=raw,
    )
