"""Scrape the EPP directly, which gives the newest values: one page per replica and poll.

Each replica has its own flow control, so every replica is scraped. If one does not answer, its queue is
hidden, and the poll fails until the replica answers or leaves the list of endpoints.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from typing import Final

from dispatcher.core.limit.poll import Unread
from dispatcher.signals.epp import latency
from dispatcher.signals.epp.series import NAMES, View, view
from dispatcher.signals.exposition import Page
from dispatcher.signals.scrape import PAGE_MAX_BYTES, Scraper, ScrapeTarget, Sought, Targets, unread

LATENCIES_EACH_S = 15.0
"""Interval at which the latency histograms are read. With many tenants they have thousands of lines, too many
to parse them with each poll."""
SERVICE_ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 -- a path
_RIGHTS = "the token's service account needs a ClusterRole with nonResourceURLs: [/metrics], verbs: [get]"
_PAGE = Sought(NAMES)
_WITH_LATENCIES = Sought(NAMES, latency.NAMES, latency.SERIES_MOST)


class EppSource:
    """Scrapes every EPP replica of a pool. Only one poll may run at a time."""

    name: Final = "epp"
    interval_least_s: Final = 0.0

    def __init__(
        self,
        pool: str,
        targets: Targets,
        *,
        timeout_s: float,
        token_file: str = "",
        tls: ssl.SSLContext | None = None,
        page_max_bytes: int = PAGE_MAX_BYTES,
        marked: bool = False,
        latencies_each_s: float = LATENCIES_EACH_S,
    ) -> None:
        self._pool = pool
        self._marked = marked
        """True if batch requests have an objective, so that the picker's series may separate them."""
        self._latencies_each_s = latencies_each_s
        self._latencies_at = float("-inf")
        self._scraper = Scraper(
            "signals.epp",
            "endpoint picker",
            targets,
            timeout_s=timeout_s,
            token_file=token_file,
            refused=(_RIGHTS, f"signals.epp.token_file (in a pod: {SERVICE_ACCOUNT_TOKEN})"),
            tls=tls,
            page_max_bytes=page_max_bytes,
        )

    def discovered(self, addresses: tuple[str, ...] | None) -> None:
        """Set the addresses of the replicas from the Kubernetes watch, with or without a port."""
        self._scraper.found = addresses

    async def poll(self) -> tuple[View, ...] | Unread:
        """Scrape every replica now. A network error is an Unread, never an exception."""
        now = asyncio.get_running_loop().time()
        latencies = now - self._latencies_at >= self._latencies_each_s

        def read(target: ScrapeTarget, page: Page, opened_at: float, closed_at: float) -> View | Unread:
            seen = view(page.samples, self._pool, opened_at, closed_at, target.label)
            if isinstance(seen, Unread):
                return unread(target, seen.why, seen.hint)
            if not latencies:
                return seen
            found = latency.histograms(page.also, target.label, marked=self._marked, spoiled=page.spoiled)
            return replace(seen, histograms=found)

        views = await self._scraper.ask(_WITH_LATENCIES if latencies else _PAGE, read)
        if latencies:
            self._latencies_at = now
        return views if isinstance(views, Unread) else tuple(views)

    async def latency(self) -> None:
        """Return `None`, because the views have the histograms."""

    async def close(self) -> None:
        await self._scraper.close()
