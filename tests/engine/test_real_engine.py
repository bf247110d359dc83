"""A text that a real engine generates in slices equals the text that it generates at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine import REPLACEMENT, Engine, require_engine, running_engine

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


def draw_slice(sizes: random.Random, left: int) -> int:
    """Return the number of tokens of the next slice: 1 to 50, but not more than are left."""
    return min(sizes.randint(1, 50), left)


def generate_by_tokens(engine: Engine, body: dict[str, Any], sizes: random.Random) -> dict[str, Any]:
    """Return the choice of a completion that is generated in slices, each continued by token ids."""
    prompt, text, tokens = engine.tokenize(body["prompt"]), "", list[int]()
    while True:
        max_tokens = draw_slice(sizes, body["max_tokens"] - len(tokens))
        (choice,) = engine.complete({**body, "prompt": prompt + tokens, "max_tokens": max_tokens})["choices"]
        text, tokens = text + choice["text"], tokens + choice["token_ids"]
        if choice["finish_reason"] != "length" or len(tokens) == body["max_tokens"]:
            return {**choice, "text": text, "token_ids": tokens, "prompt_token_ids": prompt}


def generate_by_text(engine: Engine, body: dict[str, Any], sizes: random.Random) -> tuple[str, str]:
    """Return text and finish reason of a completion that is generated in slices, each continued by text.

    A character that is cut by the end of a slice is generated again in the next one. A slice that is shorter
    than a character would never end. The tokens are those of one token per byte.
    """
    text = ""
    while True:
        left = body["max_tokens"] - len(text.encode())
        max_tokens = min(max(draw_slice(sizes, left), 4), left)
        sliced = {**body, "prompt": body["prompt"] + text, "max_tokens": max_tokens}
        (choice,) = engine.post("/v1/completions", sliced)["choices"]
        text += choice["text"].rstrip(REPLACEMENT)
        if choice["finish_reason"] != "length" or max_tokens == left:
            return text, choice["finish_reason"]


def generate_chat(engine: Engine, body: dict[str, Any], sizes: random.Random) -> tuple[str, str]:
    """Return text and finish reason of a chat answer in slices, each continued as its final message."""
    text = ""
    while True:
        left = body["max_tokens"] - len(text.encode())
        max_tokens = min(max(draw_slice(sizes, left), 4), left)
        sliced = {**body, "max_tokens": max_tokens}
        if text:
            sliced["messages"] = [*body["messages"], {"role": "assistant", "content": text}]
            sliced |= {"continue_final_message": True, "add_generation_prompt": False}
        (choice,) = engine.post("/v1/chat/completions", sliced)["choices"]
        content = choice["message"]["content"]
        # llama.cpp repeats the text that it continues, unless it streams. vLLM does not repeat it.
        assert content.startswith(text)
        text = content
        if choice["finish_reason"] != "length" or max_tokens == left:
            return text, choice["finish_reason"]


@pytest.mark.parametrize("engine", ["bpe", "spm"], indirect=True)
def test_slices_continued_by_token_ids_equal_the_whole_text(engine: Engine) -> None:
    differing = []
    for number, prompt in enumerate(make_prompts()):
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "cache_prompt": number % 2 == 0}
        (whole,) = engine.complete(body)["choices"]
        if generate_by_tokens(engine, body, random.Random(number)) != whole:
            differing.append(prompt)
    assert differing == []


@pytest.mark.parametrize("engine", ["bytes"], indirect=True)
def test_slices_continued_by_text_equal_the_whole_text_if_a_text_has_one_tokenization(engine: Engine) -> None:
    differing = []
    for number, prompt in enumerate(make_prompts()):
        # After ".", the model begins a new character. After others, it may continue one that is complete.
        body = {"prompt": f"{prompt}.", "max_tokens": MAX_TOKENS, "temperature": 0}
        (whole,) = engine.post("/v1/completions", body)["choices"]
        expected = whole["text"].rstrip(REPLACEMENT), whole["finish_reason"]
        if generate_by_text(engine, body, random.Random(number)) != expected:
            differing.append(prompt)
    assert differing == []


@pytest.mark.parametrize("engine", ["bytes"], indirect=True)
def test_chat_answer_continued_as_final_message_equals_the_whole_answer(engine: Engine) -> None:
    differing = []
    for number, prompt in enumerate(make_prompts()):
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        (whole,) = engine.post("/v1/chat/completions", body)["choices"]
        expected = whole["message"]["content"], whole["finish_reason"]
        if generate_chat(engine, body, random.Random(number)) != expected:
            differing.append(prompt)
    assert differing == []


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
