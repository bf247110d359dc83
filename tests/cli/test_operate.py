"""The operator's verbs, on a real queue without a dispatcher: each by its exit code and what it prints."""

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
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from dispatcher.cli import app, render
from dispatcher.cli.admin_client import AdminAddress, StatusProblemKind, fetch_status
from dispatcher.core.health import Cause, Health
from dispatcher.core.requests.request import encode_member
from dispatcher.ports import DeadLetter, Permit, Settlement, Submission
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.telemetry.status import (
    BudgetStatus,
    GateStatus,
    HealthStatus,
    ImpactStatus,
    ProcessStatus,
    QueueStatus,
    SignalsStatus,
    Status,
    WatchStatus,
)
from tests.queue.made import OwnerAndDesk
from tests.queue.servers import ENGINES, Server, server
from tests.warm import warm_run

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
NOW_PERMIT_LIMIT = 10
Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("operate")) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.flushall()


def verb(queue_server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_run(*arguments, "--queue-url", queue_server.url)


async def submitted(queue_server: Server, *ids: str) -> None:
    deadline = int(time.time()) + 600
    async with _queue(queue_server) as queue:
        for name in ids:
            member = encode_member(name, b'{"a":1}', deadline, token=f"token-of-{name}")
            await queue.submit([Submission(member, float(deadline), name, f"token-of-{name}", deadline)])


async def buried(queue_server: Server, name: str) -> None:
    await submitted(queue_server, name)
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

    async def __aenter__(self) -> OwnerAndDesk:
        self.queue = OwnerAndDesk(connect(self.url), NAMES, "owner")
        return self.queue

    async def __aexit__(self, *exc: object) -> None:
        await self.queue.aclose()


def status(queue_server: Server) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(verb(queue_server, "status", "--json").stdout)
    return shown


async def test_status_and_explain_tell_the_queue_without_a_dispatcher(queue_server: Server) -> None:
    await submitted(queue_server, "a", "b")
    shown = status(queue_server)
    assert (shown["pending"], shown["leased"], shown["dead"], shown["paused"]) == (2, 0, 0, None)
    told = verb(queue_server, "explain")
    assert told.returncode == 0
    assert "No dispatcher answers" in told.stdout
    assert "2 requests wait" in told.stdout


@pytest.fixture
def configured(queue_server: Server, tmp_path: Path) -> Ask:
    """A verb by --config, whose admin port is the given one."""

    def ask(verb: str, port: int, token: str | None = None) -> subprocess.CompletedProcess[str]:
        admin: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        if token is not None:
            admin["token_file"] = token
        config = tmp_path / "config.yaml"
        settings = {"gateway": {"url": "http://gw"}, "queue": {"url": queue_server.url}, "admin": admin}
        config.write_text(yaml.safe_dump(settings))
        return warm_run(verb, "--config", config)

    return ask


@asynccontextmanager
async def told(text: str, code: int = 200) -> AsyncIterator[int]:
    """A port that answers every request so."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, status=code, content_type="application/json")

    app = web.Application()
    app.router.add_get("/status", answer)
    async with TestServer(app) as there:
        assert there.port
        yield there.port


def dispatchers() -> dict[str, Any]:
    """/status of one that has something to say of each subject."""
    reading = {"signal": "saturation", "age_s": 41.7, "f_sys": 0.5, "f_epp": 0.25, "max_sys": 32.0}
    return Status(
        ProcessStatus(
            "1", "3", "default", NAMES.queue, "one", False, 0.0, config_problem="budget.reserv: unknown"
        ),
        GateStatus("full", True, "18 in flight.", 18, 18, 1, None, gateway_problem="refused"),
        BudgetStatus(
            0.05,
            max_sys=32.0,
            max_sys_source="setting",
            per_endpoint=32.0,
            per_endpoint_source="setting",
            reserve_problem="batch requests last 48 s",
        ),
        SignalsStatus(
            "epp",
            41.7,
            None,
            "timed out",
            3.2,
            0.0,
            [{**reading, "source": "epp", "raw": {"queue_size": 8.0}}],
        ),
        WatchStatus(watch_problems=["403 for pods"]),
        QueueStatus(
            pending=7,
            earliest_deadline_s=61.0,
            at_risk=3,
            service_rate=2.5,
            replicas=[
                {"owner": "one", "leases": 1, "silent_s": 0.1},
                {"owner": "two", "leases": 17, "silent_s": 3},
            ],
        ),
        ImpactStatus(0.3, 0.39, 0.016, 0.029, "realtime", 40, "epp: ttft", 0.24, None),
        health=HealthStatus(Health.FAILING, Cause.GATEWAY, "The gateway is away.", 312.0, "gateway.url"),
    ).to_dict()


@pytest.mark.parametrize(
    ("changed", "silent_s", "heard"),
    [
        ({"queue_problem": "Redis cannot be reached"}, 0.6, " when the queue was last read"),
        ({}, None, ""),  # queue.owner_timeout_s is 0
        ({}, 0.6, ", last heard of 0.6 s ago"),
    ],
)
def test_replicas_are_as_the_queue_told_last(
    changed: dict[str, Any], silent_s: float | None, heard: str
) -> None:
    replica = {"owner": "two", "leases": 17, "silent_s": silent_s}
    lines = render.format_details({**dispatchers(), "replicas": [replica], **changed})
    assert lines[-1] == f"Replica two: 17 in flight{heard}"


async def test_status_shows_what_the_runbook_looks_for(configured: Ask) -> None:
    async with told(json.dumps(dispatchers())) as port:
        lines = (await asyncio.to_thread(configured, "status", port)).stdout.splitlines()
    assert lines == [
        "Failing for 5 minutes: The gateway is away. Look at: gateway.url.",
        f"{NAMES.queue}: pending 0  leased 0  delayed 0  dead 0",
        "full: 18 in flight.",
        "The capacity is 32 by budget.per_endpoint, 32, × ready endpoints.",
        "The changed configuration is refused, the one before is in force: budget.reserv: unknown",
        "The gateway cannot be reached: refused",
        "The reserve is little: batch requests last 48 s",
        "The signals cannot be read for 3 s now: timed out",
        "The Kubernetes watch has a problem: 403 for pods",
        "Reading saturation, 41.7 s old, from epp: F_SYS 0.500, F_EPP 0.250 of 32 requests",
        "Made of: queue_size 8",
        "Rate: 2.5 requests per second; what waits takes 3 s at that.",
        "Deadlines: the earliest in 61 s; 3 at risk while 2.5 requests end per second.",
        (
            "Impact on realtime, last 5 minutes: first token 300 ms median, 390 ms 95 %; each further token "
            "16 ms median, 29 ms 95 %; of realtime alone, while batch held 24% of the capacity."
        ),
        "Replica one (this one): 1 in flight, last heard of 0.1 s ago",
        "Replica two: 17 in flight, last heard of 3.0 s ago",
    ]


async def test_check_tells_what_a_running_dispatcher_knows_of_the_reserve(configured: Ask) -> None:
    for shown, said in ((dispatchers(), True), ({**dispatchers(), "reserve_problem": None}, False)):
        async with told(json.dumps(shown)) as port:
            found = await asyncio.to_thread(configured, "check", port)
        assert ("batch requests last 48 s" in found.stderr) is said, found.stderr


async def test_an_older_dispatcher_that_tells_less_is_shown_all_the_same(configured: Ask) -> None:
    known = {"pool", "queue", "reason", "explanation", "reading_age_s", "source"}
    less = {name: value for name, value in dispatchers().items() if name in known}
    async with told(json.dumps({**less, "max_sys_source": None})) as port:
        found = await asyncio.to_thread(configured, "status", port)
    assert (found.returncode, found.stdout.splitlines()[1:]) == (0, ["full: 18 in flight."])


async def test_why_no_dispatcher_answers_is_said(
    configured: Ask, queue_server: Server, tmp_path: Path
) -> None:
    token, lines = tmp_path / "token", tmp_path / "lines"
    token.write_text("old")
    lines.write_text("old\r\nX-More: 1")
    redis = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    async with told("a bearer token is needed", 401) as refusing, told("[]") as other:
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
        for verb in ("status", "explain"):
            for port, file, why, _ in asked:
                found = await asyncio.to_thread(configured, verb, port, file)
                assert found.returncode == 0, found.stderr
                assert f"No dispatcher answers ({why}" in found.stdout
        for port, file, why, kind in asked:
            status, problem = await fetch_status(AdminAddress("127.0.0.1", port, file or ""))
            assert (status, problem and problem.kind) == (None, kind)
            assert str(problem).startswith(why)


def test_pause_is_by_a_number_where_the_uid_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that runs as a uid of the platform's choice."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert import_module("dispatcher.cli.pause")._get_user_name() == str(os.getuid())


async def test_pause_says_who_and_why_until_resume(queue_server: Server) -> None:
    assert verb(queue_server, "pause", "--by", "ann", "--why", "upgrade").returncode == 0
    assert status(queue_server)["paused"] == {"by": "ann", "why": "upgrade"}
    assert "paused by ann: upgrade" in verb(queue_server, "explain").stdout
    async with _queue(queue_server) as queue:
        assert (await queue.renew([])).shared.is_paused
    assert verb(queue_server, "resume").returncode == 0
    assert status(queue_server)["paused"] is None


async def test_cancel_sets_the_marker_of_an_active_request_only(queue_server: Server) -> None:
    await submitted(queue_server, "a")
    assert verb(queue_server, "cancel", "a").returncode == 0
    with queue_server.client() as client:
        assert client.get(NAMES.cancel_key("a", "token-of-a")) == b"token-of-a"
    missing = verb(queue_server, "cancel", "nobody")
    assert (missing.returncode, missing.stderr.strip()) == (
        1,
        "nobody: neither in the queue nor running: it has ended, or the id is of another queue",
    )


async def test_dead_are_listed_shown_requeued_and_purged(queue_server: Server) -> None:
    await buried(queue_server, "broken")
    (listed,) = json.loads(verb(queue_server, "dead", "list", "--json").stdout)
    assert (listed["id"], listed["reason"]) == ("broken", "it broke")
    entry = str(listed["entry"])
    assert '"prompt"' not in verb(queue_server, "dead", "list").stdout
    assert '\\"a\\":1' in verb(queue_server, "dead", "show", entry).stdout
    assert verb(queue_server, "dead", "show", "999").returncode == 1

    again = verb(queue_server, "dead", "requeue", entry)
    assert again.returncode == 0
    assert "second result" in again.stdout
    assert (status(queue_server)["pending"], status(queue_server)["dead"]) == (1, 0)
    assert verb(queue_server, "dead", "requeue", entry).returncode == 1

    with queue_server.client() as client:
        client.delete(NAMES.queue)
    await buried(queue_server, "worse")
    assert verb(queue_server, "dead", "purge", "--all").returncode == 2, "nobody is there to be asked"
    assert verb(queue_server, "dead", "purge", "--all", "--yes").stdout == "1 forgotten, no dead left\n"
    assert status(queue_server)["dead"] == 0


@pytest.mark.parametrize("payload", ["", '{"model": ', "[1]", "7"])
def test_payload_that_is_no_object_is_refused_before_it_is_submitted(
    queue_server: Server, payload: str
) -> None:
    told = verb(queue_server, "submit", payload)
    assert told.returncode == 2
    assert "the body is no JSON object" in told.stderr
    assert status(queue_server)["pending"] == 0


@pytest.mark.parametrize(
    ("body", "asked", "is_doubted"),
    [
        ('{"messages": []}', (), True),
        ('{"messages": []}', ("--endpoint", "/v1/chat/completions"), False),
        ('{"messages": [], "prompt": "hi"}', (), False),
        ('{"prompt": "hi"}', (), False),
    ],
)
def test_a_conversation_for_completions_is_doubted_and_sent(
    queue_server: Server, tmp_path: Path, body: str, asked: tuple[str, ...], is_doubted: bool
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"gateway: {{url: http://gw}}\nqueue: {{url: {queue_server.url}}}\n")
    told = warm_run("submit", body, "--no-wait", *asked, "--config", config)
    assert told.returncode == 0
    meant = "the body has `messages`, and /v1/completions takes a `prompt`: is --endpoint "
    assert (meant in told.stderr) is is_doubted


def test_who_pauses_what_is_paused_is_told_whose_reason_it_takes(queue_server: Server) -> None:
    asked = "pause", "--by", "ann", "--why", "upgrade"
    assert verb(queue_server, *asked).stderr == ""
    assert verb(queue_server, *asked).stderr == "", "the same once more"
    told = verb(queue_server, "pause", "--by", "bob")
    assert told.stderr.strip() == "it was paused already by ann: upgrade; that is no longer shown"
    assert status(queue_server)["paused"]["by"] == "bob"
    verb(queue_server, "resume")


def test_a_file_where_a_request_is_expected_is_told_how_to_give_it(
    queue_server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.touch()
    told = verb(queue_server, "submit", str(path))
    assert told.returncode == 2
    assert f"it is a file: a batch file is sent by --file {path}, one body by - < {path}" in told.stderr


def test_embedded_queue_without_its_dispatcher_is_not_there_and_no_wrong_usage(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"gateway: {{url: http://gw}}\nqueue: {{data_dir: {tmp_path / 'data'}}}\nadmin: {{port: 8181}}\n"
    )
    told = warm_run("status", "--config", config)
    assert told.returncode == 1
    assert f"no dispatcher is running on {tmp_path / 'data'} (admin.port 8181)" in told.stderr
    assert "the queue is only there while one runs" in told.stderr


def test_taken_admin_port_is_named_with_its_likely_cause(queue_server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(
            f"gateway: {{url: http://gw}}\nqueue: {{url: {queue_server.url}}}\n"
            f"admin: {{host: 127.0.0.1, port: {port}}}\n"
        )
        told = warm_run("run", "--config", config)
    assert told.returncode == 1
    assert told.stderr.splitlines()[-1] == (
        f"cannot start: admin.port: {port} is taken: another dispatcher on this machine? "
        "Each needs an admin.port of its own"
    )


HOSTILE = "\x1b]0;pwned\x07\x1b[31mRED\n3  2026-01-01  forged\u202e\x9b"


async def test_nothing_that_others_named_steers_a_terminal(queue_server: Server, configured: Ask) -> None:
    await buried(queue_server, HOSTILE)
    assert verb(queue_server, "pause", "--by", HOSTILE, "--why", HOSTILE).returncode == 0
    printed = [verb(queue_server, "dead", "list"), verb(queue_server, "explain")]
    gate = dispatchers() | {
        "explanation": f"Prometheus says {HOSTILE}",
        "gateway_problem": HOSTILE,
        "watch_problems": [HOSTILE],
        "readings": [{**dispatchers()["readings"][0], "raw": {HOSTILE: 1.0}}],
    }
    async with told(json.dumps(gate)) as port:
        printed += [await asyncio.to_thread(configured, each, port) for each in ("status", "explain")]
    for found in printed:
        assert found.returncode == 0, found.stderr
        assert "pwned" in found.stdout
        assert all(line.isprintable() for line in found.stdout.split("\n"))
        assert not [line for line in found.stdout.splitlines() if line.startswith("3 ")]
    assert len(printed[0].stdout.splitlines()) == 2


@pytest.mark.parametrize(("written", "seconds"), [("8h", 28_800), ("90", 90)])
def test_a_deadline_is_written_as_people_write_a_span_of_time(
    queue_server: Server, written: str, seconds: float
) -> None:
    before = time.time()
    assert verb(queue_server, "submit", "{}", "--no-wait", "--deadline", written).returncode == 0
    (listed,) = json.loads(verb(queue_server, "list", "--json").stdout)
    assert before + seconds - 1 <= listed["deadline"] <= time.time() + seconds + 1


@pytest.mark.parametrize("seconds", ["inf", "-inf", "nan", "99999w", "0", "0s", "-5", "soon"])
@pytest.mark.parametrize("arguments", [("submit", "{}"), ("dead", "requeue", "--all")])
def test_deadline_that_is_no_time_is_wrong_usage(arguments: tuple[str, ...], seconds: str) -> None:
    """Refused before anybody is asked: nobody listens on that port."""
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
def test_queue_url_that_cannot_be_read_is_wrong_usage_and_not_repeated(
    arguments: tuple[str, ...], url: str
) -> None:
    found = CliRunner().invoke(app, [*arguments, "--queue-url", url])
    assert (found.exit_code, type(found.exception), found.stdout) == (2, SystemExit, "")
    assert "s3" not in found.stderr
    assert "queue.url" in found.stderr
