"""Addresses at which the processes of a run serve their metrics, for Prometheus to find."""

from collections.abc import Callable

from deploy.driver.actor_supervisor import ActorSupervisor
from deploy.driver.processes import Processes
from deploy.driver.service_supervisor import ServiceSupervisor
from deploy.observability.exporter import is_loopback
from headway.metrics import MetricsAccess


class ScrapeTargets:
    """The metrics addresses of one run, whose processes serve them by `access`.

    `node_of` returns Ray's id of the node of a process, by name; None where it is not known.
    """

    def __init__(
        self, processes: Processes, access: MetricsAccess, node_of: Callable[[str], str | None]
    ) -> None:
        self._processes, self._access, self._node_of = processes, access, node_of

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

    def _all(self) -> dict[str, str]:
        processes = self._processes
        restarted: list[ServiceSupervisor | ActorSupervisor]
        restarted = [*processes.services, *processes.actors]
        addresses = {process.name: process.metrics for process in restarted if process.metrics}
        return {**processes.learner.metrics, **addresses}

    def _unreachable(self) -> list[str]:
        """Return the processes of other nodes that serve their metrics on loopback only."""
        if not is_loopback(self._access.host):
            return []
        nodes = {name: self._node_of(name) for name in self._all()}
        if "learner" in nodes:
            nodes["learner"] = self._node_of("learner-0")
        return [name for name, node in nodes.items() if node not in (None, self._processes.node)]
