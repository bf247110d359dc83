"""The addresses behind URLs, and which of them accept no connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from dispatcher.settings import SecretUrl

CONNECT_S = 1.5
Address = tuple[str, int]
HTTP_PORT = 80


def addresses(urls: Sequence[SecretUrl], usual_port: int = HTTP_PORT) -> set[Address]:
    """Host and port of each host of each URL."""
    found = set()
    for url in urls:
        port = 443 if url.scheme == "https" else usual_port
        for host in url.hosts:
            parts = urlsplit(f"//{host}")
            found.add((parts.hostname or "", parts.port or port))
    return found


def all_away(asked: Iterable[Address], away: Mapping[Address, str]) -> str | None:
    """What is wrong with each; None where one at least accepts connections, or none is asked (a socket)."""
    told = [away.get(address) for address in sorted(asked)]
    return None if None in told or not told else "; ".join(filter(None, told))
