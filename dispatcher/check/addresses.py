"""Extract the addresses of URLs, and describe those that accept no connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from dispatcher.settings.values import SecretUrl

CONNECT_S = 1.5
Address = tuple[str, int]
HTTP_PORT = 80


def list_addresses(urls: Sequence[SecretUrl], default_port: int = HTTP_PORT) -> set[Address]:
    """Return host and port of each host of each URL."""
    found = set()
    for url in urls:
        port = 443 if url.scheme == "https" else default_port
        for host in url.hosts:
            parts = urlsplit(f"//{host}")
            found.add((parts.hostname or "", parts.port or port))
    return found


def explain_all_unreachable(
    asked_addresses: Iterable[Address], unreachable: Mapping[Address, str]
) -> str | None:
    """Return what is wrong with the addresses, if none of them accepts connections.

    `None` if at least one does, or if there is no address at all (a Unix socket).
    """
    reasons = [unreachable.get(address) for address in sorted(asked_addresses)]
    return None if None in reasons or not reasons else "; ".join(filter(None, reasons))
