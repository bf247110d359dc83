"""Open sequences of the blocking client."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from dispatcher.client.blocking_iteration import iterate_blocking
from dispatcher.client.item import Body, Handle, Item
from dispatcher.client.result import Result
from dispatcher.features.sequences.client import OpenSequence


class BlockingSequence:
    """Blocking form of `OpenSequence`, made by `client.sequence(…)` of a blocking client.

    A `for` over the sequence yields the results of the requests that `enqueue` submits.
    """

    def __init__(self, sequence: OpenSequence, run_call: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._sequence, self._run_call = sequence, run_call

    def __repr__(self) -> str:
        return f"<BlockingSequence of {self._sequence!r}>"

    def __enter__(self) -> BlockingSequence:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._run_call(self._sequence.__aexit__(*raised))

    def __iter__(self) -> Iterator[Result]:
        return iterate_blocking(self._sequence.__aiter__(), self._run_call)

    @property
    def id(self) -> str:
        """Id of the sequence."""
        return self._sequence.id

    @property
    def next_index(self) -> int | None:
        """Index of the next request, or `None` until the first request asks the queue for it."""
        return self._sequence.next_index

    def enqueue(self, body: Body, **options: Any) -> Handle:
        """Submit the next request, and return its handle when it is in the queue."""
        handle: Handle = self._run_call(self._sequence.enqueue(body, **options))
        return handle

    def send(self, body: Body, **options: Any) -> Result:
        """Submit the next request, and wait for its result."""
        result: Result = self._run_call(self._sequence.send(body, **options))
        return result

    def send_many(self, items: Iterable[Item | Body], *, last: bool = False) -> list[Result]:
        """Submit many requests, and return their results in the same order."""
        results: list[Result] = self._run_call(self._sequence.send_many(items, last=last))
        return results

    def cancel(self) -> bool:
        """Cancel all unanswered requests, and end the sequence. Return False if it has already ended."""
        done: bool = self._run_call(self._sequence.cancel())
        return done
