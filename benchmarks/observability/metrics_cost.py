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
from benchmarks.harness.study import Options, Study, text_table
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
    costs = {
        f"scrape of {record['processes']} processes": (
            record["scrape"]["cpu_seconds"], record["interval_seconds"], "scrapes",
        ),
        "look of the watchdog": (
            record["look"]["cpu_seconds"], record["look_seconds"], "watchdog",
        ),
        "ping of all processes": (
            record["ping"]["cpu_seconds"], record["ping_seconds"], "pings",
        ),
        "metrics of a batch": (record["note_seconds"], record["step_seconds"], "notes"),
    }  # fmt: skip
    rows = [
        [name, f"{1e3 * cost:.3f}", f"{interval:.3g}", f"{record['shares'][part]:.3%}"]
        for name, (cost, interval, part) in costs.items()
    ]
    rows.append(["together", "", "", f"{record['share']:.3%}"])
    return text_table(["cause", "ms of CPU", "every, s", "share"], rows)


STUDY = Study(
    name="metrics",
    options=MetricsOptions,
    file="metrics_cost.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: (
        [f"{record['share']:.2%} of a run, at most {AIM:.0%}"] * (record["share"] > AIM)
    ),
)
