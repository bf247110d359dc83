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

from dispatcher.settings.load import read_config_blocking, unreadable_problem
from dispatcher.settings.small_files import BackgroundRead
from dispatcher.settings.yaml_source import Problem

STABLE_S = 0.1
"""Seconds between two reads that must return the same text. Then the text is considered complete."""
MISSING_S = 1.0
"""Seconds after which an empty, missing or unreadable file is a problem. An editor is faster."""
POLL_S = 2.0
"""Seconds between reads without events, for network file systems and links to other directories, where the
kernel reports no events."""


async def watch_config(path: Path | str, known_text: str) -> AsyncGenerator[str | Problem, None]:
    """Yield each new text of the file once it is stable. At first, `known_text` is the text to compare with.

    If the file stays empty, missing or unreadable, yield a Problem once. When the file comes back, yield its
    text again, even if it is unchanged. Never ends by itself, and never raises for errors of the file system.
    """
    path = Path(path)
    read_now = partial(_read_in_background, BackgroundRead(partial(_read_text, path)), path)
    # An empty file was accepted at the start, so it is no change, and the Problem is not reported again.
    last: str | Problem = known_text if known_text.strip() else _empty_problem(path)
    async with aclosing(_change_hints(path.parent)) as hints:
        async for _ in hints:
            if await read_now() == last:
                continue
            current = await _wait_until_stable(read_now)
            if current != last:  # the file may have changed back meanwhile
                last = current
                yield current


async def preload_watcher(directory: Path) -> None:
    """Import and start `watchfiles` once, which takes long, and which only some commands need."""
    from watchfiles import awatch

    with suppress(OSError, RuntimeError):  # `watch_config` handles these errors itself
        events = awatch(directory, rust_timeout=1, yield_on_timeout=True, recursive=False)
        async with aclosing(events):
            await anext(events)


async def _read_in_background(background_read: BackgroundRead[str | Problem], path: Path) -> str | Problem:
    try:
        return await background_read()
    except TimeoutError as error:
        return unreadable_problem(path, error)


def _read_text(path: Path) -> str | Problem:
    text = read_config_blocking(path)
    if isinstance(text, str) and not text.strip():
        return _empty_problem(path)
    return text


def _empty_problem(path: Path) -> Problem:
    return Problem(path.name, "", "is empty")


async def _wait_until_stable(read_now: Callable[[], Awaitable[str | Problem]]) -> str | Problem:
    """Wait until the file no longer changes, and return its text, or a problem that lasted for MISSING_S."""
    clock = asyncio.get_running_loop().time
    current = await read_now()
    unchanged_since = clock()
    while True:
        await asyncio.sleep(STABLE_S)
        again = await read_now()
        if again != current:
            current, unchanged_since = again, clock()
        elif isinstance(current, str) or clock() - unchanged_since >= MISSING_S:
            return current


async def _change_hints(directory: Path) -> AsyncGenerator[None, None]:
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
