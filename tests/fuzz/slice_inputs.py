"""Answers to slices, streams of them and stored progress, for the fuzz tests of single inputs."""

from __future__ import annotations

import msgspec

from dispatcher.features.slices.answers import (
    Continues,
    Finished,
    SliceResult,
    interpret_answer,
)
from dispatcher.features.slices.bodies import build_slice_body, can_be_continued, compute_slice_tokens
from dispatcher.features.slices.eligibility import Generation, SliceTerms, check_generation
from dispatcher.features.slices.equality import EqualityCheck
from dispatcher.features.slices.partial_answers import build_partial_answer
from dispatcher.features.slices.progress import (
    Progress,
    Stage,
    decode_progress,
    encode_progress,
    has_advanced,
)
from dispatcher.features.slices.stream import join_events
from tests.fuzz.mutations import MB

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_KEPT_BYTES = 65_536
MAX_CHECK_CALLS = 50
MAX_BYTES_FOR_ALL_STATES = 65_536
"""Longer inputs are processed in one state only, since each may cost the allowed CPU time."""
BODIES = [
    (CHAT, b'{"max_tokens":1000,"messages":[{"role":"user","content":"hi"}]}'),
    (
        COMPLETION,
        b'{"max_tokens":1000,"prompt":"\\u00e9 x","stop":["STOP","\\ufffd"],"seed":5,"temperature":0}',
    ),
    (COMPLETION, b'{"max_tokens":1000000000000,"prompt":[1,2,3]}'),
]
ANSWERS = [
    (
        b'{"id":"a","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"one two"},"finish_reason":"length"}],"usage":{"prompt_tokens":5,'
        b'"completion_tokens":10,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":4}}}'
    ),
    (
        b'{"id":"a","object":"text_completion","created":7,"choices":[{"text":"a","finish_reason":"length",'
        b'"token_ids":[1,2],"prompt_token_ids":[3,4]}],"usage":{"prompt_tokens":2,"completion_tokens":2}}'
    ),
    (
        b'{"choices":[{"text":"a STOP b\\ufffd","finish_reason":"stop","stop_reason":"STOP"}],'
        b'"usage":{"prompt_tokens":25,"completion_tokens":10,"x":1e9}}'
    ),
    b'{"error":{"message":"out of memory","code":500}}',
]
STREAMS = [
    (
        b'data: {"id":"a","object":"chat.completion.chunk","choices":[{"delta":{"content":"a"}}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{"content":" b"},"finish_reason":"length"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":10}}\n\ndata: [DONE]\n\n'
    ),
    (
        b'data: {"object":"text","choices":[{"text":"a","token_ids":[1],"prompt_token_ids":[3,4]}]}\n\n'
        b': ping\r\ndata: {"choices":[{"text":"b","token_ids":[2],"finish_reason":null}]}\r\n\r\n'
    ),
    b'data: {"choices":[{"text":"a"}]}\n\ndata: {"error":{"message":"stopped"}}\n\n',
]
# Costly for a function that copies what it has, or that decodes what it does not need.
LARGE_STREAMS = {
    "many new fields": b"".join(b'data: {"choices":[],"k%d":1}\n' % number for number in range(15_000)),
    "many ends": b"".join(
        b'data: {"choices":[{"finish_reason":"a","k%d":1}]}\n' % number for number in range(10_000)
    ),
    "many choices": b'data: {"choices":[' + b"{}," * (MB // 6) + b"{}]}\n",
    "long value": b'data: {"choices":[],"x":[' + b"[]," * (MB // 6) + b"[]]}\n",
    "empty events": b"data:\n" * (MB // 12),
    "empty lines": b"\n" * MB,
}
PROGRESS = [
    Progress(Stage.SLICES, 1, "one", tokens=10, prompt_tokens=5, response_id="a", object="chat.completion"),
    Progress(Stage.SLICES, 2, "é two", b"1,2,3", b"4,5", tokens=3, prompt_tokens=2, session_token="s"),
    Progress(Stage.REST, 3, "one two", tokens=999, uncounted_tokens=7, cut_tokens=4, repeats_text=True),
    Progress(Stage.RESTART),
]
STORED = [encode_progress(progress) for progress in PROGRESS]


def _check(path: str, body: bytes) -> Generation:
    generation = check_generation(path, body, SliceTerms(10, 11, (path,)))
    assert isinstance(generation, Generation)
    return generation


GENERATIONS = [_check(path, body) for path, body in BODIES]
STATES: list[tuple[Generation, Progress | None]] = [
    (generation, progress)
    for generation in GENERATIONS
    for progress in (None, *PROGRESS[:3])
    if progress is None or can_be_continued(generation, progress)
]


def consume_answer(data: bytes) -> None:
    for generation, progress in _choose_states(data):
        for is_cut in (False, True) if len(data) <= MAX_BYTES_FOR_ALL_STATES else (False,):
            _interpret(generation, progress, data, is_cut=is_cut)


def consume_stream(data: bytes) -> None:
    joined = join_events(data)
    if joined is not None:
        for generation, progress in _choose_states(data):
            _interpret(generation, progress, joined[0], is_cut=not joined[1])


def consume_progress(data: bytes) -> None:
    progress = decode_progress(data)
    if progress is None:
        return
    build_partial_answer(progress)
    for generation in GENERATIONS:
        if progress.stage is not Stage.RESTART and can_be_continued(generation, progress):
            for answer in ANSWERS if len(data) <= MAX_BYTES_FOR_ALL_STATES else ANSWERS[:1]:
                _interpret(generation, progress, answer, is_cut=False)


def consume_check(data: bytes) -> None:
    """Give the input as each answer to a check of a model."""
    variants = [(path, is_streamed) for path in (CHAT, COMPLETION) for is_streamed in (False, True)]
    if len(data) > MAX_BYTES_FOR_ALL_STATES:
        variants = [variants[len(data) % len(variants)]]
    for path, is_streamed in variants:
        check = EqualityCheck(path, "m", is_streamed=is_streamed)
        for _ in range(MAX_CHECK_CALLS):
            if check.next_body is None:
                break
            check.record_answer(200, data)
        else:
            raise AssertionError("the check does not end")


def _choose_states(data: bytes) -> list[tuple[Generation, Progress | None]]:
    return STATES if len(data) <= MAX_BYTES_FOR_ALL_STATES else [STATES[len(data) % len(STATES)]]


def _interpret(generation: Generation, progress: Progress | None, data: bytes, *, is_cut: bool) -> None:
    """Interpret an answer, and check that what follows from it can be stored and sent."""
    asked_tokens = compute_slice_tokens(generation, progress, 10)
    assert asked_tokens > 0
    msgspec.json.decode(build_slice_body(generation, progress, asked_tokens, wants_token_ids=True))
    result: SliceResult = interpret_answer(
        generation,
        progress,
        200,
        data,
        asked_tokens=asked_tokens,
        max_kept_bytes=MAX_KEPT_BYTES,
        is_cut=is_cut,
    )
    if isinstance(result, Finished):
        assert result.body
    elif isinstance(result, Continues):
        stored = encode_progress(result.progress)
        if result.progress.stage is Stage.SLICES:
            assert len(stored) <= MAX_KEPT_BYTES
        assert decode_progress(stored) == result.progress
        assert is_cut or has_advanced(result.progress, progress), "the same call would follow for ever"
