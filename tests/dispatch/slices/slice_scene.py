"""Requests, options and waiting for the tests of slices with the dispatch loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.result import PoppedResult, decode_result
from dispatcher.core.requests.score import compute_score
from dispatcher.core.slices.eligibility import SliceTerms
from dispatcher.dispatch import Options
from dispatcher.dispatch.options import SliceOptions
from dispatcher.ports import Submission
from tests.dispatch.scene import Scene
from tests.dispatch.slices.generation_gateway import GenerationGateway

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def build_options(slice_tokens: int = 20, **changes: Any) -> Options:
    """Return options for slices that all have the same size, unless `spread` is given."""
    terms = SliceTerms(slice_tokens, slice_tokens + 1, (CHAT, COMPLETION))
    slicing: dict[str, Any] = {"is_on": True, "terms": terms, "spread": 0.0} | changes
    return Options(RetryPolicy(), slicing=SliceOptions(**slicing))


def build_payload(path: str, number: int = 1, max_tokens: int = 100, **fields: Any) -> bytes:
    content: dict[str, Any] = (
        {"messages": [{"role": "user", "content": f"question {number}"}]}
        if path == CHAT
        else {"prompt": f"text {number}:"}
    )
    model = {"model": "m", "max_tokens": max_tokens, "temperature": 0}
    return msgspec.json.encode({**model, **content, **fields})


async def submit(
    scene: Scene,
    path: str,
    payload: bytes,
    request_id: str = "r-1",
    in_s: float = 10**6,
    priority: int | None = None,
    **fields: Any,
) -> None:
    deadline = int(asyncio.get_running_loop().time() + in_s)
    member = encode_member(request_id, payload, deadline, token="t", endpoint=path, **fields)
    score = compute_score(deadline, priority)
    await scene.store.submit([Submission(member, score, request_id, "t", deadline)])


async def wait_for_results(scene: Scene, count: int) -> Mapping[str, PoppedResult]:
    results: dict[str, PoppedResult] = {}
    for _ in range(20_000):
        if len(results) == count:
            return results
        result = scene.store.pop_result()
        if result is None:
            await asyncio.sleep(0.05)
            continue
        decoded = decode_result(result)
        assert decoded.id not in results
        results[decoded.id] = decoded
    raise AssertionError(f"no result of the others of {sorted(results)}")


async def wait_for_calls(gateway: GenerationGateway, max_tokens: int, count: int) -> None:
    """Wait until the servers have had this many calls with `max_tokens`."""
    for _ in range(100_000):
        if sum(call.max_tokens == max_tokens for call in gateway.calls) >= count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the calls have not come")


def summarize(body: str | bytes) -> tuple[Any, ...]:
    """Return what must not differ between an answer in slices and that of one call."""
    answer = msgspec.json.decode(body)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    usage = answer["usage"]
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"], answer["model"]
