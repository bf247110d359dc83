"""The verbs of single requests, on a real queue without a dispatcher: what each prints, and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.core.gateway.outcome import Failed, MoveToDeadLetters, RetryPolicy, decide_after_attempt
from dispatcher.core.requests.request import encode_member, parse_member
from dispatcher.core.requests.result import ErrorCode, decode_result, encode_answer, encode_failure
from dispatcher.ports import DeadLetter, Lease, Release, Settlement, Submission
from dispatcher.queue.keys import QueueNames
from tests.queue.made import OwnerAndDesk, claim, queues
from tests.queue.servers import ENGINES, Server, server
from tests.support import wait_until
from tests.warm import warm, warm_run

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
NOWHERE = ("--queue-url", "redis://127.0.0.1:1/0")
STARTS_S = 60.0
"""A program on a busy machine."""
LATER = int(time.time()) + 3600


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("requests")) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.flushall()


@dataclass(frozen=True, slots=True)
class Said:
    returncode: int
    stdout: str
    stderr: str


async def verb(queue_server: Server, *arguments: str) -> Said:
    """What a verb says, run in this process: a fork costs ten times as much."""
    asked = [*arguments, "--queue-url", queue_server.url]
    found = await asyncio.to_thread(CliRunner().invoke, app, asked)
    return Said(found.exit_code, found.stdout, found.stderr)


def apart(queue_server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own, which waits while the test goes on."""
    return warm_run(*arguments, "--queue-url", queue_server.url)


async def told(queue_server: Server, *arguments: str) -> Any:
    return json.loads((await verb(queue_server, *arguments, "--json")).stdout)


async def submitted(queue: OwnerAndDesk, *ids: str, results: str = "", **labels: str) -> None:
    for at, name in enumerate(ids):
        token, deadline = f"token-of-{name}", LATER + at
        member = encode_member(
            name, b'{"prompt": "hi"}', deadline, token=token, results=results, labels=labels
        )
        await queue.submit([Submission(member, float(deadline), name, token, deadline)])


async def taken(queue: OwnerAndDesk, most: int = 9) -> Sequence[Lease]:
    return (await claim(queue, most)).leases


async def ended(queue: OwnerAndDesk, *leases: Lease) -> None:
    for lease in leases:
        request = parse_member(lease.member)
        result = encode_answer(request.id or "", 200, b'{"text": "hello"}', token=request.token)
        await queue.settle([Settlement(lease, result, request.results, request.id or "", request.token)])


async def one_in_each_place(queue: OwnerAndDesk) -> None:
    await submitted(queue, "dead", "delayed", "running", "first", "second", "third")
    dead, delayed, _ = await taken(queue, 3)
    await queue.move_to_dead_letters(
        [DeadLetter(Settlement(dead, b'{"id":"dead","payload":""}', ""), "no answer: 500")]
    )
    await queue.release([Release(delayed, 600.0, is_failed_attempt=True)])


async def test_describe_says_where_a_request_lies_and_why_it_is_not_sent(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner-7", names=NAMES) as (queue,):
        await one_in_each_place(queue)
        await queue.pause("ann", "upgrade")
    said = {
        name: (await verb(queue_server, "describe", name)).stdout
        for name in ("dead", "delayed", "running", "third")
    }
    assert "no answer: 500" in said["dead"]
    assert re.search(r"due in (10|9\.\d) min", said["delayed"])
    assert "it is with owner-7" in said["running"]
    assert re.search(r"queue position +3\n", said["third"])
    assert "2 go before it; the gate: paused by ann: upgrade" in said["third"]
    (shown,) = (await told(queue_server, "describe", "third"))["requests"]
    assert (shown["state"], shown["queue_position"], shown["cancellable"]) == ("pending", 3, True)
    assert (await told(queue_server, "describe", "nobody", "--all"))["searched_all"]
    missing = await verb(queue_server, "describe", "nobody")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "nobody: not in batch:{default}:requests" in missing.stderr


async def test_describe_tells_a_request_of_any_producer_and_one_that_cannot_be_read(
    queue_server: Server,
) -> None:
    member = json.dumps({"request_kind": "redis", "data": {"id": "theirs", "deadline": LATER, "payload": {}}})
    with queue_server.client() as client:
        client.zadd(NAMES.queue, {member: 5, '{"data": {"id": "odd", "payload": {}}}': 6})
    assert "no: it carries no token" in (await verb(queue_server, "describe", "theirs")).stdout
    (odd,) = (await told(queue_server, "describe", "odd"))["requests"]
    assert (odd["queue_position"], odd["deadline"]) == (2, None)
    assert "data: Object missing required field" in odd["problem"]


async def test_two_requests_of_one_id_are_both_described(queue_server: Server) -> None:
    with queue_server.client() as client:
        for token in ("a", "b"):
            client.zadd(NAMES.queue, {encode_member("same", b"{}", LATER, token=token): LATER})
    assert len((await told(queue_server, "describe", "same"))["requests"]) == 2


async def test_a_result_is_found_by_its_id_until_it_is_taken(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "own", results=NAMES.result_list_for_id("own"))
        await submitted(queue, "shared")
        waiting = await verb(queue_server, "result", "own")
        assert (waiting.returncode, waiting.stdout) == (1, "")
        assert "own has no result yet, it is pending" in waiting.stderr
        await ended(queue, *await taken(queue))
    for name in ("own", "shared"):
        for _ in range(2):
            found = await verb(queue_server, "result", name)
            assert (found.returncode, found.stdout) == (0, '{"text": "hello"}\n')
        assert (await told(queue_server, "result", name))["status_code"] == 200
        assert "answered, status 200" in (await verb(queue_server, "describe", name)).stdout
    assert [
        json.loads(line)["id"] for line in (await verb(queue_server, "results", "--take")).stdout.splitlines()
    ] == ["shared"]
    gone = await verb(queue_server, "result", "shared", "--wait")
    assert gone.returncode == 1
    assert "shared: no result under its id" in gone.stderr


async def test_result_waits_no_longer_than_it_may(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "slow", results=NAMES.result_list_for_id("slow"))
        late = await verb(queue_server, "result", "slow", "--wait", "50ms")
        assert (late.returncode, late.stderr.strip()) == (1, "slow: no result within 0.1 s")
        asking = asyncio.create_task(asyncio.to_thread(apart, queue_server, "result", "slow", "--wait"))
        await ended(queue, *await taken(queue))
        assert (await asking).stdout == '{"text": "hello"}\n'


async def failed_and_requeued(queue: OwnerAndDesk, name: str, *, token: str) -> bytes:
    """One that died, with its result under its id, and was accepted anew; that result."""
    own = NAMES.result_list_for_id(name)
    deadline = LATER
    member = encode_member(name, b'{"prompt": "hi"}', deadline, token=token, results=own)
    await queue.submit([Submission(member, float(deadline), name, token, deadline)])
    (lease,) = await taken(queue)
    result = encode_failure(name, ErrorCode.RETRIES_EXHAUSTED, "no answer", token=token)
    await queue.move_to_dead_letters([DeadLetter(Settlement(lease, result, own, name, token), "no answer")])
    assert await queue.requeue_dead([lease.entry_id], LATER + 60) == 1
    return result


async def waited(queue_server: Server, folder: Path, name: str, then: Callable[[], Awaitable[Any]]) -> Said:
    """What `result NAME --wait` says in the end, where this is done once it waits."""
    out, err = folder / "out", folder / "err"
    asked = "dispatcher", "result", name, "--wait", "--queue-url", queue_server.url
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        warm(*asked, stdout=stdout, stderr=stderr) as waiting,
    ):
        await wait_until(lambda: "waiting: " in err.read_text(), STARTS_S)
        assert out.read_text() == ""
        await then()
        await wait_until(lambda: waiting.poll() is not None, STARTS_S)
    return Said(waiting.returncode or 0, out.read_text(), err.read_text())


@pytest.mark.parametrize(
    ("token", "same"), [("t", False), ("", False), ("t", True)], ids=["answered", "no-token", "fails-again"]
)
async def test_who_waits_for_a_request_that_was_accepted_anew_gets_its_next_result(
    queue_server: Server, tmp_path: Path, token: str, same: bool
) -> None:
    """The one of before stays, and is shown as such to who does not wait."""
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        before = await failed_and_requeued(queue, "r-1", token=token)
        shown = await verb(queue_server, "result", "r-1")
        assert shown.returncode == 1
        assert shown.stdout == decode_result(before).payload + "\n"
        assert shown.stderr.startswith(
            "of before: r-1 is in the queue again, it is pending; result r-1 --wait"
        )
        late = await verb(queue_server, "result", "r-1", "--wait", "50ms")
        assert (late.returncode, late.stdout) == (1, "")
        assert late.stderr == "r-1: no other result within 0.1 s\n"
        described = (await verb(queue_server, "describe", "r-1")).stdout
        assert "r-1: was answered before, no answer of the gateway, RETRIES_EXHAUSTED" in described

        async def end() -> None:
            (lease,) = await taken(queue)
            assert "it is leased; result r-1 --wait" in (await verb(queue_server, "result", "r-1")).stderr
            if same:
                settlement = Settlement(lease, before, NAMES.result_list_for_id("r-1"), "r-1", token)
                await queue.move_to_dead_letters([DeadLetter(settlement, "no answer")])
            else:
                await ended(queue, lease)

        said = await waited(queue_server, tmp_path, "r-1", end)
        next_ = await verb(queue_server, "result", "r-1")
    assert said.stdout == next_.stdout == (shown.stdout if same else '{"text": "hello"}\n')
    assert "of before" not in next_.stderr
    with queue_server.client() as client:
        assert client.llen(NAMES.result_list_for_id("r-1")) == 2, "nothing was taken"


async def test_who_waits_for_a_next_result_that_somebody_else_takes_is_told(
    queue_server: Server, tmp_path: Path
) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await failed_and_requeued(queue, "r-1", token="t")

        async def end() -> None:
            await queue.settle([Settlement(lease, b"", "", "r-1", "t") for lease in await taken(queue)])

        said = await waited(queue_server, tmp_path, "r-1", end)
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.endswith("there is no other result than that of before: somebody else took it\n")


async def test_result_with_the_time_before_the_id_is_told_the_order(queue_server: Server) -> None:
    said = await verb(queue_server, "result", "--wait", "30s", "r-1")
    assert said.returncode == 2
    assert said.stderr.strip().endswith("the id goes first: result r-1 --wait 30s")
    assert "goes first" not in (await verb(queue_server, "result", "r-1", "--wait", "soon")).stderr


async def test_states_of_an_id_that_is_there_twice_are_named_once(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "twice")
        await submitted(queue, "first", "twice")
        assert "it is pending: " in (await verb(queue_server, "result", "twice")).stderr


async def test_an_empty_list_says_whether_anybody_works_on_the_queue(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        said = await verb(queue_server, "list")
        none, nobody = said.stderr.splitlines()
        assert (said.returncode, none) == (0, f"{NAMES.queue}: none")
        assert nobody.startswith(
            f"no dispatcher works on {NAMES.queue}, none ever has: is the pool's name right"
        )
        await queue.sweep()
        assert (await verb(queue_server, "list")).stderr == f"{NAMES.queue}: none\n"


async def test_cancel_says_where_nobody_is_there_to_do_it(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "mine", "other", job="a")
        for asked in (("mine",), ("--label", "job=a")):
            said = await verb(queue_server, "cancel", *asked)
            assert said.returncode == 0
            assert (
                "their results come when a dispatcher works on the queue: no dispatcher works on"
                in said.stderr
            )
        await queue.sweep()
        assert (await verb(queue_server, "cancel", "other")).stderr == ""


async def test_a_request_that_is_being_cancelled_is_shown_as_such_until_it_is_answered(
    queue_server: Server,
) -> None:
    async with queues(queue_server.url, "owner-7", names=NAMES) as (queue,):
        await submitted(queue, "running", "waiting", "other")
        with queue_server.client() as client:
            client.set("request-cancel:other", "the-token-of-another")
        (lease,) = await taken(queue, 1)
        assert (await verb(queue_server, "cancel", "running", "waiting")).returncode == 0
        listed = {line.split()[0]: line for line in (await verb(queue_server, "list")).stdout.splitlines()}
        assert listed["running"].endswith("is being cancelled, at owner-7")
        assert listed["waiting"].endswith("is being cancelled")
        assert "cancelled" not in listed["other"]
        assert {one["id"]: one["being_cancelled"] for one in await told(queue_server, "list")} == {
            "running": True,
            "waiting": True,
            "other": False,
        }
        peeked = (await verb(queue_server, "peek")).stdout.splitlines()
        assert [line.endswith("is being cancelled") for line in peeked[2:]] == [True, False]
        said = (await verb(queue_server, "describe", "waiting")).stdout
        assert re.search(r"^  being cancelled +yes$", said, re.MULTILINE)
        assert (
            "it is being cancelled, and answered CANCELLED when it is claimed; it is next in the queue; "
            "the gate: "
        ) in said
        said = (await verb(queue_server, "describe", "running")).stdout
        assert "it is being cancelled; it is with owner-7, whose lease runs out" in said
        await ended(queue, lease)
        assert "cancelled" not in (await verb(queue_server, "describe", "running")).stdout
        with queue_server.client() as client:
            client.set("request-cancel:other", "token-of-other")
        assert (await told(queue_server, "describe", "other"))["requests"][0]["being_cancelled"]


async def test_with_json_how_it_goes_is_a_note_and_no_error(queue_server: Server) -> None:
    asked = "submit", "{}", "--id", "mine", "--json"
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        asking = asyncio.create_task(asyncio.to_thread(apart, queue_server, *asked))
        leases: Sequence[Lease] = ()
        for _ in range(600):
            if leases := await taken(queue):
                break
            await asyncio.sleep(0.05)
        await ended(queue, *leases)
        said = await asking
    assert said.returncode == 0
    first, *others = [json.loads(line) for line in said.stderr.splitlines()]
    assert first == {"note": "mine submitted"}
    assert all(each.keys() == {"note"} for each in others)


async def test_result_that_goes_to_another_list_is_pointed_to(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "mine", results="batch-results:mine")
        assert "results --list batch-results:mine" in (await verb(queue_server, "result", "mine")).stderr
        await ended(queue, *await taken(queue))
    (line,) = (
        await verb(queue_server, "results", "--list", "batch-results:mine", "--json")
    ).stdout.splitlines()
    assert json.loads(line)["id"] == "mine"


async def test_list_shows_what_lies_where_in_the_order_of_the_line(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await one_in_each_place(queue)
        first = (await taken(queue, 1))[0]
        await queue.release([Release(first)])
    ids = {
        state: [each["id"] for each in (await told(queue_server, "list", "--state", state))]
        for state in ("pending", "running", "delayed", "dead")
    }
    assert ids == {
        "pending": ["first", "second", "third"],
        "running": ["running"],
        "delayed": ["delayed"],
        "dead": ["dead"],
    }
    lines = (await verb(queue_server, "list")).stdout.splitlines()
    assert lines[0].split() == ["ID", "STATE", "DEADLINE", "ATTEMPTS", "NOTE"]
    assert [line.split()[0] for line in lines[1:]] == ["running", "first", "second", "third", "delayed"]
    some = await verb(queue_server, "list", "--state", "pending", "--most", "2")
    assert (len(some.stdout.splitlines()), some.stderr.strip()) == (3, "2 of 3; --most shows more")


async def test_peek_shows_what_comes_next_and_what_holds_it_back(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "a", "b", "c")
        await queue.pause("ann", "upgrade")
    lines = (await verb(queue_server, "peek", "-n", "2")).stdout.splitlines()
    assert lines[0] == "3 wait; the gate: paused by ann: upgrade"
    assert [line.split()[:2] for line in lines[2:]] == [["1", "a"], ["2", "b"]]
    found = await told(queue_server, "peek")
    assert (found["pending"], [each["queue_position"] for each in found["next"]]) == (3, [1, 2, 3])


async def test_cancel_takes_ids_or_all_with_a_label_whoever_submitted_them(queue_server: Server) -> None:
    theirs = encode_member("theirs", b"{}", LATER, token="t", labels={"job": "a"})
    mute = encode_member("mute", b"{}", LATER, labels={"job": "b"})
    with queue_server.client() as client:
        client.zadd(NAMES.queue, {theirs: 1, mute: 2})
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "ours", job="a")
        await submitted(queue, "other", job="other")
        assert (await verb(queue_server, "cancel", "theirs")).stdout == "theirs is being cancelled\n"
        assert await queue.check_cancelled([("theirs", "t"), ("ours", "token-of-ours")]) == [True, False]
        assert (await verb(queue_server, "cancel", "--label", "job=a")).stdout == "2 are being cancelled\n"
        wanted = [("ours", "token-of-ours"), ("other", "token-of-other")]
        assert await queue.check_cancelled(wanted) == [True, False]
    refused = await verb(queue_server, "cancel", "mute", "other")
    assert (refused.returncode, refused.stdout) == (1, "other is being cancelled\n")
    assert "mute: is pending, and carries no token" in refused.stderr
    assert (await told(queue_server, "cancel", "nobody")) == {
        "cancelled": [],
        "not_cancelled": {
            "nobody": "neither in the queue nor running: it has ended, or the id is of another queue"
        },
    }


async def test_results_are_shown_and_taken_the_oldest_first(queue_server: Server) -> None:
    with queue_server.client() as client:
        for at in range(3):
            client.lpush(NAMES.result_list, encode_answer(f"r-{at}", 200, b"hi"))
        client.lpush(NAMES.result_list, b"\xffgarbage")
    lines = (await verb(queue_server, "results")).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "r-0", "r-1", "r-2", "(unreadable)"]
    taken = (await verb(queue_server, "results", "--take", "--most", "2")).stdout.splitlines()
    assert [json.loads(line)["id"] for line in taken] == ["r-0", "r-1"]
    assert len((await verb(queue_server, "results", "--json")).stdout.splitlines()) == 2


async def test_the_dead_are_chosen_by_id_reason_and_age(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "a", "b", "c")
        for lease, reason in zip(
            await taken(queue), ("CUDA out of memory", "status 500", "status 500"), strict=True
        ):
            await queue.move_to_dead_letters(
                [DeadLetter(Settlement(lease, b'{"id":"x","payload":""}', ""), reason)]
            )
    assert [each["id"] for each in (await told(queue_server, "dead", "list", "--reason", "cuda"))] == ["a"]
    assert (await told(queue_server, "dead", "list", "--older", "1h")) == []
    assert (await verb(queue_server, "dead", "list")).stdout.splitlines()[0].split() == [
        "NUMBER",
        "DIED",
        "ID",
        "REASON",
    ]
    assert (
        json.loads((await verb(queue_server, "dead", "show", "a")).stdout)["reason"] == "CUDA out of memory"
    )
    assert (await told(queue_server, "dead", "requeue", "a"))["requeued"] == 1
    asked = await verb(queue_server, "dead", "purge", "--reason", "500")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    purged = await verb(queue_server, "dead", "purge", "b", "--yes")
    assert (purged.stdout, purged.stderr) == ("1 forgotten, 1 dead left\n", "")
    others = await told(queue_server, "dead", "purge", "--reason", "500", "--yes")
    assert others == {"purged": 1, "asked": 1, "dead": 0}
    empty = await verb(queue_server, "dead", "list")
    assert (empty.returncode, empty.stdout, "no dead" in empty.stderr) == (0, "", True)


async def test_a_number_is_that_of_a_dead_request_and_only_else_an_id(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "first")
        (first,) = await taken(queue)
        await submitted(queue, str(first.entry_id), "77777")
        leases = [first, *await taken(queue)]
        await queue.move_to_dead_letters(
            [DeadLetter(Settlement(lease, b"", ""), "it broke") for lease in leases]
        )
    one = await told(queue_server, "dead", "purge", str(first.entry_id), "--yes")
    assert one == {"purged": 1, "asked": 1, "dead": 2}
    left = [each["id"] for each in await told(queue_server, "dead", "list")]
    assert left == [str(first.entry_id), "77777"]
    for name in (*left, "9" * 5_000):
        purged = await verb(queue_server, "dead", "purge", name, "--yes")
        assert ("1 forgotten" in purged.stdout) == (name in left)
        assert (f"not among the dead: {name}" in purged.stderr) == (name not in left)


@pytest.mark.parametrize("act", ["purge", "requeue"])
async def test_where_none_of_the_dead_is_meant_it_says_so(queue_server: Server, act: str) -> None:
    yes = ["--yes"] if act == "purge" else []
    for named, words in (
        (["--all"], "no dead"),
        (["--reason", "CUDA"], "no dead request fits"),
        (["a", "b"], "not among the dead: a, b"),
        ([f"r-{n}" for n in range(9)], "not among the dead: r-0, r-1, r-2, r-3, r-4, …"),
    ):
        done = await verb(queue_server, "dead", act, *named, *yes)
        assert (done.stdout, done.stderr) == ("", f"{NAMES.queue}: {words}\n")


@pytest.mark.parametrize("tries", [1, 2])
async def test_a_dead_request_is_told_with_as_many_tries_as_its_reason_says(
    queue_server: Server, tries: int
) -> None:
    """The last try is one of them; what merely looks like such a reason is none."""
    policy = RetryPolicy(max_attempts=tries)
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "r-1")
        (lease,) = await taken(queue)
        for _ in range(tries - 1):
            await queue.release(
                [Release(lease, is_failed_attempt=True, last_attempt="the gateway answered 500")]
            )
            (lease,) = await taken(queue)
        verdict = decide_after_attempt(
            Failed("the gateway answered 500", 500),
            failed_attempts=lease.failed_attempts,
            refusals=0,
            deadline=LATER,
            now=0.0,
            policy=policy,
            rand=0.5,
        )
        assert isinstance(verdict, MoveToDeadLetters)
        await queue.move_to_dead_letters(
            [DeadLetter(Settlement(lease, b"", ""), verdict.message, verdict.is_failed_attempt)]
        )
        await submitted(queue, "waits")
        (lease,) = await taken(queue)
        await queue.release(
            [Release(lease, is_failed_attempt=True, last_attempt=verdict.message.replace(str(tries), "9"))]
        )
        (page,) = await queue.list_newest_dead(9)
    assert page.failed_attempts == tries
    assert f"after {tries} attempt" in page.reason
    assert (await told(queue_server, "dead", "show", "r-1"))["failed_attempts"] == tries
    assert (await told(queue_server, "describe", "r-1"))["requests"][0]["failed_attempts"] == tries
    assert f" {tries} failed\n" in (await verb(queue_server, "describe", "r-1")).stdout
    assert f" {tries} failed " in (await verb(queue_server, "list", "--state", "dead")).stdout
    assert " 1 failed\n" in (await verb(queue_server, "describe", "waits")).stdout


async def buried(queue: OwnerAndDesk, *ids: str) -> None:
    await submitted(queue, *ids)
    await queue.move_to_dead_letters(
        [DeadLetter(Settlement(lease, b"", ""), "it broke") for lease in await taken(queue)]
    )


@pytest.mark.parametrize(
    ("act", "done"),
    [
        (("purge", "--yes"), "1 forgotten, 1 dead left\n"),
        (("requeue",), "1 of 3 are pending again; a second result may come for each\n"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
async def test_those_of_the_named_that_are_not_there_are_named(
    queue_server: Server, act: tuple[str, ...], done: str
) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await buried(queue, "a", "b")
    said = await verb(queue_server, "dead", *act, "a", "z", "y")
    assert said == Said(1, done, f"{NAMES.queue}: not among the dead: y, z\n")


async def test_what_is_left_is_said_where_none_is_forgotten(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await buried(queue, "a", "b")
    for named, words in (
        (["--reason", "CUDA"], "no dead request fits"),
        (["z"], "not among the dead: z"),
    ):
        said = await verb(queue_server, "dead", "purge", *named, "--yes")
        assert said == Said(1, "", f"{NAMES.queue}: {words}; 2 dead left\n")
    nothing = {"purged": 0, "asked": 1, "dead": 2}
    assert await told(queue_server, "dead", "purge", "z", "--yes") == nothing


async def test_all_of_none_is_no_failure(queue_server: Server) -> None:
    for given in (("requeue",), ("purge", "--yes")):
        said = await verb(queue_server, "dead", *given, "--all")
        assert said == Said(0, "", f"{NAMES.queue}: no dead\n")


async def test_a_request_that_cannot_be_read_stays_dead_and_is_counted(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await queue.submit([Submission(b"{", float(LATER), "", "", LATER)])
        (lease,) = await taken(queue)
        await queue.move_to_dead_letters([DeadLetter(Settlement(lease, b"", ""), "unreadable")])
    said = await verb(queue_server, "dead", "requeue", "--all")
    why = "1 was not accepted: unreadable, or not dead any more"
    assert said == Said(1, "", f"{NAMES.queue}: {why}\n")


async def test_what_is_gone_when_the_question_is_answered_is_not_called_forgotten(
    queue_server: Server,
) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "dispatcher", "dead", "purge", "--all", "--queue-url", queue_server.url]
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await buried(queue, "a", "b")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        os.close(theirs)
        try:
            assert process.stderr is not None
            asked = await asyncio.wait_for(process.stderr.readuntil(b"[y/N]:"), STARTS_S)
            assert asked.startswith(f"Forget 2 dead requests of {NAMES.queue} for good?".encode())
            (first, _) = await queue.list_dead(2)
            assert await queue.purge_dead([first.entry_id]) == 1
            os.write(ours, b"y\n")
            out, err = await process.communicate()
        finally:
            os.close(ours)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert (process.returncode, out.decode().strip()) == (0, "1 forgotten, no dead left")
    why = "1 was gone before: requeued or purged meanwhile, or the call was made twice"
    assert err.decode().strip() == f"{NAMES.queue}: {why}"


async def test_a_key_that_is_no_list_holds_no_results(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.set("celery", "x")
    for options in ((), ("--take",), ("--json",)):
        done = await verb(queue_server, "results", "--list", "celery", *options)
        assert (done.returncode, done.stdout) == (1, "")
        assert "celery is no list: no results lie there" in done.stderr
    empty = await verb(queue_server, "results", "--list", "nothing")
    assert (empty.returncode, empty.stderr) == (0, "nothing is empty\n")


async def test_what_a_client_left_dead_is_answered_where_its_id_finds_it(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "left", results="batch-results:0123456789abcdef")
        (lease,) = await taken(queue)
        await queue.move_to_dead_letters([DeadLetter(Settlement(lease, b"", ""), "it broke")])
        assert "`batch-dispatcher result ID`" in (await verb(queue_server, "dead", "requeue", "left")).stdout
        await ended(queue, *await taken(queue))
    assert (await verb(queue_server, "result", "left")).stdout == '{"text": "hello"}\n'


async def test_a_paused_queue_is_copied_once_however_often_it_is_asked(
    queue_server: Server, tmp_path: Path
) -> None:
    async def copied(far: Server, *more: str) -> Said:
        asked = ["queue", "copy", "--from", queue_server.url, "--to", far.url, "--pool", "default", *more]
        found = await asyncio.to_thread(CliRunner().invoke, app, asked)
        return Said(found.exit_code, found.stdout, found.stderr)

    with server(ENGINES[-1], tmp_path) as far:
        async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
            await one_in_each_place(queue)
            refused = await copied(far)
            assert (refused.returncode, "is not paused there" in refused.stderr) == (1, True)
            await queue.pause("ann", "moving")
            done = await copied(far)
            assert (done.returncode, done.stdout.partition(" at ")[0]) == (
                0,
                "batch:{default}:requests: read 1 dead, 1 delayed, 3 pending; 5 of them were new",
            )
            assert done.stderr == "1 are leased and were left: copy again when they have ended\n"
        async with queues(far.url, "owner", names=NAMES) as (queue,):
            await ended(queue, *await taken(queue, 1))
            told = json.loads((await copied(far, "--json")).stdout)
            assert (told["copied"], told["left_leased"], told["found"]["pending"]) == (0, 1, 3)
            counts = await queue.count_requests()
            assert (counts.pending, counts.delayed, counts.dead) == (2, 1, 1)
        assert (await verb(far, "describe", "third")).returncode == 0
        down = await asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["queue", "copy", "--from", queue_server.url, "--to", NOWHERE[1], "--pool", "x"],
        )
        assert (down.exit_code, down.stdout) == (1, "")


async def test_submit_tells_its_id_at_once_and_how_to_go_on_when_it_is_interrupted(
    queue_server: Server, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    with (
        said.open("wb") as stderr,
        warm(
            "dispatcher", "submit", '{"a": 1}', "--id", "mine", "--queue-url", queue_server.url, stderr=stderr
        ) as submitting,
    ):
        await wait_until(
            lambda: (
                "mine submitted\nwaiting: no dispatcher works on batch:{default}:requests" in said.read_text()
            ),
            STARTS_S,
        )
        submitting.send_signal(signal.SIGINT)
        await wait_until(lambda: submitting.poll() is not None)
    assert submitting.returncode == 130
    *_, last = said.read_text().splitlines()
    assert last == "mine is still queued: batch-dispatcher result mine --wait, or cancel mine"
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await ended(queue, *await taken(queue))
    assert (await verb(queue_server, "result", "mine")).stdout == '{"text": "hello"}\n'


async def test_what_the_dispatcher_says_is_told_where_one_answers(
    queue_server: Server, tmp_path: Path
) -> None:
    told = {
        "reason": "gateway-unreachable",
        "explanation": "gateway-unreachable, no connection",
        "pool": "",
    }

    async def status(_: web.Request) -> web.Response:
        return web.json_response(told)

    async def ask(*arguments: str, port: int) -> Said:
        config.write_text(
            f"gateway: {{url: http://gw}}\nqueue: {{url: {queue_server.url}}}\n"
            f"admin: {{host: 127.0.0.1, port: {port}}}\n"
        )
        found = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--config", str(config)])
        return Said(found.exit_code, found.stdout, found.stderr)

    config = tmp_path / "config.yaml"
    application = web.Application()
    application.router.add_get("/status", status)
    async with (
        queues(queue_server.url, "owner", names=NAMES) as (queue,),
        TestServer(application) as answering,
    ):
        await submitted(queue, "r-1", results=NAMES.result_list_for_id("r-1"))
        port = answering.port or 0
        for verb_ in (("describe", "r-1"), ("peek",)):
            found = await ask(*verb_, port=port)
            assert "the gate: gateway-unreachable, no connection" in found.stdout
        waited = await ask("result", "r-1", "--wait", "2.1s", port=port)
        assert waited.stderr.startswith("waiting: gateway-unreachable, no connection\n")
        told["explanation"] = "Nothing is sent: gateway-unreachable, it refuses."
        found = await ask("peek", port=port)
        assert "the gate: gateway-unreachable, nothing is sent: it refuses." in found.stdout
        found = await ask("describe", "r-1", port=1)
        assert "no dispatcher answers: nothing listens on admin.port 1" in found.stdout
        elsewhere = await ask("submit", "{}", "--endpoint", "/v2/x", port=1)
        assert (elsewhere.returncode, "gateway.allowed_paths" in elsewhere.stderr) == (2, True)


async def test_submit_takes_no_result_without_its_token(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.lpush(NAMES.result_list_for_id("mine"), encode_answer("mine", 200, b"forged"))
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        asking = asyncio.create_task(asyncio.to_thread(apart, queue_server, "submit", "{}", "--id", "mine"))
        leases = await wait_until(lambda: taken(queue, 1), STARTS_S)
        await ended(queue, *leases)
        assert (await asking).stdout == '{"text": "hello"}\n'


async def test_a_line_of_a_batch_file_is_not_taken_for_a_payload(queue_server: Server) -> None:
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
    found = await verb(queue_server, "submit", line)
    assert (found.returncode, "submit --file" in found.stderr) == (2, True)


async def test_the_lines_of_a_file_are_cancelled_by_its_label(queue_server: Server, tmp_path: Path) -> None:
    line = '{{"custom_id": "{}", "method": "POST", "url": "/v1/completions", "body": {{"model": "m"}}}}\n'
    (tmp_path / "in.jsonl").write_text("".join(line.format(number) for number in range(5)))
    paths = "--file", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")
    url = "--queue-url", queue_server.url
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "other", job="other")
        with warm("dispatcher", "submit", *paths, "--label", "job=nightly", *url) as submitting:

            async def listed() -> Any:
                return await told(queue_server, "list", "--label", "job=nightly")

            await wait_until(lambda: _when(listed, 5), STARTS_S)
            (shown, *_) = await listed()
            assert {"job", "file"} == shown["labels"].keys()
            done = await verb(queue_server, "cancel", "--label", "job=nightly")
            assert (done.returncode, done.stdout) == (0, "5 are being cancelled\n")
            submitting.send_signal(signal.SIGINT)
            await wait_until(lambda: submitting.poll() is not None, STARTS_S)
        wanted = []
        for lease in await taken(queue):
            read = parse_member(lease.member)
            wanted.append((read.id or "", read.token))
        cancelled = dict(zip(wanted, await queue.check_cancelled(wanted), strict=True))
        assert {name: gone for (name, _), gone in cancelled.items() if not gone} == {"other": False}
        assert len(cancelled) == 6


async def _when(look: Callable[[], Awaitable[Any]], count: int) -> bool:
    return len(await look()) == count


async def test_a_url_alone_that_finds_nothing_says_which_queues_are_there(queue_server: Server) -> None:
    """Each by the option that names it; on standard error, and the verb goes on."""
    with queue_server.client() as client:
        client.zadd("batch:{qwen}:requests", {"x": 1})
        client.hset("{mine}:control", "next", "1")
        client.set("session:{7}", "of another program")
    said = "batch:{default}:requests is not there, but others are: name yours by --pool qwen, --queue mine\n"
    for asked in (("list",), ("status",), ("explain",)):
        found = await verb(queue_server, *asked)
        assert (found.returncode, said in found.stderr) == (0, True), found
    for named in (("--pool", "other"), ("--queue", "batch:{default}:requests")):
        assert "others are" not in (await verb(queue_server, "list", *named)).stderr
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "a")
    assert (await verb(queue_server, "list")).stderr == ""


async def test_who_waits_is_told_that_no_dispatcher_works_on_the_queue_and_what_becomes_of_his_request(
    queue_server: Server,
) -> None:
    """A pool's name with a slip in it is a queue that nobody serves; a failing model is no idle gate."""

    async def waited() -> str:
        return (await verb(queue_server, "result", "r-1", "--wait", "2.1s")).stderr.splitlines()[0]

    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "r-1", results=NAMES.result_list_for_id("r-1"))
        assert await waited() == (
            "waiting: no dispatcher works on batch:{default}:requests, none ever has: "
            "is the pool's name right, does one run (without --observe)?"
        )
        await queue.sweep()
        assert await waited() == "waiting: pending, it is next in the queue"
        (lease,) = await taken(queue, 1)
        assert await waited() == "waiting: a dispatcher has sent it, the answer is not there yet"
        await queue.release(
            [Release(lease, 60.0, is_failed_attempt=True, last_attempt="the gateway answered 503")]
        )
        assert (await waited()).startswith("waiting: its next attempt, due in ")
        assert (await waited()).endswith("after 1 failed, the last: the gateway answered 503")
        (shown,) = (await told(queue_server, "describe", "r-1"))["requests"]
        assert (shown["reason"], shown["last_attempt"]) == (None, "the gateway answered 503")
        described = (await verb(queue_server, "describe", "r-1")).stdout
        assert re.search(r"^ *last attempt +the gateway answered 503$", described, re.MULTILINE)


async def test_what_waits_for_its_model_is_told_with_the_model(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submitted(queue, "r-1")
        (lease,) = await taken(queue, 1)
        drained = "its model 'qwen' is drained by ann"
        why = f"not sent, because {drained}"
        await queue.release([Release(lease, is_undelivered=True, last_attempt=why, missing_model="qwen")])
        (shown,) = (await told(queue_server, "describe", "r-1"))["requests"]
        assert (shown["state"], shown["missing_model"], shown["last_attempt"]) == (
            "waiting-for-model",
            "qwen",
            why,
        )
        assert shown["why"].startswith(f"it waits, because {drained}; the gate: "), (
            "it is served, and held back"
        )
        waited = await verb(queue_server, "result", "r-1", "--wait", "2100ms")
        assert waited.stderr.splitlines()[0] == f"waiting: {drained}"
        listed = (await verb(queue_server, "list", "--state", "pending")).stdout
        assert "waiting-for-model" in listed
        assert "waits for its model 'qwen'" in listed
        assert "r-1" not in (await verb(queue_server, "peek")).stdout, "nobody claims it"
        assert "cancelled" in (await verb(queue_server, "cancel", "r-1")).stdout
        assert (await queue.sweep()).cancelled_count == 1
        (shown,) = (await told(queue_server, "describe", "r-1"))["requests"]
        assert (shown["state"], shown["missing_model"]) == ("returned", None)
