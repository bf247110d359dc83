"""Makes the pictures of docs/page.md: `python -m tests.admin.pictures docs/page`.

What they show is a story told by tests/admin/stage.py, drawn by the page itself in a Chromium.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from pathlib import Path

from PIL import Image

from tests.admin.stage import Stage, dead_request, quarter_of_an_hour
from tests.browser import chromium
from tests.support import wait_until

SIZES = {"wide": (1280, 1290), "phone": (390, 1080)}
STATES = {"open": "open", "closed": "no-room", "disconnected": "full"}


async def main(folder: Path) -> None:
    async with chromium() as browser:
        for state, reason in STATES.items():
            stage = Stage(
                dead=[
                    dead_request(7, "INVALID_REQUEST: not a JSON object", readable=False),
                    dead_request(12, "RETRIES_EXHAUSTED: 8 tries failed, the last with 500"),
                ]
            )
            stage.now = time.time()
            quarter_of_an_hour(stage, reason)
            async with browser.page() as page:
                async with stage.open(ticking=True) as url:
                    await page.open(url)
                    await wait_until(lambda page=page: page.text("#dead tbody"), what="the page")  # type: ignore[misc]
                if state == "disconnected":
                    await wait_until(
                        lambda page=page: page.ask("document.body.dataset.link === 'lost'"),  # type: ignore[misc]
                        what="the page to notice",
                    )
                for size, (width, height) in SIZES.items():
                    for dark in (False, True):
                        await page.look(
                            width=width, height=height, dark=dark, **{"prefers-reduced-motion": "reduce"}
                        )
                        await page.ask("new Promise(done => setTimeout(done, 300))")
                        if state != "disconnected":
                            await page.ask("link('live'), render()")  # the server is gone by now
                        name = f"{state}-{size}-{'dark' if dark else 'light'}.png"
                        seen = Image.open(io.BytesIO(await page.picture(whole=False))).convert("RGB")
                        few = seen.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                        few.save(folder / name, optimize=True)
                        print(f"{name}: {(folder / name).stat().st_size} bytes")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
