"""Stand-in servers that generate text: their answers, options, prefix caches and streams over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from dispatcher.lab.standin.config import Config, Control, Roll
from dispatcher.lab.standin.generation import ROLES, THINK_START, encode_text, generate_text
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.lab.standin.live import LiveWorld
from tests.support import wait_until

openai_types = importlib.import_module("openai.types")
openai_chat = importlib.import_module("openai.types.chat")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Tell me more. "}]
ENDLESS = {"ignore_eos": True}


class GenerationClient:
    """HTTP client of a world whose servers generate text."""

    def __init__(self, http: aiohttp.ClientSession, world: LiveWorld) -> None:
        self._http = http
        self.world = world

    async def post(
        self, path: str, body: dict[str, Any], url: str = "", **headers: str
    ) -> tuple[int, Any, Any]:
        """Return status, headers and decoded body of the answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post((url or self.world.gateway_url) + path, json=body, headers=named) as reply:
            text = await reply.text()
            return reply.status, reply.headers, json.loads(text) if text.startswith("{") else text

    async def get(self, path: str) -> Any:
        async with self._http.get(self.world.gateway_url + path) as reply:
            return await reply.json()

    async def complete(self, prompt: str | list[int], **fields: Any) -> Any:
        """Return the answer to a completion."""
        status, _, answer = await self.post(COMPLETIONS, {"prompt": prompt, **fields})
        assert status == 200, answer
        return answer

    async def chat(self, messages: Any = QUESTION, **fields: Any) -> Any:
        """Return the answer to a chat completion."""
        status, _, answer = await self.post(CHAT, {"messages": messages, **fields})
        assert status == 200, answer
        return answer

    async def continue_chat(self, content: str, question: Any = QUESTION, **fields: Any) -> str:
        """Return the content that continues an answer to the question."""
        messages = [*question, {"role": "assistant", "content": content}]
        prefill = {"continue_final_message": True, "add_generation_prompt": False}
        return get_content(await self.chat(messages, **prefill, **fields))

    async def stream(
        self, path: str, body: dict[str, Any], on_event: Any = lambda _: None, **headers: str
    ) -> list[Any]:
        """Return the decoded events of a stream until its end. Raises if the connection breaks before."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(
            self.world.gateway_url + path, json={**body, "stream": True}, headers=named
        ) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream"), await reply.text()
            events: list[Any] = []
            async for line in reply.content:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                    on_event(events)
            return events


def get_content(answer: Any) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def join_text(events: list[Any], field: str = "content") -> str:
    """Join the text of the events of a stream."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(
        choice["delta"].get(field, "") if "delta" in choice else choice["text"] for choice in choices
    )


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


@asynccontextmanager
async def run_servers(
    http: aiohttp.ClientSession, seconds: float | None = 0.0, *, world: Any = None, **generation: Any
) -> AsyncIterator[GenerationClient]:
    config = Config(seconds=seconds, generation=GenerationConfig(**generation), **(world or {}))
    async with LiveWorld(config) as running:
        yield GenerationClient(http, running)


# Completions.


async def test_completion_has_generated_text_and_the_fields_of_vllm(http: aiohttp.ClientSession) -> None:
    async with run_servers(http) as client:
        answer = await client.complete("Once upon ", model="qwen", max_tokens=40, return_token_ids=True)
    openai = openai_types.Completion.model_validate(answer, strict=True)
    expected = generate_text("qwen", encode_text("Once upon "), max_tokens=40, sampling=b"{}")
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)
    assert choice["prompt_token_ids"] == encode_text("Once upon ")
    assert choice["finish_reason"] == openai.choices[0].finish_reason == expected.finish_reason
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": len(expected.token_ids),
        "total_tokens": 10 + len(expected.token_ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("merged", [False, True])
async def test_slices_by_token_ids_join_to_the_whole_answer(
    http: aiohttp.ClientSession, merged: bool
) -> None:
    async with run_servers(http, merged_tokens=merged) as client:
        whole = await client.complete("Once upon ", max_tokens=300, return_token_ids=True)
        prompt = whole["choices"][0]["prompt_token_ids"]
        tokens: list[int] = []
        text, reason = "", "length"
        while reason == "length" and len(tokens) < 300:
            part = await client.complete(
                [*prompt, *tokens], max_tokens=min(7, 300 - len(tokens)), return_token_ids=True
            )
            text += part["choices"][0]["text"]
            tokens += part["choices"][0]["token_ids"]
            reason = part["choices"][0]["finish_reason"]
    assert (text, tokens, reason) == tuple(
        whole["choices"][0][name] for name in ("text", "token_ids", "finish_reason")
    )


async def test_slices_by_text_yield_another_text_with_merged_tokens(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, merged_tokens=True) as client:
        whole = (await client.complete("Once upon ", max_tokens=60, **ENDLESS))["choices"][0]["text"]
        first = (await client.complete("Once upon ", max_tokens=30, **ENDLESS))["choices"][0]["text"]
        rest = await client.complete("Once upon " + first, max_tokens=30, **ENDLESS)
    assert whole.startswith(first)
    assert not whole.startswith(first + rest["choices"][0]["text"][:8])


async def test_default_is_16_tokens_for_a_completion_and_the_context_for_a_chat(
    http: aiohttp.ClientSession,
) -> None:
    async with run_servers(http, context_length=200) as client:
        assert (await client.complete("Go. ", **ENDLESS))["usage"]["completion_tokens"] == 16
        assert (await client.chat(**ENDLESS))["usage"]["total_tokens"] == 200
        limited = await client.chat(max_tokens=50, max_completion_tokens=20, **ENDLESS)
        assert limited["usage"]["completion_tokens"] == 20


async def test_answer_ends_by_itself_or_at_a_stop_string(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, end_probability=0.005) as client:
        whole = (await client.complete("Go. ", max_tokens=5_000))["choices"][0]
        assert whole["finish_reason"] == "stop"
        assert 12 < len(whole["text"]) < 4_000
        stop = whole["text"][10:12]
        for stops in (stop, ["not in it", stop]):
            cut = (await client.complete("Go. ", max_tokens=5_000, stop=stops))["choices"][0]
            assert cut["text"] == whole["text"][: whole["text"].index(stop)]
            assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


async def test_lost_sampling_parameter_changes_the_text(http: aiohttp.ClientSession) -> None:
    async with run_servers(http) as client:
        fields: list[dict[str, Any]] = [{}, {"seed": 1}, {"temperature": 0.5}, {"top_p": 0.9}]
        texts = [(await client.complete("Go. ", **ENDLESS, **each))["choices"][0]["text"] for each in fields]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {}, "Either prompt"),
        (COMPLETIONS, {"prompt": []}, "Either prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "Only one prompt"),
        (COMPLETIONS, {"prompt": [5, 99_999]}, "Token id 99999 is out of vocabulary"),
        (COMPLETIONS, {"prompt": [5, -1]}, "Token id -1 is out of vocabulary"),
        (COMPLETIONS, {"prompt": "a", "n": 2}, "`n`"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "`echo`"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0}, "`logprobs`"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, "empty string"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "at least 1, got 0"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "`stream=True`"),
        (COMPLETIONS, {"prompt": {"text": "a"}}, "$.prompt"),
        (CHAT, {}, "`messages`"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "wizard"),
        (CHAT, {"messages": QUESTION, "tools": [{"type": "function"}]}, "`tools`"),
        (
            CHAT,
            {"messages": QUESTION, "continue_final_message": True, "add_generation_prompt": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
        (CHAT, {"messages": QUESTION, "continue_final_message": True}, "are not compatible"),
    ],
)
async def test_invalid_request_is_rejected_with_the_reason(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], message: str
) -> None:
    async with run_servers(http) as client:
        status, _, answer = await client.post(path, body)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
        assert message in answer["error"]["message"]
        assert client.world.pool.build_report()["all"]["peak"] == 0, "the request used no slot"


# Chats.


@pytest.mark.parametrize("merged", [False, True])
async def test_chat_continued_by_token_ids_is_exact(http: aiohttp.ClientSession, merged: bool) -> None:
    async with run_servers(http, merged_tokens=merged) as client:
        whole = await client.chat(max_tokens=60, return_token_ids=True, **ENDLESS)
        openai_chat.ChatCompletion.model_validate(whole, strict=True)
        first = await client.chat(max_tokens=23, return_token_ids=True, **ENDLESS)
        tokens = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
        rest = await client.complete(tokens, max_tokens=37, **ENDLESS)
    assert "prompt_token_ids" not in first["choices"][0], "vLLM has it beside the choices of a chat"
    assert get_content(first) + rest["choices"][0]["text"] == get_content(whole)


async def test_chat_continued_by_its_final_message_is_exact_with_tokens_of_one_byte(
    http: aiohttp.ClientSession,
) -> None:
    async with run_servers(http) as client:
        whole = get_content(await client.chat(max_tokens=200, **ENDLESS))
        for size in range(1, 40):
            first = get_content(await client.chat(max_tokens=size, **ENDLESS))
            joined = first + await client.continue_chat(first, max_tokens=60, **ENDLESS)
            assert len(joined) > len(first)
            assert whole.startswith(joined)


async def test_chat_without_prefill_begins_a_new_message(http: aiohttp.ClientSession) -> None:
    async with run_servers(http) as client:
        whole = get_content(await client.chat(max_tokens=60, **ENDLESS))
        messages = [*QUESTION, {"role": "assistant", "content": whole[:10]}]
        new = await client.chat(messages, max_tokens=30, return_token_ids=True, **ENDLESS)
        parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "more. "}]
        assert get_content(
            await client.chat([{"role": "user", "content": parts}], max_tokens=60, **ENDLESS)
        ) == (whole)
    assert new["prompt_token_ids"][-1] == ROLES["assistant"]
    assert get_content(new)[:5] not in whole


# Options.


async def test_template_that_trims_content_changes_the_continuation(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, trims_content=True) as client:
        question = [{"role": "user", "content": "Say a word."}]
        whole = get_content(await client.chat(question, max_tokens=300, **ENDLESS))
        assert not whole[0].isspace()
        space = next(at for at in range(5, 200) if whole[at] == " " and not whole[at - 1].isspace())
        for end, expected in ((space, True), (space + 1, False)):
            rest = await client.continue_chat(whole[:end], question, max_tokens=30, **ENDLESS)
            assert (rest[:8] == whole[end : end + 8]) == expected


async def test_server_that_ignores_prefill_begins_a_new_message(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, ignores_continue=True) as client:
        whole = get_content(await client.chat(max_tokens=100, **ENDLESS))
        prefilled = await client.continue_chat(whole[:20], max_tokens=30, **ENDLESS)
        assert prefilled[:8] not in whole
        messages = [*QUESTION, {"role": "assistant", "content": whole[:20]}]
        assert get_content(await client.chat(messages, max_tokens=30, **ENDLESS)) == prefilled
        await client.chat(messages, continue_final_message=True, max_tokens=3)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"continue_final_message": False}),
        (CHAT, {"add_generation_prompt": True}),
        (CHAT, {"return_token_ids": True}),
        (COMPLETIONS, {"return_token_ids": True}),
        (COMPLETIONS, {"ignore_eos": True}),
    ],
)
async def test_server_of_the_plain_openai_api_rejects_other_fields(
    http: aiohttp.ClientSession, path: str, field: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": QUESTION}
    body |= {"model": "m", "max_tokens": 3, "temperature": 0, "stop": "x", "seed": 1, "user": "u"}
    async with run_servers(http, rejects_unknown_fields=True) as client:
        assert (await client.post(path, body))[0] == 200
        status, _, answer = await client.post(path, body | field)
    assert status == 400
    assert answer["error"]["message"] == f"Unrecognized request argument supplied: {next(iter(field))}"


async def test_server_without_token_ids_returns_none(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, no_token_ids=True) as client:
        completion = await client.complete("a", return_token_ids=True)
        chat = await client.chat(max_tokens=5, return_token_ids=True)
    assert "token_ids" not in json.dumps([completion, chat])


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_a_field_of_the_message(http: aiohttp.ClientSession, field: str) -> None:
    async with run_servers(http, reasoning=field, end_probability=0.001) as client:
        whole = await client.chat(max_tokens=400, return_token_ids=True)
        message = whole["choices"][0]["message"]
        assert whole["prompt_token_ids"][-1] == THINK_START
        raw = await client.complete(whole["prompt_token_ids"], max_tokens=400)
        assert raw["choices"][0]["text"] == f"{message[field]}</think>{message['content']}"
        short = await client.chat(max_tokens=4)
        assert short["choices"][0]["message"]["content"] is None
        assert message[field].startswith(short["choices"][0]["message"][field])
        events = await client.stream(CHAT, {"messages": QUESTION, "max_tokens": 400})
        assert (join_text(events, field), join_text(events)) == (message[field], message["content"])


async def test_request_beyond_the_context_is_rejected_in_the_words_of_vllm(
    http: aiohttp.ClientSession,
) -> None:
    async with run_servers(http, context_length=100) as client:
        await client.complete("x" * 60, max_tokens=40)
        status, _, answer = await client.post(COMPLETIONS, {"prompt": "x" * 61, "max_tokens": 40})
        assert status == 400
        assert answer["error"]["message"].startswith(
            "This model's maximum context length is 100 tokens. However, you requested 40 output tokens and "
            "your prompt contains at least 61 input tokens, for a total of at least 101 tokens."
        )
        status, _, answer = await client.post(COMPLETIONS, {"prompt": "x" * 100_000})
        assert (status, "at least 85 input tokens" in answer["error"]["message"]) == (400, True)
        listing = await client.get("/v1/models")
        assert listing["data"][0]["max_model_len"] == 100
        full = [{"role": "user", "content": "x" * 97}]
        status, _, answer = await client.post(CHAT, {"messages": full})
        assert (status, "100 tokens" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("replaces", [False, True])
async def test_character_cut_by_the_end_is_withheld_or_replaced(
    http: aiohttp.ClientSession, replaces: bool
) -> None:
    async with run_servers(http, replaces_incomplete=replaces) as client:
        # The first generated byte completes nothing: the prompt ends with one byte of three.
        answer = await client.complete([*encode_text("漢")[:1]], max_tokens=1)
    assert answer["choices"][0]["text"] == ("\ufffd" if replaces else "")


async def test_behaviour_can_be_changed_for_one_request_or_all(http: aiohttp.ClientSession) -> None:
    async with LiveWorld(Config(seconds=0.0)) as world:
        client = GenerationClient(http, world)
        assert (await client.complete("a"))["choices"][0]["text"] == "ok"
        own = {"sim": {"generation": {"context_length": 5}}}
        assert (await client.complete("a", max_tokens=4, **own))["choices"][0]["text"] != "ok"
        assert (await client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5, **own}))[0] == 400
        async with http.post(f"{world.control_url}/control", json={"generation": {}}) as reply:
            assert reply.status == 200
        text = (await client.complete("a"))["choices"][0]["text"]
        assert text not in ("ok", "")
        sized = await client.complete("a", sim={"answer_bytes": 3})
        assert sized["choices"][0]["text"] == "xxx"
        assert (await client.post("/v1/embeddings", {"input": ["a"]}))[2]["data"][0]["embedding"]
        await world.apply_control(Control(generation=None))
        assert (await client.complete("a"))["choices"][0]["text"] == "ok"


# Prefix caches and durations.


async def test_server_reports_tokens_it_has_processed_before(http: aiohttp.ClientSession) -> None:
    async def count_cached(client: GenerationClient, prompt: Any, **fields: Any) -> int:
        answer = await client.complete(prompt, max_tokens=40, **ENDLESS, **fields)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert client.world.gateway.log[-1].cached_tokens == cached
        assert isinstance(cached, int)
        return cached

    prompt = encode_text("0123456789abcdef" * 4)
    async with run_servers(http) as client:
        assert await count_cached(client, prompt) == 0
        assert await count_cached(client, prompt) == 48, "the last token is always processed"
        # 64 tokens of the prompt and 39 processed ones of the 40 that were generated.
        generated = generate_text("m", prompt, max_tokens=40, sampling=b"{}", end_probability=0).token_ids
        assert await count_cached(client, [*prompt, *generated]) == 96
        assert await count_cached(client, prompt, model="another") == 0
        assert await count_cached(client, [0, *prompt[1:]]) == 0
        assert await count_cached(client, [*prompt[:40], 0, *prompt[41:]]) == 32
        await client.world.apply_control(Control(generation=GenerationConfig(prefix_cache=False)))
        assert await count_cached(client, prompt) == 0


async def test_each_server_has_a_cache_of_its_own(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "0123456789abcdef" * 4, "max_tokens": 2}
    async with run_servers(http, world={"prefix_servers": 2, "endpoints": 2}) as client:

        async def count_cached(url: str = "", **headers: str) -> int:
            await client.post(COMPLETIONS, body, url, **headers)
            return client.world.gateway.log[-1].cached_tokens

        assert [await count_cached(x_session_token=f"server-{n}") for n in (0, 1, 0, 1)] == [0, 0, 48, 48]
        servers = [client.world.metrics_url.replace("/metrics", f"/servers/{n}") for n in (0, 1)]
        assert [await count_cached(servers[n]) for n in (0, 1, 0, 1)] == [0, 0, 48, 48]
        await client.world.apply_control(Control(kill_server="server-1"))
        assert await count_cached(x_session_token="server-0") == 48
        await client.world.apply_control(Control(roll=Roll(to=["m"], gone_s=0.01)))
        await wait_until(lambda: len(client.world.servers.present) < 2)
        await wait_until(lambda: len(client.world.servers.present) == 2)
        assert await count_cached(servers[0]) == 0, "a server that was replaced has an empty cache"


async def test_cached_tokens_take_no_time(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, None) as client:
        for _ in range(2):
            await client.complete("x" * 4_000, max_tokens=10, **ENDLESS)
        new, cached = (entry.ended_at - entry.started_at for entry in client.world.gateway.log)  # type: ignore[operator]
    assert new >= 0.03 + 0.00025 * 4_000 + 0.012 * 10
    # 0.15 s on an idle machine.
    assert cached < 0.03 + 0.00025 * 4_000


# Streams.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stream_joins_to_the_whole_answer(http: aiohttp.ClientSession, path: str) -> None:
    body: dict[str, Any] = {"prompt": "Go. "} if path == COMPLETIONS else {"messages": QUESTION}
    body |= {"max_tokens": 83, "return_token_ids": True, **ENDLESS}
    async with run_servers(http, chunk_tokens=5) as client:
        _, _, whole = await client.post(path, body)
        events = await client.stream(path, body | {"stream_options": {"include_usage": True}})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 83)
    if path == CHAT:
        for chunk in chunks:
            openai_chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    choice = whole["choices"][0]
    assert join_text(chunks) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    with_prompt = [n for n, chunk in enumerate(chunks) if "prompt_token_ids" in json.dumps(chunk)]
    assert with_prompt == [0]
    assert len(chunks) == 17 + (path == CHAT)


async def test_stream_shows_no_part_of_a_stop_string(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, chunk_tokens=1) as client:
        whole = (await client.complete("Go. ", max_tokens=100, **ENDLESS))["choices"][0]["text"]
        stop = whole[30:36]
        body = {"prompt": "Go. ", "max_tokens": 100, "stop": [stop], **ENDLESS}
        events = await client.stream(COMPLETIONS, body)
    assert join_text(events) == whole[: whole.index(stop)]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_stream_is_spread_over_the_duration(http: aiohttp.ClientSession) -> None:
    running: list[int] = []
    async with run_servers(http, 1.0, world={"path_s": 0.02}, chunk_tokens=10) as client:
        body = {"prompt": "Go. ", "max_tokens": 100, **ENDLESS}
        events = await client.stream(
            COMPLETIONS, body, lambda _: running.append(client.world.pool.running), x_request_id="r"
        )
        report = client.world.gateway.build_report()
    assert running[0] == 1, "the first events arrive while the request runs"
    assert running[-1] == 0
    assert len(events) == 11
    assert (report["answers"], report["ids"]["served"], report["batch"]["now"]) == ({"200": 1}, 1, 0)


async def start_stream(client: GenerationClient, **headers: str) -> tuple[asyncio.Task[Any], list[Any]]:
    """Start a long stream, and return it with the list of its events when the first ones have arrived."""
    seen: list[Any] = []
    body = {"prompt": "Go. " * 10, "max_tokens": 2_000, "return_token_ids": True, **ENDLESS}

    def record(events: list[Any]) -> None:
        seen[:] = events

    stream = asyncio.create_task(client.stream(COMPLETIONS, body, record, **headers))
    await wait_until(lambda: len(seen) >= 5)
    return stream, seen


@pytest.mark.parametrize("control", [Control(evict="r"), Control(kill_server="server-0")])
async def test_eviction_and_end_of_the_server_cut_a_stream_after_what_was_sent(
    http: aiohttp.ClientSession, control: Control
) -> None:
    async with run_servers(http, 20.0) as client:
        stream, seen = await start_stream(client, x_request_id="r")
        await client.world.apply_control(Control(evict="another"))
        await client.world.apply_control(control)
        with pytest.raises(aiohttp.ClientError):
            await stream
        await wait_until(lambda: client.world.pool.running == 0)
        entry = client.world.gateway.log[-1]
        assert (entry.status, client.world.gateway.build_report()["broken"]) == (-1, 1)
        received = [token for event in seen for token in event["choices"][0]["token_ids"]]
        assert len(received) <= entry.generated_tokens < 2_000
        # An evicted request leaves its tokens in the cache of its server, a dead server loses them.
        await client.world.apply_control(Control(seconds=0.0))
        prompt = [*encode_text("Go. " * 10), *received]
        rest = await client.complete(
            prompt, max_tokens=2_000 - len(received), return_token_ids=True, **ENDLESS
        )
        cached = rest["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (0 if control.kill_server else (len(prompt) - 1) // 16 * 16)
        whole = await client.complete("Go. " * 10, max_tokens=2_000, return_token_ids=True, **ENDLESS)
        joined = [*received, *rest["choices"][0]["token_ids"]]
        assert joined == whole["choices"][0]["token_ids"]


async def test_evicted_request_is_answered_429_if_its_answer_has_not_begun(
    http: aiohttp.ClientSession,
) -> None:
    async with run_servers(http, 20.0, world={"slots": 1}) as client:
        runs = asyncio.create_task(client.post(COMPLETIONS, {"prompt": "a"}, x_request_id="runs"))
        await wait_until(lambda: client.world.pool.running == 1)
        body = {"prompt": "a", "stream": True}
        waits = asyncio.create_task(client.post(COMPLETIONS, body, x_request_id="waits"))
        await wait_until(lambda: client.world.pool.waiting == 1)
        for id_, task in (("waits", waits), ("runs", runs)):
            await client.world.apply_control(Control(evict=id_))
            status, headers, _ = await task
            assert (status, headers["x-llm-d-request-dropped-reason"]) == (429, "evicted-priority")
        assert client.world.pool.running == client.world.pool.waiting == 0
        assert client.world.build_report()["gateway"]["answers"] == {"429": 2}


async def test_disconnected_client_ends_its_stream(http: aiohttp.ClientSession) -> None:
    async with run_servers(http, 20.0) as client:
        stream, _ = await start_stream(client)
        stream.cancel()
        await wait_until(lambda: client.world.pool.running == 0)
        assert client.world.gateway.log[-1].status == 0
        assert 0 < client.world.gateway.log[-1].generated_tokens < 2_000


async def test_stream_can_be_cut_or_slow(http: aiohttp.ClientSession) -> None:
    seen: list[Any] = []
    body: dict[str, Any] = {"prompt": "Go. ", "max_tokens": 80, **ENDLESS}
    async with run_servers(http, 0.2) as client:
        whole = (await client.complete(**body))["choices"][0]["text"]
        with pytest.raises(aiohttp.ClientError):
            await client.stream(
                COMPLETIONS, body | {"sim": {"kind": "cut"}}, lambda events: seen.append(events[-1])
            )
        assert whole.startswith(join_text(seen))
        assert len(seen) == 10
        await wait_until(lambda: client.world.pool.running == 0)
        slow = await client.stream(COMPLETIONS, body | {"sim": {"kind": "slow", "slow_s": 0.1}})
        assert join_text(slow) == whole
