"""The Redis users of docs/explanation/security.md, as that page makes them."""

from __future__ import annotations

import re
import shlex

import redis

from tests.paths import DOCS
from tests.queue.servers import Server

PAGE = DOCS / "explanation" / "security.md"
PASSWORD = "its-password"
_BLOCKS = dict(
    re.findall(r"<!-- acl: (\w+) -->\n```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
)
ROLES = tuple(_BLOCKS)


def rules(role: str, tag: str = "qwen") -> list[str]:
    """What follows `ACL SETUSER <role>`, for the queue with this tag."""
    words = shlex.split(_BLOCKS[role].replace("\\\n", " "))
    assert words[:4] == ["redis-cli", "ACL", "SETUSER", role]
    return [word.replace("{qwen}", f"{{{tag}}}") for word in words[4:]]


def commands(role: str) -> set[str]:
    return set(re.findall(r"\+([\w|]+)", " ".join(rules(role))))


def grant(client: redis.Redis, role: str, *more: str, tag: str = "qwen") -> None:
    """Make the user, or make it anew, with these rules behind those of the page."""
    client.execute_command("ACL", "SETUSER", role, *rules(role, tag), *more)


def url_of(server: Server, role: str) -> str:
    return server.url.replace("redis://", f"redis://{role}:{PASSWORD}@", 1)
