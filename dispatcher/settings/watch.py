"""Notices when the configuration file says something else, however it came to.

A mounted ConfigMap changes by a swap of its `..data` symlink, editors write a new file and rename it over the
old one, others truncate and write in place. All of these are changes in the file's directory, so that is what
is watched; what counts is the text that stands there once it has settled.
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
"""A text is whole when two looks this far apart see the same."""
GONE_S = 1.0
"""A file that stays empty, missing or unreadable for so long is a problem, not an editor at work."""
POLL_S = 2.0
"""Where the kernel tells nothing (network file systems, a link to another directory), a look this often."""


async def watch(path: Path | str, known: str) -> AsyncGenerator[str | Problem, None]:
    """Yield the file's new text whenever it differs from the last (`known` at first), once it has settled.

    A Problem, once, when the file stays empty, missing or unreadable; the text again when it comes back, even
    unchanged. Never ends by itself, never raises for what a file system does.
    """
    path = Path(path)
    look = partial(_look_beside, BackgroundRead(partial(_look, path)), path)
    last: str | Problem = known if known.strip() else _empty(path)  # it was taken so: nothing has changed
    async with aclosing(_hints(path.parent)) as hints:
        async for _ in hints:
            if await look() == last:
                continue
            found = await _settled(look)
            if found != last:
                last = found
                yield found


async def prepare(directory: Path) -> None:
    """Have everything imported that `watch` needs: it takes long, and not every command watches."""
    from watchfiles import awatch

    with suppress(OSError, RuntimeError):  # `watch` itself copes with these
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
    """What the file says once it no longer changes: a text seen twice, a problem that stays for GONE_S."""
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
    from watchfiles import awatch  # 50 ms to import, and not every command watches

    yield
    while True:
        with suppress(OSError, RuntimeError):  # no such directory yet, or no inotify watch to be had
            events = awatch(
                directory,
                watch_filter=None,
                debounce=200,
                rust_timeout=int(POLL_S * 1000),
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(events):
                async for _ in events:
                    yield
        await asyncio.sleep(POLL_S)
        yield
