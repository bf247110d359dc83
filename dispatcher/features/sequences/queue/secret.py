"""The secret with which programs with our client prove that they may use a sequence."""

from __future__ import annotations

import secrets

from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.scripts import ScriptRunner


def get_secret_key(names: QueueNames) -> str:
    """Return the key of the secret that all programs with our client share for their sequences."""
    return f"{names.queue_prefix}:sequences:secret"


async def get_or_create_secret(scripts: ScriptRunner, names: QueueNames) -> str:
    """Return the secret that all programs with our client share for their sequences. Create it if needed.

    Only users with an operator's rights may read the secret, and they may read the contents of sequences
    anyway. So it keeps out producers with lesser rights, while a restarted program, its replicas and the
    command line can go on with each other's sequences.
    """
    key = get_secret_key(names)

    async def get_or_create() -> bytes:
        found: bytes | None = await scripts.client.get(key)
        if found is None:
            # Several programs may do this at the same time. NX lets the first one win, and all read its
            # secret.
            await scripts.client.set(key, secrets.token_hex(16), nx=True)
            found = await scripts.client.get(key)
        return found or b""

    return (await scripts.call_with_retries(get_or_create)).decode(errors="replace")
