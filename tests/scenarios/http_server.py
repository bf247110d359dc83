"""HTTP server that answers each POST request with what a function returns, for the model servers here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

AnswerFunction = Callable[[bytes, Message], tuple[int, dict[str, str], bytes]]
"""Returns status, headers and body of the answer to a request with this body and these headers."""


@contextmanager
def run_http_server(answer: AnswerFunction) -> Iterator[str]:
    """Run the server on a free port for the duration of the block. Each connection has its own thread.

    Yields the URL of the server.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request_body = self.rfile.read(int(self.headers["content-length"]))
            status, headers, body = answer(request_body, self.headers)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
