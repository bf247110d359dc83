"""Read the EPP's series through Prometheus: older by a scrape interval, but available without the EPP.

One instant query returns every series and the age of each sample. The server alone computes the age, as
`time() - timestamp(selector)`, so that its clock and the one of this process need not agree. The window of a
reading begins at the time of the query less this age, because Prometheus dates a sample by the start of the
scrape. The window is as long as the scrape took.

The client library is blocking. It runs in a thread that may hang without delaying anything but its own next
query.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from dispatcher.limit.budget import Reason
from dispatcher.limit.poll import ReadFailure
from dispatcher.limit.realtime_impact import ReplicaHistograms
from dispatcher.signals.blocking_call import BlockingCalls, StillRunningError
from dispatcher.signals.epp import latency
from dispatcher.signals.epp.series import START_TIME, Family, PoolView, build_view, min_or_nan
from dispatcher.signals.exposition import Sample
from dispatcher.signals.prometheus.instant_query import QueryError, parse_vector
from dispatcher.signals.prometheus.session import (
    PrometheusAddress,
    QuerySession,
    build_headers,
    connect_client,
)

LATENCY_TIMEOUT_S = 10.0
OWN_QUERY_WINDOW_S = 10.0
"""Largest age that is assumed for the samples of an own query, unless there is an `age` query."""

_VALUE, _AGE, _OWN = "dispatcher_value", "dispatcher_age", "dispatcher_own"
_TOOK = "dispatcher_took"
_FLOW_LABELS = "fairness_id, priority, model_name, target_model_name"
_SERVER_LABELS = "model_server_endpoint, model_server_pod"
_SUMMED = {
    Family.QUEUED: _FLOW_LABELS,
    Family.IN_FLIGHT: _FLOW_LABELS,
    Family.SERVER_QUEUES: _SERVER_LABELS,
}
"""Families with one series for each flow, model or server, and the labels that separate them. Prometheus
returns only their sum."""
_GONE_SHARE = 0.5
"""Share of the largest age of a reading. A series that is older than the newest one of its target by more
than that has left the page. A target that is late shows all of its series late."""
_SERIES_LABELS = frozenset(
    {"__name__", "inference_pool", "name", "stage", "detector", _VALUE, _AGE, _TOOK}
    | {label.strip() for labels in _SUMMED.values() for label in labels.split(",")}
)
"""Labels that the EPP sets. All other labels come from the scrape and identify the replica."""
_ONE_EACH = ("cluster", "namespace", "job")
"""Labels of the scrape that are the same for all replicas of one pool."""


class PrometheusSource:
    """Asks Prometheus for a pool's series. One poll at a time, also while one hangs."""

    name: Final = "prometheus"
    min_interval_s: Final = 1.0
    """Shortest interval between polls, because no scrape interval is shorter."""

    def __init__(
        self,
        access: PrometheusAddress,
        pool: str,
        namespace: str,
        *,
        timeout_s: float,
        max_age_s: float,
        queries: Mapping[str, str] | None = None,
        has_objective: bool = False,
    ) -> None:
        self._access = access
        self._pool = pool
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        given = {name: query for name, query in (queries or {}).items() if query.strip()}
        self._own_queries = {name: query for name, query in given.items() if name not in latency.OWN_QUERIES}
        self._own_query = build_own_query(self._own_queries)
        self._query = build_pool_query(pool, namespace, max_age_s)
        # The age of a sample inside an own query is not visible, so the server is told to ignore old samples.
        # Prometheus before 2.43 ignores the option.
        self._own_options = {"lookback_delta": str(math.ceil(max_age_s))}
        # Imported here and not in the threads of the blocking calls: two threads that import parts of one
        # package at the same time may see it incomplete.
        importlib.import_module("prometheus_api_client.prometheus_connect")
        self._calls = BlockingCalls("prometheus")
        self._session = QuerySession(access, timeout_s)
        self._client: Any = None
        # The latency query has its own thread and session, so that it cannot delay the query for readings.
        self._latency_query = latency.build_latency_query(
            _escape_literal(pool), _escape_literal(namespace), given, has_objective=has_objective
        )
        self._latency_calls = BlockingCalls("prometheus-latency")
        self._latency_session = QuerySession(access, LATENCY_TIMEOUT_S)
        self._latency_client: Any = None

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
        """Ignore the addresses, because Prometheus finds the EPP's pods by itself."""

    async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
        """Return the newest samples that Prometheus has. An error is an Unread, never an exception."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            rows, own_rows = await self._calls.run(self._query_series, self._timeout_s)
        except StillRunningError as error:
            return self._make_unread(f"{error}: it is not asked again before that returns")
        except TimeoutError:
            return self._make_unread(
                f"no answer within {self._timeout_s:g} s", "signals.interval_s allows more time"
            )
        except QueryError as error:
            return self._make_unread(str(error), error.hint)
        return self._build_views(rows, own_rows, asked_at, loop.time())

    async def read_latencies(self) -> ReplicaHistograms:
        """Return the latencies of the last minutes. An error is reported in `why_not`."""
        try:
            return await self._latency_calls.run(self._query_latencies, LATENCY_TIMEOUT_S)
        except StillRunningError as error:
            return ReplicaHistograms("", why_not=f"Prometheus: {error}")
        except TimeoutError:
            return ReplicaHistograms("", why_not=f"Prometheus gave no answer within {LATENCY_TIMEOUT_S:g} s")
        except QueryError as error:
            return ReplicaHistograms("", why_not=f"Prometheus: {error}")

    async def close(self) -> None:
        self._session.close()
        self._latency_session.close()

    def _query_latencies(self) -> ReplicaHistograms:
        """Run the latency query. This method runs in the thread of a blocking call."""
        if self._latency_client is None:
            self._latency_client = connect_client(self._access, self._latency_session)
        # The token file may have been replaced since the last query.
        self._latency_client.headers = build_headers(self._access)
        params = {"timeout": f"{LATENCY_TIMEOUT_S:g}", "partial_response": "false"}
        return latency.parse_latency_rows(
            parse_vector(self._latency_client.custom_query(self._latency_query, params=params))
        )

    def _query_series(self) -> tuple[list[Sample], list[Sample]]:
        """Run the queries. This method runs in the thread of a blocking call."""
        if self._client is None:
            self._client = connect_client(self._access, self._session)
        self._client.headers = build_headers(self._access)
        needs_series = {"saturation", "queued", "capacity"} - self._own_queries.keys()
        rows = self._run_query(self._query, {}) if needs_series else []
        return rows, self._run_query(self._own_query, self._own_options) if self._own_queries else []

    def _run_query(self, query: str, options: Mapping[str, str]) -> list[Sample]:
        # Thanos returns partial answers by default.
        params = {"timeout": f"{self._timeout_s:g}", "partial_response": "false", **options}
        return parse_vector(self._client.custom_query(query, params=params))

    def _build_views(
        self, rows: Sequence[Sample], own_rows: Sequence[Sample], asked_at: float, answered_at: float
    ) -> tuple[PoolView, ...] | ReadFailure:
        views: list[PoolView] = []
        for replica in self._group_by_target(rows):
            if isinstance(replica, ReadFailure):
                return replica
            seen = replica.make_view(self._pool, asked_at, answered_at, _GONE_SHARE * self._max_age_s)
            if isinstance(seen, ReadFailure):
                return self._make_unread(seen.why, seen.hint)
            views.append(seen)
        if self._own_queries:
            return self._apply_own_queries(views, own_rows, asked_at, answered_at)
        if not views:
            return self._make_unread(
                f'no series with the label name="{self._pool}" (namespace {self._namespace})',
                "pool.name and pool.namespace; or the EPP is not scraped (a PodMonitor for port 9090)",
            )
        return tuple(views)

    def _group_by_target(self, rows: Sequence[Sample]) -> list[_ScrapedReplica | ReadFailure]:
        """Group the rows by the target that they were scraped from, and return the targets of the pool."""
        named = any(row.labels.get("name") == self._pool for row in rows) or any(
            row.labels.get("inference_pool") == self._pool for row in rows
        )
        replicas: dict[frozenset[tuple[str, str]], _ScrapedReplica] = {}
        for row in rows:
            target = frozenset(item for item in row.labels.items() if item[0] not in _SERIES_LABELS)
            replicas.setdefault(target, _ScrapedReplica(dict(target))).rows.append(row)
        found = [replica for replica in replicas.values() if replica.has_pool(self._pool if named else "")]
        # A scrape job that was removed from the configuration leaves its last samples behind for minutes. If
        # all targets are old they are kept, so that the poll is reported as stale.
        found = [each for each in found if not each.age_s > self._max_age_s] or found
        problem = self._find_collision([replica.target for replica in found])
        return [problem] if problem is not None else list(found)

    def _find_collision(self, targets: Sequence[Mapping[str, str]]) -> ReadFailure | None:
        """Return why the targets cannot all be replicas of one EPP. `None` if they can.

        There may be two pools of one name, or one pool may be scraped twice.
        """
        for label in _ONE_EACH:
            values = sorted({target.get(label, "") for target in targets})
            if len(values) > 1:
                shown = ", ".join(f'{label}="{value}"' for value in values)
                return self._make_unread(
                    f"pool {self._pool} is there more than once: {shown}",
                    "one scrape job for the EPP, with namespace as a label; or signals.prometheus.queries",
                )
        instances = [target.get("instance") or target.get("pod") for target in targets]
        if len(targets) > 1 and (None in instances or len(set(instances)) < len(instances)):
            return self._make_unread(
                f"pool {self._pool} is there {len(targets)} times with one instance label or none",
                "the replicas of Prometheus itself must be deduplicated before they are queried",
            )
        return None

    def _apply_own_queries(
        self, views: Sequence[PoolView], rows: Sequence[Sample], asked_at: float, answered_at: float
    ) -> tuple[PoolView, ...] | ReadFailure:
        """Return the views with the values of the operator's own queries in place of the EPP's series."""
        values: dict[str, float] = {}
        for name in self._own_queries:
            mine = [row.value for row in rows if row.labels.get(_OWN) == name]
            if len(mine) != 1:
                why = f"the query gives {len(mine)} series instead of one"
                return self._make_unread(
                    f"{name}: {why}", f"signals.prometheus.queries.{name}: sum(…) or vector(0)"
                )
            values[name] = mine[0]
        if not views:
            views = [PoolView(asked_at - OWN_QUERY_WINDOW_S, answered_at)]
        if "age" in values:
            age_s = max(0.0, values["age"])
            views = [
                replace(each, opened_at=asked_at - age_s, closed_at=answered_at - age_s) for each in views
            ]
        raw = {f"queries.{name}": value for name, value in values.items()}
        own = [
            replace(
                each,
                saturation=values.get("saturation", each.saturation),
                # Queues of replicas are added up later, and the own query has the whole queue already.
                queued=(values["queued"] if number == 0 else 0.0) if "queued" in values else each.queued,
                capacity=values.get("capacity"),
                has_own_saturation="saturation" in values,
                raw={**each.raw, **raw} if number == 0 else each.raw,
            )
            for number, each in enumerate(views)
        ]
        return tuple(own)

    def _make_unread(self, why: str, hint: str = "") -> ReadFailure:
        host = urlsplit(self._access.url).hostname or self._access.url
        return ReadFailure(Reason.UNREADABLE, f"{host}: {why}", hint)


@dataclass(slots=True)
class _ScrapedReplica:
    """Rows that were scraped from one target."""

    target: dict[str, str]
    rows: list[Sample] = field(default_factory=list)

    def has_pool(self, pool: str) -> bool:
        """Return True if one of the rows is of the pool. An empty string means a pool without a name."""
        return any(
            row.labels.get(label, "") == pool
            for row in self.rows
            if (family := _find_family(row)) is not None and (label := family.pool_label) is not None
        )

    @property
    def age_s(self) -> float:
        """Age of the newest sample. NaN if no age is known."""
        ages = [row.value for row in self.rows if _AGE in row.labels]
        return min_or_nan(ages) if ages else math.nan

    def make_view(
        self, pool: str, asked_at: float, answered_at: float, gone_after_s: float
    ) -> PoolView | ReadFailure:
        age_of = {_get_series_key(row): row.value for row in self.rows if _AGE in row.labels}
        if not age_of or not all(math.isfinite(age) for age in age_of.values()):
            return ReadFailure(Reason.UNREADABLE, "the age of the samples is not known")
        newest = min(age_of.values())
        # Prometheus may go on to return series that have left the page.
        gone = {series for series, age in age_of.items() if age > newest + gone_after_s}
        ages = [age for series, age in age_of.items() if series not in gone]
        samples = [
            # An aggregation drops the name of the series; the newest name of the family replaces it.
            Sample(row.name or family.value[0], row.labels, row.value)
            for row in self.rows
            if (family := _find_family(row)) is not None and _get_series_key(row) not in gone
        ]
        # The ages come from the server's clock, so an age below 0 is a rounding error. A duration that is no
        # positive number is ignored.
        about = [row for row in self.rows if _TOOK in row.labels]
        took_s = max((row.value for row in about if row.name != START_TIME and row.value > 0), default=0.0)
        samples += [row for row in about if row.name == START_TIME]
        # The window is as wide as the uncertainty: the query was answered at some time between `asked_at` and
        # `answered_at`.
        opened_at, closed_at = asked_at - max(0.0, *ages), answered_at - max(0.0, min(ages) - took_s)
        address = self.target.get("instance") or self.target.get("pod") or ""
        return build_view(samples, pool, opened_at, closed_at, address)


def _get_series_key(row: Sample) -> frozenset[tuple[str, str]]:
    """Return the labels that a value and its age have in common."""
    family = row.labels.get(_VALUE) or row.labels.get(_AGE) or ""
    labels = {name: value for name, value in row.labels.items() if name not in ("__name__", _VALUE, _AGE)}
    return frozenset({**labels, _VALUE: family}.items())


def _find_family(row: Sample) -> Family | None:
    """Return the family of the row's value. `None` if the row is no value of a family."""
    return Family.__members__.get(row.labels.get(_VALUE, ""))


def build_pool_query(pool: str, namespace: str, max_age_s: float) -> str:
    """Return one PromQL query for every series of a pool, their ages, and facts about their targets.

    One label of each sample describes it: dispatcher_value has the family of a value, and dispatcher_age that
    of an age. dispatcher_took marks the duration of a scrape and the start time of a target's process.
    """
    here = f'namespace=~"{_escape_literal(namespace)}|"'
    parts: list[str] = []
    targets: list[str] = []
    for family in Family:
        label = family.pool_label
        matchers = f'{label}=~"{_escape_literal(pool)}|",{here}' if label is not None else here
        selectors = [f"{name}{{{matchers}}}" for name in family.value]
        targets += selectors if family in (Family.READY, Family.SATURATION) else []
        values = " or ".join(selectors)
        summed = _SUMMED.get(family)
        if summed is not None:
            alive = [_filter_recent(each, max_age_s) for each in selectors]
            values = " or ".join(f"sum without ({summed}) (clamp_min({each}, 0))" for each in alive)
        parts.append(f'label_replace({values}, "{_VALUE}", "{family.name}", "", "")')
        # The other families have the same age as the pool's series, because they come from the same scrape.
        if label is not None and family is not Family.SERVER_QUEUES:
            wrap = f"min without ({summed}) " if summed else ""
            ages = " or ".join(f"{wrap}(time() - timestamp({each}))" for each in selectors)
            parts.append(f'label_replace({ages}, "{_AGE}", "{family.name}", "", "")')
    about = f'{{__name__=~"scrape_duration_seconds|{START_TIME}",{here}}}'
    took = f"{about} and on (job, instance) ({' or '.join(targets)})"
    parts.append(f'label_replace({took}, "{_TOOK}", "s", "", "")')
    return " or ".join(parts)


def _filter_recent(selector: str, max_age_s: float) -> str:
    """Return a query for the series of the selector that are recent enough to be used.

    For the time of its lookback, Prometheus may return series of flows and servers that are gone. The query
    has no spaces, because servers limit the length of a URL.
    """
    return f"({selector} and time()-timestamp({selector})<{max_age_s:g})"


def build_own_query(queries: Mapping[str, str]) -> str:
    """Return the operator's own queries as one query.

    The line ends keep a comment at the end of a query from commenting out the rest.
    """
    parts = [f'label_replace((\n{query}\n), "{_OWN}", "{name}", "", "")' for name, query in queries.items()]
    return " or ".join(parts)


def _escape_literal(text: str) -> str:
    """Escape a text for a PromQL regular expression in double quotes."""
    escaped = "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$" else char for char in text)
    return escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
