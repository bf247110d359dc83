"""Declarations of Lua scripts: each call has exactly the declared keys and arguments."""

from __future__ import annotations

import re

import pytest
import redis.asyncio

from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis import lua_scripts
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.lua_scripts import load_script

NAMES = QueueNames("batch:{pool}:requests", "batch:{pool}:results")
SCRIPTS = sorted(lua_scripts._LUA)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_reads_keys_and_arguments_by_name_only(name: str) -> None:
    code = re.sub(r"--.*", "", lua_scripts._LUA[name])
    assert "ARGV" not in code
    positions = re.findall(r"KEYS\[[^\]]*\]", code)
    # `check_types` walks over the keys of the queue, and `require_commands` needs any key.
    assert set(positions) <= {"common": {"KEYS[number]"}, "require_commands": {"KEYS[1]"}}.get(name, set())


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_declared_argument_is_used(name: str) -> None:
    script, code = load_script(name), re.sub(r"--.*", "", lua_scripts._LUA[name])
    for declared in (*(name for name, _ in script.arguments), *(each.name for each in script.lists)):
        assert re.search(rf"\b{declared}\b", code), declared


def test_arguments_are_encoded_in_the_declared_order() -> None:
    encoded = load_script("renew").encode_arguments(
        {
            "leases": [{"entry_id": 7, "token": "t-7"}, {"entry_id": 8, "token": "t-8"}],
            "lease_s": 30.0,
            "owner": "a",
            "owner_timeout_s": 5,
            "limit": None,
            **dict.fromkeys(("read_at", "lost_units", "retry_after_max_s", "refused_at"), None),
            **dict.fromkeys(("retry_at", "is_out_of_capacity", "in_flight"), None),
        }
    )
    assert encoded == ["a", 5, 30.0, *[""] * 8, 2, 7, "t-7", 8, "t-8"]


def test_call_with_other_arguments_is_rejected() -> None:
    script = load_script("cut_member")
    with pytest.raises(KeyError, match="token"):
        script.encode_arguments({"entry_id": 1, "tokens": "t"})
    with pytest.raises(TypeError, match="entry_id"):
        script.encode_arguments({"entry_id": 1})
    with pytest.raises(TypeError, match="LIST"):
        load_script("push_results").encode_keys((), {"LIST": "list"})


def test_rows_with_other_columns_are_rejected() -> None:
    (leases,) = load_script("renew").lists
    assert leases.encode([{"token": "t-7", "entry_id": 7}]) == [1, 7, "t-7"]
    with pytest.raises(TypeError, match="entry_id"):
        leases.encode([{"entry": 7, "token": "t-7"}])


async def test_values_of_each_kind_reach_a_script(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absent number and an absent structure are nil."""
    text = """-- Keys: FIRST
-- Arguments: text, number: number, none: number?, yes: flag, no: flag, terms: packed,
--     no_terms: packed
-- List rows: entry_id: number, token
-- List plain: number
return {
  FIRST, text, number + 1, tostring(none), tostring(yes), tostring(no), terms.max, tostring(no_terms), #rows,
  rows[2].entry_id + 1, rows[2].token, plain[1] + plain[2],
}
"""
    monkeypatch.setitem(lua_scripts._LUA, "echo", text)
    reply = await Backend(client, NAMES).run_script(
        "echo",
        {
            "text": "hi",
            "number": 2,
            "none": None,
            "yes": True,
            "no": False,
            "terms": {"max": 3},
            "no_terms": None,
            "rows": [{"entry_id": 7, "token": "t-7"}, {"entry_id": 8, "token": "t-8"}],
            "plain": [4, 5],
        },
        keys={"FIRST": "a-key"},
    )
    load_script.cache_clear()
    assert reply.value == [
        *(b"a-key", b"hi", 3, b"nil", b"true", b"false", 3, b"nil"),
        *(2, 9, b"t-8", 9),
    ]
