"""Named streams, which continue where they stopped when the program is restarted.

    not submitted --enlist--> pending --answered--> kept --consume--> consumed

One script submits an item and records its id (lua/enlist.lua). Another script deletes its result and records
the item as consumed (lua/consume.lua). So each item is in exactly one of these states if the program crashes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from dispatcher.batched.errors import BatchError
from dispatcher.client.errors import NameInUseError, NoResultError, QueueAwayError
from dispatcher.client.item import Body, Handle, Item, body_of, item_of
from dispatcher.client.mailbox import Mailbox, check_name, whoami
from dispatcher.client.result import HookError, Result, of_error
from dispatcher.client.stream import Items, streamed
from dispatcher.core.requests.named_stream import StreamStatus
from dispatcher.core.requests.submission import Submission
from dispatcher.queue.redis import producer, streams
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import Box
from dispatcher.queue.redis.scripts import in_steps

ID_BYTES = 256
Make = Callable[[Item], Awaitable[tuple[Handle, Submission]]]
_log = logging.getLogger("batch_dispatcher.client")


class NamedStreams:
    """The named streams of one client.

    `make_mailbox` makes a mailbox for a box and an owner id. `call` makes a call to Redis, which is retried
    while Redis is unreachable. `build_request` builds the request of an item.
    """

    def __init__(
        self,
        backend: Backend,
        mailbox_at: Callable[[Box, str], Mailbox],
        call: Callable[..., Awaitable[Any]],
        make: Make,
    ) -> None:
        self._backend, self._mailbox_at = backend, mailbox_at
        self._call, self._make = call, make
        self._open: set[NamedStream] = set()
        self._closed = False

    async def run(self, name: str, items: Items, *, most: int, ordered: bool) -> AsyncGenerator[Result, None]:
        """Yield the results of a stream, continuing where its last run stopped."""
        async with self._opened(name) as stream:
            source = streamed(
                items,
                stream.enqueue,
                stream.take,
                stream.consumed,
                most=most,
                ordered=ordered,
                earlier=await stream.open(),
            )
            async with aclosing(source) as results:
                async for result in results:
                    yield result

    async def status(self, name: str, after: str, most: int, *, consumed: bool) -> StreamStatus:
        """Return the status of a stream."""
        check_name(name)
        status: StreamStatus = await self._call(
            lambda: streams.status(self._backend, name, after, most, consumed=consumed)
        )
        return status

    async def forget(self, name: str) -> None:
        """Cancel the pending requests of a stream, and delete its results and its records."""
        async with self._opened(name) as stream:
            await stream.forget()

    async def aclose(self) -> None:
        """Close the open streams. No further stream can be opened."""
        self._closed = True
        for stream in list(self._open):
            await stream.aclose()

    @asynccontextmanager
    async def _opened(self, name: str) -> AsyncIterator[NamedStream]:
        check_name(name)
        if self._closed:
            raise QueueAwayError("the client was closed")
        me = whoami()
        mailbox = self._mailbox_at(streams.box_of(self._backend, name), me)
        stream = NamedStream(name, self._backend, mailbox, me, self._call, self._make)
        self._open.add(stream)
        try:
            yield stream
        finally:
            self._open.discard(stream)
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
        me: str,
        call: Callable[..., Awaitable[Any]],
        make: Make,
    ) -> None:
        self._name, self._backend, self._mailbox, self._me = name, backend, mailbox, me
        self._call, self._make = call, make
        self._closed = False

    async def open(self) -> list[Handle]:
        """Take the name, and return handles of the unconsumed requests of earlier runs, oldest first.

        A request that is neither in the queue nor answered was lost by Redis, or its result expired. It is
        forgotten, so that its item is submitted again. Raises NameInUseError.
        """
        self._mailbox.keeps_name = True  # also while the program works on a result, and no caller waits
        await self._mailbox.settle()
        noted = await self._unconsumed()
        results = self._mailbox.box.results
        handles = {each.id: Handle(each.id, each.token, each.deadline, results) for each in noted}
        # Register the handles first, so that loading the keep delivers the results to them.
        self._mailbox.expect(handles.values())
        await self._call(self._mailbox.scan)
        now = time.time()
        # A request past its deadline is never submitted again. Without a result it ends as NO_RESULT.
        gone = [handles[each.id] for each in noted if not each.queued and each.deadline > now]
        if any(handle.arrived is None for handle in gone):
            # A request may have left the queue after the list was read, so read the list once more.
            await self._mailbox.settle()
        lost = [handle for handle in gone if handle.arrived is None]
        if lost:
            self._mailbox.unexpect(lost)
            await self._call(lambda: streams.forget(self._backend, self._name, [each.id for each in lost]))
            _log.warning("stream %s: %d requests were lost and are submitted again", self._name, len(lost))
        lost_ids = {handle.id for handle in lost}
        left = [handle for handle in handles.values() if handle.id not in lost_ids]
        # A token begins with the time at which it was made.
        return sorted(left, key=lambda handle: handle.token)

    async def enqueue(self, items: Sequence[Item | Body]) -> Sequence[Handle]:
        """Submit the items whose ids the stream does not know, and return their handles.

        An item that cannot be submitted gets a handle with a result that holds the error.
        """
        new, handles = await self._unknown(items)
        made: list[tuple[Handle, Submission, str]] = []
        for item, digest in new:
            try:
                handle, submission = await self._make(item)
            except (HookError, ValueError, TypeError) as error:
                handles.append(_failed(item, error))
                continue
            if handle.id != item.id:
                raise ValueError(f"item {item.id}: before changed its id, by which a named stream knows it")
            handles.append(handle)
            made.append((handle, submission, digest))
        for step in in_steps(made, lambda each: len(each[1].member)):
            await self._enlist(step)
        return handles

    async def take(self, handle: Handle) -> Result:
        """Wait for a result. If none arrives in time, return a result with the code NO_RESULT."""
        try:
            return handle.arrived or await self._mailbox.take(handle, None)
        except NoResultError as error:
            return of_error(handle.id, error)

    async def consumed(self, result: Result) -> None:
        """Record a result as consumed, and delete it.

        Raises NameInUseError if another process has taken the name.
        """
        if not result.number and result.code != "NO_RESULT":
            return  # the item was never submitted, so there is no record of it
        holder = await self._call(
            lambda: streams.consume(self._backend, self._name, self._me, result.id, result.number)
        )
        if holder:
            raise NameInUseError(f"stream {self._name} is read by {holder}")
        self._mailbox.give_back(result)

    async def forget(self) -> None:
        """Cancel the pending requests, and delete all results and records of the stream."""
        await self._mailbox.settle()  # takes the name, so that no other program runs the stream
        for each in await self._unconsumed():
            await self._call(lambda each=each: producer.cancel(self._backend, each.id, each.token, ""))
        await self._call(lambda: streams.forget_all(self._backend, self._name))

    async def aclose(self) -> None:
        """Release the name. Pending requests stay in the queue."""
        if not self._closed:
            self._closed = True
            await self._mailbox.aclose()

    async def _unconsumed(self) -> list[streams.NotedRequest]:
        found: dict[str, streams.NotedRequest] = {}
        after = ""
        while True:
            page = await self._call(lambda after=after: streams.noted(self._backend, self._name, after))
            found |= {each.id: each for each in page.requests}
            if not (after := page.after):
                return list(found.values())

    async def _unknown(self, items: Sequence[Item | Body]) -> tuple[list[tuple[Item, str]], list[Handle]]:
        """Return unknown items with their digests, and handles of the items that are invalid."""
        asked: dict[str, tuple[Item, str]] = {}
        handles: list[Handle] = []
        for item in map(item_of, items):
            _check(item)
            try:
                digest = _digest(item)
            except (ValueError, TypeError) as error:
                handles.append(_failed(item, error))
                continue
            _, before = asked.setdefault(item.id, (item, digest))
            self._check_same(item.id, digest, before)
        if not asked:
            return [], handles
        known = await self._call(lambda: streams.known_digests(self._backend, self._name, [*asked]))
        for (item, digest), before in zip(asked.values(), known, strict=True):
            if before is not None:
                self._check_same(item.id, digest, before)
        results = self._mailbox.box.results
        new = [
            (replace(item, results=results), digest)
            for (item, digest), before in zip(asked.values(), known, strict=True)
            if before is None
        ]
        return new, handles

    def _check_same(self, request_id: str, digest: str, before: str) -> None:
        if digest != before:
            what = (
                f"item {request_id}: stream {self._name} has a request of this id with another path or body"
            )
            raise ValueError(f"{what}: give the item another id, or forget the stream (forget_stream)")

    async def _enlist(self, step: Sequence[tuple[Handle, Submission, str]]) -> None:
        handles = [handle for handle, _, _ in step]
        requests = [(submission, digest) for _, submission, digest in step]
        # Deadlines are Unix times, and the limit of a call is a time on the monotonic clock.
        until = time.monotonic() + max(handle.deadline for handle in handles) - time.time()
        self._mailbox.expect(handles)  # before the call: a result may arrive before its reply
        try:
            await self._call(lambda: streams.enlist(self._backend, self._name, requests), until)
        except BatchError:
            self._mailbox.unexpect(handles)
            raise


def _check(item: Item) -> None:
    """Raise ValueError for an item that a named stream could not recognise in a later run."""
    if not item.id:
        raise ValueError("an item without an id: a named stream knows its items again by their ids")
    if len(item.id.encode(errors="replace")) > ID_BYTES:
        raise ValueError(f"item {item.id[:40]}…: an id in a named stream has at most {ID_BYTES} bytes")
    if item.results is not None:
        raise ValueError(f"item {item.id}: results of a named stream go to its own list: leave out results=")


def _digest(item: Item) -> str:
    """Return a digest of path and body, which shows whether two items with the same id differ."""
    return hashlib.sha256(item.path.encode(errors="replace") + b"\0" + body_of(item.body)).hexdigest()[:16]


def _failed(item: Item, error: Exception) -> Handle:
    """Return a handle for an item that was not submitted, with the error as its result."""
    handle = Handle(item.id, "", 0, "")
    handle.arrived = of_error(item.id, error)
    return handle
