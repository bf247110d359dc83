"""The chart on a real API server, and the dispatcher beside it with no rights but the release's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dispatcher import __version__
from dispatcher.queue.embedded import EmbeddedError, find_server
from tests.cluster.conftest import Helm
from tests.cluster.control_plane import ControlPlane, Object
from tests.cluster.pods import NODE, path_of, status
from tests.support import free_port, running, wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
OLD_POOLS = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferencepools"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles"
PICKER, OTHER_PICKER = "192.0.2.10", "192.0.2.11"
RELEASE = "night-batch-dispatcher"
FOLLOWED_S = 60.0
"""Within this the dispatcher shows what changed in the cluster."""


def values(pool: str = "qwen", **more: Any) -> dict[str, Any]:
    return {"pool": {"name": pool}, "gateway": {"url": f"http://{PICKER}"}} | more


WHOLE = values(
    replicas=2,
    networkPolicy={"enabled": True},
    inferenceObjective={"create": True, "apiVersion": "inference.networking.x-k8s.io/v1alpha2"},
    podDisruptionBudget={"enabled": True},
)
"""Every object that needs no operator."""


def templates(plane: ControlPlane, namespace: str) -> dict[str, Object]:
    """The pods that controllers would make, by the object that asks for them."""
    found: dict[str, Object] = {}
    for kind in ("deployments", "statefulsets"):
        for each in plane.items(f"/apis/apps/v1/namespaces/{namespace}/{kind}"):
            name, spec = each["metadata"]["name"], each["spec"]
            for claim in (of["metadata"]["name"] for of in spec.get("volumeClaimTemplates", ())):
                volume = {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}-0"}}
                spec["template"]["spec"].setdefault("volumes", []).append(volume)
            found[f"{kind} {name}"] = spec["template"]
    return found


def refusal(plane: ControlPlane, namespace: str, template: Object) -> str:
    """Why a pod of it is not admitted; empty: it is."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "asked"},
        "spec": template["spec"],
    }
    answer = plane.admin.post(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", json=manifest)
    return "" if answer.is_success else str(answer.json()["message"])


def test_all_of_it_is_admitted_where_the_standard_restricted_is_enforced(
    plane: ControlPlane, helm: Helm
) -> None:
    namespace = plane.namespace("restricted")
    said = helm.install("night", namespace, {**WHOLE, "checkHook": {"enabled": True}}, "--no-hooks")
    assert "violate" not in said, "the API server warned of a Deployment whose pods it would refuse"
    pods = templates(plane, namespace)
    for hook in yaml.safe_load_all(helm("get", "hooks", "night", "--namespace", namespace)):
        of_job = hook["kind"] == "Job"
        pods[f"{hook['kind']} {hook['metadata']['name']}"] = hook["spec"]["template"] if of_job else hook
    assert sorted(pods) == [
        f"Job {RELEASE}-check",
        f"Pod {RELEASE}-test",
        f"deployments {RELEASE}",
        f"statefulsets {RELEASE}-valkey",
    ]
    assert {name: refusal(plane, namespace, pod) for name, pod in pods.items()} == dict.fromkeys(pods, "")
    bad = pods[f"deployments {RELEASE}"]
    bad["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert 'violates PodSecurity "restricted' in refusal(plane, namespace, bad), "or this would prove nothing"


def test_a_threshold_restarts_nothing_and_what_is_bound_at_the_start_does(
    plane: ControlPlane, helm: Helm
) -> None:
    """A Deployment replaces its pods when their template changes, and only then."""
    namespace = plane.namespace("upgraded")
    config = f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}"

    def text() -> str:
        return str(plane.ask("GET", config)["data"]["config.yaml"])

    helm.install("night", namespace, values(config={"budget": {"reserve": 0.1}}))
    first, first_text = templates(plane, namespace), text()
    helm.upgrade("night", namespace, values(config={"budget": {"reserve": 0.2}}))
    assert "reserve: 0.2" in text()
    assert templates(plane, namespace) == first
    helm.upgrade("night", namespace, values(config={"queue": {"name": "other"}}))
    changed = {name for name, template in templates(plane, namespace).items() if template != first[name]}
    assert changed == {f"deployments {RELEASE}"}, "and not the queue's server"
    helm("rollback", "night", "1", "--namespace", namespace)
    assert (templates(plane, namespace), text()) == (first, first_text)


def test_what_is_uninstalled_leaves_nothing(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.namespace("left")
    before = plane.everything().keys()
    helm.install("night", namespace, WHOLE)
    helm.upgrade("night", namespace, {**WHOLE, "networkPolicy": {"enabled": False}})
    helm("rollback", "night", "1", "--namespace", namespace)
    assert len(plane.everything().keys() - before) > 15
    helm.uninstall("night", namespace)
    assert plane.everything().keys() - before == set()


def test_two_releases_of_a_namespace_do_not_touch_each_other(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.namespace("shared")
    before = plane.everything().keys()
    helm.install("day", namespace, {**WHOLE, **values("llama")})
    day = versions(plane, before)
    helm.install("night", namespace, WHOLE)
    assert len(versions(plane, before)) == 2 * len(day), "each has objects of its own"
    helm.upgrade("night", namespace, {**WHOLE, "replicas": 3})
    helm("rollback", "night", "1", "--namespace", namespace)
    helm.uninstall("night", namespace)
    assert versions(plane, before) == day, "nothing of the other was ever changed"


def versions(plane: ControlPlane, before: Any) -> dict[str, str]:
    """Everything that was not there before, each with the version that any change changes."""
    found = plane.everything()
    return {where: found[where]["resourceVersion"] for where in found.keys() - before}


# The dispatcher beside it.


def model_server(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {
            "nodeName": NODE,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "it",
                    "image": "it",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


@dataclass
class Cluster:
    """A pool's namespace: its model servers and its endpoint picker, by hand."""

    plane: ControlPlane
    namespace: str

    def start(self, name: str, address: str) -> None:
        self.plane.apply(f"/api/v1/namespaces/{self.namespace}/pods", model_server(name))
        self.turn(name, address, ready=True)

    def turn(self, name: str, address: str, *, ready: bool) -> None:
        pod = self.plane.ask("GET", self._path(name))
        self.plane.patch(f"{self._path(name)}/status", {"status": status(pod, address, ready=ready)})

    def end(self, name: str, *, grace_s: int = 30) -> None:
        """With a grace it only begins to end, as a pod that drains."""
        self.plane.ask("DELETE", self._path(name), {"gracePeriodSeconds": grace_s})

    def _path(self, name: str) -> str:
        return path_of({"metadata": {"namespace": self.namespace, "name": name}})


def new_pool() -> Object:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"kind": "Service", "name": "qwen-epp", "port": {"number": 9002}},
        },
    }


def old_pool() -> Object:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "selector": {"app": "vllm"},
            "targetPortNumber": 8000,
            "extensionRef": {"name": "qwen-epp"},
        },
    }


def picker_slice(*addresses: str) -> Object:
    """Where the picker's Service leads, as the endpoint slice controller says it."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "qwen-epp-1", "labels": {"kubernetes.io/service-name": "qwen-epp"}},
        "addressType": "IPv4",
        "ports": [{"port": 9002, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": f"picker-{number}"},
            }
            for number, address in enumerate(addresses)
        ],
    }


@dataclass
class Beside:
    """A dispatcher of this checkout with the file, and the token, that a pod of the release would have."""

    config: Path
    environ: Mapping[str, str]
    http: httpx.Client

    def status(self) -> Object:
        with suppress(httpx.TransportError):
            return dict(self.http.get("/status").json())
        return {}

    def wait_for(self, **wanted: Any) -> Object:
        seen: Object = {}

        def fits() -> bool:
            nonlocal seen
            seen = self.status()
            return bool(seen) and all(seen[name] == value for name, value in wanted.items())

        try:
            wait_until_sync(fits, FOLLOWED_S, what=str(wanted), every_s=0.05)
        except pytest.fail.Exception:
            shown = {name: seen.get(name) for name in (*wanted, "explanation", "watch_problems")}
            pytest.fail(f"{wanted} wanted, seen at last: {shown}")
        return seen

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dispatcher", *arguments, "--config", str(self.config)],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def cluster(plane: ControlPlane) -> Cluster:
    return Cluster(plane, plane.namespace("pool"))


@pytest.fixture
def beside(cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[Beside]:
    """The release installed, and its dispatcher run by hand; of its file only an address is changed."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.fail(str(error))
    plane, namespace = cluster.plane, cluster.namespace
    admin, queue, gateway, picker = (free_port() for _ in range(4))
    given = values(
        gateway={"url": f"http://{PICKER}:{gateway}"},
        config={
            "admin": {"port": admin},
            "signals": {"interval_s": 0.2, "epp": {"port": picker}},
            "budget": {"per_endpoint": 4},
        },
    )
    helm.install("night", namespace, given)
    text = plane.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}")["data"]["config.yaml"]
    host = f"{RELEASE}-valkey.{namespace}.svc:6379"
    assert host in text
    config = tmp_path / "config.yaml"
    config.write_text(text.replace(host, f"127.0.0.1:{queue}"))
    kubeconfig = plane.kubeconfig("release", plane.token(namespace, RELEASE), namespace)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")}
    environ = {**clean, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}
    with ExitStack() as stack:
        valkey = ("--port", str(queue), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
        stack.enter_context(running(server, *valkey))
        flags = (f"--host={PICKER}", f"--port={gateway}", f"--metrics-port={picker}")
        sim = (sys.executable, "-m", "dispatcher.sim.live", "--slots=32", "--endpoints=8", "--seconds=0.1")
        stack.enter_context(running(*sim, *flags))
        log = stack.enter_context((tmp_path / "dispatcher.log").open("wb"))
        run = (sys.executable, "-m", "dispatcher", "run", "--config", config)
        stack.enter_context(running(*run, env=environ, stdout=log, stderr=log, stop_s=30))
        client = httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5, trust_env=False)
        yield Beside(config, environ, stack.enter_context(client))


def test_it_finds_pool_endpoints_and_picker_by_the_release_s_rights_and_uses_each_of_them(
    cluster: Cluster, beside: Beside
) -> None:
    plane, namespace = cluster.plane, cluster.namespace
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    plane.apply(slices, picker_slice())
    missing = f"InferencePool {namespace}/qwen does not exist (look at: pool.name, pool.namespace)"
    beside.wait_for(watch_endpoints=0, watch_problems=[missing])

    # The pool as v1alpha2 alone has it, then as both have it, then as v1 alone has it.
    plane.apply(OLD_POOLS.format(namespace), old_pool())
    for number in range(3):
        cluster.start(f"server-{number}", f"192.0.2.{20 + number}")
    why = "has no ready endpoint: no endpoint picker runs (look at: the picker's pods)"
    alone = f"Service {namespace}/qwen-epp {why}"
    beside.wait_for(watch_endpoints=3, watch_problems=[alone])
    plane.apply(POOLS.format(namespace), new_pool())
    plane.ask("DELETE", f"{OLD_POOLS.format(namespace)}/qwen")
    beside.wait_for(watch_endpoints=3, watch_problems=[alone])

    # Without a picker nothing is sent; with one, requests are answered.
    plane.patch(f"{slices}/qwen-epp-1", picker_slice(PICKER))
    beside.wait_for(max_sys=12, max_sys_by="watch", watch_problems=[])
    answered = beside.run("submit", '{"model": "qwen", "prompt": "hi", "max_tokens": 1}', "--deadline", "30")
    assert answered.returncode == 0, answered.stderr
    assert '"choices"' in answered.stdout

    # Pods come and go, and the number with them.
    cluster.turn("server-0", "192.0.2.20", ready=False)
    beside.wait_for(watch_endpoints=2, max_sys=8)
    cluster.turn("server-0", "192.0.2.20", ready=True)
    beside.wait_for(watch_endpoints=3, max_sys=12)
    cluster.end("server-1")
    beside.wait_for(watch_endpoints=2)
    cluster.end("server-1", grace_s=0)
    for number in range(3, 6):
        cluster.start(f"server-{number}", f"192.0.2.{20 + number}")
    beside.wait_for(watch_endpoints=5, max_sys=20)
    plane.patch(f"{POOLS.format(namespace)}/qwen", {"spec": {"selector": {"matchLabels": {"app": "none"}}}})
    beside.wait_for(watch_endpoints=0, max_sys=0)
    plane.patch(f"{POOLS.format(namespace)}/qwen", {"spec": {"selector": {"matchLabels": {"app": "vllm"}}}})
    beside.wait_for(watch_endpoints=5, max_sys=20)

    # So do the picker's replicas: one that does not answer hides its queue, and that closes the gate.
    plane.patch(f"{slices}/qwen-epp-1", picker_slice(PICKER, OTHER_PICKER))
    seen = beside.wait_for(reason="unreadable")
    assert OTHER_PICKER in seen["explanation"]
    plane.patch(f"{slices}/qwen-epp-1", picker_slice(PICKER))
    beside.wait_for(max_sys=20, signals_problem=None)

    checked = beside.run("check")
    assert PICKER in checked.stdout + checked.stderr

    judge(plane, namespace)


def judge(plane: ControlPlane, namespace: str) -> None:
    """What was asked in the release's name, beside what its Role allows: the same, and nothing refused."""
    user = f"system:serviceaccount:{namespace}:{RELEASE}"
    asked = plane.audited(user)
    refused = {each["requestURI"]: each["responseStatus"] for each in asked if code(each) >= 400}
    assert refused == {}
    agents = {each["userAgent"] for each in asked}
    assert agents == {f"batch-dispatcher/{__version__}"}
    of = [each["objectRef"] for each in asked]
    assert {each["namespace"] for each in of} == {namespace}
    used = {
        (each.get("apiGroup", ""), each["resource"], event["verb"])
        for each, event in zip(of, asked, strict=True)
    }
    role = plane.ask("GET", f"{ROLES.format(namespace)}/{RELEASE}")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted

    # The ClusterRole is for the picker, which asks Kubernetes whether it may answer a token.
    assert plane.allows(user, nonResourceAttributes={"path": "/metrics", "verb": "get"})
    assert not plane.allows(user, nonResourceAttributes={"path": "/logs", "verb": "get"})
    secret = {"namespace": namespace, "resource": "secrets", "verb": "list"}
    assert not plane.allows(user, resourceAttributes=secret)
    elsewhere = {"namespace": "default", "resource": "pods", "verb": "list"}
    assert not plane.allows(user, resourceAttributes=elsewhere)


def code(event: Object) -> int:
    """A watch that we cut ourselves may end without a status."""
    return int(event.get("responseStatus", {}).get("code", 0))
