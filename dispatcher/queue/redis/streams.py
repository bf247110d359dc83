"""Calls of named streams: arguments and replies of submit_to_stream.lua, consume_result.lua and
read_stream.lua.

A stream records each request in the step that submits it, and each result in the step that removes it. So a
program that starts again knows which of its items were submitted, and which of them it has consumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dispatcher.core.requests.named_stream import StreamRequest, StreamState, StreamStatus
from dispatcher.core.requests.submission import Submission
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import KEEP_S, Box
from dispatcher.queue.redis.scripts import Argument

STREAM_MOST = 1_000_000
"""Largest number of ids of one stream."""
PAGE = 1000


@dataclass(frozen=True, slots=True)
class NotedRequest:
    """Unconsumed request in the record of a stream."""

    id: str
    token: str
    deadline: int
    digest: str
    queued: bool
    """True if the request waits in the queue or is in flight."""


@dataclass(frozen=True, slots=True)
class NotedPage:
    """Page of the record of a stream, and the counts of all its requests."""

    unconsumed: int
    consumed: int
    kept: int
    after: str
    requests: Sequence[NotedRequest]


def box_of(backend: Backend, name: str) -> Box:
    """Return the result box of a stream."""
    return Box(backend.names.stream_results(name))


async def enlist(
    backend: Backend, name: str, requests: Sequence[tuple[Submission, str]], most: int = STREAM_MOST
) -> int:
    """Submit requests, each with its digest, whose ids the stream does not know. Return how many."""
    args: list[Argument] = [backend.names.wake, KEEP_S, most]
    for each, digest in requests:
        args += (repr(float(each.score)), each.member, each.request_id, each.request_token)
        args += (each.deadline, digest)
    size = sum(len(each.member) for each, _ in requests)
    added: int = (await backend.run("enlist", args, backend.names.stream(name), size=size)).value
    return added


async def known_digests(backend: Backend, name: str, ids: Sequence[str]) -> Sequence[str | None]:
    """Return the digest of each request that the stream knows. `None` for an id that it does not know."""
    found: list[str | None] = [None] * len(ids)
    client = backend.scripts.client
    for key in backend.names.stream(name):
        values = await backend.scripts.attempt(partial(client.hmget, key, ids))
        for at, value in enumerate(values):
            if value is not None:
                found[at] = value.decode(errors="replace").rpartition(" ")[2]
    return found


async def consume(backend: Backend, name: str, me: str, request_id: str, number: int) -> str:
    """Record a result as consumed, and remove it. Return the other client that owns the stream, or an empty
    string."""
    box = box_of(backend, name)
    keys = [*backend.names.stream(name), box.keep, box.owner]
    told: bytes = (await backend.scripts.run("consume", keys, [me, KEEP_S, request_id, number])).value
    return told.decode(errors="replace")


async def forget(backend: Backend, name: str, ids: Sequence[str]) -> None:
    """Forget unconsumed requests, so that the stream submits them again."""
    pending, _ = backend.names.stream(name)
    await backend.scripts.attempt(lambda: backend.scripts.client.hdel(pending, *ids))


async def forget_all(backend: Backend, name: str) -> None:
    """Delete the record of a stream, and its results."""
    box = box_of(backend, name)
    keys = (*backend.names.stream(name), box.results, box.keep)
    await backend.scripts.attempt(lambda: backend.scripts.client.delete(*keys))


async def noted(
    backend: Backend, name: str, after: str = "", most: int = PAGE, *, consumed: bool = False
) -> NotedPage:
    """Return a page of the unconsumed requests, or of the consumed ones, of which only the ids are known."""
    box = box_of(backend, name)
    keys = [*backend.names.stream(name), box.results, box.keep]
    args: list[Argument] = ["consumed" if consumed else "pending", after or "0", most]
    reply = (await backend.run("stream", args, keys)).value
    unconsumed, done, kept, cursor, *found = reply
    requests = []
    for at in range(0, len(found), 3):
        request_id, value, queued = found[at : at + 3]
        token, _, rest = value.decode(errors="replace").partition(" ")
        deadline, _, digest = rest.partition(" ")
        number = int(deadline) if deadline.isdecimal() else 0
        requests.append(
            NotedRequest(request_id.decode(errors="replace"), token, number, digest, bool(queued))
        )
    return NotedPage(unconsumed, done, kept, "" if cursor == b"0" else cursor.decode(), requests)


async def status(
    backend: Backend, name: str, after: str = "", most: int = PAGE, *, consumed: bool = False
) -> StreamStatus:
    """Return the counts of a stream, and a page of its requests."""
    page = await noted(backend, name, after, most, consumed=consumed)

    def shown(each: NotedRequest) -> StreamRequest:
        if consumed:
            return StreamRequest(each.id, StreamState.CONSUMED, None)
        state = StreamState.PENDING if each.queued else StreamState.ANSWERED
        return StreamRequest(each.id, state, each.deadline)

    return StreamStatus(page.unconsumed, page.consumed, page.kept, [*map(shown, page.requests)], page.after)
