"""Makes the pictures of docs/how-to/operations.md: `python -m tests.service.admin.pictures docs/images/page`.

They show the history made by tests/service/admin/stage.py, drawn by the page in Chromium.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from PIL import Image

from tests.browser import start_chromium
from tests.service.admin.stage import FAILING, Stage, dead_request, record_quarter_of_an_hour
from tests.support import wait_until

WIDTH, HEIGHT = 1280, 1290
STATES = {"working": "full", "waiting": "no-room", "failing": "full", "disconnected": "full"}
"""States that are shown, with the reason of the gate."""


async def main(folder: Path) -> None:
    with start_chromium() as browser:
        for state, reason in STATES.items():
            stage = Stage(
                dead=[
                    dead_request(7, "INVALID_REQUEST: not a JSON object", readable=False),
                    dead_request(12, "RETRIES_EXHAUSTED: 8 tries failed, the last with 500"),
                ]
            )
            stage.now = time.time()
            record_quarter_of_an_hour(stage, reason)
            if state == "failing":
                stage.status_document |= FAILING
            async with browser.page() as page, AsyncExitStack() as stack:
                await page.set_viewport(width=WIDTH, height=HEIGHT)
                await page.open(await stack.enter_async_context(stage.open(ticking=True)))
                await wait_until(partial(page.get_text, "#dead tbody"), 30, what="the page")
                if state == "disconnected":
                    await stack.aclose()
                    lost = "document.body.dataset.link === 'lost'"
                    await wait_until(partial(page.evaluate, lost), 30, what="the page to notice")
                await page.evaluate("render(), new Promise(done => setTimeout(done, 300))")
                write_picture(await page.take_screenshot(whole_page=False), folder / f"{state}.png")


def write_picture(png: bytes, path: Path) -> None:
    seen = Image.open(io.BytesIO(png)).convert("RGB")
    few = seen.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
