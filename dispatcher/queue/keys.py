"""The names of the keys of a line and of its pool: derived from names of queues, in one cluster slot."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from dispatcher.core.patterns import any_fits
from dispatcher.core.requests.cluster_slot import fault_of_braces, tag_of
from dispatcher.core.requests.lanes import CLOSED, Lane
from dispatcher.core.requests.result_lists import OURS, usual
from dispatcher.core.sequences.turns import Turn, owner_of

ACTIVE = "request-active:"
CANCEL = "request-cancel:"
"""Markers of llm-d's producers, by id and for all queues. Ours are `Names.active` and `Names.cancel`."""
MAX_TOKEN_BYTES = 1024
"""A longer one names no key: its request is cancelled by llm-d's marker alone."""
MAX_LIST_NAME_BYTES = 1024

LINE_KEYS = {
    "PENDING": ("", "zset"),
    "RETURNED": ("returned", "zset"),
    "SUSPECTS": ("suspects", "zset"),
    "DELAYED": ("delayed", "zset"),
    "DELAYED_ORDER": ("delayed:order", "zset"),
    "ENTRIES": ("entries", "hash"),
    "MEMBERS": ("members", "hash"),
    "DEAD": ("dead", "zset"),
    "DEAD_AGE": ("dead:age", "zset"),
    "OUTBOX": ("outbox", "zset"),
}
POOL_KEYS = {
    "LEASES": ("leases", "zset"),
    "CONTROL": ("control", "hash"),
    "OWNERS": ("owners", "hash"),
    "BEATS": ("beats", "zset"),
    "PAUSED": ("paused", "string"),
}
SEQUENCE_KEYS = {
    "SEQUENCED": ("sequenced", "zset"),
    "SEQUENCES": ("sequences", "hash"),
    "CARRIED": ("sequences:carried", "hash"),
    "TURNS": ("sequences:turns", "zset"),
    "PARKED": ("sequences:parked", "zset"),
    "OVER": ("sequences:over", "zset"),
    "LOOKS": ("sequences:looks", "zset"),
}
MODEL_KEYS = {
    "ABSENT": ("absent", "zset"),
    "ABSENT_ORDER": ("absent:order", "zset"),
    "ABSENT_COUNTS": ("absent:counts", "zset"),
}
"""What the scripts call each lasting key; its suffix (none: the queue itself), and its type. A line has its
own of all but the second, which it shares with all lines of its pool. Those of sequences, and those of what
waits for its model, come last: scripts look at their types only where there is such a request."""
BOARD_KEYS = {
    "WARM": ("models:warm", "zset"),
    "WARMING": ("models:warming", "zset"),
    "USED": ("models:used", "zset"),
    "LABELS": ("models:labels", "zset"),
    "DRAINS": ("models:drains", "zset"),
    "PINS": ("models:pins", "hash"),
    "PINS_ASKED": ("models:pins:asked", "zset"),
}
"""Of the pool, too: what its owners and operators say of versions of models. Apart from all others, and given
to the steps that are about them alone."""
KEYS = {**LINE_KEYS, **POOL_KEYS, **SEQUENCE_KEYS, **MODEL_KEYS}
"""In the order in which every other script gets them."""
SHARED_BY_CLIENTS = "sequences:secret"
_SUFFIXES = (*(suffix for suffix, _ in (*KEYS.values(), *BOARD_KEYS.values()) if suffix), SHARED_BY_CLIENTS)
_OF_A_CLIENT = re.compile(r"batch-results:(?:\{[0-9a-f]{16}\}|[0-9a-f]{16})")
BOX_KEPT, BOX_OWNER = "kept", "owner"
"""Suffixes that a client appends to the name of its result list to name its two other keys."""
_OF_GO_CLIENTS = ("result-claimed", "result-claim-owners", "result-claims-idx", "result-ack-tombstones")
"""Suffixes that llm-d's Go producer (`ReceiveResult`) appends to the name of the list that it reads."""
_OF_A_BOX = re.compile(
    rf"{re.escape(OURS.removesuffix('*'))}.*:(?:{BOX_KEPT}|{BOX_OWNER})|.*:(?:{'|'.join(_OF_GO_CLIENTS)})",
    re.DOTALL,
)
_PASSING = ("reply", "posted", "active", "cancel", "sequences:cancelled", "streams")
"""Keys that expire have more behind these."""
_OF_A_QUEUE = re.compile(
    rf"batch:\{{[^{{}}]*\}}:requests|[^}}]*\}}.*:(?:{'|'.join(_SUFFIXES)})|[^}}]*\}}.*:(?:{'|'.join(_PASSING)}):.*",
    re.DOTALL,
)
"""What may be a key of any queue: all bear a hash tag, but for a queue itself that its operator named."""


class QueueNameError(ValueError):
    """A queue's name cannot be one; the message says why."""


@dataclass(frozen=True)
class Names:
    """A queue, that is a line of a pool, and its default result list. Raises QueueNameError for a name with
    stray braces.

    A name with one `{…}` keeps that as its hash tag, and its keys are `<name>:<suffix>`. A name without
    braces is its own slot, which `{<name>}:<suffix>` shares.
    """

    queue: str
    results: str
    lists: tuple[str, ...] | None = None
    """Patterns of the lists that producers may name beside `results`. None: the usual ones."""
    pool: str = ""
    """The queue after which the keys of the pool are named, which all of its lines share; empty: this one.
    All of them lie in one slot."""

    def __post_init__(self) -> None:
        if not self.queue:
            raise QueueNameError("queue.name: must not be empty")
        if not self.results:
            raise QueueNameError("queue.results: must not be empty")
        for name in (self.queue, self.pool):
            if (why := fault_of_braces(name)) is not None:
                raise QueueNameError(f"queue.name: {name!r} {why}")
        if self.pool and tag_of(self.pool) != tag_of(self.queue):
            raise QueueNameError(
                f"queue.name: {self.queue!r} cannot share a limit with {self.pool!r}: both need the same "
                "{…}, so that a Redis Cluster keeps them on one node"
            )
        if self.is_own(self.results) or self.results.startswith((ACTIVE, CANCEL)):
            raise QueueNameError(f"queue.results: {self.results!r} is one of the queue's own keys")

    @property
    def prefix(self) -> str:
        """Of the keys of the line."""
        return _prefix(self.queue)

    @property
    def pool_prefix(self) -> str:
        """Of the keys of the pool."""
        return _prefix(self.pool or self.queue)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every lasting key of the line and of its pool but `board`, as the scripts expect them."""
        line = (f"{self.prefix}:{suffix}" if suffix else self.queue for suffix, _ in LINE_KEYS.values())
        pool = (f"{self.pool_prefix}:{suffix}" for suffix, _ in POOL_KEYS.values())
        seldom = (*SEQUENCE_KEYS.values(), *MODEL_KEYS.values())
        return (*line, *pool, *(f"{self.prefix}:{suffix}" for suffix, _ in seldom))

    @property
    def board(self) -> tuple[str, ...]:
        """Where the pool has what is said of versions of models, as the steps about those expect it."""
        return tuple(f"{self.pool_prefix}:{suffix}" for suffix, _ in BOARD_KEYS.values())

    @property
    def control(self) -> str:
        """What the pool's dispatchers tell each other, and when each line was last swept."""
        return f"{self.pool_prefix}:control"

    @property
    def paused(self) -> str:
        return f"{self.pool_prefix}:paused"

    @property
    def members(self) -> str:
        """The bytes of each entry."""
        return f"{self.prefix}:members"

    @property
    def waiting(self) -> tuple[str, ...]:
        """The sets that a claim takes from."""
        lanes = (f"{self.prefix}:{lane.value}" for lane in Lane if lane not in CLOSED)
        return self.queue, f"{self.prefix}:returned", *lanes

    @property
    def outbox(self) -> str:
        return f"{self.prefix}:outbox"

    @property
    def wake(self) -> str:
        """The channel on which producers wake the dispatchers."""
        return f"{self.prefix}:wake"

    def active(self, request_id: str) -> str:
        """Who can be cancelled under this id: lua/markers.lua."""
        return f"{self.prefix}:active:{request_id}"

    def cancel(self, request_id: str, token: str) -> str:
        """Where it stands that the request of this id with this token is to be cancelled."""
        return f"{self.prefix}:cancel:{request_id}:{token}"

    def owner(self, turn: Turn) -> str:
        """Return the producer that may use the sequence of this turn. Empty for the users of the default
        list, whether they name it or not."""
        return "" if turn.owner == self._owner_by_default else turn.owner

    @cached_property
    def _owner_by_default(self) -> str:
        return owner_of("", self.results)

    @property
    def sequence_secret(self) -> str:
        """The key of the secret that all programs with our client share for their sequences."""
        return f"{self.prefix}:{SHARED_BY_CLIENTS}"

    def answers(self, request_id: str) -> str:
        """The result list of one request alone, where whoever knows the id finds its result."""
        text = f"{self.queue}\0{request_id}".encode(errors="surrogatepass")
        return f"{OURS.removesuffix('*')}{{{tag_of(self.queue)}}}:id:{hashlib.sha256(text).hexdigest()[:32]}"

    def stream(self, name: str) -> tuple[str, str]:
        """Return the keys with the requests of a named stream: those that are pending, and the consumed ones
        (lua/streams.lua)."""
        return f"{self.prefix}:streams:{name}:pending", f"{self.prefix}:streams:{name}:consumed"

    def stream_results(self, name: str) -> str:
        """Return the result list of a named stream.

        It is in the slot of the queue's keys, so that one script can note a result as consumed and remove it.
        """
        return f"{OURS.removesuffix('*')}{self.prefix}:stream-{name}"

    def is_clients_own(self, name: str) -> bool:
        """The list of a client without a name, which nobody reads once that has ended."""
        return _OF_A_CLIENT.fullmatch(name) is not None

    def reply(self, call: str) -> str:
        """Where the reply to one call is kept for a while, so that its repetition gets the same."""
        return f"{self.prefix}:reply:{call}"

    def is_own(self, name: str) -> bool:
        """A key of the queue itself or of its pool, or one that could become one."""
        return name in (self.queue, self.prefix) or name.startswith(
            (f"{self.prefix}:", f"{self.pool_prefix}:")
        )

    @cached_property
    def _allowed(self) -> tuple[str, ...]:
        return usual(self.queue, self.results) if self.lists is None else self.lists

    def refused_list(self, name: str) -> str | None:
        """Why no producer may have its result put there, as the end of a sentence; None: it may."""
        if name == self.results:
            return None
        try:
            size = len(name.encode())
        except UnicodeEncodeError:  # a lone surrogate: no consumer could name that list
            return "holds a lone surrogate"
        if size > MAX_LIST_NAME_BYTES:
            return f"is longer than {MAX_LIST_NAME_BYTES} bytes"
        if self.is_own(name) or name.startswith((ACTIVE, CANCEL)) or _OF_A_QUEUE.fullmatch(name):
            return "may be a key of a queue"
        if _OF_A_BOX.fullmatch(name):
            return "may be a key of a client"
        return None if any_fits(self._allowed, name) else "is not among queue.result_lists"


_LASTING = re.compile(rf"([^{{}}]*\{{([^{{}}]+)\}}[^{{}}]*):(?:{'|'.join(_SUFFIXES)})")


def queue_of(key: str) -> str | None:
    """The queue that a key is of, as far as its name tells: not that of a queue that its operator named, and
    that nobody but producers has touched."""
    if usual_pool_of(key) is not None:
        return key
    if (found := _LASTING.fullmatch(key)) is None:
        return None
    prefix, tag = found.groups()
    return tag if prefix == f"{{{tag}}}" else prefix


def usual_pool_of(queue: str) -> str | None:
    """The pool whose queue bears that name by default."""
    found = re.fullmatch(r"batch:\{([^{}]+)\}:requests", queue)
    return None if found is None else found[1]


def _prefix(queue: str) -> str:
    return queue if "{" in queue else f"{{{queue}}}"
