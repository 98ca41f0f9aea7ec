"""How well `headway plan` predicts: measured beside simulated throughput and lag, by bound.

    headway bench plan [FOLDER] [--gain FILE]

FOLDER is the folder of `headway bench async` or `staleness`. In each of its rounds, or with each of
its seeds, rates are measured in every run, and every run is predicted with the rates of each: its
own, which shows how faithful the model is, and the others, which is what a plan is for. `--gain`
predicts the runs of a stored async_gain.json, whose folders are not needed: an engine's rates are
those of its actors alone with two policies (a time per rollout and one per token), the learner's
are those of the reference run, and lengths are lognormal with each recorded batch's mean. Takes
seconds.
"""

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.study import Options, Record, Study, option
from benchmarks.loop.async_figures import token_seconds
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.planner.calibration import Measured, read_rates
from deploy.planner.predict import setting_of, setting_of_run
from deploy.planner.rates import EngineRates, LearnerRates, Rates, UpdateRates
from deploy.planner.simulator import Outcome, Setting, simulate
from deploy.storage.run_directory import RunDirectory

RUN_NAME = re.compile(r"(?:(?P<round>round\d+)-)?eta(?P<eta>\d+)(?:-(?P<seed>seed\d+))?")
COMPARED = ("samples_per_second", "learner_idle", "lag_mean")
"""Figures of a run that are predicted."""
TAIL = 1.0
"""Assumed coefficient of variation of lengths within a batch of a stored file."""
SWAP_SECONDS = 0.06
"""Assumed pause of an update in a stored file."""


def check_folder(folder: Path) -> Record:
    """Predict every run of every round with the rates of each.

    Raises:
        InputError: The folder has no runs.
    """
    rounds: dict[str, dict[int, RunDirectory]] = {}
    for path in sorted(path for path in folder.glob("*eta*") if path.is_dir()):
        if match := RUN_NAME.fullmatch(path.name):
            name, bound = match["round"] or match["seed"], int(match["eta"])
            rounds.setdefault(name, {})[bound] = RunDirectory(path)
    if not rounds:
        raise InputError(
            f"{folder} has no runs round1-eta0 or eta0-seed0, …: name a folder of `bench async` or "
            "`bench staleness`"
        )
    checks = []
    for name, runs in rounds.items():
        measured = {bound: read_rates(run) for bound, run in sorted(runs.items())}
        configs = {bound: run.config() for bound, run in runs.items()}
        checks += [
            {"round": name, "rates_of": source, **compare(configs[bound], rates.rates, run)}
            for source, rates in measured.items()
            for bound, run in measured.items()
        ]
    return {"folder": folder.name, "checks": checks}


def compare(config: RunConfig, rates: Rates, measured: Measured) -> Record:
    """Return the measured figures of a run beside those that rates predict."""
    outcome = simulate(setting_of_run(config, measured.batches), rates, seed=config.seed)
    figures = {key: getattr(measured, key) for key in COMPARED}
    return comparison(config.queues.max_staleness, figures, outcome)


def comparison(bound: int, measured: Mapping[str, float], predicted: Outcome) -> Record:
    """Return measured figures at a bound beside predicted ones."""
    return {
        "max_staleness": bound,
        "measured": measured["samples_per_second"],
        "predicted": predicted.samples_per_second,
        "ratio": measured["samples_per_second"] / predicted.samples_per_second,
        **{
            key: {"measured": measured[key], "predicted": getattr(predicted, key)}
            for key in COMPARED[1:]
        },
    }


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run of a stored async_gain.json."""

    round: str
    bound: int
    setting: Setting
    rates: Rates
    measured: Mapping[str, float]
    """The figures of COMPARED."""


def read_gain(file: Path) -> tuple[Record, list[StoredRun]]:
    """Return the origin of a stored async_gain.json, and its runs.

    Raises:
        InputError: It is not such a file, or no rates follow from its figures.
    """
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--gain {file} cannot be read: {error}") from None
    try:
        return {"of": document["command"], "commit": document["commit"]}, stored_runs(document)
    except (KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"--gain {file} was not written by `headway bench async`: {reason}"
        ) from None
    except InputError as error:
        raise InputError(f"--gain {file}: {error}") from None


def stored_runs(document: Mapping[str, Any]) -> list[StoredRun]:
    """Return the runs of a stored async_gain.json round by round, but for those with all cores.

    Raises:
        InputError: The recipe cannot be read, or no rates follow from a round's figures.
    """
    base = load_recipe(document["recipe"], document["settings"])
    runs = []
    for number, one_round in enumerate(document["rounds"], start=1):
        reference = one_round["arms"][str(document["reference_bound"])]
        for name, figures in one_round["arms"].items():
            if not name.isdigit():
                continue
            setting = setting_of(
                base, staleness=int(name), actors=base.actors.count, steps=document["steps"]
            )
            rates = gain_rates(one_round["limits"], reference, figures, base)
            measured = {key: figures[key] for key in COMPARED}
            runs.append(StoredRun(f"round{number}", int(name), setting, rates, measured))
    return runs


def check_gain(runs: Sequence[StoredRun]) -> list[Record]:
    """Predict each run with the rates of its round."""
    return [
        {
            "round": run.round,
            **comparison(run.bound, run.measured, simulate(run.setting, run.rates)),
        }
        for run in runs
    ]


def gain_rates(
    limits: Mapping[str, Any], reference: Mapping[str, Any], run: Mapping[str, Any], base: RunConfig
) -> Rates:
    """Return the rates that follow from one round's stored figures.

    Args:
        limits: Its limits, with those of the actors with two policies.
        reference: The run whose learner is taken.
        run: The run whose lengths are taken.
        base: The recipe.

    Raises:
        InputError: No time per rollout and per token follows from the limits of the actors.
    """
    both = [limits["actors"]["raw"][policy] for policy in ("initial", "trained")]
    token = token_seconds(*both)
    turnover = 1 / both[0]["samples_per_second"] - (token or 0.0) * both[0]["tokens_per_rollout"]
    if token is None or turnover < 0:
        measured = " and ".join(
            f"{policy['samples_per_second']:.1f} samples/s of "
            f"{policy['tokens_per_rollout']:.1f} tokens"
            for policy in both
        )
        raise InputError(
            f"actors alone gave {measured}, from which no time per rollout and per token follows: "
            "longer rollouts must take longer, and at most by as much as they are longer"
        )
    chance = random.Random(base.seed)
    sigma = math.sqrt(math.log1p(TAIL**2))
    batch, size = base.prompts.groups_per_batch, base.prompts.group_size
    lengths = []
    for tokens in run["raw"]["tokens_trained"]:
        middle = math.log(tokens / (batch * size)) - sigma**2 / 2
        lengths += [
            tuple(max(1, round(chance.lognormvariate(middle, sigma))) for _ in range(size))
            for _ in range(batch)
        ]
    return Rates(
        engine=EngineRates(step_seconds=0.0, rollout_step_seconds=token, turnover_seconds=turnover),
        learner=LearnerRates(
            batch_seconds=reference["learner_step_seconds"],
            publish_seconds=reference["learner_other_seconds"],
        ),
        update=UpdateRates(pause_seconds=SWAP_SECONDS),
        lengths=lengths,
    ).at_most(base.actors.max_new_tokens)


def measure(options: Options) -> Iterator[Record]:
    """Predict the runs of the stored file and of the folder."""
    origin, runs = read_gain(options.gain)
    if options.folder is not None:
        yield {"runs": check_folder(options.folder)}
    yield {"gain": {**origin, "checks": check_gain(runs)}}


def table(record: Record) -> str:
    """Return the comparisons, by the rates that predict."""
    checks = record.get("runs", {"checks": []})["checks"]
    lines = []
    for source in sorted({check["rates_of"] for check in checks}):
        lines.append(f"with the rates of the run with η = {source}")
        lines += [_line(check) for check in checks if check["rates_of"] == source]
    lines.append("with the limits of the stored file")
    return "\n".join([*lines, *map(_line, record["gain"]["checks"])])


def _line(check: Mapping[str, Any]) -> str:
    lag = check["lag_mean"]
    return (
        f"  η = {check['max_staleness']:2d}: {check['measured']:7.1f} samples/s measured,"
        f" {check['predicted']:7.1f} predicted, {check['ratio']:.2f};"
        f" mean lag {lag['measured']:.2f} and {lag['predicted']:.2f}"
    )


STUDY = Study(
    name="plan",
    about=__doc__,
    options=(
        option("folder", None, "of a `headway bench async`", type=Path, nargs="?"),
        option("--gain", RESULTS / "async_gain.json", "a stored file", type=Path),
    ),
    file="plan_check.json",
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    STUDY.main()
