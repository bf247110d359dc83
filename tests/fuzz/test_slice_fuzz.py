"""Every request ends, and no text is lost or doubled, for any answers of servers to slices."""

from __future__ import annotations

import random
import secrets
import time
from typing import Any

import msgspec
import pytest

from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.telemetry.events import Event
from tests.features.slices.slice_scene import (
    CHAT,
    COMPLETION,
    build_options,
    check_model,
    submit,
    wait_for_results,
)
from tests.fuzz.lying_servers import PROMPT_TOKENS, TEXT, LyingServers
from tests.fuzz.mutations import FUZZ_S, find_problem
from tests.fuzz.slice_inputs import LARGE_STREAMS, consume_stream
from tests.kernel.scene import Scene, run_in_scene

REQUESTS = 6
CONTENTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (COMPLETION, {"prompt": "begin: "}),
    (COMPLETION, {"prompt": [*range(PROMPT_TOKENS)]}),
]
MAX_CALLS = 3 * len(TEXT)
"""Each call adds a character or is one of three attempts."""


def run_requests(seed: int) -> int:
    """Send requests to servers that lie. Return the number of calls."""
    draws = random.Random(seed)
    max_kept_bytes = draws.choice([300, 2000, 1 << 20])
    mutates_bytes = draws.random() < 0.3
    servers = LyingServers(draws, mutates_bytes=mutates_bytes, max_kept_bytes=max_kept_bytes)
    size = draws.randint(1, 40)
    payloads = {}
    for number in range(REQUESTS):
        path, content = draws.choice(CONTENTS)
        max_tokens = draws.choice([draws.randint(size + 1, 300), 10_000])
        body = {"model": "m", "max_tokens": max_tokens, **content}
        payloads[f"r-{number}"] = path, msgspec.json.encode(body)

    async def check(scene: Scene) -> None:
        for path in (CHAT, COMPLETION):
            await check_model(scene, path)
        servers.begin_lying()
        for request_id, (path, payload) in payloads.items():
            await submit(scene, path, payload, request_id)
        results = await wait_for_results(scene, REQUESTS)
        assert [fields for event, fields in scene.events if event is Event.INTERNAL_ERROR] == []
        assert servers.problems == []
        assert max(servers.calls.values()) <= MAX_CALLS
        for result in results.values():
            assert result.status_code or result.error_code
            if (result.status_code == 200 or result.partial) and not mutates_bytes:
                assert TEXT.startswith(read_text(result.payload)), result

    options = build_options(
        size,
        spread=0.5,
        is_streamed=draws.random() < 0.5,
        max_kept_bytes=max_kept_bytes,
        retry=RetryPolicy(0.1, 1.0, 3),
    )
    run_in_scene(check, servers, options)
    return servers.calls.total()


def read_text(payload: str) -> str:
    answer = msgspec.json.decode(payload)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return str(text)


@pytest.mark.parametrize("name", LARGE_STREAMS)
def test_time_to_join_a_large_stream_is_proportional_to_its_length(name: str) -> None:
    assert not find_problem(consume_stream, LARGE_STREAMS[name])


def test_requests_to_lying_servers_end_without_losing_or_doubling_text() -> None:
    assert sum(run_requests(seed) for seed in (*range(60), 3310421572)) > 1000


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 300)
def test_many_requests_to_lying_servers_end_without_losing_or_doubling_text() -> None:
    seed, count, calls = secrets.randbits(32), 0, 0
    end_at = time.monotonic() + FUZZ_S
    while time.monotonic() < end_at:
        try:
            calls += run_requests(seed + count)
        except Exception as error:
            error.add_note(f"seed {seed + count}")
            raise
        count += 1
    print(f"lying servers: {count} rounds, {calls} calls, seed {seed}")
