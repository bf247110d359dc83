"""The page of /metrics against its catalogue: complete from the start, closed to strangers, cheap."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.ports import SettleStatus
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.catalogue import CATALOGUE, PREFIX, SeriesKind
from dispatcher.telemetry.events import Event, divert_events, emit
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.status import (
    MAX_TABLE_ROWS,
    BudgetStatus,
    GateStatus,
    ModelsStatus,
    ProcessStatus,
    QueueStatus,
    SignalsStatus,
    Status,
    Terms,
)
from tests.floors import beside, cpu_of
from tests.support import require_tool

STATUS = Status(
    process=ProcessStatus(
        "1.0", "3.11", "qwen", "batch:{qwen}:requests", "me", observe=False, started_at=0.0
    ),
    gate=GateStatus("open", True, "…", 30, 12, 12, 30.0, None),
    budget=BudgetStatus(
        0.05,
        "saturation",
        0.5,
        0.0,
        0.45,
        28,
        64.0,
        "picker",
        terms=[Terms("saturation", 0.5, 0.0, 0.45, 28, 64.0), Terms("requests", 0.4, 0.1, None, None, 64.0)],
    ),
    signals=SignalsStatus("epp", 0.3),
    queue=QueueStatus(pending=5, leased=12, delayed=0, dead=1),
)


def made() -> Metrics:
    metrics = Metrics("qwen")
    metrics.set_status_source(lambda: STATUS)
    return metrics


def samples(metrics: Metrics) -> list[Sample]:
    page = metrics.render_page()[0].decode()
    return [s for family in families(page) for s in family.samples if s.name.startswith(PREFIX)]


def shown(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Name and sorted label values but the pool's → value."""
    return {
        (s.name.removeprefix(PREFIX), *sorted(v for k, v in s.labels.items() if k != "pool")): s.value
        for s in samples(metrics)
    }


def test_names_are_declared_once_and_follow_prometheus() -> None:
    names = [each.page_name for each in CATALOGUE]
    assert len(names) == len(set(names))
    for each in CATALOGUE:
        assert each.name == each.name.lower()
        assert not each.name.endswith("_total"), "the page adds it"
        assert not each.description.endswith(".")
        assert "pool" not in each.labels
        assert (each.kind is SeriesKind.GAUGE) == (each.sampler is not None)
        assert (each.kind is SeriesKind.HISTOGRAM) == bool(each.buckets)
        if each.kind is not SeriesKind.GAUGE:
            assert all(each.labels.values()), f"{each.name}: a counter's label values are declared"


def test_every_label_value_is_there_from_the_start_at_0() -> None:
    page = shown(made())
    for each in CATALOGUE:
        name = each.page_name.removeprefix(PREFIX)
        if each.kind is SeriesKind.COUNTER:
            for values in product(*each.labels.values()):
                assert page[name, *sorted(values)] == 0
        elif each.kind is SeriesKind.HISTOGRAM:
            assert page[f"{name}_count",] == 0
            assert page[f"{name}_bucket", "+Inf"] == 0
    assert {key[1] for key in page if key[0] == "gate"} == set(series.REASONS)


def test_every_sample_names_the_pool() -> None:
    assert {s.labels.get("pool") for s in samples(made())} == {"qwen"}


def test_page_holds_what_the_catalogue_declares_and_nothing_else() -> None:
    page = made().render_page()[0].decode()
    known = {PREFIX + each.name for each in CATALOGUE}
    ours = [family for family in families(page) if family.name.startswith(PREFIX)]
    assert {family.name for family in ours} == known
    declared = {PREFIX + each.name: each for each in CATALOGUE}
    for family in ours:
        of = declared[family.name]
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("pool", "le")}
            assert set(labels) == set(of.labels)
            assert of.has_open_labels or all(value in of.labels[label] for label, value in labels.items())


def test_versions_that_are_there_have_series_until_there_are_too_many() -> None:
    there = {"name": "qwen-v2", "serving": 3, "warm": 1, "share": 0.25}
    gone = {"name": "qwen-v1", "serving": 0, "warm": 0, "share": 0.0}
    unwarmed = [
        {"name": f"b-{n:02}", "serving": 1, "warm": None, "share": 0.0} for n in range(MAX_TABLE_ROWS)
    ]
    rows = [
        {"name": "qwen", "serving": 3, "waiting": 0, "versions": [there, gone]},
        {"name": "plain", "serving": 1, "waiting": 0},
        {"name": "b", "serving": 1, "waiting": 0, "versions": unwarmed},
    ]
    metrics = Metrics("qwen")
    metrics.set_status_source(lambda: replace(STATUS, models=ModelsStatus(rows)))
    page = shown(metrics)
    assert page["model_version_endpoints", "qwen", "qwen-v2"] == 3
    assert page["model_version_warm_endpoints", "qwen", "qwen-v2"] == 1
    assert page["model_version_share", "qwen", "qwen-v2"] == 0.25
    assert ("model_version_share", "qwen", "qwen-v1") not in page, "no series for ever"
    assert ("model_version_warm_endpoints", "b", "b-00") not in page, "nothing warms it up"
    assert len([name for name, *_ in page if name == "model_version_share"]) == MAX_TABLE_ROWS


def test_gauges_show_the_status_and_what_is_unknown_is_absent() -> None:
    page = shown(made())
    assert page["limit",] == 30
    assert page["gate", "open"] == 1
    assert sum(value for (name, *_), value in page.items() if name == "gate") == 1
    assert page["headroom", "saturation"] == 28
    assert ("headroom", "requests") not in page, "not believed"
    assert page["f_epp", "requests"] == 0.1
    assert page["reachable", "queue"] == 1
    assert page["build_info", "1.0", "3.11"] == 1


def test_what_is_not_declared_makes_no_series() -> None:
    metrics = made()
    before = len(samples(metrics))
    for number in range(100):
        metrics.count(series.REFUSALS, f"hostile-{number}")
        metrics.count(series.RESULTS, f"{number}yy")
    assert len(samples(metrics)) == before
    assert metrics.get_value(series.REFUSALS, "other") == 100
    assert sum(metrics.get_value(series.RESULTS, code) for code in series.RESULT_CODES) == 0


def test_histogram_counts_into_the_first_bucket_that_holds_it() -> None:
    metrics = made()
    for seconds in (0.01, 0.011, 4000.0, -3.0, float("nan")):
        metrics.observe(series.ATTEMPT_SECONDS, seconds)
    shown = {
        s.labels.get("le"): s.value for s in samples(metrics) if s.name == f"{PREFIX}attempt_seconds_bucket"
    }
    assert shown["0.01"] == 3  # what is no time counts as none
    assert shown["0.025"] == 4
    assert shown["1800.0"] == 4
    assert shown["+Inf"] == 5


def test_events_are_counted_though_nothing_logs_them() -> None:
    metrics = made()
    with divert_events(metrics.count_event):
        emit(Event.LEASE_LOST, entry=1)
        emit(Event.LEASE_LOST, entry=2)
    assert metrics.get_value(series.EVENTS, "lease-lost") == 2


def test_openmetrics_for_whoever_asks_for_it() -> None:
    metrics = made()
    metrics.count(series.RESULTS, "2xx")
    page, kind = metrics.render_page("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    assert any(family.name == f"{PREFIX}results" for family in open_families(page.decode()))
    assert metrics.render_page("text/html")[1].startswith("text/plain")


def test_promtool_finds_nothing_to_say_about_our_series() -> None:
    promtool = require_tool("promtool")
    told = subprocess.run([promtool, "check", "metrics"], input=made().render_page()[0], capture_output=True)
    said = (told.stdout + told.stderr).decode()
    assert [line for line in said.splitlines() if line.startswith(PREFIX)] == []


def test_label_values_are_no_names_of_the_code() -> None:
    """They are written down: to rename a class does not rename a series."""
    assert series.OUTCOMES[Delivered] == "delivered"
    assert set(series.OUTCOMES.values()) == {
        "delivered", "overloaded", "evicted", "failed", "unreachable", "too-large", "refused", "expired",
        "unsent", "no-model",
    }  # fmt: skip
    assert set(series.COMPLETION_KINDS.values()) == {"settlement", "release", "dead-letter"}
    assert (
        set(series.QUEUE_ANSWERS)
        == {"done", "lost", "bad-list", "too-large"}
        == {str(each) for each in SettleStatus}
    )


async def test_page_costs_little_more_than_its_lines() -> None:
    """Some 3 ms, 5 at the most where it was measured: held as a ratio to what the client library itself takes
    for a page of as many lines that need no thought."""
    metrics = made()
    lines = [f"plain_{number}" for number in range(len(metrics.render_page()[0].splitlines()))]

    class Plain(Collector):
        def collect(self) -> Iterator[Metric]:
            family = GaugeMetricFamily("plain", "plain", labels=["name"])
            for line in lines:
                family.add_metric([line], 1.0)
            yield family

    registry = CollectorRegistry()
    registry.register(Plain())
    cost = await beside(cpu_of(metrics.render_page), cpu_of(lambda: generate_latest(registry)))
    print(f"{cost.ours * 1e3:.2f} ms, {len(lines)} lines, {cost.ratio:.2f} of plain ones")
    assert cost.ratio < 2


def test_page_is_made_again_only_when_it_is_old() -> None:
    now, asked = 100.0, 0
    metrics = Metrics("qwen", page_max_age_s=0.5, clock=lambda: now)

    def status() -> Status:
        nonlocal asked
        asked += 1
        return STATUS

    metrics.set_status_source(status)
    first, kind = metrics.render_page()
    metrics.count(series.REQUESTS_EXPIRED)
    now += 0.49
    assert [metrics.render_page() for _ in range(50)] == [(first, kind)] * 50
    assert asked == 1
    assert metrics.render_page("application/openmetrics-text; version=1.0.0")[0].endswith(b"# EOF\n")
    assert asked == 2, "each format is a page of its own"
    for number in range(50):
        metrics.render_page(f"application/x-{number}")
    assert asked == 2, "and no other is one"
    now += 0.01
    assert metrics.render_page()[0] != first
