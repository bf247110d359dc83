"""Names of the Redis keys of a queue and of its pool. All are derived from the name of the queue and are in
one Cluster slot."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dispatcher.common.patterns import matches_any
from dispatcher.queue.lua_files import ALL_FEATURES, FEATURE_KEYS, FEATURE_POOL_KEYS, LUA_FEATURES, OTHER_KEYS
from dispatcher.requests.cluster_slot import explain_brace_fault, extract_hash_tag
from dispatcher.requests.lanes import Lane
from dispatcher.requests.result_lists import CLIENT_LISTS, default_patterns

FOREIGN_ACTIVE_PREFIX = "request-active:"
FOREIGN_CANCEL_PREFIX = "request-cancel:"
"""Prefixes of the markers of llm-d's producers, by request id and for all queues. The markers of this project
are `QueueNames.active_key` and `QueueNames.cancel_key`."""
MAX_TOKEN_BYTES = 1024
"""Largest token that may be part of a key. A request with a longer one is cancelled by llm-d's marker
only."""
MAX_LIST_NAME_BYTES = 1024

QUEUE_KEYS = {
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
    "HEARTBEATS": ("heartbeats", "zset"),
    "PAUSED": ("paused", "string"),
}
"""Name of each lasting key in the scripts, with its suffix (empty for the queue itself) and its type.

A queue has its own keys except for the pool keys, which all queues of its pool share. The keys of
features (lua_files.py) come last: scripts check their types only if there is such a request.
"""
KERNEL_KEYS = {**QUEUE_KEYS, **POOL_KEYS}
SCRIPT_KEYS = {**KERNEL_KEYS, **FEATURE_KEYS}
"""Keys in the order in which scripts get them, without features and with all of them."""
LANE_LETTERS = {
    lane: letter
    for lane in Lane
    for key, letter in (
        ("SUSPECTS", "S"),
        *(each.lane[:2] for each in LUA_FEATURES.values() if each.lane),
    )
    if SCRIPT_KEYS[key][0] == lane.value
}
"""Letters by which scripts name the lanes that a claim may take requests from."""
CLOSED_LANES = {
    SCRIPT_KEYS[each.lane[0]][0]: each.lane[1] for each in LUA_FEATURES.values() if "closed" in each.lane
}
"""Letter of each closed lane, by its name."""
IDENTITIES_SUFFIX = "pool-identities"
_LASTING_ENDINGS = tuple(
    f":{suffix}"
    for suffix in (
        *(suffix for suffix, _ in (*SCRIPT_KEYS.values(), *FEATURE_POOL_KEYS.values()) if suffix),
        IDENTITIES_SUFFIX,
        *(name for name in OTHER_KEYS if not name.endswith(":")),
    )
)
"""Endings of the keys of a queue and its pool that have no id. None of them is the end of another one."""
_EXPIRING_PARTS = (
    *(":reply:", ":posted:", ":active:", ":cancel:", ":streams:"),
    *(f":{name}" for name in OTHER_KEYS if name.endswith(":")),
)
"""Parts of the keys that expire. Each is followed by an id."""
_ANONYMOUS_CLIENT_LIST = re.compile(r"batch-results:(?:\{[0-9a-f]{16}\}|[0-9a-f]{16})")
_CLIENT_LIST_PREFIX = CLIENT_LISTS.removesuffix("*")
KEPT_SUFFIX, OWNER_SUFFIX = "kept", "owner"
"""Suffixes that a client appends to the name of its result list to name its two other keys."""
_CLIENT_ENDINGS = (f":{KEPT_SUFFIX}", f":{OWNER_SUFFIX}")
_GO_CLIENT_ENDINGS = (
    ":result-claimed",
    ":result-claim-owners",
    ":result-claims-idx",
    ":result-ack-tombstones",
)
"""Endings that llm-d's Go producer (`ReceiveResult`) appends to the name of the list that it reads."""
_DEFAULT_QUEUE = re.compile(r"batch:\{([^{}]*)\}:requests")
_KEY_PREFIX = re.compile(r"[^{}]*\{([^{}]+)\}[^{}]*")


class QueueNameError(ValueError):
    """Error for an invalid name of a queue. The message says why it is invalid."""


@dataclass(frozen=True)
class QueueNames:
    """Names of a queue, of its pool, and of its default result list. Raises QueueNameError for a name with
    stray braces.

    A name with one `{…}` keeps that as its hash tag, and its keys are `<name>:<suffix>`. A name without
    braces is its own slot, and its keys are `{<name>}:<suffix>`.
    """

    queue: str
    result_list: str
    allowed_lists: tuple[str, ...] | None = None
    """Patterns of the lists that producers may name, besides `result_list`. `None` for the default
    patterns."""
    pool: str = ""
    """Name of the queue after which the keys of the pool are named. All queues of the pool share them, and
    all are in one slot. Empty for this queue."""

    def __post_init__(self) -> None:
        if not self.queue:
            raise QueueNameError("queue.name: must not be empty")
        if not self.result_list:
            raise QueueNameError("queue.results: must not be empty")
        for name in (self.queue, self.pool):
            if (why := explain_brace_fault(name)) is not None:
                raise QueueNameError(f"queue.name: {name!r} {why}")
        # Each script gets the keys of the queue and of the pool, and a Cluster runs it only if all are in one
        # slot.
        if self.pool and extract_hash_tag(self.pool) != extract_hash_tag(self.queue):
            raise QueueNameError(
                f"queue.name: {self.queue!r} cannot share a limit with {self.pool!r}: both need the same "
                "{…}, so that a Redis Cluster keeps them on one node"
            )
        # Results must not be pushed to a key of the queue itself.
        if self.is_queue_key(self.result_list) or self.result_list.startswith(
            (FOREIGN_ACTIVE_PREFIX, FOREIGN_CANCEL_PREFIX)
        ):
            raise QueueNameError(f"queue.results: {self.result_list!r} is one of the queue's own keys")

    @property
    def queue_prefix(self) -> str:
        """Prefix of the keys of the queue."""
        return _build_prefix(self.queue)

    @property
    def pool_prefix(self) -> str:
        """Prefix of the keys of the pool."""
        return _build_prefix(self.pool or self.queue)

    @property
    def script_keys(self) -> tuple[str, ...]:
        """All lasting keys of the queue and of its pool in the order that the scripts expect, except for
        the pool keys of features."""
        return self.list_script_keys(ALL_FEATURES)

    def list_script_keys(self, features: Sequence[str]) -> tuple[str, ...]:
        """Return the keys that a script gets which is built for these features."""
        queue_keys = (
            f"{self.queue_prefix}:{suffix}" if suffix else self.queue for suffix, _ in QUEUE_KEYS.values()
        )
        pool_keys = (f"{self.pool_prefix}:{suffix}" for suffix, _ in POOL_KEYS.values())
        of_features = (key for name in features for key in LUA_FEATURES[name].keys.values())
        return (*queue_keys, *pool_keys, *(f"{self.queue_prefix}:{suffix}" for suffix, _ in of_features))

    @property
    def feature_pool_keys(self) -> tuple[str, ...]:
        """Lasting keys of features that all queues of the pool share."""
        return tuple(key for name in ALL_FEATURES for key in self.list_pool_keys(name))

    def list_pool_keys(self, feature: str) -> tuple[str, ...]:
        """Return the pool keys of a feature in the order that its scripts expect."""
        return tuple(f"{self.pool_prefix}:{suffix}" for suffix, _ in LUA_FEATURES[feature].pool_keys.values())

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Lasting keys in which features keep a text of the queue."""
        return tuple(f"{self.queue_prefix}:{name}" for name in OTHER_KEYS if not name.endswith(":"))

    @property
    def control_key(self) -> str:
        """Key of the state that the dispatchers of the pool share, and of the times at which each queue was
        last swept."""
        return f"{self.pool_prefix}:control"

    @property
    def paused_key(self) -> str:
        return f"{self.pool_prefix}:paused"

    @property
    def members_key(self) -> str:
        """Key of the members of all entries."""
        return f"{self.queue_prefix}:members"

    @property
    def progress_key(self) -> str:
        """Key of the progress of entries that go on with another call."""
        return f"{self.queue_prefix}:progress"

    @property
    def claimable_keys(self) -> tuple[str, ...]:
        """Keys of the sets from which a claim takes requests."""
        lanes = (f"{self.queue_prefix}:{lane.value}" for lane in Lane)
        return self.queue, f"{self.queue_prefix}:returned", *lanes

    @property
    def identities_key(self) -> str:
        """Key of the identities of the pools to which the dispatchers send (queue/pool_identity.py)."""
        return f"{self.pool_prefix}:{IDENTITIES_SUFFIX}"

    @property
    def outbox_key(self) -> str:
        return f"{self.queue_prefix}:outbox"

    @property
    def wake_channel(self) -> str:
        """Channel on which producers wake the dispatchers."""
        return f"{self.queue_prefix}:wake"

    def active_key(self, request_id: str) -> str:
        """Return the key of the tokens that can be cancelled under this id (lua/cancel_markers.lua)."""
        return f"{self.queue_prefix}:active:{request_id}"

    def cancel_key(self, request_id: str, token: str) -> str:
        """Return the key that marks the request with this id and token as cancelled."""
        return f"{self.queue_prefix}:cancel:{request_id}:{token}"

    def result_list_for_id(self, request_id: str) -> str:
        """Return the result list of one request, so that the result can be found by the id of the request."""
        # A digest, because an id may have any length and any characters.
        text = f"{self.queue}\0{request_id}".encode(errors="surrogatepass")
        digest = hashlib.sha256(text).hexdigest()[:32]
        return f"{CLIENT_LISTS.removesuffix('*')}{{{extract_hash_tag(self.queue)}}}:id:{digest}"

    def is_anonymous_client_list(self, name: str) -> bool:
        """Return whether this is the list of a client without a name. Nothing reads it once the client has
        ended."""
        return _ANONYMOUS_CLIENT_LIST.fullmatch(name) is not None

    def reply_key(self, call_id: str) -> str:
        """Return the key of the reply to one call. The reply is kept for a while, so that a repeated call
        gets the same one."""
        return f"{self.queue_prefix}:reply:{call_id}"

    def is_queue_key(self, name: str) -> bool:
        """Return whether the name is a key of the queue or of its pool, or could become one."""
        return name in (self.queue, self.queue_prefix) or name.startswith(
            (f"{self.queue_prefix}:", f"{self.pool_prefix}:")
        )

    @cached_property
    def _allowed_patterns(self) -> tuple[str, ...]:
        return (
            default_patterns(self.queue, self.result_list)
            if self.allowed_lists is None
            else self.allowed_lists
        )

    def find_list_problem(self, name: str) -> str | None:
        """Return why no producer may use a list for its results, as the end of a sentence. `None` if it
        may."""
        if name == self.result_list:
            return None
        try:
            size = len(name.encode())
        except UnicodeEncodeError:  # a lone surrogate: no consumer could name that list
            return "holds a lone surrogate"
        if size > MAX_LIST_NAME_BYTES:
            return f"is longer than {MAX_LIST_NAME_BYTES} bytes"
        # These names are refused whatever `allowed_lists` says: a producer must not have results pushed over
        # the state of this queue, of another queue on the server, or of a client.
        if (
            self.is_queue_key(name)
            or name.startswith((FOREIGN_ACTIVE_PREFIX, FOREIGN_CANCEL_PREFIX))
            or _may_be_queue_key(name)
        ):
            return "may be a key of a queue"
        if _may_be_client_key(name):
            return "may be a key of a client"
        return None if matches_any(self._allowed_patterns, name) else "is not among queue.result_lists"


def encode_key(name: str) -> bytes:
    """Encode a name of a request as a key. A lone surrogate must not raise here."""
    return name.encode(errors="surrogatepass")


def _may_be_queue_key(name: str) -> bool:
    """Return whether a name may be a key of some queue. All of them have a hash tag, except for a queue that
    its operator named."""
    _, _, after_tag = name.partition("}")
    return (
        _DEFAULT_QUEUE.fullmatch(name) is not None
        or after_tag.endswith(_LASTING_ENDINGS)
        or any(part in after_tag for part in _EXPIRING_PARTS)
    )


def _may_be_client_key(name: str) -> bool:
    return name.endswith(_GO_CLIENT_ENDINGS) or (
        name.startswith(_CLIENT_LIST_PREFIX) and name.endswith(_CLIENT_ENDINGS, len(_CLIENT_LIST_PREFIX))
    )


def parse_queue_name(key: str) -> str | None:
    """Return the name of the queue to which a key belongs. `None` if the key does not show it, as the key of
    a queue that its operator named and that only producers have written to."""
    if parse_default_pool(key) is not None:
        return key
    ending = next((ending for ending in _LASTING_ENDINGS if key.endswith(ending)), None)
    prefix = "" if ending is None else key.removesuffix(ending)
    if (found := _KEY_PREFIX.fullmatch(prefix)) is None:
        return None
    return found[1] if prefix == f"{{{found[1]}}}" else prefix


def parse_default_pool(queue: str) -> str | None:
    """Return the pool whose queue has this name by default, or `None`."""
    found = _DEFAULT_QUEUE.fullmatch(queue)
    return (found[1] or None) if found else None


def _build_prefix(queue: str) -> str:
    return queue if "{" in queue else f"{{{queue}}}"
