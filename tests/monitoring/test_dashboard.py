"""The rules of Grafana's dashboard-linter, restated; and what a person needs to read a panel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher.core.health import Health
from dispatcher.core.limit.budget import Reason
from tests.monitoring.files import (
    RULES,
    VARIABLES,
    annotation_queries,
    dashboard,
    every_query,
    panel_queries,
    panels,
)
from tests.monitoring.promql import named
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
    "Utilization and impact on realtime",
    "Replicas",
]
FIRST_LINE = [
    "Health",
    "Firing alerts",
    "Results per second",
    "Error share",
    "Refusals per second",
    "Dead",
    "Time until done",
]
UNITS = {"short", "none", "percentunit", "s", "reqps", "cps", "bytes"}
each_panel = pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])


def test_rows_are_in_the_order_in_which_one_asks() -> None:
    assert [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"] == ROWS


def test_all_rows_but_the_first_two_are_collapsed_around_their_panels() -> None:
    every = dashboard()["panels"]
    for row in (panel for panel in every if panel["type"] == "row"):
        is_open = row["title"] in ROWS[:2]
        assert row["collapsed"] is not is_open
        assert bool(row["panels"]) is not is_open
    shown = [panel["title"] for panel in every if panel["type"] != "row"]
    assert shown[: len(FIRST_LINE)] == FIRST_LINE
    assert len({panel["gridPos"]["y"] for panel in every[1 : len(FIRST_LINE) + 1]}) == 1


def test_values_that_are_not_known_leave_a_gap() -> None:
    for panel in panels():
        if panel["type"] in ("timeseries", "state-timeline"):
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False, panel["title"]
        else:
            assert all(target["instant"] for target in panel["targets"]), panel["title"]


def test_variables_choose_datasource_job_namespace_pool_and_replica() -> None:
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "namespace", "pool", "instance", "runbook"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("job", "namespace", "pool", "instance"):
        variable = variables[name]
        assert variable["multi"], "several at once"
        assert variable["includeAll"]
        assert variable["refresh"] == 2, "anew when the time range changes"
        assert variable["allValue"] == VARIABLES[name]
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["definition"].endswith(f", {name})")


def test_nobody_edits_it_in_grafana_and_loses_that() -> None:
    assert dashboard()["editable"] is False


@each_panel
def test_panel_tells_what_it_is(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert panel["links"][0]["url"].startswith("${runbook}#")
    assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@each_panel
def test_queries_of_a_panel_ask_for_what_was_chosen(panel: dict[str, Any]) -> None:
    legends = []
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert "{{pool}}" in target["legendFormat"]
        legends.append(target["legendFormat"])
        for selector in named(target["expr"]).selectors:
            chosen = {(m.set_label, m.how, m.value) for m in selector.matchers}
            wanted = {(name, "=~", f"${name}") for name in ("job", "namespace", "pool", "instance")}
            if selector.name.startswith("process_"):
                wanted = {(name, "=~", f"${name}") for name in ("job", "instance")}
            elif selector.name == "ALERTS":  # an alert may have neither label
                wanted = {(name, "=~", f"${name}|") for name in ("namespace", "pool")}
            assert wanted <= chosen, selector.name
    assert len(legends) == len(set(legends))


@each_panel
def test_rates_follow_the_scrape_and_counters_are_not_drawn_bare(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        seen = named(target["expr"])
        # Over the whole time chosen only where one figure is shown for it.
        assert set(seen.windows) <= ({"[$__rate_interval]", "[$__range]"} if panel["type"] == "stat" else
                                     {"[$__rate_interval]"})  # fmt: skip
        counters = [s.name for s in seen.selectors if re.search(r"_(total|bucket|sum|count)$", s.name)]
        assert len(counters) == len(seen.windows)
        assert len(counters) == len(re.findall(r"\b(?:rate|increase)\(", target["expr"]))


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    shown = dashboard()["panels"]
    rows = [panel for panel in shown if panel["type"] == "row"]
    numbers = [panel["id"] for panel in [*rows, *panels()]]
    assert len(set(numbers)) == len(numbers)
    for together in [shown, *([row, *row["panels"]] for row in rows)]:
        taken: set[tuple[int, int]] = set()
        for panel in together:
            place = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not taken & cells, panel["title"]
            taken |= cells


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
def test_states_are_shown_in_words_and_the_worst_of_the_replicas_wins(
    title: str, states: list[Health] | list[Reason]
) -> None:
    (panel,) = (panel for panel in panels() if panel["title"] == title)
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    (target,) = panel["targets"]
    codes = dict(re.findall(r'(?:reason|state)="([\w-]+)"\} \* (\d+)', target["expr"]))
    assert {option["text"]: code for code, option in mapping["options"].items()} == codes
    assert set(states) == set(type(states[0]))
    assert sorted(codes, key=lambda state: -int(codes[state])) == states


def test_annotations_tell_of_closed_gates_and_reloads() -> None:
    assert [query.where for query in annotation_queries()] == [
        "annotation Gate closed",
        "annotation Configuration changed",
    ]


def test_promtool_takes_every_expression(tmp_path: Path) -> None:
    """The dashboard's and the runbook's, as rules of a file of their own; and the rules as they are."""
    promtool = require_tool("promtool")
    queries = [query for query in every_query() if "$" in query.expr or query.where == "the runbook"]
    assert len(queries) > 90
    made = [{"record": f"checked:{number}", "expr": query.filled()} for number, query in enumerate(queries)]
    file = tmp_path / "every.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "every", "rules": made}]}))
    for each in (file, RULES):
        done = subprocess.run([promtool, "check", "rules", each], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_generated_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_query_of_a_panel_is_known_by_its_panel() -> None:
    assert all(query.panel["title"] in query.where for query in panel_queries())
