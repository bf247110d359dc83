"""Exit codes and output of the verbs for operators, with a real queue and without a dispatcher."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from dispatcher.cli import app, render
from dispatcher.cli.admin_client import AdminAddress, StatusProblem, StatusProblemKind, fetch_status
from dispatcher.limit.health import Health
from dispatcher.queue.contract import DeadLetter, Permit, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.status import (
    BudgetStatus,
    GateStatus,
    HealthStatus,
    ImpactStatus,
    ProcessStatus,
    QueueStatus,
    ReadingStatus,
    ReplicaStatus,
    SignalsStatus,
    Status,
)
from tests.fork_server import run_cli
from tests.queue.factories import OwnerAndAdmin
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
NOW_PERMIT_LIMIT = 10
RunConfigured = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("operate")) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.flushall()


def run_verb(queue_server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments, "--queue-url", queue_server.url)


async def submit_requests(queue_server: Server, *ids: str) -> None:
    deadline = int(time.time()) + 600
    async with _queue(queue_server) as queue:
        for name in ids:
            member = encode_member(name, b'{"a":1}', deadline, token=f"token-of-{name}")
            await queue.submit([Submission(member, float(deadline), name, f"token-of-{name}", deadline)])


async def put_dead_request(queue_server: Server, name: str) -> None:
    await submit_requests(queue_server, name)
    async with _queue(queue_server) as queue:
        now = asyncio.get_running_loop().time()
        claimed = await queue.claim(1, f"nonce-{name}", Permit(NOW_PERMIT_LIMIT, now, 0))
        (lease,) = claimed.leases
        await queue.move_to_dead_letters(
            [DeadLetter(Settlement(lease, b'{"id":"x"}', "", name, ""), "it broke")]
        )


class _queue:  # noqa: N801 - a context manager
    def __init__(self, queue_server: Server) -> None:
        self.url = queue_server.url

    async def __aenter__(self) -> OwnerAndAdmin:
        self.queue = OwnerAndAdmin(connect(self.url), NAMES, "owner")
        return self.queue

    async def __aexit__(self, *exc: object) -> None:
        await self.queue.aclose()


def read_status(queue_server: Server) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(run_verb(queue_server, "status", "--json").stdout)
    return shown


async def test_status_and_explain_show_the_queue_without_a_dispatcher(queue_server: Server) -> None:
    await submit_requests(queue_server, "a", "b")
    shown = read_status(queue_server)
    assert (shown["pending"], shown["leased"], shown["dead"], shown["paused"]) == (2, 0, 0, None)
    serve_answer = run_verb(queue_server, "explain")
    assert serve_answer.returncode == 0
    assert "No dispatcher answers" in serve_answer.stdout
    assert "2 requests wait" in serve_answer.stdout


@pytest.fixture
def run_configured(queue_server: Server, tmp_path: Path) -> RunConfigured:
    """Return a function that runs a verb with a configuration that names this admin port."""

    def ask(run_verb: str, port: int, token: str | None = None) -> subprocess.CompletedProcess[str]:
        admin: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        if token is not None:
            admin["token_file"] = token
        config = tmp_path / "config.yaml"
        settings = {"gateway": {"url": "http://gw"}, "queue": {"url": queue_server.url}, "admin": admin}
        config.write_text(yaml.safe_dump(settings))
        return run_cli(run_verb, "--config", config)

    return ask


@asynccontextmanager
async def serve_answer(text: str, code: int = 200) -> AsyncIterator[int]:
    """Serve this answer for every request."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, status=code, content_type="application/json")

    app = web.Application()
    app.router.add_get("/status", answer)
    async with TestServer(app) as there:
        assert there.port
        yield there.port


def status_with_every_subject() -> Status:
    return Status(
        ProcessStatus("1", "3", "default", NAMES.queue, "one"),
        GateStatus(
            "full", True, "18 in flight.", 18, 18, 1, problems=["The gateway cannot be reached: refused"]
        ),
        BudgetStatus(
            0.05,
            max_sys=32.0,
            max_sys_source="setting",
            per_endpoint=32.0,
            per_endpoint_source="setting",
            reserve_problem="batch requests last 48 s",
            capacity_note="One of them is wrong.",
        ),
        SignalsStatus(
            "epp",
            41.7,
            readings=[ReadingStatus("saturation", 41.7, 0.1, 0.5, 0.25, 32.0, "epp", {"queue_size": 8.0})],
        ),
        queue=QueueStatus(
            pending=7,
            earliest_deadline_s=61.0,
            at_risk=3,
            service_rate=2.5,
            replicas=[ReplicaStatus("one", 1, 0.1), ReplicaStatus("two", 17, 3.0)],
        ),
        impact=ImpactStatus(0.3, 0.39, 0.016, 0.029, "realtime", 40, "epp: ttft", 0.24, None),
        health=HealthStatus(Health.FAILING, "gateway", "The gateway is away.", 312.0, "gateway.url"),
    )


def build_status_document() -> dict[str, Any]:
    """Return a /status with facts about each subject."""
    return status_with_every_subject().to_dict()


@pytest.mark.parametrize(
    ("queue_problem", "silent_s", "last_contact"),
    [
        ("Redis cannot be reached", 0.6, " when the queue was last read"),
        (None, None, ""),  # queue.owner_timeout_s is 0
        (None, 0.6, ", last heard of 0.6 s ago"),
    ],
)
def test_replicas_are_shown_with_their_last_heartbeat(
    queue_problem: str | None, silent_s: float | None, last_contact: str
) -> None:
    queue = QueueStatus(queue_problem=queue_problem, replicas=[ReplicaStatus("two", 17, silent_s)])
    lines = render.format_details(replace(status_with_every_subject(), queue=queue))
    assert lines[-1] == f"Replica two: 17 in flight{last_contact}"


async def test_status_prints_a_line_for_each_subject(run_configured: RunConfigured) -> None:
    async with serve_answer(json.dumps(build_status_document())) as port:
        lines = (await asyncio.to_thread(run_configured, "status", port)).stdout.splitlines()
    assert lines == [
        "Failing for 5.2 min: The gateway is away. Look at: gateway.url.",
        f"{NAMES.queue}: pending 0  leased 0  delayed 0  dead 0",
        "full: 18 in flight.",
        "The capacity is 32 by budget.per_endpoint, 32, × ready endpoints. One of them is wrong.",
        "The gateway cannot be reached: refused",
        "Reading saturation, 41.7 s old, from epp: F_SYS 0.500, F_EPP 0.250 of 32 requests",
        "Made of: queue_size 8",
        "Rate: 2.5 requests per second; what waits takes 2.8 s at that.",
        "Deadlines: the earliest in 61 s; 3 at risk while 2.5 requests end per second.",
        (
            "Impact on realtime, last 5 minutes: first token 300 ms median, 390 ms 95 %; each further token "
            "16 ms median, 29 ms 95 %; of realtime alone, while batch held 24% of the capacity."
        ),
        "Replica one (this one): 1 in flight, last heard of 0.1 s ago",
        "Replica two: 17 in flight, last heard of 3.0 s ago",
    ]


async def test_check_shows_the_reserve_problem_of_a_running_dispatcher(run_configured: RunConfigured) -> None:
    for shown, said in (
        (build_status_document(), True),
        ({**build_status_document(), "reserve_problem": None}, False),
    ):
        async with serve_answer(json.dumps(shown)) as port:
            found = await asyncio.to_thread(run_configured, "check", port)
        assert ("batch requests last 48 s" in found.stderr) is said, found.stderr


async def test_check_shows_what_a_running_dispatcher_knows_of_slices(run_configured: RunConfigured) -> None:
    model = {"path": "/v1/completions", "model": "phi", "verdict": "unequal", "whole_reason": "unequal"}
    shown = {**build_status_document(), "sliced_models": [{**model, "why": "because", "remedy": "this"}]}
    async with serve_answer(json.dumps(shown)) as port:
        found = await asyncio.to_thread(run_configured, "check", port)
    line = "warning: slicing: phi at /v1/completions: none, unequal: because. Remedy: this"
    assert line in found.stderr.splitlines()


async def test_status_of_a_dispatcher_of_another_version_is_shown(run_configured: RunConfigured) -> None:
    known = {"pool", "queue", "open", "reason", "explanation", "reading_age_s", "source"}
    less = {name: value for name, value in build_status_document().items() if name in known}
    async with serve_answer(json.dumps({**less, "max_sys": "a text", "impact_scope": "of tomorrow"})) as port:
        found = await asyncio.to_thread(run_configured, "status", port)
    assert (found.returncode, found.stdout.splitlines()[1:]) == (0, ["full: 18 in flight."])


async def test_reason_why_no_dispatcher_answers_is_shown(
    run_configured: RunConfigured, queue_server: Server, tmp_path: Path
) -> None:
    token, lines = tmp_path / "token", tmp_path / "lines"
    token.write_text("old")
    lines.write_text("old\r\nX-More: 1")
    redis = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    async with serve_answer("a bearer token is needed", 401) as refusing, serve_answer("[]") as other:
        asked = [
            (
                refusing,
                str(token),
                f"admin.port {refusing} of this machine wants another token than admin.token_file has",
                StatusProblemKind.UNAUTHORIZED,
            ),
            (
                refusing,
                None,
                f"admin.port {refusing} of this machine wants a token; admin.token_file names none",
                StatusProblemKind.UNAUTHORIZED,
            ),
            (
                refusing,
                str(tmp_path / "no"),
                f"admin.token_file: {tmp_path / 'no'} cannot be read: No such file",
                StatusProblemKind.BAD_TOKEN_FILE,
            ),
            (
                refusing,
                str(lines),
                f"admin.token_file: {lines} holds no bearer token",
                StatusProblemKind.BAD_TOKEN_FILE,
            ),
            (
                other,
                None,
                f"what answers on admin.port {other} of this machine is no dispatcher",
                StatusProblemKind.NOT_A_DISPATCHER,
            ),
            (
                redis,
                None,
                f"what answers on admin.port {redis} of this machine is no dispatcher",
                StatusProblemKind.NOT_A_DISPATCHER,
            ),
            (1, None, "nothing listens on admin.port 1 of this machine", StatusProblemKind.NOT_LISTENING),
        ]
        for run_verb in ("status", "explain"):
            for port, file, why, _ in asked:
                found = await asyncio.to_thread(run_configured, run_verb, port, file)
                assert found.returncode == 0, found.stderr
                assert f"No dispatcher answers: {why}" in found.stdout
        for port, file, why, kind in asked:
            problem = await fetch_status(AdminAddress("127.0.0.1", port, file or ""))
            assert isinstance(problem, StatusProblem)
            assert problem.kind == kind
            assert str(problem).startswith(why)


def test_pause_names_the_uid_if_it_has_no_user_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a uid without a user name."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert import_module("dispatcher.cli.pause")._get_user_name() == str(os.getuid())


async def test_pause_is_shown_with_operator_and_reason_until_resume(queue_server: Server) -> None:
    assert run_verb(queue_server, "pause", "--by", "ann", "--why", "upgrade").returncode == 0
    assert read_status(queue_server)["paused"] == {"by": "ann", "why": "upgrade"}
    assert "The queue is paused by ann: upgrade." in run_verb(queue_server, "explain").stdout
    async with _queue(queue_server) as queue:
        assert (await queue.renew([])).shared.is_paused
    assert run_verb(queue_server, "resume").returncode == 0
    assert read_status(queue_server)["paused"] is None


async def test_cancel_sets_the_marker_of_an_active_request_only(queue_server: Server) -> None:
    await submit_requests(queue_server, "a")
    assert run_verb(queue_server, "cancel", "a").returncode == 0
    with queue_server.client() as client:
        assert client.get(NAMES.cancel_key("a", "token-of-a")) == b"token-of-a"
    missing = run_verb(queue_server, "cancel", "nobody")
    assert (missing.returncode, missing.stderr.strip()) == (
        1,
        "nobody: neither in the queue nor running: it has ended, or the id is of another queue",
    )


async def test_dead_requests_are_listed_shown_requeued_and_purged(queue_server: Server) -> None:
    await put_dead_request(queue_server, "broken")
    (listed,) = json.loads(run_verb(queue_server, "list", "--state", "dead", "--json").stdout)
    assert (listed["id"], listed["reason"]) == ("broken", "it broke")
    entry = str(listed["entry"])
    assert '"prompt"' not in run_verb(queue_server, "list", "--state", "dead").stdout
    for number in (entry, "broken"):
        (shown,) = json.loads(run_verb(queue_server, "describe", number, "--full", "--json").stdout)[
            "requests"
        ]
        assert '\\"a\\":1' in json.dumps(shown["member"])
    assert '"a":1' not in run_verb(queue_server, "describe", entry).stdout, "it may hold secrets"
    assert '"a":1' in run_verb(queue_server, "describe", entry, "--full").stdout
    assert run_verb(queue_server, "describe", "999").returncode == 1

    again = run_verb(queue_server, "dead", "requeue", entry)
    assert again.returncode == 0
    assert "second result" in again.stdout
    assert (read_status(queue_server)["pending"], read_status(queue_server)["dead"]) == (1, 0)
    assert run_verb(queue_server, "dead", "requeue", entry).returncode == 1

    with queue_server.client() as client:
        client.delete(NAMES.queue)
    await put_dead_request(queue_server, "worse")
    assert run_verb(queue_server, "dead", "purge", "--all").returncode == 2, "there is no terminal to ask on"
    assert run_verb(queue_server, "dead", "purge", "--all", "--yes").stdout == "1 forgotten, no dead left\n"
    assert read_status(queue_server)["dead"] == 0


@pytest.mark.parametrize("payload", ["", '{"model": ', "[1]", "7"])
def test_payload_that_is_no_object_is_refused_before_submission(queue_server: Server, payload: str) -> None:
    serve_answer = run_verb(queue_server, "submit", payload)
    assert serve_answer.returncode == 2
    assert "the body is no JSON object" in serve_answer.stderr
    assert read_status(queue_server)["pending"] == 0


@pytest.mark.parametrize(
    ("body", "asked", "is_doubted"),
    [
        ('{"messages": []}', (), True),
        ('{"messages": []}', ("--path", "/v1/chat/completions"), False),
        ('{"messages": [], "prompt": "hi"}', (), False),
        ('{"prompt": "hi"}', (), False),
    ],
)
def test_conversation_for_completions_is_submitted_with_a_warning(
    queue_server: Server, tmp_path: Path, body: str, asked: tuple[str, ...], is_doubted: bool
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"gateway: {{url: http://gw}}\nqueue: {{url: {queue_server.url}}}\n")
    serve_answer = run_cli("submit", body, "--no-wait", *asked, "--config", config)
    assert serve_answer.returncode == 0
    meant = "the body has `messages`, and /v1/completions takes a `prompt`: is --path "
    assert (meant in serve_answer.stderr) is is_doubted


def test_second_pause_names_the_operator_and_reason_it_replaces(queue_server: Server) -> None:
    asked = "pause", "--by", "ann", "--why", "upgrade"
    assert run_verb(queue_server, *asked).stderr == ""
    assert run_verb(queue_server, *asked).stderr == "", "the same pause again"
    told = "the queue is paused by ann: upgrade; from now on, the new name and reason are shown"
    assert run_verb(queue_server, "pause", "--by", "bob").stderr.strip() == told
    assert read_status(queue_server)["paused"]["by"] == "bob"
    run_verb(queue_server, "resume")


def test_file_name_in_place_of_a_request_gets_a_hint(queue_server: Server, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.touch()
    serve_answer = run_verb(queue_server, "submit", str(path))
    assert serve_answer.returncode == 2
    assert (
        f"it is a file: a batch file is sent by --file {path}, one body by - < {path}" in serve_answer.stderr
    )


def test_embedded_queue_without_its_dispatcher_is_unreachable_and_no_wrong_usage(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"gateway: {{url: http://gw}}\nqueue: {{data_dir: {tmp_path / 'data'}}}\nadmin: {{port: 8181}}\n"
    )
    serve_answer = run_cli("status", "--config", config)
    assert serve_answer.returncode == 1
    assert f"no dispatcher is running on {tmp_path / 'data'} (admin.port 8181)" in serve_answer.stderr
    assert "the queue is only there while one runs" in serve_answer.stderr


def test_taken_admin_port_is_reported_with_its_likely_cause(queue_server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(
            f"gateway: {{url: http://gw}}\nqueue: {{url: {queue_server.url}}}\n"
            f"admin: {{host: 127.0.0.1, port: {port}}}\n"
        )
        serve_answer = run_cli("run", "--config", config)
    assert serve_answer.returncode == 1
    assert serve_answer.stderr.splitlines()[-1] == (
        f"cannot start: admin.port: {port} is taken: another dispatcher on this machine? "
        "Each needs an admin.port of its own"
    )


HOSTILE = "\x1b]0;pwned\x07\x1b[31mRED\n3  2026-01-01  forged\u202e\x9b"


async def test_text_of_others_cannot_control_the_terminal(
    queue_server: Server, run_configured: RunConfigured
) -> None:
    await put_dead_request(queue_server, HOSTILE)
    assert run_verb(queue_server, "pause", "--by", HOSTILE, "--why", HOSTILE).returncode == 0
    printed = [run_verb(queue_server, "list", "--state", "dead"), run_verb(queue_server, "explain")]
    gate = build_status_document() | {
        "explanation": f"Prometheus says {HOSTILE}",
        "problems": [HOSTILE],
        "readings": [{**build_status_document()["readings"][0], "raw": {HOSTILE: 1.0}}],
    }
    async with serve_answer(json.dumps(gate)) as port:
        printed += [await asyncio.to_thread(run_configured, each, port) for each in ("status", "explain")]
    for found in printed:
        assert found.returncode == 0, found.stderr
        assert "pwned" in found.stdout
        assert all(line.isprintable() for line in found.stdout.split("\n"))
        assert not [line for line in found.stdout.splitlines() if line.startswith("3 ")]
    assert len(printed[0].stdout.splitlines()) == 2


@pytest.mark.parametrize(("written", "seconds"), [("8h", 28_800), ("90", 90)])
def test_deadline_accepts_durations_with_units(queue_server: Server, written: str, seconds: float) -> None:
    before = time.time()
    assert run_verb(queue_server, "submit", "{}", "--no-wait", "--deadline", written).returncode == 0
    (listed,) = json.loads(run_verb(queue_server, "list", "--json").stdout)
    assert before + seconds - 1 <= listed["deadline"] <= time.time() + seconds + 1


@pytest.mark.parametrize("seconds", ["inf", "-inf", "nan", "99999w", "0", "0s", "-5", "soon"])
@pytest.mark.parametrize("arguments", [("submit", "{}"), ("dead", "requeue", "--all")])
def test_invalid_deadline_is_wrong_usage(arguments: tuple[str, ...], seconds: str) -> None:
    """The deadline is checked before any connection is made."""
    asked = [*arguments, f"--deadline={seconds}", "--queue-url", "redis://127.0.0.1:1"]
    found = CliRunner().invoke(app, asked, terminal_width=200)
    assert (found.exit_code, type(found.exception)) == (2, SystemExit)
    text = " ".join(found.stderr.replace("│", " ").split())
    assert "'--deadline'" in text
    assert "at least 1s and at most 3650d" in text or "write 90s, 10m, 1h30m" in text


@pytest.mark.parametrize(
    "url", ["redis://:s3cret/x@h", "redis://:s3cret#x@h", "redis://:s3[cret@h", "http://h"]
)
@pytest.mark.parametrize("arguments", [("status",), ("submit", "{}")])
def test_invalid_queue_url_is_wrong_usage_and_is_not_printed(arguments: tuple[str, ...], url: str) -> None:
    found = CliRunner().invoke(app, [*arguments, "--queue-url", url])
    assert (found.exit_code, type(found.exception), found.stdout) == (2, SystemExit, "")
    assert "s3" not in found.stderr
    assert "queue.url" in found.stderr
