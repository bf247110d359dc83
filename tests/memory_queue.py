"""Queue in memory as producers and operators use it, for tests of dispatchers in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.lab import memory_queue
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import Submission


class MemoryStore(memory_queue.MemoryStore):
    """The queue of the simulator with those calls of producers and operators that the tests need.

    While `outage_message` is set, every call of every owner raises QueueUnavailableError with it.
    """

    @property
    def outage_message(self) -> str | None:
        return self.pool.outage_message

    @outage_message.setter
    def outage_message(self, why: str | None) -> None:
        self.pool.outage_message = why

    def pop_result(self, name: str = "") -> bytes | None:
        """Take a result like RPOP of a consumer. Without a name, from the default list."""
        results = self.result_lists.get(name or self.default_result_list)
        return results.pop() if results else None

    def list_results(self) -> list[bytes]:
        """Return the results of the default list, oldest first."""
        return list(reversed(self.result_lists.get(self.default_result_list, ())))

    async def submit(self, submissions: Sequence[Submission]) -> int:
        self.pool.check_available()
        now, new = self.pool.unix_now(), 0
        for each in submissions:
            if each.request_id and each.request_token and each.deadline:
                tokens = self.queue.active_tokens.setdefault(each.request_id, {})
                tokens[each.request_token] = max(each.deadline, now + 1)
            new += self.queue.add_member(each.member, each.score)
        self.pool.wake_dispatchers()
        return new

    async def cancel_request(
        self, request_id: str, request_token: str = "", *, is_token_known: bool = False
    ) -> bool:
        self.pool.check_available()
        now = self.pool.unix_now()
        tokens = dict(self.queue.active_tokens.get(request_id, {}))
        if is_token_known:  # the caller has seen the request, so it can be cancelled without an active marker
            tokens.setdefault(request_token, now + CANCEL_TTL_S)
        asked = {
            f"{request_id}:{token}": (token, until)
            for token, until in tokens.items()
            if request_token in ("", token) and until > now
        }
        self.queue.cancel_markers |= asked
        if asked:
            self.pool.wake_dispatchers()
        return bool(asked)

    async def pause(self, who: str, why: str) -> None:
        self.pool.check_available()
        self.pool.pause = (who, why)
        self.pool.wake_dispatchers()

    async def resume(self) -> None:
        self.pool.check_available()
        self.pool.pause = None
        self.pool.wake_dispatchers()

    async def count_requests(self) -> QueueCounts:
        self.pool.check_available()
        return self.queue.count_requests()
