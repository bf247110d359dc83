"""Verbs that show, release and abort sequences."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.features.sequences.decisions import (
    SequenceOverride,
    SequenceTerms,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.queue.contract import DeadLetter, Lease, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member, parse_member
from dispatcher.requests.submission import Submission
from tests.queue.factories import OwnerAndAdmin, claim, queues
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
LATER = int(time.time()) + 86_400
TERMS = SequenceTerms(on_error=OnError.HOLD)


@dataclass(frozen=True, slots=True)
class VerbOutput:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("sequences")) as running:
        yield running


@pytest.fixture
async def queue(queue_server: Server) -> AsyncIterator[OwnerAndAdmin]:
    with queue_server.client() as client:
        client.flushall()
    async with queues(queue_server.url, "owner", names=NAMES) as (made,):
        yield made


async def run_verb(queue_server: Server, *arguments: str) -> VerbOutput:
    asked = [*arguments, "--queue-url", queue_server.url]
    found = await asyncio.to_thread(CliRunner().invoke, app, asked)
    return VerbOutput(found.exit_code, found.stdout, found.stderr)


async def submit_and_claim(queue: OwnerAndAdmin, *indexes: int) -> list[Lease]:
    """Submit `chat-<index>`, claim the requests and check their turns. Return the leases."""
    for index in indexes:
        name, turn = f"chat-{index}", Turn("chat", index)
        member = encode_member(name, b"{}", LATER, token=f"token-of-{name}", extra=turn)
        await queue.submit([Submission(member, LATER, name, f"token-of-{name}", LATER)])
    leases = list((await claim(queue)).leases)
    turns = [(lease, Turn("chat", index)) for lease, index in zip(leases, indexes, strict=True)]
    await queue.claim_turns(turns, TERMS)
    return leases


async def test_request_that_waits_for_its_turn_is_shown_with_its_predecessor(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    await submit_and_claim(queue, 0, 1)
    described = await run_verb(queue_server, "describe", "chat-1")
    assert "it waits for its turn in the sequence chat, where it has index 1, behind chat-0" in described.out
    shown = json.loads((await run_verb(queue_server, "describe", "chat-1", "--json")).out)["requests"][0]
    assert (shown["state"], shown["sequence"]) == ("sequenced", "chat")
    assert "waits for its turn in chat" in (await run_verb(queue_server, "list")).out
    assert "chat-1" not in (await run_verb(queue_server, "list", "--next")).out, (
        "it cannot be claimed before its turn"
    )


async def test_sequence_with_a_missing_index_is_shown(queue_server: Server, queue: OwnerAndAdmin) -> None:
    await submit_and_claim(queue, 2)
    assert "index 0 is missing for" in (await run_verb(queue_server, "describe", "chat-2")).out
    assert "index 0 is missing for" in (await run_verb(queue_server, "sequences", "show")).out


async def test_parked_sequence_is_shown(queue_server: Server, queue: OwnerAndAdmin) -> None:
    await submit_and_claim(queue, 0)
    await queue.submit([Submission(encode_member("late", b"{}", LATER, extra=Turn("late", 0)), LATER)])
    leases = (await claim(queue)).leases
    await queue.claim_turns([(leases[0], Turn("late", 0))], replace(TERMS, max_active=1))
    output = (await run_verb(queue_server, "describe", "late")).out
    assert "parked: it begins when one of the sequences.max_active that are alive has ended" in output


async def test_sequence_that_waits_for_others_of_its_model_is_shown(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    terms = replace(TERMS, overrides=(SequenceOverride("big-*", max_active=1),))
    turns = [Turn(name, 0, override="big-*") for name in ("first", "second")]
    await queue.submit(
        [Submission(encode_member(turn.id, b"{}", LATER, extra=turn), LATER) for turn in turns]
    )
    await queue.claim_turns(list(zip((await claim(queue)).leases, turns, strict=True)), terms)
    described = (await run_verb(queue_server, "describe", "second")).out
    assert "one of the sequences.max_active, or of the max_active for big-*, that are alive" in described
    assert (
        "those of big-* in sequences.models"
        in (await run_verb(queue_server, "sequences", "show", "second")).out
    )


async def test_held_sequence_is_shown_with_its_cause_and_released(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    first, _ = await submit_and_claim(queue, 0, 1)
    end = TurnEnd(Turn("chat", 0), has_failed=True, cause="chat-0: out of memory")
    await queue.settle([Settlement(first, b'{"id":"chat-0","payload":""}', "", extra=end)])
    shown = await run_verb(queue_server, "sequences", "show", "chat")
    assert ("held" in shown.out, "chat-0: out of memory" in shown.out) == (True, True)
    assert "1: chat-1, entry 2" in shown.out
    held = "that is held until an operator releases or aborts it: chat-0: out of memory"
    assert held in (await run_verb(queue_server, "describe", "chat-1")).out
    assert "chat" in (await run_verb(queue_server, "sequences", "show", "--status", "held")).out
    assert (
        "no sequence is open" in (await run_verb(queue_server, "sequences", "show", "--status", "open")).err
    )
    assert await run_verb(queue_server, "sequences", "release", "chat") == VerbOutput(0, "chat goes on\n", "")
    assert await run_verb(queue_server, "sequences", "release", "chat") == VerbOutput(
        1, "", "chat is not held\n"
    )
    (lease,) = (await claim(queue)).leases
    assert b"chat-1" in lease.member


async def test_requests_of_an_aborted_sequence_are_answered_with_the_given_reason(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    await submit_and_claim(queue, 0, 1)
    output = await run_verb(queue_server, "sequences", "abort", "chat", "--why", "wrong model")
    assert output == VerbOutput(0, "chat is aborted\n", "")
    (one,) = await queue.find_remaining_requests(10)
    assert (one.error_code, one.message) == ("SEQUENCE_ABORTED", "wrong model")
    assert (await run_verb(queue_server, "sequences", "abort", "chat")).code == 1


async def test_sequence_is_forgotten_only_if_no_request_runs_or_waits(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    first, *_ = await submit_and_claim(queue, 0, 1, 2)
    output = await run_verb(queue_server, "sequences", "forget", "chat")
    why = "is not forgotten: one runs and 2 wait; `cancel --sequence chat` ends that"
    assert output == VerbOutput(1, "", f"chat {why}\n")
    output = await run_verb(queue_server, "sequences", "forget", "chat", "--json")
    assert (output.code, json.loads(output.out)) == (1, {"id": "chat", "forgotten": False, "why": why})
    await run_verb(queue_server, "sequences", "abort", "chat")
    output = await run_verb(queue_server, "sequences", "forget", "chat")
    assert output.err == "chat is not forgotten: one runs; it can be when that has ended\n"
    await queue.settle([Settlement(first, b'{"id":"chat-0","payload":""}', "")])
    assert await run_verb(queue_server, "sequences", "forget", "chat") == VerbOutput(
        0, "chat is forgotten\n", ""
    )
    assert await run_verb(queue_server, "sequences", "forget", "chat") == VerbOutput(
        1, "", "chat is not known (any more)\n"
    )


async def test_sequence_is_cancelled_with_its_running_requests(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    await submit_and_claim(queue, 0, 1, 2)
    output = await run_verb(queue_server, "cancel", "--sequence", "chat")
    more = "its requests that are not claimed yet are cancelled when a dispatcher claims them\n"
    assert output == VerbOutput(0, "chat is being cancelled, with 3 requests so far\n", more)
    assert await queue.check_cancelled([("chat-0", "token-of-chat-0")]) == [True]
    assert [one.error_code for one in await queue.find_remaining_requests(10)] == ["CANCELLED"] * 2


async def test_sequence_is_cancelled_before_its_first_claim(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    earlier = encode_member("early", b"{}", LATER, created=LATER - 2 * 86_400, extra=Turn("chat", 0))
    await queue.submit([Submission(earlier, LATER, "early", "", LATER)])
    output = await run_verb(queue_server, "cancel", "--sequence", "chat", "--json")
    assert (output.code, json.loads(output.out)) == (
        0,
        {"sequence": "chat", "cancelled": True, "requests": 0},
    )
    later = encode_member("later", b"{}", LATER, created=LATER, extra=Turn("chat", 0))
    await queue.submit([Submission(later, LATER, "later", "", LATER)])
    turns = [(lease, parse_member(lease.member).extra) for lease in (await claim(queue)).leases]
    verdicts = (await queue.claim_turns([(lease, turn) for lease, turn in turns if turn], TERMS)).decisions
    assert [getattr(one, "code", "goes") for one in verdicts] == ["CANCELLED", "goes"]


async def test_sequence_is_aborted_before_its_first_claim(queue_server: Server, queue: OwnerAndAdmin) -> None:
    output = await run_verb(queue_server, "sequences", "abort", "chat", "--why", "wrong model")
    assert output == VerbOutput(0, "chat is aborted\n", "")
    assert "wrong model" in (await run_verb(queue_server, "sequences", "show", "chat")).out
    leases = await submit_and_claim(queue, 0)
    (verdict,) = (await queue.claim_turns([(leases[0], Turn("chat", 0))], TERMS)).decisions
    assert getattr(verdict, "code", "") == "SEQUENCE_ABORTED"
    again = await run_verb(queue_server, "sequences", "abort", "chat")
    assert again == VerbOutput(1, "", "chat is over already\n")


async def test_secret_of_a_sequence_is_never_shown(queue_server: Server, queue: OwnerAndAdmin) -> None:
    sent = await run_verb(queue_server, "submit", "{}", "--sequence", "chat", "--id", "r-1", "--no-wait")
    assert sent.code == 0
    secret = await queue.get_or_create_sequence_secret()
    output = await run_verb(queue_server, "list", "--json")
    (lease,) = (await claim(queue)).leases
    assert secret.encode() in lease.member
    turn = parse_member(lease.member).extra
    assert turn is not None
    await queue.claim_turns([(lease, turn)], TERMS)
    shown = [
        sent,
        output,
        *[
            await run_verb(queue_server, *words, *more)
            for words in (("describe", "r-1"), ("sequences", "show", "chat"), ("sequences", "show"))
            for more in ((), ("--json",))
        ],
    ]
    await queue.move_to_dead_letters([DeadLetter(Settlement(lease, b"", ""), "why")])
    shown += [await run_verb(queue_server, "list", "--state", "dead", *more) for more in ((), ("--json",))]
    assert all(each.code == 0 for each in shown)
    assert not [each for each in shown if secret in each.out + each.err or turn.owner in each.out + each.err]


async def test_requests_submitted_separately_join_one_sequence(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    """Each request has its own result list, which is found by the id."""
    for _ in range(2):
        sent = await run_verb(queue_server, "submit", "{}", "--sequence", "chat", "--no-wait")
        assert sent.code == 0
    turns = [parse_member(lease.member).extra for lease in (await claim(queue)).leases]
    assert len({turn.owner for turn in turns if turn is not None}) == 1
    assert None not in turns


async def test_single_request_joins_a_sequence(queue_server: Server, queue: OwnerAndAdmin) -> None:
    sent = await run_verb(queue_server, "submit", "{}", "--sequence", "chat", "--no-wait")
    assert sent.code == 0
    (lease,) = (await claim(queue)).leases
    assert b'"sequence":{"id":"chat","secret":"' in lease.member
    refused = await run_verb(queue_server, "submit", "{}", "--sequence", "x" * 300, "--no-wait")
    assert (refused.code, "data.sequence.id" in refused.err) == (2, True)


async def test_truncated_list_of_sequences_is_marked(queue_server: Server, queue: OwnerAndAdmin) -> None:
    for name in ("a", "b", "c"):
        member = encode_member(name, b"{}", LATER, extra=Turn(name, 0))
        await queue.submit([Submission(member, LATER, name, "", LATER)])
    leases = (await claim(queue)).leases
    await queue.claim_turns([(lease, Turn(name)) for lease, name in zip(leases, "abc", strict=True)], TERMS)
    output = await run_verb(queue_server, "sequences", "show", "-n", "2")
    assert (len(output.out.splitlines()), "there are more" in output.err) == (3, True)
