"""How many tokens an answer says that it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.usage import MAX_TOKENS, MAX_USAGE_BODY_BYTES, parse_token_usage


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":12,"total_tokens":19}}', (7, 12)),
        (b'{"object":"list","usage":{"prompt_tokens":7,"total_tokens":7}}', (7, 0)),
        (b'{"usage":{"input_tokens":5,"output_tokens":6}}', (5, 6)),
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":null}}', (7, 0)),
        (b'{"usage":null}', (0, 0)),
        (b'{"id":"x"}', (0, 0)),
        (b"", (0, 0)),
        (b"data: {}\n\n", (0, 0)),
        (b"[1,2]", (0, 0)),
        (b'{"usage":{"prompt_tokens":"many"}}', (0, 0)),
        (b'{"usage":{"prompt_tokens":-4,"completion_tokens":1e999}}', (0, 0)),
        (b'{"usage":{"prompt_tokens":99999999999999999999999,"completion_tokens":3}}', None),
        (b'{"usage":{"prompt_tokens":9999999999,"completion_tokens":3}}', (MAX_TOKENS, 3)),
        (b"[" * 100_000, (0, 0)),
    ],
)
def test_tokens_of_an_answer(body: bytes, told: tuple[int, int] | None) -> None:
    found = parse_token_usage(body)
    assert found == told if told is not None else 0 <= found[0] <= MAX_TOKENS


def test_long_answers_are_not_read() -> None:
    body = b'{"usage":{"prompt_tokens":7,"completion_tokens":12},"x":"%s"}'
    assert parse_token_usage(body % (b"x" * 1000)) == (7, 12)
    assert parse_token_usage(body % (b"x" * MAX_USAGE_BODY_BYTES)) == (0, 0)


@given(st.binary(max_size=200))
def test_no_bytes_raise(body: bytes) -> None:
    came, went = parse_token_usage(body)
    assert 0 <= came <= MAX_TOKENS
    assert 0 <= went <= MAX_TOKENS
