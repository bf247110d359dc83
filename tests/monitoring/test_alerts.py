"""Each alert in promtool: it fires when it should, once for two replicas, and not earlier.

Every case starts with two replicas of a healthy, idle dispatcher with all series of the real page, and
declares the differences. All firing alerts are compared, and a real Alertmanager shows which of them notify.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.telemetry.metrics import Metrics
from tests.monitoring.alert_cases import CASES, IDLE, REPLICAS, Case, rising
from tests.monitoring.chart_files import RULES, load_alerts
from tests.support import require_tool


def list_healthy_series(every_s: int) -> dict[str, str]:
    """Return the series of a healthy, idle dispatcher over time, without the label of the pool."""
    metrics = Metrics("qwen")
    metrics.set_status_source(lambda: IDLE)
    series = {}
    for family in text_string_to_metric_families(metrics.render_page()[0].decode()):
        for sample in family.samples:
            if sample.name.startswith("batch_dispatcher_") and "le" not in sample.labels:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != "pool")
                name = sample.name.removeprefix("batch_dispatcher_") + (f"{{{labels}}}" if labels else "")
                series[name] = f"{sample.value:g}x4000"
    assert {'gate_seconds_total{reason="idle"}', 'polls_total{result="ok",source="epp"}'} <= series.keys()
    return series | {
        'gate_seconds_total{reason="idle"}': rising(1, every_s),
        'polls_total{result="ok",source="epp"}': rising(1, every_s),
        "up": "1x4000",
        "start": "-100x4000",
    }


ABSENT_WHEN_IDLE = {"deadline_at_risk", "deadline_slack_seconds", "per_endpoint", "picker_max_concurrency"}
"""Series that the page of an idle dispatcher does not have."""


def build_input_series(case: Case) -> list[dict[str, str]]:
    base_series = {} if case.only_changes else list_healthy_series(case.interval_s)
    assert case.only_changes or case.changes.keys() <= base_series.keys() | ABSENT_WHEN_IDLE, (
        "the page has no such series"
    )
    input_values: dict[str, str | None] = dict(case.extra)
    for replica in REPLICAS:
        series = {**base_series, **(case.changes if replica in case.replicas else {})}
        for name, values in series.items():
            input_values[write_series(name, replica)] = (
                values and re.sub(r"x4000$", "x20 stale", values) if case.disappears else values
            )
    # Until the end of the case and a little longer, because loading the series takes most of the time.
    repeat = f"x{parse_duration_s(case.at) // case.interval_s + 10}"
    return [
        {"series": name, "values": values.replace("x4000", repeat)}
        for name, values in input_values.items()
        if values is not None
    ]


def parse_duration_s(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def write_series(name: str, replica: str) -> str:
    base_name, _, labels = name.partition("{")
    labels_of_target = f'namespace="batch",job="batch-dispatcher",instance="{replica}"'
    if base_name == "up":
        return f"up{{{labels_of_target}}}"
    if base_name == "start":
        return f"process_start_time_seconds{{{labels_of_target}}}"
    return (
        f'batch_dispatcher_{base_name}{{{labels_of_target},pool="qwen"{"," if labels else ""}{labels or "}"}'
    )


def list_expected_alerts(case: Case) -> list[dict[str, Any]]:
    input_values = []
    for alert in (*case.fires, *case.silenced):
        write_series = ",".join(f'{name}="{value}"' for name, value in case.labels_of(alert).items())
        input_values.append({"labels": f"{{{write_series}}}", "value": 1})
    return input_values


def build_promtool_test(case: Case) -> dict[str, Any]:
    firing = 'ALERTS{alertstate="firing"}'
    firing_now = f"count by (alertname, namespace, pool, reason, job) ({firing})"
    fired_until_now = f"count by (alertname) (count_over_time({firing}[{case.at}]))"
    expr = firing_now if case.fires else fired_until_now
    checks = [{"expr": expr, "eval_time": case.at, "exp_samples": list_expected_alerts(case)}]
    if case.silent_at:
        checks.append({"expr": firing_now, "eval_time": case.silent_at, "exp_samples": []})
    return {
        "name": case.name,
        "interval": f"{case.interval_s}s",
        "input_series": build_input_series(case),
        "promql_expr_test": checks,
    }


def get_evaluation_interval_s(case: Case) -> int:
    """Return one minute, or longer for cases of hours: rarely enough to be quick, and often enough for
    alerts that fire after minutes."""
    if case.interval_s >= 60:
        return 3 * case.interval_s
    hours = parse_duration_s(case.at) / 3600
    return 300 if hours >= 4 else 120 if hours >= 1 else 60


def run_cases(cases: list[Case], folder: Path, rules: Path = RULES) -> subprocess.CompletedProcess[str]:
    file = folder / "alerts_test.yaml"
    tests = [build_promtool_test(case) for case in cases]
    every_s = max(get_evaluation_interval_s(case) for case in cases)
    file.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": f"{every_s}s", "tests": tests})
    )
    command = [require_tool("promtool"), "test", "rules", str(file)]
    environ = os.environ | {"GOGC": "400"}  # a third of the CPU would be spent on collecting garbage
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=100)


def group_cases() -> list[list[Case]]:
    """Return groups of up to twelve cases with the same interval. Starting promtool takes longer than one
    case."""
    by_interval: dict[int, list[Case]] = {}
    for case in CASES:
        by_interval.setdefault(get_evaluation_interval_s(case), []).append(case)
    return [cases[i : i + 12] for cases in by_interval.values() for i in range(0, len(cases), 12)]


@pytest.mark.slow
@pytest.mark.parametrize("cases", group_cases(), ids=lambda cases: f"{cases[0].name} to {cases[-1].name}")
def test_alerts_fire_only_when_they_should(cases: list[Case], tmp_path: Path) -> None:
    """The output of promtool names the case that failed."""
    done = run_cases(cases, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_only_it_fires() -> None:
    tested_alone = {next(iter(case.fires)) for case in CASES if len(case.fires) == 1 and not case.silenced}
    assert tested_alone == set(load_alerts())
    assert {alert for case in CASES for alert in case.silenced} <= set(load_alerts())


def test_missing_dispatcher_has_pool_labels_if_the_rules_name_the_pool(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "no dispatcher was ever scraped")
    rules_with_pool = tmp_path / "named.yaml"
    rules_with_pool.write_text(RULES.read_text().replace('pool=~".+"', 'namespace="batch",pool="qwen"'))
    done = run_cases([replace(case, has_pool_labels=True)], tmp_path, rules_with_pool)
    assert done.returncode == 0, done.stdout + done.stderr


def test_silent_alert_fails_the_promtool_test(tmp_path: Path) -> None:
    """A case is run against broken rules: a threshold out of reach, and a `for` that is too long."""
    case = next(case for case in CASES if case.fires == {"BatchDispatcherSlow": ""})
    for before, after in ((" > 0.3", " > 30"), ("for: 5m", "for: 50m")):
        broken = tmp_path / "broken.yaml"
        broken.write_text(RULES.read_text().replace(before, after))
        assert run_cases([case], tmp_path, broken).returncode != 0
    assert run_cases([replace(case, fires={})], tmp_path).returncode != 0
