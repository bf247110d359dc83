"""The Python blocks of docs/how-to/sequences.md run unchanged against a dispatcher with sequences."""

from __future__ import annotations

import asyncio
import re
import textwrap
from typing import Any

import pytest

from dispatcher.client import BatchClient
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.result import encode_answer
from tests.client.answering import NAMES, POOL
from tests.client.turns import TurnTaking
from tests.paths import DOCS
from tests.queue.made import queues
from tests.queue.servers import Server

PAGE = (DOCS / "how-to" / "sequences.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SENT = (
    {"trip-1": 2, "trip-2": 2},
    {f"agent-{n}": 3 for n in range(20)},
    {"camera-3": 10},
)
"""Of each block, how many requests of each sequence are sent."""
ANSWER = b'{"choices":[{"message":{"content":"a walk"},"text":"a walk"}]}'


def completion(request: Request) -> bytes:
    return encode_answer(request.id, 200, ANSWER, token=request.token)


@pytest.mark.parametrize(
    ("block", "sent"), [*zip(BLOCKS, SENT, strict=True)], ids=("turns", "agents", "state")
)
async def test_a_block_runs(one_redis: Server, block: str, sent: dict[str, int]) -> None:
    names: dict[str, Any] = {"asyncio": asyncio}
    exec(f"async def block(client):\n{textwrap.indent(block, '    ')}", names)
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        TurnTaking(queue).always(completion) as taking,
        BatchClient(one_redis.url, pool=POOL) as client,
    ):
        await asyncio.wait_for(names["block"](client), 20)
        assert {name: len(bodies) for name, bodies in taking.served.items()} == sent
        assert not (await queue.list_sequences(100)).sequences, "each has ended"
