"""The queue as producers and operators use it. It has no owner and holds no leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from redis import exceptions as errors

from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.redis import cancel_markers, producer, search
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Client, split_batches
from dispatcher.queue.redis.steps import dead_requests
from dispatcher.queue.redis.steps.common import split_rows
from dispatcher.queue.redis.steps.count_requests import count_requests
from dispatcher.queue.requeue import build_resubmission
from dispatcher.requests.found_request import FoundRequest, LookupPage, SearchTerms
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import Submission

T = TypeVar("T")

_BATCH_SIZE = 1000
_MAX_PAUSE_BYTES = 65_536
"""Largest record of who paused the queue and why."""


class RedisQueueAdmin:
    """Submits, cancels and inspects requests. Each method is one step that is safe to repeat. Implements
    `ports.QueueAdmin`.

    Raises QueueUnavailableError for every temporary failure.
    """

    def __init__(
        self,
        client: Client,
        names: QueueNames,
        *,
        attempt_timeout_s: float = 3.0,
        features: Sequence[str] = ALL_FEATURES,
    ) -> None:
        self.names = names
        self.backend = Backend(client, names, attempt_timeout_s=attempt_timeout_s, features=features)

    def __repr__(self) -> str:
        return f"<RedisQueueAdmin {self.names.queue}>"

    async def aclose(self) -> None:
        """Close the connections."""
        await self.backend.aclose()

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        """Return the calls that a feature adds to the queue."""
        return calls(self)

    async def submit(self, submissions: Sequence[Submission]) -> int:
        """Submit requests and wake the dispatchers. Return how many were not pending already."""
        added = 0
        for batch in split_batches(submissions, lambda each: len(each.member), _BATCH_SIZE):
            added += await producer.submit(self.backend, batch)
        return added

    async def cancel_request(
        self, request_id: str, request_token: str = "", *, is_token_known: bool = False
    ) -> bool:
        """Mark the requests that are active under the id as cancelled, or the one with the token. Return
        False if there is none. `is_token_known`: a request with that token was seen in the queue, and may
        come from any producer."""
        if is_token_known:
            return bool(await producer.cancel_request(self.backend, request_id, request_token, request_token))
        if request_token and await producer.cancel_request(self.backend, request_id, request_token, ""):
            return True
        # The queue's own markers do not know the request, so a producer of llm-d may have submitted it.
        foreign_token = await cancel_markers.read_foreign_active_token(self.backend.scripts, request_id)
        return bool(await producer.cancel_request(self.backend, request_id, request_token, foreign_token))

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """Return for each (request id, token) whether a marker says that it is to be cancelled.

        Only reads. A marker that this user may not read counts as none, and so do those of llm-d's producers
        on a Cluster, because they are on any of its nodes.
        """
        foreign: cancel_markers.ForeignMode = "" if self.backend.scripts.is_cluster else "may"
        return await cancel_markers.check_cancelled(self.backend, requests, foreign=foreign)

    async def pause(self, who: str, why: str) -> None:
        """Stop all claims until `resume`. Leased requests go on."""
        record = msgspec.json.encode({"by": who, "why": why, "at": int(time.time())})
        scripts = self.backend.scripts

        async def set_pause() -> None:
            await scripts.client.set(self.names.paused_key, record)
            await self.publish_wake_up("paused")

        await scripts.call_with_retries(set_pause)

    async def resume(self) -> None:
        scripts = self.backend.scripts

        async def delete_pause() -> None:
            await scripts.client.delete(self.names.paused_key)
            await self.publish_wake_up("resumed")

        await scripts.call_with_retries(delete_pause)

    async def publish_wake_up(self, message: str) -> None:
        """Publish a wake-up. If this user may not publish, the dispatchers notice the change when they next
        poll."""
        with suppress(errors.NoPermissionError):
            await self.backend.scripts.client.publish(self.names.wake_channel, message)

    async def read_pause(self) -> tuple[str, str] | None:
        """Return who paused the queue and why. `None` if it is not paused."""
        scripts = self.backend.scripts

        async def read_value() -> bytes | None:
            found: bytes = await scripts.client.getrange(self.names.paused_key, 0, _MAX_PAUSE_BYTES - 1)
            # GETRANGE returns an empty string both for a missing key and for an empty value, which pauses as
            # well.
            if not found and not await scripts.client.exists(self.names.paused_key):
                return None
            return found

        record = await scripts.call_with_retries(read_value)
        if record is None:
            return None
        try:
            fields = msgspec.json.decode(record, type=dict[str, Any])
        except msgspec.DecodeError:  # an operator has set the key by hand
            return "", record.decode(errors="replace")
        return str(fields.get("by", "")), str(fields.get("why", ""))

    async def peek_next(self, max_count: int) -> Sequence[tuple[float, bytes]]:
        """Return score and member of the next requests in the order of a claim, including those of all lanes.

        At most 1 MB of members, but at least one.
        """
        reply = await self.backend.run_script(
            "peek_next", {"max_count": max_count, "max_bytes": MAX_SCRIPT_BYTES}
        )
        return [(float(score), member) for score, member in split_rows(reply.value, 2)]

    async def list_requests(
        self, state: str, max_count: int, after: str = "", *, full_members: bool = False
    ) -> LookupPage:
        """Return a page of the requests at a location, in their order."""
        return await search.list_requests(self.backend, state, max_count, after, full_members=full_members)

    async def find_by_id(self, request_id: str, after: str = "") -> LookupPage:
        """Return a page of the requests that may have this id, as far as they are found at little cost."""
        return await search.find_by_id(self.backend, request_id, after)

    async def search_requests(
        self, terms: SearchTerms, after: str = "", *, entries_only: bool = False, full_members: bool = False
    ) -> LookupPage:
        """Return a page of a scan over all requests, or over those that were claimed at least once."""
        return await search.search_requests(
            self.backend, terms, after, entries_only=entries_only, full_members=full_members
        )

    async def count_ahead(self, request: FoundRequest) -> int | None:
        """Return the number of requests ahead of a request. `None` if it does not wait (any more)."""
        return await search.count_ahead(self.backend, request)

    async def restore_requests(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        """Copy requests from another queue. Return how many are new."""
        batches = split_batches(requests, lambda each: len(each.member))
        return sum([await search.restore_requests(self.backend, queue, batch) for batch in batches])

    async def is_on_same_server(self, other: RedisQueueAdmin) -> bool:
        """Return whether both queues are on one server, whatever their URLs are. A key written here must be
        found there."""
        key, here, there = self.backend.create_reply_key(), self.backend.scripts, other.backend.scripts
        await here.call_with_retries(lambda: here.client.set(key, "here", ex=60))
        found = await there.call_with_retries(lambda: there.client.get(key))
        await here.call_with_retries(lambda: here.client.delete(key))
        return found is not None

    async def copy_texts(self, source: RedisQueueAdmin) -> None:
        """Copy the texts of features from another queue, except for those that this queue has."""
        here, there = self.backend.scripts, source.backend.scripts
        for key, source_key in zip(self.names.text_keys, source.names.text_keys, strict=True):
            text = await there.call_with_retries(partial(there.client.get, source_key))
            if text:
                await here.call_with_retries(partial(here.client.set, key, text, nx=True))

    async def read_results(self, name: str, max_count: int, after: int = 0) -> Sequence[bytes]:
        """Return results of a list, the oldest first, after the first `after`. None is removed."""
        return await search.read_results(self.backend, name, max_count, after)

    async def is_list(self, name: str) -> bool:
        """Return whether the name can be a result list. False if the key has another type."""
        return await search.is_list(self.backend, name)

    async def take_result(self, name: str, result: bytes) -> bool:
        """Remove the oldest result that equals this one. Return False if there is none."""
        return await search.take_result(self.backend, name, result)

    async def get_sweep_age_s(self) -> float | None:
        """Return the seconds since a dispatcher last swept the queue, in Redis time. `None` if none
        ever has."""
        return await producer.get_sweep_age_s(self.backend.scripts, self.names)

    async def count_requests(self) -> QueueCounts:
        return await count_requests(self.backend)

    async def list_dead(self, max_count: int, after: int = 0) -> Sequence[DeadRequest]:
        """Return the dead requests with an entry above `after`, by entry: at most 1 MB of members, but at
        least one."""
        return await dead_requests.list_dead_after(self.backend, after, max_count)

    async def list_newest_dead(self, max_count: int) -> Sequence[DeadRequest]:
        """Return the dead requests with the highest entries, highest first: at most 1 MB of members, but at
        least one."""
        return await dead_requests.list_newest_dead(self.backend, max_count)

    async def requeue_dead(self, entry_ids: Sequence[int], deadline: int) -> int:
        """Submit dead requests again with this deadline (in the member and in the score). Their priority
        stays.

        Each is a new submission, so there may be a second result for its id. Requests whose member cannot be
        read stay dead.
        """
        done = 0
        for entry in entry_ids:
            dead = next((one for one in await self.list_dead(1, entry - 1) if one.entry_id == entry), None)
            resubmission = (
                None if dead is None else build_resubmission(self.names, dead.member, dead.score, deadline)
            )
            if resubmission is not None:
                done += await dead_requests.requeue_dead(self.backend, entry, resubmission)
        return done

    async def purge_dead(self, entry_ids: Sequence[int] | None = None) -> int:
        """Delete dead requests. `None` for all."""
        purged_count = 0
        if entry_ids is None:
            while found := await self.list_dead(_BATCH_SIZE):
                purged_count += await dead_requests.purge_dead(
                    self.backend, [dead.entry_id for dead in found]
                )
            return purged_count
        for at in range(0, len(entry_ids), _BATCH_SIZE):
            purged_count += await dead_requests.purge_dead(self.backend, entry_ids[at : at + _BATCH_SIZE])
        return purged_count
