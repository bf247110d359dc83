"""Names of owners, and the proof that the process of another owner has ended.

A dispatcher that is killed leaves leases behind. They must not be taken back from a dispatcher that is alive.
Silence proves nothing until it is long (`queue.owner_timeout_s`), but the kernel knows at once which
processes have ended:

- The id of an owner is `<host>:<pid>:<scope>:<random>`. As long as its process lives, it holds an abstract
  unix socket named after the id, and only one process can hold a name. If the name can be bound, the process
  has ended, whatever the cause, and its connections are closed. Such names belong to one network namespace.
  The scope is a hash of the machine's boot id and that namespace, and only owners of the own scope can be
  proven to have ended. (The namespace of a pod outlives its containers, so the next container can prove it.)
- The lock on the directory of an embedded queue admits one dispatcher. Owners that it finds there at its
  start have ended, unless their names are still held.

In case of doubt, an owner counts as alive: if its name is held or may not be bound, if it has another scope,
or on other systems than Linux, only silence decides. A process in the same namespace can hold the name of an
ended owner, and then the timeout applies as everywhere. It cannot take the name from a living process. No
child process keeps the name, because the socket is closed on exec. (If a running virtual machine is cloned,
two processes have one id, and each kernel reports its own process. The tokens of the leases still fence their
results.)
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_TRIES = 3
"""Number of ids to try. A name with 64 random bits is not taken by chance, so three failures mean that none
can be bound."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
NOWHERE = "-"
"""Scope of an owner that cannot be proven to have ended."""


class Prover(Protocol):
    """Finds owners whose processes have ended, at once and without a call to the queue."""

    def gone(self, owners: Sequence[str]) -> Sequence[str]:
        """Return the owners whose processes have ended. Never returns one that is alive."""
        ...


class Presence:
    """This process as an owner: its id, and what it can prove about others. Created by `register_owner`."""

    def __init__(self, owner: str, place: str, *, alone: bool) -> None:
        self.owner = owner
        self._place = place
        self._found: frozenset[str] | None = None if alone else frozenset()
        """Owners whose directory this process took over. `None` until they were looked up."""

    def __repr__(self) -> str:
        return f"<Presence {self.owner}>"

    def gone(self, owners: Sequence[str]) -> Sequence[str]:
        # The first owners that are found in a locked directory are those from which it was taken over.
        if self._found is None:
            self._found = frozenset(owners)
        return [owner for owner in owners if owner != self.owner and self._has_ended(owner)]

    def _has_ended(self, owner: str) -> bool:
        place = _place_of(owner)
        if place != NOWHERE and place == self._place:
            return _is_free(owner)
        return self._found is not None and owner in self._found


@contextmanager
def presence(*, alone: bool = False, place: str | None = None) -> Iterator[Presence]:
    """Be an owner within the block. Until its end, other owners of the scope can see that this one is alive.

    `is_embedded`: the queue is embedded and its directory is locked, so owners that are found in it at first
    have ended.
    `scope`: `None` for the scope of this process.
    """
    place = _here() if place is None else place
    # The open socket is the proof that this process is alive. It needs no cleanup, because the kernel closes
    # it.
    with socket.socket(socket.AF_UNIX) as name:
        owner = _claim_name(name, place) if place != NOWHERE else _new_owner(NOWHERE)
        yield Presence(owner, _place_of(owner), alone=alone)


def _claim_name(held: socket.socket, place: str) -> str:
    for _ in range(_TRIES):
        owner = _new_owner(place)
        try:
            held.bind(_name_of(owner))
        except OSError:  # the name is held, or this process may not bind any
            continue
        return owner
    return _new_owner(NOWHERE)


def _new_owner(place: str) -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{place}:{secrets.token_hex(8)}"


def _place_of(owner: str) -> str:
    parts = owner.rsplit(":", 3)  # those of older versions end in <pid>:<random>
    return parts[2] if len(parts) == 4 and len(parts[2]) == 16 else NOWHERE


def _here() -> str:
    """Return the scope of this process: the boot of this machine and the network namespace."""
    if sys.platform != "linux":
        return NOWHERE
    try:
        boot, network = _BOOT_ID.read_text(encoding="ascii").strip(), _NETWORK.stat().st_ino
    except (OSError, ValueError):
        return NOWHERE
    return hashlib.sha256(f"{boot}/{network}".encode()).hexdigest()[:16] if boot else NOWHERE


def _name_of(owner: str) -> bytes:
    """Return the name of the socket of an owner: an abstract name (with a zero byte first) of the same length
    for every id. The longest name that the kernel allows has 107 bytes."""
    return b"\0batch-dispatcher/" + hashlib.sha256(owner.encode()).hexdigest()[:32].encode()


def _is_free(owner: str) -> bool:
    """Return whether no process holds the name of an owner. Each type of socket has names of its own, and all
    owners use the same type."""
    # The socket is closed at once, so the name is free again for the next check.
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(_name_of(owner))
        except OSError:
            return False
    return True
