"""Publication of a process's metrics to Prometheus over HTTP."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

PUBLISHED = ("resident_memory_bytes", "cpu_seconds")
"""Suffixes of the process metrics of `prometheus_client` that are published."""


class ProcessMetrics(Collector):
    """Memory and CPU time of this process."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(namespace="headway", registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        return (metric for metric in self._collector.collect() if metric.name.endswith(PUBLISHED))


def serve(collectors: Iterable[Collector], *, host: str) -> int:
    """Serve collectors, and `ProcessMetrics`, at `/metrics` until the process ends.

    Collectors are called from another thread. Returns the port, a free one.
    """
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    registry.register(ProcessMetrics())
    server, _ = start_http_server(0, addr=host, registry=registry)
    return int(server.server_port)


def public_address(host: str, port: int, node: str) -> str:
    """Return the `host:port` under which other nodes reach a server that is bound to `host`.

    Example:
        >>> public_address("127.0.0.1", 9090, node="10.0.0.7")
        '127.0.0.1:9090'
        >>> public_address("0.0.0.0", 9090, node="10.0.0.7")
        '10.0.0.7:9090'
    """
    return f"{node if host == '0.0.0.0' else host}:{port}"
