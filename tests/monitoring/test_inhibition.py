"""The inhibition rules in a real Alertmanager: of an alert and those that follow from it, only the first
notifies."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.alert_cases import CASES, Case
from tests.monitoring.alertmanager import Alertmanager, write_configuration
from tests.monitoring.chart_files import INHIBIT, load_alerts
from tests.support import require_tool, wait_until_sync

SEVERITIES = ("info", "warning", "critical")


def load_inhibition_rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load(INHIBIT.read_text())["inhibit_rules"])


def find_named_alerts(matchers: list[str]) -> set[str]:
    """Return the alerts that one side of a rule names, those that do not exist included."""
    (value,) = (found[1] for each in matchers if (found := re.match(r'alertname =~? "?([^"]+)"?$', each)))
    if value == "BatchDispatcher.+":
        return set(load_alerts())
    return set(value.split("|"))


def test_amtool_accepts_the_rules(tmp_path: Path) -> None:
    command = [require_tool("amtool"), "check-config", str(write_configuration(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(load_inhibition_rules())} inhibit rules" in done.stdout


def test_rules_name_alerts_that_exist() -> None:
    for rule in load_inhibition_rules():
        named = find_named_alerts(rule["source_matchers"]) | find_named_alerts(rule["target_matchers"])
        assert named <= set(load_alerts()), rule


def test_no_alert_silences_a_more_severe_one() -> None:
    severity = {name: SEVERITIES.index(rule["labels"]["severity"]) for name, rule in load_alerts().items()}
    for rule in load_inhibition_rules():
        least = min(severity[name] for name in find_named_alerts(rule["source_matchers"]))
        assert all(severity[name] <= least for name in find_named_alerts(rule["target_matchers"])), rule


def is_without_pool(case: Case) -> bool:
    """Whether the case has no dispatcher in any pool, which concerns every other case as well."""
    return "BatchDispatcherDown" in case.fires and not case.has_pool_labels


def get_alert_labels(case: Case, number: int, alert: str) -> dict[str, str]:
    """Return the labels of an alert, with a namespace for each case."""
    found = case.labels_of(alert)
    return found | {"namespace": f"{number}-{found['namespace']}"} if "namespace" in found else found


def sort_labels(found: list[dict[str, str]]) -> list[list[tuple[str, str]]]:
    return sorted(sorted(each.items()) for each in found)


@pytest.mark.parametrize("without_pool", [False, True])
def test_alerts_of_a_cause_notify_and_silence_those_that_follow(without_pool: bool, tmp_path: Path) -> None:
    """The cases share one Alertmanager, each in a namespace of its own."""
    cases = [
        (n, case) for n, case in enumerate(CASES) if case.fires and is_without_pool(case) == without_pool
    ]
    notify = [get_alert_labels(case, n, alert) for n, case in cases for alert in case.fires]
    silenced = [get_alert_labels(case, n, alert) for n, case in cases for alert in case.silenced]
    assert silenced
    expected = tuple(map(sort_labels, (remove_duplicates(notify), remove_duplicates(silenced))))
    with Alertmanager(tmp_path) as alertmanager:
        alertmanager.raise_alerts([*notify, *silenced])

        def found() -> bool:
            return tuple(map(sort_labels, alertmanager.read_by_inhibition())) == expected

        wait_until_sync(found, 20, what=f"{len(silenced)} alerts are silenced", every_s=0.1)


def remove_duplicates(found: list[dict[str, str]]) -> list[dict[str, str]]:
    return [dict(each) for each in {tuple(sorted(get_alert_labels.items())) for get_alert_labels in found}]


def test_alert_silences_nothing_in_another_pool(tmp_path: Path) -> None:
    here, there = ({"namespace": "batch", "pool": pool} for pool in ("qwen", "other"))
    causes = [
        {"alertname": "BatchDispatcherDown", **here},
        {"alertname": "BatchDispatcherGateClosed", **here},
    ]
    others = [
        {"alertname": "BatchDispatcherDeadlineNear", **there},
        {"alertname": "BatchDispatcherReplicaDown", "job": "a", **there},
    ]
    with Alertmanager(tmp_path) as alertmanager:
        alertmanager.raise_alerts([*causes, *others])
        expected = (sort_labels([causes[0], *others]), sort_labels(causes[1:]))
        wait_until_sync(
            lambda: tuple(map(sort_labels, alertmanager.read_by_inhibition())) == expected,
            20, what="the alert of the same pool alone is silenced", every_s=0.1,
        )  # fmt: skip
