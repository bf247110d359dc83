"""Values of merging: targets, batch members, calls, and what follows from an answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from dispatcher.common.patterns import RuleFinder
from dispatcher.common.printable import truncate_text
from dispatcher.features.merging import shapes
from dispatcher.features.merging.call_size import CallMeasurement, CallSize
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.requests.outcomes.outcome import Delivered, Failed, FailureKind
from dispatcher.requests.request import Request

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from dispatcher.common.grouping import WaitingItem
    from dispatcher.features.merging.shapes import Part
    from dispatcher.gateway.contract import AttemptResult
    from dispatcher.kernel.in_flight import Attempt, InFlightLease


MAX_TARGETS = 256
"""Maximum number of targets that are remembered."""
MAX_MODEL_CHARS = 100
"""Length to which a longer model name is cut."""
MAX_SPLIT_LISTS = 64
"""Maximum number of split lists whose answers are kept while they wait for another attempt."""
MAX_ANSWER_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class MergeTarget:
    """One model behind one path. Requests to it may be merged."""

    path: str
    model: str
    rule: BatchRule
    size: CallSize
    in_flight_units: int = 0
    """Units of its calls in flight."""
    in_flight_turns: int = 0
    """Number of turns in its calls in flight that are not the last ones of their sequences."""

    @property
    def delay_s(self) -> float:
        """Maximum time that a request waits for others."""
        rule_s = self.rule.grouping.max_delay_s
        return self.size.compute_delay_s(rule_s) if self.rule.can_stretch_delay else rule_s

    def get_log_fields(self) -> dict[str, Any]:
        """Return what the server is known to accept, for the log."""
        size = self.size
        about = {"path": self.path, "model": self.model}
        return {
            **about,
            "max_items": size.server_max_items,
            "max_tokens": None if size.server_max_tokens == inf else size.server_max_tokens,
        }


@dataclass(slots=True, eq=False)
class BatchMember:
    """One request that a merge rule applies to."""

    entry: InFlightLease
    request: Request
    part: Part
    target: MergeTarget
    key: Hashable
    """Members with equal keys may be merged."""
    is_sent_alone: bool = False
    """True if it is sent alone, because it may be the one that makes merged calls fail."""
    waiting: WaitingItem | None = None
    """Member as the grouping rule sees it, while it waits in a group."""
    calls: list[MergedCall] = field(default_factory=list)
    """Calls with this member that count in the target."""

    @property
    def token(self) -> str:
        """Token of the lease."""
        return self.entry.lease.token

    @property
    def units(self) -> int | float:
        """Units of the request alone. A list that is sent in pieces counts its largest piece. If a call
        counts one unit, this is the share of it in a full call."""
        if self.target.rule.unit_per_call:
            return min(1, self.part.size / self.target.size.best_size)
        takes = self.target.size.server_max_items
        return self.part.size if takes is None else min(self.part.size, takes)


@dataclass(slots=True, eq=False)
class ParityCheck:
    """Parity check: a merged call that was answered, while single calls show whether its answer is right."""

    members: list[BatchMember]
    merged_answers: dict[str, AttemptResult]
    """Result of each member if the answer is right, by the token of the lease."""
    pending: set[str]
    """Tokens of the leases whose single calls are still to be answered."""
    single_answers: dict[str, AttemptResult] = field(default_factory=dict)
    """Results of the single calls, by the token of the lease."""
    difference: str = ""


@dataclass(slots=True, eq=False)
class SplitList:
    """A list that is too long for the server, sent in several calls one after the other."""

    parts: list[Part]
    answers: list[bytes] = field(default_factory=list)
    """Answers to the first of the parts."""


class MergeTargets:
    """Targets by path and model, and the rules for paths."""

    def __init__(self, rules: Sequence[BatchRule]) -> None:
        self._rule_by_path = RuleFinder(rules)
        self._targets: OrderedDict[tuple[str, str], MergeTarget] = OrderedDict()

    def __iter__(self) -> Iterator[MergeTarget]:
        return iter(list(self._targets.values()))

    def find_rule(self, path: str) -> BatchRule | None:
        """Return the first rule that applies to a path."""
        return self._rule_by_path.find_rule(path)

    def get_target(self, path: str, model: str, rule: BatchRule) -> MergeTarget:
        """Return the target of path and model. If there are too many, the least recently used one is
        forgotten."""
        name = path, truncate_text(model, MAX_MODEL_CHARS)
        target = self._targets.get(name)
        if target is None:
            forming = rule.grouping
            preferred, tokens = forming.preferred_sizes, forming.max_weight
            size = CallSize(rule.mode, forming.max_size, preferred, rule.max_items, tokens)
            target = self._targets[name] = MergeTarget(*name, rule, size)
            if len(self._targets) > MAX_TARGETS:
                self._targets.popitem(last=False)
        else:
            self._targets.move_to_end(name)
        return target


class PartialAnswers:
    """Answers to pieces of lists that wait for another attempt. They are kept in this process only, and not
    for ever."""

    def __init__(self) -> None:
        self._split_lists: OrderedDict[int, tuple[str, SplitList]] = OrderedDict()
        """Split lists by the entry id of the request, with the token of the request."""

    def store_answers(self, member: BatchMember, split_list: SplitList) -> None:
        if not split_list.answers:
            return
        self._split_lists[member.entry.lease.entry_id] = member.request.token, split_list
        while len(self._split_lists) > MAX_SPLIT_LISTS or self._count_bytes() > MAX_ANSWER_BYTES:
            self._split_lists.popitem(last=False)

    def take_answers(self, member: BatchMember) -> SplitList | None:
        """Remove and return the split list of a member."""
        token, split_list = self._split_lists.pop(member.entry.lease.entry_id, ("", None))
        return split_list if token == member.request.token else None

    def _count_bytes(self) -> int:
        return sum(len(body) for _, split_list in self._split_lists.values() for body in split_list.answers)


@dataclass(slots=True, eq=False)
class MergedCall:
    """One attempt as `RequestMerger` sees it: a merged call, a single call, a piece of a list, or a parity
    check."""

    members: list[BatchMember]
    max_items: int
    """Largest call that was allowed when this one was created."""
    is_follow_up: bool
    """True if it follows from another attempt of these leases."""
    parity_check: ParityCheck | None = None
    """Parity check that this single call belongs to. Its answer is only compared."""
    split_list: SplitList | None = None
    """List that was split. This call sends one piece of it."""
    units: int = 0
    """Units that it counts in the limit, from its beginning to its end."""
    turns: int = 0
    """Number of its turns that are not the last ones of their sequences."""
    in_flight_units: int = 0
    """Units in flight to the same target when it began, its own included."""
    next_attempts: list[Attempt] = field(default_factory=list)
    """Attempts that start when this one has ended."""

    def count_in_target(self) -> None:
        """Count the units and turns of the call in its target from now on."""
        for member in self.members:
            member.calls.append(self)
        target = self.members[0].target
        units = sum(member.entry.lease.units for member in self.members)
        self.units = 1 if target.rule.unit_per_call else units
        self.in_flight_units = target.in_flight_units = target.in_flight_units + self.units
        if target.rule.merge_sequences:
            sequences = [member.request.extra for member in self.members]
            self.turns = sum(turn is not None and not turn.last for turn in sequences)
            target.in_flight_turns += self.turns

    def remove_from_target(self) -> None:
        """Stop counting the units and turns of the call, because it has ended."""
        for member in self.members:
            if self in member.calls:
                member.calls.remove(self)
        target = self.members[0].target
        target.in_flight_units -= self.units
        target.in_flight_turns -= self.turns
        self.units = self.turns = 0

    def release_waiting(self) -> list[InFlightLease]:
        """End this call and those that follow it. Return the leases that waited for them, unless they are
        also in another call at the gateway."""
        self.remove_from_target()
        waiting = [member.entry for member in self.members]
        if (check := self.parity_check) is not None:
            check.pending.discard(self.members[0].token)
            waiting += [member.entry for member in check.members if member.entry.attempt is None]
            check.members = [member for member in check.members if member.entry.attempt is not None]
        for attempt in self.next_attempts:
            if attempt.call is not None:
                waiting += attempt.call.release_waiting()
        return waiting

    def record_call_time(self, ended_at: float) -> None:
        """Record how long the call took, to learn which size pays off. A follow-up is not measured."""
        size = self.members[0].target.size
        if size.mode is not MergeMode.AUTO or self.is_follow_up:
            return
        entries = [member.entry for member in self.members]
        # From the claim on, because waiting in a group also costs units of the limit.
        unit_s = sum(entry.lease.units * (ended_at - entry.claimed_at) for entry in entries)
        began_at = min(entry.claimed_at for entry in entries)
        item_count = sum(member.part.size for member in self.members)
        size.record_call(
            CallMeasurement(self.max_items, item_count, unit_s, began_at, ended_at, self.in_flight_units)
        )


LeaseResults = list[tuple["InFlightLease", "AttemptResult"]]
AnswersByToken = dict[str, "AttemptResult"]
"""Results by the token of the lease."""


def split_by_limits(target: MergeTarget, members: list[BatchMember]) -> Iterator[list[BatchMember]]:
    """Yield the members in calls that the server is known to accept."""
    batch: list[BatchMember] = []
    size, tokens = 0, 0
    for member in members:
        size, tokens = size + member.part.size, tokens + member.part.tokens
        if batch and (
            size > (target.size.server_max_items or size) or tokens > target.size.server_max_tokens
        ):
            yield batch
            batch, size, tokens = [], member.part.size, member.part.tokens
        batch.append(member)
    if batch:
        yield batch


def join_answers(member: BatchMember, split_list: SplitList, status: int) -> Delivered | Failed:
    whole = shapes.join_answers(member.part, split_list.parts, split_list.answers)
    if isinstance(whole, shapes.Unfit):
        return Failed(
            f"the answers to {len(split_list.parts)} pieces of the list could not be joined: {whole.why}",
            kind=FailureKind.UNUSABLE_ANSWER,
        )
    return Delivered(status, whole)


def split_long_list(member: BatchMember) -> SplitList | None:
    """Split the list of a member into pieces that the server accepts. `None` if it is not too long."""
    part, takes, tokens = (
        member.part,
        member.target.size.server_max_items,
        member.target.size.server_max_tokens,
    )
    if part.size < 2 or ((takes is None or part.size <= takes) and part.tokens <= tokens):
        return None
    parts = shapes.cut_part(part, takes or part.size, tokens)
    return SplitList(parts) if len(parts) > 1 else None
