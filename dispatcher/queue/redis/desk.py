"""The queue as producers and operators see it: no leases, no owner."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis import exceptions as errors

from dispatcher.ports import Counts, Dead, Submission
from dispatcher.queue.constants import CANCEL_TTL_S, REPLY_TTL_S, SUSPECT_DEATHS
from dispatcher.queue.keys import ACTIVE, MAX_TOKEN_BYTES, Names
from dispatcher.queue.redis.clock import ServerClock
from dispatcher.queue.redis.scripts import SCRIPT_BYTES, Argument, Client, Reply, Scripts, in_steps
from dispatcher.queue.requeue import accept_anew

_BATCH = 1000


class RedisDesk:
    """Submit, cancel, look and decide; each method is one step, safe to repeat. Implements ports.Desk.

    Raises QueueUnavailableError for whatever may pass by itself.
    """

    def __init__(self, client: Client, names: Names, *, try_s: float = 3.0) -> None:
        self.names = names
        self._scripts = Scripts(client, try_s=try_s)
        self._clock = ServerClock()
        self._own = names.keys

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.names.queue}>"

    async def aclose(self) -> None:
        """Close the connections."""
        with suppress(Exception):  # those that broke already say so, and nobody needs to know
            await self._scripts.client.aclose()

    async def submit(self, submissions: Sequence[Submission]) -> int:
        """Put them into the queue and wake the dispatchers; how many were not pending already."""
        added = 0
        for batch in in_steps(submissions, lambda each: len(each.member), _BATCH):
            call = secrets.token_hex(8)
            pairs = [part for each in batch for part in (repr(float(each.score)), each.member)]
            marks = [part for each in batch for part in _mark(each)]
            args: list[Argument] = [REPLY_TTL_S, self.names.wake, len(batch), *pairs, *marks]
            added += (await self._run("submit", args, [self.names.reply(call)])).value
        return added

    async def cancel(self, request_id: str, request_token: str = "") -> bool:
        """Set the cancel markers of those that are active under the id, or of the one with that token; False
        where there is none."""
        args: list[Argument] = [self.names.wake, CANCEL_TTL_S, request_id, request_token]
        if request_token and (await self._run("cancel", [*args, ""])).value:
            return True
        theirs = await self._scripts.attempt(lambda: self._scripts.client.get(ACTIVE + request_id))
        return bool((await self._run("cancel", [*args, theirs or ""])).value)

    async def pause(self, by: str, why: str) -> None:
        """Stop all claims until `resume`; what is leased goes on."""
        switch = msgspec.json.encode({"by": by, "why": why, "at": int(time.time())})

        async def pause() -> None:
            await self._scripts.client.set(self.names.paused, switch)
            await self._wake("paused")

        await self._scripts.attempt(pause)

    async def resume(self) -> None:
        async def resume() -> None:
            await self._scripts.client.delete(self.names.paused)
            await self._wake("resumed")

        await self._scripts.attempt(resume)

    async def _wake(self, what: str) -> None:
        """Who may not publish is noticed at the dispatchers' next look."""
        with suppress(errors.NoPermissionError):
            await self._scripts.client.publish(self.names.wake, what)

    async def paused(self) -> tuple[str, str] | None:
        """Who paused it and why; None when nobody did."""

        async def read() -> bytes | None:
            found: bytes | None = await self._scripts.client.get(self.names.paused)
            return found

        switch = await self._scripts.attempt(read)
        if switch is None:
            return None
        try:
            fields = msgspec.json.decode(switch, type=dict[str, Any])
        except msgspec.DecodeError:  # set by hand
            return "", switch.decode(errors="replace")
        return str(fields.get("by", "")), str(fields.get("why", ""))

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        """Score and member of the first that a claim would take, suspects included, in order.

        At most 1 MB of members (one at least).
        """
        found = (await self._run("peek", [most, SCRIPT_BYTES])).value
        return [(float(found[at]), found[at + 1]) for at in range(0, len(found), 2)]

    async def counts(self) -> Counts:
        _, pending, leased, delayed, dead, _ = await self._counts()
        return Counts(pending, leased, delayed, dead)

    async def _counts(self) -> Sequence[int]:
        reply = await self._run("counts", [])
        self._saw(reply, reply.value[0])
        counts: Sequence[int] = reply.value
        return counts

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        """The dead with an entry above `after`, by entry; at most 1 MB of members (one at least)."""
        return await self._list_dead("list", after, most)

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        """Those with the highest entries, the highest first; at most 1 MB of members (one at least)."""
        return await self._list_dead("newest", 0, most)

    async def _list_dead(self, how: str, after: int, most: int) -> Sequence[Dead]:
        found = (await self._run("dead", [how, after, most, SCRIPT_BYTES])).value
        return [_dead(*found[at : at + 9]) for at in range(0, len(found), 9)]

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        """Accept them anew with this deadline (in the member and in the score, the priority kept).

        Each is a new acceptance, and so may give a second result for its id. Those whose member cannot be
        read stay dead.
        """
        done = 0
        for entry in entries:
            dead = next((one for one in await self.dead_list(1, entry - 1) if one.entry == entry), None)
            again = None if dead is None else accept_anew(dead.member, dead.score, deadline)
            if again is None:
                continue
            args: list[Argument] = [entry, repr(again.score), again.member, self.names.wake, *_mark(again)]
            done += (await self._run("requeue", args)).value
        return done

    async def dead_purge(self, entries: Sequence[int] | None = None) -> int:
        """Forget them; None: all."""
        if entries is not None:
            gone = 0
            for at in range(0, len(entries), _BATCH):
                gone += (await self._run("dead", ["purge", *entries[at : at + _BATCH]])).value
            return gone
        gone = 0
        while found := await self.dead_list(_BATCH):
            gone += await self.dead_purge([dead.entry for dead in found])
        return gone

    async def _run(
        self, script: str, args: Sequence[Argument], keys: Sequence[Argument] = (), *, size: int = 0
    ) -> Reply:
        return await self._scripts.run(script, [*self._own, *keys], args, size=size)

    def _saw(self, reply: Reply, server_time: bytes) -> None:
        self._clock.observe(reply.sent_at, reply.received_at, float(server_time))

    async def _learn_clock(self) -> None:
        """Translating a time needs one reply first."""
        if not self._clock.known:
            await self._counts()

    def _server(self, at: float) -> str:
        """Loop time as an argument of a script."""
        return f"{at + self._clock.offset(asyncio.get_running_loop().time()):.6f}"


def _mark(submission: Submission) -> tuple[str | int, ...]:
    """What makes it one that can be cancelled, where it can be."""
    if not (submission.request_id and submission.request_token and submission.deadline):
        return ()
    if len(submission.request_token.encode(errors="surrogatepass")) > MAX_TOKEN_BYTES:
        return ()
    return submission.request_id, submission.request_token, submission.deadline


def _dead(
    entry: int,
    member: bytes,
    score: bytes,
    reason: bytes,
    died_at: bytes,
    deliveries: int,
    attempts: int,
    refusals: int,
    deaths: int,
) -> Dead:
    return Dead(
        entry,
        member,
        float(score),
        reason.decode(errors="replace"),
        float(died_at),
        deliveries,
        attempts,
        refusals,
        max(0, deaths - SUSPECT_DEATHS),
    )
