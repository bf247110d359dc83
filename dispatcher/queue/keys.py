"""The names of a queue's keys: all derived from the queue's own, all in its cluster slot."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVE = "request-active:"
CANCEL = "request-cancel:"
MAX_LIST_NAME_BYTES = 1024

_DERIVED = (
    "returned",
    "suspects",
    "delayed",
    "delayed:order",
    "leases",
    "entries",
    "members",
    "dead",
    "dead:age",
    "control",
    "owners",
    "paused",
    "outbox",
    "beats",
)
"""In the order in which every script gets them, after the queue itself: lua/common.lua names them again."""


class QueueNameError(ValueError):
    """A queue's name cannot be one; the message says why."""


@dataclass(frozen=True)
class Names:
    """A queue and its default result list. Raises QueueNameError for a name with stray braces.

    A name with one `{…}` keeps that as its hash tag, and its keys are `<name>:<suffix>`. A name without
    braces is its own slot, which `{<name>}:<suffix>` shares.
    """

    queue: str
    results: str

    def __post_init__(self) -> None:
        if not self.queue:
            raise QueueNameError("queue.name: must not be empty")
        if not self.results:
            raise QueueNameError("queue.results: must not be empty")
        opens, closes = self.queue.count("{"), self.queue.count("}")
        if opens or closes:
            first, last = self.queue.find("{"), self.queue.find("}")
            if (opens, closes) != (1, 1) or last < first + 2:
                raise QueueNameError(
                    f"queue.name: {self.queue!r} has stray braces: none, or one {{…}} around a part of it"
                )
        if self.is_own(self.results) or self.results.startswith((ACTIVE, CANCEL)):
            raise QueueNameError(f"queue.results: {self.results!r} is one of the queue's own keys")

    @property
    def prefix(self) -> str:
        return self.queue if "{" in self.queue else f"{{{self.queue}}}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Every lasting key of the queue, as the scripts expect them."""
        return (self.queue, *(f"{self.prefix}:{suffix}" for suffix in _DERIVED))

    @property
    def paused(self) -> str:
        return f"{self.prefix}:paused"

    @property
    def waiting(self) -> tuple[str, ...]:
        """The sets that a claim takes from."""
        return self.queue, f"{self.prefix}:returned", f"{self.prefix}:suspects"

    @property
    def outbox(self) -> str:
        return f"{self.prefix}:outbox"

    @property
    def wake(self) -> str:
        """The channel on which producers wake the dispatchers."""
        return f"{self.prefix}:wake"

    def reply(self, call: str) -> str:
        """Where the reply to one call is kept for a while, so that its repetition gets the same."""
        return f"{self.prefix}:reply:{call}"

    def is_own(self, name: str) -> bool:
        """A key of the queue itself, or one that could become one."""
        return name in (self.queue, self.prefix) or name.startswith(f"{self.prefix}:")

    def takes_results(self, name: str) -> bool:
        """Whether a producer may have its result put there."""
        try:
            short = len(name.encode()) <= MAX_LIST_NAME_BYTES
        except UnicodeEncodeError:  # a lone surrogate: no consumer could name that list
            return False
        return short and not self.is_own(name) and not name.startswith((ACTIVE, CANCEL))
