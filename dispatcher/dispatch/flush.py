"""Reports finished requests to the queue, and claims the next requests of their sequences in the same call.

    flush    reports all completions, with one call for each kind
    claim    if requests of sequences end, the next ones come with the reply. This saves a claim and the check
             of their turns.

A lost reply loses nothing: the completions are reported again, and the next claim returns the leases of the
lost reply, because it uses the same nonce.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from dispatcher.core.sequences.decisions import Goes
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.in_flight import HeldLease
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.lanes import Lanes
from dispatcher.dispatch.queue_access import QueueAccess, now
from dispatcher.ports import Burial, Claimed, Lease, Permit, Release, Settled, Settlement


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Next requests of sequences that a flush has claimed."""

    nonce: str
    """Nonce of the call that flushed and claimed."""
    asked_at: float
    permit: Permit
    claimed: Claimed | None
    """Reply of the queue. `None` if it is not known: a claim with the same nonce returns it."""
    goes: Sequence[Goes] = ()


class HandingIn:
    """Completions of this process until the queue has confirmed them. `remove_lease` is called for each
    confirmed one."""

    def __init__(
        self, access: QueueAccess, lanes: Lanes, journal: Journal, drop: Callable[[str], HeldLease | None]
    ) -> None:
        self.done: list[Ending] = []
        """Completions that are not flushed yet."""
        self.nonces = _nonces()
        """Nonces for calls that create leases. No two processes generate the same one."""
        self._access = access
        self._lanes = lanes
        self._journal = journal
        self._drop = drop

    def ends(self, leases: Iterable[Lease]) -> bool:
        """Return True if one of these leases has a completion that ends its request for good."""
        tokens = {lease.token for lease in leases}
        ended = (ending for ending in self.done if not isinstance(ending, Release))
        return any(completions.lease_of(ending).token in tokens for ending in ended)

    async def all(self, permit: Callable[[], Permit | None]) -> TakenOver | None:
        """Flush all pending completions. `get_permit` returns the permit to claim next requests of sequences,
        or `None` if none may be claimed."""
        # Requests that finish during the calls below are appended to the new list.
        done, self.done = self.done, []
        settlements = [ending for ending in done if isinstance(ending, Settlement)]
        releases = [ending for ending in done if isinstance(ending, Release)]
        burials = [ending for ending in done if isinstance(ending, Burial)]
        access, taken = self._access, None
        if settlements:
            # Without a request of a sequence there is no next one, and the plain call is cheaper.
            by = permit() if any(ending.turn is not None for ending in settlements) else None
            if by is not None:
                taken = await self._take_over(settlements, by)
            else:
                self._ended(settlements, await access.ask("settle", access.queue.settle(settlements)))
        if releases:
            self._ended(releases, await access.ask("release", access.queue.release(releases)))
        if burials:
            self._ended(burials, await access.ask("bury", access.queue.bury(burials)))
        return taken

    async def _take_over(self, settlements: list[Settlement], permit: Permit) -> TakenOver:
        access = self._access
        nonce, asked_at = next(self.nonces), access.clock()
        told = await access.ask("settle", access.queue.hand_over(settlements, nonce, permit))
        # Keep the nonce: a claim with it returns leases that the queue may have created.
        if told is None or told.claimed is None:
            self._ended(settlements, None if told is None else told.answers)
            return TakenOver(nonce, asked_at, permit, None)
        self._ended(settlements, told.answers, brought=True)
        access.heard(asked_at)
        access.learn(told.claimed)
        access.work = access.work or told.claimed.waiting > 0
        return TakenOver(nonce, asked_at, permit, told.claimed, told.goes)

    def _ended(
        self, handed_in: Sequence[Ending], answers: Sequence[Settled | None] | None, *, brought: bool = False
    ) -> None:
        """Remove the leases that have ended, and keep the completions that must be flushed again.

        `is_next_known` is True if the next requests of the sequences are already known.
        """
        if answers is None:
            # The queue is unreachable: the whole call is repeated with the next flush.
            self.done.extend(handed_in)
            return
        at, unix_now = now(), self._access.queue.unix_now()
        for ending, answer in zip(handed_in, answers, strict=True):
            if answer is None:  # only this one failed: flush it again with the next turn
                self.done.append(ending)
                continue
            lease = completions.lease_of(ending)
            held = self._drop(lease.token)
            self._journal.ended(held, ending, answer, at, unix_now)
            if isinstance(ending, Release):
                at_once = ending.delay_s <= 0 and not ending.awaits
            else:
                at_once = not brought and completions.turn_of(ending) is not None
            if self._lanes.ended(lease, ending) or at_once:
                self._access.work = True


def _nonces() -> Iterator[str]:
    mine = secrets.token_hex(8)
    return (f"{mine}-{number}" for number in count(1))
