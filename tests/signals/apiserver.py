"""Fake Kubernetes API server that lists and watches, with the faults of real servers and networks.

The shapes (lists, events, bookmarks, Status) are those of kube-apiserver 1.3x. Objects are complete, as it
sends them: these tests ignore most fields of a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from aiohttp import web

from dispatcher.signals.kubernetes.cluster import ClusterAccess

Object = dict[str, Any]
POOLS = "inference.networking.k8s.io/v1/inferencepools"
OLD_POOLS = "inference.networking.x-k8s.io/v1alpha2/inferencepools"
PODS = "v1/pods"
SLICES = "discovery.k8s.io/v1/endpointslices"
REWRITES = "llm-d.ai/v1alpha2/inferencemodelrewrites"
OLD_REWRITES = "inference.networking.x-k8s.io/v1alpha2/inferencemodelrewrites"
BOOKMARK_S = 60.0
"""Time between the bookmarks of a watch. kube-apiserver 1.34 sends them 59 to 62 s apart if its etcd
notifies it of progress, as in a cluster of kubeadm."""
_KINDS = {
    POOLS: "InferencePool",
    OLD_POOLS: "InferencePool",
    PODS: "Pod",
    SLICES: "EndpointSlice",
    REWRITES: "InferenceModelRewrite",
    OLD_REWRITES: "InferenceModelRewrite",
}


def pool(name: str = "qwen", *, app: str = "vllm", ports: int = 1, epp: str = "qwen-epp") -> Object:
    return {
        "metadata": {"name": name, "uid": f"uid-of-{name}"},
        "spec": {
            "selector": {"matchLabels": {"app": app, "tier": "gpu"}},
            "targetPorts": [{"number": 8000 + n} for n in range(ports)],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": epp,
                "port": {"number": 9002},
                "failureMode": "FailClose",
            },
        },
        "status": {"parents": [{"parentRef": {"name": "gateway"}, "conditions": []}]},
    }


def old_pool(name: str = "qwen", *, app: str = "vllm", epp: str = "qwen-epp") -> Object:
    return {
        "metadata": {"name": name, "uid": f"old-uid-of-{name}"},
        "spec": {
            "selector": {"app": app, "tier": "gpu"},
            "targetPortNumber": 8000,
            "extensionRef": {"name": epp, "portNumber": 9002, "failureMode": "FailClose"},
        },
    }


def rewrite(
    name: str,
    *rules: tuple[Sequence[str], Sequence[str]],
    pool: str = "qwen",
    created: str = "2025-11-21T04:00:00Z",
) -> Object:
    """Return a rewrite. `rules`: names (none for any name) and the models that they become."""
    return {
        "metadata": {"name": name, "creationTimestamp": created, "generation": 1},
        "spec": {
            "poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool},
            "rules": [
                {
                    **(
                        {"matches": [{"model": {"type": "Exact", "value": each}} for each in names]}
                        if names
                        else {}
                    ),
                    "targets": [{"modelRewrite": target, "weight": 50} for target in targets],
                }
                for names, targets in rules
            ],
        },
        "status": {"conditions": [{"type": "Accepted", "status": "Unknown", "reason": "Pending"}]},
    }


def pod(
    name: str, *, ready: bool = True, app: str = "vllm", deleting: bool = False, address: str = "10.0.0.9"
) -> Object:
    now = "2025-11-21T04:00:00Z"
    metadata: Object = {
        "name": name,
        "generateName": "vllm-7d9c5b6f4-",
        "uid": f"uid-{name}",
        "creationTimestamp": now,
        "labels": {"app": app, "tier": "gpu", "pod-template-hash": "7d9c5b6f4"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "vllm-7d9c5b6f4"}],
        "managedFields": [
            {"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {"f:c": {}}}}
        ],
    }
    if deleting:
        metadata |= {"deletionTimestamp": now, "deletionGracePeriodSeconds": 30}
    state = "True" if ready else "False"
    return {
        "metadata": metadata,
        "spec": {
            "containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "m"]}]
        },
        "status": {
            "phase": "Running",
            **({"podIP": address} if address else {}),
            "conditions": [
                {"type": "Initialized", "status": "True", "lastProbeTime": None, "lastTransitionTime": now},
                {"type": "Ready", "status": state, "lastProbeTime": None, "lastTransitionTime": now},
                {
                    "type": "ContainersReady",
                    "status": state,
                    "lastProbeTime": None,
                    "lastTransitionTime": now,
                },
            ],
            "containerStatuses": [{"name": "vllm", "ready": ready, "restartCount": 0, "started": True}],
        },
    }


def endpoint_slice(
    name: str,
    service: str,
    *addresses: str,
    ready: bool | None = True,
    family: str = "IPv4",
    pods: Sequence[str] = (),
) -> Object:
    """Return an endpoint slice. `pods`: names of the pods of the addresses; by default each address has its
    own."""
    names = pods or [f"pod-{address}" for address in addresses]
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [{"name": "grpc-ext-proc", "port": 9002, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"serving": True, "terminating": False}
                | ({} if ready is None else {"ready": ready}),
                **({"targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"}} if pod else {}),
            }
            for address, pod in zip(addresses, names, strict=True)
        ],
    }


@dataclass
class Faults:
    """Current faults of the server. Each can change at any time."""

    forbidden: set[str] = field(default_factory=set)
    """Collections that answer 403. With the prefix `list ` or `watch ` only that verb does."""
    rules: list[dict[str, list[str]]] | None = None
    """Rules of a Role, or `None` to allow everything. As in a real server they are checked first."""
    not_served: set[str] = field(default_factory=set)
    """Collections whose API is not installed: the server answers 404, and not as a Status."""
    expired_as_status: bool = False
    """Whether 410 is the HTTP status of the answer instead of an event."""
    cut_s: float | None = None
    """Time after which each watch is cut, in the middle of a line."""
    silent_watches: bool = False
    """Whether watches begin and then send nothing, not even an end, as behind a proxy that buffers."""
    no_bookmarks: bool = False
    """Whether no bookmark is sent while nothing changes, as where etcd does not notify the API server of
    progress."""
    no_answers: bool = False
    """Whether no request is answered at all."""
    retry_after_s: int | None = None
    """Value of Retry-After in an answer 429 to every request."""
    garbage: bool = False
    page_expires: bool = False
    """Whether the next `continue` token has expired (once)."""


@dataclass
class Request:
    collection: str
    query: dict[str, str]
    at: float
    token: str
    user_agent: str
    status: int = 200

    @property
    def verb(self) -> str:
        return "watch" if "watch" in self.query else "list"


class ApiServer:
    """Fake API server. Use `async with ApiServer().serve(tmp_path) as server`; `server.kubeconfig` connects
    to it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.tokens = {"t0"}
        self.requests: deque[Request] = deque(maxlen=1_000)
        self.url = ""
        self.kubeconfig = Path()
        self._version = 1_000
        self._objects: dict[str, dict[tuple[str, str], Object]] = {name: {} for name in _KINDS}
        self._events: dict[str, list[tuple[int, Object | None, Object]]] = {name: [] for name in _KINDS}
        self._event_signals: dict[str, asyncio.Event] = {name: asyncio.Event() for name in _KINDS}
        self._oldest = 0
        self._watchers: dict[asyncio.Transport, str] = {}
        self._bookmark_queues: set[asyncio.Queue[None]] = set()
        self._not_frozen = asyncio.Event()
        self._not_frozen.set()
        self._port = 0
        self._tls: ssl.SSLContext | None = None
        self._runner: web.AppRunner | None = None

    @asynccontextmanager
    async def serve(self, directory: Path, tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
        self._tls = tls
        await self.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._port}"
        self.kubeconfig = directory / "kubeconfig"
        self.write_kubeconfig("t0")
        try:
            yield self
        finally:
            await self.stop()

    def write_kubeconfig(self, token: str = "", *, token_file: str = "") -> None:
        """Write the kubeconfig. `token_file` is relative to it."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": token} if token else {"tokenFile": token_file}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen on the same port as before, with another certificate if one is given."""
        self._tls = tls or self._tls
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening, and cut all connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.cut_watches()
            await runner.cleanup()

    def freeze(self) -> None:
        """Freeze the server as SIGSTOP does: it accepts connections, and sends nothing until `thaw`."""
        self._not_frozen.clear()

    def thaw(self) -> None:
        self._not_frozen.set()

    def cut_watches(self) -> None:
        """Cut every watch that is open now. Later requests for a watch are not cut."""
        for transport in list(self._watchers):
            transport.abort()

    def is_watched(self, *collections: str) -> bool:
        """Return whether a watch of each of these collections is open."""
        return set(collections) <= set(self._watchers.values())

    def put(self, collection: str, thing: Object, namespace: str = "default") -> None:
        self._version += 1
        key = (namespace, thing["metadata"]["name"])
        group_version, _, _ = collection.rpartition("/")
        thing = thing | {"apiVersion": group_version, "kind": _KINDS[collection]}
        thing["metadata"] = thing["metadata"] | {
            "namespace": namespace,
            "resourceVersion": str(self._version),
        }
        before = self._objects[collection].get(key)
        self._objects[collection][key] = thing
        self._record_event(collection, before, thing)

    def delete(self, collection: str, name: str, namespace: str = "default") -> None:
        self._version += 1
        deleted = self._objects[collection].pop((namespace, name))
        deleted = deleted | {"metadata": deleted["metadata"] | {"resourceVersion": str(self._version)}}
        self._record_event(collection, deleted, deleted | {"deleted": True})

    def compact(self) -> None:
        """Answer 410 to watches that begin at an earlier version. Running watches go on."""
        self._version += 1
        self._oldest = self._version

    def drop_delivered_events(self) -> None:
        """Drop the events that every watch has received by now, without answering 410 for them."""
        for events in self._events.values():
            events.clear()

    def send_bookmarks(self) -> None:
        """Send a bookmark of the newest version to all watches that asked for bookmarks."""
        self._version += 1
        for queue in self._bookmark_queues:
            queue.put_nowait(None)

    def requests_for(self, collection: str, *, watch: bool) -> list[Request]:
        return [
            each
            for each in self.requests
            if each.collection == collection and ("watch" in each.query) == watch
        ]

    def _record_event(self, collection: str, before: Object | None, after: Object) -> None:
        self._events[collection].append((self._version, before, after))
        changed, self._event_signals[collection] = self._event_signals[collection], asyncio.Event()
        changed.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.match_info["path"].split("/")
        parts = parts[1:]  # api or apis
        at = parts.index("namespaces") if "namespaces" in parts else 0
        namespace, collection = parts[at + 1], "/".join([*parts[:at], parts[at + 2]])
        token = request.headers.get("Authorization", "").partition(" ")[2]
        query = dict(request.query)
        agent = request.headers.get("User-Agent", "")
        received = Request(collection, query, asyncio.get_running_loop().time(), token, agent)
        self.requests.append(received)
        try:
            answer = await self._answer(request, received, namespace)
        except ConnectionError:  # the client closed the connection
            return web.Response(status=499)
        received.status = answer.status
        return answer

    def requests_with_status(self, status: int) -> list[Request]:
        return [each for each in self.requests if each.status == status]

    def _is_allowed(self, collection: str, verb: str) -> bool:
        if {collection, f"{verb} {collection}"} & self.faults.forbidden:
            return False
        if self.faults.rules is None:
            return True
        group = collection.split("/")[0] if collection.count("/") == 2 else ""
        plural = collection.rpartition("/")[2]
        return any(
            group in rule["apiGroups"] and plural in rule["resources"] and verb in rule["verbs"]
            for rule in self.faults.rules
        )

    async def _answer(self, request: web.Request, received: Request, namespace: str) -> web.StreamResponse:
        collection, query = received.collection, received.query
        await self._not_frozen.wait()
        if self.faults.no_answers:
            await asyncio.sleep(3_600)
        if received.token not in self.tokens:
            return _status(401, "Unauthorized", "Unauthorized")
        if not self._is_allowed(collection, received.verb):
            plural = collection.rpartition("/")[2]
            subject = f'User "system:serviceaccount:default:dispatcher" cannot {received.verb} resource'
            return _status(
                403,
                "Forbidden",
                f'{plural} is forbidden: {subject} "{plural}" in the namespace "{namespace}"',
            )
        if collection in self.faults.not_served:
            return web.Response(status=404, text="404 page not found\n")
        if self.faults.retry_after_s is not None:
            answer = _status(429, "TooManyRequests", "too many requests, please try again later")
            answer.headers["Retry-After"] = str(self.faults.retry_after_s)
            return answer
        if self.faults.garbage:
            return web.Response(text="<html>a captive portal</html>")
        if "watch" in query:
            return await self._watch(request, collection, namespace, query)
        return self._list(collection, namespace, query)

    def _list(self, collection: str, namespace: str, query: dict[str, str]) -> web.Response:
        items = [
            thing
            for (where, _), thing in sorted(self._objects[collection].items())
            if where == namespace and _selected(thing, query)
        ]
        version, _, start = query.get("continue", f"{self._version}:0").partition(":")
        if "continue" in query and self.faults.page_expires:
            self.faults.page_expires = False
            return _status(410, "Expired", "The provided continue parameter is too old")
        end = int(start) + int(query.get("limit", len(items) + 1))
        metadata: Object = {"resourceVersion": version}
        if end < len(items):
            metadata |= {"continue": f"{version}:{end}", "remainingItemCount": len(items) - end}
        kind, group_version = f"{_KINDS[collection]}List", collection.rpartition("/")[0]
        page = {
            "kind": kind,
            "apiVersion": group_version,
            "metadata": metadata,
            "items": items[int(start) : end],
        }
        return web.json_response(page)

    async def _watch(
        self, request: web.Request, collection: str, namespace: str, query: dict[str, str]
    ) -> web.StreamResponse:
        from_version = int(query["resourceVersion"])
        if from_version < self._oldest and self.faults.expired_as_status:
            return _status(410, "Expired", f"too old resource version: {from_version} ({self._oldest})")
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        bookmarks: asyncio.Queue[None] = asyncio.Queue()
        transport = request.transport
        assert transport is not None
        self._watchers[transport] = collection
        if "allowWatchBookmarks" in query:
            self._bookmark_queues.add(bookmarks)
        try:
            if from_version < self._oldest:
                expired = _status_object(
                    410, "Expired", f"too old resource version: {from_version} ({self._oldest})"
                )
                await _send(stream, "ERROR", expired)
                return stream
            if self.faults.silent_watches:
                await asyncio.sleep(3_600)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.faults.cut_s or float(query["timeoutSeconds"])):
                    await self._send_events(stream, collection, namespace, query, from_version, bookmarks)
            await self._not_frozen.wait()
            if self.faults.cut_s is not None:
                await stream.write(b'{"type":"MODIFIED","object":{"metadata":{"na')
                transport.abort()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has disconnected, or the server stops
        finally:
            self._watchers.pop(transport, None)
            self._bookmark_queues.discard(bookmarks)
        return stream

    async def _send_events(
        self,
        stream: web.StreamResponse,
        collection: str,
        namespace: str,
        query: dict[str, str],
        last_version: int,
        bookmarks: asyncio.Queue[None],
    ) -> None:
        loop = asyncio.get_running_loop()
        bookmark_at = loop.time() + BOOKMARK_S
        while True:
            await self._not_frozen.wait()
            if loop.time() >= bookmark_at:
                bookmark_at = loop.time() + BOOKMARK_S
                if not self.faults.no_bookmarks:
                    bookmarks.put_nowait(None)
            changed = self._event_signals[collection]
            events = self._events[collection]
            for version, before, after in events[bisect_right(events, last_version, key=itemgetter(0)) :]:
                last_version = version
                if after["metadata"]["namespace"] != namespace:
                    continue
                was_selected = before is not None and _selected(before, query)
                is_selected = "deleted" not in after and _selected(after, query)
                if was_selected or is_selected:
                    kind = "DELETED" if not is_selected else "MODIFIED" if was_selected else "ADDED"
                    thing = {name: value for name, value in after.items() if name != "deleted"}
                    await _send(stream, kind, thing)
            while not bookmarks.empty():
                bookmarks.get_nowait()
                version_only = {"resourceVersion": str(self._version), "creationTimestamp": None}
                await _send(stream, "BOOKMARK", {"kind": _KINDS[collection], "metadata": version_only})
            waiting: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(changed.wait()),
                asyncio.ensure_future(_wait_for_bookmark(bookmarks)),
            ]
            try:
                left_s = max(0.0, bookmark_at - loop.time())
                await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for future in waiting:
                    future.cancel()


async def _wait_for_bookmark(bookmarks: asyncio.Queue[None]) -> None:
    await bookmarks.get()
    bookmarks.put_nowait(None)


async def _send(stream: web.StreamResponse, kind: str, thing: Object) -> None:
    await stream.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


def _selected(thing: Object, query: dict[str, str]) -> bool:
    metadata = thing["metadata"]
    labels = metadata.get("labels", {})
    requirements = [part for part in query.get("labelSelector", "").split(",") if part]
    field_selector = query.get("fieldSelector", "")
    by_name = not field_selector or field_selector == f"metadata.name={metadata['name']}"
    return by_name and all(_matches(part, labels) for part in requirements)


def _matches(requirement: str, labels: dict[str, str]) -> bool:
    """Return whether the labels match `name=value`, `name` (the label exists) or `!name`."""
    name, equals, value = requirement.partition("=")
    if equals:
        return labels.get(name) == value
    return name[1:] not in labels if name.startswith("!") else name in labels


def _status_object(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status_object(code, reason, message), status=code)


def populate(server: ApiServer, pods: int = 3, **more: Any) -> None:
    server.put(POOLS, pool(**more))
    server.put(SLICES, endpoint_slice("qwen-epp-x1", "qwen-epp", "10.0.0.1"))
    for number in range(pods):
        server.put(PODS, pod(f"p{number}"))


def access(server: ApiServer) -> ClusterAccess:
    return ClusterAccess(environ={"KUBECONFIG": str(server.kubeconfig)}, service_account=Path("/nonexistent"))
