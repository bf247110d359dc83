"""Render the Grafana dashboard from dashboard.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from dispatcher.limit.budget import Reason
from dispatcher.limit.health import Health

SELECTOR = 'job=~"$job", namespace=~"$namespace", pool=~"$pool", instance=~"$instance"'
PROCESS_SELECTOR = 'job=~"$job", instance=~"$instance"'
"""Matchers of series that the client library exports, which have no pool."""
VARIABLES = {"job": ".+", "namespace": ".*", "pool": ".+", "instance": ".+"}
"""Variables of the dashboard with the pattern for All. A scrape outside Kubernetes adds no namespace."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, BLUE, YELLOW, ORANGE, RED, PURPLE, GREY = (
    "green",
    "blue",
    "yellow",
    "orange",
    "red",
    "purple",
    "#808080",
)
COLOURS = {
    **dict.fromkeys(Reason, RED),
    Reason.DRAINING: GREY,
    Reason.PAUSED: PURPLE,
    Reason.STARTING: GREY,
    Reason.BACKPRESSURE: ORANGE,
    Reason.NO_ROOM: ORANGE,
    Reason.SATURATED: YELLOW,
    Reason.FULL: BLUE,
    Reason.IDLE: GREY,
    Reason.OPEN: GREEN,
}
HEALTH_COLOURS = {
    str(Health.FAILING): RED,
    str(Health.DEGRADED): ORANGE,
    str(Health.UNKNOWN): PURPLE,
    str(Health.WAITING): BLUE,
    str(Health.WORKING): GREEN,
    str(Health.IDLE): GREY,
}
"""Colors of the states of the health, worst first."""
OPEN_ROWS = ("Now", "Queue")
"""Rows that are not collapsed."""
RUNBOOK = "docs/how-to/runbook.md"


def insert_matchers(expression: str) -> str:
    """Return the expression with the variables of the dashboard as matchers of every series."""
    expression = expression.replace("@", "namespace, pool")
    for pattern, matchers in ((r"batch_dispatcher_\w+", SELECTOR), (r"process_\w+", PROCESS_SELECTOR)):
        expression = re.sub(rf"\b({pattern})(\{{)?", partial(_add_matchers, matchers), expression)
    return expression


def _add_matchers(matchers: str, found: re.Match[str]) -> str:
    return f"{found[1]}{{{matchers}, " if found[2] else f"{found[1]}{{{matchers}}}"


@dataclass(frozen=True)
class States:
    """States of a series, drawn as one number. With several replicas, the worst state is shown."""

    series: str
    label: str
    colours: Mapping[str, str]
    """Return a value for each state of the health, the worst first."""

    @property
    def codes(self) -> dict[str, int]:
        return {state: len(self.colours) - index for index, state in enumerate(self.colours)}

    def query(self) -> str:
        each = (f'{self.series}{{{self.label}="{state}"}} * {code}' for state, code in self.codes.items())
        return f"max by (@) ({' or '.join(each)})"

    def mappings(self) -> list[dict[str, Any]]:
        shown = {
            str(code): {"text": state, "color": self.colours[state]} for state, code in self.codes.items()
        }
        return [{"type": "value", "options": shown}]


STATES = {
    "gate": States(
        "batch_dispatcher_gate",
        "reason",
        {str(reason): COLOURS[reason] for reason in Reason},
    ),
    "health": States("batch_dispatcher_health", "state", HEALTH_COLOURS),
}


def list_queries(panel: Mapping[str, Any]) -> dict[str, str]:
    """Return the queries of a panel by legend."""
    if states := panel.get("states"):
        return {"": STATES[states].query()}
    if name := panel.get("quantiles"):
        bucket = f"sum by (@, le) (rate(batch_dispatcher_{name}_bucket[$__rate_interval]))"
        return {f"p{q * 100:g}": f"histogram_quantile({q}, {bucket})" for q in (0.5, 0.95, 0.99)}
    return dict(panel["queries"])


def render_panel(panel: Mapping[str, Any]) -> dict[str, Any]:
    """Return a panel in the format of Grafana, without its position."""
    kind, title = next(iter(panel.items()))
    is_instant = kind in ("stat", "table")
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": insert_matchers(query),
            "legendFormat": f"{{{{namespace}}}} {{{{pool}}}} {legend}".strip(),
            "instant": is_instant,
            "range": not is_instant,
            "format": "table" if kind == "table" else "time_series",
        }
        for number, (legend, query) in enumerate(list_queries(panel).items())
    ]
    return {
        "type": "timeseries" if kind == "graph" else kind,
        "title": title,
        "description": panel["about"],
        "datasource": DATASOURCE,
        "targets": targets,
        "gridPos": {"w": panel.get("width", 8), "h": panel.get("height", 4 if kind == "stat" else 8)},
        "links": [{"title": "Runbook", "url": f"${{runbook}}#{panel['link']}", "targetBlank": True}],
        "fieldConfig": {"defaults": _defaults(kind, panel), "overrides": list(_overrides(kind, panel))},
        "options": _OPTIONS[kind],
        "transformations": _merge_into_table(targets) if kind == "table" else [],
    }


def _merge_into_table(targets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return transformations that merge several queries into one table with a row for each set of labels.

    The value of an info series is hidden, because it is always 1.
    """
    values = {f"Value #{target['refId']}": target for target in targets}
    hidden = ["Time", *(column for column, target in values.items() if "_info{" in target["expr"])]
    shown = {column: values[column]["legendFormat"].split()[-1] for column in values if column not in hidden}
    columns = {"excludeByName": dict.fromkeys(hidden, True), "renameByName": shown}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": columns}]


_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {
        "textMode": "value_and_name",
        "colorMode": "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"]},
    },
    "graph": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "state-timeline": {"mergeValues": True, "showValue": "auto", "rowHeight": 0.8},
    "table": {"showHeader": True},
}


def _defaults(kind: str, panel: Mapping[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": GREEN, "value": None}]
    custom: dict[str, Any] = {}
    defaults = {
        "unit": "s" if "quantiles" in panel else panel.get("unit", "short"),
        "noValue": panel.get("empty", "unknown"),
        "custom": custom,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if kind == "state-timeline":
        custom["spanNulls"] = False
    if kind == "graph":
        custom |= {"fillOpacity": 60 if panel.get("stacked") else 8, "showPoints": "auto", "spanNulls": False}
        if panel.get("stacked"):
            custom["stacking"] = {"mode": "normal", "group": "A"}
        if not panel.get("signed"):
            defaults["min"] = 0
    if "maximum" in panel:
        defaults["max"] = panel["maximum"]
    if "line" in panel:
        steps.append({"color": RED, "value": panel["line"]})
        custom["thresholdsStyle"] = {"mode": "line"}
    if states := panel.get("states"):
        defaults["mappings"] = STATES[states].mappings()
    return defaults


def _overrides(kind: str, panel: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def override(suffix: str, *properties: tuple[str, Any]) -> dict[str, Any]:
        property_list = [{"id": name, "value": value} for name, value in properties]
        return {"matcher": {"id": "byRegexp", "options": f"/ {suffix}$/"}, "properties": property_list}

    for legend, unit in panel.get("units", {}).items():
        axis = [("custom.axisPlacement", "right")] if kind == "graph" else []
        yield override(legend, ("unit", unit), *axis)
    if kind == "graph" and any("gate_seconds" in query for query in list_queries(panel).values()):
        for reason, colour in COLOURS.items():
            yield override(reason, ("color", {"mode": "fixed", "fixedColor": colour}))


def render_dashboard() -> str:
    """Return dashboard.json."""
    rows = yaml.safe_load((Path(__file__).parent / "dashboard.yaml").read_text())
    rendered = {
        "uid": "batch-dispatcher",
        "title": "Batch dispatcher",
        "description": "Why is it not sending, and what does it cost interactive users?",
        "tags": ["batch-dispatcher", "llm-d"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"title": "Runbook", "type": "link", "url": "${runbook}", "targetBlank": True}],
        "templating": {"list": list(_variables())},
        "annotations": {"list": list(_annotations())},
        "panels": list(_place_rows(rows)),
    }
    return json.dumps(rendered, indent=1, ensure_ascii=False) + "\n"


def _place_rows(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the rows one below the other, 24 wide. A collapsed row has its panels inside it."""
    numbers = count(1)
    y = 0
    for title, panels in rows.items():
        row = {"type": "row", "id": next(numbers), "title": title}
        position = {"x": 0, "y": y, "w": 24, "h": 1}
        row_panels = list(_row(panels, y + 1, numbers))
        is_open = title in OPEN_ROWS
        yield {**row, "collapsed": not is_open, "panels": [] if is_open else row_panels, "gridPos": position}
        y += 1
        if is_open:
            yield from row_panels
            y = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row_panels)


def _row(panels: Sequence[Mapping[str, Any]], y: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the panels of a row from left to right, in as many lines as they need."""
    x = row_height = 0
    for panel in panels:
        rendered = render_panel(panel)
        size = rendered["gridPos"]
        if x + size["w"] > 24:
            y, x, row_height = y + row_height, 0, 0
        yield {**rendered, "id": next(numbers), "gridPos": {"x": x, "y": y, **size}}
        x, row_height = x + size["w"], max(row_height, size["h"])


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    selected_matchers: list[str] = []
    for name, all_pattern in VARIABLES.items():
        query = f"label_values(batch_dispatcher_limit{{{', '.join(selected_matchers)}}}, {name})"
        selected_matchers.append(f'{name}=~"${name}"')
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": all_pattern,
            "current": {"text": "All", "value": "$__all"},
        }
    yield {"name": "runbook", "label": "Runbook", "type": "constant", "query": RUNBOOK, "hide": 2}


def _annotations() -> Iterator[dict[str, Any]]:
    closed = "|".join(reason for reason in Reason if reason.is_closed)
    annotations = (
        (
            "Gate closed",
            ORANGE,
            f'max by (@, reason) (batch_dispatcher_gate{{reason=~"{closed}"}}) == 1',
            "reason",
        ),
        (
            "Configuration changed",
            BLUE,
            "sum by (@, result) (increase(batch_dispatcher_config_reloads_total[2m])) > 0",
            "result",
        ),
    )
    for name, colour, query, label in annotations:
        yield {
            "name": name,
            "enable": True,
            "iconColor": colour,
            "datasource": DATASOURCE,
            "expr": insert_matchers(query),
            "titleFormat": f"{{{{pool}}}}: {{{{{label}}}}}",
            "step": "15s",
        }
