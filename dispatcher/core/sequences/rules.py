"""Rules of sequences: requests that belong together run in order, one at a time.

    claim turn  a leased request asks for its turn: it becomes the next request of its sequence
                (`TurnGranted`), waits (`TurnWaits`), or is rejected for ever (`TurnRejected`)
    end         a request has ended for good: the step that ends it also chooses the next request
    sweep       time has passed: a missing index is no longer waited for, a run is over, or the next request
                is gone

The memory queue executes these rules directly. queue/lua/sequences.lua implements them in Redis, state by
state, and tests/properties/test_sequence_model.py verifies that both agree.

    order   A sequence run expects indexes from 0, or from the index of the reset that began it. A request
            without an index gets the one after all known indexes. The next request is always the lowest that
            waits. It is granted its turn if its index is the expected one, or if the expected one was waited
            for `gap_s`. A request that ended before its turn marks its index as passed, and is not waited
            for.
    runs    A reset begins a further run after the present one, and all later requests join that run. A run
            ends with its last request, by idle time, by age, by abort or by cancel. Requests that still wait
            begin the next run (`SequenceRun.expected_index` is then the first of them), or are rejected.
    owner   The request that begins a sequence determines its owner (`Turn.owner`: a secret, or a result
            list). Requests of other owners are rejected while the sequence is known, and change nothing in
            it.
    cancel  A cancel ends the sequence and leaves a mark (`CancelMark`). A request that was submitted before
            the cancel is rejected as CANCELLED when it claims its turn, or ends earlier and leaves no trace
            in the sequence. A request that was submitted afterwards begins the sequence anew. Therefore it
            makes no difference how many of the requests had been claimed.
    closed  The remaining requests of a closed run are answered by the owner that sweeps, without a lease
            (`iterate_remaining`), so that neither gate nor limit delays their results.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import (
    Barred,
    Goes,
    SequenceNews,
    SequenceTerms,
    TurnEnd,
    Verdict,
    Waits,
)
from dispatcher.core.sequences.runs import (
    CancelMark,
    Life,
    Over,
    Passed,
    Seat,
    Sequenced,
    denied,
    full,
    taken,
)
from dispatcher.core.sequences.turns import LIVES_MOST, UNPARK_MOST, OnError, SequenceStatus, Turn

_LAST, _CANCELLED = "its last request has ended", "the sequence was cancelled"
_UNDATED = f"{_CANCELLED}, and no data.created says that the request came later"
_IDLE, _AGE = "nothing of it ran or waited for max_idle_s", "it had run for max_age_s"
_OVER = (SequenceStatus.ABORTED, SequenceStatus.ENDED)
_ABORT = SequenceStatus.ABORTED, ErrorCode.SEQUENCE_ABORTED
_END = SequenceStatus.ENDED, ErrorCode.SEQUENCE_ENDED
_ALIVE = (SequenceStatus.OPEN, SequenceStatus.HELD)


class Sequences:
    """State of all sequences of a queue. `take_ready_entries` returns entries that may be claimed from now
    on."""

    def __init__(self) -> None:
        self.terms = SequenceTerms()
        self.known: dict[str, Sequenced] = {}
        self.seats: dict[int, Seat] = {}
        """Slots by entry."""
        self.over: dict[int, Over] = {}
        """Closed runs by run number."""
        self.marks: dict[str, CancelMark] = {}
        self.news = SequenceNews()
        self._told = False
        self.count: Counter[SequenceStatus] = Counter()
        self._numbers = itertools.count(1)
        self._parked, self._due = list[tuple[float, bytes]](), list[tuple[float, bytes]]()
        self._moved: list[int] = []
        self._leased = 0

    def moved(self) -> list[int]:
        """Return the entries that became next requests since the last call, without those that are leased."""
        moved, self._moved = self._moved, []
        return moved

    def tell(self, terms: SequenceTerms) -> None:
        """Apply these settings from now on. Without any settings, requests that end do not create
        sequences."""
        self.terms, self._told = terms, True

    # Claiming turns.

    def line_up(self, entry: int, score: float, turn: Turn, now: float) -> Verdict:
        """Decide about the turn of a leased request."""
        known = self.known.get(turn.id)
        # The entry may have its turn already: it was released or reclaimed, or the call is repeated.
        if (goes := self.goes(entry)) is not None:
            return goes
        if (refused := self._refused(known, turn, now)) is not None:
            return refused
        one, index = self._joined(known, turn, score, now)
        life = one.lives[-1]
        on_error = turn.on_error or self.terms.on_error
        seat = Seat(turn.id, entry, life.number, index, turn.last, on_error)
        self.seats[entry] = seat
        life.put(index, seat)
        life.waiting += 1
        # Entries that become next requests are moved to the claimable ones. This one is leased already.
        self._leased = entry
        self._settle_down(one, now)
        self._leased = 0
        return self.goes(entry) or Waits()

    def _refused(self, one: Sequenced | None, turn: Turn, now: float) -> Barred | None:
        most = self.terms.max_waiting
        # This check comes first: the answer to another producer must show nothing else about the sequence.
        if one is not None and one.owner is not None and one.owner != turn.owner:
            return denied()
        mark = self.marks.get(turn.id)
        if mark is not None and mark.covers(turn.submitted_at, now):
            return Barred(ErrorCode.CANCELLED, _CANCELLED if turn.submitted_at else _UNDATED)
        if one is not None and one.status in _OVER and not turn.reset:
            one.touched_at = now
            aborted = one.status is SequenceStatus.ABORTED
            return Barred(ErrorCode.SEQUENCE_ABORTED if aborted else ErrorCode.SEQUENCE_ENDED, one.cause)
        if one is None or one.status in _OVER:
            goes = self._has_room() and (turn.reset or not turn.index)
            return None if goes or most > 0 else full(most)
        life = one.lives[-1]
        index = life.behind if turn.index is None else turn.index
        if not turn.reset and (index < life.next or index in life.line):
            return taken(index, life.next)
        goes = one.status is SequenceStatus.OPEN and one.head is None and len(one.lives) == 1
        goes = goes and (not life.line if turn.reset else index == life.next)
        many = one.in_line >= most or (turn.reset and len(one.lives) >= LIVES_MOST)
        return None if goes or not many else full(most)

    def _joined(self, one: Sequenced | None, turn: Turn, score: float, now: float) -> tuple[Sequenced, int]:
        """Return the sequence with a run that takes the turn, and the index of the request in it."""
        fresh = one is None or one.status in _OVER
        one = one or self._added(turn.id, now, score)
        if one.owner is None:
            one.owner = turn.owner
        if fresh:
            one.begin()
            one.lives, one.score = [], score
            self._turn_to(one, SequenceStatus.OPEN if self._has_room() else SequenceStatus.PARKED)
        if fresh or turn.reset:
            one.lives.append(Life(next(self._numbers), (turn.index or 0) if turn.reset else 0))
        one.touched_at = now
        # Parked sequences begin in the order of their best scores. Setting the status again adds the new
        # score to the heap.
        if one.status is SequenceStatus.PARKED and score < one.score:
            one.score = score
            self._turn_to(one, one.status)
        return one, one.lives[-1].behind if turn.index is None else turn.index

    def _added(self, name: str, now: float, score: float) -> Sequenced:
        one = self.known[name] = Sequenced(name, SequenceStatus.ENDED, [], now, score)
        return one

    def goes(self, entry: int) -> Goes | None:
        """Return the granted turn of an entry. `None` if it is not its turn."""
        seat = self.seats.get(entry)
        if seat is None or (one := self.known.get(seat.id)) is None or one.head is not seat:
            return None
        return Goes(seat.index, one.token, one.carry, one.done == 0)

    # Ending.

    def end(self, entry: int, end: TurnEnd | None, now: float) -> None:
        """End a request for good, with a result or as a dead-letter request."""
        seat = self.seats.pop(entry, None)
        if seat is None:
            if end is not None:
                self._pass_by(end, now)
            return
        one, failed = self.known.get(seat.id), end is not None and end.failed
        cause = "" if end is None else end.cause
        if one is not None and one.head is seat:
            one.head, one.touched_at = None, now
            # A request of an earlier run changes nothing: its run has ended while it was in flight.
            if one.status is SequenceStatus.OPEN and seat.number == one.lives[0].number:
                one.token = one.token if end is None or end.token is None else end.token
                one.carry = one.carry if end is None or end.carry is None else end.carry
                one.count(failed=failed)
                self._follow(one, seat.last, seat.on_error if failed else OnError.CONTINUE, cause, now)
                self._end_if_old(one, now)
            self._settle_down(one, now)
        elif seat.number in self.over:
            # A remaining request of a closed run was answered.
            del self.over[seat.number].seats[entry]
            if not self.over[seat.number].seats:
                del self.over[seat.number]
        elif one is not None and (life := one.life_of(seat)) is not None:
            then = seat.on_error if failed else OnError.CONTINUE
            # The request ended while it waited, for example by its deadline. Its index must not be waited
            # for.
            life.put(seat.index, Passed(seat.last, failed, then, cause))
            life.waiting -= 1
            one.touched_at = now
            self._settle_down(one, now)

    def _pass_by(self, end: TurnEnd, now: float) -> None:
        """Record a request that ended before it claimed its turn.

        If others would wait for its index, or its failure ends the sequence, its index is marked as passed.
        """
        turn = end.turn
        then = (turn.on_error or self.terms.on_error) if end.failed else OnError.CONTINUE
        one = self.known.get(turn.id)
        if turn.index is None and then is OnError.CONTINUE:
            return
        if not self._told or ((one is None or one.status in _OVER) and not self._has_room()):
            return
        if self._refused(one, turn, now) is not None:
            return
        one, index = self._joined(one, turn, float("inf"), now)
        one.lives[-1].put(index, Passed(turn.last, end.failed, then, end.cause))
        self._settle_down(one, now)

    # Next requests, and ends of runs.

    def _settle_down(self, one: Sequenced, now: float) -> None:
        self._advance(one, now)
        self._unpark(now)
        self._schedule(one, now)

    def _advance(self, one: Sequenced, now: float) -> None:
        """Choose the next request, as far as one may be sent now."""
        gap, one.gap_since = one.gap_since, None
        while one.head is None and one.status in _ALIVE and one.id in self.known:
            held, life = one.status is SequenceStatus.HELD, one.lives[0]
            if not life.order:
                if held or len(one.lives) == 1:
                    return
                self._next_life(one)
                continue
            index = life.order[0]
            if index > life.next and held:
                return
            # A gap before a waiting reset is not waited for: no later request can fill it any more.
            if index > life.next and len(one.lives) == 1:
                gap = now if gap is None else gap
                if now < gap + self.terms.gap_s:
                    one.gap_since = gap
                    return
                self.news.gaps += 1
            item = life.line[index]
            # A held sequence skips passed indexes, but starts nothing and does not end.
            if held and (isinstance(item, Seat) or item.last):
                return
            del life.order[0], life.line[index]
            life.next, gap = index + 1, None
            if isinstance(item, Seat):
                self._promote(one, life, item, now)
                return
            one.count(failed=item.failed)
            if not held:
                self._follow(one, item.last, item.then, item.cause, now)

    def _promote(self, one: Sequenced, life: Life, seat: Seat, now: float) -> None:
        one.head, seat.waits = seat, False
        life.waiting -= 1
        one.born_at, one.touched_at = now if one.born_at is None else one.born_at, now
        if seat.entry != self._leased:
            self._moved.append(seat.entry)

    def _follow(self, one: Sequenced, last: bool, then: OnError, cause: str, now: float) -> None:
        """Apply the end of a request of the present run: end, abort or hold the sequence."""
        if last:
            self._end_life(one, _LAST, now)
        elif then is OnError.ABORT:
            self._close(one, _ABORT, cause, now)
        elif then is OnError.HOLD:
            self._turn_to(one, SequenceStatus.HELD)
            one.cause = cause
            self.news.held, self.news.last_held = self.news.held + 1, one.id

    def _end_if_old(self, one: Sequenced, now: float) -> None:
        old = one.born_at is not None and now >= one.born_at + self.terms.max_age_s
        if old and one.status is SequenceStatus.OPEN and one.id in self.known:
            self.news.aged += 1
            self._end_life(one, _AGE, now)

    def _end_life(self, one: Sequenced, why: str, now: float) -> None:
        life = one.lives[0]
        if self.terms.refuse_after_end:
            self._close(one, _END, why, now)
        # The waiting requests begin the next run, under the same run number.
        elif life.waiting:
            one.begin()
            life.next = life.order[0]
        elif len(one.lives) > 1:
            self._next_life(one)
        else:
            self._forget(one)

    def _close(self, one: Sequenced, how: tuple[SequenceStatus, ErrorCode], why: str, now: float) -> None:
        """End the present run and fail its remaining requests. If a reset waits, its run begins."""
        if how is _ABORT:
            self.news.aborted, self.news.last_aborted = self.news.aborted + 1, one.id
        self._doom(one.lives[0], how[1], why)
        if len(one.lives) > 1:
            self._next_life(one)
            return
        one.lives = [Life(next(self._numbers), one.lives[0].next)]
        # An empty run remains, so that the end is remembered until the idle time has passed.
        self._turn_to(one, how[0])
        one.token, one.carry, one.cause, one.touched_at = "", b"", why, now

    def _doom(self, life: Life, code: ErrorCode, why: str) -> None:
        seats = [life.line[index] for index in life.order]
        doomed = {seat.entry: seat for seat in seats if isinstance(seat, Seat)}
        if doomed:
            self.over[life.number] = Over(code, why, doomed)
        life.waiting = 0

    def _next_life(self, one: Sequenced) -> None:
        del one.lives[0]
        one.begin()
        if one.status is SequenceStatus.HELD:
            self._turn_to(one, SequenceStatus.OPEN)

    def _forget(self, one: Sequenced) -> None:
        self._turn_to(one, SequenceStatus.ENDED)
        del self.known[one.id]

    # How many are alive.

    def _has_room(self) -> bool:
        most = self.terms.max_active
        return most is None or self.count[_ALIVE[0]] + self.count[_ALIVE[1]] < most

    def _turn_to(self, one: Sequenced, status: SequenceStatus) -> None:
        self.count.subtract((one.status,))
        self.count[status] += 1
        one.status = status
        if status is SequenceStatus.PARKED:
            heapq.heappush(self._parked, (one.score, one.id.encode()))

    def _unpark(self, now: float) -> None:
        for _ in range(UNPARK_MOST):
            one = self._first_parked() if self._has_room() else None
            if one is None:
                return
            self._turn_to(one, SequenceStatus.OPEN)
            self._advance(one, now)
            self._schedule(one, now)

    def _first_parked(self) -> Sequenced | None:
        while self._parked:
            score, name = heapq.heappop(self._parked)
            one = self.known.get(name.decode())
            if one is not None and one.status is SequenceStatus.PARKED and one.score == score:
                return one
        return None

    # Time.

    def sweep(self, now: float, is_there: Callable[[int], bool]) -> None:
        """Process all checks that are due. `is_there` returns whether an entry waits, is delayed or leased.

        If time ends a sequence, no parked one begins before all due sequences were checked. Otherwise the
        result would depend on checks that come early.
        """
        due = []
        while self._due and self._due[0][0] <= now:
            at, name = heapq.heappop(self._due)
            one = self.known.get(name.decode())
            # Entries of the heap whose time is no longer the scheduled one are outdated.
            if one is not None and one.due_at == at:
                one.due_at = None
                due.append(one)
        for one in sorted(due, key=lambda one: one.lives[0].number):
            # A sequence that ended while an earlier one was checked is no longer known.
            if self.known.get(one.id) is one:
                self._look(one, now, is_there)
        # Redis does the same: once per sequence, with up to MAX_UNPARKED_PER_STEP sequences each time.
        for _ in range(1 + len(due)):
            self._unpark(now)
        self.marks = {name: mark for name, mark in self.marks.items() if now < mark.until}

    def step_back(self, by_s: float) -> None:
        """Shift the times of all checks by `step_s`, which is negative, after the clock stepped back."""
        self._due = [(at + by_s, name) for at, name in self._due]
        for one in self.known.values():
            one.due_at = None if one.due_at is None else one.due_at + by_s

    def _look(self, one: Sequenced, now: float, is_there: Callable[[int], bool]) -> None:
        one.not_after(now)
        if one.head is not None:
            # An owner of a version that knows no sequences has ended it without telling the sequence.
            if not is_there(one.head.entry):
                self.end(one.head.entry, None, now)
        elif not one.waiting and now >= one.touched_at + self.terms.max_idle_s:
            if one.status in _OVER:
                self._forget(one)
            else:
                self.news.idle += 1
                self._end_life(one, _IDLE, now)
        else:
            self._end_if_old(one, now)
        self._advance(one, now)
        self._schedule(one, now)

    def _schedule(self, one: Sequenced, now: float) -> None:
        """Schedule the next check of the sequence."""
        due = one.wants_a_look_at(self.terms, now)
        if one.id in self.known and due != one.due_at:
            one.due_at = due
            heapq.heappush(self._due, (due, one.id.encode()))

    # Remaining requests, and decisions of operators.

    def unserved(self) -> Iterator[tuple[int, ErrorCode, str]]:
        """Yield the entries that are to be answered with an error, with code and reason, in their order."""
        for _, over in sorted(self.over.items(), key=lambda item: item[0]):
            for entry in over.seats:
                yield entry, over.code, over.why

    def release(self, name: str, now: float) -> bool:
        """Let a held sequence continue. Return False if it is not held."""
        one = self.known.get(name)
        if one is None or one.status is not SequenceStatus.HELD:
            return False
        self._turn_to(one, SequenceStatus.OPEN)
        one.cause, one.touched_at = "", now
        self.news.released += 1
        self._settle_down(one, now)
        return True

    def abort(self, name: str, why: str, now: float) -> bool:
        """Abort the present run: its waiting requests and later ones are answered SEQUENCE_ABORTED. The next
        request, if it is in flight, runs to its end.

        Return False if the sequence was aborted before, or has ended.
        """
        one = self.known.get(name)
        if one is not None and one.status in _OVER:
            return False
        if one is None:  # no request of it was claimed yet, but later ones must be rejected
            self._told = True
            one = self._unbegun(name, now)
        self._close(one, _ABORT, why, now)
        self._settle_down(one, now)
        return True

    def _unbegun(self, name: str, now: float) -> Sequenced:
        one = self._added(name, now, 0.0)
        one.lives = [Life(next(self._numbers), 0)]
        return one

    def cancel(self, name: str, mark: CancelMark, now: float) -> int | None:
        """End the sequence. Its waiting requests are answered CANCELLED, and so are requests that were
        submitted before the mark when they are claimed.

        Return the entry of its next request, with which the sequence ends, or 0 if it has none. `None` if the
        sequence is not known or has ended.
        """
        before = self.marks.get(name)
        if before is not None and now < before.until:
            mark = CancelMark(max(mark.at, before.at), max(mark.until, before.until))
        self.marks[name] = mark
        one = self.known.get(name)
        if one is None and self.terms.refuse_after_end:
            one = self._unbegun(name, now)
            self._close(one, _END, _CANCELLED, now)
            self._settle_down(one, now)
            return None
        if one is None or one.status in _OVER:
            return None
        self.news.cancelled += 1
        for life in one.lives:
            self._doom(life, ErrorCode.CANCELLED, _CANCELLED)
        one.lives = [Life(next(self._numbers), one.lives[0].next)]
        if one.head is not None:
            # The request in flight moves to the new empty run as its last one, so that its end ends the
            # sequence.
            one.head.number, one.head.last = one.lives[0].number, True
        else:
            self._end_life(one, _CANCELLED, now)
        self._settle_down(one, now)
        return 0 if one.head is None else one.head.entry

    def forget(self, name: str, now: float) -> bool | None:
        """Forget the sequence, so that its id begins anew. Return False, and do nothing, if a request of it
        runs or waits. `None` if the sequence is not known.

        The cancel still applies to requests whose time of submission is known to be before it.
        """
        one, mark = self.known.get(name), self.marks.get(name)
        marked = mark is not None and mark.undated and now < mark.until
        if one is None:
            if mark is not None and marked:
                self.marks[name] = replace(mark, undated=False)
            return True if marked else None
        if one.head is not None or one.waiting:
            return False
        if mark is not None:
            self.marks[name] = replace(mark, undated=False)
        self._forget(one)
        self._settle_down(one, now)
        return True
