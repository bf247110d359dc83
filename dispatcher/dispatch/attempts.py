"""Runs attempts, from the first step to the completions of their leases.

run        forward the request, in a task of its own
judge      what the outcome says (outcome_judge.py), and what it means for each lease
follow up  attempts that follow from the answer to a merged call start at once
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import partial

from dispatcher.core.gateway.outcome import Delivered, Failed, FailureKind
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.usage import parse_token_usage
from dispatcher.core.slices.answers import Continues, Finished
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Completion
from dispatcher.dispatch.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.merging.merged_calls import FollowUp
from dispatcher.dispatch.merging.merger import RequestMerger
from dispatcher.dispatch.models.model_router import ModelRouter
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.outcome_judge import OutcomeJudge
from dispatcher.dispatch.queue_access import QueueAccess, loop_time
from dispatcher.dispatch.sequences.turns import TurnChecker
from dispatcher.dispatch.slices.slicer import Slicer
from dispatcher.ports import AttemptResult, Gateway, Release
from dispatcher.telemetry.events import Event, emit


class AttemptRunner:
    """All running attempts.

    `complete` takes the completion of each lease of an attempt. `remove_lease` removes a lease that another
    owner has now.
    """

    def __init__(
        self,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        in_flight: InFlightTable,
        access: QueueAccess,
        journal: Journal,
        judge: OutcomeJudge,
        merger: RequestMerger,
        turn_checker: TurnChecker,
        model_router: ModelRouter,
        slicer: Slicer,
        random_source: random.Random,
        complete: Callable[[Completion], None],
        remove_lease: Callable[[str], object],
    ) -> None:
        self._gateway = gateway
        self._limiter = limiter
        self._options = options
        self._in_flight = in_flight
        self._access = access
        self._journal = journal
        self._judge = judge
        self._merger = merger
        self._turn_checker = turn_checker
        self._model_router = model_router
        self._slicer = slicer
        self._random = random_source
        self._complete = complete
        self._remove_lease = remove_lease
        self._tasks: asyncio.TaskGroup | None = None
        in_flight.on_detached = self._complete_stopped

    def reconfigure(self, options: Options) -> None:
        self._options = options

    def use_task_group(self, tasks: asyncio.TaskGroup) -> None:
        """Run the attempts that start from now on in this group."""
        self._tasks = tasks

    def start_attempt(self, attempt: Attempt) -> None:
        assert self._tasks is not None  # noqa: S101 -- the loop runs
        attempt.task = self._tasks.create_task(self._run_attempt(attempt))
        # asyncio may cancel a task before its first step; then not even its `finally` blocks run.
        attempt.task.add_done_callback(partial(self._handle_never_started, attempt))
        self._in_flight.start_attempt(attempt)
        if len(attempt.leases) > 1:
            self._expire_late_leases(attempt)

    def _expire_late_leases(self, attempt: Attempt) -> None:
        """End each lease whose deadline comes before the answer. The last one ends the attempt."""
        unix_now = self._access.queue.unix_now()
        deadlines = [(entry.request.deadline, entry) for entry in attempt.leases if entry.request is not None]
        for deadline, entry in deadlines:
            if deadline <= unix_now and len(attempt.leases) > 1 and entry.attempt is attempt:
                self._in_flight.stop_waiting(entry, "deadline")
        remaining = [deadline for deadline, entry in deadlines if entry.attempt is attempt]
        if len(remaining) > 1 and (soonest := min(remaining)) < attempt.request.deadline:
            wait_s = max(0.0, soonest - unix_now)
            # The attempt itself runs until the latest of the deadlines, so earlier ones need a timer.
            asyncio.get_running_loop().call_later(wait_s, self._expire_late_leases, attempt)

    async def _run_attempt(self, attempt: Attempt) -> None:
        started, unix_now = loop_time(), self._access.queue.unix_now()
        self._limiter.record_send(attempt.token, started, attempt.units)
        for entry in () if attempt.is_follow_up else attempt.leases:
            self._journal.record_sent(entry, entry.request or attempt.request, unix_now)
        try:
            deadline = started + attempt.request.deadline - unix_now
            if attempt.token in self._slicer.slices:
                result = await self._forward_slice(attempt, deadline)
            else:
                result = await self._gateway.forward(
                    attempt.request,
                    token=attempt.token,
                    deadline=deadline,
                    may_send=partial(self._are_leases_valid, attempt),
                )
        except asyncio.CancelledError:
            self._limiter.record_answer(attempt.token, loop_time())
            # Without a reason, the cancellation comes from outside (the task group): pass it on.
            if any(entry.stop_reason is None for entry in attempt.leases):
                raise
            self._complete_stopped_attempt(attempt)
            return
        except Exception as error:
            emit(Event.INTERNAL_ERROR, where="forward", error=repr(error))
            result = AttemptResult(_make_internal_failure(error), started, loop_time())
        finally:
            self._in_flight.end_attempt(attempt)
        # Before any completion: the next claim must already see the free units.
        self._limiter.record_answer(attempt.token, result.ended_at, result.connect_s)
        outcome = self._model_router.interpret_outcome(attempt, result.outcome, result.sent_at)
        judged = self._judge.judge_attempt(attempt, result, outcome)
        if attempt.is_merged_call:
            follow_up = self._interpret_answer(attempt, judged)
            if result.memory is not None:
                # The attempts that follow from the answer have copies of what they need.
                self._in_flight.keep_answer_memory([entry for entry, _ in follow_up.ended], result.memory)
            self._apply_follow_up(attempt, follow_up)
        else:
            if result.memory is not None:
                self._in_flight.keep_answer_memory(attempt.leases, result.memory)
            for entry in attempt.leases:
                self._complete_lease(entry, attempt.request, result, judged)

    async def _forward_slice(self, attempt: Attempt, deadline: float) -> AttemptResult:
        may_send = partial(self._are_leases_valid, attempt)
        prepared = await self._slicer.prepare_request(attempt, deadline, may_send)
        if isinstance(prepared, AttemptResult):
            return prepared
        return await self._gateway.forward(
            prepared, token=attempt.token, deadline=deadline, may_send=may_send
        )

    def _complete_lease(
        self, entry: InFlightLease, request: Request, result: AttemptResult, judged: AttemptResult
    ) -> None:
        """Complete one lease. `result` is what the gateway answered, `judged` the same with the outcome that
        counts."""
        outcome = self._judge.judge_for_lease(entry, judged)
        self._in_flight.record_answer(entry, result.ended_at)
        request = entry.request or request
        finished = None
        if not self._slicer.slices:
            self._journal.record_attempt(entry, result, outcome)
        else:
            sliced = self._slicer.interpret_outcome(entry.lease.token, request, result, outcome)
            tokens = None if sliced is None else _count_tokens(sliced)
            self._journal.record_attempt(entry, result, outcome, tokens)
            if isinstance(sliced, Continues):
                if request.session is None and not request.version:  # it is as it was parsed
                    generation = self._slicer.slices[entry.lease.token].generation
                    self._turn_checker.parsed_requests.store_request(entry.lease, request, generation)
                self._complete(completions.build_progress_release(entry.lease, sliced.progress, sliced.why))
                return
            if sliced is not None and isinstance(outcome, Delivered):
                finished, outcome = sliced, Delivered(outcome.status, sliced.body)
                result = result.copy_with(outcome=outcome)
            elif not isinstance(outcome, Delivered):
                self._keep_partial_progress(entry, request, result.sticky_token)
        completion = completions.build_completion(
            entry.lease,
            request,
            outcome,
            self._access.queue.unix_now(),
            self._options.retry,
            self._random.random(),
            finished,
        )
        completion = self._turn_checker.add_turn_end(entry, completion, result)
        if entry.has_new_progress:
            self._complete_with_progress(entry, completion)
        else:
            self._complete(completion)

    def _keep_partial_progress(self, entry: InFlightLease, request: Request, sticky_token: str = "") -> None:
        """Keep what a slice has generated whose answer broke off."""
        progress = self._slicer.find_partial_progress(entry.lease.token, request, sticky_token)
        if progress is not None:
            self._in_flight.set_progress(entry, progress)

    def _complete_with_progress(self, entry: InFlightLease, completion: Completion) -> None:
        """Complete a lease. If its request returns to the queue, new progress is stored with it."""
        if entry.has_new_progress and isinstance(completion, Release):
            completion = completion.copy_with(progress=entry.lease.progress)
        self._complete(completion)

    def _interpret_answer(self, attempt: Attempt, judged: AttemptResult) -> FollowUp:
        """Return what the answer means for each lease. An internal error costs each lease a failed
        attempt."""
        try:
            return self._merger.handle_answer(attempt, judged)
        except Exception as error:
            emit(Event.INTERNAL_ERROR, where="merging", error=repr(error))
            # Without this, the leases would stay in the table until the process ends.
            failure = judged.copy_with(outcome=_make_internal_failure(error))
            return FollowUp([(entry, failure) for entry in attempt.leases])

    def _apply_follow_up(self, attempt: Attempt, follow_up: FollowUp) -> None:
        """Complete the leases that have an answer, and start the attempts that follow for the others. Where
        nothing may be sent any more, their leases are returned."""
        for entry, result in follow_up.ended:
            self._complete_lease(entry, attempt.request, result, result)
        for entry in follow_up.returned:
            self._complete(completions.build_return(entry.lease))
        for next_attempt in follow_up.attempts:
            if self._limiter.get_allowance(loop_time()).reason.is_closed:
                self._apply_follow_up(next_attempt, self._merger.handle_unsent(next_attempt))
            else:
                self.start_attempt(next_attempt)

    def complete_unsent(self, entries: Iterable[InFlightLease]) -> None:
        """Complete leases that leave their batch group without being sent."""
        for entry in entries:
            self._in_flight.leave_batch_group((entry,))
            self._complete_stopped(entry)

    def _complete_stopped_attempt(self, attempt: Attempt) -> None:
        for entry in attempt.leases:
            self._keep_partial_progress(entry, attempt.request)
            self._complete_stopped(entry)
        self._apply_follow_up(attempt, self._merger.handle_stopped(attempt))

    def _are_leases_valid(self, attempt: Attempt) -> bool:
        # Called before each send, mostly for one lease, for which a generator costs more than the check.
        for entry in attempt.leases:  # noqa: SIM110
            if not self._access.is_lease_valid(entry):
                return False
        return True

    def _handle_never_started(self, attempt: Attempt, _task: asyncio.Task[None]) -> None:
        """Complete an attempt whose task was cancelled before its first step, so that none of its code has
        run."""
        if attempt.task is not None and any(entry.attempt is attempt for entry in attempt.leases):
            self._in_flight.end_attempt(attempt)
            self._complete_stopped_attempt(attempt)

    def _complete_stopped(self, entry: InFlightLease) -> None:
        """Complete a lease whose answer is no longer awaited. If the process is stopping, or the slice was
        revoked, the lease is returned."""
        if entry.stop_reason == "cancelled" and entry.request is not None:
            self._complete(completions.build_cancellation(entry.lease, entry.request))
        elif entry.stop_reason == "deadline" and entry.request is not None:
            self._complete(completions.build_deadline_error(entry.lease, entry.request))
        elif entry.stop_reason == "lost":
            self._remove_lease(entry.lease.token)
        else:
            self._complete_with_progress(entry, completions.build_return(entry.lease))


def _count_tokens(sliced: Continues | Finished) -> tuple[int, int] | None:
    """Return the tokens in and out of a slice. `None` if the answer has to be searched for them."""
    if sliced.usage is not None:
        return sliced.usage.limited_tokens
    return parse_token_usage(sliced.body) if isinstance(sliced, Finished) else None


def _make_internal_failure(error: Exception) -> Failed:
    return Failed(f"the dispatcher failed: {error!r}", kind=FailureKind.INTERNAL_ERROR)
