"""The queue as producers and operators use it. It has no owner and holds no leases."""

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
"""Beginning of the reason of a dead request whose attempts are used up (core/gateway/outcome.py)."""


class RedisDesk:
    """Submits, cancels and inspects requests. Each method is one step that is safe to repeat. Implements
    `ports.QueueAdmin`.

    Raises QueueUnavailableError for every temporary failure.
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
        """Submit requests and wake the dispatchers. Return how many were not pending already."""
        added = 0
        for batch in in_steps(submissions, lambda each: len(each.member), _BATCH):
            added += await producer.submit(self.backend, batch)
        return added

    async def cancel(self, request_id: str, request_token: str = "", *, found: bool = False) -> bool:
        """Mark the requests that are active under the id as cancelled, or the one with the token. Return
        False if there is none. `is_token_known`: a request with that token was seen in the queue, and may
        come from any producer."""
        if found:
            return bool(await producer.cancel(self.backend, request_id, request_token, request_token))
        if request_token and await producer.cancel(self.backend, request_id, request_token, ""):
            return True
        # The queue's own markers do not know the request, so a producer of llm-d may have submitted it.
        theirs = await cancel_markers.active_of(self.backend.scripts, request_id)
        return bool(await producer.cancel(self.backend, request_id, request_token, theirs))

    async def being_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """Return for each (request id, token) whether a marker says that it is to be cancelled.

        Only reads. A marker that this user may not read counts as none, and so do those of llm-d's producers
        on a Cluster, because they are on any of its nodes.
        """
        foreign: cancel_markers.Foreign = "" if self.backend.scripts.is_cluster else "may"
        return await cancel_markers.cancelled(self.backend, requests, foreign=foreign)

    async def pause(self, by: str, why: str) -> None:
        """Stop all claims until `resume`. Leased requests go on."""
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
        """Publish a wake-up. If this user may not publish, the dispatchers notice the change when they next
        poll."""
        with suppress(errors.NoPermissionError):
            await self.backend.scripts.client.publish(self.names.wake, what)

    async def paused(self) -> tuple[str, str] | None:
        """Return who paused the queue and why. `None` if it is not paused."""
        scripts = self.backend.scripts

        async def read() -> bytes | None:
            found: bytes = await scripts.client.getrange(self.names.paused, 0, _PAUSE_BYTES - 1)
            # GETRANGE returns an empty string both for a missing key and for an empty value, which pauses as
            # well.
            if not found and not await scripts.client.exists(self.names.paused):
                return None
            return found

        switch = await scripts.attempt(read)
        if switch is None:
            return None
        try:
            fields = msgspec.json.decode(switch, type=dict[str, Any])
        except msgspec.DecodeError:  # an operator has set the key by hand
            return "", switch.decode(errors="replace")
        return str(fields.get("by", "")), str(fields.get("why", ""))

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        """Return score and member of the next requests in the order of a claim, including those of all lanes.

        At most 1 MB of members, but at least one.
        """
        return await script_calls.peek(self.backend, most)

    async def lying(self, state: Whereabouts, most: int, after: str = "", *, whole: bool = False) -> Looked:
        """Return a page of the requests at a location, in their order."""
        return _counted(await search.lying(self.backend, state, most, after, whole=whole))

    async def near(self, request_id: str, after: str = "") -> Looked:
        """Return a page of the requests that may have this id, as far as they are found at little cost."""
        return _counted(await search.near(self.backend, request_id, after))

    async def search(
        self, words: Words, after: str = "", *, entries_only: bool = False, whole: bool = False
    ) -> Looked:
        """Return a page of a scan over all requests, or over those that were claimed at least once."""
        return _counted(await search.walk(self.backend, words, after, entries_only=entries_only, whole=whole))

    async def ahead(self, found: FoundRequest) -> int | None:
        """Return the number of requests ahead of a request. `None` if it does not wait (any more)."""
        return await search.ahead(self.backend, found)

    async def restore(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        """Copy requests from another queue. Return how many are new."""
        batches = in_steps(requests, lambda each: len(each.member))
        return sum([await search.restore(self.backend, queue, batch) for batch in batches])

    async def is_where(self, other: RedisDesk) -> bool:
        """Return whether both queues are on one server, whatever their URLs are. A key written here must be
        found there."""
        key, here, there = self.backend.new_reply(), self.backend.scripts, other.backend.scripts
        await here.attempt(lambda: here.client.set(key, "here", ex=60))
        found = await there.attempt(lambda: there.client.get(key))
        await here.attempt(lambda: here.client.delete(key))
        return found is not None

    async def read_results(self, name: str, most: int, after: int = 0) -> Sequence[bytes]:
        """Return results of a list, the oldest first, after the first `after`. None is removed."""
        return await search.results(self.backend, name, most, after)

    async def is_list(self, name: str) -> bool:
        """Return whether the name can be a result list. False if the key has another type."""
        return await search.is_list(self.backend, name)

    async def take_result(self, name: str, result: bytes) -> bool:
        """Remove the oldest result that equals this one. Return False if there is none."""
        return await search.take(self.backend, name, result)

    async def unserved_s(self) -> float | None:
        """Return the seconds since a dispatcher last swept the queue, in Redis time. `None` if none
        ever has."""
        return await producer.unserved_s(self.backend.scripts, self.names)

    async def counts(self) -> Counts:
        return await script_calls.counts(self.backend)

    async def awaited(self) -> Mapping[str, int]:
        """Return the number of requests that wait for each model that is not served."""
        return await waiting_for_model.awaited(self.backend)

    async def sequences(
        self, most: int, after: str = "", status: SequenceStatus | None = None
    ) -> SequencePage:
        """Return a page of a scan over about `max_count` sequences, in no order. It has those with the
        status, if one is given."""
        return await sequences.page(self.backend, most, after, status)

    async def sequence(self, sequence_id: str) -> SequenceSeen | None:
        """Return one sequence with the first of its waiting requests. `None` if it is not known."""
        return await sequences.show(self.backend, sequence_id)

    async def ids_of(self, entries: Sequence[int]) -> dict[int, str]:
        """Return the ids of requests that were claimed at least once, as far as they exist and can be
        read."""
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

        Requests that were submitted until `submitted_until` (Unix time; `None` for now, by the clock of
        Redis) and are claimed within `claimed_within_s` are answered CANCELLED, too. Return False if, as far
        as dispatchers know, the sequence has ended or is not there.
        """
        told = "" if at is None else repr(at)
        head = await sequences.decide(self.backend, "cancel", sequence_id, told, for_s)
        if head:  # a request of the sequence runs or waits for its retry: cancel it by its token
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
        """Return the model registry. Only reads."""
        return await model_registry.look(self.backend)

    async def label(self, family: str, label: str, version: str | None, who: str) -> bool:
        """Let the label mean that version. `None` removes the label. Return False if there was none to
        remove."""
        return await model_registry.label(self.backend, family, label, version, who)

    async def drain(self, model: str, who: str, why: str = "") -> None:
        """Send no new requests to this version."""
        await model_registry.drain(self.backend, model, who, why)

    async def undrain(self, model: str) -> bool:
        """Remove the drain of a version. Return False if it was not drained."""
        return await model_registry.undrain(self.backend, model)

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        """Return the dead requests with an entry above `after`, by entry: at most 1 MB of members, but at
        least one."""
        found = await script_calls.dead_after(self.backend, after, most)
        return [replace(one, attempts=_attempts(one.attempts, one.reason)) for one in found]

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        """Return the dead requests with the highest entries, highest first: at most 1 MB of members, but at
        least one."""
        found = await script_calls.dead_newest(self.backend, most)
        return [replace(one, attempts=_attempts(one.attempts, one.reason)) for one in found]

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        """Submit dead requests again with this deadline (in the member and in the score). Their priority
        stays.

        Each is a new submission, so there may be a second result for its id. Requests whose member cannot be
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
        """Delete dead requests. `None` for all."""
        gone = 0
        if entries is None:
            while found := await self.dead_list(_BATCH):
                gone += await script_calls.purge(self.backend, [dead.entry for dead in found])
            return gone
        for at in range(0, len(entries), _BATCH):
            gone += await script_calls.purge(self.backend, entries[at : at + _BATCH])
        return gone


def _attempts(counted: int, reason: str) -> int:
    """Return the number of all failed attempts of a dead request. The queue counts an attempt when it
    is released for another one. The last attempt, after which the request died, is counted in the
    reason only."""
    said = _USED_UP.match(reason)
    return counted if said is None else max(counted, int(said[1]))


def _counted(page: Looked) -> Looked:
    found = [
        replace(one, attempts=_attempts(one.attempts, one.reason)) if one.state is Whereabouts.DEAD else one
        for one in page.found
    ]
    return replace(page, found=found)
