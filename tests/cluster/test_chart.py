"""The chart on a real control plane, and a local dispatcher with the rights of the release."""

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
from tests.cluster.kubelet import NODE, Kubelet, is_ready, make_running_status, pod_path
from tests.kubelet import mount_file, replace_file
from tests.paths import DOCS
from tests.support import free_port, running_process, wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
OLD_POOLS = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferencepools"
REWRITES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferencemodelrewrites"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"
UNSERVED_GROUP = "llm-d.ai"
"""Second API group of rewrites and objectives, which this control plane does not serve."""
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles"
PICKER, OTHER_PICKER = "192.0.2.10", "192.0.2.11"
RELEASE = "night-batch-dispatcher"
MODEL_SERVER_PORT = 8000
"""Port of the model servers."""
CHANGE_TIMEOUT_S = 60.0
"""Time within which the dispatcher must show a change in the cluster."""
START_TIMEOUT_S = 180.0
"""Time within which the dispatcher must start, even on a busy machine."""


def make_values(pool: str = "qwen", **more_values: Any) -> dict[str, Any]:
    image = {"registry": "registry.example", "tag": "1"}
    return {"pool": {"name": pool}, "gateway": {"url": f"http://{PICKER}"}, "image": image} | more_values


ALL_OBJECTS = make_values(
    replicas=2,
    networkPolicy={"enabled": True},
    inferenceObjective={"create": True},
    checkHook={"enabled": True},
)
"""Values that create every hook and every object that needs no operator. The control plane serves the
InferenceObjective only in the group of the Inference Extension, which the chart finds out."""


def pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def list_release_pods(plane: ControlPlane, namespace: str, component: str = "dispatcher") -> list[Object]:
    """Return the pods of the release that are not terminating."""
    labels = f"app.kubernetes.io/component={component},app.kubernetes.io/instance=night"
    found = plane.list_objects(pods_path(namespace), labelSelector=labels)
    return [each for each in found if "deletionTimestamp" not in each["metadata"]]


def get_uids(pods: list[Object]) -> set[str]:
    return {str(each["metadata"]["uid"]) for each in pods}


def list_warnings(plane: ControlPlane, namespace: str) -> list[str]:
    """Return the warnings of controllers, for example about pods that are not admitted."""
    found = plane.list_objects(f"/api/v1/namespaces/{namespace}/events")
    return [f"{each['reason']}: {each['message']}" for each in found if each["type"] != "Normal"]


def test_release_runs_in_a_namespace_that_enforces_the_restricted_standard(
    plane: ControlPlane, helm: Helm, node: Kubelet
) -> None:
    """helm waits for the pods of the release and for its hooks."""
    components_run: list[str] = []

    def work(pod: dict[str, Any]) -> int:
        components_run.append(pod["metadata"]["labels"]["app.kubernetes.io/component"])
        return 0

    node.run_to_completion = work
    namespace = plane.create_namespace("restricted")
    output = helm.install("night", namespace, ALL_OBJECTS)
    assert "violate" not in output, "the API server must not warn of pods that it would reject"
    assert len(list_release_pods(plane, namespace)) == 2
    assert len(list_release_pods(plane, namespace, "valkey")) == 1
    (objective,) = plane.list_objects(OBJECTIVES.format(namespace))
    assert (objective["metadata"]["name"], objective["spec"]["priority"]) == (RELEASE, -10)
    helm("test", "night", "--namespace", namespace)
    assert components_run == ["check", "test"]
    assert list_warnings(plane, namespace) == []

    (pod, *_) = list_release_pods(plane, namespace)
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bad"}, "spec": pod["spec"]}
    manifest["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    answer = plane.admin.post(pods_path(namespace), json=manifest)
    assert answer.status_code == 403, "the namespace must enforce the standard"
    assert 'violates PodSecurity "restricted' in answer.json()["message"]


def test_reloadable_setting_restarts_no_pod_and_other_settings_replace_the_pods(
    plane: ControlPlane, helm: Helm
) -> None:
    namespace = plane.create_namespace("upgraded")
    config = f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}"

    def read_config() -> str:
        return str(plane.request("GET", config)["data"]["config.yaml"])

    helm.install("night", namespace, make_values(replicas=2, config={"budget": {"reserve": 0.1}}))
    first_uids, first_config = get_uids(list_release_pods(plane, namespace)), read_config()
    queue = get_uids(list_release_pods(plane, namespace, "valkey"))
    helm.upgrade("night", namespace, make_values(replicas=2, config={"budget": {"reserve": 0.2}}))
    assert "reserve: 0.2" in read_config()
    assert get_uids(list_release_pods(plane, namespace)) == first_uids, "a changed reserve restarts no pod"

    # A setting that cannot be reloaded replaces all pods, and starts each before it stops one.
    start = plane.get_resource_version(pods_path(namespace))
    helm.upgrade("night", namespace, make_values(replicas=2, config={"queue": {"name": "other"}}))
    second_uids = get_uids(list_release_pods(plane, namespace))
    assert (len(second_uids), second_uids & first_uids) == (2, set())
    plane.apply(pods_path(namespace), make_model_server("marker"))
    ready, existing = set(first_uids), set(first_uids)
    least_ready = most_existing = 2
    for change, pod in plane.watch_changes(start, pods_path(namespace), "marker"):
        uid = pod["metadata"]["uid"]
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "dispatcher":
            continue
        is_terminating = change == "DELETED" or "deletionTimestamp" in pod["metadata"]
        (existing.discard if is_terminating else existing.add)(uid)
        (ready.add if is_ready(pod) and not is_terminating else ready.discard)(uid)
        least_ready, most_existing = min(least_ready, len(ready)), max(most_existing, len(existing))
    assert (ready, least_ready, most_existing) == (second_uids, 2, 3)

    helm.rollback("night", namespace, 1)
    assert read_config() == first_config
    assert not get_uids(list_release_pods(plane, namespace)) & second_uids
    assert get_uids(list_release_pods(plane, namespace, "valkey")) == queue, (
        "the queue's server is never restarted"
    )
    assert list_warnings(plane, namespace) == []


def test_strategy_recreate_stops_all_pods_before_it_starts_new_ones(plane: ControlPlane, helm: Helm) -> None:
    """The values keep the defaults of a rolling update, which the API server rejects with this strategy."""
    namespace = plane.create_namespace("recreated")
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{RELEASE}"

    def read_strategy() -> Object:
        return dict(plane.request("GET", deployment)["spec"]["strategy"])

    recreate = make_values(replicas=2, strategy={"type": "Recreate"})
    helm.install("night", namespace, recreate)
    assert read_strategy() == {"type": "Recreate"}
    helm.upgrade("night", namespace, make_values(replicas=2))
    assert read_strategy() == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    first_uids = get_uids(list_release_pods(plane, namespace))
    start = plane.get_resource_version(pods_path(namespace))
    helm.upgrade("night", namespace, {**recreate, "config": {"queue": {"name": "other"}}})
    assert read_strategy() == {"type": "Recreate"}
    plane.apply(pods_path(namespace), make_model_server("marker"))
    stopped: set[str] = set()
    started: set[str] = set()
    for change, pod in plane.watch_changes(start, pods_path(namespace), "marker"):
        uid = pod["metadata"]["uid"]
        if change == "DELETED":
            stopped.add(uid)
        elif change == "ADDED":
            assert stopped == first_uids
            started.add(uid)
    assert started == get_uids(list_release_pods(plane, namespace))


def test_node_drain_evicts_one_replica_at_a_time(plane: ControlPlane, helm: Helm, node: Kubelet) -> None:
    namespace = plane.create_namespace("drained")
    helm.install("night", namespace, make_values(replicas=2))
    first, second = list_release_pods(plane, namespace)

    def evict(pod: Object) -> httpx.Response:
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod["metadata"]["name"]},
        }
        return plane.admin.post(f"{pod_path(pod)}/eviction", json=eviction)

    node.makes_pods_ready = False
    wait_until_sync(
        lambda: evict(first).status_code == 201, 30, what="the first pod can be evicted", every_s=0.2
    )
    refused = evict(second)
    assert refused.status_code == 429
    assert "violate the pod's disruption budget" in refused.json()["message"]

    # A pod that is not ready does not block an eviction.
    ready = get_uids([second])
    (unready,) = wait_until_sync(
        lambda: [
            each
            for each in list_release_pods(plane, namespace)
            if not get_uids([each]) & (ready | get_uids([first]))
        ],
        30,
        what="the replacement of the first pod",
    )
    assert evict(unready).status_code == 201
    node.makes_pods_ready = True
    wait_until_sync(
        lambda: evict(second).status_code == 201, 30, what="the second pod can be evicted", every_s=0.2
    )


@pytest.mark.parametrize("keep", [True, False])
def test_uninstalled_release_leaves_only_the_queue_volume_if_it_is_kept(
    plane: ControlPlane, helm: Helm, keep: bool
) -> None:
    namespace = plane.create_namespace("left")
    before = plane.list_all_objects().keys()
    values = {**ALL_OBJECTS, "valkey": {"persistence": {"keep": keep}}}
    helm.install("night", namespace, values)
    helm.upgrade("night", namespace, {**values, "networkPolicy": {"enabled": False}})
    helm.rollback("night", namespace, 1)
    assert len(plane.list_all_objects().keys() - before) > 20
    helm.uninstall("night", namespace)
    expected_objects = (
        {f"/api/v1/persistentvolumeclaims {namespace}/data-{RELEASE}-valkey-0"} if keep else set()
    )

    def find_remaining() -> set[str]:
        return set(plane.list_all_objects().keys() - before)

    with suppress(pytest.fail.Exception):
        wait_until_sync(lambda: find_remaining() == expected_objects, 60, every_s=0.5)
    assert find_remaining() == expected_objects


def test_two_releases_of_a_namespace_do_not_touch_each_other(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.create_namespace("shared")
    before = plane.list_all_objects().keys()
    helm.install("day", namespace, {**ALL_OBJECTS, **make_values("llama")})
    day = wait_for_stable_objects(plane, before)
    helm.install("night", namespace, ALL_OBJECTS)
    assert len(wait_for_stable_objects(plane, before)) == 2 * len(day), "each release has its own objects"
    helm.upgrade("night", namespace, {**ALL_OBJECTS, "replicas": 3})
    helm.rollback("night", namespace, 1)
    helm.uninstall("night", namespace)
    volume = f"/api/v1/persistentvolumeclaims {namespace}/data-{RELEASE}-valkey-0"
    left = wait_for_stable_objects(plane, before)
    assert left.pop(volume)
    assert left == day, "no object of the other release was changed"


def wait_for_stable_objects(plane: ControlPlane, before: Any) -> dict[str, str]:
    """Wait until the cluster is stable, and return the version of every object that was not there before."""
    last: dict[str, str] = {}

    def is_stable() -> bool:
        nonlocal last
        found = plane.list_all_objects()
        previous, last = last, {where: found[where]["resourceVersion"] for where in found.keys() - before}
        return previous == last

    wait_until_sync(is_stable, 60, what="the controllers have finished", every_s=1)
    return last


def test_token_of_the_guide_can_read_only_metrics(plane: ControlPlane) -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    (text,) = re.findall(r"<!-- picker token -->\n```yaml\n(.*?)```", page, re.DOTALL)
    namespace = plane.create_namespace("token")
    for each in yaml.safe_load_all(text.replace("namespace: llm", f"namespace: {namespace}")):
        plane.create(each)
    path = f"/api/v1/namespaces/{namespace}/secrets/picker-metrics"
    secret = wait_until_sync(
        lambda: (found := plane.request("GET", path)) and found.get("data", {}).get("token"),
        30,
        what="the token is in the secret",
        every_s=0.1,
    )
    user = {"Authorization": f"Bearer {base64.b64decode(secret).decode()}"}
    assert plane.admin.get("/metrics", headers=user).status_code == 200
    for refused in ("/logs", f"/api/v1/namespaces/{namespace}/pods"):
        assert plane.admin.get(refused, headers=user).status_code == 403


# A local dispatcher with the rights of the release.


def make_model_server(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {
            "nodeName": NODE,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "server",
                    "image": "server",
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
    """Namespace of a pool whose model servers and endpoint picker the test creates."""

    plane: ControlPlane
    namespace: str

    def start_pod(self, name: str, address: str, *, app: str = "vllm") -> None:
        manifest = make_model_server(name)
        manifest["metadata"]["labels"] = {"app": app}
        self.plane.apply(pods_path(self.namespace), manifest)
        self.set_ready(name, address, ready=True)

    def set_ready(self, name: str, address: str, *, ready: bool) -> None:
        pod = self.plane.request("GET", self._path(name))
        self.plane.patch(
            f"{self._path(name)}/status", {"status": make_running_status(pod, address, ready=ready)}
        )

    def delete_pod(self, name: str, *, grace_s: int = 30) -> None:
        """Delete a pod. With a grace period it only starts to terminate, like a draining pod."""
        self.plane.request("DELETE", self._path(name), {"gracePeriodSeconds": grace_s})

    def make_pool(self) -> None:
        self.plane.apply(POOLS.format(self.namespace), make_pool_manifest())

    def make_picker(self) -> None:
        self.plane.apply(f"/api/v1/namespaces/{self.namespace}/services", make_picker_service())

    def _path(self, name: str) -> str:
        return pod_path({"metadata": {"namespace": self.namespace, "name": name}})


def make_pool_manifest() -> Object:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": MODEL_SERVER_PORT}],
            "endpointPickerRef": {"kind": "Service", "name": "qwen-epp", "port": {"number": 9002}},
        },
    }


def make_rewrite(model: str, target: str) -> Object:
    rule = {
        "matches": [{"model": {"type": "Exact", "value": model}}],
        "targets": [{"modelRewrite": target, "weight": 1}],
    }
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": {"name": model},
        "spec": {"poolRef": {"name": "qwen"}, "rules": [rule]},
    }


def make_old_pool() -> Object:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "selector": {"app": "vllm"},
            "targetPortNumber": MODEL_SERVER_PORT,
            "extensionRef": {"name": "qwen-epp"},
        },
    }


def make_picker_service() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "qwen-epp"},
        "spec": {"selector": {"app": "qwen-epp"}, "ports": [{"port": 9002}]},
    }


@dataclass
class LocalDispatcher:
    """A dispatcher of this checkout with the file and token of a pod of the release."""

    values: Mapping[str, Any]
    read_config: Callable[[], str]
    """Return the configuration in the ConfigMap of the release, with the local address of the queue."""
    config: Path
    environ: Mapping[str, str]
    http: httpx.Client

    def sync(self) -> None:
        """Update the file from the ConfigMap, as a kubelet does each minute."""
        replace_file(self.config.parent, self.read_config())

    def status(self) -> Object:
        with suppress(httpx.TransportError):
            return dict(self.http.get("/status").json())
        return {}

    def wait_for(self, **expected: Any) -> Object:
        last_status: Object = {}

        def matches() -> bool:
            nonlocal last_status
            last_status = self.status()
            return bool(last_status) and all(last_status[name] == value for name, value in expected.items())

        try:
            wait_until_sync(matches, CHANGE_TIMEOUT_S, what=str(expected), every_s=0.05)
        except pytest.fail.Exception:
            relevant = {name: last_status.get(name) for name in (*expected, "explanation", "watch_problems")}
            pytest.fail(f"expected {expected}, last status: {relevant}")
        return last_status

    def wait_for_model(self, name: str, *, served: bool) -> None:
        def matches() -> bool:
            models = {each["name"]: each for each in self.status().get("models", ())}
            return name in models and bool(models[name]["serving"]) is served

        wait_until_sync(
            matches, CHANGE_TIMEOUT_S, what=f"{name} is {'' if served else 'not '}served", every_s=0.05
        )

    def run_command(self, *arguments: str, token: bool = True) -> subprocess.CompletedProcess[str]:
        """Run another command with the same file, with the token only if its pod mounts one."""
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
    return Cluster(plane, plane.create_namespace("pool"))


@pytest.fixture
def dispatcher(cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[LocalDispatcher]:
    """Install the release and run its dispatcher locally. Only an address in its file is changed."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.fail(str(error))
    plane, namespace = cluster.plane, cluster.namespace
    admin, queue, gateway, picker = (free_port() for _ in range(4))
    values = make_values(
        gateway={"url": f"http://{PICKER}:{gateway}"},
        config={
            "admin": {"port": admin},
            "signals": {"interval_s": 0.2, "epp": {"port": picker}},
            "budget": {"per_endpoint": 4},
            "models": [{"name": "qwen"}, {"name": "chat", "when_not_served": "fail"}],
            "serving": {"interval_s": 0.5},
        },
    )
    helm.install("night", namespace, values)
    host = f"{RELEASE}-valkey.{namespace}.svc:6379"

    def read_config() -> str:
        found = plane.request("GET", f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}")
        assert host in found["data"]["config.yaml"]
        return str(found["data"]["config.yaml"]).replace(host, f"127.0.0.1:{queue}")

    config = mount_file(tmp_path / "config", read_config())
    kubeconfig = plane.write_kubeconfig("release", plane.create_token(namespace, RELEASE), namespace)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")}
    environ = {**clean, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}
    with ExitStack() as stack:
        valkey = ("--port", str(queue), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
        stack.enter_context(running_process(server, *valkey))
        flags = (f"--host={PICKER}", f"--port={gateway}", f"--metrics-port={picker}")
        stand_in = (
            sys.executable,
            "-m",
            "dispatcher.lab.standin",
            "--slots=32",
            "--endpoints=8",
            "--seconds=0.1",
        )
        stack.enter_context(running_process(*stand_in, *flags))
        server_options = (
            "--host=0.0.0.0",
            f"--port={MODEL_SERVER_PORT}",
            "--models=qwen",
        )  # All pods have an address of this machine.
        stack.enter_context(running_process(sys.executable, "-m", "dispatcher.lab.standin", *server_options))
        log = stack.enter_context((tmp_path / "dispatcher.log").open("wb"))
        run = (sys.executable, "-m", "dispatcher", "run", "--config", config)
        stack.enter_context(running_process(*run, env=environ, stdout=log, stderr=log, stop_s=30))
        client = httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=5, trust_env=False)
        dispatcher = LocalDispatcher(values, read_config, config, environ, stack.enter_context(client))
        wait_until_sync(
            dispatcher.status, START_TIMEOUT_S, what="the dispatcher answers /status", every_s=0.2
        )
        yield dispatcher


def test_dispatcher_follows_pool_endpoints_and_picker_with_the_rights_of_the_release(
    cluster: Cluster, dispatcher: LocalDispatcher
) -> None:
    plane, namespace = cluster.plane, cluster.namespace
    cluster.make_picker()
    missing = f"InferencePool {namespace}/qwen does not exist (look at: pool.name, pool.namespace)"
    dispatcher.wait_for(watch_endpoints=0, watch_problems=[missing])

    # The pool exists first in v1alpha2, then in both versions, then in v1.
    plane.apply(OLD_POOLS.format(namespace), make_old_pool())
    for number in range(3):
        cluster.start_pod(f"server-{number}", f"192.0.2.{20 + number}")
    why = "has no ready endpoint: no endpoint picker runs (look at: the picker's pods)"
    no_picker = f"Service {namespace}/qwen-epp {why}"
    dispatcher.wait_for(watch_endpoints=3, watch_problems=[no_picker])
    cluster.make_pool()
    plane.request("DELETE", f"{OLD_POOLS.format(namespace)}/qwen")
    dispatcher.wait_for(watch_endpoints=3, watch_problems=[no_picker])

    # Requests are sent and answered only with a picker.
    cluster.start_pod("picker", PICKER, app="qwen-epp")
    dispatcher.wait_for(max_sys=12, max_sys_source="watch", watch_problems=[])
    answered = dispatcher.run_command(
        "submit", '{"model": "qwen", "prompt": "hi", "max_tokens": 1}', "--deadline", "30"
    )
    assert answered.returncode == 0, answered.stderr
    assert '"choices"' in answered.stdout

    # The capacity follows the number of ready pods.
    cluster.set_ready("server-0", "192.0.2.20", ready=False)
    dispatcher.wait_for(watch_endpoints=2, max_sys=8)
    cluster.set_ready("server-0", "192.0.2.20", ready=True)
    dispatcher.wait_for(watch_endpoints=3, max_sys=12)
    cluster.delete_pod("server-1")
    dispatcher.wait_for(watch_endpoints=2)
    cluster.delete_pod("server-1", grace_s=0)
    for number in range(3, 6):
        cluster.start_pod(f"server-{number}", f"192.0.2.{20 + number}")
    dispatcher.wait_for(watch_endpoints=5, max_sys=20)
    plane.patch(f"{POOLS.format(namespace)}/qwen", {"spec": {"selector": {"matchLabels": {"app": "none"}}}})
    dispatcher.wait_for(watch_endpoints=0, max_sys=0)
    plane.patch(f"{POOLS.format(namespace)}/qwen", {"spec": {"selector": {"matchLabels": {"app": "vllm"}}}})
    dispatcher.wait_for(watch_endpoints=5, max_sys=20)

    # A name that the picker rewrites to a served model is served as long as the rewrite exists.
    chat = '{"model": "chat", "prompt": "hi", "max_tokens": 1}'
    rewrites = REWRITES.format(namespace)
    for served in (False, True, False):
        if served:
            plane.apply(rewrites, make_rewrite("chat", "qwen"))
        elif plane.get(f"{rewrites}/chat"):
            plane.request("DELETE", f"{rewrites}/chat")
        dispatcher.wait_for_model("chat", served=served)
        answered = dispatcher.run_command("submit", chat, "--deadline", "30")
        assert (answered.returncode == 0) is served, answered.stderr + answered.stdout
        assert ("MODEL_NOT_FOUND" in answered.stdout + answered.stderr) is not served

    # A picker replica that does not answer closes the gate, because its queue is unknown.
    cluster.start_pod("other-picker", OTHER_PICKER, app="qwen-epp")
    last_status = dispatcher.wait_for(reason="unreadable")
    assert OTHER_PICKER in last_status["explanation"]
    cluster.delete_pod("other-picker", grace_s=0)
    dispatcher.wait_for(max_sys=20, signals_problem=None)

    checked = dispatcher.run_command("check")
    assert PICKER in checked.stdout + checked.stderr

    check_used_rights(plane, namespace)


def test_upgrade_reaches_the_running_dispatcher_and_helm_returns_the_result_of_its_hooks(
    cluster: Cluster, dispatcher: LocalDispatcher, helm: Helm, node: Kubelet
) -> None:
    """`helm test` and the check after an upgrade run the real commands of admitted pods."""
    namespace, commands_run = cluster.namespace, []

    def run(pod: Object) -> int:
        (container,) = pod["spec"]["containers"]
        arguments = list(container["args"])
        at = arguments.index("--config")
        del arguments[at : at + 2]
        token = any(each["mountPath"].endswith("/serviceaccount") for each in container["volumeMounts"])
        status = dispatcher.run_command(*arguments, token=token).returncode
        commands_run.append((arguments[0], token, status))
        return status

    node.run_to_completion = run
    cluster.make_picker()
    cluster.make_pool()
    cluster.start_pod("picker", PICKER, app="qwen-epp")
    cluster.start_pod("server", "192.0.2.20")
    dispatcher.wait_for(max_sys=4)
    helm("test", "night", "--namespace", namespace)
    before = get_uids(list_release_pods(cluster.plane, namespace))
    changed = {**dispatcher.values["config"], "budget": {"per_endpoint": 4, "reserve": 0.5}}
    with_hooks = {"config": changed, "checkHook": {"enabled": True}, "test": {"deadline": 2}}
    helm.upgrade("night", namespace, {**dispatcher.values, **with_hooks})
    assert commands_run == [("submit", False, 0), ("check", True, 0)]
    assert get_uids(list_release_pods(cluster.plane, namespace)) == before
    dispatcher.sync()
    dispatcher.wait_for(reserve=0.5, limit=2, config_problem=None)

    # `helm test` fails if no endpoint serves the pool.
    cluster.plane.request("DELETE", f"{POOLS.format(namespace)}/qwen")
    dispatcher.wait_for(max_sys=0)
    assert helm.run_unchecked("test", "night", "--namespace", namespace).returncode != 0
    verb, _, status = commands_run[-1]
    assert verb == "submit"
    assert status != 0
    assert list_release_pods(cluster.plane, namespace, "test") == [], "an uninstall would leave it"


def check_used_rights(plane: ControlPlane, namespace: str) -> None:
    """Assert that the requests of the release use exactly the rights of its Role and none was refused."""
    user = f"system:serviceaccount:{namespace}:{RELEASE}"
    requests = plane.find_audit_events(user)
    refused = {
        each["requestURI"]: each["responseStatus"] for each in requests if get_status_code(each) >= 400
    }
    assert {
        uri: status_object for uri, status_object in refused.items() if not is_unserved(uri, status_object)
    } == {}
    agents = {each["userAgent"] for each in requests}
    assert agents == {f"batch-dispatcher/{__version__}"}
    references = [each["objectRef"] for each in requests]
    assert {each["namespace"] for each in references} == {namespace}
    used = {
        (each.get("apiGroup", ""), each["resource"], event["verb"])
        for each, event in zip(references, requests, strict=True)
    }
    role = plane.request("GET", f"{ROLES.format(namespace)}/{RELEASE}")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if (group, verb) != (UNSERVED_GROUP, "watch")  # A watch follows a successful list.
    }
    assert used == granted

    # The ClusterRole allows the picker to verify the token for its metrics.
    assert plane.is_allowed(user, nonResourceAttributes={"path": "/metrics", "verb": "get"})
    assert not plane.is_allowed(user, nonResourceAttributes={"path": "/logs", "verb": "get"})
    secret = {"namespace": namespace, "resource": "secrets", "verb": "list"}
    assert not plane.is_allowed(user, resourceAttributes=secret)
    elsewhere = {"namespace": "default", "resource": "pods", "verb": "list"}
    assert not plane.is_allowed(user, resourceAttributes=elsewhere)


def is_unserved(uri: str, status_object: Object) -> bool:
    return uri.startswith(f"/apis/{UNSERVED_GROUP}/") and status_object["code"] == 404


def get_status_code(event: Object) -> int:
    """Return the status of an event, or 0 for a watch that the client ended."""
    return int(event.get("responseStatus", {}).get("code", 0))
