"""A stream with a name, which goes on where it was when the program that consumes it begins anew.

    never submitted --enlist--> pending --answered--> kept --consume--> consumed

An item is noted under its id in the step that submits it (lua/enlist.lua), and as consumed in the step that
removes its result (lua/consume.lua). So each item is in one of these states, whenever the program ends.
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

    `mailbox_at` makes a mailbox for a place and a process; `call` makes a call to Redis, again while Redis is
    away; `make` makes the request of an item.
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
        """Yield the results of a stream, from where it was."""
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
        """Return what is noted of a stream."""
        check_name(name)
        status: StreamStatus = await self._call(
            lambda: streams.status(self._backend, name, after, most, consumed=consumed)
        )
        return status

    async def forget(self, name: str) -> None:
        """Cancel what is pending of a stream, and remove all that is noted of it."""
        async with self._opened(name) as stream:
            await stream.forget()

    async def aclose(self) -> None:
        """End the streams that are open; no other one is opened."""
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
    """One run of a stream. One process at a time runs a stream of a name.

    `mailbox` is that of the stream, which this process reads as `me`.
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
        """Take the name, and return what earlier runs submitted and nobody consumed, in that order.

        A request that is neither in the queue nor answered was lost, by Redis or because its result expired.
        It is forgotten, so that its item is submitted again. Raises NameInUseError.
        """
        self._mailbox.keeps_name = True
        await self._mailbox.settle()
        noted = await self._unconsumed()
        results = self._mailbox.box.results
        handles = {each.id: Handle(each.id, each.token, each.deadline, results) for each in noted}
        self._mailbox.expect(handles.values())
        await self._call(self._mailbox.scan)
        now = time.time()
        gone = [handles[each.id] for each in noted if not each.queued and each.deadline > now]
        if any(handle.arrived is None for handle in gone):
            # Results may have come to the list between the look into it and the end of their requests.
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
        """Submit those of the items whose ids the stream does not know, and return their handles."""
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
        """Await a result; one that does not come in time is a result, too."""
        try:
            return handle.arrived or await self._mailbox.take(handle, None)
        except NoResultError as error:
            return of_error(handle.id, error)

    async def consumed(self, result: Result) -> None:
        """Note a result as consumed, and remove it. Raises NameInUseError if the name was lost meanwhile."""
        if not result.number and result.code != "NO_RESULT":
            return  # it was never submitted
        holder = await self._call(
            lambda: streams.consume(self._backend, self._name, self._me, result.id, result.number)
        )
        if holder:
            raise NameInUseError(f"stream {self._name} is read by {holder}")
        self._mailbox.give_back(result)

    async def forget(self) -> None:
        """Cancel what is pending, and remove all results and all that is noted."""
        await self._mailbox.settle()
        for each in await self._unconsumed():
            await self._call(lambda each=each: producer.cancel(self._backend, each.id, each.token, ""))
        await self._call(lambda: streams.forget_all(self._backend, self._name))

    async def aclose(self) -> None:
        """Give the name back. What is pending goes on."""
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
        """Return the items that the stream does not know, with their digests, and handles of those that are
        no requests."""
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
        until = time.monotonic() + max(handle.deadline for handle in handles) - time.time()
        self._mailbox.expect(handles)
        try:
            await self._call(lambda: streams.enlist(self._backend, self._name, requests), until)
        except BatchError:
            self._mailbox.unexpect(handles)
            raise


def _check(item: Item) -> None:
    """Raise ValueError for an item that a named stream could not know again."""
    if not item.id:
        raise ValueError("an item without an id: a named stream knows its items again by their ids")
    if len(item.id.encode(errors="replace")) > ID_BYTES:
        raise ValueError(f"item {item.id[:40]}…: an id in a named stream has at most {ID_BYTES} bytes")
    if item.results is not None:
        raise ValueError(f"item {item.id}: results of a named stream go to its own list: leave out results=")


def _digest(item: Item) -> str:
    """Return what tells two items of one id apart."""
    return hashlib.sha256(item.path.encode(errors="replace") + b"\0" + body_of(item.body)).hexdigest()[:16]


def _failed(item: Item, error: Exception) -> Handle:
    """Return the handle of an item that was not submitted."""
    handle = Handle(item.id, "", 0, "")
    handle.arrived = of_error(item.id, error)
    return handle
