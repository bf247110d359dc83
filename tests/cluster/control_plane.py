"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and kube-controller-manager.

Authorization is RBAC, nobody is anonymous, service accounts have tokens, and every request is in the audit
log. There are no nodes: tests/cluster/kubelet.py stands for one.
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
from tests.support import free_port, require_tool, running, wait_until_sync

Object = dict[str, Any]
BUILT = ROOT / "build" / "controlplane"
HOST = "127.0.0.1"
OWN_ADDRESS = "192.0.2.1"
"""Kubernetes takes no loopback address for an endpoint; `make cluster-test` puts 192.0.2.0/24 on loopback."""
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
"""None that looks for nodes: it would take the pods from a node that never says that it lives."""
_LISTENERS = ("etcd", "etcd-peer", "api", "controllers")
_CHANGING = {"events", "leases", "componentstatuses"}


@dataclass(frozen=True)
class ControlPlane:
    url: str
    directory: Path
    admin: httpx.Client

    @property
    def authority(self) -> Path:
        return self.directory / "ca.crt"

    def kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """A file for who has this token."""
        path = self.directory / f"{name}.kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "it",
                            "cluster": {"server": self.url, "certificate-authority": str(self.authority)},
                        }
                    ],
                    "users": [{"name": name, "user": {"token": token}}],
                    "contexts": [
                        {"name": name, "context": {"cluster": "it", "user": name, "namespace": namespace}}
                    ],
                    "current-context": name,
                }
            )
        )
        return path

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        """What the API answers the administrator; anything but a 2xx fails the test with its words."""
        answer = self.admin.request(method, path, json=body, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def get(self, path: str) -> Object | None:
        """An object; None where there is none."""
        answer = self.admin.get(path)
        assert answer.is_success or answer.status_code == 404, f"{path}: {answer.text}"
        return dict(answer.json()) if answer.is_success else None

    def items(self, path: str, **query: str) -> list[Object]:
        answer = self.admin.get(path, params=query)
        assert answer.is_success, f"{path}: {answer.text}"
        return list(answer.json()["items"])

    def create(self, manifest: Object) -> Object:
        """As `kubectl create` finds the path: by kind and namespace."""
        group, kind, of = manifest["apiVersion"], manifest["kind"], manifest["metadata"]
        root = f"/api/{group}" if group == "v1" else f"/apis/{group}"
        (plural,) = (
            each["name"]
            for each in self.ask("GET", root)["resources"]
            if each["kind"] == kind and "/" not in each["name"]
        )
        inside = f"/namespaces/{of['namespace']}" if "namespace" in of else ""
        return self.apply(f"{root}{inside}/{plural}", manifest)

    def patch(self, path: str, change: Mapping[str, Any]) -> Object:
        kind = {"Content-Type": "application/merge-patch+json"}
        answer = self.admin.patch(path, content=json.dumps(change), headers=kind)
        assert answer.is_success, f"{path}: {answer.text}"
        return dict(answer.json())

    def apply(self, path: str, manifest: Mapping[str, Any]) -> Object:
        return self.ask("POST", path, dict(manifest))

    def namespace(self, kind: str) -> str:
        """A new one that admits only what meets the standard `restricted`."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        of = {"generateName": f"{kind}-", "labels": labels}
        asked = {"apiVersion": "v1", "kind": "Namespace", "metadata": of}
        name = str(self.apply("/api/v1/namespaces", asked)["metadata"]["name"])
        for made in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
            path = f"/api/v1/namespaces/{name}/{made}"
            wait_until_sync(partial(self.get, path), 30, what=path, every_s=0.05)
        return name

    def define(self, manifest: Object) -> None:
        """A CustomResourceDefinition, served when this returns."""
        name = manifest["metadata"]["name"]
        group, plural = manifest["spec"]["group"], manifest["spec"]["names"]["plural"]
        self.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", manifest)
        for version in manifest["spec"]["versions"]:
            path = f"/apis/{group}/{version['name']}/{plural}"
            wait_until_sync(partial(self.get, path), 30, what=f"{name} is served")

    def token(self, namespace: str, account: str) -> str:
        """A new token of a service account, as a kubelet asks for one."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        made = self.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        return str(made["status"]["token"])

    def allows(self, user: str, **asked: Any) -> bool:
        """Whether RBAC lets a user do it: `resourceAttributes` or `nonResourceAttributes`."""
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(self.ask("POST", path, {"spec": {"user": user, **asked}})["status"]["allowed"])

    def everything(self) -> dict[str, Object]:
        """The metadata of every object in the cluster that somebody made, by where it is."""
        found: dict[str, Object] = {}
        for group in ["/api/v1", *self._groups()]:
            for resource in self.ask("GET", group)["resources"]:
                name = resource["name"]
                if "list" not in resource["verbs"] or name in _CHANGING:
                    continue
                for each in self.items(f"{group}/{name}"):
                    of = each["metadata"]
                    found[f"{group}/{name} {of.get('namespace', '')}/{of['name']}"] = of
        return found

    def version(self, path: str) -> str:
        """Of a list of objects, now: `since` tells what came after."""
        return str(self.ask("GET", path)["metadata"]["resourceVersion"])

    def since(self, version: str, path: str, until: str) -> Iterator[tuple[str, Object]]:
        """Every change of these objects since then, in order, before the one of this name was made."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "60"}
        with self.admin.stream("GET", path, params=query, timeout=70) as answer:
            assert answer.is_success, f"{path}: {answer.read().decode()}"
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["object"]["metadata"]["name"] == until:
                    return
                yield event["type"], event["object"]
        pytest.fail(f"{path}: {until} was never seen")

    def audited(self, user: str) -> list[Object]:
        """What the audit log has of a user's requests, each once for each stage."""
        with (self.directory / "audit.log").open() as log:
            lines = [json.loads(line) for line in log if line.endswith("\n")]
        return [each for each in lines if each["user"]["username"] == user]

    def _groups(self) -> list[str]:
        groups = self.ask("GET", "/apis")["groups"]
        return [f"/apis/{each['preferredVersion']['groupVersion']}" for each in groups]


@contextmanager
def control_plane(directory: Path) -> Iterator[ControlPlane]:
    """Start one that serves the definitions of `make cluster-test`, and stop it by its own processes."""
    etcd = require_tool("etcd")
    for program in ("kube-apiserver", "kube-controller-manager"):
        if not (BUILT / program).exists():
            pytest.fail(f"{BUILT / program} is missing: `make cluster-test` builds it")
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
    while len(ports) < len(_LISTENERS):  # none twice
        ports = dict(zip(_LISTENERS, {free_port() for _ in _LISTENERS}, strict=False))
    store, peer = (f"http://{HOST}:{ports[name]}" for name in ("etcd", "etcd-peer"))
    url = f"https://{HOST}:{ports['api']}"
    with ExitStack() as stack:

        def start(name: str, *command: str | Path) -> subprocess.Popen[bytes]:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            child = running(*command, stop_s=20, stdout=log, stderr=log, cwd=directory)
            return stack.enter_context(child)

        start(
            "etcd",
            etcd,
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--experimental-watch-progress-notify-interval=5s",  # as kubeadm has it: bookmarks need it
        )
        api = start(
            "api",
            BUILT / "kube-apiserver",
            f"--etcd-servers={store}",
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
        made = ControlPlane(url, directory, admin)

        def ready() -> bool:
            assert api.poll() is None, (directory / "api.log").read_text()[-3000:]
            with suppress(httpx.TransportError):
                return admin.get("/readyz").is_success
            return False

        wait_until_sync(ready, READY_S, what="the API server is ready", every_s=0.2)
        # The last that it makes by itself, a while after it is ready.
        for own in ("/api/v1/namespaces/default/services/kubernetes", "/api/v1/namespaces/kube-node-lease"):
            wait_until_sync(partial(made.get, own), READY_S, what=own, every_s=0.1)
        for path in sorted((BUILT / "crds").glob("*.yaml")):
            made.define(yaml.safe_load(path.read_text()))
        start(
            "controllers",
            BUILT / "kube-controller-manager",
            f"--kubeconfig={made.kubeconfig('controllers', ADMIN)}",
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
        yield made
