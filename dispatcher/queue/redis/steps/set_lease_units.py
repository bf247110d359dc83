"""Set the units of leases: set_lease_units.lua."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.queue.contract import Lease, LeaseUnitsResult, Permit
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import OwnerTerms, decode_owner_reply, describe_permit


async def set_lease_units(
    backend: Backend, owner_terms: OwnerTerms, lease_units: Sequence[tuple[Lease, int]], permit: Permit
) -> LeaseUnitsResult:
    rows = [
        {"entry_id": lease.entry_id, "token": lease.token, "units": max(0, units)}
        for lease, units in lease_units
    ]
    reply = await backend.run_script(
        "set_lease_units",
        {"leases": rows, **owner_terms.to_arguments(), **describe_permit(backend, permit)},
    )
    owner_reply, fits = reply.value
    return LeaseUnitsResult([bool(each) for each in fits], *decode_owner_reply(backend, reply, owner_reply))
