"""docs/reference/queue-contract.md is correct: its examples run, and its keys and scripts exist."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
import redis.asyncio
from redis.crc import key_slot

from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.models.registry import PinRequest
from dispatcher.features.sequences.decisions import (
    SequenceTerms,
)
from dispatcher.features.sequences.queue.secret import get_secret_key
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import Turn
from dispatcher.queue.constants import LUA_CONSTANTS
from dispatcher.queue.contract import DeadLetter, Release
from dispatcher.queue.keys import (
    POOL_KEYS,
    SCRIPT_KEYS,
    QueueNameError,
    QueueNames,
    parse_queue_name,
)
from dispatcher.queue.lua_files import FEATURE_POOL_KEYS, TEXTS, parse_header, split_list
from dispatcher.queue.redis.owner import RedisQueue
from tests.paths import DOCS
from tests.queue.factories import OwnerAndAdmin, answer, claim, claim_one, queues, submission
from tests.queue.servers import Server
from tests.support import require_tool

PAGE = (DOCS / "reference" / "queue-contract.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
HEADERS = {name: parse_header(text) for name, text in TEXTS.items()}
FRAGMENTS = {name for header in HEADERS.values() for name in split_list(header.get("Uses", ""))}
FRAGMENTS |= {name for name, header in HEADERS.items() if {"Feature", "Hooks"} & header.keys()}
QWEN = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")


@pytest.fixture
async def queue(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a", names=QWEN) as (one,):
        yield one


def shell(example: str, server: Server, token: str = "") -> str:
    """Run an example of the page with redis-cli pointed at this server."""
    pointed = f'token={token}; redis-cli() {{ command {require_tool("redis-cli")} -p {server.port} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euc", pointed + EXAMPLES[example]], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


async def test_shell_examples_submit_cancel_and_read_a_result(queue: RedisQueue, any_server: Server) -> None:
    output = shell("submit", any_server)
    assert "ERR" not in output
    lease = await claim_one(queue)
    data = msgspec.json.decode(lease.member)
    token = data["internal"]["request_token"]
    assert (data["data"]["id"], lease.score) == ("r-1", data["data"]["deadline"])
    assert await queue.check_cancelled([("r-1", token)]) == [False]
    shell("cancel", any_server, token)
    assert await queue.check_cancelled([("r-1", token), ("r-1", "another")]) == [True, False]
    await queue.settle([answer(lease, token=token)])
    listed, result = shell("result", any_server).splitlines()
    assert listed == QWEN.result_list
    assert msgspec.json.decode(result) == {"id": "r-1", "status_code": 200, "payload": "ok"}


async def test_python_example_runs(any_server: Server, client: redis.asyncio.Redis) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", EXAMPLES["python"]],
        env={**os.environ, "QUEUE_URL": any_server.url},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "1 new",
        "True",
        "QueueCounts(pending=1, leased=0, delayed=0, dead=0)",
    ]


def test_every_example_is_executed() -> None:
    assert set(EXAMPLES) == {"submit", "result", "cancel", "python"}


async def test_documented_keys_are_the_existing_keys(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """Create every kind of key, and compare names and types with the table."""
    rows = re.findall(r"^\| `(<[^`]+)` \| (\w+) \|", PAGE, re.MULTILINE)
    names = {"<queue>": QWEN.queue, "<prefix>": QWEN.queue_prefix, "<pool>": QWEN.pool_prefix}
    listed = {re.sub("<(?:queue|prefix|pool)>", lambda of: names[of[0]], key): kind for key, kind in rows}
    own = {key: kind for key, kind in listed.items() if "<" not in key}
    assert set(own) == {
        *QWEN.script_keys,
        *QWEN.feature_pool_keys,
        get_secret_key(QWEN),
        QWEN.identities_key,
    }
    passing = [
        key.partition("<")[0] for key in listed if key.startswith(f"{QWEN.queue_prefix}:") and "<" in key
    ]
    cancels = {f"{QWEN.queue_prefix}:cancel:", f"{QWEN.queue_prefix}:sequences:cancelled:"}
    assert set(passing) == {
        QWEN.reply_key(""),
        QWEN.active_key(""),
        f"{QWEN.queue_prefix}:streams:",
        *cancels,
    }

    await queue.submit([submission(f"r-{number}", token="t") for number in range(9)])
    assert await queue.cancel_request("r-7", "t")
    leases = (await claim(queue, 7)).leases
    await create_sequences_of_every_kind(queue)
    await queue.get_or_create_sequence_secret()
    await queue.share_pool_identity(b"east", 30.0)
    await queue.cancel_sequence("z")
    await queue.release([Release(leases[0]), Release(leases[1], delay_s=60)])
    await queue.move_to_dead_letters([DeadLetter(answer(leases[2]), "why")])
    await client.zadd(f"{QWEN.queue_prefix}:leases", {f"{leases[3].entry_id}:a": 0}, xx=True)
    for _ in range(2):  # its owner dies twice, so it is a suspect
        assert (await queue.sweep()).reclaimed_count == 1
        last = next(one for one in (await claim(queue, 2)).leases if one.entry_id == leases[3].entry_id)
        await client.zadd(f"{QWEN.queue_prefix}:leases", {f"{last.entry_id}:a": 0}, xx=True)
    await queue.sweep()
    await queue.release([Release(leases[4]), Release(leases[5], extra=ModelWait("m"))])
    await queue.release([Release(leases[6], progress=b"part 1")])
    await queue.submit([submission("waits")])
    await queue.pause("me", "why")
    await queue.mark_warm("qwen-v1", "10.0.0.1:8000")
    await queue.take_warm_up_lock("qwen-v2", "10.0.0.1:8000")
    await queue.refresh_warm_markers((), (), ["qwen-v1"])
    await queue.pin_versions([PinRequest("chat-7", "qwen-v1", (), 100)])
    await queue.set_label("qwen", "stable", "1", "me")
    await queue.drain_version("qwen-v0", "me")
    seen = {key.decode(): cast("bytes", await client.type(key)).decode() async for key in client.scan_iter()}
    expected = {
        key: kind for key, kind in own.items() if key != QWEN.outbox_key
    }  # exists on a Cluster only, and is tested there
    assert {key: kind for key, kind in seen.items() if key in own} == expected
    for key in seen.keys() - own.keys() - {QWEN.result_list}:
        assert key.startswith(tuple(passing)), key
        assert await client.ttl(key) > 0, key


async def create_sequences_of_every_kind(queue: OwnerAndAdmin) -> None:
    """Create a sequence with a conversation, one with a closed run, and a parked one."""
    await queue.submit([submission(f"s-{number}", 1_000_000_000) for number in range(5)])
    leases = (await claim(queue, 5)).leases
    terms = SequenceTerms(max_active=2)
    a, b, c = Turn("a"), Turn("b"), Turn("c")
    await queue.claim_turns([(leases[0], a), (leases[1], b), (leases[2], b), (leases[3], b)], terms)
    end = TurnEnd(a, sticky_token="t", conversation=b"so far")
    await queue.settle([answer(leases[0]).copy_with(extra=end)])
    await queue.abort_sequence("b", "why")
    (again,) = (await claim(queue, 1)).leases
    await queue.claim_turns([(leases[4], c), (again, Turn("d"))], terms)


@pytest.mark.parametrize("script", sorted(TEXTS.keys() - FRAGMENTS))
def test_every_script_is_on_the_page_and_states_its_guarantees(script: str) -> None:
    assert f"`{script}`" in PAGE.partition("## Steps")[2]
    head = re.match(r"(?:--[^\n]*\n)+", TEXTS[script])
    assert head is not None
    for part in ("-- Keys: ", "-- Returns ", "-- Guarantees: "):
        assert part in head[0], f"{script}: its head lacks {part!r}"


@pytest.mark.parametrize("script", sorted(TEXTS))
def test_shared_constants_are_defined_in_python_only(script: str) -> None:
    locals_ = re.findall(r"^local ([A-Z_, ]+) =", TEXTS[script], re.MULTILINE)
    named = {name.strip() for names in locals_ for name in names.split(",")}
    assert named & {*LUA_CONSTANTS, *SCRIPT_KEYS, *FEATURE_POOL_KEYS, "KEY_TYPES"} == set()


@pytest.mark.parametrize(
    ("queue", "prefix"),
    [
        ("batch:{qwen}:requests", "batch:{qwen}:requests"),
        ("requests", "{requests}"),
        ("{tag}", "{tag}"),
    ],
)
def test_all_keys_share_the_slot_of_the_queue(queue: str, prefix: str) -> None:
    names = QueueNames(queue, "results")
    assert names.queue_prefix == prefix
    assert {
        key_slot(key.encode()) for key in (*names.script_keys, *names.feature_pool_keys, names.reply_key("x"))
    } == {key_slot(queue.encode())}


def test_queues_of_a_pool_share_only_the_keys_of_the_pool() -> None:
    urgent = QueueNames("batch:{qwen}:urgent", QWEN.result_list, pool=QWEN.queue)
    shared = set(urgent.script_keys) & set(QWEN.script_keys)
    assert shared == {f"{QWEN.queue_prefix}:{suffix}" for suffix, _ in POOL_KEYS.values()}
    assert {key_slot(key.encode()) for key in urgent.script_keys} == {key_slot(QWEN.queue.encode())}
    assert urgent.paused_key == QWEN.paused_key
    assert urgent.feature_pool_keys == QWEN.feature_pool_keys
    assert not set(QWEN.feature_pool_keys) & set(QWEN.script_keys)
    assert urgent.find_list_problem(f"{QWEN.queue_prefix}:made-up") is not None


@pytest.mark.parametrize("pool", ["batch:{other}:requests", "batch", "a{", "{qwen"])
def test_pool_in_another_slot_is_rejected(pool: str) -> None:
    with pytest.raises(QueueNameError):
        QueueNames("batch:{qwen}:urgent", "results", pool=pool)


@pytest.mark.parametrize("queue", ["", "a{", "a}", "{}", "a{}b", "}{", "{a}{b}", "{{a}}", "{a", "a}b{c"])
def test_names_with_stray_braces_are_rejected(queue: str) -> None:
    with pytest.raises(QueueNameError):
        QueueNames(queue, "results")


@pytest.mark.parametrize("queue", ["batch:{qwen}:requests", "a:{b}", "{b}c:d", "plain", "plain:more"])
def test_name_of_a_lasting_key_shows_its_queue(queue: str) -> None:
    names = QueueNames(queue, "results")
    assert {
        parse_queue_name(key) for key in (*names.script_keys, *names.feature_pool_keys) if key != queue
    } == {queue}
    assert (
        parse_queue_name(names.result_list_for_id("r-1")) is parse_queue_name(names.active_key("r-1")) is None
    )


def test_pending_key_shows_its_queue_only_under_the_default_name() -> None:
    assert parse_queue_name("batch:{qwen}:requests") == "batch:{qwen}:requests"
    for other in ("batch:{}:requests", "batch:{qwen}:results", "plain", "leases", "{}:leases", "a:leases"):
        assert parse_queue_name(other) is None, other


OWN_OR_ANOTHERS = [
    *("batch:{qwen}:requests", "batch:{qwen}:requests:leases", "batch:{qwen}:requests:made-up"),
    *("request-active:r-1", "request-cancel:r-1", "x" * 1025, "\ud800"),
    *("batch:{other}:requests", "batch:{other}:requests:paused", "batch:{other}:requests:delayed:order"),
    *("{requests}:leases", "a:{qwen}:outbox", "batch:{other}:requests:reply:0f"),
    *("{victim}:posted:batch:other:requests", "v{i}:posted:batch:qwen:requests:for:x"),
]


OF_A_CLIENT = ["batch-results:{nightly}:owner", "batch-results:{nightly}:kept", "batch-results:0123:kept"]
OF_A_CLIENT += [
    "batch:{qwen}:results:result-claimed",
    "{a}:result-claim-owners",
    "a:{qwen}:result-claims-idx",
]


@pytest.mark.parametrize("name", [*OWN_OR_ANOTHERS, *OF_A_CLIENT])
@pytest.mark.parametrize("lists", [None, ("*",)])
def test_key_of_a_queue_is_never_a_result_list(name: Any, lists: tuple[str] | None) -> None:
    names = QueueNames(QWEN.queue, QWEN.result_list, lists)
    assert names.find_list_problem(name) is not None


@pytest.mark.parametrize(
    ("lists", "taken", "refused"),
    [
        (
            None,
            ["batch-results:1", "batch-results:{nightly}", "batch:{qwen}:results:a", "t:{qwen}"],
            ["celery", "batch:{other}:results"],
        ),
        (("celery", "t:*"), ["celery", "t:1", "t:dead", "t:owners"], ["batch-results:1", "celery2", "at:1"]),
        ((), [], ["batch-results:1", "t:{qwen}", ""]),
    ],
)
def test_only_allowed_lists_can_be_result_lists(
    lists: tuple[str, ...] | None, taken: list[str], refused: list[str]
) -> None:
    names = QueueNames(QWEN.queue, QWEN.result_list, lists)
    assert [names.find_list_problem(name) for name in (*taken, QWEN.result_list)] == [None] * (len(taken) + 1)
    assert {names.find_list_problem(name) for name in refused} == {"is not among queue.result_lists"}


@pytest.mark.parametrize("results", ["", "q", "{q}:leases", "{q}:x", "request-active:1", "request-cancel:1"])
def test_default_list_must_not_be_a_key_of_the_queue(results: str) -> None:
    with pytest.raises(QueueNameError):
        QueueNames("q", results)
