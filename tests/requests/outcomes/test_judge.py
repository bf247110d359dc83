"""Consequences of an outcome, row by row: for the gateway, for a request and its group, and for the lease."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.outcomes.judge import (
    FREE_CHARGES,
    MAX_DELAY_S,
    MAX_TRIALS,
    MIN_REST_S,
    NO_RECORD,
    REST_PER_SECOND,
    ROUTE_MEMORY_S,
    SLOW_ANSWER_S,
    Decision,
    Errored,
    ErrorFacts,
    GatewayRecord,
    GatewaySign,
    GroupSign,
    LeaseVerdict,
    MoveToDeadLetters,
    OutageRecord,
    RequestRecord,
    Retry,
    compute_rest_s,
    decide_after_attempt,
    decide_after_deaths,
    judge_attempt,
    judge_lease,
)
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    ModelNotServed,
    Outcome,
    Overloaded,
    Refused,
    RetryPolicy,
    TooLarge,
    TooLate,
    UncountedError,
    Unreachable,
    Unsent,
    classify_answer,
    describe_outcome,
)
from dispatcher.requests.outcomes.reachability import MAX_PROBE_PAUSE_OTHERS_S
from dispatcher.wire_format import ErrorCode

POLICY = RetryPolicy(base_s=2.0, max_s=60.0, max_attempts=8, max_deliveries=5)
FULL = Overloaded(429, "", is_out_of_capacity=True)
SATURATED = Overloaded(429, "rejected-saturated", is_out_of_capacity=True)
EVICTED = Evicted(429, "evicted-priority")
DOWN = Failed("the gateway answered 502", 502, is_intermediary_error=True)
NO_ROUTE = Failed("no such route", 404, is_intermediary_error=True, kind=FailureKind.NO_ROUTE)
BROKEN = Failed("the gateway answered 500", 500, b"Traceback")
RESET = Failed("connection reset", kind=FailureKind.CONNECTION_RESET)

# ── the gateway ─────────────────────────────────────────────────────────────────────────────────────────────

HERE = "/v1/completions"
PAYLOAD = b'{"model": "m"}'
NO_MODEL = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model"}}'
UNVERIFIED, VERIFIED = GatewayRecord(), GatewayRecord(is_verified=True)
ROUTED = GatewayRecord(is_verified=True, last_route=(1.0, HERE, PAYLOAD))


@pytest.mark.parametrize(
    ("outcome", "sign", "is_verified"),
    [
        (Delivered(200, b""), GatewaySign.ANSWERED, True),
        (Delivered(299, b""), GatewaySign.ANSWERED, True),
        (TooLarge(200, 9), GatewaySign.ANSWERED, True),
        (Delivered(300, b""), GatewaySign.ANSWERED, False),
        (Delivered(400, b""), GatewaySign.ANSWERED, False),
        (Delivered(404, NO_MODEL), GatewaySign.ANSWERED, False),
        (TooLarge(404, 9), GatewaySign.ANSWERED, False),
        (SATURATED, GatewaySign.OVERLOADED, True),
        (FULL, GatewaySign.OVERLOADED, False),
        (EVICTED, GatewaySign.ANSWERED, True),
        (Evicted(429, ""), GatewaySign.ANSWERED, False),
        (ModelNotServed("not here"), GatewaySign.ANSWERED, False),
        (BROKEN, GatewaySign.ANSWERED, False),
        (Failed("the gateway answered 400", 400), GatewaySign.ANSWERED, False),
        (DOWN, GatewaySign.INTERMEDIARY_ERROR, False),
        (NO_ROUTE, GatewaySign.INTERMEDIARY_ERROR, False),
        (RESET, GatewaySign.NOTHING, False),
        (Unreachable("refused"), GatewaySign.NO_CONNECTION, False),
        (UncountedError("gone"), GatewaySign.NOTHING, False),
        (Refused("no such path"), GatewaySign.NOTHING, False),
        (TooLate(), GatewaySign.NOTHING, False),
        (Unsent(), GatewaySign.NOTHING, False),
    ],
    ids=repr,
)
def test_outcome_counts_as_it_is_and_says_this_about_the_gateway(
    outcome: Outcome, sign: GatewaySign, *, is_verified: bool
) -> None:
    is_routed = isinstance(outcome, Delivered | TooLarge) and 200 <= outcome.status < 300
    route = (3.0, HERE, PAYLOAD) if is_routed else None
    for before in (UNVERIFIED, VERIFIED):
        judged, found, gateway = judge_attempt(outcome, before, path=HERE, payload=PAYLOAD, at=3.0)
        assert (judged, found) == (outcome, sign)
        assert gateway == GatewayRecord(before.is_verified or is_verified, last_route=route)


NOT_FOUND = [(status, body) for status in (301, 302, 307, 403, 404, 405, 501) for body in (b"", b"<html>")]


@pytest.mark.parametrize(("status", "body"), NOT_FOUND)
def test_not_found_of_an_unverified_address_counts_as_intermediary_error(status: int, body: bytes) -> None:
    judged, sign, gateway = judge_attempt(classify_answer(status, {}, body, 0.0), UNVERIFIED)
    assert isinstance(judged, Failed)
    assert (judged.is_intermediary_error, judged.status, judged.body) == (True, status, body)
    is_empty_404 = (status, body) == (404, b"")
    setting = "gateway.token_file" if status == 403 else "gateway.path, or at the model"
    assert (setting in judged.why) is not is_empty_404
    assert judged.kind is (FailureKind.NO_ROUTE if is_empty_404 else FailureKind.MAYBE_NO_GATEWAY)
    assert (sign, gateway) == (GatewaySign.INTERMEDIARY_ERROR, UNVERIFIED)


@pytest.mark.parametrize(("status", "body"), NOT_FOUND)
def test_not_found_of_a_verified_gateway_is_the_answer_of_its_request(status: int, body: bytes) -> None:
    outcome = classify_answer(status, {}, body, 0.0)
    is_empty_404 = (status, body) == (404, b"")
    sign = GatewaySign.INTERMEDIARY_ERROR if is_empty_404 else GatewaySign.ANSWERED
    assert judge_attempt(outcome, VERIFIED, can_try_others=True) == (outcome, sign, VERIFIED)


@pytest.mark.parametrize("payload", [b'{"model": "other"}', b"{}", b"no JSON"])
def test_404_that_does_not_name_the_requested_model_is_an_intermediary_error(payload: bytes) -> None:
    """A web server that answers everything alike has not read the request."""
    body = NO_MODEL.replace(b'"param":"model"', b'"param":""')
    judged, sign, _ = judge_attempt(Delivered(404, body), UNVERIFIED, path=HERE, payload=payload)
    assert isinstance(judged, Failed)
    assert sign is GatewaySign.INTERMEDIARY_ERROR


@pytest.mark.parametrize(
    ("before", "path", "model", "at", "blames_request", "after"),
    [
        (UNVERIFIED, HERE, "other", 2.0, False, UNVERIFIED),
        (VERIFIED, HERE, "other", 2.0, False, VERIFIED),
        (ROUTED, HERE, "other", 2.0, True, ROUTED),
        (ROUTED, "/v1/rerank", "m", 2.0, True, ROUTED),
        (ROUTED, HERE, "other", 1.0 + ROUTE_MEMORY_S, True, ROUTED),
        (ROUTED, HERE, "other", 1.5 + ROUTE_MEMORY_S, False, ROUTED),
        (ROUTED, HERE, "m", 2.0, False, VERIFIED),
    ],
    ids=["unverified", "no route", "another model", "another path", "recent", "old", "lost its own route"],
)
def test_empty_404_is_blamed_on_its_request_if_another_request_has_a_route(
    before: GatewayRecord, path: str, model: str, at: float, *, blames_request: bool, after: GatewayRecord
) -> None:
    payload = b'{"model": "%b"}' % model.encode()
    blamed = replace(NO_ROUTE, why="no such route, and others have one", is_intermediary_error=False)
    judged = judge_attempt(NO_ROUTE, before, path=path, payload=payload, at=at)
    if blames_request:
        assert judged == (blamed, GatewaySign.ANSWERED, after)
    else:
        assert judged == (NO_ROUTE, GatewaySign.INTERMEDIARY_ERROR, after)


@pytest.mark.parametrize(
    ("outcome", "before", "can_try_others", "is_trial"),
    [
        (NO_ROUTE, UNVERIFIED, True, True),
        (Delivered(404, b"<html>"), UNVERIFIED, True, True),
        (Delivered(403, b""), UNVERIFIED, True, True),
        (Failed("redirected", 302), UNVERIFIED, True, True),
        (Failed("redirected", 302), UNVERIFIED, False, False),
        (NO_ROUTE, VERIFIED, True, False),
        (NO_ROUTE, GatewayRecord(trial_count=MAX_TRIALS - 1), True, True),
        (NO_ROUTE, GatewayRecord(trial_count=MAX_TRIALS), True, False),
        (DOWN, UNVERIFIED, True, False),
    ],
    ids=repr,
)
def test_other_requests_are_tried_while_it_is_open_whether_the_address_is_a_gateway(
    outcome: Outcome, before: GatewayRecord, *, can_try_others: bool, is_trial: bool
) -> None:
    counted, _, _ = judge_attempt(outcome, before)
    assert isinstance(counted, Failed)
    judged, sign, after = judge_attempt(outcome, before, can_try_others=can_try_others)
    if is_trial:
        assert judged == UncountedError(counted.why, counted.kind)
        assert (sign, after) == (GatewaySign.NOTHING, GatewayRecord(trial_count=before.trial_count + 1))
    else:
        assert (judged, sign, after) == (counted, GatewaySign.INTERMEDIARY_ERROR, before)


def test_known_trials_and_routes_are_kept_when_the_address_is_verified() -> None:
    before = GatewayRecord(trial_count=7, last_route=(1.0, HERE, PAYLOAD))
    _, _, verified = judge_attempt(SATURATED, before)
    assert verified == GatewayRecord(True, 7, (1.0, HERE, PAYLOAD))
    _, _, routed = judge_attempt(Delivered(200, b""), before, path=HERE, payload=b"{}", at=2.0)
    assert routed == GatewayRecord(True, 7, (2.0, HERE, b"{}"))


# ── the request and its group ───────────────────────────────────────────────────────────────────────────────

T0 = 1000.0
"""Time at which the requests of the rows below were sent."""
AT = T0 + 0.25
KNOWN = RequestRecord(2, 3, T0 - 9.0, 1, T0 - 1.0)
"""Record of a request that was evicted twice and had three intermediary errors, one of them charged."""
QUIET = OutageRecord(T0 - 100.0, T0 - 90.0, T0 - 80.0, 5.0)
"""Record of an outage that is over. No request was sent and answered since it began."""
ANSWERED = OutageRecord(T0, T0 - 90.0, T0 - 80.0, 5.0)
"""The same after an answer to a request that was sent at T0."""
OTHERS = ErrorFacts(has_others=True, time_left_s=1e6)
DURING = ErrorFacts(T0 - 2.0, has_others=True, time_left_s=1e6)
"""Facts in an outage that began two seconds before T0."""
AFTER_ERROR = RequestRecord(2, 4, AT, 1, T0 - 1.0)
"""KNOWN after another intermediary error that is not charged."""


def judge_one(
    outcome: Outcome,
    request: RequestRecord = KNOWN,
    outage: OutageRecord = QUIET,
    facts: ErrorFacts = OTHERS,
    *,
    sent_at: float = T0,
    took_s: float = 0.25,
    rand: float = 0.5,
) -> LeaseVerdict:
    at = sent_at + took_s
    return judge_lease(
        outcome, request, outage, sent_at=sent_at, at=at, policy=POLICY, rand=rand, facts=facts
    )


@pytest.mark.parametrize(
    ("outcome", "counts_as", "group", "request_after", "outage_after"),
    [
        (Delivered(200, b""), Delivered(200, b""), GroupSign.ACCEPTED, NO_RECORD, ANSWERED),
        (Delivered(404, b"x"), Delivered(404, b"x"), GroupSign.ACCEPTED, NO_RECORD, ANSWERED),
        (TooLarge(200, 9), TooLarge(200, 9), GroupSign.ACCEPTED, NO_RECORD, ANSWERED),
        (FULL, FULL, GroupSign.REFUSED, RequestRecord(2), ANSWERED),
        (EVICTED, replace(EVICTED, delay_s=6.0), GroupSign.UNKNOWN, RequestRecord(3), ANSWERED),
        (BROKEN, BROKEN, GroupSign.UNKNOWN, RequestRecord(2), ANSWERED),
        (DOWN, UncountedError(DOWN.why, delay_s=8.0), GroupSign.UNKNOWN, AFTER_ERROR, QUIET),
        (
            UncountedError("nothing here", FailureKind.MAYBE_NO_GATEWAY),
            UncountedError("nothing here", FailureKind.MAYBE_NO_GATEWAY, MIN_REST_S),
            GroupSign.UNKNOWN,
            AFTER_ERROR.copy_with(rest_until=AT + MIN_REST_S),
            QUIET,
        ),
        (RESET, RESET, GroupSign.UNKNOWN, KNOWN, QUIET),
        (Unreachable("refused"), Unreachable("refused"), GroupSign.UNKNOWN, KNOWN, QUIET),
        (Refused("no such path"), Refused("no such path"), GroupSign.UNKNOWN, KNOWN, QUIET),
        (TooLate(), TooLate(), GroupSign.UNKNOWN, KNOWN, QUIET),
        (Unsent(), Unsent(), GroupSign.UNKNOWN, KNOWN, QUIET),
        (ModelNotServed("no"), ModelNotServed("no"), GroupSign.UNKNOWN, KNOWN, QUIET),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outcome_says_this_about_the_request_and_its_group(
    outcome: Outcome,
    counts_as: Outcome,
    group: GroupSign,
    request_after: RequestRecord,
    outage_after: OutageRecord,
) -> None:
    assert judge_one(outcome) == LeaseVerdict(counts_as, group, request_after, outage_after)


BLAMED = RequestRecord(0, 9, T0 - 9.0, FREE_CHARGES)
"""Record of a request that is to blame if it is charged once more."""
IN_OUTAGE = OutageRecord(T0 - 5.0, T0 - 2.0, T0 - 1.0, 8.0)
"""Record in the outage of DURING, in which this process has probed for 8 s."""
IN_OUTAGE_LATER = IN_OUTAGE.copy_with(last_error_at=AT, probed_s=9.25)
LATE, ALONE = DURING.copy_with(time_left_s=8.0), DURING.copy_with(has_others=False)
COUNTED = None
"""Delay of an error that counts as a failed attempt."""


@pytest.mark.parametrize(
    ("facts", "request_before", "outage_before", "delay_s", "changes", "outage_after"),
    [
        (OTHERS, NO_RECORD, ANSWERED, 0.0, {}, ANSWERED),
        (OTHERS, KNOWN, QUIET, 8.0, {}, QUIET),
        (OTHERS, KNOWN, ANSWERED, 8.0, {"charges": 2}, ANSWERED),
        (OTHERS, BLAMED, QUIET, 60.0, {}, QUIET),
        (OTHERS, BLAMED, ANSWERED, COUNTED, {"charges": FREE_CHARGES + 1}, ANSWERED),
        (DURING, KNOWN, QUIET, 10.0, {"rest_until": AT + 10.0}, OutageRecord(T0 - 100, T0 - 2, AT, 2.0)),
        (DURING, KNOWN, IN_OUTAGE, 18.5, {"charges": 2, "rest_until": AT + 18.5}, IN_OUTAGE_LATER),
        (DURING, BLAMED, IN_OUTAGE, 18.5, {"charges": 6, "rest_until": AT + 18.5}, IN_OUTAGE_LATER),
        (LATE, KNOWN, IN_OUTAGE, 4.0, {"charges": 2, "rest_until": AT + 4.0}, IN_OUTAGE_LATER),
        (ALONE, KNOWN, IN_OUTAGE, 0.0, {"charges": 2}, IN_OUTAGE),
    ],
    ids=[
        "first error",
        "no other is answered",
        "others are answered",
        "many errors, and no other is answered",
        "many errors, and others are answered",
        "begin of an outage",
        "later in an outage",
        "no request is to blame in an outage",
        "shortly before the deadline",
        "no other request waits",
    ],
)
def test_intermediary_error_counts_only_if_it_is_the_fault_of_the_request(
    facts: ErrorFacts,
    request_before: RequestRecord,
    outage_before: OutageRecord,
    delay_s: float | None,
    changes: dict[str, Any],
    outage_after: OutageRecord,
) -> None:
    counts_as = DOWN if delay_s is COUNTED else UncountedError(DOWN.why, DOWN.kind, delay_s)
    error_count = request_before.error_count + 1
    request_after = request_before.copy_with(error_count=error_count, last_error_at=AT, **changes)
    assert judge_one(DOWN, request_before, outage_before, facts) == LeaseVerdict(
        counts_as, GroupSign.UNKNOWN, request_after, outage_after
    )


def test_answer_to_an_older_request_does_not_replace_that_to_a_newer_one() -> None:
    newer = OutageRecord(answered_sent_at=T0 + 5.0)
    assert judge_one(Delivered(200, b""), outage=newer).outage == newer


def test_pause_after_an_eviction_doubles_up_to_the_longest() -> None:
    for rand, share in ((0.0, 0.5), (0.5, 0.75)):
        request, pauses = NO_RECORD, []
        for _ in range(7):
            verdict = judge_one(EVICTED, request, rand=rand)
            assert isinstance(verdict.outcome, Evicted)
            request = verdict.request
            pauses.append(verdict.outcome.delay_s)
        assert pauses == [share * each for each in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)]
    assert judge_one(EVICTED, RequestRecord(10**6)).request == RequestRecord(10**6 + 1)


@pytest.mark.parametrize(("asked_s", "waits_s"), [(0.5, 1.0), (7.0, 7.0), (86400.0, 60.0)])
def test_longer_retry_after_of_an_eviction_is_obeyed_up_to_the_maximum(
    asked_s: float, waits_s: float
) -> None:
    outcome = replace(EVICTED, retry_after_s=asked_s)
    assert judge_one(outcome, NO_RECORD, rand=0.0).outcome == replace(outcome, delay_s=waits_s)


def get_delay_s(verdict: LeaseVerdict) -> float:
    assert isinstance(verdict.outcome, UncountedError)
    return verdict.outcome.delay_s


def test_request_is_retried_at_once_after_its_first_error_and_then_with_doubling_delay() -> None:
    request, delays = NO_RECORD, []
    for _ in range(8):
        verdict = judge_one(DOWN, request)
        request = verdict.request
        delays.append(get_delay_s(verdict))
    assert delays == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("took_s", "again_s"),
    [(0.75, 0.0), (SLOW_ANSWER_S, SLOW_ANSWER_S), (15.0, 15.0), (600.0, MAX_DELAY_S)],
)
def test_request_waits_as_long_as_its_slow_error_held_a_slot(took_s: float, again_s: float) -> None:
    assert get_delay_s(judge_one(DOWN, NO_RECORD, took_s=took_s)) == again_s
    assert get_delay_s(judge_one(DOWN, KNOWN, took_s=took_s)) == max(8.0, again_s)


@pytest.mark.parametrize(("left_s", "rest_s"), [(60.0, MIN_REST_S), (8.0, 4.0), (-8.0, 0.0)])
def test_request_of_a_trial_rests_ten_seconds_or_half_of_its_time(left_s: float, rest_s: float) -> None:
    facts = ErrorFacts(time_left_s=left_s)
    assert get_delay_s(judge_one(UncountedError("nothing here"), facts=facts)) == rest_s


class History:
    """Outcomes of several requests, one after the other."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestRecord] = {}
        self.outage = OutageRecord()

    def record(self, entry: int, outcome: Outcome, at: float, facts: ErrorFacts) -> Outcome:
        """Record the outcome of an attempt that took no time, and return it as it counts."""
        request = self.requests.get(entry, NO_RECORD)
        verdict = judge_one(outcome, request, self.outage, facts, sent_at=at, took_s=0.0)
        self.requests[entry], self.outage = verdict.request, verdict.outage
        return verdict.outcome

    def record_error(self, entry: int, at: float, facts: ErrorFacts = OTHERS) -> bool:
        """Return whether the request is to blame."""
        return self.record(entry, DOWN, at, facts) is DOWN

    def record_answer(self, entry: int, sent_at: float) -> None:
        self.record(entry, Delivered(200, b""), sent_at, OTHERS)


@pytest.mark.parametrize(
    ("other_sent_s", "blamed_from"), [(0.5, FREE_CHARGES + 1), (0.0, FREE_CHARGES + 1), (-0.1, None)]
)
def test_request_is_blamed_only_if_others_that_were_sent_later_are_answered(
    other_sent_s: float, blamed_from: int | None
) -> None:
    history, blamed = History(), []
    for n in range(20):
        blamed.append(history.record_error(1, T0 + n))
        history.record_answer(99, T0 + n + other_sent_s)
    assert blamed == [blamed_from is not None and n >= blamed_from for n in range(20)]


def test_rest_grows_with_the_outage_while_the_delay_in_the_queue_is_bounded() -> None:
    history, facts = History(), ErrorFacts(T0, has_others=True, time_left_s=1e6)
    for n in range(100):
        history.record_error(1, T0 + n, facts)
        rest_s = max(MIN_REST_S, REST_PER_SECOND * n)
        assert compute_rest_s(history.requests[1], T0 + n) == min(MAX_DELAY_S, rest_s)
    for passed_s, rest_s in ((MAX_DELAY_S, MAX_DELAY_S), (178.0, 20.0), (198.0, 0.0), (300.0, 0.0)):
        assert compute_rest_s(history.requests[1], T0 + 99 + passed_s) == rest_s
    assert compute_rest_s(NO_RECORD, T0) == 0


@given(st.floats(-10, 1e6), st.floats(0, 1e6))
def test_rest_never_exceeds_half_of_the_time_left(left_s: float, away_s: float) -> None:
    facts = ErrorFacts(T0 - away_s, has_others=True, time_left_s=left_s)
    assert 0 <= get_delay_s(judge_one(DOWN, facts=facts)) <= max(0.0, left_s) / 2 + 1e-6


@pytest.mark.parametrize("failing_count", [10, 50, 200, 1000])
def test_request_behind_any_number_of_failing_requests_is_probed(failing_count: int) -> None:
    """Each probe is the first request of the queue that does not rest, and fails quickly."""
    history, at, probes = History(), T0, 0
    facts = ErrorFacts(T0, has_others=True, time_left_s=1e9)
    while True:
        records = (history.requests.get(each, NO_RECORD) for each in range(failing_count + 1))
        entry = next(number for number, record in enumerate(records) if not compute_rest_s(record, at))
        probes += 1
        if entry == failing_count:
            break
        history.record_error(entry, at, facts)
        at += MAX_PROBE_PAUSE_OTHERS_S
    assert probes <= failing_count * 1.5 + 3


times = st.floats(0, 1000)


@given(
    st.lists(st.tuples(times, st.integers(0, 3), st.booleans(), st.floats(0, 20)), max_size=200), st.data()
)
def test_common_outages_never_blame_a_request_and_single_failures_always_do(
    attempts: list[tuple[float, int, bool, float]], data: st.DataObject
) -> None:
    """Sound requests get errors in fewer than FREE_CHARGES outages only, a failing request always."""
    boundaries = sorted(data.draw(st.lists(times, max_size=2 * FREE_CHARGES, unique=True)))
    outages = list(zip(boundaries[::2], boundaries[1::2], strict=False))

    def is_outage(at: float) -> bool:
        return any(start <= at <= end for start, end in outages)

    history = History()
    for at, entry, _, took_s in sorted(attempts):
        # An answer comes only while there is a gateway, to a request that was sent to it.
        if is_outage(at):
            assert not history.record_error(entry, at)
        elif not is_outage(at - took_s):
            history.record_answer(100 + entry, at - took_s)
    for n in range(FREE_CHARGES + 1):
        history.record_error(50, 2000.0 + n)
        history.record_answer(100, 2000.5 + n)
    assert history.record_error(50, 2000.0 + FREE_CHARGES + 1)


# ── how a lease ends ────────────────────────────────────────────────────────────────────────────────────────


def decide(
    outcome: Outcome, *, attempts: int = 0, refusals: int = 0, left: float = 1e6, rand: float = 0.5
) -> Decision:
    return decide_after_attempt(
        outcome, failed_attempts=attempts, refusals=refusals, deadline=left, now=0.0, policy=POLICY, rand=rand
    )


SAID = {
    BROKEN: "the gateway answered 500: Traceback",
    FULL: "the gateway refused it for now: 429",
    EVICTED: "the gateway stopped it for more important requests: 429, evicted-priority",
}


@pytest.mark.parametrize(
    ("outcome", "decision"),
    [
        (Delivered(404, b"x"), Delivered(404, b"x")),
        (TooLarge(200, 10), Errored(ErrorCode.TOO_LARGE, "the answer (200) is larger than 10 bytes")),
        (Refused("no such path"), Errored(ErrorCode.INVALID_REQUEST, "no such path")),
        (
            TooLate(),
            Errored(
                ErrorCode.DEADLINE_EXCEEDED,
                "deadline exceeded after 2 attempts and 1 refusal; the last attempt: reset",
            ),
        ),
        (BROKEN, Retry(4.0, is_failed_attempt=True, last_attempt=SAID[BROKEN])),
        (FULL, Retry(2.0, is_refusal=True, last_attempt=SAID[FULL])),
        (replace(EVICTED, delay_s=4.0), Retry(4.0, last_attempt=SAID[EVICTED])),
        (Unreachable("gone"), Retry(is_undelivered=True, last_attempt="gone")),
        (UncountedError("gone", delay_s=7.0), Retry(7.0, is_undelivered=True, last_attempt="gone")),
        (Unsent(), Retry(is_undelivered=True)),
        (
            ModelNotServed("no 'm'", "m", 3.0),
            Retry(3.0, is_undelivered=True, last_attempt="no 'm'", wait="m"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outcome_of_the_third_attempt_leads_to_this_decision(outcome: Outcome, decision: Decision) -> None:
    """Two attempts have failed, and one was refused."""
    decided = decide_after_attempt(
        outcome,
        last_attempt="reset",
        failed_attempts=2,
        refusals=1,
        deadline=100.0,
        now=0.0,
        policy=POLICY,
        rand=0.5,
    )
    assert decided == decision


def test_first_refusal_is_retried_at_once_and_later_ones_with_doubling_delay() -> None:
    delays = [decide(Overloaded(429, "", is_out_of_capacity=True), refusals=n) for n in range(8)]
    why = "the gateway refused it for now: 429"
    waits = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)
    assert delays == [Retry(s, is_refusal=True, last_attempt=why) for s in waits]


def test_failures_back_off_with_full_jitter() -> None:
    for attempts, most in enumerate((2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)):
        for rand in (0.0, 0.25, 0.999):
            decision = decide(Failed("x"), attempts=attempts, rand=rand)
            assert decision == Retry(most * rand, is_failed_attempt=True, last_attempt="x")


def test_failure_obeys_retry_after_up_to_the_maximum_delay() -> None:
    for asked_s, delay_s in ((20.0, 20.0), (600.0, 60.0)):
        decision = decide(Failed("x", retry_after_s=asked_s), rand=0.0)
        assert decision == Retry(delay_s, is_failed_attempt=True, last_attempt="x")


def test_last_failure_moves_the_request_to_the_dead_letters_with_its_answer() -> None:
    decision = decide(Failed("the gateway answered 502", 502, b"bad"), attempts=7)
    assert decision == MoveToDeadLetters(
        ErrorCode.RETRIES_EXHAUSTED,
        "no answer after 8 attempts, the last: the gateway answered 502",
        502,
        b"bad",
        is_failed_attempt=True,
    )
    one = RetryPolicy(max_attempts=1)
    decision = decide_after_attempt(
        Failed("x"), failed_attempts=0, refusals=0, deadline=1, now=0, policy=one, rand=0
    )
    assert isinstance(decision, MoveToDeadLetters)
    assert "1 attempt," in decision.message


def test_time_to_the_deadline_counts_from_now() -> None:
    for now, delay_s in ((9_990.0, 4.0), (9_997.0, 3.0)):
        decision = decide_after_attempt(
            Evicted(429, "x", delay_s=4.0),
            failed_attempts=0,
            refusals=0,
            deadline=10_000,
            now=now,
            policy=POLICY,
            rand=0.0,
        )
        assert isinstance(decision, Retry)
        assert decision.delay_s == delay_s


def test_delay_never_passes_the_deadline() -> None:
    for outcome in (
        Failed("x"),
        FULL,
        UncountedError("gone", delay_s=9.0),
        replace(EVICTED, delay_s=60.0),
    ):
        decision = decide(outcome, attempts=6, refusals=5, rand=0.9, left=5.0)
        assert isinstance(decision, Retry)
        assert decision.delay_s == 5.0


@pytest.mark.parametrize("outcome", [Failed("x"), FULL, Unreachable("x"), replace(EVICTED, delay_s=60.0)])
@pytest.mark.parametrize("left", [0.0, -3.0])
def test_outcome_after_the_deadline_ends_the_request(outcome: Outcome, left: float) -> None:
    ended = decide(outcome, left=left)
    assert isinstance(ended, Errored)
    assert ended.code is ErrorCode.DEADLINE_EXCEEDED
    counted = {Failed: " after 1 attempt", Overloaded: " after 1 refusal"}.get(type(outcome), "")
    assert isinstance(outcome, Failed | Overloaded | Unreachable | Evicted)
    assert ended.message == f"deadline exceeded{counted}; the last attempt: {describe_outcome(outcome)}"


def test_request_that_kills_dispatchers_is_moved_to_the_dead_letters_after_max_deliveries() -> None:
    assert decide_after_deaths(5, POLICY) is None
    dead = decide_after_deaths(6, POLICY)
    assert dead is not None
    assert dead.code is ErrorCode.DELIVERIES_EXHAUSTED
