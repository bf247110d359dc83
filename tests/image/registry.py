"""An in-memory image registry with TLS: the part of the OCI distribution API that a push needs."""

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
    """Media type and text of each manifest, by `name:tag` and by `name:digest`."""

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
        name, kind, reference = found.groups()
        if kind == "blobs":
            blob = self.registry.blobs.get(reference)
            media = None if blob is None else ("application/octet-stream", blob)
        else:
            media = self.registry.manifests.get(f"{name}:{reference}")
        self._answer(404) if media is None else self._answer(200, media[1], {"Content-Type": media[0]})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self._answer(202, headers={"Location": f"{self.path}1"})

    def do_PATCH(self) -> None:
        body = self._body()
        self.registry.blobs[self.path] = body
        self._answer(202, headers={"Location": self.path, "Range": f"0-{len(body) - 1}"})

    def do_PUT(self) -> None:
        url, body = urlsplit(self.path), self._body()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", url.path):
            name, tag = found.groups()
            for reference in (tag, digest):
                self.registry.manifests[f"{name}:{reference}"] = (self.headers["Content-Type"], body)
            self._answer(201, headers={"Docker-Content-Digest": digest})
        else:
            blob = self.registry.blobs.pop(url.path, b"") + body
            self.registry.blobs[parse_qs(url.query)["digest"][0]] = blob
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
        default_headers = (
            {"Docker-Content-Digest": f"sha256:{hashlib.sha256(body).hexdigest()}"} if body else {}
        )
        for name, value in {**default_headers, **(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def run_registry(authority: Path) -> Iterator[Registry]:
    """Serve a registry and write the certificate that clients have to trust to the file `authority`."""
    registry, certificate_authority = Registry(), trustme.CA()
    certificate_authority.cert_pem.write_to_path(str(authority))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate_authority.issue_cert("127.0.0.1").configure_cert(context)
    handler = type("_Handler", (_Handler,), {"registry": registry})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        registry.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
