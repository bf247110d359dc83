"""Ids, tokens and keys of one run of a batch file.

All of them are derived from the journal, so they are the same after a crash.
"""

from __future__ import annotations

from hashlib import blake2b

from dispatcher.features.batch_files.journal import RunFacts
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.cluster_slot import extract_hash_tag
from dispatcher.wire_format import PoppedResult


class JobNames:
    """Names of the requests of a run, and of its keys in Redis."""

    def __init__(self, facts: RunFacts, names: QueueNames) -> None:
        self._job, self._secret = facts.job, facts.secret
        self._begun_at_ns = int(facts.begun_at * 1e9)
        self._names = names

    @property
    def result_list(self) -> str:
        """Result list of the run. It is in the cluster slot of the queue, so that a result is in the list as
        soon as its request has ended."""
        return f"batch-results:{{{extract_hash_tag(self._names.queue)}}}:{self._job}"

    def request_id(self, n: int) -> str:
        return f"{self._job}-{n}"

    def request_token(self, n: int, position: int) -> str:
        """Return the token of a line. It begins with a number that grows with the position.

        A member begins with its token, and the queue takes the smallest member first if scores are equal. So
        lines are served in the order of their positions.
        """
        return f"{self._begun_at_ns + position:016x}{self._token_suffix(n, position)}"

    def reply_key(self, chunk: int) -> str:
        """Return the key under which the queue remembers that it accepted a chunk."""
        return self._names.reply_key(f"{self._job}-{chunk}")

    def parse_line_number(self, result: PoppedResult) -> int | None:
        """Return the line number of a result, or `None` if the result does not belong to this run."""
        job, _, number = result.id.rpartition("-")
        token = result.request_token or ""
        if job != self._job or not number.isdecimal() or len(number) > 15 or len(token) != 48:
            return None
        n = int(number)
        # Any program may push to the list. Only results with a token that this run made are accepted.
        try:
            position = int(token[:16], 16) - self._begun_at_ns
        except ValueError:
            return None
        return n if token == self.request_token(n, position) else None

    def _token_suffix(self, n: int, position: int) -> str:
        return blake2b(b"%d:%d" % (n, position), key=self._secret, digest_size=16).hexdigest()
