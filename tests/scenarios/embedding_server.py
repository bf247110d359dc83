"""HTTP model server for embeddings, which records the number of items of each call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message

from tests.features.merging.embedding_gateway import build_answer
from tests.scenarios.http_server import run_http_server


@dataclass
class EmbeddingServer:
    url: str
    item_counts: list[int] = field(default_factory=list)
    """Number of items of each call, in the order of arrival."""


@contextmanager
def run_embedding_server() -> Iterator[EmbeddingServer]:
    """Run the server on a free port for the duration of the block."""

    def answer(body: bytes, _: Message) -> tuple[int, dict[str, str], bytes]:
        request = json.loads(body)
        texts = request["input"] if isinstance(request["input"], list) else [request["input"]]
        server.item_counts.append(len(texts))
        return 200, {}, build_answer(texts, request["model"])

    with run_http_server(answer) as url:
        server = EmbeddingServer(url)
        yield server
