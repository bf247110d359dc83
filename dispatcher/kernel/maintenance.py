"""Tasks that run beside the rounds of the loop, whatever the gate says, each at its own interval."""

from __future__ import annotations

import asyncio
import contextlib

from dispatcher.kernel import completions
from dispatcher.kernel.change_log import GateChangeLog, build_gate_fields
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.error_guard import start_task
from dispatcher.kernel.options import Options
from dispatcher.kernel.queue_access import loop_time
from dispatcher.kernel.queue_steps import QueueStep
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import Overload, Permit, Settlement, SweepSummary, UnleasedRequest
from dispatcher.requests.forecast import ServiceRateMeter, compute_forecast
from dispatcher.requests.request import Request, parse_member
from dispatcher.telemetry.events import Event, emit

INTERVAL_S = 1.0
"""Interval for counts, sweeps and cancel markers."""
FORECAST_INTERVAL_S = 5.0
SWEEPS_PER_TIMEOUT = 6
"""Number of sweeps in the shorter of owner_timeout_s and lease_s. Sweeps are the heartbeat of this owner, and
a late sweep looks to the queue like the first one after an outage."""
EXPIRE_BATCH_SIZE = 256
MAX_EXPIRE_BATCHES = 20
"""Maximum number of batches of EXPIRE_BATCH_SIZE in a row, so that the other tasks of a sweep are not
delayed."""


class Maintenance:
    """Renews leases, sweeps the queue, shares limits, and waits for new work and for cancelled requests."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._access = context.access
        self._queue = context.access.queue
        self._in_flight = context.in_flight
        self._limiter = context.limiter
        self._journal = context.journal
        self._share_due = asyncio.Event()
        self._gate_log = GateChangeLog()
        self._unshared_overload: Overload | None = None
        """Overload that was seen here and is not shared yet."""
        self._pool_allowance: Allowance | None = None
        """Newest allowance that says something about the pool, not only about this process."""
        self._shared_read_at = float("-inf")
        """Newest reading that was shared, or is about to be."""
        self._last_expire_at = float("-inf")

    async def reclaim_from_ended_owners(self) -> None:
        """Take back the leases of owners that are proven to have ended, before anything else.

        After the first count, these leases would count as lost since then, and would lower the limit until a
        second reading, although the first reading contains none of their requests.
        """
        if not self._context.options.observe:
            self._report_reclaimed(await self._sweep_once())

    def start_tasks(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        duties = [self._count_queue, self._update_forecast]
        if not self._context.options.observe:
            # An observer changes nothing in the queue, and so gives no heartbeat either.
            duties += [self._renew_leases, self._sweep_queue, self._share_state, self._stop_cancelled]
            duties += [self._retry_markers, self._listen_for_work]
        return [start_task(tasks, duty, duty.__name__.strip("_")) for duty in duties]

    def request_lease_count(self) -> None:
        """Count the leases soon: between two counts, a new reading may allow more."""
        self._share_due.set()

    def schedule_share(self, allowance: Allowance, overload: Overload | None = None) -> None:
        """Share the limit and the overload with the other replicas soon if they are new, and log a change of
        the gate."""
        self._log_gate_change(allowance)
        # Other reasons (draining, queue away, …) close only this process and must not limit the others.
        if not allowance.reason.is_closed or allowance.reason is Reason.NO_ROOM:
            self._pool_allowance = allowance
        if overload is not None:
            self._unshared_overload = overload
        if overload is not None or allowance.read_at > self._shared_read_at:
            self._shared_read_at = allowance.read_at
            self._share_due.set()

    async def _share_state(self) -> None:
        while True:
            await self._share_due.wait()
            self._share_due.clear()
            allowance, overload = self._pool_allowance, self._unshared_overload
            if allowance is None:  # no reading yet: read_at=0 is older than any reading of others
                permit = Permit(
                    limit=0, read_at=0.0, lost_units=0, retry_after_max_s=self._context.options.retry.max_s
                )
            else:
                permit = build_permit(allowance, self._context.options)
            asked_at = self._access.clock()
            reply = await self._access.call_queue(QueueStep.SHARE, self._queue.share_state(permit, overload))
            if reply is None:
                await asyncio.sleep(self._access.retry_pause_s)
                self._share_due.set()
                continue
            # A newer overload may have arrived during the call: keep it and share again.
            if self._unshared_overload is overload:
                self._unshared_overload = None
            else:
                self._share_due.set()
            self._access.record_sign_of_life(asked_at)
            self._access.update_from_reply(reply)
            self._access.wake.set()

    async def _count_queue(self) -> None:
        """Count the queue, and log changes of the gate even if the loop stands still."""
        while True:
            counts = await self._access.call_queue(QueueStep.COUNT, self._queue.count_requests())
            if counts is not None:
                self._access.view.counts, self._access.view.counted_at = counts, loop_time()
                for on_counts in self._context.hooks.on_counts:
                    on_counts(counts)
                self._limiter.set_waiting_count(counts.claimable_count, loop_time())
                if self._context.options.observe:
                    # An observer never claims, so it learns the leases of the others only from these counts.
                    self._limiter.record_lease_counts(
                        loop_time(), other_owners_units=counts.units, just_leased_units=0, lost_units=0
                    )
            self._log_gate_change(self._limiter.get_allowance(loop_time()))
            await asyncio.sleep(INTERVAL_S)

    def _log_gate_change(self, allowance: Allowance) -> None:
        """Log a change of the gate's reason, if it is to be logged now."""
        at = loop_time()
        unlogged_count = self._gate_log.check_reason(allowance.reason, at)
        if unlogged_count is None:
            return
        age_s = min((at - reading.closed_at for reading in self._limiter.newest_readings), default=None)
        fields = build_gate_fields(allowance, in_flight=self._limiter.in_flight, reading_age_s=age_s)
        if unlogged_count:
            fields["unlogged_changes"] = unlogged_count
        emit(Event.GATE, **fields)

    async def _update_forecast(self) -> None:
        """Update the forecast for operators: who misses the deadline, and which replicas work."""
        served = ServiceRateMeter()
        self._access.view.forecast = None  # the task starts again here after an exception
        while True:
            rate, service_s = served.rate_per_s, served.service_s
            snapshot = await self._access.call_queue(
                QueueStep.TAKE_SNAPSHOT, self._queue.take_snapshot(rate, service_s)
            )
            if snapshot is not None:
                self._access.view.forecast = compute_forecast(snapshot, rate, service_s)
                served.record_snapshot(snapshot)
            await asyncio.sleep(FORECAST_INTERVAL_S)

    async def _renew_leases(self) -> None:
        """Renew the leases of this process; at once if some of them may have been taken back."""
        pause = self._context.options.lease_s / 3
        leases_were_lost = self._access.leases_were_lost
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await leases_were_lost.wait()
            leases_were_lost.clear()
            pause = (
                self._context.options.lease_s / 3 if await self._renew_once() else self._access.retry_pause_s
            )

    async def _renew_once(self) -> bool:
        """Renew the leases once. Return True if the queue answered."""
        # Take the time before the call: the queue counts from when it ran, which is never earlier.
        entries, asked_at = list(self._in_flight), self._access.clock()
        renewed = await self._access.call_queue(
            QueueStep.RENEW, self._queue.renew([entry.lease for entry in entries])
        )
        if renewed is None:
            return False
        self._access.record_sign_of_life(asked_at)
        self._access.update_from_reply(renewed)
        lost_entry_ids = set(renewed.lost_entry_ids)
        self._in_flight.confirm_leases(entries, lost_entry_ids, asked_at)
        lost = {entry for entry in entries if entry.lease.entry_id in lost_entry_ids}
        # During the call, a lease may have ended here, and its request may have been claimed again.
        for entry in self._in_flight.list_in_work():
            if entry in lost:
                self._journal.record_lost(entry)
                emit(Event.LEASE_LOST, entry=entry.lease.entry_id)
                self._in_flight.stop_waiting(entry, "lost")
        return True

    async def _sweep_queue(self) -> None:
        """Return requests to their places whose owners died, whose leases ran out or whose retry is due, and
        answer those past their deadline."""
        while True:
            summary = await self._sweep_once()
            shortest = min(self._context.options.lease_s, self._context.options.owner_timeout_s)
            pause = min(INTERVAL_S, shortest / SWEEPS_PER_TIMEOUT)
            self._report_reclaimed(summary)
            if summary is not None:
                self._access.record_lost_units(summary.lost_units)
                if summary.reclaimed_count or summary.due_count or summary.freed_count:
                    self._access.signal_work()
                # Sweeps may be more frequent than this with a short lease or owner timeout.
                if loop_time() - self._last_expire_at >= INTERVAL_S:
                    self._last_expire_at = loop_time()
                    await self._expire_overdue()
                    for after_sweep in self._context.hooks.after_sweep:
                        await after_sweep()
                if summary.next_due_at is not None:
                    # Without the lower bound, a request that is due but not moved yet makes this loop spin.
                    pause = min(pause, max(0.01, summary.next_due_at - loop_time()))
            await asyncio.sleep(pause)

    async def _sweep_once(self) -> SweepSummary | None:
        asked_at = self._access.clock()
        summary = await self._access.call_queue(QueueStep.SWEEP, self._queue.sweep())
        if summary is not None:
            self._access.record_sign_of_life(asked_at)
        return summary

    def _report_reclaimed(self, summary: SweepSummary | None) -> None:
        if summary is not None and summary.reclaimed_count:
            self._journal.record_reclaimed(summary.reclaimed_count)
            emit(Event.LEASES_RECLAIMED, leases=summary.reclaimed_count)

    async def _expire_overdue(self) -> None:
        for _ in range(MAX_EXPIRE_BATCHES):
            found = (
                await self._access.call_queue(
                    QueueStep.FIND_OVERDUE, self._queue.find_overdue(EXPIRE_BATCH_SIZE)
                )
                or ()
            )
            expired = []
            for overdue in found:
                try:
                    settlement = self._build_overdue_error(overdue)
                except Exception as error:  # it must not hold up the others
                    emit(Event.INTERNAL_ERROR, where="overdue request", error=repr(error))
                    continue
                if settlement is not None:
                    expired.append((overdue, settlement))
            if expired:
                self._journal.record_expired(
                    await self._access.call_queue(
                        QueueStep.SETTLE_UNLEASED, self._queue.settle_unleased(expired)
                    )
                    or 0
                )
                # What a request leaves to a feature may free other requests.
                if any(settlement.extra is not None for _, settlement in expired):
                    self._access.signal_work()
            # A full batch without a single expired request means scores that are no deadlines: stop here.
            if len(found) < EXPIRE_BATCH_SIZE or not expired:
                return

    def _build_overdue_error(self, overdue: UnleasedRequest) -> Settlement | None:
        """Settle a request with an error. `None` if it is not past its deadline."""
        request = parse_member(overdue.member)
        if not isinstance(request, Request) or request.deadline > self._queue.unix_now():
            return None
        for rewrite in self._context.hooks.rewrite_request:
            request = rewrite(request)
        return self._context.end_with_progress(completions.build_overdue_error(overdue, request))

    async def _stop_cancelled(self) -> None:
        """Stop requests in flight that were cancelled. This closes the connection, so that the gateway stops,
        too."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            entries = self._in_flight.list_in_work()
            for entry, is_cancelled in zip(entries, await self._access.check_cancelled(entries), strict=True):
                if is_cancelled:
                    self._in_flight.stop_waiting(entry, "cancelled")

    async def _retry_markers(self) -> None:
        """Look up unread cancel markers again until they can be read."""
        while True:
            await self._access.markers_unreadable.wait()
            await asyncio.sleep(self._access.retry_pause_s)
            await self._access.retry_unread_markers()

    async def _listen_for_work(self) -> None:
        while True:
            if await self._access.call_queue(QueueStep.WAIT_FOR_WORK, self._wait_for_work()):
                self._access.signal_work()
                shared = self._access.view.shared
                if shared is not None and shared.is_paused:
                    self._share_due.set()  # the wake-up may mean that the pause has ended: ask
            else:
                await asyncio.sleep(self._access.retry_pause_s)

    async def _wait_for_work(self) -> bool:
        await self._queue.wait_for_work()
        return True


def build_permit(allowance: Allowance, options: Options, unleased_units: int = 0) -> Permit:
    return Permit(
        allowance.limit, allowance.read_at, allowance.lost_units, options.retry.max_s, unleased_units
    )
