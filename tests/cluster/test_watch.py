"""Requests of the watch to a real API server during minutes without changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dispatcher.signals.kubernetes.api import Api
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.kubernetes.mirror import SILENCE_S, Mirror, Resource
from dispatcher.signals.kubernetes.objects import parse_pod, parse_rewrite
from tests.cluster.control_plane import ControlPlane, Object
from tests.support import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

WATCH_RULES = [
    {"apiGroups": ["", "*"], "resources": ["pods", "inferencemodelrewrites"], "verbs": ["list", "watch"]}
]


def allow_to_watch(plane: ControlPlane, namespace: str) -> None:
    """Allow the default service account of the namespace to read the watched resources."""
    rbac = "rbac.authorization.k8s.io"
    name = {"name": "watcher", "namespace": namespace}
    plane.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": name, "rules": WATCH_RULES})
    role = {"apiGroup": rbac, "kind": "Role", "name": "watcher"}
    account = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    binding = {"metadata": name, "roleRef": role, "subjects": [account]}
    plane.create({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", **binding})


async def test_bookmarks_keep_a_watch_open_and_unserved_resources_are_requested_rarely(
    plane: ControlPlane, tmp_path: Path
) -> None:
    namespace = plane.create_namespace("watched")
    allow_to_watch(plane, namespace)
    kubeconfig = plane.write_kubeconfig("watcher", plane.create_token(namespace, "default"), namespace)
    access = ClusterAccess({"KUBECONFIG": str(kubeconfig)}, tmp_path)
    version, plural = "v1alpha2", "inferencemodelrewrites"
    api = Api(access)
    pods = Mirror(api, Resource("", "v1", "pods", namespace), parse_pod, lambda: None)
    rewrites = [
        Mirror(api, Resource(group, version, plural, namespace), parse_rewrite, lambda: None)
        for group in ("inference.networking.x-k8s.io", "llm-d.ai")
    ]
    served: list[Mirror[Any]] = [pods, rewrites[0]]
    unserved = rewrites[1]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(mirror.run()) for mirror in (*served, unserved)]
        await wait_until(lambda: all(mirror.was_watched for mirror in served), 30)
        began_at = max(mirror.last_contact_at for mirror in served)
        # Without further requests, only two bookmarks can make this true.
        await wait_until(
            lambda: all(mirror.last_contact_at > began_at + SILENCE_S for mirror in served),
            4 * SILENCE_S,
            what="bookmarks",
            every_s=0.5,
        )
        assert unserved.is_unserved
        for task in running:
            task.cancel()
    await api.close()
    counts = count_requests(plane, f"system:serviceaccount:{namespace}:default")
    assert counts.pop(("llm-d.ai", "list", 404)) <= 6
    assert counts == {
        (group, verb, 200): 1 for group in ("", "inference.networking.x-k8s.io") for verb in ("list", "watch")
    }


def count_requests(plane: ControlPlane, user: str) -> Counter[tuple[str, str, int]]:
    """Return the number of requests of a user by group, verb and answer."""

    def classify(event: Object) -> tuple[str, str, int]:
        code = int(event["responseStatus"]["code"])
        return event["objectRef"].get("apiGroup", ""), event["verb"], code

    started = {
        each["auditID"]: classify(each) for each in plane.find_audit_events(user) if "responseStatus" in each
    }
    return Counter(started.values())
