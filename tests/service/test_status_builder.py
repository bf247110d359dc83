"""Parts of the status other than the gate: warnings, realtime load, sequences, attempts and queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dispatcher.kernel.hooks import Hooks
from dispatcher.kernel.queue_access import QueueView
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.health import Assessment, Causes, Health, HealthRecord
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import SharedState
from dispatcher.requests.forecast import QueueForecast
from dispatcher.requests.outcomes.outcome import Failed
from dispatcher.requests.outcomes.recent_attempts import RecentAttempts
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.settings.model import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import FeatureSection, FeatureStatus, Status
from tests.service.limiter_status import (
    SlowLimiter,
    build_context_status,
    build_limiter_status,
    create_context,
)


def build_status(
    call_duration_s: float,
    *,
    reserve: float = 0.05,
    batch_requests: int = 30,
    f_sys: float = 0.9,
    shared: SharedState | None = None,
    why_long: str = "",
) -> Status:
    """Return the status of a pool of 64 with this many batch requests in flight, whose calls take
    `call_duration_s`. `why_long` is what a feature knows about their duration."""
    policy = Policy(reserve=reserve, per_endpoint=64)
    limiter = SlowLimiter(policy, [Signal.REQUESTS])
    limiter.call_duration_s = call_duration_s
    for number in range(batch_requests):
        limiter.record_send(number, 0.0)
    limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, f_sys=f_sys, f_epp=0.0, max_sys=64), 1.1)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "budget": {"reserve": reserve}})
    forecast = QueueForecast(None, None, 0, 1.0, 48.0)
    queue = QueueView(QueueCounts(0, batch_requests, 0, 0), 1.1, shared=shared, forecast=forecast)
    context = create_context(limiter, queue=queue)
    told = FeatureStatus(FeatureSection(), ("It is told.",), ("a problem of it",), why_long)
    context.hooks = Hooks(status=(lambda now, counts: told,))
    return build_context_status(context, 1.2, settings)


def get_realtime_load(
    *readings: Reading, sent: float, ended: float | None = None
) -> tuple[float | None, float | None]:
    """Return the realtime requests that the status shows at time 2.0, running and waiting in the picker.

    30 batch requests were sent and ended at these times.
    """
    limiter = Limiter(Policy(per_endpoint=64), [each.signal for each in readings])
    for number in range(30):
        limiter.record_send(number, sent)
    if ended is not None:
        for number in range(30):
            limiter.record_answer(number, ended)
    for reading in readings:
        limiter.add_reading(reading, reading.closed_at)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    status = build_limiter_status(limiter, 2.0, settings).signals
    return status.realtime, status.realtime_waiting


def create_reading(
    f_sys: float, f_epp: float = 0.0, *, signal: Signal = Signal.REQUESTS, **fields: Any
) -> Reading:
    return Reading(signal, 1.0, 1.1, f_sys=f_sys, f_epp=f_epp, max_sys=64, **fields)


def test_batch_requests_that_ended_since_the_reading_are_not_shown_as_realtime() -> None:
    assert get_realtime_load(create_reading(30 / 64), sent=0.0) == (0.0, 0.0)
    assert get_realtime_load(create_reading(30 / 64), sent=0.0, ended=1.8) == (0.0, 0.0), (
        "no request is in flight any more"
    )
    assert get_realtime_load(create_reading(30 / 64), sent=1.05, ended=1.09) == (0.0, 0.0), (
        "the reading may contain the requests"
    )
    assert get_realtime_load(create_reading(40 / 64), sent=0.0, ended=1.8) == (10.0, 0.0)
    assert get_realtime_load(create_reading(30 / 64), sent=1.8) == (30.0, 0.0), "the requests were sent later"


def test_batch_requests_that_wait_in_the_picker_are_not_shown_as_realtime() -> None:
    assert get_realtime_load(create_reading(20 / 64, 10 / 64), sent=0.0) == (0.0, 0.0)
    assert get_realtime_load(create_reading(20 / 64, 15 / 64), sent=0.0) == (0.0, 5.0)
    assert get_realtime_load(create_reading(40 / 64, 15 / 64), sent=0.0) == (10.0, 15.0)


def test_realtime_comes_from_the_signal_that_counts_requests() -> None:
    score = create_reading(0.9, signal=Signal.SATURATION, is_request_count=False)
    assert get_realtime_load(score, create_reading(34 / 64), sent=0.0) == (4.0, 0.0)
    counted = replace(score, running=32.0, waiting=1.0, has_exact_counts=False)
    assert get_realtime_load(counted, sent=0.0) == (3.0, 0.0)
    assert get_realtime_load(create_reading(float("nan")), sent=0.0) == (None, None)


def build_merging_status(*, beyond_calls: float, seconds: int) -> Status:
    """Return the status of a pool of 64 whose readings show 20 realtime requests and 8 batch calls of 6
    items."""
    limiter = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS])
    for number in range(8):
        limiter.record_send(number, 0.0, 6)
    load = 20 + 8 + min(40.0, beyond_calls)
    for at in range(1, seconds):
        limiter.add_reading(
            Reading(Signal.REQUESTS, at, at, load / 64, 0.0, max_sys=64, items_beyond_calls=beyond_calls),
            at + 0.1,
        )
        limiter.get_allowance(at + 0.5)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    return build_limiter_status(limiter, seconds - 0.5, settings)


@pytest.mark.parametrize("beyond_calls", [0.0, 10.0, 40.0, float("inf")])
def test_realtime_is_right_however_merged_calls_are_counted(beyond_calls: float) -> None:
    status = build_merging_status(beyond_calls=beyond_calls, seconds=5)
    assert (status.gate.in_flight, status.signals.realtime) == (48, 20.0)
    assert status.gate.open


def test_warning_about_long_calls_with_a_small_reserve() -> None:
    status = build_status(48.0)
    assert status.budget.reserve_problem is not None
    assert f"Warning: {status.budget.reserve_problem}." in status.gate.explanation


def test_no_warning_about_long_requests_that_are_sent_in_short_calls() -> None:
    status = build_status(4.0)
    assert status.queue.service_s == 48.0, "all calls of a request together"
    assert status.budget.reserve_problem is None


def test_warning_names_why_calls_are_long() -> None:
    problem = build_status(48.0, why_long="a feature is off").budget.reserve_problem
    assert problem is not None
    assert "calls of batch requests take 48 s on average (a feature is off)" in problem


def test_sentences_and_problems_of_features_are_shown() -> None:
    gate = build_status(4.0).gate
    assert " It is told." in gate.explanation
    assert gate.problems == ["a problem of it"]


@pytest.mark.parametrize("probing_owner", [None, "dispatcher-7"])
def test_owner_of_the_gateway_probe_is_shown(probing_owner: str | None) -> None:
    shared = SharedState(limit=10, read_at=1.0, overload=None, probing_owner=probing_owner, is_paused=False)
    assert build_status(4.0, shared=shared).gate.probing_owner == probing_owner


@pytest.mark.parametrize(
    "other",
    [
        build_status(4.0),
        build_status(48.0, reserve=0.2),
        build_status(48.0, batch_requests=2),
        build_status(48.0, batch_requests=60, f_sys=60 / 64),
    ],
    ids=["short requests", "large reserve", "few batch requests", "no realtime"],
)
def test_no_warning_about_the_reserve_if_it_is_not_needed(other: Status) -> None:
    assert other.budget.reserve_problem is None
    assert "Warning" not in other.gate.explanation


def build_status_after_failures(*, is_unreachable: bool = False, at: float = 3.0) -> Status:
    """Return the status after four attempts failed at 1 s. `is_unreachable`: the last could not connect."""
    limiter, recent = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS]), RecentAttempts()
    limiter.add_reading(Reading(Signal.REQUESTS, 0.5, 0.5, f_sys=0.0, f_epp=0.0, max_sys=64), 0.6)
    for _ in range(4):
        recent.record_attempt(1.0, Failed("the gateway answered 500", 500), 500)
    if is_unreachable:
        limiter.record_connection_failure(1.0, "no connection: refused")
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    return build_limiter_status(limiter, at, settings, recent=recent)


def test_old_counts_of_an_unreachable_queue_are_unknown() -> None:
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    counts = QueueCounts(8, 0, 0, 0)
    context = create_context(Limiter(Policy(), []), queue=QueueView(counts=counts, counted_at=1.0))
    told_to_features: list[QueueCounts | None] = []

    def build_feature(now: float, counts: QueueCounts | None) -> FeatureStatus:
        told_to_features.append(counts)
        return FeatureStatus(FeatureSection())

    context.hooks = Hooks(status=(build_feature,))
    early, late = (build_context_status(context, at, settings) for at in (2.0, 60.0))
    assert (early.queue.pending, late.queue.pending) == (8, None)
    assert told_to_features == [counts, None]


def test_time_until_done_is_unknown_while_everything_fails() -> None:
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    view = QueueView(QueueCounts(100, 0, 0, 0), 1.0, forecast=QueueForecast(None, None, 0, 2.0, 1.0))
    record = HealthRecord()
    for health, done_in_s in ((Health.WORKING, 50.0), (Health.FAILING, None)):
        record.current = Assessment(health, Causes.NONE, "")
        shown = build_limiter_status(Limiter(Policy(), []), 2.0, settings, queue=view, health=record).health
        assert (shown.health, shown.done_in_s) == (health, done_in_s)


def test_failed_attempts_are_explained_although_the_gate_is_open() -> None:
    gate = build_status_after_failures().gate
    assert gate.open
    assert gate.attempts_problem == "Of the last 4 attempts 4 failed: 500 (4), the newest 2 s ago"
    assert f" {gate.attempts_problem}." in gate.explanation


def test_failed_attempts_are_not_explained_if_the_gateway_is_unreachable() -> None:
    """The closed gate explains that already."""
    gate = build_status_after_failures(is_unreachable=True).gate
    assert (gate.reason, gate.attempts_problem) == ("gateway-unreachable", None)
    assert "no connection: refused" in gate.explanation
    assert "failed" not in gate.explanation


def test_old_failed_attempts_are_not_explained() -> None:
    gate = build_status_after_failures(at=1000.0).gate
    assert gate.attempts_problem is None
    assert "failed" not in gate.explanation


def test_fixed_limit_has_no_realtime_numbers() -> None:
    limiter = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS])
    limiter.add_reading(create_reading(0.0), 1.1)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    polls = {
        source: SourcePoll(completed_at=1.1, signals=(Signal.REQUESTS,), source=source)
        for source in ("fixed", "epp")
    }
    shown = {
        name: build_limiter_status(limiter, 1.2, settings, poll=poll).signals for name, poll in polls.items()
    }
    assert (shown["fixed"].realtime, shown["fixed"].realtime_waiting) == (None, None)
    assert shown["epp"].realtime == 0.0
