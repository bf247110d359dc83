"""Mirror of one collection of Kubernetes objects, kept by list and watch.

    list ──▶ watch from there ──▶ ended or cut: watch again from the last version seen, bookmarks included
      ▲                       ├─▶ no line for SILENCE_S: list again
      │                       └─▶ 410 Gone, as a status or as an event, or what cannot be read: list again
      └── any other failure: again after a pause that grows, with jitter

A **contact** with the API is a complete list, the start of a watch, an event, a bookmark, or the end of a
watch, cut or as agreed: until then the server would have sent any change. A server continues a running watch,
with all changes, when its token expires or its right is removed. It refuses the next watch.

A watch lasts 5 to 10 minutes, like those of client-go, so a dead watch must be noticed. Its connection may be
half open, a proxy may hold its bytes back, or its server may hang while the kernel answers TCP keep-alive.
kube-apiserver sends a bookmark about once a minute. If a watch brings no line for longer than that, it is
closed and the collection is listed again. This is right in all of these cases, and also if a server sends no
bookmarks. docs/contributing/decisions/0024-long-watches-and-bookmarks.md has the measurements and the
alternatives.

The pause after a failure stays short for some minutes, because most failures are short. After that it grows,
so that an audit log does not fill with refusals. A collection that the server does not serve (404) is no
temporary failure, and most clusters lack one of the collections. Its pause grows at once, and further. New
credentials end any pause.
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
"""Time after the last contact with the API for which the objects count."""
MIN_WATCH_S, MAX_WATCH_S = 300.0, 600.0
"""Range of the random duration of a watch. It is random so that replicas do not reconnect together."""
SILENCE_S = 75.0
"""Time without a line after which a watch is dead. kube-apiserver sends a bookmark every 60 to 62 s."""
MAX_EARLY_PAUSE_S, EARLY_FOR_S, MAX_LATE_PAUSE_S = 4.0, 300.0, 30.0
"""Longest pause between two attempts during the first EARLY_FOR_S seconds of a failure, that time, and the
longest pause afterwards."""
MAX_UNSERVED_PAUSE_S = 300.0
"""Longest pause while a collection is not served (404). Each pause is four times the previous one."""
MAX_RETRY_AFTER_S = 60.0
"""Longest Retry-After that is honoured. API Priority and Fairness asks for 32 s at most."""
_PAGE_OBJECTS = 500
_LIST_TIMEOUT_S = 60.0
_OVERDUE_S = 5.0
"""Time that a watch may take to end after its duration is over."""
_MIN_PAUSE_S, _MAX_CUT_PAUSE_S, _MIN_UNSERVED_PAUSE_S = 0.1, 0.5, 1.0
_WATCH_SUCCEEDED_S = 1.0
"""Duration after which the end of a watch is no failure."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Resource:
    """A collection of objects in a namespace, complete or by selector."""

    group: str
    """API group. Empty for the core group."""
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


def format_role_rule(groups: Sequence[str], plural: str) -> str:
    """Return the rule of a Role that allows the dispatcher to read a collection."""
    quoted = ", ".join(f'"{group}"' for group in groups)
    return f'apiGroups: [{quoted}], resources: ["{plural}"], verbs: ["list", "watch"]'


class Mirror(Generic[V]):
    """Keeps the parsed objects of a collection by name, up to date with the API server.

    `parse` converts the JSON of an object to the value that is kept. `on_change` is called after each change
    of the objects or of the problem, and when the first watch begins.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        parse: Callable[[msgspec.Raw], V],
        on_change: Callable[[], None],
        *,
        hold_s: float = HOLD_S,
    ) -> None:
        self.resource = resource
        self.items: dict[str, V] = {}
        self.is_synced = False
        """True if the collection was listed completely at least once."""
        self.was_watched = False
        """True if a watch has begun at least once."""
        self.failure: ApiError | None = None
        """Current failure. A single cut of a watch is none."""
        self.verb: Literal["list", "watch"] = "list"
        """Verb of the last request."""
        self._api = api
        self._parse = parse
        self._on_change = on_change
        self._hold_s = hold_s
        self._wake = asyncio.Event()
        """Event that ends the current pause, or the next one."""
        self._resource_version = ""
        self._made_progress = False
        """True if the last round received something, or its watch lasted for a while."""
        self._was_watch_opened = False
        """True if a watch was opened in the last round."""
        self._loop = asyncio.get_running_loop()
        self.last_contact_at = self._loop.time()
        """Loop time of the last contact with the API. Before the first contact: time of the start."""

    def __repr__(self) -> str:
        state = "synced" if self.is_synced else "not synced"
        return f"<Mirror of {self.resource.path}: {len(self.items)} items, {state}, {self.failure or 'fine'}>"

    @property
    def is_settled(self) -> bool:
        """True if the collection is known and watched, or the reason why it is not."""
        return self.was_watched or self.failure is not None

    @property
    def expires_at(self) -> float | None:
        """Loop time at which the objects cease to count. `None` while the collection is followed."""
        return None if self.failure is None else self.last_contact_at + self._hold_s

    @property
    def is_expired(self) -> bool:
        """True if the objects no longer count."""
        return self.expires_at is not None and self._loop.time() >= self.expires_at

    @property
    def is_unserved(self) -> bool:
        """True if the API server does not serve the collection."""
        return self.failure is not None and self.failure.status == 404

    @property
    def problem(self) -> ClusterProblem | None:
        """Current problem with a hint how to solve it. `None` if there is none."""
        return None if self._is_throttled else self._current_problem

    @property
    def notice(self) -> ClusterProblem | None:
        """Request of the API server to wait. It is no problem while the objects still count."""
        return self._current_problem if self._is_throttled else None

    @property
    def _is_throttled(self) -> bool:
        return (
            self.failure is not None and self.failure.is_throttled and self.is_synced and not self.is_expired
        )

    @property
    def _current_problem(self) -> ClusterProblem | None:
        if self.failure is None:
            return None
        if self.failure.status != 403:
            return self.failure.problem
        where = self.resource
        return ClusterProblem(
            f"not allowed to {self.verb} {where.plural} in namespace {where.namespace}",
            f"the Role there: it needs the rule {format_role_rule([where.group], where.plural)}",
        )

    def retry_now(self) -> None:
        """Ask the API server at once, because it may serve the collection by now."""
        self._wake.set()

    async def run(self) -> None:
        """Keep the mirror, until cancelled."""
        failures, unserved, failing_since = 0, 0, 0.0
        while True:
            began_at = self._loop.time()
            self._made_progress = self._was_watch_opened = False
            failure: ApiError | None = None
            try:
                if not self._resource_version:
                    await self._list_objects()
                await self._watch_changes()
            except ApiError as error:
                failure = error
            # An open watch ends in a time-out if it was silent for SILENCE_S, or did not end when it should.
            # That proves nothing about the time since its last line. Any other end is a contact: the server
            # would have sent all changes until then.
            is_silent = self._was_watch_opened and failure is not None and failure.is_timeout
            if self._was_watch_opened and not is_silent:
                self._record_contact()
            # In these cases the last version is of no use, and the next round begins with a list.
            if failure is not None and (failure.status == 410 or failure.is_malformed or is_silent):
                self._resource_version = ""
            unserved = unserved + 1 if failure is not None and failure.status == 404 else 0
            failures = 0 if self._made_progress else failures + 1
            if failures == 0:
                # The watch brought changes or ended as agreed: the next one starts without a pause.
                await asyncio.sleep(random.uniform(0.0, 0.05))
                continue
            if failures == 1:
                failing_since = began_at
            if failure is not None and not self._was_watch_opened:
                self._record_failure(failure, failures)
            if unserved:
                pause_s = min(MAX_UNSERVED_PAUSE_S, _MIN_UNSERVED_PAUSE_S * 4.0 ** min(unserved - 1, 8))
            else:
                # If a stream begins and is cut, the cause is on the network path. The next watch returns what
                # was missed, so the pause stays short.
                soon = self._loop.time() - failing_since < EARLY_FOR_S
                most_s = (
                    _MAX_CUT_PAUSE_S
                    if self._was_watch_opened
                    else MAX_EARLY_PAUSE_S
                    if soon
                    else MAX_LATE_PAUSE_S
                )
                pause_s = min(most_s, _MIN_PAUSE_S * 2.0 ** min(failures - 1, 16))
            # The jitter only shortens the own pause. A Retry-After is never undercut.
            asked_s = min(MAX_RETRY_AFTER_S, failure.retry_after_s) if failure is not None else 0.0
            await self._api.pause(max(pause_s * random.uniform(0.5, 1.0), asked_s), self._wake)
            self._wake.clear()

    async def _list_objects(self) -> None:
        """List the collection page by page. The mirror changes only when all pages have arrived."""
        self.verb = "list"
        items: dict[str, V] = {}
        more = ""
        while True:
            query = [*self.resource.query, ("limit", str(_PAGE_OBJECTS))]
            if more:
                query.append(("continue", more))
            async with self._api.get(self.resource.path, query, _LIST_TIMEOUT_S) as body:
                page = msgspec.json.decode(await body.read(), type=_ObjectPage)
                for item in page.items or ():
                    items[_parse_name(item)] = self._parse(item)
            more = page.metadata.more
            if not more:
                break
        self._resource_version = page.metadata.version
        self._record_contact()
        has_changed = not self.is_synced or items != self.items
        self.items, self.is_synced = items, True
        if has_changed:
            self._on_change()

    async def _watch_changes(self) -> None:
        """Watch the collection from the last version on. Returns when the server ends the stream."""
        self.verb = "watch"
        lasts_s = random.uniform(MIN_WATCH_S, MAX_WATCH_S)
        query = [
            *self.resource.query,
            ("watch", "true"),
            ("resourceVersion", self._resource_version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(round(lasts_s))),
        ]
        async with self._api.get(self.resource.path, query, lasts_s + _OVERDUE_S) as body:
            self._was_watch_opened = True
            self._record_watch_start()
            opened_at = self._loop.time()
            try:
                async with asyncio.timeout(SILENCE_S) as silence:
                    async for line in body:
                        # Any line proves that the watch is alive, also an empty one.
                        silence.reschedule(self._loop.time() + SILENCE_S)
                        if line.strip():
                            self._apply_event(msgspec.json.decode(line, type=_WatchEvent))
            finally:
                if self._loop.time() - opened_at >= _WATCH_SUCCEEDED_S:
                    self._made_progress = True

    def _apply_event(self, event: _WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=ApiStatus)
            # With 410 and with any other code, the server cannot continue from the last version.
            self._resource_version = ""
            why = f"the Kubernetes API ended the watch ({status.message or status.reason})"
            raise ApiError(why, status=status.code)
        metadata = msgspec.json.decode(event.object, type=_NamedObject).metadata
        value = None if event.type in ("BOOKMARK", "DELETED") else self._parse(event.object)
        self._resource_version = metadata.version or self._resource_version
        self._made_progress = True
        self._record_contact()
        if event.type == "BOOKMARK":
            return
        if value is None:
            if self.items.pop(metadata.name, None) is not None:
                self._on_change()
        elif metadata.name not in self.items or self.items[metadata.name] != value:
            self.items[metadata.name] = value
            self._on_change()

    def _record_contact(self) -> None:
        self.last_contact_at = self._loop.time()

    def _record_watch_start(self) -> None:
        """Record that a watch has begun, which ends any failure."""
        self._record_contact()
        has_changed = self.failure is not None or not self.was_watched
        self.failure, self.was_watched = None, True
        if has_changed:
            self._on_change()

    def _record_failure(self, failure: ApiError, times: int) -> None:
        # A single failure that the next request may solve is not reported.
        if times > 1 or failure.is_permanent or failure.is_timeout or failure.is_throttled:
            self.failure = failure
            self._on_change()


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


def _parse_name(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_NamedObject).metadata.name
