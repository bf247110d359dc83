"""Scrape the EPP directly, which gives the newest values: one page per replica and poll.

Each replica has its own flow control, so every replica is scraped. If one does not answer, its queue is
hidden, and the poll fails until the replica answers or leaves the list of endpoints.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from typing import Final

from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp import in_flight_load, latency
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView, build_view
from dispatcher.signals.exposition import PageParser
from dispatcher.signals.scrape import (
    PAGE_MAX_BYTES,
    Scraper,
    ScrapeTarget,
    SeriesSelection,
    Targets,
    make_unread,
)

LATENCY_INTERVAL_S = 15.0
"""Interval at which the latency histograms are read. With many tenants they have thousands of lines, too many
to parse them with each poll."""
SERVICE_ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 -- a path
_RIGHTS = "the token's service account needs a ClusterRole with nonResourceURLs: [/metrics], verbs: [get]"
_SELECTION = SeriesSelection(SERIES_NAMES, (in_flight_load.SERIES,))
_SELECTION_WITH_LATENCIES = SeriesSelection(SERIES_NAMES, (in_flight_load.SERIES, latency.SERIES))


class EppSource:
    """Scrapes every EPP replica of a pool. Only one poll may run at a time."""

    name: Final = "epp"
    min_interval_s: Final = 0.0

    def __init__(
        self,
        pool: str,
        targets: Targets,
        *,
        timeout_s: float,
        token_file: str = "",
        tls: ssl.SSLContext | None = None,
        page_max_bytes: int = PAGE_MAX_BYTES,
        has_objective: bool = False,
        latency_interval_s: float = LATENCY_INTERVAL_S,
    ) -> None:
        self._pool = pool
        self._has_objective = has_objective
        """True if batch requests have an objective, so that the picker's series may separate them."""
        self._latency_interval_s = latency_interval_s
        self._latencies_read_at = float("-inf")
        self._scraper = Scraper(
            "signals.epp",
            "endpoint picker",
            targets,
            timeout_s=timeout_s,
            token_file=token_file,
            refusal_hints=(_RIGHTS, f"signals.epp.token_file (in a pod: {SERVICE_ACCOUNT_TOKEN})"),
            tls=tls,
            page_max_bytes=page_max_bytes,
        )

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
        """Set the addresses of the replicas from the Kubernetes watch, with or without a port."""
        self._scraper.replica_addresses = addresses

    async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
        """Scrape every replica now. A network error is an Unread, never an exception."""
        now = asyncio.get_running_loop().time()
        with_latencies = now - self._latencies_read_at >= self._latency_interval_s

        def parse_page(
            target: ScrapeTarget, page: PageParser, opened_at: float, closed_at: float
        ) -> PoolView | ReadFailure:
            seen = build_view(page.samples, self._pool, opened_at, closed_at, target.label)
            if isinstance(seen, ReadFailure):
                return make_unread(target, seen.why, seen.hint)
            load = page.optional[in_flight_load.SERIES]
            seen = replace(seen, load=in_flight_load.sum_in_flight_load(load.samples, load.problem))
            if not with_latencies:
                return seen
            latencies = page.optional[latency.SERIES]
            found = latency.build_histograms(
                latencies.samples,
                target.label,
                has_objective=self._has_objective,
                problem=latencies.problem,
            )
            return replace(seen, histograms=found)

        views = await self._scraper.scrape_replicas(
            _SELECTION_WITH_LATENCIES if with_latencies else _SELECTION, parse_page
        )
        if with_latencies:
            self._latencies_read_at = now
        return views if isinstance(views, ReadFailure) else tuple(views)

    async def read_latencies(self) -> None:
        """Return `None`, because the views have the histograms."""

    async def close(self) -> None:
        await self._scraper.close()
