"""Model servers of one known text that lie about everything else, in virtual time.

A generation is the rest of TEXT after what the prompt has of it already. So any text that a consumer gets, or
that a slice continues, is a beginning of TEXT, unless the dispatcher has lost a part or has it twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec

from dispatcher.gateway.contract import AttemptResult
from dispatcher.requests.outcomes.outcome import Delivered, Evicted, Failed, FailureKind, Outcome, Unsent
from dispatcher.requests.request import Request
from tests.fuzz.mutations import mutate
from tests.kernel.scene import AnsweringGateway

CHUNK = 4
"""Number of characters of a token."""
PROMPT_TOKENS = 5
TEXT = "".join(
    f"{number} é{' ' * (number % 3)}\N{GRINNING FACE}\n,"[: 3 + number % 9] for number in range(400)
)
CUT = Failed("the answer broke off", kind=FailureKind.BROKEN_OFF)
RESET = Failed("connection reset", kind=FailureKind.CONNECTION_RESET)
EVICTED = Evicted(429, "evicted")
ERRORS: list[Outcome] = [CUT, RESET, EVICTED, Delivered(400, b"no"), Failed("the gateway answered 500", 500)]
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 17, 300, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63) - 1, 10**300),
    *(1.5, 1e10, 1e308, -0.0, True, None, "1", [], {}, [1]),
]
NAMES: list[Any] = [None, 5, "", "x" * 3000, 2**70, [], {}, "chat", "é\N{GRINNING FACE}", "\0"]


class LyingServers(AnsweringGateway):
    """Gateway to such servers. Each request gets its own mixture of lies, by its id."""

    def __init__(self, draws: random.Random, *, mutates_bytes: bool, max_kept_bytes: int) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        """Number of calls by the id of the request."""
        self.problems: list[str] = []
        self.is_honest = True
        """True until the model has been checked."""
        self._draws = draws
        self._mutates_bytes = mutates_bytes
        self._max_kept_bytes = max_kept_bytes
        self._shortest, self._end = draws.randrange(10, len(TEXT)), len(TEXT)
        self._has_token_ids = draws.random() < 0.5
        self._prompts: list[str] = []
        self._lie_share = draws.choice([0.05, 0.3, 0.8])

    def begin_lying(self) -> None:
        """Lie from now on, and end the text somewhere."""
        self.is_honest, self._end = False, self._shortest
        self.calls.clear()

    async def forward(self, request: Request, *, token: str, deadline: float, may_send: Any) -> AttemptResult:
        sent_at = asyncio.get_running_loop().time()
        if not may_send():
            return AttemptResult(Unsent(), sent_at, sent_at)
        self.calls[request.id] += 1
        await asyncio.sleep(0.01)
        outcome = self._answer(request)
        return AttemptResult(outcome, sent_at, asyncio.get_running_loop().time(), sticky_token="server")

    def _answer(self, request: Request) -> Outcome:
        fields = msgspec.json.decode(request.payload)
        draws = self._draws
        if not self.is_honest and draws.random() < 0.1:
            return draws.choice(ERRORS)
        start = self._find_start(fields)
        # A text that ends inside a token continues with the rest of that token.
        known_tokens = start // CHUNK
        stop = min(self._end, (known_tokens + fields["max_tokens"]) * CHUNK)
        starts = [*range(known_tokens * CHUNK, stop, CHUNK)] if start < stop else []
        parts = [TEXT[max(at, start) : min(at + CHUNK, stop)] for at in starts]
        has_ended = len(parts) < fields["max_tokens"]
        answer: dict[str, Any] = {
            "id": request.id,
            "object": "chat.completion" if "messages" in fields else "text_completion",
            "created": 7,
            "model": "m",
            "usage": {"prompt_tokens": PROMPT_TOKENS + known_tokens, "completion_tokens": len(parts)},
        }
        choice = {"index": 0, "finish_reason": "stop" if has_ended else "length"}
        returns_ids = self._has_token_ids and fields.get("return_token_ids")
        ids: list[Any] | None = starts if returns_ids else None
        if not self.is_honest and draws.random() < self._lie_share:
            self._tell_lie(answer, choice, ids)
        if not fields.get("stream"):
            return Delivered(200, self._encode(self._build_body(fields, answer, choice, parts, ids)))
        received = self._build_stream(fields, answer, choice, parts, ids)
        is_cut = not self.is_honest and draws.random() < 0.3
        if is_cut:
            received = received[: draws.randrange(len(received) + 1)]
        if request.received is not None:
            request.received.append(received)
        cuts: list[Outcome] = [CUT, RESET, EVICTED, Delivered(200, received)]
        return draws.choice(cuts) if is_cut else Delivered(200, received)

    def _find_start(self, fields: dict[str, Any]) -> int:
        """Return where the text goes on, and check that the prompt has a beginning of it."""
        if "messages" in fields:
            *_, last = fields["messages"]
            known = last["content"] if last["role"] == "assistant" else ""
        elif isinstance(fields["prompt"], str):
            prompt = fields["prompt"]
            begin = next((each for each in self._prompts if prompt.startswith(each)), prompt)
            self._prompts.append(begin)
            known = prompt.removeprefix(begin)
        else:
            ids = fields["prompt"][PROMPT_TOKENS:]
            if any(after - before != CHUNK for before, after in pairwise(ids)):
                self._report(f"tokens {ids}")
            return min(self._end, ids[-1] + CHUNK) if ids else 0
        if not TEXT.startswith(known):
            self._report(f"text {known!r}")
        if len(known.encode()) > self._max_kept_bytes:
            self._report(f"{len(known.encode())} bytes were kept")
        return min(self._end, len(known))

    def _report(self, problem: str) -> None:
        if not self._mutates_bytes:  # which changes the text
            self.problems.append(problem)

    def _tell_lie(self, answer: dict[str, Any], choice: dict[str, Any], ids: list[Any] | None) -> None:
        draws, usage = self._draws, answer["usage"]
        match draws.randrange(8):
            case 0:
                usage[draws.choice(["prompt_tokens", "total_tokens", "x"])] = draws.choice(NUMBERS)
            case 1:
                # Some tokens less than the ids say would be a lie that nobody could notice.
                usage["completion_tokens"] = draws.choice(NUMBERS if ids is None else NUMBERS[5:])
            case 2:
                usage["prompt_tokens_details"] = draws.choice(
                    [None, [], {"cached_tokens": draws.choice(NUMBERS)}]
                )
            case 3:
                answer["created"] = draws.choice(NUMBERS)
            case 4:
                answer[draws.choice(["id", "model", "object"])] = draws.choice(NAMES)
            case 5:
                del answer[draws.choice(["id", "object", "created", "model", "usage"])]
            case 6:
                choice["finish_reason"] = draws.choice([None, "", "stop", "length", "abort", 5])
            case _ if ids:
                ids[:] = draws.choice([[], ids[:-1], [None], ["x"], [-1], [[1]], [1.5]])

    def _build_body(
        self,
        fields: dict[str, Any],
        answer: dict[str, Any],
        choice: dict[str, Any],
        parts: list[str],
        ids: list[Any] | None,
    ) -> dict[str, Any]:
        text = "".join(parts)
        choice |= {"message": {"content": text}} if "messages" in fields else {"text": text}
        if ids is not None:
            choice |= {"token_ids": ids, "prompt_token_ids": [*range(PROMPT_TOKENS)]}
        has_two = not self.is_honest and self._draws.random() < 0.02
        return {**answer, "choices": [choice, choice] if has_two else [choice]}

    def _build_stream(
        self,
        fields: dict[str, Any],
        answer: dict[str, Any],
        choice: dict[str, Any],
        parts: list[str],
        ids: list[Any] | None,
    ) -> bytes:
        head = {name: value for name, value in answer.items() if name != "usage"}
        events: list[bytes] = []
        for number, part in enumerate(parts):
            event: dict[str, Any] = {"index": 0, "finish_reason": None}
            event |= {"delta": {"content": part}} if "messages" in fields else {"text": part}
            if ids is not None:
                event |= {"token_ids": ids[number : number + 1]}
                event |= {} if number else {"prompt_token_ids": [*range(PROMPT_TOKENS)]}
            events.append(self._encode({**head, "choices": [event]}))
        empty: dict[str, Any] = {"delta": {}} if "messages" in fields else {"text": ""}
        events.append(self._encode({**head, "choices": [{**choice, **empty}]}))
        if "usage" in answer:
            events.append(self._encode({**head, "choices": [], "usage": answer["usage"]}))
        if not self.is_honest and self._draws.random() < self._lie_share / 4:
            other = [
                b'{"error":{"message":"stopped"}}',
                b"{",
                b'{"choices":[]}',
                b'{"choices":[],"new":1}',
                b"",
            ]
            events.insert(self._draws.randrange(len(events) + 1), self._draws.choice(other))
        return b"".join(b"data: %b\n\n" % event for event in [*events, b"[DONE]"])

    def _encode(self, value: dict[str, Any]) -> bytes:
        body = msgspec.json.encode(value)
        if self._mutates_bytes and not self.is_honest and self._draws.random() < self._lie_share:
            return mutate(self._draws, [body], 100_000).replace(b"\n", b" ")
        return body
