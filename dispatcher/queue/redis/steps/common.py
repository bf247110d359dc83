"""Arguments and parts of replies that the steps of an owner have in common."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.queue.constants import CLAIM_BYTES, REPLY_TTL_S
from dispatcher.queue.contract import ClaimResult, Lease, LeaseCounts, Overload, Permit, SharedState
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Reply
from dispatcher.requests.lanes import choose_lane, count_losses


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
            "reply_s": REPLY_TTL_S,
            "reply_key": backend.names.reply_key(f"{self.owner}:{self.nonce}"),
            **describe_permit(backend, self.permit),
            "read_at": float(backend.to_server_time(self.permit.read_at)),
        }


def describe_permit(backend: Backend, permit: Permit) -> dict[str, Any]:
    return {
        "limit": permit.limit,
        "read_at": backend.to_server_time(permit.read_at),
        "lost_units": permit.lost_units,
        "retry_after_max_s": permit.retry_after_max_s,
        "unleased_units": permit.unleased_units,
    }


def describe_leases(leases: Sequence[Lease]) -> list[dict[str, Any]]:
    return [{"entry_id": lease.entry_id, "token": lease.token} for lease in leases]


def split_rows(values: Sequence[Any], width: int) -> Iterator[Sequence[Any]]:
    """Yield the rows of a flat list."""
    return (values[at : at + width] for at in range(0, len(values), width))


def decode_by_feature(values: Sequence[Any]) -> dict[str, Any]:
    """Decode the results of a hook by the names of their features (`features.collect` in common.lua)."""
    return {name.decode(): value for name, value in split_rows(values, 2)}


def decode_owner_reply(
    backend: Backend, reply: Reply, values: Sequence[Any]
) -> tuple[LeaseCounts, SharedState]:
    """Decode the part of the reply that all scripts of owners have in common (`build_owner_reply`)."""
    now, live, own, just_leased, lost, orphaned, limit, read_at, *rest = values
    overload_at, retry_at, is_out_of_capacity, in_flight, prober, paused = rest
    backend.observe_clock(reply, now)
    counts = LeaseCounts(backend.to_loop_time(now), live, live - own, just_leased, lost, orphaned)
    overload = None
    if overload_at is not None:
        overload = Overload(
            backend.to_loop_time(overload_at),
            backend.to_loop_time(retry_at),
            bool(is_out_of_capacity),
            in_flight,
        )
    return counts, SharedState(
        limit,
        0.0 if limit is None else backend.to_loop_time(read_at),
        overload,
        None if prober is None else prober.decode(),
        bool(paused),
    )


def decode_claim_result(backend: Backend, reply: Reply, values: Sequence[Any]) -> ClaimResult:
    """Decode the owner reply, the number of waiting requests and the lease rows of a claim."""
    owner_reply, waiting_count, rows = values
    leases = [_decode_lease(*row) for row in split_rows(rows, 11)]
    return ClaimResult(leases, *decode_owner_reply(backend, reply, owner_reply), waiting_count)


def _decode_lease(
    entry_id: int,
    token: bytes,
    member: bytes | int,
    score: bytes,
    deliveries: int,
    failed_attempts: int,
    refusals: int,
    deaths: int,
    units: int,
    last_attempt: bytes,
    progress: bytes | int,
) -> Lease:
    """Decode a lease. Its member is empty if the script returned only the size of the member, and so is its
    progress."""
    return Lease(
        entry_id,
        token.decode(),
        b"" if isinstance(member, int) else member,
        float(score),
        deliveries,
        failed_attempts,
        refusals,
        deaths_as_suspect=count_losses(deaths),
        lane=choose_lane(deaths, has_progress=bool(progress)),
        units=units,
        last_attempt=last_attempt.decode(errors="replace") if last_attempt else "",
        progress=b"" if isinstance(progress, int) else progress,
    )
