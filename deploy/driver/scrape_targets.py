"""Addresses at which the processes of a run serve their metrics, for Prometheus to find."""

from collections.abc import Awaitable, Callable
from typing import Any

from deploy.driver.processes import Processes
from deploy.observability.exporter import is_loopback, show_process
from queues.runtime.prometheus import MetricsAccess


class ScrapeTargets:
    """The metrics addresses of one run, whose processes serve them by `access`.

    `node_of` returns Ray's id of the node of a process, by name; None where it is not known.
    """

    def __init__(
        self, processes: Processes, access: MetricsAccess, node_of: Callable[[str], str | None]
    ) -> None:
        self._processes, self._access, self._node_of = processes, access, node_of
        self._addresses: dict[str, str] = {}
        """Addresses of the processes that are never restarted, by name."""

    def serve(self) -> list[tuple[str, Awaitable[None]]]:
        """Have processes serve their metrics; return the name of each and the call to wait for.

        Actors and reward models do so by themselves.
        """
        processes = self._processes
        calls = {
            "broker": processes.broker.serve_metrics(self._access),
            "learner": processes.learner.serve_metrics(self._access),
        }
        done = {"broker", "learner-0", *(p.name for p in self._restarted())}
        for name, handle in processes.handles().items():
            if name not in done:
                calls[name] = show_process(handle, self._access)
        return [(name, self._add(name, call)) for name, call in calls.items()]

    def reachable(self) -> list[tuple[str, str]]:
        """Return the name and address of every process whose metrics Prometheus can reach."""
        unreachable = self._unreachable()
        return [(name, at) for name, at in self._all().items() if name not in unreachable]

    def warning(self) -> str | None:
        """Return a warning that names processes whose metrics are unreachable; None without any."""
        if not (unreachable := self._unreachable()):
            return None
        return (
            f"no metrics of {', '.join(unreachable)}: on other nodes, and deploy.metrics_host = "
            f"{self._access.host!r} is their own loopback; set it to '0.0.0.0'"
        )

    def add(self, name: str, address: str) -> None:
        """Add a process that is never restarted."""
        self._addresses[name] = address

    async def _add(self, name: str, call: Awaitable[str]) -> None:
        self.add(name, await call)

    def _restarted(self) -> list[Any]:
        """Return the processes that may be restarted, with another address each time."""
        return [*self._processes.reward_models, *self._processes.actors]

    def _all(self) -> dict[str, str]:
        restarted = {p.name: p.metrics for p in self._restarted() if p.metrics}
        return {**self._addresses, **restarted}

    def _unreachable(self) -> list[str]:
        """Return the processes of other nodes that serve their metrics on loopback only."""
        if not is_loopback(self._access.host):
            return []
        nodes = {name: self._node_of(name) for name in self._all()}
        if "learner" in nodes:
            nodes["learner"] = self._node_of("learner-0")
        return [name for name, node in nodes.items() if node not in (None, self._processes.node)]
