"""What has finished here, on its way back to the queue, and what comes next by that.

    hand in    all that has finished, one call for each way to end
    take over  where requests of sequences end, the next ones come with the reply, as a claim would have
               brought them: without a second call, and without being asked for their turn

Nothing is lost with a reply: what was handed in is handed in again, and what was taken over by it is told by
the next claim, which has the nonce of that call.
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
    """What a call has brought that handed in others."""

    nonce: str
    """Of that call."""
    asked_at: float
    permit: Permit
    claimed: Claimed | None
    """None: a claim by the same nonce tells."""
    goes: Sequence[Goes] = ()


class HandingIn:
    """Of one process. `drop`: the queue has taken back a lease."""

    def __init__(
        self, access: QueueAccess, lanes: Lanes, journal: Journal, drop: Callable[[str], HeldLease | None]
    ) -> None:
        self.done: list[Ending] = []
        """What has finished and is not handed in."""
        self.nonces = _nonces()
        """Names for calls that hand out leases: no process ever gives one twice."""
        self._access = access
        self._lanes = lanes
        self._journal = journal
        self._drop = drop

    def ends(self, leases: Iterable[Lease]) -> bool:
        """Whether the request of one of these leases has ended for good, and is to be handed in."""
        tokens = {lease.token for lease in leases}
        ended = (ending for ending in self.done if not isinstance(ending, Release))
        return any(completions.lease_of(ending).token in tokens for ending in ended)

    async def all(self, permit: Callable[[], Permit | None]) -> TakenOver | None:
        """Hand in what has finished. `permit`: by which others may be taken over for it; None: none may."""
        done, self.done = self.done, []
        settlements = [ending for ending in done if isinstance(ending, Settlement)]
        releases = [ending for ending in done if isinstance(ending, Release)]
        burials = [ending for ending in done if isinstance(ending, Burial)]
        access, taken = self._access, None
        if settlements:
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
        """`brought`: what may be claimed by that is known."""
        if answers is None:
            self.done.extend(handed_in)
            return
        at, unix_now = now(), self._access.queue.unix_now()
        for ending, answer in zip(handed_in, answers, strict=True):
            if answer is None:  # alone, it waits for the next turn
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
