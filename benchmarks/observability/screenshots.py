"""Screenshots of a real run on a cluster of this machine, for deploy/README.md.

    headway bench screenshots [--steps 60]

Starts the head of a Ray cluster with its dashboard, submits the demo as a job, and takes
screenshots with Chromium (`make test-browser` fetches it): Ray's pages of the cluster and of its
actors, `headway top`, and at the end the report, on a wide screen and on a phone. Ends what it
started. The warm start is made first unless `runs/` has one.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.observability.browser import Browser, View
from deploy.config.loader import load_recipe
from deploy.errors import InputError
from deploy.observability.run_client import RunClient
from deploy.observability.top_view import screen

PICTURES = Path(__file__).parents[2] / "deploy" / "pictures"
HEADWAY = Path(sys.executable).parent / "headway"
RAY = HEADWAY.parent / "ray"
NAME = "pictures"
COLUMNS = 110
WIDE, PHONE = 1280, 390
"""Pixels."""
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0;background:#14191f;
display:inline-block"><pre style="font:13px/15px 'DejaVu Sans Mono',monospace;margin:14px;
color:#dfe3e8">{code}</pre></body>"""
SHOWS_ACTORS = "document.body.innerText.includes('actor-0')"
FIRST_OF_RUN = (
    "[...document.querySelectorAll('tbody tr')].find(row => row.innerText.includes('BrokerActor'))"
    ".getBoundingClientRect().top"
)
SHOWS_STATES = "/actor-0: .*rollouts/.test(document.body.innerText)"


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: It is not true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.5)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Run the head of a cluster; yields the address of its dashboard."""
    port = free_port()
    command = [
        RAY, "start", "--head", "--block", "--port=0", f"--dashboard-port={port}",
        f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}",
        "--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={folder / 'ray'}",
        "--num-cpus=4", "--disable-usage-stats",
    ]  # fmt: skip
    path = f"{RAY.parent}:{os.environ['PATH']}"
    log = folder / "head.log"
    with log.open("w") as file:
        head = subprocess.Popen(
            command,
            env={**os.environ, "PATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "runtime started" in log.read_text() or head.poll() is not None, 120)
        if head.poll() is not None:
            raise SystemExit(f"Ray did not start: {log.read_text()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        below = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(60)
        _, alive = psutil.wait_procs(below, timeout=30)
        for process in alive:
            process.kill()


def token() -> dict[str, str]:
    """Return the header that Ray's dashboard requires, where this user has a token."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    return {"Authorization": f"Bearer {file.read_text().strip()}"} if file.exists() else {}


def trained(folder: Path) -> int:
    """Return the number of trained batches of a run."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def frame(folder: Path, file: Path) -> None:
    """Write the frame of `headway top` of a running run as a page."""
    client = RunClient(str(folder), folder.parent)
    client.look()
    time.sleep(5)
    with (file.parent / "ignored").open("w") as ignored:
        console = Console(record=True, width=COLUMNS, file=ignored, force_terminal=True)
        console.print(screen(client.look()))
    file.write_text(console.export_html(inline_styles=True, code_format=FRAME))


async def take(address: str, run: Path, folder: Path, steps: int, job: list[str]) -> None:
    """Take all screenshots, in the order of the run."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    async with Browser(folder, token()) as browser:
        submitted = await asyncio.to_thread(subprocess.run, job, check=True, capture_output=True)
        print(submitted.stdout.decode().strip())
        await asyncio.to_thread(wait_for, lambda: trained(run) > steps // 3, 480)
        await browser.picture(
            f"{address}/#/actors", PICTURES / "ray-actors.png", View(1800, until=SHOWS_ACTORS)
        )
        await browser.picture(
            f"{address}/#/cluster",
            PICTURES / "ray-cluster.png",
            View(1500, until=SHOWS_STATES, begins=FIRST_OF_RUN),
        )
        page = folder / "top.html"
        await asyncio.to_thread(frame, run, page)
        await browser.picture(page.as_uri(), PICTURES / "top.png", View(960))

        def done() -> bool:
            return json.loads((run / "summary.json").read_text())["status"] == "done"

        await asyncio.to_thread(wait_for, lambda: (run / "report.html").exists() and done(), 480)
        report = (run / "report.html").as_uri()
        await browser.picture(report, PICTURES / "report.png", View(WIDE, longest=2400))
        await browser.picture(report, PICTURES / "report-phone.png", View(PHONE, longest=2000))
    for file in sorted(PICTURES.glob("*.png")):
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench screenshots", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    options = parser.parse_args()
    runs = options.runs_dir.absolute()
    settings = [
        f"name={NAME}", "sft.name=demo", f"steps={options.steps}", f"deploy.runs_dir={runs}",
        "heldout.every=20", "heldout.size=100", "heldout.final_size=200",
    ]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    try:
        config = load_recipe("demo", settings)
    except InputError as error:
        raise SystemExit(str(error)) from None
    if not config.warm_start.exists():
        subprocess.run([HEADWAY, "sft", "demo", *words], check=True)
    shutil.rmtree(runs / NAME, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as name,  # sockets want a short path
        cluster(Path(name)) as address,
    ):
        job = [HEADWAY, "submit", "demo", *words, "--replace", "--address", address]
        asyncio.run(take(address, runs / NAME, Path(name), options.steps, list(map(str, job))))


if __name__ == "__main__":
    main()
