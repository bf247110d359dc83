"""The Python examples of docs/how-to/sequences.md run unchanged with a dispatcher that has sequences."""

from __future__ import annotations

import asyncio
import re
import textwrap
from typing import Any

import pytest

from dispatcher.client import BatchClient
from dispatcher.requests.request import Request
from dispatcher.requests.result import encode_answer
from tests.client.fake_dispatcher import NAMES, POOL
from tests.features.sequences.fake_sequence_dispatcher import FakeSequenceDispatcher
from tests.paths import DOCS
from tests.queue.factories import queues
from tests.queue.servers import Server

PAGE = (DOCS / "how-to" / "sequences.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXPECTED_COUNTS = (
    {"trip-1": 2, "trip-2": 2},
    {f"agent-{n}": 3 for n in range(20)},
    {"camera-3": 10},
    {"camera-4": 5},
)
"""Number of requests of each sequence that each example sends."""
ANSWER = b'{"choices":[{"message":{"content":"a walk"},"text":"a walk"}]}'


def completion(request: Request) -> bytes:
    return encode_answer(request.id, 200, ANSWER, token=request.token)


@pytest.mark.parametrize(
    ("block", "expected_counts"),
    [*zip(BLOCKS, EXPECTED_COUNTS, strict=True)],
    ids=("turns", "agents", "state", "results one by one"),
)
async def test_example_sends_its_sequences(
    one_redis: Server, block: str, expected_counts: dict[str, int]
) -> None:
    namespace: dict[str, Any] = {"asyncio": asyncio}
    exec(f"async def block(client):\n{textwrap.indent(block, '    ')}", namespace)
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        FakeSequenceDispatcher(queue).answer_continuously(completion) as dispatcher,
        BatchClient(one_redis.url, pool=POOL) as client,
    ):
        await asyncio.wait_for(namespace["block"](client), 20)
        assert {name: len(bodies) for name, bodies in dispatcher.answered.items()} == expected_counts
        assert not (await queue.list_sequences(100)).sequences, "each sequence has ended"
