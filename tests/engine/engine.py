"""A real inference engine for tests: llama.cpp with a tiny model of random weights."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx
import pytest

from tests.paths import ROOT
from tests.support import make_http_client, running_process, skip_or_fail

REPLACEMENT = "\ufffd"
"""Character that servers write instead of bytes that are not UTF-8, for example of half a character."""


class Engine:
    """A running engine."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of the engine as it is."""
        response = self._client.post(path, json=body)
        if response.status_code != 200:
            raise ValueError(f"{path} answered {response.status_code}: {response.text}")
        return response.json()

    def get_json(self, path: str) -> Any:
        """Return what the engine answers to a GET request."""
        return self._client.get(path).raise_for_status().json()

    @property
    def url(self) -> str:
        return str(self._client.base_url).rstrip("/")

    def send(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer, whatever they are."""
        # After a stream, the engine closes the connection without saying so.
        response = self._client.post(path, content=body, headers={"connection": "close"})
        return response.status_code, response.content

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens: list[int] = self.post("/tokenize", body)["tokens"]
        return tokens

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of tokens, without a character that is incomplete at the end."""
        text: str = self.post("/detokenize", {"tokens": tokens})["content"]
        return text.rstrip(REPLACEMENT)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer the body of a completion in the form of vLLM with `return_token_ids: true`.

        llama.cpp's own /v1/completions returns no tokens, and writes U+FFFD on both sides of a cut inside a
        character. vLLM writes the character once its last byte is known.
        """
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self.tokenize(body["prompt"])
        answer = self.post("/completion", {**body, "prompt": prompt, "return_tokens": True})
        tokens: list[int] = answer["tokens"]
        written = tokens[:-1] if answer["stop_type"] == "eos" else tokens
        text = self.detokenize(prompt + written).removeprefix(self.detokenize(prompt))
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": "length" if answer["stop_type"] == "limit" else "stop",
            "prompt_token_ids": prompt,
            "token_ids": tokens,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": answer["tokens_predicted"]}
        return {"object": "text_completion", "choices": [choice], "usage": usage}


@contextlib.contextmanager
def running_engine(model: Path, *options: str) -> Iterator[Engine]:
    """Run the engine with this model, and options of `tests.engine.serve`, for the duration of the block."""
    command = (sys.executable, "-m", "tests.engine.serve", str(model), *options)
    with running_process(*command, cwd=ROOT, stdout=PIPE, stderr=None) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        if not address:
            pytest.fail("the engine ended before it could serve; its output says why")
        with make_http_client(address, timeout_s=60) as client:
            yield Engine(client)


def require_engine() -> None:
    """Skip the test if the engine is not installed, or fail it if CI=true."""
    for package in ("xllamacpp", "gguf"):
        if importlib.util.find_spec(package) is None:
            skip_or_fail(f"the {package} wheel is not installed")
