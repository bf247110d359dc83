"""Mailbox: receives the results of a client. One task reads the result list for all callers that wait.

    result list --collect--> keep --given back--> deleted

One script (lua/collect_results.lua) moves results from the list into a hash, the keep. A result is given
back, and deleted from the keep, once its caller has it. So no result is lost if the program or a connection
dies.

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

from dispatcher.client.errors import NameInUseError, NoResultError, QueueUnreachableError
from dispatcher.client.item import Handle
from dispatcher.client.outage import Outage, unreachable_error
from dispatcher.client.result import Result, result_from_popped
from dispatcher.common.errors import BatchError
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.producer import ResultBox
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.wire_format import PoppedResult

_log = logging.getLogger("batch_dispatcher.client")
WAIT_S = 5.0
"""Longest time of one blocking command. Longer waits use several commands."""
OWNER_TTL_S = 15
"""Seconds after the last collect call of a client until another client may take its name."""
_NO_TIMEOUT_S = 86_400.0
"""Time limit of a wait that the next collect call ends anyway, by its result or by its error."""
DEADLINE_GRACE_S = 10.0
"""Seconds after its deadline within which the dispatcher, if one runs, has answered a request."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(name: str) -> None:
    """Raise ValueError if the name is not valid for a client or a stream."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: 1 to 64 letters, digits, dots, dashes and underscores")


def make_owner_id() -> str:
    """Return an owner id for this process. It is shown to other clients that want the same name."""
    return f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"


def _make_closed_error() -> QueueUnreachableError:
    return QueueUnreachableError("the client was closed")


class Mailbox:
    """Results of one client.

    `owner_id` identifies this process if clients of the same name share the box. It is empty otherwise.
    """

    def __init__(
        self,
        scripts: ScriptRunner,
        blocking_scripts: ScriptRunner,
        box: ResultBox,
        outage: Outage,
        names: QueueNames,
        *,
        owner_id: str = "",
    ) -> None:
        self.box = box
        self._names = names
        self._is_unserved = False
        """True if the warning that no dispatcher works on the queue was logged."""
        self.owner_ttl_s = OWNER_TTL_S
        self.in_use_after_s = OWNER_TTL_S + 5.0
        """Seconds to wait for the name. A client that died has lost the name by then."""
        self.ignored_count = 0
        """Number of elements of the list that were not the result of a known request."""
        self.is_reading = False
        """True if this mailbox reads the list, so that no other client of its name does."""
        self._scripts = scripts
        self._blocking_scripts = blocking_scripts
        """Scripts whose time limit allows blocking commands of WAIT_S."""
        self._outage = outage
        self._owner_id = owner_id
        self.keeps_name = False
        """True if the mailbox keeps its name while no caller waits."""
        self._handles: WeakValueDictionary[str, Handle] = WeakValueDictionary()
        """Handles by token. Weak, so that handles that the program dropped do not pile up."""
        self._pending: dict[str, tuple[str, int]] = {}
        """Id and deadline of each submitted request without a result, by token."""
        self._kept_numbers: dict[str, list[int]] = {}
        """Numbers of the results in the keep, by request id, for callers that ask by id."""
        self._given_back_numbers: list[int] = []
        self._expired_removed_at = 0.0
        self._last_number = 0
        """Highest number of a result that was received."""
        self._is_caught_up = False
        self._collect_count = self._last_empty_collect = 0
        """Number of collect calls so far, and number of the last call that found the list empty."""
        self._waiters: set[asyncio.Future[None]] = set()
        self._wake_event = asyncio.Event()
        self._change_waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Mailbox {self.box.result_list} {len(self._pending)} pending, {len(self._waiters)} awaited>"

    @property
    def pending_requests(self) -> Sequence[tuple[str, str]]:
        """Id and token of each submitted request without a result."""
        return [(request_id, token) for token, (request_id, _) in self._pending.items()]

    @property
    def is_caught_up(self) -> bool:
        """True if the last collect call left nothing in the list."""
        return self._is_caught_up

    def expect_results(self, handles: Iterable[Handle]) -> None:
        """Register handles whose requests are about to be submitted."""
        for handle in handles:
            self._handles[handle.token] = handle
            self._pending[handle.token] = (handle.id, handle.deadline)

    def forget_expected(self, handles: Iterable[Handle]) -> None:
        """Forget handles whose requests were not submitted after all."""
        for handle in handles:
            self._pending.pop(handle.token, None)
        self._notify_change()

    def is_full(self, new_count: int, max_count: int) -> bool:
        """Return whether `new_count` more requests would exceed `max_count` pending ones.

        Requests whose deadline passed more than DEADLINE_GRACE_S ago no longer count as pending.
        """
        if len(self._pending) + new_count <= max_count:
            return False
        now = time.time()
        # Look through the pending requests at most once a second, or when the clock was set back.
        if not self._expired_removed_at <= now < self._expired_removed_at + 1.0:
            self._expired_removed_at = now
            for token in [token for token, (_, at) in self._pending.items() if at < now - DEADLINE_GRACE_S]:
                del self._pending[token]
        return len(self._pending) + new_count > max_count

    async def wait_for_result(self, handle: Handle, timeout_s: float | None) -> Result:
        """Wait for the result of a request. Raises NoResultError after the timeout.

        Without a timeout, wait until DEADLINE_GRACE_S after the deadline of the request.
        """
        self._handles[handle.token] = handle
        if timeout_s is None:
            timeout_s = max(0.0, handle.deadline - time.time()) + DEADLINE_GRACE_S
        give_up_at = time.monotonic() + timeout_s
        # The handle may have been rebuilt by the program after its result was loaded from the keep.
        if self._owner_id and handle.received_result is None and handle.id in self._kept_numbers:
            await self._match_kept_result(handle)
        while handle.received_result is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            handle.waiters.append(future)
            try:
                if not await self._wait_for_future(future, give_up_at):
                    raise self._missing_result_error(f"no result for {handle.id} within {timeout_s:.1f} s")
            finally:
                if future in handle.waiters:
                    handle.waiters.remove(future)
        return handle.received_result

    async def find_kept_result(self, request_id: str) -> Result | None:
        """Return the result with this id from the keep, or `None` if there is none.

        The request may have been submitted by any client of this name.
        """
        while numbers := self._kept_numbers.get(request_id):
            raw = await producer.read_kept_result(self._scripts, self.box, numbers[0])
            if raw is not None:
                with suppress(ValueError):
                    return result_from_popped(decode_result(raw), numbers[0])
            if numbers:  # `give_back` may have removed the numbers while this task waited for Redis
                numbers.pop(0)
        return None

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait for the next collect call, but no longer than the timeout."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._change_waiters.append(future)
        await self._wait_for_future(future, time.monotonic() + timeout_s)

    async def catch_up(self) -> None:
        """Wait until all results that are in the list now were received. Raises NameInUseError."""
        next_collect = self._collect_count + 1  # a call in progress may have read the list before this moment
        while self._last_empty_collect < next_collect:
            await self.wait_for_change(_NO_TIMEOUT_S)

    async def load_kept_results(self) -> None:
        """Load all results in the keep, which earlier clients of this name have left there."""
        # Read the number first: results that arrive during the scan come with the next collect call.
        self._last_number = await producer.get_last_kept_number(self._scripts, self.box)
        async for number, raw in producer.iterate_kept_results(self._scripts, self.box):
            self._accept_result(number, raw)

    def give_back(self, result: Result) -> None:
        """Mark a result as received by the program. The next collect call deletes it from the keep."""
        if result.keep_number:
            self._given_back_numbers.append(result.keep_number)
            self._wake_event.set()
            if numbers := self._kept_numbers.get(result.id):
                with suppress(ValueError):
                    numbers.remove(result.keep_number)
                if not numbers:
                    del self._kept_numbers[result.id]

    async def collect_remaining(self) -> None:
        """Stop the reader task, and receive all results of pending requests that have already arrived."""
        await self._stop_reader()
        while self._pending and (await self._collect_results()).results:
            pass

    async def aclose(self) -> None:
        """Stop the reader task. Delete the list and the keep, unless clients of the same name share them."""
        # First, because a caller that begins to wait from now on would start the reader again.
        self._is_closed = True
        await self._stop_reader()
        for future in self._waiters:
            if not future.done():
                future.set_exception(_make_closed_error())
        # Best effort: without Redis, list and keep expire by themselves, and so does the owner key.
        with suppress(QueueUnavailableError):
            if not self._owner_id:
                if self._task is not None or self._pending:
                    await producer.delete_box(self._scripts, self.box)
            elif self._task is not None:
                if self._given_back_numbers:
                    await self._collect_results()
                await producer.release_box_ownership(self._scripts, self.box, self._owner_id)

    async def _stop_reader(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _missing_result_error(self, message: str) -> BatchError:
        current_error = self._outage.current_error
        return NoResultError(message) if current_error is None else unreachable_error(current_error)

    def _notify_change(self) -> None:
        for future in self._change_waiters:
            if not future.done():
                future.set_result(None)
        self._change_waiters.clear()

    async def _wait_for_future(self, future: asyncio.Future[None], give_up_at: float) -> bool:
        """Wait for a future, and return whether it was resolved in time. Raises the errors of the reader."""
        if self._is_closed:
            raise _make_closed_error()
        self._start_reader()
        self._waiters.add(future)
        self._wake_event.set()  # the reader may be idle, because no caller waited
        try:
            done, _ = await asyncio.wait([future], timeout=max(0.0, give_up_at - time.monotonic()))
            if done:
                future.result()
            return bool(done)
        finally:
            self._waiters.discard(future)

    def _start_reader(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_results(), name="batch client: results")

    async def _read_results(self) -> None:
        name_in_use_since: float | None = None
        rescan = bool(self._owner_id)
        while True:
            try:
                if rescan:
                    await self.load_kept_results()
                    rescan = False
                collected = await self._collect_results()
                if collected.holder:
                    # The holder may have been killed. Then it loses the name after OWNER_TTL_S.
                    name_in_use_since = name_in_use_since or time.monotonic()
                    if time.monotonic() - name_in_use_since > self.in_use_after_s:
                        self._fail_waiters(
                            NameInUseError(f"{self.box.result_list} is read by {collected.holder}")
                        )
                    await asyncio.sleep(1.0)
                    if not self._waiters:  # no caller of this process needs the name any more
                        name_in_use_since = None
                        await self._wait_for_caller()
                    continue
                name_in_use_since = None
                self._outage.record_success()
                if (
                    collected.has_been_reset
                ):  # Redis lost the keep, or it expired: the known numbers mean nothing now
                    self._kept_numbers.clear()
                    self._given_back_numbers.clear()
                    self._last_number = 0
                    rescan = bool(self._owner_id)
                elif not collected.results:
                    await self._wait_for_work()
            except QueueUnavailableError as error:
                if (error_to_raise := self._outage.record_failure(error)) is not None:
                    self._fail_waiters(error_to_raise)
                    await asyncio.sleep(0)  # let the callers handle the error, and perhaps wait again
                    if not self._waiters:
                        await self._wait_for_caller()
                await self._outage.wait_before_retry()

    async def _collect_results(self) -> producer.CollectReply:
        self._collect_count += 1
        # Numbers that are given back during the call stay for the next call.
        collect_number, given_back = self._collect_count, self._given_back_numbers[:5000]
        collected = await producer.collect_results(
            self._scripts,
            self.box,
            client_id=self._owner_id,
            owner_ttl_s=self.owner_ttl_s,
            last_seen=self._last_number,
            acknowledged=given_back,
        )
        if collected.holder:
            self.is_reading = False
            return collected
        # Only after the reply: a call that failed is repeated with the same numbers.
        del self._given_back_numbers[: len(given_back)]
        self._last_number = collected.last_number
        for number, raw in collected.results:
            self._accept_result(number, raw)
        self.is_reading = True
        self._is_caught_up = not collected.results and not collected.has_been_reset
        if self._is_caught_up:
            self._last_empty_collect = collect_number
        self._notify_change()
        return collected

    async def _wait_for_work(self) -> None:
        """Wait until there may be something to collect."""
        if self._given_back_numbers:
            return  # collect again at once, which deletes them from the keep
        # An idle client makes no calls, and so loses its name to other clients.
        if not self._waiters and not self._pending and not self.keeps_name:
            await self._wait_for_caller()
            return
        if not await producer.wait_for_result(self._blocking_scripts, self.box, WAIT_S):
            with suppress(QueueUnavailableError):  # the next collect call reports the outage
                await self._check_for_dispatcher()

    async def _check_for_dispatcher(self) -> None:
        """Log one warning if no dispatcher works on the queue. The name of the queue may be wrong then."""
        last_sweep_s = await producer.get_sweep_age_s(self._scripts, self._names)
        is_unserved = last_sweep_s is None or last_sweep_s > producer.NOT_SERVED_AFTER_S
        if is_unserved and not self._is_unserved:
            _log.warning(
                "no dispatcher works on %s: is the pool's name right, does one run (without --observe)?",
                self._names.queue,
            )
        self._is_unserved = is_unserved

    async def _wait_for_caller(self) -> None:
        """Wait until a caller waits for a result, or a result is given back."""
        self._wake_event.clear()
        await self._wake_event.wait()

    async def _match_kept_result(self, handle: Handle) -> None:
        """Deliver a result from the keep to a handle that the program has rebuilt from its fields."""
        # A copy, which cannot change during the calls.
        for number in list(self._kept_numbers.get(handle.id, ())):
            raw = await producer.read_kept_result(self._scripts, self.box, number)
            with suppress(ValueError):
                if raw is not None and (result := decode_result(raw)).request_token == handle.token:
                    self._deliver_result(handle, result, number)
                    return

    def _accept_result(self, number: int, raw: bytes) -> None:
        try:
            result = decode_result(raw)
        except ValueError:  # some program has pushed an element that is no result
            self.ignored_count += 1
            self._given_back_numbers.append(number)
            return
        token = result.request_token or ""
        handle = self._handles.get(token)
        if handle is not None and handle.id == result.id:
            self._deliver_result(handle, result, number)
        elif self._owner_id:  # keep it: the program may ask for it by its id
            self._pending.pop(token, None)
            self._note_kept(result.id, number)
        else:  # the program dropped the handle, or the result is of an unknown request
            if self._pending.pop(token, None) is None or handle is not None:
                self.ignored_count += 1
            self._given_back_numbers.append(number)

    def _deliver_result(self, handle: Handle, popped: PoppedResult, number: int) -> None:
        self._pending.pop(handle.token, None)
        if handle.received_result is None:  # a result may come twice, when a call is repeated
            handle.received_result = result_from_popped(popped, number if self._owner_id else 0)
        if self._owner_id:
            self._note_kept(handle.id, number)
        else:
            self._given_back_numbers.append(number)
        for future in handle.waiters:
            if not future.done():
                future.set_result(None)

    def _note_kept(self, request_id: str, number: int) -> None:
        numbers = self._kept_numbers.setdefault(request_id, [])
        if number not in numbers:
            numbers.append(number)
            numbers.sort()

    def _fail_waiters(self, error: BatchError) -> None:
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(error)
