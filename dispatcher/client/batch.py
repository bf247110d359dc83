"""`BatchClient`: submit requests to a pool's queue, and await their results."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from dispatcher.batched.errors import TooManyPendingError
from dispatcher.client.blocking import BlockingBatchClient
from dispatcher.client.errors import NoResultError, QueueAwayError
from dispatcher.client.item import Body, Deadline, Handle, Item, Tokens, item_of, submission_of
from dispatcher.client.mailbox import WAIT_S, Mailbox, check_name, whoami
from dispatcher.client.named_stream import NamedStreams
from dispatcher.client.outage import Outage
from dispatcher.client.result import HookError, Result, called, of_error
from dispatcher.client.sequence import CarryWord, OnErrorWord, OpenSequence, SequenceDoors, mapped
from dispatcher.client.sequence_calls import SequenceCalls
from dispatcher.client.stream import Items, streamed
from dispatcher.client.submitter import SUBMITTED_MOST, Submitter
from dispatcher.core.requests.named_stream import StreamStatus
from dispatcher.core.requests.submission import QueueUnavailableError, Submission
from dispatcher.core.sequences.turns import SequenceSeen, Turn
from dispatcher.queue.keys import Names
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.connect import connect, place_of
from dispatcher.queue.redis.producer import Box
from dispatcher.queue.redis.scripts import Scripts

if TYPE_CHECKING:
    from dispatcher.client.files import FileProgress
    from dispatcher.queue.redis.queue_admin import RedisDesk

T = TypeVar("T")
Before = Callable[[Item], "Item | Awaitable[Item | None] | None"]
After = Callable[[Item, Result], "Awaitable[None] | None"]

CALLS_AT_ONCE = 2
"""Beside the submitter's call and the reader's: so a client has four connections at the most, and one more
for each named stream that runs."""
CLOSE_S = 5.0
"""What is pending when a client closes is cancelled within this, or not."""
UNKNOWN_S = 2.0
"""What was neither in line nor kept for so long is not to come: on a Cluster results are under way for a
moment."""
_NO_STRINGS: Mapping[str, str] = {}


class BatchClient:
    """A client of one pool's queue.

        async with BatchClient("redis://localhost:6379", pool="qwen") as client:
            result = await client.submit({"model": "m", "prompt": "hi"}, deadline="10m")

    `url`: of Redis, as in the dispatcher's `queue.url`. `pool`: its queue is `batch:{pool}:requests`; `queue`
    and `results` name another queue and its default result list.

    `name`: without, the client has a result list of its own, and what it has not read is gone when it closes:
    what is pending then is cancelled (unless `cancel_on_close` is false). With a name its results wait for it
    for as long as they live (`queue.result_ttl_s`), and whoever comes next under that name may fetch them, by
    handle or by id. One process at a time reads under a name; another one gets NameInUseError.

    `max_pending`: so many requests may be submitted and unanswered; a further one waits, or raises
    TooManyPendingError where `when_full` is "raise".

    `before(item)` is called before a submission and may return another Item to submit in its place;
    `after(item, result)` when its result is taken. Either may be a coroutine function. What one raises fails
    that item alone.

    `retry_for`: for so many seconds a call goes on trying while Redis is away. None: until the request's
    deadline or the call's time-out; ten seconds where Redis was not reached yet. A call that is repeated does
    nothing twice.

    A client belongs to one event loop. `BatchClient.sync(…)` is the same for programs without one.
    """

    def __init__(
        self,
        url: str,
        *,
        pool: str = "default",
        queue: str = "",
        results: str = "",
        name: str = "",
        max_pending: int = 100_000,
        when_full: Literal["wait", "raise"] = "wait",
        before: Before | None = None,
        after: After | None = None,
        retry_for: float | None = None,
        cancel_on_close: bool = True,
    ) -> None:
        if name:
            check_name(name)
        if max_pending < 1:
            raise ValueError(f"max_pending {max_pending}: must be at least 1")
        queue = queue or f"batch:{{{pool}}}:requests"
        names = Names(queue, results or f"{queue.removesuffix(':requests')}:results")
        self.name = name
        self._url = url
        self._names = names
        self._max_pending, self._when_full = max_pending, when_full
        self._before, self._after = before, after
        self._cancel_on_close = cancel_on_close and not name
        redis = connect(url, answer_s=WAIT_S + 3.0)
        self._backend = Backend(redis, names)
        self._outage = Outage(retry_for, place_of(url))
        self._submitter = Submitter(self._backend, self._outage)
        self._redis = redis
        box = Box(f"batch-results:{{{name or secrets.token_hex(8)}}}")
        self._mailbox = self._mailbox_at(box, whoami() if name else "")
        self._tokens = Tokens()
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        self._streams = NamedStreams(self._backend, self._mailbox_at, self._call, self._made)
        self._sequences = SequenceCalls(self._call, self._desk, self._tokens)
        self._doors = SequenceDoors(
            self.enqueue,
            self._taken,
            self._arrived,
            self._mailbox.give_back,
            self.cancel,
            self.known_sequence,
            self._sequences.cancel,
        )
        self._cancelling: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<BatchClient {self._names.queue} {self._mailbox!r}>"

    @property
    def box(self) -> Box:
        """Where its results arrive in Redis."""
        return self._mailbox.box

    @property
    def reading(self) -> bool:
        """It takes results now."""
        return self._mailbox.reading

    @property
    def pending(self) -> int:
        """How many requests of this client are submitted, or about to be, and not answered."""
        return len(self._mailbox.pending)

    @property
    def trouble(self) -> str | None:
        """Why the queue cannot be reached now; None: nothing is known against it."""
        return None if self._outage.trouble is None else str(self._outage.trouble)

    @property
    def passed_over(self) -> int:
        """Elements of its list that were no result of a request of this client."""
        return self._mailbox.passed_over

    @staticmethod
    def sync(url: str, **options: Any) -> BlockingBatchClient:
        """The same for scripts and notebooks: the same verbs, which block. Safe to use from several
        threads."""
        return BlockingBatchClient(lambda: BatchClient(url, **options))

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def enqueue(
        self,
        body: Body,
        *,
        path: str = "",
        id: str = "",  # noqa: A002 - it is the contract's word
        deadline: Deadline = "1h",
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        results: str | None = None,
        sequence: Turn | str | None = None,
    ) -> Handle:
        """Submit one request, and return when it is in line. The arguments are those of `Item`.

        Raises ValueError or TypeError for what no dispatcher would take, HookError where `before` raised,
        TooManyPendingError, and QueueAwayError.
        """
        told = (headers or _NO_STRINGS, metadata or _NO_STRINGS, labels or _NO_STRINGS)
        item = Item(body, path, id, deadline, priority, *told, results, sequence)
        handle, submission = await self._made(item)
        await self._submit([(handle, submission)])
        return handle

    async def enqueue_many(self, items: Sequence[Item | Body]) -> list[Handle]:
        """Submit many requests, in this order, with one call to Redis for a thousand of them.

        Raises as `enqueue`, before any is submitted where it is for one of them. An item whose `before`
        raised is not submitted: its handle has a result that says so (HOOK_FAILED).
        """
        made = []
        for number, item in enumerate(items):
            try:
                made.append(await self._made_or_failed(item_of(item), HookError))
            except (ValueError, TypeError) as error:
                raise type(error)(f"item {number}: {error}") from error
        await self._submit([(handle, submission) for handle, submission in made if submission is not None])
        return [handle for handle, _ in made]

    async def result(self, handle: Handle | str, *, timeout: float | None = None) -> Result:
        """Await the result of a request of this client. Asked again, it is the same.

        `handle`: what `enqueue` returned, or one made anew of the same id, token, deadline and list; for a
        client with a name also an id. `timeout` None: some seconds past the deadline, by when the dispatcher
        has answered if there is one. Raises NoResultError, QueueAwayError, NameInUseError, HookError. A
        request that failed is a result, too: `raise_for_status` raises.
        """
        if isinstance(handle, str):
            result = await self._of_id(handle, timeout)
        else:
            result = await self._taken(handle, timeout)
        self._mailbox.give_back(result)
        return result

    async def submit(self, body: Body, *, timeout: float | None = None, **options: Any) -> Result:
        """Submit one request and await its result: `enqueue` and `result`, with the arguments of both.

        A request that failed is a result, too: `raise_for_status` raises. Cancelled meanwhile, it cancels the
        request where nobody else could have its result: of a client without a name.
        """
        handle = await self.enqueue(body, **options)
        try:
            return await self.result(handle, timeout=timeout)
        except asyncio.CancelledError:
            self._forsake([handle])
            raise

    def stream(
        self,
        items: Items,
        *,
        max_pending: int = 1000,
        ordered: bool = False,
        name: str = "",
    ) -> AsyncGenerator[Result, None]:
        """Submit all of these, never more than `max_pending` at a time, and yield their results as they come,
        or in the order of the items.

        Each item has exactly one result. What goes wrong with one alone is told by its result:
        INVALID_REQUEST, HOOK_FAILED, NO_RESULT. Raises QueueAwayError and NameInUseError. A result of a
        client with a name is given back when the next one is asked for.

        `name`: the stream goes on where it was when it is run again under this name, after a crash, too. Each
        item needs an `id`, by which it is known again. Results of items that earlier runs submitted come
        first; items that were consumed are passed over. A result is consumed when the next one is asked for,
        so that after a crash only the result that the program was at comes a second time. One process at a
        time runs a stream of a name. A client with the hook `after` cannot run one.
        """
        most = min(max_pending, self._max_pending)
        if name:
            if self._after is not None:  # a run that goes on has results of items that nobody has any more
                raise ValueError("a named stream cannot run in a client with the hook after")
            return self._streams.run(name, items, most=most, ordered=ordered)

        async def given(result: Result) -> None:
            self._mailbox.give_back(result)

        return self._stream(items, most, ordered, given)

    async def stream_status(
        self, name: str, *, consumed: bool = False, after: str = "", most: int = 1000
    ) -> StreamStatus:
        """Return the notes about the stream of this name: counts, and a page of about `most` requests that
        are not consumed, or that are. `after` is that of the page before."""
        return await self._streams.status(name, after, most, consumed=consumed)

    async def forget_stream(self, name: str) -> None:
        """Cancel what is pending of the stream of this name, and remove its results and all that is noted, so
        that it begins anew. Raises NameInUseError while a program runs it."""
        await self._streams.forget(name)

    async def map(self, items: Items) -> list[Result]:
        """All their results, in the order of the items, each as `stream` tells it."""

        async def keep(result: Result) -> None:
            """Give none back before all are there."""

        stream = self._stream(items, self._max_pending, True, keep)
        results = [result async for result in stream]
        for result in results:
            self._mailbox.give_back(result)
        return results

    async def cancel(self, handle: Handle | str) -> bool:
        """Ask for it to be cancelled; False where it has ended. Its result is CANCELLED, unless it came
        before."""
        request_id, token = (handle, "") if isinstance(handle, str) else (handle.id, handle.token)

        async def cancel() -> bool:
            return bool(await producer.cancel(self._backend, request_id, token, ""))

        return await self._call(cancel)

    def sequence(
        self,
        sequence_id: str,
        *,
        on_error: OnErrorWord | None = None,
        reset: bool = False,
        index: int | None = None,
        carry: CarryWord | None = None,
    ) -> OpenSequence:
        """A sequence to send: its requests run in order, one at a time, and are numbered by it.

        `on_error`: what becomes of the later ones when one has no answer (`continue`, `abort`, `hold`).
        `carry`: whether the conversation so far goes before each body (`messages`, `off`). None: as the
        dispatcher's `sequences` say. `reset`: it begins anew, behind all that came before. `index`: of its
        first request. Without either it goes on behind what the queue knows of it.
        """
        return OpenSequence(self._doors, sequence_id, on_error, reset, index, carry)

    async def map_sequences(
        self,
        sequences: Mapping[str, Iterable[Item | Body]],
        *,
        on_error: OnErrorWord | None = None,
        reset: bool = True,
        carry: CarryWord | None = None,
        at_once: int = 500,
    ) -> dict[str, list[Result]]:
        """All results of these sequences, by id and in order. Each begins anew, unless `reset` is false, and
        ends with its last request; no more than `at_once` of them are under way, and of each as many requests
        as `OpenSequence.send_many` submits."""
        return await mapped(
            lambda each: self.sequence(each, on_error=on_error, reset=reset, carry=carry), sequences, at_once
        )

    async def known_sequence(self, sequence_id: str) -> SequenceSeen | None:
        """What the queue knows of one, by what dispatchers have claimed of it; None: nothing (any more)."""
        return await self._call(lambda: self._desk().sequence(sequence_id))

    async def cancel_sequence(self, sequence_id: str) -> bool:
        """Cancel all requests of a sequence that were submitted until now, by this client or another.

        The sequence ends, and requests that are submitted later begin it anew. Return False if, as far as
        dispatchers know, it has ended or is not there. Requests that no dispatcher has claimed yet are
        cancelled all the same.
        """
        return await self._sequences.cancel(sequence_id)

    async def forget_sequence(self, sequence_id: str) -> bool:
        """Have the queue know nothing more of one, so that its id begins anew: after an abort, or an end.
        True also where nothing was known of it. False: something of it runs or waits, as `known_sequence`
        tells; `cancel_sequence` ends that."""
        done = await self._call(lambda: self._desk().forget_sequence(sequence_id))
        return done is not False

    async def run_file(
        self,
        source: str | Path | BinaryIO,
        output: str | Path | BinaryIO,
        errors: str | Path | None = None,
        *,
        on_progress: Callable[[FileProgress], None] = lambda _: None,
        **options: Any,
    ) -> FileProgress:
        """Have every line of a batch file of OpenAI's format answered. Called again after it was broken off,
        it goes on where it was. The options are those of `dispatcher.client.files.FileOptions`;
        `on_progress` is called each second.

        Raises InputError (BadInputError for lines), JournalError, SinkError and QueueAwayError.
        """
        from dispatcher.client.files import FileOptions, FilePaths, run_file

        read, written = (Path(each) if isinstance(each, str) else each for each in (source, output))
        paths = FilePaths(read, written, None if errors is None else Path(errors))
        return await run_file(self._url, self._names, paths, FileOptions(**options), on_progress=on_progress)

    async def aclose(self) -> None:
        """End it, and close its connections. Whoever still awaits something gets QueueAwayError."""
        if self._closed:
            return
        self._closed = True
        await self._streams.aclose()
        await self._submitter.aclose()
        for task in self._cancelling:
            task.cancel()
        if self._cancel_on_close:
            with suppress(TimeoutError, QueueUnavailableError):
                async with asyncio.timeout(CLOSE_S):
                    await self._mailbox.drain()
                    for request_id, token in self._mailbox.pending:
                        await producer.cancel(self._backend, request_id, token, "")
        await self._mailbox.aclose()
        await self._backend.aclose()

    async def _made(self, item: Item) -> tuple[Handle, Submission]:
        """The request of an item, after `before` has seen it. Raises HookError, ValueError, TypeError."""
        if self._closed:
            raise QueueAwayError("the client was closed")
        if self._before is not None:
            try:
                item = await called(self._before, item) or item
            except Exception as error:
                raise HookError(f"before: {type(error).__name__}: {error}") from error
        results = self.box.results if item.results is None else item.results
        if results and (why := self._names.refused_list(results)) is not None and item.results is not None:
            raise ValueError(f"results: {results} {why}")
        sent = await self._sequences.with_secret(item)
        submission = submission_of(sent, self._tokens.make(), queue=self._names.queue, results=results)
        handle = Handle(submission.request_id, submission.request_token, submission.deadline, results)
        if self._after is not None:
            handle.item = item
        return handle, submission

    async def _made_or_failed(
        self, item: Item, failures: type[Exception] | tuple[type[Exception], ...]
    ) -> tuple[Handle, Submission | None]:
        """As `_made`; what fails so has a handle with a result that says so."""
        try:
            return await self._made(item)
        except QueueAwayError:
            raise
        except failures as error:
            handle = Handle(item.id, "", 0, self.box.results)
            handle.arrived = of_error(item.id, error)
            return handle, None

    async def _submit(self, made: Sequence[tuple[Handle, Submission]]) -> None:
        """In steps, so that no more are pending than may be."""
        at, expected = 0, sum(handle.results == self.box.results for handle, _ in made)
        if self._when_full == "raise" and self._mailbox.full(expected, self._max_pending):
            raise TooManyPendingError(f"{self._max_pending} requests are unanswered (max_pending)")
        while at < len(made):
            some = made[at : at + min(SUBMITTED_MOST, self._max_pending)]
            at += len(some)
            own = [handle for handle, _ in some if handle.results == self.box.results]
            while self._mailbox.full(len(own), self._max_pending):
                await self._mailbox.change(1.0)
            self._mailbox.expect(own)
            group = self._submitter.hand_in(
                [submission for _, submission in some], max(each.deadline for _, each in some)
            )
            try:
                await asyncio.shield(group.done)
            except QueueAwayError:
                self._mailbox.unexpect(own)
                raise
            except asyncio.CancelledError:
                if self._submitter.give_up(group):
                    self._forsake(own, group.done)
                else:
                    self._mailbox.unexpect(own)
                raise

    async def _taken(self, handle: Handle, timeout: float | None) -> Result:
        if handle.arrived is None and handle.results != self.box.results:
            raise ValueError(
                f"{handle.id}: its result goes to {handle.results or self._names.results}, not to this client"
            )
        result = handle.arrived or await self._mailbox.take(handle, timeout)
        item, handle.item = handle.item, None
        if self._after is not None and item is not None:
            try:
                await called(self._after, item, result)
            except Exception as error:
                told = HookError(f"{handle.id}: after: {type(error).__name__}: {error}")
                told.result = result
                raise told from error
        return result

    async def _arrived(self, handle: Handle) -> None:
        with suppress(NoResultError):
            await self._mailbox.take(handle, None)

    def _desk(self) -> RedisDesk:
        from dispatcher.queue.redis.queue_admin import RedisDesk

        return RedisDesk(self._redis, self._names)

    async def _of_id(self, request_id: str, timeout: float | None) -> Result:
        if not self.name:
            raise ValueError("a client without a name finds its results by their handles alone")
        until = float("inf") if timeout is None else time.monotonic() + timeout
        unknown_since: float | None = None
        while True:
            result = await self._call(lambda: self._mailbox.kept(request_id), until)
            now = time.monotonic()
            if result is not None:
                return result
            if now >= until:
                raise NoResultError(f"no result for {request_id} within {timeout:.1f} s")
            if timeout is None and self._mailbox.settled:
                in_line = await self._call(lambda: producer.is_active(self._backend, request_id), until)
                unknown_since = None if in_line else unknown_since or now
                if unknown_since is not None and now - unknown_since > UNKNOWN_S:
                    raise NoResultError(
                        f"{request_id} is not in line, and no result of it is kept for {self.name}"
                    )
            await self._mailbox.change(max(0.0, min(1.0, until - now)))

    async def _call(self, act: Callable[[], Awaitable[T]], until: float = float("inf")) -> T:
        """One of the calls that are made at once; again while Redis is away."""
        async with self._calls:
            return await self._outage.borne(act, until)

    def _mailbox_at(self, box: Box, me: str) -> Mailbox:
        long = Scripts(self._redis, try_s=WAIT_S + 3.0)
        return Mailbox(self._backend.scripts, long, box, self._outage, self._backend.names, me=me)

    def _stream(
        self, items: Items, most: int, ordered: bool, given: Callable[[Result], Awaitable[None]]
    ) -> AsyncGenerator[Result, None]:
        async def enqueue(some: Sequence[Item | Body]) -> Sequence[Handle]:
            made = [
                await self._made_or_failed(item_of(item), (HookError, ValueError, TypeError)) for item in some
            ]
            await self._submit(
                [(handle, submission) for handle, submission in made if submission is not None]
            )
            return [handle for handle, _ in made]

        async def take(handle: Handle) -> Result:
            try:
                return await self._taken(handle, None)
            except (HookError, NoResultError) as error:
                return of_error(handle.id, error)

        return streamed(items, enqueue, take, given, most=most, ordered=ordered)

    def _forsake(self, handles: Iterable[Handle], submitted: asyncio.Future[None] | None = None) -> None:
        """Nobody awaits these any more: cancel them where nobody else can, once they are `submitted`: what is
        not in line yet cannot be cancelled."""
        if not self._cancel_on_close or self._closed:
            return

        async def cancel() -> None:
            if submitted is not None:
                await asyncio.wait([submitted])
            with suppress(QueueUnavailableError, QueueAwayError):
                for handle in handles:
                    if not await self.cancel(handle) and submitted is not None:
                        self._mailbox.unexpect([handle])  # it never was in line

        task = asyncio.create_task(cancel(), name="batch client: cancel")
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
