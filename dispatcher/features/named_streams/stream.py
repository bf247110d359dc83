"""Named streams, which continue where they stopped when the program is restarted.

    not submitted --enlist--> pending --answered--> kept --consume--> consumed

One script submits an item and records its id (lua/submit_to_stream.lua). Another script deletes its result
and records the item as consumed (lua/consume_result.lua). So each item is in exactly one of these states if
the program crashes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from dispatcher.client.errors import NameInUseError, NoResultError
from dispatcher.client.item import Body, Handle, Item, encode_body, to_item
from dispatcher.client.mailbox import Mailbox, check_name, make_owner_id
from dispatcher.client.result import HookError, Result, result_from_error
from dispatcher.client.stream import Items, stream_results
from dispatcher.common.errors import BatchError
from dispatcher.features.named_streams import redis_streams as streams
from dispatcher.features.named_streams.state import StreamStatus
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import ResultBox
from dispatcher.queue.redis.scripts import split_batches
from dispatcher.requests.submission import Submission

MAX_ID_BYTES = 256
BuildRequest = Callable[[Item], Awaitable[tuple[Handle, Submission]]]
_log = logging.getLogger("batch_dispatcher.client")


class NamedStreams:
    """The named streams of one client.

    `make_mailbox` makes a mailbox for a box and an owner id, and raises QueueUnreachableError if the client
    was closed. `call` makes a call to Redis, which is retried while Redis is unreachable. `build_request`
    builds the request of an item.
    """

    def __init__(
        self,
        backend: Backend,
        make_mailbox: Callable[[ResultBox, str], Mailbox],
        call: Callable[..., Awaitable[Any]],
        build_request: BuildRequest,
    ) -> None:
        self._backend, self._make_mailbox = backend, make_mailbox
        self._call, self._build_request = call, build_request
        self._open_streams: set[NamedStream] = set()

    async def run_stream(
        self, name: str, items: Items, *, max_pending: int, ordered: bool
    ) -> AsyncGenerator[Result, None]:
        """Yield the results of a stream, continuing where its last run stopped."""
        async with self._open_stream(name) as stream:
            source = stream_results(
                items,
                stream.enqueue_new,
                stream.wait_for_result,
                stream.mark_consumed,
                max_pending=max_pending,
                ordered=ordered,
                earlier_handles=await stream.take_name(),
            )
            async with aclosing(source) as results:
                async for result in results:
                    yield result

    async def get_status(self, name: str, after: str, limit: int, *, consumed: bool) -> StreamStatus:
        """Return the status of a stream."""
        check_name(name)
        status: StreamStatus = await self._call(
            lambda: streams.read_stream_status(self._backend, name, after, limit, consumed=consumed)
        )
        return status

    async def forget_stream(self, name: str) -> None:
        """Cancel the pending requests of a stream, and delete its results and its records."""
        async with self._open_stream(name) as stream:
            await stream.forget_all()

    async def aclose(self) -> None:
        """Close the open streams."""
        for stream in list(self._open_streams):
            await stream.aclose()

    @asynccontextmanager
    async def _open_stream(self, name: str) -> AsyncIterator[NamedStream]:
        check_name(name)
        owner_id = make_owner_id()
        mailbox = self._make_mailbox(streams.get_stream_box(self._backend.names, name), owner_id)
        stream = NamedStream(name, self._backend, mailbox, owner_id, self._call, self._build_request)
        self._open_streams.add(stream)
        try:
            yield stream
        finally:
            self._open_streams.discard(stream)
            await stream.aclose()


class NamedStream:
    """One run of a named stream. Only one process at a time runs a stream with a given name.

    `mailbox` is the mailbox of the stream, and `owner_id` identifies this process in it.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        mailbox: Mailbox,
        owner_id: str,
        call: Callable[..., Awaitable[Any]],
        build_request: BuildRequest,
    ) -> None:
        self._name, self._backend, self._mailbox, self._owner_id = name, backend, mailbox, owner_id
        self._call, self._build_request = call, build_request
        self._is_closed = False

    async def take_name(self) -> list[Handle]:
        """Take the name, and return handles of the unconsumed requests of earlier runs, oldest first.

        A request that is neither in the queue nor answered was lost by Redis, or its result expired. It is
        forgotten, so that its item is submitted again. Raises NameInUseError.
        """
        self._mailbox.keeps_name = True  # also while the program works on a result, and no caller waits
        await self._mailbox.catch_up()
        noted = await self._load_unconsumed()
        results = self._mailbox.box.result_list
        handles = {each.id: Handle(each.id, each.token, each.deadline, results) for each in noted}
        # Register the handles first, so that loading the keep delivers the results to them.
        self._mailbox.expect_results(handles.values())
        await self._call(self._mailbox.load_kept_results)
        now = time.time()
        # A request past its deadline is never submitted again. Without a result it ends as NO_RESULT.
        gone = [handles[each.id] for each in noted if not each.is_queued and each.deadline > now]
        if any(handle.received_result is None for handle in gone):
            # A request may have left the queue after the list was read, so read the list once more.
            await self._mailbox.catch_up()
        lost = [handle for handle in gone if handle.received_result is None]
        if lost:
            self._mailbox.forget_expected(lost)
            await self._call(
                lambda: streams.forget_requests(self._backend, self._name, [each.id for each in lost])
            )
            _log.warning("stream %s: %d requests were lost and are submitted again", self._name, len(lost))
        lost_ids = {handle.id for handle in lost}
        remaining = [handle for handle in handles.values() if handle.id not in lost_ids]
        # A token begins with the time at which it was made.
        return sorted(remaining, key=lambda handle: handle.token)

    async def enqueue_new(self, items: Sequence[Item | Body]) -> Sequence[Handle]:
        """Submit the items whose ids the stream does not know, and return their handles.

        An item that cannot be submitted gets a handle with a result that holds the error.
        """
        new, handles = await self._select_unknown(items)
        made: list[tuple[Handle, Submission, str]] = []
        for item, digest in new:
            try:
                handle, submission = await self._build_request(item)
            except (HookError, ValueError, TypeError) as error:
                handles.append(_failed_handle(item, error))
                continue
            if handle.id != item.id:
                raise ValueError(
                    f"item {item.id}: `before` changed its id, and a named stream finds items by their ids"
                )
            handles.append(handle)
            made.append((handle, submission, digest))
        for step in split_batches(made, lambda each: len(each[1].member)):
            await self._enlist_requests(step)
        return handles

    async def wait_for_result(self, handle: Handle) -> Result:
        """Wait for a result. If none arrives in time, return a result with the code NO_RESULT."""
        try:
            return handle.received_result or await self._mailbox.wait_for_result(handle, None)
        except NoResultError as error:
            return result_from_error(handle.id, error)

    async def mark_consumed(self, result: Result) -> None:
        """Record a result as consumed, and delete it.

        Raises NameInUseError if another process has taken the name.
        """
        if not result.keep_number and result.code != "NO_RESULT":
            return  # the item was never submitted, so there is no record of it
        holder = await self._call(
            lambda: streams.consume_result(
                self._backend, self._name, self._owner_id, result.id, result.keep_number
            )
        )
        if holder:
            raise NameInUseError(f"stream {self._name} is read by {holder}")
        self._mailbox.give_back(result)

    async def forget_all(self) -> None:
        """Cancel the pending requests, and delete all results and records of the stream."""
        await self._mailbox.catch_up()  # takes the name, so that no other program runs the stream
        for each in await self._load_unconsumed():
            await self._call(
                lambda each=each: producer.cancel_request(self._backend, each.id, each.token, "")
            )
        await self._call(lambda: streams.delete_stream(self._backend, self._name))

    async def aclose(self) -> None:
        """Release the name. Pending requests stay in the queue."""
        if not self._is_closed:
            self._is_closed = True
            await self._mailbox.aclose()

    async def _load_unconsumed(self) -> list[streams.StreamRecord]:
        requests: dict[str, streams.StreamRecord] = {}
        after = ""
        while True:
            page: streams.StreamPage = await self._call(
                lambda after=after: streams.read_stream_page(self._backend, self._name, after)
            )
            requests |= {each.id: each for each in page.requests}
            if not (after := page.next_cursor):
                return list(requests.values())

    async def _select_unknown(
        self, items: Sequence[Item | Body]
    ) -> tuple[list[tuple[Item, str]], list[Handle]]:
        """Return unknown items with their digests, and handles of the items that are invalid."""
        candidates: dict[str, tuple[Item, str]] = {}
        handles: list[Handle] = []
        for item in map(to_item, items):
            _check_item(item)
            try:
                digest = _item_digest(item)
            except (ValueError, TypeError) as error:
                handles.append(_failed_handle(item, error))
                continue
            _, before = candidates.setdefault(item.id, (item, digest))
            self._check_unchanged(item.id, digest, before)
        if not candidates:
            return [], handles
        known = await self._call(lambda: streams.read_digests(self._backend, self._name, [*candidates]))
        for (item, digest), before in zip(candidates.values(), known, strict=True):
            if before is not None:
                self._check_unchanged(item.id, digest, before)
        results = self._mailbox.box.result_list
        new = [
            (replace(item, results=results), digest)
            for (item, digest), before in zip(candidates.values(), known, strict=True)
            if before is None
        ]
        return new, handles

    def _check_unchanged(self, request_id: str, digest: str, known_digest: str) -> None:
        if digest != known_digest:
            what = (
                f"item {request_id}: stream {self._name} has a request of this id with another path or body"
            )
            raise ValueError(f"{what}: give the item another id, or forget the stream (forget_stream)")

    async def _enlist_requests(self, step: Sequence[tuple[Handle, Submission, str]]) -> None:
        handles = [handle for handle, _, _ in step]
        requests = [(submission, digest) for _, submission, digest in step]
        # Deadlines are Unix times, and the limit of a call is a time on the monotonic clock.
        give_up_at = time.monotonic() + max(handle.deadline for handle in handles) - time.time()
        self._mailbox.expect_results(handles)  # before the call: a result may arrive before its reply
        try:
            await self._call(
                lambda: streams.submit_to_stream(self._backend, self._name, requests), give_up_at
            )
        except BatchError:
            self._mailbox.forget_expected(handles)
            raise


def _check_item(item: Item) -> None:
    """Raise ValueError for an item that a named stream could not recognise in a later run."""
    if not item.id:
        raise ValueError("an item without an id: a named stream knows its items again by their ids")
    if len(item.id.encode(errors="replace")) > MAX_ID_BYTES:
        raise ValueError(f"item {item.id[:40]}…: an id in a named stream has at most {MAX_ID_BYTES} bytes")
    if item.results is not None:
        raise ValueError(f"item {item.id}: results of a named stream go to its own list: leave out results=")


def _item_digest(item: Item) -> str:
    """Return a digest of path and body, which shows whether two items with the same id differ."""
    return hashlib.sha256(item.path.encode(errors="replace") + b"\0" + encode_body(item.body)).hexdigest()[
        :16
    ]


def _failed_handle(item: Item, error: Exception) -> Handle:
    """Return a handle for an item that was not submitted, with the error as its result."""
    handle = Handle(item.id, "", 0, "")
    handle.received_result = result_from_error(item.id, error)
    return handle
