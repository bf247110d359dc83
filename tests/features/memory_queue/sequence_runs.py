"""State of sequences: slots of requests in sequence runs. sequence_rules.py has the rules."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from dispatcher.features.sequences.decisions import SequenceTerms, TurnRejected
from dispatcher.features.sequences.turns import (
    OnError,
    SequenceSnapshot,
    SequenceStatus,
)
from dispatcher.queue.lua_files import FEATURE_CONSTANTS as LIMITS
from dispatcher.wire_format import ErrorCode


@dataclass(slots=True)
class Slot:
    """A request that a sequence knows: its next request, one that waits, or a remaining request of a closed
    run."""

    sequence_id: str
    entry: int
    run_number: int
    """Number of its sequence run."""
    index: int
    is_last: bool
    on_error: OnError
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class PassedIndex:
    """An index whose request ended before its turn."""

    is_last: bool
    has_failed: bool
    action: OnError
    cause: str


@dataclass(slots=True)
class SequenceRun:
    """A sequence from one beginning to one end."""

    number: int
    expected_index: int
    """Index that is expected next. Lower ones were granted their turn, or are skipped."""
    override: str = ""
    """Override for the model that its first request names (`Turn.override`)."""
    first_score: float = float("inf")
    """Score of its first request."""
    waiting_count: int = 0
    waiting_items: dict[int, Slot | PassedIndex] = field(default_factory=dict)
    waiting_indexes: list[int] = field(default_factory=list)

    @property
    def next_free_index(self) -> int:
        """The index after all known ones."""
        return max(self.expected_index, self.waiting_indexes[-1] + 1 if self.waiting_indexes else 0)

    def put_item(self, index: int, item: Slot | PassedIndex) -> None:
        if index not in self.waiting_items:
            insort(self.waiting_indexes, index)
        self.waiting_items[index] = item


@dataclass(slots=True)
class SequenceRecord:
    """State of one sequence."""

    id: str
    status: SequenceStatus
    runs: list[SequenceRun]
    last_active_at: float
    score: float
    """Best score of the requests that wait, until the sequence may begin."""
    override: str = ""
    """Override of its present run, or of the last one."""
    next_request: Slot | None = None
    began_at: float | None = None
    gap_since: float | None = None
    sticky_token: str = ""
    conversation: bytes = b""
    ended_count: int = 0
    failed_count: int = 0
    cause: str = ""
    check_at: float | None = field(default=None, compare=False)
    owner: str | None = None
    """Producer that may use the sequence (`Turn.owner`), fixed by the request that began it. `None` before
    that."""

    @property
    def waiting_count(self) -> int:
        return sum(run.waiting_count for run in self.runs)

    @property
    def item_count(self) -> int:
        """Number of waiting requests and of indexes that were passed before their turn."""
        return sum(len(run.waiting_items) for run in self.runs)

    def find_run(self, slot: Slot) -> SequenceRun | None:
        return next((run for run in self.runs if run.number == slot.run_number), None)

    def clamp_times(self, now: float) -> None:
        """Limit all times to `now`, because the clock may have stepped back."""
        self.last_active_at = min(self.last_active_at, now)
        self.began_at = None if self.began_at is None else min(self.began_at, now)
        self.gap_since = None if self.gap_since is None else min(self.gap_since, now)

    def begin_run(self) -> None:
        """Reset the state that belongs to one run."""
        self.began_at = None
        self.sticky_token, self.conversation, self.cause = "", b"", ""
        self.ended_count = self.failed_count = 0

    def count_end(self, *, has_failed: bool) -> None:
        """Count a request of the present run that has ended."""
        self.ended_count += 1
        self.failed_count += has_failed

    def compute_check_at(self, terms: SequenceTerms, now: float) -> float:
        """Return when time may change something. An earlier check must change nothing."""
        max_idle_s = terms.get_max_idle_s(self.override)
        check_at = now + max(max_idle_s, LIMITS["CHECK_INTERVAL_S"])
        if self.next_request is not None:
            # While a request runs, time changes nothing except that its entry may disappear.
            return now + LIMITS["CHECK_INTERVAL_S"]
        if not self.waiting_count:
            check_at = self.last_active_at + max_idle_s
        if self.gap_since is not None:  # also without a waiting request: a passed index may be the last one
            check_at = min(check_at, self.gap_since + terms.gap_s)
        if self.status is SequenceStatus.OPEN and self.began_at is not None:
            check_at = min(check_at, self.began_at + terms.max_age_s)
        return check_at

    def make_snapshot(self, max_waiting: int) -> SequenceSnapshot:
        """Return a snapshot with up to `max_waiting` waiting requests. Its times are by the clock of the
        caller."""
        run, next_request = self.runs[0], self.next_request
        slots = [run.waiting_items[index] for index in run.waiting_indexes]
        waiting_requests = [(slot.index, slot.entry) for slot in slots if isinstance(slot, Slot)]
        return SequenceSnapshot(
            id=self.id,
            status=self.status,
            expected_index=run.expected_index,
            next_entry=None if next_request is None else next_request.entry,
            waiting_count=self.waiting_count,
            run_count=len(self.runs),
            ended_count=self.ended_count,
            failed_count=self.failed_count,
            began_at=self.began_at,
            last_active_at=self.last_active_at,
            gap_since=self.gap_since,
            has_token=self.sticky_token != "",
            conversation_bytes=len(self.conversation),
            cause=self.cause,
            override=self.override,
            waiting_requests=waiting_requests[:max_waiting],
        )


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """A closed run. Its remaining requests are answered with this error."""

    code: ErrorCode
    why: str
    slots: dict[int, Slot]


@dataclass(frozen=True, slots=True)
class CancelMark:
    """Mark of a cancelled sequence. Requests of it that were submitted earlier must not run, whether they
    were claimed by then or not."""

    cancelled_at: float
    """Unix time of the cancel."""
    expires_at: float
    """Time at which the mark is forgotten, by the clock of the queue."""
    covers_undated: bool = True
    """True if requests with an unknown time of submission count as submitted before the cancel."""

    def covers_submission(self, submitted_at: float, now: float) -> bool:
        """Return whether a request was submitted before the cancel. 0 is an unknown time of submission."""
        if now >= self.expires_at:
            return False
        return submitted_at <= self.cancelled_at if submitted_at else self.covers_undated


def reject_denied() -> TurnRejected:
    return TurnRejected(ErrorCode.SEQUENCE_DENIED, "its sequence belongs to another producer")


def reject_full(max_waiting: int) -> TurnRejected:
    return TurnRejected(ErrorCode.SEQUENCE_FULL, f"{max_waiting} requests of its sequence wait already")


def reject_taken(index: int, expected_index: int) -> TurnRejected:
    message = (
        f"index {index} was there before"
        if index >= expected_index
        else f"index {index}: {expected_index} is next"
    )
    return TurnRejected(ErrorCode.SEQUENCE_INDEX, message)
