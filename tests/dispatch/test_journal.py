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
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.in_flight import HeldLease
from dispatcher.dispatch.journal import Journal
from dispatcher.lab.simulation.virtual_loop import run
from dispatcher.ports import Burial, Forwarded, Release, Settled, Settlement
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.catalogue import Series
from dispatcher.telemetry.events import Event, detail, diverted
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.scene import lease, open_limiter, request

UNIX_NOW = 1_000_000.0
SETTLEMENT = Settlement(lease(), b"{}", "", code="2xx")


class Told:
    """A journal, and what it told."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.journal = Journal(self.metrics)
        self.events: list[tuple[Event, Mapping[str, Any]]] = []

    def count(self, series: Series, *labels: str) -> float:
        return self.metrics.value(series, *labels)

    def tried(self, outcome: Outcome) -> HeldLease:
        held = HeldLease(lease(), request=request())
        self.journal.tried(held, Forwarded(outcome, 1.0, 3.5), outcome)
        return held

    def ended(self, ending: Ending, answer: Settled = Settled.DONE, held: HeldLease | None = None) -> None:
        self.journal.ended(held, ending, answer, 5.0, UNIX_NOW)


def telling(check: Callable[[Told], Awaitable[None]], *, broken: bool = False) -> None:
    async def main() -> None:
        told = Told()
        with diverted(lambda event, fields: told.events.append((event, fields))):
            await check(told)
        assert (Event.SURPRISE in [event for event, _ in told.events]) == broken

    run(main())


@pytest.fixture
def at_debug() -> Iterator[None]:
    detail(True)
    yield
    detail(False)


@pytest.mark.parametrize(
    ("outcome", "labels"),
    [
        (Delivered(200, b"{}"), ("delivered", "2xx")),
        (Delivered(404, b"{}"), ("delivered", "4xx")),
        (Failed("reset"), ("failed", "none")),
        (Overloaded(429, "", capacity=True), ("overloaded", "4xx")),
        (Unreachable("no connection"), ("unreachable", "none")),
        (Evicted(429, "evicted-priority"), ("evicted", "4xx")),
        (Evicted(200, "evicted"), ("evicted", "2xx")),
    ],
)
def test_try_is_counted_by_its_outcome_and_status(outcome: Outcome, labels: tuple[str, str]) -> None:
    async def check(told: Told) -> None:
        held = told.tried(outcome)
        assert told.count(series.TRIES, *labels) == 1
        assert told.count(series.TRY) == 1
        assert told.metrics._seconds[series.TRY].sum == 2.5
        assert held.answered_at == 3.5

    telling(check)


def test_time_in_the_pickers_queue_is_counted_where_the_answer_says_it() -> None:
    async def check(told: Told) -> None:
        told.tried(Delivered(200, b"{}"))
        assert told.count(series.PICKER_WAIT) == 0
        waited = Forwarded(Delivered(200, b"{}"), 1.0, 3.5, queued_s=0.25)
        told.journal.tried(HeldLease(lease(), request=request()), waited, waited.outcome)
        assert told.count(series.PICKER_WAIT) == 1
        assert told.metrics._seconds[series.PICKER_WAIT].sum == 0.25

    telling(check)


def test_status_of_the_gateway_counts_though_the_outcome_counts_as_another() -> None:
    """A bare answer in the outage that it belongs to is no failure of the request."""

    async def check(told: Told) -> None:
        bare = Forwarded(Failed("503", 503, bare=True), 1.0, 2.0)
        told.journal.tried(HeldLease(lease(), request=request()), bare, Unreachable("503"))
        assert told.count(series.TRIES, "unreachable", "5xx") == 1

    telling(check)


def test_it_is_kept_how_the_last_tries_went_by_what_the_gateway_answered() -> None:
    async def check(told: Told) -> None:
        broken = Failed("500", 500, b"secret")
        outcomes: list[Outcome] = [Delivered(200, b"{}"), Failed("reset"), broken, broken]
        for outcome in outcomes:
            told.tried(outcome)
        bare = Forwarded(Failed("503", 503, bare=True), 1.0, 4.5)
        told.journal.tried(HeldLease(lease(), request=request()), bare, Unreachable("503"))
        problem = told.journal.recent.problem(5.5)
        assert problem == "Of the last 5 tries 4 failed: 500 (2), no answer (1), 503 (1), the newest 1 s ago"

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
        told.tried(Overloaded(429, reason, capacity=True))
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
        (SETTLEMENT, Settled.DONE, "2xx"),
        (SETTLEMENT, Settled.TOO_LARGE, ErrorCode.TOO_LARGE),
        (SETTLEMENT, Settled.BAD_LIST, ErrorCode.INVALID_REQUEST),
        (SETTLEMENT, Settled.LOST, None),
        (Burial(SETTLEMENT, "why"), Settled.DONE, "2xx"),
        (Burial(SETTLEMENT, "why"), Settled.BAD_LIST, "2xx"),
        (Burial(Settlement(lease(), b"", ""), "unread"), Settled.DONE, None),
        (Release(lease()), Settled.DONE, None),
    ],
)
def test_result_is_counted_by_what_was_written_and_none_that_was_not(
    ending: Ending, answer: Settled, code: str | None
) -> None:
    async def check(told: Told) -> None:
        told.ended(ending, answer)
        assert told.count(series.ENDED, series.ENDINGS[type(ending)], answer) == 1
        results = {each: told.count(series.RESULTS, each) for each in series.CODES}
        assert {each for each, count in results.items() if count} == ({code} if code else set())

    telling(check)


def test_retries_are_counted_by_what_they_are_for() -> None:
    async def check(told: Told) -> None:
        told.ended(Release(lease(), attempt=True))
        told.ended(Release(lease(), refusal=True))
        told.ended(Release(lease(), undelivered=True))
        counted = [told.count(series.RETRIES, each) for each in series.COUNTED]
        assert counted == [1, 1], "what was given back untouched is no retry"

    telling(check)


def test_times_of_a_request_are_those_between_birth_and_result() -> None:
    async def check(told: Told) -> None:
        held = HeldLease(lease(), request=request(created=int(UNIX_NOW) - 60))
        told.journal.sent(held, request(created=int(UNIX_NOW) - 60), UNIX_NOW - 20)
        held.answered_at = 4.5
        told.ended(SETTLEMENT, held=held)
        seconds = [told.metrics._seconds[each].sum for each in (series.WAIT, series.WHOLE, series.SETTLE)]
        assert seconds == [40.0, 60.0, 0.5]

    telling(check)


def test_wait_is_counted_once_and_nothing_is_known_of_who_tells_no_birth() -> None:
    async def check(told: Told) -> None:
        again = HeldLease(lease(deliveries=2), request=request(created=10))
        told.journal.sent(again, request(created=10), UNIX_NOW)
        unborn = HeldLease(lease(), request=request())
        told.journal.sent(unborn, request(), UNIX_NOW)
        told.ended(SETTLEMENT, held=unborn)
        counted = [told.count(each) for each in (series.WAIT, series.WHOLE, series.SETTLE)]
        assert counted == [0, 0, 0]

    telling(check)


def test_what_ends_without_a_try_is_counted_too() -> None:
    async def check(told: Told) -> None:
        told.journal.expired(3)
        told.journal.reclaimed(2)
        told.journal.lost(HeldLease(lease()))
        assert told.count(series.EXPIRED) == 3
        assert told.count(series.RESULTS, ErrorCode.DEADLINE_EXCEEDED) == 3
        assert (told.count(series.RECLAIMED), told.count(series.LOST)) == (2, 1)

    telling(check)


def test_turns_feed_the_integrals_over_time() -> None:
    async def check(told: Told) -> None:
        allowance = Allowance(9, Reason.OPEN, "", None, None, 0.0, 0, None)
        for at in (1.0, 3.0):
            told.journal.turned(at, allowance, open_limiter(), used=4)
        assert told.journal.meter.reason_s[Reason.OPEN] == 2.0
        assert sum(told.journal.meter.used_s.values()) == 8.0

    telling(check)


@pytest.mark.usefixtures("at_debug")
def test_log_at_debug_has_a_line_for_each_step_and_no_word_of_others() -> None:
    """What a gateway answers may be the payload sent back."""

    async def check(told: Told) -> None:
        secret = "what the user asked"
        mine = request(payload=f'{{"prompt": "{secret}"}}'.encode())

        async def one_try() -> None:  # a task of its own, as each has: what it speaks of stays within
            held = HeldLease(lease(attempts=1, refusals=2), probe=True, request=mine)
            told.journal.sent(held, mine, UNIX_NOW)
            outcome = Failed(f"redirected (302) to '{secret}'; redirects are not followed", 302)
            told.journal.tried(held, Forwarded(outcome, 1.0, 3.5), outcome)
            told.ended(Release(lease(), attempt=True), held=held)

        await asyncio.create_task(one_try())
        assert [event for event, _ in told.events] == [Event.SENT, Event.TRY, Event.ENDED]
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
        (Overloaded(429, "made up", capacity=True), ""),
        (Overloaded(429, "rejected-saturated", capacity=True), "rejected-saturated"),
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
        held = HeldLease(lease(), request=request(created=10))
        told.journal.sent(held, request(created=10), UNIX_NOW)
        told.tried(Delivered(200, b"{}"))
        told.ended(SETTLEMENT, held=held)
        told.journal.expired(1)
        told.journal.lost(held)
        where = [fields["where"] for event, fields in told.events if event is Event.SURPRISE]
        assert where == [f"journal: {each}" for each in ("sent", "tried", "ended", "expired", "lost")]

    telling(check, broken=True)
