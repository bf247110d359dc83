"""The chart on a real control plane, and the dispatcher beside it with no rights but the release's."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
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
from tests.cluster.kubelet import NODE, Kubelet, is_ready, path_of, status
from tests.kubelet import mount, swap
from tests.paths import DOCS
from tests.support import free_port, running, wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
OLD_POOLS = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferencepools"
REWRITES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferencemodelrewrites"
UNSERVED = "llm-d.ai"
"""The other group of rewrites, which this control plane does not have."""
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles"
PICKER, OTHER_PICKER = "192.0.2.10", "192.0.2.11"
RELEASE = "night-batch-dispatcher"
SERVES = 8000
"""The model servers' port."""
FOLLOWED_S = 60.0
"""Within this the dispatcher shows what changed in the cluster."""
STARTED_S = 180.0
"""Within this it has started, on a busy machine too."""


def values(pool: str = "qwen", **more: Any) -> dict[str, Any]:
    return {"pool": {"name": pool}, "gateway": {"url": f"http://{PICKER}"}} | more


WHOLE = values(
    replicas=2,
    networkPolicy={"enabled": True},
    inferenceObjective={"create": True, "apiVersion": "inference.networking.x-k8s.io/v1alpha2"},
    checkHook={"enabled": True},
)
"""Every object that needs no operator, and every hook."""


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def ours(plane: ControlPlane, namespace: str, component: str = "dispatcher") -> list[Object]:
    """The release's pods that are not about to end."""
    labels = f"app.kubernetes.io/component={component},app.kubernetes.io/instance=night"
    found = plane.items(pods(namespace), labelSelector=labels)
    return [each for each in found if "deletionTimestamp" not in each["metadata"]]


def uids(of: list[Object]) -> set[str]:
    return {str(each["metadata"]["uid"]) for each in of}


def complaints(plane: ControlPlane, namespace: str) -> list[str]:
    """What controllers could not do: a pod that is not admitted is a warning of the ReplicaSet."""
    found = plane.items(f"/api/v1/namespaces/{namespace}/events")
    return [f"{each['reason']}: {each['message']}" for each in found if each["type"] != "Normal"]


def test_all_of_it_runs_where_the_standard_restricted_is_enforced(
    plane: ControlPlane, helm: Helm, node: Kubelet
) -> None:
    """helm waits for pods that controllers made of the release, and for its hooks."""
    done: list[str] = []

    def work(pod: dict[str, Any]) -> int:
        done.append(pod["metadata"]["labels"]["app.kubernetes.io/component"])
        return 0

    node.work = work
    namespace = plane.namespace("restricted")
    said = helm.install("night", namespace, WHOLE)
    assert "violate" not in said, "the API server warned of a Deployment whose pods it would refuse"
    assert len(ours(plane, namespace)) == 2
    assert len(ours(plane, namespace, "valkey")) == 1
    helm("test", "night", "--namespace", namespace)
    assert done == ["check", "test"]
    assert complaints(plane, namespace) == []

    (bad, *_) = ours(plane, namespace)
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bad"}, "spec": bad["spec"]}
    manifest["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    answer = plane.admin.post(pods(namespace), json=manifest)
    assert answer.status_code == 403, "or this would prove nothing"
    assert 'violates PodSecurity "restricted' in answer.json()["message"]


def test_a_threshold_restarts_nothing_and_what_is_bound_at_the_start_does(
    plane: ControlPlane, helm: Helm
) -> None:
    namespace = plane.namespace("upgraded")
    config = f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}"

    def text() -> str:
        return str(plane.ask("GET", config)["data"]["config.yaml"])

    helm.install("night", namespace, values(replicas=2, config={"budget": {"reserve": 0.1}}))
    first, first_text = uids(ours(plane, namespace)), text()
    queue = uids(ours(plane, namespace, "valkey"))
    helm.upgrade("night", namespace, values(replicas=2, config={"budget": {"reserve": 0.2}}))
    assert "reserve: 0.2" in text()
    assert uids(ours(plane, namespace)) == first, "a changed reserve restarts no pod"

    # What cannot change in a running dispatcher replaces all, one more before one less.
    start = plane.version(pods(namespace))
    helm.upgrade("night", namespace, values(replicas=2, config={"queue": {"name": "other"}}))
    second = uids(ours(plane, namespace))
    assert (len(second), second & first) == (2, set())
    plane.apply(pods(namespace), model_server("marker"))
    ready, there = set(first), set(first)
    fewest = most = 2
    for change, pod in plane.since(start, pods(namespace), "marker"):
        uid = pod["metadata"]["uid"]
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "dispatcher":
            continue
        going = change == "DELETED" or "deletionTimestamp" in pod["metadata"]
        (there.discard if going else there.add)(uid)
        (ready.add if is_ready(pod) and not going else ready.discard)(uid)
        fewest, most = min(fewest, len(ready)), max(most, len(there))
    assert (ready, fewest, most) == (second, 2, 3)

    helm.rollback("night", namespace, 1)
    assert text() == first_text
    assert not uids(ours(plane, namespace)) & second
    assert uids(ours(plane, namespace, "valkey")) == queue, "the queue's server is never restarted"
    assert complaints(plane, namespace) == []


def test_a_drained_node_takes_one_replica_at_a_time(plane: ControlPlane, helm: Helm, node: Kubelet) -> None:
    namespace = plane.namespace("drained")
    helm.install("night", namespace, values(replicas=2))
    first, second = ours(plane, namespace)

    def evict(pod: Object) -> httpx.Response:
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod["metadata"]["name"]},
        }
        return plane.admin.post(f"{path_of(pod)}/eviction", json=eviction)

    node.readies = False
    wait_until_sync(lambda: evict(first).status_code == 201, 30, what="the first may go", every_s=0.2)
    refused = evict(second)
    assert refused.status_code == 429
    assert "violate the pod's disruption budget" in refused.json()["message"]

    # One that is not ready holds up nobody.
    ready = uids([second])
    (unready,) = wait_until_sync(
        lambda: [each for each in ours(plane, namespace) if not uids([each]) & (ready | uids([first]))],
        30,
        what="the one that comes for the first",
    )
    assert evict(unready).status_code == 201
    node.readies = True
    wait_until_sync(lambda: evict(second).status_code == 201, 30, what="the second may go", every_s=0.2)


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_uninstalled_leaves_its_queue_s_volume_or_nothing(
    plane: ControlPlane, helm: Helm, keep: bool
) -> None:
    namespace = plane.namespace("left")
    before = plane.everything().keys()
    given = {**WHOLE, "valkey": {"persistence": {"keep": keep}}}
    helm.install("night", namespace, given)
    helm.upgrade("night", namespace, {**given, "networkPolicy": {"enabled": False}})
    helm.rollback("night", namespace, 1)
    assert len(plane.everything().keys() - before) > 20
    helm.uninstall("night", namespace)
    kept = {f"/api/v1/persistentvolumeclaims {namespace}/data-{RELEASE}-valkey-0"} if keep else set()

    def left() -> set[str]:
        return set(plane.everything().keys() - before)

    with suppress(pytest.fail.Exception):
        wait_until_sync(lambda: left() == kept, 60, every_s=0.5)
    assert left() == kept


def test_two_releases_of_a_namespace_do_not_touch_each_other(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.namespace("shared")
    before = plane.everything().keys()
    helm.install("day", namespace, {**WHOLE, **values("llama")})
    day = settled(plane, before)
    helm.install("night", namespace, WHOLE)
    assert len(settled(plane, before)) == 2 * len(day), "each has objects of its own"
    helm.upgrade("night", namespace, {**WHOLE, "replicas": 3})
    helm.rollback("night", namespace, 1)
    helm.uninstall("night", namespace)
    volume = f"/api/v1/persistentvolumeclaims {namespace}/data-{RELEASE}-valkey-0"
    left = settled(plane, before)
    assert left.pop(volume)
    assert left == day, "nothing of the other was ever changed"


def settled(plane: ControlPlane, before: Any) -> dict[str, str]:
    """Everything that was not there before, each with the version that any change changes."""
    last: dict[str, str] = {}

    def stays() -> bool:
        nonlocal last
        found = plane.everything()
        seen, last = last, {where: found[where]["resourceVersion"] for where in found.keys() - before}
        return seen == last

    wait_until_sync(stays, 60, what="the controllers have done what there was to do", every_s=1)
    return last


def test_token_of_the_guide_may_read_metrics_and_nothing_else(plane: ControlPlane) -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    (text,) = re.findall(r"<!-- picker token -->\n```yaml\n(.*?)```", page, re.DOTALL)
    namespace = plane.namespace("token")
    for each in yaml.safe_load_all(text.replace("namespace: llm", f"namespace: {namespace}")):
        plane.create(each)
    path = f"/api/v1/namespaces/{namespace}/secrets/picker-metrics"
    secret = wait_until_sync(
        lambda: (found := plane.ask("GET", path)) and found.get("data", {}).get("token"),
        30,
        what="Kubernetes puts the token into it",
        every_s=0.1,
    )
    user = {"Authorization": f"Bearer {base64.b64decode(secret).decode()}"}
    assert plane.admin.get("/metrics", headers=user).status_code == 200
    for refused in ("/logs", f"/api/v1/namespaces/{namespace}/pods"):
        assert plane.admin.get(refused, headers=user).status_code == 403


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

    def start(self, name: str, address: str, *, app: str = "vllm") -> None:
        manifest = model_server(name)
        manifest["metadata"]["labels"] = {"app": app}
        self.plane.apply(pods(self.namespace), manifest)
        self.turn(name, address, ready=True)

    def turn(self, name: str, address: str, *, ready: bool) -> None:
        pod = self.plane.ask("GET", self._path(name))
        self.plane.patch(f"{self._path(name)}/status", {"status": status(pod, address, ready=ready)})

    def end(self, name: str, *, grace_s: int = 30) -> None:
        """With a grace it only begins to end, as a pod that drains."""
        self.plane.ask("DELETE", self._path(name), {"gracePeriodSeconds": grace_s})

    def make_pool(self) -> None:
        self.plane.apply(POOLS.format(self.namespace), new_pool())

    def make_picker(self) -> None:
        self.plane.apply(f"/api/v1/namespaces/{self.namespace}/services", picker_service())

    def _path(self, name: str) -> str:
        return path_of({"metadata": {"namespace": self.namespace, "name": name}})


def new_pool() -> Object:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": SERVES}],
            "endpointPickerRef": {"kind": "Service", "name": "qwen-epp", "port": {"number": 9002}},
        },
    }


def new_rewrite(of: str, to: str) -> Object:
    rule = {
        "matches": [{"model": {"type": "Exact", "value": of}}],
        "targets": [{"modelRewrite": to, "weight": 1}],
    }
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": {"name": of},
        "spec": {"poolRef": {"name": "qwen"}, "rules": [rule]},
    }


def old_pool() -> Object:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "selector": {"app": "vllm"},
            "targetPortNumber": SERVES,
            "extensionRef": {"name": "qwen-epp"},
        },
    }


def picker_service() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "qwen-epp"},
        "spec": {"selector": {"app": "qwen-epp"}, "ports": [{"port": 9002}]},
    }


@dataclass
class Beside:
    """A dispatcher of this checkout with the file, and the token, that a pod of the release would have."""

    values: Mapping[str, Any]
    text: Callable[[], str]
    """Of the release's ConfigMap, with the one address changed."""
    config: Path
    environ: Mapping[str, str]
    http: httpx.Client

    def sync(self) -> None:
        """Bring the ConfigMap as it is now, as a kubelet does each minute."""
        swap(self.config.parent, self.text())

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

    def wait_for_model(self, name: str, *, served: bool) -> None:
        def fits() -> bool:
            models = {each["name"]: each for each in self.status().get("models", ())}
            return name in models and bool(models[name]["serving"]) is served

        wait_until_sync(fits, FOLLOWED_S, what=f"{name} is {'' if served else 'not '}served", every_s=0.05)

    def run_command(self, *arguments: str, token: bool = True) -> subprocess.CompletedProcess[str]:
        """Another command with the same file; a pod that mounts no token has none here."""
        return subprocess.run(
            [sys.executable, "-m", "dispatcher", *arguments, "--config", str(self.config)],
            env={name: value for name, value in self.environ.items() if token or name != "KUBECONFIG"},
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
            "models": [{"name": "qwen"}, {"name": "chat", "when_not_served": "fail"}],
            "serving": {"interval_s": 0.5},
        },
    )
    helm.install("night", namespace, given)
    host = f"{RELEASE}-valkey.{namespace}.svc:6379"

    def text() -> str:
        found = plane.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}")
        assert host in found["data"]["config.yaml"]
        return str(found["data"]["config.yaml"]).replace(host, f"127.0.0.1:{queue}")

    config = mount(tmp_path / "config", text())
    kubeconfig = plane.kubeconfig("release", plane.token(namespace, RELEASE), namespace)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")}
    environ = {**clean, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}
    with ExitStack() as stack:
        valkey = ("--port", str(queue), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
        stack.enter_context(running(server, *valkey))
        flags = (f"--host={PICKER}", f"--port={gateway}", f"--metrics-port={picker}")
        sim = (sys.executable, "-m", "dispatcher.lab.standin", "--slots=32", "--endpoints=8", "--seconds=0.1")
        stack.enter_context(running(*sim, *flags))
        servers = (
            "--host=0.0.0.0",
            f"--port={SERVES}",
            "--models=qwen",
        )  # every pod's address is this machine's
        stack.enter_context(running(sys.executable, "-m", "dispatcher.lab.standin", *servers))
        log = stack.enter_context((tmp_path / "dispatcher.log").open("wb"))
        run = (sys.executable, "-m", "dispatcher", "run", "--config", config)
        stack.enter_context(running(*run, env=environ, stdout=log, stderr=log, stop_s=30))
        client = httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5, trust_env=False)
        made = Beside(given, text, config, environ, stack.enter_context(client))
        wait_until_sync(made.status, STARTED_S, what="the dispatcher answers /status", every_s=0.2)
        yield made


def test_it_finds_pool_endpoints_and_picker_by_the_release_s_rights_and_uses_each_of_them(
    cluster: Cluster, beside: Beside
) -> None:
    plane, namespace = cluster.plane, cluster.namespace
    cluster.make_picker()
    missing = f"InferencePool {namespace}/qwen does not exist (look at: pool.name, pool.namespace)"
    beside.wait_for(watch_endpoints=0, watch_problems=[missing])

    # The pool as v1alpha2 alone has it, then as both have it, then as v1 alone has it.
    plane.apply(OLD_POOLS.format(namespace), old_pool())
    for number in range(3):
        cluster.start(f"server-{number}", f"192.0.2.{20 + number}")
    why = "has no ready endpoint: no endpoint picker runs (look at: the picker's pods)"
    alone = f"Service {namespace}/qwen-epp {why}"
    beside.wait_for(watch_endpoints=3, watch_problems=[alone])
    cluster.make_pool()
    plane.ask("DELETE", f"{OLD_POOLS.format(namespace)}/qwen")
    beside.wait_for(watch_endpoints=3, watch_problems=[alone])

    # Without a picker nothing is sent; with one, requests are answered.
    cluster.start("picker", PICKER, app="qwen-epp")
    beside.wait_for(max_sys=12, max_sys_source="watch", watch_problems=[])
    answered = beside.run_command(
        "submit", '{"model": "qwen", "prompt": "hi", "max_tokens": 1}', "--deadline", "30"
    )
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

    # A name that the picker turns into a served one is served, for as long as it does.
    chat = '{"model": "chat", "prompt": "hi", "max_tokens": 1}'
    rewrites = REWRITES.format(namespace)
    for served in (False, True, False):
        if served:
            plane.apply(rewrites, new_rewrite("chat", "qwen"))
        elif plane.get(f"{rewrites}/chat"):
            plane.ask("DELETE", f"{rewrites}/chat")
        beside.wait_for_model("chat", served=served)
        answered = beside.run_command("submit", chat, "--deadline", "30")
        assert (answered.returncode == 0) is served, answered.stderr + answered.stdout
        assert ("MODEL_NOT_FOUND" in answered.stdout + answered.stderr) is not served

    # So do the picker's replicas: one that does not answer hides its queue, and that closes the gate.
    cluster.start("other-picker", OTHER_PICKER, app="qwen-epp")
    seen = beside.wait_for(reason="unreadable")
    assert OTHER_PICKER in seen["explanation"]
    cluster.end("other-picker", grace_s=0)
    beside.wait_for(max_sys=20, signals_problem=None)

    checked = beside.run_command("check")
    assert PICKER in checked.stdout + checked.stderr

    judge(plane, namespace)


def test_an_upgrade_reaches_what_runs_and_the_hooks_answer_is_helm_s(
    cluster: Cluster, beside: Beside, helm: Helm, node: Kubelet
) -> None:
    """`helm test` and the check after an upgrade: pods that were admitted, their commands run for real."""
    namespace, ran = cluster.namespace, []

    def run(pod: Object) -> int:
        (container,) = pod["spec"]["containers"]
        words = list(container["args"])
        at = words.index("--config")
        del words[at : at + 2]
        token = any(each["mountPath"].endswith("/serviceaccount") for each in container["volumeMounts"])
        status = beside.run_command(*words, token=token).returncode
        ran.append((words[0], token, status))
        return status

    node.work = run
    cluster.make_picker()
    cluster.make_pool()
    cluster.start("picker", PICKER, app="qwen-epp")
    cluster.start("server", "192.0.2.20")
    beside.wait_for(max_sys=4)
    helm("test", "night", "--namespace", namespace)
    before = uids(ours(cluster.plane, namespace))
    changed = {**beside.values["config"], "budget": {"per_endpoint": 4, "reserve": 0.5}}
    hooked = {"config": changed, "checkHook": {"enabled": True}, "test": {"deadline": 2}}
    helm.upgrade("night", namespace, {**beside.values, **hooked})
    assert ran == [("submit", False, 0), ("check", True, 0)]
    assert uids(ours(cluster.plane, namespace)) == before
    beside.sync()
    beside.wait_for(reserve=0.5, limit=2, config_problem=None)

    # A pool that nobody serves: no answer, and helm says so.
    cluster.plane.ask("DELETE", f"{POOLS.format(namespace)}/qwen")
    beside.wait_for(max_sys=0)
    assert helm.tried("test", "night", "--namespace", namespace).returncode != 0
    verb, _, status = ran[-1]
    assert verb == "submit"
    assert status != 0


def judge(plane: ControlPlane, namespace: str) -> None:
    """What was asked in the release's name, beside what its Role allows: the same, and nothing refused."""
    user = f"system:serviceaccount:{namespace}:{RELEASE}"
    asked = plane.audited(user)
    refused = {each["requestURI"]: each["responseStatus"] for each in asked if code(each) >= 400}
    assert {uri: said for uri, said in refused.items() if not unserved(uri, said)} == {}
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
        if (group, verb) != (UNSERVED, "watch")  # for it must be listed first
    }
    assert used == granted

    # The ClusterRole is for the picker, which asks Kubernetes whether it may answer a token.
    assert plane.allows(user, nonResourceAttributes={"path": "/metrics", "verb": "get"})
    assert not plane.allows(user, nonResourceAttributes={"path": "/logs", "verb": "get"})
    secret = {"namespace": namespace, "resource": "secrets", "verb": "list"}
    assert not plane.allows(user, resourceAttributes=secret)
    elsewhere = {"namespace": "default", "resource": "pods", "verb": "list"}
    assert not plane.allows(user, resourceAttributes=elsewhere)


def unserved(uri: str, said: Object) -> bool:
    return uri.startswith(f"/apis/{UNSERVED}/") and said["code"] == 404


def code(event: Object) -> int:
    """A watch that we cut ourselves may end without a status."""
    return int(event.get("responseStatus", {}).get("code", 0))
