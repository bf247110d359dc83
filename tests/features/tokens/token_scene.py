"""A dispatcher in virtual time whose readings show the KV memory, and a gateway that reports usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from dispatcher.features.tokens.options import TokenOptions
from dispatcher.features.tokens.token_budget import TokenBudget
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Options
from dispatcher.limit.budget import KvUse, Reading, Signal
from dispatcher.limit.poll import Poll
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import Submission
from tests.kernel.scene import AnsweringGateway, Scene, find_part

CAPACITY = 100_000


class UsageGateway(AnsweringGateway):
    """Gateway that answers with the usage that `usage` returns, and notes how many tokens are in flight."""

    answer_after_s = 5.0

    def __init__(
        self, usage: Callable[[dict[str, Any]], tuple[int, int]] | None = None, cached_tokens: int = 0
    ) -> None:
        super().__init__()
        self.cached_tokens = cached_tokens
        self.usage = usage or (lambda body: (body["prompt_tokens"], body["max_tokens"]))
        self.tokens = 0
        self.most_tokens = 0

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        prompt, output = self.usage(json.loads(request.payload))
        self.tokens += prompt + output
        self.most_tokens = max(self.most_tokens, self.tokens)
        try:
            result = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        finally:
            self.tokens -= prompt + output
        details = {"cached_tokens": self.cached_tokens}
        used = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
        return result.copy_with(outcome=Delivered(200, json.dumps({"usage": used}).encode()))


def build_options(**changes: Any) -> Options:
    options = TokenOptions(**{"is_on": True, "per_endpoint": CAPACITY, **changes})
    return Options(RetryPolicy(), default_path="/v1/completions", of_features={TokenOptions: options})


def find_budget(scene: Scene) -> TokenBudget:
    return find_part(scene.dispatcher, TokenBudget)


def show(scene: Scene, used: float | None, **changes: Any) -> None:
    """Pass a reading of an endpoint with room for 100 requests. `used` is the share of its KV memory in use,
    `None` if the reading does not show it."""
    at = asyncio.get_running_loop().time()
    known: dict[str, Any] = {"share": used, "capacity_tokens": None, "endpoints": 1}
    use = None if used is None else KvUse(**known | {"opened_at": at, "closed_at": at} | changes)
    reading = Reading(Signal.REQUESTS, at, at, 0.0, 0.0, 100.0, kv_use=use)
    scene.dispatcher.apply_poll(Poll(completed_at=at, signals=(Signal.REQUESTS,), readings=(reading,)))


async def show_for(scene: Scene, seconds: float, used: float | None, every_s: float = 0.5) -> None:
    """Pass such readings for some time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        show(scene, used)
        await asyncio.sleep(every_s)


async def submit(scene: Scene, request_id: str, prompt: int, output: int, in_s: float = 10**6) -> None:
    """Submit a request whose prompt consists of that many token ids."""
    body = {"prompt": [7] * prompt, "max_tokens": output, "prompt_tokens": prompt}
    deadline = int(asyncio.get_running_loop().time() + in_s)
    member = encode_member(request_id, json.dumps(body).encode(), deadline, token="t")
    await scene.store.submit([Submission(member, float(deadline), request_id, "t", deadline)])
