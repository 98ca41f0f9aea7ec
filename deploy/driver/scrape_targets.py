"""Addresses at which the processes of a run serve their metrics, for Prometheus to find."""

from collections.abc import Callable
from dataclasses import dataclass

from deploy.driver.processes import Processes
from deploy.observability.exporter import is_loopback
from headway.metrics import MetricsAccess
from headway.roles import ProcessName, Role


@dataclass(frozen=True, slots=True)
class ScrapeTargets:
    """The metrics addresses of one run, whose processes serve them by `access`."""

    processes: Processes
    access: MetricsAccess
    node_of: Callable[[str], str | None]
    """Returns Ray's id of the node of a process, by name; None where it is not known."""

    def reachable(self) -> list[tuple[ProcessName, str]]:
        """Return the name and address of every process whose metrics Prometheus can reach."""
        unreachable = self._unreachable()
        return [(name, at) for name, at in self._all().items() if name not in unreachable]

    def warning(self) -> str | None:
        """Return a warning that names processes whose metrics are unreachable; None without any."""
        if not (unreachable := self._unreachable()):
            return None
        return (
            f"no metrics of {', '.join(unreachable)}: on other nodes, and deploy.metrics_host = "
            f"{self.access.host!r} is their own loopback; set it to '0.0.0.0'"
        )

    def _all(self) -> dict[ProcessName, str]:
        supervisors = self.processes.supervisors()
        return {name: at for process in supervisors for name, at in process.metrics.items()}

    def _unreachable(self) -> list[ProcessName]:
        """Return the processes of other nodes that serve their metrics on loopback only."""
        if not is_loopback(self.access.host):
            return []
        first = {ProcessName(Role.LEARNER): ProcessName(Role.LEARNER, 0)}
        nodes = {name: self.node_of(first.get(name, name)) for name in self._all()}
        return [name for name, node in nodes.items() if node not in (None, self.processes.node)]
