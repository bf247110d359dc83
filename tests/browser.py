"""A headless Chromium, driven by its DevTools protocol: pages, their log messages, and screenshots."""

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

from tests.support import require_tool, running_process, wait_until, wait_until_sync

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root in a container cannot create one; only our own pages are opened
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
START_TIMEOUT_S = 30.0


CALL_TIMEOUT_S = 100.0
"""Longest time in seconds that a call to the browser takes on a busy machine."""


class PageError(Exception):
    """A script in the page threw an exception."""


class Page:
    """One tab of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        """Errors and warnings logged by scripts, or by the browser about them, such as CSP violations."""
        self.network: list[str] = []
        """Errors about resources that could not be loaded."""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await self._waiting[number]

    async def listen(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                waiting = self._waiting.pop(message["id"])
                if "error" in message:
                    waiting.set_exception(PageError(str(message["error"])))
                else:
                    waiting.set_result(message["result"])
            else:
                self._record_event(message["method"], message.get("params", {}))

    def _record_event(self, method: str, params: dict[str, Any]) -> None:
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
        await wait_until(lambda: self.evaluate("document.readyState === 'complete'"), what=f"{url} to load")

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression.

        Promises are awaited. The CSP of the page does not apply.
        """
        reply = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in reply:
            raise PageError(str(reply["exceptionDetails"].get("exception", reply["exceptionDetails"])))
        return reply["result"].get("value")

    async def get_text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def set_viewport(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, **media: str
    ) -> None:
        """Set window size and media preferences. Motion is off, because it costs a CPU core without a GPU."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        no_motion = {"prefers-reduced-motion": "reduce"}
        preferences = {"prefers-color-scheme": "dark" if dark else "light", **no_motion, **media}
        features = [{"name": name, "value": value} for name, value in preferences.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press_key(self, key: str, text: str = "") -> None:
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

    async def insert_text(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def take_screenshot(self, *, whole_page: bool = True) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        return base64.b64decode(reply["data"])


class Browser:
    """Browser started by `start_chromium`.

    `page()` may be called any number of times, from any event loop.
    """

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
                listener = asyncio.create_task(page.listen())
                try:
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    await page.call(
                        "Emulation.setFocusEmulationEnabled", enabled=True
                    )  # a tab is drawn although others are in front of it
                    await page.set_viewport()
                    yield page
                finally:
                    listener.cancel()
                    async with session.get(f"{self._root}/close/{target['id']}"):
                        pass


@contextmanager
def start_chromium() -> Iterator[Browser]:
    """Start a browser with an empty profile. If none is installed, skip the test, or fail it if CI=true."""
    path = require_tool("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        environ = {**os.environ, "HOME": home, "TZ": "UTC", "LANG": "C.UTF-8"}
        port_file = Path(home) / "profile" / "DevToolsActivePort"
        with running_process(
            path, *FLAGS, f"--user-data-dir={home}/profile", "about:blank", env=environ
        ) as process:
            lines = wait_until_sync(
                lambda: port_file.read_text().splitlines() if port_file.exists() else None,
                START_TIMEOUT_S,
                what="Chromium",
            )
            yield Browser(int(lines[0]), process)
