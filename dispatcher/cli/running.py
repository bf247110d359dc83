"""The dispatcher that runs on this machine, asked at its admin port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dispatcher.settings import Admin


async def running(admin: Admin) -> tuple[dict[str, Any] | None, str | None]:
    """/status of the dispatcher that runs by a configuration on this machine; or why it is not known."""
    import aiohttp

    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)  # noqa: S104 - what is listened on
    headers = {}
    if admin.token_file:
        try:
            headers["Authorization"] = f"Bearer {_token(admin.token_file)}"
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "no text"
            return None, f"admin.token_file: {admin.token_file} cannot be read: {why}"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
            session.get(f"http://{host}:{admin.port}/status", headers=headers) as answer,
        ):
            if answer.status == 401:
                other = "another token than admin.token_file has"
                wanted = other if admin.token_file else "a token; admin.token_file names none"
                return None, f"admin.port {admin.port} wants {wanted}"
            found = await answer.json() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None, f"nobody on admin.port {admin.port} of this machine"
    if isinstance(found, dict) and "explanation" in found:
        return found, None
    return None, f"what answers on admin.port {admin.port} is no dispatcher"


def _token(path: str) -> str:
    return Path(path).read_text().strip()
