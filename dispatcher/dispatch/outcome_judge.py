"""Judges what an outcome says: of the gateway, of the tenant, and of the request itself.

gateway    The limiter learns whether the gateway is reachable and whether it is overloaded. A gateway
           that was never seen to be one is not believed.
tenant     A tenant that was refused rests, while the requests of others are sent.
request    Decides whether the outcome counts as a failed attempt: not if the gateway or an intermediary
           is to blame.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

from dispatcher.core.gateway.evictions import Evictions
from dispatcher.core.gateway.gateway_verification import GatewayVerification
from dispatcher.core.gateway.intermediary_errors import IntermediaryErrors
from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    ModelNotServed,
    Outcome,
    Overloaded,
    TooLarge,
    UncountedError,
    Unreachable,
)
from dispatcher.core.gateway.tenants import TenantRefusals
from dispatcher.core.limit.limiter import Limiter
from dispatcher.dispatch.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.dispatch.maintenance import Maintenance
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess, loop_time
from dispatcher.ports import AttemptResult, Gateway, Lease, Overload

CONNECTION_CHECK_S = 0.1
"""Interval for checking open connections while the gateway is unreachable."""


class OutcomeJudge:
    """Judges the outcomes of one process, and keeps what they have shown."""

    def __init__(
        self,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        in_flight: InFlightTable,
        access: QueueAccess,
        maintenance: Maintenance,
        random_source: random.Random,
    ) -> None:
        self._options = options
        self._tenants = TenantRefusals()
        self._intermediary_errors = IntermediaryErrors()
        self._evictions = Evictions()
        self._gateway_verification = GatewayVerification()
        self._gateway = gateway
        self._limiter = limiter
        self._in_flight = in_flight
        self._access = access
        self._maintenance = maintenance
        self._random = random_source
        self._connection_check: asyncio.TimerHandle | None = None

    def reconfigure(self, options: Options) -> None:
        if options.gateway_url != self._options.gateway_url:
            self._gateway_verification = GatewayVerification()
        self._options = options

    def close(self) -> None:
        """Stop the timer. No attempt may be running."""
        if self._connection_check is not None:
            self._connection_check.cancel()

    @property
    def max_tried_at_once(self) -> int | None:
        """Number of requests that may be tried at once while all are refused. `None` if there is no bound."""
        return self._tenants.max_tried_at_once

    def get_probe_rest_s(self, lease: Lease) -> float:
        """Return for how long this request may not be the probe again."""
        return self._intermediary_errors.compute_rest_s(lease.entry_id, loop_time())

    def judge_attempt(self, attempt: Attempt, result: AttemptResult, outcome: Outcome) -> AttemptResult:
        """Return the result of an attempt with the outcome that counts, and tell the limiter what it says
        about the gateway. `outcome` is the one of `result`, or what is known about the model instead."""
        if not isinstance(outcome, ModelNotServed):
            request = attempt.request
            path = request.endpoint or self._options.default_path
            outcome = self._gateway_verification.judge_outcome(
                outcome, path, request.payload, result.ended_at
            )
        # Copying is expensive compared with the rest, and the outcome is rarely changed.
        judged = result if outcome is result.outcome else result.copy_with(outcome=outcome)
        self._report_to_limiter(attempt, judged)
        return judged

    def _report_to_limiter(self, attempt: Attempt, judged: AttemptResult) -> None:
        """Tell the limiter what the outcome says about the gateway."""
        outcome, at, sent_at = judged.outcome, judged.ended_at, judged.sent_at
        match outcome:
            case Overloaded():
                self._limiter.record_gateway_answer(at, sent_at)
                self._report_overload(attempt, outcome, at)
            case Failed(is_intermediary_error=True):
                if self._limiter.record_intermediary_error(
                    at, sent_at, outcome.why, self._iterate_connect_times()
                ):
                    self._handle_unreachable_gateway()
            case Unreachable():
                self._limiter.record_connection_failure(at, outcome.why)
                self._handle_unreachable_gateway()
            case Delivered() | TooLarge() | ModelNotServed() | Evicted():
                self._limiter.record_gateway_answer(at, sent_at)
            case Failed() if outcome.status is not None:
                self._limiter.record_gateway_answer(at, sent_at)
            case _:
                pass  # not sent, or no answer: says nothing about the gateway

    def _report_overload(self, attempt: Attempt, outcome: Overloaded, at: float) -> None:
        # Requests that were sent under an older reading may have caused the refusal.
        read_at = self._limiter.get_allowance(at).read_at
        alone = all(other.claimed_at >= read_at for other in self._in_flight.list_at_gateway())
        # All leases of a merged call have the same tenant, which is refused once.
        refused = {self._get_tenant(entry): entry.lease.refusals > 0 for entry in attempt.leases}
        is_capacity_shortage = [
            self._tenants.record_refusal(tenant, at, read_at, was_refused=was_refused_before, is_alone=alone)
            for tenant, was_refused_before in refused.items()
        ]
        overload = Overload(
            refused_at=at,
            retry_at=at + min(outcome.retry_after_s or 0.0, self._options.retry.max_s),
            is_out_of_capacity=outcome.is_out_of_capacity and all(is_capacity_shortage),
            in_flight=self._limiter.count_in_flight_at_refusal(at, attempt.units),
        )
        self._access.record_overload(overload)
        self._maintenance.schedule_share(self._limiter.get_allowance(at), overload)

    def judge_for_lease(self, entry: InFlightLease, judged: AttemptResult) -> Outcome:
        """Return the outcome as it counts for one of the leases, and record what it says about the tenant."""
        outcome, at, sent_at = judged.outcome, judged.ended_at, judged.sent_at
        entry_id, was_refused_before = entry.lease.entry_id, entry.lease.refusals > 0
        match outcome:
            case Overloaded():
                self._intermediary_errors.record_answer(entry_id, sent_at)
                return outcome
            case Evicted():
                self._intermediary_errors.record_answer(entry_id, sent_at)
                rest_s = self._evictions.record_eviction(
                    entry_id, self._options.retry, self._random.random(), outcome.retry_after_s
                )
                outcome = replace(outcome, delay_s=rest_s)
            case Delivered() | TooLarge():
                self._intermediary_errors.record_answer(entry_id, sent_at)
                self._evictions.forget_request(entry_id)
                if was_refused_before or not self._tenants.has_no_refusals:
                    self._tenants.record_acceptance(
                        self._get_tenant(entry), sent_at, was_refused=was_refused_before
                    )
                return outcome
            case Failed(is_intermediary_error=True):
                is_blamed = self._intermediary_errors.record_error(entry_id, at)
                # Without a gateway, the failure counts against no request.
                if self._limiter.gateway_unreachable_since is not None:
                    rest_s = self._get_unreachable_rest_s(entry, at)
                    outcome = UncountedError(outcome.why, outcome.kind, rest_s)
                elif not is_blamed:
                    retry_s = self._intermediary_errors.compute_retry_delay_s(
                        entry_id, at - sent_at, self._options.retry
                    )
                    # An intermediary error of a single request may pass: retry before blaming the request.
                    outcome = UncountedError(outcome.why, outcome.kind, retry_s)
            case Failed() if outcome.status is not None:
                self._intermediary_errors.record_answer(entry_id, sent_at)
            case _:
                pass
        # Other outcomes show neither acceptance nor refusal of the tenant.
        self._tenants.end_trial(self._get_tenant(entry), was_refused=was_refused_before)
        return outcome

    def _get_unreachable_rest_s(self, entry: InFlightLease, at: float) -> float:
        """Return how long the request waits in the queue so that others can show whether there is a gateway.
        0 if there are no others."""
        since = self._limiter.gateway_unreachable_since
        if since is None or entry.request is None or not self._access.has_claimable_requests:
            return 0.0
        left_s = entry.request.deadline - self._access.queue.unix_now()
        return self._intermediary_errors.set_aside(entry.lease.entry_id, at, since=since, time_left_s=left_s)

    def _handle_unreachable_gateway(self) -> None:
        self._schedule_connection_check()
        self._gateway.resize_connection_pool(0)  # idle connections may be dead: a probe must open a new one

    def get_rest_s(self, entry: InFlightLease) -> float:
        """Return how long the tenant, or the group of refused requests, must not send."""
        was_refused_before = entry.lease.refusals > 0
        if self._tenants.has_no_refusals and not was_refused_before:
            return 0.0
        return self._tenants.admit_request(
            self._get_tenant(entry), loop_time(), was_refused=was_refused_before
        )

    def _get_tenant(self, entry: InFlightLease) -> str:
        return "" if entry.request is None else entry.request.metadata.get(self._options.tenant_attribute, "")

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
