"""Run blocking calls that may never return, without delaying the event loop or the end of the process.

The threads of an executor are joined when the process ends, so that one hanging call would delay the
shutdown. Each call therefore runs in a daemon thread, which the process can leave behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StillRunningError(Exception):
    """The previous call has not returned. `running_s` is the time since it was started."""

    def __init__(self, running_s: float) -> None:
        super().__init__(f"the previous call has been hanging for {running_s:.0f} s")
        self.running_s = running_s


class BlockingCalls:
    """One blocking call at a time, each in its own daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started_at: float | None = None

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run the call and return its result, or raise its exception.

        Raises TimeoutError if the call takes longer than `timeout_s`. Its thread goes on, and until the call
        returns, every further run raises StillRunningError, so that a hanging server is not asked twice.
        """
        loop = asyncio.get_running_loop()
        if self._started_at is not None:
            raise StillRunningError(loop.time() - self._started_at)
        self._started_at = loop.time()
        outcome: asyncio.Future[T] = loop.create_future()

        def deliver_result(result: T | None, error: BaseException | None) -> None:
            self._started_at = None
            if outcome.done():
                return  # the caller timed out or was cancelled
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

        def run_in_thread() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = call()
            except BaseException as error:
                failure = error
            # RuntimeError: the loop was closed while the call was running, so there is no caller any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver_result, result, failure)

        threading.Thread(target=run_in_thread, name=self._name, daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await outcome
