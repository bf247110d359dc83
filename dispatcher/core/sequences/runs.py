"""State of sequences: slots of requests in sequence runs. core/sequences/rules.py has the rules."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import Barred, SequenceTerms
from dispatcher.core.sequences.turns import LOOK_S, OnError, SequenceSeen, SequenceStatus


@dataclass(slots=True, eq=False)
class Seat:
    """A request that a sequence knows: its next request, one that waits, or a remaining request of a closed
    run."""

    id: str
    entry: int
    number: int
    """Number of its sequence run."""
    index: int
    last: bool
    on_error: OnError
    waits: bool = True


@dataclass(frozen=True, slots=True)
class Passed:
    """An index whose request ended before its turn."""

    last: bool
    failed: bool
    then: OnError
    cause: str


@dataclass(slots=True)
class Life:
    """A sequence from one beginning to one end."""

    number: int
    next: int
    """Index that is expected next. Lower ones were granted their turn, or are skipped."""
    waiting: int = 0
    line: dict[int, Seat | Passed] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    @property
    def behind(self) -> int:
        """The index after all known ones."""
        return max(self.next, self.order[-1] + 1 if self.order else 0)

    def put(self, index: int, item: Seat | Passed) -> None:
        if index not in self.line:
            insort(self.order, index)
        self.line[index] = item


@dataclass(slots=True)
class Sequenced:
    """State of one sequence."""

    id: str
    status: SequenceStatus
    lives: list[Life]
    touched_at: float
    score: float
    """Best score of the requests that wait, until the sequence may begin."""
    head: Seat | None = None
    born_at: float | None = None
    gap_since: float | None = None
    token: str = ""
    carry: bytes = b""
    done: int = 0
    failed: int = 0
    cause: str = ""
    due_at: float | None = None
    owner: str | None = None
    """Producer that may use the sequence (`Turn.owner`), fixed by the request that began it. `None` before
    that."""

    @property
    def waiting(self) -> int:
        return sum(life.waiting for life in self.lives)

    @property
    def in_line(self) -> int:
        """Number of waiting requests and of indexes that were passed before their turn."""
        return sum(len(life.line) for life in self.lives)

    def life_of(self, seat: Seat) -> Life | None:
        return next((life for life in self.lives if life.number == seat.number), None)

    def not_after(self, now: float) -> None:
        """Limit all times to `now`, because the clock may have stepped back."""
        self.touched_at = min(self.touched_at, now)
        self.born_at = None if self.born_at is None else min(self.born_at, now)
        self.gap_since = None if self.gap_since is None else min(self.gap_since, now)

    def begin(self) -> None:
        """Reset the state that belongs to one run."""
        self.born_at = None
        self.token, self.carry, self.cause = "", b"", ""
        self.done = self.failed = 0

    def count(self, *, failed: bool) -> None:
        """Count a request of the present run that has ended."""
        self.done += 1
        self.failed += failed

    def wants_a_look_at(self, terms: SequenceTerms, now: float) -> float:
        """Return when time may change something. An earlier check must change nothing."""
        due = now + max(terms.max_idle_s, LOOK_S)
        if self.head is not None:
            # While a request runs, time changes nothing except that its entry may disappear.
            return now + LOOK_S
        if not self.waiting:
            due = self.touched_at + terms.max_idle_s
        if self.gap_since is not None:  # also without a waiting request: a passed index may be the last one
            due = min(due, self.gap_since + terms.gap_s)
        if self.status is SequenceStatus.OPEN and self.born_at is not None:
            due = min(due, self.born_at + terms.max_age_s)
        return due

    def seen(self, most: int) -> SequenceSeen:
        """Return a snapshot with up to `max_waiting` waiting requests. Its times are by the clock of the
        caller."""
        life, head = self.lives[0], self.head
        seats = [life.line[index] for index in life.order]
        line = [(seat.index, seat.entry) for seat in seats if isinstance(seat, Seat)]
        return SequenceSeen(
            id=self.id,
            status=self.status,
            next=life.next,
            head=None if head is None else head.entry,
            waiting=self.waiting,
            lives=len(self.lives),
            done=self.done,
            failed=self.failed,
            began_at=self.born_at,
            touched_at=self.touched_at,
            gap_since=self.gap_since,
            has_token=self.token != "",
            carry_bytes=len(self.carry),
            cause=self.cause,
            line=line[:most],
        )


@dataclass(frozen=True, slots=True)
class Over:
    """A closed run. Its remaining requests are answered with this error."""

    code: ErrorCode
    why: str
    seats: dict[int, Seat]


@dataclass(frozen=True, slots=True)
class CancelMark:
    """Mark of a cancelled sequence. Requests of it that were submitted earlier must not run, whether they
    were claimed by then or not."""

    at: float
    """Unix time of the cancel."""
    until: float
    """Time at which the mark is forgotten, by the clock of the queue."""
    undated: bool = True
    """True if requests with an unknown time of submission count as submitted before the cancel."""

    def covers(self, submitted_at: float, now: float) -> bool:
        """Return whether a request was submitted before the cancel. 0 is an unknown time of submission."""
        if now >= self.until:
            return False
        return submitted_at <= self.at if submitted_at else self.undated


def denied() -> Barred:
    return Barred(ErrorCode.SEQUENCE_DENIED, "its sequence belongs to another producer")


def full(most: int) -> Barred:
    return Barred(ErrorCode.SEQUENCE_FULL, f"{most} requests of its sequence wait already")


def taken(index: int, expected: int) -> Barred:
    told = f"index {index} was there before" if index >= expected else f"index {index}: {expected} is next"
    return Barred(ErrorCode.SEQUENCE_INDEX, told)
