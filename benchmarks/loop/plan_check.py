"""How well `headway plan` predicts: measured against simulated throughput and lag, by bound.

    headway bench plan [FOLDER] [--gain FILE]

FOLDER is what `headway bench async` or `staleness` left behind. In each of its rounds, or with each
of its seeds, the rates of every arm's parts are measured, and with them every arm is predicted: the
arm itself, which says how faithful the model is, and the others, which is what a plan is for.
`--gain` predicts the arms of a stored async_gain.json, whose runs need not be there: an engine's
rates are those of its actors alone with two policies (a time for a rollout and one for a token),
the learner's are those of the reference arm, and lengths are lognormal with each recorded batch's
mean. Takes seconds. Raw numbers are stored under benchmarks/results/.
"""

import argparse
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.arms import end_well
from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from benchmarks.loop.async_figures import token_seconds
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.planner.calibration import Measured, read_rates
from deploy.planner.predict import setting_of, setting_of_run
from deploy.planner.rates import EngineRates, LearnerRates, Rates, UpdateRates
from deploy.planner.simulator import Outcome, Setting, simulate
from deploy.storage.run_directory import RunDirectory

ARM = re.compile(r"(?:(?P<round>round\d+)-)?eta(?P<eta>\d+)(?:-(?P<seed>seed\d+))?")
COMPARED = ("samples_per_second", "learner_idle", "lag_mean")
"""Figures of an arm that stand beside predicted ones."""
TAIL = 1.0
"""Variation of lengths within a batch, where a stored figure does not have it."""


def check_folder(folder: Path) -> dict[str, Any]:
    """Every arm of every round, predicted by the rates of each.

    Raises:
        InputError: There are no arms.
    """
    rounds: dict[str, dict[int, RunDirectory]] = {}
    for path in sorted(each for each in folder.glob("*eta*") if each.is_dir()):
        if found := ARM.fullmatch(path.name):
            name, bound = found["round"] or found["seed"], int(found["eta"])
            rounds.setdefault(name, {})[bound] = RunDirectory(path)
    if not rounds:
        raise InputError(
            f"{folder} has no runs round1-eta0 or eta0-seed0, …: name a folder of `bench async` or "
            "`bench staleness`"
        )
    checks = []
    for name, arms in rounds.items():
        measured = {bound: read_rates(arm) for bound, arm in sorted(arms.items())}
        configs = {bound: arm.config() for bound, arm in arms.items()}
        checks += [
            {"round": name, "rates_of": source, **compare(configs[arm], rates.rates, measured[arm])}
            for source, rates in measured.items()
            for arm in measured
        ]
    return {"folder": folder.name, "checks": checks}


def compare(config: RunConfig, rates: Rates, measured: Measured) -> dict[str, Any]:
    """One arm: what was measured of it, and what rates predict."""
    found = simulate(setting_of_run(config, measured.batches), rates, seed=config.seed)
    figures = {key: getattr(measured, key) for key in COMPARED}
    return beside(config.queues.max_staleness, figures, found)


def beside(bound: int, measured: Mapping[str, float], found: Outcome) -> dict[str, Any]:
    """What was measured at a bound, COMPARED of it, beside what was predicted."""
    return {
        "max_staleness": bound,
        "measured": measured["samples_per_second"],
        "predicted": found.samples_per_second,
        "ratio": measured["samples_per_second"] / found.samples_per_second,
        "learner_idle": {"measured": measured["learner_idle"], "predicted": found.learner_idle},
        "lag_mean": {"measured": measured["lag_mean"], "predicted": found.lag_mean},
    }


@dataclass(frozen=True, slots=True)
class GainArm:
    """One arm of a stored async_gain.json."""

    round: str
    bound: int
    setting: Setting
    rates: Rates
    measured: Mapping[str, float]
    """COMPARED."""


def read_gain(file: Path) -> tuple[dict[str, Any], list[GainArm]]:
    """Which measurement a stored async_gain.json is, and its arms.

    Raises:
        InputError: It is not such a file, or its figures tell no rates.
    """
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--gain {file} cannot be read: {error}") from None
    try:
        return {"of": document["command"], "commit": document["commit"]}, gain_arms(document)
    except KeyError as error:
        raise InputError(
            f"--gain {file} was not written by `headway bench async`: it has no {error}"
        ) from None
    except TypeError as error:
        raise InputError(
            f"--gain {file} was not written by `headway bench async`: {error}"
        ) from None
    except InputError as error:
        raise InputError(f"--gain {file}: {error}") from None


def gain_arms(document: Mapping[str, Any]) -> list[GainArm]:
    """The arms of a stored async_gain.json, round by round; arms with all cores are left out.

    Raises:
        InputError: The recipe cannot be read, or a round's figures tell no rates.
    """
    base = load_recipe(document["recipe"], document["settings"])
    found = []
    for number, round_ in enumerate(document["rounds"], start=1):
        reference = round_["arms"][str(document["reference_bound"])]
        for name, arm in round_["arms"].items():
            if not name.isdigit():
                continue
            setting = setting_of(
                base, staleness=int(name), actors=base.actors.count, steps=document["steps"]
            )
            rates = gain_rates(round_["limits"], reference, arm, base)
            measured = {key: arm[key] for key in COMPARED}
            found.append(GainArm(f"round{number}", int(name), setting, rates, measured))
    return found


def check_gain(arms: Sequence[GainArm]) -> list[dict[str, Any]]:
    """Each arm, predicted by the rates of its round."""
    return [
        {"round": arm.round, **beside(arm.bound, arm.measured, simulate(arm.setting, arm.rates))}
        for arm in arms
    ]


def gain_rates(
    limits: Mapping[str, Any], reference: Mapping[str, Any], arm: Mapping[str, Any], base: RunConfig
) -> Rates:
    """Rates from one round's stored figures.

    Args:
        limits: Its limits; those of the actors with two policies.
        reference: The arm whose learner is taken.
        arm: The arm whose lengths are taken.
        base: The recipe.

    Raises:
        InputError: The limits of the actors tell no time for a rollout and one for a token.
    """
    initial, trained = (limits["actors"]["raw"][policy] for policy in ("initial", "trained"))
    token = token_seconds(initial, trained)
    turnover = 1 / initial["samples_per_second"] - (token or 0.0) * initial["tokens_per_rollout"]
    if token is None or turnover < 0:
        measured = (
            f"{each['samples_per_second']:.1f} samples/s of {each['tokens_per_rollout']:.1f} tokens"
            for each in (initial, trained)
        )
        raise InputError(
            f"actors alone gave {' and '.join(measured)}, which does not tell a time for a rollout "
            "and one for each of its tokens: longer rollouts must take longer, and at most by as "
            "much as they are longer"
        )
    chance = random.Random(base.seed)
    sigma = math.sqrt(math.log1p(TAIL**2))
    lengths = []
    batch, size = base.prompts.groups_per_batch, base.prompts.group_size
    for tokens in arm["raw"]["tokens_trained"]:
        middle = math.log(tokens / (batch * size)) - sigma**2 / 2
        lengths += [
            tuple(max(1, round(chance.lognormvariate(middle, sigma))) for _ in range(size))
            for _ in range(batch)
        ]
    return Rates(
        engine=EngineRates(
            step_seconds=0.0,
            rollout_step_seconds=token,
            turnover_seconds=turnover,
        ),
        learner=LearnerRates(
            batch_seconds=reference["learner_step_seconds"],
            publish_seconds=reference["learner_other_seconds"],
        ),
        update=UpdateRates(pause_seconds=0.06),
        lengths=lengths,
    ).at_most(base.actors.max_new_tokens)


def line(check: Mapping[str, Any]) -> str:
    """One comparison on a line."""
    lag = check["lag_mean"]
    return (
        f"η = {check['max_staleness']:2d}: {check['measured']:7.1f} samples/s measured,"
        f" {check['predicted']:7.1f} predicted, {check['ratio']:.2f};"
        f" mean lag {lag['measured']:.2f} and {lag['predicted']:.2f}"
    )


def say(text: str, checks: Sequence[Mapping[str, Any]]) -> None:
    """A table on the terminal."""
    print(text)
    for check in checks:
        print(f"  {line(check)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="headway bench plan", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of a `headway bench async`")
    parser.add_argument("--gain", type=Path, default=RESULTS / "async_gain.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_check.json")
    options = parser.parse_args()
    end_well(lambda console: run(options))


def run(options: argparse.Namespace) -> None:
    """Everything, from the command line to the file.

    Raises:
        InputError: A folder or file is not what it should be.
    """
    reserve(options.out)
    record: dict[str, Any] = environment()
    measurement, arms = read_gain(options.gain)
    if options.folder is not None:
        record["runs"] = check_folder(options.folder)
    record["gain"] = {**measurement, "checks": check_gain(arms)}
    for source in sorted({check["rates_of"] for check in record.get("runs", {}).get("checks", [])}):
        mine = [each for each in record["runs"]["checks"] if each["rates_of"] == source]
        say(f"by the rates of the run with η = {source}", mine)
    say(f"by the limits in {options.gain.name}", record["gain"]["checks"])
    store(record, options.out)


if __name__ == "__main__":
    main()
