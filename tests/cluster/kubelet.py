"""A stand-in for scheduler and kubelet: it gives pods a node and an address and makes them ready or ended.

No container runs. For pods that run to completion, a test sets `run_to_completion`, which can run the command
of the pod outside the cluster and returns its exit status.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx

from tests.cluster.control_plane import ControlPlane, Object

NODE = "stand-in"
POD_LABEL = "app.kubernetes.io/name"
"""Label of the pods that the stand-in handles. The test handles pods without it."""
_INTERVAL_S = 0.1


@dataclass
class Kubelet:
    """Stand-in for the kubelet of one node."""

    admin: httpx.Client
    makes_pods_ready: bool = True
    """True if started pods become ready."""
    run_to_completion: Callable[[Object], int] = lambda pod: 0
    """Run a pod that is not restarted, and return its exit status."""
    _addresses: Iterator[str] = field(
        default_factory=lambda: (f"192.0.2.{number}" for number in itertools.cycle(range(100, 200)))
    )

    def advance_pod(self, pod: Object) -> None:
        """Advance the state of a pod by one step. A conflict with another change is ignored."""
        path, uid, phase = pod_path(pod), pod["metadata"]["uid"], pod["status"].get("phase")
        if "deletionTimestamp" in pod["metadata"]:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            answer = self.admin.request("DELETE", path, json=body)
        elif not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            metadata = {"name": pod["metadata"]["name"], "uid": uid}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
            answer = self.admin.post(f"{path}/binding", json=binding)
        elif phase == "Pending" and pod["spec"]["restartPolicy"] != "Always":
            answer = self._patch_status(
                pod, {"phase": "Failed" if self.run_to_completion(pod) else "Succeeded"}
            )
        elif phase == "Pending":
            answer = self._patch_status(
                pod, make_running_status(pod, next(self._addresses), ready=self.makes_pods_ready)
            )
        elif phase == "Running" and self.makes_pods_ready and not is_ready(pod):
            answer = self._patch_status(pod, make_running_status(pod, pod["status"]["podIP"], ready=True))
        else:
            return
        assert answer.is_success or answer.status_code in (404, 409), f"{path}: {answer.text}"

    def _patch_status(self, pod: Object, status_fields: Object) -> httpx.Response:
        change = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status_fields}
        kind = {"Content-Type": "application/strategic-merge-patch+json"}
        return self.admin.patch(f"{pod_path(pod)}/status", content=json.dumps(change), headers=kind)


@contextmanager
def run_kubelet(plane: ControlPlane) -> Iterator[Kubelet]:
    plane.apply("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    stand_in, stop_event = Kubelet(plane.admin), threading.Event()
    problems: list[BaseException] = []

    def run_loop() -> None:
        try:
            while not stop_event.wait(_INTERVAL_S):
                for pod in plane.list_objects("/api/v1/pods", labelSelector=POD_LABEL):
                    stand_in.advance_pod(pod)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run_loop)
    thread.start()
    try:
        yield stand_in
    finally:
        stop_event.set()
        thread.join(60)
    if problems:
        raise problems[0]


def pod_path(pod: Object) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def is_ready(pod: Object) -> bool:
    """Return True if the pod is ready and not terminating."""
    found = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
    return found.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def make_running_status(pod: Object, address: str, *, ready: bool) -> Object:
    """Return the status of a pod whose containers run, as a kubelet reports it."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition_value = "True" if ready else "False"
    conditions = {
        "PodScheduled": "True",
        "Initialized": "True",
        "ContainersReady": condition_value,
        "Ready": condition_value,
    }
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": [
            {"type": name, "status": value, "lastTransitionTime": now} for name, value in conditions.items()
        ],
        "containerStatuses": [
            {
                "name": each["name"],
                "image": each["image"],
                "imageID": "",
                "ready": ready,
                "restartCount": 0,
                "started": True,
                "state": {"running": {"startedAt": now}},
            }
            for each in pod["spec"]["containers"]
        ],
    }
