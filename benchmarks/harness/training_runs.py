"""Training runs of a benchmark: variants of a recipe, one process after the other, resumable."""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.cores import check_devices, describe_devices, with_cores
from benchmarks.harness.provenance import environment, reserve
from benchmarks.harness.study import Options, Record, option
from benchmarks.harness.subprocesses import CLI, child, follow, raise_failure, set_options
from deploy.config.devices import for_this_machine
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.preflight.model_origins import refuse_another_origin, warm_start_origin
from deploy.preflight.models import model_path
from deploy.report.summary import WARM_UP
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import ORIGIN_FILE
from deploy.storage.run_directory import RunDirectory
from headway.cpu_cores import usable_cores
from headway.errors import InputError
from learner.config.learner import ModelConfig

RECIPE = (
    option("recipe", "demo", "a TOML file or a shipped recipe", nargs="?"),
    option("--set", [], dest="settings", action="append", metavar="KEY=VALUE"),
    option("--steps", None, "of every run; the recipe's by default", type=int),
)
SCORED = (
    *RECIPE,
    option("--seeds", "0,1,2", "of prompts and sampling"),
    option("--problems", 2000, "of the last score"),
    option("--target", 0.85, "held-out score whose time is taken"),
)
"""Options of benchmarks that score checkpoints; --score-every has a default of each benchmark."""
BATCHES = "metrics.jsonl"
"""File in the folder of a run with a line for each batch."""
ENVIRONMENT = ".environment.json"
"""Suffix of the file with the provenance of a run."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One training run of a benchmark."""

    name: str
    """In tables."""
    seed: int
    config: RunConfig
    kind: str = ""
    """The part of the benchmark that it belongs to."""
    worker: tuple[str, ...] = ()
    """Module that runs it and further arguments; empty: Headway itself."""
    variables: Mapping[str, str] | None = None
    """Added to the environment of its process."""

    @property
    def directory(self) -> RunDirectory:
        """The folder of the run."""
        return RunDirectory.of(self.config)

    def environment(self) -> dict[str, Any] | None:
        """Return the provenance of the run; None where it was not stored."""
        file = self.directory.path.parent / f"{self.config.name}{ENVIRONMENT}"
        return json.loads(file.read_text()) if file.exists() else None


def vary(base: RunConfig, name: str, **changes: dict[str, Any]) -> RunConfig:
    """Return the recipe of a variant.

    Raises:
        InputError: The changes do not go together.
    """
    try:
        return base.updated(name=name, **changes)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


class TrainingRuns:
    """Runs variants one after the other and prints their number and the time left."""

    def __init__(self, out: Path, total: int) -> None:
        self._out, self._total, self._done = out, total, 0
        self._seconds: list[float] = []
        self._terminal = Terminal()

    def run(
        self,
        label: str,
        config: RunConfig,
        module: str,
        *arguments: str | Path,
        variables: Mapping[str, str] | None = None,
    ) -> RunDirectory:
        """Run one process to its end; it is given the file of the recipe and the arguments.

        Raises:
            InputError: It refused its input; with its message.
            RunFailed: It failed; names its log.
        """
        recipe, log = self._out / f"{config.name}.json", self._out / f"{config.name}.log"
        recipe.write_text(config.model_dump_json(indent=2))
        (self._out / f"{config.name}{ENVIRONMENT}").write_text(json.dumps(environment(), indent=2))
        directory = RunDirectory(self._out / config.name)
        began = time.monotonic()
        self._done += 1

        def describe(batches: int) -> str:
            left = seconds_left(
                self._seconds,
                self._total - self._done,
                elapsed=time.monotonic() - began,
                share=batches / config.steps,
            )
            return f"{label} · {describe_seconds(left)}"

        self._terminal.say(f"{self._done}/{self._total}  {describe(0)}")
        command = [sys.executable, "-m", module, recipe, *arguments]
        with (
            log.open("w") as file,
            child(command, file, variables) as process,
            self._terminal.bar(config.steps, label),
        ):
            follow(
                process,
                lambda: count_lines(directory.path / BATCHES),
                lambda batches: self._terminal.advance(batches, describe(batches)),
            )
        raise_failure(label, process.returncode, log)
        self._seconds.append(time.monotonic() - began)
        return directory

    def train(self, variants: Sequence[Variant]) -> tuple[list[Variant], list[Record]]:
        """Train variants that are not finished yet; a failure does not end the others.

        Returns:
            The finished variants, and a record of each failure.

        Raises:
            InputError: A variant refused its input, which the others have too.
        """
        trained, failed = [], []
        for variant in variants:
            try:
                self._train(variant)
                trained.append(variant)
            except RunFailed as error:
                failed.append(failure(variant, str(error)))
        return trained, failed

    def _train(self, variant: Variant) -> None:
        if finished(variant.directory, variant.config):
            self._done += 1
            return
        variant.directory.lock.check_at_rest()  # its process outlives a benchmark that is killed
        shutil.rmtree(variant.directory.path, ignore_errors=True)
        module, *arguments = variant.worker or ("benchmarks.loop.run_worker", "train")
        label = f"seed {variant.seed} · {variant.name}"
        self.run(label, variant.config, module, *arguments, variables=variant.variables)


def failure(variant: Variant, reason: str) -> Record:
    """Print why a variant is left out, and return it as a record."""
    print(reason, flush=True)
    return {"kind": variant.kind, "name": variant.name, "seed": variant.seed, "why": reason}


def count_lines(file: Path) -> int:
    """Return the number of complete lines of a file; 0 without it."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def seconds_left(
    finished: Sequence[float], further: int, *, elapsed: float, share: float
) -> float | None:
    """Estimate the seconds until all runs are finished.

    Args:
        finished: Seconds that each finished run took.
        further: Number of runs after the present one.
        elapsed: Seconds since the start of the present run.
        share: Part of the present run that is done, from 0 to 1.

    Returns:
        None where nothing is known yet.
    """
    if share > 0:
        whole = elapsed / share
    elif finished:
        whole = max(elapsed, fmean(finished))
    else:
        return None
    return whole - elapsed + further * fmean([*finished, whole])


def describe_seconds(left: float | None) -> str:
    """Describe an estimate of `seconds_left`."""
    if left is None:
        return "time left: known after the first step"
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"


def load_comparison(options: Options) -> RunConfig:
    """Return the recipe of a comparison, with cores where it has none.

    Raises:
        InputError: It is not valid, or its variants would not have equal devices.
    """
    recipe = for_this_machine(load_recipe(options.recipe, options.settings))
    recipe = with_cores(recipe, usable_cores())
    check_devices(recipe)
    return recipe


def check_inputs(base: RunConfig) -> None:
    """Check model, prompts and user code before anything is written.

    Where the warm start is still to be made, only what does not depend on the model is checked.

    Raises:
        InputError: Something is missing or cannot be used; it may be the InputError of `actors`.
    """
    from deploy.preflight.inputs import check_code, load_inputs

    model = Path(str(base.model.path))
    if model.exists() or not model.is_relative_to(base.deploy.runs_dir):
        load_inputs(base)
    else:
        check_code(base)


def finished(directory: RunDirectory, config: RunConfig) -> bool:
    """Return True if a run was finished with the same recipe.

    Raises:
        InputError: It was made with another one.
    """
    if not directory.summary_file.exists():
        return False
    if directory.config() != config.with_model_names():
        raise InputError(
            f"{directory.path} was made from another recipe, checkout or warm start; name another "
            "--out"
        )
    return directory.status() == "done"


def make_base(options: Options, name: str) -> RunConfig:
    """Return the recipe that all variants share, scored by checkpoints; writes nothing.

    Raises:
        InputError: The options or the recipe cannot be measured.
    """
    recipe = load_comparison(options)
    least = WARM_UP + 5
    steps = recipe.steps if options.steps is None else options.steps
    if steps < least or min(options.score_every, options.problems) < 1:
        raise InputError(
            f"--steps {steps} must be at least {least}, --score-every {options.score_every} and "
            f"--problems {options.problems} at least 1"
        )
    if recipe.heldout is None:
        raise InputError(f"recipe {options.recipe} has no [heldout] to score by")
    size = min(options.problems, recipe.heldout.size)
    base = start_from(recipe, options, name, steps).updated(
        heldout={"size": size, "final_size": options.problems},
        learner={"checkpoint_every": options.score_every, "keep_checkpoints": steps},
    )
    check_inputs(base)
    return base


def start_from(recipe: RunConfig, options: Options, name: str, steps: int) -> RunConfig:
    """Return a recipe on its initial model in the benchmark's folder; sets `options.out`."""
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    out = (options.out or recipe.deploy.runs_dir / f"bench-{name}-{stamp}").absolute()
    options.out = out
    model = ModelConfig(path=initial_model(recipe, out))
    changed = recipe.model_copy(update={"steps": steps, "model": model, "sft": None})
    return changed.updated(deploy={"runs_dir": out})


def initial_model(recipe: RunConfig, out: Path) -> str:
    """Return the recipe's initial model, or the warm start that exists or will be made.

    Raises:
        InputError: There is no such model, or `out` has a warm start of other settings.
    """
    if recipe.sft is None:
        return model_path(recipe)
    origin = warm_start_origin(recipe)
    for folder in (out, recipe.deploy.runs_dir):
        for file in sorted(folder.glob(f"*-sft/model/{ORIGIN_FILE}")):
            if file.read_text() == origin:
                return str(file.parent.absolute())
    warm_start = recipe.updated(deploy={"runs_dir": out}).warm_start
    if warm_start.exists():
        refuse_another_origin(warm_start, origin, "name another --out")
    return str(warm_start)


def make_warm_start(options: Options, base: RunConfig) -> None:
    """Make the folder of a benchmark, and the warm start that its variants need.

    Raises:
        InputError: The warm start refused its input, or the folder cannot be written.
        RunFailed: The warm start could not be made; names its log.
    """
    out, model = base.deploy.runs_dir, Path(str(base.model.path))
    reserve(out / f"{base.name}.json")
    if model.is_relative_to(out) and not model.exists():
        words = set_options([*options.settings, f"deploy.runs_dir={out}"])
        command, log = [sys.executable, *CLI, "sft", options.recipe, *words], out / "sft.log"
        with log.open("w") as errors, child(command, None, errors=errors) as process:
            process.wait()
        raise_failure("the warm start", process.returncode, log)
    print(f"every variant starts from {base.model.path}, {describe_devices(base)}", flush=True)


def commits(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the commits that runs were measured at, each once; "unknown" where none is stored."""
    return sorted({(run["environment"] or {}).get("commit") or "unknown" for run in runs})


def conditions(document: Mapping[str, Any]) -> str:
    """Describe which runs failed, the commits of the others, and the load of the machine."""
    lines = [
        f"left out: seed {failed['seed']}, {failed['name']}: {failed['why']}"
        for failed in document["failed"]
    ]
    measured = commits(document["arms"])
    if measured != [document["commit"]]:
        lines.append(
            f"runs were measured at commit {', '.join(measured)}; "
            f"this was written at {document['commit'] or 'unknown'}"
        )
    known = [run["environment"] for run in document["arms"] if run["environment"]]
    if known:
        largest = max(facts["machine"]["load_average"][0] for facts in known)
        lines.append(f"largest load average at the start of a run {largest:.1f}")
    return "\n".join(lines)
