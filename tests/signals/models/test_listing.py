"""One endpoint is asked which models it lists, and answers as servers, proxies and strangers do."""

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

from dispatcher.core.models.availability import Listing
from dispatcher.core.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.signals.exposition import Sample
from dispatcher.signals.models.listing import (
    LIST_MAX_BYTES,
    MAX_NAMES,
    MAX_OBJECTS,
    ListClient,
    ListTarget,
    UnreadableListError,
    find_waiting_adapters,
    parse_list,
)
from tests.signals.fakes import PATIENT_S, answering, dripping, hanging, raw_server, resetting
from tests.signals.modelservers import adapters, card, listing, model_server
from tests.support import free_port


@contextlib.asynccontextmanager
async def inquirer(
    tls: ssl.SSLContext | bool = True, timeout_s: float = PATIENT_S
) -> AsyncIterator[ListClient]:
    made = ListClient(tls, timeout_s=timeout_s)
    try:
        yield made
    finally:
        await made.aclose()


async def ask(url: str, *, timeout_s: float = PATIENT_S, **more: Any) -> Listing:
    async with inquirer(timeout_s=timeout_s) as asker:
        return await asker.fetch_listing(ListTarget("x:1", f"{url}/v1/models", **more), frozenset())


async def problem(url: str, **more: Any) -> str:
    told = await ask(url, **more)
    assert (told.endpoint, told.models, told.loading) == ("x:1", None, ())
    return told.problem


@pytest.mark.parametrize(
    ("body", "names", "vllm"),
    [
        (listing("Qwen/Qwen3-32B"), ("Qwen/Qwen3-32B",), True),
        # A vLLM with adapters, static or loaded later: each is a model of its own.
        (json.dumps({"object": "list", "data": [card("m"), card("lora", parent="m")]}), ("m", "lora"), True),
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
def test_lists_of_each_kind_of_server_are_read(body: str, names: tuple[str, ...], vllm: bool) -> None:
    assert parse_list(body.encode()) == (names, vllm)


def test_names_that_no_request_could_carry_are_left_out() -> None:
    longest = "ü" * (MAX_MODEL_NAME_BYTES // 2)
    assert parse_list(listing(longest, f"{longest}x", "m").encode()).names == (longest, "m")
    assert parse_list(listing("a\nb", "\x1b[2J", "\u202em", "ein Modell").encode()).names == ("ein Modell",)


def test_a_list_without_end_is_cut_and_keeps_what_the_settings_name() -> None:
    names = [f"m{number}" for number in range(MAX_NAMES + 5)]
    kept = parse_list(listing(*names).encode(), {names[-1], names[3]}).names
    assert len(kept) == MAX_NAMES
    assert set(kept) >= {names[-1], names[3], "m0"}


def test_a_list_that_would_take_long_to_read_is_not_read() -> None:
    most = b"{}," * (MAX_OBJECTS - 2) + b"{}"
    assert parse_list(b'{"data":[' + most + b"]}").names == ()
    with pytest.raises(UnreadableListError, match="has more than 50000 objects"):
        parse_list(b'{"data":[{},' + most + b"]}")


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
def test_what_is_no_list_is_told_in_one_short_sentence(body: bytes) -> None:
    with pytest.raises(UnreadableListError, match="the list of models is malformed: ") as told:
        parse_list(body)
    assert len(str(told.value)) < 300
    assert "\n" not in str(told.value)


@given(
    st.one_of(
        st.binary(max_size=200), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)
    )
)
@example('{"data":[{"id":"\\ud800"}]}')
def test_no_body_raises_anything_else(body: bytes | str) -> None:
    with contextlib.suppress(UnreadableListError):
        parse_list(body if isinstance(body, bytes) else body.encode())


async def test_a_server_is_asked_without_ado_and_its_list_told() -> None:
    before = asyncio.get_running_loop().time()
    async with model_server("a", "b") as server:
        told = await ask(server.url, headers={"Authorization": "Bearer t", "X-Odd": "1"})
        (headers,) = server.headers
    assert (told.endpoint, told.models, told.loading, told.problem) == ("x:1", ("a", "b"), (), "")
    assert before <= told.asked_at <= asyncio.get_running_loop().time()
    assert (headers["Authorization"], headers["X-Odd"]) == ("Bearer t", "1")
    assert headers["Accept-Encoding"] == "identity"
    assert headers["User-Agent"].startswith("batch-dispatcher/")


@pytest.mark.parametrize(
    ("status", "more", "said"),
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
async def test_a_refusal_is_told_with_what_mends_it(status: int, more: dict[str, Any], said: str) -> None:
    async with model_server() as server:
        server.answer = web.Response(status=status)
        assert await problem(server.url, **more) == said


async def test_a_redirect_is_not_followed() -> None:
    async with model_server("secret") as other, model_server() as server:
        server.answer = web.Response(status=302, headers={"Location": f"{other.url}/v1/models"})
        assert await problem(server.url) == "HTTP 302: a redirect, which is not followed"
        assert other.asked == []


async def test_a_body_that_is_too_large_is_not_read_to_its_end() -> None:
    async with model_server() as server:
        server.answer = web.Response(body=b'{"data":[], "x": "' + b"x" * LIST_MAX_BYTES + b'"}')
        assert await problem(server.url) == f"the answer is larger than {LIST_MAX_BYTES} bytes"


async def test_a_compressed_body_is_not_unpacked() -> None:
    async with model_server() as server:
        packed = gzip.compress(listing("m").encode())
        server.answer = web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        assert "a coding we did not ask for: gzip" in await problem(server.url)


@pytest.mark.parametrize(
    "talk", [hanging, dripping(b"HTTP/1.1 200 OK\r\n\r\n", 0.01)], ids=["hangs", "drips"]
)
async def test_a_slow_server_is_given_up(talk: Any) -> None:
    async with raw_server(talk) as port:
        said = await problem(f"http://127.0.0.1:{port}", timeout_s=0.2)
    assert said == "no whole answer within 0.2 s"


@pytest.mark.parametrize(
    "talk",
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
async def test_what_is_no_http_is_a_problem_and_no_exception(talk: Any) -> None:
    async with raw_server(talk) as port:
        said = await problem(f"http://127.0.0.1:{port}")
    assert said
    assert len(said) < 300


async def test_nobody_there_is_told() -> None:
    assert "refused" in await problem(f"http://127.0.0.1:{free_port()}")


async def test_only_a_port_where_nobody_listens_is_down() -> None:
    """Whoever answers there next is another process. One that hangs, resets or refuses us may be the same."""
    assert (await ask(f"http://127.0.0.1:{free_port()}")).is_down
    assert (await ask(f"http://localhost:{free_port()}")).is_down, "at each of its addresses"
    assert not (await ask("http://no-such-host.invalid:80")).is_down
    for talk in (resetting, answering(b""), answering(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")):
        async with raw_server(talk) as port:
            told = await ask(f"http://127.0.0.1:{port}")
            assert (told.models, told.is_down) == (None, False)
    async with raw_server(hanging) as port:
        assert not (await ask(f"http://127.0.0.1:{port}", timeout_s=0.2)).is_down
    async with model_server("m") as server:
        assert not (await ask(server.url)).is_down


async def test_a_certificate_that_is_not_trusted_is_told_and_one_that_is_works() -> None:
    authority = trustme.CA()
    theirs, ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    authority.configure_trust(ours)
    async with model_server("m", tls=theirs) as server:
        assert "its certificate is not trusted" in await problem(server.url)
        async with inquirer(ours) as asker:
            told = await asker.fetch_listing(ListTarget("x:1", f"{server.url}/v1/models"), frozenset())
        assert told.models == ("m",)


# Adapters that are being loaded.


def test_the_newest_sample_tells_which_adapters_wait() -> None:
    def sample(at: float, running: str, waiting: str) -> Sample:
        labels = {"running_lora_adapters": running, "waiting_lora_adapters": waiting, "max_lora": "4"}
        return Sample("vllm:lora_requests_info", labels, at)

    old, new = sample(10.0, "", "a,b"), sample(20.0, "a, c", " b,a,d ,,")
    assert find_waiting_adapters([new, old]) == find_waiting_adapters([old, new]) == ("b", "d")
    assert find_waiting_adapters([]) == ()
    assert find_waiting_adapters([Sample("vllm:lora_requests_info", {}, 1.0)]) == ()


@contextlib.asynccontextmanager
async def vllm(*models: str, page: str) -> AsyncIterator[Any]:
    async with model_server(*models) as server, inquirer() as asker:
        server.page = page
        target = ListTarget("x:1", f"{server.url}/v1/models", metrics_url=f"{server.url}/metrics")

        async def told(*wanted: str) -> tuple[str, ...]:
            found = await asker.fetch_listing(target, frozenset(wanted))
            assert found.models == models
            return found.loading

        yield server, told


async def test_an_adapter_that_only_waits_is_loading_where_it_is_wanted_and_not_listed() -> None:
    async with vllm("m", "listed", page=adapters((1.0, "run", "listed,run,new,other"))) as (_, told):
        assert await told("m", "new", "run", "listed") == ("new",)


async def test_the_page_is_asked_only_where_it_can_tell_something() -> None:
    async with vllm("m", page=adapters((1.0, "", "new"))) as (server, told):
        assert await told() == await told("m") == ()
        assert server.pages == 0, "nothing is missing"
        server.owner = "sglang"
        assert await told("new") == ()
        assert server.pages == 0, "no other server shows adapters so"
        server.owner = "vllm"
        assert await told("new") == await told("new") == ("new",)
        assert server.pages == 2


@pytest.mark.parametrize(
    "page", ["", adapters(), "vllm:lora_requests_info{", "vllm:lora_requests_info NaN x y\n"]
)
async def test_a_page_without_adapters_is_left_alone_for_a_while(page: str) -> None:
    async with vllm("m", page=page) as (server, told):
        for _ in range(3):
            assert await told("new") == ()
        assert (server.lists, server.pages) == (3, 1)
