"""HTTP model server with the OpenAI Responses API, which stores conversations, and with chat completions.

A chat completion repeats the whole conversation in its answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class ResponsesServer:
    url: str
    inputs_by_response: dict[str, list[str]] = field(default_factory=dict)
    """Inputs of the conversation until a response, by response id."""
    bodies: list[bytes] = field(default_factory=list)
    """Bodies of all requests in the order of arrival."""

    def make_answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Continue the conversation of `previous_response_id` like the API, or answer 404."""
        self.bodies.append(body)
        request = json.loads(body)
        if "messages" in request:
            contents = " / ".join(each["content"] for each in request["messages"])
            return 200, {"choices": [{"message": {"role": "assistant", "content": f"heard: {contents}"}}]}
        previous = request.get("previous_response_id")
        if previous is not None and previous not in self.inputs_by_response:
            return 404, {"error": {"code": "previous_response_not_found", "param": "previous_response_id"}}
        name = f"resp_{len(self.inputs_by_response)}"
        self.inputs_by_response[name] = [*self.inputs_by_response.get(previous, []), request["input"]]
        text = {"type": "output_text", "text": f"{len(self.inputs_by_response[name])} so far"}
        output = [{"type": "message", "role": "assistant", "content": [text]}]
        return 200, {"id": name, "object": "response", "previous_response_id": previous, "output": output}


@contextmanager
def run_responses_server() -> Iterator[ResponsesServer]:
    """Run the server on a free port for the duration of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, answer = server.make_answer(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.daemon_threads = True
        server = ResponsesServer(f"http://127.0.0.1:{http_server.server_address[1]}")
        thread = Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http_server.shutdown()
            thread.join()
