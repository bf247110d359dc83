"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and kube-controller-manager.

Authorization is RBAC without anonymous access, service accounts have tokens, and the audit log contains every
request. There are no nodes: tests/cluster/kubelet.py replaces one.
"""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from tests.paths import ROOT
from tests.support import free_port, require_tool, running_process, wait_until_sync

Object = dict[str, Any]
PROGRAMS = ROOT / "build" / "controlplane"
HOST = "127.0.0.1"
OWN_ADDRESS = "192.0.2.1"
"""Address of endpoints, which must not be a loopback address. `make cluster-test` adds 192.0.2.0/24."""
ADMIN = "admin-token"
READY_S = 120.0
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
_CONTROLLERS = (
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "persistentvolumeclaim-protection-controller",
    "replicaset-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "statefulset-controller",
)
"""Controllers that run. A controller of nodes would evict the pods of a node that reports no heartbeat."""
_LISTENERS = ("etcd", "etcd-peer", "api", "controllers")
_VOLATILE_RESOURCES = {"events", "leases", "componentstatuses"}


@dataclass(frozen=True)
class ControlPlane:
    url: str
    directory: Path
    admin: httpx.Client

    @property
    def authority(self) -> Path:
        return self.directory / "ca.crt"

    def write_kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """Write a kubeconfig file with this token and return its path."""
        path = self.directory / f"{name}.kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "test",
                            "cluster": {"server": self.url, "certificate-authority": str(self.authority)},
                        }
                    ],
                    "users": [{"name": name, "user": {"token": token}}],
                    "contexts": [
                        {"name": name, "context": {"cluster": "test", "user": name, "namespace": namespace}}
                    ],
                    "current-context": name,
                }
            )
        )
        return path

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        """Send a request as the administrator and return the answer, which must have a 2xx status."""
        answer = self.admin.request(method, path, json=body, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def get(self, path: str) -> Object | None:
        """Return an object, or `None` if it does not exist."""
        answer = self.admin.get(path)
        assert answer.is_success or answer.status_code == 404, f"{path}: {answer.text}"
        return dict(answer.json()) if answer.is_success else None

    def list_objects(self, path: str, **query: str) -> list[Object]:
        answer = self.admin.get(path, params=query)
        assert answer.is_success, f"{path}: {answer.text}"
        return list(answer.json()["items"])

    def create(self, manifest: Object) -> Object:
        """Create an object at the path that belongs to its kind and namespace."""
        group, kind, metadata = manifest["apiVersion"], manifest["kind"], manifest["metadata"]
        root = f"/api/{group}" if group == "v1" else f"/apis/{group}"
        (plural,) = (
            each["name"]
            for each in self.request("GET", root)["resources"]
            if each["kind"] == kind and "/" not in each["name"]
        )
        namespace_path = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
        return self.apply(f"{root}{namespace_path}/{plural}", manifest)

    def patch(self, path: str, change: Mapping[str, Any]) -> Object:
        kind = {"Content-Type": "application/merge-patch+json"}
        answer = self.admin.patch(path, content=json.dumps(change), headers=kind)
        assert answer.is_success, f"{path}: {answer.text}"
        return dict(answer.json())

    def apply(self, path: str, manifest: Mapping[str, Any]) -> Object:
        return self.request("POST", path, dict(manifest))

    def create_namespace(self, kind: str) -> str:
        """Create a namespace that enforces the security standard `restricted` and return its name."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"generateName": f"{kind}-", "labels": labels}
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        name = str(self.apply("/api/v1/namespaces", manifest)["metadata"]["name"])
        for default_object in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
            path = f"/api/v1/namespaces/{name}/{default_object}"
            wait_until_sync(partial(self.get, path), 30, what=path, every_s=0.05)
        return name

    def define_resource(self, manifest: Object) -> None:
        """Create a CustomResourceDefinition and wait until it is served."""
        name = manifest["metadata"]["name"]
        group, plural = manifest["spec"]["group"], manifest["spec"]["names"]["plural"]
        self.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", manifest)
        for version in manifest["spec"]["versions"]:
            path = f"/apis/{group}/{version['name']}/{plural}"
            wait_until_sync(partial(self.get, path), 30, what=f"{name} is served")

    def create_token(self, namespace: str, account: str) -> str:
        """Create a token of a service account, as a kubelet does."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        answer = self.request("POST", path, {"spec": {"expirationSeconds": 3600}})
        return str(answer["status"]["token"])

    def is_allowed(self, user: str, **attributes: Any) -> bool:
        """Return True if RBAC allows a user these `resourceAttributes` or `nonResourceAttributes`."""
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(self.request("POST", path, {"spec": {"user": user, **attributes}})["status"]["allowed"])

    def list_all_objects(self) -> dict[str, Object]:
        """Return the metadata of every stable object in the cluster, by its path."""
        found: dict[str, Object] = {}
        for group in ["/api/v1", *self._groups()]:
            for resource in self.request("GET", group)["resources"]:
                name = resource["name"]
                if "list" not in resource["verbs"] or name in _VOLATILE_RESOURCES:
                    continue
                for each in self.list_objects(f"{group}/{name}"):
                    metadata = each["metadata"]
                    found[f"{group}/{name} {metadata.get('namespace', '')}/{metadata['name']}"] = metadata
        return found

    def get_resource_version(self, path: str) -> str:
        """Return the current version of a list of objects, for `watch_changes`."""
        return str(self.request("GET", path)["metadata"]["resourceVersion"])

    def watch_changes(self, version: str, path: str, until: str) -> Iterator[tuple[str, Object]]:
        """Yield every later change of these objects in order, until an object named `until` appears."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "60"}
        with self.admin.stream("GET", path, params=query, timeout=70) as answer:
            assert answer.is_success, f"{path}: {answer.read().decode()}"
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["object"]["metadata"]["name"] == until:
                    return
                yield event["type"], event["object"]
        pytest.fail(f"{path}: {until} was never seen")

    def find_audit_events(self, user: str) -> list[Object]:
        """Return the events of a user's requests in the audit log, one per request and stage."""
        with (self.directory / "audit.log").open() as log:
            lines = [json.loads(line) for line in log if line.endswith("\n")]
        return [each for each in lines if each["user"]["username"] == user]

    def _groups(self) -> list[str]:
        groups = self.request("GET", "/apis")["groups"]
        return [f"/apis/{each['preferredVersion']['groupVersion']}" for each in groups]


@contextmanager
def run_control_plane(directory: Path) -> Iterator[ControlPlane]:
    """Run a control plane that serves the definitions of `make cluster-test`."""
    etcd = require_tool("etcd")
    for program in ("kube-apiserver", "kube-controller-manager"):
        if not (PROGRAMS / program).exists():
            pytest.fail(f"{PROGRAMS / program} is missing: `make cluster-test` builds it")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.crt")
    server, signer = authority.issue_cert(HOST), authority.issue_cert("tokens.invalid")
    server.private_key_pem.write_to_path(directory / "server.key")
    for certificate in server.cert_chain_pems:
        certificate.write_to_path(directory / "server.crt", append=True)
    signer.private_key_pem.write_to_path(directory / "tokens.key")
    (directory / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
    (directory / "audit.yaml").write_text(yaml.safe_dump(_AUDIT))
    ports: dict[str, int] = {}
    while len(ports) < len(_LISTENERS):  # All ports must differ.
        ports = dict(zip(_LISTENERS, {free_port() for _ in _LISTENERS}, strict=False))
    etcd_url, peer_url = (f"http://{HOST}:{ports[name]}" for name in ("etcd", "etcd-peer"))
    url = f"https://{HOST}:{ports['api']}"
    with ExitStack() as stack:

        def start(name: str, *command: str | Path) -> subprocess.Popen[bytes]:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            child = running_process(*command, stop_s=20, stdout=log, stderr=log, cwd=directory)
            return stack.enter_context(child)

        start(
            "etcd",
            etcd,
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--experimental-watch-progress-notify-interval=5s",  # The value of kubeadm; bookmarks need it.
        )
        api = start(
            "api",
            PROGRAMS / "kube-apiserver",
            f"--etcd-servers={etcd_url}",
            f"--bind-address={HOST}",
            f"--advertise-address={OWN_ADDRESS}",
            "--endpoint-reconciler-type=none",
            f"--secure-port={ports['api']}",
            f"--cert-dir={directory / 'certificates'}",
            "--tls-cert-file=server.crt",
            "--tls-private-key-file=server.key",
            "--token-auth-file=tokens.csv",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=tokens.key",
            "--service-account-signing-key-file=tokens.key",
            "--service-cluster-ip-range=198.51.100.0/24",
            "--audit-policy-file=audit.yaml",
            "--audit-log-path=audit.log",
            "--audit-log-mode=blocking",
        )
        admin = stack.enter_context(
            httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {ADMIN}"},
                verify=ssl.create_default_context(cafile=str(directory / "ca.crt")),
                timeout=30,
                trust_env=False,
            )
        )
        plane = ControlPlane(url, directory, admin)

        def is_ready() -> bool:
            assert api.poll() is None, (directory / "api.log").read_text()[-3000:]
            with suppress(httpx.TransportError):
                return admin.get("/readyz").is_success
            return False

        wait_until_sync(is_ready, READY_S, what="the API server is ready", every_s=0.2)
        # The API server creates these last objects some time after it is ready.
        for own_path in (
            "/api/v1/namespaces/default/services/kubernetes",
            "/api/v1/namespaces/kube-node-lease",
        ):
            wait_until_sync(partial(plane.get, own_path), READY_S, what=own_path, every_s=0.1)
        for path in sorted((PROGRAMS / "crds").glob("*.yaml")):
            plane.define_resource(yaml.safe_load(path.read_text()))
        start(
            "controllers",
            PROGRAMS / "kube-controller-manager",
            f"--kubeconfig={plane.write_kubeconfig('controllers', ADMIN)}",
            f"--controllers={','.join(_CONTROLLERS)}",
            "--leader-elect=false",
            f"--bind-address={HOST}",
            f"--secure-port={ports['controllers']}",
            f"--cert-dir={directory / 'certificates'}",
            "--service-account-private-key-file=tokens.key",
            "--root-ca-file=ca.crt",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )
        yield plane
