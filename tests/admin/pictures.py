"""Makes the pictures of docs/how-to/page.md: `python -m tests.admin.pictures docs/page`.

What they show is a story told by tests/admin/stage.py, drawn by the page itself in a Chromium.
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

from tests.admin.stage import FAILING, Stage, dead_request, quarter_of_an_hour
from tests.browser import chromium
from tests.support import wait_until

SIZES = {"wide": (1280, 1290), "phone": (390, 1080)}
STATES = {"working": "full", "waiting": "no-room", "failing": "full", "disconnected": "full"}
"""Each state that is shown, with the reason of the gate in it."""


async def main(folder: Path) -> None:
    with chromium() as browser:
        for state, reason in STATES.items():
            stage = Stage(
                dead=[
                    dead_request(7, "INVALID_REQUEST: not a JSON object", readable=False),
                    dead_request(12, "RETRIES_EXHAUSTED: 8 tries failed, the last with 500"),
                ]
            )
            stage.now = time.time()
            quarter_of_an_hour(stage, reason)
            if state == "failing":
                stage.told |= FAILING
            for size, (width, height) in SIZES.items():
                async with browser.page() as page, AsyncExitStack() as stack:
                    await page.look(width=width, height=height)
                    await page.open(await stack.enter_async_context(stage.open(ticking=True)))
                    await wait_until(partial(page.text, "#dead tbody"), 30, what="the page")
                    if state == "disconnected":
                        await stack.aclose()
                        lost = "document.body.dataset.link === 'lost'"
                        await wait_until(partial(page.ask, lost), 30, what="the page to notice")
                    for dark in (False, True):
                        name = f"{state}-{size}-{'dark' if dark else 'light'}.png"
                        await page.look(width=width, height=height, dark=dark)
                        await page.ask("render(), new Promise(done => setTimeout(done, 300))")
                        keep(await page.picture(whole=False), folder / name)


def keep(png: bytes, path: Path) -> None:
    seen = Image.open(io.BytesIO(png)).convert("RGB")
    few = seen.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
