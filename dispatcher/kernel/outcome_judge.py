"""Judges the outcomes of attempts, and applies what follows from them.

`requests.outcomes.judge` decides, as a table. Here are the records that it needs of earlier outcomes, and the
parts that are told what an outcome says:

gateway    The limiter learns whether the gateway is reachable and whether it is overloaded.
group      A group of requests that is refused rests, while others are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.in_flight import Attempt, InFlightLease
from dispatcher.kernel.maintenance import Maintenance
from dispatcher.kernel.queue_access import loop_time
from dispatcher.queue.contract import Lease, Overload
from dispatcher.requests.outcomes import judge
from dispatcher.requests.outcomes.judge import (
    NO_FACTS,
    NO_RECORD,
    ErrorFacts,
    GatewayRecord,
    GatewaySign,
    GroupSign,
    OutageRecord,
    RequestRecord,
)
from dispatcher.requests.outcomes.outcome import Failed, Outcome, Overloaded, UncountedError, Unreachable
from dispatcher.requests.outcomes.refusal_groups import RefusalGroups

MAX_RECORDS = 16_384
"""Maximum number of requests that are remembered."""
CONNECTION_CHECK_S = 0.1
"""Interval for checking open connections while the gateway is unreachable."""


class OutcomeJudge:
    """Judges the outcomes of one process, and keeps what they have shown."""

    def __init__(self, context: KernelContext, maintenance: Maintenance) -> None:
        self._refusal_groups = RefusalGroups()
        self._outage_record = OutageRecord()
        self._request_records: dict[int, RequestRecord] = {}
        """Records of requests by their entry in the queue."""
        self._gateway_record = GatewayRecord()
        self._gateway_url = context.options.gateway_url
        """Address that `_gateway_record` is about."""
        self._context = context
        self._gateway = context.gateway
        self._limiter = context.limiter
        self._in_flight = context.in_flight
        self._access = context.access
        self._maintenance = maintenance
        self._connection_check: asyncio.TimerHandle | None = None

    def reconfigure(self) -> None:
        """Begin anew with a gateway at another address."""
        if self._context.options.gateway_url != self._gateway_url:
            self._gateway_url = self._context.options.gateway_url
            self._gateway_record = GatewayRecord()

    def close(self) -> None:
        """Stop the timer. No attempt may be running."""
        if self._connection_check is not None:
            self._connection_check.cancel()

    @property
    def max_tried_at_once(self) -> int | None:
        """Number of requests that may be tried at once while all are refused. `None` if there is no bound."""
        return self._refusal_groups.max_tried_at_once

    def get_probe_rest_s(self, lease: Lease) -> float:
        """Return for how long this request may not be the probe again."""
        return judge.compute_rest_s(self._get_record(lease), loop_time())

    def judge_attempt(self, attempt: Attempt, result: AttemptResult, outcome: Outcome) -> AttemptResult:
        """Return the result of an attempt with the outcome that counts, and tell the limiter what it says
        about the gateway. `outcome` is the one of `result`, or what is known about the model instead."""
        request, at, sent_at = attempt.request, result.ended_at, result.sent_at
        outcome, sign, self._gateway_record = judge.judge_attempt(
            outcome,
            self._gateway_record,
            path=request.endpoint or self._context.options.default_path,
            payload=request.payload,
            at=at,
            can_try_others=not self._gateway_record.is_verified and self._can_try_others(attempt),
        )
        # Copying is expensive compared with the rest, and the outcome is rarely changed.
        judged = result if outcome is result.outcome else result.copy_with(outcome=outcome)
        match sign, outcome:
            case GatewaySign.ANSWERED, _:
                self._limiter.record_gateway_answer(at, sent_at)
            case GatewaySign.OVERLOADED, Overloaded() as refusal:
                self._limiter.record_gateway_answer(at, sent_at)
                self._report_overload(attempt, refusal, at)
            case GatewaySign.INTERMEDIARY_ERROR, Failed(why=why):
                self._limiter.record_intermediary_error(at, sent_at, why, self._iterate_connect_times())
            case GatewaySign.NO_CONNECTION, Unreachable(why=why):
                self._limiter.record_connection_failure(at, why)
        if self._limiter.gateway_unreachable_since is not None:
            self._schedule_connection_check()
            # A probe must open a new connection. A kept one may be dead, or may still get answers from a
            # gateway that accepts no new ones: a request that was sent before the outage leaves such a
            # connection behind when it is answered.
            self._gateway.resize_connection_pool(0)
        return judged

    def _can_try_others(self, attempt: Attempt) -> bool:
        """Return whether other requests wait, and none of the attempt had an intermediary error before."""
        return self._access.has_claimable_requests and not any(
            self._get_record(entry.lease).error_count for entry in attempt.leases
        )

    def _report_overload(self, attempt: Attempt, outcome: Overloaded, at: float) -> None:
        # Requests that were sent under an older reading may have caused the refusal.
        read_at = self._limiter.get_allowance(at).read_at
        alone = all(other.claimed_at >= read_at for other in self._in_flight.list_at_gateway())
        # All leases of a call have the same fairness id, which is refused once.
        refused = {self._get_fairness_id(entry): entry.lease.refusals > 0 for entry in attempt.leases}
        is_capacity_shortage = [
            self._refusal_groups.record_refusal(
                fairness_id, at, read_at, was_refused=was_refused_before, is_alone=alone
            )
            for fairness_id, was_refused_before in refused.items()
        ]
        overload = Overload(
            refused_at=at,
            retry_at=at + min(outcome.retry_after_s or 0.0, self._context.options.retry.max_s),
            is_out_of_capacity=outcome.is_out_of_capacity and all(is_capacity_shortage),
            in_flight=self._limiter.count_in_flight_at_refusal(at, attempt.units),
        )
        self._access.record_overload(overload)
        self._maintenance.schedule_share(self._limiter.get_allowance(at), overload)

    def judge_lease(self, entry: InFlightLease, judged: AttemptResult, rand: float) -> Outcome:
        """Return the outcome as it counts for one of the leases, and record what it says about the request
        and its group. `rand` is in [0, 1)."""
        outcome, sent_at = judged.outcome, judged.sent_at
        record, was_refused_before = self._get_record(entry.lease), entry.lease.refusals > 0
        verdict = judge.judge_lease(
            outcome,
            record,
            self._outage_record,
            sent_at=sent_at,
            at=judged.ended_at,
            policy=self._context.options.retry,
            rand=rand,
            facts=self._find_error_facts(entry) if isinstance(outcome, Failed | UncountedError) else NO_FACTS,
        )
        self._outage_record = verdict.outage
        if verdict.request is not record:
            self._keep_record(entry.lease, verdict.request)
        if verdict.group is GroupSign.ACCEPTED:
            if was_refused_before or not self._refusal_groups.has_no_refusals:
                self._refusal_groups.record_acceptance(
                    self._get_fairness_id(entry), sent_at, was_refused=was_refused_before
                )
        elif verdict.group is GroupSign.UNKNOWN:
            self._refusal_groups.end_trial(self._get_fairness_id(entry), was_refused=was_refused_before)
        return verdict.outcome

    def _find_error_facts(self, entry: InFlightLease) -> ErrorFacts:
        unreachable_since = self._limiter.gateway_unreachable_since
        if entry.request is None:
            return ErrorFacts(unreachable_since)
        time_left_s = entry.request.deadline - self._access.queue.unix_now()
        return ErrorFacts(unreachable_since, self._access.has_claimable_requests, time_left_s)

    def _get_record(self, lease: Lease) -> RequestRecord:
        return self._request_records.get(lease.entry_id, NO_RECORD)

    def _keep_record(self, lease: Lease, record: RequestRecord) -> None:
        self._request_records.pop(lease.entry_id, None)
        if record != NO_RECORD:
            self._request_records[lease.entry_id] = record  # newest last
            if len(self._request_records) > MAX_RECORDS:
                del self._request_records[next(iter(self._request_records))]

    def get_rest_s(self, entry: InFlightLease) -> float:
        """Return how long a group of the request must not send."""
        was_refused_before = entry.lease.refusals > 0
        if self._refusal_groups.has_no_refusals and not was_refused_before:
            return 0.0
        return self._refusal_groups.admit_request(
            self._get_fairness_id(entry), loop_time(), was_refused=was_refused_before
        )

    def _get_fairness_id(self, entry: InFlightLease) -> str:
        return (
            ""
            if entry.request is None
            else entry.request.metadata.get(self._context.options.fairness_attribute, "")
        )

    def _check_connections(self) -> None:
        """Check whether a request stays connected while the gateway is unreachable: a probe, or a request
        that was sent together with the first that failed. If so, it has reached the gateway, though its
        answer is still to come."""
        if self._limiter.check_connections(loop_time(), self._iterate_connect_times()):
            # The gateway is back: what was claimed as a probe counts as an ordinary request from here on.
            self._in_flight.end_probes()
            self._access.wake.set()
        self._connection_check = None
        self._schedule_connection_check()

    def _schedule_connection_check(self) -> None:
        if self._connection_check is None and self._limiter.gateway_unreachable_since is not None:
            self._connection_check = asyncio.get_running_loop().call_later(
                CONNECTION_CHECK_S, self._check_connections
            )

    def _iterate_connect_times(self) -> Iterator[float]:
        """Yield for each request at the gateway the time since which it has a connection."""
        for attempt in self._in_flight.attempts:
            since = self._gateway.get_connected_at(attempt.token)
            if since is not None:
                yield since
