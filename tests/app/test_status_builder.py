"""Parts of the status other than the gate: warnings, realtime load, sequences, attempts and queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import Failed
from dispatcher.core.gateway.recent_attempts import RecentAttempts
from dispatcher.core.health import Assessment, Cause, Health, HealthRecord
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.forecast import QueueForecast
from dispatcher.core.sequences.decisions import OverrideCounts, SequenceCounts
from dispatcher.dispatch.queue_access import QueueView
from dispatcher.ports import QueueCounts, SharedState
from dispatcher.settings import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import Status
from tests.app.limiter_status import build_limiter_status


def build_status(
    service_s: float,
    *,
    reserve: float = 0.05,
    batch_requests: int = 30,
    f_sys: float = 0.9,
    shared: SharedState | None = None,
) -> Status:
    """Return the status of a pool of 64 with this many batch requests in flight."""
    policy = Policy(reserve=reserve, per_endpoint=64)
    limiter = Limiter(policy, [Signal.REQUESTS])
    for number in range(batch_requests):
        limiter.record_send(number, 0.0)
    limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, f_sys=f_sys, f_epp=0.0, max_sys=64), 1.1)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "budget": {"reserve": reserve}})
    forecast = QueueForecast(None, None, 0, 1.0, service_s)
    queue = QueueView(QueueCounts(0, batch_requests, 0, 0), 1.1, shared=shared, forecast=forecast)
    return build_limiter_status(limiter, 1.2, settings, queue=queue, running=batch_requests)


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


@pytest.mark.parametrize(
    ("beyond_calls", "seconds", "is_expected"), [(0.0, 30, True), (0.0, 10, False), (40.0, 30, False)]
)
def test_warning_if_metrics_count_calls_and_the_limit_counts_items(
    beyond_calls: float, seconds: int, *, is_expected: bool
) -> None:
    """The warning appears after some seconds, when the items beyond the calls of the picker are known."""
    explanation = build_merging_status(beyond_calls=beyond_calls, seconds=seconds).gate.explanation
    sentence = "The metrics count calls: 48 units of this process are 8 there. Set `unit: call`"
    assert (sentence in explanation) is is_expected


def test_warning_about_long_requests_with_a_small_reserve() -> None:
    status = build_status(48.0)
    assert status.budget.reserve_problem is not None
    assert status.queue.service_s == 48.0
    assert f"Warning: {status.budget.reserve_problem}." in status.gate.explanation


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


def explain_sequences(**counted: Any) -> str:
    """Return the explanation of sequences for these counts."""
    limiter = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS])
    models = [{"match": "big-*", "max_active": 1}, {"match": "patient", "max_idle_s": 9}]
    settings = Settings.model_validate(
        {"gateway": {"url": "http://gw"}, "sequences": {"max_active": 2, "models": models}}
    )
    queue = QueueView(counts=QueueCounts(9, 0, 0, 0, sequences=SequenceCounts(**counted)))
    explanation = build_limiter_status(limiter, 1.2, settings, queue=queue, running=0).gate.explanation
    return explanation[explanation.index("Sequences: ") :] if "Sequences: " in explanation else ""


def test_requests_held_back_by_sequences_are_explained() -> None:
    assert explain_sequences(active=2, aborted=3) == "", "no request is held back"
    assert explain_sequences(active=1, waiting=1) == "Sequences: 1 request waits for a turn."
    held = "1 sequence is held until an operator decides (`sequences list --status held`)"
    assert explain_sequences(active=1, held=1) == f"Sequences: {held}."
    assert explain_sequences(active=2, held=1, parked=4, waiting=7) == (
        f"Sequences: 7 requests wait for a turn, {held}, 4 have not begun, because sequences.max_active "
        "(2) are active."
    )


def test_parked_sequences_are_explained_by_the_limit_that_they_wait_for() -> None:
    big = OverrideCounts("big-*", active=1, parked=3)
    limited = "3 of model big-* have not begun, because sequences.models[0].max_active (1) are active"
    assert explain_sequences(active=1, parked=3, overrides=(big,)) == f"Sequences: {limited}."
    patient = OverrideCounts("patient", active=1, parked=1)
    general = "2 have not begun, because sequences.max_active (2) are active"
    assert (
        explain_sequences(active=2, parked=5, overrides=(big, patient)) == f"Sequences: {limited}, {general}."
    )


def test_sequences_of_overrides_are_in_the_status() -> None:
    counts = SequenceCounts(active=2, parked=3, overrides=(OverrideCounts("big-*", 1, 3),))
    view = QueueView(counts=QueueCounts(9, 0, 0, 0, sequences=counts))
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    status = build_limiter_status(Limiter(Policy(), []), 1.2, settings, queue=view).sequences
    assert status.sequences == {"active": 2, "parked": 3, "held": 0, "aborted": 0, "waiting": 0}
    assert (status.get_by_match("active"), status.get_by_match("parked")) == ({"big-*": 1.0}, {"big-*": 3.0})


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
    counts = QueueCounts(
        8, 0, 0, 0, sequences=SequenceCounts(active=2, parked=0, held=1, aborted=0, waiting=7)
    )
    view = QueueView(counts=counts, counted_at=1.0)
    early, late = (
        build_limiter_status(Limiter(Policy(), []), at, settings, queue=view) for at in (2.0, 60.0)
    )
    assert (early.queue.pending, early.sequences.get_count("waiting")) == (8, 7)
    assert "7 requests wait for a turn" in early.gate.explanation
    assert (late.queue.pending, late.sequences.sequences) == (None, None)
    assert "for a turn" not in late.gate.explanation


def test_time_until_done_is_unknown_while_everything_fails() -> None:
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    view = QueueView(QueueCounts(100, 0, 0, 0), 1.0, forecast=QueueForecast(None, None, 0, 2.0, 1.0))
    record = HealthRecord()
    for health, done_in_s in ((Health.WORKING, 50.0), (Health.FAILING, None)):
        record.current = Assessment(health, Cause.NONE, "")
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
