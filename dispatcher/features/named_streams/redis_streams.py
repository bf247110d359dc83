"""Calls of named streams: submit_to_stream.lua, consume_result.lua and read_stream.lua.

A stream records each request in the step that submits it, and each result in the step that removes it. So a
program that starts again knows which of its items were submitted, and which of them it has consumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dispatcher.features.named_streams.state import StreamRequest, StreamState, StreamStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import KEPT_TTL_S, ResultBox
from dispatcher.requests.result_lists import CLIENT_LISTS
from dispatcher.requests.submission import Submission

MAX_STREAM_IDS = 1_000_000
"""Largest number of ids of one stream."""
PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """Unconsumed request in the record of a stream."""

    id: str
    token: str
    deadline: int
    digest: str
    is_queued: bool
    """True if the request waits in the queue or is in flight."""


@dataclass(frozen=True, slots=True)
class StreamPage:
    """Page of the record of a stream, and the counts of all its requests."""

    unconsumed_count: int
    consumed_count: int
    kept_count: int
    next_cursor: str
    requests: Sequence[StreamRecord]


def get_stream_keys(names: QueueNames, name: str) -> tuple[str, str]:
    """Return the keys with the requests of a stream: those that are pending, and the consumed ones
    (lua/named_streams.lua)."""
    return f"{names.queue_prefix}:streams:{name}:pending", f"{names.queue_prefix}:streams:{name}:consumed"


def get_stream_box(names: QueueNames, name: str) -> ResultBox:
    """Return the result box of a stream.

    It is in the slot of the queue's keys, so that one script can note a result as consumed and remove it.
    """
    return ResultBox(f"{CLIENT_LISTS.removesuffix('*')}{names.queue_prefix}:stream-{name}")


async def submit_to_stream(
    backend: Backend, name: str, requests: Sequence[tuple[Submission, str]], max_ids: int = MAX_STREAM_IDS
) -> int:
    """Submit requests, each with its digest, whose ids the stream does not know. Return how many."""
    rows = [
        {
            "score": repr(float(each.score)),
            "member": each.member,
            "id": each.request_id,
            "token": each.request_token,
            "deadline": each.deadline,
            "digest": digest,
        }
        for each, digest in requests
    ]
    reply = await backend.run_script(
        "submit_to_stream",
        {
            "channel": backend.names.wake_channel,
            "record_ttl_s": KEPT_TTL_S,
            "max_ids": max_ids,
            "requests": rows,
        },
        keys=_record_keys(backend, name),
        size_bytes=sum(len(each.member) for each, _ in requests),
    )
    added: int = reply.value
    return added


def _record_keys(backend: Backend, name: str) -> dict[str, str]:
    pending, consumed = get_stream_keys(backend.names, name)
    return {"PENDING_IDS": pending, "CONSUMED_IDS": consumed}


async def read_digests(backend: Backend, name: str, ids: Sequence[str]) -> Sequence[str | None]:
    """Return the digest of each request that the stream knows. `None` for an id that it does not know."""
    found: list[str | None] = [None] * len(ids)
    client = backend.scripts.client
    for key in get_stream_keys(backend.names, name):
        values = await backend.scripts.call_with_retries(partial(client.hmget, key, ids))
        for at, value in enumerate(values):
            if value is not None:
                found[at] = value.decode(errors="replace").rpartition(" ")[2]
    return found


async def consume_result(backend: Backend, name: str, client_id: str, request_id: str, number: int) -> str:
    """Record a result as consumed, and remove it. Return the other client that owns the stream, or an empty
    string."""
    box = get_stream_box(backend.names, name)
    reply = await backend.run_script(
        "consume_result",
        {"client_id": client_id, "record_ttl_s": KEPT_TTL_S, "request_id": request_id, "kept_number": number},
        keys={**_record_keys(backend, name), "KEPT": box.kept_key, "OWNER": box.owner_key},
    )
    holder: bytes = reply.value
    return holder.decode(errors="replace")


async def forget_requests(backend: Backend, name: str, ids: Sequence[str]) -> None:
    """Forget unconsumed requests, so that the stream submits them again."""
    pending, _ = get_stream_keys(backend.names, name)
    await backend.scripts.call_with_retries(lambda: backend.scripts.client.hdel(pending, *ids))


async def delete_stream(backend: Backend, name: str) -> None:
    """Delete the record of a stream, and its results."""
    box = get_stream_box(backend.names, name)
    keys = (*get_stream_keys(backend.names, name), box.result_list, box.kept_key)
    await backend.scripts.call_with_retries(lambda: backend.scripts.client.delete(*keys))


async def read_stream_page(
    backend: Backend, name: str, after: str = "", max_count: int = PAGE_SIZE, *, consumed: bool = False
) -> StreamPage:
    """Return a page of the unconsumed requests, or of the consumed ones, which have only their ids."""
    box = get_stream_box(backend.names, name)
    reply = await backend.run_script(
        "read_stream",
        {"kind": "consumed" if consumed else "pending", "cursor": after or "0", "max_count": max_count},
        keys={**_record_keys(backend, name), "RESULT_LIST": box.result_list, "KEPT": box.kept_key},
    )
    return _decode_page(reply.value)


def _decode_page(reply: Sequence[Any]) -> StreamPage:
    unconsumed, done, kept, cursor, *found = reply
    requests = []
    for at in range(0, len(found), 3):
        request_id, value, queued = found[at : at + 3]
        token, _, rest = value.decode(errors="replace").partition(" ")
        deadline, _, digest = rest.partition(" ")
        number = int(deadline) if deadline.isdecimal() else 0
        requests.append(
            StreamRecord(request_id.decode(errors="replace"), token, number, digest, bool(queued))
        )
    return StreamPage(unconsumed, done, kept, "" if cursor == b"0" else cursor.decode(), requests)


async def read_stream_status(
    backend: Backend, name: str, after: str = "", max_count: int = PAGE_SIZE, *, consumed: bool = False
) -> StreamStatus:
    """Return the counts of a stream, and a page of its requests."""
    page = await read_stream_page(backend, name, after, max_count, consumed=consumed)

    def to_stream_request(each: StreamRecord) -> StreamRequest:
        if consumed:
            return StreamRequest(each.id, StreamState.CONSUMED, None)
        state = StreamState.PENDING if each.is_queued else StreamState.ANSWERED
        return StreamRequest(each.id, state, each.deadline)

    return StreamStatus(
        page.unconsumed_count,
        page.consumed_count,
        page.kept_count,
        [*map(to_stream_request, page.requests)],
        page.next_cursor,
    )
