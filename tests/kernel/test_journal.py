"""The journal counts and logs what happens to each request, and its own errors cost no request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel.completions import Completion
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.journal import Journal
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import DeadLetter, Release, Settlement, SettleStatus
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    Outcome,
    Overloaded,
    Refused,
    UncountedError,
    Unreachable,
)
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, divert_events, enable_debug_events
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.series import Series
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import lease, open_limiter, request

UNIX_NOW = 1_000_000.0
SETTLEMENT = Settlement(lease(), b"{}", "", result_class="2xx")


class JournalBench:
    """A journal, with its metrics and the events that it logged."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.journal = Journal(self.metrics)
        self.events: list[tuple[Event, Mapping[str, Any]]] = []

    def count(self, series: Series, *labels: str) -> float:
        return self.metrics.get_value(series, *labels)

    def record_attempt_with(self, outcome: Outcome) -> InFlightLease:
        entry = InFlightLease(lease(), request=request())
        self.journal.record_attempt(entry, AttemptResult(outcome, 1.0, 3.5), outcome)
        return entry

    def record_completion(
        self,
        completion: Completion,
        answer: SettleStatus = SettleStatus.DONE,
        entry: InFlightLease | None = None,
    ) -> None:
        self.journal.record_completion(entry, completion, answer, 5.0, UNIX_NOW)


def run_on_bench(
    check: Callable[[JournalBench], Awaitable[None]], *, expects_internal_error: bool = False
) -> None:
    async def main() -> None:
        bench = JournalBench()
        with divert_events(lambda event, fields: bench.events.append((event, fields))):
            await check(bench)
        assert (Event.INTERNAL_ERROR in [event for event, _ in bench.events]) == expects_internal_error

    run_in_virtual_time(main())


@pytest.fixture
def debug_events() -> Iterator[None]:
    enable_debug_events(True)
    yield
    enable_debug_events(False)


@pytest.mark.parametrize(
    ("outcome", "labels"),
    [
        (Delivered(200, b"{}"), ("delivered", "2xx")),
        (Delivered(404, b"{}"), ("delivered", "4xx")),
        (Failed("reset"), ("failed", "none")),
        (Overloaded(429, "", is_out_of_capacity=True), ("overloaded", "4xx")),
        (Unreachable("no connection"), ("unreachable", "none")),
        (UncountedError("the gateway answered 503"), ("uncounted", "none")),
        (Evicted(429, "evicted-priority"), ("evicted", "4xx")),
        (Evicted(200, "evicted"), ("evicted", "2xx")),
    ],
)
def test_attempt_is_counted_by_its_outcome_and_status(outcome: Outcome, labels: tuple[str, str]) -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_attempt_with(outcome)
        assert bench.count(series.ATTEMPTS, *labels) == 1
        assert bench.count(series.ATTEMPT_SECONDS) == 1
        assert bench.metrics._histograms[series.ATTEMPT_SECONDS].sum == 2.5

    run_on_bench(check)


def test_time_in_the_picker_queue_is_counted_if_the_answer_states_it() -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_attempt_with(Delivered(200, b"{}"))
        assert bench.count(series.PICKER_WAIT_SECONDS) == 0
        waited = AttemptResult(Delivered(200, b"{}"), 1.0, 3.5, queued_s=0.25)
        bench.journal.record_attempt(InFlightLease(lease(), request=request()), waited, waited.outcome)
        assert bench.count(series.PICKER_WAIT_SECONDS) == 1
        assert bench.metrics._histograms[series.PICKER_WAIT_SECONDS].sum == 0.25

    run_on_bench(check)


def test_gateway_status_is_counted_even_if_the_outcome_is_uncounted() -> None:
    """An intermediary error during an outage is no failure of the request."""

    async def check(bench: JournalBench) -> None:
        intermediary_error = AttemptResult(Failed("503", 503, is_intermediary_error=True), 1.0, 2.0)
        bench.journal.record_attempt(
            InFlightLease(lease(), request=request()), intermediary_error, UncountedError("503")
        )
        assert bench.count(series.ATTEMPTS, "uncounted", "5xx") == 1

    run_on_bench(check)


def test_recent_attempts_are_summarized_by_the_answers_of_the_gateway() -> None:
    async def check(bench: JournalBench) -> None:
        error_status = Failed("500", 500, b"secret")
        no_answer = Failed("reset", kind=FailureKind.NO_ANSWER)
        outcomes: list[Outcome] = [Delivered(200, b"{}"), no_answer, error_status, error_status]
        for outcome in outcomes:
            bench.record_attempt_with(outcome)
        intermediary_error = AttemptResult(Failed("503", 503, is_intermediary_error=True), 1.0, 4.5)
        bench.journal.record_attempt(
            InFlightLease(lease(), request=request()), intermediary_error, UncountedError("503")
        )
        problem = bench.journal.recent_attempts.describe_problem(5.5)
        assert (
            problem == "Of the last 5 attempts 4 failed: 500 (2), no answer (1), 503 (1), the newest 1 s ago"
        )

    run_on_bench(check)


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("", "none"),
        ("rejected-saturated", "rejected-saturated"),
        ("server-full", "server-full"),
        ("unknown reason of a gateway", "other"),
    ],
)
def test_refusal_is_counted_by_a_known_reason(reason: str, label: str) -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_attempt_with(Overloaded(429, reason, is_out_of_capacity=True))
        assert bench.count(series.REFUSALS, label) == 1

    run_on_bench(check)


@pytest.mark.parametrize(("status", "counted"), [(200, (7.0, 3.0)), (400, (0.0, 0.0))])
def test_tokens_of_answers_are_counted_but_not_those_of_errors(
    status: int, counted: tuple[float, float]
) -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_attempt_with(
            Delivered(status, b'{"usage": {"prompt_tokens": 7, "completion_tokens": 3}}')
        )
        assert (bench.count(series.TOKENS, "in"), bench.count(series.TOKENS, "out")) == counted

    run_on_bench(check)


@pytest.mark.parametrize(
    ("completion", "answer", "code"),
    [
        (SETTLEMENT, SettleStatus.DONE, "2xx"),
        (SETTLEMENT, SettleStatus.TOO_LARGE, ErrorCode.TOO_LARGE),
        (SETTLEMENT, SettleStatus.BAD_LIST, ErrorCode.INVALID_REQUEST),
        (SETTLEMENT, SettleStatus.LOST, None),
        (DeadLetter(SETTLEMENT, "why"), SettleStatus.DONE, "2xx"),
        (DeadLetter(SETTLEMENT, "why"), SettleStatus.BAD_LIST, "2xx"),
        (DeadLetter(Settlement(lease(), b"", ""), "unread"), SettleStatus.DONE, None),
        (Release(lease()), SettleStatus.DONE, None),
    ],
)
def test_result_is_counted_by_the_code_that_was_written(
    completion: Completion, answer: SettleStatus, code: str | None
) -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_completion(completion, answer)
        assert bench.count(series.LEASES_ENDED, series.COMPLETION_KINDS[type(completion)], answer) == 1
        results = {each: bench.count(series.RESULTS, each) for each in series.RESULT_CODES}
        assert {each for each, count in results.items() if count} == ({code} if code else set())

    run_on_bench(check)


def test_retries_are_counted_by_their_cause() -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_completion(Release(lease(), is_failed_attempt=True))
        bench.record_completion(Release(lease(), is_refusal=True))
        bench.record_completion(Release(lease(), is_undelivered=True))
        counted = [bench.count(series.RETRIES, each) for each in series.RETRY_KINDS]
        assert counted == [1, 1], "a return without an attempt is no retry"

    run_on_bench(check)


def test_durations_span_from_creation_to_result() -> None:
    async def check(bench: JournalBench) -> None:
        entry = InFlightLease(lease(), request=request(created=int(UNIX_NOW) - 60))
        bench.journal.record_sent(entry, request(created=int(UNIX_NOW) - 60), UNIX_NOW - 20)
        entry.answered_at = 4.5
        bench.record_completion(SETTLEMENT, entry=entry)
        durations_s = [
            bench.metrics._histograms[each].sum
            for each in (series.WAIT_SECONDS, series.REQUEST_SECONDS, series.SETTLE_SECONDS)
        ]
        assert durations_s == [40.0, 60.0, 0.5]

    run_on_bench(check)


def test_wait_is_counted_once_and_only_with_a_creation_time() -> None:
    async def check(bench: JournalBench) -> None:
        second_delivery = InFlightLease(lease(deliveries=2), request=request(created=10))
        bench.journal.record_sent(second_delivery, request(created=10), UNIX_NOW)
        without_creation_time = InFlightLease(lease(), request=request())
        bench.journal.record_sent(without_creation_time, request(), UNIX_NOW)
        bench.record_completion(SETTLEMENT, entry=without_creation_time)
        counted = [
            bench.count(each) for each in (series.WAIT_SECONDS, series.REQUEST_SECONDS, series.SETTLE_SECONDS)
        ]
        assert counted == [0, 0, 0]

    run_on_bench(check)


def test_requests_that_end_without_an_attempt_are_counted() -> None:
    async def check(bench: JournalBench) -> None:
        bench.journal.record_expired(3)
        bench.journal.record_reclaimed(2)
        bench.journal.record_lost(InFlightLease(lease()))
        assert bench.count(series.REQUESTS_EXPIRED) == 3
        assert bench.count(series.RESULTS, ErrorCode.DEADLINE_EXCEEDED) == 3
        assert (bench.count(series.LEASES_RECLAIMED), bench.count(series.LEASES_LOST)) == (2, 1)

    run_on_bench(check)


def test_recorded_states_are_integrated_over_time() -> None:
    async def check(bench: JournalBench) -> None:
        allowance = Allowance(9, Reason.OPEN, "", None, None, 0.0, 0, None)
        for at in (1.0, 3.0):
            bench.journal.record_state(at, allowance, open_limiter(), used_units=4)
        assert bench.journal.meter.reason_s[Reason.OPEN] == 2.0
        assert sum(bench.journal.meter.used_unit_s.values()) == 8.0

    run_on_bench(check)


@pytest.mark.usefixtures("debug_events")
def test_debug_log_has_an_event_for_each_step_and_no_payload() -> None:
    """The answer of a gateway may contain the payload."""

    async def check(bench: JournalBench) -> None:
        secret = "the prompt of the user"
        own_request = request(payload=f'{{"prompt": "{secret}"}}'.encode())

        async def run_attempt() -> None:  # The log context ends with the task.
            entry = InFlightLease(lease(failed_attempts=1, refusals=2), is_probe=True, request=own_request)
            bench.journal.record_sent(entry, own_request, UNIX_NOW)
            why = f"redirected (302) to '{secret}'; redirects are not followed"
            outcome = Failed(why, 302, kind=FailureKind.REDIRECT)
            bench.journal.record_attempt(entry, AttemptResult(outcome, 1.0, 3.5), outcome)
            bench.record_completion(Release(lease(), is_failed_attempt=True), entry=entry)

        await asyncio.create_task(run_attempt())
        assert [event for event, _ in bench.events] == [
            Event.ATTEMPT_STARTED,
            Event.ATTEMPT,
            Event.LEASE_ENDED,
        ]
        started, attempt, ended = (fields for _, fields in bench.events)
        assert (started["request"], started["attempt"], started["refusals"], started["probe"]) == (
            "r-1",
            2,
            2,
            True,
        )
        assert (attempt["outcome"], attempt["status"], attempt["took_s"]) == ("failed", 302, 2.5)
        assert attempt["why"] == "redirect"
        assert (ended["step"], ended["answer"]) == ("release", "done")
        assert secret not in repr(bench.events)

    run_on_bench(check)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Failed("the gateway answered 500", 500, b"text of the answer"), "error status"),
        (Failed("no answer: text of the answer", kind=FailureKind.NO_ANSWER), "no answer"),
        (Unreachable("no connection: 'gateway' is unknown"), "no connection: 'gateway' is unknown"),
        (
            Unreachable("no answer: text of the answer, and now no connection", FailureKind.NO_ANSWER),
            "no answer",
        ),
        (
            Unreachable("gateway.token_file: it is empty", FailureKind.NO_CREDENTIALS),
            "gateway.token_file: it is empty",
        ),
        (UncountedError("the gateway answered 404", FailureKind.NO_ROUTE), "no route"),
        (Refused("'text of the answer' is not a plain path"), ""),
        (Overloaded(429, "made up", is_out_of_capacity=True), ""),
        (Overloaded(429, "rejected-saturated", is_out_of_capacity=True), "rejected-saturated"),
        (Delivered(200, b"{}"), ""),
    ],
)
@pytest.mark.usefixtures("debug_events")
def test_logged_cause_contains_no_text_of_the_answer(outcome: Outcome, why: str) -> None:
    async def check(bench: JournalBench) -> None:
        bench.record_attempt_with(outcome)
        assert bench.events[-1][1]["why"] == why

    run_on_bench(check)


def test_errors_of_the_journal_are_logged_and_not_raised() -> None:
    """The event names the failing method."""

    async def check(bench: JournalBench) -> None:
        bench.journal._metrics = None  # type: ignore[assignment]
        entry = InFlightLease(lease(), request=request(created=10))
        bench.journal.record_sent(entry, request(created=10), UNIX_NOW)
        bench.record_attempt_with(Delivered(200, b"{}"))
        bench.record_completion(SETTLEMENT, entry=entry)
        bench.journal.record_expired(1)
        bench.journal.record_lost(entry)
        where = [fields["where"] for event, fields in bench.events if event is Event.INTERNAL_ERROR]
        assert where == [
            "journal: record_sent",
            "journal: record_attempt",
            "journal: record_completion",
            "journal: record_expired",
            "journal: record_lost",
        ]

    run_on_bench(check, expects_internal_error=True)
