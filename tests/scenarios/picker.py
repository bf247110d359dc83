"""As much of an endpoint picker as Envoy asks for: `python picker.py PORT [FILE]` says yes to every request,
and puts what it was asked into the file, as it came.

A process of its own: gRPC's threads do not survive in a test process that starts others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
GO_ON = b"\x0a\x00"
"""A ProcessingResponse that lets the request's headers pass as they are."""


def main(port: int, noted: str) -> None:
    def answer(asked: Iterator[bytes]) -> Iterator[bytes]:
        for each in asked:
            if noted:
                with Path(noted).open("ab") as file:
                    file.write(each)
            yield GO_ON

    server = grpc.server(ThreadPoolExecutor(64))  # a stream each, for as long as its request runs
    handler = grpc.stream_stream_rpc_method_handler(lambda asked, _: answer(asked))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
