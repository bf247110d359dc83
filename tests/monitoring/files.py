"""What operators load, as it lies in the chart, the runbook beside it, and every expression in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from tests.paths import DOCS, ROOT

FILES = ROOT / "deploy" / "helm" / "batch-dispatcher" / "files"
RULES, DASHBOARD, RUNBOOK = FILES / "rules.yaml", FILES / "dashboard.json", DOCS / "how-to" / "runbook.md"
INHIBIT = FILES / "inhibit.yaml"

VARIABLES: Mapping[str, str] = {
    "job": ".+",
    "namespace": ".*",
    "pool": ".+",
    "instance": ".+",
    "__rate_interval": "1m",
    "__range": "5m",
    "__interval": "15s",
}
"""What the dashboard's variables stand for when all of everything is chosen."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and where it stands."""

    where: str
    expr: str
    """With variables in it, if it is the dashboard's."""
    legend: str = ""
    panel: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def filled(self, **variables: str) -> str:
        """With values for the variables: all of everything unless told otherwise."""
        known = {**VARIABLES, **variables}
        return re.sub(r"\$\{?(\w+)\}?", lambda found: known[found[1]], self.expr)


@cache
def rules() -> list[dict[str, Any]]:
    """Every rule, recording and alert."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


@cache
def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def panels() -> list[dict[str, Any]]:
    """Return every panel but the rows, those inside collapsed rows included."""
    every = dashboard()["panels"]
    inside = [panel for row in every if row["type"] == "row" for panel in row["panels"]]
    return [panel for panel in every if panel["type"] != "row"] + inside


def rule_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


def panel_queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(f"panel {panel['title']}", target["expr"], target["legendFormat"], panel)


def annotation_queries() -> Iterator[Query]:
    for each in dashboard()["annotations"]["list"]:
        yield Query(f"annotation {each['name']}", each["expr"])


def runbook_queries() -> Iterator[Query]:
    for block in re.findall(r"```promql\n(.*?)```", RUNBOOK.read_text(), re.DOTALL):
        for line in filter(None, block.splitlines()):
            yield Query("the runbook", line)


def every_query() -> list[Query]:
    return [*rule_queries(), *panel_queries(), *annotation_queries(), *runbook_queries()]
