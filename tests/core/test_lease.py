"""A lease with another member, weight or last try is the same in all else."""

from __future__ import annotations

import pytest

from dispatcher.core.lanes import Lane
from dispatcher.core.lease import Lease

LEASE = Lease(7, "t", b"{}", 1.5, 2, 1, 0, 3, Lane.SUSPECTS, 4, "it failed")


def test_a_lease_changes_in_one_thing() -> None:
    assert LEASE.with_member(b"") == Lease(7, "t", b"", 1.5, 2, 1, 0, 3, Lane.SUSPECTS, 4, "it failed")
    assert LEASE.counting(0) == Lease(7, "t", b"{}", 1.5, 2, 1, 0, 3, Lane.SUSPECTS, 0, "it failed")
    assert LEASE.after("no way") == Lease(7, "t", b"{}", 1.5, 2, 1, 0, 3, Lane.SUSPECTS, 4, "no way")
    assert LEASE.units == 4, "and itself stays as it was"


def test_nobody_writes_into_a_lease() -> None:
    with pytest.raises(AttributeError):
        LEASE.units = 5  # type: ignore[misc]
