"""Payloads pass unchanged from producer to gateway, and answers from gateway to result."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.scenarios.processes import Stage

ECHO = b'"sim":{"echo":true}'

UNUSUAL_PAYLOADS = [
    b'{"b":1,"a":2,"A":3}',
    b'{ "spaces" :\t1 ,\n"more" : [ ] }',
    b'{"big":18446744073709551615,"small":-9223372036854775808,"real":1.0e-320,"same":1.10}',
    b'{"escapes":"\\u00e9\\/\\n\\u0000\\ud83d\\ude00\\ud800"}',
    '{"text":"é ☃ 😀 \u2028 \ufeff \u202e"}'.encode(),
    b'{"twice":1,"twice":2}',
    b'{"":{"deep":' + b"[" * 50 + b"]" * 50 + b"}}",
    b'{"html":"</script><!--","quotes":"\\"\\\\\\""}',
]


def test_payload_and_answer_of_sixteen_megabytes_pass(stage: Stage) -> None:
    template = b'{"prompt":"%s",' + ECHO + b"}"
    payload = template % (("é".encode()) * ((16 * 2**20 - len(template) + 2) // 2))
    assert 16 * 2**20 - 2 < len(payload) <= 16 * 2**20, (
        "the largest payload that queue.max_payload_bytes allows"
    )
    world = stage.world(seconds=0.01)
    (id_,) = stage.producer.submit(1, payload)
    (larger,) = stage.producer.submit(1, payload.replace(b"true", b" true "))
    stage.dispatcher(stage.settings(world, queue={"lease_s": 10}))
    results = stage.producer.wait_for_all(timeout_s=40)
    assert [result["status_code"] for result in results[id_]] == [200]
    assert results[id_][0]["payload"].encode() == payload
    assert [result["error_code"] for result in results[larger]] == ["TOO_LARGE"]


def test_event_stream_is_kept_whole(stage: Stage) -> None:
    world = stage.world(seconds=0.01)
    (id_,) = stage.producer.submit(1, b'{"stream":true,"sim":{"events":500}}')
    stage.dispatcher(stage.settings(world))
    ((result,),) = stage.producer.wait_for_all(timeout_s=20).values()
    chunks = result["payload"].split("\n\n")
    assert chunks[500:] == ["data: [DONE]", ""]
    events = [json.loads(event.removeprefix("data: ")) for event in chunks[:500]]
    assert {each["id"] for each in events} == {id_}
    assert [each["choices"][0]["text"] for each in events] == [f"t{n}" for n in range(500)]


def test_payloads_and_answers_pass_byte_for_byte(stage: Stage) -> None:
    """The gateway echoes the payload, so the result covers both directions."""
    world = stage.world()
    ids = [stage.producer.submit(1, payload)[0] for payload in UNUSUAL_PAYLOADS]
    with run_echo_gateway() as url:
        dispatcher = stage.dispatcher(stage.settings(world, gateway={"url": url}))
        results = stage.producer.wait_for_all(timeout_s=20)
        dispatcher.terminate()
    for id_, payload in zip(ids, UNUSUAL_PAYLOADS, strict=True):
        assert results[id_] == [{"id": id_, "status_code": 200, "payload": payload.decode()}]


INVALID_UTF8 = b'{"text":"caf\xe9 \xf0\x9f\x98 \xc3\xa9"}'


class _EchoHandler(BaseHTTPRequestHandler):
    """Echoes each body without parsing it; answers a body that contains `latin` with invalid UTF-8."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        body = INVALID_UTF8 if b"latin" in body else body
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def run_echo_gateway() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _EchoHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


def test_invalid_utf_8_is_replaced_and_noted_in_the_result(stage: Stage) -> None:
    world = stage.world()
    stage.producer.submit(1, b'{"prompt":"latin"}')
    with run_echo_gateway() as url:
        dispatcher = stage.dispatcher(stage.settings(world, gateway={"url": url}))
        ((result,),) = stage.producer.wait_for_all(timeout_s=20).values()
        dispatcher.terminate()
    assert result["status_code"] == 200
    assert result["payload"] == INVALID_UTF8.decode(errors="replace")
    assert result["payload"].count("\ufffd") == 2
    assert "UTF-8" in result["payload_note"]
    assert "byte 12" in result["payload_note"]


@pytest.mark.long
def test_many_large_requests_pass_at_once(stage: Stage) -> None:
    world = stage.world(seconds=0.2)
    payloads = [b'{"n":%d,"prompt":"%s",%s}' % (n, b"x" * 2**20, ECHO) for n in range(100)]
    ids = [stage.producer.submit(1, payload)[0] for payload in payloads]
    stage.dispatcher(stage.settings(world, queue={"lease_s": 10}))
    results = stage.producer.wait_for_all(timeout_s=90)
    for id_, payload in zip(ids, payloads, strict=True):
        assert [result["payload"].encode() for result in results[id_]] == [payload]
