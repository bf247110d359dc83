"""Merges requests into one call: groups them, creates the calls, and gives each request its part of the
answer.

    register    A request whose path has a rule becomes a `BatchMember`. If its body does not have the shape
                of the rule, it is sent as usual.
    group       Members with one key wait in a group until the grouping rule (grouping.py) sends the first
                ones.
    answer      The answer is split. If that fails, or the call was rejected, further attempts follow:

        2xx                      Each member gets its part. For the first calls, and for some later ones,
                                 items are also sent alone, and the answers compared before any is used.
        2xx that does not split  Each is sent alone; nothing of this model is merged any more.
        413, "batch too large"   Smaller calls, from now on too.
        other 4xx, too large     Two halves, down to the request that is the cause.
        5xx, no answer           Counts as a failed attempt for each. A request that failed once is sent
                                 alone, and none ends with an error before it was sent alone.
        429, no gateway          The same outcome for each.

    pieces      A list longer than the server accepts is sent in several calls, and answered once.

Nothing here waits or sends: times come in, attempts and completions go out. All members are leased by this
process already, and count in the limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dispatcher.features.merging import shapes
from dispatcher.features.merging.groups import BatchGroups
from dispatcher.features.merging.merged_calls import (
    AnswersByToken,
    BatchMember,
    LeaseResults,
    MergedCall,
    MergeTarget,
    MergeTargets,
    ParityCheck,
    PartialAnswers,
    SplitList,
    join_answers,
    split_by_limits,
    split_long_list,
)
from dispatcher.features.merging.merged_request import (
    build_piece,
    check_sequence_fields,
    join_copies,
    merge_requests,
)
from dispatcher.features.merging.options import MergeOptions
from dispatcher.kernel import completions
from dispatcher.kernel.hooks import FollowUp, LeasePart
from dispatcher.kernel.in_flight import Attempt, InFlightLease
from dispatcher.requests.affinity import AffinityOptions
from dispatcher.requests.outcomes.outcome import Delivered, Failed, FailureKind, TooLarge
from dispatcher.telemetry.events import Event, emit
from dispatcher.wire_format import ErrorCode

if TYPE_CHECKING:
    from dispatcher.features.merging.rules import BatchRule
    from dispatcher.features.merging.shapes import Part
    from dispatcher.gateway.contract import AttemptResult
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.context import KernelContext
    from dispatcher.requests.request import Request

MAX_SENT_ALONE = 8192
"""Maximum number of requests that are remembered as to be sent alone."""


class RequestMerger(LeasePart):
    """Merges the requests of one process."""

    def __init__(self, context: KernelContext) -> None:
        self.groups = BatchGroups()
        self.targets = MergeTargets(context.options.of(MergeOptions).rules)
        self.call_counts: dict[str, int] = dict.fromkeys(("split", "halved", "unsplittable", "failed"), 0)
        """Number of merged calls by result."""
        self.merged_request_count = 0
        """Number of requests that were answered by merged calls."""
        self.check_counts: dict[str, int] = dict.fromkeys(("same", "differs", "inconclusive"), 0)
        """Number of single calls for parity checks, by result."""
        self._context = context
        self._rules = context.options.of(MergeOptions).rules
        self.leases: dict[str, BatchMember] = {}
        """Members by the token of their lease."""
        self._sent_alone: OrderedDict[int, None] = OrderedDict()
        self._partial_answers = PartialAnswers()
        self._attempt_number = 0

    def reconfigure(self) -> None:
        """Use new options. New rules start with nothing learned; waiting and running calls end by the old
        rules."""
        before, self._rules = self._rules, self._context.options.of(MergeOptions).rules
        if before != self._rules:
            self.targets = MergeTargets(self._rules)

    # ── groups ───────────────────────────────────────────────────────────────────────────────────────────

    def has_rule_for(self, request: Request) -> bool:
        """Return True if a rule applies to the path of the request."""
        return self.targets.find_rule(request.endpoint or self._context.options.default_path) is not None

    def join_copies(self, path: str, body: bytes, max_bytes: int) -> Iterable[tuple[bytes, int]]:
        """Return the calls of `merged_request.join_copies` by the rule for the path. None without a rule."""
        rule = self.targets.find_rule(path)
        return () if rule is None else join_copies(rule, body, max_bytes)

    def register_request(self, entry: InFlightLease, request: Request) -> str:
        """Register a request that may be merged, or a list that may be too long. Return why the request may
        not be sent. Empty if it may.

        A call may have requests of several sequences. It never has two of one, because the queue grants the
        next turn only when the one before has ended.
        """
        path = request.endpoint or self._context.options.default_path
        rule = self.targets.find_rule(path)
        if rule is None or (request.extra is not None and not _can_merge_sequence(rule, request)):
            return ""
        part = shapes.parse_part(rule.shape, request.payload)
        if isinstance(part, shapes.Unfit):
            # A body that names a sequence is never merged. It could use the state of another producer's
            # sequence at the server.
            return (
                check_sequence_fields(rule.shape, request.payload)
                if self._writes_sequence_fields(rule)
                else ""
            )
        target = self.targets.get_target(path, part.model, rule)
        headers = tuple(sorted(request.headers.items())) if request.headers else ()
        fairness_id = request.metadata.get(self._context.options.fairness_attribute, "")
        lease = entry.lease
        self.leases[lease.token] = BatchMember(
            entry,
            request,
            part,
            target,
            # Everything that must be equal in one call is part of the key.
            (
                path,
                part.merge_key,
                headers,
                fairness_id,
                request.chosen_model,
                request.endpoints,
                # A call goes to one server. Sequences without a server get a call of their own, so that the
                # endpoint picker can balance them.
                None if request.affinity is None else request.affinity.sticky_token,
            ),
            is_sent_alone=entry.is_probe
            or lease.lane is not None
            or lease.failed_attempts > 0
            or lease.entry_id in self._sent_alone,
        )
        return ""

    def _writes_sequence_fields(self, rule: BatchRule) -> bool:
        """Return True if the dispatcher writes the ids of sequences into bodies. If servers are chosen by the
        header with the id, the producers write them."""
        headers = self._context.options.of(AffinityOptions)
        is_by_token = headers.token_header != "" or not headers.id_header
        return rule.merge_sequences and rule.shape.sequence_field != "" and is_by_token

    def look_up(self, requests: list[ClaimedRequest]) -> None:
        """Need nothing from the queue."""

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Register the requests that may be merged. Return those that may be sent; the others are
        completed."""
        if not self._rules:
            return requests
        return [claimed for claimed in requests if self._may_be_sent(claimed)]

    def _may_be_sent(self, claimed: ClaimedRequest) -> bool:
        entry, request = claimed.entry, claimed.request
        why = self.register_request(entry, request)
        if why:
            self._context.complete(
                completions.build_error(entry.lease, request, ErrorCode.INVALID_REQUEST, why)
            )
        return not why

    def weigh(self, token: str) -> float:
        """Return the units of a request. Less than 1 is its share of a merged call."""
        return self.leases[token].units

    def get_entries(self, members: Sequence[BatchMember]) -> list[InFlightLease]:
        return [member.entry for member in members]

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        member = self.leases.pop(token, None)
        # An exception may have kept a call from its end. It would count in its target for ever.
        for call in () if member is None else list(member.calls):
            if not any(each.token in self.leases for each in call.members):
                call.remove_from_target()

    def add_to_group(self, entry: InFlightLease, now: float, left_s: float) -> None:
        """Add a registered request to its batch group. `left_s` is the time to its deadline."""
        self.groups.add_member(self.leases[entry.lease.token], now, left_s)

    def prepare_first_attempt(self, members: Sequence[BatchMember], max_items: int) -> Attempt:
        """Return the attempt for members whose call is ready."""
        attempt = self._prepare_attempt(list(members), max_items, is_follow_up=False)
        get_call(attempt).count_in_target()
        return attempt

    def counts_one_unit(self, attempt: Attempt) -> bool:
        """Return True if the attempt counts one unit for any number of members."""
        return get_call(attempt).members[0].target.rule.unit_per_call

    # ── creating attempts ────────────────────────────────────────────────────────────────────────────────

    def _prepare_attempt(
        self, members: list[BatchMember], max_items: int, *, is_follow_up: bool = True
    ) -> Attempt:
        if len(members) > 1:
            return self._create_attempt(
                MergedCall(members, max_items, is_follow_up),
                merge_requests([member.request for member in members], [member.part for member in members]),
            )
        split_list = self._get_split_list(members[0])
        if split_list is not None:
            return self._create_piece_attempt(
                MergedCall(members, max_items, is_follow_up, split_list=split_list)
            )
        request = members[0].request
        if request.affinity is not None:
            request = merge_requests([request], [members[0].part])
        return self._create_attempt(MergedCall(members, max_items, is_follow_up), request)

    def _create_attempt(self, call: MergedCall, request: Request) -> Attempt:
        token = call.members[0].token
        if call.is_follow_up:  # the token of the lease was used by the first attempt
            self._attempt_number += 1
            token = f"{token}.{self._attempt_number}"
        return Attempt(
            token,
            request,
            [member.entry for member in call.members],
            call=call,
            is_follow_up=call.is_follow_up,
        )

    def _retry_alone(self, members: Iterable[BatchMember], max_items: int) -> list[Attempt]:
        members = list(members)
        for member in members:
            self._remember_alone(member)
        return [self._prepare_attempt([member], max_items) for member in members]

    def _retry_in_halves(self, members: list[BatchMember], max_items: int) -> list[Attempt]:
        for member in members:
            self._remember_alone(member)  # it may return to the queue before the cause is known
        middle = (len(members) + 1) // 2
        return [self._prepare_attempt(half, max_items) for half in (members[:middle], members[middle:])]

    def _remember_alone(self, member: BatchMember) -> None:
        self._sent_alone[member.entry.lease.entry_id] = None
        if len(self._sent_alone) > MAX_SENT_ALONE:
            self._sent_alone.popitem(last=False)

    # ── lists that are too long ──────────────────────────────────────────────────────────────────────────

    def _get_split_list(self, member: BatchMember) -> SplitList | None:
        """Return the split list of a member. `None` if its list is not too long, or must not be cut because
        the server keeps the state of its sequence."""
        if member.request.extra is not None:
            return None
        return self._partial_answers.take_answers(member) or split_long_list(member)

    def _create_piece_attempt(self, call: MergedCall) -> Attempt:
        split_list, (member,) = call.split_list, call.members
        assert split_list is not None  # noqa: S101 -- the call is a piece
        part = split_list.parts[len(split_list.answers)]
        return self._create_attempt(call, build_piece(member.request, part))

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────

    def handle_answer(self, attempt: Attempt, result: AttemptResult) -> FollowUp:
        """Return how each lease of an attempt ends, and the attempts that follow."""
        call = get_call(attempt)
        return self._end_call(call, self._handle_call_answer(call, attempt, result))

    def handle_stopped(self, attempt: Attempt) -> FollowUp:
        """Handle an attempt whose answer is no longer awaited. A parity check may still need it."""
        if attempt.call is None:
            return FollowUp()
        call = get_call(attempt)
        if call.parity_check is None:
            return self._end_call(call, FollowUp())
        # This member is completed elsewhere; the others still wait for the end of this check.
        call.parity_check.members = [
            member for member in call.parity_check.members if member is not call.members[0]
        ]
        return self._end_call(call, self._finish_check(call, call.parity_check, "inconclusive"))

    def handle_unsent(self, attempt: Attempt) -> FollowUp:
        """Handle a follow-up that could not start because the gate has closed."""
        call = get_call(attempt)
        if call.parity_check is not None:
            return self._end_call(call, self._finish_check(call, call.parity_check, "inconclusive"))
        if call.split_list is not None:
            # The answers so far are kept, so that the next attempt continues with the next piece.
            self._partial_answers.store_answers(call.members[0], call.split_list)
        return self._end_call(call, FollowUp(returned=list(attempt.leases)))

    def _end_call(self, call: MergedCall, follow_up: FollowUp) -> FollowUp:
        """Count the calls that follow in place of the ended one, and return what follows. If a call counts
        one unit, follow-ups start one after the other, because they have only that one."""
        for attempt in follow_up.attempts:
            get_call(attempt).count_in_target()
        call.remove_from_target()
        if not call.members[0].target.rule.unit_per_call:
            return follow_up
        attempts = follow_up.attempts + call.next_attempts
        if attempts:
            get_call(attempts[0]).next_attempts = attempts[1:]
        return FollowUp(follow_up.ended, attempts[:1], follow_up.returned)

    def _handle_call_answer(self, call: MergedCall, attempt: Attempt, result: AttemptResult) -> FollowUp:
        # Members whose lease left the attempt were completed then, and get no part of the answer.
        tokens = {entry.lease.token for entry in attempt.leases}
        members = [member for member in call.members if member.token in tokens]
        if call.parity_check is not None:
            return self._compare_answers(call, call.parity_check, members, result)
        if call.split_list is not None:
            return self._handle_piece_answer(call, call.split_list, result)
        if len(call.members) == 1:
            return self._handle_single_answer(call, result)
        return self._handle_merged_answer(call, members, result)

    def _handle_merged_answer(
        self, call: MergedCall, members: list[BatchMember], result: AttemptResult
    ) -> FollowUp:
        outcome, target = result.outcome, call.members[0].target
        match outcome:
            case Delivered(status, body) if status < 300:
                parts = shapes.split_answer([member.part for member in call.members], body)
                if isinstance(parts, shapes.Unfit):
                    self.call_counts["unsplittable"] += 1
                    many = f"{len(call.members)} requests"
                    why = f"the answer to {many} could not be split: {parts.why}"
                    self._disable_merging(target, why)
                    if members and members[0].request.extra is not None:
                        # The server has taken these turns, so each sequence decides by its own rule.
                        failure = Failed(why, kind=FailureKind.UNUSABLE_ANSWER)
                        return self._handle_failure(members, result.copy_with(outcome=failure))
                    return FollowUp(attempts=self._retry_alone(members, 1))
                self.call_counts["split"] += 1
                call.record_call_time(result.ended_at)
                answers = {
                    member.token: result.copy_with(outcome=Delivered(status, part))
                    for member, part in zip(call.members, parts, strict=True)
                }
                return self._start_parity_check(target, members, answers)
            case Delivered() | TooLarge():
                self.call_counts["halved"] += 1
                if self._learn_size_limit([member.part for member in call.members], target, result):
                    return FollowUp(
                        attempts=[
                            self._prepare_attempt(batch, call.max_items)
                            for batch in split_by_limits(target, members)
                        ]
                    )
                if len(members) > 1:
                    return FollowUp(attempts=self._retry_in_halves(members, call.max_items))
                return FollowUp(attempts=self._retry_alone(members, call.max_items))
            case Failed():
                self.call_counts["failed"] += 1
                return self._handle_failure(members, result)
            case _:
                return FollowUp([(member.entry, result) for member in members])

    def _handle_failure(self, members: list[BatchMember], result: AttemptResult) -> FollowUp:
        """Count a failed attempt for each member, except for members that this would end: they are first sent
        alone."""
        last = self._context.options.retry.max_attempts
        ended: LeaseResults = []
        alone = []
        for member in members:
            if member.entry.lease.failed_attempts + 1 >= last:
                alone.append(member)
            else:
                self._remember_alone(member)
                ended.append((member.entry, result))
        return FollowUp(ended, self._retry_alone(alone, 1))

    def _learn_size_limit(self, parts: list[Part], target: MergeTarget, result: AttemptResult) -> bool:
        """Learn from an answer how much the server accepts. Return True if the answer was about the size."""
        outcome, size = result.outcome, target.size
        if not isinstance(outcome, Delivered | TooLarge):
            return False
        items, tokens = sum(part.size for part in parts), sum(part.tokens for part in parts)
        limits_before = size.server_max_items, size.server_max_tokens
        learned = size.learn_from_refusal(outcome, items, tokens, result.ended_at)
        if limits_before != (size.server_max_items, size.server_max_tokens):
            emit(Event.BATCHING_LIMIT, refused=items, **target.get_log_fields())
        return learned

    def _handle_single_answer(self, call: MergedCall, result: AttemptResult) -> FollowUp:
        (member,), outcome = call.members, result.outcome
        if isinstance(outcome, Delivered):
            if outcome.status < 300:
                call.record_call_time(result.ended_at)
            elif self._learn_size_limit([member.part], member.target, result):
                split_list = self._get_split_list(member)
                if split_list is not None:
                    return FollowUp(
                        attempts=[
                            self._create_piece_attempt(
                                MergedCall([member], call.max_items, True, split_list=split_list)
                            )
                        ]
                    )
            self._sent_alone.pop(member.entry.lease.entry_id, None)
        return FollowUp([(member.entry, result)])

    def _handle_piece_answer(
        self, call: MergedCall, split_list: SplitList, result: AttemptResult
    ) -> FollowUp:
        (member,), outcome = call.members, result.outcome
        if not isinstance(outcome, Delivered):
            self._partial_answers.store_answers(member, split_list)
            return FollowUp([(member.entry, result)])
        if outcome.status < 300:
            split_list.answers.append(outcome.body)
            if len(split_list.answers) == len(split_list.parts):
                return FollowUp(
                    [
                        (
                            member.entry,
                            result.copy_with(outcome=join_answers(member, split_list, outcome.status)),
                        )
                    ]
                )
        else:
            done = len(split_list.answers)
            part = split_list.parts[done]
            if not self._learn_size_limit([part], member.target, result):
                return FollowUp([(member.entry, result)])  # an error of one piece is the answer to the list
            size = member.target.size
            # The answered pieces stay; only the rest is split again.
            split_list.parts[done:] = [
                each
                for remaining_part in split_list.parts[done:]
                for each in shapes.cut_part(
                    remaining_part, size.server_max_items or remaining_part.size, size.server_max_tokens
                )
            ]
        return FollowUp(
            attempts=[
                self._create_piece_attempt(MergedCall([member], call.max_items, True, split_list=split_list))
            ]
        )

    # ── parity checks ────────────────────────────────────────────────────────────────────────────────────

    def _start_parity_check(
        self, target: MergeTarget, members: list[BatchMember], answers: AnswersByToken
    ) -> FollowUp:
        if members and members[0].request.extra is not None:
            return self._complete_members(members, answers)  # a check would send their turns twice
        # `None` asks for all members.
        check_count = target.size.take_check_count()
        chosen = (
            members
            if check_count is None
            else self._context.random.sample(members, min(check_count, len(members)))
        )
        if not chosen:
            return self._complete_members(members, answers)
        parity_check = ParityCheck(members, answers, {member.token for member in chosen})
        return FollowUp(
            attempts=[
                self._create_attempt(MergedCall([member], 1, True, parity_check=parity_check), member.request)
                for member in chosen
            ]
        )

    def _compare_answers(
        self, call: MergedCall, parity_check: ParityCheck, members: list[BatchMember], result: AttemptResult
    ) -> FollowUp:
        """Handle the answer of a single call of a parity check."""
        (member,) = call.members
        if not members:
            parity_check.members = [other for other in parity_check.members if other is not member]
        if not isinstance(result.outcome, Delivered):
            return self._finish_check(call, parity_check, "inconclusive")
        parity_check.single_answers[member.token] = result
        merged = parity_check.merged_answers[member.token].outcome
        assert isinstance(merged, Delivered)  # noqa: S101 -- only answers are checked
        if result.outcome.status != merged.status:
            why: str | None = f"a single call is answered {result.outcome.status}"
        else:
            why = shapes.find_difference(member.part, merged.body, result.outcome.body)
        parity_check.difference = parity_check.difference or why or ""
        return self._finish_check(call, parity_check, "differs" if why else "same")

    def _finish_check(self, call: MergedCall, parity_check: ParityCheck, result: str) -> FollowUp:
        self.check_counts[result] += 1
        parity_check.pending.discard(call.members[0].token)
        # The answers are used only when all single calls agree.
        if parity_check.pending or not parity_check.members:
            return FollowUp()
        target = parity_check.members[0].target
        if not parity_check.difference:
            if parity_check.single_answers:
                target.size.record_match()
            return self._complete_members(parity_check.members, parity_check.merged_answers)
        self._disable_merging(
            target,
            "the answer to a merged call differs from the answers to single calls: "
            f"{parity_check.difference}",
        )
        checked = [member for member in parity_check.members if member.token in parity_check.single_answers]
        others = [
            member for member in parity_check.members if member.token not in parity_check.single_answers
        ]
        ended = self._complete_members(checked, parity_check.single_answers, is_merged=False).ended
        return FollowUp(ended, self._retry_alone(others, 1))

    def _complete_members(
        self, members: list[BatchMember], answers: AnswersByToken, *, is_merged: bool = True
    ) -> FollowUp:
        self.merged_request_count += len(members) if is_merged else 0
        for member in members:
            self._sent_alone.pop(member.entry.lease.entry_id, None)
        return FollowUp([(member.entry, answers[member.token]) for member in members])

    def _disable_merging(self, target: MergeTarget, why: str) -> None:
        if not target.size.off_reason:
            emit(Event.BATCHING_OFF, path=target.path, model=target.model, why=why)
        target.size.turn_off(why)


def get_call(attempt: Attempt) -> MergedCall:
    """Return the call of an attempt that this module has created."""
    assert isinstance(attempt.call, MergedCall)  # noqa: S101 -- only this module sets it
    return attempt.call


def _can_merge_sequence(rule: BatchRule, request: Request) -> bool:
    """Return True if requests of sequences are merged, and their servers are known by a token. If servers are
    chosen by a header with the id of the sequence, each needs a call of its own."""
    affinity = request.affinity
    return (
        rule.merge_sequences
        and affinity is not None
        and (affinity.token_header != "" or not affinity.headers)
    )
