"""A Kubernetes API server as far as list and watch go, with the faults of real ones and of the way there.

Shapes (lists, events, bookmarks, Status) are those of kube-apiserver 1.3x. Objects are whole, as it sends
them: most of a pod is what nobody here looks at.
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
"""Time between the bookmarks of a watch. kube-apiserver 1.34 sends them 59 to 62 s apart where its etcd
notifies of progress, as kubeadm has it."""
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
        "metadata": {"name": name},
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
        "metadata": {"name": name},
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
    """`rules`: names (none: any) and the models that they become."""
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
    """`pods`: what the addresses belong to; one of its own each where it is not given."""
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
    """What is wrong now; any of it can change at any time."""

    forbidden: set[str] = field(default_factory=set)
    """Collections that answer 403; with `list ` or `watch ` before it to that verb only."""
    rules: list[dict[str, list[str]]] | None = None
    """What a Role allows; None: all. As in a real server it is asked before anything else."""
    not_served: set[str] = field(default_factory=set)
    """Collections whose API is not installed: 404, and not as a Status."""
    expired_as_status: bool = False
    """410 comes as the status of the answer, not as an event."""
    cut_s: float | None = None
    """Watches are cut so long after they began, in the middle of a line."""
    deaf: bool = False
    """Watches begin and then say nothing, not even goodbye, as behind a proxy that buffers."""
    no_bookmarks: bool = False
    """No bookmark comes while nothing changes, as where etcd notifies the API server of no progress."""
    mute: bool = False
    """No request is answered at all."""
    busy_s: int | None = None
    """429 with this Retry-After."""
    garbage: bool = False
    page_expires: bool = False
    """The next `continue` is too old (once)."""


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
    """`async with ApiServer().serve(tmp_path) as server`: `server.kubeconfig` is the way to it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.tokens = {"t0"}
        self.requests: deque[Request] = deque(maxlen=1_000)
        self.url = ""
        self.kubeconfig = Path()
        self._version = 1_000
        self._objects: dict[str, dict[tuple[str, str], Object]] = {name: {} for name in _KINDS}
        self._events: dict[str, list[tuple[int, Object | None, Object]]] = {name: [] for name in _KINDS}
        self._news: dict[str, asyncio.Event] = {name: asyncio.Event() for name in _KINDS}
        self._oldest = 0
        self._watchers: dict[asyncio.Transport, str] = {}
        self._marks: set[asyncio.Queue[None]] = set()
        self._goes = asyncio.Event()
        self._goes.set()
        self._port = 0
        self._tls: ssl.SSLContext | None = None
        self._runner: web.AppRunner | None = None

    @asynccontextmanager
    async def serve(self, directory: Path, tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
        self._tls = tls
        await self.up()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._port}"
        self.kubeconfig = directory / "kubeconfig"
        self.write_kubeconfig("t0")
        try:
            yield self
        finally:
            await self.down()

    def write_kubeconfig(self, token: str = "", *, token_file: str = "") -> None:
        """`token_file`: relative to the kubeconfig."""
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

    async def up(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port as before; with another certificate where one is given."""
        self._tls = tls or self._tls
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def down(self) -> None:
        """Stop listening, and cut what is connected."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.cut()
            await runner.cleanup()

    def freeze(self) -> None:
        """As SIGSTOP does: connections stand and are taken, nothing comes from them until `thaw`."""
        self._goes.clear()

    def thaw(self) -> None:
        self._goes.set()

    def cut(self) -> None:
        """Every watch that is open by now: who asks for one is not cut."""
        for transport in list(self._watchers):
            transport.abort()

    def watched(self, *collections: str) -> bool:
        """A watch of each of them is open."""
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
        self._tell(collection, before, thing)

    def delete(self, collection: str, name: str, namespace: str = "default") -> None:
        self._version += 1
        gone = self._objects[collection].pop((namespace, name))
        gone = gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self._version)}}
        self._tell(collection, gone, gone | {"deleted": True})

    def compact(self) -> None:
        """Who begins to watch from a version before this is told 410. Watches that run go on."""
        self._version += 1
        self._oldest = self._version

    def drop_delivered_events(self) -> None:
        """Drop the events that every watch has had by now; nobody is told 410 for them."""
        for events in self._events.values():
            events.clear()

    def bookmark(self) -> None:
        """Send a bookmark of the newest version to all that watch and want them."""
        self._version += 1
        for mark in self._marks:
            mark.put_nowait(None)

    def asked(self, collection: str, *, watch: bool) -> list[Request]:
        return [
            each
            for each in self.requests
            if each.collection == collection and ("watch" in each.query) == watch
        ]

    def _tell(self, collection: str, before: Object | None, after: Object) -> None:
        self._events[collection].append((self._version, before, after))
        news, self._news[collection] = self._news[collection], asyncio.Event()
        news.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.match_info["path"].split("/")
        parts = parts[1:]  # api or apis
        at = parts.index("namespaces") if "namespaces" in parts else 0
        namespace, collection = parts[at + 1], "/".join([*parts[:at], parts[at + 2]])
        token = request.headers.get("Authorization", "").partition(" ")[2]
        query = dict(request.query)
        agent = request.headers.get("User-Agent", "")
        came = Request(collection, query, asyncio.get_running_loop().time(), token, agent)
        self.requests.append(came)
        try:
            answer = await self._answer(request, came, namespace)
        except ConnectionError:  # the client did not wait
            return web.Response(status=499)
        came.status = answer.status
        return answer

    def refused(self, status: int) -> list[Request]:
        return [each for each in self.requests if each.status == status]

    def _may(self, collection: str, verb: str) -> bool:
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

    async def _answer(self, request: web.Request, came: Request, namespace: str) -> web.StreamResponse:
        collection, query = came.collection, came.query
        await self._goes.wait()
        if self.faults.mute:
            await asyncio.sleep(3_600)
        if came.token not in self.tokens:
            return _status(401, "Unauthorized", "Unauthorized")
        if not self._may(collection, came.verb):
            plural = collection.rpartition("/")[2]
            who = f'User "system:serviceaccount:default:dispatcher" cannot {came.verb} resource'
            return _status(
                403, "Forbidden", f'{plural} is forbidden: {who} "{plural}" in the namespace "{namespace}"'
            )
        if collection in self.faults.not_served:
            return web.Response(status=404, text="404 page not found\n")
        if self.faults.busy_s is not None:
            answer = _status(429, "TooManyRequests", "too many requests, please try again later")
            answer.headers["Retry-After"] = str(self.faults.busy_s)
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
        seen = int(query["resourceVersion"])
        if seen < self._oldest and self.faults.expired_as_status:
            return _status(410, "Expired", f"too old resource version: {seen} ({self._oldest})")
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        marks: asyncio.Queue[None] = asyncio.Queue()
        transport = request.transport
        assert transport is not None
        self._watchers[transport] = collection
        if "allowWatchBookmarks" in query:
            self._marks.add(marks)
        try:
            if seen < self._oldest:
                expired = _status_object(410, "Expired", f"too old resource version: {seen} ({self._oldest})")
                await _send(stream, "ERROR", expired)
                return stream
            if self.faults.deaf:
                await asyncio.sleep(3_600)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.faults.cut_s or float(query["timeoutSeconds"])):
                    await self._feed(stream, collection, namespace, query, seen, marks)
            await self._goes.wait()
            if self.faults.cut_s is not None:
                await stream.write(b'{"type":"MODIFIED","object":{"metadata":{"na')
                transport.abort()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the server goes
        finally:
            self._watchers.pop(transport, None)
            self._marks.discard(marks)
        return stream

    async def _feed(
        self,
        stream: web.StreamResponse,
        collection: str,
        namespace: str,
        query: dict[str, str],
        seen: int,
        marks: asyncio.Queue[None],
    ) -> None:
        loop = asyncio.get_running_loop()
        bookmark_at = loop.time() + BOOKMARK_S
        while True:
            await self._goes.wait()
            if loop.time() >= bookmark_at:
                bookmark_at = loop.time() + BOOKMARK_S
                if not self.faults.no_bookmarks:
                    marks.put_nowait(None)
            news = self._news[collection]
            events = self._events[collection]
            for version, before, after in events[bisect_right(events, seen, key=itemgetter(0)) :]:
                seen = version
                if after["metadata"]["namespace"] != namespace:
                    continue
                was = before is not None and _selected(before, query)
                now = "deleted" not in after and _selected(after, query)
                if was or now:
                    kind = "DELETED" if not now else "MODIFIED" if was else "ADDED"
                    thing = {name: value for name, value in after.items() if name != "deleted"}
                    await _send(stream, kind, thing)
            while not marks.empty():
                marks.get_nowait()
                version_only = {"resourceVersion": str(self._version), "creationTimestamp": None}
                await _send(stream, "BOOKMARK", {"kind": _KINDS[collection], "metadata": version_only})
            waits: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(news.wait()),
                asyncio.ensure_future(_arrived(marks)),
            ]
            try:
                left_s = max(0.0, bookmark_at - loop.time())
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


async def _arrived(marks: asyncio.Queue[None]) -> None:
    await marks.get()
    marks.put_nowait(None)


async def _send(stream: web.StreamResponse, kind: str, thing: Object) -> None:
    await stream.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


def _selected(thing: Object, query: dict[str, str]) -> bool:
    metadata = thing["metadata"]
    labels = metadata.get("labels", {})
    wanted = [part for part in query.get("labelSelector", "").split(",") if part]
    field_selector = query.get("fieldSelector", "")
    by_name = not field_selector or field_selector == f"metadata.name={metadata['name']}"
    return by_name and all(_matches(part, labels) for part in wanted)


def _matches(requirement: str, labels: dict[str, str]) -> bool:
    """`name=value`, `name` (it is there) or `!name`."""
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
