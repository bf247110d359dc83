"""A real Prometheus with the rules of the chart, which scrapes dispatchers on this machine.

    with Prometheus(folder) as prometheus:
        prometheus.scrape({"a": 18080, "b": 18081})        # again whenever a dispatcher has another port
        prometheus.wait_for('batch_dispatcher_gate{reason="open"} == 1')
        prometheus.query("max by (pool) (batch_dispatcher_limit)")
        for query in prometheus.list_panel_queries(): prometheus.query(query.fill_variables(pool="qwen"))
        prometheus.check_queries()                         # expressions without data, or with a wrong sign

All calls block. Times are Unix seconds.

"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from dispatcher.telemetry.catalogue import CATALOGUE
from tests.monitoring.chart_files import (
    RULES,
    Query,
    list_annotation_queries,
    list_panel_queries,
    list_rule_queries,
    list_runbook_queries,
)
from tests.monitoring.promql import parse_expression
from tests.support import free_port, make_http_client, require_tool, running_process, wait_until_sync

SIGNED_PARTS = ("slack", "batch_dispatcher_budget", "headroom", "deriv(", " - ")
"""Parts of expressions whose value may be negative."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """Samples of one series over time."""

    labels: Mapping[str, str]
    at: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the result of an expression."""

    query: Query
    problem: str
    """`no data`, `negative`, or the error message of Prometheus."""
    series: frozenset[str] = frozenset()
    """Series of an expression that returns nothing."""
    missing_series: frozenset[str] = frozenset()
    """Series of the expression without any sample, which explains why it returns nothing."""


@dataclass
class Prometheus:
    """Context manager that runs Prometheus. `speedup` divides the windows and waiting times of the rules."""

    folder: Path
    scrape_s: float = 1.0
    speedup: float = 1.0
    job: str = "batch-dispatcher"
    extra_scrape_configs: Sequence[Mapping[str, Any]] = ()
    """Further scrape configurations."""
    port: int = field(default_factory=free_port)
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> Prometheus:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and return when it answers."""
        (self.folder / "rules.yaml").write_text(shorten_times(RULES.read_text(), self.speedup))
        self.scrape({})
        interval = f"{round(self.scrape_s * 1000)}ms"
        config = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": self.job,
                    "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
                },
                *self.extra_scrape_configs,
            ],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            require_tool("prometheus"),
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self._stack.enter_context(running_process(*command, stop_s=20))
        http = make_http_client(f"http://127.0.0.1:{self.port}")
        self._http = self._stack.enter_context(http)
        wait_until_sync(self._is_ready, 30, what="Prometheus is ready", every_s=0.1)

    def stop(self) -> None:
        self._stack.close()

    def scrape(self, ports: Mapping[str, int], namespace: str = "batch") -> None:
        """Scrape these ports from now on. The keys are values of the label `instance`."""
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name, "namespace": namespace}}
            for name, port in ports.items()
        ]
        new_file = self.folder / "targets.new"
        new_file.write_text(json.dumps(targets))
        new_file.replace(self.folder / "targets.json")

    # Queries

    def query(self, expr: str, at: float | None = None) -> list[Sample]:
        """Return the samples of an expression without variables. Raises ValueError with the message of
        Prometheus."""
        time_parameter = {} if at is None else {"time": str(at)}
        answer = self._request("query", query=expr, **time_parameter)
        if answer["resultType"] == "scalar":
            return [Sample({}, float(answer["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in answer["result"]]

    def query_range(self, expr: str, begin: float, end: float, step_s: float = 1.0) -> list[TimeSeries]:
        answer = self._request("query_range", query=expr, start=str(begin), end=str(end), step=f"{step_s:g}s")
        return [
            TimeSeries(
                series["metric"],
                tuple(float(at) for at, _ in series["values"]),
                tuple(float(value) for _, value in series["values"]),
            )
            for series in answer["result"]
        ]

    def wait_for(self, expr: str, timeout_s: float = 30.0) -> list[Sample]:
        """Wait until the expression returns a sample."""
        return wait_until_sync(lambda: self.query(expr), timeout_s, what=expr, every_s=0.1)

    def read_alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that are pending or firing, with their rendered texts."""
        return list(self._request("alerts")["alerts"])

    def read_rule_errors(self) -> dict[str, str]:
        """Return the error of each rule that could not be evaluated."""
        groups = self._request("rules")["groups"]
        return {
            rule["name"]: rule["lastError"] for g in groups for rule in g["rules"] if rule.get("lastError")
        }

    @staticmethod
    def list_panel_queries() -> list[Query]:
        """Return every query of the dashboard, including its annotations."""
        return [*list_panel_queries(), *list_annotation_queries()]

    @staticmethod
    def list_rule_queries() -> list[Query]:
        return list(list_rule_queries())

    def check_queries(self, queries: Sequence[Query] | None = None, **variables: str) -> list[Finding]:
        """Run the queries, by default every expression of dashboard, rules and runbook, and return their
        problems.

        An alert that returns nothing is no problem, unless a series that it names does not exist. A query
        with a problem is repeated: on a busy machine a scrape may fail, and its series are then gone for a
        moment.
        """
        if queries is None:
            queries = [*self.list_panel_queries(), *self.list_rule_queries(), *list_runbook_queries()]
        findings = list(self._find_problems(queries, variables))
        for _ in range(5):
            if findings:
                time.sleep(self.scrape_s)
                findings = list(self._find_problems([found.query for found in findings], variables))
        return findings

    def _find_problems(self, queries: Sequence[Query], variables: Mapping[str, str]) -> Iterator[Finding]:
        intervals = {"__rate_interval": f"{max(4, 4 * self.scrape_s):g}s", **variables}
        for query in queries:
            expr = query.fill_variables(**intervals)
            try:
                found = self.query(expr)
            except ValueError as error:
                yield Finding(query, str(error))
                continue
            if any(sample.value < 0 for sample in found) and not any(each in expr for each in SIGNED_PARTS):
                yield Finding(query, "negative")
            if any(not math.isnan(sample.value) for sample in found):
                continue
            series = frozenset(selector.name for selector in parse_expression(expr).selectors)
            missing_series = frozenset(name for name in series if not self.query(f"count({name})"))
            if missing_series or not is_empty_when_healthy(query):
                yield Finding(query, "no data", series, missing_series)

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _request(self, endpoint: str, **params: str) -> Any:
        answer = self._http.get(f"/api/v1/{endpoint}", params=params).json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]


def is_empty_when_healthy(query: Query) -> bool:
    """Return whether the query is an alert, or keeps only values that pass a comparison."""
    return (
        "alert" in query.location.lower()
        or bool(re.search(r"(==|[<>]) ?\S+$|> 0\)", query.expr))
        or (query.location.startswith("BatchDispatcher"))
    )


def shorten_times(rules: str, divisor: float) -> str:
    """Return the rules with windows, waiting times and ages divided by `divisor`."""
    if divisor == 1:
        return rules
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def shorten(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, round(float(found[2]) * seconds[found[3]] * 1000 / divisor))}ms"

    with_short_windows = re.sub(r"(\[)(\d+)([smhd])(?=\])", shorten, rules)
    return re.sub(r"(for: )(\d+)([smhd])", shorten, with_short_windows)


def find_present_series(prometheus: Prometheus) -> dict[str, bool]:
    """Return for each series of the catalogue whether it had a sample within the last hour."""

    def has_samples(name: str) -> bool:
        return bool(
            prometheus.query(f"count(last_over_time({name}[1h]) or last_over_time({name}_count[1h]))")
        )

    return {series.page_name: has_samples(series.page_name) for series in CATALOGUE}


def find_changed_series(prometheus: Prometheus, instance: str, window: str = "1h") -> dict[str, bool]:
    """Return for each series of the catalogue whether it changed, appeared or disappeared on this instance
    within the window."""
    selector = f'instance="{instance}"'
    scrape_count = f"count_over_time(batch_dispatcher_build_info{{{selector}}}[{window}])"

    def has_changed(name: str) -> bool:
        changed = f"changes({{__name__=~'{name}(_count)?',{selector}}}[{window}]) > 0"
        appeared_or_disappeared = (
            f"min(count_over_time({name}{{{selector}}}[{window}])) < max({scrape_count})"
        )
        return bool(prometheus.query(f"count({changed}) or {appeared_or_disappeared}"))

    return {series.page_name: has_changed(series.page_name) for series in CATALOGUE}
