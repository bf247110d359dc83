"""Metrics page of llama.cpp with the use of its KV memory, which llama.cpp itself does not export.

The use is computed from `/slots`: the prompts of the requests that run, and what they have generated. The
page has the names of vLLM, which the dispatcher reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.engine.engine import Engine


@contextmanager
def serve_memory_page(engine: Engine, kv_tokens: int) -> Iterator[str]:
    """Serve the page of an engine whose slots share so many tokens, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = render_page(engine.get_json("/slots"), kv_tokens).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            server.shutdown()
            thread.join()


def render_page(slots: list[dict[str, Any]], kv_tokens: int) -> str:
    """Return the page for the state of all slots."""
    running = [slot for slot in slots if slot["is_processing"]]
    # The number of a slot includes what was generated, except for the newest token.
    used = sum(slot["n_prompt_tokens"] for slot in running)
    return (
        f'vllm:num_requests_running{{model_name="m"}} {len(running)}\n'
        'vllm:num_requests_waiting{model_name="m"} 0\n'
        f'vllm:kv_cache_usage_perc{{model_name="m"}} {min(1.0, used / kv_tokens)}\n'
        f'vllm:cache_config_info{{kv_cache_size_tokens="{kv_tokens}"}} 1\n'
    )
