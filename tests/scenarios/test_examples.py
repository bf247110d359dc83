"""The programs of docs/examples keep the queue contract, each in its language, beside a real dispatcher."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode, encode_answer, encode_failure
from tests.scenarios.foreign import EXAMPLES, PROGRAMS, go_program, submitting
from tests.scenarios.processes import NAMES, Stage
from tests.support import require_tool, wait_until_sync

ODD = '{"model":"m", "prompt":"<ä\\u00df\u2028&>","seed":12345678901234567890,"top_p":1.0}'
"""A body that a program which decodes and encodes it would change."""


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> list[str]:
    return PROGRAMS[request.param]()


def in_line(stage: Stage) -> list[Request]:
    """In the order in which they would leave."""
    members: Any = stage.producer.client.zrange(NAMES.queue, 0, -1)
    found = [parse_member(member) for member in members]
    assert all(isinstance(each, Request) for each in found), found
    return [each for each in found if isinstance(each, Request)]


def test_every_request_is_answered_once(stage: Stage, tmp_path: Path, program: list[str]) -> None:
    world = stage.world(slots=32, seconds=0.05)
    stage.dispatcher(stage.settings(world, queue={"poll_s": 30}))  # by the wake-up, or not for long
    bodies = [f'{{"model":"m","prompt":"number {n}","max_tokens":4}}' for n in range(40)]
    with submitting(program, tmp_path, stage.server.url, NAMES.queue, [*bodies, ""]) as running:
        assert running.end(20) == 0, running.told()
        results = running.printed()
    assert [result["status_code"] for result in results.values()] == [200] * 40
    assert all("choices" in json.loads(result["payload"]) for result in results.values())
    assert running.told() == ""
    assert sum(stage.producer.count_requests().values()) == 0
    assert stage.producer.client.keys("batch-results:*") == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_end_it_cancels_what_is_pending(
    stage: Stage, tmp_path: Path, program: list[str], how: signal.Signals
) -> None:
    world = stage.world(slots=4, seconds=60)
    stage.dispatcher(stage.settings(world, max_sys=4))
    with submitting(program, tmp_path, stage.server.url, NAMES.queue, ['{"prompt":"hi"}'] * 5) as running:
        wait_until_sync(lambda: world.in_flight() == 3, 20, what=f"three at work; {running.told()}")
        running.process.send_signal(how)
        assert running.end(20) == 1
        assert [result["error_code"] for result in running.printed().values()] == ["CANCELLED"] * 5
    wait_until_sync(lambda: world.in_flight() == 0, 10, what="those at work are broken off")
    assert stage.producer.client.keys("*:cancel:*") == []


def test_what_it_submits_and_takes_is_of_the_contract(
    stage: Stage, tmp_path: Path, program: list[str]
) -> None:
    """There is no dispatcher: the test looks at what lies in line, and answers it."""
    client, bodies = stage.producer.client, [ODD, *('{"prompt":"hi"}',) * 1200]
    with submitting(program, tmp_path, stage.server.url, NAMES.queue, bodies, 900) as running:
        wait_until_sync(
            lambda: stage.producer.count_requests()["pending"] == len(bodies),
            20,
            what=f"in line; {running.told()}",
        )
        requests = in_line(stage)
        numbers = [int(request.id.partition("-")[2]) for request in requests]
        assert numbers == [n + 1 for n in range(len(bodies))], (
            "equal deadlines leave in the order of submission"
        )
        first = requests[0]
        assert first.payload == ODD.encode()
        assert NAMES.find_list_problem(first.results) is None
        assert len({request.token for request in requests}) == len(bodies)
        forged = encode_answer(first.id, 200, b"forged", token="another")
        client.lpush(first.results, forged, b'{"id":"none"}', *(result_of(each) for each in requests))
        assert running.end(20) == 1, "one failed"
        results = running.printed()
    assert len(results) == len(bodies)
    assert (results[first.id]["status_code"], results[first.id]["payload"]) == (200, "ä")
    assert sum("error_code" in result for result in results.values()) == 1
    assert client.exists(first.results) == 0


def result_of(request: Request) -> bytes:
    """The last one's deadline has passed."""
    if request.id.endswith("-1201"):
        return encode_failure(
            request.id, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded", token=request.token
        )
    return encode_answer(request.id, 200, "ä".encode(), token=request.token)


@pytest.mark.parametrize("body", ["{", "[1]", '"text"', "null"])
def test_what_is_no_request_is_named_before_anything_is_submitted(
    stage: Stage, tmp_path: Path, program: list[str], body: str
) -> None:
    with submitting(program, tmp_path, stage.server.url, NAMES.queue, ["{}", body]) as running:
        assert running.end() == 2
        assert "line 2" in running.told()
    assert in_line(stage) == []


def test_redis_may_go_and_come_back_meanwhile(own_stage: Stage, tmp_path: Path, program: list[str]) -> None:
    client = own_stage.producer.client
    url = own_stage.server.url
    with submitting(program, tmp_path, url, NAMES.queue, ['{"prompt":"hi"}'] * 3) as running:
        wait_until_sync(
            lambda: own_stage.producer.count_requests()["pending"] == 3, 20, what=f"in line; {running.told()}"
        )
        requests = in_line(own_stage)
        own_stage.server.kill()
        wait_until_sync(lambda: "Redis is away" in running.told(), 10, what="that it says so")
        own_stage.server.start()
        for request in requests:
            client.lpush(request.results, result_of(request))
        assert running.end() == 0, running.told()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_says_how_to_run_it(name: str) -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert f"]({name}/)" in page


def test_the_locks_name_no_host() -> None:
    lock = (EXAMPLES / "javascript" / "package-lock.json").read_text()
    assert "resolved" not in lock
    assert "://" not in lock
    packages = json.loads(lock)["packages"]
    assert all(
        package.get("integrity", "").startswith("sha512-") for name, package in packages.items() if name
    )
    module = (EXAMPLES / "go" / "go.mod").read_text()
    assert "replace" not in module
    assert re.search(r"^go 1\.21$", module, re.MULTILINE)


def test_the_go_program_is_formatted_and_vetted() -> None:
    go, folder = require_tool("go"), EXAMPLES / "go"
    gofmt = [require_tool("gofmt"), "-l", "."]
    assert subprocess.run(gofmt, cwd=folder, capture_output=True, text=True, check=True).stdout == ""
    go_program()  # it fetches what it imports
    subprocess.run([go, "vet", "."], cwd=folder, check=True)
