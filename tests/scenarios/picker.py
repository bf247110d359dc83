"""As much of an endpoint picker as Envoy asks for: `python picker.py PORT` says yes to every request.

A process of its own: gRPC's threads do not survive in a test process that starts others.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
GO_ON = b"\x0a\x00"
"""A ProcessingResponse that lets the request's headers pass as they are."""


def main(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(64))  # a stream each, for as long as its request runs
    handler = grpc.stream_stream_rpc_method_handler(lambda asked, _: (GO_ON for _ in asked))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]))
