"""Gateway to servers that generate text, in virtual time, with a prefix cache each and faults."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dispatcher.gateway.contract import AttemptResult
from dispatcher.lab.standin.generation_api import (
    GenerationConfig,
    InvalidRequestError,
    parse_request,
)
from dispatcher.requests.outcomes.outcome import Delivered, Outcome, TooLate, Unsent
from dispatcher.requests.request import Request
from tests.kernel.scene import AnsweringGateway


@dataclass
class Server:
    """One model server."""

    name: str
    known_prefixes: set[tuple[int, ...]] = field(default_factory=set)

    def count_cached(self, prompt: tuple[int, ...]) -> int:
        """Return the number of tokens at the beginning of the prompt that were seen before, in blocks."""
        size = len(prompt) // 16 * 16
        while size and prompt[:size] not in self.known_prefixes:
            size -= 16
        return size

    def remember(self, tokens: tuple[int, ...]) -> None:
        for size in range(16, len(tokens) + 1, 16):
            self.known_prefixes.add(tokens[:size])


@dataclass
class Call:
    """One call that reached a server."""

    id: str
    server: str
    max_tokens: int


@dataclass
class GenerationGateway(AnsweringGateway):
    """Sends each request to the server of its session token, or else to the next one in turn."""

    config: GenerationConfig = field(default_factory=GenerationConfig)
    server_count: int = 2
    token_s: float = 0.001
    cold_token_s: float = 0.0
    """Time for each token of a prompt that is not in the prefix cache."""
    next_outcomes: deque[Outcome | None] = field(default_factory=deque)
    """Outcomes of the next calls, instead of their answers. `None`: the answer of the server."""
    cut_after: float = 1.0
    """Share of its tokens that a call has generated when it gets an outcome of `next_outcomes`."""
    calls: list[Call] = field(default_factory=list)
    generated_tokens: int = 0
    """Number of tokens that were generated, also by calls whose answer was lost."""
    _servers: list[Server] = field(init=False)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._servers = [Server(f"server-{number}") for number in range(self.server_count)]

    async def forward(self, request: Request, *, token: str, deadline: float, may_send: Any) -> AttemptResult:
        now = asyncio.get_running_loop().time
        sent_at = now()
        if not may_send():
            return AttemptResult(Unsent(), sent_at, sent_at)
        server = self._choose_server(request)
        is_chat = request.endpoint.endswith("/chat/completions")
        try:
            parsed = parse_request(request.payload, is_chat=is_chat, config=self.config)
        except InvalidRequestError as error:
            return AttemptResult(Delivered(400, error.build_body().encode()), sent_at, now())
        cached = server.count_cached(tuple(parsed.prompt)) if self.config.prefix_cache else 0
        answer = parsed.generate_answer(cached)
        self.calls.append(Call(request.id, server.name, parsed.max_tokens))
        uncached = len(parsed.prompt) - cached
        outcome = self.next_outcomes.popleft() if self.next_outcomes else None
        count = answer.token_count if outcome is None else int(answer.token_count * self.cut_after)
        id_ = f"call-{len(self.calls)}"
        events = list(answer.build_events(id_, 1)) if parsed.is_stream else []
        received: list[bytes] = [] if request.received is None else request.received
        generated = 0
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(self.cold_token_s * uncached)
                if not events:
                    await asyncio.sleep(self.token_s * count)
                    generated = count
                for event in events:
                    if event.tokens > count:
                        break
                    await asyncio.sleep(self.token_s * (event.tokens - generated))
                    generated = event.tokens
                    received.append(b"data: %b\n\n" % event.data)
        except TimeoutError:
            return AttemptResult(TooLate(), sent_at, now())
        finally:
            self.generated_tokens += generated
            server.remember(tuple(answer.list_tokens(generated)))
        body = b"".join(received) if events else answer.build_body(id_, 1)
        return AttemptResult(outcome or Delivered(200, body), sent_at, now(), sticky_token=server.name)

    def _choose_server(self, request: Request) -> Server:
        wanted = "" if request.affinity is None else request.affinity.sticky_token
        for server in self._servers:
            if server.name == wanted:
                return server
        self._turn += 1
        return self._servers[self._turn % len(self._servers)]


def generate_whole(request_path: str, payload: bytes, config: GenerationConfig) -> bytes:
    """Return the answer of one call to the whole request."""
    parsed = parse_request(payload, is_chat=request_path.endswith("/chat/completions"), config=config)
    return parsed.generate_answer(0).build_body("whole", 1)
