"""`BatchClient`: submit requests to a pool's queue, and wait for their results."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from dispatcher.client.blocking import BlockingBatchClient
from dispatcher.client.errors import NoResultError, QueueUnreachableError
from dispatcher.client.item import Body, Deadline, Handle, Item, TokenGenerator, build_submission, to_item
from dispatcher.client.mailbox import WAIT_S, Mailbox, check_name, make_owner_id
from dispatcher.client.outage import Outage
from dispatcher.client.result import HookError, Result, call_hook, result_from_error
from dispatcher.client.stream import Items, stream_results
from dispatcher.client.submitter import MAX_SUBMISSIONS_PER_CALL, Submitter
from dispatcher.common.errors import TooManyPendingError
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.connect import connect, describe_address
from dispatcher.queue.redis.producer import ResultBox
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.requests.submission import QueueUnavailableError, Submission

if TYPE_CHECKING:
    from dispatcher.features.batch_files.progress import FileProgress
    from dispatcher.features.named_streams.state import StreamStatus
    from dispatcher.features.named_streams.stream import NamedStreams
    from dispatcher.features.sequences.client import CarryOption, OnErrorOption, OpenSequence, SequenceClient
    from dispatcher.features.sequences.turns import SequenceSnapshot, Turn

T = TypeVar("T")
BeforeHook = Callable[[Item], "Item | Awaitable[Item | None] | None"]
AfterHook = Callable[[Item, Result], "Awaitable[None] | None"]

MAX_PARALLEL_CALLS = 2
"""Largest number of parallel calls to Redis beside those of the submitter and the reader. So a client has at
most four connections, and one more for each named stream."""
CLOSE_TIMEOUT_S = 5.0
"""Longest time for which closing a client waits for the cancellation of pending requests."""
UNKNOWN_REQUEST_S = 2.0
"""Seconds after which a request that is neither in the queue nor has a kept result is unknown. In a Redis
Cluster, a result needs a moment to reach a list in another slot."""
_EMPTY_MAP: Mapping[str, str] = {}


class BatchClient:
    """Client of a pool's queue.

        async with BatchClient("redis://localhost:6379", pool="qwen") as client:
            result = await client.submit({"model": "m", "prompt": "hi"}, deadline="10m")

    - `url`: URL of Redis, as in the dispatcher's setting `queue.url`.
    - `pool`: name of the pool. Its queue is `batch:{pool}:requests`. `queue` and `results` name another queue
      and its default result list.
    - `name`: name of the client. A client without a name has its own result list, which is deleted when the
      client closes. Pending requests are cancelled then, unless `cancel_on_close` is false. With a name, the
      results stay in Redis for `queue.result_ttl_s`, and the next client with that name can fetch them, by
      handle or by id. One process at a time can read results under a name. Others get NameInUseError.
    - `max_pending`: largest number of unanswered requests. A further request waits, or raises
      TooManyPendingError if `when_full` is `"raise"`.
    - `before` and `after`: hooks, which are functions or coroutine functions. `before(item)` is called before
      an item is submitted, and may return another Item to submit instead. `after(item, result)` is called
      when the result is returned. An exception in a hook fails only that item.
    - `retry_for`: seconds for which a call is retried while Redis is unreachable. With `None`, calls are
      retried until the deadline of the request or the timeout of the call, or for ten seconds if Redis was
      never reached. A retried call does nothing twice.

    A client belongs to one event loop. Use `BatchClient.sync(…)` in programs without an event loop.
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
        before: BeforeHook | None = None,
        after: AfterHook | None = None,
        retry_for: float | None = None,
        cancel_on_close: bool = True,
    ) -> None:
        if name:
            check_name(name)
        if max_pending < 1:
            raise ValueError(f"max_pending {max_pending}: must be at least 1")
        queue = queue or f"batch:{{{pool}}}:requests"
        names = QueueNames(queue, results or f"{queue.removesuffix(':requests')}:results")
        self.name = name
        self._url = url
        self._names = names
        self._is_closed = False
        self._max_pending, self._when_full = max_pending, when_full
        self._before, self._after = before, after
        self._cancel_on_close = cancel_on_close and not name  # the next client of the name may fetch results
        redis = connect(
            url, response_timeout_s=WAIT_S + 3.0
        )  # blocking commands wait up to WAIT_S for an answer
        self._backend = Backend(redis, names)
        self._outage = Outage(retry_for, describe_address(url))
        self._submitter = Submitter(self._backend, self._outage)
        self._redis = redis
        box = ResultBox(f"batch-results:{{{name or secrets.token_hex(8)}}}")
        self._mailbox = self._make_mailbox(box, make_owner_id() if name else "")
        self._tokens = TokenGenerator()
        self._call_slots = asyncio.Semaphore(MAX_PARALLEL_CALLS)
        self._streams: NamedStreams | None = None
        self._sequences: SequenceClient | None = None
        self._cancel_tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<BatchClient {self._names.queue} {self._mailbox!r}>"

    @property
    def box(self) -> ResultBox:
        """Redis keys under which the results of this client arrive."""
        return self._mailbox.box

    @property
    def is_reading(self) -> bool:
        """True if this client reads its result list now."""
        return self._mailbox.is_reading

    @property
    def pending(self) -> int:
        """Number of requests of this client that are submitted, or about to be, and have no result yet."""
        return len(self._mailbox.pending_requests)

    @property
    def connection_error(self) -> str | None:
        """Error of the last call to the queue, or `None` if that call succeeded."""
        return None if self._outage.current_error is None else str(self._outage.current_error)

    @property
    def ignored_count(self) -> int:
        """Number of elements in the result list that were not a result of a request of this client."""
        return self._mailbox.ignored_count

    @staticmethod
    def sync(url: str, **options: Any) -> BlockingBatchClient:
        """Return a client with the same methods, which block. It may be shared by several threads.

        The options are those of `BatchClient`.
        """
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
        slicing: bool = True,
    ) -> Handle:
        """Submit one request, and return its handle when it is in the queue. The arguments are those of
        `Item`.

        Raises ValueError or TypeError if no dispatcher would accept the request, HookError if `before`
        raised, TooManyPendingError, and QueueUnreachableError.
        """
        mappings = (headers or _EMPTY_MAP, metadata or _EMPTY_MAP, labels or _EMPTY_MAP)
        item = Item(body, path, id, deadline, priority, *mappings, results, sequence, slicing)
        handle, submission = await self._build_request(item)
        await self._submit_requests([(handle, submission)])
        return handle

    async def enqueue_many(self, items: Sequence[Item | Body]) -> list[Handle]:
        """Submit many requests in this order, and return their handles. One call to Redis submits up to a
        thousand requests.

        Raises the exceptions of `enqueue`. If an item is invalid, nothing is submitted. An item whose hook
        `before` raised is not submitted, and its handle has a result with the code HOOK_FAILED.
        """
        made = []
        for number, item in enumerate(items):
            try:
                made.append(await self._build_or_fail(to_item(item), HookError))
            except (ValueError, TypeError) as error:
                raise type(error)(f"item {number}: {error}") from error
        await self._submit_requests(
            [(handle, submission) for handle, submission in made if submission is not None]
        )
        return [handle for handle, _ in made]

    async def result(self, handle: Handle | str, *, timeout: float | None = None) -> Result:
        """Wait for the result of a request, and return it. Further calls return the same result.

        `handle` is a return value of `enqueue`, or a `Handle` that is rebuilt from its id, token, deadline
        and result list. For a client with a name it may also be the id of a request. Without a `timeout`, the
        call waits until some seconds after the deadline. By then the dispatcher, if one runs, has answered.

        A failed request also returns a result. Its `raise_for_status` raises an exception. The call itself
        raises NoResultError, QueueUnreachableError, NameInUseError, and HookError.
        """
        if isinstance(handle, str):
            result = await self._wait_for_id(handle, timeout)
        else:
            result = await self._wait_for_result(handle, timeout)
        self._mailbox.give_back(result)
        return result

    async def submit(self, body: Body, *, timeout: float | None = None, **options: Any) -> Result:
        """Submit one request, and wait for its result. The arguments are those of `enqueue` and `result`.

        A failed request also returns a result. Its `raise_for_status` raises an exception. If the task is
        cancelled, a client without a name cancels the request, because no other client can fetch its result.
        """
        handle = await self.enqueue(body, **options)
        try:
            return await self.result(handle, timeout=timeout)
        except asyncio.CancelledError:
            self._cancel_abandoned([handle])
            raise

    def stream(
        self,
        items: Items,
        *,
        max_pending: int = 1000,
        ordered: bool = False,
        name: str = "",
    ) -> AsyncGenerator[Result, None]:
        """Submit items, and yield their results as they arrive, or in the order of the items if `ordered`.

        At most `max_pending` requests are unanswered at a time. Each item has exactly one result. A failure
        of a single item is a result with the code INVALID_REQUEST, HOOK_FAILED or NO_RESULT. Raises
        QueueUnreachableError and NameInUseError.

        With a `name`, the stream continues where it stopped when it is run again under the same name, also
        after a crash. Each item needs an `id`, so that later runs recognise it. Results of items that
        earlier runs submitted come first, and consumed items are skipped. A result counts as consumed when
        the next result is requested. So after a crash, only the result that the program worked on is yielded
        a second time. One process at a time can run a stream with a given name. A client with the hook
        `after` cannot run named streams.
        """
        pending_limit = min(max_pending, self._max_pending)
        if name:
            if self._after is not None:  # results of earlier runs have no Item to call the hook with
                raise ValueError("a named stream cannot run in a client with the hook after")
            return self._load_streams().run_stream(name, items, max_pending=pending_limit, ordered=ordered)

        async def give_back(result: Result) -> None:
            self._mailbox.give_back(result)

        return self._stream_items(items, pending_limit, ordered, give_back)

    async def stream_status(
        self, name: str, *, consumed: bool = False, after: str = "", limit: int = 1000
    ) -> StreamStatus:
        """Return the status of the stream with this name: counts, and a page of its requests.

        The page holds about `limit` unconsumed requests, or consumed ones if `consumed` is true. `after` is
        the cursor of the previous page.
        """
        return await self._load_streams().get_status(name, after, limit, consumed=consumed)

    async def forget_stream(self, name: str) -> None:
        """Cancel the pending requests of the stream with this name, and delete its results and records, so
        that it can begin anew. Raises NameInUseError while a program runs the stream."""
        await self._load_streams().forget_stream(name)

    async def map(self, items: Items) -> list[Result]:
        """Submit items, and return all results in the order of the items. Failures of single items are
        results, as with `stream`."""

        async def keep_result(result: Result) -> None:
            """Do nothing. Results are given back once all of them have arrived."""

        stream = self._stream_items(items, self._max_pending, True, keep_result)
        results = [result async for result in stream]
        for result in results:
            self._mailbox.give_back(result)
        return results

    async def cancel(self, handle: Handle | str) -> bool:
        """Cancel a request. Return False if it has already ended.

        The result of a cancelled request has the code CANCELLED.
        """
        request_id, token = (handle, "") if isinstance(handle, str) else (handle.id, handle.token)

        async def cancel_request() -> bool:
            return bool(await producer.cancel_request(self._backend, request_id, token, ""))

        return await self._call_queue(cancel_request)

    def sequence(
        self,
        sequence_id: str | None = None,
        *,
        on_error: OnErrorOption | None = None,
        reset: bool = False,
        index: int | None = None,
        carry: CarryOption | None = None,
        max_pending: int = 1000,
    ) -> OpenSequence:
        """Open a sequence, to send requests that run in order, one at a time.

        - `sequence_id`: id of the sequence. Without an id, it is a new sequence with a random id.
        - `on_error`: what happens to later requests after one without an answer: `continue`, `abort` or
          `hold`.
        - `carry`: `messages` to send each body with the conversation so far before it, or `off`.
        - `reset`: begin the sequence anew, after all requests that it has.
        - `index`: index of the first request. Without `reset` and `index`, the first request continues after
          all requests that the queue knows.
        - `max_pending`: largest number of requests that `OpenSequence.enqueue` submits ahead of an iteration
          over the results.

        With `None`, `on_error` and `carry` are those of the dispatcher's settings (`sequences`).
        """
        from dispatcher.features.sequences.client import OpenSequence

        return OpenSequence(self._load_sequences(), sequence_id, on_error, reset, index, carry, max_pending)

    async def map_sequences(
        self,
        sequences: Mapping[str, Iterable[Item | Body]],
        *,
        on_error: OnErrorOption | None = None,
        reset: bool = True,
        carry: CarryOption | None = None,
        at_once: int = 500,
    ) -> dict[str, list[Result]]:
        """Run many sequences, and return the results of each in order, by id.

        Each sequence begins anew, unless `reset` is false, and ends with its last request. At most `at_once`
        sequences are in progress at a time. The requests of each are sent as with `OpenSequence.send_many`.
        """
        from dispatcher.features.sequences.client import run_sequences

        return await run_sequences(
            lambda each: self.sequence(each, on_error=on_error, reset=reset, carry=carry), sequences, at_once
        )

    async def sequence_status(self, sequence_id: str) -> SequenceSnapshot | None:
        """Return the state of a sequence in the queue, or `None` if the queue does not know it.

        The queue knows only the requests that dispatchers have claimed at least once.
        """
        return await self._load_sequences().get_status(sequence_id)

    async def cancel_sequence(self, sequence_id: str) -> bool:
        """Cancel all requests of a sequence that were submitted until now.

        The requests may come from this client or from another one. The sequence ends, and requests that are
        submitted later begin it anew. Return False if, as far as dispatchers know, the sequence has ended or
        does not exist. Requests that no dispatcher has claimed yet are cancelled nevertheless.
        """
        return await self._load_sequences().cancel_sequence(sequence_id)

    async def forget_sequence(self, sequence_id: str) -> bool:
        """Forget a sequence that was aborted or has ended, so that its id begins anew.

        Return False if requests of the sequence still run or wait. Call `cancel_sequence` first then. Return
        True also if the sequence was not known.
        """
        return await self._load_sequences().forget_sequence(sequence_id)

    async def run_file(
        self,
        source: str | Path | BinaryIO,
        output: str | Path | BinaryIO,
        errors: str | Path | None = None,
        *,
        on_progress: Callable[[FileProgress], None] = lambda _: None,
        **options: Any,
    ) -> FileProgress:
        """Run a batch file in the format of OpenAI's batch API: submit each line, and write the answers.

        After an interruption, call it again with the same arguments, and it continues where it stopped. Its
        options are described at `FileOptions`. `on_progress` is called once a second.

        Raises InputError (BadInputError for bad lines), TemplateError, JournalError, SinkError and
        QueueUnreachableError.
        """
        # Imported here, because most programs run no files and should start fast.
        from dispatcher.features.batch_files.run import run_file
        from dispatcher.features.batch_files.run_options import FileOptions, FilePaths

        input_source, output_target = (
            Path(each) if isinstance(each, str) else each for each in (source, output)
        )
        paths = FilePaths(input_source, output_target, None if errors is None else Path(errors))
        return await run_file(self._url, self._names, paths, FileOptions(**options), on_progress=on_progress)

    async def aclose(self) -> None:
        """Close the client and its connections. Calls that still wait raise QueueUnreachableError."""
        if self._is_closed:
            return
        self._is_closed = True
        # Close first what submits, so that no further request becomes pending.
        if self._streams is not None:
            await self._streams.aclose()
        await self._submitter.aclose()
        for task in self._cancel_tasks:
            task.cancel()
        if self._cancel_on_close:
            # Best effort: without Redis nothing can be cancelled, and closing must not wait for it.
            with suppress(TimeoutError, QueueUnavailableError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._mailbox.collect_remaining()
                    for request_id, token in self._mailbox.pending_requests:
                        await producer.cancel_request(self._backend, request_id, token, "")
        await self._mailbox.aclose()
        await self._backend.aclose()

    async def _build_request(self, item: Item) -> tuple[Handle, Submission]:
        """Call the hook `before`, and build the request. Raises HookError, ValueError, TypeError."""
        if self._is_closed:
            raise QueueUnreachableError("the client was closed")
        if self._before is not None:
            try:
                item = await call_hook(self._before, item) or item
            except Exception as error:
                raise HookError(f"before: {type(error).__name__}: {error}") from error
        results = self.box.result_list if item.results is None else item.results
        if (
            results
            and (why := self._names.find_list_problem(results)) is not None
            and item.results is not None
        ):
            raise ValueError(f"results: {results} {why}")
        sent = item if item.sequence is None else await self._load_sequences().add_secret(item)
        submission = build_submission(
            sent, self._tokens.make_token(), queue=self._names.queue, results=results
        )
        handle = Handle(submission.request_id, submission.request_token, submission.deadline, results)
        if self._after is not None:
            handle.item = item
        return handle, submission

    async def _build_or_fail(
        self, item: Item, failure_types: type[Exception] | tuple[type[Exception], ...]
    ) -> tuple[Handle, Submission | None]:
        """Build the request of an item. If that raises one of `failure_types`, return a handle whose result
        holds the error."""
        try:
            return await self._build_request(item)
        except QueueUnreachableError:
            raise
        except failure_types as error:
            handle = Handle(item.id, "", 0, self.box.result_list)
            handle.received_result = result_from_error(item.id, error)
            return handle, None

    async def _submit_requests(self, requests: Sequence[tuple[Handle, Submission]]) -> None:
        """Submit requests in steps, so that the limit of pending requests is kept."""
        at, expected = 0, sum(handle.results == self.box.result_list for handle, _ in requests)
        if self._when_full == "raise" and self._mailbox.is_full(expected, self._max_pending):
            raise TooManyPendingError(f"{self._max_pending} requests are unanswered (max_pending)")
        while at < len(requests):
            some = requests[at : at + min(MAX_SUBMISSIONS_PER_CALL, self._max_pending)]
            at += len(some)
            own = [handle for handle, _ in some if handle.results == self.box.result_list]
            while self._mailbox.is_full(len(own), self._max_pending):
                await self._mailbox.wait_for_change(1.0)
            self._mailbox.expect_results(own)  # before the call: a result may arrive before its reply
            group = self._submitter.start_submission(
                [submission for _, submission in some], max(each.deadline for _, each in some)
            )
            try:
                await asyncio.shield(group.done)  # the submitter resolves it, even if this task is cancelled
            except QueueUnreachableError:
                self._mailbox.forget_expected(own)
                raise
            except asyncio.CancelledError:
                if self._submitter.give_up_group(group):
                    # Some requests may be in the queue, or get there by the call in progress.
                    self._cancel_abandoned(own, group.done)
                else:
                    self._mailbox.forget_expected(own)
                raise

    async def _wait_for_result(self, handle: Handle, timeout: float | None) -> Result:
        if handle.received_result is None and handle.results != self.box.result_list:
            raise ValueError(
                f"{handle.id}: its result goes to {handle.results or self._names.result_list}, "
                "not to this client"
            )
        result = handle.received_result or await self._mailbox.wait_for_result(handle, timeout)
        item, handle.item = handle.item, None  # the hook runs once, even if the result is requested again
        if self._after is not None and item is not None:
            try:
                await call_hook(self._after, item, result)
            except Exception as error:
                hook_error = HookError(f"{handle.id}: after: {type(error).__name__}: {error}")
                hook_error.result = result
                raise hook_error from error
        return result

    async def _wait_for_id(self, request_id: str, timeout: float | None) -> Result:
        if not self.name:
            raise ValueError("a client without a name finds its results by their handles alone")
        give_up_at = float("inf") if timeout is None else time.monotonic() + timeout
        unknown_since: float | None = None
        while True:
            result = await self._call_queue(lambda: self._mailbox.find_kept_result(request_id), give_up_at)
            now = time.monotonic()
            if result is not None:
                return result
            if now >= give_up_at:
                raise NoResultError(f"no result for {request_id} within {timeout:.1f} s")
            # Without a timeout, stop waiting for an id that neither the queue nor the keep knows.
            if timeout is None and self._mailbox.is_caught_up:
                is_active = await self._call_queue(
                    lambda: producer.is_request_active(self._backend, request_id), give_up_at
                )
                unknown_since = None if is_active else unknown_since or now
                if unknown_since is not None and now - unknown_since > UNKNOWN_REQUEST_S:
                    raise NoResultError(
                        f"{request_id} is not in line, and no result of it is kept for {self.name}"
                    )
            await self._mailbox.wait_for_change(max(0.0, min(1.0, give_up_at - now)))

    async def _call_queue(self, call: Callable[[], Awaitable[T]], give_up_at: float = float("inf")) -> T:
        """Make a call to the queue, retried while Redis is unreachable."""
        async with self._call_slots:
            return await self._outage.retry_while_unreachable(call, give_up_at)

    def _load_sequences(self) -> SequenceClient:
        if self._sequences is None:
            # Imported here, because most programs have no sequences.
            from dispatcher.features.sequences.client import SequenceClient
            from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

            self._sequences = SequenceClient(
                RedisQueueAdmin(self._redis, self._names),
                self._mailbox,
                self._tokens,
                self._call_queue,
                self.enqueue,
                self._wait_for_result,
                self.cancel,
            )
        return self._sequences

    def _load_streams(self) -> NamedStreams:
        if self._streams is None:
            # Imported here, because most programs have no named streams.
            from dispatcher.features.named_streams.stream import NamedStreams

            self._streams = NamedStreams(
                self._backend, self._make_mailbox, self._call_queue, self._build_request
            )
        return self._streams

    def _make_mailbox(self, box: ResultBox, owner_id: str) -> Mailbox:
        if self._is_closed:
            raise QueueUnreachableError("the client was closed")
        blocking_scripts = ScriptRunner(self._redis, attempt_timeout_s=WAIT_S + 3.0)
        return Mailbox(
            self._backend.scripts, blocking_scripts, box, self._outage, self._backend.names, owner_id=owner_id
        )

    def _stream_items(
        self, items: Items, max_pending: int, ordered: bool, on_consumed: Callable[[Result], Awaitable[None]]
    ) -> AsyncGenerator[Result, None]:
        async def enqueue_items(some: Sequence[Item | Body]) -> Sequence[Handle]:
            made = [
                await self._build_or_fail(to_item(item), (HookError, ValueError, TypeError)) for item in some
            ]
            await self._submit_requests(
                [(handle, submission) for handle, submission in made if submission is not None]
            )
            return [handle for handle, _ in made]

        async def wait_for_result(handle: Handle) -> Result:
            try:
                return await self._wait_for_result(handle, None)
            except (HookError, NoResultError) as error:
                return result_from_error(handle.id, error)

        return stream_results(
            items, enqueue_items, wait_for_result, on_consumed, max_pending=max_pending, ordered=ordered
        )

    def _cancel_abandoned(
        self, handles: Iterable[Handle], submitted: asyncio.Future[None] | None = None
    ) -> None:
        """Cancel requests whose callers no longer wait, unless another client could fetch their results.

        The cancellation waits for `submitted`, because a request that is not in the queue yet cannot be
        cancelled.
        """
        if not self._cancel_on_close or self._is_closed:
            return

        async def cancel_handles() -> None:
            if submitted is not None:
                await asyncio.wait([submitted])
            with suppress(QueueUnavailableError, QueueUnreachableError):
                for handle in handles:
                    if not await self.cancel(handle) and submitted is not None:
                        self._mailbox.forget_expected([handle])  # the request never reached the queue

        task = asyncio.create_task(cancel_handles(), name="batch client: cancel")
        self._cancel_tasks.add(task)
        task.add_done_callback(self._cancel_tasks.discard)
