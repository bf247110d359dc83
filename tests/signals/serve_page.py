"""Serve a file at every path, in a separate process so that its CPU time does not count as the scraper's."""

from __future__ import annotations

import http.server
import sys
from pathlib import Path


def main() -> None:
    page = Path(sys.argv[1]).read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(page)))
            if sys.argv[1].endswith(".gz"):
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
