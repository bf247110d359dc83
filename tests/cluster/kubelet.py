"""What stands for scheduler and kubelet: pods get a node and an address, are ready, end when told to.

No container runs. What a pod that is not started again does is the test's affair (`work`): it may run the
pod's command beside the cluster, and its exit status is then the pod's.
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
MINE = "app.kubernetes.io/name"
"""The label of pods that are tended; those without it are the test's."""
_LOOK_S = 0.1


@dataclass
class Kubelet:
    """How pods fare from now on."""

    admin: httpx.Client
    readies: bool = True
    """What is started becomes ready."""
    work: Callable[[Object], int] = lambda pod: 0
    """Do what a pod is for that is not started again; with what status it ends."""
    _addresses: Iterator[str] = field(
        default_factory=lambda: (f"192.0.2.{number}" for number in itertools.cycle(range(100, 200)))
    )

    def step(self, pod: Object) -> None:
        """Bring a pod one step further. Another may have been quicker: what is gone or changed is left."""
        path, uid, phase = path_of(pod), pod["metadata"]["uid"], pod["status"].get("phase")
        if "deletionTimestamp" in pod["metadata"]:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            answer = self.admin.request("DELETE", path, json=body)
        elif not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            of = {"name": pod["metadata"]["name"], "uid": uid}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": of, "target": target}
            answer = self.admin.post(f"{path}/binding", json=binding)
        elif phase == "Pending" and pod["spec"]["restartPolicy"] != "Always":
            answer = self._say(pod, {"phase": "Failed" if self.work(pod) else "Succeeded"})
        elif phase == "Pending":
            answer = self._say(pod, status(pod, next(self._addresses), ready=self.readies))
        elif phase == "Running" and self.readies and not is_ready(pod):
            answer = self._say(pod, status(pod, pod["status"]["podIP"], ready=True))
        else:
            return
        assert answer.is_success or answer.status_code in (404, 409), f"{path}: {answer.text}"

    def _say(self, pod: Object, said: Object) -> httpx.Response:
        change = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": said}
        kind = {"Content-Type": "application/strategic-merge-patch+json"}
        return self.admin.patch(f"{path_of(pod)}/status", content=json.dumps(change), headers=kind)


@contextmanager
def kubelet(plane: ControlPlane) -> Iterator[Kubelet]:
    plane.apply("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    made, done = Kubelet(plane.admin), threading.Event()
    problems: list[BaseException] = []

    def tend() -> None:
        try:
            while not done.wait(_LOOK_S):
                for pod in plane.items("/api/v1/pods", labelSelector=MINE):
                    made.step(pod)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=tend)
    thread.start()
    try:
        yield made
    finally:
        done.set()
        thread.join(60)
    if problems:
        raise problems[0]


def path_of(pod: Object) -> str:
    of = pod["metadata"]
    return f"/api/v1/namespaces/{of['namespace']}/pods/{of['name']}"


def is_ready(pod: Object) -> bool:
    """Ready, and not about to end."""
    found = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
    return found.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def status(pod: Object, address: str, *, ready: bool) -> Object:
    """What a kubelet says of a pod whose containers run."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    word = "True" if ready else "False"
    conditions = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": word, "Ready": word}
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
