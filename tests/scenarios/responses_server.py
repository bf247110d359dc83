"""HTTP model server with the OpenAI Responses API, which stores conversations, and with chat completions.

A chat completion repeats the whole conversation in its answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from tests.scenarios.http_server import run_http_server


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

    def answer(body: bytes, _: Message) -> tuple[int, dict[str, str], bytes]:
        status, content = server.make_answer(body)
        return status, {}, json.dumps(content).encode()

    with run_http_server(answer) as url:
        server = ResponsesServer(url)
        yield server
