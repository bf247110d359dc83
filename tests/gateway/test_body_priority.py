"""`gateway.body_priority` is the one top-level `priority` of each body that is a JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.gateway.body_priority import set_priority
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.gateway.transport import STREAMED_BYTES
from dispatcher.requests.outcomes.outcome import Delivered
from tests.gateway.scripted_server import a_request, always, options, outcome, serving

NAMES = st.sampled_from(["priority", "Priority", "priority ", '"priority', "model", ""]) | st.text()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=5)
PRIORITIES = st.integers(-100_000, 100_000)
WHITESPACE = st.text(" \t\r\n", max_size=3)


@given(BODIES, PRIORITIES, st.booleans(), st.sampled_from([None, 1]), WHITESPACE, WHITESPACE)
def test_only_the_priority_of_an_object_changes(
    body: dict[str, object], priority: int, is_ascii: bool, indent: int | None, before: str, after: str
) -> None:
    text = before + json.dumps(body, ensure_ascii=is_ascii, indent=indent) + after
    changed = set_priority(text.encode(), priority)
    pairs = json.loads(changed, object_pairs_hook=lambda pairs: pairs)
    assert json.loads(changed) == body | {"priority": priority}
    assert [name for name, _ in pairs].count("priority") == 1, "parsers disagree about duplicates"


@given(VALUES.filter(lambda value: not isinstance(value, dict)), PRIORITIES)
def test_json_that_is_no_object_stays_unchanged(value: object, priority: int) -> None:
    text = json.dumps(value).encode()
    assert set_priority(text, priority) == text


@given(st.binary() | st.binary().map(b'{"priority"'.__add__), PRIORITIES)
def test_bytes_that_are_no_json_never_raise(text: bytes, priority: int) -> None:
    set_priority(text, priority)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"priority":5}'),
        (b" { \n} ", b' {"priority":5 \n} '),
        (b'{"a": 1 }', b'{"priority":5,"a": 1 }'),
        (b'\n{ "a":1}\n', b'\n{"priority":5, "a":1}\n'),
        # Everything that a decoder could change, and a nested priority, which is not the request's.
        (
            b'{"n":12345678901234567890.10,"a":1,"a":2,"s":"\\u00e9\\/", "x":{"priority":1}}',
            b'{"priority":5,"n":12345678901234567890.10,"a":1,"a":2,"s":"\\u00e9\\/", "x":{"priority":1}}',
        ),
        (b'{"text":"\\"priority\\": 1"}', b'{"priority":5,"text":"\\"priority\\": 1"}'),
        (b'{"sort":"priority"}', b'{"priority":5,"sort":"priority"}'),
        (b'{"sort":"\\u0070riority"}', b'{"priority":5,"sort":"\\u0070riority"}'),
        (b'{"s":"\xff"}', b'{"priority":5,"s":"\xff"}'),
        (b'{"s":"\\ud800"}', b'{"priority":5,"s":"\\ud800"}'),
    ],
)
def test_field_is_inserted_and_no_other_byte_changes(body: bytes, expected: bytes) -> None:
    assert set_priority(body, 5) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"priority":-9}', b'{"priority":5}'),
        (b'{"a":1, "priority" : [{"priority":1}] }', b'{"a":1,"priority":5}'),
        (b'{"priority":"-9","n":1.50,"priority":-9}', b'{"priority":5,"n":1.50}'),
        (b'{"\\u0070riority":-9}', b'{"priority":5}'),
        (b'{"pr\\u0069ority":-9}', b'{"priority":5}'),
        (b'{"pr\\u0069\\u006Frit\\u0079":-9,"priority":-8}', b'{"priority":5}'),
        (b'{"s":"\xff","priority":-9}', b'{"s":"\xff","priority":5}'),
        # The decoder rejects these. Model servers may not, and take the last of two fields.
        (b'{"s":"\\ud800","priority":-9}', b'{"s":"\\ud800","priority":-9,"priority":5}'),
        (b'{"\\ud800":1,"priority":-9} \n', b'{"\\ud800":1,"priority":-9,"priority":5} \n'),
        (b'{"\xff":1,"\\u0070riority":-9}', b'{"\xff":1,"\\u0070riority":-9,"priority":5}'),
        (b'{"n":NaN,"priority":-9}', b'{"n":NaN,"priority":-9,"priority":5}'),
    ],
)
def test_priority_of_the_producer_does_not_apply(body: bytes, expected: bytes) -> None:
    assert set_priority(body, 5) == expected


def test_priority_beside_deep_nesting_does_not_apply() -> None:
    body = b'{"a":%b%b,"priority":-9}' % (b"[" * 100_000, b"]" * 100_000)
    assert set_priority(body, 5) == body[:-1] + b',"priority":5}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b'[{"priority":1}]',
        b'"priority"',
        b"7",
        b"null",
        b"\xef\xbb\xbf{}",
        b"}",
        b'{"priority":1',
        b'{"priority":{}}x',
    ],
)
def test_body_that_is_no_object_stays_unchanged(body: bytes) -> None:
    assert set_priority(body, 5) == body


@pytest.mark.parametrize("own", [b"", b',"priority":-9'])
async def test_priority_of_the_setting_is_sent_and_follows_a_reload(
    gateway_to: Callable[..., HttpGateway], own: bytes
) -> None:
    body = b'{"prompt": "%b"%b}' % (b"x" * 2 * STREAMED_BYTES, own)
    async with serving(always()) as server:
        gateway = gateway_to(server.url)
        requests = [
            a_request(body, endpoint=f"/v1/{path}") for path in ("chat/completions", "embeddings", "x")
        ]
        for priority in (None, 7, 0, -3, None):
            gateway.reconfigure(options(server.url, body_priority=priority))
            for request in requests:
                assert await outcome(gateway, request) == Delivered(200, b"{}")
    bodies = [received.body for received in server.received]
    assert bodies[:3] == bodies[-3:] == [body] * 3
    sent = [json.loads(each) for each in bodies[3:-3]]
    plain = json.loads(body)
    assert sent == [plain | {"priority": priority} for priority in (7, 7, 7, 0, 0, 0, -3, -3, -3)]
