"""Screenshots of pages with Debian's Chromium, which `make test-browser` fetches.

A client of the DevTools protocol over the debugging port: it waits for a condition of a page, sets
its width, and sends headers.
"""

import asyncio
import base64
import io
import itertools
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from PIL import Image

FETCHED = Path(__file__).parents[2] / ".chromium" / "usr" / "lib"
START_SECONDS = 60.0
POLL_SECONDS = 0.2
REST_SECONDS = 1.0
"""Time that animations of a page need to end."""
LOWEST = 300
"""Height of the window, in pixels, in which the height of a page is measured."""
COLOURS = 128
"""Colours of a stored picture: enough for plots and tables, at a quarter of the size."""


def chromium() -> Path | None:
    """Return the browser's program; None where there is none."""
    fetched = FETCHED / "chromium" / "chromium"
    program = str(fetched) if fetched.exists() else shutil.which("chromium")
    return Path(program) if program else None


def libraries() -> str:
    """Return the library path of a fetched browser."""
    system = FETCHED / "x86_64-linux-gnu"
    return ":".join(str(path) for path in (system, system / "pulseaudio", FETCHED / "chromium"))


@dataclass(frozen=True, slots=True)
class View:
    """The part of a page that is stored, and when."""

    width: int
    """Of the page, in pixels."""
    until: str = "true"
    """An expression of JavaScript that has to become true first."""
    begins: str = "0"
    """An expression for the height of the page at which the picture begins."""
    longest: int = 3000
    """Height of the page at which the picture ends."""
    seconds: float = 60.0
    """Deadline of `until`."""


class Browser:
    """A browser with one page; `async with Browser(folder) as page`.

    Args:
        folder: For its profile and its log.
        headers: Sent with every request.
    """

    def __init__(self, folder: Path, headers: dict[str, str] | None = None) -> None:
        self._folder, self._headers = folder, headers or {}
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        port = await asyncio.to_thread(self._start)
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        self._socket = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=0
        )
        await self._do("Network.enable")
        await self._do("Network.setExtraHTTPHeaders", headers=self._headers)
        return self

    def _start(self) -> str:
        """Start the browser and return its debugging port."""
        program = chromium()
        if program is None:
            raise SystemExit("there is no Chromium: `make test-browser` fetches it")
        profile = self._folder / "profile"
        with (self._folder / "chromium.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--hide-scrollbars",
                    "--remote-debugging-port=0",
                    f"--user-data-dir={profile}",
                    "about:blank",
                ],
                env={**os.environ, "LD_LIBRARY_PATH": libraries()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + START_SECONDS
        while not file.exists() or "\n" not in file.read_text():
            if time.monotonic() > deadline:
                self._process.kill()
                raise TimeoutError(f"Chromium did not start within {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        return file.read_text().split()[0]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    async def picture(self, url: str, file: Path, view: View) -> None:
        """Store a screenshot of a page as a PNG.

        Raises:
            TimeoutError: The page did not become ready.
        """
        width = view.width
        await self._size(width, 900)
        await self._do("Page.navigate", url=url)
        await self._until(f"document.readyState == 'complete' && ({view.until})", view.seconds)
        await self._size(width, LOWEST)
        await asyncio.sleep(REST_SECONDS)
        height = await self._value("document.documentElement.scrollHeight")
        bottom = min(int(height), view.longest)
        await self._size(width, bottom)
        await asyncio.sleep(REST_SECONDS)
        top = int(await self._value(view.begins))
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        taken = await self._do("Page.captureScreenshot", format="png", clip=clip)
        image = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
        image.quantize(COLOURS).save(file, optimize=True)

    async def _size(self, width: int, height: int) -> None:
        await self._do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def _until(self, expression: str, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not await self._value(expression):  # noqa: ASYNC110  (a page sets no event)
                await asyncio.sleep(POLL_SECONDS)

    async def _value(self, expression: str) -> Any:
        evaluated = await self._do("Runtime.evaluate", expression=expression, returnByValue=True)
        return evaluated["result"].get("value")

    async def _do(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result; events are skipped."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(30):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']['message']}")
                    return message["result"]
