"""Signals from the metrics pages of the model servers, for pools without endpoint picker and Prometheus.

Each page shows the requests that run and wait at its server now. Without a picker no other queue is visible,
so F_SYS is everything that runs and waits, and F_EPP is 0. Few servers show how many requests they run at
once. Unless all servers do, the number comes from `budget.per_endpoint`, or the dispatcher searches for it.
"""

from __future__ import annotations

import math
import ssl
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.series import PoolView, max_or_nan, sum_or_nan
from dispatcher.signals.exposition import OptionalSeries, PageParser, Sample
from dispatcher.signals.scrape import Scraper, ScrapeTarget, SeriesSelection, Targets, make_unread


class ModelServerKind(Enum):
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
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
"""Series of newer versions of vLLM with the waiting requests by reason. Requests with the reason `capacity`
wait because the server is full. Requests with the reason `deferred` wait for a grammar, a remote KV cache or
a LoRA adapter."""
_GRAMMAR = "sglang:num_grammar_queue_reqs"
"""Requests that SGLang counts neither as running nor as waiting, because their grammar is not ready."""
_CACHE_CONFIG, _CACHE_TOKENS = "vllm:cache_config_info", "kv_cache_size_tokens"
"""Series of vLLM with a sample for each engine, and its label with the size of the KV cache in tokens. Only
the newest versions have this label. Other labels show the number of blocks and their size, but their product
is wrong for hybrid models, so it is not used."""
_SGLANG_TOKENS = "sglang:max_total_num_tokens"
"""Size of the KV cache in tokens."""
_KV_SIZES = OptionalSeries(frozenset({_CACHE_CONFIG, _SGLANG_TOKENS}), 1000, "series of sizes of KV caches")
_SELECTION = SeriesSelection(
    frozenset(name for kind in ModelServerKind for names in kind.value for name in names)
    | {_SWAPPED, _WAITING_BY_REASON, _GRAMMAR},
    # An error in these must not hide the load.
    optional=(_KV_SIZES,),
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
    """Share of the KV cache in use, that of the fullest engine."""
    kv_tokens: float | None
    """KV cache of all engines in tokens. `None` if the page does not show a usable number for each of them.
    """
    limit: float | None
    """Requests that the server runs at once. `None` if its page does not show a usable number."""


class ModelServersSource:
    """Scrapes every model server of a pool. Only one poll may run at a time."""

    name: Final = "vllm"
    min_interval_s: Final = 0.0

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
            refusal_hints=(f"{token}: the servers refuse this one", token),
            tls=tls,
        )

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
        """Ignore the endpoint picker's pods: this source scrapes model servers."""

    async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
        """Scrape every server now and return one view of all of them.

        If one server cannot be read, the load of the pool is not known, and the result is an Unread.
        """
        pages = await self._scraper.scrape_replicas(_SELECTION, _parse_page)
        return pages if isinstance(pages, ReadFailure) else (_merge_pages(pages),)

    async def read_latencies(self) -> None:
        """Return `None`: the histograms of a page are those of one server. Prometheus aggregates them."""

    async def close(self) -> None:
        await self._scraper.close()


def _parse_page(
    target: ScrapeTarget, page: PageParser, opened_at: float, closed_at: float
) -> _ServerPage | ReadFailure:
    for kind in ModelServerKind:
        running, waiting, kv_cache, limits = (_find_gauge_values(page.samples, names) for names in kind.value)
        if not running and not waiting:
            continue  # the page of another kind of server
        if not running or not waiting:
            missing = kind.value[1 if running else 0][0]
            return make_unread(target, f"{missing} is not there", "a model server that shows both")
        used = max_or_nan(kv_cache) if kv_cache else None
        queued, deferred = sum_or_nan(waiting), 0.0
        # In vLLM the deferred requests are a part of the waiting ones. In SGLang they come on top.
        if kind is ModelServerKind.VLLM:
            deferred = _count_deferred(page.samples, queued)
            queued = sum_or_nan([queued, *_find_gauge_values(page.samples, (_SWAPPED,))])
        elif kind is ModelServerKind.SGLANG:
            deferred = sum_or_nan(_find_gauge_values(page.samples, (_GRAMMAR,)))
            queued = sum_or_nan([queued, deferred])
        return _ServerPage(
            opened_at,
            closed_at,
            running=sum_or_nan(running),
            waiting=queued,
            deferred=deferred,
            kv_cache=used,
            kv_tokens=_sum_kv_tokens(page, engine_count=len(running)),
            limit=_sum_sizes(limits),
        )
    return make_unread(
        target,
        "none of the series of vLLM, SGLang or TensorRT-LLM is there",
        "signals.vllm: the address must be a model server's metrics page (SGLang: --enable-metrics)",
    )


def _find_gauge_values(samples: Sequence[Sample], names: Sequence[str]) -> list[float]:
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


def _count_deferred(samples: Sequence[Sample], waiting: float) -> float:
    """Return the number of waiting requests that do not wait for the server's capacity.

    The two reasons are separate gauges and may disagree. The smaller number counts then: at most all waiting
    requests less those that wait for capacity. The result is 0 if one of the numbers is impossible.
    """
    reasons = [sample for sample in samples if sample.name == _WAITING_BY_REASON]
    deferred = sum_or_nan(each.value for each in reasons if each.labels.get("reason") == "deferred")
    capacity = sum_or_nan(each.value for each in reasons if each.labels.get("reason") == "capacity")
    if not (0.0 <= deferred <= waiting < math.inf and 0.0 <= capacity < math.inf):
        return 0.0
    return min(deferred, max(0.0, waiting - capacity))


def _sum_sizes(sizes: Sequence[float]) -> float | None:
    """Return the sum of the limits, or of the KV caches, of engines or servers.

    `None` if there is none, or if one of them or the sum is no positive finite number.
    """
    total = sum_or_nan(sizes)
    return total if math.isfinite(total) and min(sizes, default=0.0) > 0 else None


def _sum_kv_tokens(page: PageParser, engine_count: int) -> float | None:
    """Return the tokens in the KV caches of all engines of a server. `None` if the page does not show one
    usable number for each engine."""
    samples = page.optional[_KV_SIZES].samples
    tokens = [_parse_number(each.labels.get(_CACHE_TOKENS)) for each in samples if each.name == _CACHE_CONFIG]
    tokens += _find_gauge_values(samples, (_SGLANG_TOKENS,))
    # After a malformed line, samples of other engines are missing.
    return _sum_sizes(tokens) if len(tokens) == engine_count else None


def _parse_number(text: str | None) -> float:
    """Return the number in a label, or NaN if there is none."""
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _compute_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, or NaN if one of the values is no finite number."""
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def _compute_mean_use(shares: Sequence[float], sizes: Sequence[float], total: float | None) -> float:
    """Return the mean share of the KV cache in use, weighted by the size of each server's cache. It is the
    plain mean if the total size is not known."""
    if total is None:
        return sum_or_nan(shares) / len(shares)
    return sum_or_nan(share * (size / total) for share, size in zip(shares, sizes, strict=True))


def _merge_pages(pages: Sequence[_ServerPage]) -> PoolView:
    count = len(pages)
    running, waiting = sum_or_nan(each.running for each in pages), sum_or_nan(each.waiting for each in pages)
    used = [each.kv_cache for each in pages if each.kv_cache is not None]
    deferred = sum_or_nan(each.deferred for each in pages)
    raw = {"servers": float(count), "running": running, "waiting": waiting}
    if deferred:
        raw["deferred"] = deferred
    if used:
        raw["kv_cache_most"] = max_or_nan(used)
    limits = [each.limit for each in pages if each.limit is not None]
    # A server that does not show its limit may run any number of requests, so the sum would be too small.
    limit = sum_or_nan(limits) if len(limits) == count else None
    if limit is not None:
        raw["limit"] = limit
    sizes = [each.kv_tokens for each in pages if each.kv_tokens is not None]
    kv_tokens = _sum_sizes(sizes) if len(sizes) == count else None
    # Means per server, because a view has the same form for the picker, whose averages are means.
    return PoolView(
        min(each.opened_at for each in pages),
        max(each.closed_at for each in pages),
        running=running / count,
        waiting=waiting / count,
        deferred=deferred / count,
        kv_cache=_compute_mean_use(used, sizes, kv_tokens) if len(used) == count else None,
        kv_tokens=kv_tokens,
        server_queued=waiting - deferred,
        running_deviation=_compute_deviation([each.running for each in pages]),
        endpoints_with_room=float(sum(each.waiting <= each.deferred for each in pages)),
        ready=float(count),
        per_endpoint=None if limit is None else limit / count,
        has_current_averages=True,
        raw=raw,
    )
