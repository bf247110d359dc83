"""Stage that plans slices: a long generation is sent in several calls, and its slot comes free in between.

    plan       Decide whether a request is sliced, by its body, the settings, and what is known of its model.
    prepare    Just before the call: check the model if that is due, and build the body of the slice.
    interpret  After the answer: the generation has ended, or its progress returns to the queue.

The queue stores the progress of a request, so that any dispatcher can send the next slice, whatever happened
to the one before. A request whose lease ends without an answer keeps the progress that it had.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.core.requests.request import SLICING_ATTRIBUTE, SLICING_OFF
from dispatcher.core.sequences.turns import Session
from dispatcher.core.slices.answers import Continues, Finished, SliceResult, interpret_answer
from dispatcher.core.slices.bodies import build_slice_body, compute_slice_tokens, replace_body
from dispatcher.core.slices.eligibility import Generation, WholeReason, check_generation
from dispatcher.core.slices.equality import Continuation
from dispatcher.core.slices.pieces import Usage
from dispatcher.core.slices.progress import Progress, Stage, decode_progress, encode_progress
from dispatcher.core.slices.revocation import RevocationPlanner
from dispatcher.core.slices.size import MEASURE_TOKENS, vary_tokens
from dispatcher.core.slices.stream import join_events
from dispatcher.core.slices.support import ModelKey, ModelSupport, SupportTable
from dispatcher.dispatch.queue_access import loop_time
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatcher.core.gateway.outcome import Outcome
    from dispatcher.core.limit.allowance import Allowance
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.claimed_request import ClaimedRequest
    from dispatcher.dispatch.in_flight import Attempt, InFlightTable
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.ports import AttemptResult, Gateway

MAX_ATTEMPTS_AT_SERVER = 2
"""Number of failed attempts after which the next slice may go to any server."""


@dataclass(slots=True, eq=False)
class _Slice:
    """A leased request that is sliced."""

    generation: Generation
    key: ModelKey
    support: ModelSupport
    progress: Progress | None
    """Progress of earlier slices. `None` before the first one."""
    is_checked: bool
    """False if the model must be checked before the first slice."""
    asked_tokens: int = 0
    """Number of tokens that the call asks for. 0 if it is not a slice."""
    received: list[bytes] | None = None
    """Parts of the streamed answer. `None` if it is not streamed."""


class Slicer:
    """Slices the requests of one process. `is_merged` returns True for a request that a rule merges."""

    def __init__(
        self,
        access: QueueAccess,
        gateway: Gateway,
        options: Options,
        is_merged: Callable[[Request], bool],
    ) -> None:
        self.support = SupportTable()
        self.whole_counts: Counter[WholeReason] = Counter()
        """Number of generations that were sent whole, by the reason."""
        self.answer_counts: dict[str, int] = dict.fromkeys(("continued", "finished", "restarted"), 0)
        """Number of answers to slices by what followed."""
        self.generated_tokens = 0
        """Number of tokens of all slices."""
        self.revoked_count = 0
        """Number of slices that were ended early."""
        self._revocations = RevocationPlanner()
        self._access = access
        self._gateway = gateway
        self._is_merged = is_merged
        self.slices: dict[str, _Slice] = {}
        """Sliced requests by the token of their lease. While it is empty, the methods for answers and leases
        need not be called, which saves time where no request is sliced."""
        self._slice_number = 0
        """Number of slices that were sent."""
        self.reconfigure(options)

    def reconfigure(self, options: Options) -> None:
        self._options = options.slicing
        self._default_path = options.default_path
        self._token_header = options.sequences.token_header.lower()
        self.support.judges_cost = options.slicing.judges_cost
        self.support.is_streamed = options.slicing.is_streamed

    @property
    def measures_size(self) -> bool:
        """True if the size of slices is chosen by measurements."""
        return self._options.is_on and self._options.measures_size

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, requests: list[ClaimedRequest]) -> None:
        """Plan how each request is sent."""
        for claimed in requests:
            stored = claimed.entry.lease.progress
            progress = decode_progress(stored) if stored else None
            # While slicing is off, generations that began before are completed.
            if self._options.is_on or progress is not None:
                self._plan_request(claimed, progress)

    def _plan_request(self, claimed: ClaimedRequest, progress: Progress | None) -> None:
        request = claimed.request
        path = request.endpoint or self._default_path
        if progress is None:
            reason = self._find_reason_before_parsing(request)
            generation = reason or check_generation(path, request.payload, self._options.terms)
        elif claimed.generation is not None and claimed.generation.path == path:
            generation = claimed.generation
        else:
            generation = check_generation(path, request.payload, self._options.terms, has_begun=True)
        if isinstance(generation, WholeReason):
            # A request that began in slices and may not be sliced any more starts again: nothing of it has
            # been returned to anyone.
            self.whole_counts[generation] += 1
            return
        if progress is not None and progress.version != request.version:
            progress = Progress(Stage.RESTART)  # another version would continue another model's text
        template_options = generation.fields.get("chat_template_kwargs")
        key = path, request.version or generation.model, bytes(template_options or b"")
        support = self.support.get_support(key)
        is_due = support.is_check_due(loop_time())
        # A model that was equal is checked again by one request, while the others are sliced.
        is_equal = support.reason is None and not is_due
        is_checked = self._options.skips_check or progress is not None or is_equal
        if not is_checked and not is_due:
            self.whole_counts[support.reason or WholeReason.UNCHECKED] += 1
            return
        if is_checked and progress is None and not _can_continue(generation, support):
            self.whole_counts[WholeReason.PROMPT] += 1
            return
        self.slices[claimed.entry.lease.token] = _Slice(generation, key, support, progress, is_checked)

    def _find_reason_before_parsing(self, request: Request) -> WholeReason | None:
        if request.metadata.get(SLICING_ATTRIBUTE) == SLICING_OFF:
            return WholeReason.DECLINED
        if self._is_merged(request):
            return WholeReason.MERGED
        counts = self._access.view.counts
        if counts is not None and counts.started >= self._options.max_started:
            return WholeReason.TOO_MANY_STARTED
        return None

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        self.slices.pop(token, None)

    # ── prepare ──────────────────────────────────────────────────────────────────────────────────────────

    async def prepare_request(
        self, attempt: Attempt, deadline: float, may_send: Callable[[], bool]
    ) -> Request | AttemptResult:
        """Return the request of the next slice. If the model has to be checked first and a call of the check
        has no answer, return that result instead."""
        planned, request = self.slices[attempt.token], attempt.request
        if not planned.is_checked:
            failed = await self._check_model(attempt, planned.key, deadline, may_send)
            if failed is not None:
                return failed
            reason = planned.support.reason
            if reason is None and not _can_continue(planned.generation, planned.support):
                reason = WholeReason.PROMPT
            if reason is not None:
                self.whole_counts[reason] += 1
                return self._send_whole(attempt)
        progress = planned.progress
        if progress is not None and progress.stage is Stage.RESTART:
            return self._send_whole(attempt)
        generation = planned.generation
        slice_tokens = self._choose_slice_tokens(planned) if self._options.is_on else generation.max_tokens
        planned.asked_tokens = compute_slice_tokens(generation, progress, slice_tokens)
        body = build_slice_body(
            generation,
            progress,
            planned.asked_tokens,
            wants_token_ids=self._uses_token_ids(planned),
            is_streamed=self._options.is_streamed,
        )
        planned.received = [] if self._options.is_streamed else None
        failed_attempts = attempt.leases[0].lease.failed_attempts
        session = self._build_session(request, progress, failed_attempts)
        return replace_body(request, body, session, planned.received)

    def _choose_slice_tokens(self, planned: _Slice) -> int:
        size = self._options.terms.slice_tokens
        if self._options.measures_size:
            size = planned.support.size.choose_tokens(is_continued=planned.progress is not None)
            if size == MEASURE_TOKENS:
                return size
        if planned.generation.seed is not None:  # the answer depends on where slices end
            return size
        self._slice_number += 1
        return vary_tokens(size, self._slice_number, self._options.spread)

    def _uses_token_ids(self, planned: _Slice) -> bool:
        # Progress says it for itself: another process may have checked the model.
        if planned.progress is not None:
            return bool(planned.progress.token_ids)
        return planned.support.continuation is Continuation.TOKEN_IDS

    def _send_whole(self, attempt: Attempt) -> Request:
        del self.slices[attempt.token]
        return attempt.request

    def _build_session(
        self, request: Request, progress: Progress | None, failed_attempts: int
    ) -> Session | None:
        """Return the headers that send the slice to the server that has the beginning in its prefix cache."""
        if not self._token_header:
            return request.session
        session = request.session
        # After failures, the server may be the cause.
        if progress is None or not progress.session_token or failed_attempts >= MAX_ATTEMPTS_AT_SERVER:
            return session or Session({}, self._token_header)
        header = {self._token_header: progress.session_token}
        if session is None:
            return Session(header, self._token_header)
        return session.copy_with(headers={**session.headers, **header})

    async def _check_model(
        self, attempt: Attempt, key: ModelKey, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult | None:
        """Check whether slices are equal on the model. Return the result of a call that has no final answer,
        `None` if the check has ended.

        The calls run one after the other on the slot of the attempt, which counts in the limit already.
        """
        check = self.support.begin_check(key, loop_time())
        if check is None:  # another request checks the model now
            return None
        ended, number = None, 0
        try:
            while (body := check.next_body) is not None:
                number += 1
                result = await self._gateway.forward(
                    replace_body(attempt.request, body, attempt.request.session),
                    token=f"{attempt.token}/check-{number}",
                    deadline=deadline,
                    may_send=may_send,
                )
                if result.memory is not None:
                    result.memory.free_share()
                if not isinstance(result.outcome, Delivered):
                    return result
                check.record_answer(result.outcome.status, result.outcome.body)
            ended = check
        finally:
            if self.support.end_check(key, ended, loop_time()):
                self._log_support(key)
        return None

    def _log_support(self, key: ModelKey) -> None:
        support = self.support.get_support(key)
        emit(
            Event.SLICING,
            path=key[0],
            model=key[1],
            continued_by=str(support.continuation or ""),
            reason=str(support.reason or ""),
            why=support.why,
        )

    # ── revoke ───────────────────────────────────────────────────────────────────────────────────────────

    def revoke_slices(self, allowance: Allowance, in_flight: InFlightTable, other_owners_units: int) -> None:
        """End the youngest slices if a reading shows that realtime requests need their slots."""
        all_units = in_flight.units + other_owners_units
        running = [
            entry
            for entry in in_flight.list_at_gateway()
            if entry.stop_reason is None
            and (planned := self.slices.get(entry.lease.token)) is not None
            and planned.asked_tokens
        ]
        units = self._revocations.plan_revocations(
            allowance, loop_time(), sum(entry.lease.units for entry in running), all_units
        )
        for entry in sorted(running, key=lambda entry: -entry.claimed_at):
            if units <= 0:
                break
            units -= entry.lease.units
            self.revoked_count += 1
            in_flight.stop_waiting(entry, "revoked")

    # ── interpret ────────────────────────────────────────────────────────────────────────────────────────

    def interpret_outcome(
        self, token: str, request: Request, result: AttemptResult, outcome: Outcome
    ) -> Continues | Finished | None:
        """Return what the answer to a slice leads to. `None` if the outcome is that of the request.

        `token` is that of the lease, and `outcome` the one of `result` as it was judged.
        """
        planned = self.slices.get(token)
        if planned is None or not planned.asked_tokens or not isinstance(outcome, Delivered):
            return None
        body, is_complete = outcome.body, True
        joined = join_events(body) if planned.received is not None else None
        if joined is not None:
            body, is_complete = joined
        interpreted = self._interpret(
            planned, outcome.status, body, request.version, result.sticky_token, is_cut=not is_complete
        )
        if not isinstance(interpreted, Continues | Finished):
            # The request did not ask for a stream.
            return Finished(body, 1, 0, None) if joined is not None else None
        usage = interpreted.usage
        if usage is not None:
            self.generated_tokens += usage.completion_tokens
            if planned.progress is not None:
                self._record_cost(planned.key, usage, result.ended_at - result.sent_at)
        if isinstance(interpreted, Finished):
            self.answer_counts["finished"] += 1
        elif interpreted.progress.stage is Stage.RESTART:
            self.answer_counts["restarted"] += 1
        else:
            self.answer_counts["continued"] += 1
        if isinstance(interpreted, Continues) and interpreted.reason is not None:
            self.whole_counts[interpreted.reason] += 1
            if interpreted.reason is WholeReason.REASONING:
                self.support.record_reason(planned.key, interpreted.reason, interpreted.why, loop_time())
                self._log_support(planned.key)
        return interpreted

    def find_partial_progress(self, token: str, request: Request, sticky_token: str = "") -> bytes | None:
        """Return the progress that includes what a slice has generated whose answer broke off. `None` if
        there is nothing new."""
        planned = self.slices.get(token)
        if planned is None or not planned.received or not planned.asked_tokens:
            return None
        joined = join_events(b"".join(planned.received))
        if joined is None:
            return None
        interpreted = self._interpret(planned, 200, joined[0], request.version, sticky_token, is_cut=True)
        # What cannot be continued is generated again. So is a first slice of which the prompt's number of
        # tokens is not known, because the tokens of later slices could not be counted.
        if (
            not isinstance(interpreted, Continues)
            or interpreted.progress.stage is Stage.RESTART
            or not interpreted.progress.prompt_tokens
        ):
            return None
        if interpreted.usage is not None:
            self.generated_tokens += interpreted.usage.completion_tokens
        return encode_progress(interpreted.progress)

    def _interpret(
        self, planned: _Slice, status: int, body: bytes, version: str, session_token: str, *, is_cut: bool
    ) -> SliceResult:
        return interpret_answer(
            planned.generation,
            planned.progress,
            status,
            body,
            asked_tokens=planned.asked_tokens,
            max_kept_bytes=self._options.max_kept_bytes,
            version=version,
            session_token=session_token,
            repeats_text=planned.support.continuation is Continuation.REPEATED_TEXT,
            is_cut=is_cut,
        )

    def _record_cost(self, key: ModelKey, usage: Usage, duration_s: float) -> None:
        """Record what a continued slice has cost."""
        at, is_wasteful = loop_time(), False
        if usage.cached_tokens is not None:
            is_wasteful = self.support.record_cached(key, usage.cached_tokens, usage.prompt_tokens, at)
        if self._options.measures_size and not is_wasteful:
            is_wasteful = self.support.record_duration(key, usage.completion_tokens, duration_s, at)
        if is_wasteful:
            self._log_support(key)


def _can_continue(generation: Generation, support: ModelSupport) -> bool:
    """Return True if the prompt can be continued: one of token ids only by token ids."""
    return isinstance(generation.prompt, str) or support.continuation is Continuation.TOKEN_IDS
