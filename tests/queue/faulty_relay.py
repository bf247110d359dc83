"""Relay to a server that can be made slow, silent or wrong at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tests.queue.servers import Server

_CHUNK = 65_536


@dataclass
class Relay:
    """Relays each connection. Its fields take effect at once."""

    server: Server
    port: int = 0
    says: bytes | None = None
    """Bytes that answer every request in place of the server. Empty to close the connection."""
    bytes_per_s: float | None = None
    swallows: int | None = None
    """Number of bytes in one read, at most 65,536, from which on a connection becomes silent for ever."""
    mute: int | None = None
    """The same for answers of the server. Earlier answers are passed on."""
    answered: int = 0
    """Number of times that the relay has answered itself."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back: asyncio.Task[None] | None = None
        with suppress(OSError, asyncio.CancelledError):  # the test has ended
            there_reader, there = await asyncio.open_connection("127.0.0.1", self.server.port, limit=2**24)
            back = asyncio.create_task(self._back(there_reader, writer))
            while chunk := await reader.read(_CHUNK):
                if self.says is not None:
                    self.answered += 1
                    if not self.says:
                        break
                    writer.write(self.says)
                    continue
                if self.swallows is not None and len(chunk) >= self.swallows:
                    await asyncio.Event().wait()  # until the client gives up
                await self._pass(chunk, there)
        if back is not None:
            back.cancel()
            there.close()
        writer.transport.abort()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if self.mute is not None and len(chunk) >= self.mute:
                    await asyncio.Event().wait()
                await self._pass(chunk, writer)
            writer.close()

    async def _pass(self, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        if self.bytes_per_s is not None and len(chunk) > 1000:
            await asyncio.sleep(len(chunk) / self.bytes_per_s)
        writer.write(chunk)
        await writer.drain()


@asynccontextmanager
async def relay(server: Server) -> AsyncIterator[Relay]:
    """Yield a relay on its own port."""
    made = Relay(server)
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=_CHUNK)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
