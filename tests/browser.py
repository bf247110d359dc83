"""A headless Chromium, driven by its DevTools protocol: pages, what they log, pictures of them."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support import require_tool, running, wait_until, wait_until_sync

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container's root may not make one; only pages of ours are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
START_S = 30.0


CALL_S = 100.0
"""Longest time in seconds that a call to the browser takes on a busy machine."""


class PageError(Exception):
    """A script in the page threw."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        """Errors and warnings that scripts logged, or that the browser did about them: CSP among them."""
        self.network: list[str] = []
        """What could not be loaded."""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_S):
            return await self._waiting[number]

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                waiting = self._waiting.pop(told["id"])
                if "error" in told:
                    waiting.set_exception(PageError(str(told["error"])))
                else:
                    waiting.set_result(told["result"])
            else:
                self._note(told["method"], told.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Log.entryAdded":
                entry = params["entry"]
                into = self.network if entry["source"] == "network" else self.console
                if entry["level"] in ("error", "warning"):
                    into.append(f"{entry['source']}: {entry['text']}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.console.append(str(details.get("exception", details).get("description", details)))

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await wait_until(lambda: self.ask("document.readyState === 'complete'"), what=f"{url} to load")

    async def ask(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Past the page's own CSP."""
        found = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise PageError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    async def text(self, selector: str) -> str:
        return str(await self.ask(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, **media: str) -> None:
        """Be a window of this size, for these preferences. Motion costs a core where no GPU draws."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        still = {"prefers-reduced-motion": "reduce"}
        wanted = {"prefers-color-scheme": "dark" if dark else "light", **still, **media}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            codes = {"Tab": 9, "Enter": 13, " ": 32}
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=codes.get(key, 0),
                **typed,
            )

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, *, whole: bool = True) -> bytes:
        """A PNG of the window, or of the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])


class Browser:
    """`with chromium() as browser`: then `page()`, as often as wanted, from any event loop."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._root = f"http://127.0.0.1:{port}/json"

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{self._root}/new?about:blank") as answer:
                target = await answer.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    await page.call(
                        "Emulation.setFocusEmulationEnabled", enabled=True
                    )  # drawn behind others too
                    await page.look()
                    yield page
                finally:
                    listening.cancel()
                    async with session.get(f"{self._root}/close/{target['id']}"):
                        pass


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile. Not installed: the test is skipped, or fails where CI=true."""
    path = require_tool("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        environ = {**os.environ, "HOME": home, "TZ": "UTC", "LANG": "C.UTF-8"}
        told = Path(home) / "profile" / "DevToolsActivePort"
        with running(path, *FLAGS, f"--user-data-dir={home}/profile", "about:blank", env=environ) as process:
            lines = wait_until_sync(
                lambda: told.read_text().splitlines() if told.exists() else None, START_S, what="Chromium"
            )
            yield Browser(int(lines[0]), process)
