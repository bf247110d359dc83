"""Metrics of the process: counted when something happens, rendered when /metrics is scraped.

Counting is an addition in a dict and uses no library. `prometheus_client` only renders the page.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, product
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dispatcher.telemetry.catalogue import CATALOGUE, EVENTS
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.series import OTHER_LABEL, PREFIX, Series, SeriesKind
from dispatcher.telemetry.status import Status

PAGE_MAX_AGE_S = 0.5
"""Maximum age of a rendered page. Rendering costs as much CPU time as several requests, so that frequent
scrapes share a page."""


class Metrics:
    """Counters and histograms of one process. Renders them together with the gauges of the status."""

    def __init__(
        self, pool: str = "", *, page_max_age_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._page_max_age_s = page_max_age_s
        self._clock = clock
        self._pages: dict[str, tuple[float, bytes]] = {}
        """Pages that were rendered, by content type, each with its time."""
        self._counts: dict[Series, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[Series, _Histogram] = {}
        self._status: Callable[[], Status] | None = None
        for series in CATALOGUE:
            if series.kind is SeriesKind.COUNTER:
                self._counts[series] = dict.fromkeys(product(*series.labels.values()), 0.0)
            elif series.kind is SeriesKind.HISTOGRAM:
                self._histograms[series] = _Histogram(series.buckets)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(_PageCollector(self._collect_families))

    def count(self, series: Series, *labels: str, amount: float = 1.0) -> None:
        """Add `amount` to a counter. An undeclared label value counts as `other`, and not at all if the
        series has no such value."""
        counts = self._counts[series]
        if labels not in counts:
            declared = series.labels.values()
            labels = tuple(
                # Values come from clients and servers, which must not be able to create series.
                label if label in values else OTHER_LABEL
                for label, values in zip(labels, declared, strict=True)
            )
            if labels not in counts:
                return
        counts[labels] += amount

    def set_total(self, series: Series, *labels: str, total: float) -> None:
        """Set a counter that another component counts."""
        self._counts[series][labels] = total

    def observe(self, series: Series, seconds: float) -> None:
        """Add a duration to a histogram. Negative values and NaN count as 0."""
        # A wait that starts at the creation time by the producer's clock can be negative. NaN compares as
        # false.
        self._histograms[series].observe(seconds if seconds > 0 else 0.0)

    def get_value(self, series: Series, *labels: str) -> float:
        """Return the value of a counter, or the number of observations of a histogram."""
        if series.kind is SeriesKind.HISTOGRAM:
            return float(sum(self._histograms[series].counts))
        return self._counts[series][labels]

    def count_event(self, event: Event, _fields: Mapping[str, Any]) -> None:
        """Count an event. This is a sink of events."""
        self.count(EVENTS, event.event_name)

    def set_status_source(self, status: Callable[[], Status]) -> None:
        """Set the function that returns the status from which the gauges are rendered."""
        self._status = status

    def render_page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the /metrics page and its content type. `accept` is the HTTP header that selects the format.
        The page may be up to `page_max_age_s` old."""
        encoder, content_type = choose_encoder(accept)
        now = self._clock()
        made_at, page = self._pages.get(content_type, (-math.inf, b""))
        if now - made_at >= self._page_max_age_s:
            page = encoder(self._registry)
            self._pages[content_type] = now, page
        return page, content_type

    def _collect_families(self) -> Iterator[Metric]:
        # One status per page, so that its gauges belong to the same moment.
        status = self._status() if self._status is not None else None
        for series in CATALOGUE:
            match series.kind:
                case SeriesKind.COUNTER:
                    yield self._build_counter(series, status)
                case SeriesKind.HISTOGRAM:
                    yield self._build_histogram(series)
                case SeriesKind.GAUGE if status is not None:
                    yield self._build_gauge(series, status)

    def _build_counter(self, series: Series, status: Status | None) -> Metric:
        family = CounterMetricFamily(
            PREFIX + series.name, series.description, labels=["pool", *series.labels]
        )
        counts = self._counts[series]
        if series.sampler is not None and status is not None:
            value = series.sampler(status)
            by_label = value if isinstance(value, Mapping) else {"": value or 0.0}
            counts = counts | {(label,) if label else (): float(count) for label, count in by_label.items()}
        for labels, total in counts.items():
            family.add_metric([self._pool, *labels], total)
        return family

    def _build_histogram(self, series: Series) -> Metric:
        histogram = self._histograms[series]
        family = HistogramMetricFamily(PREFIX + series.name, series.description, labels=["pool"])
        family.add_metric([self._pool], histogram.get_cumulative_counts(), histogram.sum)
        return family

    def _build_gauge(self, series: Series, status: Status) -> Metric:
        assert series.sampler is not None  # noqa: S101 -- every gauge has one
        family = GaugeMetricFamily(PREFIX + series.name, series.description, labels=["pool", *series.labels])
        value = series.sampler(status)
        if isinstance(value, Mapping):
            for label, sample in value.items():
                family.add_metric([self._pool, *label.split("\0")], sample)
        elif value is not None:
            family.add_metric([self._pool], float(value))
        return family


class _Histogram:
    """Histogram with fixed bucket bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def get_cumulative_counts(self) -> list[tuple[str, float]]:
        """Return the number of observations up to each bound, as the exposition format needs it."""
        bounds = map(floatToGoString, (*self.bounds, math.inf))
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class _PageCollector(Collector):
    """Collector that builds all series at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()

    # Without descriptions the registry does not collect at registration, when there is no status yet.
    def describe(self) -> list[Metric]:
        return []
