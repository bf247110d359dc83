"""Which results are a client's own, and what it makes of them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import redis.asyncio

from dispatcher.client import (
    BatchClient,
    DeadlineExceededError,
    Handle,
    Item,
    NoResultError,
    QueueUnreachableError,
    RequestCancelledError,
    RequestFailedError,
    TokenUsage,
)
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.result import ErrorCode, encode_answer
from dispatcher.lab.standin.live import Config, LiveWorld
from tests.client.answering import NAMES, POOL, Answering, refusal
from tests.queue.known import assert_only_known_keys
from tests.queue.made import queues
from tests.queue.servers import Server
from tests.scenarios.responses_server import ResponsesServer
from tests.support import wait_until


@pytest.fixture
async def producer(one_redis: Server) -> AsyncIterator[BatchClient]:
    async with BatchClient(one_redis.url, pool=POOL) as made:
        yield made


@pytest.fixture
async def raw(one_redis: Server) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(one_redis.url) as found:
        yield found


async def test_a_request_is_answered_on_every_engine(any_redis: Server) -> None:
    async with queues(any_redis.url, "a", names=NAMES) as (queue,), Answering(queue).always():
        async with BatchClient(any_redis.url, pool=POOL) as client:
            result = await client.submit({"prompt": "hi"}, deadline="10m", priority=3)
        assert (result.ok, result.status, result.json()) == (True, 200, {"prompt": "hi"})
        assert result.raise_for_status() is result
        async with BatchClient(any_redis.url, pool=POOL, name="nightly") as client:
            handle = await client.enqueue({"prompt": "hi"}, id="mine-1")
        async with BatchClient(any_redis.url, pool=POOL, name="nightly") as client:
            assert (await client.result("mine-1")).json() == {"prompt": "hi"}
        assert handle.id == "mine-1"


async def test_a_closed_client_leaves_nothing_that_stays(
    answering: Answering, one_redis: Server, raw: redis.asyncio.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        await client.enqueue({"n": 1})
        await client.enqueue({"n": 2})
        await answering.once()
        handle = await client.enqueue({"n": 3})
    await assert_only_known_keys(raw, NAMES)
    assert not [key async for key in raw.scan_iter("batch-results:*")]
    assert list(await answering.queue.check_cancelled([(handle.id, handle.token)])), (
        "nobody could read its result"
    )


async def test_a_result_without_the_token_of_its_request_is_nobodys(
    answering: Answering, raw: redis.asyncio.Redis, producer: BatchClient
) -> None:
    """Another producer names alice's list and alice's id; her own result comes after it."""
    handle = await producer.enqueue(b'{"real": 1}', id="alice-1")
    forged = [encode_answer("alice-1", 200, b"forged", token=token) for token in ("", "guessed")]
    await raw.lpush(handle.results, *forged, encode_answer("another", 200, b"forged", token=handle.token))
    with pytest.raises(NoResultError):
        await producer.result(handle, timeout=0.2)
    assert producer.ignored_count == 3
    await answering.once()
    assert (await producer.result(handle, timeout=5)).text == '{"real": 1}'


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[1]", b'{"id": 7}', b'{"id":"\xff"}', b"[" * 5000])
async def test_garbage_in_the_list_costs_nobody_his_result(
    answering: Answering, raw: redis.asyncio.Redis, producer: BatchClient, garbage: bytes
) -> None:
    handle = await producer.enqueue(b"{}")
    await raw.lpush(handle.results, garbage)
    await answering.once()
    assert (await producer.result(handle, timeout=5)).id == handle.id
    assert producer.ignored_count == 1


async def test_results_of_others_are_kept_while_somebody_may_await_them(
    answering: Answering, producer: BatchClient
) -> None:
    handles = await producer.enqueue_many([{"n": n} for n in range(20)])
    await answering.once()
    assert (await producer.result(handles[-1], timeout=5)).json() == {"n": 19}
    await wait_until(lambda: all(handle.done for handle in handles))
    del handles[5:]
    gc.collect()
    assert len(producer._mailbox._handles) == 5, "what nobody can await any more is not kept"
    found = await asyncio.gather(*(producer.result(handle, timeout=5) for handle in handles))
    assert [result.json() for result in found] == [{"n": n} for n in range(5)]


async def test_a_result_that_is_asked_for_again_is_the_same(
    answering: Answering, producer: BatchClient
) -> None:
    handle = await producer.enqueue({})
    await answering.once()
    first, second = await asyncio.gather(producer.result(handle), producer.result(handle))
    assert first is second is await producer.result(handle, timeout=0)


async def test_a_wait_that_was_given_up_costs_no_result(answering: Answering, producer: BatchClient) -> None:
    handle = await producer.enqueue({})
    waiting = asyncio.create_task(producer.result(handle))
    await wait_until(lambda: handle.waiters)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await answering.once()
    assert (await producer.result(handle, timeout=5)).ok


@pytest.mark.parametrize(
    ("code", "status", "raised"),
    [
        (ErrorCode.CANCELLED, None, RequestCancelledError),
        (ErrorCode.DEADLINE_EXCEEDED, None, DeadlineExceededError),
        (ErrorCode.RETRIES_EXHAUSTED, 503, RequestFailedError),
    ],
)
async def test_a_request_that_failed_raises_when_it_is_asked(
    answering: Answering, producer: BatchClient, code: ErrorCode, status: int | None, raised: type[Exception]
) -> None:
    async with answering.always(refusal(code, status, b"no room" if status else None)):
        result = await producer.submit({}, id="r-1")
    assert not result.ok
    with pytest.raises(raised, match=f"r-1: {code}: told {code}") as told:
        result.raise_for_status()
    error = told.value
    assert isinstance(error, RequestFailedError)
    assert (error.id, error.code, error.status) == ("r-1", code, status)
    assert error.body == ("no room" if status else f'{{"error":"told {code}"}}')


async def test_a_result_says_as_which_version_it_was_sent(
    answering: Answering, producer: BatchClient
) -> None:
    def chosen(request: Request) -> bytes:
        return encode_answer(request.id, 200, b"{}", token=request.token, version="m-v2")

    async with answering.always(chosen):
        assert (await producer.submit({})).model_version == "m-v2"
    async with answering.always():
        assert (await producer.submit({})).model_version == ""


async def test_an_answer_of_400_is_a_failure(answering: Answering, producer: BatchClient) -> None:
    async with answering.always(lambda each: encode_answer(each.id, 400, b"bad model", token=each.token)):
        result = await producer.submit({}, id="r-1")
    with pytest.raises(RequestFailedError, match="r-1: status 400: bad model"):
        result.raise_for_status()
    with pytest.raises(ValueError, match="the body of r-1 is no JSON"):
        result.json()


async def test_usage_is_that_of_the_answer(answering: Answering, producer: BatchClient) -> None:
    async with answering.always():
        told = await producer.submit(
            {"usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}
        )
        other = await producer.submit({})
    assert told.usage == TokenUsage(7, 5)
    assert told.usage.total_tokens == 12
    assert other.usage is None


@pytest.mark.parametrize(("status", "words"), [(200, "Paris"), (400, None)])
async def test_content_is_the_models_words_where_it_answered(
    answering: Answering, producer: BatchClient, status: int, words: str | None
) -> None:
    body = b'{"choices": [{"message": {"role": "assistant", "content": "Paris"}}]}'
    async with answering.always(lambda each: encode_answer(each.id, status, body, token=each.token)):
        result = await producer.submit({})
    assert (result.content, result.text) == (words, body.decode())


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("/v1/completions", {"prompt": "hi"}, "xxxxxxxx"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "xxxxxxxx"),
        ("/v1/embeddings", {"input": "hi"}, None),
        ("/v1/completions", {"sim": {"kind": "status", "status": 500, "body": "it broke"}}, None),
        ("/v1/completions", {"sim": {"events": 3}}, None),
        ("/v1/completions", {"sim": {"answer_bytes": 8_000_000}}, "x" * 8_000_000),
    ],
)
async def test_content_of_what_a_server_answers(
    answering: Answering, producer: BatchClient, path: str, asked: dict[str, Any], words: str | None
) -> None:
    async with (
        LiveWorld(Config(seconds=0.01)) as world,
        aiohttp.ClientSession() as http,
        http.post(
            f"{world.gateway_url}{path}", json={"model": "m", "sim": {"answer_bytes": 8}} | asked
        ) as reply,
    ):
        status, body = reply.status, await reply.read()
    async with answering.always(lambda each: encode_answer(each.id, status, body, token=each.token)):
        result = await producer.submit({})
    assert (result.content, result.text) == (words, body.decode())


async def test_content_of_a_response(answering: Answering, producer: BatchClient) -> None:
    status, told = ResponsesServer("").answer(b'{"input": "hi"}')
    body = json.dumps(told).encode()
    async with answering.always(lambda each: encode_answer(each.id, status, body, token=each.token)):
        assert (await producer.submit({})).content == "1 so far"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"choices": null}',
        b'{"choices": [null]}',
        b'{"choices": [7]}',
        b'{"choices": {"0": {"text": "x"}}}',
        b'{"choices": [{"text": 7}]}',
        b'{"choices": [{"message": "x"}]}',
        b'{"choices": [{"message": {"content": {"text": "x"}}}]}',
        b'{"choices": [{"message": {"content": [["x"]]}}]}',
        b'{"choices": [{"delta": {"content": "x"}}]}',
        b'{"choices": [{"text": "x"}]',
        b'{"output": [{"type": "message", "content": [{"type": "output_text", "text": 7}]}]}',
        b'{"output": [null]}',
        b'{"choices": [{"text": "\xff"}]' + b"[" * 100_000,
        b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"choices": [{"text": "x", "text": 7}]}',
        b"[" * 4_000_000,
    ],
    ids=range(18),
)
async def test_an_answer_of_any_other_shape_has_no_content_and_raises_nothing(
    answering: Answering, producer: BatchClient, body: bytes
) -> None:
    async with answering.always(lambda each: encode_answer(each.id, 200, body, token=each.token)):
        result = await producer.submit({})
    assert result.ok
    assert (result.content, result.usage) == (None, None)


async def test_results_of_another_list_are_not_awaited_here(
    answering: Answering, raw: redis.asyncio.Redis, producer: BatchClient
) -> None:
    handle = await producer.enqueue({}, results="")
    await answering.once()
    with pytest.raises(ValueError, match=r"its result goes to batch:\{qwen\}:results"):
        await producer.result(handle)
    assert await raw.llen(NAMES.result_list) == 1
    with pytest.raises(ValueError, match=r"results: batch:\{qwen\}:requests may be a key"):
        await producer.enqueue({}, results="batch:{qwen}:requests")


async def test_what_is_pending_is_told_by_its_handle_made_anew(
    answering: Answering, one_redis: Server
) -> None:
    """A journal keeps id, token, deadline and list; the process that wrote it is gone."""
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as first:
        handles = await first.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(3)])
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as second:
        await answering.once()
        for n, old in enumerate(handles):
            anew = Handle(old.id, old.token, old.deadline, old.results)
            assert (await second.result(anew, timeout=5)).json() == {"n": n}


@pytest.mark.parametrize("wrong", [{"id": "\ud800"}, {"path": "/v1/\ud800"}, {"metadata": {"a": "\ud800"}}])
async def test_half_a_character_is_told_before_anything_is_sent(
    one_redis: Server, wrong: dict[str, Any]
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        with pytest.raises(ValueError, match="holds a lone surrogate"):
            await client.enqueue({}, **wrong)
        with pytest.raises(QueueUnreachableError, match="holds a lone surrogate"):
            await client.cancel("\ud800")
        with pytest.raises(ValueError, match="request 'xxx") as caught:
            await client.enqueue({}, id="x" * 1_000_000)
        assert len(str(caught.value)) < 1000
