"""Redis users of docs/explanation/security.md, created as that page describes."""

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
    """Return the rules after `ACL SETUSER <role>`, for the queue with this tag."""
    words = shlex.split(_BLOCKS[role].replace("\\\n", " "))
    assert words[:4] == ["redis-cli", "ACL", "SETUSER", role]
    return [word.replace("{qwen}", f"{{{tag}}}") for word in words[4:]]


def commands(role: str) -> set[str]:
    return set(re.findall(r"\+([\w|]+)", " ".join(rules(role))))


def grant(client: redis.Redis, role: str, *more: str, tag: str = "qwen") -> None:
    """Create the user, or create it again, with the rules of the page and then these."""
    client.execute_command("ACL", "SETUSER", role, *rules(role, tag), *more)


def url_of(server: Server, role: str) -> str:
    return server.url.replace("redis://", f"redis://{role}:{PASSWORD}@", 1)
