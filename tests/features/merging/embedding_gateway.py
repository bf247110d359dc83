"""Gateway to an embedding server, in virtual time, with the duration, limits and faults of its calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dispatcher.gateway.contract import AttemptResult
from dispatcher.requests.outcomes.outcome import Delivered, Failed, Outcome, TooLate, Unsent
from dispatcher.requests.request import Request

REJECTED_TEXT = "bad"
"""Start of a text that the server rejects, together with the whole call."""
CRASHING_TEXT = "deadly"
"""Start of a text that crashes the server, so that the whole call fails."""


def build_vector(text: str) -> list[float]:
    """Return four numbers that identify a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return [round(int.from_bytes(digest[at : at + 2]) / 65536, 6) + 0.01 for at in range(0, 8, 2)]


def build_answer(texts: list[str], model: str = "m") -> bytes:
    """Return the body of a correct answer to a call with these texts."""
    data = [
        {"object": "embedding", "index": n, "embedding": build_vector(text)} for n, text in enumerate(texts)
    ]
    tokens = sum(len(text) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


@dataclass
class EmbeddingGateway:
    """Runs up to `workers` calls at once. Each takes `call_s`, and `item_s` for each item."""

    call_s: float = 0.005
    item_s: float = 0.0001
    workers: int = 1
    max_items: int | None = None
    """Maximum number of items of a call. The server rejects longer ones."""
    drops_last_item: bool = False
    """True if the answer to a call with several items lacks the last one."""
    swaps_first_items: bool = False
    """True if the answer to a call with several items swaps the first two."""
    next_outcomes: deque[Outcome] = field(default_factory=deque)
    """Outcomes of the next calls, before the server answers by itself."""
    calls: list[list[str]] = field(default_factory=list)
    """Texts of each call, in the order in which the calls began."""
    running_count: int = 0
    """Number of calls at the server."""
    max_running_count: int = 0
    _worker_slots: asyncio.Semaphore | None = None

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        now = asyncio.get_running_loop().time
        sent_at = now()
        if not may_send():
            return AttemptResult(Unsent(), sent_at, sent_at)
        body = msgspec.json.decode(request.payload)
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        self.calls.append(texts)
        self.running_count += 1
        self.max_running_count = max(self.max_running_count, self.running_count)
        try:
            async with asyncio.timeout_at(deadline):
                self._worker_slots = self._worker_slots or asyncio.Semaphore(self.workers)
                async with self._worker_slots:
                    await asyncio.sleep(self.call_s + self.item_s * len(texts))
        except TimeoutError:
            return AttemptResult(TooLate(), sent_at, now())
        finally:
            self.running_count -= 1
        return AttemptResult(self._choose_outcome(texts, body.get("model", "")), sent_at, now())

    def _choose_outcome(self, texts: list[str], model: str) -> Outcome:
        if self.next_outcomes:
            return self.next_outcomes.popleft()
        if self.max_items is not None and len(texts) > self.max_items:
            why = f"batch size {len(texts)} > maximum allowed batch size {self.max_items}"
            return Delivered(413, msgspec.json.encode({"error": why, "error_type": "Validation"}))
        if any(text.startswith(REJECTED_TEXT) for text in texts):
            return Delivered(400, b'{"error": {"message": "bad input"}}')
        if any(text.startswith(CRASHING_TEXT) for text in texts):
            return Failed("the gateway answered 500", 500, b"crashed")
        if self.drops_last_item and len(texts) > 1:
            return Delivered(200, build_answer(texts[:-1], model))
        if self.swaps_first_items and len(texts) > 1:
            first, second, *others = texts
            return Delivered(200, build_answer([second, first, *others], model))
        return Delivered(200, build_answer(texts, model))

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...
