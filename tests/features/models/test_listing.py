"""The request for the model list of an endpoint, with answers of model servers, proxies and other servers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trustme
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher.features.models.availability import Listing
from dispatcher.features.models.listing import (
    LIST_MAX_BYTES,
    MAX_NAMES,
    MAX_OBJECTS,
    ListClient,
    ListTarget,
    UnreadableListError,
    find_waiting_adapters,
    parse_list,
)
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.signals.exposition import Sample
from tests.signals.fakes import ANSWER_TIMEOUT_S, answering, dripping, hanging, raw_server, resetting
from tests.signals.modelservers import adapters_page, model_object, model_server, models_answer
from tests.support import free_port


@contextlib.asynccontextmanager
async def create_client(
    tls: ssl.SSLContext | bool = True, timeout_s: float = ANSWER_TIMEOUT_S
) -> AsyncIterator[ListClient]:
    client = ListClient(tls, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.aclose()


async def fetch_listing(url: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **more: Any) -> Listing:
    async with create_client(timeout_s=timeout_s) as client:
        return await client.fetch_listing(ListTarget("x:1", f"{url}/v1/models", **more), frozenset())


async def fetch_problem(url: str, **more: Any) -> str:
    fetched = await fetch_listing(url, **more)
    assert (fetched.endpoint, fetched.models, fetched.loading) == ("x:1", None, ())
    return fetched.problem


@pytest.mark.parametrize(
    ("body", "names", "is_vllm"),
    [
        (models_answer("Qwen/Qwen3-32B"), ("Qwen/Qwen3-32B",), True),
        # A vLLM with adapters, static or loaded later: each is a model of its own.
        (
            json.dumps({"object": "list", "data": [model_object("m"), model_object("lora", parent="m")]}),
            ("m", "lora"),
            True,
        ),
        # SGLang
        (
            '{"object":"list","data":[{"id":"q","owned_by":"sglang","root":"q","max_model_len":40960}]}',
            ("q",),
            False,
        ),
        # TensorRT-LLM, Text Generation Inference
        ('{"object":"list","data":[{"id":"t","object":"model","owned_by":"tensorrt_llm"}]}', ("t",), False),
        ('{"object":"list","data":[{"id":"g","object":"model","created":0,"owned_by":"g"}]}', ("g",), False),
        ('{"data":[]}', (), False),
        (
            '{"data":[{"id":"a"},{"id":"b"},{"id":"a"},{"id":""},{"owned_by":7}],"more":{"x":[1]}}',
            ("a", "b"),
            False,
        ),
    ],
)
def test_model_list_of_each_kind_of_server_is_parsed(
    body: str, names: tuple[str, ...], is_vllm: bool
) -> None:
    assert parse_list(body.encode()) == (names, is_vllm)


def test_names_that_are_too_long_or_not_printable_are_omitted() -> None:
    longest = "ü" * (MAX_MODEL_NAME_BYTES // 2)
    assert parse_list(models_answer(longest, f"{longest}x", "m").encode()).names == (longest, "m")
    assert parse_list(models_answer("a\nb", "\x1b[2J", "\u202em", "ein Modell").encode()).names == (
        "ein Modell",
    )


def test_long_list_is_cut_and_keeps_the_configured_models() -> None:
    names = [f"m{number}" for number in range(MAX_NAMES + 5)]
    kept = parse_list(models_answer(*names).encode(), {names[-1], names[3]}).names
    assert len(kept) == MAX_NAMES
    assert set(kept) >= {names[-1], names[3], "m0"}


def test_list_with_too_many_objects_is_rejected() -> None:
    max_objects = b"{}," * (MAX_OBJECTS - 2) + b"{}"
    assert parse_list(b'{"data":[' + max_objects + b"]}").names == ()
    with pytest.raises(UnreadableListError, match="has more than 50000 objects"):
        parse_list(b'{"data":[{},' + max_objects + b"]}")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"object":"error","message":"no"}',
        b'{"data":{"id":"m"}}',
        b'{"data":["m"]}',
        b'{"data":[{"id":7}]}',
        b'{"data":[{"id":"\xff\xfe"}]}',
        b'{"data":[{"id":"m"}]',
        b"<html>sign in</html>",
        b'{"x":' + b"[" * 200_000,
        b'{"data":[{"owned_by":' + b'{"a":' * 40_000,
    ],
)
def test_malformed_list_is_an_error_with_one_short_sentence(body: bytes) -> None:
    with pytest.raises(UnreadableListError, match="the list of models is malformed: ") as fetched:
        parse_list(body)
    assert len(str(fetched.value)) < 300
    assert "\n" not in str(fetched.value)


@given(
    st.one_of(
        st.binary(max_size=200), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)
    )
)
@example('{"data":[{"id":"\\ud800"}]}')
def test_no_body_raises_another_error(body: bytes | str) -> None:
    with contextlib.suppress(UnreadableListError):
        parse_list(body if isinstance(body, bytes) else body.encode())


async def test_listing_has_the_models_of_the_server() -> None:
    before = asyncio.get_running_loop().time()
    async with model_server("a", "b") as server:
        fetched = await fetch_listing(server.url, headers={"Authorization": "Bearer t", "X-Custom": "1"})
        (headers,) = server.headers
    assert (fetched.endpoint, fetched.models, fetched.loading, fetched.problem) == ("x:1", ("a", "b"), (), "")
    assert before <= fetched.asked_at <= asyncio.get_running_loop().time()
    assert (headers["Authorization"], headers["X-Custom"]) == ("Bearer t", "1")
    assert headers["Accept-Encoding"] == "identity"
    assert headers["User-Agent"].startswith("batch-dispatcher/")


@pytest.mark.parametrize(
    ("status", "more", "expected"),
    [
        (401, {}, "HTTP 401: serving.token_file is needed"),
        (403, {"has_token": True}, "HTTP 403: serving.token_file is refused"),
        (401, {"token_setting": "gateway.token_file"}, "HTTP 401: gateway.token_file is needed"),
        (404, {}, "HTTP 404: there is no list of models"),
        (500, {}, "HTTP 500"),
        (503, {}, "HTTP 503"),
        (204, {}, "HTTP 204"),
    ],
)
async def test_http_error_is_a_problem_with_a_hint(status: int, more: dict[str, Any], expected: str) -> None:
    async with model_server() as server:
        server.answer = web.Response(status=status)
        assert await fetch_problem(server.url, **more) == expected


async def test_redirect_is_not_followed() -> None:
    async with model_server("secret") as other, model_server() as server:
        server.answer = web.Response(status=302, headers={"Location": f"{other.url}/v1/models"})
        assert await fetch_problem(server.url) == "HTTP 302: a redirect, which is not followed"
        assert other.requested_paths == []


async def test_body_that_is_too_large_is_a_problem() -> None:
    async with model_server() as server:
        server.answer = web.Response(body=b'{"data":[], "x": "' + b"x" * LIST_MAX_BYTES + b'"}')
        assert await fetch_problem(server.url) == f"the answer is larger than {LIST_MAX_BYTES} bytes"


async def test_compressed_body_is_a_problem() -> None:
    async with model_server() as server:
        packed = gzip.compress(models_answer("m").encode())
        server.answer = web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        assert "a coding we did not ask for: gzip" in await fetch_problem(server.url)


@pytest.mark.parametrize(
    "handler", [hanging, dripping(b"HTTP/1.1 200 OK\r\n\r\n", 0.01)], ids=["hangs", "drips"]
)
async def test_slow_server_is_a_problem(handler: Any) -> None:
    async with raw_server(handler) as port:
        expected = await fetch_problem(f"http://127.0.0.1:{port}", timeout_s=0.2)
    assert expected == "no whole answer within 0.2 s"


@pytest.mark.parametrize(
    "handler",
    [
        resetting,
        answering(b"SSH-2.0-OpenSSH_9.6\r\n"),
        answering(b""),
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
        answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
        answering(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"),
        answering(b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
    ],
)
async def test_invalid_http_is_a_problem_and_not_an_exception(handler: Any) -> None:
    async with raw_server(handler) as port:
        expected = await fetch_problem(f"http://127.0.0.1:{port}")
    assert expected
    assert len(expected) < 300


async def test_refused_connection_is_a_problem() -> None:
    assert "refused" in await fetch_problem(f"http://127.0.0.1:{free_port()}")


async def test_only_a_refused_connection_means_that_the_server_is_down() -> None:
    """After a refused connection, the next server at that port is another process. A server that hangs,
    resets the connection or answers with an error may be the same one."""
    assert (await fetch_listing(f"http://127.0.0.1:{free_port()}")).is_down
    assert (await fetch_listing(f"http://localhost:{free_port()}")).is_down, "at each of its addresses"
    assert not (await fetch_listing("http://no-such-host.invalid:80")).is_down
    for handler in (resetting, answering(b""), answering(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")):
        async with raw_server(handler) as port:
            fetched = await fetch_listing(f"http://127.0.0.1:{port}")
            assert (fetched.models, fetched.is_down) == (None, False)
    async with raw_server(hanging) as port:
        assert not (await fetch_listing(f"http://127.0.0.1:{port}", timeout_s=0.2)).is_down
    async with model_server("m") as server:
        assert not (await fetch_listing(server.url)).is_down


async def test_untrusted_certificate_is_a_problem_and_a_trusted_one_works() -> None:
    authority = trustme.CA()
    server_tls, client_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    authority.configure_trust(client_tls)
    async with model_server("m", tls=server_tls) as server:
        assert "its certificate is not trusted" in await fetch_problem(server.url)
        async with create_client(client_tls) as client:
            fetched = await client.fetch_listing(ListTarget("x:1", f"{server.url}/v1/models"), frozenset())
        assert fetched.models == ("m",)


# Adapters that are being loaded


def test_newest_sample_names_the_waiting_adapters() -> None:
    def sample(at: float, running: str, waiting: str) -> Sample:
        labels = {"running_lora_adapters": running, "waiting_lora_adapters": waiting, "max_lora": "4"}
        return Sample("vllm:lora_requests_info", labels, at)

    old, new = sample(10.0, "", "a,b"), sample(20.0, "a, c", " b,a,d ,,")
    assert find_waiting_adapters([new, old]) == find_waiting_adapters([old, new]) == ("b", "d")
    assert find_waiting_adapters([]) == ()
    assert find_waiting_adapters([Sample("vllm:lora_requests_info", {}, 1.0)]) == ()


@contextlib.asynccontextmanager
async def is_vllm(*models: str, page: str) -> AsyncIterator[Any]:
    async with model_server(*models) as server, create_client() as client:
        server.page = page
        target = ListTarget("x:1", f"{server.url}/v1/models", metrics_url=f"{server.url}/metrics")

        async def fetched(*desired: str) -> tuple[str, ...]:
            found = await client.fetch_listing(target, frozenset(desired))
            assert found.models == models
            return found.loading

        yield server, fetched


async def test_waiting_adapter_is_loading_if_it_is_desired_and_not_listed() -> None:
    async with is_vllm("m", "listed", page=adapters_page((1.0, "run", "listed,run,new,other"))) as (
        _,
        fetched,
    ):
        assert await fetched("m", "new", "run", "listed") == ("new",)


async def test_metrics_page_is_requested_only_if_a_model_may_be_loading() -> None:
    async with is_vllm("m", page=adapters_page((1.0, "", "new"))) as (server, fetched):
        assert await fetched() == await fetched("m") == ()
        assert server.page_request_count == 0, "no desired model is missing"
        server.owner = "sglang"
        assert await fetched("new") == ()
        assert server.page_request_count == 0, "only vLLM shows adapters on its page"
        server.owner = "vllm"
        assert await fetched("new") == await fetched("new") == ("new",)
        assert server.page_request_count == 2


@pytest.mark.parametrize(
    "page", ["", adapters_page(), "vllm:lora_requests_info{", "vllm:lora_requests_info NaN x y\n"]
)
async def test_page_without_adapters_is_not_requested_again_for_a_while(page: str) -> None:
    async with is_vllm("m", page=page) as (server, fetched):
        for _ in range(3):
            assert await fetched("new") == ()
        assert (server.list_request_count, server.page_request_count) == (3, 1)
