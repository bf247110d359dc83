"""Output and exit codes of the verbs for single requests, with a real queue and without a dispatcher."""

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
from dispatcher.queue.contract import DeadLetter, Lease, Release, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.outcomes.judge import MoveToDeadLetters, decide_after_attempt
from dispatcher.requests.outcomes.outcome import (
    Failed,
    RetryPolicy,
)
from dispatcher.requests.request import encode_member, parse_member
from dispatcher.requests.result import add_partial_answer, decode_result, encode_answer, encode_failure
from dispatcher.requests.submission import Submission
from dispatcher.wire_format import ErrorCode
from tests.fork_server import forked_process, run_cli
from tests.queue.factories import OwnerAndAdmin, claim, queues
from tests.queue.servers import ENGINES, Server, server
from tests.support import wait_until

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
NOWHERE = ("--queue-url", "redis://127.0.0.1:1/0")
STARTS_S = 60.0
"""Time for the start of a program on a busy machine."""
LATER = int(time.time()) + 86_400


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("requests")) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.flushall()


@dataclass(frozen=True, slots=True)
class VerbOutput:
    returncode: int
    stdout: str
    stderr: str


async def run_verb(queue_server: Server, *arguments: str) -> VerbOutput:
    """Run a verb in this process, because a fork costs ten times as much."""
    given = [*arguments, "--queue-url", queue_server.url]
    found = await asyncio.to_thread(CliRunner().invoke, app, given)
    return VerbOutput(found.exit_code, found.stdout, found.stderr)


def start_verb(queue_server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb in a process of its own, which waits while the test continues."""
    return run_cli(*arguments, "--queue-url", queue_server.url)


async def run_verb_for_json(queue_server: Server, *arguments: str) -> Any:
    return json.loads((await run_verb(queue_server, *arguments, "--json")).stdout)


async def submit_requests(queue: OwnerAndAdmin, *ids: str, results: str = "", **labels: str) -> None:
    for at, name in enumerate(ids):
        token, deadline = f"token-of-{name}", LATER + at
        member = encode_member(
            name, b'{"prompt": "hi"}', deadline, token=token, results=results, labels=labels
        )
        await queue.submit([Submission(member, float(deadline), name, token, deadline)])


async def claim_leases(queue: OwnerAndAdmin, most: int = 9) -> Sequence[Lease]:
    return (await claim(queue, most)).leases


async def settle_leases(queue: OwnerAndAdmin, *leases: Lease) -> None:
    for lease in leases:
        request = parse_member(lease.member)
        result = encode_answer(request.id or "", 200, b'{"text": "hello"}', token=request.token)
        await queue.settle([Settlement(lease, result, request.results, request.id or "", request.token)])


async def put_one_request_in_each_state(queue: OwnerAndAdmin) -> None:
    await submit_requests(queue, "dead", "delayed", "running", "first", "second", "third")
    dead, delayed, _ = await claim_leases(queue, 3)
    await queue.move_to_dead_letters(
        [DeadLetter(Settlement(dead, b'{"id":"dead","payload":""}', ""), "no answer: 500")]
    )
    await queue.release([Release(delayed, 600.0, is_failed_attempt=True)])


async def test_describe_shows_the_location_of_a_request_and_why_it_is_not_sent(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner-7", names=NAMES) as (queue,):
        await put_one_request_in_each_state(queue)
        await queue.pause("ann", "upgrade")
    expected = {
        name: (await run_verb(queue_server, "describe", name)).stdout
        for name in ("dead", "delayed", "running", "third")
    }
    assert "no answer: 500" in expected["dead"]
    assert re.search(r"due in (10|9\.\d) min", expected["delayed"])
    assert "it is with owner-7" in expected["running"]
    assert re.search(r"queue position +3\n", expected["third"])
    assert "2 go before it; the gate: the queue is paused by ann: upgrade" in expected["third"]
    (shown,) = (await run_verb_for_json(queue_server, "describe", "third"))["requests"]
    assert (shown["state"], shown["queue_position"], shown["cancellable"]) == ("pending", 3, True)
    assert (await run_verb_for_json(queue_server, "describe", "nobody", "--all"))["searched_all"]
    missing = await run_verb(queue_server, "describe", "nobody")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "nobody: not in batch:{default}:requests" in missing.stderr


async def test_describe_shows_requests_of_other_producers_and_unreadable_ones(
    queue_server: Server,
) -> None:
    member = json.dumps({"request_kind": "redis", "data": {"id": "theirs", "deadline": LATER, "payload": {}}})
    with queue_server.client() as client:
        client.zadd(NAMES.queue, {member: 5, '{"data": {"id": "odd", "payload": {}}}': 6})
    assert "no: it carries no token" in (await run_verb(queue_server, "describe", "theirs")).stdout
    (odd,) = (await run_verb_for_json(queue_server, "describe", "odd"))["requests"]
    assert (odd["queue_position"], odd["deadline"]) == (2, None)
    assert "data: Object missing required field" in odd["problem"]


async def test_describe_shows_all_requests_with_the_same_id(queue_server: Server) -> None:
    with queue_server.client() as client:
        for token in ("a", "b"):
            client.zadd(NAMES.queue, {encode_member("same", b"{}", LATER, token=token): LATER})
    assert len((await run_verb_for_json(queue_server, "describe", "same"))["requests"]) == 2


async def test_result_is_found_by_its_id_until_it_is_taken(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "own", results=NAMES.result_list_for_id("own"))
        await submit_requests(queue, "shared")
        waiting = await run_verb(queue_server, "result", "own")
        assert (waiting.returncode, waiting.stdout) == (1, "")
        assert "own has no result yet, it is pending" in waiting.stderr
        await settle_leases(queue, *await claim_leases(queue))
    for name in ("own", "shared"):
        for _ in range(2):
            found = await run_verb(queue_server, "result", name)
            assert (found.returncode, found.stdout) == (0, '{"text": "hello"}\n')
        assert (await run_verb_for_json(queue_server, "result", name))["status_code"] == 200
        assert "answered, status 200" in (await run_verb(queue_server, "describe", name)).stdout
    assert [
        json.loads(line)["id"]
        for line in (await run_verb(queue_server, "result", "--all", "--take")).stdout.splitlines()
    ] == ["shared"]
    gone = await run_verb(queue_server, "result", "shared", "--wait")
    assert gone.returncode == 1
    assert "shared: no result under its id" in gone.stderr


async def test_result_waits_until_its_timeout(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "slow", results=NAMES.result_list_for_id("slow"))
        late = await run_verb(queue_server, "result", "slow", "--wait", "50ms")
        assert (late.returncode, late.stderr.strip()) == (1, "slow: no result within 0.1 s")
        asking = asyncio.create_task(asyncio.to_thread(start_verb, queue_server, "result", "slow", "--wait"))
        await settle_leases(queue, *await claim_leases(queue))
        assert (await asking).stdout == '{"text": "hello"}\n'


async def fail_and_requeue(queue: OwnerAndAdmin, name: str, *, token: str) -> bytes:
    """Let a request fail and requeue it. Return its first result, which is stored under its id."""
    own = NAMES.result_list_for_id(name)
    deadline = LATER
    member = encode_member(name, b'{"prompt": "hi"}', deadline, token=token, results=own)
    await queue.submit([Submission(member, float(deadline), name, token, deadline)])
    (lease,) = await claim_leases(queue)
    result = encode_failure(name, ErrorCode.RETRIES_EXHAUSTED, "no answer", token=token)
    await queue.move_to_dead_letters([DeadLetter(Settlement(lease, result, own, name, token), "no answer")])
    assert await queue.requeue_dead([lease.entry_id], LATER + 60) == 1
    return result


async def wait_output(
    queue_server: Server, folder: Path, name: str, then: Callable[[], Awaitable[Any]]
) -> VerbOutput:
    """Return the output of `result NAME --wait`. `then` runs as soon as it waits."""
    out, err = folder / "out", folder / "err"
    given = "dispatcher", "result", name, "--wait", "--queue-url", queue_server.url
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        forked_process(*given, stdout=stdout, stderr=stderr) as waiting,
    ):
        await wait_until(lambda: "waiting: " in err.read_text(), STARTS_S)
        assert out.read_text() == ""
        await then()
        await wait_until(lambda: waiting.poll() is not None, STARTS_S)
    return VerbOutput(waiting.returncode or 0, out.read_text(), err.read_text())


@pytest.mark.parametrize(
    ("token", "same"), [("t", False), ("", False), ("t", True)], ids=["answered", "no-token", "fails-again"]
)
async def test_waiting_for_a_requeued_request_returns_its_next_result(
    queue_server: Server, tmp_path: Path, token: str, same: bool
) -> None:
    """The earlier result stays, and is marked as such if the command does not wait."""
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        before = await fail_and_requeue(queue, "r-1", token=token)
        shown = await run_verb(queue_server, "result", "r-1")
        assert shown.returncode == 1
        assert shown.stdout == decode_result(before).payload + "\n"
        assert shown.stderr.startswith(
            "of before: r-1 is in the queue again, it is pending; result r-1 --wait"
        )
        late = await run_verb(queue_server, "result", "r-1", "--wait", "50ms")
        assert (late.returncode, late.stdout) == (1, "")
        assert late.stderr == "r-1: no other result within 0.1 s\n"
        described = (await run_verb(queue_server, "describe", "r-1")).stdout
        assert "r-1: was answered before, no answer of the gateway, RETRIES_EXHAUSTED" in described

        async def end() -> None:
            (lease,) = await claim_leases(queue)
            assert "it is leased; result r-1 --wait" in (await run_verb(queue_server, "result", "r-1")).stderr
            if same:
                settlement = Settlement(lease, before, NAMES.result_list_for_id("r-1"), "r-1", token)
                await queue.move_to_dead_letters([DeadLetter(settlement, "no answer")])
            else:
                await settle_leases(queue, lease)

        expected = await wait_output(queue_server, tmp_path, "r-1", end)
        next_ = await run_verb(queue_server, "result", "r-1")
    assert expected.stdout == next_.stdout == (shown.stdout if same else '{"text": "hello"}\n')
    assert "of before" not in next_.stderr
    with queue_server.client() as client:
        assert client.llen(NAMES.result_list_for_id("r-1")) == 2, "nothing was taken"


async def test_waiting_for_a_result_that_another_consumer_takes_is_reported(
    queue_server: Server, tmp_path: Path
) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await fail_and_requeue(queue, "r-1", token="t")

        async def end() -> None:
            await queue.settle(
                [Settlement(lease, b"", "", "r-1", "t") for lease in await claim_leases(queue)]
            )

        expected = await wait_output(queue_server, tmp_path, "r-1", end)
    assert (expected.returncode, expected.stdout) == (1, "")
    assert expected.stderr.endswith("there is no other result than that of before: somebody else took it\n")


async def test_result_with_time_and_id_swapped_gets_a_hint(queue_server: Server) -> None:
    expected = await run_verb(queue_server, "result", "--wait", "30s", "r-1")
    assert expected.returncode == 2
    assert expected.stderr.strip().endswith("the id goes first: result r-1 --wait 30s")
    assert "goes first" not in (await run_verb(queue_server, "result", "r-1", "--wait", "soon")).stderr


async def test_equal_states_of_one_id_are_named_once(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "twice")
        await submit_requests(queue, "first", "twice")
        assert "it is pending: " in (await run_verb(queue_server, "result", "twice")).stderr


async def test_empty_list_says_whether_a_dispatcher_works_on_the_queue(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        expected = await run_verb(queue_server, "list")
        none, nobody = expected.stderr.splitlines()
        assert (expected.returncode, none) == (0, f"{NAMES.queue}: none")
        assert nobody.startswith(
            f"no dispatcher works on {NAMES.queue}, none ever has: is the pool's name right"
        )
        await queue.sweep()
        assert (await run_verb(queue_server, "list")).stderr == f"{NAMES.queue}: none\n"


async def test_cancel_says_if_no_dispatcher_works_on_the_queue(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "mine", "other", job="a")
        for given in (("mine",), ("--label", "job=a")):
            expected = await run_verb(queue_server, "cancel", *given)
            assert expected.returncode == 0
            assert (
                "their results come when a dispatcher works on the queue: no dispatcher works on"
                in expected.stderr
            )
        await queue.sweep()
        assert (await run_verb(queue_server, "cancel", "other")).stderr == ""


async def test_request_that_is_being_cancelled_is_marked_until_it_is_answered(
    queue_server: Server,
) -> None:
    async with queues(queue_server.url, "owner-7", names=NAMES) as (queue,):
        await submit_requests(queue, "running", "waiting", "other")
        with queue_server.client() as client:
            client.set("request-cancel:other", "the-token-of-another")
        (lease,) = await claim_leases(queue, 1)
        assert (await run_verb(queue_server, "cancel", "running", "waiting")).returncode == 0
        listed = {
            line.split()[0]: line for line in (await run_verb(queue_server, "list")).stdout.splitlines()
        }
        assert listed["running"].endswith("is being cancelled, at owner-7")
        assert listed["waiting"].endswith("is being cancelled")
        assert "cancelled" not in listed["other"]
        assert {
            one["id"]: one["being_cancelled"] for one in await run_verb_for_json(queue_server, "list")
        } == {
            "running": True,
            "waiting": True,
            "other": False,
        }
        peeked = (await run_verb(queue_server, "list", "--next")).stdout.splitlines()
        assert [line.endswith("is being cancelled") for line in peeked[2:]] == [True, False]
        expected = (await run_verb(queue_server, "describe", "waiting")).stdout
        assert re.search(r"^  being cancelled +yes$", expected, re.MULTILINE)
        assert (
            "it is being cancelled, and answered CANCELLED when it is claimed; it is next in the queue; "
            "the gate: "
        ) in expected
        expected = (await run_verb(queue_server, "describe", "running")).stdout
        assert "it is being cancelled; it is with owner-7, whose lease runs out" in expected
        await settle_leases(queue, lease)
        assert "cancelled" not in (await run_verb(queue_server, "describe", "running")).stdout
        with queue_server.client() as client:
            client.set("request-cancel:other", "token-of-other")
        assert (await run_verb_for_json(queue_server, "describe", "other"))["requests"][0]["being_cancelled"]


async def test_progress_is_a_note_and_no_error_with_json(queue_server: Server) -> None:
    given = "submit", "{}", "--id", "mine", "--json"
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        asking = asyncio.create_task(asyncio.to_thread(start_verb, queue_server, *given))
        leases: Sequence[Lease] = ()
        for _ in range(600):
            if leases := await claim_leases(queue):
                break
            await asyncio.sleep(0.05)
        await settle_leases(queue, *leases)
        expected = await asking
    assert expected.returncode == 0
    first, *others = [json.loads(line) for line in expected.stderr.splitlines()]
    assert first == {"note": "mine submitted"}
    assert all(each.keys() == {"note"} for each in others)


async def test_result_in_another_list_is_mentioned(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "mine", results="batch-results:mine")
        assert "result --list batch-results:mine" in (await run_verb(queue_server, "result", "mine")).stderr
        await settle_leases(queue, *await claim_leases(queue))
    (line,) = (
        await run_verb(queue_server, "result", "--list", "batch-results:mine", "--json")
    ).stdout.splitlines()
    assert json.loads(line)["id"] == "mine"


async def test_list_shows_requests_with_their_location_in_queue_order(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await put_one_request_in_each_state(queue)
        first = (await claim_leases(queue, 1))[0]
        await queue.release([Release(first)])
    ids = {
        state: [each["id"] for each in (await run_verb_for_json(queue_server, "list", "--state", state))]
        for state in ("pending", "running", "delayed", "dead")
    }
    assert ids == {
        "pending": ["first", "second", "third"],
        "running": ["running"],
        "delayed": ["delayed"],
        "dead": ["dead"],
    }
    lines = (await run_verb(queue_server, "list")).stdout.splitlines()
    assert lines[0].split() == ["ID", "STATE", "DEADLINE", "ATTEMPTS", "NOTE"]
    assert [line.split()[0] for line in lines[1:]] == ["running", "first", "second", "third", "delayed"]
    some = await run_verb(queue_server, "list", "--state", "pending", "--most", "2")
    assert (len(some.stdout.splitlines()), some.stderr.strip()) == (3, "2 of 3; --most shows more")


async def test_list_next_shows_the_next_requests_and_the_gate(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "a", "b", "c")
        await queue.pause("ann", "upgrade")
    lines = (await run_verb(queue_server, "list", "--next", "-n", "2")).stdout.splitlines()
    assert lines[0] == "3 wait; the gate: the queue is paused by ann: upgrade"
    assert [line.split()[:2] for line in lines[2:]] == [["1", "a"], ["2", "b"]]
    found = await run_verb_for_json(queue_server, "list", "--next")
    assert (found["pending"], [each["queue_position"] for each in found["next"]]) == (3, [1, 2, 3])


async def test_cancel_accepts_ids_or_a_label(queue_server: Server) -> None:
    theirs = encode_member("theirs", b"{}", LATER, token="t", labels={"job": "a"})
    mute = encode_member("mute", b"{}", LATER, labels={"job": "b"})
    with queue_server.client() as client:
        client.zadd(NAMES.queue, {theirs: 1, mute: 2})
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "ours", job="a")
        await submit_requests(queue, "other", job="other")
        assert (await run_verb(queue_server, "cancel", "theirs")).stdout == "theirs is being cancelled\n"
        assert await queue.check_cancelled([("theirs", "t"), ("ours", "token-of-ours")]) == [True, False]
        assert (
            await run_verb(queue_server, "cancel", "--label", "job=a")
        ).stdout == "2 are being cancelled\n"
        wanted = [("ours", "token-of-ours"), ("other", "token-of-other")]
        assert await queue.check_cancelled(wanted) == [True, False]
    refused = await run_verb(queue_server, "cancel", "mute", "other")
    assert (refused.returncode, refused.stdout) == (1, "other is being cancelled\n")
    assert "mute: is pending, and carries no token" in refused.stderr
    assert (await run_verb_for_json(queue_server, "cancel", "nobody")) == {
        "cancelled": [],
        "not_cancelled": {
            "nobody": "neither in the queue nor running: it has ended, or the id is of another queue"
        },
    }


async def test_results_are_shown_and_taken_oldest_first(queue_server: Server) -> None:
    with queue_server.client() as client:
        for at in range(3):
            client.lpush(NAMES.result_list, encode_answer(f"r-{at}", 200, b"hi"))
        client.lpush(NAMES.result_list, b"\xffgarbage")
    lines = (await run_verb(queue_server, "result", "--all")).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "r-0", "r-1", "r-2", "(unreadable)"]
    claim_leases = (
        await run_verb(queue_server, "result", "--all", "--take", "--most", "2")
    ).stdout.splitlines()
    assert [json.loads(line)["id"] for line in claim_leases] == ["r-0", "r-1"]
    assert len((await run_verb(queue_server, "result", "--all", "--json")).stdout.splitlines()) == 2


async def test_dead_requests_are_selected_by_id_reason_and_age(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "a", "b", "c")
        for lease, reason in zip(
            await claim_leases(queue), ("CUDA out of memory", "status 500", "status 500"), strict=True
        ):
            await queue.move_to_dead_letters(
                [DeadLetter(Settlement(lease, b'{"id":"x","payload":""}', ""), reason)]
            )
    assert [each["id"] for each in (await run_verb_for_json(queue_server, "list", "--reason", "cuda"))] == [
        "a"
    ]
    assert (await run_verb_for_json(queue_server, "list", "--older", "1h")) == []
    row = (await run_verb(queue_server, "list", "--reason", "cuda")).stdout.splitlines()[1]
    assert re.search(r"^a +dead .* died .* ago: CUDA out of memory$", row)
    (shown,) = (await run_verb_for_json(queue_server, "describe", "a"))["requests"]
    assert shown["reason"] == "CUDA out of memory"
    assert (await run_verb_for_json(queue_server, "dead", "requeue", "a"))["requeued"] == 1
    given = await run_verb(queue_server, "dead", "purge", "--reason", "500")
    assert (given.returncode, "--yes" in given.stderr) == (2, True)
    purged = await run_verb(queue_server, "dead", "purge", "b", "--yes")
    assert (purged.stdout, purged.stderr) == ("1 forgotten, 1 dead left\n", "")
    others = await run_verb_for_json(queue_server, "dead", "purge", "--reason", "500", "--yes")
    assert others == {"purged": 1, "asked": 1, "dead": 0}
    empty = await run_verb(queue_server, "list", "--state", "dead")
    assert (empty.returncode, empty.stdout, "none" in empty.stderr) == (0, "", True)


async def test_number_selects_a_dead_request_by_entry_before_id(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "first")
        (first,) = await claim_leases(queue)
        await submit_requests(queue, str(first.entry_id), "77777")
        leases = [first, *await claim_leases(queue)]
        await queue.move_to_dead_letters(
            [DeadLetter(Settlement(lease, b"", ""), "it broke") for lease in leases]
        )
    one = await run_verb_for_json(queue_server, "dead", "purge", str(first.entry_id), "--yes")
    assert one == {"purged": 1, "asked": 1, "dead": 2}
    left = [each["id"] for each in await run_verb_for_json(queue_server, "list", "--state", "dead")]
    assert left == [str(first.entry_id), "77777"]
    for name in (*left, "9" * 5_000):
        purged = await run_verb(queue_server, "dead", "purge", name, "--yes")
        assert ("1 forgotten" in purged.stdout) == (name in left)
        assert (f"not among the dead: {name}" in purged.stderr) == (name not in left)


async def test_unreadable_dead_request_is_named_by_its_number(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.zadd(NAMES.queue, {b"no json": LATER})
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        (lease,) = await claim_leases(queue)
        await queue.move_to_dead_letters([DeadLetter(Settlement(lease, b"", ""), "it cannot be read")])
    number = str(lease.entry_id)
    row = (await run_verb(queue_server, "list", "--state", "dead")).stdout.splitlines()[1]
    assert row.startswith(f"(unreadable: {number})")
    (shown,) = (await run_verb_for_json(queue_server, "describe", number, "--full"))["requests"]
    assert (shown["member"], shown["reason"]) == ("no json", "it cannot be read")
    assert "1 forgotten" in (await run_verb(queue_server, "dead", "purge", number, "--yes")).stdout


@pytest.mark.parametrize("act", ["purge", "requeue"])
async def test_selection_without_a_dead_request_is_reported(queue_server: Server, act: str) -> None:
    yes = ["--yes"] if act == "purge" else []
    for named, words in (
        (["--all"], "no dead"),
        (["--reason", "CUDA"], "no dead request fits"),
        (["a", "b"], "not among the dead: a, b"),
        ([f"r-{n}" for n in range(9)], "not among the dead: r-0, r-1, r-2, r-3, r-4, …"),
    ):
        done = await run_verb(queue_server, "dead", act, *named, *yes)
        assert (done.stdout, done.stderr) == ("", f"{NAMES.queue}: {words}\n")


@pytest.mark.parametrize("tries", [1, 2])
async def test_attempts_of_a_dead_request_include_the_last_one(queue_server: Server, tries: int) -> None:
    """The last attempt is included; a text that only resembles such a reason does not count."""
    policy = RetryPolicy(max_attempts=tries)
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "r-1")
        (lease,) = await claim_leases(queue)
        for _ in range(tries - 1):
            await queue.release(
                [Release(lease, is_failed_attempt=True, last_attempt="the gateway answered 500")]
            )
            (lease,) = await claim_leases(queue)
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
        await submit_requests(queue, "waits")
        (lease,) = await claim_leases(queue)
        await queue.release(
            [Release(lease, is_failed_attempt=True, last_attempt=verdict.message.replace(str(tries), "9"))]
        )
        (page,) = await queue.list_newest_dead(9)
    assert page.failed_attempts == tries
    assert f"after {tries} attempt" in page.reason
    assert (await run_verb_for_json(queue_server, "describe", "r-1"))["requests"][0][
        "failed_attempts"
    ] == tries
    assert f" {tries} failed\n" in (await run_verb(queue_server, "describe", "r-1")).stdout
    assert f" {tries} failed " in (await run_verb(queue_server, "list", "--state", "dead")).stdout
    assert " 1 failed\n" in (await run_verb(queue_server, "describe", "waits")).stdout


async def move_to_dead_letters(queue: OwnerAndAdmin, *ids: str) -> None:
    await submit_requests(queue, *ids)
    await queue.move_to_dead_letters(
        [DeadLetter(Settlement(lease, b"", ""), "it broke") for lease in await claim_leases(queue)]
    )


@pytest.mark.parametrize(
    ("act", "done"),
    [
        (("purge", "--yes"), "1 forgotten, 1 dead left\n"),
        (("requeue",), "1 of 3 are pending again; a second result may come for each\n"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
async def test_named_dead_requests_that_do_not_exist_are_listed(
    queue_server: Server, act: tuple[str, ...], done: str
) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await move_to_dead_letters(queue, "a", "b")
    expected = await run_verb(queue_server, "dead", *act, "a", "z", "y")
    assert expected == VerbOutput(1, done, f"{NAMES.queue}: not among the dead: y, z\n")


async def test_number_of_remaining_dead_requests_is_shown_if_none_is_purged(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await move_to_dead_letters(queue, "a", "b")
    for named, words in (
        (["--reason", "CUDA"], "no dead request fits"),
        (["z"], "not among the dead: z"),
    ):
        expected = await run_verb(queue_server, "dead", "purge", *named, "--yes")
        assert expected == VerbOutput(1, "", f"{NAMES.queue}: {words}; 2 dead left\n")
    nothing = {"purged": 0, "asked": 1, "dead": 2}
    assert await run_verb_for_json(queue_server, "dead", "purge", "z", "--yes") == nothing


async def test_all_of_an_empty_dead_letter_set_is_no_failure(queue_server: Server) -> None:
    for given in (("requeue",), ("purge", "--yes")):
        expected = await run_verb(queue_server, "dead", *given, "--all")
        assert expected == VerbOutput(0, "", f"{NAMES.queue}: no dead\n")


async def test_unreadable_request_stays_dead_and_is_counted(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await queue.submit([Submission(b"{", float(LATER), "", "", LATER)])
        (lease,) = await claim_leases(queue)
        await queue.move_to_dead_letters([DeadLetter(Settlement(lease, b"", ""), "unreadable")])
    expected = await run_verb(queue_server, "dead", "requeue", "--all")
    why = "1 was not accepted: unreadable, or not dead any more"
    assert expected == VerbOutput(1, "", f"{NAMES.queue}: {why}\n")


async def test_request_that_ends_before_the_confirmation_is_not_reported_as_purged(
    queue_server: Server,
) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "dispatcher", "dead", "purge", "--all", "--queue-url", queue_server.url]
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await move_to_dead_letters(queue, "a", "b")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        os.close(theirs)
        try:
            assert process.stderr is not None
            given = await asyncio.wait_for(process.stderr.readuntil(b"[y/N]:"), STARTS_S)
            assert given.startswith(f"Forget 2 dead requests of {NAMES.queue} for good?".encode())
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


async def test_key_that_is_no_list_contains_no_results(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.set("celery", "x")
    for options in ((), ("--take",), ("--json",)):
        done = await run_verb(queue_server, "result", "--list", "celery", *options)
        assert (done.returncode, done.stdout) == (1, "")
        assert "celery is no result list" in done.stderr
    empty = await run_verb(queue_server, "result", "--list", "nothing")
    assert (empty.returncode, empty.stderr) == (0, "nothing is empty\n")


async def test_dead_request_of_a_client_is_answered_under_its_id(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "left", results="batch-results:0123456789abcdef")
        (lease,) = await claim_leases(queue)
        await queue.move_to_dead_letters([DeadLetter(Settlement(lease, b"", ""), "it broke")])
        assert (
            "`batch-dispatcher result ID`" in (await run_verb(queue_server, "dead", "requeue", "left")).stdout
        )
        await settle_leases(queue, *await claim_leases(queue))
    assert (await run_verb(queue_server, "result", "left")).stdout == '{"text": "hello"}\n'


async def test_paused_queue_is_copied_once_even_if_the_copy_is_repeated(
    queue_server: Server, tmp_path: Path
) -> None:
    async def copied(far: Server, *more: str) -> VerbOutput:
        given = ["queue", "copy", "--from", queue_server.url, "--to", far.url, "--pool", "default", *more]
        found = await asyncio.to_thread(CliRunner().invoke, app, given)
        return VerbOutput(found.exit_code, found.stdout, found.stderr)

    with server(ENGINES[-1], tmp_path) as far:
        async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
            await put_one_request_in_each_state(queue)
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
            await settle_leases(queue, *await claim_leases(queue, 1))
            summary = json.loads((await copied(far, "--json")).stdout)
            assert (summary["copied"], summary["left_leased"], summary["found"]["pending"]) == (0, 1, 3)
            counts = await queue.count_requests()
            assert (counts.pending, counts.delayed, counts.dead) == (2, 1, 1)
        assert (await run_verb(far, "describe", "third")).returncode == 0
        down = await asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["queue", "copy", "--from", queue_server.url, "--to", NOWHERE[1], "--pool", "x"],
        )
        assert (down.exit_code, down.stdout) == (1, "")


async def test_submit_prints_its_id_at_once_and_a_hint_when_interrupted(
    queue_server: Server, tmp_path: Path
) -> None:
    expected = tmp_path / "said"
    with (
        expected.open("wb") as stderr,
        forked_process(
            "dispatcher", "submit", '{"a": 1}', "--id", "mine", "--queue-url", queue_server.url, stderr=stderr
        ) as submitting,
    ):
        await wait_until(
            lambda: (
                "mine submitted\nwaiting: no dispatcher works on batch:{default}:requests"
                in expected.read_text()
            ),
            STARTS_S,
        )
        submitting.send_signal(signal.SIGINT)
        await wait_until(lambda: submitting.poll() is not None)
    assert submitting.returncode == 130
    *_, last = expected.read_text().splitlines()
    assert last == "mine is still queued: batch-dispatcher result mine --wait, or cancel mine"
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await settle_leases(queue, *await claim_leases(queue))
    assert (await run_verb(queue_server, "result", "mine")).stdout == '{"text": "hello"}\n'


async def test_gate_of_the_dispatcher_is_shown_if_one_answers(queue_server: Server, tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "reason": "gateway-unreachable",
        "explanation": "Nothing is sent: gateway-unreachable, no connection.",
        "queue": NAMES.queue,
    }

    async def status(_: web.Request) -> web.Response:
        return web.json_response(document)

    async def ask(*arguments: str, port: int) -> VerbOutput:
        config.write_text(
            f"gateway: {{url: http://gw}}\nqueue: {{url: {queue_server.url}}}\n"
            f"admin: {{host: 127.0.0.1, port: {port}}}\n"
        )
        found = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--config", str(config)])
        return VerbOutput(found.exit_code, found.stdout, found.stderr)

    config = tmp_path / "config.yaml"
    application = web.Application()
    application.router.add_get("/status", status)
    async with (
        queues(queue_server.url, "owner", names=NAMES) as (queue,),
        TestServer(application) as answering,
    ):
        await submit_requests(queue, "r-1", results=NAMES.result_list_for_id("r-1"))
        port = answering.port or 0
        for verb_ in (("describe", "r-1"), ("list", "--next")):
            found = await ask(*verb_, port=port)
            assert "the gate: Nothing is sent: gateway-unreachable, no connection." in found.stdout
        wait_output = await ask("result", "r-1", "--wait", "2.1s", port=port)
        assert wait_output.stderr.startswith(
            "waiting: Nothing is sent: gateway-unreachable, no connection.\n"
        )
        document |= {"open": True, "reason": "full", "explanation": "16 in flight fill the limit."}
        found = await ask("list", "--next", port=port)
        assert "the gate: full: 16 in flight fill the limit." in found.stdout
        document["queue"] = "another"
        found = await ask("list", "--next", port=port)
        assert "the gate: the dispatcher that answers works on another queue, another" in found.stdout
        found = await ask("describe", "r-1", port=1)
        assert "no dispatcher answers: nothing listens on admin.port 1" in found.stdout
        elsewhere = await ask("submit", "{}", "--path", "/v2/x", port=1)
        assert (elsewhere.returncode, "gateway.allowed_paths" in elsewhere.stderr) == (2, True)


async def test_submit_accepts_no_result_without_its_token(queue_server: Server) -> None:
    with queue_server.client() as client:
        client.lpush(NAMES.result_list_for_id("mine"), encode_answer("mine", 200, b"forged"))
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        asking = asyncio.create_task(
            asyncio.to_thread(start_verb, queue_server, "submit", "{}", "--id", "mine")
        )
        leases = await wait_until(lambda: claim_leases(queue, 1), STARTS_S)
        await settle_leases(queue, *leases)
        assert (await asking).stdout == '{"text": "hello"}\n'


async def test_request_submitted_without_slicing_is_marked(queue_server: Server) -> None:
    for name, options in (("sliced", ()), ("whole", ("--no-slicing",))):
        sent = await run_verb(queue_server, "submit", "{}", "--id", name, "--no-wait", *options)
        assert sent.returncode == 0
    described = (await run_verb(queue_server, "describe", "whole")).stdout
    assert re.search(r"^ *slicing +off: it is sent in one call$", described, re.MULTILINE)
    assert "slicing" not in (await run_verb(queue_server, "describe", "sliced")).stdout


async def test_partial_answer_is_printed_with_its_error(queue_server: Server) -> None:
    partial = b'{"choices": [{"text": "once upon"}]}'
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "late", "long")
        late, long = await claim_leases(queue)
        failure = encode_failure("late", ErrorCode.DEADLINE_EXCEEDED, "", token="token-of-late")
        ended = add_partial_answer(failure, partial)
        fields = {"slices": 5, "cached_tokens": 700}
        answered = encode_answer("long", 200, b"{}", fields, token="token-of-long")
        await queue.settle(
            [
                Settlement(late, ended, "", "late", "token-of-late"),
                Settlement(long, answered, "", "long", "token-of-long"),
            ]
        )
    printed = await run_verb(queue_server, "result", "late")
    assert (printed.returncode, printed.stdout) == (1, partial.decode() + "\n")
    assert printed.stderr == (
        "late: DEADLINE_EXCEEDED; the printed answer is what was generated until then\n"
    )
    fields = await run_verb_for_json(queue_server, "result", "long")
    assert (fields["slices"], fields["cached_tokens"], fields["partial"]) == (5, 700, False)
    described = [(await run_verb(queue_server, "describe", name)).stdout for name in ("late", "long")]
    assert described[0].startswith(
        "late: answered, no answer of the gateway, DEADLINE_EXCEEDED; a part of the answer was generated\n"
    )
    assert described[1].startswith("long: answered, status 200, generated in 5 slices\n")


async def test_line_of_a_batch_file_is_rejected_as_payload(queue_server: Server) -> None:
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
    found = await run_verb(queue_server, "submit", line)
    assert (found.returncode, "submit --file" in found.stderr) == (2, True)


async def test_requests_of_a_batch_file_are_cancelled_by_its_label(
    queue_server: Server, tmp_path: Path
) -> None:
    line = '{{"custom_id": "{}", "method": "POST", "url": "/v1/completions", "body": {{"model": "m"}}}}\n'
    (tmp_path / "in.jsonl").write_text("".join(line.format(number) for number in range(5)))
    paths = "--file", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")
    url = "--queue-url", queue_server.url
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "other", job="other")
        with forked_process("dispatcher", "submit", *paths, "--label", "job=nightly", *url) as submitting:

            async def listed() -> Any:
                return await run_verb_for_json(queue_server, "list", "--label", "job=nightly")

            await wait_until(lambda: _wait_for_count(listed, 5), STARTS_S)
            (shown, *_) = await listed()
            assert {"job", "file"} == shown["labels"].keys()
            done = await run_verb(queue_server, "cancel", "--label", "job=nightly")
            assert (done.returncode, done.stdout) == (0, "5 are being cancelled\n")
            submitting.send_signal(signal.SIGINT)
            await wait_until(lambda: submitting.poll() is not None, STARTS_S)
        wanted = []
        for lease in await claim_leases(queue):
            read = parse_member(lease.member)
            wanted.append((read.id or "", read.token))
        cancelled = dict(zip(wanted, await queue.check_cancelled(wanted), strict=True))
        assert {name: gone for (name, _), gone in cancelled.items() if not gone} == {"other": False}
        assert len(cancelled) == 6


async def _wait_for_count(look: Callable[[], Awaitable[Any]], count: int) -> bool:
    return len(await look()) == count


async def test_unknown_default_queue_lists_the_existing_queues(queue_server: Server) -> None:
    """Each queue is listed with the option that selects it on standard error, and the verb continues."""
    with queue_server.client() as client:
        client.zadd("batch:{qwen}:requests", {"x": 1})
        client.hset("{mine}:control", "next", "1")
        client.set("session:{7}", "of another program")
    expected = (
        "batch:{default}:requests is not there, but others are: name yours by --pool qwen, --queue mine\n"
    )
    for given in (("list",), ("status",), ("explain",)):
        found = await run_verb(queue_server, *given)
        assert (found.returncode, expected in found.stderr) == (0, True), found
    for named in (("--pool", "other"), ("--queue", "batch:{default}:requests")):
        assert "others are" not in (await run_verb(queue_server, "list", *named)).stderr
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "a")
    assert (await run_verb(queue_server, "list")).stderr == ""


async def test_waiting_shows_the_missing_dispatcher_and_the_state_of_the_request(
    queue_server: Server,
) -> None:
    """A misspelled pool name selects a queue that no dispatcher serves; a failing model is no closed gate."""

    async def wait_output() -> str:
        return (await run_verb(queue_server, "result", "r-1", "--wait", "2.1s")).stderr.splitlines()[0]

    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "r-1", results=NAMES.result_list_for_id("r-1"))
        assert await wait_output() == (
            "waiting: no dispatcher works on batch:{default}:requests, none ever has: "
            "is the pool's name right, does one run (without --observe)?"
        )
        await queue.sweep()
        assert await wait_output() == "waiting: pending, it is next in the queue"
        (lease,) = await claim_leases(queue, 1)
        assert await wait_output() == "waiting: a dispatcher has sent it, the answer is not there yet"
        await queue.release(
            [Release(lease, 60.0, is_failed_attempt=True, last_attempt="the gateway answered 503")]
        )
        assert (await wait_output()).startswith("waiting: its next attempt, due in ")
        assert (await wait_output()).endswith("after 1 failed, the last: the gateway answered 503")
        (shown,) = (await run_verb_for_json(queue_server, "describe", "r-1"))["requests"]
        assert (shown["reason"], shown["last_attempt"]) == (None, "the gateway answered 503")
        described = (await run_verb(queue_server, "describe", "r-1")).stdout
        assert re.search(r"^ *last attempt +the gateway answered 503$", described, re.MULTILINE)


async def test_started_request_is_listed_before_others_of_its_priority(queue_server: Server) -> None:
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await submit_requests(queue, "r-0", "r-1")
        first, second = await claim_leases(queue, 2)
        await queue.release([Release(first), Release(second, progress=b"part 1")])
        (shown,) = (await run_verb_for_json(queue_server, "describe", "r-1"))["requests"]
        assert (shown["state"], shown["queue_position"]) == ("started", 1)
        assert shown["why"].startswith(
            "a part of its answer was generated, so it goes before all others of its priority; "
            "it is next in the queue; the gate: "
        )
        wait_output = await run_verb(queue_server, "result", "r-1", "--wait", "2100ms")
        assert wait_output.stderr.splitlines()[0] == (
            "waiting: its next slice: a part of its answer was generated"
        )
        listed = (await run_verb(queue_server, "list", "--state", "pending")).stdout
        assert "was started, waits for its next slice" in listed
        assert listed.index("r-1") < listed.index("r-0")
        peeked = (await run_verb(queue_server, "list", "--next")).stdout
        assert peeked.index("r-1") < peeked.index("r-0")
