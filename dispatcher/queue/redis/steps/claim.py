"""Claim requests: claim.lua, and cut_member.lua for a member that could not be transferred."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from dispatcher.queue.constants import CLAIM_BYTES, REPLY_TTL_S
from dispatcher.queue.contract import ClaimResult, Lease, Permit
from dispatcher.queue.keys import LANE_LETTERS
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import OwnerTerms, decode_claim_result, describe_permit
from dispatcher.requests.lanes import Lane, compute_lane_room


@dataclass(frozen=True, slots=True)
class ClaimReply:
    claim_result: ClaimResult
    large_member_bytes: int
    """Size of the member if it is too large to be part of the reply, which then has one lease.
    Otherwise 0."""
    large_progress_bytes: int
    """The same for the progress of the request."""


async def claim(
    backend: Backend,
    owner_terms: OwnerTerms,
    nonce: str,
    permit: Permit,
    *,
    max_count: int,
    max_per_lane: Mapping[Lane, int],
    assumed_units: int,
    max_blocked: int,
    max_member_bytes: int,
    is_probe: bool = False,
) -> ClaimReply:
    """Claim requests. `max_member_bytes` is the size of the largest member that is moved whole."""
    rooms = compute_lane_room(max_per_lane)
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
            "max_blocked": max_blocked,
            "rooms": [{"lane": letter, "room": rooms[lane]} for lane, letter in LANE_LETTERS.items()],
            **owner_terms.to_arguments(),
            **describe_permit(backend, permit),
        },
        keys={"REPLY": backend.names.reply_key(f"{owner_terms.owner}:{nonce}")},
    )
    rows = reply.value[2]
    member, progress = (rows[2], rows[10]) if rows else (b"", b"")
    claim_result = decode_claim_result(backend, reply, reply.value[:3])
    return ClaimReply(
        claim_result.copy_with(blocked_entry_id=reply.value[3] or None),
        member if isinstance(member, int) else 0,
        progress if isinstance(progress, int) else 0,
    )


async def cut_member(backend: Backend, lease: Lease) -> bytes | None:
    """Cut the member of a lease. Return what is left of it, or `None` if the lease has ended."""
    reply = await backend.run_script("cut_member", {"entry_id": lease.entry_id, "token": lease.token})
    left: bytes | None = reply.value
    return left
