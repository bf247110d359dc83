"""A gateway to an embedding server, in virtual time: what a call costs, what it refuses, where it errs."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dispatcher.core.gateway.outcome import Delivered, Failed, Outcome, TooLate, Unsent
from dispatcher.core.requests.request import Request
from dispatcher.ports import AttemptResult

BAD = "bad"
"""A text that the server refuses, and the whole call with it."""
DEADLY = "deadly"
"""A text that crashes the server, and the whole call with it."""


def vector(text: str) -> list[float]:
    """Four numbers that no other text has."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return [round(int.from_bytes(digest[at : at + 2]) / 65536, 6) + 0.01 for at in range(0, 8, 2)]


def answer(texts: list[str], model: str = "m") -> bytes:
    data = [{"object": "embedding", "index": n, "embedding": vector(text)} for n, text in enumerate(texts)]
    tokens = sum(len(text) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


@dataclass
class Embedder:
    """Calls one after the other (`workers` at once), each takes `call_s` and `item_s` for each item."""

    call_s: float = 0.005
    item_s: float = 0.0001
    workers: int = 1
    max_limit: int | None = None
    """Longer lists are refused."""
    miscounts: bool = False
    """Of a list of several it forgets the last."""
    mixes_up: bool = False
    """Of a list of several it swaps the first two."""
    scripted: deque[Outcome] = field(default_factory=deque)
    """What it answers first of all."""
    calls: list[list[str]] = field(default_factory=list)
    """The texts of each call, as they began."""
    running: int = 0
    peak: int = 0
    _slots: asyncio.Semaphore | None = None

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        now = asyncio.get_running_loop().time
        began = now()
        if not may_send():
            return AttemptResult(Unsent(), began, began)
        body = msgspec.json.decode(request.payload)
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        self.calls.append(texts)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            async with asyncio.timeout_at(deadline):
                self._slots = self._slots or asyncio.Semaphore(self.workers)
                async with self._slots:
                    await asyncio.sleep(self.call_s + self.item_s * len(texts))
        except TimeoutError:
            return AttemptResult(TooLate(), began, now())
        finally:
            self.running -= 1
        return AttemptResult(self._outcome(texts, body.get("model", "")), began, now())

    def _outcome(self, texts: list[str], model: str) -> Outcome:
        if self.scripted:
            return self.scripted.popleft()
        if self.max_limit is not None and len(texts) > self.max_limit:
            why = f"batch size {len(texts)} > maximum allowed batch size {self.max_limit}"
            return Delivered(413, msgspec.json.encode({"error": why, "error_type": "Validation"}))
        if any(text.startswith(BAD) for text in texts):
            return Delivered(400, b'{"error": {"message": "bad input"}}')
        if any(text.startswith(DEADLY) for text in texts):
            return Failed("the gateway answered 500", 500, b"crashed")
        if self.miscounts and len(texts) > 1:
            return Delivered(200, answer(texts[:-1], model))
        if self.mixes_up and len(texts) > 1:
            first, second, *others = texts
            return Delivered(200, answer([second, first, *others], model))
        return Delivered(200, answer(texts, model))

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...
