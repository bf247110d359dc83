"""A text that a real engine generates in slices equals the text that it generates at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dispatcher.features.slices.answers import Finished, Unchanged, interpret_answer
from dispatcher.features.slices.bodies import build_slice_body, compute_slice_tokens
from dispatcher.features.slices.eligibility import Generation, SliceTerms, WholeReason, check_generation
from dispatcher.features.slices.equality import Continuation, EqualityCheck
from dispatcher.features.slices.progress import Progress, Stage
from dispatcher.features.slices.stream import join_events
from tests.engine.engine import REPLACEMENT, Engine, require_engine, running_engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPTS = 200
MAX_TOKENS = 100
SYMBOLS = [
    *"abehist ,.\n",
    "the ",
    "é",
    "ß",
    "€",
    "漢",
    "字",
    "\u3042",
    "😊",
    "👩\u200d👩",
    "e\u0301",
    "\u2028",
    "\u05d0",
]


def make_prompts() -> list[str]:
    source = random.Random(5)
    return ["".join(source.choices(SYMBOLS, k=source.randint(1, 40))) for _ in range(PROMPTS)]


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the tokenizer that the test names as its parameter."""
    require_engine()
    from tests.engine.make_model import write_model

    model = Path(tmp_path_factory.mktemp("engine")) / "model.gguf"
    write_model(model, request.param)
    with running_engine(model) as engine:
        yield engine


@dataclass
class Slices:
    """Generations in slices, by the functions that the dispatcher uses."""

    send: Callable[[str, bytes], tuple[int, bytes]]
    """Send a body to a path, and return status and body of the answer."""
    path: str
    wants_token_ids: bool = False
    repeats_text: bool = False
    is_streamed: bool = False
    restart_count: int = 0
    """Number of generations that could not be continued, and were sent whole."""
    slice_count: int = 0

    def generate(self, body: dict[str, Any], sizes: random.Random) -> bytes:
        """Return the answer of a generation in slices of random sizes."""
        payload = msgspec.json.encode(body)
        generation = check_generation(self.path, payload, SliceTerms(1, 1, (self.path,)))
        assert isinstance(generation, Generation)
        progress: Progress | None = None
        while True:
            asked_tokens = compute_slice_tokens(generation, progress, sizes.randint(1, 50))
            sliced = build_slice_body(
                generation,
                progress,
                asked_tokens,
                wants_token_ids=self.wants_token_ids,
                is_streamed=self.is_streamed,
            )
            status, answer = self.send(self.path, sliced)
            self.slice_count += 1
            if self.is_streamed:
                joined = join_events(answer)
                assert joined is not None
                assert joined[1], "the stream is complete"
                answer = joined[0]
            result = interpret_answer(
                generation,
                progress,
                status,
                answer,
                asked_tokens=asked_tokens,
                max_kept_bytes=1 << 20,
                repeats_text=self.repeats_text,
            )
            if isinstance(result, Finished):
                return result.body
            if isinstance(result, Unchanged):
                return answer
            progress = result.progress
            if progress.stage is Stage.RESTART:
                self.restart_count += 1
                return self.send(self.path, payload)[1]


def summarize(answer: bytes) -> tuple[Any, ...]:
    """Return what must not differ between an answer in slices and that of one call."""
    decoded = msgspec.json.decode(answer)
    (choice,), usage = decoded["choices"], decoded["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def find_differing(slices: Slices, bodies: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the generations whose answers in slices are not those of one call."""
    differing = []
    for number, body in enumerate(bodies):
        whole = summarize(slices.send(slices.path, msgspec.json.encode(body))[1])
        got = summarize(slices.generate(body, random.Random(number)))
        if slices.is_streamed:
            # A stream of llama.cpp leaves out the bytes of a character that the end cuts.
            whole, got = ((text.rstrip(REPLACEMENT), *rest) for text, *rest in (whole, got))
        if got != whole:
            differing.append((number, body, got, whole))
    print(f"{len(bodies)} generations in {slices.slice_count} slices, {slices.restart_count} restarted")
    return differing


@pytest.mark.slow
@pytest.mark.parametrize("caches_prompt", [True, False])
@pytest.mark.parametrize("engine", ["bpe", "spm"], indirect=True)
def test_slices_continued_by_token_ids_equal_the_whole_text(engine: Engine, caches_prompt: bool) -> None:
    def complete(path: str, body: bytes) -> tuple[int, bytes]:
        answer = engine.complete({**msgspec.json.decode(body), "cache_prompt": caches_prompt})
        return 200, msgspec.json.encode(answer)

    slices = Slices(complete, COMPLETION, wants_token_ids=True)
    prompts = make_prompts()[caches_prompt::2]
    bodies = [{"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0} for prompt in prompts]
    assert find_differing(slices, bodies) == []
    # The model writes bytes that are no characters, too. Where a slice begins with one, it is not continued.
    assert slices.restart_count < len(prompts) / 20


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("engine", ["bytes"], indirect=True)
def test_slices_continued_by_text_equal_the_whole_text_if_a_text_has_one_tokenization(
    engine: Engine, is_streamed: bool
) -> None:
    slices = Slices(engine.send, COMPLETION, is_streamed=is_streamed)
    # After ".", the model begins a new character. After others, it may continue one that is complete.
    bodies = [
        {"prompt": f"{prompt}.", "max_tokens": MAX_TOKENS, "temperature": 0} for prompt in make_prompts()
    ]
    assert find_differing(slices, bodies) == []
    assert slices.restart_count < PROMPTS / 10


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("engine", ["bytes"], indirect=True)
def test_chat_answer_continued_as_final_message_equals_the_whole_answer(
    engine: Engine, is_streamed: bool
) -> None:
    # llama.cpp repeats the text that it continues, unless it streams. vLLM does not repeat it.
    slices = Slices(engine.send, CHAT, is_streamed=is_streamed, repeats_text=not is_streamed)
    bodies = [
        {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS, "temperature": 0}
        for prompt in make_prompts()
    ]
    assert find_differing(slices, bodies) == []
    assert slices.restart_count < PROMPTS / 10


@pytest.mark.parametrize(
    ("path", "is_streamed", "expected"),
    [
        (COMPLETION, False, Continuation.TEXT),
        (COMPLETION, True, Continuation.TEXT),
        (CHAT, False, Continuation.REPEATED_TEXT),
        (CHAT, True, Continuation.TEXT),
    ],
)
@pytest.mark.parametrize("engine", ["bytes"], indirect=True)
def test_check_finds_how_the_engine_continues_generations(
    engine: Engine, path: str, is_streamed: bool, expected: Continuation
) -> None:
    check = EqualityCheck(path, "m", is_streamed=is_streamed)
    while (body := check.next_body) is not None:
        check.record_answer(*engine.send(path, body))
    assert (check.continuation, check.why) == (expected, "")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("engine", ["bpe", "spm"], indirect=True)
def test_check_finds_that_text_is_divided_into_other_tokens(engine: Engine, is_streamed: bool) -> None:
    check = EqualityCheck(COMPLETION, "m", is_streamed=is_streamed)
    while (body := check.next_body) is not None:
        check.record_answer(*engine.send(COMPLETION, body))
    assert (check.continuation, check.reason) == (None, WholeReason.UNEQUAL)
    assert check.difference is not None


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["bpe", "spm"], indirect=True)
def test_slices_continued_by_text_differ_if_the_text_has_other_tokens(engine: Engine) -> None:
    """Text is generated by tokens that depend on the tokens before, so a wrong continuation is noticed."""
    differing = 0
    for prompt in make_prompts()[:40]:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        (whole,) = engine.complete(body)["choices"]
        first = engine.detokenize(whole["token_ids"][:50])
        rest = {**body, "prompt": prompt + first, "max_tokens": MAX_TOKENS - 50}
        (choice,) = engine.complete(rest)["choices"]
        if len(whole["token_ids"]) > 50:
            differing += first + choice["text"] != whole["text"]
    assert differing > 10
