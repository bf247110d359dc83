"""Token counts that an answer reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.usage import MAX_TOKENS, MAX_USAGE_BODY_BYTES, parse_token_usage


@pytest.mark.parametrize(
    ("body", "expected"),
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
def test_token_counts_are_read_from_the_answer(body: bytes, expected: tuple[int, int] | None) -> None:
    usage = parse_token_usage(body)
    assert usage == (*expected, 0) if expected is not None else 0 <= usage[0] <= MAX_TOKENS


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b'"prompt_tokens":70,"prompt_tokens_details":{"audio_tokens":1,"cached_tokens":64}', 64),
        (b'"input_tokens":70,"input_tokens_details":{"cached_tokens":32}', 32),
        (b'"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":71}', 70),
        (b'"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":-1}', 0),
        (b'"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":null}', 0),
        (b'"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":"64"}', 0),
        (b'"prompt_tokens":70,"prompt_tokens_details":[64]', 0),
        (b'"prompt_tokens":70,"prompt_tokens_details":null', 0),
        (b'"prompt_tokens":70', 0),
    ],
)
def test_cached_part_of_a_prompt_is_read_and_never_spoils_the_other_numbers(
    usage: bytes, expected: int
) -> None:
    parsed = parse_token_usage(b'{"usage":{%b,"completion_tokens":3}}' % usage)
    assert parsed == (70, 3, expected)


def test_usage_of_a_too_long_answer_is_not_read() -> None:
    body = b'{"usage":{"prompt_tokens":7,"completion_tokens":12},"x":"%s"}'
    assert parse_token_usage(body % (b"x" * 1000)) == (7, 12, 0)
    assert parse_token_usage(body % (b"x" * MAX_USAGE_BODY_BYTES)) == (0, 0, 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_without_an_error(body: bytes) -> None:
    prompt_tokens, completion_tokens, cached_tokens = parse_token_usage(body)
    assert 0 <= cached_tokens <= prompt_tokens
    assert 0 <= prompt_tokens <= MAX_TOKENS
    assert 0 <= completion_tokens <= MAX_TOKENS
