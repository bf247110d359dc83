"""Effects of calls that the queue in memory does not have, because no dispatcher in virtual time needs them.
The model tests compare the scripts with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dispatcher.lab.memory_queue.entries import Entry, Location
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.lab.memory_queue.sweep import reclaim_from_owners
from dispatcher.queue.contract import SweepSummary
from dispatcher.queue.requeue import build_resubmission
from tests.features.memory_queue import MemoryQueue


def drop_oldest_dead(queue: QueueState, dead_max: int) -> int:
    """Drop those dead requests beyond `dead_max` that died first. Return their number."""
    dropped = [entry for entry, _ in list(queue.dead.values())[: max(0, len(queue.dead) - dead_max)]]
    for entry in dropped:
        queue.remove_entry(entry)
    return len(dropped)


async def purge_dead(queue: QueueState, entry_ids: Sequence[int]) -> int:
    """Delete dead requests. Return their number."""
    known = [queue.dead[entry_id][0] for entry_id in entry_ids if entry_id in queue.dead]
    for entry in known:
        queue.remove_entry(entry)
    return len(known)


async def requeue_dead(queue: QueueState, entry_ids: Sequence[int], deadline: int) -> int:
    """Submit dead requests again, except for those that cannot be read. Return their number."""
    requeued_count = 0
    for entry in [queue.dead[entry_id][0] for entry_id in entry_ids if entry_id in queue.dead]:
        again = build_resubmission(queue.names, entry.member, entry.score, deadline)
        if again is None:
            continue
        requeued_count += 1
        queue.remove_entry(entry)
        if entry.progress:  # a pending request has no place for it, so the request is returned
            started = Entry(again.member, again.score)
            started.id, started.progress = queue.pool.next_entry_id(), entry.progress
            started.units = 1  # only pending requests count the assumed units
            queue.entries[started.id] = started
            queue.move_entry(started, Location.RETURNED)
        else:
            queue.add_member(again.member, again.score)
        queue.active_tokens.setdefault(again.request_id, {})[again.request_token] = again.deadline
    return requeued_count


async def sweep(owner: MemoryQueue, ended_owners: Collection[str]) -> SweepSummary:
    """Sweep, then reclaim the leases of other owners that are proven to have ended. They are not orphaned,
    because none of their requests runs any more."""
    summary, pool = await owner.sweep(), owner.store.pool
    ended = [name for name in ended_owners if name != owner.owner and pool.units_by_owner[name]]
    reclaimed_count = summary.reclaimed_count + reclaim_from_owners(owner.store.queue, ended)
    return replace(summary, reclaimed_count=reclaimed_count, lost_units=pool.lost_units)
