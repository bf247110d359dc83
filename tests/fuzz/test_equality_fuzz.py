"""The check of a model ends and raises nothing for any answers of a server."""

from __future__ import annotations

import os
import random
import secrets
import time

import pytest

from dispatcher.features.slices.equality import EqualityCheck
from dispatcher.lab.standin.generation_api import GenerationConfig, InvalidRequestError, parse_request
from tests.fuzz.mutations import mutate

FUZZ_S = float(os.environ.get("FUZZ_S", "600"))
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_CALLS = 100
MAX_ANSWER_BYTES = 1 << 16


def answer(path: str, body: bytes, config: GenerationConfig) -> tuple[int, bytes]:
    try:
        parsed = parse_request(body, is_chat=path == CHAT, config=config)
    except InvalidRequestError as error:
        return 400, error.build_body().encode()
    generated = parsed.generate_answer(0)
    if parsed.is_stream:
        return 200, b"".join(b"data: %b\n\n" % event.data for event in generated.build_events("a", 1))
    return 200, generated.build_body("a", 1)


def run_check(source: random.Random) -> int:
    """Run a check of a random server that changes some answers. Return the number of calls."""
    path, share = source.choice([CHAT, COMPLETION]), source.choice([0.02, 0.2, 1.0])
    config = GenerationConfig(
        end_probability=source.choice([0.0, 0.05]),
        merged_tokens=source.random() < 0.3,
        no_token_ids=source.random() < 0.5,
        ignores_last_answer=source.random() < 0.2,
        reasoning="reasoning" if source.random() < 0.1 else "",
    )
    check, calls = EqualityCheck(path, "m", is_streamed=source.random() < 0.5), 0
    while (body := check.next_body) is not None:
        calls += 1
        assert calls <= MAX_CALLS
        status, answered = answer(path, body, config)
        if source.random() < share:
            status = source.choice([status, status, status, 204, 400, 500])
            answered = mutate(source, [answered], MAX_ANSWER_BYTES)
        check.record_answer(status, answered)
    assert check.continuation is not None or check.why
    assert not (check.is_undecided and check.continuation)
    assert len(str(check.difference)) < 1000
    return calls


def test_check_ends_whatever_the_server_answers() -> None:
    assert sum(run_check(random.Random(seed)) for seed in range(300)) > 1000


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 300)
def test_many_checks_end_whatever_the_server_answers() -> None:
    seed, count, calls = secrets.randbits(32), 0, 0
    end_at = time.monotonic() + FUZZ_S
    while time.monotonic() < end_at:
        try:
            calls += run_check(random.Random(seed + count))
        except Exception as error:
            error.add_note(f"seed {seed + count}")
            raise
        count += 1
    print(f"{count} checks, {calls} calls, seed {seed}")
