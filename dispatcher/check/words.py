"""An error as an operator would say it."""

from __future__ import annotations

import asyncio
import socket
import ssl

from dispatcher.peer import reason


def words(error: Exception) -> str:
    """An error as an operator would say it."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed"
    return reason(error) if isinstance(error, OSError) else str(error)
