"""Extract the addresses of URLs, and describe those that accept no connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from dispatcher.settings import SecretUrl

CONNECT_S = 1.5
Address = tuple[str, int]
HTTP_PORT = 80


def addresses(urls: Sequence[SecretUrl], usual_port: int = HTTP_PORT) -> set[Address]:
    """Return host and port of each host of each URL."""
    found = set()
    for url in urls:
        port = 443 if url.scheme == "https" else usual_port
        for host in url.hosts:
            parts = urlsplit(f"//{host}")
            found.add((parts.hostname or "", parts.port or port))
    return found


def all_away(asked: Iterable[Address], away: Mapping[Address, str]) -> str | None:
    """Return what is wrong with the addresses, if none of them accepts connections.

    `None` if at least one does, or if there is no address at all (a Unix socket).
    """
    told = [away.get(address) for address in sorted(asked)]
    return None if None in told or not told else "; ".join(filter(None, told))
