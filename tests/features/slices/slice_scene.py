"""Requests, options and waiting for the tests of slices with the dispatch loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from dispatcher.features.slices.eligibility import SliceTerms
from dispatcher.features.slices.equality import CASES, WHOLE_TOKENS
from dispatcher.features.slices.options import SliceOptions
from dispatcher.features.slices.slicer import Slicer
from dispatcher.kernel import Options
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.wire_format import PoppedResult
from tests.features.slices.generation_gateway import GenerationGateway
from tests.kernel.scene import Scene

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CHECK_CALLS = sum(len(case.slice_tokens) + 2 for case in CASES)
"""Number of calls of a check whose answers are equal."""
CHECK_TOKENS = 2 * WHOLE_TOKENS * len(CASES)
"""Number of tokens that they generate, if the model is continued by token ids."""


def build_options(slice_tokens: int = 20, retry: RetryPolicy | None = None, **changes: Any) -> Options:
    """Return options for slices that all have the same size, unless `spread` is given."""
    terms = SliceTerms(slice_tokens, slice_tokens + 1, (CHAT, COMPLETION))
    slicing: dict[str, Any] = {"is_on": True, "terms": terms, "spread": 0.0} | changes
    return Options(retry or RetryPolicy(), of_features={SliceOptions: SliceOptions(**slicing)})


def find_slicer(scene: Scene) -> Slicer:
    return next(part for part in scene.dispatcher.context.hooks.lease_parts if isinstance(part, Slicer))


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


async def check_model(scene: Scene, path: str) -> None:
    """Send a request, so that slices on the model are compared with one call before the others come."""
    await submit(scene, path, build_payload(path), "first")
    await wait_for_results(scene, 1)
    assert [support.reason for key, support in find_slicer(scene).support if key[0] == path] == [None]


async def wait_for_calls(gateway: GenerationGateway, max_tokens: int | None, count: int) -> None:
    """Wait until the servers have had this many calls with `max_tokens`, or at all if it is `None`."""
    for _ in range(100_000):
        if sum(max_tokens in (None, call.max_tokens) for call in gateway.calls) >= count:
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
