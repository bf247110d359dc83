"""The dashboard follows the rules of Grafana's dashboard-linter, and its panels explain themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher.limit.budget import Reason
from dispatcher.limit.health import Health
from tests.monitoring.chart_files import (
    RULES,
    VARIABLES,
    list_annotation_queries,
    list_panel_queries,
    list_panels,
    list_queries,
    load_dashboard,
)
from tests.monitoring.promql import parse_expression
from tests.paths import ROOT
from tests.support import require_tool

ROWS = [
    "Now",
    "Queue",
    "Budget and gate",
    "Gateway",
    "Models",
    "Sequences",
    "Batching",
    "Slices",
    "KV memory",
    "Utilization and impact on realtime",
    "Replicas",
]
FIRST_ROW_PANELS = [
    "Health",
    "Firing alerts",
    "Results per second",
    "Error share",
    "Refusals per second",
    "Dead letters",
    "Time until the queue is empty",
]
UNITS = {"short", "none", "percentunit", "s", "reqps", "cps", "bytes"}
each_panel = pytest.mark.parametrize("panel", list_panels(), ids=lambda panel: panel["title"])


def test_rows_have_their_order() -> None:
    assert [panel["title"] for panel in load_dashboard()["panels"] if panel["type"] == "row"] == ROWS


def test_rows_after_the_first_two_are_collapsed() -> None:
    all_panels = load_dashboard()["panels"]
    for row in (panel for panel in all_panels if panel["type"] == "row"):
        is_open = row["title"] in ROWS[:2]
        assert row["collapsed"] is not is_open
        assert bool(row["panels"]) is not is_open
    top_level = [panel["title"] for panel in all_panels if panel["type"] != "row"]
    assert top_level[: len(FIRST_ROW_PANELS)] == FIRST_ROW_PANELS
    assert len({panel["gridPos"]["y"] for panel in all_panels[1 : len(FIRST_ROW_PANELS) + 1]}) == 1


def test_unknown_values_leave_a_gap() -> None:
    for panel in list_panels():
        if panel["type"] in ("timeseries", "state-timeline"):
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False, panel["title"]
        else:
            assert all(target["instant"] for target in panel["targets"]), panel["title"]


def test_variables_choose_datasource_job_namespace_pool_and_replica() -> None:
    variables = {each["name"]: each for each in load_dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "namespace", "pool", "instance", "runbook"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("job", "namespace", "pool", "instance"):
        variable = variables[name]
        assert variable["multi"], "several values can be selected"
        assert variable["includeAll"]
        assert variable["refresh"] == 2, "refreshed when the time range changes"
        assert variable["allValue"] == VARIABLES[name]
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["definition"].endswith(f", {name})")


def test_dashboard_cannot_be_edited_in_grafana() -> None:
    assert load_dashboard()["editable"] is False


@each_panel
def test_panel_has_its_descriptions(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert panel["links"][0]["url"].startswith("${runbook}#")
    assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@each_panel
def test_queries_of_a_panel_use_the_selected_variables(panel: dict[str, Any]) -> None:
    legends = []
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert "{{pool}}" in target["legendFormat"]
        legends.append(target["legendFormat"])
        for selector in parse_expression(target["expr"]).selectors:
            used = {(m.label, m.operator, m.value) for m in selector.matchers}
            expected = {(name, "=~", f"${name}") for name in ("job", "namespace", "pool", "instance")}
            if selector.name.startswith("process_"):
                expected = {(name, "=~", f"${name}") for name in ("job", "instance")}
            elif selector.name == "ALERTS":  # an alert may lack both labels
                expected = {(name, "=~", f"${name}|") for name in ("namespace", "pool")}
            assert expected <= used, selector.name
    assert len(legends) == len(set(legends))


@each_panel
def test_counters_are_shown_as_rates_over_the_scrape_interval(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        parsed = parse_expression(target["expr"])
        # The whole selected time is used only by panels that show one number.
        assert set(parsed.windows) <= ({"[$__rate_interval]", "[$__range]"} if panel["type"] == "stat" else
                                     {"[$__rate_interval]"})  # fmt: skip
        counters = [s.name for s in parsed.selectors if re.search(r"_(total|bucket|sum|count)$", s.name)]
        assert len(counters) == len(parsed.windows)
        assert len(counters) == len(re.findall(r"\b(?:rate|increase)\(", target["expr"]))


def test_panels_do_not_overlap_and_have_unique_ids() -> None:
    top_level = load_dashboard()["panels"]
    rows = [panel for panel in top_level if panel["type"] == "row"]
    numbers = [panel["id"] for panel in [*rows, *list_panels()]]
    assert len(set(numbers)) == len(numbers)
    for panels_of_row in [top_level, *([row, *row["panels"]] for row in rows)]:
        used_cells: set[tuple[int, int]] = set()
        for panel in panels_of_row:
            grid = panel["gridPos"]
            cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
            assert not used_cells & cells, panel["title"]
            used_cells |= cells


WORST_FIRST = [
    Health.FAILING,
    Health.DEGRADED,
    Health.UNKNOWN,
    Health.WAITING,
    Health.WORKING,
    Health.IDLE,
]


@pytest.mark.parametrize(
    ("title", "states"),
    [("Health", WORST_FIRST), ("Health over time", WORST_FIRST), ("Gate over time", list(Reason))],
)
def test_states_are_shown_in_words_and_the_worst_replica_decides(
    title: str, states: list[Health] | list[Reason]
) -> None:
    (panel,) = (panel for panel in list_panels() if panel["title"] == title)
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    (target,) = panel["targets"]
    codes = dict(re.findall(r'(?:reason|state)="([\w-]+)"\} \* (\d+)', target["expr"]))
    assert {option["text"]: code for code, option in mapping["options"].items()} == codes
    assert set(states) == set(type(states[0]))
    assert sorted(codes, key=lambda state: -int(codes[state])) == states


def test_annotations_mark_closed_gates_and_reloads() -> None:
    assert [query.location for query in list_annotation_queries()] == [
        "annotation Gate closed",
        "annotation Configuration changed",
    ]


def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    """The expressions of dashboard and runbook are checked as rules in a temporary file, and the rules as
    they are."""
    promtool = require_tool("promtool")
    queries = [query for query in list_queries() if "$" in query.expr or query.location == "the runbook"]
    assert len(queries) > 90
    checked_rules = [
        {"record": f"checked:{number}", "expr": query.fill_variables()}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "every.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "every", "rules": checked_rules}]}))
    for each in (file, RULES):
        done = subprocess.run([promtool, "check", "rules", each], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_generated_files_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_query_of_a_panel_has_its_title() -> None:
    assert all(query.panel["title"] in query.location for query in list_panel_queries())
