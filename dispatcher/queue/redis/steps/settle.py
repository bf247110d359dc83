"""Write results, and end what they belong to: settle.lua for leases, and settle_unleased.lua for requests
without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.queue.constants import DONE, REPLY_TTL_S
from dispatcher.queue.contract import ClaimResult, Settlement, UnleasedRequest
from dispatcher.queue.keys import MAX_TOKEN_BYTES, encode_key
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.lua_scripts import get_feature_columns
from dispatcher.queue.redis.overdue import parse_location
from dispatcher.queue.redis.scripts import Reply
from dispatcher.queue.redis.steps.common import ClaimOffer, decode_claim_result

_NO_EXTRA = get_feature_columns("items")
_NO_RESULT, _PUSH, _POST = range(3)
"""Delivery of a result to its list: none, in the same step, or by the outbox."""


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
        extra = self.settlement.extra
        carried = 0 if extra is None else extra.size_bytes
        member = b"" if self.unleased is None else self.unleased.member
        return len(self.settlement.result) + carried + len(member)

    @property
    def identity(self) -> tuple[int, str] | UnleasedRequest:
        """Key that identifies the lease or the request that ends with the write."""
        lease = self.settlement.lease
        return (lease.entry_id, lease.token) if self.unleased is None else self.unleased


@dataclass(frozen=True, slots=True)
class SettleReply:
    statuses: Sequence[int]
    dropped_dead_count: int
    """Number of dead requests that were dropped for `dead_max`."""
    claim_result: ClaimResult | None = None
    """Claimed next requests. `None` if nothing was offered, or if the reply was lost."""
    extras: Sequence[Any] = ()
    """Values that a feature returns, one with each of these requests."""


async def settle(
    backend: Backend,
    writes: Sequence[ResultWrite],
    *,
    ttl_s: int,
    dead_max: int,
    offer: ClaimOffer | None = None,
) -> SettleReply:
    """Settle leases. `offer` is one to claim the next requests."""
    rows = [
        {
            "name": write.settlement.lease.entry_id,
            "token": write.settlement.lease.token,
            "is_dead": int(write.dead_reason is not None),
            "is_failed_attempt": int(write.is_failed_attempt),
            "reason": write.dead_reason or "",
            **_describe_result(backend, write.settlement),
        }
        for write in writes
    ]
    reply = await _run_script(
        backend,
        "settle",
        writes,
        {
            "items": rows,
            "ttl_s": ttl_s,
            "dead_max": dead_max,
            "offer": None if offer is None else offer.describe(backend),
        },
    )
    now, dropped, claimed, *statuses = reply.value
    backend.observe_clock(reply, now)
    if not isinstance(claimed, list):  # no offer, or the reply of a repeated call, which has only a number
        return SettleReply(statuses, dropped)
    *claim_values, extras = claimed
    claim_result = decode_claim_result(backend, reply, claim_values)
    return SettleReply(statuses, dropped, claim_result, extras)


async def settle_unleased(backend: Backend, writes: Sequence[ResultWrite], *, ttl_s: int) -> Sequence[int]:
    """Settle unleased requests. Return a status for each."""
    rows = [
        {
            "location": parse_location(write.unleased),
            "member": write.unleased.member,
            **_describe_result(backend, write.settlement),
        }
        for write in writes
        if write.unleased is not None
    ]
    reply = await _run_script(backend, "settle_unleased", writes, {"items": rows, "ttl_s": ttl_s})
    statuses: Sequence[int] = reply.value
    return statuses


async def _run_script(
    backend: Backend, script: str, writes: Sequence[ResultWrite], arguments: Mapping[str, Any]
) -> Reply:
    default = encode_key(backend.names.result_list)
    return await backend.run_script(
        script,
        {"reply_s": REPLY_TTL_S, "foreign": backend.can_reach_foreign_markers, **arguments},
        keys={
            "REPLY": backend.create_reply_key(),
            # A default list in another slot must not be named to a script, so the outbox takes its place.
            "DEFAULT_LIST": backend.names.outbox_key if backend.is_in_other_slot(default) else default,
        },
        size_bytes=sum(write.size_bytes for write in writes),
    )


def _describe_result(backend: Backend, settlement: Settlement) -> dict[str, Any]:
    """Return the columns of a row about its result, and about what it leaves to a feature."""
    name = encode_key(settlement.result_list or backend.names.result_list)
    token = encode_key(settlement.request_token)
    # Scripts of a Cluster can only write keys of the queue's slot, so other lists need the outbox.
    delivery = _POST if backend.is_in_other_slot(name) else _PUSH
    # Without an id, the script leaves the markers alone. A token that is too long is part of no key.
    can_be_cancelled = 0 < len(token) <= MAX_TOKEN_BYTES
    return {
        "delivery": delivery if settlement.result else _NO_RESULT,
        "list": name,
        "result": settlement.result,
        "request_id": encode_key(settlement.request_id) if can_be_cancelled else b"",
        "request_token": token,
        **_NO_EXTRA,
        **(settlement.extra.to_columns(backend.names) if settlement.extra is not None else {}),
    }
