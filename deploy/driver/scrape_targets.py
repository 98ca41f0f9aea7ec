"""Which processes of a run show metrics, and where Prometheus finds them.

Addresses are collected here and answered by `exporter`; what is shown is each process's own.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import ray

from deploy.config import evaluation_schedule as heldout
from deploy.config.run_config import RunConfig
from deploy.driver.processes import Processes
from deploy.driver.run_metrics import RunMetrics
from deploy.observability.exporter import Exporter, is_loopback, show_process
from queues.records import Purpose


class Targets:
    """Addresses of metrics of one run.

    Args:
        config: The recipe, in which metrics are shown.
        folder: Of the run.
        metrics: Of the driver itself.
        processes: All others.
        node_of: Ray's id of the node of a process, by name; None where it is not known.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        metrics: RunMetrics,
        processes: Processes,
        node_of: Callable[[str], str | None],
    ) -> None:
        self._config, self._processes, self._node_of = config, processes, node_of
        self._shown: list[tuple[str, str]] = []
        self.exporter = Exporter(
            config.name,
            folder,
            [metrics],
            self.reached,
            host=config.deploy.metrics_host,
            port=config.deploy.metrics_port,
            node=ray.util.get_node_ip_address(),
            evaluators=[
                actor.name
                for index, actor in enumerate(processes.actors)
                if heldout.purpose(config.heldout, index, config.actors.count) is Purpose.EVALUATE
            ],
        )

    def show(self) -> list[tuple[str, Awaitable[None]]]:
        """Has processes show their metrics; actors and judges do so in each of their lives."""
        host, processes = self._config.deploy.metrics_host, self._processes
        by_themselves = {actor.name for actor in processes.actors}
        by_themselves |= {judge.name for judge in processes.judges}
        calls = {
            "broker": processes.broker.serve_metrics(host),
            "learner": processes.learner.serve_metrics(host),
        }
        for name, handle in processes.handles().items():
            if name not in by_themselves | {"broker", "learner-0"}:
                calls[name] = show_process(handle, host)
        return [(name, self._note(name, call)) for name, call in calls.items()]

    def add(self, name: str, address: str) -> None:
        """Lets Prometheus find a process that lives as long as the run."""
        self._shown.append((name, address))

    def reached(self) -> list[tuple[str, str]]:
        """Every process that shows metrics where they can be had, and its address."""
        away = self._out_of_reach()
        return [found for found in self._all() if found[0] not in away]

    def missing(self) -> str | None:
        """What to say of processes whose metrics nobody reaches; None where there are none."""
        if not (away := self._out_of_reach()):
            return None
        return (
            f"no metrics of {', '.join(away)}: on other nodes, and deploy.metrics_host = "
            f"{self._config.deploy.metrics_host!r} is their own loopback; set it to '0.0.0.0'"
        )

    def _all(self) -> list[tuple[str, str]]:
        judges, actors = self._processes.judges, self._processes.actors
        return [
            *self._shown,
            *((judge.name, judge.metrics) for judge in judges if judge.metrics),
            *((actor.name, actor.metrics) for actor in actors if actor.metrics),
        ]

    def _out_of_reach(self) -> list[str]:
        """Processes of other nodes whose metrics only their own node reaches."""
        if not is_loopback(self._config.deploy.metrics_host):
            return []
        names = [name for name, _ in self._all()]
        nodes = {name: self._node_of(name) for name in names}
        nodes["learner"] = self._node_of("learner-0")
        return [name for name in names if nodes[name] not in (None, self._processes.node)]

    async def _note(self, name: str, shows: Awaitable[str]) -> None:
        self.add(name, await shows)
