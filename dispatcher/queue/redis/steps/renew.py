"""Extend leases, and exchange the shared state of the owners: renew.lua."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.queue.contract import Lease, Overload, Permit, RenewResult
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import (
    OwnerTerms,
    decode_owner_reply,
    describe_leases,
    describe_permit,
)

_NO_PERMIT = dict.fromkeys(("limit", "read_at", "lost_units", "retry_after_max_s"))
_NO_OVERLOAD = dict.fromkeys(("refused_at", "retry_at", "is_out_of_capacity", "in_flight"))


async def renew(
    backend: Backend,
    owner_terms: OwnerTerms,
    leases: Sequence[Lease] = (),
    permit: Permit | None = None,
    overload: Overload | None = None,
) -> RenewResult:
    """Renew leases. An overload is shared with the permit of the owner that saw it."""
    arguments = {
        "leases": describe_leases(leases),
        **owner_terms.to_arguments(),
        **_NO_PERMIT,
        **_NO_OVERLOAD,
    }
    if permit is not None:
        arguments |= describe_permit(backend, permit)
        del arguments["unleased_units"]  # of no interest to other owners
        if overload is not None:
            arguments |= {
                "refused_at": backend.to_server_time(overload.refused_at),
                "retry_at": backend.to_server_time(overload.retry_at),
                "is_out_of_capacity": int(overload.is_out_of_capacity),
                "in_flight": overload.in_flight,
            }
    reply = await backend.run_script("renew", arguments)
    owner_reply, lost_entry_ids = reply.value
    return RenewResult(lost_entry_ids, *decode_owner_reply(backend, reply, owner_reply))
