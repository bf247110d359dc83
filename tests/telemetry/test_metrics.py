"""The page of /metrics matches its catalogue: complete from the start, without other series, and cheap."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from dispatcher.queue.contract import SettleStatus
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.catalogue import CATALOGUE
from dispatcher.telemetry.events import Event, divert_events, emit
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.series import PREFIX, SeriesKind
from dispatcher.telemetry.status import (
    BudgetStatus,
    GateStatus,
    ProcessStatus,
    QueueStatus,
    SignalsStatus,
    Status,
    Terms,
)
from tests.cost_comparison import compare_costs, measure_cpu_s
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


def create_metrics() -> Metrics:
    metrics = Metrics("qwen")
    metrics.set_status_source(lambda: STATUS)
    return metrics


def parse_samples(metrics: Metrics) -> list[Sample]:
    page = metrics.render_page()[0].decode()
    return [s for family in families(page) for s in family.samples if s.name.startswith(PREFIX)]


def parse_values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the values by name and sorted label values, without the label of the pool."""
    return {
        (s.name.removeprefix(PREFIX), *sorted(v for k, v in s.labels.items() if k != "pool")): s.value
        for s in parse_samples(metrics)
    }


def test_names_are_unique_and_follow_prometheus() -> None:
    names = [each.page_name for each in CATALOGUE]
    assert len(names) == len(set(names))
    for each in CATALOGUE:
        assert each.name == each.name.lower()
        assert not each.name.endswith("_total"), "the page adds it"
        assert not each.description.endswith(".")
        assert "pool" not in each.labels
        assert each.sampler is not None or each.kind is not SeriesKind.GAUGE
        assert (each.kind is SeriesKind.HISTOGRAM) == bool(each.buckets)
        if each.kind is not SeriesKind.GAUGE:
            assert all(each.labels.values()), f"{each.name}: a counter's label values are declared"


def test_every_label_value_is_present_from_the_start_with_value_0() -> None:
    page = parse_values(create_metrics())
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
    assert {s.labels.get("pool") for s in parse_samples(create_metrics())} == {"qwen"}


def test_page_has_exactly_the_series_of_the_catalogue() -> None:
    page = create_metrics().render_page()[0].decode()
    declared_names = {PREFIX + each.name for each in CATALOGUE}
    families_of_page = [family for family in families(page) if family.name.startswith(PREFIX)]
    assert {family.name for family in families_of_page} == declared_names
    declared = {PREFIX + each.name: each for each in CATALOGUE}
    for family in families_of_page:
        declaration = declared[family.name]
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("pool", "le")}
            assert set(labels) == set(declaration.labels)
            assert declaration.has_open_labels or all(
                value in declaration.labels[label] for label, value in labels.items()
            )


def test_gauges_show_the_status_and_unknown_values_are_absent() -> None:
    page = parse_values(create_metrics())
    assert page["limit",] == 30
    assert page["gate", "open"] == 1
    assert sum(value for (name, *_), value in page.items() if name == "gate") == 1
    assert page["headroom", "saturation"] == 28
    assert ("headroom", "requests") not in page, "the headroom is unknown"
    assert page["f_epp", "requests"] == 0.1
    assert page["reachable", "queue"] == 1
    assert page["build_info", "1.0", "3.11"] == 1


def test_undeclared_label_values_create_no_series() -> None:
    metrics = create_metrics()
    before = len(parse_samples(metrics))
    for number in range(100):
        metrics.count(series.REFUSALS, f"hostile-{number}")
        metrics.count(series.RESULTS, f"{number}yy")
    assert len(parse_samples(metrics)) == before
    assert metrics.get_value(series.REFUSALS, "other") == 100
    assert sum(metrics.get_value(series.RESULTS, code) for code in series.RESULT_CODES) == 0


def test_histogram_counts_into_the_first_matching_bucket() -> None:
    metrics = create_metrics()
    for seconds in (0.01, 0.011, 4000.0, -3.0, float("nan")):
        metrics.observe(series.ATTEMPT_SECONDS, seconds)
    buckets = {
        s.labels.get("le"): s.value
        for s in parse_samples(metrics)
        if s.name == f"{PREFIX}attempt_seconds_bucket"
    }
    assert buckets["0.01"] == 3  # an invalid duration counts as 0
    assert buckets["0.025"] == 4
    assert buckets["1800.0"] == 4
    assert buckets["+Inf"] == 5


def test_events_are_counted_without_being_logged() -> None:
    metrics = create_metrics()
    with divert_events(metrics.count_event):
        emit(Event.LEASE_LOST, entry=1)
        emit(Event.LEASE_LOST, entry=2)
    assert metrics.get_value(series.EVENTS, "lease-lost") == 2


def test_openmetrics_is_returned_on_request() -> None:
    metrics = create_metrics()
    metrics.count(series.RESULTS, "2xx")
    page, kind = metrics.render_page("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    assert any(family.name == f"{PREFIX}results" for family in open_families(page.decode()))
    assert metrics.render_page("text/html")[1].startswith("text/plain")


def test_promtool_reports_nothing_about_the_series() -> None:
    promtool = require_tool("promtool")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=create_metrics().render_page()[0], capture_output=True
    )
    output = (done.stdout + done.stderr).decode()
    assert [line for line in output.splitlines() if line.startswith(PREFIX)] == []


def test_label_values_are_fixed_strings() -> None:
    """Renaming a class does not rename a label value."""
    assert series.OUTCOMES[Delivered] == "delivered"
    assert set(series.OUTCOMES.values()) == {
        "delivered", "overloaded", "evicted", "failed", "unreachable", "uncounted", "too-large", "refused",
        "expired", "unsent", "no-model",
    }  # fmt: skip
    assert set(series.COMPLETION_KINDS.values()) == {"settlement", "release", "dead-letter"}
    assert (
        set(series.QUEUE_ANSWERS)
        == {"done", "lost", "bad-list", "too-large"}
        == {str(each) for each in SettleStatus}
    )


async def test_page_costs_little_more_than_a_page_of_plain_lines() -> None:
    """Measured: 3 to 5 ms. Compared with the time that the client library takes for a page of as many plain
    lines."""
    metrics = create_metrics()
    lines = [f"plain_{number}" for number in range(len(metrics.render_page()[0].splitlines()))]

    class PlainCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            family = GaugeMetricFamily("plain", "plain", labels=["name"])
            for line in lines:
                family.add_metric([line], 1.0)
            yield family

    registry = CollectorRegistry()
    registry.register(PlainCollector())
    cost = await compare_costs(
        measure_cpu_s(metrics.render_page), measure_cpu_s(lambda: generate_latest(registry))
    )
    print(f"{cost.ours * 1e3:.2f} ms, {len(lines)} lines, {cost.ratio:.2f} of plain ones")
    assert cost.ratio < 2


def test_page_is_rendered_again_only_when_it_is_old() -> None:
    now, status_count = 100.0, 0
    metrics = Metrics("qwen", page_max_age_s=0.5, clock=lambda: now)

    def status() -> Status:
        nonlocal status_count
        status_count += 1
        return STATUS

    metrics.set_status_source(status)
    first, kind = metrics.render_page()
    metrics.count(series.REQUESTS_EXPIRED)
    now += 0.49
    assert [metrics.render_page() for _ in range(50)] == [(first, kind)] * 50
    assert status_count == 1
    assert metrics.render_page("application/openmetrics-text; version=1.0.0")[0].endswith(b"# EOF\n")
    assert status_count == 2, "each format is a page of its own"
    for number in range(50):
        metrics.render_page(f"application/x-{number}")
    assert status_count == 2, "unknown formats get one of these pages"
    now += 0.01
    assert metrics.render_page()[0] != first
