"""What dashboard, rules and runbook name must exist, and what exists must be looked at somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.telemetry.catalogue import CATALOGUE
from tests.monitoring.files import (
    FILES,
    RUNBOOK,
    Query,
    alerts,
    dashboard,
    every_query,
    panels,
    recorded,
    rules,
)
from tests.monitoring.names import known
from tests.monitoring.promql import Matcher, Selector, named
from tests.pages import anchors
from tests.paths import ROOT


def faults(query: Query) -> list[str]:
    """What it names that does not exist."""
    found = []
    seen = named(query.filled())
    every = known()
    for selector in seen.selectors:
        if selector.name not in every:
            found.append(f"{query.where}: no series {selector.name}")
            continue
        labels = every[selector.name].labels
        for matcher in selector.matchers:
            if matcher.set_label not in labels:
                found.append(f"{query.where}: {selector.name} has no label {matcher.set_label}")
            elif labels[matcher.set_label]:
                found += [
                    f"{query.where}: {selector.name} has no {matcher.set_label}={value!r}"
                    for value in unmatched(matcher, labels[matcher.set_label])
                ]
    there = {label for s in seen.selectors if s.name in every for label in every[s.name].labels}
    found += [f"{query.where}: grouped by {label}, which nothing has" for label in seen.labels - there]
    return found


def unmatched(matcher: Matcher, values: tuple[str, ...]) -> list[str]:
    """Those of the matcher's alternatives that fit no declared value."""
    if "~" not in matcher.how:
        return [] if matcher.value in values else [matcher.value]
    return [
        each for each in matcher.value.split("|") if not any(re.fullmatch(each, value) for value in values)
    ]


def unused(queries: list[Query]) -> set[str]:
    """Series of the catalogue that no query asks for."""
    asked = {selector.name for query in queries for selector in named(query.filled()).selectors}
    return {
        series.page_name
        for series in CATALOGUE
        if not asked & {series.page_name, f"{series.page_name}_bucket"}
    }


def test_every_expression_names_what_exists() -> None:
    assert [fault for query in every_query() for fault in faults(query)] == []


def test_every_series_of_the_catalogue_is_asked_for() -> None:
    assert unused(every_query()) == set()


def test_every_recording_rule_is_used() -> None:
    asked = {selector.name for query in every_query() for selector in named(query.filled()).selectors}
    assert recorded().keys() - asked == set()


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
def test_a_planted_fault_is_found(expression: str, fault: str) -> None:
    assert [fault in told for told in faults(Query("here", expression))] == [True]


def test_a_series_that_nobody_asks_for_is_found() -> None:
    without = [query for query in every_query() if "service_rate" not in query.expr]
    assert unused(without) == {"batch_dispatcher_service_rate"}


def test_what_is_read_of_an_expression() -> None:
    seen = named(
        'max by (pool) (rate(a_total{x="1", y=~`b|c`}[5m] offset 1h))'
        " / on (pool) group_left (z) b * 3600 > bool 1e3 unless ignoring (q) absent(c{}) # d"
    )
    matchers = (Matcher("x", "=", "1"), Matcher("y", "=~", "b|c"))
    assert seen.selectors == (Selector("a_total", matchers), Selector("b"), Selector("c"))
    assert seen.labels == {"pool", "z", "q"}
    assert seen.windows == ("[5m]",)
    with pytest.raises(ValueError, match="without a name"):
        named('{__name__="a"}')


# ── texts and links ─────────────────────────────────────────────────────────────────────────────────────────


def test_legends_and_texts_name_only_labels_that_their_expression_keeps() -> None:
    lost = []
    for query in every_query():
        kept = named(query.filled()).labels
        lost += [
            f"{query.where}: {label}"
            for label in re.findall(r"\{\{(\w+)\}\}", query.legend)
            if label not in kept
        ]
    for name, rule in alerts().items():
        through = [
            rule["expr"],
            *(recorded()[s.name] for s in named(rule["expr"]).selectors if s.name in recorded()),
        ]
        kept = frozenset(label for expression in through for label in named(expression).labels)
        text = " ".join(rule["annotations"].values())
        lost += [f"{name}: {label}" for label in re.findall(r"\$labels\.(\w+)", text) if label not in kept]
    assert lost == []


def test_every_alert_says_how_bad_where_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        told = rule["annotations"]
        assert "$labels" in told["summary"] + told["description"], name
        assert (
            "$value" in told["summary"] + told["description"] or "one was there" in name or name in UNCOUNTED
        ), name
        assert len(told["summary"]) < 120, name


UNCOUNTED = {"BatchDispatcherDown"}
"""Nothing is there to count."""


def test_every_alert_and_every_link_of_the_dashboard_has_its_section_of_the_runbook() -> None:
    sections = anchors(RUNBOOK)
    base = yaml.safe_load((FILES / "alerts.yaml").read_text())["settings"]["runbook"]
    assert (ROOT / base).samefile(RUNBOOK), "the default leads to the page in the repository"
    assert not any("runbook_url" in rule["annotations"] for rule in alerts().values()), "it would be no URL"
    linked = {rule["annotations"]["runbook"] for rule in alerts().values()}
    linked |= {link["url"] for panel in panels() for link in panel["links"]}
    assert {url.partition("#")[2] for url in linked} - sections == set()
    assert {url.partition("#")[0] for url in linked} == {base, "${runbook}"}
    assert base in {v["query"] for v in dashboard()["templating"]["list"] if v["name"] == "runbook"}


def test_every_section_of_an_alert_is_whole_and_every_alert_section_has_its_alert() -> None:
    told = dict(
        re.findall(
            r"^## (BatchDispatcher\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL
        )
    )
    assert told.keys() == alerts().keys()
    for name, text in told.items():
        for part in ("**Users notice:**", "**Look:**", "**Do:**", "**Worry when:**", "```promql\n"):
            assert part in text, f"{name}: {part}"


def test_every_command_of_the_runbook_is_one_and_says_which_queue_it_asks() -> None:
    told = re.findall(r"`batch-dispatcher ([^`]+)`", RUNBOOK.read_text())
    assert len(told) > len(alerts())
    for words in {tuple(each.split()) for each in told}:
        verb = words[: next((n for n, word in enumerate(words) if not word.islower()), len(words))]
        verb = tuple(word for word in verb if not word.startswith("-"))
        assert CliRunner().invoke(app, [*verb, "--help"]).exit_code == 0, words
        assert verb == ("version",) or words[-2:] == ("--config", "FILE"), f"{' '.join(words)}: wrong usage"


def test_no_alert_and_no_record_is_declared_twice() -> None:
    names = [rule.get("alert") or rule["record"] for rule in rules()]
    assert len(names) == len(set(names))


def test_thresholds_are_kept_in_one_place() -> None:
    """Each alert's threshold stands in its expression as $threshold: whoever renders it can set another."""
    declared: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["alerts"]
    for alert in declared:
        assert alert["expr"].count("$threshold") >= 1, alert["alert"]
        assert alert["about"], alert["alert"]
