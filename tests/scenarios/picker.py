"""Minimal endpoint picker for Envoy: `python picker.py PORT [FILE]` allows every request.

The messages from Envoy are appended to the file. It is a separate process because gRPC threads do not survive
in a test process that starts other processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
CONTINUE = b"\x0a\x00"
"""ProcessingResponse that lets the headers of the request pass unchanged."""


def main(port: int, record_path: str) -> None:
    def allow_all(requests: Iterator[bytes]) -> Iterator[bytes]:
        for request in requests:
            if record_path:
                with Path(record_path).open("ab") as file:
                    file.write(request)
            yield CONTINUE

    server = grpc.server(ThreadPoolExecutor(64))  # each request occupies a stream while it runs
    handler = grpc.stream_stream_rpc_method_handler(lambda requests, _: allow_all(requests))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
