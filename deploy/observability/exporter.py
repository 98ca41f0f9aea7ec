"""The run's address for Prometheus: its own metrics, and where those of its processes are.

/metrics    of the driver
/targets    every process with its labels, for `http_sd_configs`
targets.json in the run's folder, the same for `file_sd_configs`
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from deploy.errors import InputError
from deploy.runtime.daemon_thread import run_in_daemon_thread
from queues.runtime.atomic_file import atomic_file
from queues.runtime.prometheus import ProcessMetrics, public_address, serve

FILE = "targets.json"
WRITE_SECONDS = 0.5
"""Between two looks at whether it is up to date."""
Addresses = Sequence[tuple[str, str]]
"""Process and address, as "actor-0", "127.0.0.1:9000"."""


class Exporter:
    """Serves until `close`.

    Args:
        run: Name of the run, a label of all.
        folder: Of the run; gets `targets.json`.
        collectors: Metrics of this process.
        targets: Names and addresses of the other processes that show metrics now; asked by
            another thread.
        host: Address to bind to.
        port: 0 takes a free one.
        node: Address of this node as Ray knows it, under which others find what is bound to all
            of them; a label, also of what is bound to the loopback.
        evaluators: Processes that only evaluate; idle and behind others as they may be.

    Raises:
        InputError: Somebody else has the port, or the host is not of this machine.
    """

    def __init__(
        self,
        run: str,
        folder: Path,
        collectors: Sequence[Collector],
        targets: Callable[[], Addresses],
        *,
        host: str,
        port: int,
        node: str,
        evaluators: Collection[str] = (),
    ) -> None:
        self._run, self._file, self._targets = run, folder / FILE, targets
        self._node = node
        self._written, self._evaluators = "", evaluators
        self._turn, self._closed = threading.Lock(), False
        """What `follow` began may still be writing when all is closed."""
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        registry.register(ProcessMetrics())
        answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/metrics": (CONTENT_TYPE_LATEST, lambda: generate_latest(registry)),
            "/targets": ("application/json", lambda: json.dumps(self.targets()).encode()),
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in answers:
                    self.send_error(404, f"there are {', '.join(answers)}")
                    return
                kind, answer = answers[self.path]
                body = answer()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Scrapes are not told."""

        with _explained(host, port):
            self._server = ThreadingHTTPServer((host, port), Handler)
        self.address = public_address(host, self._server.server_port, node)
        """Where to find it, as host:port."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="exporter", daemon=True
        )
        self._thread.start()

    def targets(self) -> list[dict[str, Any]]:
        """Every process of the run that shows metrics, as Prometheus wants them."""
        return [
            {
                "targets": [found],
                "labels": {
                    "run": self._run,
                    "process": name,
                    "role": role(name),
                    "node": self._node if is_loopback(found) else found.rpartition(":")[0],
                }
                | ({"purpose": "evaluate"} if name in self._evaluators else {}),
            }
            for name, found in [("driver", self.address), *self._targets()]
        ]

    async def follow(self) -> None:
        """Keeps `targets.json` up to date until it is cancelled, as far as its disk answers."""
        while True:
            await run_in_daemon_thread(self.write)
            await asyncio.sleep(WRITE_SECONDS)

    def write(self) -> None:
        """Brings `targets.json` up to date, where it is not and the disk has room."""
        with self._turn, suppress(OSError):
            text = json.dumps(self.targets(), indent=1)
            if text == self._written or self._closed:
                return
            with atomic_file(self._file) as file:
                file.write(text.encode())
            self._written = text

    def close(self) -> None:
        """Ends serving; `targets.json` goes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._turn:
            self._closed = True
            self._file.unlink(missing_ok=True)


def is_loopback(where: str) -> bool:
    """Whether a host, or host:port, is reached from its own node alone.

    Example:
        >>> is_loopback("127.0.0.1:9000"), is_loopback("localhost"), is_loopback("10.0.0.7:9000")
        (True, True, False)
    """
    return where.startswith(("127.", "localhost", "::1", "[::1]"))


async def show_process(handle: Any, host: str) -> str:
    """Has any process of Ray show what it uses, until it ends; host:port."""
    found: str = await handle.__ray_call__.remote(_serve_process, host)
    return found


def _serve_process(_: object, host: str) -> str:
    import ray

    return public_address(host, serve([], host=host), ray.util.get_node_ip_address())


def role(process: str) -> str:
    """What a process does: its name without a number.

    Example:
        >>> role("actor-3"), role("broker")
        ('actor', 'broker')
    """
    name, _, number = process.rpartition("-")
    return name if number.isdigit() else process


def check_address(host: str, port: int) -> None:
    """Tries to bind, for an instant.

    Raises:
        InputError: Somebody else has the port, or the host is not of this machine.
    """
    with _explained(host, port), socket.create_server((host, port)):
        pass


@contextmanager
def _explained(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"deploy.metrics_host = {host!r} with metrics_port = {port}: {error.strerror}; choose "
            "another, metrics_port = 0 for any that is free, or metrics = false"
        ) from error
