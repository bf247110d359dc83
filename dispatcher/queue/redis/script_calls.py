"""One function for each script, which encodes its arguments and decodes its reply.

Each call is atomic and safe to repeat. The header of the Lua file says what it guarantees. Everything that
needs several calls is part of the owner or of the queue admin.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dispatcher.core.requests.forecast import REPLICAS, LineAhead
from dispatcher.core.requests.lanes import Lane, rooms
from dispatcher.core.sequences.decisions import Goes
from dispatcher.ports import (
    Claimed,
    Counts,
    Dead,
    Expired,
    Lease,
    Overload,
    Permit,
    Release,
    Renewed,
    Settled,
    Settlement,
    Submission,
    Weighed,
)
from dispatcher.queue.constants import CLAIM_BYTES, DONE, LOST, REPLY_TTL_S
from dispatcher.queue.keys import MAX_TOKEN_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.overdue import place_of
from dispatcher.queue.redis.producer import mark
from dispatcher.queue.redis.replies import dead_of, facts_of, lease_of, line_of
from dispatcher.queue.redis.scripts import SCRIPT_BYTES, Argument, Scripts, source
from dispatcher.queue.redis.sequences import TakeOver, counted_of, handed_of, left_by, news_of
from dispatcher.queue.redis.waiting_for_model import awaits_of

_SPLITS = 200
"""Largest number of spans that one snapshot splits."""
_HEAD_BYTES = 4096
_NO_RESULT, _PUSH, _POST = range(3)
"""Delivery of a result to its list: none, in the same step, or by the outbox."""


@dataclass(frozen=True, slots=True)
class OwnerTerms:
    """Arguments that the scripts of an owner have in common."""

    owner: str
    timeout_s: float
    """Seconds without a call after which the owner counts as dead. With 0, only its leases run out."""
    lease_s: float
    arguments: tuple[Argument, ...] = field(init=False)
    """These values as arguments of a script."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", (self.owner, self.timeout_s, self.lease_s))


# Leases.


@dataclass(frozen=True, slots=True)
class ClaimReply:
    claimed: Claimed
    untold_bytes: int
    """Size of the member if it is too large to be part of the reply, which then has one lease.
    Otherwise 0."""


async def claim(
    backend: Backend,
    me: OwnerTerms,
    nonce: str,
    permit: Permit,
    *,
    most: int,
    lanes: Mapping[Lane, int],
    units: int,
    largest: int,
    probing: bool = False,
) -> ClaimReply:
    """Run claim.lua. `max_member_bytes` is the size of the largest member that is moved whole."""
    args: list[Argument] = [*me.arguments, most, CLAIM_BYTES, secrets.token_hex(16), REPLY_TTL_S]
    args += [int(probing), *_permit(backend, permit), largest, max(0, units), *rooms(lanes).values()]
    reply = await backend.run("claim", args, [backend.names.reply(f"{me.owner}:{nonce}")])
    facts, waiting, flat = reply.value
    leases = [lease_of(*flat[at : at + 10]) for at in range(0, len(flat), 10)]
    untold = flat[2] if flat and isinstance(flat[2], int) else 0
    return ClaimReply(Claimed(leases, *facts_of(backend, reply, facts), waiting), untold)


async def shorten(backend: Backend, lease: Lease) -> bytes | None:
    """Cut the member of a lease. Return what is left of it, or `None` if the lease has ended."""
    left: bytes | None = (await backend.run("shorten", [lease.entry, lease.token])).value
    return left


async def renew(
    backend: Backend,
    me: OwnerTerms,
    leases: Sequence[Lease] = (),
    permit: Permit | None = None,
    overload: Overload | None = None,
) -> Renewed:
    """Run renew.lua. An overload is shared with the permit of the owner that saw it."""
    args: list[Argument] = [*me.arguments, len(leases)]
    for lease in leases:
        args += (lease.entry, lease.token)
    if permit is not None:
        args += _permit(backend, permit)[:-1]  # unleased units are of no interest to other owners
        if overload is not None:
            args += [backend.server_time(overload.at), backend.server_time(overload.until)]
            args += [int(overload.capacity), overload.in_flight]
    reply = await backend.run("renew", args)
    facts, lost = reply.value
    return Renewed(lost, *facts_of(backend, reply, facts))


async def weigh(
    backend: Backend, me: OwnerTerms, weights: Sequence[tuple[Lease, int]], permit: Permit
) -> Weighed:
    args: list[Argument] = [*me.arguments, *_permit(backend, permit)]
    for lease, units in weights:
        args += (lease.entry, lease.token, max(0, units))
    reply = await backend.run("weigh", args)
    facts, fits = reply.value
    return Weighed([bool(each) for each in fits], *facts_of(backend, reply, facts))


async def release(backend: Backend, releases: Sequence[Release]) -> list[Settled]:
    args: list[Argument] = [REPLY_TTL_S]
    for each in releases:
        args += (each.lease.entry, each.lease.token, f"{each.delay_s:.6f}")
        args += (int(each.attempt), int(each.refusal), int(each.undelivered), each.last_try)
        args += awaits_of(each)
    reply = await backend.run("release", args, [backend.new_reply()])
    now, *statuses = reply.value
    backend.saw(reply, now)
    return [Settled.LOST if status == LOST else Settled.DONE for status in statuses]


@dataclass(frozen=True, slots=True)
class SweepReply:
    reclaimed: int
    due: int
    next_due_at: float | None
    more: bool
    """True if there are more leases to take back, or more requests to return."""
    lost: int
    holders: Sequence[str]
    """Owners that hold leases."""
    turns: int
    """Number of requests of sequences whose turn has come."""
    revoked: int
    """Number of cancelled requests that waited for their model."""


async def sweep(
    backend: Backend, me: OwnerTerms, most: int, gone: Sequence[str], *, max_pending: int
) -> SweepReply:
    """Run sweep.lua. `ended_owners` are proven to have ended."""
    reply = await backend.run("sweep", [*me.arguments, most, _foreign(backend), max_pending, *gone])
    now, reclaimed, due, next_due, more, lost, holders, turns, revoked = reply.value
    backend.saw(reply, now)
    return SweepReply(
        reclaimed,
        due,
        None if next_due is None else backend.loop_time(next_due),
        bool(more),
        lost,
        [holder.decode(errors="replace") for holder in holders],
        turns,
        revoked,
    )


# Results.


@dataclass(frozen=True, slots=True)
class Write:
    """Write of one result, and the lease or the overdue unleased request that ends with it."""

    settlement: Settlement
    bury: str | None = None
    """Reason for which the request goes to the dead-letter set. `None` if it does not."""
    lies: Expired | None = None
    """Location of the request if it is not leased."""
    instead: int = DONE
    """Status if this result replaces another one: BAD_LIST for the INVALID_REQUEST of a refused list,
    TOO_LARGE for a result that the server does not take."""

    @property
    def size(self) -> int:
        turn = self.settlement.turn
        carried = 0 if turn is None or turn.carry is None else len(turn.carry)
        return len(self.settlement.result) + carried + (0 if self.lies is None else len(self.lies.member))

    @property
    def ends(self) -> tuple[int, str] | Expired:
        """Key that identifies the lease or the request that ends with the write."""
        return (self.settlement.lease.entry, self.settlement.lease.token) if self.lies is None else self.lies


@dataclass(frozen=True, slots=True)
class SettleReply:
    statuses: Sequence[int]
    dropped: int
    """Number of dead requests that were dropped for `dead_max`."""
    claimed: Claimed | None = None
    """Claimed next requests. `None` if nothing was offered, or if the reply was lost."""
    goes: Sequence[Goes] = ()
    """Granted turns of these requests."""


async def settle(
    backend: Backend, writes: Sequence[Write], *, ttl_s: int, dead_max: int, offer: TakeOver | None = None
) -> SettleReply:
    keys, args = _results_keys(backend), [*_results_head(backend, ttl_s), dead_max]
    args.append("" if offer is None else offer.packed(backend))
    if offer is not None:
        keys.append(backend.names.reply(f"{offer.owner}:{offer.nonce}"))
    for write in writes:
        lease, why = write.settlement.lease, write.bury
        args += (lease.entry, lease.token, *_result(backend, write.settlement))
        args += (0, "") if why is None else (1, why)
        args += left_by(backend, write.settlement.turn)
    size = sum(write.size for write in writes)
    reply = await backend.run("settle", args, keys, size=size)
    now, dropped, handed, *statuses = reply.value
    backend.saw(reply, now)
    if not isinstance(handed, list):  # no offer, or the reply of a repeated call, which has only a number
        return SettleReply(statuses, dropped)
    return SettleReply(statuses, dropped, *handed_of(backend, reply, handed))


async def expire(backend: Backend, writes: Sequence[Write], *, ttl_s: int) -> Sequence[int]:
    """Run settle_unleased.lua for the writes of unleased requests. Return a status for each."""
    args: list[Argument] = _results_head(backend, ttl_s)
    for write in writes:
        if write.lies is not None:
            args += (place_of(write.lies), write.lies.member, *_result(backend, write.settlement))
            args += left_by(backend, write.settlement.turn)
    size = sum(write.size for write in writes)
    statuses: Sequence[int] = (await backend.run("expire", args, _results_keys(backend), size=size)).value
    return statuses


def _results_head(backend: Backend, ttl_s: int) -> list[Argument]:
    return [REPLY_TTL_S, ttl_s, _foreign(backend)]


def _foreign(backend: Backend) -> int:
    """Return 1 if scripts of the queue can reach the markers of llm-d's producers, otherwise 0."""
    return int(not backend.scripts.is_cluster)


def _results_keys(backend: Backend) -> list[Argument]:
    """Return the reply key and the default list. A default list in another slot must not be named to a
    script, so the outbox takes its place."""
    default = key_of(backend.names.results)
    return [backend.new_reply(), backend.names.outbox if backend.elsewhere(default) else default]


def _result(backend: Backend, settlement: Settlement) -> tuple[Argument, ...]:
    name = key_of(settlement.results or backend.names.results)
    # Scripts of a Cluster can only write keys of the queue's slot, so other lists need the outbox.
    how = _NO_RESULT if not settlement.result else _POST if backend.elsewhere(name) else _PUSH
    token = key_of(settlement.request_token)
    # Without an id, the script leaves the markers alone. A token that is too long is part of no key.
    request = key_of(settlement.request_id) if 0 < len(token) <= MAX_TOKEN_BYTES else b""
    return how, name, settlement.result, request, token


@dataclass(frozen=True, slots=True)
class OverdueReply:
    until: bytes
    next_range: int
    """Range at which to go on. -1 at the end."""
    next_offset: int
    rows: Sequence[tuple[int, bytes, bytes, bytes, int, int]]
    """Range, location, member, last attempt, failed attempts and refusals of each request."""
    alone_bytes: int
    """Size of the first member if it needs a call of its own, and then the only row has no member. Otherwise
    0."""


async def overdue(
    backend: Backend, position: Sequence[Argument], most: int, *, largest: int, alone_bytes: int = 0
) -> OverdueReply:
    """Run one call of a search. `large_member_bytes` is the size of the first member if it is to be returned
    alone."""
    args = [*position, most, alone_bytes or SCRIPT_BYTES, largest]
    reply = await backend.run("overdue", args, size=alone_bytes)
    until, next_range, next_offset, *rows = reply.value
    size = rows[0][2] if rows and isinstance(rows[0][2], int) else 0
    return OverdueReply(until, next_range, next_offset, rows, size)


async def unfit(backend: Backend, lists: Sequence[bytes]) -> list[bool]:
    """Return for each list whether it takes no results. A Cluster finds the node by the key of the queue."""
    told = (await backend.scripts.run("unfit", [backend.names.queue], lists)).value
    return [bool(no) for no in told]


# Between the slots of a Cluster.


async def push(
    backend: Backend,
    name: bytes,
    marker: bytes,
    results: Sequence[tuple[bytes, bytes]],
    *,
    ttl_s: int,
    marker_s: int,
) -> bool:
    """Push results by their numbers, in rising order. Return False if the list or the marker has another
    type."""
    parts = [part for result in results for part in result]
    size = sum(map(len, parts))
    reply = await backend.scripts.run("push", [name, marker], [ttl_s, marker_s, *parts], size=size)
    return bool(reply.value)


async def forget(backend: Backend, marker: bytes, token: bytes) -> None:
    """Delete a marker of llm-d's producers."""
    await backend.scripts.run("forget", [marker], [token])


# Looking.


async def counts(backend: Backend) -> Counts:
    reply = await backend.run("counts", [])
    now, pending, leased, delayed, dead, units, *of_sequences, awaiting = reply.value
    backend.saw(reply, now)
    news = news_of(of_sequences[0])
    return Counts(pending, leased, delayed, dead, units, counted_of(*of_sequences), news, awaiting)


async def outlook(backend: Backend, timeout_s: float, rate: float | None, service_s: float) -> LineAhead:
    args: list[Argument] = [timeout_s, repr(rate or 0.0), repr(service_s), _SPLITS, _HEAD_BYTES, REPLICAS]
    reply = await backend.run("outlook", args)
    backend.saw(reply, reply.value[0])
    return line_of(reply.value)


async def peek(backend: Backend, most: int) -> list[tuple[float, bytes]]:
    found = (await backend.run("peek", [most, SCRIPT_BYTES])).value
    return [(float(found[at]), found[at + 1]) for at in range(0, len(found), 2)]


async def permits(scripts: Scripts, calls: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each call whether this user may make it. Empty if the server cannot be asked."""
    flat = [word for call in calls for word in (str(len(call)), *call)]
    # By EVAL, because EVALSHA is among the permissions in question.
    text, _ = source("permits")
    told = await scripts.attempt(lambda: scripts.client.execute_command("EVAL", text, 0, *flat))
    return [bool(granted) for granted in told]


# Producers and operators.


async def dead_after(backend: Backend, entry: int, most: int) -> list[Dead]:
    return await _dead(backend, "list", entry, most)


async def dead_newest(backend: Backend, most: int) -> list[Dead]:
    return await _dead(backend, "newest", 0, most)


async def _dead(backend: Backend, how: str, after: int, most: int) -> list[Dead]:
    found = (await backend.run("dead", [how, after, most, SCRIPT_BYTES])).value
    return [dead_of(*found[at : at + 9]) for at in range(0, len(found), 9)]


async def purge(backend: Backend, entries: Sequence[int]) -> int:
    """Delete dead requests. Return how many there were."""
    gone: int = (await backend.run("dead", ["purge", *entries])).value
    return gone


async def requeue(backend: Backend, entry: int, again: Submission) -> int:
    args: list[Argument] = [entry, repr(again.score), again.member, backend.names.wake, *mark(again)]
    done: int = (await backend.run("requeue", args)).value
    return done


# What arguments and replies are made of.


def key_of(name: str) -> bytes:
    """Encode a name of a request as a key. A lone surrogate must not raise here."""
    return name.encode(errors="surrogatepass")


def _permit(backend: Backend, permit: Permit) -> tuple[Argument, ...]:
    by = permit.limit, backend.server_time(permit.read_at), permit.lost
    return *by, permit.retry_after_max_s, permit.apart
