"""The address of a run for Prometheus: the driver's metrics, and the targets of all processes.

/metrics        metrics of the driver
/targets        every process with its labels, for `http_sd_configs`
targets.json    in the run's folder, the same for `file_sd_configs`
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from deploy.config.evaluation_schedule import evaluator
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from queues.runtime.atomic_file import atomic_file
from queues.runtime.daemon_thread import run_in_daemon_thread
from queues.runtime.prometheus import ProcessMetrics, public_address, serve

DEFAULT_PORT = 9464
"""Port where `monitoring/prometheus.yml` looks for a run."""
FILE = "targets.json"
WRITE_SECONDS = 0.5


class Exporter:
    """HTTP server for Prometheus that answers until `close`.

    Args:
        config: The run's recipe.
        folder: The run's folder.
        metrics: Metrics of this process.
        targets: Returns name and address of the other processes; called in another thread.
        node: Address of this node in Ray: a label, and the host of a server on all interfaces.

    Raises:
        InputError: The port is in use, or the host is not of this machine.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        metrics: Collector,
        targets: Callable[[], Sequence[tuple[str, str]]],
        node: str,
    ) -> None:
        self._run, self._file, self._targets = config.name, folder / FILE, targets
        self._node = node
        engine = evaluator(config.heldout, config.actors.count)
        self._evaluator = engine and engine.replace("engine", "actor")
        """Name of an actor that only evaluates, and may therefore idle and lag."""
        self._written = ""
        self._lock, self._closed = threading.Lock(), False
        """A thread of `follow` may still be writing when the exporter is closed."""
        registry = CollectorRegistry()
        registry.register(metrics)
        registry.register(ProcessMetrics())
        host, port = config.deploy.metrics_host, config.deploy.metrics_port
        with _explained(host, port):
            self._server, self._thread = _serve(host, port, registry)
        self.address = public_address(host, self._server.server_port, node)
        """The address that it answers at, as host:port."""
        answer_metrics: Any = self._server.get_app()

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            if environ["PATH_INFO"] != "/targets":
                return answer_metrics(environ, start_response)
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self.targets()).encode()]

        self._server.set_app(answer)

    def targets(self) -> list[dict[str, Any]]:
        """Return every process of the run that serves metrics, in Prometheus' format."""
        return [
            {
                "targets": [address],
                "labels": {
                    "run": self._run,
                    "process": name,
                    "role": role(name),
                    "node": self._node if is_loopback(address) else address.rpartition(":")[0],
                }
                | ({"purpose": "evaluate"} if name == self._evaluator else {}),
            }
            for name, address in [("driver", self.address), *self._targets()]
        ]

    async def follow(self) -> None:
        """Keep `targets.json` up to date until cancelled, as far as its disk answers."""
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
        """Stop serving and delete `targets.json`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            self._closed = True
            self._file.unlink(missing_ok=True)


def _serve(host: str, port: int | None, registry: CollectorRegistry) -> Any:
    """Serve at a port; None is DEFAULT_PORT, or a free one if that is in use."""
    if port is None:
        with suppress(OSError):
            return start_http_server(DEFAULT_PORT, addr=host, registry=registry)
    return start_http_server(port or 0, addr=host, registry=registry)


def is_loopback(address: str) -> bool:
    """Return whether a host, or host:port, is reached from its own node alone."""
    return address.startswith(("127.", "localhost", "::1", "[::1]"))


async def show_process(handle: Any, host: str) -> str:
    """Have a Ray actor serve its process metrics until it ends; return host:port."""
    address: str = await handle.__ray_call__.remote(_serve_process, host)
    return address


def _serve_process(_: object, host: str) -> str:
    import ray

    return public_address(host, serve([], host=host), ray.util.get_node_ip_address())


def role(process: str) -> str:
    """Return the role of a process: its name without a number, as "actor" of "actor-3"."""
    name, _, number = process.rpartition("-")
    return name if number.isdigit() else process


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
