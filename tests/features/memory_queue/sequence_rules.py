"""Rules of sequences as plain Python: the oracle of tests/properties/test_sequence_model.py.

features/sequences/README.md has the rules in words, and features/sequences/lua/sequences.lua implements them.

    claim turn  a leased request asks for its turn: it becomes the next request of its sequence
                (`TurnGranted`), waits (`TurnWaits`), or is rejected for ever (`TurnRejected`)
    end         a request has ended for good: the step that ends it also chooses the next request
    sweep       time has passed: a missing index is no longer waited for, or a run is over
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from dispatcher.features.sequences.decisions import (
    OverrideCounts,
    SequenceCounters,
    SequenceTerms,
    TurnDecision,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, SequenceStatus, Turn
from dispatcher.queue.lua_files import FEATURE_CONSTANTS as LIMITS
from dispatcher.wire_format import ErrorCode
from tests.features.memory_queue.sequence_runs import (
    CancelMark,
    ClosedRun,
    PassedIndex,
    SequenceRecord,
    SequenceRun,
    Slot,
    reject_denied,
    reject_full,
    reject_taken,
)

_LAST, _CANCELLED = "its last request has ended", "the sequence was cancelled"
_UNDATED = f"{_CANCELLED}, and the request has no data.created that proves that it came later"
_IDLE, _AGE = "no request of it ran or waited for max_idle_s", "it had run for max_age_s"
_OVER = (SequenceStatus.ABORTED, SequenceStatus.ENDED)
_ABORT = SequenceStatus.ABORTED, ErrorCode.SEQUENCE_ABORTED
_END = SequenceStatus.ENDED, ErrorCode.SEQUENCE_ENDED
_ALIVE = (SequenceStatus.OPEN, SequenceStatus.HELD)


class SequenceTable:
    """State of all sequences of a queue. `take_ready_entries` returns entries that may be claimed from now
    on."""

    def __init__(self) -> None:
        self.terms = SequenceTerms()
        self.records: dict[str, SequenceRecord] = {}
        self.slots: dict[int, Slot] = {}
        """Slots by entry."""
        self.closed_runs: dict[int, ClosedRun] = {}
        """Closed runs by run number."""
        self.cancel_marks: dict[str, CancelMark] = {}
        self.counters = SequenceCounters()
        self._has_terms = False
        self.status_counts: Counter[SequenceStatus] = Counter()
        self._run_numbers = itertools.count(1)
        self._active_by_override: Counter[str] = Counter()
        self._parked_by_override: Counter[str] = Counter()
        self._parked: dict[str, list[tuple[float, bytes]]] = {}
        """Parked sequences by override, as heaps of score and id."""
        self._checks: list[tuple[float, bytes]] = []
        self._ready_entries: list[int] = []
        self._leased_entry = 0

    def take_ready_entries(self) -> list[int]:
        """Return the entries that became next requests since the last call, without those that are leased."""
        moved, self._ready_entries = self._ready_entries, []
        return moved

    def set_terms(self, terms: SequenceTerms) -> None:
        """Apply these settings from now on. Without any settings, requests that end do not create
        sequences."""
        self.terms, self._has_terms = terms, True

    # Claiming turns.

    def claim_turn(self, entry: int, score: float, turn: Turn, now: float) -> TurnDecision:
        """Decide about the turn of a leased request."""
        record = self.records.get(turn.id)
        # The entry may have its turn already: it was released or reclaimed, or the call is repeated.
        if (granted := self.get_granted_turn(entry)) is not None:
            return granted
        if (rejected := self._find_rejection(record, turn, now)) is not None:
            return rejected
        sequence, index = self._join_run(record, turn, score, now)
        run = sequence.runs[-1]
        on_error = turn.on_error or self.terms.on_error
        slot = Slot(turn.id, entry, run.number, index, turn.last, on_error)
        self.slots[entry] = slot
        run.put_item(index, slot)
        run.waiting_count += 1
        # Entries that become next requests are moved to the claimable ones. This one is leased already.
        self._leased_entry = entry
        self._update_sequence(sequence, now)
        self._leased_entry = 0
        return self.get_granted_turn(entry) or TurnWaits()

    def _find_rejection(self, sequence: SequenceRecord | None, turn: Turn, now: float) -> TurnRejected | None:
        max_waiting = self.terms.max_waiting
        # This check comes first: the answer to another producer must show nothing else about the sequence.
        if sequence is not None and sequence.owner is not None and sequence.owner != turn.owner:
            return reject_denied()
        mark = self.cancel_marks.get(turn.id)
        if mark is not None and mark.covers_submission(turn.submitted_at, now):
            return TurnRejected(ErrorCode.CANCELLED, _CANCELLED if turn.submitted_at else _UNDATED)
        if sequence is not None and sequence.status in _OVER and not turn.reset:
            sequence.last_active_at = now
            self._schedule_check(sequence, now)
            aborted = sequence.status is SequenceStatus.ABORTED
            return TurnRejected(
                ErrorCode.SEQUENCE_ABORTED if aborted else ErrorCode.SEQUENCE_ENDED, sequence.cause
            )
        if sequence is None or sequence.status in _OVER:
            goes_at_once = self._has_room(turn.override) and (turn.reset or not turn.index)
            return None if goes_at_once or max_waiting > 0 else reject_full(max_waiting)
        run = sequence.runs[-1]
        index = run.next_free_index if turn.index is None else turn.index
        if not turn.reset and (index < run.expected_index or index in run.waiting_items):
            return reject_taken(index, run.expected_index)
        goes_at_once = (
            sequence.status is SequenceStatus.OPEN
            and sequence.next_request is None
            and len(sequence.runs) == 1
        )
        goes_at_once = goes_at_once and (not run.waiting_items if turn.reset else index == run.expected_index)
        is_full = sequence.item_count >= max_waiting or (
            turn.reset and len(sequence.runs) >= LIMITS["MAX_RUNS"]
        )
        return None if goes_at_once or not is_full else reject_full(max_waiting)

    def _join_run(
        self, sequence: SequenceRecord | None, turn: Turn, score: float, now: float
    ) -> tuple[SequenceRecord, int]:
        """Return the sequence with a run that takes the turn, and the index of the request in it."""
        is_new = sequence is None or sequence.status in _OVER
        sequence = sequence or self._add_record(turn.id, now, score)
        if sequence.owner is None:
            sequence.owner = turn.owner
        if is_new:
            sequence.begin_run()
            sequence.runs, sequence.score, sequence.override = [], score, turn.override
            has_room = self._has_room(turn.override)
            self._set_status(sequence, SequenceStatus.OPEN if has_room else SequenceStatus.PARKED)
        if is_new or turn.reset:
            first_index = (turn.index or 0) if turn.reset else 0
            sequence.runs.append(
                SequenceRun(next(self._run_numbers), first_index, turn.override, first_score=score)
            )
        sequence.last_active_at = now
        # Parked sequences begin in the order of their best scores. Setting the status again adds the new
        # score to the heap.
        if sequence.status is SequenceStatus.PARKED and score < sequence.score:
            sequence.score = score
            self._set_status(sequence, sequence.status)
        return sequence, sequence.runs[-1].next_free_index if turn.index is None else turn.index

    def _add_record(self, name: str, now: float, score: float) -> SequenceRecord:
        sequence = self.records[name] = SequenceRecord(name, SequenceStatus.ENDED, [], now, score)
        return sequence

    def get_granted_turn(self, entry: int) -> TurnGranted | None:
        """Return the granted turn of an entry. `None` if it is not its turn."""
        slot = self.slots.get(entry)
        if (
            slot is None
            or (sequence := self.records.get(slot.sequence_id)) is None
            or sequence.next_request is not slot
        ):
            return None
        return TurnGranted(
            slot.index, sequence.sticky_token, sequence.conversation, sequence.ended_count == 0
        )

    # Ending.

    def end_request(self, entry: int, end: TurnEnd | None, now: float) -> None:
        """End a request for good, with a result or as a dead-letter request."""
        slot = self.slots.pop(entry, None)
        if slot is None:
            if end is not None:
                self._pass_index(end, now)
            return
        sequence, has_failed = self.records.get(slot.sequence_id), end is not None and end.has_failed
        cause = "" if end is None else end.cause
        if sequence is not None and sequence.next_request is slot:
            sequence.next_request, sequence.last_active_at = None, now
            # A request of an earlier run changes nothing: its run has ended while it was in flight. A parked
            # sequence has a request of its present run in flight if it was parked by a reset, then cancelled.
            is_in_run = sequence.status in (SequenceStatus.OPEN, SequenceStatus.PARKED)
            if is_in_run and slot.run_number == sequence.runs[0].number:
                sequence.sticky_token = (
                    sequence.sticky_token if end is None or end.sticky_token is None else end.sticky_token
                )
                sequence.conversation = (
                    sequence.conversation if end is None or end.conversation is None else end.conversation
                )
                sequence.count_end(has_failed=has_failed)
                self._apply_end(
                    sequence, slot.is_last, slot.on_error if has_failed else OnError.CONTINUE, cause, now
                )
                self._end_if_old(sequence, now)
            self._update_sequence(sequence, now)
        elif slot.run_number in self.closed_runs:
            # A remaining request of a closed run was answered.
            del self.closed_runs[slot.run_number].slots[entry]
            if not self.closed_runs[slot.run_number].slots:
                del self.closed_runs[slot.run_number]
        elif sequence is not None and (run := sequence.find_run(slot)) is not None:
            action = slot.on_error if has_failed else OnError.CONTINUE
            # The request ended while it waited, for example by its deadline. Its index must not be waited
            # for.
            run.put_item(slot.index, PassedIndex(slot.is_last, has_failed, action, cause))
            run.waiting_count -= 1
            sequence.last_active_at = now
            self._update_sequence(sequence, now)

    def _pass_index(self, end: TurnEnd, now: float) -> None:
        """Record a request that ended before it claimed its turn.

        If others would wait for its index, or its failure ends the sequence, its index is marked as passed.
        """
        turn = end.turn
        action = (turn.on_error or self.terms.on_error) if end.has_failed else OnError.CONTINUE
        sequence = self.records.get(turn.id)
        if turn.index is None and action is OnError.CONTINUE:
            return
        if not self._has_terms or (
            (sequence is None or sequence.status in _OVER) and not self._has_room(turn.override)
        ):
            return
        if self._find_rejection(sequence, turn, now) is not None:
            return
        sequence, index = self._join_run(sequence, turn, float("inf"), now)
        sequence.runs[-1].put_item(index, PassedIndex(turn.last, end.has_failed, action, end.cause))
        self._update_sequence(sequence, now)

    # Next requests, and ends of runs.

    def _update_sequence(self, sequence: SequenceRecord, now: float) -> None:
        self._advance_sequence(sequence, now)
        self._unpark_sequences(now)
        self._schedule_check(sequence, now)

    def _advance_sequence(self, sequence: SequenceRecord, now: float) -> None:
        """Choose the next request of the sequence if one may be sent now."""
        gap_since, sequence.gap_since = sequence.gap_since, None
        while sequence.next_request is None and sequence.status in _ALIVE and sequence.id in self.records:
            is_held, run = sequence.status is SequenceStatus.HELD, sequence.runs[0]
            if not run.waiting_indexes:
                if is_held or len(sequence.runs) == 1:
                    return
                self._begin_next_run(sequence)
                continue
            index = run.waiting_indexes[0]
            if index > run.expected_index and is_held:
                return
            # A gap before a waiting reset is not waited for: no later request can fill it any more.
            if index > run.expected_index and len(sequence.runs) == 1:
                gap_since = now if gap_since is None else gap_since
                if now < gap_since + self.terms.gap_s:
                    sequence.gap_since = gap_since
                    return
                self.counters.gaps += 1
            item = run.waiting_items[index]
            # A held sequence skips passed indexes, but starts nothing and does not end.
            if is_held and (isinstance(item, Slot) or item.is_last):
                return
            del run.waiting_indexes[0], run.waiting_items[index]
            run.expected_index, gap_since = index + 1, None
            if isinstance(item, Slot):
                self._promote_slot(sequence, run, item, now)
                return
            sequence.count_end(has_failed=item.has_failed)
            if not is_held:
                self._apply_end(sequence, item.is_last, item.action, item.cause, now)

    def _promote_slot(self, sequence: SequenceRecord, run: SequenceRun, slot: Slot, now: float) -> None:
        sequence.next_request, slot.is_waiting = slot, False
        run.waiting_count -= 1
        sequence.began_at, sequence.last_active_at = (
            now if sequence.began_at is None else sequence.began_at,
            now,
        )
        if slot.entry != self._leased_entry:
            self._ready_entries.append(slot.entry)

    def _apply_end(
        self, sequence: SequenceRecord, is_last: bool, action: OnError, cause: str, now: float
    ) -> None:
        """Apply the end of a request of the present run: end, abort or hold the sequence."""
        if is_last:
            self._end_run(sequence, _LAST, now)
        elif action is OnError.ABORT:
            self._close_run(sequence, _ABORT, cause, now)
        elif action is OnError.HOLD:
            self._set_status(sequence, SequenceStatus.HELD)
            sequence.cause = cause
            self.counters.held, self.counters.last_held = self.counters.held + 1, sequence.id

    def _end_if_old(self, sequence: SequenceRecord, now: float) -> None:
        is_old = sequence.began_at is not None and now >= sequence.began_at + self.terms.max_age_s
        if is_old and sequence.status is SequenceStatus.OPEN and sequence.id in self.records:
            self.counters.aged += 1
            self._end_run(sequence, _AGE, now)

    def _end_run(self, sequence: SequenceRecord, why: str, now: float) -> None:
        run = sequence.runs[0]
        if self.terms.refuse_after_end:
            self._close_run(sequence, _END, why, now)
        # The waiting requests begin the next run, under the same run number.
        elif run.waiting_count:
            sequence.begin_run()
            run.expected_index = run.waiting_indexes[0]
        elif len(sequence.runs) > 1:
            self._begin_next_run(sequence)
        else:
            self._forget_record(sequence)

    def _close_run(
        self, sequence: SequenceRecord, closing: tuple[SequenceStatus, ErrorCode], why: str, now: float
    ) -> None:
        """End the present run and fail its remaining requests. If a reset waits, its run begins."""
        if closing is _ABORT:
            self.counters.aborted, self.counters.last_aborted = self.counters.aborted + 1, sequence.id
        self._fail_remaining(sequence.runs[0], closing[1], why)
        if len(sequence.runs) > 1:
            self._begin_next_run(sequence)
            return
        sequence.runs = [self._make_empty_run(sequence)]
        # An empty run remains, so that the end is remembered until the idle time has passed.
        self._set_status(sequence, closing[0])
        sequence.sticky_token, sequence.conversation, sequence.cause, sequence.last_active_at = (
            "",
            b"",
            why,
            now,
        )

    def _make_empty_run(self, sequence: SequenceRecord) -> SequenceRun:
        """Return a run in place of the present one, which has ended."""
        return SequenceRun(next(self._run_numbers), sequence.runs[0].expected_index, sequence.override)

    def _fail_remaining(self, run: SequenceRun, code: ErrorCode, why: str) -> None:
        slots = [run.waiting_items[index] for index in run.waiting_indexes]
        remaining = {slot.entry: slot for slot in slots if isinstance(slot, Slot)}
        if remaining:
            self.closed_runs[run.number] = ClosedRun(code, why, remaining)
        run.waiting_count = 0

    def _begin_next_run(self, sequence: SequenceRecord) -> None:
        del sequence.runs[0]
        sequence.begin_run()
        if sequence.status is SequenceStatus.HELD:
            self._set_status(sequence, SequenceStatus.OPEN)
        run = sequence.runs[0]
        if run.override == sequence.override:
            return
        # The sequence stays active if its new override has room. Its place within max_active is its own.
        self._set_status(sequence, SequenceStatus.ENDED)
        sequence.override, sequence.score = run.override, run.first_score
        has_room = self._has_room_in_override(run.override)
        self._set_status(sequence, SequenceStatus.OPEN if has_room else SequenceStatus.PARKED)

    def _forget_record(self, sequence: SequenceRecord) -> None:
        self._set_status(sequence, SequenceStatus.ENDED)
        del self.records[sequence.id]

    # How many are alive.

    def _has_room(self, override: str = "") -> bool:
        """Return whether a sequence with this override may begin."""
        max_active = self.terms.max_active
        if max_active is not None and sum(self.status_counts[status] for status in _ALIVE) >= max_active:
            return False
        return self._has_room_in_override(override)

    def _has_room_in_override(self, override: str) -> bool:
        max_active = self.terms.get_max_active(override)
        return max_active is None or self._active_by_override[override] < max_active

    def count_overrides(self) -> tuple[OverrideCounts, ...]:
        """Return the counts of the overrides that any active or parked sequence has."""
        return tuple(
            OverrideCounts(name, self._active_by_override[name], self._parked_by_override[name])
            for name in sorted(self._active_by_override.keys() | self._parked_by_override.keys())
            if name and (self._active_by_override[name] or self._parked_by_override[name])
        )

    def _set_status(self, sequence: SequenceRecord, status: SequenceStatus) -> None:
        for known, change in ((sequence.status, -1), (status, 1)):
            self.status_counts[known] += change
            self._active_by_override[sequence.override] += change * (known in _ALIVE)
            self._parked_by_override[sequence.override] += change * (known is SequenceStatus.PARKED)
        sequence.status = status
        if status is SequenceStatus.PARKED:
            heap = self._parked.setdefault(sequence.override, [])
            heapq.heappush(heap, (sequence.score, sequence.id.encode()))

    def _unpark_sequences(self, now: float) -> None:
        for _ in range(LIMITS["MAX_UNPARKED_PER_STEP"]):
            sequence = self._find_first_parked()
            if sequence is None:
                return
            heapq.heappop(self._parked[sequence.override])
            self._set_status(sequence, SequenceStatus.OPEN)
            self._advance_sequence(sequence, now)
            self._schedule_check(sequence, now)

    def _find_first_parked(self) -> SequenceRecord | None:
        """Return the parked sequence that begins next. `None` if there is none, or no room."""
        if not self._has_room():
            return None
        heads = [heap[0] for override in list(self._parked) if (heap := self._drop_outdated(override))]
        return self.records[min(heads)[1].decode()] if heads else None

    def _drop_outdated(self, override: str) -> list[tuple[float, bytes]]:
        """Return the heap of an override without outdated entries at its top. Empty if the override has no
        room."""
        heap = self._parked[override]
        while heap:
            score, name = heap[0]
            sequence = self.records.get(name.decode())
            if (
                sequence is not None
                and sequence.status is SequenceStatus.PARKED
                and (sequence.override, sequence.score) == (override, score)
            ):
                return heap if self._has_room_in_override(override) else []
            heapq.heappop(heap)
        del self._parked[override]
        return heap

    # Time.

    def sweep_due(self, now: float) -> None:
        """Process all checks that are due.

        If time ends a sequence, no parked one begins before all due sequences were checked. Otherwise the
        result would depend on checks that come early.
        """
        due = []
        while self._checks and self._checks[0][0] <= now:
            at, name = heapq.heappop(self._checks)
            sequence = self.records.get(name.decode())
            # Entries of the heap whose time is no longer the scheduled one are outdated.
            if sequence is not None and sequence.check_at == at:
                sequence.check_at = None
                due.append(sequence)
        for sequence in sorted(due, key=lambda one: one.runs[0].number):
            self._check_sequence(sequence, now)
        # Redis does the same: once per sequence, with up to MAX_UNPARKED_PER_STEP sequences each time.
        for _ in range(1 + len(due)):
            self._unpark_sequences(now)
        self.cancel_marks = {name: mark for name, mark in self.cancel_marks.items() if now < mark.expires_at}

    def shift_checks(self, step_s: float) -> None:
        """Shift the times of all checks by `step_s`, which is negative, after the clock stepped back."""
        self._checks = [(at + step_s, name) for at, name in self._checks]
        for sequence in self.records.values():
            sequence.check_at = None if sequence.check_at is None else sequence.check_at + step_s

    def _check_sequence(self, sequence: SequenceRecord, now: float) -> None:
        sequence.clamp_times(now)
        if sequence.next_request is None:
            idle_at = sequence.last_active_at + self.terms.get_max_idle_s(sequence.override)
            if sequence.waiting_count or now < idle_at:
                self._end_if_old(sequence, now)
            elif sequence.status in _OVER:
                self._forget_record(sequence)
            else:
                self.counters.idle += 1
                self._end_run(sequence, _IDLE, now)
        self._advance_sequence(sequence, now)
        self._schedule_check(sequence, now)

    def _schedule_check(self, sequence: SequenceRecord, now: float) -> None:
        """Schedule the next check of the sequence, unless there is an earlier one. As in the scripts, that
        one counts if the terms have changed since, and schedules the next."""
        due = sequence.compute_check_at(self.terms, now)
        has_earlier = sequence.check_at is not None and now < sequence.check_at <= due
        if sequence.id in self.records and not has_earlier:
            sequence.check_at = due
            heapq.heappush(self._checks, (due, sequence.id.encode()))

    # Remaining requests, and decisions of operators.

    def iterate_remaining(self) -> Iterator[tuple[int, ErrorCode, str]]:
        """Yield the entries that are to be answered with an error, with code and reason, in their order."""
        for _, closed in sorted(self.closed_runs.items(), key=lambda item: item[0]):
            for entry in closed.slots:
                yield entry, closed.code, closed.why

    def release_sequence(self, name: str, now: float) -> bool:
        """Let a held sequence continue. Return False if it is not held."""
        sequence = self.records.get(name)
        if sequence is None or sequence.status is not SequenceStatus.HELD:
            return False
        self._set_status(sequence, SequenceStatus.OPEN)
        sequence.cause, sequence.last_active_at = "", now
        self.counters.released += 1
        self._update_sequence(sequence, now)
        return True

    def abort_sequence(self, name: str, why: str, now: float) -> bool:
        """Abort the present run: its waiting requests and later ones are answered SEQUENCE_ABORTED. The next
        request, if it is in flight, runs to its end.

        Return False if the sequence was aborted before, or has ended.
        """
        sequence = self.records.get(name)
        if sequence is not None and sequence.status in _OVER:
            return False
        if sequence is None:  # no request of it was claimed yet, but later ones must be rejected
            self._has_terms = True
            sequence = self._add_unbegun(name, now)
        self._close_run(sequence, _ABORT, why, now)
        self._update_sequence(sequence, now)
        return True

    def _add_unbegun(self, name: str, now: float) -> SequenceRecord:
        sequence = self._add_record(name, now, 0.0)
        sequence.runs = [SequenceRun(next(self._run_numbers), 0)]
        return sequence

    def cancel_sequence(self, name: str, mark: CancelMark, now: float) -> int | None:
        """End the sequence. Its waiting requests are answered CANCELLED, and so are requests that were
        submitted before the mark when they are claimed.

        Return the entry of its next request, with which the sequence ends, or 0 if it has none. `None` if the
        sequence is not known or has ended.
        """
        before = self.cancel_marks.get(name)
        if before is not None and now < before.expires_at:
            mark = CancelMark(
                max(mark.cancelled_at, before.cancelled_at), max(mark.expires_at, before.expires_at)
            )
        self.cancel_marks[name] = mark
        sequence = self.records.get(name)
        if sequence is None and self.terms.refuse_after_end:
            sequence = self._add_unbegun(name, now)
            self._close_run(sequence, _END, _CANCELLED, now)
            self._update_sequence(sequence, now)
            return None
        if sequence is None or sequence.status in _OVER:
            return None
        self.counters.cancelled += 1
        for run in sequence.runs:
            self._fail_remaining(run, ErrorCode.CANCELLED, _CANCELLED)
        sequence.runs = [self._make_empty_run(sequence)]
        if sequence.next_request is not None:
            # The request in flight moves to the new empty run as its last one, so that its end ends the
            # sequence.
            sequence.next_request.run_number, sequence.next_request.is_last = sequence.runs[0].number, True
        else:
            self._end_run(sequence, _CANCELLED, now)
        self._update_sequence(sequence, now)
        return 0 if sequence.next_request is None else sequence.next_request.entry

    def forget_sequence(self, name: str, now: float) -> bool | None:
        """Forget the sequence, so that its id begins anew. Return False, and do nothing, if a request of it
        runs or waits. `None` if the sequence is not known.

        The cancel still applies to requests whose time of submission is known to be before it.
        """
        sequence, mark = self.records.get(name), self.cancel_marks.get(name)
        marked = mark is not None and mark.covers_undated and now < mark.expires_at
        if sequence is None:
            if mark is not None and marked:
                self.cancel_marks[name] = replace(mark, covers_undated=False)
            return True if marked else None
        if sequence.next_request is not None or sequence.waiting_count:
            return False
        if mark is not None:
            self.cancel_marks[name] = replace(mark, covers_undated=False)
        self._forget_record(sequence)
        self._update_sequence(sequence, now)
        return True
