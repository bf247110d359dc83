"""The queue as producers and operators see it: no leases, no owner."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from redis import exceptions as errors

from dispatcher.core.requests.found_request import FoundRequest, Looked, Whereabouts, Words
from dispatcher.core.requests.request import Request, parse
from dispatcher.core.sequences.decisions import SequencePage
from dispatcher.core.sequences.turns import SequenceSeen, SequenceStatus
from dispatcher.ports import Counts, Dead, ModelMarks, Submission
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.keys import Names
from dispatcher.queue.redis import (
    cancel_markers,
    model_registry,
    producer,
    script_calls,
    search,
    sequences,
    waiting_for_model,
)
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Client, in_steps
from dispatcher.queue.requeue import accept_anew

_BATCH = 1000
_PAUSE_BYTES = 65_536
"""Largest record of who paused the queue and why."""
_USED_UP = re.compile(r"no answer after (\d{1,9}) attempts?, the last: ")
"""How core.outcome begins the reason of a request whose attempts are used up."""


class RedisDesk:
    """Submit, cancel, look and decide; each method is one step, safe to repeat. Implements ports.Desk.

    Raises QueueUnavailableError for whatever may pass by itself.
    """

    def __init__(self, client: Client, names: Names, *, try_s: float = 3.0) -> None:
        self.names = names
        self.backend = Backend(client, names, try_s=try_s)

    def __repr__(self) -> str:
        return f"<RedisDesk {self.names.queue}>"

    async def aclose(self) -> None:
        """Close the connections."""
        await self.backend.aclose()

    async def submit(self, submissions: Sequence[Submission]) -> int:
        """Put them into the queue and wake the dispatchers; how many were not pending already."""
        added = 0
        for batch in in_steps(submissions, lambda each: len(each.member), _BATCH):
            added += await producer.submit(self.backend, batch)
        return added

    async def cancel(self, request_id: str, request_token: str = "", *, found: bool = False) -> bool:
        """Set the cancel markers of those that are active under the id, or of the one with that token; False
        where there is none. `found`: it was seen in the queue with that token, whoever submitted it."""
        if found:
            return bool(await producer.cancel(self.backend, request_id, request_token, request_token))
        if request_token and await producer.cancel(self.backend, request_id, request_token, ""):
            return True
        theirs = await cancel_markers.active_of(self.backend.scripts, request_id)
        return bool(await producer.cancel(self.backend, request_id, request_token, theirs))

    async def being_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """For each (request id, its token): does a marker say that it is to be cancelled? Reads only; a
        marker that this user may not read counts as none, and so do those of llm-d's producers on a Cluster,
        which lie on any of its nodes."""
        foreign: cancel_markers.Foreign = "" if self.backend.scripts.is_cluster else "may"
        return await cancel_markers.cancelled(self.backend, requests, foreign=foreign)

    async def pause(self, by: str, why: str) -> None:
        """Stop all claims until `resume`; what is leased goes on."""
        switch = msgspec.json.encode({"by": by, "why": why, "at": int(time.time())})
        scripts = self.backend.scripts

        async def pause() -> None:
            await scripts.client.set(self.names.paused, switch)
            await self._wake("paused")

        await scripts.attempt(pause)

    async def resume(self) -> None:
        scripts = self.backend.scripts

        async def resume() -> None:
            await scripts.client.delete(self.names.paused)
            await self._wake("resumed")

        await scripts.attempt(resume)

    async def _wake(self, what: str) -> None:
        """Who may not publish is noticed at the dispatchers' next look."""
        with suppress(errors.NoPermissionError):
            await self.backend.scripts.client.publish(self.names.wake, what)

    async def paused(self) -> tuple[str, str] | None:
        """Who paused it and why; None when nobody did."""
        scripts = self.backend.scripts

        async def read() -> bytes | None:
            found: bytes = await scripts.client.getrange(self.names.paused, 0, _PAUSE_BYTES - 1)
            if not found and not await scripts.client.exists(self.names.paused):
                return None
            return found

        switch = await scripts.attempt(read)
        if switch is None:
            return None
        try:
            fields = msgspec.json.decode(switch, type=dict[str, Any])
        except msgspec.DecodeError:  # set by hand
            return "", switch.decode(errors="replace")
        return str(fields.get("by", "")), str(fields.get("why", ""))

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        """Score and member of the first that a claim would take, those of all lanes included, in order.

        At most 1 MB of members (one at least).
        """
        return await script_calls.peek(self.backend, most)

    async def lying(self, state: Whereabouts, most: int, after: str = "", *, whole: bool = False) -> Looked:
        """A page of those that lie there, in their order."""
        return _counted(await search.lying(self.backend, state, most, after, whole=whole))

    async def near(self, request_id: str, after: str = "") -> Looked:
        """A page of those that may bear this id, where looking costs little."""
        return _counted(await search.near(self.backend, request_id, after))

    async def search(
        self, words: Words, after: str = "", *, entries_only: bool = False, whole: bool = False
    ) -> Looked:
        """A page of a walk over all requests, or over those that were claimed at least once."""
        return _counted(await search.walk(self.backend, words, after, entries_only=entries_only, whole=whole))

    async def ahead(self, found: FoundRequest) -> int | None:
        """How many lie before it in line; None where it does not wait there (any more)."""
        return await search.ahead(self.backend, found)

    async def restore(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        """Take over requests that were found in that other queue; how many are new."""
        batches = in_steps(requests, lambda each: len(each.member))
        return sum([await search.restore(self.backend, queue, batch) for batch in batches])

    async def is_where(self, other: RedisDesk) -> bool:
        """Whether both are on one server, whatever their URLs say: what is written here is found there."""
        key, here, there = self.backend.new_reply(), self.backend.scripts, other.backend.scripts
        await here.attempt(lambda: here.client.set(key, "here", ex=60))
        found = await there.attempt(lambda: there.client.get(key))
        await here.attempt(lambda: here.client.delete(key))
        return found is not None

    async def read_results(self, name: str, most: int, after: int = 0) -> Sequence[bytes]:
        """What lies in a result list, the oldest first, behind so many; nothing is taken."""
        return await search.results(self.backend, name, most, after)

    async def is_list(self, name: str) -> bool:
        """Whether results can lie under that name: False where something else does."""
        return await search.is_list(self.backend, name)

    async def take_result(self, name: str, result: bytes) -> bool:
        """Remove it, the oldest that equals it; False where it is gone."""
        return await search.take(self.backend, name, result)

    async def unserved_s(self) -> float | None:
        """How long ago a dispatcher last swept the queue, in Redis time; None: none ever has."""
        return await producer.unserved_s(self.backend.scripts, self.names)

    async def counts(self) -> Counts:
        return await script_calls.counts(self.backend)

    async def awaited(self) -> Mapping[str, int]:
        """How many wait for which model that is not served."""
        return await waiting_for_model.awaited(self.backend)

    async def sequences(
        self, most: int, after: str = "", status: SequenceStatus | None = None
    ) -> SequencePage:
        """A page of a walk over about so many, in no order; of those, the ones with that status."""
        return await sequences.page(self.backend, most, after, status)

    async def sequence(self, sequence_id: str) -> SequenceSeen | None:
        """Return one sequence with the first of its waiting requests. `None` if it is not known."""
        return await sequences.show(self.backend, sequence_id)

    async def ids_of(self, entries: Sequence[int]) -> dict[int, str]:
        """The ids of requests that were claimed once, those that are there and can be read."""
        scripts, key = self.backend.scripts, self.names.members
        found = {}
        for entry in entries:
            member = await scripts.attempt(lambda entry=entry: scripts.client.hget(key, entry))  # type: ignore[misc]
            if name := parse(member or b"").id:
                found[entry] = name
        return found

    async def release_sequence(self, sequence_id: str) -> bool:
        """Let a sequence that is held go on. Return False if it is not held."""
        done = bool(await sequences.decide(self.backend, "release", sequence_id))
        return await self._decided(done=done)

    async def abort_sequence(self, sequence_id: str, why: str) -> bool:
        """Have the waiting and later requests of a sequence answered SEQUENCE_ABORTED. Return False if it was
        aborted before, or has ended."""
        return await self._decided(done=await sequences.abort(self.backend, sequence_id, why))

    async def cancel_sequence(
        self, sequence_id: str, at: float | None = None, for_s: float = CANCEL_TTL_S
    ) -> bool:
        """End a sequence. Its waiting requests are answered CANCELLED, and its running one is cancelled.

        Requests that were submitted until `at` (Unix time; `None` for now, by the clock of Redis) and are
        claimed within `for_s` are answered CANCELLED, too. Return False if, as far as dispatchers know, the
        sequence has ended or is not there.
        """
        told = "" if at is None else repr(at)
        head = await sequences.decide(self.backend, "cancel", sequence_id, told, for_s)
        if head:
            scripts, key = self.backend.scripts, self.names.members
            request = parse(await scripts.attempt(lambda: scripts.client.hget(key, head)) or b"")
            if isinstance(request, Request) and request.token:
                await self.cancel(request.id, request.token, found=True)
        await self._decided(done=True)
        return head is not None

    async def sequence_secret(self) -> str:
        """Return the secret that all programs with our client share for their sequences. Create it if there
        is none."""
        return await producer.sequence_secret(self.backend.scripts, self.names)

    async def take_over_secret(self, other: RedisDesk) -> None:
        """Copy the secret of sequences from another queue, unless this one has a secret.

        Programs with our client can then go on with the sequences of requests that were copied from there.
        """
        there, here = other.backend.scripts, self.backend.scripts
        secret = await there.attempt(lambda: there.client.get(other.names.sequence_secret))
        if secret:
            await here.attempt(lambda: here.client.set(self.names.sequence_secret, secret, nx=True))

    async def forget_sequence(self, sequence_id: str) -> bool | None:
        """Forget a sequence. Return False if a request of it runs or waits; `None` if it is not known."""
        told = await sequences.decide(self.backend, "forget", sequence_id)
        return None if told is None else await self._decided(done=bool(told))

    async def _decided(self, *, done: bool) -> bool:
        if done:
            await self.backend.scripts.attempt(lambda: self._wake("sequence"))
        return done

    async def model_marks(self) -> ModelMarks:
        """What is said of versions of models; reads only."""
        return await model_registry.look(self.backend)

    async def label(self, family: str, label: str, version: str | None, who: str) -> bool:
        """Have the label mean that version; None takes it back. False: there was none to take back."""
        return await model_registry.label(self.backend, family, label, version, who)

    async def drain(self, model: str, who: str, why: str = "") -> None:
        """Have this version take nothing new."""
        await model_registry.drain(self.backend, model, who, why)

    async def undrain(self, model: str) -> bool:
        """Take that back; False: it was not drained."""
        return await model_registry.undrain(self.backend, model)

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        """The dead with an entry above `after`, by entry; at most 1 MB of members (one at least)."""
        found = await script_calls.dead_after(self.backend, after, most)
        return [replace(one, attempts=_attempts(one.attempts, one.reason)) for one in found]

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        """Those with the highest entries, the highest first; at most 1 MB of members (one at least)."""
        found = await script_calls.dead_newest(self.backend, most)
        return [replace(one, attempts=_attempts(one.attempts, one.reason)) for one in found]

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        """Accept them anew with this deadline (in the member and in the score, the priority kept).

        Each is a new acceptance, and so may give a second result for its id. Those whose member cannot be
        read stay dead.
        """
        done = 0
        for entry in entries:
            dead = next((one for one in await self.dead_list(1, entry - 1) if one.entry == entry), None)
            again = None if dead is None else accept_anew(self.names, dead.member, dead.score, deadline)
            if again is not None:
                done += await script_calls.requeue(self.backend, entry, again)
        return done

    async def dead_purge(self, entries: Sequence[int] | None = None) -> int:
        """Forget them; None: all."""
        gone = 0
        if entries is None:
            while found := await self.dead_list(_BATCH):
                gone += await script_calls.purge(self.backend, [dead.entry for dead in found])
            return gone
        for at in range(0, len(entries), _BATCH):
            gone += await script_calls.purge(self.backend, entries[at : at + _BATCH])
        return gone


def _attempts(counted: int, reason: str) -> int:
    """All tries of a dead request that failed. The queue counts a try when it is given back for another one;
    the last, after which it died, stands in the reason alone."""
    said = _USED_UP.match(reason)
    return counted if said is None else max(counted, int(said[1]))


def _counted(page: Looked) -> Looked:
    found = [
        replace(one, attempts=_attempts(one.attempts, one.reason)) if one.state is Whereabouts.DEAD else one
        for one in page.found
    ]
    return replace(page, found=found)
