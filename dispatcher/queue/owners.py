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

_BIND_ATTEMPTS = 3
"""Number of ids to try. A name with 64 random bits is not taken by chance, so three failures mean that none
can be bound."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
NO_SCOPE = "-"
"""Scope of an owner that cannot be proven to have ended."""


class DeadOwnerDetector(Protocol):
    """Finds owners whose processes have ended, at once and without a call to the queue."""

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        """Return the owners whose processes have ended. Never returns one that is alive."""
        ...


class OwnerRegistration:
    """This process as an owner: its id, and what it can prove about others. Created by `register_owner`."""

    def __init__(self, owner: str, scope: str, *, is_embedded: bool) -> None:
        self.owner = owner
        self._scope = scope
        self._previous_owners: frozenset[str] | None = None if is_embedded else frozenset()
        """Owners whose directory this process took over. `None` until they were looked up."""

    def __repr__(self) -> str:
        return f"<OwnerRegistration {self.owner}>"

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        # The first owners that are found in a locked directory are those from which it was taken over.
        if self._previous_owners is None:
            self._previous_owners = frozenset(owners)
        return [owner for owner in owners if owner != self.owner and self._has_ended(owner)]

    def _has_ended(self, owner: str) -> bool:
        scope = _parse_scope(owner)
        if scope != NO_SCOPE and scope == self._scope:
            return _is_name_free(owner)
        return self._previous_owners is not None and owner in self._previous_owners


@contextmanager
def register_owner(*, is_embedded: bool = False, scope: str | None = None) -> Iterator[OwnerRegistration]:
    """Be an owner within the block. Until its end, other owners of the scope can see that this one is alive.

    `is_embedded`: the queue is embedded and its directory is locked, so owners that are found in it at first
    have ended.
    `scope`: `None` for the scope of this process.
    """
    scope = _get_own_scope() if scope is None else scope
    # The open socket is the proof that this process is alive. It needs no cleanup, because the kernel closes
    # it.
    with socket.socket(socket.AF_UNIX) as name:
        owner = _bind_owner_name(name, scope) if scope != NO_SCOPE else _create_owner_id(NO_SCOPE)
        yield OwnerRegistration(owner, _parse_scope(owner), is_embedded=is_embedded)


def _bind_owner_name(name_socket: socket.socket, scope: str) -> str:
    for _ in range(_BIND_ATTEMPTS):
        owner = _create_owner_id(scope)
        try:
            name_socket.bind(_socket_name(owner))
        except OSError:  # the name is held, or this process may not bind any
            continue
        return owner
    return _create_owner_id(NO_SCOPE)


def _create_owner_id(scope: str) -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{scope}:{secrets.token_hex(8)}"


def _parse_scope(owner: str) -> str:
    parts = owner.rsplit(":", 3)  # a program that is not this one may name its owner in any way
    return parts[2] if len(parts) == 4 and len(parts[2]) == 16 else NO_SCOPE


def _get_own_scope() -> str:
    """Return the scope of this process: the boot of this machine and the network namespace."""
    if sys.platform != "linux":
        return NO_SCOPE
    try:
        boot, network = _BOOT_ID.read_text(encoding="ascii").strip(), _NETWORK.stat().st_ino
    except (OSError, ValueError):
        return NO_SCOPE
    return hashlib.sha256(f"{boot}/{network}".encode()).hexdigest()[:16] if boot else NO_SCOPE


def _socket_name(owner: str) -> bytes:
    """Return the name of the socket of an owner: an abstract name (with a zero byte first) of the same length
    for every id. The longest name that the kernel allows has 107 bytes."""
    return b"\0batch-dispatcher/" + hashlib.sha256(owner.encode()).hexdigest()[:32].encode()


def _is_name_free(owner: str) -> bool:
    """Return whether no process holds the name of an owner. Each type of socket has names of its own, and all
    owners use the same type."""
    # The socket is closed at once, so the name is free again for the next check.
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(_socket_name(owner))
        except OSError:
            return False
    return True
