"""The programs of docs/examples follow the queue contract, with and without a real dispatcher."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import encode_answer, encode_failure
from dispatcher.wire_format import ErrorCode
from tests.scenarios.example_programs import EXAMPLES_DIR, PROGRAM_BUILDERS, build_go_program, run_program
from tests.scenarios.processes import NAMES, Stage
from tests.support import require_tool, wait_until_sync

UNUSUAL_BODY = '{"model":"m", "prompt":"<ä\\u00df\u2028&>","seed":12345678901234567890,"top_p":1.0}'
"""Body that a program would change if it decoded and encoded it."""


BUILDS = (pytest.mark.slow, pytest.mark.timeout(600))
"""Marks of tests that download packages and compile them, which takes minutes without caches."""


@pytest.fixture(
    params=[name if name == "python" else pytest.param(name, marks=BUILDS) for name in PROGRAM_BUILDERS]
)
def program(request: pytest.FixtureRequest) -> list[str]:
    return PROGRAM_BUILDERS[request.param]()


def read_queue(stage: Stage) -> list[Request]:
    """Return the queued requests in queue order."""
    members: Any = stage.producer.client.zrange(NAMES.queue, 0, -1)
    found = [parse_member(member) for member in members]
    assert all(isinstance(each, Request) for each in found), found
    return [each for each in found if isinstance(each, Request)]


def test_every_request_is_answered_once(stage: Stage, tmp_path: Path, program: list[str]) -> None:
    world = stage.world(slots=32, seconds=0.05)
    stage.dispatcher(
        stage.settings(world, queue={"poll_s": 30})
    )  # without the wake-up, requests would wait for 30 s
    bodies = [f'{{"model":"m","prompt":"number {n}","max_tokens":4}}' for n in range(40)]
    with run_program(program, tmp_path, stage.server.url, NAMES.queue, [*bodies, ""]) as running:
        assert running.wait_for_exit(20) == 0, running.read_stderr()
        results = running.read_results()
    assert [result["status_code"] for result in results.values()] == [200] * 40
    assert all("choices" in json.loads(result["payload"]) for result in results.values())
    assert running.read_stderr() == ""
    assert sum(stage.producer.count_requests().values()) == 0
    assert stage.producer.client.keys("batch-results:*") == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signal_cancels_pending_requests(
    stage: Stage, tmp_path: Path, program: list[str], signal_number: signal.Signals
) -> None:
    world = stage.world(slots=4, seconds=60)
    stage.dispatcher(stage.settings(world, max_sys=4))
    with run_program(program, tmp_path, stage.server.url, NAMES.queue, ['{"prompt":"hi"}'] * 5) as running:
        wait_until_sync(
            lambda: world.in_flight() == 3, 20, what=f"three running requests; {running.read_stderr()}"
        )
        running.process.send_signal(signal_number)
        assert running.wait_for_exit(20) == 1
        assert [result["error_code"] for result in running.read_results().values()] == ["CANCELLED"] * 5
    wait_until_sync(lambda: world.in_flight() == 0, 10, what="running requests to be aborted")
    assert stage.producer.client.keys("*:cancel:*") == []


def test_members_and_results_follow_the_queue_contract(
    stage: Stage, tmp_path: Path, program: list[str]
) -> None:
    """There is no dispatcher: the test reads the queue and writes the results."""
    client, bodies = stage.producer.client, [UNUSUAL_BODY, *('{"prompt":"hi"}',) * 1200]
    with run_program(program, tmp_path, stage.server.url, NAMES.queue, bodies, 900) as running:
        wait_until_sync(
            lambda: stage.producer.count_requests()["pending"] == len(bodies),
            20,
            what=f"all requests to be queued; {running.read_stderr()}",
        )
        requests = read_queue(stage)
        numbers = [int(request.id.partition("-")[2]) for request in requests]
        assert numbers == [n + 1 for n in range(len(bodies))], (
            "requests with equal deadlines are queued in the order of submission"
        )
        first = requests[0]
        assert first.payload == UNUSUAL_BODY.encode()
        assert NAMES.find_list_problem(first.results) is None
        assert len({request.token for request in requests}) == len(bodies)
        forged = encode_answer(first.id, 200, b"forged", token="another")
        client.lpush(first.results, forged, b'{"id":"none"}', *(make_result(each) for each in requests))
        assert running.wait_for_exit(20) == 1, "one failed"
        results = running.read_results()
    assert len(results) == len(bodies)
    assert (results[first.id]["status_code"], results[first.id]["payload"]) == (200, "ä")
    assert sum("error_code" in result for result in results.values()) == 1
    assert client.exists(first.results) == 0


def make_result(request: Request) -> bytes:
    """Return a success for each request but the last one, whose deadline has passed."""
    if request.id.endswith("-1201"):
        return encode_failure(
            request.id, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded", token=request.token
        )
    return encode_answer(request.id, 200, "ä".encode(), token=request.token)


@pytest.mark.parametrize("body", ["{", "[1]", '"text"', "null"])
def test_invalid_line_is_reported_before_anything_is_submitted(
    stage: Stage, tmp_path: Path, program: list[str], body: str
) -> None:
    with run_program(program, tmp_path, stage.server.url, NAMES.queue, ["{}", body]) as running:
        assert running.wait_for_exit() == 2
        assert "line 2" in running.read_stderr()
    assert read_queue(stage) == []


def test_program_survives_a_restart_of_redis(own_stage: Stage, tmp_path: Path, program: list[str]) -> None:
    client = own_stage.producer.client
    url = own_stage.server.url
    with run_program(program, tmp_path, url, NAMES.queue, ['{"prompt":"hi"}'] * 3) as running:
        wait_until_sync(
            lambda: own_stage.producer.count_requests()["pending"] == 3,
            20,
            what=f"all requests to be queued; {running.read_stderr()}",
        )
        requests = read_queue(own_stage)
        own_stage.server.kill()
        wait_until_sync(
            lambda: "Redis is away" in running.read_stderr(), 10, what="the outage to be reported"
        )
        own_stage.server.start()
        for request in requests:
            client.lpush(request.results, make_result(request))
        assert running.wait_for_exit() == 0, running.read_stderr()


@pytest.mark.parametrize("name", PROGRAM_BUILDERS)
def test_readme_describes_each_program(name: str) -> None:
    page = (EXAMPLES_DIR / "README.md").read_text()
    assert f"]({name}/)" in page


def test_lock_files_name_no_host() -> None:
    lock = (EXAMPLES_DIR / "javascript" / "package-lock.json").read_text()
    assert "resolved" not in lock
    assert "://" not in lock
    packages = json.loads(lock)["packages"]
    assert all(
        package.get("integrity", "").startswith("sha512-") for name, package in packages.items() if name
    )
    module = (EXAMPLES_DIR / "go" / "go.mod").read_text()
    assert "replace" not in module
    assert re.search(r"^go 1\.21$", module, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_go_program_is_formatted_and_vetted() -> None:
    go, folder = require_tool("go"), EXAMPLES_DIR / "go"
    gofmt = [require_tool("gofmt"), "-l", "."]
    assert subprocess.run(gofmt, cwd=folder, capture_output=True, text=True, check=True).stdout == ""
    build_go_program()  # downloads its imports
    subprocess.run([go, "vet", "."], cwd=folder, check=True)
