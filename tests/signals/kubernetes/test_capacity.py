"""What the Kubernetes watch sees, through the real client, of an API server that fails as real ones do."""

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
from dispatcher.settings import EppSettings
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
from tests.signals.told import QWEN, Seen
from tests.support import wait_until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer().serve(tmp_path) as server:
        yield server


@asynccontextmanager
async def watching(
    where: ApiServer | ClusterAccess, epp: EppSettings | None = None, **more: Any
) -> AsyncIterator[Seen]:
    seen = Seen()
    way = where if isinstance(where, ClusterAccess) else access(where)
    watch = seen.watch = CapacityWatch(QWEN, epp or EppSettings(), seen, access=way, **more)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.run())
        try:
            yield seen
        finally:
            task.cancel()


async def test_ready_pods_times_ports_count(server: ApiServer) -> None:
    populate(server, 3, ports=2)
    server.put(PODS, pod("starting", ready=False))
    server.put(PODS, pod("going", deleting=True))
    server.put(PODS, pod("other", app="another"))
    server.put(PODS, pod("elsewhere"), namespace="another")
    async with watching(server) as seen:
        await seen.ready(6)
        await wait_until(lambda: seen.fine(6, "10.0.0.1"))


async def test_each_ready_pod_and_port_is_an_address(server: ApiServer) -> None:
    server.put(POOLS, pool(ports=2))
    server.put(PODS, pod("a", address="10.0.0.7"))
    server.put(PODS, pod("b", address="fd00::8"))
    server.put(PODS, pod("starting", ready=False, address="10.0.0.5"))
    server.put(PODS, pod("going", deleting=True, address="10.0.0.6"))
    server.put(PODS, pod("nowhere", address=""))
    async with watching(server) as seen:
        await seen.ready(6)
        assert set(seen.now.addresses or ()) == {
            f"{at}:800{n}" for at in ("10.0.0.7", "[fd00::8]") for n in "01"
        }
        server.delete(PODS, "a")
        await seen.ready(4)
        assert set(seen.now.addresses or ()) == {"[fd00::8]:8000", "[fd00::8]:8001"}
        server.put(PODS, pod("b", address="10.0.0.3"))  # as many as before, somewhere else
        await wait_until(lambda: seen.now.addresses == ("10.0.0.3:8000", "10.0.0.3:8001"))
        server.delete(POOLS, "qwen")
        await seen.ready(0)
        assert seen.now.addresses == ()


async def test_addresses_are_those_of_an_old_pool_too_and_stay_when_the_watch_is_lost(
    server: ApiServer,
) -> None:
    server.put(OLD_POOLS, old_pool())
    server.put(PODS, pod("a", address="10.0.0.7"))
    async with watching(server, hold_s=0.2) as seen:
        await seen.ready(1)
        assert seen.now.addresses == ("10.0.0.7:8000",)
        await wait_until(lambda: server.watched(OLD_POOLS, PODS))  # listed is not yet watched
        server.tokens = set()  # told at once; how long silence takes is looked at in virtual time
        server.cut()
        await seen.ready(None)
        assert seen.now.addresses == ("10.0.0.7:8000",)


async def test_a_pod_is_followed_through_its_life(server: ApiServer) -> None:
    populate(server, 2)
    async with watching(server) as seen:
        await seen.ready(2)
        server.put(PODS, pod("new", ready=False))
        server.put(PODS, pod("new"))
        await seen.ready(3)
        server.put(PODS, pod("p0", deleting=True))
        await seen.ready(2)
        server.delete(PODS, "p0")
        server.put(PODS, pod("p1", app="another"))  # no longer selected: the server says DELETED
        await seen.ready(1)
        server.delete(PODS, "new")
        await seen.ready(0)
        assert not seen.now.problems
        assert len(server.asked(PODS, watch=False)) == 1


async def test_a_cut_watch_goes_on_where_it_was(server: ApiServer) -> None:
    populate(server, 1)
    async with watching(server) as seen:
        await seen.ready(1)
        for number in range(1, 6):
            server.cut()
            server.put(PODS, pod(f"p{number}"))
            await seen.ready(number + 1)
        assert len(server.asked(PODS, watch=False)) == 1
        assert not any(told.problems for told in seen.history)


async def test_a_bookmark_spares_a_new_list(server: ApiServer) -> None:
    populate(server, 1)
    async with watching(server) as seen:
        await seen.ready(1)
        await wait_until(lambda: server.asked(PODS, watch=True))
        first = server.asked(PODS, watch=True)[-1].query["resourceVersion"]
        server.put(PODS, pod("other", app="another"))  # nothing for this watch

        turn = itertools.cycle((server.bookmark, server.cut))

        def goes_on_from_bookmark() -> bool:
            next(turn)()
            return int(server.asked(PODS, watch=True)[-1].query["resourceVersion"]) > int(first) + 1

        await wait_until(goes_on_from_bookmark, every_s=0.1)
        assert len(server.asked(PODS, watch=False)) == 1


@pytest.mark.parametrize("as_status", [False, True])
async def test_gone_means_list_again(server: ApiServer, as_status: bool) -> None:
    populate(server, 3)
    server.faults.expired_as_status = as_status
    async with watching(server) as seen:
        await seen.ready(3)
        await wait_until(lambda: server.watched(PODS))
        server.faults.mute = True
        server.cut()
        server.delete(PODS, "p0")
        server.put(PODS, pod("p1", ready=False))
        server.compact()
        server.faults.mute = False
        server.cut()
        await seen.ready(1)
        assert len(server.asked(PODS, watch=False)) == 2
        server.put(PODS, pod("p1"))
        await seen.ready(2)


async def test_another_selector_counts_other_pods(server: ApiServer) -> None:
    populate(server, 3)
    server.put(PODS, pod("b0", app="sglang"))
    async with watching(server) as seen:
        await seen.ready(3)
        server.put(POOLS, pool(app="sglang"))
        await seen.ready(1)
        server.put(PODS, pod("p9"))
        server.put(PODS, pod("b1", app="sglang"))
        await seen.ready(2)
        server.put(POOLS, pool(app="sglang", ports=4))
        await seen.ready(8)
        assert None not in [told.ready for told in seen.history[seen.history.index(seen.now) - 3 :]]


async def test_a_deleted_pool_has_no_endpoints(server: ApiServer) -> None:
    populate(server, 2)
    async with watching(server) as seen:
        await seen.ready(2)
        server.delete(POOLS, "qwen")
        await seen.ready(0)
        assert "InferencePool default/qwen does not exist" in await seen.problem()
        server.put(POOLS, pool())
        await seen.ready(2)
        await wait_until(lambda: not seen.now.problems)


async def test_a_pool_without_a_picker_bounds_the_capacity_and_says_what_is_missing(
    server: ApiServer,
) -> None:
    """The newest Gateway API Inference Extension does not require the reference to a picker."""
    alone = pool()
    del alone["spec"]["endpointPickerRef"]
    server.put(POOLS, alone)
    server.put(PODS, pod("p0"))
    async with watching(server) as seen:
        await seen.ready(1)
        told = await seen.problem("InferencePool default/qwen names no endpoint picker")
        assert "signals.epp.urls or signals.epp.service" in told
        assert seen.now.epp_addresses is None
        server.put(POOLS, pool())
        server.put(SLICES, endpoint_slice("x", "qwen-epp", "10.0.0.1"))
        await wait_until(lambda: seen.fine(1, "10.0.0.1"))


async def test_a_pool_that_is_not_there_has_none_either(server: ApiServer) -> None:
    server.put(POOLS, pool("another"))
    async with watching(server) as seen:
        await seen.ready(0)


class TestOlderApi:
    async def test_the_older_version_serves_where_the_newer_is_not(self, server: ApiServer) -> None:
        server.faults.not_served = {POOLS}
        server.put(OLD_POOLS, old_pool())
        server.put(PODS, pod("p0"))
        server.put(SLICES, endpoint_slice("x", "qwen-epp", "10.0.0.1"))
        async with watching(server) as seen:
            await wait_until(lambda: seen.fine(1, "10.0.0.1"))
            server.delete(OLD_POOLS, "qwen")
            await seen.ready(0)

    async def test_the_newer_wins_where_both_have_the_pool(self, server: ApiServer) -> None:
        server.put(OLD_POOLS, old_pool(app="old"))
        server.put(POOLS, pool())
        server.put(PODS, pod("p0"))
        server.put(PODS, pod("p1"))
        server.put(PODS, pod("o1", app="old"))
        async with watching(server) as seen:
            await seen.ready(2)
            server.delete(POOLS, "qwen")
            await seen.ready(1)

    async def test_a_role_without_the_older_is_no_problem(self, server: ApiServer) -> None:
        server.faults.forbidden = {OLD_POOLS}
        populate(server, 2)
        async with watching(server) as seen:
            await wait_until(lambda: seen.fine(2, "10.0.0.1"))
            server.delete(POOLS, "qwen")
            await seen.ready(0)

    async def test_without_any_crd_it_says_what_to_install(self, server: ApiServer) -> None:
        server.faults.not_served = {POOLS, OLD_POOLS}
        async with watching(server) as seen:
            assert "inferencepools.inference.networking.k8s.io" in await seen.problem("install the CRDs")
            assert seen.now.ready is None
            server.faults.not_served = set()
            populate(server, 1)
            await seen.ready(1)
            await wait_until(lambda: not seen.now.problems)


class TestRights:
    """Which rule is asked for. A server looks at rights before it looks whether it serves a thing at all."""

    RULE = 'needs the rule apiGroups: [{}], resources: ["inferencepools"], verbs: ["list", "watch"]'
    NEW, OLD = '"inference.networking.k8s.io"', '"inference.networking.x-k8s.io"'

    async def test_only_the_older_version_is_refused_and_the_newer_not_served(
        self, server: ApiServer
    ) -> None:
        """Where the pool is of the older version this right is missing: to install CRDs would not help."""
        server.faults.not_served, server.faults.forbidden = {POOLS}, {OLD_POOLS}
        server.put(OLD_POOLS, old_pool())
        server.put(PODS, pod("p0"))
        async with watching(server) as seen:
            told = await seen.problem("not allowed to list inferencepools", self.RULE.format(self.OLD))
            assert "or, if the cluster serves no InferencePools, install the CRDs" in told
            assert seen.now.ready is None
            server.faults.forbidden = set()
            await seen.ready(1)

    async def test_only_the_newer_is_refused_and_the_older_not_served(self, server: ApiServer) -> None:
        server.faults.not_served, server.faults.forbidden = {OLD_POOLS}, {POOLS}
        async with watching(server) as seen:
            told = await seen.problem("not allowed to list inferencepools", self.RULE.format(self.NEW))
            assert "or, if the cluster serves no InferencePools, install the CRDs" in told

    async def test_only_the_newer_is_refused_and_the_older_has_no_pool(self, server: ApiServer) -> None:
        server.faults.forbidden = {POOLS}
        async with watching(server) as seen:
            assert "CRD" not in await seen.problem("not allowed", self.RULE.format(self.NEW))

    async def test_both_are_refused(self, server: ApiServer) -> None:
        server.faults.forbidden = {POOLS, OLD_POOLS}
        async with watching(server) as seen:
            told = await seen.problem("not allowed", self.RULE.format(f"{self.NEW}, {self.OLD}"))
            assert "inference.networking.x-k8s.io only where the cluster serves it" in told
            assert "install the CRDs" in told

    async def test_the_newer_has_no_pool_and_the_older_is_refused(self, server: ApiServer) -> None:
        server.faults.forbidden = {OLD_POOLS}
        async with watching(server) as seen:
            await seen.problem("default/qwen does not exist, unless in", self.RULE.format(self.OLD))
            assert seen.now.ready == 0

    async def test_the_crd_of_the_newer_goes_while_the_older_is_refused(self, server: ApiServer) -> None:
        populate(server, 2)
        server.faults.forbidden = {OLD_POOLS}
        async with watching(server) as seen:
            await seen.ready(2)
            server.faults.not_served = {POOLS}
            server.delete(POOLS, "qwen")
            server.cut()
            await seen.problem("not allowed", self.RULE.format(self.OLD))
            assert seen.now.ready == 0

    async def test_a_right_to_list_alone_is_not_enough(self, server: ApiServer) -> None:
        populate(server, 2)
        server.faults.forbidden = {f"watch {PODS}"}
        async with watching(server) as seen:
            rule = 'apiGroups: [""], resources: ["pods"], verbs: ["list", "watch"]'
            await seen.problem("not allowed to watch pods in namespace default", rule)
            assert seen.now.ready == 2  # for a while


class TestLeastRole:
    """The Role in the documentation: what the program asks for, no more and no less."""

    @staticmethod
    def documents() -> list[dict[str, Any]]:
        page = (DOCS / "explanation" / "signals.md").read_text()
        (found,) = re.findall(r"<!-- least role -->\n```yaml\n(.*?)```", page, re.DOTALL)
        return list(yaml.safe_load_all(found))

    def test_is_bound(self) -> None:
        role, binding = self.documents()
        names = [role["metadata"], binding["metadata"], *binding["subjects"]]
        assert {(each["name"], each["namespace"]) for each in names} == {("batch-dispatcher", "default")}
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])

    async def test_is_enough_and_no_more_than_is_used(self, tmp_path: Path) -> None:
        rules = self.documents()[0]["rules"]
        used = set()
        for unserved, older in ((set(), False), ({POOLS}, True)):
            async with ApiServer().serve(tmp_path) as server:
                populate(server, 2)
                if older:
                    server.delete(POOLS, "qwen")
                    server.put(OLD_POOLS, old_pool())
                server.faults.rules, server.faults.not_served = rules, unserved
                async with watching(server) as seen:
                    await wait_until(lambda: seen.fine(2, "10.0.0.1"))
                assert not server.refused(403)
                used |= {(each.collection, each.verb) for each in server.requests}
        named = {POOLS: rules[0], OLD_POOLS: rules[1], PODS: rules[2], SLICES: rules[3]}
        asked = {(name, verb) for name, rule in named.items() for verb in rule["verbs"]}
        assert used == asked
        assert len(rules) == len(named)
        for name, rule in named.items():
            group = name.split("/")[0] if name.count("/") == 2 else ""
            assert (rule["apiGroups"], rule["resources"]) == ([group], [name.rpartition("/")[2]])


@pytest.mark.parametrize(
    ("collection", "group", "ready"),
    [(POOLS, "inference.networking.k8s.io", None), (PODS, "", None), (SLICES, "discovery.k8s.io", 2)],
)
async def test_a_missing_right_is_named_with_its_rule(
    server: ApiServer, collection: str, group: str, ready: int | None
) -> None:
    populate(server, 2)
    server.faults.forbidden = {collection}
    plural = collection.rpartition("/")[2]
    async with watching(server) as seen:
        rule = f'apiGroups: ["{group}"], resources: ["{plural}"], verbs: ["list", "watch"]'
        assert "\n" not in await seen.problem(f"not allowed to list {plural} in namespace default", rule)
        await seen.ready(ready)
        server.faults.forbidden = set()
        await wait_until(lambda: seen.fine(2, "10.0.0.1"))


async def test_an_outage_is_bridged_for_a_while_and_then_nothing_is_claimed(server: ApiServer) -> None:
    populate(server, 2)
    async with watching(server, hold_s=1.0) as seen:
        await wait_until(lambda: seen.fine(2, "10.0.0.1"))
        await server.down()
        await seen.problem("cannot be reached")
        assert seen.now.ready == 2
        await seen.ready(None)
        assert seen.now.epp_addresses == ("10.0.0.1",)
        await seen.problem("no longer counts")
        server.put(PODS, pod("p2"))
        await server.up()
        await wait_until(lambda: seen.fine(3, "10.0.0.1"))


async def test_something_else_that_begins_to_answer_is_a_problem(server: ApiServer) -> None:
    """A portal on the way answers 200 to everything; what it says is no news of the pool."""
    populate(server, 2)
    async with watching(server, hold_s=1.0) as seen:
        await seen.ready(2)
        server.faults.garbage = True
        server.cut()
        await seen.problem("what answers for the Kubernetes API sends text/plain")
        await seen.ready(None)
        server.faults.garbage = False
        await wait_until(lambda: seen.fine(2, "10.0.0.1"))


@pytest.mark.parametrize("fault", ["garbage", "busy"])
async def test_an_answer_that_is_none_is_a_problem_and_no_end(server: ApiServer, fault: str) -> None:
    populate(server, 1)
    server.faults.garbage = fault == "garbage"
    server.faults.busy_s = 1 if fault == "busy" else None
    async with watching(server) as seen:
        await seen.problem(
            "the Kubernetes API", "sends text/plain" if fault == "garbage" else "server asks to wait 1 s"
        )
        asked = [each.at for each in server.asked(POOLS, watch=False)]
        if fault == "busy":
            assert all(after - before >= 1.0 for before, after in itertools.pairwise(asked))
        server.faults.garbage, server.faults.busy_s = False, None
        await seen.ready(1)
        await wait_until(lambda: not seen.now.problems)


async def test_a_long_list_comes_in_pages(server: ApiServer) -> None:
    populate(server, 1_200)
    server.faults.page_expires = True
    async with watching(server) as seen:
        await seen.ready(1_200)
        pages = server.asked(PODS, watch=False)
        # The second page had expired: from the start again.
        assert ["continue" in page.query for page in pages] == [False, True, False, True, True]
        # Half of a list is nobody's capacity.
        assert {told.ready for told in seen.history} <= {None, 1_200}


class TestCredentials:
    async def test_a_new_token_in_the_kubeconfig_is_taken_up(self, server: ApiServer) -> None:
        populate(server, 1)
        async with watching(server) as seen:
            await seen.ready(1)
            server.tokens = {"t1"}
            server.cut()
            assert (
                "answered 401 (Unauthorized) (look at: the credentials of kubeconfig" in await seen.problem()
            )
            server.write_kubeconfig("t1")
            server.put(PODS, pod("p1"))
            await seen.ready(2)
            await wait_until(lambda: not seen.now.problems)
            assert server.requests[-1].token == "t1"

    async def test_a_pod_uses_its_service_account_and_its_rotating_token(self, tmp_path: Path) -> None:
        authority = trustme.CA()
        async with ApiServer().serve(tmp_path, tls_of(authority)) as server:
            populate(server, 1)
            host, _, port = server.url.removeprefix("https://").partition(":")
            authority.cert_pem.write_to_path(tmp_path / "ca.crt")
            (tmp_path / "token").write_text("t0")
            environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            async with watching(ClusterAccess(environ=environ, service_account=tmp_path)) as seen:
                await seen.ready(1)
                (tmp_path / "token").write_text("t1")
                server.tokens = {"t1"}
                server.cut()
                server.put(PODS, pod("p1"))
                await seen.ready(2)

    async def test_without_a_cluster_it_says_so_once_and_ends(self, tmp_path: Path) -> None:
        seen = Seen()
        nowhere = ClusterAccess(environ={"HOME": str(tmp_path)}, service_account=tmp_path / "none")
        await CapacityWatch(QWEN, EppSettings(), seen, access=nowhere).run()
        assert seen.history == [NO_KUBERNETES]

    async def test_the_usual_kubeconfig_is_found(self, server: ApiServer, tmp_path: Path) -> None:
        populate(server, 1)
        (tmp_path / ".kube").mkdir()
        server.kubeconfig.rename(tmp_path / ".kube" / "config")
        async with watching(
            ClusterAccess(environ={"HOME": str(tmp_path)}, service_account=tmp_path / "none")
        ) as seen:
            await seen.ready(1)

    @pytest.mark.parametrize("content", [None, "", "[]", "{", "clusters: 3"])
    async def test_a_bad_kubeconfig_is_a_problem_until_it_is_mended(
        self, server: ApiServer, content: str | None
    ) -> None:
        populate(server, 1)
        if content is None:
            server.kubeconfig.unlink()
        else:
            server.kubeconfig.write_text(content)
        async with watching(server) as seen:
            await seen.problem(str(server.kubeconfig), "cannot be used")
            server.write_kubeconfig("t0")
            await seen.ready(1)

    @pytest.mark.parametrize("unreadable", ["[]", "{", "clusters: 3"])
    async def test_a_kubeconfig_that_becomes_unreadable_is_told_and_taken_up_when_it_is_mended(
        self, server: ApiServer, unreadable: str
    ) -> None:
        populate(server, 1)
        async with watching(server) as seen:
            await wait_until(lambda: seen.fine(1, "10.0.0.1"))
            server.kubeconfig.write_text(unreadable)
            server.cut()
            await seen.problem(str(server.kubeconfig), "cannot be used")
            server.write_kubeconfig("t0")
            await wait_until(lambda: seen.fine(1, "10.0.0.1"))

    async def test_another_authority_is_taken_up(self, tmp_path: Path) -> None:
        """The server gets a certificate of a new authority, and the pod's ca.crt follows."""
        old, new = trustme.CA(), trustme.CA()
        (tmp_path / "token").write_text("t0")
        old.cert_pem.write_to_path(tmp_path / "ca.crt")
        async with ApiServer().serve(tmp_path, tls_of(old)) as server:
            populate(server, 1)
            host, _, port = server.url.removeprefix("https://").partition(":")
            environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            async with watching(ClusterAccess(environ=environ, service_account=tmp_path)) as seen:
                await seen.ready(1)
                await server.down()
                await server.up(tls_of(new))
                await seen.problem("cannot be reached", "certificate")
                new.cert_pem.write_to_path(tmp_path / "ca.crt")
                server.put(PODS, pod("p1"))
                await seen.ready(2)

    async def test_the_dispatcher_says_who_it_is(self, server: ApiServer) -> None:
        populate(server, 1)
        async with watching(server) as seen:
            await seen.ready(1)
        assert {each.user_agent for each in server.requests} == {f"batch-dispatcher/{__version__}"}


def tls_of(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


class TestEndpointPicker:
    async def test_its_ready_replicas_are_told(self, server: ApiServer) -> None:
        populate(server, 1)
        server.put(SLICES, endpoint_slice("qwen-epp-x2", "qwen-epp", "10.0.0.3", "10.0.0.2", ready=None))
        server.put(SLICES, endpoint_slice("qwen-epp-x3", "qwen-epp", "10.0.0.4", ready=False))
        server.put(SLICES, endpoint_slice("other", "other", "10.0.0.5"))
        async with watching(server) as seen:
            await wait_until(lambda: seen.now.epp_addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
            server.delete(SLICES, "qwen-epp-x2")
            await wait_until(lambda: seen.now.epp_addresses == ("10.0.0.1",))
            server.put(POOLS, pool(epp="other"))
            await wait_until(lambda: seen.now.epp_addresses == ("10.0.0.5",))
            server.delete(SLICES, "other")
            await seen.problem("Service default/other has no ready endpoint")
            assert seen.now.epp_addresses == ()
            assert seen.now.ready == 1

    async def test_a_replica_with_addresses_of_two_families_is_one(self, server: ApiServer) -> None:
        server.put(POOLS, pool())
        server.put(SLICES, endpoint_slice("v6", "qwen-epp", "fd00::10", "fd00::11", family="IPv6", pods="ab"))
        server.put(SLICES, endpoint_slice("v4", "qwen-epp", "10.0.0.9", family="IPv4", pods="a"))
        async with watching(server) as seen:
            await wait_until(lambda: seen.now.epp_addresses == ("10.0.0.9", "fd00::11"))

    async def test_an_endpoint_that_names_no_pod_is_told_by_its_address(self, server: ApiServer) -> None:
        server.put(POOLS, pool())
        server.put(SLICES, endpoint_slice("a", "qwen-epp", "10.0.0.2", "10.0.0.1", pods=["", ""]))
        server.put(SLICES, endpoint_slice("b", "qwen-epp", "10.0.0.1", pods=[""]))
        async with watching(server) as seen:
            await wait_until(lambda: seen.now.epp_addresses == ("10.0.0.1", "10.0.0.2"))

    @pytest.mark.parametrize("epp", [{"urls": ["http://epp:9090"]}, {"service": "epp"}])
    async def test_it_is_not_looked_for_where_the_settings_name_it(
        self, server: ApiServer, epp: dict[str, Any]
    ) -> None:
        populate(server, 1)
        async with watching(server, EppSettings.model_validate(epp)) as seen:
            await seen.ready(1)
            server.put(PODS, pod("p1"))
            await seen.ready(2)
            assert seen.fine(2)
            assert not server.asked(SLICES, watch=False)

    async def test_it_is_looked_for_once_the_settings_name_it_no_longer(self, server: ApiServer) -> None:
        populate(server, 1)
        async with watching(server, EppSettings(service="epp")) as seen:
            await wait_until(lambda: seen.fine(1))
            seen.watch.reconfigure(EppSettings())
            await wait_until(lambda: seen.fine(1, "10.0.0.1"))
            seen.watch.reconfigure(EppSettings(service="epp"))
            await wait_until(lambda: seen.fine(1))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_it_ends_with_the_truth(server: ApiServer, seed: int) -> None:
    dice = random.Random(seed)
    populate(server, 0)
    truth: dict[str, bool] = {}

    def put() -> None:
        name = f"p{dice.randrange(20)}"
        ready, app = dice.random() < 0.7, dice.choice(["vllm", "vllm", "another"])
        server.put(PODS, pod(name, ready=ready, app=app))
        truth[name] = ready and app == "vllm"

    def remove() -> None:
        if truth:
            name = dice.choice(sorted(truth))
            server.delete(PODS, name)
            del truth[name]

    acts: list[Callable[[], None]] = [put, put, put, put, remove, server.cut, server.compact, server.bookmark]
    async with watching(server) as seen:
        await seen.ready(0)
        for _ in range(150):
            dice.choice(acts)()
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() * 0.01)
        await seen.ready(sum(truth.values()))
        server.put(PODS, pod("last"))
        await seen.ready(sum(truth.values()) + 1)


@pytest.mark.serial
@pytest.mark.parametrize("pods", [25, pytest.param(50, marks=pytest.mark.long)])
async def test_a_rolling_update_is_followed_within_a_second(server: ApiServer, pods: int) -> None:
    """All pods are replaced, while watches are cut every 2 s and their place is lost now and then."""
    populate(server, pods)
    server.faults.cut_s = 2.0
    loop = asyncio.get_running_loop()
    async with watching(server) as seen:
        await seen.ready(pods)
        truth: list[tuple[float, int]] = [(loop.time(), pods)]
        late: list[tuple[float, int | None]] = []

        def change(by: int) -> None:
            truth.append((loop.time(), truth[-1][1] + by))

        async def pause(seconds: float) -> None:
            until = loop.time() + seconds
            while loop.time() < until:
                await asyncio.sleep(0.01)
                now = loop.time()
                recent = {number for at, number in truth if at > now - 1.0}
                standing = [number for at, number in truth if at <= now - 1.0][-1:]
                if seen.now.ready not in recent.union(standing):
                    late.append((now, seen.now.ready))

        for number in range(pods):
            server.put(PODS, pod(f"p{number}", deleting=True))
            change(-1)
            await pause(0.05)
            server.delete(PODS, f"p{number}")
            server.put(PODS, pod(f"n{number}", ready=False))
            await pause(0.05)
            server.put(PODS, pod(f"n{number}"))
            change(+1)
            if number % 10 == 9:
                server.compact()
                server.cut()
            await pause(0.04)
        await pause(1.0)
        assert late == []
        assert seen.now.ready == pods
        assert len(server.asked(PODS, watch=True)) >= 3  # it was cut
        assert len(server.asked(PODS, watch=False)) >= 3  # and lost its place


@pytest.mark.parametrize("further", [2_000, pytest.param(8_000, marks=pytest.mark.long)])
async def test_memory_stays_flat_over_thousands_of_events(server: ApiServer, further: int) -> None:
    """After 2,000 events nothing more is kept: of those that follow a byte each stays with us."""
    populate(server, 30)
    async with watching(server) as seen:
        await seen.ready(30)

        told = [0]

        async def events(number: int) -> None:
            for count in range(number // 2):
                server.put(PODS, pod(f"p{count % 30}", ready=False))
                server.put(PODS, pod(f"p{count % 30}"))
                if count % 250 == 249:
                    # 31 are there only when all before has arrived; then the server's memory of it may go.
                    server.put(PODS, pod("mark"))
                    await seen.ready(31)
                    server.delete(PODS, "mark")
                    await seen.ready(30)
                    server.drop_delivered_events()
                    told[0] += len(seen.history)
                    seen.history.clear()

        tracemalloc.start()
        try:
            await events(2_000)
            gc.collect()
            before = tracemalloc.take_snapshot()
            await events(further)
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
    assert told[0] >= 2_000 + further
    assert grown["ours"] < max(4_096, further)
    assert grown["all"] < 65_536
