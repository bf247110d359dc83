"""A real Prometheus with our rules, scraping dispatchers on this machine; and every expression asked of it.

    with Prometheus(folder) as prometheus:
        prometheus.scrape({"a": 18080, "b": 18081})        # again whenever a dispatcher has another port
        prometheus.wait_for('batch_dispatcher_gate{reason="open"} == 1')
        prometheus.query("max by (pool) (batch_dispatcher_limit)")
        for query in prometheus.panels(): prometheus.query(query.filled(pool="qwen"))
        prometheus.findings()                              # what returns nothing, or the wrong sign

All calls block. Times are Unix seconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from dispatcher.telemetry.catalogue import CATALOGUE
from tests.monitoring.files import (
    RULES,
    Query,
    annotation_queries,
    panel_queries,
    rule_queries,
    runbook_queries,
)
from tests.monitoring.promql import named
from tests.support import free_port, plain_client, require_tool, running, wait_until_sync

SIGNED = ("slack", "batch_dispatcher_budget", "headroom", "deriv(", " - ")
"""What these make may be below 0."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Line:
    """A series over time."""

    labels: Mapping[str, str]
    at: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with what an expression returned."""

    query: Query
    problem: str
    """`no data`, `negative`, or Prometheus's own words."""
    absent: frozenset[str]
    """The series it names of which there is no sample: why it returns nothing."""


@dataclass
class Prometheus:
    """Context manager. `hurry`: the windows and waits of the rules are so many times shorter."""

    folder: Path
    scrape_s: float = 1.0
    hurry: float = 1.0
    job: str = "batch-dispatcher"
    also: Sequence[Mapping[str, Any]] = ()
    """Scrape configurations of others."""
    port: int = field(default_factory=free_port)
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> Prometheus:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when it answers."""
        (self.folder / "rules.yaml").write_text(hurried(RULES.read_text(), self.hurry))
        self.scrape({})
        every = f"{round(self.scrape_s * 1000)}ms"
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": self.job,
                    "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
                },
                *self.also,
            ],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            require_tool("prometheus"),
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self._stack.enter_context(running(*command, stop_s=20))
        http = plain_client(f"http://127.0.0.1:{self.port}")
        self._http = self._stack.enter_context(http)
        wait_until_sync(self._ready, 30, what="Prometheus is ready", every_s=0.1)

    def stop(self) -> None:
        self._stack.close()

    def scrape(self, ports: Mapping[str, int], namespace: str = "batch") -> None:
        """These from now on, by what they are called (`instance`)."""
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name, "namespace": namespace}}
            for name, port in ports.items()
        ]
        fresh = self.folder / "targets.new"
        fresh.write_text(json.dumps(targets))
        fresh.replace(self.folder / "targets.json")

    # Asking.

    def query(self, expr: str, at: float | None = None) -> list[Sample]:
        """Without variables: `Query.filled` puts them in. Raises ValueError with Prometheus's own words."""
        moment = {} if at is None else {"time": str(at)}
        told = self._ask("query", query=expr, **moment)
        if told["resultType"] == "scalar":
            return [Sample({}, float(told["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in told["result"]]

    def query_range(self, expr: str, begin: float, end: float, step_s: float = 1.0) -> list[Line]:
        told = self._ask("query_range", query=expr, start=str(begin), end=str(end), step=f"{step_s:g}s")
        return [
            Line(
                series["metric"],
                tuple(float(at) for at, _ in series["values"]),
                tuple(float(value) for _, value in series["values"]),
            )
            for series in told["result"]
        ]

    def wait_for(self, expr: str, timeout_s: float = 30.0) -> list[Sample]:
        """Wait until it returns something."""
        return wait_until_sync(lambda: self.query(expr), timeout_s, what=expr, every_s=0.1)

    def alerts(self) -> list[dict[str, Any]]:
        """Those that are pending or fire, with their rendered texts."""
        return list(self._ask("alerts")["alerts"])

    def rule_errors(self) -> dict[str, str]:
        """Rules that could not be evaluated."""
        groups = self._ask("rules")["groups"]
        return {
            rule["name"]: rule["lastError"] for g in groups for rule in g["rules"] if rule.get("lastError")
        }

    @staticmethod
    def panels() -> list[Query]:
        """Every query of the dashboard, its annotations too."""
        return [*panel_queries(), *annotation_queries()]

    @staticmethod
    def rules() -> list[Query]:
        return list(rule_queries())

    def findings(self, queries: Sequence[Query] | None = None, **variables: str) -> list[Finding]:
        """Ask these; None: every expression of dashboard, rules and runbook. An alert that returns nothing is
        no finding, but a series that it names and that is nowhere is."""
        every = [*self.panels(), *self.rules(), *runbook_queries()] if queries is None else queries
        return list(self._findings(every, variables))

    def _findings(self, queries: Sequence[Query], variables: Mapping[str, str]) -> Iterator[Finding]:
        shorter = {"__rate_interval": f"{max(4, 4 * self.scrape_s):g}s", **variables}
        for query in queries:
            expr = query.filled(**shorter)
            try:
                found = self.query(expr)
            except ValueError as error:
                yield Finding(query, str(error), frozenset())
                continue
            if any(sample.value < 0 for sample in found) and not any(each in expr for each in SIGNED):
                yield Finding(query, "negative", frozenset())
            if any(not math.isnan(sample.value) for sample in found):
                continue
            absent = frozenset(s.name for s in named(expr).selectors if not self.query(f"count({s.name})"))
            if absent or not silent_when_well(query):
                yield Finding(query, "no data", absent)

    def _ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _ask(self, what: str, **params: str) -> Any:
        answer = self._http.get(f"/api/v1/{what}", params=params).json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]


def silent_when_well(query: Query) -> bool:
    """An alert, or an expression that keeps only what is above or equal to something."""
    return (
        "alert" in query.where.lower()
        or bool(re.search(r"(==|[<>]) ?\S+$|> 0\)", query.expr))
        or (query.where.startswith("BatchDispatcher"))
    )


def hurried(rules: str, times: float) -> str:
    """The rules with windows, waits and ages so many times shorter."""
    if times == 1:
        return rules
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, round(float(found[2]) * seconds[found[3]] * 1000 / times))}ms"

    shorter_rules = re.sub(r"(\[)(\d+)([smhd])(?=\])", shorter, rules)
    return re.sub(r"(for: )(\d+)([smhd])", shorter, shorter_rules)


def seen_of_catalogue(prometheus: Prometheus) -> dict[str, bool]:
    """Which series of the catalogue have ever had a sample within the last hour."""

    def seen(name: str) -> bool:
        return bool(
            prometheus.query(f"count(last_over_time({name}[1h]) or last_over_time({name}_count[1h]))")
        )

    return {series.page_name: seen(series.page_name) for series in CATALOGUE}


def moved_of_catalogue(prometheus: Prometheus, instance: str, window: str = "1h") -> dict[str, bool]:
    """Which series of the catalogue had more than one value on this instance within the window, or came or
    went."""
    here = f'instance="{instance}"'
    looks = f"count_over_time(batch_dispatcher_build_info{{{here}}}[{window}])"

    def moved(name: str) -> bool:
        changed = f"changes({{__name__=~'{name}(_count)?',{here}}}[{window}]) > 0"
        came_or_went = f"min(count_over_time({name}{{{here}}}[{window}])) < max({looks})"
        return bool(prometheus.query(f"count({changed}) or {came_or_went}"))

    return {series.page_name: moved(series.page_name) for series in CATALOGUE}
