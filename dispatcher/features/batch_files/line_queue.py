"""Calls of a run to the queue: submit chunks, collect results, and find out which lines are in the queue."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dispatcher.client.outage import Outage
from dispatcher.features.batch_files.job_names import JobNames
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.connect import connect, describe_address
from dispatcher.queue.redis.producer import CollectReply, ResultBox
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import Submission
from dispatcher.wire_format import PoppedResult

T = TypeVar("T")

FIRST_CONTACT_S = 1.5
"""Seconds of retries if Redis was never reached. Short, because the URL is probably wrong, and because the
same command can continue the run later."""
WAIT_S = 5.0
"""Longest time of one blocking command. Longer waits use several commands."""
CHUNK_REPLY_TTL_S = 7 * 86_400
"""Seconds for which the queue remembers which chunks it has accepted."""
MAX_IDS_PER_CALL = 500


class LineQueue:
    """Connection of a run to the queue.

    All calls are retried while Redis is unreachable, and raise QueueUnreachableError for permanent errors.
    """

    def __init__(self, url: str, names: QueueNames, job_names: JobNames) -> None:
        self._job_names = job_names
        self._box = ResultBox(job_names.result_list)
        self._backend = Backend(connect(url, response_timeout_s=WAIT_S + 3.0), names)
        self._blocking_scripts = ScriptRunner(self._backend.scripts.client, attempt_timeout_s=WAIT_S + 3.0)
        self._outage = Outage(None, describe_address(url), first_contact_s=FIRST_CONTACT_S)
        self._finished_replies: list[str] = []
        self.ignored_count = 0
        """Number of elements in the result list that do not belong to this run."""

    @property
    def connection_error(self) -> str:
        """Error of the last call, or empty if it succeeded."""
        return str(self._outage.current_error or "")

    async def submit_chunk(self, chunk: int, submissions: Sequence[Submission]) -> None:
        """Submit a chunk. Further calls for the same chunk submit nothing."""
        reply = self._job_names.reply_key(chunk)
        # Delete the reply key of the previous chunk: the journal has recorded that it was accepted.
        finished_replies = self._finished_replies

        async def send_chunk() -> None:
            await producer.submit(
                self._backend,
                submissions,
                reply_key=reply,
                reply_ttl_s=CHUNK_REPLY_TTL_S,
                obsolete_replies=finished_replies,
            )

        await self._call(send_chunk)
        self._finished_replies = [reply]

    async def has_chunk(self, chunk: int) -> bool:
        """Return whether the queue remembers that it accepted this chunk."""
        scripts, reply = self._backend.scripts, self._job_names.reply_key(chunk)
        return bool(await self._call(lambda: scripts.call_with_retries(lambda: scripts.client.exists(reply))))

    async def find_inactive(self, numbers: Sequence[int]) -> set[int]:
        """Return the lines whose requests are neither waiting nor in flight. Takes up to MAX_IDS_PER_CALL."""
        scripts, names = self._backend.scripts, self._backend.names

        async def check_markers() -> list[int]:
            pipe = scripts.client.pipeline(transaction=False)
            for n in numbers:
                pipe.exists(names.active_key(self._job_names.request_id(n)))
            flags: list[int] = await pipe.execute()
            return flags

        active_flags = await self._call(lambda: scripts.call_with_retries(check_markers))
        return {n for n, is_there in zip(numbers, active_flags, strict=True) if not is_there}

    async def collect_results(self, last_number: int, given_back: Sequence[int]) -> CollectReply:
        """Return the results after `last_number`, and delete the results that are given back."""
        scripts = self._backend.scripts
        return await self._call(
            lambda: producer.collect_results(
                scripts,
                self._box,
                client_id="",
                owner_ttl_s=1,
                last_seen=last_number,
                acknowledged=given_back,
            )
        )

    async def wait_for_results(self) -> None:
        """Wait until there is something in the result list, but no longer than WAIT_S."""
        await self._call(lambda: producer.wait_for_result(self._blocking_scripts, self._box, WAIT_S))

    def parse_result(self, raw: bytes) -> tuple[int, PoppedResult] | None:
        """Decode a result. Return its line number and the result, or `None` if it is not of this run."""
        try:
            result = decode_result(raw)
        except ValueError:
            result = None
        n = None if result is None else self._job_names.parse_line_number(result)
        if n is None or result is None:
            self.ignored_count += 1
            return None
        return n, result

    async def discard_results(self) -> None:
        """Delete the result list, its keep and the reply keys, after the last result."""
        scripts = self._backend.scripts

        async def delete_keys() -> None:
            await producer.delete_box(scripts, self._box)
            for reply in self._finished_replies:
                await scripts.call_with_retries(lambda: scripts.client.delete(reply))  # noqa: B023 - called at once

        await self._call(delete_keys)

    async def cancel_lines(self, numbers: Sequence[int], give_up_at: float) -> None:
        """Cancel the requests of these lines, until the time `give_up_at` (monotonic clock)."""
        for n in numbers:
            if time.monotonic() > give_up_at:
                return
            await producer.cancel_request(self._backend, self._job_names.request_id(n), "", "")

    async def aclose(self) -> None:
        await self._backend.aclose()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, retried while Redis is unreachable."""
        return await self._outage.retry_while_unreachable(call, math.inf)
