"""An unreachable gateway delays requests but costs them no attempts, whatever the kind of outage."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from dispatcher.limit.budget import GATEWAY_OUTAGES
from tests.scenarios.processes import NEARLY_FULL, Dispatcher, Stage, World, assert_stays_true, merge_settings
from tests.support import find_envoy, free_port, measure_slowdown, running_process, wait_until_sync

LIMIT = 30
RESUME_TIMEOUT_S = 3.0
MAX_COUNTED_ATTEMPTS = 2
"""Failed attempts that a replica may count before it knows that the gateway is unreachable."""

short_and_long = pytest.mark.parametrize(
    "outage_s", [2.0, pytest.param(60.0, marks=pytest.mark.long)], ids=["short", "long"]
)


def count_failed_attempts(dispatcher: Dispatcher) -> float:
    return dispatcher.count_attempts("failed")


def count_probes(dispatcher: Dispatcher) -> float:
    return dispatcher.count_attempts("unreachable") + dispatcher.count_attempts("uncounted")


class ReplicaPair:
    """Two replicas in a world whose gateway becomes unreachable."""

    def __init__(self, stage: Stage, world: World, gateway: dict[str, Any]) -> None:
        self.world = world
        self.producer = stage.producer
        settings = stage.settings(world, gateway=gateway)
        self.replicas = [stage.dispatcher(settings) for _ in range(2)]

    def run_outage(
        self, outage_s: float, break_gateway: Callable[[], object], restore_gateway: Callable[[], object]
    ) -> None:
        """Break the gateway for `outage_s`, restore it, and check that every request is answered once."""
        world, producer, replicas = self.world, self.producer, self.replicas
        wait_until_sync(self._both_run_requests, 20, what="both replicas to run requests", every_s=0.05)
        failed_before = [count_failed_attempts(replica) for replica in replicas]
        producer.submit(240)
        wait_until_sync(lambda: world.in_flight() >= NEARLY_FULL, 15, what="the idle capacity to be used")

        break_gateway()
        wait_until_sync(
            lambda: {replica.status()["reason"] for replica in replicas} <= set(GATEWAY_OUTAGES),
            15,
            what="both replicas to notice the outage",
        )
        # Until the last request that got through has ended, its lease counts beside that of a probe.
        wait_until_sync(
            lambda: world.in_flight() == 0 and producer.count_requests()["leased"] <= 1,
            10,
            what="the last request that got through to end",
        )
        finished, probes_before = len(producer.collect()), sum(map(count_probes, replicas))
        assert_stays_true(
            lambda: producer.count_requests()["leased"] <= 1, outage_s, what="two probes at a time"
        )
        assert sum(map(count_probes, replicas)) > probes_before, "otherwise no probe was sent"
        assert len(producer.collect()) == finished, "no result without a gateway"
        assert {replica.status()["reason"] for replica in replicas} <= set(GATEWAY_OUTAGES)
        assert set(producer.collect()) < set(producer.submitted), "otherwise no request had to wait"

        # On a busy machine the outage starts late, and few requests remain to use the idle capacity.
        producer.submit(3 * LIMIT)
        last_number = max((entry.number for entry in world.log()), default=0)
        restore_gateway()
        restored_at = time.monotonic()
        new_entries = wait_until_sync(
            lambda: [e for e in world.log(last_number) if e.arrived_at > restored_at],
            RESUME_TIMEOUT_S + 5,
            what="a request to be sent",
        )
        wait_until_sync(
            lambda: world.in_flight() >= NEARLY_FULL,
            RESUME_TIMEOUT_S + 5,
            what="the idle capacity to be used again",
        )
        full_s = time.monotonic() - restored_at
        failed_counts = [
            count_failed_attempts(replica) - before
            for replica, before in zip(replicas, failed_before, strict=True)
        ]
        print(
            f"sent {new_entries[0].arrived_at - restored_at:.2f} s, "
            f"full {full_s:.2f} s after the gateway was restored; {failed_counts=}"
        )
        assert full_s < RESUME_TIMEOUT_S * measure_slowdown()
        assert max(failed_counts) <= MAX_COUNTED_ATTEMPTS

        producer.wait_for_all(timeout_s=40)
        assert producer.count_results() == {"200": len(producer.submitted)}
        assert not producer.find_duplicates()
        assert not producer.find_lost_requests()

    def _both_run_requests(self) -> bool:
        self.producer.submit(2)
        return all(replica.status()["running"] for replica in self.replicas)


@pytest.mark.parametrize("listener", ["refuse", "blackhole"])
@short_and_long
def test_gateway_that_accepts_no_connection_costs_no_attempts(
    stage: Stage, listener: str, outage_s: float
) -> None:
    world = stage.world(slots=32, seconds=0.5)
    # Connections to the black hole hang until this timeout, and the system gives up real ones, too.
    replicas = ReplicaPair(stage, world, {"timeout_s": 2})
    replicas.run_outage(
        outage_s,
        lambda: world.control(gateway={"listener": listener}),
        lambda: world.control(gateway=None),
    )


@short_and_long
@pytest.mark.timeout(400)
def test_gateway_that_rejects_everything_costs_no_attempts(stage: Stage, outage_s: float) -> None:
    """The route is missing, the token has expired, or there is no backend."""
    world = stage.world(slots=32, seconds=0.5)
    world.control(
        path_s=0.1
    )  # so that a stand-in that stalls for a moment does not seem to have accepted the request
    replicas = ReplicaPair(stage, world, {})
    kinds = [(404, ""), (401, "who"), (500, "")]
    for status, body in kinds if outage_s > 10 else kinds[:1]:
        answer = {"kind": "status", "status": status, "body": body}
        replicas.run_outage(
            outage_s,
            partial(world.control, gateway={"answer": answer}),
            lambda: world.control(gateway=None),
        )


@short_and_long
def test_gateway_that_lost_its_tls_costs_no_attempts(stage: Stage, tmp_path: Path, outage_s: float) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    world = stage.world(slots=32, seconds=0.5, tls_cert=tmp_path / "server.pem")
    replicas = ReplicaPair(stage, world, {"tls": {"ca_file": str(tmp_path / "ca.pem")}})
    replicas.run_outage(
        outage_s,
        lambda: world.control(gateway={"listener": "plaintext"}),
        lambda: world.control(gateway=None),
    )


def test_gateway_that_dies_with_requests_on_new_connections_costs_no_attempts(stage: Stage) -> None:
    """Such a reset looks like one caused by the body of a request, except that the gateway is gone."""
    world = stage.world(slots=32, seconds=2.0)
    dispatcher = stage.dispatcher(stage.settings(world))
    ids = stage.producer.submit(LIMIT)
    wait_until_sync(lambda: world.in_flight() == LIMIT, 20, what="all to be sent")
    world.control(gateway={"listener": "refuse"})
    dispatcher.wait_for(reason="gateway-unreachable")
    world.control(gateway=None, seconds=0.1)
    stage.producer.wait_for_all(timeout_s=20)
    assert stage.producer.count_results() == {"200": len(ids)}
    assert count_failed_attempts(dispatcher) == 0


def test_probe_opens_a_new_connection(stage: Stage) -> None:
    """A kept connection could stay open without a gateway behind it, and the probe would succeed wrongly."""
    world = stage.world(slots=32, seconds=0.3)
    producer = stage.producer
    dispatcher = stage.dispatcher(stage.settings(world, gateway={"timeout_s": 2}))
    producer.wait_for_all(producer.submit(LIMIT), 20)
    assert world.observed()["gateway"]["connections"] == LIMIT, "all connections are kept open and idle"
    world.control(gateway={"listener": "blackhole"})
    producer.submit(5)
    dispatcher.wait_for(reason="gateway-unreachable")
    assert_stays_true(
        lambda: dispatcher.status()["reason"] == "gateway-unreachable",
        3.5,
        what="the gateway to stay unreachable",
    )
    world.control(gateway=None)
    producer.wait_for_all(timeout_s=20)
    assert producer.count_results() == {"200": LIMIT + 5}
    assert count_failed_attempts(dispatcher) == 0


class Picker:
    """Endpoint picker of an Envoy, which can be stopped and restarted on the same port."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.port = free_port()
        self._stack = stack
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = Path(__file__).with_name("picker.py")
        self._process = self._stack.enter_context(running_process(sys.executable, program, str(self.port)))

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def make_address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def make_cluster(name: str, port: int, **options: Any) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": make_address(port)}}
    return {
        "name": name,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    } | options


def make_envoy_config(port: int, upstream: int, picker: int) -> dict[str, Any]:
    """Return a configuration that routes requests to the pool only if the picker allows them."""
    filters = "type.googleapis.com/envoy.extensions.filters"
    http2 = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    picker_filter = {
        "@type": f"{filters}.http.ext_proc.v3.ExternalProcessor",
        "failure_mode_allow": False,
        "processing_mode": {"response_header_mode": "SKIP"},
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
    }
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "pool"}}]
    virtual_host = {"name": "all", "domains": ["*"], "routes": routes}
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [virtual_host]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": picker_filter},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{filters}.http.router.v3.Router"},
            },
        ],
    }
    chain = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    protocol = {"@type": http2, "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "static_resources": {
            "listeners": [{"address": make_address(port), "filter_chains": [{"filters": chain}]}],
            "clusters": [
                make_cluster("pool", upstream),
                make_cluster(
                    "picker", picker, typed_extension_protocol_options={http2.rpartition("/")[2]: protocol}
                ),
            ],
        }
    }


@contextlib.contextmanager
def run_envoy(world: World, picker: Picker, folder: Path) -> Iterator[str]:
    port = free_port()
    config = folder / "envoy.json"
    upstream = int(world.gateway.rpartition(":")[2])
    config.write_text(json.dumps(make_envoy_config(port, upstream, picker.port)))
    command = (find_envoy(), "-c", config, "--concurrency", "1", "--disable-hot-restart")
    with (folder / "envoy.log").open("wb") as log, running_process(*command, stderr=log) as process:

        def is_serving() -> bool:
            assert process.poll() is None, (folder / "envoy.log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={}).status_code == 200
            return False

        wait_until_sync(is_serving, 30, what="Envoy to serve", every_s=0.1)
        yield f"http://127.0.0.1:{port}"


@short_and_long
def test_envoy_without_its_endpoint_picker_costs_no_attempts(
    stage: Stage, tmp_path: Path, outage_s: float
) -> None:
    world = stage.world(slots=32, seconds=0.5)
    with contextlib.ExitStack() as stack:
        picker = Picker(stack)
        picker.start()
        url = stack.enter_context(run_envoy(world, picker, tmp_path))
        ReplicaPair(stage, world, {"url": url}).run_outage(outage_s, picker.stop, picker.start)


def test_request_that_makes_the_gateway_reset_affects_no_other_request(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.5)
    producer = stage.producer
    dispatcher = stage.dispatcher(
        stage.settings(world, retry={"base_s": 0.1, "max_s": 0.2, "max_attempts": 4})
    )
    poison = producer.submit(5, b'{"sim":{"kind":"reset"}}', prefix="poison", deadline_s=3000)
    plain = producer.submit(600, prefix="plain")
    producer.wait_for_all(timeout_s=30)
    assert {producer.results[id_][0]["status_code"] for id_ in plain} == {200}
    assert {producer.results[id_][0]["error_code"] for id_ in poison} == {"RETRIES_EXHAUSTED"}
    assert not producer.find_duplicates()
    assert producer.count_requests() == {"pending": 0, "leased": 0, "delayed": 0, "dead": 5}
    assert count_failed_attempts(dispatcher) == 4 * len(poison)
    assert not [event for event in dispatcher.events("gate") if event["reason"] in GATEWAY_OUTAGES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "status", "body", "replicas"),
    [(1, 404, "", 2), (1, 401, "who", 1), (3, 503, "x", 1), (3, 504, "", 2), (50, 404, "", 2)],
)
def test_requests_answered_without_gateway_headers_affect_no_other_request(
    stage: Stage, count: int, status: int, body: str, replicas: int
) -> None:
    """They are first in the queue and alone at first, so they look like an unreachable gateway."""
    world = stage.world(slots=32, seconds=0.5)
    producer = stage.producer
    poison = json.dumps({"sim": {"kind": "status", "status": status, "body": body}}).encode()
    ids = producer.submit(count, poison, prefix="poison", deadline_s=3000)
    settings = stage.settings(world, retry={"base_s": 0.1, "max_s": 0.2, "max_attempts": 2})
    dispatchers = [stage.dispatcher(settings) for _ in range(replicas)]
    dispatchers[0].wait_for(reason="gateway-failing")
    started_at = time.monotonic()
    plain = producer.submit(20, prefix="plain")
    producer.wait_for_all(plain, timeout_s=20)
    print(f"{count} × {status}, {replicas} replicas: 20/20 in {time.monotonic() - started_at:.2f} s")
    assert {producer.results[id_][0]["status_code"] for id_ in plain} == {200}
    assert not any(count_failed_attempts(dispatcher) for dispatcher in dispatchers), (
        "no attempt is counted so soon"
    )

    def is_poison_answered() -> bool:
        producer.submit(5, prefix="plain")
        return set(ids) <= producer.collect().keys()

    if count == 1:
        # The request pauses for 10 s whenever it fails three times before another request is answered.
        world.control(seconds=0.05)
        wait_until_sync(
            is_poison_answered, 90, what="the poison to be answered while other requests run", every_s=0.1
        )
        assert producer.results[ids[0]][0]["error_code"] == "RETRIES_EXHAUSTED"
        assert producer.results[ids[0]][0]["status_code"] == status


def test_failing_gateway_is_reported_until_it_works_again(stage: Stage) -> None:
    """The gateway is reachable, so the gate stays open, and the failures are reported as the problem."""
    world = stage.world(slots=32, seconds=0.05)
    producer = stage.producer
    dispatcher = stage.dispatcher(
        stage.settings(world, retry={"base_s": 0.1, "max_s": 0.2, "max_attempts": 4})
    )
    broken = json.dumps({"sim": {"kind": "status", "status": 500, "body": "secret"}}).encode()
    ids = producer.submit(5, broken, prefix="broken", deadline_s=3000)
    producer.wait_for_all(ids, timeout_s=20)
    status = dispatcher.wait_for(open=True)
    assert status["attempts_problem"].startswith("Of the last 20 attempts 20 failed: 500 (20), the newest ")
    assert f"{status['attempts_problem']}." in status["explanation"]
    assert "secret" not in json.dumps(status)
    producer.wait_for_all(producer.submit(20, prefix="plain"), timeout_s=20)
    status_after = dispatcher.wait_for(attempts_problem=None)
    assert "failed" not in status_after["explanation"]


def test_token_files_that_are_pipes_do_not_block(stage: Stage, tmp_path: Path) -> None:
    """The pipes have no writer, so opening one without O_NONBLOCK would block for ever and delay SIGTERM."""
    world = stage.world()
    for name in ("gateway", "epp"):
        os.mkfifo(tmp_path / name)
    settings_with_pipes = {
        "gateway": {"token_file": str(tmp_path / "gateway")},
        "signals": {"epp": {"token_file": str(tmp_path / "epp")}},
    }
    dispatcher = stage.dispatcher(merge_settings(stage.settings(world), settings_with_pipes))
    wait_until_sync(lambda: dispatcher.get_probe("/livez")[0] == 200, what="/livez to answer")
    wait_until_sync(
        lambda: "not a regular file" in json.dumps(dispatcher.status()), what="the reason to be shown"
    )
    assert dispatcher.terminate() == 0
