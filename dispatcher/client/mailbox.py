"""Mailbox: receives the results of a client. One task reads the result list for all callers that wait.

    result list --collect--> keep --given back--> deleted

One script (lua/collect.lua) moves results from the list into a hash, the keep. A result is given back, and
deleted from the keep, once its caller has it. So no result is lost if the program or a connection dies.

Clients with the same name share a result list and a keep. Only one of them reads at a time. It is the one
whose owner id is in `<list>:owner`.
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
"""Longest time of one blocking command. Longer waits use several commands."""
OWNER_S = 15
"""Seconds after its last collect call at which a client loses its name to another client."""
_LONG_S = 86_400.0
"""Time limit of a wait that the next collect call ends anyway, by its result or by its error."""
GRACE_S = 10.0
"""Seconds after its deadline within which the dispatcher, if one runs, has answered a request."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(name: str) -> None:
    """Raise ValueError if the name is not valid for a client or a stream."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: 1 to 64 letters, digits, dots, dashes and underscores")


def whoami() -> str:
    """Return an owner id for this process. It is shown to other clients that want the same name."""
    return f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"


class Mailbox:
    """Results of one client.

    `owner_id` identifies this process if clients of the same name share the box. It is empty otherwise.
    """

    def __init__(
        self, scripts: Scripts, long: Scripts, box: Box, outage: Outage, names: Names, *, me: str = ""
    ) -> None:
        self.box = box
        self._names = names
        self._unserved = False
        """True if the warning that no dispatcher works on the queue was logged."""
        self.owner_s = OWNER_S
        self.in_use_after_s = OWNER_S + 5.0
        """Seconds to wait for the name. A client that died has lost the name by then."""
        self.passed_over = 0
        """Number of elements of the list that were not the result of a known request."""
        self.reading = False
        """True if this mailbox reads the list, so that no other client of its name does."""
        self._scripts = scripts
        self._long = long
        """Scripts whose time limit allows blocking commands of WAIT_S."""
        self._outage = outage
        self._me = me
        self.keeps_name = False
        """True if the mailbox keeps its name while no caller waits."""
        self._handles: WeakValueDictionary[str, Handle] = WeakValueDictionary()
        """Handles by token. Weak, so that handles that the program dropped do not pile up."""
        self._pending: dict[str, tuple[str, int]] = {}
        """Id and deadline of each submitted request without a result, by token."""
        self._kept: dict[str, list[int]] = {}
        """Numbers of the results in the keep, by request id, for callers that ask by id."""
        self._given_back: list[int] = []
        self._swept_at = 0.0
        self._seen = 0
        """Highest number of a result that was received."""
        self._settled = False
        self._looks = self._settled_look = 0
        """Number of collect calls so far, and number of the last call that found the list empty."""
        self._waiters: set[asyncio.Future[None]] = set()
        self._wake = asyncio.Event()
        self._changing: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Mailbox {self.box.results} {len(self._pending)} pending, {len(self._waiters)} awaited>"

    @property
    def pending(self) -> Sequence[tuple[str, str]]:
        """Id and token of each submitted request without a result."""
        return [(request_id, token) for token, (request_id, _) in self._pending.items()]

    @property
    def settled(self) -> bool:
        """True if the last collect call left nothing in the list."""
        return self._settled

    def expect(self, handles: Iterable[Handle]) -> None:
        """Register handles whose requests are about to be submitted."""
        for handle in handles:
            self._handles[handle.token] = handle
            self._pending[handle.token] = (handle.id, handle.deadline)

    def unexpect(self, handles: Iterable[Handle]) -> None:
        """Forget handles whose requests were not submitted after all."""
        for handle in handles:
            self._pending.pop(handle.token, None)
        self._changed()

    def full(self, more: int, most: int) -> bool:
        """Return whether `new_count` more requests would exceed `max_count` pending ones.

        Requests whose deadline passed more than DEADLINE_GRACE_S ago no longer count as pending.
        """
        if len(self._pending) + more <= most:
            return False
        now = time.time()
        # Look through the pending requests at most once a second, or when the clock was set back.
        if not self._swept_at <= now < self._swept_at + 1.0:
            self._swept_at = now
            for token in [token for token, (_, at) in self._pending.items() if at < now - GRACE_S]:
                del self._pending[token]
        return len(self._pending) + more > most

    async def take(self, handle: Handle, within_s: float | None) -> Result:
        """Wait for the result of a request. Raises NoResultError after the timeout.

        Without a timeout, wait until DEADLINE_GRACE_S after the deadline of the request.
        """
        self._handles[handle.token] = handle
        if within_s is None:
            within_s = max(0.0, handle.deadline - time.time()) + GRACE_S
        until = time.monotonic() + within_s
        # The handle may have been rebuilt by the program after its result was loaded from the keep.
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
        """Return the result with this id from the keep, or `None` if there is none.

        The request may have been submitted by any client of this name.
        """
        while numbers := self._kept.get(request_id):
            raw = await producer.kept_result(self._scripts, self.box, numbers[0])
            if raw is not None:
                with suppress(ValueError):
                    return of_popped(decode_result(raw), numbers[0])
            if numbers:  # `give_back` may have removed the numbers while this task waited for Redis
                numbers.pop(0)
        return None

    async def change(self, within_s: float) -> None:
        """Wait for the next collect call, but no longer than the timeout."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing.append(future)
        await self._awaited(future, time.monotonic() + within_s)

    async def settle(self) -> None:
        """Wait until all results that are in the list now were received. Raises NameInUseError."""
        wanted = self._looks + 1  # a call in progress may have read the list before this moment
        while self._settled_look < wanted:
            await self.change(_LONG_S)

    async def scan(self) -> None:
        """Load all results in the keep, which earlier clients of this name have left there."""
        # Read the number first: results that arrive during the scan come with the next collect call.
        self._seen = await producer.last_kept(self._scripts, self.box)
        async for number, raw in producer.kept(self._scripts, self.box):
            self._came(number, raw)

    def give_back(self, result: Result) -> None:
        """Mark a result as received by the program. The next collect call deletes it from the keep."""
        if result.number:
            self._given_back.append(result.number)
            self._wake.set()
            if numbers := self._kept.get(result.id):
                with suppress(ValueError):
                    numbers.remove(result.number)
                if not numbers:
                    del self._kept[result.id]

    async def drain(self) -> None:
        """Stop the reader task, and receive all results of pending requests that have already arrived."""
        await self._end()
        while self._pending and (await self._collect()).results:
            pass

    async def aclose(self) -> None:
        """Stop the reader task. Delete the list and the keep, unless clients of the same name share them."""
        await self._end()
        for future in self._waiters:
            if not future.done():
                future.set_exception(QueueAwayError("the client was closed"))
        # Best effort: without Redis, list and keep expire by themselves, and so does the owner key.
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
        """Wait for a future, and return whether it was resolved in time. Raises the errors of the reader."""
        self._start()
        self._waiters.add(future)
        self._wake.set()  # the reader may be idle, because no caller waited
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
                    # The holder may have been killed. Then it loses the name after OWNER_TTL_S.
                    since = since or time.monotonic()
                    if time.monotonic() - since > self.in_use_after_s:
                        self._fail(NameInUseError(f"{self.box.results} is read by {found.holder}"))
                    await asyncio.sleep(1.0)
                    if not self._waiters:  # no caller of this process needs the name any more
                        since = None
                        await self._called()
                    continue
                since = None
                self._outage.well()
                if found.other:  # Redis lost the keep, or it expired: the known numbers mean nothing now
                    self._kept.clear()
                    self._given_back.clear()
                    self._seen = 0
                    rescan = bool(self._me)
                elif not found.results:
                    await self._rest()
            except QueueUnavailableError as error:
                if (told := self._outage.ill(error)) is not None:
                    self._fail(told)
                    await asyncio.sleep(0)  # let the callers handle the error, and perhaps wait again
                    if not self._waiters:
                        await self._called()
                await self._outage.pause()

    async def _collect(self) -> producer.Collected:
        self._looks += 1
        # Numbers that are given back during the call stay for the next call.
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
        # Only after the reply: a call that failed is repeated with the same numbers.
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
        """Wait until there may be something to collect."""
        if self._given_back:
            return  # collect again at once, which deletes them from the keep
        # An idle client makes no calls, and so loses its name to other clients.
        if not self._waiters and not self._pending and not self.keeps_name:
            await self._called()
            return
        if not await producer.arrival(self._long, self.box, WAIT_S):
            with suppress(QueueUnavailableError):  # the next collect call reports the outage
                await self._look_for_a_dispatcher()

    async def _look_for_a_dispatcher(self) -> None:
        """Log one warning if no dispatcher works on the queue. The name of the queue may be wrong then."""
        last_s = await producer.unserved_s(self._scripts, self._names)
        unserved = last_s is None or last_s > producer.UNSERVED_AFTER_S
        if unserved and not self._unserved:
            _log.warning(
                "no dispatcher works on %s: is the pool's name right, does one run (without --observe)?",
                self._names.queue,
            )
        self._unserved = unserved

    async def _called(self) -> None:
        """Wait until a caller waits for a result, or a result is given back."""
        self._wake.clear()
        await self._wake.wait()

    async def _match(self, handle: Handle) -> None:
        """Deliver a result from the keep to a handle that the program has rebuilt from its fields."""
        # A copy, which cannot change during the calls.
        for number in list(self._kept.get(handle.id, ())):
            raw = await producer.kept_result(self._scripts, self.box, number)
            with suppress(ValueError):
                if raw is not None and (result := decode_result(raw)).request_token == handle.token:
                    self._deliver(handle, result, number)
                    return

    def _came(self, number: int, raw: bytes) -> None:
        try:
            result = decode_result(raw)
        except ValueError:  # some program has pushed an element that is no result
            self.passed_over += 1
            self._given_back.append(number)
            return
        token = result.request_token or ""
        handle = self._handles.get(token)
        if handle is not None and handle.id == result.id:
            self._deliver(handle, result, number)
        elif self._me:  # keep it: the program may ask for it by its id
            self._pending.pop(token, None)
            self._keep(result.id, number)
        else:  # the program dropped the handle, or the result is of an unknown request
            if self._pending.pop(token, None) is None or handle is not None:
                self.passed_over += 1
            self._given_back.append(number)

    def _deliver(self, handle: Handle, popped: PoppedResult, number: int) -> None:
        self._pending.pop(handle.token, None)
        if handle.arrived is None:  # a result may come twice, when a call is repeated
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
