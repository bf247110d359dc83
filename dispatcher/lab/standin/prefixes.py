"""Prefix caches of model servers: a prompt that starts like a recent one needs less work."""

from __future__ import annotations

import random
from collections import OrderedDict
from hashlib import blake2b

import msgspec

BLOCK_BYTES = 64
"""Size of a block, about sixteen tokens."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Prompt(msgspec.Struct):
    messages: list[_Message] = []
    prompt: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prompt).decode


class PrefixCache:
    """Cache of the most recently used blocks of prompts. A block is the same only if everything before it is
    the same."""

    def __init__(self, blocks: int) -> None:
        self._max_blocks = blocks
        self._recent_blocks: OrderedDict[bytes, None] = OrderedDict()
        self.restart_measurement()

    def restart_measurement(self) -> None:
        """Start a new measurement. The cache keeps its blocks."""
        self.lookups = self.hits = 0

    def record_prompt(self, body: bytes) -> None:
        """Record the prompt of a request."""
        if not self._max_blocks:
            return
        try:
            decoded = _decode(body)
        # Not a prompt: it counts nothing.
        except msgspec.MsgspecError:
            return
        prompt = b"".join(bytes(each.content) for each in decoded.messages) or bytes(decoded.prompt)
        digest, is_prefix_cached = blake2b(digest_size=16), True
        for at in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            digest.update(prompt[at : at + BLOCK_BYTES])
            # The digest covers all blocks up to here, so that a block only matches after the same prefix.
            block = digest.digest()
            self.lookups += 1
            # The first missing block ends the reusable prefix, even if later blocks are present.
            is_prefix_cached = is_prefix_cached and block in self._recent_blocks
            self.hits += is_prefix_cached
            self._recent_blocks[block] = None
            self._recent_blocks.move_to_end(block)
        while len(self._recent_blocks) > self._max_blocks:
            self._recent_blocks.popitem(last=False)

    def build_report(self) -> dict[str, int]:
        return {"asked": self.lookups, "hits": self.hits}


class PrefixServers:
    """Model servers with a cache each, behind a picker with session affinity.

    A request that names a server goes there while the server exists; other requests go to a random server.
    Each answer names its server.
    """

    def __init__(self, servers: int, blocks: int, seed: int = 0) -> None:
        self._blocks = blocks
        self._random = random.Random(seed)
        self._caches = {f"server-{number}": PrefixCache(blocks) for number in range(max(1, servers))}
        self._removed_caches: list[PrefixCache] = []

    def route_request(self, body: bytes, token: str) -> str:
        """Record a request and return the token of the server that it goes to."""
        name = token if token in self._caches else self._random.choice(list(self._caches))
        self._caches[name].record_prompt(body)
        return name

    def remove_server(self, token: str) -> None:
        """Remove a server with its cache. The last server stays."""
        if token in self._caches and len(self._caches) > 1:
            self._removed_caches.append(self._caches.pop(token))

    def restart_measurement(self) -> None:
        """Start a new measurement. The caches keep their blocks."""
        self._removed_caches.clear()
        for cache in self._caches.values():
            cache.restart_measurement()

    def build_report(self) -> dict[str, int]:
        every = [*self._caches.values(), *self._removed_caches]
        return {"asked": sum(each.lookups for each in every), "hits": sum(each.hits for each in every)}
