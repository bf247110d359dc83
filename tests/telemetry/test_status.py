"""Status and metrics while the signals fail and the gate is still open."""

from __future__ import annotations

from typing import Any

from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.poll import ReadFailure
from dispatcher.settings.model import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.status import Status
from tests.service.limiter_status import build_limiter_status

SETTINGS = Settings.model_validate({"pool": {"name": "qwen"}, "gateway": {"url": "http://gateway"}})
REQUESTS = (Signal.REQUESTS,)


def build_status_at(now: float, *failures: ReadFailure, **poll_fields: Any) -> Status:
    """Return the status at `now`, after a reading at 100 s and a poll at 101 s with these failures."""
    limiter = Limiter(Policy(), REQUESTS)
    limiter.add_reading(Reading(Signal.REQUESTS, 100.0, 100.0, 0.5, 0.0, 64.0), 100.0)
    poll = SourcePoll(completed_at=101.0, source="epp", signals=REQUESTS, failures=failures, **poll_fields)
    limiter.apply_poll(poll, 101.0)
    return build_limiter_status(limiter, now, SETTINGS, poll=poll)


def test_failing_signals_are_explained_although_the_gate_is_open() -> None:
    missing = ReadFailure(Reason.UNREADABLE, "ready endpoints are not there", signal=Signal.REQUESTS)
    failing = {"closes_at": 102.5, "failing_since": 101.0}
    status = build_status_at(102.0, missing, **failing)
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
    closed = build_status_at(102.5, missing, **failing)
    assert (closed.gate.reason, closed.signals.signals_close_in_s) == ("unreadable", 0.0)
    assert "stand for" not in closed.gate.explanation


def test_readable_signals_have_no_failure_times() -> None:
    status = build_status_at(101.5)
    assert (status.signals.signals_failing_s, status.signals.signals_close_in_s) == (None, None)
    assert "cannot be read" not in status.gate.explanation
