"""Every verb is tried in every situation; a verb without a row fails."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import struct
import termios
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from dispatcher.cli import VERBS, app
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.named_streams.redis_streams import get_stream_keys
from dispatcher.features.sequences.decisions import (
    SequenceTerms,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.queue.contract import DeadLetter, Release, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import encode_answer
from dispatcher.requests.submission import Submission
from tests.fork_server import forked_process
from tests.queue.factories import OwnerAndAdmin, claim, queues
from tests.queue.servers import ENGINES, Server, server
from tests.support import wait_until

POOL = "row"
NAMES = QueueNames("batch:{row}:requests", "batch:{row}:results")
NOWHERE = "redis://127.0.0.1:1/0"
LATER = 4_000_000_000
STARTS_S = 60.0
"""Time for the start of a program on a busy machine."""
Fields = Mapping[str, set[str]]
"""Fields of the JSON of a verb by their path. An empty path is the top level."""
Arguments = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A verb with its expectations. In arguments, {folder} is a folder, {url} and {other} are queues."""

    happy_arguments: Arguments = ()
    also: tuple[Arguments, ...] = ()
    """Other arguments to try with an empty or an unreachable queue."""
    empty: int = 0
    """Exit code with an empty queue."""
    wrong: tuple[Arguments, ...] = (("--nonsense",),)
    fields: Fields | None = None
    """`None` if the verb prints nothing for programs."""
    by_line: bool = False
    """True if the JSON is one object per line."""
    uses_queue: bool = True
    """True if the verb uses the queue of --config or --queue-url."""
    shows_gate: bool = False
    """True if the verb shows the gate of the dispatcher."""
    runs_until_stopped: bool = False
    """True if the verb runs until Ctrl-C."""
    table: bool = False
    """True if the lines are cut at the width of the terminal. Sentences and JSON are wrapped."""
    slow: bool = False
    """True if the successful case is tried in long runs only."""


MODEL = {
    "name",
    "state",
    "serving",
    "endpoints",
    "unread_count",
    "since_s",
    "named",
    "denied",
    "waiting",
    "sentence",
    *("drained_by", "policy", "labels", "versions"),
}
REQUEST = {
    *("id", "state", "queue_position", "entry", "score", "priority", "deadline", "created", "deliveries"),
    "failed_attempts",
    *(
        "refusals",
        "deaths",
        "owner",
        "due_at",
        "leased_until",
        "died_at",
        "reason",
        "last_attempt",
        "missing_model",
        "path",
        "result_list",
    ),
    *("labels", "sequence", "cancellable", "being_cancelled", "bytes", "problem"),
}
RESULT = {
    "id",
    "status_code",
    "error_code",
    "error_message",
    "payload",
    "payload_note",
    "model_version",
    "slices",
    "cached_tokens",
    "partial",
}
SEQUENCE = {
    *(
        "id",
        "status",
        "next_index",
        "current_entry",
        "waiting",
        "runs",
        "done",
        "failed",
        "began_at",
        "last_active_at",
    ),
    *("gap_since", "sticky", "carry_bytes", "cause", "match"),
}
STATUS = {
    *("queue", "pending", "leased", "delayed", "dead", "paused", "queue_problem", "dispatcher"),
    *("dispatcher_problem", "dispatcher_problem_kind", "config_problems"),
}
ROWS = {
    "run": Row(
        happy_arguments=("--config", "{folder}/run.yaml"),
        wrong=(("--config", "{folder}/none.yaml"), ("--nonsense",)),
        uses_queue=False,
        runs_until_stopped=True,
    ),
    "init": Row(
        happy_arguments=("--output", "{folder}/new.yaml", "--gateway", "http://gw"),
        wrong=((), ("--gateway", "http://gw", "--reserve", "2"), ("--gateway", "no url")),
        fields={"": {"written", "pool", "gateway", "way"}},
        uses_queue=False,
    ),
    "check": Row(
        happy_arguments=("--config", "{folder}/config.yaml"),
        wrong=(("--config", "{folder}/none.yaml"), ("x",)),
        fields={"": {"ok", "settings", "defaults", "problems", "findings"}},
        uses_queue=False,
    ),
    "submit": Row(
        happy_arguments=('{"prompt": "hi"}', "--no-wait"),
        wrong=(
            (),
            ("[1]",),
            ("{}", "--deadline", "0"),
            ("{}", "--priority", "10"),
            ("{}", "--label", "job"),
            ("{}", "--file", "in.jsonl"),
            ("--file", "in.jsonl"),
            ("--file", "in.jsonl", "--output", "out.jsonl", "--sequence", "s"),
            ("--file", "in.jsonl", "--output", "out.jsonl", "--sequence-by", "a..b"),
            ("--file", "{folder}/none.jsonl", "--output", "{folder}/out.jsonl"),
        ),
        fields={"": {"id"}},
    ),
    "result": Row(
        happy_arguments=("answered",),
        also=(("x", "--wait"),),
        empty=1,
        wrong=(
            *((), ("x", "30s"), ("x", "--wait", "soon"), ("x", "--all"), ("--all", "--list", "y")),
            *(("x", "--take"), ("--all", "--wait"), ("--all", "--most", "0")),
        ),
        fields={"": {*RESULT, "request_token"}},
    ),
    "describe": Row(
        happy_arguments=("third",),
        empty=1,
        wrong=((),),
        fields={
            "": {"id", "queue", "requests", "results", "searched", "searched_all"},
            "requests": {*REQUEST, "why"},
        },
        shows_gate=True,
    ),
    "list": Row(
        also=(("--state", "dead"), ("--reason", "CUDA")),
        wrong=(
            *(("--state", "lost"), ("--label", "job"), ("-n", "0"), ("--older", "long")),
            *(("--next", "--state", "dead"), ("--reason", "x", "--state", "running")),
        ),
        fields={"": REQUEST},
        table=True,
    ),
    "status": Row(
        wrong=(("--wait", "soon"), ("--admin-url", "ftp://h")), fields={"": STATUS}, shows_gate=True
    ),
    "explain": Row(
        wrong=(("--admin-url", "ftp://h"),), fields={"": {"explanation", *STATUS}}, shows_gate=True
    ),
    "top": Row(
        wrong=(("--admin-url", "ftp://h"),),
        fields={"": {"at", *STATUS}},
        by_line=True,
        shows_gate=True,
        runs_until_stopped=True,
        table=True,
    ),
    "pause": Row(
        happy_arguments=("--why", "upgrade"), fields={"": {"queue", "paused"}, "paused": {"by", "why"}}
    ),
    "resume": Row(fields={"": {"queue", "paused"}}),
    "cancel": Row(
        happy_arguments=("first", "second"),
        also=(("--label", "a=b"), ("--sequence", "chat-7")),
        empty=1,
        wrong=((), ("x", "--label", "a=b"), ("--label", "job"), ("x", "--sequence", "y")),
        fields={"": {"cancelled", "not_cancelled"}},
    ),
    "dead requeue": Row(
        happy_arguments=("dead",),
        empty=1,
        wrong=((), ("x", "--all"), ("x", "--deadline", "-1")),
        fields={"": {"requeued", "asked", "results_by_id"}},
    ),
    "dead purge": Row(
        happy_arguments=("dead", "--yes"),
        empty=1,
        wrong=((), ("x", "--all")),
        fields={"": {"purged", "asked", "dead"}},
    ),
    "sequences show": Row(
        also=(("--status", "held"),),
        wrong=(("--status", "lost"), ("-n", "0"), ("a", "b"), ("a", "--status", "held")),
        fields={"": SEQUENCE},
        table=True,
    ),
    "sequences release": Row(
        happy_arguments=("chat-7",), empty=1, wrong=((),), fields={"": {"id", "released"}}
    ),
    "sequences abort": Row(
        happy_arguments=("chat-7",), wrong=((), ("chat-7", "--why", " ")), fields={"": {"id", "aborted"}}
    ),
    "sequences forget": Row(
        happy_arguments=("chat-8",), empty=1, wrong=((), ("a", "b")), fields={"": {"id", "forgotten", "why"}}
    ),
    "streams show": Row(
        happy_arguments=("nightly",),
        also=(("nightly", "--consumed"),),
        empty=1,
        wrong=((), ("a", "b"), ("a b",), ("nightly", "-n", "0")),
        fields={
            "": {"name", "unconsumed", "consumed", "kept", "requests"},
            "requests": {"id", "state", "deadline"},
        },
        table=True,
    ),
    "streams forget": Row(
        happy_arguments=("nightly",),
        empty=1,
        wrong=((), ("a", "b"), ("a:kept",)),
        fields={"": {"name", "forgotten"}},
    ),
    "models show": Row(
        wrong=(("--nonsense",), ("a", "b"), ("qwen", "--waiting")), fields={"": MODEL}, table=True
    ),
    "models label": Row(
        happy_arguments=("qwen", "stable", "3"),
        wrong=((), ("qwen", "stable"), ("qwen", "stable", "3", "--clear"), ("qwen", "\n", "3")),
        fields={"": {"model", "label", "version", "changed"}},
    ),
    "models drain": Row(
        happy_arguments=("qwen-v3", "--why", "it leaks"),
        wrong=((), ("a", "b"), ("a", "--undo", "--why", "b"), ("x" * 257,)),
        fields={"": {"name", "drained", "changed"}, "drained": {"by", "why"}},
    ),
    "models record": Row(
        happy_arguments=("--model", "qwen", "--output", "{folder}/warmup.jsonl"),
        empty=1,
        wrong=((), ("--model", "qwen", "--most", "0"), ("--model", "qwen", "--output", "-", "--json")),
        fields={"": {"written", "model", "requests", "calls", "bytes", "of_model", "searched"}},
    ),
    "queue copy": Row(
        happy_arguments=("--from", "{url}", "--to", "{other}", "--live", "--pool", POOL),
        wrong=((), ("--from", "{url}", "--to", "{url}"), ("--from", "{url}", "--to", "http://h", "--live")),
        fields={
            "": {"queue", "copied", "found", "left_leased"},
            "found": {
                *("pending", "returned", "suspect", "sequenced", "waiting-for-model", "started"),
                *("delayed", "dead"),
            },
        },
        uses_queue=False,
    ),
    "simulate": Row(
        happy_arguments=("--trace", "idle", "--seconds", "30", "--slots", "4", "--policy", "dispatcher"),
        wrong=(("--policy", "nonsense"), ("--trace", "{folder}/none.csv"), ("--sweep", "reserve=")),
        fields={"": {"trace", "scenario", "rows", "warnings"}},
        uses_queue=False,
        table=True,
    ),
    "demo": Row(
        wrong=(("--requests", "0"),),
        uses_queue=False,
        fields={"": {"ok", "checks"}, "checks": {"ok", "what"}},
        slow=True,
    ),
}


@dataclass(frozen=True, slots=True)
class VerbOutput:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [*self.out.splitlines(), *self.err.splitlines()]


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a verb: a queue with requests, and a dispatcher that answers or not."""

    server: Server
    folder: Path

    def arguments(self, name: str, given: Arguments, *, running: bool = True) -> list[str]:
        urls = {"{folder}": str(self.folder), "{url}": self.server.url, "{other}": self.server.url[:-1] + "1"}
        found = [*name.split(), *given]
        for mark, value in urls.items():
            found = [each.replace(mark, value) for each in found]
        if ROWS[name].uses_queue:
            config = "config.yaml" if running else "alone.yaml"
            found += ["--config", str(self.folder / config), "--pool", POOL]
        return found

    async def run_verb(self, name: str, given: Arguments, *, running: bool = True) -> VerbOutput:
        """Run the verb in this process, because a fork costs ten times as much."""
        return await asyncio.to_thread(invoke, *self.arguments(name, given, running=running))


def invoke(*arguments: str) -> VerbOutput:
    found = CliRunner().invoke(app, arguments)
    if not isinstance(found.exception, SystemExit | None):
        raise found.exception
    return VerbOutput(found.exit_code, found.stdout, found.stderr)


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("rows")) as running:
        yield running


@pytest.fixture
async def environment(queue_server: Server, tmp_path: Path) -> AsyncIterator[Environment]:
    async def status(_: web.Request) -> web.Response:
        document = {"reason": "full", "explanation": "18 in flight.", "pool": POOL, "queue": NAMES.queue}
        rest = {"limit": 18, "in_flight": 18, "reading_age_s": None, "source": None, "pending": 3}
        return web.json_response({**document, **rest})

    with queue_server.client() as client:
        client.flushall()
    application = web.Application()
    application.router.add_get("/status", status)
    async with TestServer(application) as answering:
        for name, port in (("config", answering.port), ("alone", 1), ("run", 0)):
            settings = {
                "gateway": {"url": "http://127.0.0.1:1"},
                "queue": {"url": queue_server.url},
                "admin": {"host": "127.0.0.1", "port": port},
            }
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        yield Environment(queue_server, tmp_path)


async def add_requests(environment: Environment) -> None:
    """Add one request in each state, and a result in each kind of list."""
    with environment.server.client() as client:
        client.flushall()
        client.lpush(NAMES.result_list, encode_answer("shared", 200, b'{"text": "hello"}'))
        for name in ("answered", "dead"):
            client.lpush(NAMES.result_list_for_id(name), encode_answer(name, 200, b'{"text": "hello"}'))
        pending, consumed = get_stream_keys(NAMES, "nightly")
        client.hset(pending, "row-1", f"token {LATER} digest")
        client.hset(consumed, "row-2", "digest")
    async with queues(environment.server.url, "owner", names=NAMES) as (queue,):
        await add_sequences(queue)
        await queue.submit([Submission(encode_member("early", b'{"model": "qwen"}', LATER), LATER)])
        (early,) = (await claim(queue, 1)).leases
        await queue.release([Release(early, is_undelivered=True, extra=ModelWait("qwen"))])
        for at, name in enumerate(("dead", "delayed", "running", "first", "second", "third" + "-" * 90)):
            token = f"token-of-{name}"
            member = encode_member(name.rstrip("-"), b'{"prompt": "hi"}', LATER + at, token=token)
            sent = Submission(member, LATER + at, name.rstrip("-"), token, LATER + at)
            await queue.submit([sent])
        dead, delayed, _ = (await claim(queue, 3)).leases
        await queue.move_to_dead_letters([DeadLetter(Settlement(dead, b"", ""), "CUDA out of memory, " * 9)])
        await queue.release([Release(delayed, 600.0, is_failed_attempt=True)])


async def add_sequences(queue: OwnerAndAdmin) -> None:
    """Add an idle sequence, and a held one with a waiting request."""
    member = encode_member("alone", b"{}", LATER, extra=Turn("chat-8", 0))
    await queue.submit([Submission(member, LATER)])
    (lease,) = (await claim(queue, 1)).leases
    await queue.claim_turns([(lease, Turn("chat-8", 0))], SequenceTerms())
    await queue.settle([Settlement(lease, encode_answer("alone", 200, b"{}"), NAMES.result_list_for_id("x"))])
    for index in range(2):
        turn = Turn("chat-7", index)
        member = encode_member(f"chat-{index}", b"{}", LATER, token=f"token-{index}", extra=turn)
        await queue.submit([Submission(member, LATER, f"chat-{index}", f"token-{index}", LATER)])
    leases = (await claim(queue, 2)).leases
    terms = SequenceTerms(on_error=OnError.HOLD)
    await queue.claim_turns([(lease, Turn("chat-7", at)) for at, lease in enumerate(leases)], terms)
    end = TurnEnd(Turn("chat-7", 0), has_failed=True, cause="out of memory")
    await queue.settle(
        [Settlement(leases[0], encode_answer("chat-0", 200, b"{}"), NAMES.result_list_for_id("x"), extra=end)]
    )


def list_verb_names() -> set[str]:
    """Return the verbs of the command itself, so that a verb without a row is found."""
    program: Any = typer.main.get_command(app)
    found = set()
    for verb in VERBS:
        inner = getattr(program.get_command(typer.Context(program), verb), "commands", {})
        found |= {f"{verb} {each}" for each in inner} or {verb}
    return found


def test_each_verb_has_a_row() -> None:
    assert set(ROWS) == list_verb_names()


QUICK = [name for name, row in ROWS.items() if not row.runs_until_stopped and not row.slow]
ASKING = [
    name
    for name, row in ROWS.items()
    if (row.uses_queue or name == "queue copy") and not row.runs_until_stopped
]


@pytest.mark.parametrize("name", QUICK)
async def test_verb_succeeds_in_a_pipe(name: str, environment: Environment) -> None:
    await add_requests(environment)
    found = await environment.run_verb(name, ROWS[name].happy_arguments)
    assert found.code == 0, found
    assert found.out, "the result is printed to standard output"
    assert not re.search(r"[^\n -~\u00a0-\uffff]", found.out), "no control characters"
    if ROWS[name].shows_gate:
        assert "18 in flight." in found.out


@pytest.mark.parametrize("name", [name for name in QUICK if ROWS[name].fields is not None])
async def test_json_has_its_fields_with_and_without_a_dispatcher(name: str, environment: Environment) -> None:
    row = ROWS[name]
    await add_requests(environment)
    found = await environment.run_verb(name, (*row.happy_arguments, "--json"), running=False)
    assert found.code == 0, found
    check_fields(row, json.loads(found.out.splitlines()[0] if row.by_line else found.out))
    if row.shows_gate:
        assert "nothing listens on admin.port 1 of this machine" in found.out


def check_fields(row: Row, value: Any) -> None:
    assert row.fields
    for where, fields in row.fields.items():
        items = value[where] if where else value
        assert items
        for item in items if isinstance(items, list) else [items]:
            assert set(item) == fields, item


@pytest.mark.long
async def test_the_demo_ends_with_a_verdict(environment: Environment) -> None:
    """With few requests the verdict may be negative."""
    found = await environment.run_verb("demo", ("--requests", "5", "--json"))
    check_fields(ROWS["demo"], document := json.loads(found.out))
    assert found.code == (0 if document["ok"] else 1)


@pytest.mark.parametrize("name", ASKING)
async def test_verb_succeeds_without_a_dispatcher(name: str, environment: Environment) -> None:
    await add_requests(environment)
    found = await environment.run_verb(name, ROWS[name].happy_arguments, running=False)
    assert found.code == 0, found
    assert ("nothing listens on admin.port 1" in found.out) is ROWS[name].shows_gate


@pytest.mark.parametrize("name", ASKING)
async def test_empty_queue_is_reported_in_words(name: str, environment: Environment) -> None:
    for given in (ROWS[name].happy_arguments, *ROWS[name].also):
        found = await environment.run_verb(name, given)
        assert found.code == ROWS[name].empty, found
        assert 1 <= len(found.lines) <= 2, found


@pytest.mark.parametrize("name", ASKING)
def test_unreachable_queue_is_one_line_and_exit_code_1(name: str) -> None:
    row = ROWS[name]
    for given in (row.happy_arguments, *row.also):
        there = [each.replace("{url}", NOWHERE).replace("{other}", NOWHERE[:-1] + "1") for each in given]
        found = invoke(*name.split(), *there, *(["--queue-url", NOWHERE] if row.uses_queue else []))
        assert (found.code, found.out) == (1, ""), found
        assert found.err == "Redis cannot be reached: 127.0.0.1:1: connection refused\n"


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, row in ROWS.items() for wrong in row.wrong]
)
def test_wrong_usage_is_explained_with_exit_code_2(name: str, wrong: Arguments, tmp_path: Path) -> None:
    """The arguments are checked before any connection is made."""
    given = [each.replace("{url}", NOWHERE).replace("{folder}", str(tmp_path)) for each in wrong]
    found = invoke(*name.split(), *given, *(["--queue-url", NOWHERE] if ROWS[name].uses_queue else []))
    assert (found.code, found.out) == (2, ""), found
    assert found.err
    assert "Traceback" not in found.err


async def run_on_terminal(environment: Environment, name: str) -> tuple[int | None, str]:
    """Return the output on a terminal of 80 × 24. A verb that never ends is stopped after its first page."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {each: value for each, value in os.environ.items() if each not in ("COLUMNS", "LINES")}
    printed = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: printed.extend(os.read(ours, 65536)))
    try:
        with (
            os.fdopen(theirs, "wb", buffering=0) as terminal,
            forked_process(
                "dispatcher",
                *environment.arguments(name, ROWS[name].happy_arguments),
                stdout=terminal,
                stderr=terminal,
                env={**environ, "TERM": "xterm"},
            ) as child,
        ):
            if ROWS[name].runs_until_stopped:
                await wait_until(lambda: printed.count(b"\n") > 1 or child.poll() is not None, STARTS_S)
                child.send_signal(signal.SIGINT)
            await wait_until(lambda: child.poll() is not None, STARTS_S)
            loop.remove_reader(ours)
        # The kernel delivers the output gradually, and reports its end once no process can write.
        with suppress(OSError):
            while part := os.read(ours, 65536):
                printed += part
        return child.returncode, printed.decode()
    finally:
        loop.remove_reader(ours)
        os.close(ours)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.table or row.runs_until_stopped])
async def test_tables_fit_a_terminal_of_80_columns(name: str, environment: Environment) -> None:
    await add_requests(environment)
    code, printed = await run_on_terminal(environment, name)
    assert code == 0, printed
    assert printed
    if ROWS[name].table:
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)
        assert [line for line in plain.splitlines() if len(line) > 80] == []


async def test_top_continues_while_redis_is_unreachable(environment: Environment, tmp_path: Path) -> None:
    said_file = tmp_path / "said"
    with (
        said_file.open("wb") as out,
        forked_process(
            "dispatcher", "top", "--json", "--queue-url", NOWHERE, stdout=out, stderr=out
        ) as child,
    ):
        await wait_until(lambda: said_file.read_text().count("\n") > 1, STARTS_S)
        child.send_signal(signal.SIGINT)
        await wait_until(lambda: child.poll() is not None, STARTS_S)
    assert child.returncode == 0
    for line in said_file.read_text().splitlines():
        check_fields(ROWS["top"], document := json.loads(line))
        assert document["queue_problem"] == "Redis cannot be reached: 127.0.0.1:1: connection refused"


async def test_closed_output_pipe_ends_the_verb_without_a_traceback(
    environment: Environment, tmp_path: Path
) -> None:
    await add_requests(environment)
    reading, writing = os.pipe()
    os.close(reading)
    with (
        (tmp_path / "err").open("wb") as err,
        os.fdopen(writing, "wb", buffering=0) as out,
        forked_process("dispatcher", *environment.arguments("list", ()), stdout=out, stderr=err) as child,
    ):
        await wait_until(lambda: child.poll() is not None, STARTS_S)
    assert child.returncode == 1
    assert (tmp_path / "err").read_text() == ""


def test_verb_with_a_queue_accepts_url_pool_and_name() -> None:
    program: Any = typer.main.get_command(app)
    for name, row in ROWS.items():
        found = program
        for each in name.split():
            found = found.get_command(typer.Context(found), each)
        options = {option for each in found.params for option in each.opts}
        wanted = {"--config", "--queue-url", "--pool", "--queue"}
        assert wanted <= options if row.uses_queue else not {"--queue-url", "--queue"} <= options, name
        assert ("--json" in options) is (row.fields is not None), name
