"""A registry of images in memory, on loopback and over TLS: what a push needs of the OCI distribution API."""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import trustme


@dataclass
class Registry:
    """Stand-in for an image registry. It keeps what was pushed."""

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """`name:tag` or `name:digest` → media type and text."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: Registry

    def do_GET(self) -> None:
        found = re.fullmatch(r"/v2/(.+)/(blobs|manifests)/([^/]+)", self.path)
        if found is None:
            self._answer(200 if self.path == "/v2/" else 404)
            return
        name, kind, of = found.groups()
        if kind == "blobs":
            blob = self.registry.blobs.get(of)
            media = None if blob is None else ("application/octet-stream", blob)
        else:
            media = self.registry.manifests.get(f"{name}:{of}")
        self._answer(404) if media is None else self._answer(200, media[1], {"Content-Type": media[0]})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self._answer(202, headers={"Location": f"{self.path}1"})

    def do_PATCH(self) -> None:
        body = self._body()
        self.registry.blobs[self.path] = body
        self._answer(202, headers={"Location": self.path, "Range": f"0-{len(body) - 1}"})

    def do_PUT(self) -> None:
        at, body = urlsplit(self.path), self._body()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", at.path):
            name, of = found.groups()
            for reference in (of, digest):
                self.registry.manifests[f"{name}:{reference}"] = (self.headers["Content-Type"], body)
            self._answer(201, headers={"Docker-Content-Digest": digest})
        else:
            whole = self.registry.blobs.pop(at.path, b"") + body
            self.registry.blobs[parse_qs(at.query)["digest"][0]] = whole
            self._answer(201)

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = {"Docker-Content-Digest": f"sha256:{hashlib.sha256(body).hexdigest()}"} if body else {}
        for name, value in {**more, **(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing: a test says what it asks for."""


@contextmanager
def registry(authority: Path) -> Iterator[Registry]:
    """Serve one; the file at `authority` then holds the certificate that clients have to trust."""
    made, issuer = Registry(), trustme.CA()
    issuer.cert_pem.write_to_path(str(authority))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer.issue_cert("127.0.0.1").configure_cert(context)
    handler = type("_Handler", (_Handler,), {"registry": made})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
