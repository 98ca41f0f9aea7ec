"""Publication of a process's metrics to Prometheus over HTTP, to everybody or by a token."""

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Collectors = Iterable[Collector]
PUBLISHED = ("resident_memory_bytes", "cpu_seconds")
"""Suffixes of the process metrics of `prometheus_client` that are published."""
TOKEN_VARIABLE = "HEADWAY_METRICS_TOKEN"
"""Environment variable of the driver, and of `headway top`, with the token of `MetricsAccess`."""
CONNECTIONS = 32
"""Most connections of each kind: of clients whose request is still read, where a new one takes the
place of the oldest; that are answered by a public page; that are answered otherwise."""
REQUEST_SECONDS = 10.0
"""Longest that a connection may last, from its beginning to the last byte of the answer."""


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """The address at which a process serves its metrics, and who may read them."""

    host: str
    """Address of its node to bind to."""
    token_hash: str | None = None
    """SHA-256 of the token that requests must have, in hexadecimal; None lets everybody read."""

    def allows(self, authorization: str) -> bool:
        """Return True for the value of a header "Authorization" that has the token."""
        if self.token_hash is None:
            return True
        scheme, _, token = authorization.partition(" ")
        sent = hashlib.sha256(token.strip().encode(errors="surrogateescape")).hexdigest()
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, self.token_hash)


def labelled(
    metric: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]
) -> Metric:
    """Add values to a metric, each under its label or tuple of labels."""
    for key, value in values.items():
        metric.add_metric([key] if isinstance(key, str) else key, value)
    return metric


class ProcessMetrics(Collector):
    """Memory and CPU time of this process."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(namespace="headway", registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        return (metric for metric in self._collector.collect() if metric.name.endswith(PUBLISHED))


class Page(NamedTuple):
    """A page of JSON beside the metrics."""

    answer: Callable[[], tuple[bool, Any]]
    """Returns False if the status is 503, and the content; called in another thread."""
    public: bool = False
    """Read without the token too."""


class MetricsServer:
    """Serves collectors, `ProcessMetrics` and pages, by path, until `close` or the process's end.

    Collectors are called from other threads. Port 0 is a free one. Raises OSError.
    """

    def __init__(
        self,
        collectors: Collectors,
        access: MetricsAccess,
        *,
        port: int = 0,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        registry = CollectorRegistry()
        for collector in (*collectors, ProcessMetrics()):
            registry.register(collector)
        metrics: Any = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            page = (pages or {}).get(environ["PATH_INFO"])
            public = page is not None and page.public
            if not (public or access.allows(environ.get("HTTP_AUTHORIZATION", ""))):
                start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
                return [b""]
            if page is None:
                return metrics(environ, start_response)
            well, content = page.answer()
            status = "200 OK" if well else "503 Service Unavailable"
            start_response(status, [("Content-Type", "application/json")])
            return [json.dumps(content).encode()]

        public = {path for path, page in (pages or {}).items() if page.public}
        self._server = _Server(access.host, port, public)
        self._server.set_app(answer)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    """A connection with one request, which needs a slot of its kind once it has been read."""

    server: "_Server"
    _slot: threading.BoundedSemaphore | None = None

    def parse_request(self) -> bool:
        if not (super().parse_request() and self.server.has_read(self.connection)):
            return False
        slot = self.server.slots[self.path.partition("?")[0] in self.server.public]
        if not slot.acquire(blocking=False):
            self.send_error(503)
            return False
        self._slot = slot
        return True

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            if self._slot:
                self._slot.release()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (its own name)
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each connection, bounded in number and time; it logs nothing."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, public: Container[str]) -> None:
        kind = socket.SOCK_STREAM
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=kind)
        self.address_family = family
        self.public = public
        self.slots = {kind: threading.BoundedSemaphore(CONNECTIONS) for kind in (True, False)}
        """Slots of requests: those of public pages by True, of others by False."""
        self._reading: dict[Any, None] = {}
        """Connections whose request has not been read yet, from the oldest to the newest."""
        self._lock = threading.Lock()
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._reading)) if len(self._reading) >= CONNECTIONS else None
            self._reading.pop(oldest, None)
            self._reading[request] = None
        if oldest:
            _cut(oldest)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(REQUEST_SECONDS, _cut, [request])
        deadline.daemon = True
        deadline.start()
        super().process_request_thread(request, client_address)
        deadline.cancel()
        self.has_read(request)

    def has_read(self, request: Any) -> bool:
        """Note that the request of a connection was read; return False if it came too late."""
        with self._lock:
            return self._reading.pop(request, self) is None

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that broke off, or that asks for nonsense


def public_address(host: str, port: int, node: str) -> str:
    """Return the `host:port` under which other nodes reach a server that is bound to `host`.

    Example:
        >>> public_address("0.0.0.0", 9090, node="10.0.0.7")
        '10.0.0.7:9090'
    """
    return f"{node if host == '0.0.0.0' else host}:{port}"


def _cut(connection: Any) -> None:
    """End a connection, whose thread wakes by that."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
