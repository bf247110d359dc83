"""A gateway that is gone costs no request anything but time, however it is gone."""

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

from tests.scenarios.processes import Dispatcher, Stage, World, hold, merged
from tests.support import envoy_path, free_port, running, slowness, wait_until_sync

LIMIT = 30
RESUMED_S = 3.0
BURNT = 2
"""Attempts that a replica may count against requests before it knows that there is no gateway."""

stretches = pytest.mark.parametrize(
    "gone_s", [2.0, pytest.param(60.0, marks=pytest.mark.long)], ids=["short", "long"]
)


def burnt(one: Dispatcher) -> float:
    return one.tries("failed")


def probed(one: Dispatcher) -> float:
    return one.tries("unreachable")


class Pair:
    """Two replicas at work on a world whose gateway they are about to lose."""

    def __init__(self, stage: Stage, world: World, gateway: dict[str, Any]) -> None:
        self.world = world
        self.producer = stage.producer
        settings = stage.settings(world, gateway=gateway)
        self.replicas = [stage.dispatcher(settings) for _ in range(2)]

    def outlive(self, gone_s: float, leave: Callable[[], object], come_back: Callable[[], object]) -> None:
        """The gateway leaves for `gone_s` and comes back; every request gets its answer."""
        world, producer, replicas = self.world, self.producer, self.replicas
        wait_until_sync(self._both_take_part, 20, what="both replicas to take part", every_s=0.05)
        burnt_before = [burnt(one) for one in replicas]
        producer.submit(240)
        wait_until_sync(lambda: world.in_flight() >= LIMIT, 15, what="the slack to be filled")

        leave()
        for one in replicas:
            one.wait_for(reason="gateway-unreachable")
        wait_until_sync(
            lambda: producer.count_requests()["leased"] <= 1, 10, what="all but a probe to be back"
        )
        # The one may be the last that got through, which runs for half a second.
        hold(lambda: producer.count_requests()["leased"] <= 1, 1.0, what="two probes at a time")
        finished, probes = len(producer.collect()), sum(map(probed, replicas))
        hold(lambda: producer.count_requests()["leased"] <= 1, gone_s, what="two probes at a time")
        assert sum(map(probed, replicas)) > probes, "otherwise nothing was looked for"
        assert len(producer.collect()) == finished, "no result without a gateway"
        assert {one.status()["reason"] for one in replicas} == {"gateway-unreachable"}
        assert set(producer.collect()) < set(producer.submitted), "otherwise nothing was held back"

        # On a busy machine the gateway leaves late, and little is left to fill the slack with.
        producer.submit(3 * LIMIT)
        known = max((entry.number for entry in world.log()), default=0)
        come_back()
        back_at = time.monotonic()
        served = wait_until_sync(
            lambda: [e for e in world.log(known) if e.arrived_at > back_at], RESUMED_S + 5, what="a request"
        )
        wait_until_sync(lambda: world.in_flight() >= LIMIT, RESUMED_S + 5, what="all slack to be filled")
        full_s = time.monotonic() - back_at
        cost = [burnt(one) - before for one, before in zip(replicas, burnt_before, strict=True)]
        print(f"sent {served[0].arrived_at - back_at:.2f} s, full {full_s:.2f} s after the return; {cost=}")
        assert full_s < RESUMED_S * slowness()
        assert max(cost) <= BURNT

        producer.wait_for_all(timeout_s=40)
        assert producer.answers() == {"200": len(producer.submitted)}
        assert not producer.twice()
        assert not producer.unaccounted()

    def _both_take_part(self) -> bool:
        self.producer.submit(2)
        return all(one.status()["running"] for one in self.replicas)


@pytest.mark.parametrize("listener", ["refuse", "blackhole"])
@stretches
def test_a_gateway_that_takes_no_connection_burns_nothing(stage: Stage, listener: str, gone_s: float) -> None:
    world = stage.world(slots=32, seconds=0.5)
    # What hangs in a black hole hangs until then; real connections are given up by the system, too.
    pair = Pair(stage, world, {"timeout_s": 2})
    pair.outlive(
        gone_s,
        lambda: world.control(gateway={"listener": listener}),
        lambda: world.control(gateway=None),
    )


@stretches
@pytest.mark.timeout(400)
def test_a_gateway_that_only_sends_us_away_burns_nothing(stage: Stage, gone_s: float) -> None:
    """The route is missing; our token has expired; nobody is behind it."""
    world = stage.world(slots=32, seconds=0.5)
    world.control(
        path_s=0.1
    )  # so that a stand-in which stands still for a moment seems not to have let us in
    pair = Pair(stage, world, {})
    kinds = [(404, ""), (401, "who"), (500, "")]
    for status, body in kinds if gone_s > 10 else kinds[:1]:
        answer = {"kind": "status", "status": status, "body": body}
        pair.outlive(
            gone_s,
            partial(world.control, gateway={"answer": answer}),
            lambda: world.control(gateway=None),
        )


@stretches
def test_a_gateway_that_lost_its_tls_burns_nothing(stage: Stage, tmp_path: Path, gone_s: float) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    world = stage.world(slots=32, seconds=0.5, tls_cert=tmp_path / "server.pem")
    pair = Pair(stage, world, {"tls": {"ca_file": str(tmp_path / "ca.pem")}})
    pair.outlive(
        gone_s,
        lambda: world.control(gateway={"listener": "plaintext"}),
        lambda: world.control(gateway=None),
    )


def test_a_gateway_that_dies_with_first_requests_of_new_connections_burns_nothing(stage: Stage) -> None:
    """Nothing tells such a reset from one that a request's body has caused, but that nobody is there."""
    world = stage.world(slots=32, seconds=2.0)
    one = stage.dispatcher(stage.settings(world))
    ids = stage.producer.submit(LIMIT)
    wait_until_sync(lambda: world.in_flight() == LIMIT, 20, what="all to be sent")
    world.control(gateway={"listener": "refuse"})
    one.wait_for(reason="gateway-unreachable")
    world.control(gateway=None, seconds=0.1)
    stage.producer.wait_for_all(timeout_s=20)
    assert stage.producer.answers() == {"200": len(ids)}
    assert burnt(one) == 0


def test_a_probe_does_not_ride_on_a_connection_that_was_kept(stage: Stage) -> None:
    """It would be connected for as long as it liked, and take that for a gateway."""
    world = stage.world(slots=32, seconds=0.3)
    producer = stage.producer
    one = stage.dispatcher(stage.settings(world, gateway={"timeout_s": 2}))
    producer.wait_for_all(producer.submit(LIMIT), 20)
    assert world.observed()["gateway"]["connections"] == LIMIT, "all of them kept, and idle"
    world.control(gateway={"listener": "blackhole"})
    producer.submit(5)
    one.wait_for(reason="gateway-unreachable")
    hold(lambda: one.status()["reason"] == "gateway-unreachable", 3.5, what="reached, without a gateway")
    world.control(gateway=None)
    producer.wait_for_all(timeout_s=20)
    assert producer.answers() == {"200": LIMIT + 5}
    assert burnt(one) == 0


class Picker:
    """The endpoint picker behind an Envoy, which can go down and come up again on its port."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.port = free_port()
        self._stack = stack
        self._process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        program = Path(__file__).with_name("picker.py")
        self._process = self._stack.enter_context(running(sys.executable, program, str(self.port)))

    def down(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def cluster(name: str, port: int, **more: Any) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": address(port)}}
    return {
        "name": name,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    } | more


def envoy_config(port: int, upstream: int, picker: int) -> dict[str, Any]:
    """A route to the pool for what the picker says yes to; without the picker it fails closed."""
    filters = "type.googleapis.com/envoy.extensions.filters"
    http2 = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    picking = {
        "@type": f"{filters}.http.ext_proc.v3.ExternalProcessor",
        "failure_mode_allow": False,
        "processing_mode": {"response_header_mode": "SKIP"},
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
    }
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "pool"}}]
    everything = {"name": "all", "domains": ["*"], "routes": routes}
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [everything]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": picking},
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
            "listeners": [{"address": address(port), "filter_chains": [{"filters": chain}]}],
            "clusters": [
                cluster("pool", upstream),
                cluster(
                    "picker", picker, typed_extension_protocol_options={http2.rpartition("/")[2]: protocol}
                ),
            ],
        }
    }


@contextlib.contextmanager
def envoy_before(world: World, picker: Picker, folder: Path) -> Iterator[str]:
    port = free_port()
    config = folder / "envoy.json"
    upstream = int(world.gateway.rpartition(":")[2])
    config.write_text(json.dumps(envoy_config(port, upstream, picker.port)))
    command = (envoy_path(), "-c", config, "--concurrency", "1", "--disable-hot-restart")
    with (folder / "envoy.log").open("wb") as log, running(*command, stderr=log) as process:

        def serves() -> bool:
            assert process.poll() is None, (folder / "envoy.log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={}).status_code == 200
            return False

        wait_until_sync(serves, 30, what="Envoy to serve", every_s=0.1)
        yield f"http://127.0.0.1:{port}"


@stretches
def test_an_envoy_without_its_endpoint_picker_burns_nothing(
    stage: Stage, tmp_path: Path, gone_s: float
) -> None:
    world = stage.world(slots=32, seconds=0.5)
    with contextlib.ExitStack() as stack:
        picker = Picker(stack)
        picker.up()
        url = stack.enter_context(envoy_before(world, picker, tmp_path))
        Pair(stage, world, {"url": url}).outlive(gone_s, picker.down, picker.up)


def test_a_body_that_makes_the_gateway_reset_stops_nobody_but_itself(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.5)
    producer = stage.producer
    one = stage.dispatcher(stage.settings(world, retry={"base_s": 0.1, "max_s": 0.2, "max_attempts": 4}))
    poison = producer.submit(5, b'{"sim":{"kind":"reset"}}', prefix="poison", deadline_s=3000)
    plain = producer.submit(600, prefix="plain")
    producer.wait_for_all(timeout_s=30)
    assert {producer.results[id_][0]["status_code"] for id_ in plain} == {200}
    assert {producer.results[id_][0]["error_code"] for id_ in poison} == {"RETRIES_EXHAUSTED"}
    assert not producer.twice()
    assert producer.count_requests() == {"pending": 0, "leased": 0, "delayed": 0, "dead": 5}
    assert burnt(one) == 4 * len(poison)
    assert not [event for event in one.events("gate") if event["reason"] == "gateway-unreachable"]


@pytest.mark.parametrize(
    ("count", "status", "body", "replicas"),
    [(1, 404, "", 2), (1, 401, "who", 1), (3, 503, "x", 1), (3, 504, "", 2), (50, 404, "", 2)],
)
def test_requests_that_are_answered_as_if_there_were_no_gateway_stop_nobody_but_themselves(
    stage: Stage, count: int, status: int, body: str, replicas: int
) -> None:
    """They are the first in line, and alone at first: nothing tells them from a gateway that is gone."""
    world = stage.world(slots=32, seconds=0.5)
    producer = stage.producer
    poison = json.dumps({"sim": {"kind": "status", "status": status, "body": body}}).encode()
    ids = producer.submit(count, poison, prefix="poison", deadline_s=3000)
    settings = stage.settings(world, retry={"base_s": 0.1, "max_s": 0.2, "max_attempts": 2})
    several = [stage.dispatcher(settings) for _ in range(replicas)]
    several[0].wait_for(reason="gateway-unreachable")
    began_at = time.monotonic()
    plain = producer.submit(20, prefix="plain")
    producer.wait_for_all(plain, timeout_s=20)
    print(f"{count} × {status}, {replicas} replicas: 20/20 in {time.monotonic() - began_at:.2f} s")
    assert {producer.results[id_][0]["status_code"] for id_ in plain} == {200}
    assert not any(burnt(one) for one in several), "nothing is charged to anybody so soon"

    def ended() -> bool:
        producer.submit(5, prefix="plain")
        return set(ids) <= producer.collect().keys()

    if count == 1:
        # Each time that it bounces thrice before another one is answered, it rests for 10 s.
        world.control(seconds=0.05)
        wait_until_sync(ended, 90, what="the poison to end, in company", every_s=0.1)
        assert producer.results[ids[0]][0]["error_code"] == "RETRIES_EXHAUSTED"
        assert producer.results[ids[0]][0]["status_code"] == status


def test_a_gateway_that_fails_what_it_gets_is_told_until_it_works_again(stage: Stage) -> None:
    """It is there, so the gate stays open; what waits for a retry is not why nothing comes back."""
    world = stage.world(slots=32, seconds=0.05)
    producer = stage.producer
    one = stage.dispatcher(stage.settings(world, retry={"base_s": 0.1, "max_s": 0.2, "max_attempts": 4}))
    broken = json.dumps({"sim": {"kind": "status", "status": 500, "body": "secret"}}).encode()
    ids = producer.submit(5, broken, prefix="broken", deadline_s=3000)
    producer.wait_for_all(ids, timeout_s=20)
    told = one.wait_for(open=True)
    assert told["attempts_problem"].startswith("Of the last 20 attempts 20 failed: 500 (20), the newest ")
    assert f"{told['attempts_problem']}." in told["explanation"]
    assert "secret" not in json.dumps(told)
    producer.wait_for_all(producer.submit(20, prefix="plain"), timeout_s=20)
    after = one.wait_for(attempts_problem=None)
    assert "failed" not in after["explanation"]


def test_token_files_that_are_pipes_stop_nothing(stage: Stage, tmp_path: Path) -> None:
    """The pipes have no writer. Opening one without O_NONBLOCK would block for ever, and delay SIGTERM."""
    world = stage.world()
    for name in ("gateway", "epp"):
        os.mkfifo(tmp_path / name)
    files = {
        "gateway": {"token_file": str(tmp_path / "gateway")},
        "signals": {"epp": {"token_file": str(tmp_path / "epp")}},
    }
    one = stage.dispatcher(merged(stage.settings(world), files))
    wait_until_sync(lambda: one.claim_probe("/livez")[0] == 200, what="it to be live")
    wait_until_sync(lambda: "not a regular file" in json.dumps(one.status()), what="the reason to be shown")
    assert one.terminate() == 0
