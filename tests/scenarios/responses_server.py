"""A model server behind HTTP with OpenAI's Responses API, which keeps the conversations itself, and with chat
completions, whose answer repeats the whole conversation."""

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
    known: dict[str, list[str]] = field(default_factory=dict)
    """By the id of a response: what was said until then, the inputs alone."""
    asked: list[bytes] = field(default_factory=list)
    """The bodies, in the order in which they came."""

    def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """As the API does: on with the response that is named, 404 where that is not known."""
        self.asked.append(body)
        asked = json.loads(body)
        if "messages" in asked:
            said = " / ".join(each["content"] for each in asked["messages"])
            return 200, {"choices": [{"message": {"role": "assistant", "content": f"heard: {said}"}}]}
        previous = asked.get("previous_response_id")
        if previous is not None and previous not in self.known:
            return 404, {"error": {"code": "previous_response_not_found", "param": "previous_response_id"}}
        name = f"resp_{len(self.known)}"
        self.known[name] = [*self.known.get(previous, []), asked["input"]]
        text = {"type": "output_text", "text": f"{len(self.known[name])} so far"}
        output = [{"type": "message", "role": "assistant", "content": [text]}]
        return 200, {"id": name, "object": "response", "previous_response_id": previous, "output": output}


@contextmanager
def responses_server() -> Iterator[ResponsesServer]:
    """On a free port, for as long as it is used."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, answer = served.answer(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        listening.daemon_threads = True
        served = ResponsesServer(f"http://127.0.0.1:{listening.server_address[1]}")
        thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            listening.shutdown()
            thread.join()
