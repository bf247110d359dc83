"""Dashboard, rules and runbook name only series that exist, and each series is used somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.telemetry.catalogue import CATALOGUE
from tests.markdown_pages import find_anchors
from tests.monitoring.chart_files import (
    FILES,
    RUNBOOK,
    Query,
    list_panels,
    list_queries,
    load_alerts,
    load_dashboard,
    load_recorded_expressions,
    load_rules,
)
from tests.monitoring.known_series import find_known_series
from tests.monitoring.promql import Matcher, Selector, parse_expression
from tests.paths import ROOT


def find_faults(query: Query) -> list[str]:
    """Return the names in the query that do not exist."""
    found = []
    parsed = parse_expression(query.fill_variables())
    known_series = find_known_series()
    for selector in parsed.selectors:
        if selector.name not in known_series:
            found.append(f"{query.location}: no series {selector.name}")
            continue
        labels = known_series[selector.name].labels
        for matcher in selector.matchers:
            if matcher.label not in labels:
                found.append(f"{query.location}: {selector.name} has no label {matcher.label}")
            elif labels[matcher.label]:
                found += [
                    f"{query.location}: {selector.name} has no {matcher.label}={value!r}"
                    for value in find_unmatched(matcher, labels[matcher.label])
                ]
    existing_labels = {
        label for s in parsed.selectors if s.name in known_series for label in known_series[s.name].labels
    }
    found += [
        f"{query.location}: grouped by {label}, which nothing has"
        for label in parsed.labels - existing_labels
    ]
    return found


def find_unmatched(matcher: Matcher, values: tuple[str, ...]) -> list[str]:
    """Return the alternatives of the matcher that match no declared value."""
    if "~" not in matcher.operator:
        return [] if matcher.value in values else [matcher.value]
    return [
        each for each in matcher.value.split("|") if not any(re.fullmatch(each, value) for value in values)
    ]


def find_unused_series(queries: list[Query]) -> set[str]:
    """Return the series of the catalogue that no query uses."""
    used = {
        selector.name for query in queries for selector in parse_expression(query.fill_variables()).selectors
    }
    return {
        series.page_name
        for series in CATALOGUE
        if not used & {series.page_name, f"{series.page_name}_bucket"}
    }


def test_every_expression_names_only_existing_series() -> None:
    assert [fault for query in list_queries() for fault in find_faults(query)] == []


def test_every_series_of_the_catalogue_is_used() -> None:
    assert find_unused_series(list_queries()) == set()


def test_every_recording_rule_is_used() -> None:
    used = {
        selector.name
        for query in list_queries()
        for selector in parse_expression(query.fill_variables()).selectors
    }
    assert load_recorded_expressions().keys() - used == set()


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("batch_dispatcher_limits", "no series batch_dispatcher_limits"),
        ("rate(batch_dispatcher_tries[5m])", "no series batch_dispatcher_tries"),
        ("batch_dispatcher_gate{why='full'}", "has no label why"),
        ('batch_dispatcher_gate{reason="ful"}', "has no reason='ful'"),
        ('batch_dispatcher_gate{reason=~"full|opn"}', "has no reason='opn'"),
        ('batch_dispatcher_gate{reason!="opn"}', "has no reason='opn'"),
        ("sum by (pool, outcom) (batch_dispatcher_attempts_total)", "grouped by outcom, which nothing has"),
        ("batch_dispatcher_wait_seconds", "no series batch_dispatcher_wait_seconds"),
        ("pool:batch_dispatcher_gone:ratio", "no series pool:batch_dispatcher_gone:ratio"),
        ('histogram_quantile(0.9, batch_dispatcher_attempt_seconds_bucket{lee="1"})', "has no label lee"),
        ("up{pool='qwen'}", "up has no label pool"),
    ],
)
def test_wrong_name_is_found(expression: str, fault: str) -> None:
    assert [fault in found for found in find_faults(Query("here", expression))] == [True]


def test_unused_series_is_found() -> None:
    remaining_queries = [query for query in list_queries() if "service_rate" not in query.expr]
    assert find_unused_series(remaining_queries) == {"batch_dispatcher_service_rate"}


def test_expression_is_parsed() -> None:
    parsed = parse_expression(
        'max by (pool) (rate(a_total{x="1", y=~`b|c`}[5m] offset 1h))'
        " / on (pool) group_left (z) b * 3600 > bool 1e3 unless ignoring (q) absent(c{}) # d"
    )
    matchers = (Matcher("x", "=", "1"), Matcher("y", "=~", "b|c"))
    assert parsed.selectors == (Selector("a_total", matchers), Selector("b"), Selector("c"))
    assert parsed.labels == {"pool", "z", "q"}
    assert parsed.windows == ("[5m]",)
    with pytest.raises(ValueError, match="without a name"):
        parse_expression('{__name__="a"}')


# Texts and links


def test_legends_and_texts_use_only_labels_of_their_expression() -> None:
    missing = []
    for query in list_queries():
        labels = parse_expression(query.fill_variables()).labels
        missing += [
            f"{query.location}: {label}"
            for label in re.findall(r"\{\{(\w+)\}\}", query.legend)
            if label not in labels
        ]
    for name, rule in load_alerts().items():
        expressions = [
            rule["expr"],
            *(
                load_recorded_expressions()[s.name]
                for s in parse_expression(rule["expr"]).selectors
                if s.name in load_recorded_expressions()
            ),
        ]
        labels = frozenset(
            label for expression in expressions for label in parse_expression(expression).labels
        )
        text = " ".join(rule["annotations"].values())
        missing += [
            f"{name}: {label}" for label in re.findall(r"\$labels\.(\w+)", text) if label not in labels
        ]
    assert missing == []


def test_every_alert_has_severity_place_and_value() -> None:
    for name, rule in load_alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        annotations = rule["annotations"]
        assert "$labels" in annotations["summary"] + annotations["description"], name
        assert (
            "$value" in annotations["summary"] + annotations["description"]
            or "one was there" in name
            or name in ALERTS_WITHOUT_VALUE
        ), name
        assert len(annotations["summary"]) < 120, name


ALERTS_WITHOUT_VALUE = {"BatchDispatcherDown"}
"""Alerts about missing series, which have no value."""


def test_every_alert_and_dashboard_link_has_a_section_in_the_runbook() -> None:
    sections = find_anchors(RUNBOOK)
    runbook_page = yaml.safe_load((FILES / "alerts.yaml").read_text())["settings"]["runbook"]
    assert (ROOT / runbook_page).samefile(RUNBOOK), "the default is the page in the repository"
    assert not any("runbook_url" in rule["annotations"] for rule in load_alerts().values()), (
        "the default is not a URL"
    )
    linked = {rule["annotations"]["runbook"] for rule in load_alerts().values()}
    linked |= {link["url"] for panel in list_panels() for link in panel["links"]}
    assert {url.partition("#")[2] for url in linked} - sections == set()
    assert {url.partition("#")[0] for url in linked} == {runbook_page, "${runbook}"}
    assert runbook_page in {
        v["query"] for v in load_dashboard()["templating"]["list"] if v["name"] == "runbook"
    }


def test_every_alert_section_of_the_runbook_is_complete() -> None:
    text_by_alert = dict(
        re.findall(
            r"^## (BatchDispatcher\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL
        )
    )
    assert text_by_alert.keys() == load_alerts().keys()
    for name, text in text_by_alert.items():
        for part in ("**Users notice:**", "**Look:**", "**Do:**", "**Worry when:**", "```promql\n"):
            assert part in text, f"{name}: {part}"


def test_every_command_of_the_runbook_exists_and_names_its_configuration() -> None:
    commands = re.findall(r"`batch-dispatcher ([^`]+)`", RUNBOOK.read_text())
    assert len(commands) > len(load_alerts())
    for words in {tuple(each.split()) for each in commands}:
        verb = words[: next((n for n, word in enumerate(words) if not word.islower()), len(words))]
        verb = tuple(word for word in verb if not word.startswith("-"))
        assert CliRunner().invoke(app, [*verb, "--help"]).exit_code == 0, words
        assert words == ("--version",) or words[-2:] == ("--config", "FILE"), (
            f"{' '.join(words)}: wrong usage"
        )


def test_names_of_rules_are_unique() -> None:
    names = [rule.get("alert") or rule["record"] for rule in load_rules()]
    assert len(names) == len(set(names))


def test_thresholds_are_declared_once() -> None:
    """The expression of each alert has its threshold as $threshold, so that a chart value can change it."""
    declared: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["alerts"]
    for alert in declared:
        assert alert["expr"].count("$threshold") >= 1, alert["alert"]
        assert alert["about"], alert["alert"]
