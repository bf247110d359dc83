"""One function for each script of owners and operators: its arguments by name, and its decoded reply.

Each call is atomic and safe to repeat. The header of the Lua file says what it guarantees. Everything that
needs several calls is part of the owner or of the queue admin.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.core.requests.forecast import MAX_REPLICAS_LISTED, QueueSnapshot
from dispatcher.core.requests.lanes import Lane, compute_lane_room
from dispatcher.ports import (
    DeadRequest,
    Lease,
    LeaseUnitsResult,
    Overload,
    Permit,
    QueueCounts,
    Release,
    RenewResult,
    Settlement,
    Submission,
    UnleasedRequest,
)
from dispatcher.queue.constants import CLAIM_BYTES, DONE, REPLY_TTL_S
from dispatcher.queue.keys import MAX_TOKEN_BYTES
from dispatcher.queue.redis import replies
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.lua_scripts import Row, load_script
from dispatcher.queue.redis.overdue import ScoreWalk, parse_location
from dispatcher.queue.redis.producer import build_active_marker
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Reply, ScriptRunner
from dispatcher.queue.redis.sequences import TurnEndArguments, describe_turn_end
from dispatcher.queue.redis.waiting_for_model import describe_model_wait

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

    def to_arguments(self) -> dict[str, Any]:
        return {"owner": self.owner, "owner_timeout_s": self.timeout_s, "lease_s": self.lease_s}


@dataclass(frozen=True, slots=True)
class ClaimOffer:
    """Offer of an owner to claim requests in the step that ends leases."""

    owner: str
    lease_s: float
    nonce: str
    permit: Permit
    max_member_bytes: int
    """Size of the largest member that is moved."""

    def describe(self, backend: Backend) -> dict[str, Any]:
        """Return the offer for claim_again.lua."""
        return {
            "owner": self.owner,
            "lease_s": self.lease_s,
            "token_base": secrets.token_hex(16),
            "max_bytes": CLAIM_BYTES,
            "max_member_bytes": self.max_member_bytes,
            "limit": self.permit.limit,
            "read_at": float(backend.to_server_time(self.permit.read_at)),
            "lost_units": self.permit.lost_units,
            "retry_after_max_s": self.permit.retry_after_max_s,
            "unleased_units": self.permit.unleased_units,
            "reply_s": REPLY_TTL_S,
            "reply_key": backend.names.reply_key(f"{self.owner}:{self.nonce}"),
        }


# Leases.


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
) -> replies.ClaimReply:
    """Run claim.lua. `max_member_bytes` is the size of the largest member that is moved whole."""
    reply = await backend.run_script(
        "claim",
        {
            "max_count": max_count,
            "max_bytes": CLAIM_BYTES,
            "token_base": secrets.token_hex(16),
            "reply_s": REPLY_TTL_S,
            "is_probe": is_probe,
            "max_member_bytes": max_member_bytes,
            "assumed_units": max(0, assumed_units),
            "room_by_lane": list(compute_lane_room(max_per_lane).values()),
            **owner_terms.to_arguments(),
            **_describe_permit(backend, permit),
        },
        keys={"REPLY": backend.names.reply_key(f"{owner_terms.owner}:{nonce}")},
    )
    return replies.decode_claim(backend, reply)


async def cut_member(backend: Backend, lease: Lease) -> bytes | None:
    """Cut the member of a lease. Return what is left of it, or `None` if the lease has ended."""
    reply = await backend.run_script("cut_member", {"entry_id": lease.entry_id, "token": lease.token})
    left: bytes | None = reply.value
    return left


class _LeaseRow(Row):
    entry_id: int
    token: str


async def renew(
    backend: Backend,
    owner_terms: OwnerTerms,
    leases: Sequence[Lease] = (),
    permit: Permit | None = None,
    overload: Overload | None = None,
) -> RenewResult:
    """Run renew.lua. An overload is shared with the permit of the owner that saw it."""
    arguments: dict[str, Any] = dict.fromkeys(
        (
            *("limit", "read_at", "lost_units", "retry_after_max_s"),
            *("refused_at", "retry_at", "is_out_of_capacity", "in_flight"),
        )
    )
    if permit is not None:
        arguments |= _describe_permit(backend, permit)
        del arguments["unleased_units"]  # of no interest to other owners
        if overload is not None:
            arguments |= {
                "refused_at": backend.to_server_time(overload.refused_at),
                "retry_at": backend.to_server_time(overload.retry_at),
                "is_out_of_capacity": int(overload.is_out_of_capacity),
                "in_flight": overload.in_flight,
            }
    reply = await backend.run_script(
        "renew",
        {
            "leases": [_LeaseRow(entry_id=lease.entry_id, token=lease.token) for lease in leases],
            **owner_terms.to_arguments(),
            **arguments,
        },
    )
    return replies.decode_renew(backend, reply)


class _UnitsRow(Row):
    entry_id: int
    token: str
    units: int


async def set_lease_units(
    backend: Backend, owner_terms: OwnerTerms, lease_units: Sequence[tuple[Lease, int]], permit: Permit
) -> LeaseUnitsResult:
    reply = await backend.run_script(
        "set_lease_units",
        {
            "leases": [
                _UnitsRow(entry_id=lease.entry_id, token=lease.token, units=max(0, units))
                for lease, units in lease_units
            ],
            **owner_terms.to_arguments(),
            **_describe_permit(backend, permit),
        },
    )
    return replies.decode_lease_units(backend, reply)


class _ReleaseRow(Row):
    entry_id: int
    token: str
    delay_s: str
    failed_attempts: int
    refusals: int
    undelivered: int
    last_attempt: str
    missing_model: str
    new_score: str
    request_id: bytes
    request_token: bytes
    has_progress: bool
    progress: bytes
    can_be_claimed_again: bool


async def release(
    backend: Backend, releases: Sequence[Release], offer: Mapping[str, Any] | None = None
) -> replies.ReleaseReply:
    """Run release.lua. `offer` is one to claim requests again (`ClaimOffer.describe`)."""
    rows = []
    for each in releases:
        missing_model, request_id, request_token = describe_model_wait(each)
        progress = each.stored_progress
        rows.append(
            _ReleaseRow(
                entry_id=each.lease.entry_id,
                token=each.lease.token,
                delay_s=f"{each.delay_s:.6f}",
                failed_attempts=int(each.is_failed_attempt),
                refusals=int(each.is_refusal),
                undelivered=int(each.is_undelivered),
                last_attempt=each.last_attempt,
                missing_model=missing_model,
                new_score="" if each.new_score is None else f"{each.new_score:.17g}",
                request_id=request_id,
                request_token=request_token,
                has_progress=progress is not None,
                progress=progress or b"",
                can_be_claimed_again=each.can_be_claimed_again,
            )
        )
    reply = await backend.run_script(
        "release",
        {"reply_s": REPLY_TTL_S, "offer": offer, "releases": rows},
        keys={"REPLY": backend.create_reply_key()},
        size_bytes=sum(len(row.progress) for row in rows),
    )
    return replies.decode_release(backend, reply)


async def sweep(
    backend: Backend,
    owner_terms: OwnerTerms,
    max_count: int,
    ended_owners: Sequence[str],
    *,
    max_pending: int,
) -> replies.SweepReply:
    """Run sweep.lua. `ended_owners` are proven to have ended."""
    reply = await backend.run_script(
        "sweep",
        {
            "max_count": max_count,
            "foreign": _can_reach_foreign_markers(backend),
            "max_pending": max_pending,
            "ended_owners": ended_owners,
            **owner_terms.to_arguments(),
        },
    )
    return replies.decode_sweep(backend, reply)


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


class _ResultRow(Row):
    """Columns of a result."""

    delivery: int
    list: bytes
    result: bytes
    request_id: bytes
    request_token: bytes
    turn_end: TurnEndArguments | None
    conversation: bytes


class _SettleRow(_ResultRow):
    name: int
    token: str
    is_dead: int
    is_failed_attempt: int
    reason: str


class _UnleasedRow(_ResultRow):
    location: str
    member: bytes


async def settle(
    backend: Backend,
    writes: Sequence[ResultWrite],
    *,
    ttl_s: int,
    dead_max: int,
    offer: Mapping[str, Any] | None = None,
) -> replies.SettleReply:
    """Run settle.lua. `offer` is one to claim the next requests (`ClaimOffer.describe`)."""
    rows = []
    for write in writes:
        settlement = write.settlement
        rows.append(
            _SettleRow(
                name=settlement.lease.entry_id,
                token=settlement.lease.token,
                is_dead=int(write.dead_reason is not None),
                is_failed_attempt=int(write.is_failed_attempt),
                reason=write.dead_reason or "",
                **_describe_result(backend, settlement),
            )
        )
    reply = await backend.run_script(
        "settle",
        {
            "reply_s": REPLY_TTL_S,
            "ttl_s": ttl_s,
            "foreign": _can_reach_foreign_markers(backend),
            "dead_max": dead_max,
            "offer": offer,
            "items": rows,
        },
        keys=_results_keys(backend),
        size_bytes=sum(write.size_bytes for write in writes),
    )
    return replies.decode_settle(backend, reply)


def _describe_result(backend: Backend, settlement: Settlement) -> dict[str, Any]:
    """Return the columns of a row about its result, and about what it leaves to its sequence."""
    name = encode_key(settlement.result_list or backend.names.result_list)
    request_id, request_token = _encode_cancel_key(settlement)
    end = settlement.turn_end
    return {
        "delivery": _choose_delivery(backend, settlement, name),
        "list": name,
        "result": settlement.result,
        "request_id": request_id,
        "request_token": request_token,
        "turn_end": None if end is None else describe_turn_end(backend, end),
        "conversation": b"" if end is None else end.conversation or b"",
    }


async def settle_unleased(backend: Backend, writes: Sequence[ResultWrite], *, ttl_s: int) -> Sequence[int]:
    """Run settle_unleased.lua for the writes of unleased requests. Return a status for each."""
    rows = []
    for write in writes:
        if write.unleased is None:
            continue
        settlement = write.settlement
        rows.append(
            _UnleasedRow(
                location=parse_location(write.unleased),
                member=write.unleased.member,
                **_describe_result(backend, settlement),
            )
        )
    reply = await backend.run_script(
        "settle_unleased",
        {
            "reply_s": REPLY_TTL_S,
            "ttl_s": ttl_s,
            "foreign": _can_reach_foreign_markers(backend),
            "items": rows,
        },
        keys=_results_keys(backend),
        size_bytes=sum(write.size_bytes for write in writes),
    )
    statuses: Sequence[int] = reply.value
    return statuses


def _can_reach_foreign_markers(backend: Backend) -> bool:
    """Return whether scripts of the queue can reach the markers of llm-d's producers."""
    return not backend.scripts.is_cluster


def _results_keys(backend: Backend) -> dict[str, str | bytes]:
    """Return the reply key and the default list. A default list in another slot must not be named to a
    script, so the outbox takes its place."""
    default = encode_key(backend.names.result_list)
    return {
        "REPLY": backend.create_reply_key(),
        "DEFAULT_LIST": backend.names.outbox_key if backend.is_in_other_slot(default) else default,
    }


def _choose_delivery(backend: Backend, settlement: Settlement, name: bytes) -> int:
    if not settlement.result:
        return _NO_RESULT
    # Scripts of a Cluster can only write keys of the queue's slot, so other lists need the outbox.
    return _POST if backend.is_in_other_slot(name) else _PUSH


def _encode_cancel_key(settlement: Settlement) -> tuple[bytes, bytes]:
    """Return the id and the token of the markers of a request."""
    token = encode_key(settlement.request_token)
    # Without an id, the script leaves the markers alone. A token that is too long is part of no key.
    return encode_key(settlement.request_id) if 0 < len(token) <= MAX_TOKEN_BYTES else b"", token


async def find_overdue(
    backend: Backend,
    walk: ScoreWalk,
    max_count: int,
    *,
    max_member_bytes: int,
    large_request_bytes: int = 0,
) -> replies.OverdueReply:
    """Run one call of a search. `large_request_bytes` is the size of the first member with its progress if
    they are to be returned alone."""
    reply = await backend.run_script(
        "find_overdue",
        {
            "after": walk.after,
            "until_at": walk.until,
            "range": walk.range_index,
            "offset": walk.offset,
            "max_count": max_count,
            "max_bytes": large_request_bytes or MAX_SCRIPT_BYTES,
            "max_member_bytes": max_member_bytes,
        },
        size_bytes=large_request_bytes,
    )
    return replies.decode_overdue(reply)


async def check_result_lists(backend: Backend, lists: Sequence[bytes]) -> list[bool]:
    """Return for each list whether it takes no results."""
    reply = await backend.run_script(
        "check_result_lists", {"lists": lists}, keys={"PENDING": backend.names.queue}
    )
    return [bool(is_unusable) for is_unusable in reply.value]


# Between the slots of a Cluster.


class _OutboxRow(Row):
    number: bytes
    result: bytes


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
    reply = await backend.run_script(
        "push_results",
        {
            "ttl_s": ttl_s,
            "last_pushed_ttl_s": marker_ttl_s,
            "results": [_OutboxRow(number=number, result=result) for number, result in results],
        },
        keys={"LIST": name, "LAST_PUSHED": marker},
        size_bytes=sum(len(number) + len(result) for number, result in results),
    )
    return bool(reply.value)


async def read_outbox(backend: Backend, after: str, max_count: int) -> Sequence[bytes]:
    """Return the next elements of the outbox: at most a megabyte, or one element if it is larger."""
    reply = await backend.run_script(
        "read_outbox",
        {"after": after, "max_count": max_count, "max_bytes": MAX_SCRIPT_BYTES},
        keys={"OUTBOX": backend.names.outbox_key},
    )
    elements: Sequence[bytes] = reply.value
    return elements


async def delete_marker(backend: Backend, marker: bytes, token: bytes) -> None:
    """Delete a marker of llm-d's producers."""
    await backend.run_script("delete_marker", {"token": token}, keys={"MARKER": marker})


# Counts and lookups.


async def count_requests(backend: Backend) -> QueueCounts:
    return replies.decode_counts(backend, await backend.run_script("count_requests"))


async def take_snapshot(
    backend: Backend, timeout_s: float, rate: float | None, service_s: float
) -> QueueSnapshot:
    reply = await backend.run_script(
        "take_snapshot",
        {
            "owner_timeout_s": timeout_s,
            "rate": rate or 0.0,
            "service_s": service_s,
            "max_splits": _MAX_SPAN_SPLITS,
            "head_bytes": _HEAD_BYTES,
            "max_owners": MAX_REPLICAS_LISTED,
        },
    )
    return replies.decode_queue_snapshot(backend, reply)


async def peek_next(backend: Backend, max_count: int) -> list[tuple[float, bytes]]:
    reply = await backend.run_script("peek_next", {"max_count": max_count, "max_bytes": MAX_SCRIPT_BYTES})
    return replies.decode_next_requests(reply)


class _WordRow(Row):
    call: int
    text: str


async def check_permissions(scripts: ScriptRunner, calls: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each call whether this user may make it. Empty if the server cannot be asked."""
    words = [_WordRow(call=number, text=word) for number, call in enumerate(calls, 1) for word in call]
    script = load_script("check_permissions")
    arguments = script.encode_arguments({"words": words})

    # By EVAL, because EVALSHA is among the permissions in question.
    flags = await scripts.call_with_retries(
        lambda: scripts.client.execute_command("EVAL", script.text, 0, *arguments)
    )
    return [bool(granted) for granted in flags]


# Dead requests.


async def list_dead_after(backend: Backend, entry_id: int, max_count: int) -> list[DeadRequest]:
    reply = await _run_dead_requests(backend, "list", after=entry_id, max_count=max_count)
    return replies.decode_dead_requests(reply)


async def list_newest_dead(backend: Backend, max_count: int) -> list[DeadRequest]:
    return replies.decode_dead_requests(await _run_dead_requests(backend, "newest", max_count=max_count))


async def purge_dead(backend: Backend, entry_ids: Sequence[int]) -> int:
    """Delete dead requests. Return how many there were."""
    purged_count: int = (await _run_dead_requests(backend, "purge", purged=entry_ids)).value
    return purged_count


async def _run_dead_requests(
    backend: Backend, action: str, *, after: int = 0, max_count: int = 0, purged: Sequence[int] = ()
) -> Reply:
    return await backend.run_script(
        "dead_requests",
        {
            "action": action,
            "after": after,
            "max_count": max_count,
            "max_bytes": MAX_SCRIPT_BYTES,
            "purged": purged,
        },
    )


async def requeue_dead(backend: Backend, entry_id: int, resubmission: Submission) -> int:
    request_id, request_token, deadline = build_active_marker(resubmission)
    reply = await backend.run_script(
        "requeue_dead",
        {
            "entry_id": entry_id,
            "score": repr(resubmission.score),
            "member": resubmission.member,
            "channel": backend.names.wake_channel,
            "request_id": request_id,
            "request_token": request_token,
            "deadline": deadline,
        },
    )
    done: int = reply.value
    return done


# Parts of arguments.


def encode_key(name: str) -> bytes:
    """Encode a name of a request as a key. A lone surrogate must not raise here."""
    return name.encode(errors="surrogatepass")


def _describe_permit(backend: Backend, permit: Permit) -> dict[str, Any]:
    return {
        "limit": permit.limit,
        "read_at": backend.to_server_time(permit.read_at),
        "lost_units": permit.lost_units,
        "retry_after_max_s": permit.retry_after_max_s,
        "unleased_units": permit.unleased_units,
    }
