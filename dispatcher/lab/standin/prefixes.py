"""What model servers keep of prompts: one that begins like a recent one needs less work."""

from __future__ import annotations

import random
from collections import OrderedDict
from hashlib import blake2b

import msgspec

BLOCK_BYTES = 64
"""Some sixteen tokens."""


class _Said(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Prompt(msgspec.Struct):
    messages: list[_Said] = []
    prompt: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prompt).decode


class PrefixCache:
    """So many blocks of prompts, those that were read last. A block is the same where everything before it is
    the same, too."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement. What is kept stays."""
        self.asked = self.hits = 0

    def read(self, body: bytes) -> None:
        """A request comes in."""
        if not self._most:
            return
        try:
            found = _decode(body)
        except msgspec.MsgspecError:
            return
        prompt = b"".join(bytes(each.content) for each in found.messages) or bytes(found.prompt)
        digest, still = blake2b(digest_size=16), True
        for at in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            digest.update(prompt[at : at + BLOCK_BYTES])
            block = digest.digest()
            self.asked += 1
            still = still and block in self._kept
            self.hits += still
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def report(self) -> dict[str, int]:
        return {"asked": self.asked, "hits": self.hits}


class PrefixServers:
    """Model servers with a cache each, behind a picker that keeps sessions where they are: a request that
    names a server goes there while it is there, any other one to some server, and each answer says which.
    """

    def __init__(self, servers: int, blocks: int, seed: int = 0) -> None:
        self._blocks = blocks
        self._random = random.Random(seed)
        self._caches = {f"server-{number}": PrefixCache(blocks) for number in range(max(1, servers))}
        self._gone: list[PrefixCache] = []

    def read(self, body: bytes, token: str) -> str:
        """A request comes in; the token of the server that it goes to."""
        name = token if token in self._caches else self._random.choice(list(self._caches))
        self._caches[name].read(body)
        return name

    def kill(self, token: str) -> None:
        """That server ends, and what it kept; one at least stays."""
        if token in self._caches and len(self._caches) > 1:
            self._gone.append(self._caches.pop(token))

    def restart(self) -> None:
        """Begin a new measurement. What is kept stays."""
        self._gone.clear()
        for cache in self._caches.values():
            cache.restart()

    def report(self) -> dict[str, int]:
        every = [*self._caches.values(), *self._gone]
        return {"asked": sum(each.asked for each in every), "hits": sum(each.hits for each in every)}
