"""Runs attempts, from the first step to the completions of their leases, and reports to the limiter what each
says about the gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from dispatcher.core.gateway.evictions import Evictions
from dispatcher.core.gateway.intermediary_errors import Bounces
from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    Unreachable,
    WithoutModel,
)
from dispatcher.core.gateway.tenants import Tenants
from dispatcher.core.gateway.unverified_gateway import Stranger
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import Request
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.in_flight import HeldLease, Holding, Try
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.maintenance import Upkeep
from dispatcher.dispatch.merging.merged_calls import FollowUp
from dispatcher.dispatch.merging.merging import Batching
from dispatcher.dispatch.models.model_requests import Models
from dispatcher.dispatch.models.warming import Warming
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess, now
from dispatcher.dispatch.sequences.turns import LineUp
from dispatcher.ports import Forwarded, Gateway, Lease, ModelServers, Overload
from dispatcher.telemetry.events import Event, emit

LOOK_S = 0.1
"""Interval for checking open connections while the gateway is unreachable."""


class Tries:
    """All running attempts.

    `complete` takes the completion of each lease of an attempt. `remove_lease` removes a lease that another
    owner has now.
    """

    def __init__(
        self,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        holding: Holding,
        access: QueueAccess,
        upkeep: Upkeep,
        journal: Journal,
        rand: random.Random,
        finish: Callable[[Ending], None],
        drop: Callable[[str], object],
        servers: ModelServers | None = None,
    ) -> None:
        self.options = options
        self.others_wait = False
        """True if the newest claim or probe left requests that can be claimed."""
        self.tenants = Tenants()
        self.bounces = Bounces()
        self.evictions = Evictions()
        self.stranger = Stranger()
        self.batching = Batching(options, rand)
        self.lineup = LineUp(access, options, finish, drop)
        self.models = Models(access, options, finish)
        self.warming = Warming(access, limiter, holding, gateway, self.models.versions, options, servers)
        self._gateway = gateway
        self._limiter = limiter
        self._holding = holding
        self._access = access
        self._upkeep = upkeep
        self._journal = journal
        self._random = rand
        self._finish = finish
        self._drop = drop
        self._looking: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        holding.left = self._was_cut

    def reconfigure(self, options: Options) -> None:
        if options.gateway != self.options.gateway:
            self.stranger = Stranger()
        self.options = self.lineup.options = options
        self.batching.reconfigure(options)
        self.models.reconfigure(options)
        self.warming.reconfigure(options)

    def close(self) -> None:
        """Stop the timer. No attempt may be running."""
        if self._looking is not None:
            self._looking.cancel()

    def begin(self, begun: Try, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        begun.task = tasks.create_task(self._run(begun))
        # asyncio may cancel a task before its first step; then not even its `finally` blocks run.
        begun.task.add_done_callback(partial(self._never_began, begun))
        self._holding.started(begun)
        if len(begun.riders) > 1:
            self._end_the_late(begun)

    def _end_the_late(self, begun: Try) -> None:
        """End each lease whose deadline comes before the answer. The last one ends the attempt."""
        unix_now = self._access.queue.unix_now()
        deadlines = [(held.request.deadline, held) for held in begun.riders if held.request is not None]
        for deadline, held in deadlines:
            if deadline <= unix_now and len(begun.riders) > 1 and held.rides is begun:
                self._holding.cut(held, "late")
        left = [deadline for deadline, held in deadlines if held.rides is begun]
        if len(left) > 1 and (soonest := min(left)) < begun.request.deadline:
            wait_s = max(0.0, soonest - unix_now)
            # The attempt itself runs until the latest of the deadlines, so earlier ones need a timer.
            asyncio.get_running_loop().call_later(wait_s, self._end_the_late, begun)

    async def _run(self, running: Try) -> None:
        started, unix_now = now(), self._access.queue.unix_now()
        self._limiter.sent(running.token, started, running.units)
        for held in () if running.again else running.riders:
            self._journal.sent(held, held.request or running.request, unix_now)
        try:
            forwarded = await self._gateway.forward(
                running.request,
                token=running.token,
                deadline=started + running.request.deadline - unix_now,
                may_send=partial(self._all_ours, running),
            )
        except asyncio.CancelledError:
            self._limiter.answered(running.token, now())
            # Without a reason, the cancellation comes from outside (the task group): pass it on.
            if any(held.cut is None for held in running.riders):
                raise
            self._cut(running)
            return
        except Exception as error:
            emit(Event.SURPRISE, where="forward", error=repr(error))
            forwarded = Forwarded(Failed(f"the dispatcher failed: {error!r}"), started, now())
        finally:
            self._holding.back(running)
        # Before any completion: the next claim must already see the free units.
        self._limiter.answered(running.token, forwarded.ended_at, forwarded.opened_s)
        outcome = self.models.outcome(running, forwarded.outcome, forwarded.sent_at)
        if not isinstance(outcome, WithoutModel):
            request = running.request
            path = request.endpoint or self.options.path
            outcome = self.stranger.judged(outcome, path, request.payload, forwarded.ended_at)
        # Copying is expensive compared with the rest, and the outcome is rarely changed.
        seen = forwarded if outcome is forwarded.outcome else forwarded.but(outcome=outcome)
        self._gateway_seen(running, seen)
        if running.bundled:
            follow = self._answered(running, seen)
            self._hold_answer([held for held, _ in follow.ends], forwarded)
            self._follow(running, follow)
        else:
            self._hold_answer(running.riders, forwarded)
            for held in running.riders:
                self._end(held, running.request, forwarded, seen)

    def _hold_answer(self, ends: Sequence[HeldLease], forwarded: Forwarded) -> None:
        """Give the memory of an answer back when the queue has confirmed the end of all these leases.

        Attempts that follow from the answer have copies of what they need.
        """
        if forwarded.held is None:
            return
        ends = [held for held in ends if held in self._holding]
        for held in ends:
            held.answer = forwarded.held
        # 0 if all leases have ended meanwhile, which gives the memory back at once.
        forwarded.held.share(len(ends))

    def _end(self, held: HeldLease, request: Request, forwarded: Forwarded, seen: Forwarded) -> None:
        """Complete one lease. `result` is what the gateway answered, `judged` the same with the outcome that
        counts."""
        outcome = self._counted(held, seen)
        self._journal.tried(held, forwarded, outcome)
        ending = self._decide(held.lease, held.request or request, outcome)
        self._finish(ending if held.goes is None else self.lineup.leaves(held, ending, forwarded))

    def _answered(self, running: Try, seen: Forwarded) -> FollowUp:
        """Return what the answer means for each lease. An internal error costs each lease a failed
        attempt."""
        try:
            return self.batching.answered(running, seen)
        except Exception as error:
            emit(Event.SURPRISE, where="batching", error=repr(error))
            # Without this, the leases would stay in the table until the process ends.
            lost = seen.but(outcome=Failed(f"the dispatcher failed: {error!r}"))
            return FollowUp([(held, lost) for held in running.riders])

    def _follow(self, tried: Try, answered: FollowUp) -> None:
        """Complete the leases that have an answer, and start the attempts that follow for the others. Where
        nothing may be sent any more, their leases are returned."""
        for held, seen in answered.ends:
            self._end(held, tried.request, seen, seen)
        for held in answered.back:
            self._finish(completions.returned(held.lease))
        for following in answered.tries:
            if self._tasks is None or self._limiter.allowance(now()).reason.closed:
                self._follow(following, self.batching.unsent(following))
            else:
                self.begin(following, self._tasks)

    def give_up(self, waited: Iterable[HeldLease]) -> None:
        """Complete leases that leave their batch group without being sent."""
        for held in waited:
            held.waits = False
            self._was_cut(held)

    def _cut(self, tried: Try) -> None:
        for held in tried.riders:
            self._was_cut(held)
        self._follow(tried, self.batching.cut(tried))

    def _all_ours(self, running: Try) -> bool:
        # Called before each send, mostly for one lease, for which a generator costs more than the check.
        for held in running.riders:  # noqa: SIM110
            if not self._access.ours(held):
                return False
        return True

    def _never_began(self, begun: Try, _task: asyncio.Task[None]) -> None:
        """Complete an attempt whose task was cancelled before its first step, so that none of its code has
        run."""
        if begun.task is not None and any(held.rides is begun for held in begun.riders):
            self._holding.back(begun)
            self._cut(begun)

    def _was_cut(self, held: HeldLease) -> None:
        """Complete a lease whose answer is no longer awaited. If the process is stopping, the lease is
        returned."""
        if held.cut == "cancelled" and held.request is not None:
            self._finish(completions.cancelled(held.lease, held.request))
        elif held.cut == "late" and held.request is not None:
            self._finish(completions.expired(held.lease, held.request))
        elif held.cut == "lost":
            self._drop(held.lease.token)
        else:
            self._finish(completions.returned(held.lease))

    def _gateway_seen(self, tried: Try, seen: Forwarded) -> None:
        """Tell the limiter what the outcome says about the gateway."""
        outcome, at, sent_at = seen.outcome, seen.ended_at, seen.sent_at
        match outcome:
            case Overloaded():
                self._limiter.reached(at, sent_at)
                self._refused(tried, outcome, at)
            case Failed(bare=True):
                if self._limiter.bare_answer(at, sent_at, outcome.why, self._connected()):
                    self._without_gateway()
            case Unreachable():
                self._limiter.unreachable(at, outcome.why)
                self._without_gateway()
            case Delivered() | TooLarge() | WithoutModel() | Evicted():
                self._limiter.reached(at, sent_at)
            case Failed() if outcome.status is not None:
                self._limiter.reached(at, sent_at)
            case _:
                pass  # not sent, or no answer: says nothing about the gateway

    def _refused(self, tried: Try, outcome: Overloaded, at: float) -> None:
        # Requests that were sent under an older reading may have caused the refusal.
        read_at = self._limiter.allowance(at).read_at
        alone = all(other.claimed_at >= read_at for other in self._holding.at_gateway())
        # All leases of a merged call have the same tenant, which is refused once.
        refused = {self._tenant(held): held.lease.refusals > 0 for held in tried.riders}
        teaches = [
            self.tenants.refused(tenant, at, read_at, again=again, alone=alone)
            for tenant, again in refused.items()
        ]
        overload = Overload(
            at=at,
            until=at + min(outcome.retry_after_s or 0.0, self.options.retry.max_s),
            capacity=outcome.capacity and all(teaches),
            in_flight=self._limiter.in_flight_when_refused(at, tried.units),
        )
        self._access.overloaded(overload)
        self._upkeep.share(self._limiter.allowance(at), overload)

    def _counted(self, held: HeldLease, seen: Forwarded) -> Outcome:
        """Return the outcome as it counts for one of the leases, and record what it says about the tenant."""
        outcome, at, sent_at = seen.outcome, seen.ended_at, seen.sent_at
        entry, again = held.lease.entry, held.lease.refusals > 0
        match outcome:
            case Overloaded():
                self.bounces.answered(entry, sent_at)
                return outcome
            case Evicted():
                self.bounces.answered(entry, sent_at)
                rest_s = self.evictions.evicted(
                    entry, self.options.retry, self._random.random(), outcome.retry_after_s
                )
                outcome = replace(outcome, rest_s=rest_s)
            case Delivered() | TooLarge():
                self.bounces.answered(entry, sent_at)
                self.evictions.ended(entry)
                if again or not self.tenants.calm:
                    self.tenants.accepted(self._tenant(held), sent_at, again=again)
                return outcome
            case Failed(bare=True):
                blamed = self.bounces.bounced(entry, at)
                # Without a gateway, the failure counts against no request.
                if self._limiter.without_gateway_since is not None:
                    outcome = Unreachable(outcome.why, self._make_way(held, at))
                elif not blamed:
                    again_s = self.bounces.again_s(entry, at - sent_at, self.options.retry)
                    # An intermediary error of a single request may pass: retry before blaming the request.
                    outcome = Unreachable(outcome.why, again_s)
            case Failed() if outcome.status is not None:
                self.bounces.answered(entry, sent_at)
            case _:
                pass
        # Other outcomes show neither acceptance nor refusal of the tenant.
        self.tenants.ended(self._tenant(held), again=again)
        return outcome

    def _make_way(self, held: HeldLease, at: float) -> float:
        """Return how long the request waits in the queue so that others can show whether there is a gateway.
        0 if there are no others."""
        since = self._limiter.without_gateway_since
        if since is None or held.request is None or not self.others_wait:
            return 0.0
        left_s = held.request.deadline - self._access.queue.unix_now()
        return self.bounces.make_way(held.lease.entry, at, since=since, left_s=left_s)

    def _without_gateway(self) -> None:
        self._look_again()
        self._gateway.resize(0)  # idle connections may be dead: a probe must open a new one

    def rest_s(self, held: HeldLease) -> float:
        """Return how long the tenant, or the group of refused requests, must not send."""
        again = held.lease.refusals > 0
        if self.tenants.calm and not again:
            return 0.0
        return self.tenants.rest_s(self._tenant(held), now(), again=again)

    def _tenant(self, held: HeldLease) -> str:
        return "" if held.request is None else held.request.metadata.get(self.options.tenant_from, "")

    def _decide(self, lease: Lease, request: Request, outcome: Outcome) -> Ending:
        policy, at = self.options.retry, self._access.queue.unix_now()
        return completions.after_try(lease, request, outcome, at, policy, self._random.random())

    def _look(self) -> None:
        """Check whether a request stays connected while the gateway is unreachable: a probe, or a request
        that was sent together with the first that failed. If so, it has reached the gateway, though its
        answer is still to come."""
        if self._limiter.look(now(), self._connected()):
            # The gateway is back: what was claimed as a probe counts as an ordinary request from here on.
            for held in self._holding:
                held.probe = False
            self._access.wake.set()
        self._looking = None
        self._look_again()

    def _look_again(self) -> None:
        if self._looking is None and self._limiter.without_gateway_since is not None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _connected(self) -> Iterator[float]:
        """Yield for each request at the gateway the time since which it has a connection."""
        for running in self._holding.tries:
            since = self._gateway.connected(running.token)
            if since is not None:
                yield since
