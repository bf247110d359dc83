"""A generation in slices of any sizes, with streams cut anywhere, has the answer of one call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher.features.slices.answers import Continues, Finished, interpret_answer
from dispatcher.features.slices.bodies import build_slice_body, compute_slice_tokens
from dispatcher.features.slices.eligibility import Generation, SliceTerms, check_generation
from dispatcher.features.slices.progress import Progress, Stage, decode_progress, encode_progress
from dispatcher.features.slices.stream import join_events
from dispatcher.lab.standin.generation_api import GeneratedAnswer, GenerationConfig, parse_request

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
STOP_STRINGS = ("e", "a ", "\n\n", "th", "é", "漢字", "€", "n t")


@dataclass
class SlicedGeneration:
    """One generation by the functions that the dispatcher uses, on a server that generates text."""

    path: str
    body: dict[str, Any]
    config: GenerationConfig
    draws: random.Random
    max_slice_tokens: int
    is_streamed: bool
    cut_share: float = 0.0
    """Share of the streams that break off."""
    has_token_ids: bool = True
    """True if the server was found to continue by token ids."""
    progress: Progress | None = None
    calls: list[tuple[Progress | None, int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.payload = msgspec.json.encode(self.body)
        generation = check_generation(self.path, self.payload, SliceTerms(0, 0, (self.path,)))
        assert isinstance(generation, Generation)
        self.generation = generation

    def generate(self, payload: bytes) -> GeneratedAnswer:
        is_chat = self.path == CHAT
        return parse_request(payload, is_chat=is_chat, config=self.config).generate_answer(0)

    def generate_whole(self) -> bytes:
        return self.generate(self.payload).build_body("whole", 1)

    def run(self) -> bytes | None:
        """Return the answer of the generation in slices. `None` if it starts again and is sent whole."""
        for _ in range(10_000):
            asked_tokens = compute_slice_tokens(
                self.generation, self.progress, self.draws.randint(1, self.max_slice_tokens)
            )
            payload = build_slice_body(
                self.generation,
                self.progress,
                asked_tokens,
                wants_token_ids=self.has_token_ids
                and (self.progress is None or bool(self.progress.token_ids)),
                is_streamed=self.is_streamed,
            )
            answer, is_cut = self._call_server(payload)
            self.calls.append((self.progress, asked_tokens, answer))
            result = interpret_answer(
                self.generation,
                self.progress,
                200,
                answer,
                asked_tokens=asked_tokens,
                max_kept_bytes=1 << 20,
                is_cut=is_cut,
            )
            if is_cut and not (isinstance(result, Continues) and self._keeps(result.progress)):
                continue  # the slice is sent again
            if isinstance(result, Finished):
                return result.body
            if not isinstance(result, Continues):
                return answer
            self.progress = decode_progress(encode_progress(result.progress))
            assert self.progress is not None
            if self.progress.stage is Stage.RESTART:
                return None
        raise AssertionError("the generation does not end")

    def _keeps(self, progress: Progress) -> bool:
        """Return True if the dispatcher keeps what a stream that broke off has generated."""
        return progress.stage is not Stage.RESTART and bool(progress.prompt_tokens)

    def _call_server(self, payload: bytes) -> tuple[bytes, bool]:
        """Return the answer, and whether it broke off."""
        generated = self.generate(payload)
        number = len(self.calls)
        if not self.is_streamed:
            return generated.build_body(f"call-{number}", number), False
        events = [b"data: %b\n\n" % event.data for event in generated.build_events(f"call-{number}", number)]
        received = b"".join(events)
        while True:
            part = received
            if self.draws.random() < self.cut_share:
                part = received[: self.draws.randrange(len(received))]
            joined = join_events(part)
            if joined is not None:
                return joined[0], not joined[1]


def summarize(answer: bytes) -> tuple[Any, ...]:
    """Return what must not differ between an answer in slices and that of one call."""
    decoded = msgspec.json.decode(answer)
    (choice,), usage = decoded["choices"], decoded["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def draw_generation(seed: int) -> SlicedGeneration:
    """Return a random generation on a random server that continues generations."""
    draws = random.Random(seed)
    path = draws.choice([CHAT, COMPLETION])
    is_text = path == CHAT or draws.random() < 0.5
    config = GenerationConfig(
        end_probability=draws.choice([0.0, 0.01]),
        # A text may be tokenized in another way than it was generated.
        merged_tokens=not is_text and draws.random() < 0.5,
        replaces_incomplete=draws.random() < 0.3,
        no_token_ids=is_text,
        trims_content=draws.random() < 0.5,
        chunk_tokens=draws.randint(1, 5),
    )
    text = f"text {draws.randint(0, 10**6)}:"
    body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": draws.randint(1, 150)}
    body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    if draws.random() < 0.3:
        body["stop"] = draws.sample(STOP_STRINGS, draws.randint(1, 2))
    return SlicedGeneration(
        path,
        body,
        config,
        draws,
        max_slice_tokens=draws.choice([1, 3, 10, 50]),
        is_streamed=draws.random() < 0.5,
        cut_share=draws.choice([0.0, 0.3]),
        has_token_ids=not is_text,
    )


@given(st.integers(0, 2**32))
@example(18).via("white space at the end of the first slice, of most of its tokens")
@example(24).via("U+FFFD at the end of a slice that is continued by token ids")
@example(38).via("stream that breaks off after the text, before the number of tokens")
@example(2497).via("streams that break off after the last token")
@example(4043).via("two stop strings in one token")
def test_generation_in_slices_has_the_answer_of_one_call(seed: int) -> None:
    sliced = draw_generation(seed)
    answer = sliced.run()
    if answer is None:
        return
    got, expected = summarize(answer), summarize(sliced.generate_whole())
    if sliced.generation.stop and got[-1] > expected[-1]:
        # A stop string across a boundary is found when the slice after it has ended.
        got, expected = got[:-1], expected[:-1]
    assert got == expected
