"""List-and-watch of one kind of Kubernetes object: the API reached, its failures in one form, a mirror kept.

The client is `kubernetes.aio`, used at the level of requests. Its models and its Watch are left out: a model
of each pod costs a hundred times what is kept of it, and the Watch hides when it lost its place.

    list ──▶ watch from there ──▶ cut: watch again from the last version seen, bookmarks included
      ▲                       └─▶ 410 Gone, as a status or as an event: the version is too old, list again
      └── any other failure: again after a pause that doubles, with jitter
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE = 500
_HEAD_S = 10.0
"""An answer must begin within this; a watch's head comes at once, too."""
_LIST_S = 60.0
_PAUSE_LEAST_S, _PAUSE_CUT_S, _PAUSE_MOST_S = 0.05, 0.5, 30.0
_ALIVE_S = 1.0
"""A watch that lived so long was one; its end is no failure."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Access:
    """Where the way into the cluster is looked for: the pod's service account, then a kubeconfig."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    service_account: Path = SERVICE_ACCOUNT

    @property
    def in_cluster(self) -> bool:
        return bool(self.environ.get("KUBERNETES_SERVICE_HOST")) and (self.service_account / "token").exists()

    @property
    def kubeconfig(self) -> str:
        """A path, or several with colons between; empty: none is there."""
        named = self.environ.get("KUBECONFIG", "")
        if named:
            return named
        usual = Path(self.environ.get("HOME", "/nonexistent")) / ".kube" / "config"
        return str(usual) if usual.exists() else ""

    def __bool__(self) -> bool:
        return self.in_cluster or bool(self.kubeconfig)

    def __str__(self) -> str:
        return "the pod's service account" if self.in_cluster else f"kubeconfig {self.kubeconfig}"


def prepare() -> None:
    """Import the client, which takes too long to be done while anything is timed."""
    for name in ("client", "config", "config.incluster_config"):
        importlib.import_module(f"kubernetes.aio.{name}")


class ApiError(Exception):
    """The API did not answer, or not with what was asked for. The message is one sentence for an operator."""

    def __init__(self, why: str, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status = status
        """None: no HTTP answer at all."""
        self.retry_after_s = retry_after_s

    @property
    def standing(self) -> bool:
        """Only a change of configuration or of rights mends it."""
        return self.status in (401, 403, 404)


class Api:
    """The API server. Every failure comes out as an ApiError."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: _Session | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.client.close()

    @asynccontextmanager
    async def get(
        self, path: str, query: Sequence[tuple[str, str]], total_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a 200, to be read inside the block. `total_s`: until the block must be done."""
        try:
            async with self._connected() as client, await _request(client, path, query, total_s) as response:
                if response.status != 200:
                    raise await self._failure(response)
                yield response.content
        except TimeoutError as error:
            raise ApiError("the Kubernetes API did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(f"the Kubernetes API cannot be reached: {_words(error)}") from error
        except ValueError as error:  # a line longer than the buffer, or not the JSON that it should be
            raise ApiError(f"the Kubernetes API's answer cannot be read: {_words(error)}") from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A client with credentials that the server has not refused so far."""
        async with self._connecting:
            if self._session is None:
                self._session = _Session(await self._connect())
        session = self._session
        session.users += 1
        try:
            yield session.client
        finally:
            session.users -= 1
            # The watches that began with the old credentials go on with them to their end.
            if session is not self._session and session.users == 0:
                await session.client.close()

    async def _connect(self) -> Any:
        """Read the credentials: at first, and again when the server refuses those we have."""
        # A second of imports: not in the event loop's time.
        client = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.client")
        config = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.config")
        configuration = client.Configuration()
        try:
            if self._access.in_cluster:
                loader = importlib.import_module(
                    "kubernetes.aio.config.incluster_config"
                ).InClusterConfigLoader(
                    token_filename=str(self._access.service_account / "token"),
                    cert_filename=str(self._access.service_account / "ca.crt"),
                    environ=self._access.environ,
                )
                loader.load_and_set(configuration)
            else:
                await config.load_kube_config(
                    self._access.kubeconfig, client_configuration=configuration, persist_config=False
                )
            return client.ApiClient(configuration)
        except Exception as error:  # whatever a file, a plugin or a certificate makes of it
            raise ApiError(f"{self._access} cannot be used: {_words(error)}") from error

    async def _failure(self, response: aiohttp.ClientResponse) -> ApiError:
        body = await response.content.read(64 * 1024)
        try:
            message = msgspec.json.decode(body, type=_Status).message
        except msgspec.MsgspecError:
            message = body[:200].decode("utf-8", "replace").strip()
        if response.status == 401:
            self._session = None  # rotated or expired: the next request reads the credentials again
        after = response.headers.get("Retry-After", "")
        why = f"the Kubernetes API answered {response.status}: {message or response.reason}"
        return ApiError(why, response.status, float(after) if after.isdigit() else 0.0)


@dataclass(slots=True, eq=False)
class _Session:
    client: Any
    users: int = 0


async def _request(
    client: Any, path: str, query: Sequence[tuple[str, str]], total_s: float
) -> aiohttp.ClientResponse:
    async with asyncio.timeout(_HEAD_S):
        try:
            method, url, headers, _, _ = await client.param_serialize(
                "GET",
                path,
                query_params=list(query),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
        except Exception as error:  # it reads the token's file now and then
            raise ApiError(f"the token cannot be read: {_words(error)}") from error
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=5.0)
        answer = await client.call_api(method, url, headers, _request_timeout=timeout)
    response: aiohttp.ClientResponse = answer.response
    return response


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

    def explain(self, error: ApiError) -> str:
        """The failure with what mends it, in one sentence."""
        if error.status == 403:
            return (
                f"not allowed to watch {self.plural} in namespace {self.namespace}: "
                f'add to the Role there the rule apiGroups: ["{self.group}"], resources: ["{self.plural}"], '
                'verbs: ["get", "list", "watch"]'
            )
        if error.status == 401:
            return f"{error}; the credentials are no longer (or not yet) valid"
        return str(error)


class Mirror(Generic[V]):
    """What is kept of each object of a collection, by name, as the API server tells it.

    `digest` makes it of an object's JSON. `changed` is called after each change, of the objects or of what is
    wrong. Only what `digest` returns is kept.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        digest: Callable[[msgspec.Raw], V],
        changed: Callable[[], None],
        *,
        watch_s: float = 60.0,
    ) -> None:
        self.resource = resource
        self.items: dict[str, V] = {}
        self.synced = False
        """Whether the whole collection was seen once."""
        self.failure: ApiError | None = None
        """What is wrong now; a single cut is nothing."""
        self.down_since: float | None = None
        """Loop time since which nothing could be learnt; None: it can."""
        self._api = api
        self._digest = digest
        self._changed = changed
        self._watch_s = watch_s
        self._version = ""
        self._fruitful = False
        """Whether the last round brought anything, or lasted."""
        self._opened = False
        """Whether it came as far as a watch."""
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        state = "synced" if self.synced else "not synced"
        return f"<Mirror of {self.resource.path}: {len(self.items)} items, {state}, {self.failure or 'fine'}>"

    async def run(self) -> None:
        """Keep the mirror, until cancelled."""
        failures = 0
        while True:
            self._fruitful = self._opened = False
            failure: ApiError | None = None
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiError as error:
                failure = error
            if failure is not None and failure.status == 410:
                self._version = ""
            failures = 0 if self._fruitful else failures + 1
            if failures == 0:
                await asyncio.sleep(random.uniform(0.0, 0.05))
                continue
            if failure is not None and not self._opened and (failures > 1 or failure.standing):
                self._failed(failure)
            # A stream that begins and is cut is a nuisance on the way; what it missed comes with the next.
            most_s = _PAUSE_CUT_S if self._opened else _PAUSE_MOST_S
            pause_s = min(most_s, _PAUSE_LEAST_S * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(pause_s, failure.retry_after_s if failure is not None else 0.0))

    async def _list(self) -> None:
        """Read the whole collection, page by page; the mirror changes when all of it is here."""
        items: dict[str, V] = {}
        more = ""
        while True:
            query = [*self.resource.query, ("limit", str(_PAGE))]
            if more:
                query.append(("continue", more))
            async with self._api.get(self.resource.path, query, _LIST_S) as body:
                page = msgspec.json.decode(await body.read(), type=_Page)
                for item in page.items or ():
                    items[_name(item)] = self._digest(item)
            more = page.metadata.more
            if not more:
                break
        self._version = page.metadata.version
        news = not self.synced or items != self.items
        self.items, self.synced = items, True
        if not self._up() and news:
            self._changed()

    async def _watch(self) -> None:
        """Follow the collection from the last version on; returns when the server ends the stream."""
        # A connection that died without a word is noticed when its time is up. The times differ, so that
        # replicas that were started together do not come back together.
        lasts_s = self._watch_s * random.uniform(0.75, 1.25)
        query = [
            *self.resource.query,
            ("watch", "true"),
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(max(1, round(lasts_s)))),
        ]
        async with self._api.get(self.resource.path, query, lasts_s + min(lasts_s, _HEAD_S)) as body:
            self._opened = True
            self._up()
            opened_at = self._loop.time()
            try:
                async for line in body:
                    if line.strip():
                        self._apply(msgspec.json.decode(line, type=_Event))
            finally:
                if self._loop.time() - opened_at >= _ALIVE_S:
                    self._fruitful = True

    def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            self._version = ""  # 410 or not: where we stood, the server cannot go on from
            raise ApiError(f"the watch ended: {status.message or status.reason}", status.code)
        metadata = msgspec.json.decode(event.object, type=_Named).metadata
        self._version = metadata.version or self._version
        self._fruitful = True
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            if metadata.name in self.items:
                del self.items[metadata.name]
                self._changed()
            return
        value = self._digest(event.object)
        if metadata.name not in self.items or self.items[metadata.name] != value:
            self.items[metadata.name] = value
            self._changed()

    def _up(self) -> bool:
        """It works (again). True when that was news, which is told."""
        was, self.failure, self.down_since = self.failure, None, None
        if was is not None:
            self._changed()
        return was is not None

    def _failed(self, failure: ApiError) -> None:
        self.failure = failure
        if self.down_since is None:
            self.down_since = self._loop.time()
        self._changed()


class _Metadata(msgspec.Struct):
    name: str = ""
    version: str = msgspec.field(default="", name="resourceVersion")
    more: str = msgspec.field(default="", name="continue")


class _Named(msgspec.Struct):
    metadata: _Metadata


class _Page(msgspec.Struct):
    metadata: _Metadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int | None = None


def _words(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _name(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_Named).metadata.name
