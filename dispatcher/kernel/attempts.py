"""Runs attempts, from the first step to the completions of their leases.

run        forward the request, in a task of its own
judge      what the outcome says (outcome_judge.py), and what it means for each lease
follow up  attempts that follow from the answer to a call of a grouping start at once

An exception in any of these steps costs the leases of the attempt a failed attempt (error_guard.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import completions
from dispatcher.kernel.queue_access import is_unexpected, loop_time
from dispatcher.queue.contract import Release
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.requests.usage import parse_token_usage
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.gateway.contract import AnswerMemory
    from dispatcher.kernel.completions import Completion
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.error_guard import ErrorGuard
    from dispatcher.kernel.hooks import FollowUp
    from dispatcher.kernel.in_flight import Attempt, InFlightLease
    from dispatcher.kernel.outcome_judge import OutcomeJudge
    from dispatcher.requests.request import Request


class AttemptRunner:
    """All running attempts."""

    def __init__(self, context: KernelContext, judge: OutcomeJudge, guard: ErrorGuard) -> None:
        self._context = context
        self._access = context.access
        self._gateway = context.gateway
        self._limiter = context.limiter
        self._in_flight = context.in_flight
        self._journal = context.journal
        self._judge = judge
        self._guard = guard
        self._tasks: asyncio.TaskGroup | None = None
        context.in_flight.on_detached = self._complete_detached

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
            attempt.deadline_timer = asyncio.get_running_loop().call_later(
                wait_s, self._expire_late_leases, attempt
            )

    async def _run_attempt(self, attempt: Attempt) -> None:
        """Run an attempt, and complete its leases. An exception costs them a failed attempt."""
        started = loop_time()
        try:
            try:
                unix_now = self._access.queue.unix_now()
                self._limiter.record_send(attempt.token, started, attempt.units)
                for entry in () if attempt.is_follow_up else attempt.leases:
                    self._journal.record_sent(entry, entry.request or attempt.request, unix_now)
                deadline = started + attempt.request.deadline - unix_now
                may_send = partial(self._are_leases_valid, attempt)
                request: Request | AttemptResult = attempt.request
                for part in self._context.hooks.preparing:
                    if attempt.token in part.leases and not isinstance(request, AttemptResult):
                        request = await part.prepare(attempt, request, deadline, may_send)
                if isinstance(request, AttemptResult):
                    result = request
                else:
                    result = await self._gateway.forward(
                        request, token=attempt.token, deadline=deadline, may_send=may_send
                    )
            except BaseException as error:
                is_stopped = isinstance(error, asyncio.CancelledError) and all(
                    entry.stop_reason is not None for entry in attempt.leases
                )
                if is_stopped or not is_unexpected(error):
                    self._limiter.record_answer(attempt.token, loop_time())
                    # Without a reason, the cancellation comes from outside (the task group): pass it on.
                    if not is_stopped:
                        raise
                    self._complete_stopped_attempt(attempt)
                    return
                # The exception counts like an answer, so that a grouping decides what follows for its call.
                emit(Event.INTERNAL_ERROR, where="attempt", error=repr(error))
                result = AttemptResult(completions.build_internal_outcome(error), started, loop_time())
            finally:
                self._in_flight.end_attempt(attempt)
        except Exception as error:
            self._fail_attempt(attempt, error)
        else:
            self._handle_result(attempt, result)

    def _handle_result(self, attempt: Attempt, result: AttemptResult) -> None:
        """Judge the result of an attempt, and complete its leases. An exception costs them a failed
        attempt."""
        memory, hooks = result.memory, self._context.hooks
        try:
            # Before any completion: the next claim must already see the free units.
            self._limiter.record_answer(attempt.token, result.ended_at, result.connect_s)
            outcome = result.outcome
            for part in hooks.explaining:
                if attempt.leases and attempt.leases[0].lease.token in part.leases:
                    outcome = part.explain(attempt, outcome, result.sent_at)
            judged = self._judge.judge_attempt(attempt, result, outcome)
            if attempt.call is None or hooks.grouping is None:
                if memory is not None:
                    self._in_flight.keep_answer_memory(attempt.leases, memory)
                    memory = None
                for entry in attempt.leases:
                    self._complete_lease(entry, attempt.request, result, judged)
                return
            follow_up = hooks.grouping.handle_answer(attempt, judged)
            if memory is not None:
                # The attempts that follow from the answer have copies of what they need.
                self._in_flight.keep_answer_memory([entry for entry, _ in follow_up.ended], memory)
                memory = None
            self._apply_follow_up(attempt, follow_up)
        except Exception as error:
            self._fail_attempt(attempt, error, memory)

    def _fail_attempt(self, attempt: Attempt, error: Exception, memory: AnswerMemory | None = None) -> None:
        """Count a failed attempt for each lease of an attempt that is still open. Raises no exception.

        `memory` is the memory of its answer, if it was given to no lease yet.
        """
        self._guard.fail_leases(attempt.leases, error, "attempt")
        if attempt.task is not None:  # it was started, and ends by itself
            return
        try:
            if memory is not None:
                self._in_flight.keep_answer_memory((), memory)
            # This has no effect if the answer is recorded already.
            self._limiter.record_answer(attempt.token, loop_time())
            self._stop_call(attempt)
        except Exception as second_error:
            waiting = [] if attempt.call is None else attempt.call.release_waiting()
            self._guard.fail_leases(waiting, second_error, "attempt")

    def _stop_call(self, attempt: Attempt) -> None:
        """Apply what follows from a call of a grouping whose answer is no longer awaited."""
        grouping = self._context.hooks.grouping
        if attempt.call is not None and grouping is not None:
            self._apply_follow_up(attempt, grouping.handle_stopped(attempt))

    def _complete_lease(
        self, entry: InFlightLease, request: Request, result: AttemptResult, judged: AttemptResult
    ) -> None:
        """Complete one lease. `result` is what the gateway answered, `judged` the same with the outcome that
        counts."""
        context, token = self._context, entry.lease.token
        rand = context.random.random()
        outcome = self._judge.judge_lease(entry, judged, rand)
        self._in_flight.record_answer(entry, result.ended_at)
        request = entry.request or request
        release = tokens = result_fields = None
        for part in context.hooks.concluding:
            if token in part.leases:
                concluded = part.conclude(entry, request, result, outcome)
                outcome, tokens = concluded.outcome, concluded.tokens
                release, result_fields = concluded.release, concluded.result_fields
                break  # the parts after it would not know what it has concluded
        for part in context.hooks.measuring:
            if token in part.leases and isinstance(outcome, Delivered) and outcome.status < 300:
                if tokens is None:
                    tokens = parse_token_usage(outcome.body)
                part.record_tokens(entry, *tokens)
        self._journal.record_attempt(entry, result, outcome, tokens)
        if release is not None:
            context.complete(release)
            return
        if result_fields is not None:  # the answer is the joined one from here on
            result = result.copy_with(outcome=outcome)
        completion = completions.build_completion(
            entry.lease,
            request,
            outcome,
            self._access.queue.unix_now(),
            context.options.retry,
            rand,
            result_fields,
        )
        for part in context.hooks.ending:
            if token in part.leases:
                completion = part.end(entry, completion, result)
        self._complete_with_progress(entry, completion)

    def _complete_with_progress(self, entry: InFlightLease, completion: Completion) -> None:
        """Complete a lease. If its request returns to the queue, new progress is stored with it."""
        if entry.has_new_progress and isinstance(completion, Release):
            completion = completion.copy_with(progress=entry.lease.progress)
        self._context.complete(completion)

    def _apply_follow_up(self, attempt: Attempt, follow_up: FollowUp) -> None:
        """Complete the leases that have an answer, and start the attempts that follow for the others. Where
        nothing may be sent any more, their leases are returned.

        An exception costs only the lease or the attempt that it concerns, because the others may belong to
        other attempts.
        """
        for entry, result in follow_up.ended:
            with self._guard.charge(entry, "answer"):
                self._complete_lease(entry, attempt.request, result, result)
        for entry in follow_up.returned:
            self._context.complete(completions.build_return(entry.lease))
        grouping = self._context.hooks.grouping
        for next_attempt in follow_up.attempts:
            try:
                is_closed = self._limiter.get_allowance(loop_time()).reason.is_closed
                if is_closed and grouping is not None:
                    self._apply_follow_up(next_attempt, grouping.handle_unsent(next_attempt))
                else:
                    self.start_attempt(next_attempt)
            except Exception as error:
                self._fail_attempt(next_attempt, error)

    def complete_unsent(self, entries: Iterable[InFlightLease]) -> None:
        """Complete leases that leave their batch group without being sent."""
        for entry in entries:
            self._in_flight.leave_batch_group((entry,))
            self._complete_detached(entry)

    def _complete_detached(self, entry: InFlightLease) -> None:
        """Complete a lease that has no attempt any more."""
        with self._guard.charge(entry, "stop"):
            self._complete_stopped(entry)

    def _complete_stopped_attempt(self, attempt: Attempt) -> None:
        for entry in attempt.leases:
            for part in self._context.hooks.stopping:
                if entry.lease.token in part.leases:
                    part.stop(entry, attempt.request)
            self._complete_stopped(entry)
        self._stop_call(attempt)

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
            try:
                self._complete_stopped_attempt(attempt)
            except Exception as error:
                self._fail_attempt(attempt, error)

    def _complete_stopped(self, entry: InFlightLease) -> None:
        """Complete a lease whose answer is no longer awaited. If the process is stopping, or a feature has
        stopped the call, the lease is returned."""
        if entry.stop_reason == "cancelled" and entry.request is not None:
            self._context.complete(completions.build_cancellation(entry.lease, entry.request))
        elif entry.stop_reason == "deadline" and entry.request is not None:
            self._context.complete(completions.build_deadline_error(entry.lease, entry.request))
        elif entry.stop_reason == "lost":
            self._context.remove_lost_lease(entry.lease.token)
        else:
            self._complete_with_progress(entry, completions.build_return(entry.lease))
