"""Watch of the configuration file, which reports each new text.

A mounted ConfigMap changes by a swap of its `..data` symlink. Editors write a new file and rename it over the
old one, or truncate the file and write in place. All of these are changes in the directory of the file, so
the directory is watched. A new text is reported once it is stable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from dispatcher.settings.load import read_blocking, unreadable
from dispatcher.settings.small_files import BackgroundRead
from dispatcher.settings.yaml_source import Problem

QUIET_S = 0.1
"""Seconds between two reads that must return the same text. Then the text is considered complete."""
GONE_S = 1.0
"""Seconds after which an empty, missing or unreadable file is a problem. An editor is faster."""
POLL_S = 2.0
"""Seconds between reads without events, for network file systems and links to other directories, where the
kernel reports no events."""


async def watch(path: Path | str, known: str) -> AsyncGenerator[str | Problem, None]:
    """Yield each new text of the file once it is stable. At first, `known_text` is the text to compare with.

    If the file stays empty, missing or unreadable, yield a Problem once. When the file comes back, yield its
    text again, even if it is unchanged. Never ends by itself, and never raises for errors of the file system.
    """
    path = Path(path)
    look = partial(_look_beside, BackgroundRead(partial(_look, path)), path)
    # An empty file was accepted at the start, so it is no change, and the Problem is not reported again.
    last: str | Problem = known if known.strip() else _empty(path)
    async with aclosing(_hints(path.parent)) as hints:
        async for _ in hints:
            if await look() == last:
                continue
            found = await _settled(look)
            if found != last:  # the file may have changed back meanwhile
                last = found
                yield found


async def prepare(directory: Path) -> None:
    """Import and start `watchfiles` once, which takes long, and which only some commands need."""
    from watchfiles import awatch

    with suppress(OSError, RuntimeError):  # `watch_config` handles these errors itself
        looks = awatch(directory, rust_timeout=1, yield_on_timeout=True, recursive=False)
        async with aclosing(looks):
            await anext(looks)


async def _look_beside(read: BackgroundRead[str | Problem], path: Path) -> str | Problem:
    try:
        return await read()
    except TimeoutError as error:
        return unreadable(path, error)


def _look(path: Path) -> str | Problem:
    found = read_blocking(path)
    if isinstance(found, str) and not found.strip():
        return _empty(path)
    return found


def _empty(path: Path) -> Problem:
    return Problem(path.name, "", "is empty")


async def _settled(look: Callable[[], Awaitable[str | Problem]]) -> str | Problem:
    """Wait until the file no longer changes, and return its text, or a problem that lasted for MISSING_S."""
    clock = asyncio.get_running_loop().time
    found = await look()
    since = clock()
    while True:
        await asyncio.sleep(QUIET_S)
        again = await look()
        if again != found:
            found, since = again, clock()
        elif isinstance(found, str) or clock() - since >= GONE_S:
            return found


async def _hints(directory: Path) -> AsyncGenerator[None, None]:
    """Yield whenever the directory may have changed: at once, on its events, and at least every POLL_S."""
    from watchfiles import awatch  # takes 50 ms to import, and only some commands watch the file

    yield
    while True:
        # The directory may not exist yet, or the system may have no inotify watch left: then only poll.
        with suppress(OSError, RuntimeError):
            events = awatch(
                directory,
                watch_filter=None,  # any file counts: a ConfigMap changes by its `..data` link
                debounce=200,
                rust_timeout=int(POLL_S * 1000),
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(events):
                async for _ in events:
                    yield
        # Only reached without a working watch: look again after a while, and try to watch again.
        await asyncio.sleep(POLL_S)
        yield
