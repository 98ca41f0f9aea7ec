"""Cost of metrics, watchdog and pings for a run, as a share of its steps.

    headway bench metrics [--steps 24]

Trains the demo; then, with all processes at rest, takes the CPU seconds of scrapes, of looks of the
watchdog and of pings, by which processes that hang are found, over their intervals, and of the
learner's metrics of a batch, as if nothing ran in parallel. Must stay below 1 %. Leaves out
`deploy.engine_metrics`.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml

import deploy
from benchmarks.harness.processes import CLI, set_options
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study
from deploy.config.loader import load_recipe

AIM = 0.01
PROMETHEUS = Path(deploy.__file__).parent / "monitoring" / "prometheus.yml"


class MetricsOptions(Options):
    """Options of `headway bench metrics`."""

    steps: Annotated[int, typer.Option(help="Of the run.")] = 24


def shares(figures: Record, interval: float) -> dict[str, float]:
    """Return the shares of a run's time, by cause."""
    return {
        "scrapes": figures["scrape"]["cpu_seconds"] / interval,
        "watchdog": figures["look"]["cpu_seconds"] / figures["look_seconds"],
        "pings": figures["ping"]["cpu_seconds"] / figures["ping_seconds"],
        "notes": figures["note_seconds"] / figures["step_seconds"],
    }


def measure(options: MetricsOptions) -> Iterator[Record]:
    from benchmarks.observability.measured_run import MeasuredRun
    from deploy import session
    from deploy.driver.watchdog import Probes
    from deploy.preflight.inputs import load_inputs
    from deploy.runtime.console import Terminal
    from deploy.storage.run_directory import RunDirectory
    from headway.hang_detection import PING_SECONDS

    prometheus = yaml.safe_load(PROMETHEUS.read_text())["global"]
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        settings = [f"deploy.runs_dir={folder}", f"steps={options.steps}", "heldout.size=8"]
        settings += ["heldout.final_size=8", "heldout.every=100000"]
        config = load_recipe("demo", settings)
        command = [sys.executable, *CLI, "sft", "demo", *set_options(settings)]
        subprocess.run(command, check=True)
        directory = RunDirectory.of(config)
        vars(session)["Run"] = MeasuredRun
        with directory.created(config, replace=False):
            session.run(config, load_inputs(config), directory, Terminal())
    interval = float(prometheus["scrape_interval"].rstrip("s"))
    intervals = {"look_seconds": Probes().look_seconds, "ping_seconds": PING_SECONDS}
    yield {"interval_seconds": interval, **intervals, **MeasuredRun.figures}


def conclude(record: Record) -> Record:
    parts = shares(record, record["interval_seconds"])
    return {"shares": parts, "share": sum(parts.values())}


def table(record: Record) -> str:
    parts = ", ".join(f"{name} {share:.3%}" for name, share in record["shares"].items())
    return (
        f"a step takes {record['step_seconds']:.2f} s; a scrape of {record['processes']} processes "
        f"costs {1e3 * record['scrape']['cpu_seconds']:.1f} ms of CPU, every "
        f"{record['interval_seconds']:g} s; a look of the watchdog "
        f"{1e3 * record['look']['cpu_seconds']:.1f} ms, every {record['look_seconds']:g} s; "
        f"pings of all processes {1e3 * record['ping']['cpu_seconds']:.1f} ms, every "
        f"{record['ping_seconds']:g} s; "
        f"the metrics of a batch {1e6 * record['note_seconds']:.0f} µs\n"
        f"{parts}: together {record['share']:.3%} of a step, {AIM:.0%} allowed"
    )


STUDY = Study(
    name="metrics",
    options=MetricsOptions,
    file="metrics_cost.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: ["metrics, watchdog and pings cost too much"] * (record["share"] > AIM),
)
