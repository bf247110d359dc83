"""Search for inference pools in a cluster through kubectl, with the rights of its user."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 10
POOLS = ("inferencepools.inference.networking.k8s.io", "inferencepools.inference.networking.x-k8s.io")
OBJECTIVES = "inferenceobjectives.inference.networking.x-k8s.io"
Json = Mapping[str, Any]


class KubectlError(Exception):
    """Raised if the cluster cannot be asked or refuses. The message says why."""


@dataclass(frozen=True, slots=True)
class FoundPool:
    """An InferencePool with the related resources. Empty fields were not found."""

    name: str
    namespace: str
    picker: str = ""
    """Name of the Service of the endpoint picker."""
    gateway: str = ""
    """URL of a gateway with a route to the pool."""
    objective: str = ""
    """InferenceObjective of the pool with the lowest negative priority."""


def list_pools(namespace: str = "") -> list[FoundPool]:
    """Return the pools of a namespace, or of all namespaces. Raises KubectlError.

    Related resources that the user may not list are left out.
    """
    where = ("--namespace", namespace) if namespace else ("--all-namespaces",)
    resources: list[Json] = []
    first_error = None
    # A cluster may have the CRD of the current API group, of the one before it, or both.
    for kind in POOLS:
        try:
            resources += _list_resources(kind, *where)
        except KubectlError as error:
            first_error = first_error or error
    if not resources and first_error is not None:
        raise first_error
    related = {kind: _list_if_allowed(kind, *where) for kind in ("httproutes", "gateways", OBJECTIVES)}
    # Reversed, so that of a pool in both API groups the first one counts.
    resources_by_name = {
        (resource["metadata"]["namespace"], resource["metadata"]["name"]): resource
        for resource in reversed(resources)
    }
    return [
        build_pool(resource, related["httproutes"], related["gateways"], related[OBJECTIVES])
        for _, resource in sorted(resources_by_name.items())
    ]


def build_pool(
    pool: Json, routes: Sequence[Json], gateways: Sequence[Json], objectives: Sequence[Json]
) -> FoundPool:
    """Return a pool with its picker, its gateway and its objective."""
    name, namespace = pool["metadata"]["name"], pool["metadata"]["namespace"]
    spec = pool.get("spec") or {}
    # extensionRef is the field of the older API group.
    picker = spec.get("endpointPickerRef") or spec.get("extensionRef") or {}
    parents = [
        parent
        for route in routes
        if _routes_to_pool(route, name, namespace)
        for parent in _list_parents(route)
    ]
    urls = [url for resource in gateways if _get_key(resource) in parents for url in _list_urls(resource)]
    ranked = sorted(
        (int((resource.get("spec") or {}).get("priority") or 0), resource["metadata"]["name"])
        for resource in objectives
        if resource["metadata"]["namespace"] == namespace
        and ((resource.get("spec") or {}).get("poolRef") or {}).get("name") == name
    )
    objective = ranked[0][1] if ranked and ranked[0][0] < 0 else ""
    return FoundPool(name, namespace, str(picker.get("name") or ""), urls[0] if urls else "", objective)


def _get_key(resource: Json) -> tuple[str, str]:
    return resource["metadata"]["namespace"], resource["metadata"]["name"]


def _routes_to_pool(route: Json, name: str, namespace: str) -> bool:
    route_namespace = route["metadata"]["namespace"]
    return any(
        backend.get("kind") == "InferencePool"
        and backend.get("name") == name
        # A backend without a namespace is in the namespace of its route.
        and (backend.get("namespace") or route_namespace) == namespace
        for rule in (route.get("spec") or {}).get("rules") or ()
        for backend in rule.get("backendRefs") or ()
    )


def _list_parents(route: Json) -> Iterator[tuple[str, str]]:
    for parent in (route.get("spec") or {}).get("parentRefs") or ():
        yield parent.get("namespace") or route["metadata"]["namespace"], parent["name"]


def _list_urls(gateway: Json) -> Iterator[str]:
    addresses = [each.get("value") for each in (gateway.get("status") or {}).get("addresses") or ()]
    for listener in (gateway.get("spec") or {}).get("listeners") or ():
        scheme = str(listener.get("protocol", "")).lower()
        if scheme in ("http", "https"):
            port = listener.get("port")
            # The default port of the scheme is left out.
            end = "" if port == {"http": 80, "https": 443}[scheme] else f":{port}"
            yield from (f"{scheme}://{address}{end}" for address in addresses if address)


def _list_if_allowed(kind: str, *where: str) -> list[Json]:
    try:
        return _list_resources(kind, *where)
    except KubectlError:  # the CRD is not installed, or listing it is not allowed: the user names it instead
        return []


def _list_resources(kind: str, *where: str) -> list[Json]:
    program = shutil.which("kubectl")
    if program is None:
        raise KubectlError("kubectl is not installed")
    try:
        process = subprocess.run(  # noqa: S603 - no shell; what the user named is one argument
            [program, "get", kind, *where, "--output", "json", f"--request-timeout={TIMEOUT_S}s"],
            capture_output=True,
            timeout=TIMEOUT_S + 5,  # bounds kubectl itself, too: a login before the request, for example
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KubectlError(f"kubectl: {error}") from error
    if process.returncode:
        # kubectl may print warnings first; the last line is the error.
        error_lines = process.stderr.decode(errors="replace").strip().splitlines()
        raise KubectlError(
            f"kubectl: {error_lines[-1] if error_lines else f'exit code {process.returncode}'}"
        )
    try:
        items = json.loads(process.stdout)["items"]
        return [each for each in items if each["metadata"]["name"] and each["metadata"]["namespace"]]
    except (ValueError, KeyError, TypeError) as error:
        raise KubectlError(f"kubectl: its answer on {kind} is not understood") from error
