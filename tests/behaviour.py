"""Observers of this checkout's behaviour, which `test_behaviour.py` compares with its records.

`python -m tests.behaviour` records everything again in `tests/assets`, after an intended change.
"""

import hashlib
import json
import shutil
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import prometheus_client
import torch
import typer
from prometheus_client.parser import text_string_to_metric_families

from actors.metrics import ENGINE, ActorMetrics, EngineMetrics
from actors.rollout.actor_statistics import ActorStatistics
from deploy.cli.app import app
from deploy.cli.bench import BENCHMARKS
from deploy.config.run_config import RunConfig
from deploy.driver.run_metrics import RunMetrics
from deploy.observability.waits import Wait
from deploy.storage.run_record import Record
from headway.metrics import ProcessMetrics
from headway.roles import role_of
from learner.diagnostics.batch_report import TrainedBatch
from learner.metrics import FIGURES, LearnerMetrics
from queues.broker.metrics import BrokerMetrics
from tests.deploy.conftest import Headway, call_main, read_rows
from weight_sync.announcements import WeightUpdateReport
from weight_sync.probe import ProbeResult

ASSETS = Path(__file__).parent / "assets"
RECIPE = ASSETS / "locked_run.toml"
REWARD = (
    "def score(prompt, completion, answer, metadata):\n"
    "    return {'length': len(completion) / 100, 'even': float(len(completion) % 2 == 0)}\n"
)
VERSIONS = 8
"""Versions after the warm start whose weights are locked."""
FIGURES_LOCKED = (
    "loss", "grad_norm", "critic_grad_norm", "value_loss", "reference_kl", "entropy_mean",
    "ess", "reward_mean", "tokens_trained",
)  # fmt: skip
DEADLINE_SECONDS = 300


def recorded(name):
    return json.loads((ASSETS / name).read_text())


def record(name, content):
    ASSETS.mkdir(exist_ok=True)
    (ASSETS / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


# --- one run without lag, from its warm start to Ctrl-C


def cpu():
    """Return the versions and CPU properties that the bits of a float32 result depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = [line.split(":", 1) for line in reversed(lines) if ":" in line]
    about = {key.strip(): value.strip() for key, value in pairs}
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "vendor": about.get("vendor_id"),
        "family": about.get("cpu family"),
        "name": about.get("model name"),
    }


def scrape(run):
    """Return the metrics that each process of a run exports now, by role."""
    shown = {}
    for target in json.loads((run / "targets.json").read_text()):
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=30) as answer:
            shown[role_of(target["labels"]["process"])] = families(answer.read().decode())
    return shown


def complete(shown):
    """Return True if every process was scraped after a batch and the first held-out scores."""
    return (
        shown.keys() >= {"actor", "broadcaster", "broker", "driver", "learner"}
        and "headway_loss" in shown["learner"]
        and shown["driver"]["headway_heldout_score"]["labels"]
    )


def play(folder):
    """Train the locked run until `VERSIONS` versions exist, then interrupt it.

    Returns:
        The weights and figures of each version, the metrics by role, the lags of the trained
        tokens, and the key paths of `summary.json` and of `headway inspect --json`.
    """
    headway = Headway(folder)
    (folder / "locked_reward.py").write_text(REWARD)
    trained = headway("sft", RECIPE)
    assert trained.returncode == 0, trained.stderr
    warm = headway.run_folder("locked-sft") / "model" / "model.safetensors"
    run = headway.run_folder("locked")
    process = headway.start_plain("run", RECIPE)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(read_rows(run / "metrics.jsonl")) < VERSIONS or not complete(
            shown := scrape(run)
        ):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, f"{VERSIONS} batches were not trained in time"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 130, output
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    versions = [
        {"version": row["version"] + 1, "checksum": row["weights_checksum"]}
        | {name: row[name] for name in FIGURES_LOCKED}
        for row in read_rows(run / "metrics.jsonl")[:VERSIONS]
    ]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "weights": {
            "recorded_on": cpu(),
            "warm_start_sha256": hashlib.sha256(warm.read_bytes()).hexdigest(),
            "versions": versions,
        },
        "metrics": shown,
        "lags": list(summary["lag_histogram"]),
        "summary": paths(summary),
        "inspect": paths(headway.accounting("locked")),
    }


def paths(value, prefix=""):
    """Return the keys of a JSON document, as "heldout[].score", sorted."""
    keys = set()
    if isinstance(value, dict):
        for key, inner in value.items():
            path = f"{prefix}.{key}" if prefix else key
            keys |= {path, *paths(inner, path)}
    elif isinstance(value, list):
        keys |= {path for inner in value for path in paths(inner, f"{prefix}[]")}
    return sorted(keys)


# --- every metric, with labels that a healthy run does not show


def families(text):
    """Return type and labels of the metrics in a scrape, by name."""
    return {
        family.name: {
            "type": family.type,
            "labels": sorted({name for s in family.samples for name in s.labels} - {"le"}),
        }
        for family in sorted(text_string_to_metric_families(text), key=lambda x: x.name)
    }


def exposed(*collectors):
    registry = prometheus_client.CollectorRegistry()
    for collector in (*collectors, ProcessMetrics()):
        registry.register(collector)
    return families(prometheus_client.generate_latest(registry).decode())


def actor_metrics():
    """Return the metrics of an actor whose process also holds metrics of vLLM."""
    statistics, engine = ActorStatistics("engine-0"), prometheus_client.CollectorRegistry()
    statistics.groups["put"] = 1
    for name in ENGINE:
        kind = (
            prometheus_client.Counter if name.endswith("preemptions") else prometheus_client.Gauge
        )
        kind(name, "Of vLLM.", ["model_name"], registry=engine).labels("m")
    with mock.patch("actors.metrics.REGISTRY", engine):
        return exposed(ActorMetrics(statistics), EngineMetrics())


def broker_metrics():
    figures = (
        "version steps accepted diverged live window staleness_window overdue "
        "oldest_ready_seconds oldest_queued_seconds"
    )
    status = SimpleNamespace(
        **dict.fromkeys(figures.split(), 1), paused=None, waits_for={}, depth={"queued": 1},
        ended={("failed", "reward"): 1}, given_back={"reward": 1}, refused={"fenced": 1},
        engines={"engine-0": 1}, window_moves={"ess": 1},
    )  # fmt: skip
    return exposed(BrokerMetrics(lambda: status))


def learner_metrics():
    times = ("wait_started_at", "wait_finished_at", "step_started_at", "step_finished_at")
    kinds = ("mismatch_fresh", "kl_fresh", "tokens_fresh")
    metrics = LearnerMetrics()
    engine = dict.fromkeys(("mismatch_fresh", "tokens_fresh", "rank_score", "mismatch_ratio"), 1.0)
    row = dict.fromkeys((*times, "published_at", *kinds, *FIGURES), 1.0) | {
        "version": 0,
        "weights_checksum": "",
        "lag_histogram": {"0": 1},
        "group_lag_histogram": {"0": 1},
        "fractions": {"capped": 0.5},
        "reward_parts": {"task": 0.5},
        "teacher_divergence": {"teacher": 0.5},
        "gold": {"groups": [[0.5, 0.5]], "length": 1.0, "finished": 1.0, "distinct": 1.0},
        "engines": {"engine-0": engine},
    }
    metrics.observe(TrainedBatch.from_dict(row))
    return exposed(metrics)


def driver_metrics(folder):
    times = ("published_at", "staged_at", "swap_started_at", "swap_finished_at")
    known = Record(name="locked", steps=1, max_staleness=0, started_at=0.0)
    known.swaps.append(
        WeightUpdateReport(engine_id="e", version=0, bytes=1, **dict.fromkeys(times, 1.0))
    )
    known.heldout.append({"score": 1.0, "scored": 1, "failed": 0})
    known.restarts, known.away = Counter({"actor-0": 1}), {"actor-0": 1.0}
    known.drifting = {"engine-0": True}
    known.probes = {
        "engine-0": ProbeResult(engine_id="engine-0", version=0, difference=0.0, tolerance=1.0)
    }
    late = Wait("learner", "actor-0", "groups", seconds=1.0)
    return exposed(RunMetrics(known, folder, lambda: [late]))


def all_metrics():
    return {
        "actor": actor_metrics(),
        "broadcaster": exposed(),
        "broker": broker_metrics(),
        "driver": driver_metrics(Path(tempfile.gettempdir())),
        "learner": learner_metrics(),
    }


# --- the command line


def commands():
    """Return every command with its parameters, and the names of the benchmarks."""
    root = typer.main.get_command(app)
    parameters = {}
    for name, command in {"headway": root, **root.commands}.items():
        parameters[name] = {
            "/".join([*parameter.opts, *parameter.secondary_opts]): {
                "required": parameter.required,
                "repeated": parameter.multiple or parameter.nargs != 1,
                "switch": getattr(parameter, "is_flag", False),
                "default": json.loads(json.dumps(parameter.default, default=str)),
            }
            for parameter in command.params
        }
    return {"commands": parameters, "benchmarks": sorted(BENCHMARKS)}


def call(arguments, folder):
    """Call `headway` in this process, in a folder with some files."""
    shutil.copy(ASSETS / "untrained.toml", folder)
    (folder / "broken.toml").write_text("steps = = 1")
    for name in ("empty", "folder", "corrupt"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("folder", "corrupt"):
        (folder / name / "recipe.toml").write_text("")
    (folder / "corrupt" / "ledger.sqlite").write_text("no database")
    return call_main(arguments, folder)


# --- recipe keys


def recipe_keys():
    """Return every key of a recipe with its JSON schema, without titles and descriptions."""
    schema = RunConfig.model_json_schema()
    keys = {}

    def plain(node):
        """Return a schema whose references are replaced by what they refer to."""
        if isinstance(node, list):
            return [plain(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            target = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
            node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
        return {
            key: {name: plain(inner) for name, inner in value.items()}
            if key == "properties"
            else plain(value)
            for key, value in node.items()
            if not (key in ("title", "description") and isinstance(value, str))
        }

    def walk(node, prefix, required):
        sections = [node, *node.get("anyOf", ())]
        tables = [section for section in sections if "properties" in section]
        entry = {"required": required}
        if tables:
            entry |= {"section": True, "optional": {"type": "null"} in sections}
        else:
            entry |= node
        if prefix:
            keys[prefix] = entry
        for table in tables:
            for name, inner in table["properties"].items():
                path = f"{prefix}.{name}" if prefix else name
                walk(inner, path, name in table.get("required", ()))

    walk(plain(schema), "", True)
    return keys


def record_all():
    """Write every asset again, from this checkout."""
    record("commands.json", commands())
    record("recipe_keys.json", recipe_keys())
    calls = recorded("exit_codes.json")
    for recorded_call in calls.values():
        with tempfile.TemporaryDirectory() as name:
            recorded_call["code"] = call(recorded_call["arguments"], Path(name)).returncode
    record("exit_codes.json", calls)
    with tempfile.TemporaryDirectory() as name:
        locked = play(Path(name))
    record("weights.json", locked["weights"])
    for document in ("summary", "inspect"):
        record(f"{document}_keys.json", locked[document])
    metrics = all_metrics()
    for process, shown in metrics.items():
        for metric, about in shown.items():
            about["in_locked_run"] = metric in locked["metrics"][process]
    record("metrics.json", metrics)


if __name__ == "__main__":
    record_all()
