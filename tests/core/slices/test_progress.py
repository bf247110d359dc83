"""Progress as it is stored in the queue."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.slices.progress import Progress, Stage, decode_progress, encode_progress, find_version

COUNTS = st.integers(0, 2**40)
TOKENS = st.binary(max_size=10)
PROGRESS = st.builds(
    Progress,
    st.sampled_from(Stage),
    slices=COUNTS,
    text=st.text(),
    token_ids=TOKENS,
    prompt_token_ids=TOKENS,
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
        *msgspec.msgpack.decode(encode_progress(Progress(Stage.REST, 2))),
        "a field that does not exist yet",
    ]
    assert decode_progress(msgspec.msgpack.encode(newer)) == Progress(Stage.REST, 2)
