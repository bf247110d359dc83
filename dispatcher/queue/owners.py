"""Who is alive: an owner's name, and the proof that another owner's process has ended.

A dispatcher that is killed leaves leases, and whoever takes them back must not take them from one that
lives. Silence proves nothing until it is long (`queue.owner_timeout_s`). But the kernel knows at once, and
tells those who share it:

- An owner's id is `<host>:<pid>:<place>:<random>`. As long as its process lives it holds an abstract unix
  socket named after that id, and a name can be held once. Where the name can be taken nobody holds it: the
  process has ended, whatever it died of, and its connections are closed. Such names are of one network
  namespace, so the place is a hash of the machine's boot and that namespace, and only an owner of our own
  place can be proven gone. (A pod's namespace outlives its containers: the next one can tell.)
- The lock on an embedded queue's directory admits one dispatcher. Owners found there at the start are those
  that the lock was taken over from: gone, unless their names are still held.

Doubt is life. Where a name is held, or may not be taken, in another place, on another system than Linux,
nothing is proven and silence decides. The worst that a neighbour in the same namespace can do is to hold the
name of a dead owner: then we wait as everybody does. It cannot take a name from a process that holds it, and
no child of ours keeps it, for the socket is closed on exec. (A virtual machine that is cloned while it runs
gives two processes one id, and each kernel speaks for its own. Tokens fence their results all the same.)
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
"""Names to try for: none of 64 random bits is taken by chance, so what refuses three refuses all."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
NOWHERE = "-"
"""The place of an owner that nobody can disprove."""


class Prover(Protocol):
    """Knows what can be proven about other owners, at once and without asking the queue."""

    def gone(self, owners: Sequence[str]) -> Sequence[str]:
        """Those of them whose processes have ended. One that lives is never among them."""
        ...


class Presence:
    """This process as an owner: its id, and what it can prove of others. Made by `presence`."""

    def __init__(self, owner: str, place: str, *, alone: bool) -> None:
        self.owner = owner
        self._place = place
        self._found: frozenset[str] | None = None if alone else frozenset()
        """Owners that a directory of ours was taken over from; None: not looked yet."""

    def __repr__(self) -> str:
        return f"<Presence {self.owner}>"

    def gone(self, owners: Sequence[str]) -> Sequence[str]:
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
    """Be an owner for the length of the block: others of its place can see it until then, and its end after.

    `alone`: the queue is embedded and its directory locked, so that the owners found in it first have ended.
    `place`: None: where this process is.
    """
    place = _here() if place is None else place
    with socket.socket(socket.AF_UNIX) as name:
        owner = _claim_name(name, place) if place != NOWHERE else _new_owner(NOWHERE)
        yield Presence(owner, _place_of(owner), alone=alone)


def _claim_name(held: socket.socket, place: str) -> str:
    for _ in range(_TRIES):
        owner = _new_owner(place)
        try:
            held.bind(_name_of(owner))
        except OSError:
            continue
        return owner
    return _new_owner(NOWHERE)


def _new_owner(place: str) -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{place}:{secrets.token_hex(8)}"


def _place_of(owner: str) -> str:
    parts = owner.rsplit(":", 3)  # those of older versions end in <pid>:<random>
    return parts[2] if len(parts) == 4 and len(parts[2]) == 16 else NOWHERE


def _here() -> str:
    """This boot of this machine, and the network namespace in it."""
    if sys.platform != "linux":
        return NOWHERE
    try:
        boot, network = _BOOT_ID.read_text(encoding="ascii").strip(), _NETWORK.stat().st_ino
    except (OSError, ValueError):
        return NOWHERE
    return hashlib.sha256(f"{boot}/{network}".encode()).hexdigest()[:16] if boot else NOWHERE


def _name_of(owner: str) -> bytes:
    """An abstract name (a zero byte first), the same length for every id: 107 bytes are the most."""
    return b"\0batch-dispatcher/" + hashlib.sha256(owner.encode()).hexdigest()[:32].encode()


def _is_free(owner: str) -> bool:
    """Nobody holds its name. Each kind of socket has names of its own: all of ours are of one kind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(_name_of(owner))
        except OSError:
            return False
    return True
