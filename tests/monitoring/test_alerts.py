"""Each alert in promtool: it fires when it should, once though there are two replicas, and not before.

Every case begins as two replicas of a healthy, idle dispatcher with all series of the real page, and says
what is different. All alerts that fire are compared, and a real Alertmanager says which of them notify.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.telemetry.metrics import Metrics
from tests.monitoring.cases import CASES, IDLE, REPLICAS, Case, rising
from tests.monitoring.files import RULES, alerts
from tests.support import require_tool


def healthy(every_s: int) -> dict[str, str]:
    """The page of a healthy, idle dispatcher as it goes on, without the pool's label."""
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


UNKNOWN = {"deadline_at_risk", "deadline_slack_seconds", "per_endpoint", "picker_max_concurrency"}
"""Absent from the page of an idle dispatcher."""


def input_series(case: Case) -> list[dict[str, str]]:
    base = {} if case.bare else healthy(case.every_s)
    assert case.bare or case.changes.keys() <= base.keys() | UNKNOWN, "no such series on the page"
    found: dict[str, str | None] = dict(case.extra)
    for replica in REPLICAS:
        series = {**base, **(case.changes if replica in case.only else {})}
        for name, values in series.items():
            found[written(name, replica)] = (
                values and re.sub(r"x4000$", "x20 stale", values) if case.vanish else values
            )
    # To its end and a little longer: what promtool loads is most of what it costs.
    till_end = f"x{in_seconds(case.at) // case.every_s + 10}"
    return [
        {"series": name, "values": values.replace("x4000", till_end)}
        for name, values in found.items()
        if values is not None
    ]


def in_seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def written(name: str, replica: str) -> str:
    bare, _, labels = name.partition("{")
    where = f'namespace="batch",job="batch-dispatcher",instance="{replica}"'
    if bare == "up":
        return f"up{{{where}}}"
    if bare == "start":
        return f"process_start_time_seconds{{{where}}}"
    return f'batch_dispatcher_{bare}{{{where},pool="qwen"{"," if labels else ""}{labels or "}"}'


def expected(case: Case) -> list[dict[str, Any]]:
    found = []
    for alert in (*case.fires, *case.silenced):
        written = ",".join(f'{name}="{value}"' for name, value in case.labels_of(alert).items())
        found.append({"labels": f"{{{written}}}", "value": 1})
    return found


def promtool_test(case: Case) -> dict[str, Any]:
    firing = 'ALERTS{alertstate="firing"}'
    now = f"count by (alertname, namespace, pool, reason, job) ({firing})"
    until_now = f"count by (alertname) (count_over_time({firing}[{case.at}]))"
    expr = now if case.fires else until_now
    moments = [{"expr": expr, "eval_time": case.at, "exp_samples": expected(case)}]
    if case.not_at:
        moments.append({"expr": now, "eval_time": case.not_at, "exp_samples": []})
    return {
        "name": case.about,
        "interval": f"{case.every_s}s",
        "input_series": input_series(case),
        "promql_expr_test": moments,
    }


def evaluated_every_s(case: Case) -> int:
    """Each minute; over hours seldom enough to be quick, and often enough for what takes minutes to fire."""
    if case.every_s >= 60:
        return 3 * case.every_s
    hours = in_seconds(case.at) / 3600
    return 300 if hours >= 4 else 120 if hours >= 1 else 60


def run(cases: list[Case], folder: Path, rules: Path = RULES) -> subprocess.CompletedProcess[str]:
    file = folder / "alerts_test.yaml"
    tests = [promtool_test(case) for case in cases]
    every_s = max(evaluated_every_s(case) for case in cases)
    file.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": f"{every_s}s", "tests": tests})
    )
    command = [require_tool("promtool"), "test", "rules", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def together() -> list[list[Case]]:
    """A dozen cases a run of promtool, which takes longer to start than to judge one."""
    alike: dict[int, list[Case]] = {}
    for case in CASES:
        alike.setdefault(evaluated_every_s(case), []).append(case)
    return [cases[i : i + 12] for cases in alike.values() for i in range(0, len(cases), 12)]


@pytest.mark.parametrize("cases", together(), ids=lambda cases: f"{cases[0].about} to {cases[-1].about}")
def test_each_alert_fires_when_it_should_and_only_then(cases: list[Case], tmp_path: Path) -> None:
    """What promtool prints names the case that failed."""
    done = run(cases, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_alone_fires_and_no_case_names_another() -> None:
    alone = {next(iter(case.fires)) for case in CASES if len(case.fires) == 1 and not case.silenced}
    assert alone == set(alerts())
    assert {alert for case in CASES for alert in case.silenced} <= set(alerts())


def test_a_pool_that_never_had_a_dispatcher_is_told_by_name_where_the_rules_name_it(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.about == "nothing of ours was ever seen")
    named = tmp_path / "named.yaml"
    named.write_text(RULES.read_text().replace('pool=~".+"', 'namespace="batch",pool="qwen"'))
    done = run([replace(case, pooled=True)], tmp_path, named)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_would_notice_an_alert_that_is_silent(tmp_path: Path) -> None:
    """The cases are held against broken rules: a threshold out of reach, a `for` too long."""
    case = next(case for case in CASES if case.fires == {"BatchDispatcherSlow": ""})
    for before, after in ((" > 0.3", " > 30"), ("for: 5m", "for: 50m")):
        broken = tmp_path / "broken.yaml"
        broken.write_text(RULES.read_text().replace(before, after))
        assert run([case], tmp_path, broken).returncode != 0
    assert run([replace(case, fires={})], tmp_path).returncode != 0
