"""Prefix caches of model servers: a prompt that starts like a recent one needs less work."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

BLOCK_BYTES = 64
"""Size of a block, about sixteen tokens."""
BLOCK_TOKENS = 16
"""Size of a block of a server that generates text."""
_MAX_TOKEN_BLOCKS = 65_536


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


class TokenCache:
    """Cache of the tokens that a model server has processed, in blocks, as those of vLLM."""

    def __init__(self, max_blocks: int = _MAX_TOKEN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._recent_blocks: OrderedDict[bytes, None] = OrderedDict()

    def count_cached(self, model: str, prompt: Sequence[int]) -> int:
        """Return how many tokens at the begin of a prompt are in the cache."""
        cached = 0
        # The last token is always processed, since the first generated one follows from it.
        for block in _hash_blocks(model, prompt[:-1]):
            if block not in self._recent_blocks:
                break
            self._recent_blocks.move_to_end(block)
            cached += BLOCK_TOKENS
        return cached

    def record_tokens(self, model: str, tokens: Sequence[int]) -> None:
        """Record tokens that the server has processed."""
        for block in _hash_blocks(model, tokens):
            self._recent_blocks[block] = None
            self._recent_blocks.move_to_end(block)
        while len(self._recent_blocks) > self._max_blocks:
            self._recent_blocks.popitem(last=False)


def _hash_blocks(model: str, tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield a hash for each complete block, of the model and of all tokens up to the end of the block."""
    digest = blake2b(model.encode() + b"\0", digest_size=16)
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(array("I", tokens[at : at + BLOCK_TOKENS]).tobytes())
        yield digest.digest()


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

    def pick_server(self, token: str) -> str:
        """Return the token of the server that a request with this session token goes to."""
        return token if token in self._caches else self._random.choice(list(self._caches))

    def record_prompt(self, server: str, body: bytes) -> None:
        """Record a request that goes to a server."""
        self._caches[server].record_prompt(body)

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
