"""Ids, tokens and lists of one job, all made of what its journal holds: after a crash they are the same."""

from __future__ import annotations

from hashlib import blake2b

from dispatcher.client.files.journal import Facts
from dispatcher.core.requests.cluster_slot import tag_of
from dispatcher.core.requests.result import PoppedResult
from dispatcher.queue.keys import Names


class Naming:
    """What the requests of a job are called."""

    def __init__(self, facts: Facts, names: Names) -> None:
        self._job, self._secret = facts.job, facts.secret
        self._since_ns = int(facts.begun_at * 1e9)
        self._names = names

    @property
    def results(self) -> str:
        """Their list; in the queue's own slot, so that a result is there when its request has ended."""
        return f"batch-results:{{{tag_of(self._names.queue)}}}:{self._job}"

    def request_id(self, n: int) -> str:
        return f"{self._job}-{n}"

    def token(self, n: int, position: int) -> str:
        """Begins with what grows by position: of equal scores the queue takes the smallest member first."""
        return f"{self._since_ns + position:016x}{self._proof(n, position)}"

    def reply(self, chunk: int) -> str:
        """Where the queue remembers that it took a chunk."""
        return self._names.reply(f"{self._job}-{chunk}")

    def line_of(self, result: PoppedResult) -> int | None:
        """The number of the line that a result is of; None: of none of this job's."""
        job, _, number = result.id.rpartition("-")
        token = result.request_token or ""
        if job != self._job or not number.isdecimal() or len(number) > 15 or len(token) != 48:
            return None
        n = int(number)
        try:
            position = int(token[:16], 16) - self._since_ns
        except ValueError:
            return None
        return n if token == self.token(n, position) else None

    def _proof(self, n: int, position: int) -> str:
        return blake2b(b"%d:%d" % (n, position), key=self._secret, digest_size=16).hexdigest()
