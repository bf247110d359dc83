"""The rules, the dashboard and the runbook that operators use, and every expression in them."""

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
"""Values of the dashboard's variables if everything is selected."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and the place where it is used."""

    location: str
    expr: str
    """Expression. It has variables if it belongs to the dashboard."""
    legend: str = ""
    panel: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def fill_variables(self, **variables: str) -> str:
        """Return the expression with values for its variables; by default everything is selected."""
        values = {**VARIABLES, **variables}
        return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], self.expr)


@cache
def load_rules() -> list[dict[str, Any]]:
    """Return every recording rule and alert rule."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def load_alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in load_rules() if "alert" in rule}


def load_recorded_expressions() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in load_rules() if "record" in rule}


@cache
def load_dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def list_panels() -> list[dict[str, Any]]:
    """Return every panel but the rows, those inside collapsed rows included."""
    all_panels = load_dashboard()["panels"]
    collapsed = [panel for row in all_panels if row["type"] == "row" for panel in row["panels"]]
    return [panel for panel in all_panels if panel["type"] != "row"] + collapsed


def list_rule_queries() -> Iterator[Query]:
    for rule in load_rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


def list_panel_queries() -> Iterator[Query]:
    for panel in list_panels():
        for target in panel["targets"]:
            yield Query(f"panel {panel['title']}", target["expr"], target["legendFormat"], panel)


def list_annotation_queries() -> Iterator[Query]:
    for each in load_dashboard()["annotations"]["list"]:
        yield Query(f"annotation {each['name']}", each["expr"])


def list_runbook_queries() -> Iterator[Query]:
    for block in re.findall(r"```promql\n(.*?)```", RUNBOOK.read_text(), re.DOTALL):
        for line in filter(None, block.splitlines()):
            yield Query("the runbook", line)


def list_queries() -> list[Query]:
    return [*list_rule_queries(), *list_panel_queries(), *list_annotation_queries(), *list_runbook_queries()]
