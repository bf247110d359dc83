"""What is told while the signals fail and the gate is still open."""

from __future__ import annotations

from typing import Any

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.settings import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.status import Status
from tests.app.status_worlds import status_of

SETTINGS = Settings.model_validate({"pool": {"name": "qwen"}, "gateway": {"url": "http://gateway"}})
REQUESTS = (Signal.REQUESTS,)


def told_at(now: float, *unread: ReadFailure, **told: Any) -> Status:
    """The status at `now`, after a reading of 100 s and then, where something was unread, a poll of 101 s."""
    limiter = Limiter(Policy(), REQUESTS)
    limiter.add_reading(Reading(Signal.REQUESTS, 100.0, 100.0, 0.5, 0.0, 64.0), 100.0)
    poll = SourcePoll(completed_at=101.0, source="epp", signals=REQUESTS, failures=unread, **told)
    limiter.apply_poll(poll, 101.0)
    return status_of(limiter, now, SETTINGS, poll=poll)


def test_failing_signals_are_told_with_what_and_since_when_though_the_gate_is_open() -> None:
    missing = ReadFailure(Reason.UNREADABLE, "ready endpoints are not there", signal=Signal.REQUESTS)
    failing = {"closes_at": 102.5, "failing_since": 101.0}
    status = told_at(102.0, missing, **failing)
    assert status.gate.open
    assert (
        "The signals cannot be read for 1.0 s now (requests: ready endpoints are not there): "
        "the readings before stand for another 0.5 s."
    ) in status.gate.explanation
    assert (status.signals.signals_failing_s, status.signals.signals_close_in_s) == (1.0, 0.5)
    metrics = Metrics("qwen")
    metrics.set_status_source(lambda: status)
    page = metrics.render_page()[0].decode()
    assert 'batch_dispatcher_signals_failing_seconds{pool="qwen"} 1.0' in page
    assert 'batch_dispatcher_reachable{part="signals",pool="qwen"} 0.0' in page
    closed = told_at(102.5, missing, **failing)
    assert (closed.gate.reason, closed.signals.signals_close_in_s) == ("unreadable", 0.0)
    assert "stand for" not in closed.gate.explanation


def test_signals_that_are_read_fail_since_never() -> None:
    status = told_at(101.5)
    assert (status.signals.signals_failing_s, status.signals.signals_close_in_s) == (None, None)
    assert "cannot be read" not in status.gate.explanation
