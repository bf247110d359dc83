"""A changed configuration file takes effect in a running dispatcher, or is rejected with a reason.

The file is changed like the kubelet does: the link `..data` of the mounted directory is replaced
(tests/kubelet.py).
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress

import httpx
import yaml
from typer.testing import CliRunner

from dispatcher.cli import app
from tests.scenarios.embedding_server import run_embedding_server
from tests.scenarios.processes import NEARLY_FULL, Dispatcher, Stage, assert_stays_true
from tests.support import wait_until_sync

RELOAD_TIMEOUT_S = 2.0


def test_changed_reserve_applies_at_once_and_loses_no_request(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.2)
    producer = stage.producer
    dispatcher = stage.dispatcher(stage.settings(world))
    producer.submit(1200)
    wait_until_sync(lambda: world.in_flight() >= NEARLY_FULL, 20, what="the idle capacity to be used")

    changed_at = time.monotonic()
    dispatcher.reconfigure(budget={"reserve": 0.5})
    dispatcher.wait_for(config_generation=2, limit=16)
    durations_s = [time.monotonic() - changed_at]
    # Leases must be checked too: when all requests finish at once, the next ones are claimed already.
    wait_until_sync(lambda: producer.count_requests()["leased"] <= 16, 5, what="the rest to finish")
    wait_until_sync(lambda: world.in_flight() <= 16, 5, what="the rest to leave the gateway")
    world.control(restart=True)
    assert_stays_true(lambda: world.in_flight() <= 16 + 1, 1.5)
    observed = world.observed()["gateway"]
    assert observed["gone"] == 0, "no request in flight is aborted"
    # The mean is tested in virtual time (test_virtual_limit), where other load cannot distort it.
    assert observed["batch"]["peak"] >= 16, "the limit is used in full"

    dispatcher.write_config("budget: {reserve: 0.2, reserv: 1}\n")
    problem = wait_until_sync(
        lambda: dispatcher.status()["config_problem"], 10, what="the bad file to be noticed"
    )
    assert "gateway.url" in problem, "all problems are reported at once"
    assert_shown_everywhere(dispatcher, "budget.reserv: unknown key (did you mean reserve?)")
    status = dispatcher.status()
    assert (status["reserve"], status["limit"], status["config_generation"]) == (0.5, 16, 2)

    changed_gateway = dispatcher.settings["gateway"] | {"url": "http://127.0.0.1:1"}
    dispatcher.write_config(
        dispatcher.settings | {"gateway": changed_gateway, "budget": {"max_sys": 32, "reserve": 0.25}}
    )
    problem_text = "gateway.url: needs a restart to change"
    wait_until_sync(lambda: problem_text in (dispatcher.status()["config_problem"] or ""), 10)
    assert_shown_everywhere(dispatcher, problem_text)
    assert dispatcher.status()["reserve"] == 0.5, "the rest of that file is not applied either"

    for generation, (reserve, limit) in enumerate([(0.05, 30), (0.5, 16), (0.05, 30)], start=3):
        changed_at = time.monotonic()
        dispatcher.reconfigure(budget={"reserve": reserve})
        dispatcher.wait_for(config_generation=generation, config_problem=None, limit=limit)
        durations_s.append(time.monotonic() - changed_at)
    # On a busy machine one of them may be late.
    assert min(durations_s) <= RELOAD_TIMEOUT_S, durations_s
    print(f"in force after {', '.join(f'{each:.2f}' for each in durations_s)} s")
    wait_until_sync(lambda: dispatcher.metrics()["config_reloads_total{applied}"] == 4, 2)
    metrics = dispatcher.metrics()
    assert metrics["config_refused"] == 0
    assert metrics["config_reloads_total{refused}"] >= 2
    producer.submit(300)  # on a busy machine most requests have been answered by now
    wait_until_sync(lambda: world.in_flight() >= NEARLY_FULL, 5, what="the capacity to be used again")

    producer.wait_for_all(timeout_s=30)
    assert producer.count_results() == {"200": len(producer.submitted)}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
    assert dispatcher.count_attempts("failed") == 0
    assert world.observed()["gateway"]["batch"]["peak"] <= 30 + 1


def assert_shown_everywhere(dispatcher: Dispatcher, problem: str) -> None:
    """Assert that log, /status, `status`, `explain`, metrics and /events show the problem."""
    assert any(
        problem in reason for event in dispatcher.events("config-refused") for reason in event["reasons"]
    )
    assert problem in dispatcher.status()["config_problem"]
    assert dispatcher.metrics()["config_refused"] == 1
    for command in ("status", "explain"):
        output = run_command(dispatcher, command)
        assert "The changed configuration is refused, the one before is in force: config.yaml" in output
        assert problem in output
    events, status = read_event_stream(dispatcher)
    assert problem in status["config_problem"]
    assert any(problem in str(event["fields"]) for event in events if event["event"] == "config-refused")


def run_command(dispatcher: Dispatcher, command: str) -> str:
    """Run a command with the configuration file from before the change, as from another machine."""
    client_config = dispatcher.folder / "client.yaml"
    client_config.write_text(
        yaml.safe_dump(
            dispatcher.settings | {"admin": dispatcher.settings["admin"] | {"port": dispatcher.admin_port}}
        )
    )
    completed = CliRunner().invoke(app, [command, "--config", str(client_config)])
    assert completed.exit_code == 0, completed.output
    return completed.output


def read_event_stream(dispatcher: Dispatcher) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Return the past events and the status that a new client of /events gets."""
    messages: dict[str, dict[str, list[dict[str, object]]]] = {}
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream("GET", f"http://127.0.0.1:{dispatcher.admin_port}/events") as answer,
    ):
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                messages.setdefault(kind, json.loads(line.removeprefix("data: ")))
            if {"history", "status"} <= messages.keys():
                break
    return messages["history"]["events"], messages["status"]  # type: ignore[return-value]


def test_sighup_reloads_the_file(stage: Stage) -> None:
    """SIGHUP reloads the file at once, and an invalid file changes nothing."""
    world = stage.world(slots=32)
    dispatcher = stage.dispatcher(stage.settings(world))
    dispatcher.wait_for(limit=30)
    dispatcher.settings["budget"] = {"max_sys": 32, "reserve": 0.5}
    dispatcher.write_config(dispatcher.settings)
    dispatcher.send_signal(signal.SIGHUP)
    dispatcher.wait_for(limit=16, config_problem=None)
    dispatcher.write_config("gateway: [")
    dispatcher.send_signal(signal.SIGHUP)
    wait_until_sync(lambda: dispatcher.status()["config_problem"], 10, what="the bad file to be noticed")
    assert dispatcher.status()["limit"] == 16
    assert dispatcher.child.poll() is None


def test_changed_batching_rules_apply_to_requests_sent_afterwards(stage: Stage) -> None:
    world, producer = stage.world(slots=64), stage.producer
    rule = {"paths": ["/v1/embeddings"], "max_delay_s": 1}
    with run_embedding_server() as server:
        settings = stage.settings(world, batching={"mode": "off"}, gateway={"url": server.url})
        dispatcher = stage.dispatcher(settings)

        def submit_and_get_call_sizes(count: int) -> list[int]:
            """Submit embedding requests. Return the number of items of each call to the server."""
            count_before = len(server.item_counts)
            ids = [
                *producer.submit(
                    count, b'{"model":"m","input":"a text"}', prefix="e", endpoint="/v1/embeddings"
                )
            ]
            producer.wait_for_all(ids, timeout_s=30)
            return server.item_counts[count_before:]

        assert submit_and_get_call_sizes(20) == [1] * 20
        assert dispatcher.status()["batching"] == []

        dispatcher.reconfigure(batching={"mode": "on", "rules": [rule | {"max_size": 4}]})
        dispatcher.wait_for(config_generation=2)
        assert 1 < max(submit_and_get_call_sizes(40)) <= 4
        (group,) = dispatcher.status()["batching"]
        assert (group["model"], group["mode"], group["size"]) == ("m", "on", 4)
        assert dispatcher.metrics()["merged_requests_total"] > 0

        dispatcher.reconfigure(batching={"rules": [rule | {"max_size": 16, "preferred_sizes": [16]}]})
        dispatcher.wait_for(config_generation=3)
        assert 4 < max(submit_and_get_call_sizes(200)) <= 16

        dispatcher.write_config(
            dispatcher.settings | {"batching": {"rules": [rule | {"max_size": 8, "preferred_sizes": [16]}]}}
        )
        problem_text = "batching.rules[0].preferred_sizes: 16 is above max_size, 8"
        wait_until_sync(lambda: problem_text in (dispatcher.status()["config_problem"] or ""), 10)
        assert dispatcher.status()["batching"][0]["size"] == 16, "the previous rules stay in force"

        dispatcher.reconfigure(batching={"mode": "off"})
        dispatcher.wait_for(config_generation=4, config_problem=None)
        assert submit_and_get_call_sizes(20) == [1] * 20
    assert producer.count_results() == {"200": len(producer.submitted)}
    assert not producer.find_duplicates()
    assert dispatcher.count_attempts("failed") == 0
