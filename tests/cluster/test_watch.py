"""The watch on a real API server: what it asks of it in minutes in which nothing happens."""

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

READS = [
    {"apiGroups": ["", "*"], "resources": ["pods", "inferencemodelrewrites"], "verbs": ["list", "watch"]}
]


def allow_to_watch(plane: ControlPlane, namespace: str) -> None:
    """Let the namespace's default service account read what is watched here."""
    rbac = "rbac.authorization.k8s.io"
    name = {"name": "watcher", "namespace": namespace}
    plane.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": name, "rules": READS})
    role = {"apiGroup": rbac, "kind": "Role", "name": "watcher"}
    account = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    binding = {"metadata": name, "roleRef": role, "subjects": [account]}
    plane.create({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", **binding})


async def test_bookmarks_keep_a_watch_and_what_is_not_served_is_asked_for_seldom(
    plane: ControlPlane, tmp_path: Path
) -> None:
    namespace = plane.namespace("watched")
    allow_to_watch(plane, namespace)
    kubeconfig = plane.kubeconfig("watcher", plane.token(namespace, "default"), namespace)
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
        # Nothing but two bookmarks makes it so without another request.
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
    asked = requests(plane, f"system:serviceaccount:{namespace}:default")
    assert asked.pop(("llm-d.ai", "list", 404)) <= 6
    assert asked == {
        (group, verb, 200): 1 for group in ("", "inference.networking.x-k8s.io") for verb in ("list", "watch")
    }


def requests(plane: ControlPlane, user: str) -> Counter[tuple[str, str, int]]:
    """Return the number of requests of a user by group, verb and answer."""

    def kind(event: Object) -> tuple[str, str, int]:
        code = int(event["responseStatus"]["code"])
        return event["objectRef"].get("apiGroup", ""), event["verb"], code

    started = {each["auditID"]: kind(each) for each in plane.audited(user) if "responseStatus" in each}
    return Counter(started.values())
