"""Data that other programs wrote is read with a bound, however large it is."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import redis

from dispatcher.queue.lua_files import TEXTS
from dispatcher.queue.redis.producer import ResultBox, iterate_kept_results
from dispatcher.queue.redis.steps.outbox import read_outbox
from tests.paths import DOCS, ROOT
from tests.queue.factories import NAMES, OwnerAndAdmin, answer, claim, member, queues
from tests.queue.servers import Server

READS = {"GET", "MGET", "GETRANGE", "GETDEL", "GETEX", "HGET", "HMGET", "HGETALL", "HKEYS", "HVALS", "HSCAN"}
READS |= {
    "LRANGE",
    "LINDEX",
    "LPOP",
    "RPOP",
    "BLPOP",
    "BRPOP",
    "LMOVE",
    "BLMOVE",
    "SMEMBERS",
    "SSCAN",
    "SCAN",
}
READS |= {
    "ZRANGE",
    "ZRANGEBYSCORE",
    "ZRANGEBYLEX",
    "ZREVRANGE",
    "ZSCAN",
    "ZPOPMIN",
    "ZPOPMAX",
    "XRANGE",
    "KEYS",
}
LARGE = b"x" * (4 << 20)
FEW_BYTES = 64 * 1024
"""Largest number of bytes that a look at a few requests may read over the network."""


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a") as (one,):
        yield one


@pytest.fixture
def admin(any_server: Server) -> redis.Redis:
    return any_server.client()


def reads_of_scripts() -> set[str]:
    """Return `COMMAND key` for each call in a Lua script that reads data which other programs may write."""
    found = set()
    for script in TEXTS.values():
        text = re.sub(r"--.*", "", script)
        for command, what in re.findall(r"call\('([A-Z]+)', ([A-Za-z_]+(?:\([^()]*\)|\[[^\]]*\])?)", text):
            if command in READS:
                found.add(f"{command} {what}")
    return found


def reads_of_modules() -> set[str]:
    found = set()
    for module in (ROOT / "dispatcher").rglob("*.py"):
        if "standin" not in module.parts:
            for command in re.findall(r"(?:client|pipe)\.(\w+)[(,]|\"(BLMOVE)\"", module.read_text("utf-8")):
                name = "".join(command)
                if name.removesuffix("_iter").upper() in READS:
                    found.add(f"{module.name}: {name}")
    return found


def test_documented_reads_are_the_reads_of_the_code() -> None:
    page = (DOCS / "contributing" / "threats.md").read_text(encoding="utf-8")
    section = page.partition("\n## Input that others write\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!what \||-)[^|]+\| [^|]+\| ([^|]+) \|", section, re.MULTILINE)
    reply = {read for row in rows for read in re.findall(r"`([^`]+)`", row)}
    assert reply == reads_of_scripts() | reads_of_modules()


class SentBytes:
    """Number of bytes that the server has sent since this object was created."""

    def __init__(self, admin: redis.Redis) -> None:
        self._admin = admin
        self._before = self._total()

    def _total(self) -> int:
        return int(self._admin.info("stats")["total_net_output_bytes"])

    @property
    def bytes(self) -> int:
        return self._total() - self._before


@pytest.mark.parametrize("marker", [NAMES.cancel_key("x", "t"), "request-cancel:x"])
async def test_large_cancel_marker_is_compared_inside_the_server(
    queue: OwnerAndAdmin, admin: redis.Redis, marker: str
) -> None:
    asked = [("x", "t")] * 32 + [("y", "u")]
    admin.set(marker, LARGE)
    admin.set(NAMES.cancel_key("y", "u"), "u")
    sent = SentBytes(admin)
    assert await queue.check_cancelled(asked) == [False] * 32 + [True]
    assert await queue.queue_admin.check_cancelled(asked) == [False] * 32 + [True]
    assert sent.bytes < FEW_BYTES


async def test_marker_longer_than_the_token_cancels_nothing(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    admin.set(NAMES.cancel_key("x", "t"), "tt")
    admin.set("request-cancel:x", "t ")
    assert await queue.check_cancelled([("x", "t"), ("x", "")]) == [False, False]
    admin.set("request-cancel:x", "t")
    assert await queue.check_cancelled([("x", "t"), ("x", "")]) == [True, False]


async def test_marker_of_another_type_cancels_nothing(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    admin.lpush("request-cancel:x", "t")
    admin.lpush(NAMES.cancel_key("x", "t"), "t")
    assert await queue.check_cancelled([("x", "t")]) == [False]


async def test_large_markers_of_a_finished_request_are_not_copied(
    queue: OwnerAndAdmin, admin: redis.Redis
) -> None:
    """The markers are kept, because they belong to another request, and no GET copies them inside the
    server."""
    admin.zadd(NAMES.queue, {member("x", token="t"): 1})
    (lease,) = (await claim(queue)).leases
    for key in ("request-active:x", "request-cancel:x"):
        admin.set(key, LARGE)
    admin.config_resetstat()
    assert await queue.settle([answer(lease, token="t")]) != [None]
    stats = admin.info("commandstats")
    assert admin.strlen("request-active:x") == admin.strlen("request-cancel:x") == len(LARGE)
    assert "cmdstat_mget" not in stats
    assert stats["cmdstat_get"]["calls"] == 1, "only the record of the reply is read"


async def test_large_token_under_an_id_cancels_nothing(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    """`cancel` by id uses the token that a producer of llm-d has left under the id."""
    admin.set("request-active:x", LARGE)
    sent = SentBytes(admin)
    assert not await queue.cancel_request("x")
    assert sent.bytes < FEW_BYTES
    assert admin.keys(f"{NAMES.queue_prefix}:cancel:*") == []


async def test_oversized_list_of_active_tokens_counts_as_empty(
    queue: OwnerAndAdmin, admin: redis.Redis
) -> None:
    admin.set(NAMES.active_key("x"), LARGE)
    assert not await queue.cancel_request("x")
    sent = SentBytes(admin)
    page = await queue.find_by_id("x")
    assert (list(page.requests), page.after) == ([], "")
    assert sent.bytes < FEW_BYTES


async def test_large_reason_of_a_pause_is_shortened(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    admin.set(NAMES.paused_key, LARGE)
    sent = SentBytes(admin)
    reply = await queue.read_pause()
    assert reply == ("", "x" * FEW_BYTES)
    assert sent.bytes < 2 * FEW_BYTES


async def test_outbox_is_read_by_the_megabyte(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    sizes = [300_000] * 5 + [3 << 20, 10, 10]
    made = {b"%d\n1\na" % at + b"x" * size: at for at, size in enumerate(sizes, 1)}
    admin.zadd(NAMES.outbox_key, made)
    pages, after = [], "-inf"
    while page := await read_outbox(queue.backend, after, 100):
        pages.append(len(page))
        after = "(" + page[-1].partition(b"\n")[0].decode()
    assert pages == [3, 2, 1, 2]


async def test_large_kept_results_are_read_a_few_at_a_time(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    box = ResultBox("batch-results:{nightly}")
    admin.hset(box.kept_key, mapping={str(at): b"x" * 400_000 for at in range(40)})
    admin.config_resetstat()
    found = {number async for number, _ in iterate_kept_results(queue.backend.scripts, box)}
    assert found == set(range(40))
    assert admin.info("commandstats")["cmdstat_hscan"]["calls"] >= 4, "Valkey has seven in a bucket"
