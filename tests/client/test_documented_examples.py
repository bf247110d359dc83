"""The Python examples of the page on the client and of the README run unchanged."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dispatcher.client import BatchClient
from dispatcher.requests.request import Request
from dispatcher.requests.result import encode_answer
from tests.client.fake_dispatcher import POOL, FakeDispatcher
from tests.paths import DOCS, ROOT
from tests.queue.servers import Server

PAGE = (DOCS / "how-to" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
ANSWER = b'{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}'


def completion(request: Request) -> bytes:
    return encode_answer(request.id, 200, ANSWER, token=request.token)


def test_page_has_examples() -> None:
    assert len(BLOCKS) >= 8
    fences = re.findall(r"^```", PAGE, re.MULTILINE)
    assert len(fences) == 2 * len(BLOCKS), "all examples are in Python"


@pytest.mark.parametrize(
    "block", BLOCKS + README_BLOCKS, ids=lambda block: block.strip().splitlines()[-1].strip()[:40]
)
async def test_example_runs(
    fake_dispatcher: FakeDispatcher,
    one_redis: Server,
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = block.replace("redis://localhost:6379", one_redis.url)
    if "__main__" in block:
        program = tmp_path / "program.py"
        program.write_text(block)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        command = [sys.executable, str(program)]
        done = await asyncio.to_thread(lambda: subprocess.run(command, capture_output=True, check=False))
        assert (done.returncode, done.stderr) == (0, b"")
        return
    namespace: dict[str, Any] = {"BatchClient": BatchClient, "__name__": "block"}
    async with fake_dispatcher.answer_continuously(completion):
        if "asyncio.run(" in block or "BatchClient.sync(" in block:
            await asyncio.to_thread(exec, block, namespace)
            return
        body = textwrap.indent(block, "    ")
        exec(f"async def block(client):\n{body}", namespace)
        async with BatchClient(one_redis.url, pool=POOL) as client:
            await asyncio.wait_for(namespace["block"](client), 20)
