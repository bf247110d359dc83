"""Steps of claim_turns.lua, find_remaining_requests.lua and sequence_admin.lua: the rules of
core/sequences/rules.py on a `QueueState`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from dispatcher.core.requests.oversize import cut
from dispatcher.core.requests.request import Request, parse
from dispatcher.core.sequences.decisions import Goes, SequencePage, SequenceTerms, TurnEnd, Verdict, Waits
from dispatcher.core.sequences.runs import CancelMark, Sequenced
from dispatcher.core.sequences.turns import LINE_SEEN, SequenceSeen, SequenceStatus, Turn
from dispatcher.lab.memory_queue import admin_steps
from dispatcher.lab.memory_queue.entries import Entry, Place
from dispatcher.lab.memory_queue.state import Line
from dispatcher.ports import Expired, Lease, Unserved


def line_up(line: Line, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms) -> list[Verdict]:
    line.sequences.tell(terms)
    now = line.pool.clock()
    return [_line_up(line, lease, turn, now) for lease, turn in turns]


def _line_up(line: Line, lease: Lease, turn: Turn, now: float) -> Verdict:
    pool, grant = line.pool, line.held(lease)
    if grant is None:
        return Waits()
    entry = grant.entry
    verdict = line.sequences.line_up(entry.id, entry.score, _owned(line, turn), now)
    if isinstance(verdict, Waits):
        pool.end_lease(grant)
        entry.deliveries -= 1  # it was not delivered
        entry.in_line = True
        line.move(entry, Place.RETURNED)
    bring_forward(line)
    return verdict


def _owned(line: Line, turn: Turn) -> Turn:
    return structs.replace(turn, owner=line.names.owner(turn))


def bring_forward(line: Line) -> list[Entry]:
    """Return the entries whose turn has come to the queue, where they can be claimed."""
    moved = [line.entries[number] for number in line.sequences.moved()]
    for entry in moved:
        line.leave_lane(entry)
        line.move(entry, Place.RETURNED)
    return moved


def end_turn(line: Line, entry: Entry, end: TurnEnd | None, now: float) -> list[Entry]:
    """End the turn of a request that has ended. Return the entries whose turn has come by that."""
    if end is not None:
        end = structs.replace(end, turn=_owned(line, end.turn))
    line.sequences.end(entry.id, end, now)
    return bring_forward(line)


def goes_of(line: Line, entry: Entry) -> Goes:
    """Return the granted turn of a request that has the turn."""
    goes = line.sequences.goes(entry.id)
    assert goes is not None  # noqa: S101 -- it was moved
    return goes


def sweep(line: Line) -> int:
    """End what time ends. Return the number of requests whose turn has come by that."""

    def is_there(number: int) -> bool:
        entry = line.entries.get(number)
        return entry is not None and entry.place is not Place.DEAD

    line.sequences.sweep(line.pool.clock(), is_there)
    return len(bring_forward(line))


def unserved(line: Line, most: int) -> list[Unserved]:
    found: list[Unserved] = []
    for number, code, why in line.sequences.unserved():
        if len(found) == most:
            break
        entry = line.entries[number]
        whole = len(entry.member) <= line.largest
        member = entry.member if whole else cut(entry.member)
        found.append(Unserved(Expired(entry.where, member), code, why))
    return found


def page(line: Line, most: int, after: str, status: SequenceStatus | None) -> SequencePage:
    names = sorted(line.sequences.known)
    first = int(after or 0)
    some = [line.sequences.known[name] for name in names[first : first + most]]
    found = [_seen(line, one, 0) for one in some if status in (None, one.status)]
    return SequencePage(found, str(first + most) if first + most < len(names) else "")


def show(line: Line, name: str) -> SequenceSeen | None:
    one = line.sequences.known.get(name)
    return None if one is None else _seen(line, one, LINE_SEEN)


def _seen(line: Line, one: Sequenced, most: int) -> SequenceSeen:
    """Return the state of a sequence with its times in Unix seconds."""
    seen, origin = one.seen(most), line.pool.unix_origin
    return replace(
        seen,
        began_at=None if seen.began_at is None else seen.began_at + origin,
        touched_at=seen.touched_at + origin,
        gap_since=None if seen.gap_since is None else seen.gap_since + origin,
    )


def release(line: Line, name: str) -> bool:
    done = line.sequences.release(name, line.pool.clock())
    return _decided(line, done=done)


def abort(line: Line, name: str, why: str) -> bool:
    done = line.sequences.abort(name, why, line.pool.clock())
    return _decided(line, done=done)


def cancel(line: Line, name: str, at: float | None, for_s: float) -> bool:
    now = line.pool.clock()
    mark = CancelMark(line.pool.unix_now() if at is None else at, now + for_s)
    head = line.sequences.cancel(name, mark, now)
    if head:
        request = parse(line.entries[head].member)
        if isinstance(request, Request) and request.token:
            admin_steps.cancel(line, request.id, request.token, found=True)
    _decided(line, done=True)
    return head is not None


def forget(line: Line, name: str) -> bool | None:
    done = line.sequences.forget(name, line.pool.clock())
    _decided(line, done=bool(done))
    return done


def _decided(line: Line, *, done: bool) -> bool:
    bring_forward(line)
    if done:
        line.pool.wake()
    return done
