"""Progress as it is stored in the queue."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dispatcher.features.slices.progress import (
    Progress,
    Stage,
    decode_progress,
    encode_progress,
    find_version,
    has_advanced,
)

BEFORE = Progress(Stage.SLICES, 1, "one two", b"1", b"2", tokens=10)
COUNTS = st.integers(0, 2**40)
TOKENS = st.sampled_from([(b"", b""), (b"1", b"2,3"), (b"5,6,7", b"1")])
PROGRESS = st.builds(
    lambda ids, **fields: Progress(token_ids=ids[0], prompt_token_ids=ids[1], **fields),
    TOKENS,
    stage=st.sampled_from(Stage),
    slices=st.integers(1, 2**40),
    text=st.text(min_size=1),
    tokens=COUNTS,
    uncounted_tokens=COUNTS,
    prompt_tokens=COUNTS,
    cached_tokens=COUNTS,
    response_id=st.text(max_size=5),
    created=COUNTS,
    object=st.text(max_size=5),
    model=st.text(max_size=5),
    version=st.text(max_size=5),
    session_token=st.text(max_size=5),
)


@given(PROGRESS)
def test_progress_is_read_as_it_was_stored(progress: Progress) -> None:
    stored = encode_progress(progress)
    assert decode_progress(stored) == progress
    assert find_version(stored) == progress.version


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xff",
        b"\xc1",
        b"text",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["unknown stage"]),
        msgspec.msgpack.encode(["slices", "one"]),
        msgspec.msgpack.encode({"stage": "slices"}),
        encode_progress(Progress(Stage.SLICES, text="no slice")),
        encode_progress(Progress(Stage.REST, slices=1)),
        encode_progress(Progress(Stage.SLICES, slices=-1, text="one")),
        encode_progress(Progress(Stage.SLICES, slices=1, text="one", tokens=2**63)),
        encode_progress(Progress(Stage.SLICES, slices=1, text="one", created=2**63)),
        encode_progress(Progress(Stage.SLICES, slices=1, token_ids=b"1,2")),
        encode_progress(Progress(Stage.SLICES, slices=1, token_ids=b"1,,2", prompt_token_ids=b"1")),
        encode_progress(Progress(Stage.SLICES, slices=1, token_ids=b"1", prompt_token_ids=b'1],"n":[2')),
        b"\x91" * 100_000,
    ],
)
def test_progress_that_cannot_be_read_is_none(stored: bytes) -> None:
    assert decode_progress(stored) is None
    assert find_version(stored) == ""


@given(st.binary(max_size=30))
def test_any_stored_bytes_are_progress_or_none(stored: bytes) -> None:
    found = decode_progress(stored)
    assert found is None or isinstance(found, Progress)


def test_progress_of_an_older_and_of_a_newer_version_is_read() -> None:
    assert decode_progress(msgspec.msgpack.encode(["slices", 2, "text"])) == Progress(Stage.SLICES, 2, "text")
    newer = [
        *msgspec.msgpack.decode(encode_progress(Progress(Stage.REST, 2, "text"))),
        "a field that does not exist yet",
    ]
    assert decode_progress(msgspec.msgpack.encode(newer)) == Progress(Stage.REST, 2, "text")


@pytest.mark.parametrize(
    ("progress", "has"),
    [
        (BEFORE, False),
        (replace(BEFORE, tokens=20, slices=2, session_token="s", uncounted_tokens=9), False),
        (replace(BEFORE, text="one"), False),
        (replace(BEFORE, text="one two."), True),
        (replace(BEFORE, token_ids=b"1,2"), True),
        (replace(BEFORE, stage=Stage.REST), True),
    ],
)
def test_progress_advances_by_text_tokens_or_its_stage(progress: Progress, has: bool) -> None:
    assert has_advanced(progress, BEFORE) is has


def test_first_progress_has_advanced_if_there_is_any_text_or_token() -> None:
    assert not has_advanced(Progress(Stage.SLICES, 1), None)
    assert has_advanced(BEFORE, None)
    assert has_advanced(Progress(Stage.SLICES, 1, token_ids=b"1"), None)
