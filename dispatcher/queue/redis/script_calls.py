"""One function for each script, which encodes its arguments and decodes its reply.

Each call is atomic and safe to repeat. The header of the Lua file says what it guarantees. Everything that
needs several calls is part of the owner or of the queue admin.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dispatcher.core.requests.forecast import MAX_REPLICAS_LISTED, QueueSnapshot
from dispatcher.core.requests.lanes import Lane, compute_lane_room
from dispatcher.core.sequences.decisions import TurnGranted
from dispatcher.ports import (
    ClaimResult,
    DeadRequest,
    Lease,
    LeaseUnitsResult,
    Overload,
    Permit,
    QueueCounts,
    Release,
    RenewResult,
    Settlement,
    SettleStatus,
    Submission,
    UnleasedRequest,
)
from dispatcher.queue.constants import CLAIM_BYTES, DONE, LOST, REPLY_TTL_S
from dispatcher.queue.keys import MAX_TOKEN_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.overdue import parse_location
from dispatcher.queue.redis.producer import build_active_marker
from dispatcher.queue.redis.replies import (
    decode_dead_request,
    decode_lease,
    decode_owner_reply,
    decode_queue_snapshot,
)
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Argument, ScriptRunner, build_source
from dispatcher.queue.redis.sequences import (
    NextClaimOffer,
    decode_next_claim,
    decode_sequence_counters,
    decode_sequence_counts,
    encode_turn_end,
)
from dispatcher.queue.redis.waiting_for_model import encode_model_wait

_MAX_SPAN_SPLITS = 200
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
    script_args: tuple[Argument, ...] = field(init=False)
    """These values as arguments of a script."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "script_args", (self.owner, self.timeout_s, self.lease_s))


# Leases.


@dataclass(frozen=True, slots=True)
class ClaimReply:
    claim_result: ClaimResult
    large_member_bytes: int
    """Size of the member if it is too large to be part of the reply, which then has one lease.
    Otherwise 0."""


async def claim(
    backend: Backend,
    owner_terms: OwnerTerms,
    nonce: str,
    permit: Permit,
    *,
    max_count: int,
    max_per_lane: Mapping[Lane, int],
    assumed_units: int,
    max_member_bytes: int,
    is_probe: bool = False,
) -> ClaimReply:
    """Run claim.lua. `max_member_bytes` is the size of the largest member that is moved whole."""
    args: list[Argument] = [
        *owner_terms.script_args,
        max_count,
        CLAIM_BYTES,
        secrets.token_hex(16),
        REPLY_TTL_S,
    ]
    args += [
        int(is_probe),
        *_encode_permit(backend, permit),
        max_member_bytes,
        max(0, assumed_units),
        *compute_lane_room(max_per_lane).values(),
    ]
    reply = await backend.run_script("claim", args, [backend.names.reply_key(f"{owner_terms.owner}:{nonce}")])
    facts, waiting, flat = reply.value
    leases = [decode_lease(*flat[at : at + 10]) for at in range(0, len(flat), 10)]
    large_member_bytes = flat[2] if flat and isinstance(flat[2], int) else 0
    return ClaimReply(
        ClaimResult(leases, *decode_owner_reply(backend, reply, facts), waiting), large_member_bytes
    )


async def cut_member(backend: Backend, lease: Lease) -> bytes | None:
    """Cut the member of a lease. Return what is left of it, or `None` if the lease has ended."""
    left: bytes | None = (await backend.run_script("cut_member", [lease.entry_id, lease.token])).value
    return left


async def renew(
    backend: Backend,
    owner_terms: OwnerTerms,
    leases: Sequence[Lease] = (),
    permit: Permit | None = None,
    overload: Overload | None = None,
) -> RenewResult:
    """Run renew.lua. An overload is shared with the permit of the owner that saw it."""
    args: list[Argument] = [*owner_terms.script_args, len(leases)]
    for lease in leases:
        args += (lease.entry_id, lease.token)
    if permit is not None:
        args += _encode_permit(backend, permit)[:-1]  # unleased units are of no interest to other owners
        if overload is not None:
            args += [backend.to_server_time(overload.refused_at), backend.to_server_time(overload.retry_at)]
            args += [int(overload.is_out_of_capacity), overload.in_flight]
    reply = await backend.run_script("renew", args)
    facts, lost = reply.value
    return RenewResult(lost, *decode_owner_reply(backend, reply, facts))


async def set_lease_units(
    backend: Backend, owner_terms: OwnerTerms, lease_units: Sequence[tuple[Lease, int]], permit: Permit
) -> LeaseUnitsResult:
    args: list[Argument] = [*owner_terms.script_args, *_encode_permit(backend, permit)]
    for lease, units in lease_units:
        args += (lease.entry_id, lease.token, max(0, units))
    reply = await backend.run_script("set_lease_units", args)
    facts, fits = reply.value
    return LeaseUnitsResult([bool(each) for each in fits], *decode_owner_reply(backend, reply, facts))


async def release(backend: Backend, releases: Sequence[Release]) -> list[SettleStatus]:
    args: list[Argument] = [REPLY_TTL_S]
    for each in releases:
        args += (each.lease.entry_id, each.lease.token, f"{each.delay_s:.6f}")
        args += (
            int(each.is_failed_attempt),
            int(each.is_refusal),
            int(each.is_undelivered),
            each.last_attempt,
        )
        args += encode_model_wait(each)
    reply = await backend.run_script("release", args, [backend.create_reply_key()])
    now, *statuses = reply.value
    backend.observe_clock(reply, now)
    return [SettleStatus.LOST if status == LOST else SettleStatus.DONE for status in statuses]


@dataclass(frozen=True, slots=True)
class SweepReply:
    reclaimed_count: int
    due_count: int
    next_due_at: float | None
    has_more: bool
    """True if there are more leases to take back, or more requests to return."""
    lost_units: int
    lease_owners: Sequence[str]
    """Owners that hold leases."""
    turn_count: int
    """Number of requests of sequences whose turn has come."""
    cancelled_count: int
    """Number of cancelled requests that waited for their model."""


async def sweep(
    backend: Backend,
    owner_terms: OwnerTerms,
    max_count: int,
    ended_owners: Sequence[str],
    *,
    max_pending: int,
) -> SweepReply:
    """Run sweep.lua. `ended_owners` are proven to have ended."""
    reply = await backend.run_script(
        "sweep",
        [*owner_terms.script_args, max_count, _foreign_markers_flag(backend), max_pending, *ended_owners],
    )
    now, reclaimed, due, next_due, more, lost, holders, turns, revoked = reply.value
    backend.observe_clock(reply, now)
    return SweepReply(
        reclaimed,
        due,
        None if next_due is None else backend.to_loop_time(next_due),
        bool(more),
        lost,
        [holder.decode(errors="replace") for holder in holders],
        turns,
        revoked,
    )


# Results.


@dataclass(frozen=True, slots=True)
class ResultWrite:
    """Write of one result, and the lease or the overdue unleased request that ends with it."""

    settlement: Settlement
    dead_reason: str | None = None
    """Reason for which the request goes to the dead-letter set. `None` if it does not."""
    is_failed_attempt: bool = False
    """True if the last attempt of a dead request counts as a failed one."""
    unleased: UnleasedRequest | None = None
    """Location of the request if it is not leased."""
    replacement_status: int = DONE
    """Status if this result replaces another one: BAD_LIST for the INVALID_REQUEST of a refused list,
    TOO_LARGE for a result that the server does not take."""

    @property
    def size_bytes(self) -> int:
        turn = self.settlement.turn_end
        carried = 0 if turn is None or turn.conversation is None else len(turn.conversation)
        return (
            len(self.settlement.result)
            + carried
            + (0 if self.unleased is None else len(self.unleased.member))
        )

    @property
    def identity(self) -> tuple[int, str] | UnleasedRequest:
        """Key that identifies the lease or the request that ends with the write."""
        return (
            (self.settlement.lease.entry_id, self.settlement.lease.token)
            if self.unleased is None
            else self.unleased
        )


@dataclass(frozen=True, slots=True)
class SettleReply:
    statuses: Sequence[int]
    dropped_dead_count: int
    """Number of dead requests that were dropped for `dead_max`."""
    claim_result: ClaimResult | None = None
    """Claimed next requests. `None` if nothing was offered, or if the reply was lost."""
    granted_turns: Sequence[TurnGranted] = ()
    """Granted turns of these requests."""


async def settle(
    backend: Backend,
    writes: Sequence[ResultWrite],
    *,
    ttl_s: int,
    dead_max: int,
    offer: NextClaimOffer | None = None,
) -> SettleReply:
    keys, args = _results_keys(backend), [*_result_head_args(backend, ttl_s), dead_max]
    args.append("" if offer is None else offer.pack_arguments(backend))
    if offer is not None:
        keys.append(backend.names.reply_key(f"{offer.owner}:{offer.nonce}"))
    for write in writes:
        lease, why = write.settlement.lease, write.dead_reason
        args += (lease.entry_id, lease.token, *_encode_result(backend, write.settlement))
        args += (0, "") if why is None else (2 if write.is_failed_attempt else 1, why)
        args += encode_turn_end(backend, write.settlement.turn_end)
    size = sum(write.size_bytes for write in writes)
    reply = await backend.run_script("settle", args, keys, size_bytes=size)
    now, dropped, handed, *statuses = reply.value
    backend.observe_clock(reply, now)
    if not isinstance(handed, list):  # no offer, or the reply of a repeated call, which has only a number
        return SettleReply(statuses, dropped)
    return SettleReply(statuses, dropped, *decode_next_claim(backend, reply, handed))


async def settle_unleased(backend: Backend, writes: Sequence[ResultWrite], *, ttl_s: int) -> Sequence[int]:
    """Run settle_unleased.lua for the writes of unleased requests. Return a status for each."""
    args: list[Argument] = _result_head_args(backend, ttl_s)
    for write in writes:
        if write.unleased is not None:
            args += (
                parse_location(write.unleased),
                write.unleased.member,
                *_encode_result(backend, write.settlement),
            )
            args += encode_turn_end(backend, write.settlement.turn_end)
    size = sum(write.size_bytes for write in writes)
    statuses: Sequence[int] = (
        await backend.run_script("settle_unleased", args, _results_keys(backend), size_bytes=size)
    ).value
    return statuses


def _result_head_args(backend: Backend, ttl_s: int) -> list[Argument]:
    return [REPLY_TTL_S, ttl_s, _foreign_markers_flag(backend)]


def _foreign_markers_flag(backend: Backend) -> int:
    """Return 1 if scripts of the queue can reach the markers of llm-d's producers, otherwise 0."""
    return int(not backend.scripts.is_cluster)


def _results_keys(backend: Backend) -> list[Argument]:
    """Return the reply key and the default list. A default list in another slot must not be named to a
    script, so the outbox takes its place."""
    default = encode_key(backend.names.result_list)
    return [
        backend.create_reply_key(),
        backend.names.outbox_key if backend.is_in_other_slot(default) else default,
    ]


def _encode_result(backend: Backend, settlement: Settlement) -> tuple[Argument, ...]:
    name = encode_key(settlement.result_list or backend.names.result_list)
    # Scripts of a Cluster can only write keys of the queue's slot, so other lists need the outbox.
    how = _NO_RESULT if not settlement.result else _POST if backend.is_in_other_slot(name) else _PUSH
    token = encode_key(settlement.request_token)
    # Without an id, the script leaves the markers alone. A token that is too long is part of no key.
    request = encode_key(settlement.request_id) if 0 < len(token) <= MAX_TOKEN_BYTES else b""
    return how, name, settlement.result, request, token


@dataclass(frozen=True, slots=True)
class OverdueReply:
    until: bytes
    next_range: int
    """Range at which to go on. -1 at the end."""
    next_offset: int
    rows: Sequence[tuple[int, bytes, bytes, bytes, int, int]]
    """Range, location, member, last attempt, failed attempts and refusals of each request."""
    large_member_bytes: int
    """Size of the first member if it needs a call of its own, and then the only row has no member. Otherwise
    0."""


async def find_overdue(
    backend: Backend,
    position: Sequence[Argument],
    max_count: int,
    *,
    max_member_bytes: int,
    large_member_bytes: int = 0,
) -> OverdueReply:
    """Run one call of a search. `large_member_bytes` is the size of the first member if it is to be returned
    alone."""
    args = [*position, max_count, large_member_bytes or MAX_SCRIPT_BYTES, max_member_bytes]
    reply = await backend.run_script("find_overdue", args, size_bytes=large_member_bytes)
    until, next_range, next_offset, *rows = reply.value
    size = rows[0][2] if rows and isinstance(rows[0][2], int) else 0
    return OverdueReply(until, next_range, next_offset, rows, size)


async def check_result_lists(backend: Backend, lists: Sequence[bytes]) -> list[bool]:
    """Return for each list whether it takes no results. A Cluster finds the node by the key of the queue."""
    flags = (await backend.scripts.run("check_result_lists", [backend.names.queue], lists)).value
    return [bool(no) for no in flags]


# Between the slots of a Cluster.


async def push_results(
    backend: Backend,
    name: bytes,
    marker: bytes,
    results: Sequence[tuple[bytes, bytes]],
    *,
    ttl_s: int,
    marker_ttl_s: int,
) -> bool:
    """Push results by their numbers, in rising order. Return False if the list or the marker has another
    type."""
    parts = [part for result in results for part in result]
    size = sum(map(len, parts))
    reply = await backend.scripts.run(
        "push_results", [name, marker], [ttl_s, marker_ttl_s, *parts], size_bytes=size
    )
    return bool(reply.value)


async def delete_marker(backend: Backend, marker: bytes, token: bytes) -> None:
    """Delete a marker of llm-d's producers."""
    await backend.scripts.run("delete_marker", [marker], [token])


# Looking.


async def count_requests(backend: Backend) -> QueueCounts:
    reply = await backend.run_script("count_requests", [])
    now, pending, leased, delayed, dead, units, *of_sequences, awaiting = reply.value
    backend.observe_clock(reply, now)
    news = decode_sequence_counters(of_sequences[0])
    return QueueCounts(
        pending, leased, delayed, dead, units, decode_sequence_counts(*of_sequences), news, awaiting
    )


async def take_snapshot(
    backend: Backend, timeout_s: float, rate: float | None, service_s: float
) -> QueueSnapshot:
    args: list[Argument] = [
        timeout_s,
        repr(rate or 0.0),
        repr(service_s),
        _MAX_SPAN_SPLITS,
        _HEAD_BYTES,
        MAX_REPLICAS_LISTED,
    ]
    reply = await backend.run_script("take_snapshot", args)
    backend.observe_clock(reply, reply.value[0])
    return decode_queue_snapshot(reply.value)


async def peek_next(backend: Backend, max_count: int) -> list[tuple[float, bytes]]:
    found = (await backend.run_script("peek_next", [max_count, MAX_SCRIPT_BYTES])).value
    return [(float(found[at]), found[at + 1]) for at in range(0, len(found), 2)]


async def check_permissions(scripts: ScriptRunner, calls: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each call whether this user may make it. Empty if the server cannot be asked."""
    flat = [word for call in calls for word in (str(len(call)), *call)]
    # By EVAL, because EVALSHA is among the permissions in question.
    text, _ = build_source("check_permissions")
    flags = await scripts.call_with_retries(lambda: scripts.client.execute_command("EVAL", text, 0, *flat))
    return [bool(granted) for granted in flags]


# Producers and operators.


async def list_dead_after(backend: Backend, entry_id: int, max_count: int) -> list[DeadRequest]:
    return await _list_dead(backend, "list", entry_id, max_count)


async def list_newest_dead(backend: Backend, max_count: int) -> list[DeadRequest]:
    return await _list_dead(backend, "newest", 0, max_count)


async def _list_dead(backend: Backend, how: str, after: int, max_count: int) -> list[DeadRequest]:
    found = (await backend.run_script("dead_requests", [how, after, max_count, MAX_SCRIPT_BYTES])).value
    return [decode_dead_request(*found[at : at + 9]) for at in range(0, len(found), 9)]


async def purge_dead(backend: Backend, entry_ids: Sequence[int]) -> int:
    """Delete dead requests. Return how many there were."""
    purged_count: int = (await backend.run_script("dead_requests", ["purge", *entry_ids])).value
    return purged_count


async def requeue_dead(backend: Backend, entry_id: int, resubmission: Submission) -> int:
    args: list[Argument] = [
        entry_id,
        repr(resubmission.score),
        resubmission.member,
        backend.names.wake_channel,
        *build_active_marker(resubmission),
    ]
    done: int = (await backend.run_script("requeue_dead", args)).value
    return done


# What arguments and replies are made of.


def encode_key(name: str) -> bytes:
    """Encode a name of a request as a key. A lone surrogate must not raise here."""
    return name.encode(errors="surrogatepass")


def _encode_permit(backend: Backend, permit: Permit) -> tuple[Argument, ...]:
    by = permit.limit, backend.to_server_time(permit.read_at), permit.lost_units
    return *by, permit.retry_after_max_s, permit.unleased_units
