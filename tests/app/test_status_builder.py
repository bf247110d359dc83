"""What is told of a dispatcher beside its gate."""

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
from dispatcher.core.sequences.decisions import SequenceCounts
from dispatcher.dispatch.queue_access import QueueView
from dispatcher.ports import QueueCounts, SharedState
from dispatcher.settings import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import Status
from tests.app.status_worlds import status_of


def status(
    service_s: float,
    *,
    reserve: float = 0.05,
    ours: int = 30,
    f_sys: float = 0.9,
    shared: SharedState | None = None,
) -> Status:
    """Of a pool of 64 with so many of ours in it."""
    policy = Policy(reserve=reserve, per_endpoint=64)
    limiter = Limiter(policy, [Signal.REQUESTS])
    for number in range(ours):
        limiter.record_send(number, 0.0)
    limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, f_sys=f_sys, f_epp=0.0, max_sys=64), 1.1)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "budget": {"reserve": reserve}})
    outlook = QueueForecast(None, None, 0, 1.0, service_s)
    queue = QueueView(QueueCounts(0, ours, 0, 0), 1.1, shared=shared, forecast=outlook)
    return status_of(limiter, 1.2, settings, queue=queue, running=ours)


def load_of(*readings: Reading, sent: float, ended: float | None = None) -> tuple[float | None, float | None]:
    """Return the requests that the status shows as realtime at time 2.0, running and waiting in the picker.

    30 requests of ours were sent and ended at these times.
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
    told = status_of(limiter, 2.0, settings).signals
    return told.realtime, told.realtime_waiting


def read(f_sys: float, f_epp: float = 0.0, *, signal: Signal = Signal.REQUESTS, **more: Any) -> Reading:
    return Reading(signal, 1.0, 1.1, f_sys=f_sys, f_epp=f_epp, max_sys=64, **more)


def test_requests_of_ours_that_ended_since_the_reading_are_not_shown_as_realtime() -> None:
    assert load_of(read(30 / 64), sent=0.0) == (0.0, 0.0)
    assert load_of(read(30 / 64), sent=0.0, ended=1.8) == (0.0, 0.0), "none is in flight any more"
    assert load_of(read(30 / 64), sent=1.05, ended=1.09) == (0.0, 0.0), "they may have been there"
    assert load_of(read(40 / 64), sent=0.0, ended=1.8) == (10.0, 0.0)
    assert load_of(read(30 / 64), sent=1.8) == (30.0, 0.0), "they came later"


def test_requests_of_ours_that_wait_in_the_picker_are_not_shown_as_realtime() -> None:
    assert load_of(read(20 / 64, 10 / 64), sent=0.0) == (0.0, 0.0)
    assert load_of(read(20 / 64, 15 / 64), sent=0.0) == (0.0, 5.0)
    assert load_of(read(40 / 64, 15 / 64), sent=0.0) == (10.0, 15.0)


def test_realtime_is_of_the_signal_that_counts_requests() -> None:
    score = read(0.9, signal=Signal.SATURATION, is_request_count=False)
    assert load_of(score, read(34 / 64), sent=0.0) == (4.0, 0.0)
    counted = replace(score, running=32.0, waiting=1.0, has_exact_counts=False)
    assert load_of(counted, sent=0.0) == (3.0, 0.0)
    assert load_of(read(float("nan")), sent=0.0) == (None, None)


def merging(*, beyond_calls: float, seconds: int) -> Status:
    """Return the status of a pool of 64. Each second a reading showed 20 requests of realtime and 8 calls of
    6 items of ours."""
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
    return status_of(limiter, seconds - 0.5, settings)


@pytest.mark.parametrize("beyond_calls", [0.0, 10.0, 40.0, float("inf")])
def test_realtime_is_shown_right_beside_merged_calls_however_they_are_counted(beyond_calls: float) -> None:
    told = merging(beyond_calls=beyond_calls, seconds=5)
    assert (told.gate.in_flight, told.signals.realtime) == (48, 20.0)
    assert told.gate.open


@pytest.mark.parametrize(
    ("beyond_calls", "seconds", "said"), [(0.0, 30, True), (0.0, 10, False), (40.0, 30, False)]
)
def test_metrics_that_count_calls_are_told_where_items_are_counted(
    beyond_calls: float, seconds: int, *, said: bool
) -> None:
    """Not at once: what the picker's averages have beyond its calls is known some seconds later."""
    told = merging(beyond_calls=beyond_calls, seconds=seconds).gate.explanation
    sentence = "The metrics count calls: 48 units of this process are 8 there. Set `unit: call`"
    assert (sentence in told) is said


def test_long_requests_with_little_reserve_are_told_where_people_look() -> None:
    told = status(48.0)
    assert told.budget.reserve_problem is not None
    assert told.queue.service_s == 48.0
    assert f"Warning: {told.budget.reserve_problem}." in told.gate.explanation


@pytest.mark.parametrize("prober", [None, "dispatcher-7"])
def test_who_tries_whether_the_gateway_is_back_is_told(prober: str | None) -> None:
    shared = SharedState(limit=10, read_at=1.0, overload=None, probing_owner=prober, is_paused=False)
    assert status(4.0, shared=shared).gate.probing_owner == prober


@pytest.mark.parametrize(
    "other",
    [
        status(4.0),
        status(48.0, reserve=0.2),
        status(48.0, ours=2),
        status(48.0, ours=60, f_sys=60 / 64),
    ],
    ids=["short", "reserve", "few of ours", "nobody else"],
)
def test_nobody_is_warned_who_need_not_be(other: Status) -> None:
    assert other.budget.reserve_problem is None
    assert "Warning" not in other.gate.explanation


def in_turn(**counted: int) -> str:
    """What is said of sequences where so much is counted of them."""
    limiter = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS])
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "sequences": {"max_active": 2}})
    queue = QueueView(counts=QueueCounts(9, 0, 0, 0, sequences=SequenceCounts(**counted)))
    told = status_of(limiter, 1.2, settings, queue=queue, running=0).gate.explanation
    return told[told.index("Sequences: ") :] if "Sequences: " in told else ""


def test_what_sequences_keep_back_is_explained() -> None:
    assert in_turn(active=2, aborted=3) == "", "nothing is kept back"
    assert in_turn(active=1, waiting=1) == "Sequences: 1 request waits for a turn."
    held = "1 sequence is held until an operator decides (`sequences list --status held`)"
    assert in_turn(active=1, held=1) == f"Sequences: {held}."
    assert in_turn(active=2, held=1, parked=4, waiting=7) == (
        f"Sequences: 7 requests wait for a turn, {held}, 4 have not begun, because sequences.max_active "
        "(2) are active."
    )


def tried(*, gone: bool = False, at: float = 3.0) -> Status:
    """Where four tries failed until 1 s; `gone`: the last of them found no gateway."""
    limiter, recent = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS]), RecentAttempts()
    limiter.add_reading(Reading(Signal.REQUESTS, 0.5, 0.5, f_sys=0.0, f_epp=0.0, max_sys=64), 0.6)
    for _ in range(4):
        recent.record_attempt(1.0, Failed("the gateway answered 500", 500), 500)
    if gone:
        limiter.record_connection_failure(1.0, "no connection: refused")
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    return status_of(limiter, at, settings, recent=recent)


def test_counts_of_a_queue_that_does_not_answer_are_unknown_wherever_they_are_shown() -> None:
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    counts = QueueCounts(
        8, 0, 0, 0, sequences=SequenceCounts(active=2, parked=0, held=1, aborted=0, waiting=7)
    )
    view = QueueView(counts=counts, counted_at=1.0)
    at_once, late = (status_of(Limiter(Policy(), []), at, settings, queue=view) for at in (2.0, 60.0))
    assert (at_once.queue.pending, at_once.sequences.get_count("waiting")) == (8, 7)
    assert "7 requests wait for a turn" in at_once.gate.explanation
    assert (late.queue.pending, late.sequences.sequences) == (None, None)
    assert "for a turn" not in late.gate.explanation


def test_no_end_is_promised_while_everything_fails() -> None:
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    view = QueueView(QueueCounts(100, 0, 0, 0), 1.0, forecast=QueueForecast(None, None, 0, 2.0, 1.0))
    record = HealthRecord()
    for health, done_in_s in ((Health.WORKING, 50.0), (Health.FAILING, None)):
        record.current = Assessment(health, Cause.NONE, "")
        shown = status_of(Limiter(Policy(), []), 2.0, settings, queue=view, health=record).health
        assert (shown.health, shown.done_in_s) == (health, done_in_s)


def test_gateway_that_fails_what_it_gets_is_told_though_the_gate_is_open() -> None:
    told = tried().gate
    assert told.open
    assert told.attempts_problem == "Of the last 4 attempts 4 failed: 500 (4), the newest 2 s ago"
    assert f" {told.attempts_problem}." in told.explanation


def test_tries_that_failed_are_not_told_beside_a_gateway_that_is_gone() -> None:
    """The gate says that, and why."""
    told = tried(gone=True).gate
    assert (told.reason, told.attempts_problem) == ("gateway-unreachable", None)
    assert "no connection: refused" in told.explanation
    assert "failed" not in told.explanation


def test_tries_of_long_ago_are_told_no_more() -> None:
    told = tried(at=1000.0).gate
    assert told.attempts_problem is None
    assert "failed" not in told.explanation


def test_fixed_limit_says_nothing_of_realtime() -> None:
    limiter = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS])
    limiter.add_reading(read(0.0), 1.1)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}})
    polls = {
        source: SourcePoll(completed_at=1.1, signals=(Signal.REQUESTS,), source=source)
        for source in ("fixed", "epp")
    }
    shown = {name: status_of(limiter, 1.2, settings, poll=poll).signals for name, poll in polls.items()}
    assert (shown["fixed"].realtime, shown["fixed"].realtime_waiting) == (None, None)
    assert shown["epp"].realtime == 0.0
