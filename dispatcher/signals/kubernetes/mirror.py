"""Mirror of one collection of Kubernetes objects, kept by list and watch.

    list ──▶ watch from there ──▶ ended or cut: watch again from the last version seen, bookmarks included
      ▲                       ├─▶ no line for SILENCE_S: list again
      │                       └─▶ 410 Gone, as a status or as an event, or what cannot be read: list again
      └── any other failure: again after a pause that grows, with jitter

The API was **heard** when a list was complete, a watch began, an event or a bookmark came, or the stream of a
watch was ended or cut: until then its server would have sent what changed. A server goes on with a watch that
runs when the token behind it expires or its right is taken away, and sends what changes; it refuses the next
watch.

A watch lasts 5 to 10 minutes, as those of client-go do, so it has to be noticed when it is dead: its
connection is half open, something on the way keeps its bytes back, or its server hangs while the kernel goes
on to answer TCP keep-alive. kube-apiserver sends a bookmark about once a minute. A watch without a line for
longer than that is left and the collection listed, which is right in each of these cases, and also where a
server sends no bookmarks.

The pause after a failure stays short for some minutes, for most are short themselves. After that it grows:
an audit log should not fill with refusals that nobody mends. A collection that the server does not serve
(404) is no failure that passes, and most clusters lack one that is asked for: its pause grows at once, and
further. New credentials end any pause.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from dispatcher.signals.kubernetes.api import Api, ApiError, ApiStatus, ClusterProblem

HOLD_S = 60.0
"""Time for which objects count after the API was last heard of them."""
WATCH_LEAST_S, WATCH_MOST_S = 300.0, 600.0
"""Range of the time that a watch asks for; a random one, so that replicas do not come back together."""
SILENCE_S = 75.0
"""A watch without a line for this long is dead. kube-apiserver sends a bookmark each 60 to 62 s."""
SOON_S, SOON_FOR_S, LATE_S = 4.0, 300.0, 30.0
"""The longest pause in the first SOON_FOR_S of a failure, and after that."""
UNSERVED_S = 300.0
"""The longest pause while a collection is not served (404); each is four times the one before."""
RETRY_AFTER_MOST_S = 60.0
"""The longest Retry-After that is honoured. API Priority and Fairness asks for 32 s at most."""
_PAGE = 500
_LIST_S = 60.0
_OVERDUE_S = 5.0
"""So much longer than agreed a watch may take to end."""
_PAUSE_LEAST_S, _PAUSE_CUT_S, _PAUSE_UNSERVED_S = 0.1, 0.5, 1.0
_ALIVE_S = 1.0
"""A watch that lived so long was one; its end is no failure."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Resource:
    """A collection of objects in a namespace, whole or by selector."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    namespace: str
    label_selector: str = ""
    field_selector: str = ""

    @property
    def path(self) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{self.namespace}/{self.plural}"

    @property
    def query(self) -> list[tuple[str, str]]:
        selectors = (("labelSelector", self.label_selector), ("fieldSelector", self.field_selector))
        return [(name, value) for name, value in selectors if value]


def rule(groups: Sequence[str], plural: str) -> str:
    """The rule of a Role by which the dispatcher may read a collection."""
    quoted = ", ".join(f'"{group}"' for group in groups)
    return f'apiGroups: [{quoted}], resources: ["{plural}"], verbs: ["list", "watch"]'


class Mirror(Generic[V]):
    """What is kept of each object of a collection, by name, as the API server tells it.

    `digest` makes it of an object's JSON. `changed` is called after each change, of the objects or of what is
    wrong, and when the first watch begins. Only what `digest` returns is kept.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        digest: Callable[[msgspec.Raw], V],
        changed: Callable[[], None],
        *,
        hold_s: float = HOLD_S,
    ) -> None:
        self.resource = resource
        self.items: dict[str, V] = {}
        self.synced = False
        """Whether the whole collection was seen once."""
        self.watched = False
        """Whether a watch has begun once."""
        self.failure: ApiError | None = None
        """What is wrong now; a single cut is nothing."""
        self.verb: Literal["list", "watch"] = "list"
        """What was tried last."""
        self._api = api
        self._digest = digest
        self._changed = changed
        self._hold_s = hold_s
        self._wake = asyncio.Event()
        """Set to end the pause that lasts, or the next one."""
        self._version = ""
        self._fruitful = False
        """Whether the last round brought anything, or lasted."""
        self._opened = False
        """Whether it came as far as a watch."""
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        """When the API was surely heard last, on the loop's clock; before the first time: when we began."""

    def __repr__(self) -> str:
        state = "synced" if self.synced else "not synced"
        return f"<Mirror of {self.resource.path}: {len(self.items)} items, {state}, {self.failure or 'fine'}>"

    @property
    def settled(self) -> bool:
        """Whether it is known what the collection holds and that it can be watched, or why not."""
        return self.watched or self.failure is not None

    @property
    def holds_until(self) -> float | None:
        """Time at which the objects seen cease to count, on the loop's clock. `None` while the collection is
        followed."""
        return None if self.failure is None else self.heard_at + self._hold_s

    @property
    def given_up(self) -> bool:
        """Whether what was seen no longer counts."""
        return self.holds_until is not None and self._loop.time() >= self.holds_until

    @property
    def unserved(self) -> bool:
        """Whether the API server does not serve the collection."""
        return self.failure is not None and self.failure.status == 404

    @property
    def problem(self) -> ClusterProblem | None:
        """What is wrong now, with what mends it."""
        return None if self._throttled else self._complaint

    @property
    def notice(self) -> ClusterProblem | None:
        """Request of the API server to wait. It is no problem yet while the objects seen still count."""
        return self._complaint if self._throttled else None

    @property
    def _throttled(self) -> bool:
        return self.failure is not None and self.failure.throttled and self.synced and not self.given_up

    @property
    def _complaint(self) -> ClusterProblem | None:
        if self.failure is None:
            return None
        if self.failure.status != 403:
            return self.failure.problem
        where = self.resource
        return ClusterProblem(
            f"not allowed to {self.verb} {where.plural} in namespace {where.namespace}",
            f"the Role there: it needs the rule {rule([where.group], where.plural)}",
        )

    def retry(self) -> None:
        """Ask at once, because the collection may be served by now."""
        self._wake.set()

    async def run(self) -> None:
        """Keep the mirror, until cancelled."""
        failures, unserved, failing_since = 0, 0, 0.0
        while True:
            began_at = self._loop.time()
            self._fruitful = self._opened = False
            failure: ApiError | None = None
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiError as error:
                failure = error
            dead = self._opened and failure is not None and failure.slow
            if self._opened and not dead:
                self._hear()
            if failure is not None and (failure.status == 410 or failure.garbled or dead):
                self._version = ""
            unserved = unserved + 1 if failure is not None and failure.status == 404 else 0
            failures = 0 if self._fruitful else failures + 1
            if failures == 0:
                await asyncio.sleep(random.uniform(0.0, 0.05))
                continue
            if failures == 1:
                failing_since = began_at
            if failure is not None and not self._opened:
                self._failed(failure, failures)
            if unserved:
                pause_s = min(UNSERVED_S, _PAUSE_UNSERVED_S * 4.0 ** min(unserved - 1, 8))
            else:
                # A stream that begins and is cut is a nuisance on the way: the next brings what it missed.
                soon = self._loop.time() - failing_since < SOON_FOR_S
                most_s = _PAUSE_CUT_S if self._opened else SOON_S if soon else LATE_S
                pause_s = min(most_s, _PAUSE_LEAST_S * 2.0 ** min(failures - 1, 16))
            asked_s = min(RETRY_AFTER_MOST_S, failure.retry_after_s) if failure is not None else 0.0
            await self._api.pause(max(pause_s * random.uniform(0.5, 1.0), asked_s), self._wake)
            self._wake.clear()

    async def _list(self) -> None:
        """Read the whole collection, page by page; the mirror changes when all of it is here."""
        self.verb = "list"
        items: dict[str, V] = {}
        more = ""
        while True:
            query = [*self.resource.query, ("limit", str(_PAGE))]
            if more:
                query.append(("continue", more))
            async with self._api.get(self.resource.path, query, _LIST_S) as body:
                page = msgspec.json.decode(await body.read(), type=_ObjectPage)
                for item in page.items or ():
                    items[_name(item)] = self._digest(item)
            more = page.metadata.more
            if not more:
                break
        self._version = page.metadata.version
        self._hear()
        news = not self.synced or items != self.items
        self.items, self.synced = items, True
        if news:
            self._changed()

    async def _watch(self) -> None:
        """Follow the collection from the last version on; returns when the server ends the stream."""
        self.verb = "watch"
        lasts_s = random.uniform(WATCH_LEAST_S, WATCH_MOST_S)
        query = [
            *self.resource.query,
            ("watch", "true"),
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(round(lasts_s))),
        ]
        async with self._api.get(self.resource.path, query, lasts_s + _OVERDUE_S) as body:
            self._opened = True
            self._up()
            opened_at = self._loop.time()
            try:
                async with asyncio.timeout(SILENCE_S) as silence:
                    async for line in body:
                        silence.reschedule(self._loop.time() + SILENCE_S)
                        if line.strip():
                            self._apply(msgspec.json.decode(line, type=_WatchEvent))
            finally:
                if self._loop.time() - opened_at >= _ALIVE_S:
                    self._fruitful = True

    def _apply(self, event: _WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=ApiStatus)
            self._version = ""  # 410 or not: where we stood, the server cannot go on from
            why = f"the Kubernetes API ended the watch ({status.message or status.reason})"
            raise ApiError(why, status=status.code)
        metadata = msgspec.json.decode(event.object, type=_NamedObject).metadata
        value = None if event.type in ("BOOKMARK", "DELETED") else self._digest(event.object)
        self._version = metadata.version or self._version
        self._fruitful = True
        self._hear()
        if event.type == "BOOKMARK":
            return
        if value is None:
            if self.items.pop(metadata.name, None) is not None:
                self._changed()
        elif metadata.name not in self.items or self.items[metadata.name] != value:
            self.items[metadata.name] = value
            self._changed()

    def _hear(self) -> None:
        self.heard_at = self._loop.time()

    def _up(self) -> None:
        """A watch has begun: it works (again)."""
        self._hear()
        news = self.failure is not None or not self.watched
        self.failure, self.watched = None, True
        if news:
            self._changed()

    def _failed(self, failure: ApiError, times: int) -> None:
        if times > 1 or failure.standing or failure.slow or failure.throttled:
            self.failure = failure
            self._changed()


class _ObjectMetadata(msgspec.Struct):
    name: str = ""
    version: str = msgspec.field(default="", name="resourceVersion")
    more: str = msgspec.field(default="", name="continue")


class _NamedObject(msgspec.Struct):
    metadata: _ObjectMetadata


class _ObjectPage(msgspec.Struct):
    metadata: _ObjectMetadata
    items: list[msgspec.Raw] | None = None


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


def _name(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_NamedObject).metadata.name
