"""Calls of producers and consumers: one function for each script, as in script_calls.py, and the wait for
results.

They are separate from those of dispatchers, so that a program which only submits loads little.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dispatcher.core.requests.submission import Submission
from dispatcher.queue.constants import CANCEL_TTL_S, REPLY_TTL_S
from dispatcher.queue.keys import BOX_KEPT, BOX_OWNER, MAX_TOKEN_BYTES, Names
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import SCRIPT_BYTES, Argument, Scripts, WrongKeyError

COLLECTED_MOST = 1000
_SCANNED_MOST = 100
UNSERVED_AFTER_S = 30.0
"""Seconds without a sweep after which no dispatcher serves the queue: each of them sweeps every few
seconds."""
KEEP_S = 604_800
"""Seconds for which results are kept for a client if their list has no lifetime of its own."""


async def submit(
    backend: Backend,
    submissions: Sequence[Submission],
    *,
    reply: str = "",
    reply_s: int = REPLY_TTL_S,
    done_with: Sequence[str] = (),
) -> int:
    """Submit requests. Return how many were not pending already.

    `reply_key` is the key of the reply for `reply_ttl_s`, so that a repeated call with the same key submits
    nothing twice; empty for a new key. `obsolete_replies` are the keys of calls that will not be repeated.
    """
    args: list[Argument] = [reply_s, backend.names.wake, len(submissions)]
    for each in submissions:
        args += (repr(float(each.score)), each.member)
    for each in submissions:
        args += mark(each)
    size = sum(len(each.member) for each in submissions)
    keys = [reply or backend.new_reply(), *done_with]
    added: int = (await backend.run("submit", args, keys, size=size)).value
    return added


def mark(submission: Submission) -> tuple[str | int, ...]:
    """Return the active marker of a submission (id, token, deadline), or nothing if it cannot be
    cancelled."""
    if not (submission.request_id and submission.request_token and submission.deadline):
        return ()
    if len(submission.request_token.encode(errors="surrogatepass")) > MAX_TOKEN_BYTES:
        return ()
    return submission.request_id, submission.request_token, submission.deadline


async def cancel(backend: Backend, request_id: str, request_token: str, theirs: bytes | str) -> int:
    """Mark requests as cancelled. Return how many. `foreign_token` is what a producer of llm-d has left under
    the id."""
    args: list[Argument] = [backend.names.wake, CANCEL_TTL_S, request_id, request_token, theirs]
    active: int = (await backend.run("cancel", args)).value
    return active


async def sequence_secret(scripts: Scripts, names: Names) -> str:
    """Return the secret that all programs with our client share for their sequences. Create it if needed.

    Only users with an operator's rights may read the secret, and they may read the contents of sequences
    anyway. So it keeps out producers with lesser rights, while a restarted program, its replicas and the
    command line can go on with each other's sequences.
    """

    async def agreed() -> bytes:
        found: bytes | None = await scripts.client.get(names.sequence_secret)
        if found is None:
            # Several programs may do this at the same time. NX lets the first one win, and all read its
            # secret.
            await scripts.client.set(names.sequence_secret, secrets.token_hex(16), nx=True)
            found = await scripts.client.get(names.sequence_secret)
        return found or b""

    return (await scripts.attempt(agreed)).decode(errors="replace")


async def is_active(backend: Backend, request_id: str) -> bool:
    """Return whether a request of this id that can be cancelled waits or runs."""
    scripts = backend.scripts
    return bool(await scripts.attempt(lambda: scripts.client.exists(backend.names.active(request_id))))


@dataclass(frozen=True, slots=True)
class Box:
    """Result list of one client, and its keys for the results that it has taken from the list."""

    results: str

    @property
    def keep(self) -> str:
        return f"{self.results}:{BOX_KEPT}"

    @property
    def owner(self) -> str:
        return f"{self.results}:{BOX_OWNER}"


@dataclass(frozen=True, slots=True)
class Collected:
    """Reply to one collection of results."""

    holder: str = ""
    """Client that takes the results instead, in which case nothing was done. Otherwise empty."""
    other: bool = False
    """True if the kept results are not those that the client has seen, because Redis lost them or they
    expired."""
    last: int = 0
    """Highest number that was returned so far."""
    results: Sequence[tuple[int, bytes]] = ()


async def collect(
    scripts: Scripts, box: Box, *, me: str, owner_s: int, seen: int, given_back: Sequence[int] = ()
) -> Collected:
    """Take new results, and delete the acknowledged ones. `client_id` is empty if no other client shares the
    list."""
    args: list[Argument] = [me, owner_s, seen, COLLECTED_MOST, SCRIPT_BYTES, KEEP_S, *given_back]
    told = (await scripts.run("collect", [box.results, box.keep, box.owner], args)).value
    if len(told) == 1:
        return Collected(holder=told[0].decode(errors="replace"))
    _, other, last, *rest = told
    return Collected(
        other=bool(other),
        last=int(last),
        results=[(int(rest[at]), rest[at + 1]) for at in range(0, len(rest), 2)],
    )


async def arrival(scripts: Scripts, box: Box, within_s: float) -> bool:
    """Wait until there is a result in the list, at most `timeout_s`. The result is moved from the end of the
    list to its end, so it stays there."""

    async def wait() -> bool:
        found = await scripts.client.execute_command(
            "BLMOVE", box.results, box.results, "RIGHT", "RIGHT", within_s
        )
        return found is not None

    return await scripts.attempt(wait)


async def unserved_s(scripts: Scripts, names: Names) -> float | None:
    """Return the seconds since a dispatcher last swept the queue, in Redis time. `None` if none ever has."""
    line = f"tick:{names.queue}"

    async def read() -> float | None:
        client: Any = scripts.client
        if (tick := await client.hget(names.control, line)) is None:
            return None
        # Without a target, a Cluster would send TIME to all of its nodes.
        where = {"target_nodes": client.get_default_node()} if scripts.is_cluster else {}
        seconds, micros = await client.execute_command("TIME", **where)
        return max(0.0, int(seconds) + int(micros) / 1e6 - float(tick))

    return await scripts.attempt(read)


async def last_kept(scripts: Scripts, box: Box) -> int:
    """Return the highest number of the kept results. 0 if there are none. Raises WrongKeyError if the key is
    no hash."""
    kind = (await scripts.attempt(lambda: scripts.client.type(box.keep))).decode()
    if kind not in ("none", "hash"):
        raise WrongKeyError(f"{box.keep} holds a {kind}, not a hash")
    return int(await scripts.attempt(lambda: scripts.client.hget(box.keep, "last")) or 0)


async def kept(scripts: Scripts, box: Box) -> AsyncIterator[tuple[int, bytes]]:
    """Yield all kept results, some of them perhaps twice."""
    cursor, count = 0, 1
    while True:
        scan = partial(scripts.client.hscan, box.keep, cursor, count=count)
        cursor, found = await scripts.attempt(scan, size=SCRIPT_BYTES)
        # The sizes are not known in advance. Aim at about a megabyte per call.
        size = sum(map(len, found.values()))
        count = max(1, min(_SCANNED_MOST, 4 * count, SCRIPT_BYTES * max(1, len(found)) // (size + 1)))
        for name, result in found.items():
            if name.isdigit():  # the hash also has the fields `first` and `last`
                yield int(name), result
        if not cursor:
            return


async def kept_result(scripts: Scripts, box: Box, number: int) -> bytes | None:
    """Return one kept result. `None` if it is there no longer."""
    found: bytes | None = await scripts.attempt(lambda: scripts.client.hget(box.keep, str(number)))
    return found


async def hand_over(scripts: Scripts, box: Box, me: str) -> None:
    """Let another client of the name take the results from now on."""

    async def delete() -> None:
        # One byte more than the name is read, to recognise a longer one.
        if await scripts.client.getrange(box.owner, 0, len(me)) == me.encode():
            await scripts.client.delete(box.owner)

    await scripts.attempt(delete)


async def discard(scripts: Scripts, box: Box) -> None:
    """Delete the list and the kept results."""
    await scripts.attempt(lambda: scripts.client.delete(box.results, box.keep))
