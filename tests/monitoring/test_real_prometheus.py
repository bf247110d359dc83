"""Every expression of the chart, in a real Prometheus that scrapes a working dispatcher."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dispatcher.features.merging.status import BatchingStatus
from dispatcher.features.models.status import ModelsStatus, ModelStatus, VersionStatus
from dispatcher.features.sequences.status import SequenceModelStatus, SequencesStatus
from dispatcher.features.slices.status import SlicingStatus
from dispatcher.features.tokens.status import TokenEstimateStatus, TokensStatus
from dispatcher.telemetry.catalogue import CATALOGUE
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.series import SeriesKind
from dispatcher.telemetry.status import (
    BudgetStatus,
    ImpactStatus,
    QueueStatus,
    Terms,
    WatchStatus,
)
from tests.monitoring.alert_cases import IDLE, MERGED
from tests.monitoring.alertmanager import Alertmanager
from tests.monitoring.chart_files import Query, load_alerts, load_recorded_expressions
from tests.monitoring.prometheus import Prometheus, find_changed_series, find_present_series, shorten_times
from tests.scenarios.processes import POOL, Stage
from tests.support import wait_until_sync

ABSENT_SERIES = {
    "ALERTS",  # no alert is pending
    "batch_dispatcher_model_endpoints",  # no models are configured
    "batch_dispatcher_model_version_endpoints",
    "batch_dispatcher_model_version_share",
    "batch_dispatcher_model_version_warm_endpoints",
    "batch_dispatcher_model_waiting",
    "batch_dispatcher_kv_capacity_tokens",  # the size of the KV memory is not known
    "batch_dispatcher_kv_reserved_tokens",
    "batch_dispatcher_kv_room_tokens",
    "batch_dispatcher_kv_used_tokens",
    "batch_dispatcher_token_estimate_error",
    "batch_dispatcher_merge_gain",  # no request matches a rule
    "batch_dispatcher_merge_off",
    "batch_dispatcher_merge_size",
    "batch_dispatcher_picker_max_concurrency",  # appears when enough pages of the picker agree
    "batch_dispatcher_per_endpoint",  # max_sys is set
    "batch_dispatcher_sequences_active_by_model",  # no sequence has settings of its own
    "batch_dispatcher_sequences_parked_by_model",
    "batch_dispatcher_signals_failing_seconds",  # the signals can be read
    "batch_dispatcher_watch_endpoints",  # no cluster
    "batch_dispatcher_watch_stale_seconds",
}
"""Series for which a dispatcher with the stand-in has no value, or has one from some time on only."""


STATUS_WITH_ALL_VALUES = replace(
    IDLE,
    gate=replace(IDLE.gate, reason="no-room"),
    budget=BudgetStatus(
        0.05, "requests", 0.9, 0.1, -0.05, -2, 32.0, "watch", 48.0,
        per_endpoint=32.0, picker_max_concurrency=31,
        terms=[Terms(name, 0.9, 0.1, -0.05, -2, 32.0) for name in ("saturation", "requests")],
    ),
    signals=replace(IDLE.signals, signals_problem="timed out", signals_failing_s=3.0, signals_close_in_s=1.0),
    watch=WatchStatus(watch_endpoints=1, watch_stale_s=5.0, watch_problems=["one"]),
    queue=QueueStatus(
        pending=20, leased=2, delayed=1, dead=3, paused=True, oldest_pending_age_s=30.0,
        earliest_deadline_s=-5.0, at_risk=4, service_rate=0.5, replica_count=2,
    ),
    impact=ImpactStatus(0.2, 0.9, 0.02, 0.05, batch_share=0.4),
    features=(
        ModelsStatus(
            [ModelStatus("qwen", serving=2, waiting=7,
                         versions=[VersionStatus("qwen-v2", serving=2, warm=1, share=1.0)])]
        ),
        BatchingStatus([MERGED, replace(MERGED, model="other", off_reason="it mixes things up")], 3),
        SequencesStatus(
            {"active": 5, "parked": 1, "held": 1, "aborted": 1, "waiting": 9},
            [SequenceModelStatus("qwen-*", 2, 1)],
        ),
        SlicingStatus(started=2),
        TokensStatus(9e4, 6e4, 2e4, 3e4, 1e4, token_estimates=[TokenEstimateStatus("qwen", 0.1)]),
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.first
def test_every_expression_returns_data_of_a_working_dispatcher(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(slots=32, seconds=0.3)
    dispatcher = stage.dispatcher(stage.settings(world))
    (tmp_path / "prometheus").mkdir()
    with Prometheus(tmp_path / "prometheus", scrape_s=0.5) as prometheus:
        prometheus.scrape({"a": dispatcher.admin_port})
        # No request waits before the first scrape, so every rate begins at 0.
        prometheus.wait_for('batch_dispatcher_gate{reason="idle"} == 1')
        world.control(realtime=6)
        stage.producer.submit(8000, b'{"prompt":"hi","max_tokens":8}', created=int(time.time()))
        prometheus.wait_for(
            'rate(batch_dispatcher_attempts_total{outcome="delivered"}[4s]) > 10'
            " and on () batch_dispatcher_pending > 0"
        )
        expected_series = {
            each.page_name + ("_count" if each.buckets else "") for each in CATALOGUE
        } - ABSENT_SERIES
        for name in [*load_recorded_expressions(), *expected_series]:
            prometheus.wait_for(name, 60)
        findings = prometheus.check_queries(pool=POOL, namespace="batch", instance="a")
        faulty = (
            "batch_dispatcher_gone",
            "-batch_dispatcher_limit",
            "0 * batch_dispatcher_limit / 0",
            "sum(",
        )
        wrong_findings = prometheus.check_queries([Query("planted", expr) for expr in faulty])
        present, changed = find_present_series(prometheus), find_changed_series(prometheus, "a")
        assert prometheus.read_rule_errors() == {}
        assert [alert["labels"] for alert in prometheus.read_alerts() if alert["state"] == "firing"] == []
    assert (changed["batch_dispatcher_attempts_total"], changed["batch_dispatcher_wait_seconds"]) == (
        True,
        True,
    )
    assert (changed["batch_dispatcher_reserve"], changed["batch_dispatcher_config_generation"]) == (
        False,
        False,
    )
    missing = {name for name, is_present in present.items() if not is_present}
    assert missing <= ABSENT_SERIES, missing
    assert [found for found in findings if not found.series & ABSENT_SERIES] == []
    assert [found.problem.partition(":")[0] for found in wrong_findings] == [
        "no data",
        "negative",
        "no data",
        'invalid parameter "query"',
    ]


def test_every_expression_returns_data_if_all_values_are_known(tmp_path: Path) -> None:
    """All gauges of two replicas are known and all counters increase, so no panel is empty."""
    pages = [Metrics(POOL), Metrics(POOL)]
    for metrics in pages:
        metrics.set_status_source(lambda: STATUS_WITH_ALL_VALUES)

    def render_page(number: int) -> bytes:
        for series in CATALOGUE:
            if series.kind is SeriesKind.HISTOGRAM:
                pages[number].observe(series, 0.3)
            elif series.kind is SeriesKind.COUNTER:
                for labels in product(*series.labels.values()):
                    pages[number].count(series, *labels)
        return pages[number].render_page()[0]

    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(serve_page(partial(render_page, n))) for n, name in enumerate("ab")
        }
        prometheus = stack.enter_context(Prometheus(tmp_path, scrape_s=0.5))
        prometheus.scrape(ports)
        prometheus.wait_for('count(rate(batch_dispatcher_attempts_total{status="2xx"}[4s]) > 0) > 1')
        for name in load_recorded_expressions():
            prometheus.wait_for(name)
        findings = prometheus.check_queries(pool=POOL, namespace="batch", instance="a|b")
        assert findings == []
        (utilization,) = [
            query for query in prometheus.list_panel_queries() if query.location == "panel Utilization"
        ]
        (sample,) = prometheus.query(utilization.fill_variables(__rate_interval="4s"))
        assert sample.value == pytest.approx(2, rel=0.5), "each of two replicas counts the same free capacity"
        assert prometheus.read_rule_errors() == {}


@contextmanager
def serve_page(render_page: Callable[[], bytes]) -> Iterator[int]:
    """Serve a page of metrics, and yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = render_page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_firing_alert_has_its_rendered_texts(stage: Stage, tmp_path: Path) -> None:
    """A dispatcher ends, and the rules have short times."""
    world = stage.world(slots=32, seconds=0.3)
    dispatcher = stage.dispatcher(stage.settings(world))
    (tmp_path / "prometheus").mkdir()
    with Prometheus(tmp_path / "prometheus", scrape_s=0.5, speedup=100) as prometheus:
        prometheus.scrape({"a": dispatcher.admin_port})
        prometheus.wait_for(
            'batch_dispatcher_build_info unless on () ALERTS{alertname="BatchDispatcherDown"}'
        )
        dispatcher.terminate()
        prometheus.wait_for('ALERTS{alertname="BatchDispatcherDown",alertstate="firing"}')
        (down,) = [
            each for each in prometheus.read_alerts() if each["labels"]["alertname"] == "BatchDispatcherDown"
        ]
    assert (down["labels"]["pool"], down["labels"]["namespace"]) == (POOL, "batch")
    assert down["annotations"]["summary"] == f"No dispatcher runs for pool {POOL}"
    assert "<" not in "".join(down["annotations"].values())


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize(
    ("status", "silenced_alert"), [(429, "BatchDispatcherRefusals"), (500, "BatchDispatcherDeadRequests")]
)
def test_failing_gateway_notifies_with_one_alert(
    status: int, silenced_alert: str, stage: Stage, tmp_path: Path
) -> None:
    """The alert of the cause notifies, and a real Alertmanager silences its effects. The rules have short
    times."""
    world = stage.world(slots=32, seconds=0.3)
    dispatcher = stage.dispatcher(stage.settings(world, retry={"max_attempts": 1}))
    for name in ("prometheus", "alertmanager"):
        (tmp_path / name).mkdir()
    # A 500 without a body would count as an answer of a proxy.
    reason = "rejected-saturated" if status == 429 else ""
    answer = {"status": status, "reason": reason, "body": "out of order"}
    with (
        Prometheus(tmp_path / "prometheus", scrape_s=0.5, speedup=40) as prometheus,
        Alertmanager(tmp_path / "alertmanager") as alertmanager,
    ):
        prometheus.scrape({"a": dispatcher.admin_port})
        prometheus.wait_for('batch_dispatcher_gate{reason="idle"} == 1')
        stage.producer.submit(9000, json.dumps({"sim": answer}).encode(), created=int(time.time()))
        for name in ("BatchDispatcherNothingSucceeds", silenced_alert):
            prometheus.wait_for(f'ALERTS{{alertname="{name}",alertstate="firing"}}', 90)
        firing = [each["labels"] for each in prometheus.read_alerts() if each["state"] == "firing"]
        alertmanager.raise_alerts(firing)

        def is_silenced() -> bool:
            notify, is_silenced = (
                {each["alertname"] for each in part} for part in alertmanager.read_by_inhibition()
            )
            return "BatchDispatcherNothingSucceeds" in notify and silenced_alert in is_silenced

        wait_until_sync(is_silenced, 20, what=f"{silenced_alert} is silenced", every_s=0.1)


def test_shortened_rules_differ_only_in_their_times() -> None:
    text = "expr: rate(x[5m]) > 60\nfor: 1h\n"
    assert shorten_times(text, 60) == "expr: rate(x[5000ms]) > 60\nfor: 60000ms\n"
    assert shorten_times(text, 1) == text
    assert len(load_alerts()) > 20
