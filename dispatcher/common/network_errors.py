"""Descriptions of network errors for operators. Imports nothing that takes time."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator

_MOST_CHARS = 200
"""Length limit of the text of an error, which may contain bytes of the peer."""


def describe_error(error: BaseException) -> str:
    """Return in one line what went wrong: the message of TLS or of the system if either is behind the error.

    Client libraries wrap errors in errors of their own, whose messages say less, or too much: a URL with its
    secrets.
    """
    for cause in _iterate_causes(error):
        if (description := _describe_known_error(cause)) is not None:
            return description
    return " ".join(str(error).split())[:_MOST_CHARS] or type(error).__name__


def describe_error_with_address(error: BaseException) -> str:
    """Return the description, after the address if the error names one (aiohttp's connector does)."""
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    return f"{host}:{port}: {describe_error(error)}" if host and port else describe_error(error)


def is_connection_refused(error: BaseException) -> bool:
    """Return True if the connection was refused at every address that was tried: no process has the port."""
    for cause in _iterate_causes(error):
        if isinstance(cause, OSError) and (errnos := _collect_errnos(cause)):
            return set(errnos) == {errno.ECONNREFUSED}
    return False


def is_connection_reset(error: BaseException) -> bool:
    """Return True if the peer closed the connection with a reset."""
    return any(
        isinstance(cause, ConnectionResetError)
        or (isinstance(cause, OSError) and errno.ECONNRESET in _collect_errnos(cause))
        for cause in _iterate_causes(error)
    )


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the outermost first."""
    # A cause may be linked back to an error that was yielded already.
    visited_ids: set[int] = set()
    while error is not None and id(error) not in visited_ids:
        visited_ids.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _describe_known_error(error: BaseException) -> str | None:
    """Describe one error of the chain. `None` if only its own text is known, or its causes may say more."""
    if hasattr(error, "request_info"):  # aiohttp's ClientResponseError: its own words hold the URL
        return (
            f"the answer is not HTTP ({str(getattr(error, 'message', '')).partition(':')[0][:_MOST_CHARS]})"
        )
    if isinstance(error, ssl.SSLError):
        # aiohttp derives an exception of its own from the certificate's, and leaves the message behind.
        if verify := getattr(error, "verify_message", ""):
            return f"its certificate is not trusted: {verify}"
        return f"TLS failed: {reason}" if (reason := getattr(error, "reason", None)) else None
    if isinstance(error, EOFError):
        return "the connection was closed"
    if not isinstance(error, OSError):
        return None
    if isinstance(error, socket.gaierror) or (error.errno or 0) < 0:
        return f"the name cannot be resolved ({error.strerror})"
    # asyncio joins the errors of all addresses of a name in one message: show one reason.
    if errnos := _collect_errnos(error):
        why = os.strerror(errnos[0]).lower()
        return f"{error.filename}: {why}" if error.filename else why
    return "no answer in time" if isinstance(error, TimeoutError) else None


def _collect_errnos(error: OSError) -> list[int]:
    """Return the `errno` of the error, or of each address that was tried."""
    return [error.errno] if error.errno else [int(each) for each in re.findall(r"Errno (\d+)", str(error))]
