"""Endpoints that the Kubernetes watch finds through the real client, with an API server that fails as real
ones do."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import re
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from dispatcher import __version__
from dispatcher.settings.signals import EppSettings
from dispatcher.signals.kubernetes.capacity import NO_KUBERNETES, CapacityWatch
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from tests.paths import DOCS
from tests.signals.apiserver import (
    OLD_POOLS,
    PODS,
    POOLS,
    SLICES,
    ApiServer,
    access,
    endpoint_slice,
    old_pool,
    pod,
    pool,
    populate,
)
from tests.signals.capacity_recorder import QWEN, CapacityRecorder
from tests.support import wait_until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer().serve(tmp_path) as server:
        yield server


@asynccontextmanager
async def run_watch(
    target: ApiServer | ClusterAccess, epp: EppSettings | None = None, **more: Any
) -> AsyncIterator[CapacityRecorder]:
    recorder = CapacityRecorder()
    cluster_access = target if isinstance(target, ClusterAccess) else access(target)
    watch = recorder.watch = CapacityWatch(
        QWEN, epp or EppSettings(), recorder, access=cluster_access, **more
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.run())
        try:
            yield recorder
        finally:
            task.cancel()


async def test_ready_pods_times_ports_are_endpoints(server: ApiServer) -> None:
    populate(server, 3, ports=2)
    server.put(PODS, pod("starting", ready=False))
    server.put(PODS, pod("going", deleting=True))
    server.put(PODS, pod("other", app="another"))
    server.put(PODS, pod("elsewhere"), namespace="another")
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(6)
        await wait_until(lambda: recorder.is_complete_with(6, "10.0.0.1"))


async def test_each_ready_pod_and_port_is_an_address(server: ApiServer) -> None:
    server.put(POOLS, pool(ports=2))
    server.put(PODS, pod("a", address="10.0.0.7"))
    server.put(PODS, pod("b", address="fd00::8"))
    server.put(PODS, pod("starting", ready=False, address="10.0.0.5"))
    server.put(PODS, pod("going", deleting=True, address="10.0.0.6"))
    server.put(PODS, pod("nowhere", address=""))
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(6)
        assert set(recorder.latest.addresses or ()) == {
            f"{at}:800{n}" for at in ("10.0.0.7", "[fd00::8]") for n in "01"
        }
        server.delete(PODS, "a")
        await recorder.wait_for_ready(4)
        assert set(recorder.latest.addresses or ()) == {"[fd00::8]:8000", "[fd00::8]:8001"}
        server.put(PODS, pod("b", address="10.0.0.3"))  # the same number of addresses, with another value
        await wait_until(lambda: recorder.latest.addresses == ("10.0.0.3:8000", "10.0.0.3:8001"))
        server.delete(POOLS, "qwen")
        await recorder.wait_for_ready(0)
        assert recorder.latest.addresses == ()


async def test_addresses_of_an_older_pool_are_found_and_stay_when_the_watch_is_lost(
    server: ApiServer,
) -> None:
    server.put(OLD_POOLS, old_pool())
    server.put(PODS, pod("a", address="10.0.0.7"))
    async with run_watch(server, hold_s=0.2) as recorder:
        await recorder.wait_for_ready(1)
        assert recorder.latest.addresses == ("10.0.0.7:8000",)
        await wait_until(lambda: server.is_watched(OLD_POOLS, PODS))  # a listed collection is not watched yet
        server.tokens = set()  # fails at once; test_lost_watch.py tests the time after a silent loss
        server.cut_watches()
        await recorder.wait_for_ready(None)
        assert recorder.latest.addresses == ("10.0.0.7:8000",)


async def test_ready_count_follows_a_pod_until_its_deletion(server: ApiServer) -> None:
    populate(server, 2)
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(2)
        server.put(PODS, pod("new", ready=False))
        server.put(PODS, pod("new"))
        await recorder.wait_for_ready(3)
        server.put(PODS, pod("p0", deleting=True))
        await recorder.wait_for_ready(2)
        server.delete(PODS, "p0")
        server.put(PODS, pod("p1", app="another"))  # no longer selected, so the server sends DELETED
        await recorder.wait_for_ready(1)
        server.delete(PODS, "new")
        await recorder.wait_for_ready(0)
        assert not recorder.latest.problems
        assert len(server.requests_for(PODS, watch=False)) == 1


async def test_cut_watch_continues_at_its_version(server: ApiServer) -> None:
    populate(server, 1)
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(1)
        for number in range(1, 6):
            server.cut_watches()
            server.put(PODS, pod(f"p{number}"))
            await recorder.wait_for_ready(number + 1)
        assert len(server.requests_for(PODS, watch=False)) == 1
        assert not any(endpoints.problems for endpoints in recorder.history)


async def test_bookmark_makes_a_new_list_unnecessary(server: ApiServer) -> None:
    populate(server, 1)
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(1)
        await wait_until(lambda: server.requests_for(PODS, watch=True))
        first = server.requests_for(PODS, watch=True)[-1].query["resourceVersion"]
        server.put(PODS, pod("other", app="another"))  # sends no event to this watch

        steps = itertools.cycle((server.send_bookmarks, server.cut_watches))

        def continues_from_bookmark() -> bool:
            next(steps)()
            return int(server.requests_for(PODS, watch=True)[-1].query["resourceVersion"]) > int(first) + 1

        await wait_until(continues_from_bookmark, every_s=0.1)
        assert len(server.requests_for(PODS, watch=False)) == 1


@pytest.mark.parametrize("as_status", [False, True])
async def test_expired_version_is_listed_again(server: ApiServer, as_status: bool) -> None:
    populate(server, 3)
    server.faults.expired_as_status = as_status
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(3)
        await wait_until(lambda: server.is_watched(PODS))
        server.faults.no_answers = True
        server.cut_watches()
        server.delete(PODS, "p0")
        server.put(PODS, pod("p1", ready=False))
        server.compact()
        server.faults.no_answers = False
        server.cut_watches()
        await recorder.wait_for_ready(1)
        assert len(server.requests_for(PODS, watch=False)) == 2
        server.put(PODS, pod("p1"))
        await recorder.wait_for_ready(2)


async def test_changed_selector_counts_other_pods(server: ApiServer) -> None:
    populate(server, 3)
    server.put(PODS, pod("b0", app="sglang"))
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(3)
        server.put(POOLS, pool(app="sglang"))
        await recorder.wait_for_ready(1)
        server.put(PODS, pod("p9"))
        server.put(PODS, pod("b1", app="sglang"))
        await recorder.wait_for_ready(2)
        server.put(POOLS, pool(app="sglang", ports=4))
        await recorder.wait_for_ready(8)
        assert None not in [
            endpoints.ready for endpoints in recorder.history[recorder.history.index(recorder.latest) - 3 :]
        ]


async def test_deleted_pool_has_no_endpoints(server: ApiServer) -> None:
    populate(server, 2)
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(2)
        assert recorder.latest.pool_uid == "uid-of-qwen"
        server.delete(POOLS, "qwen")
        await recorder.wait_for_ready(0)
        assert recorder.latest.pool_uid == ""
        assert "InferencePool default/qwen does not exist" in await recorder.wait_for_problem()
        server.put(POOLS, pool())
        await recorder.wait_for_ready(2)
        await wait_until(lambda: not recorder.latest.problems)


async def test_pool_without_a_picker_counts_and_the_problem_names_what_is_missing(
    server: ApiServer,
) -> None:
    """The newest Gateway API Inference Extension does not require the reference to a picker."""
    alone = pool()
    del alone["spec"]["endpointPickerRef"]
    server.put(POOLS, alone)
    server.put(PODS, pod("p0"))
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(1)
        problem = await recorder.wait_for_problem("InferencePool default/qwen names no endpoint picker")
        assert "signals.epp.urls or signals.epp.service" in problem
        assert recorder.latest.epp_addresses is None
        server.put(POOLS, pool())
        server.put(SLICES, endpoint_slice("x", "qwen-epp", "10.0.0.1"))
        await wait_until(lambda: recorder.is_complete_with(1, "10.0.0.1"))


async def test_missing_pool_has_no_endpoints(server: ApiServer) -> None:
    server.put(POOLS, pool("another"))
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(0)


class TestOlderApi:
    async def test_older_version_is_used_if_the_newer_is_not_served(self, server: ApiServer) -> None:
        server.faults.not_served = {POOLS}
        server.put(OLD_POOLS, old_pool())
        server.put(PODS, pod("p0"))
        server.put(SLICES, endpoint_slice("x", "qwen-epp", "10.0.0.1"))
        async with run_watch(server) as recorder:
            await wait_until(lambda: recorder.is_complete_with(1, "10.0.0.1"))
            server.delete(OLD_POOLS, "qwen")
            await recorder.wait_for_ready(0)

    async def test_newer_version_is_used_if_both_have_the_pool(self, server: ApiServer) -> None:
        server.put(OLD_POOLS, old_pool(app="old"))
        server.put(POOLS, pool())
        server.put(PODS, pod("p0"))
        server.put(PODS, pod("p1"))
        server.put(PODS, pod("o1", app="old"))
        async with run_watch(server) as recorder:
            await recorder.wait_for_ready(2)
            server.delete(POOLS, "qwen")
            await recorder.wait_for_ready(1)

    async def test_missing_right_to_the_older_version_is_no_problem(self, server: ApiServer) -> None:
        server.faults.forbidden = {OLD_POOLS}
        populate(server, 2)
        async with run_watch(server) as recorder:
            await wait_until(lambda: recorder.is_complete_with(2, "10.0.0.1"))
            server.delete(POOLS, "qwen")
            await recorder.wait_for_ready(0)

    async def test_problem_names_what_to_install_if_no_crd_exists(self, server: ApiServer) -> None:
        server.faults.not_served = {POOLS, OLD_POOLS}
        async with run_watch(server) as recorder:
            assert "inferencepools.inference.networking.k8s.io" in await recorder.wait_for_problem(
                "install the CRDs"
            )
            assert recorder.latest.ready is None
            server.faults.not_served = set()
            populate(server, 1)
            await recorder.wait_for_ready(1)
            await wait_until(lambda: not recorder.latest.problems)


class TestMissingRights:
    """Rules that the problems name. A server checks rights before it checks whether it serves a collection
    at all."""

    RULE = 'needs the rule apiGroups: [{}], resources: ["inferencepools"], verbs: ["list", "watch"]'
    NEW, OLD = '"inference.networking.k8s.io"', '"inference.networking.x-k8s.io"'

    async def test_older_version_is_refused_and_the_newer_not_served(self, server: ApiServer) -> None:
        """The pool may be of the older version, so that installing CRDs would not help."""
        server.faults.not_served, server.faults.forbidden = {POOLS}, {OLD_POOLS}
        server.put(OLD_POOLS, old_pool())
        server.put(PODS, pod("p0"))
        async with run_watch(server) as recorder:
            problem = await recorder.wait_for_problem(
                "not allowed to list inferencepools", self.RULE.format(self.OLD)
            )
            assert "or, if the cluster serves no InferencePools, install the CRDs" in problem
            assert recorder.latest.ready is None
            server.faults.forbidden = set()
            await recorder.wait_for_ready(1)

    async def test_newer_version_is_refused_and_the_older_not_served(self, server: ApiServer) -> None:
        server.faults.not_served, server.faults.forbidden = {OLD_POOLS}, {POOLS}
        async with run_watch(server) as recorder:
            problem = await recorder.wait_for_problem(
                "not allowed to list inferencepools", self.RULE.format(self.NEW)
            )
            assert "or, if the cluster serves no InferencePools, install the CRDs" in problem

    async def test_newer_version_is_refused_and_the_older_has_no_pool(self, server: ApiServer) -> None:
        server.faults.forbidden = {POOLS}
        async with run_watch(server) as recorder:
            assert "CRD" not in await recorder.wait_for_problem("not allowed", self.RULE.format(self.NEW))

    async def test_both_versions_are_refused(self, server: ApiServer) -> None:
        server.faults.forbidden = {POOLS, OLD_POOLS}
        async with run_watch(server) as recorder:
            problem = await recorder.wait_for_problem(
                "not allowed", self.RULE.format(f"{self.NEW}, {self.OLD}")
            )
            assert "inference.networking.x-k8s.io only where the cluster serves it" in problem
            assert "install the CRDs" in problem

    async def test_newer_version_has_no_pool_and_the_older_is_refused(self, server: ApiServer) -> None:
        server.faults.forbidden = {OLD_POOLS}
        async with run_watch(server) as recorder:
            await recorder.wait_for_problem(
                "default/qwen does not exist, unless in", self.RULE.format(self.OLD)
            )
            assert recorder.latest.ready == 0

    async def test_crd_of_the_newer_version_is_removed_while_the_older_is_refused(
        self, server: ApiServer
    ) -> None:
        populate(server, 2)
        server.faults.forbidden = {OLD_POOLS}
        async with run_watch(server) as recorder:
            await recorder.wait_for_ready(2)
            server.faults.not_served = {POOLS}
            server.delete(POOLS, "qwen")
            server.cut_watches()
            await recorder.wait_for_problem("not allowed", self.RULE.format(self.OLD))
            assert recorder.latest.ready == 0

    async def test_right_to_list_without_watch_is_not_enough(self, server: ApiServer) -> None:
        populate(server, 2)
        server.faults.forbidden = {f"watch {PODS}"}
        async with run_watch(server) as recorder:
            rule = 'apiGroups: [""], resources: ["pods"], verbs: ["list", "watch"]'
            await recorder.wait_for_problem("not allowed to watch pods in namespace default", rule)
            assert recorder.latest.ready == 2  # until the hold time ends


class TestDocumentedRole:
    """The Role in the documentation allows exactly the requests that the program sends."""

    @staticmethod
    def read_role_and_binding() -> list[dict[str, Any]]:
        page = (DOCS / "explanation" / "signals.md").read_text()
        (found,) = re.findall(r"<!-- least role -->\n```yaml\n(.*?)```", page, re.DOTALL)
        return list(yaml.safe_load_all(found))

    def test_role_is_bound_to_the_service_account(self) -> None:
        role, binding = self.read_role_and_binding()
        names = [role["metadata"], binding["metadata"], *binding["subjects"]]
        assert {(each["name"], each["namespace"]) for each in names} == {("batch-dispatcher", "default")}
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])

    async def test_role_allows_exactly_the_used_requests(self, tmp_path: Path) -> None:
        rules = self.read_role_and_binding()[0]["rules"]
        sent = set()
        for unserved, older in ((set(), False), ({POOLS}, True)):
            async with ApiServer().serve(tmp_path) as server:
                populate(server, 2)
                if older:
                    server.delete(POOLS, "qwen")
                    server.put(OLD_POOLS, old_pool())
                server.faults.rules, server.faults.not_served = rules, unserved
                async with run_watch(server) as recorder:
                    await wait_until(lambda: recorder.is_complete_with(2, "10.0.0.1"))
                assert not server.requests_with_status(403)
                sent |= {(each.collection, each.verb) for each in server.requests}
        rule_of_collection = {POOLS: rules[0], OLD_POOLS: rules[1], PODS: rules[2], SLICES: rules[3]}
        allowed = {(name, verb) for name, rule in rule_of_collection.items() for verb in rule["verbs"]}
        assert sent == allowed
        assert len(rules) == len(rule_of_collection)
        for name, rule in rule_of_collection.items():
            group = name.split("/")[0] if name.count("/") == 2 else ""
            assert (rule["apiGroups"], rule["resources"]) == ([group], [name.rpartition("/")[2]])


@pytest.mark.parametrize(
    ("collection", "group", "ready"),
    [(POOLS, "inference.networking.k8s.io", None), (PODS, "", None), (SLICES, "discovery.k8s.io", 2)],
)
async def test_missing_right_is_named_with_its_rule(
    server: ApiServer, collection: str, group: str, ready: int | None
) -> None:
    populate(server, 2)
    server.faults.forbidden = {collection}
    plural = collection.rpartition("/")[2]
    async with run_watch(server) as recorder:
        rule = f'apiGroups: ["{group}"], resources: ["{plural}"], verbs: ["list", "watch"]'
        assert "\n" not in await recorder.wait_for_problem(
            f"not allowed to list {plural} in namespace default", rule
        )
        await recorder.wait_for_ready(ready)
        server.faults.forbidden = set()
        await wait_until(lambda: recorder.is_complete_with(2, "10.0.0.1"))


async def test_endpoints_count_during_an_outage_until_the_hold_time_ends(server: ApiServer) -> None:
    populate(server, 2)
    async with run_watch(server, hold_s=1.0) as recorder:
        await wait_until(lambda: recorder.is_complete_with(2, "10.0.0.1"))
        await server.stop()
        problem = await recorder.wait_for_problem("cannot be reached")
        assert "the address of the API server in kubeconfig" in problem
        assert recorder.latest.ready == 2
        await recorder.wait_for_ready(None)
        assert recorder.latest.epp_addresses == ("10.0.0.1",)
        await recorder.wait_for_problem("no longer counts")
        server.put(PODS, pod("p2"))
        await server.start()
        await wait_until(lambda: recorder.is_complete_with(3, "10.0.0.1"))


async def test_answers_of_another_server_are_a_problem(server: ApiServer) -> None:
    """A captive portal answers 200 to everything. Its answers say nothing about the pool."""
    populate(server, 2)
    async with run_watch(server, hold_s=1.0) as recorder:
        await recorder.wait_for_ready(2)
        server.faults.garbage = True
        server.cut_watches()
        await recorder.wait_for_problem("what answers for the Kubernetes API sends text/plain")
        await recorder.wait_for_ready(None)
        server.faults.garbage = False
        await wait_until(lambda: recorder.is_complete_with(2, "10.0.0.1"))


@pytest.mark.parametrize("fault", ["garbage", "busy"])
async def test_watch_survives_invalid_answers_and_reports_them(server: ApiServer, fault: str) -> None:
    populate(server, 1)
    server.faults.garbage = fault == "garbage"
    server.faults.retry_after_s = 1 if fault == "busy" else None
    async with run_watch(server) as recorder:
        await recorder.wait_for_problem(
            "the Kubernetes API", "sends text/plain" if fault == "garbage" else "server asks to wait 1 s"
        )
        requested_at = [each.at for each in server.requests_for(POOLS, watch=False)]
        if fault == "busy":
            assert all(after - before >= 1.0 for before, after in itertools.pairwise(requested_at))
        server.faults.garbage, server.faults.retry_after_s = False, None
        await recorder.wait_for_ready(1)
        await wait_until(lambda: not recorder.latest.problems)


async def test_long_list_is_read_in_pages(server: ApiServer) -> None:
    populate(server, 1_200)
    server.faults.page_expires = True
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(1_200)
        pages = server.requests_for(PODS, watch=False)
        # The second page had expired, so the list starts again.
        assert ["continue" in page.query for page in pages] == [False, True, False, True, True]
        # An incomplete list is never published as the capacity.
        assert {endpoints.ready for endpoints in recorder.history} <= {None, 1_200}


class TestCredentials:
    async def test_new_token_in_the_kubeconfig_is_used(self, server: ApiServer) -> None:
        populate(server, 1)
        async with run_watch(server) as recorder:
            await recorder.wait_for_ready(1)
            server.tokens = {"t1"}
            server.cut_watches()
            assert (
                "answered 401 (Unauthorized) (look at: the credentials of kubeconfig"
                in await recorder.wait_for_problem()
            )
            server.write_kubeconfig("t1")
            server.put(PODS, pod("p1"))
            await recorder.wait_for_ready(2)
            await wait_until(lambda: not recorder.latest.problems)
            assert server.requests[-1].token == "t1"

    async def test_pod_uses_its_service_account_and_its_rotating_token(self, tmp_path: Path) -> None:
        authority = trustme.CA()
        async with ApiServer().serve(tmp_path, create_server_tls(authority)) as server:
            populate(server, 1)
            host, _, port = server.url.removeprefix("https://").partition(":")
            authority.cert_pem.write_to_path(tmp_path / "ca.crt")
            (tmp_path / "token").write_text("t0")
            environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            async with run_watch(ClusterAccess(environ=environ, service_account=tmp_path)) as recorder:
                await recorder.wait_for_ready(1)
                (tmp_path / "token").write_text("t1")
                server.tokens = {"t1"}
                server.cut_watches()
                server.put(PODS, pod("p1"))
                await recorder.wait_for_ready(2)

    async def test_watch_without_a_cluster_reports_that_once_and_ends(self, tmp_path: Path) -> None:
        recorder = CapacityRecorder()
        no_cluster = ClusterAccess(environ={"HOME": str(tmp_path)}, service_account=tmp_path / "none")
        await CapacityWatch(QWEN, EppSettings(), recorder, access=no_cluster).run()
        assert recorder.history == [NO_KUBERNETES]

    async def test_default_kubeconfig_is_found(self, server: ApiServer, tmp_path: Path) -> None:
        populate(server, 1)
        (tmp_path / ".kube").mkdir()
        server.kubeconfig.rename(tmp_path / ".kube" / "config")
        async with run_watch(
            ClusterAccess(environ={"HOME": str(tmp_path)}, service_account=tmp_path / "none")
        ) as recorder:
            await recorder.wait_for_ready(1)

    @pytest.mark.parametrize("content", [None, "", "[]", "{", "clusters: 3"])
    async def test_invalid_kubeconfig_is_a_problem_until_it_is_repaired(
        self, server: ApiServer, content: str | None
    ) -> None:
        populate(server, 1)
        if content is None:
            server.kubeconfig.unlink()
        else:
            server.kubeconfig.write_text(content)
        async with run_watch(server) as recorder:
            await recorder.wait_for_problem(str(server.kubeconfig), "cannot be used")
            server.write_kubeconfig("t0")
            await recorder.wait_for_ready(1)

    @pytest.mark.parametrize("unreadable", ["[]", "{", "clusters: 3"])
    async def test_kubeconfig_that_becomes_invalid_is_a_problem_until_it_is_repaired(
        self, server: ApiServer, unreadable: str
    ) -> None:
        populate(server, 1)
        async with run_watch(server) as recorder:
            await wait_until(lambda: recorder.is_complete_with(1, "10.0.0.1"))
            server.kubeconfig.write_text(unreadable)
            server.cut_watches()
            await recorder.wait_for_problem(str(server.kubeconfig), "cannot be used")
            server.write_kubeconfig("t0")
            await wait_until(lambda: recorder.is_complete_with(1, "10.0.0.1"))

    async def test_changed_certificate_authority_is_used(self, tmp_path: Path) -> None:
        """The server gets a certificate of a new authority, and the ca.crt of the pod follows."""
        old, new = trustme.CA(), trustme.CA()
        (tmp_path / "token").write_text("t0")
        old.cert_pem.write_to_path(tmp_path / "ca.crt")
        async with ApiServer().serve(tmp_path, create_server_tls(old)) as server:
            populate(server, 1)
            host, _, port = server.url.removeprefix("https://").partition(":")
            environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            async with run_watch(ClusterAccess(environ=environ, service_account=tmp_path)) as recorder:
                await recorder.wait_for_ready(1)
                await server.stop()
                problem = await recorder.wait_for_problem("connection refused")
                assert "network policies and firewalls between it and this pod" in problem
                await server.start(create_server_tls(new))
                problem = await recorder.wait_for_problem("cannot be reached", "certificate")
                assert "the certificates of the pod's service account" in problem
                new.cert_pem.write_to_path(tmp_path / "ca.crt")
                server.put(PODS, pod("p1"))
                await recorder.wait_for_ready(2)

    async def test_user_agent_names_the_dispatcher(self, server: ApiServer) -> None:
        populate(server, 1)
        async with run_watch(server) as recorder:
            await recorder.wait_for_ready(1)
        assert {each.user_agent for each in server.requests} == {f"batch-dispatcher/{__version__}"}


def create_server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


class TestEndpointPicker:
    async def test_ready_replicas_are_published(self, server: ApiServer) -> None:
        populate(server, 1)
        server.put(SLICES, endpoint_slice("qwen-epp-x2", "qwen-epp", "10.0.0.3", "10.0.0.2", ready=None))
        server.put(SLICES, endpoint_slice("qwen-epp-x3", "qwen-epp", "10.0.0.4", ready=False))
        server.put(SLICES, endpoint_slice("other", "other", "10.0.0.5"))
        async with run_watch(server) as recorder:
            await wait_until(lambda: recorder.latest.epp_addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
            server.delete(SLICES, "qwen-epp-x2")
            await wait_until(lambda: recorder.latest.epp_addresses == ("10.0.0.1",))
            server.put(POOLS, pool(epp="other"))
            await wait_until(lambda: recorder.latest.epp_addresses == ("10.0.0.5",))
            server.delete(SLICES, "other")
            await recorder.wait_for_problem("Service default/other has no ready endpoint")
            assert recorder.latest.epp_addresses == ()
            assert recorder.latest.ready == 1

    async def test_replica_with_addresses_of_two_families_counts_once(self, server: ApiServer) -> None:
        server.put(POOLS, pool())
        server.put(SLICES, endpoint_slice("v6", "qwen-epp", "fd00::10", "fd00::11", family="IPv6", pods="ab"))
        server.put(SLICES, endpoint_slice("v4", "qwen-epp", "10.0.0.9", family="IPv4", pods="a"))
        async with run_watch(server) as recorder:
            await wait_until(lambda: recorder.latest.epp_addresses == ("10.0.0.9", "fd00::11"))

    async def test_endpoint_without_a_pod_is_identified_by_its_address(self, server: ApiServer) -> None:
        server.put(POOLS, pool())
        server.put(SLICES, endpoint_slice("a", "qwen-epp", "10.0.0.2", "10.0.0.1", pods=["", ""]))
        server.put(SLICES, endpoint_slice("b", "qwen-epp", "10.0.0.1", pods=[""]))
        async with run_watch(server) as recorder:
            await wait_until(lambda: recorder.latest.epp_addresses == ("10.0.0.1", "10.0.0.2"))

    @pytest.mark.parametrize("epp", [{"urls": ["http://epp:9090"]}, {"service": "epp"}])
    async def test_picker_is_not_searched_for_if_the_settings_name_it(
        self, server: ApiServer, epp: dict[str, Any]
    ) -> None:
        populate(server, 1)
        async with run_watch(server, EppSettings.model_validate(epp)) as recorder:
            await recorder.wait_for_ready(1)
            server.put(PODS, pod("p1"))
            await recorder.wait_for_ready(2)
            assert recorder.is_complete_with(2)
            assert not server.requests_for(SLICES, watch=False)

    async def test_picker_is_searched_for_once_the_settings_no_longer_name_it(
        self, server: ApiServer
    ) -> None:
        populate(server, 1)
        async with run_watch(server, EppSettings(service="epp")) as recorder:
            await wait_until(lambda: recorder.is_complete_with(1))
            recorder.watch.reconfigure(EppSettings())
            await wait_until(lambda: recorder.is_complete_with(1, "10.0.0.1"))
            recorder.watch.reconfigure(EppSettings(service="epp"))
            await wait_until(lambda: recorder.is_complete_with(1))


@pytest.mark.parametrize("seed", range(4))
async def test_random_changes_end_with_the_right_count(server: ApiServer, seed: int) -> None:
    generator = random.Random(seed)
    populate(server, 0)
    expected: dict[str, bool] = {}

    def put() -> None:
        name = f"p{generator.randrange(20)}"
        ready, app = generator.random() < 0.7, generator.choice(["vllm", "vllm", "another"])
        server.put(PODS, pod(name, ready=ready, app=app))
        expected[name] = ready and app == "vllm"

    def remove() -> None:
        if expected:
            name = generator.choice(sorted(expected))
            server.delete(PODS, name)
            del expected[name]

    actions: list[Callable[[], None]] = [
        put,
        put,
        put,
        put,
        remove,
        server.cut_watches,
        server.compact,
        server.send_bookmarks,
    ]
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(0)
        for _ in range(150):
            generator.choice(actions)()
            if generator.random() < 0.3:
                await asyncio.sleep(generator.random() * 0.01)
        await recorder.wait_for_ready(sum(expected.values()))
        server.put(PODS, pod("last"))
        await recorder.wait_for_ready(sum(expected.values()) + 1)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("pods", [25, pytest.param(50, marks=pytest.mark.long)])
async def test_rolling_update_is_followed_within_a_second(server: ApiServer, pods: int) -> None:
    """All pods are replaced while watches are cut every 2 s and their versions expire now and then."""
    populate(server, pods)
    server.faults.cut_s = 2.0
    loop = asyncio.get_running_loop()
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(pods)
        expected: list[tuple[float, int]] = [(loop.time(), pods)]
        late: list[tuple[float, int | None]] = []

        def record_change(difference: int) -> None:
            expected.append((loop.time(), expected[-1][1] + difference))

        async def pause_and_check(seconds: float) -> None:
            until = loop.time() + seconds
            while loop.time() < until:
                await asyncio.sleep(0.01)
                now = loop.time()
                recent = {number for at, number in expected if at > now - 1.0}
                still_valid = [number for at, number in expected if at <= now - 1.0][-1:]
                if recorder.latest.ready not in recent.union(still_valid):
                    late.append((now, recorder.latest.ready))

        for number in range(pods):
            server.put(PODS, pod(f"p{number}", deleting=True))
            record_change(-1)
            await pause_and_check(0.05)
            server.delete(PODS, f"p{number}")
            server.put(PODS, pod(f"n{number}", ready=False))
            await pause_and_check(0.05)
            server.put(PODS, pod(f"n{number}"))
            record_change(+1)
            if number % 10 == 9:
                server.compact()
                server.cut_watches()
            await pause_and_check(0.04)
        await pause_and_check(1.0)
        assert late == []
        assert recorder.latest.ready == pods
        assert len(server.requests_for(PODS, watch=True)) >= 3  # the watch was cut
        assert len(server.requests_for(PODS, watch=False)) >= 3  # and its version expired


@pytest.mark.slow
@pytest.mark.parametrize("further", [2_000, pytest.param(8_000, marks=pytest.mark.long)])
async def test_memory_does_not_grow_over_thousands_of_events(server: ApiServer, further: int) -> None:
    """After 2,000 events, memory grows by less than a byte for each further event."""
    populate(server, 30)
    async with run_watch(server) as recorder:
        await recorder.wait_for_ready(30)

        published_count = [0]

        async def send_events(number: int) -> None:
            for count in range(number // 2):
                server.put(PODS, pod(f"p{count % 30}", ready=False))
                server.put(PODS, pod(f"p{count % 30}"))
                if count % 250 == 249:
                    # 31 pods are ready only when all earlier events have arrived; then the server may forget
                    # these.
                    server.put(PODS, pod("mark"))
                    await recorder.wait_for_ready(31)
                    server.delete(PODS, "mark")
                    await recorder.wait_for_ready(30)
                    server.drop_delivered_events()
                    published_count[0] += len(recorder.history)
                    recorder.history.clear()

        tracemalloc.start()
        try:
            await send_events(2_000)
            gc.collect()
            before = tracemalloc.take_snapshot()
            await send_events(further)
            gc.collect()
            after = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        ours = [tracemalloc.Filter(True, "*/dispatcher/signals/*")]
        grown = {
            "all": sum(stat.size_diff for stat in after.compare_to(before, "filename")),
            "ours": sum(
                stat.size_diff
                for stat in after.filter_traces(ours).compare_to(before.filter_traces(ours), "filename")
            ),
        }
    assert published_count[0] >= 2_000 + further
    assert grown["ours"] < max(4_096, further)
    assert grown["all"] < 65_536
