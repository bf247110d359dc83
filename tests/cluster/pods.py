"""What a kubelet says of pods, for those that no kubelet has."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.cluster.control_plane import Object

NODE = "stand-in"


def path_of(pod: Object) -> str:
    of = pod["metadata"]
    return f"/api/v1/namespaces/{of['namespace']}/pods/{of['name']}"


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
