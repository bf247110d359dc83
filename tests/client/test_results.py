"""Which results a client accepts, and how it presents them."""

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
from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.live import LiveWorld
from dispatcher.requests.request import Request
from dispatcher.requests.result import add_partial_answer, encode_answer, encode_failure
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import NAMES, POOL, FakeDispatcher, fail_with
from tests.queue.factories import queues
from tests.queue.key_checks import assert_only_known_keys
from tests.queue.servers import Server
from tests.scenarios.responses_server import ResponsesServer
from tests.support import wait_until


@pytest.fixture
async def producer(one_redis: Server) -> AsyncIterator[BatchClient]:
    async with BatchClient(one_redis.url, pool=POOL) as created:
        yield created


@pytest.fixture
async def redis_client(one_redis: Server) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(one_redis.url) as connected:
        yield connected


async def test_request_is_answered_on_every_engine(any_redis: Server) -> None:
    async with (
        queues(any_redis.url, "a", names=NAMES) as (queue,),
        FakeDispatcher(queue).answer_continuously(),
    ):
        async with BatchClient(any_redis.url, pool=POOL) as client:
            result = await client.submit({"prompt": "hi"}, deadline="10m", priority=3)
        assert (result.ok, result.status, result.json()) == (True, 200, {"prompt": "hi"})
        assert result.raise_for_status() is result
        async with BatchClient(any_redis.url, pool=POOL, name="nightly") as client:
            handle = await client.enqueue({"prompt": "hi"}, id="mine-1")
        async with BatchClient(any_redis.url, pool=POOL, name="nightly") as client:
            assert (await client.result("mine-1")).json() == {"prompt": "hi"}
        assert handle.id == "mine-1"


async def test_closed_client_leaves_no_permanent_keys(
    fake_dispatcher: FakeDispatcher, one_redis: Server, redis_client: redis.asyncio.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        await client.enqueue({"n": 1})
        await client.enqueue({"n": 2})
        await fake_dispatcher.answer_once()
        handle = await client.enqueue({"n": 3})
    await assert_only_known_keys(redis_client, NAMES)
    assert not [key async for key in redis_client.scan_iter("batch-results:*")]
    assert list(await fake_dispatcher.queue.check_cancelled([(handle.id, handle.token)])), (
        "no client could read its result"
    )


async def test_result_without_the_token_of_its_request_is_ignored(
    fake_dispatcher: FakeDispatcher, redis_client: redis.asyncio.Redis, producer: BatchClient
) -> None:
    """Another producer uses the result list and the id of alice. The result of her request comes later."""
    handle = await producer.enqueue(b'{"real": 1}', id="alice-1")
    forged = [encode_answer("alice-1", 200, b"forged", token=token) for token in ("", "guessed")]
    await redis_client.lpush(
        handle.results, *forged, encode_answer("another", 200, b"forged", token=handle.token)
    )
    with pytest.raises(NoResultError):
        await producer.result(handle, timeout=0.2)
    assert producer.ignored_count == 3
    await fake_dispatcher.answer_once()
    assert (await producer.result(handle, timeout=5)).text == '{"real": 1}'


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[1]", b'{"id": 7}', b'{"id":"\xff"}', b"[" * 5000])
async def test_garbage_in_the_result_list_is_ignored(
    fake_dispatcher: FakeDispatcher, redis_client: redis.asyncio.Redis, producer: BatchClient, garbage: bytes
) -> None:
    handle = await producer.enqueue(b"{}")
    await redis_client.lpush(handle.results, garbage)
    await fake_dispatcher.answer_once()
    assert (await producer.result(handle, timeout=5)).id == handle.id
    assert producer.ignored_count == 1


async def test_results_are_kept_while_their_handles_exist(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    handles = await producer.enqueue_many([{"n": n} for n in range(20)])
    await fake_dispatcher.answer_once()
    assert (await producer.result(handles[-1], timeout=5)).json() == {"n": 19}
    await wait_until(lambda: all(handle.done for handle in handles))
    del handles[5:]
    gc.collect()
    assert len(producer._mailbox._handles) == 5, "results without a handle are dropped"
    results = await asyncio.gather(*(producer.result(handle, timeout=5) for handle in handles))
    assert [result.json() for result in results] == [{"n": n} for n in range(5)]


async def test_repeated_calls_return_the_same_result(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    handle = await producer.enqueue({})
    await fake_dispatcher.answer_once()
    first, second = await asyncio.gather(producer.result(handle), producer.result(handle))
    assert first is second is await producer.result(handle, timeout=0)


async def test_cancelled_wait_does_not_lose_the_result(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    handle = await producer.enqueue({})
    waiting = asyncio.create_task(producer.result(handle))
    await wait_until(lambda: handle.waiters)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await fake_dispatcher.answer_once()
    assert (await producer.result(handle, timeout=5)).ok


@pytest.mark.parametrize(
    ("code", "status", "exception_type"),
    [
        (ErrorCode.CANCELLED, None, RequestCancelledError),
        (ErrorCode.DEADLINE_EXCEEDED, None, DeadlineExceededError),
        (ErrorCode.RETRIES_EXHAUSTED, 503, RequestFailedError),
    ],
)
async def test_failed_request_raises_in_raise_for_status(
    fake_dispatcher: FakeDispatcher,
    producer: BatchClient,
    code: ErrorCode,
    status: int | None,
    exception_type: type[Exception],
) -> None:
    async with fake_dispatcher.answer_continuously(fail_with(code, status, b"no room" if status else None)):
        result = await producer.submit({}, id="r-1")
    assert not result.ok
    with pytest.raises(exception_type, match=f"r-1: {code}: failed with {code}") as caught:
        result.raise_for_status()
    error = caught.value
    assert isinstance(error, RequestFailedError)
    assert (error.id, error.code, error.status) == ("r-1", code, status)
    assert error.body == ("no room" if status else f'{{"error":"failed with {code}"}}')


async def test_result_has_the_version_that_it_was_sent_to(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    def answer_with_version(request: Request) -> bytes:
        return encode_answer(request.id, 200, b"{}", token=request.token, chosen_model="m-v2")

    async with fake_dispatcher.answer_continuously(answer_with_version):
        assert (await producer.submit({})).model_version == "m-v2"
    async with fake_dispatcher.answer_continuously():
        assert (await producer.submit({})).model_version == ""


async def test_result_of_a_sliced_request_has_the_number_of_its_slices(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    def answer_in_slices(request: Request) -> bytes:
        return encode_answer(request.id, 200, b"{}", {"slices": 5, "cached_tokens": 700}, token=request.token)

    async with fake_dispatcher.answer_continuously(answer_in_slices):
        sliced = await producer.submit({})
    async with fake_dispatcher.answer_continuously():
        whole = await producer.submit({})
    assert (sliced.slices, sliced.cached_tokens, sliced.is_partial) == (5, 700, False)
    assert (whole.slices, whole.cached_tokens, whole.is_partial) == (1, 0, False)


PARTIAL_ANSWERS: dict[str, dict[str, Any]] = {
    "completion": {"choices": [{"text": "once upon"}]},
    "chat": {"choices": [{"message": {"role": "assistant", "content": "once upon"}}]},
}


@pytest.mark.parametrize("kind", PARTIAL_ANSWERS)
async def test_partial_answer_is_a_failure_with_the_text_so_far(
    fake_dispatcher: FakeDispatcher, producer: BatchClient, kind: str
) -> None:
    answer = {**PARTIAL_ANSWERS[kind], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}

    def end_early(request: Request) -> bytes:
        body = json.dumps(answer).encode()
        code = ErrorCode.DEADLINE_EXCEEDED
        return add_partial_answer(encode_failure(request.id, code, "too late", token=request.token), body)

    async with fake_dispatcher.answer_continuously(end_early):
        result = await producer.submit({})
    assert (result.ok, result.is_partial) == (False, True)
    assert (result.content, result.partial_content, result.usage) == (None, "once upon", TokenUsage(7, 2))
    with pytest.raises(DeadlineExceededError, match="too late") as caught:
        result.raise_for_status()
    assert json.loads(caught.value.body) == answer


async def test_failure_without_a_partial_answer_has_no_partial_content(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    body = json.dumps(PARTIAL_ANSWERS["completion"]).encode()
    async with fake_dispatcher.answer_continuously(fail_with(ErrorCode.RETRIES_EXHAUSTED, 502, body)):
        result = await producer.submit({})
    assert (result.is_partial, result.partial_content, result.usage) == (False, None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"slices": 0, "cached_tokens": None},
        {"slices": -3},
        {"status_code": 200, "payload": '{"choices": [{"text": "once"}]}', "partial": True},
    ],
)
async def test_implausible_slices_of_a_result_are_not_believed(
    fake_dispatcher: FakeDispatcher, producer: BatchClient, fields: dict[str, Any]
) -> None:
    def answer_implausibly(request: Request) -> bytes:
        return json.dumps(
            {"id": request.id, "payload": "{}", "request_token": request.token, **fields}
        ).encode()

    async with fake_dispatcher.answer_continuously(answer_implausibly):
        result = await producer.submit({})
    assert (result.slices, result.cached_tokens, result.is_partial) == (1, 0, False)


async def test_answer_400_is_a_failure(fake_dispatcher: FakeDispatcher, producer: BatchClient) -> None:
    async with fake_dispatcher.answer_continuously(
        lambda each: encode_answer(each.id, 400, b"bad model", token=each.token)
    ):
        result = await producer.submit({}, id="r-1")
    with pytest.raises(RequestFailedError, match="r-1: status 400: bad model"):
        result.raise_for_status()
    with pytest.raises(ValueError, match="the body of r-1 is no JSON"):
        result.json()


async def test_usage_is_read_from_the_answer(fake_dispatcher: FakeDispatcher, producer: BatchClient) -> None:
    async with fake_dispatcher.answer_continuously():
        with_usage = await producer.submit(
            {"usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}
        )
        without_usage = await producer.submit({})
    assert with_usage.usage == TokenUsage(7, 5)
    assert with_usage.usage.total_tokens == 12
    assert without_usage.usage is None


@pytest.mark.parametrize(("status", "expected"), [(200, "Paris"), (400, None)])
async def test_content_is_the_text_of_a_successful_answer(
    fake_dispatcher: FakeDispatcher, producer: BatchClient, status: int, expected: str | None
) -> None:
    body = b'{"choices": [{"message": {"role": "assistant", "content": "Paris"}}]}'
    async with fake_dispatcher.answer_continuously(
        lambda each: encode_answer(each.id, status, body, token=each.token)
    ):
        result = await producer.submit({})
    assert (result.content, result.text) == (expected, body.decode())


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/completions", {"prompt": "hi"}, "xxxxxxxx"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "xxxxxxxx"),
        ("/v1/embeddings", {"input": "hi"}, None),
        ("/v1/completions", {"sim": {"kind": "status", "status": 500, "body": "it broke"}}, None),
        ("/v1/completions", {"sim": {"events": 3}}, None),
        ("/v1/completions", {"sim": {"answer_bytes": 8_000_000}}, "x" * 8_000_000),
    ],
)
async def test_content_of_answers_of_a_server(
    fake_dispatcher: FakeDispatcher,
    producer: BatchClient,
    path: str,
    fields: dict[str, Any],
    expected: str | None,
) -> None:
    async with (
        LiveWorld(Config(seconds=0.01)) as world,
        aiohttp.ClientSession() as http,
        http.post(
            f"{world.gateway_url}{path}", json={"model": "m", "sim": {"answer_bytes": 8}} | fields
        ) as reply,
    ):
        status, body = reply.status, await reply.read()
    async with fake_dispatcher.answer_continuously(
        lambda each: encode_answer(each.id, status, body, token=each.token)
    ):
        result = await producer.submit({})
    assert (result.content, result.text) == (expected, body.decode())


async def test_content_of_a_responses_answer(fake_dispatcher: FakeDispatcher, producer: BatchClient) -> None:
    status, document = ResponsesServer("").make_answer(b'{"input": "hi"}')
    body = json.dumps(document).encode()
    async with fake_dispatcher.answer_continuously(
        lambda each: encode_answer(each.id, status, body, token=each.token)
    ):
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
async def test_answer_of_another_shape_has_no_content_and_raises_nothing(
    fake_dispatcher: FakeDispatcher, producer: BatchClient, body: bytes
) -> None:
    async with fake_dispatcher.answer_continuously(
        lambda each: encode_answer(each.id, 200, body, token=each.token)
    ):
        result = await producer.submit({})
    assert result.ok
    assert (result.content, result.usage) == (None, None)


async def test_result_of_another_list_cannot_be_awaited(
    fake_dispatcher: FakeDispatcher, redis_client: redis.asyncio.Redis, producer: BatchClient
) -> None:
    handle = await producer.enqueue({}, results="")
    await fake_dispatcher.answer_once()
    with pytest.raises(ValueError, match=r"its result goes to batch:\{qwen\}:results"):
        await producer.result(handle)
    assert await redis_client.llen(NAMES.result_list) == 1
    with pytest.raises(ValueError, match=r"results: batch:\{qwen\}:requests may be a key"):
        await producer.enqueue({}, results="batch:{qwen}:requests")


async def test_recreated_handle_gets_its_result(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    """The program that wrote id, token, deadline and list into a journal has ended."""
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as first:
        handles = await first.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(3)])
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as second:
        await fake_dispatcher.answer_once()
        for n, original in enumerate(handles):
            recreated = Handle(original.id, original.token, original.deadline, original.results)
            assert (await second.result(recreated, timeout=5)).json() == {"n": n}


@pytest.mark.parametrize("invalid", [{"id": "\ud800"}, {"path": "/v1/\ud800"}, {"metadata": {"a": "\ud800"}}])
async def test_lone_surrogate_is_an_error_before_anything_is_sent(
    one_redis: Server, invalid: dict[str, Any]
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        with pytest.raises(ValueError, match="holds a lone surrogate"):
            await client.enqueue({}, **invalid)
        with pytest.raises(QueueUnreachableError, match="holds a lone surrogate"):
            await client.cancel("\ud800")
        with pytest.raises(ValueError, match="request 'xxx") as caught:
            await client.enqueue({}, id="x" * 1_000_000)
        assert len(str(caught.value)) < 1000


async def test_waiting_after_the_client_was_closed_raises_at_once(one_redis: Server) -> None:
    client = BatchClient(one_redis.url, pool=POOL)
    handle = await client.enqueue({"prompt": "x"})
    await client.aclose()
    async with asyncio.timeout(5):
        with pytest.raises(QueueUnreachableError, match="closed"):
            await client._mailbox.wait_for_result(handle, None)
