"""The address of a run for Prometheus: the driver's metrics, and the targets of all processes.

/metrics        metrics of the driver
/targets        every process with its labels, for `http_sd_configs`
/healthz        200 while the driver answers, else 503; needs no token, nor does the next
/readyz         200 while the run trains, 503 with what it waits for
targets.json    in the run's folder, the same for `file_sd_configs`
"""

import asyncio
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from deploy.config.deploy_config import DeployConfig
from deploy.config.evaluation_schedule import evaluator
from deploy.config.run_config import RunConfig
from headway.atomic_file import atomic_file
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import InputError
from headway.metrics import TOKEN_VARIABLE, MetricsAccess, MetricsServer, Page, public_address
from headway.roles import Role, role_of

DEFAULT_PORT = 9464
"""Port where `monitoring/prometheus.yml` looks for a run."""
FILE = "targets.json"
WRITE_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""Longest that the event loop may take to answer a question about its health."""


class Exporter:
    """HTTP server for Prometheus that answers until `close`.

    `targets` returns name and address of the other processes, `waits_for` what the run waits for
    instead of training; both are called in another thread. `node`, the address of this node in Ray,
    is a label, and the host of a server on all interfaces. Raises InputError if the port is in use,
    or the host is not of this machine.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        metrics: Collector,
        targets: Callable[[], Sequence[tuple[str, str]]],
        node: str,
        waits_for: Callable[[], Sequence[str]] = list,
    ) -> None:
        self._run, self._file, self._targets = config.name, folder / FILE, targets
        self._node, self._waits_for = node, waits_for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._evaluator = evaluator(config.heldout)
        """Name of an actor that only evaluates, and may therefore idle and lag."""
        self._written = ""
        self._lock, self._closed = threading.Lock(), False
        """A thread of `follow` may still be writing when the exporter is closed."""
        pages = {
            "/targets": Page(lambda: (True, self.targets())),
            "/healthz": Page(self._health, public=True),
            "/readyz": Page(self._readiness, public=True),
        }
        host, port = config.deploy.metrics_host, config.deploy.metrics_port
        serve = partial(MetricsServer, [metrics], metrics_access(config.deploy), pages=pages)
        with _explained(host, port):
            try:
                self._server = serve(port=DEFAULT_PORT if port is None else port)
            except OSError:
                if port is not None:
                    raise
                self._server = serve()  # at a free port
        self.address = public_address(host, self._server.port, node)
        """The address that it answers at, as host:port."""

    def targets(self) -> list[dict[str, Any]]:
        """Return every process of the run that serves metrics, in Prometheus' format."""
        return [
            {
                "targets": [address],
                "labels": {
                    "run": self._run,
                    "process": name,
                    "role": role_of(name),
                    "node": self._node if is_loopback(address) else address.rpartition(":")[0],
                }
                | ({"purpose": "evaluate"} if name == self._evaluator else {}),
            }
            for name, address in [(Role.DRIVER.value, self.address), *self._targets()]
        ]

    def _health(self) -> tuple[bool, Any]:
        """Answer whether the event loop of the run goes on; before it begins, the run starts."""
        if self._loop is not None:
            answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
            try:
                answer.result(ANSWER_SECONDS)
            except TimeoutError:
                answer.cancel()
                problem = f"the driver has not answered for {ANSWER_SECONDS:g} s"
                return False, {"run": self._run, "status": problem}
        return True, {"run": self._run, "status": "ok"}

    def _readiness(self) -> tuple[bool, Any]:
        well, content = self._health()
        waits_for = [*self._waits_for()]
        return well and not waits_for, {**content, "waits_for": waits_for}

    async def follow(self) -> None:
        """Keep `targets.json` up to date until cancelled, as far as its disk answers."""
        self._loop = asyncio.get_running_loop()
        while True:
            await run_in_daemon_thread(self.write)
            await asyncio.sleep(WRITE_SECONDS)

    def write(self) -> None:
        """Bring `targets.json` up to date; a disk error is ignored and tried again."""
        with self._lock, suppress(OSError):
            text = json.dumps(self.targets(), indent=1)
            if text == self._written or self._closed:
                return
            with atomic_file(self._file) as file:
                file.write(text.encode())
            self._written = text

    def close(self) -> None:
        """Stop serving and delete `targets.json`, as far as its disk lets it."""
        self._server.close()
        with self._lock, suppress(OSError):
            self._closed = True
            self._file.unlink(missing_ok=True)


def metrics_access(deploy: DeployConfig) -> MetricsAccess:
    """Return who may read the metrics of a run; raise InputError if the token is not set."""
    if not (deploy.metrics and deploy.metrics_token):
        return MetricsAccess(deploy.metrics_host)
    if not (token := os.environ.get(TOKEN_VARIABLE, "").strip()):
        raise InputError(
            f"deploy.metrics_token = true, and the environment variable {TOKEN_VARIABLE} is not "
            "set; give it a token, or set deploy.metrics_token = false"
        )
    return MetricsAccess(deploy.metrics_host, hashlib.sha256(token.encode()).hexdigest())


def is_loopback(address: str) -> bool:
    """Return whether a host, or host:port, is reached from its own node alone."""
    return address.startswith(("127.", "localhost", "::1", "[::1]"))


def check_address(host: str, port: int | None) -> None:
    """Raise InputError if the port is in use, or the host is not of this machine."""
    with _explained(host, port), socket.create_server((host, port or 0)):
        pass


@contextmanager
def _explained(host: str, port: int | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"deploy.metrics_host = {host!r} with metrics_port = {port or 0}: {error.strerror}; "
            "choose another, metrics_port = 0 for any that is free, or metrics = false"
        ) from error
