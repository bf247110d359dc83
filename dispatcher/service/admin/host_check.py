"""Check of the Host header, against DNS rebinding.

A page in a browser may only read answers of its own origin. An attacker who owns a domain can serve a page
from it, then let its name resolve to the address of this server, and read what the browser can reach. The
browser sends the name of that domain in the Host header. Therefore only names are accepted that a stranger
cannot own.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from dispatcher.common.patterns import matches_any

_PORT = re.compile(r":\d*$")
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".test")
"""Ends of names that no public DNS has. `.svc` and `.svc.cluster.local` are those of Kubernetes."""


def is_own_host(host: str, allowed: Sequence[str]) -> bool:
    """Return whether a request with this Host header may be answered. `allowed` are patterns of further
    names."""
    name = _PORT.sub("", host).lower().removesuffix(".")
    # A request without the header does not come from a browser. Names without a dot are not public.
    if "." not in name and ":" not in name:
        return True
    return (
        _is_address(name)
        or name.endswith(_PRIVATE_SUFFIXES)
        or name == socket.gethostname().lower()
        or matches_any(allowed, name)
    )


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
