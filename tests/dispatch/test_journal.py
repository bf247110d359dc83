"""What becomes of each request, as metrics and log tell it; and nothing that is only told costs a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import Delivered, Evicted, Failed, Outcome, Overloaded, Unreachable
from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.result import ErrorCode
from dispatcher.dispatch.completions import Completion
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.dispatch.journal import Journal
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import AttemptResult, DeadLetter, Release, Settlement, SettleStatus
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.catalogue import Series
from dispatcher.telemetry.events import Event, divert_events, enable_debug_events
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.scene import lease, open_limiter, request

UNIX_NOW = 1_000_000.0
SETTLEMENT = Settlement(lease(), b"{}", "", result_class="2xx")


class Told:
    """A journal, and what it told."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.journal = Journal(self.metrics)
        self.events: list[tuple[Event, Mapping[str, Any]]] = []

    def count(self, series: Series, *labels: str) -> float:
        return self.metrics.get_value(series, *labels)

    def tried(self, outcome: Outcome) -> InFlightLease:
        held = InFlightLease(lease(), request=request())
        self.journal.record_attempt(held, AttemptResult(outcome, 1.0, 3.5), outcome)
        return held

    def record_completion(
        self,
        completion: Completion,
        answer: SettleStatus = SettleStatus.DONE,
        held: InFlightLease | None = None,
    ) -> None:
        self.journal.record_completion(held, completion, answer, 5.0, UNIX_NOW)


def telling(check: Callable[[Told], Awaitable[None]], *, broken: bool = False) -> None:
    async def main() -> None:
        told = Told()
        with divert_events(lambda event, fields: told.events.append((event, fields))):
            await check(told)
        assert (Event.INTERNAL_ERROR in [event for event, _ in told.events]) == broken

    run_in_virtual_time(main())


@pytest.fixture
def at_debug() -> Iterator[None]:
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
        (Evicted(429, "evicted-priority"), ("evicted", "4xx")),
        (Evicted(200, "evicted"), ("evicted", "2xx")),
    ],
)
def test_try_is_counted_by_its_outcome_and_status(outcome: Outcome, labels: tuple[str, str]) -> None:
    async def check(told: Told) -> None:
        held = told.tried(outcome)
        assert told.count(series.ATTEMPTS, *labels) == 1
        assert told.count(series.ATTEMPT_SECONDS) == 1
        assert told.metrics._histograms[series.ATTEMPT_SECONDS].sum == 2.5
        assert held.answered_at == 3.5

    telling(check)


def test_time_in_the_pickers_queue_is_counted_where_the_answer_says_it() -> None:
    async def check(told: Told) -> None:
        told.tried(Delivered(200, b"{}"))
        assert told.count(series.PICKER_WAIT_SECONDS) == 0
        waited = AttemptResult(Delivered(200, b"{}"), 1.0, 3.5, queued_s=0.25)
        told.journal.record_attempt(InFlightLease(lease(), request=request()), waited, waited.outcome)
        assert told.count(series.PICKER_WAIT_SECONDS) == 1
        assert told.metrics._histograms[series.PICKER_WAIT_SECONDS].sum == 0.25

    telling(check)


def test_status_of_the_gateway_counts_though_the_outcome_counts_as_another() -> None:
    """A bare answer in the outage that it belongs to is no failure of the request."""

    async def check(told: Told) -> None:
        bare = AttemptResult(Failed("503", 503, is_intermediary_error=True), 1.0, 2.0)
        told.journal.record_attempt(InFlightLease(lease(), request=request()), bare, Unreachable("503"))
        assert told.count(series.ATTEMPTS, "unreachable", "5xx") == 1

    telling(check)


def test_it_is_kept_how_the_last_tries_went_by_what_the_gateway_answered() -> None:
    async def check(told: Told) -> None:
        broken = Failed("500", 500, b"secret")
        outcomes: list[Outcome] = [Delivered(200, b"{}"), Failed("reset"), broken, broken]
        for outcome in outcomes:
            told.tried(outcome)
        bare = AttemptResult(Failed("503", 503, is_intermediary_error=True), 1.0, 4.5)
        told.journal.record_attempt(InFlightLease(lease(), request=request()), bare, Unreachable("503"))
        problem = told.journal.recent_attempts.describe_problem(5.5)
        assert (
            problem == "Of the last 5 attempts 4 failed: 500 (2), no answer (1), 503 (1), the newest 1 s ago"
        )

    telling(check)


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("", "none"),
        ("rejected-saturated", "rejected-saturated"),
        ("server-full", "server-full"),
        ("what a gateway may make up", "other"),
    ],
)
def test_refusal_is_counted_by_reasons_that_are_declared(reason: str, label: str) -> None:
    async def check(told: Told) -> None:
        told.tried(Overloaded(429, reason, is_out_of_capacity=True))
        assert told.count(series.REFUSALS, label) == 1

    telling(check)


@pytest.mark.parametrize(("status", "counted"), [(200, (7.0, 3.0)), (400, (0.0, 0.0))])
def test_tokens_of_answers_are_counted_not_those_of_errors(status: int, counted: tuple[float, float]) -> None:
    async def check(told: Told) -> None:
        told.tried(Delivered(status, b'{"usage": {"prompt_tokens": 7, "completion_tokens": 3}}'))
        assert (told.count(series.TOKENS, "in"), told.count(series.TOKENS, "out")) == counted

    telling(check)


@pytest.mark.parametrize(
    ("ending", "answer", "code"),
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
def test_result_is_counted_by_what_was_written_and_none_that_was_not(
    ending: Completion, answer: SettleStatus, code: str | None
) -> None:
    async def check(told: Told) -> None:
        told.record_completion(ending, answer)
        assert told.count(series.LEASES_ENDED, series.COMPLETION_KINDS[type(ending)], answer) == 1
        results = {each: told.count(series.RESULTS, each) for each in series.RESULT_CODES}
        assert {each for each, count in results.items() if count} == ({code} if code else set())

    telling(check)


def test_retries_are_counted_by_what_they_are_for() -> None:
    async def check(told: Told) -> None:
        told.record_completion(Release(lease(), is_failed_attempt=True))
        told.record_completion(Release(lease(), is_refusal=True))
        told.record_completion(Release(lease(), is_undelivered=True))
        counted = [told.count(series.RETRIES, each) for each in series.RETRY_KINDS]
        assert counted == [1, 1], "what was given back untouched is no retry"

    telling(check)


def test_times_of_a_request_are_those_between_birth_and_result() -> None:
    async def check(told: Told) -> None:
        held = InFlightLease(lease(), request=request(created=int(UNIX_NOW) - 60))
        told.journal.record_sent(held, request(created=int(UNIX_NOW) - 60), UNIX_NOW - 20)
        held.answered_at = 4.5
        told.record_completion(SETTLEMENT, held=held)
        seconds = [
            told.metrics._histograms[each].sum
            for each in (series.WAIT_SECONDS, series.REQUEST_SECONDS, series.SETTLE_SECONDS)
        ]
        assert seconds == [40.0, 60.0, 0.5]

    telling(check)


def test_wait_is_counted_once_and_nothing_is_known_of_who_tells_no_birth() -> None:
    async def check(told: Told) -> None:
        again = InFlightLease(lease(deliveries=2), request=request(created=10))
        told.journal.record_sent(again, request(created=10), UNIX_NOW)
        unborn = InFlightLease(lease(), request=request())
        told.journal.record_sent(unborn, request(), UNIX_NOW)
        told.record_completion(SETTLEMENT, held=unborn)
        counted = [
            told.count(each) for each in (series.WAIT_SECONDS, series.REQUEST_SECONDS, series.SETTLE_SECONDS)
        ]
        assert counted == [0, 0, 0]

    telling(check)


def test_what_ends_without_a_try_is_counted_too() -> None:
    async def check(told: Told) -> None:
        told.journal.record_expired(3)
        told.journal.record_reclaimed(2)
        told.journal.record_lost(InFlightLease(lease()))
        assert told.count(series.REQUESTS_EXPIRED) == 3
        assert told.count(series.RESULTS, ErrorCode.DEADLINE_EXCEEDED) == 3
        assert (told.count(series.LEASES_RECLAIMED), told.count(series.LEASES_LOST)) == (2, 1)

    telling(check)


def test_turns_feed_the_integrals_over_time() -> None:
    async def check(told: Told) -> None:
        allowance = Allowance(9, Reason.OPEN, "", None, None, 0.0, 0, None)
        for at in (1.0, 3.0):
            told.journal.record_state(at, allowance, open_limiter(), used_units=4)
        assert told.journal.meter.reason_s[Reason.OPEN] == 2.0
        assert sum(told.journal.meter.used_unit_s.values()) == 8.0

    telling(check)


@pytest.mark.usefixtures("at_debug")
def test_log_at_debug_has_a_line_for_each_step_and_no_word_of_others() -> None:
    """What a gateway answers may be the payload sent back."""

    async def check(told: Told) -> None:
        secret = "what the user asked"
        mine = request(payload=f'{{"prompt": "{secret}"}}'.encode())

        async def one_try() -> None:  # a task of its own, as each has: what it speaks of stays within
            held = InFlightLease(lease(failed_attempts=1, refusals=2), is_probe=True, request=mine)
            told.journal.record_sent(held, mine, UNIX_NOW)
            outcome = Failed(f"redirected (302) to '{secret}'; redirects are not followed", 302)
            told.journal.record_attempt(held, AttemptResult(outcome, 1.0, 3.5), outcome)
            told.record_completion(Release(lease(), is_failed_attempt=True), held=held)

        await asyncio.create_task(one_try())
        assert [event for event, _ in told.events] == [
            Event.ATTEMPT_STARTED,
            Event.ATTEMPT,
            Event.LEASE_ENDED,
        ]
        sent, tried, ended = (fields for _, fields in told.events)
        assert (sent["request"], sent["attempt"], sent["refusals"], sent["probe"]) == ("r-1", 2, 2, True)
        assert (tried["outcome"], tried["status"], tried["took_s"]) == ("failed", 302, 2.5)
        assert tried["why"] == "redirected (302) to"
        assert (ended["step"], ended["answer"]) == ("release", "done")
        assert secret not in repr(told.events)

    telling(check)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Failed("reset: ConnectionResetError[user's words]"), "reset"),
        (Failed("reset: ConnectionResetError"), "reset: ConnectionResetError"),
        (Unreachable("no connection: 'gateway' is unknown"), "no connection: 'gateway' is unknown"),
        (Overloaded(429, "made up", is_out_of_capacity=True), ""),
        (Overloaded(429, "rejected-saturated", is_out_of_capacity=True), "rejected-saturated"),
        (Delivered(200, b"{}"), ""),
    ],
)
@pytest.mark.usefixtures("at_debug")
def test_why_is_told_in_words_of_ours_alone(outcome: Outcome, why: str) -> None:
    async def check(told: Told) -> None:
        told.tried(outcome)
        assert told.events[-1][1]["why"] == why

    telling(check)


def test_nothing_that_is_told_raises() -> None:
    """A defect in what is only counted and shown is told, with where it is, and ends nothing."""

    async def check(told: Told) -> None:
        told.journal._metrics = None  # type: ignore[assignment]
        held = InFlightLease(lease(), request=request(created=10))
        told.journal.record_sent(held, request(created=10), UNIX_NOW)
        told.tried(Delivered(200, b"{}"))
        told.record_completion(SETTLEMENT, held=held)
        told.journal.record_expired(1)
        told.journal.record_lost(held)
        where = [fields["where"] for event, fields in told.events if event is Event.INTERNAL_ERROR]
        assert where == [
            "journal: record_sent",
            "journal: record_attempt",
            "journal: record_completion",
            "journal: record_expired",
            "journal: record_lost",
        ]

    telling(check, broken=True)
