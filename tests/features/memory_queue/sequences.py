"""Steps of claim_turns.lua, find_remaining_requests.lua and sequence_admin.lua: the rules of
sequence_rules.py on a `FeatureQueueState`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnDecision,
    TurnGranted,
    TurnWaits,
)
from dispatcher.features.sequences.queue.calls import RemainingRequest
from dispatcher.features.sequences.queue.turn_end import TurnEnd, get_sequence_owner
from dispatcher.features.sequences.turns import LANE, SequenceSnapshot, Turn
from dispatcher.lab.memory_queue.entries import Entry, Location
from dispatcher.queue.contract import Extra, Lease, UnleasedRequest
from dispatcher.queue.lua_files import FEATURE_CONSTANTS as LIMITS
from tests.features.memory_queue.sequence_runs import CancelMark, SequenceRecord

if TYPE_CHECKING:
    from tests.features.memory_queue import FeatureQueueState


def claim_turns(
    queue: FeatureQueueState, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms
) -> list[TurnDecision]:
    queue.sequences.set_terms(terms)
    now = queue.pool.clock()
    return [_claim_turn(queue, lease, turn, now) for lease, turn in turns]


def _claim_turn(queue: FeatureQueueState, lease: Lease, turn: Turn, now: float) -> TurnDecision:
    pool, grant = queue.pool, queue.find_lease(lease)
    if grant is None:
        return TurnWaits()
    entry = grant.entry
    verdict = queue.sequences.claim_turn(entry.id, entry.score, _with_owner(queue, turn), now)
    if isinstance(verdict, TurnWaits):
        pool.end_lease(grant)
        entry.deliveries -= 1  # it was not delivered
        entry.closed_lane = LANE
        queue.move_entry(entry, Location.RETURNED)
    return_ready_entries(queue)
    return verdict


def _with_owner(queue: FeatureQueueState, turn: Turn) -> Turn:
    return structs.replace(turn, owner=get_sequence_owner(queue.names, turn))


def return_ready_entries(queue: FeatureQueueState) -> list[Entry]:
    """Return the entries whose turn has come to the queue, where they can be claimed."""
    moved = [queue.entries[number] for number in queue.sequences.take_ready_entries()]
    for entry in moved:
        queue.move_entry(entry, Location.RETURNED)
    return moved


def end_turn(queue: FeatureQueueState, entry: Entry, extra: Extra | None, now: float) -> list[Entry]:
    """End the turn of a request that has ended. Return the entries whose turn has come by that."""
    end = extra if isinstance(extra, TurnEnd) else None
    if end is not None:
        end = structs.replace(end, turn=_with_owner(queue, end.turn))
    queue.sequences.end_request(entry.id, end, now)
    return return_ready_entries(queue)


def get_granted_turn(queue: FeatureQueueState, entry: Entry) -> TurnGranted:
    """Return the granted turn of a request that has the turn."""
    goes = queue.sequences.get_granted_turn(entry.id)
    assert goes is not None
    return goes


def sweep_sequences(queue: FeatureQueueState) -> int:
    """End what time ends. Return the number of requests whose turn has come by that."""
    queue.sequences.sweep_due(queue.pool.clock())
    return len(return_ready_entries(queue))


def find_remaining_requests(queue: FeatureQueueState, max_count: int) -> list[RemainingRequest]:
    found: list[RemainingRequest] = []
    for number, code, why in queue.sequences.iterate_remaining():
        if len(found) == max_count:
            break
        entry = queue.entries[number]
        request = UnleasedRequest(entry.location_token, entry.member, progress=entry.progress)
        found.append(RemainingRequest(request, code, why))
    return found


def get_sequence(queue: FeatureQueueState, name: str) -> SequenceSnapshot | None:
    one = queue.sequences.records.get(name)
    return None if one is None else _to_sequence_state(queue, one, LIMITS["MAX_WAITING_SHOWN"])


def _to_sequence_state(
    queue: FeatureQueueState, sequence: SequenceRecord, max_waiting: int
) -> SequenceSnapshot:
    """Return the state of a sequence with its times in Unix seconds."""
    seen, origin = sequence.make_snapshot(max_waiting), queue.pool.unix_origin
    return replace(
        seen,
        began_at=None if seen.began_at is None else seen.began_at + origin,
        last_active_at=seen.last_active_at + origin,
        gap_since=None if seen.gap_since is None else seen.gap_since + origin,
    )


def release_sequence(queue: FeatureQueueState, name: str) -> bool:
    done = queue.sequences.release_sequence(name, queue.pool.clock())
    return _return_and_wake(queue, done=done)


def abort_sequence(queue: FeatureQueueState, name: str, why: str) -> bool:
    done = queue.sequences.abort_sequence(name, why, queue.pool.clock())
    return _return_and_wake(queue, done=done)


def cancel_sequence(
    queue: FeatureQueueState, name: str, submitted_until: float | None, claimed_within_s: float
) -> int | None:
    """Cancel a sequence, and return what `SequenceTable.cancel_sequence` returns. The caller cancels the
    entry."""
    now = queue.pool.clock()
    mark = CancelMark(
        queue.pool.unix_now() if submitted_until is None else submitted_until, now + claimed_within_s
    )
    next_entry = queue.sequences.cancel_sequence(name, mark, now)
    return_ready_entries(queue)
    return next_entry


def forget_sequence(queue: FeatureQueueState, name: str) -> bool | None:
    done = queue.sequences.forget_sequence(name, queue.pool.clock())
    _return_and_wake(queue, done=bool(done))
    return done


def _return_and_wake(queue: FeatureQueueState, *, done: bool) -> bool:
    return_ready_entries(queue)
    if done:
        queue.pool.wake_dispatchers()
    return done
