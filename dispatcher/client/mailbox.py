"""Where the results of a client arrive: one task reads its list, however many await.

    list --collect--> keep --given back--> gone

A result is taken from the list into the keep in one step (lua/collect.lua), and given back when whoever
awaited it has it. So it is in Redis until then, whatever dies. The list of a client with a name is there for
the next one of that name, too; one at a time takes from it, and shows in `<list>:owner` that it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from dispatcher.batched.errors import BatchError
from dispatcher.client.errors import NameInUseError, NoResultError, QueueAwayError
from dispatcher.client.item import Handle
from dispatcher.client.outage import Outage, away
from dispatcher.client.result import Result, of_popped
from dispatcher.core.requests.result import PoppedResult, decode_result
from dispatcher.core.requests.submission import QueueUnavailableError
from dispatcher.queue.keys import Names
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.producer import Box
from dispatcher.queue.redis.scripts import Scripts

_log = logging.getLogger("batch_dispatcher.client")
WAIT_S = 5.0
"""One blocking wait takes at most this long; then another one follows."""
OWNER_S = 15
"""A client that did not collect for so long has lost its name to the next one."""
_LONG_S = 86_400.0
"""The wait for a look into the list ends by that look, or by what it raises, and not by its time."""
GRACE_S = 10.0
"""Past its deadline the dispatcher has answered a request by then, if there is one."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(name: str) -> None:
    """Raise ValueError for what cannot be the name of a client or of a stream."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: 1 to 64 letters, digits, dots, dashes and underscores")


def whoami() -> str:
    """Return who takes results that others of the same name may take, too."""
    return f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"


class Mailbox:
    """Results of one client. `me`: who collects, where the box is shared with clients of the same name; else
    empty."""

    def __init__(
        self, scripts: Scripts, long: Scripts, box: Box, outage: Outage, names: Names, *, me: str = ""
    ) -> None:
        self.box = box
        self._names = names
        self._unserved = False
        """It was told that no dispatcher works on the queue."""
        self.owner_s = OWNER_S
        self.in_use_after_s = OWNER_S + 5.0
        """Of waiting for the name: a client that died has lost it by then."""
        self.passed_over = 0
        """Elements of its list that were no result of a request that somebody holds."""
        self.reading = False
        """It takes what comes: no other client of its name does."""
        self._scripts = scripts
        self._long = long
        """For calls that may take WAIT_S."""
        self._outage = outage
        self._me = me
        self.keeps_name = False
        """The name is kept also while nobody awaits anything."""
        self._handles: WeakValueDictionary[str, Handle] = WeakValueDictionary()
        """By token."""
        self._pending: dict[str, tuple[str, int]] = {}
        """Id and deadline by token: what was submitted and is not answered."""
        self._kept: dict[str, list[int]] = {}
        """By id: what lies in the keep and nobody of this process awaited by its handle."""
        self._given_back: list[int] = []
        self._swept_at = 0.0
        self._seen = 0
        self._settled = False
        self._looks = self._settled_look = 0
        """Looks into the list that have begun, and the last one that found it empty."""
        self._waiters: set[asyncio.Future[None]] = set()
        self._wake = asyncio.Event()
        self._changing: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Mailbox {self.box.results} {len(self._pending)} pending, {len(self._waiters)} awaited>"

    @property
    def pending(self) -> Sequence[tuple[str, str]]:
        """Id and token of what was submitted and is not answered."""
        return [(request_id, token) for token, (request_id, _) in self._pending.items()]

    @property
    def settled(self) -> bool:
        """All that lay in the list a moment ago is known."""
        return self._settled

    def expect(self, handles: Iterable[Handle]) -> None:
        """They are about to be submitted."""
        for handle in handles:
            self._handles[handle.token] = handle
            self._pending[handle.token] = (handle.id, handle.deadline)

    def unexpect(self, handles: Iterable[Handle]) -> None:
        """They were not submitted."""
        for handle in handles:
            self._pending.pop(handle.token, None)
        self._changed()

    def full(self, more: int, most: int) -> bool:
        """So many more would be more than may be pending. Those whose deadline has long passed are none any
        more."""
        if len(self._pending) + more <= most:
            return False
        now = time.time()
        if not self._swept_at <= now < self._swept_at + 1.0:
            self._swept_at = now
            for token in [token for token, (_, at) in self._pending.items() if at < now - GRACE_S]:
                del self._pending[token]
        return len(self._pending) + more > most

    async def take(self, handle: Handle, within_s: float | None) -> Result:
        """Await its result. Raises NoResultError after so long; None: GRACE_S past its deadline."""
        self._handles[handle.token] = handle
        if within_s is None:
            within_s = max(0.0, handle.deadline - time.time()) + GRACE_S
        until = time.monotonic() + within_s
        if self._me and handle.arrived is None and handle.id in self._kept:
            await self._match(handle)
        while handle.arrived is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            handle.waiters.append(future)
            try:
                if not await self._awaited(future, until):
                    raise self._none(f"no result for {handle.id} within {within_s:.1f} s")
            finally:
                if future in handle.waiters:
                    handle.waiters.remove(future)
        return handle.arrived

    async def kept(self, request_id: str) -> Result | None:
        """The result of this id that lies in the keep, of whatever client of this name."""
        while numbers := self._kept.get(request_id):
            raw = await producer.kept_result(self._scripts, self.box, numbers[0])
            if raw is not None:
                with suppress(ValueError):
                    return of_popped(decode_result(raw), numbers[0])
            if numbers:
                numbers.pop(0)
        return None

    async def change(self, within_s: float) -> None:
        """Return after the next look into the list, and in so long at the latest."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing.append(future)
        await self._awaited(future, time.monotonic() + within_s)

    async def settle(self) -> None:
        """Return when all results that are in the list now are known. Raises NameInUseError."""
        wanted = self._looks + 1
        while self._settled_look < wanted:
            await self.change(_LONG_S)

    async def scan(self) -> None:
        """Take in all that is in the keep: what clients of this name before this one have left there."""
        self._seen = await producer.last_kept(self._scripts, self.box)
        async for number, raw in producer.kept(self._scripts, self.box):
            self._came(number, raw)

    def give_back(self, result: Result) -> None:
        """Whoever awaited it has it."""
        if result.number:
            self._given_back.append(result.number)
            self._wake.set()
            if numbers := self._kept.get(result.id):
                with suppress(ValueError):
                    numbers.remove(result.number)
                if not numbers:
                    del self._kept[result.id]

    async def drain(self) -> None:
        """Look at all that has come, of what is pending, after the reading has ended."""
        await self._end()
        while self._pending and (await self._collect()).results:
            pass

    async def aclose(self) -> None:
        """End the reading. What is shared stays; what is not is removed."""
        await self._end()
        for future in self._waiters:
            if not future.done():
                future.set_exception(QueueAwayError("the client was closed"))
        with suppress(QueueUnavailableError):
            if not self._me:
                if self._task is not None or self._pending:
                    await producer.discard(self._scripts, self.box)
            elif self._task is not None:
                if self._given_back:
                    await self._collect()
                await producer.hand_over(self._scripts, self.box, self._me)

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _none(self, what: str) -> BatchError:
        trouble = self._outage.trouble
        return NoResultError(what) if trouble is None else away(trouble)

    def _changed(self) -> None:
        for future in self._changing:
            if not future.done():
                future.set_result(None)
        self._changing.clear()

    async def _awaited(self, future: asyncio.Future[None], until: float) -> bool:
        """Whether it came in time. Raises what ends the reading meanwhile."""
        self._start()
        self._waiters.add(future)
        self._wake.set()
        try:
            done, _ = await asyncio.wait([future], timeout=max(0.0, until - time.monotonic()))
            if done:
                future.result()
            return bool(done)
        finally:
            self._waiters.discard(future)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read(), name="batch client: results")

    async def _read(self) -> None:
        since: float | None = None
        rescan = bool(self._me)
        while True:
            try:
                if rescan:
                    await self.scan()
                    rescan = False
                found = await self._collect()
                if found.holder:
                    since = since or time.monotonic()
                    if time.monotonic() - since > self.in_use_after_s:
                        self._fail(NameInUseError(f"{self.box.results} is read by {found.holder}"))
                    await asyncio.sleep(1.0)
                    if not self._waiters:  # nobody here wants the name any more
                        since = None
                        await self._called()
                    continue
                since = None
                self._outage.well()
                if found.other:
                    self._kept.clear()
                    self._given_back.clear()
                    self._seen = 0
                    rescan = bool(self._me)
                elif not found.results:
                    await self._rest()
            except QueueUnavailableError as error:
                if (told := self._outage.ill(error)) is not None:
                    self._fail(told)
                    await asyncio.sleep(0)
                    if not self._waiters:
                        await self._called()
                await self._outage.pause()

    async def _collect(self) -> producer.Collected:
        self._looks += 1
        look, giving_back = self._looks, self._given_back[:5000]
        found = await producer.collect(
            self._scripts,
            self.box,
            me=self._me,
            owner_s=self.owner_s,
            seen=self._seen,
            given_back=giving_back,
        )
        if found.holder:
            self.reading = False
            return found
        del self._given_back[: len(giving_back)]
        self._seen = found.last
        for number, raw in found.results:
            self._came(number, raw)
        self.reading = True
        self._settled = not found.results and not found.other
        if self._settled:
            self._settled_look = look
        self._changed()
        return found

    async def _rest(self) -> None:
        """Until there may be something to do."""
        if self._given_back:
            return
        if not self._waiters and not self._pending and not self.keeps_name:
            await self._called()
            return
        if not await producer.arrival(self._long, self.box, WAIT_S):
            with suppress(QueueUnavailableError):  # the next look into the list tells of it
                await self._look_for_a_dispatcher()

    async def _look_for_a_dispatcher(self) -> None:
        """Who waits in vain is told once where nobody works on the queue: its name may be wrong."""
        last_s = await producer.unserved_s(self._scripts, self._names)
        unserved = last_s is None or last_s > producer.UNSERVED_AFTER_S
        if unserved and not self._unserved:
            _log.warning(
                "no dispatcher works on %s: is the pool's name right, does one run (without --observe)?",
                self._names.queue,
            )
        self._unserved = unserved

    async def _called(self) -> None:
        """Until somebody awaits something."""
        self._wake.clear()
        await self._wake.wait()

    async def _match(self, handle: Handle) -> None:
        """A handle made anew, of a request whose result lies in the keep."""
        for number in list(self._kept.get(handle.id, ())):
            raw = await producer.kept_result(self._scripts, self.box, number)
            with suppress(ValueError):
                if raw is not None and (result := decode_result(raw)).request_token == handle.token:
                    self._deliver(handle, result, number)
                    return

    def _came(self, number: int, raw: bytes) -> None:
        try:
            result = decode_result(raw)
        except ValueError:
            self.passed_over += 1
            self._given_back.append(number)
            return
        token = result.request_token or ""
        handle = self._handles.get(token)
        if handle is not None and handle.id == result.id:
            self._deliver(handle, result, number)
        elif self._me:
            self._pending.pop(token, None)
            self._keep(result.id, number)
        else:
            if self._pending.pop(token, None) is None or handle is not None:
                self.passed_over += 1
            self._given_back.append(number)

    def _deliver(self, handle: Handle, popped: PoppedResult, number: int) -> None:
        self._pending.pop(handle.token, None)
        if handle.arrived is None:
            handle.arrived = of_popped(popped, number if self._me else 0)
        if self._me:
            self._keep(handle.id, number)
        else:
            self._given_back.append(number)
        for future in handle.waiters:
            if not future.done():
                future.set_result(None)

    def _keep(self, request_id: str, number: int) -> None:
        numbers = self._kept.setdefault(request_id, [])
        if number not in numbers:
            numbers.append(number)
            numbers.sort()

    def _fail(self, error: BatchError) -> None:
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(error)
