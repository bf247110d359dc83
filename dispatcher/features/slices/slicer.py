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

from dispatcher.features.slices.answers import Continues, Finished, SliceResult, interpret_answer
from dispatcher.features.slices.bodies import (
    build_length_check,
    build_slice_body,
    can_be_continued,
    compute_slice_tokens,
    replace_body,
)
from dispatcher.features.slices.counts import SliceCounts
from dispatcher.features.slices.eligibility import Generation, WholeReason, check_generation
from dispatcher.features.slices.equality import CHECK_ID, Continuation
from dispatcher.features.slices.options import SliceOptions
from dispatcher.features.slices.pieces import Usage
from dispatcher.features.slices.progress import (
    Progress,
    Stage,
    decode_progress,
    encode_progress,
    has_advanced,
)
from dispatcher.features.slices.revocation import RevocationPlanner
from dispatcher.features.slices.size import MEASURE_TOKENS, vary_tokens
from dispatcher.features.slices.stream import join_events
from dispatcher.features.slices.support import ModelKey, ModelSupport, SupportTable
from dispatcher.kernel.hooks import Conclusion, LeasePart
from dispatcher.kernel.queue_access import loop_time
from dispatcher.queue.contract import Release
from dispatcher.requests.affinity import Affinity, AffinityOptions
from dispatcher.requests.outcomes.outcome import Delivered, Failed, FailureKind, UncountedError
from dispatcher.requests.request import Request
from dispatcher.requests.usage import parse_token_usage
from dispatcher.telemetry.events import Event, emit
from dispatcher.wire_format import ONE_CALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatcher.gateway.contract import AttemptResult
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.in_flight import Attempt, InFlightLease
    from dispatcher.limit.allowance import Allowance
    from dispatcher.requests.outcomes.outcome import Outcome

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

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompt and answer together. The prompt counts as 0 until it is known."""
        prompt_tokens = 0 if self.progress is None else self.progress.prompt_tokens
        return prompt_tokens + self.generation.max_tokens


class Slicer(LeasePart):
    """Slices the requests of one process."""

    def __init__(self, context: KernelContext) -> None:
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
        self._context = context
        self._access = context.access
        self._gateway = context.gateway
        self.leases: dict[str, _Slice] = {}
        """Sliced requests by the token of their lease."""
        self._slice_number = 0
        """Number of slices that were sent."""
        self.reconfigure()

    def reconfigure(self) -> None:
        options = self._context.options
        self._options = options.of(SliceOptions)
        self._default_path = options.default_path
        self._token_header = options.of(AffinityOptions).token_header.lower()
        self.support.judges_cost = self._options.judges_cost
        self.support.is_streamed = self._options.is_streamed

    @property
    def measures_size(self) -> bool:
        """True if the size of slices is chosen by measurements."""
        return self._options.is_on and self._options.measures_size

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────────────

    def look_up(self, requests: list[ClaimedRequest]) -> None:
        """Need nothing from the queue: progress comes with the lease."""

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Plan how each request is sent."""
        for claimed in requests:
            stored = claimed.entry.lease.progress
            progress = decode_progress(stored) if stored else None
            # While slicing is off, generations that began before are completed.
            if self._options.is_on or progress is not None:
                self._plan_request(claimed, progress)
        return requests

    def _plan_request(self, claimed: ClaimedRequest, progress: Progress | None) -> None:
        request = claimed.request
        path = request.endpoint or self._default_path
        if progress is None:
            reason = self._find_reason_before_parsing(request)
            generation = reason or check_generation(path, request.payload, self._options.terms)
        elif isinstance(claimed.remembered, Generation) and claimed.remembered.path == path:
            generation = claimed.remembered
        else:
            generation = check_generation(path, request.payload, self._options.terms, has_begun=True)
        if isinstance(generation, WholeReason):
            # A request that began in slices and may not be sliced any more starts again: nothing of it has
            # been returned to anyone.
            self.whole_counts[generation] += 1
            return
        if progress is not None and not can_be_continued(generation, progress):
            progress = Progress(Stage.RESTART)
        if progress is not None and progress.version != request.chosen_model:
            progress = Progress(Stage.RESTART)  # another version would continue another model's text
        key = path, request.chosen_model or generation.model, _get_template_options(generation)
        support = self.support.get_for_request(key)
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
        self.leases[claimed.entry.lease.token] = _Slice(generation, key, support, progress, is_checked)

    def find_call_tokens(self, token: str) -> tuple[int | None, int] | None:
        """Return the tokens of the prompt of the next slice, and of its answer. `None` if the request is sent
        whole."""
        planned = self.leases.get(token)
        if planned is None or not self._options.is_on:
            return None
        progress = planned.progress
        if progress is not None and progress.stage is Stage.RESTART:
            return None
        size = self._options.terms.slice_tokens
        if self._options.measures_size:
            size = planned.support.size.size
        tokens = compute_slice_tokens(planned.generation, progress, size)
        if progress is None or not progress.prompt_tokens:
            return None, tokens
        return progress.prompt_tokens + progress.tokens + progress.uncounted_tokens, tokens

    def _find_reason_before_parsing(self, request: Request) -> WholeReason | None:
        if request.metadata.items() >= ONE_CALL.items():
            return WholeReason.DECLINED
        if any(claims(request) for claims in self._context.hooks.claims_request):
            return WholeReason.MERGED
        counts = self._access.view.counts
        if counts is not None and counts.of(SliceCounts).started >= self._options.max_started:
            return WholeReason.TOO_MANY_STARTED
        return None

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        self.leases.pop(token, None)

    # ── prepare ──────────────────────────────────────────────────────────────────────────────────────────

    async def prepare(
        self, attempt: Attempt, request: Request, deadline: float, may_send: Callable[[], bool]
    ) -> Request | AttemptResult:
        """Return the request of the next slice. If the model has to be checked first and a call of the check
        has no answer, return that result instead."""
        planned = self.leases[attempt.token]
        if not planned.is_checked:
            failed = await self._check_model(attempt, planned.key, deadline, may_send)
            if failed is not None:
                return failed
            planned.support = self.support.find_support(planned.key)
            reason = planned.support.reason
            if reason is None and not _can_continue(planned.generation, planned.support):
                reason = WholeReason.PROMPT
            if reason is not None:
                self.whole_counts[reason] += 1
                return self._send_whole(attempt, request)
        progress = planned.progress
        if progress is not None and progress.stage is Stage.RESTART:
            return self._send_whole(attempt, request)
        if self._must_check_length(planned):
            result = await self._check_length(attempt, request, planned, deadline, may_send)
            if not isinstance(result.outcome, Delivered):
                return result
            if not 200 <= result.outcome.status < 300:
                self.whole_counts[WholeReason.BODY] += 1
                return self._send_whole(attempt, request)
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
        affinity = self._build_affinity(request, progress, failed_attempts)
        return replace_body(request, body, affinity, planned.received)

    def _choose_slice_tokens(self, planned: _Slice) -> int:
        size = self._options.terms.slice_tokens
        if self._options.measures_size:
            size = planned.support.size.choose_tokens(is_continued=planned.progress is not None)
            if size == MEASURE_TOKENS:
                return size
        self._slice_number += 1
        return vary_tokens(size, self._slice_number, self._options.spread)

    def _uses_token_ids(self, planned: _Slice) -> bool:
        # Progress says it for itself: another process may have checked the model.
        if planned.progress is not None:
            return bool(planned.progress.token_ids)
        return planned.support.continuation is Continuation.TOKEN_IDS

    def _send_whole(self, attempt: Attempt, request: Request) -> Request:
        del self.leases[attempt.token]
        return request

    def _build_affinity(
        self, request: Request, progress: Progress | None, failed_attempts: int
    ) -> Affinity | None:
        """Return the headers that send the slice to the server that has the beginning in its prefix cache."""
        if not self._token_header:
            return request.affinity
        affinity = request.affinity
        # After failures, the server may be the cause.
        if progress is None or not progress.session_token or failed_attempts >= MAX_ATTEMPTS_AT_SERVER:
            return affinity or Affinity({}, self._token_header)
        header = {self._token_header: progress.session_token}
        if affinity is None:
            return Affinity(header, self._token_header)
        return affinity.copy_with(headers={**affinity.headers, **header})

    async def _check_model(
        self, attempt: Attempt, key: ModelKey, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult | None:
        """Check whether slices are equal on the model. Return the result of a call that has no final answer,
        `None` if the check has ended.

        The calls run one after the other on the slot of the attempt, which counts in the limit already.
        """
        check = self.support.begin_check(key, loop_time())
        if check is None:  # another request checks the model now, or the table has no place for it
            return None
        # The check decides about the requests of all producers. Therefore it has none of the headers and
        # metadata of this request.
        request = Request(
            id=CHECK_ID,
            deadline=attempt.request.deadline,
            payload=b"",
            endpoint=attempt.request.endpoint,
            chosen_model=attempt.request.chosen_model,
            endpoints=attempt.request.endpoints,
        )
        number = 0
        try:
            while (body := check.next_body) is not None:
                number += 1
                result = await self._gateway.forward(
                    replace_body(request, body, None),
                    token=f"{attempt.token}/check-{number}",
                    deadline=deadline,
                    may_send=may_send,
                )
                if result.memory is not None:
                    result.memory.free_share()
                if not isinstance(result.outcome, Delivered):
                    return result
                check.record_answer(result.outcome.status, result.outcome.body)
        finally:
            if self.support.end_check(key, check, loop_time()):
                self._log_support(key)
        return None

    def _must_check_length(self, planned: _Slice) -> bool:
        """Return True if the request is longer than those that its servers are known to accept."""
        # A call for all tokens that are left needs no check: its own answer shows whether it is accepted.
        asks_for_all = planned.progress is not None and planned.progress.stage is Stage.REST
        if asks_for_all or not self._options.is_on or self._options.skips_check:
            return False
        return planned.total_tokens > planned.support.accepted_tokens

    async def _check_length(
        self,
        attempt: Attempt,
        request: Request,
        planned: _Slice,
        deadline: float,
        may_send: Callable[[], bool],
    ) -> AttemptResult:
        """Ask the server whether it accepts a request of this length, and return the result of the call.

        Slices ask for few tokens. Without this call, a server that cannot generate `max_tokens` would reject
        the request only after most of the text was generated.
        """
        body = build_length_check(planned.generation)
        result = await self._gateway.forward(
            replace_body(request, body, request.affinity),
            token=f"{attempt.token}/length",
            deadline=deadline,
            may_send=may_send,
        )
        if result.memory is not None:
            result.memory.free_share()
        if isinstance(result.outcome, Delivered) and 200 <= result.outcome.status < 300:
            # The answer has the number of tokens of the prompt, which is not known before the first slice.
            total_tokens = parse_token_usage(result.outcome.body)[0] + planned.generation.max_tokens
            support = planned.support
            support.accepted_tokens = max(support.accepted_tokens, planned.total_tokens, total_tokens)
        return result

    def _log_support(self, key: ModelKey) -> None:
        support = self.support.find_support(key)
        emit(
            Event.SLICING,
            path=key[0],
            model=key[1],
            continued_by=str(support.continuation or ""),
            reason=str(support.reason or ""),
            why=support.why,
        )

    # ── revoke ───────────────────────────────────────────────────────────────────────────────────────────

    def revoke_slices(self, allowance: Allowance) -> None:
        """End the youngest slices if a reading shows that realtime requests need their slots, those without a
        token last: their prompts would have to be processed again for nothing."""
        if not self._options.revokes or not self.leases:
            return
        in_flight = self._context.in_flight
        all_units = in_flight.units + self._context.limiter.other_owners_units
        running = [
            entry
            for entry in in_flight.list_at_gateway()
            if entry.stop_reason is None
            and (planned := self.leases.get(entry.lease.token)) is not None
            and planned.asked_tokens
        ]
        units = self._revocations.plan_revocations(
            allowance,
            loop_time(),
            sum(entry.lease.units for entry in running),
            all_units,
            self._context.limiter.reading_interval_s,
        )
        if units <= 0:  # the usual case, in each round of the loop
            return
        running.sort(key=lambda entry: (not self.leases[entry.lease.token].received, -entry.claimed_at))
        for entry in running:
            if units <= 0:
                break
            units -= entry.lease.units
            self.revoked_count += 1
            in_flight.stop_waiting(entry, "revoked")

    # ── interpret ────────────────────────────────────────────────────────────────────────────────────────

    def conclude(
        self, entry: InFlightLease, request: Request, result: AttemptResult, outcome: Outcome
    ) -> Conclusion:
        """Return what the answer to a slice means: the generation goes on, has ended, or the slice has
        failed."""
        interpreted = self.interpret_outcome(entry.lease.token, request, result, outcome)
        if isinstance(interpreted, Failed):
            return Conclusion(interpreted)
        if interpreted is None:
            if isinstance(outcome, Delivered):
                return Conclusion(outcome)
            is_kept = self._keep_partial_progress(entry, request, result.sticky_token)
            if is_kept and isinstance(outcome, Failed):
                # The request has advanced, so this is no failed attempt.
                rest_s = self._context.random.random() * self._context.options.retry.base_s
                outcome = UncountedError(outcome.why, outcome.kind, rest_s)
            return Conclusion(outcome)
        tokens = _count_tokens(interpreted)
        if isinstance(interpreted, Continues):
            if request.affinity is None and not request.chosen_model:  # it is as it was parsed
                generation = self.leases[entry.lease.token].generation
                self._context.parsed_requests.store_request(entry.lease, request, generation)
            release = Release(
                entry.lease, progress=encode_progress(interpreted.progress), last_attempt=interpreted.why
            )
            return Conclusion(outcome, tokens, release)
        if isinstance(outcome, Delivered):
            outcome = Delivered(outcome.status, interpreted.body)
        fields: dict[str, object] = {}
        if interpreted.slices > 1:
            fields = {"slices": interpreted.slices, "cached_tokens": interpreted.cached_tokens}
        return Conclusion(outcome, tokens, result_fields=fields)

    def stop(self, entry: InFlightLease, request: Request) -> None:
        """Keep what a slice has generated whose answer is no longer awaited."""
        self._keep_partial_progress(entry, request)

    def _keep_partial_progress(self, entry: InFlightLease, request: Request, sticky_token: str = "") -> bool:
        """Keep what a slice has generated whose answer broke off. Return False if there is nothing to
        keep."""
        progress = self.find_partial_progress(entry.lease.token, request, sticky_token)
        if progress is not None:
            self._context.in_flight.set_progress(entry, progress)
        return progress is not None

    def interpret_outcome(
        self, token: str, request: Request, result: AttemptResult, outcome: Outcome
    ) -> Continues | Finished | Failed | None:
        """Return what follows from the answer to a slice. `None` if the outcome is that of the request, and
        `Failed` if the stream of the answer ended early and nothing of it can be kept.

        `token` is that of the lease, and `outcome` the one of `result` as it was judged.
        """
        planned = self.leases.get(token)
        if planned is None or not planned.asked_tokens or not isinstance(outcome, Delivered):
            return None
        body, is_complete = outcome.body, True
        joined = join_events(body) if planned.received is not None else None
        if joined is not None:
            body, is_complete = joined
        interpreted = self._interpret(
            planned, outcome.status, body, request.chosen_model, result.sticky_token, is_cut=not is_complete
        )
        if not isinstance(interpreted, Continues | Finished):
            # The request did not ask for a stream.
            return Finished(body, 1, 0, None) if joined is not None else None
        if (
            not is_complete
            and isinstance(interpreted, Continues)
            and interpreted.progress.stage is not Stage.RESTART
            and not _can_keep(planned, interpreted)
        ):
            return Failed("the answer to a slice ended early", kind=FailureKind.BROKEN_OFF)
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
            if interpreted.reason in (WholeReason.REASONING, WholeReason.UNEQUAL):
                self.support.record_doubt(planned.key)
        return interpreted

    def find_partial_progress(self, token: str, request: Request, sticky_token: str = "") -> bytes | None:
        """Return the progress that includes what a slice has generated whose answer broke off. `None` if
        there is nothing new."""
        planned = self.leases.get(token)
        if planned is None or not planned.received or not planned.asked_tokens:
            return None
        joined = join_events(b"".join(planned.received))
        if joined is None:
            return None
        interpreted = self._interpret(
            planned, 200, joined[0], request.chosen_model, sticky_token, is_cut=True
        )
        if not isinstance(interpreted, Continues) or not _can_keep(planned, interpreted):
            return None  # it is generated again
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


def _count_tokens(interpreted: Continues | Finished) -> tuple[int, int, int] | None:
    """Return what `record_tokens` is told of a slice. `None` if the answer has to be searched for them."""
    if interpreted.usage is not None:
        return interpreted.usage.prompt_tokens, interpreted.usage.completion_tokens, 0
    return parse_token_usage(interpreted.body) if isinstance(interpreted, Finished) else None


def _get_template_options(generation: Generation) -> bytes:
    """Return the `chat_template_kwargs` of a request. Empty if there are none."""
    options = bytes(generation.fields.get("chat_template_kwargs", b""))
    return b"" if options in (b"null", b"{}") else options


def _can_continue(generation: Generation, support: ModelSupport) -> bool:
    """Return True if the prompt can be continued: one of token ids only by token ids."""
    return isinstance(generation.prompt, str) or support.continuation is Continuation.TOKEN_IDS


def _can_keep(planned: _Slice, interpreted: Continues) -> bool:
    """Return True if the generation can be continued from an answer that broke off."""
    progress = interpreted.progress
    if progress.stage is Stage.RESTART or not has_advanced(progress, planned.progress):
        return False
    # Without the number of tokens of the prompt, the tokens of later slices could not be counted.
    return progress.prompt_tokens > 0
