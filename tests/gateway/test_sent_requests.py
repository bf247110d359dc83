"""Requests are sent with the unchanged payload, to allowed paths, and with allowed headers only."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dispatcher import __version__
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.gateway.transport import STREAMED_BYTES
from dispatcher.requests.affinity import Affinity
from dispatcher.requests.headers import FORBIDDEN_HEADERS, FORBIDDEN_PREFIXES
from dispatcher.requests.outcomes.outcome import Delivered, FailureKind, Refused, Unreachable, Unsent
from dispatcher.settings.small_files import BackgroundRead
from tests.gateway.scripted_server import Connection, a_request, always, forward, options, outcome, serving
from tests.support import wait_until

MakeGateway = Callable[..., HttpGateway]
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


async def test_plain_request_has_exactly_these_headers(gateway_to: MakeGateway) -> None:
    async with serving(always()) as server:
        assert await outcome(gateway_to(server.url)) == Delivered(200, b"{}")
    (received,) = server.received
    assert received.first_line == "POST /v1/completions HTTP/1.1"
    assert received.body == b'{"prompt":"hi"}'
    assert received.headers == {
        "host": f"127.0.0.1:{server.port}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": "15",
        "user-agent": f"batch-dispatcher/{__version__}",
        "x-request-id": "r-1",
    }


@pytest.mark.parametrize("size", [15, 3 * STREAMED_BYTES])
async def test_request_that_may_no_longer_be_sent_is_not_sent(gateway_to: MakeGateway, size: int) -> None:
    """The lease may belong to another owner by the time the name is resolved and the connection made."""
    async with serving(always()) as server:
        gateway = gateway_to(server.url)
        assert await outcome(gateway, a_request(b"x" * size)) == Delivered(200, b"{}")
        assert await outcome(gateway, a_request(b"x" * size), may_send=lambda: False) == Unsent()
        assert await outcome(gateway, a_request(b"x" * size)) == Delivered(200, b"{}")
    assert len(server.received) == 2


async def test_second_send_over_a_new_connection_checks_the_lease_again(gateway_to: MakeGateway) -> None:
    asked: list[bool] = []

    def once() -> bool:
        asked.append(not asked)
        return asked[-1]

    async def script(connection: Connection) -> None:
        await connection.receive()
        await connection.answer()
        await connection.receive()
        connection.reset()

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        assert await outcome(gateway) == Delivered(200, b"{}")
        assert await outcome(gateway, may_send=once) == Unsent()
    assert (len(server.received), asked) == (2, [True, False])


async def test_objective_fairness_trace_and_configured_headers_are_added(gateway_to: MakeGateway) -> None:
    gateway = None
    async with serving(always()) as server:
        gateway = gateway_to(
            server.url.replace("//", "//us%40er:pa%3Ass@") + "/base/",
            path="/v1/chat/completions",
            objective="batch",
            headers={"X-Team": "a", "Accept": "application/json", "Host": "pool.example"},
        )
        request = a_request(
            metadata={"userid": "tenant 1", "traceparent": TRACE, "other": "x"},
            headers={"x-team": "mine", "x-own": "ü", "accept": "text/event-stream"},
        )
        assert isinstance(await outcome(gateway, request), Delivered)
    (received,) = server.received
    assert received.first_line == "POST /base/v1/chat/completions HTTP/1.1"
    expected = {
        "host": "pool.example",
        "x-llm-d-inference-objective": "batch",
        "x-llm-d-inference-fairness-id": "tenant%201",
        "traceparent": TRACE,
        "x-team": "a",
        "accept": "application/json",
        "x-own": "ü".encode().decode("latin-1"),
        "authorization": "Basic dXNAZXI6cGE6c3M=",
    }
    assert expected.items() <= received.headers.items()
    assert "other" not in received.headers


@pytest.mark.parametrize(
    ("request_id", "sent"),
    [("r/1:a%", "r/1:a%"), ("a b", "a%20b"), ("é\r\nx: y", "%C3%A9%0D%0Ax:%20y"), ("\0", "%00")],
)
async def test_id_that_is_no_header_value_is_escaped(
    gateway_to: MakeGateway, request_id: str, sent: str
) -> None:
    async with serving(always()) as server:
        request = a_request(id=request_id, metadata={"userid": request_id})
        assert isinstance(await outcome(gateway_to(server.url), request), Delivered)
    assert server.received[0].headers["x-request-id"] == sent
    assert server.received[0].headers["x-llm-d-inference-fairness-id"] == sent


@pytest.mark.parametrize("trace", ["", "00-zz", TRACE.upper(), TRACE + "\r\nx: y", TRACE + "-more"])
async def test_invalid_traceparent_is_omitted(gateway_to: MakeGateway, trace: str) -> None:
    async with serving(always()) as server:
        await outcome(gateway_to(server.url), a_request(metadata={"traceparent": trace}))
    assert "traceparent" not in server.received[0].headers


async def test_headers_of_the_caller_are_sent_except_for_reserved_ones(
    gateway_to: MakeGateway,
) -> None:
    hostile = {
        **dict.fromkeys(FORBIDDEN_HEADERS - {"connection"}, "evil"),
        **{prefix + "x": "evil" for prefix in FORBIDDEN_PREFIXES},
        "X_LLM_D_Inference_Objective": "evil",
        "X-Gateway-Destination-Endpoint": "evil:80",
        "Connection": "close, X-Named",
        "x-named": "evil",
    }
    harmless = {"X-Own": "1", "accept-language": "de", "X-Empty": ""}
    async with serving(always()) as server:
        gateway = gateway_to(server.url)
        await outcome(gateway)
        await outcome(gateway, a_request(headers=hostile | harmless))
    plain, received = (request.headers for request in server.received)
    assert received == plain | {name.lower(): value for name, value in harmless.items()}
    assert len(server.connections) == 1  # `Connection: close` of the caller had no effect


PAYLOADS = {
    "small": b'{"a": 1 }',
    "just in one piece": b'{"a":"' + b"x" * (STREAMED_BYTES - 8) + b'"}',
    "just in two": b'{"a":"' + b"x" * (STREAMED_BYTES - 7) + b'"}',
    "bytes of all kinds": b'{"a":"\\ud800 \xf0\x9f\x99\x82 \\u0000","n":9223372036854775807,"n":1e400}\r\n\n',
    "16 MB": b'{"a":"' + os.urandom(8 << 20).hex().encode() + b'"}',
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
async def test_payload_is_sent_byte_for_byte(gateway_to: MakeGateway, payload: bytes) -> None:
    async with serving(always()) as server:
        assert isinstance(await outcome(gateway_to(server.url), a_request(payload)), Delivered)
    assert server.received[0].body == payload
    assert server.received[0].headers["content-length"] == str(len(payload))


@pytest.mark.parametrize(
    "endpoint", ["/v1/chat/completions", "/v1/models/m:predict", "/v1/a-b_c~d.e", "/v1/x/", "/default"]
)
async def test_allowed_path_is_used(gateway_to: MakeGateway, endpoint: str) -> None:
    async with serving(always()) as server:
        gateway = gateway_to(server.url, path="/default")
        assert isinstance(await outcome(gateway, a_request(endpoint=endpoint)), Delivered)
    assert server.received[0].first_line == f"POST {endpoint} HTTP/1.1"


HOSTILE_PATHS = [
    *("//evil", "//evil/v1/x", "///v1/x", "/v1//x", "\\\\evil\\v1", "/v1\\..\\admin"),
    *("/v1/../admin", "/v1/..", "/v1/./x", "/v1/.", "/v1/%2e%2e/admin", "/v1/%2E%2E/admin", "/v1/..;/admin"),
    *("/v1/a%2Fb", "/v1/a%2fb", "/v1/%252e%252e/admin", "/v1/a%00", "/v1/a%0d%0ax:y"),
    *("http://evil/v1/x", "https://evil", "HTTP://evil/v1/x", "evil/v1/x", "v1/x", "evil:80", ".", "*"),
    *("/v1/x@evil", "@evil/v1/x", "/v1/x?a=b", "/v1/x?", "/v1/x#f", "#", "?"),
    *("/v1/x\r\nHost: evil", "/v1/x\n", "\n/v1/x", "/v1/x\0", "/v1/x y", " /v1/x", "/v1/x\t", "/v1/é"),
    *("/v1/\u2025/x", "/v1/x HTTP/1.1", "/v1/<x>", '/v1/"x"', "/v1/{x}", "/v1/[x]", "/v1/x|y", "/v1/^"),
]
FOREIGN_PATHS = ["/", "/v1", "/V1/x", "/admin", "/v10/x", "/v2/x", "/metrics", "/x/v1/x"]


@pytest.mark.parametrize("endpoint", [*HOSTILE_PATHS, *FOREIGN_PATHS])
async def test_other_path_is_refused_and_nothing_is_sent(gateway_to: MakeGateway, endpoint: str) -> None:
    async with serving(always()) as server:
        forwarded = await forward(gateway_to(server.url), a_request(endpoint=endpoint))
    assert isinstance(forwarded.outcome, Refused)
    assert forwarded.outcome.why.startswith("data.endpoint: ")
    assert not server.connections


async def test_only_the_default_path_is_allowed_without_allowed_paths(gateway_to: MakeGateway) -> None:
    async with serving(always()) as server:
        gateway = gateway_to(server.url, allowed_paths=[])
        assert isinstance(await outcome(gateway, a_request(endpoint="/v1/x")), Refused)
        assert isinstance(await outcome(gateway, a_request(endpoint="/v1/completions")), Delivered)


async def test_proxy_and_netrc_of_the_environment_are_not_used(
    gateway_to: MakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(always()) as server:
        assert isinstance(await outcome(gateway_to(server.url)), Delivered)
    assert "authorization" not in server.received[0].headers


async def test_cookies_are_not_kept(gateway_to: MakeGateway) -> None:
    async with serving(always(headers="set-cookie: a=b; path=/\r\n")) as server:
        gateway = gateway_to(server.url.replace("127.0.0.1", "localhost"))
        for _ in range(2):
            assert isinstance(await outcome(gateway), Delivered)
    assert "cookie" not in server.received[1].headers


async def test_token_is_read_again_when_its_file_is_replaced(gateway_to: MakeGateway, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with serving(always()) as server:
        gateway = gateway_to(server.url, token_file=str(token))
        await outcome(gateway)
        (tmp_path / "next").write_text("second")
        (tmp_path / "next").replace(token)

        async def sends_the_new_one() -> bool:
            await outcome(gateway)
            return server.received[-1].headers["authorization"] == "Bearer second"

        await wait_until(sends_the_new_one)
        token.unlink()  # the rotation is half done, and the old token is still used
        assert isinstance(await outcome(gateway), Delivered)
    assert server.received[0].headers["authorization"] == "Bearer first"


async def test_token_file_that_becomes_a_pipe_does_not_block_requests(
    gateway_to: MakeGateway, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    async with serving(always()) as server:
        gateway = gateway_to(server.url, token_file=str(token))
        assert isinstance(await outcome(gateway), Delivered)
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").replace(token)

        async def was_looked_at() -> bool:
            assert isinstance(await outcome(gateway), Delivered), "with the old token"
            return "not a regular file" in gateway._bearer.fault

        await wait_until(was_looked_at)
        anew = gateway_to(server.url, token_file=str(token))
        found = await outcome(anew)
        assert isinstance(found, Unreachable)
        assert found.kind is FailureKind.NO_CREDENTIALS
        assert found.why.startswith(f"gateway.token_file: {token} cannot be read: it is not a regular file")


async def test_attempts_continue_with_the_old_token_while_its_file_system_hangs(
    gateway_to: MakeGateway, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    let = threading.Event()

    def hang() -> tuple[object, str]:
        let.wait()
        return "changed", "Bearer second"

    async with serving(always()) as server:
        gateway = gateway_to(server.url, token_file=str(token))
        assert isinstance(await outcome(gateway), Delivered)
        gateway._bearer._background_load = BackgroundRead(hang, timeout_s=0)
        gateway._bearer._next_check_at = 0.0
        for _ in range(3):
            assert isinstance(await outcome(gateway), Delivered)
        assert gateway._bearer.fault == f"{token} cannot be read: its file system does not answer"
        let.set()
    assert {each.headers["authorization"] for each in server.received} == {"Bearer first"}


@pytest.mark.parametrize("content", [None, "", "two words", "line\nline", "é"])
async def test_nothing_is_sent_without_a_readable_token(
    gateway_to: MakeGateway, tmp_path: Path, content: str | None
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    async with serving(always()) as server:
        gateway = gateway_to(server.url, token_file=str(token))
        found = await outcome(gateway)
        assert isinstance(found, Unreachable)
        assert "gateway.token_file" in found.why
        assert not server.connections
        token.write_text("good")

        async def works() -> bool:
            return isinstance(await outcome(gateway), Delivered)

        await wait_until(works)


async def test_changed_options_apply_to_the_next_request_and_not_to_a_running_one(
    gateway_to: MakeGateway,
) -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.receive()
            if received.headers["x-request-id"] == "slow":
                await go_on.wait()
            await connection.answer(b"x" * 10)

    async with serving(script) as server:
        gateway = gateway_to(server.url)
        running = asyncio.create_task(outcome(gateway, a_request(id="slow")))
        await wait_until(lambda: server.received)
        gateway.reconfigure(
            options(server.url, path="/v1/new", headers={"x-new": "1"}, max_response_bytes=10, timeout_s=1)
        )
        assert isinstance(await outcome(gateway), Delivered)
        go_on.set()
        assert isinstance(await running, Delivered)
        gateway.reconfigure(options(server.url, max_response_bytes=10))
        assert isinstance(await outcome(gateway), Delivered)
        assert len(server.connections) == 2  # no option of the connections has changed, so they were kept
    assert server.received[1].first_line == "POST /v1/new HTTP/1.1"
    assert server.received[1].headers["x-new"] == "1"


async def test_session_of_a_sequence_is_sent_and_returned(gateway_to: MakeGateway) -> None:
    """The header of the answer is read for such requests only, and no caller can set the headers, even if all
    are allowed: one value names the state of another producer's sequence."""
    affinity = Affinity({"x-session-id": "chät 1", "x-session-token": "pod-1"}, "x-session-token")
    theirs = {"X-Session-Token": "theirs", "X_Session_Id": "theirs", "X-Fine": "fine"}
    async with serving(always(headers="X-Session-Token: pod-2\r\n")) as server:
        gateway = gateway_to(server.url, allowed_headers=("*",))
        request = msgspec.structs.replace(a_request(), headers=theirs)
        plainly = await forward(gateway, request)
        told = await forward(gateway, msgspec.structs.replace(request, affinity=affinity))
        first = Affinity({"x-session-id": "a"}, "x-session-token")
        await forward(gateway, msgspec.structs.replace(request, affinity=first))
    assert (plainly.sticky_token, told.sticky_token) == ("", "pod-2")
    of_none, of_one, without_token = (each.headers for each in server.received)
    assert of_none["x-fine"] == "fine"
    assert not {"x-session-token", "x_session_id"} & of_none.keys()
    assert (of_one["x-session-id"], of_one["x-session-token"]) == ("ch%C3%A4t%201", "pod-1")
    assert of_one["x-fine"] == "fine"
    assert "x_session_id" not in of_one
    assert "x-session-token" not in without_token


async def test_endpoints_of_a_request_are_sent_in_the_configured_header(gateway_to: MakeGateway) -> None:
    async with serving(always()) as server:
        gateway = gateway_to(server.url)
        directed = a_request(endpoints="10.0.0.1:8000,10.0.0.2:8000")
        for header in ("", "x-subset", "X-Other"):
            gateway.reconfigure(options(server.url), subset_header=header)
            assert isinstance(await outcome(gateway, directed), Delivered)
        named = {name: value for each in server.received for name, value in each.headers.items()}
        assert "10.0.0.1:8000,10.0.0.2:8000" not in server.received[0].headers.values()
        assert named["x-subset"] == named["x-other"] == "10.0.0.1:8000,10.0.0.2:8000"
        assert "x-subset" not in server.received[2].headers


@pytest.mark.parametrize(
    ("ttl_s", "within_s", "expected"),
    [
        (1.5, 30.0, {"1500ms"}),
        (0.001, 30.0, {"1ms"}),
        (600.0, 30.0, {f"{ms}ms" for ms in range(20_000, 30_001)}),
    ],
)
async def test_time_in_the_pickers_queue_is_bounded_by_the_setting_and_the_time_left(
    gateway_to: MakeGateway, ttl_s: float, within_s: float, expected: set[str]
) -> None:
    async with serving(always()) as server:
        gateway = gateway_to(server.url, inference_ttl_s=ttl_s)
        request = a_request(headers={"x-llm-d-inference-ttl": "1h"})
        assert await outcome(gateway, request, within_s=within_s) == Delivered(200, b"{}")
    assert server.received[0].headers["x-llm-d-inference-ttl"] in expected


async def test_time_in_the_pickers_queue_is_not_bounded_without_the_setting(gateway_to: MakeGateway) -> None:
    async with serving(always()) as server:
        await outcome(gateway_to(server.url), a_request(headers={"x-llm-d-inference-ttl": "1h"}))
    assert "x-llm-d-inference-ttl" not in server.received[0].headers


@pytest.mark.parametrize(
    ("value", "queued_s"),
    [
        ("250", 0.25),
        ("0", 0.0),
        ("12.5", 0.0125),
        ("-1", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("9" * 400, None),
        ("86400001", None),
        ("1, 2", None),
    ],
)
async def test_waiting_time_in_the_picker_is_read_from_the_answer(
    gateway_to: MakeGateway, value: str, queued_s: float | None
) -> None:
    script = always(headers=f"X-LLM-D-Flow-Queue-Duration-Ms: {value}\r\n")
    async with serving(script) as server:
        assert (await forward(gateway_to(server.url))).queued_s == queued_s
