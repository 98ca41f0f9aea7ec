"""Throughput against off-policyness: what each bound costs and gains, and what correction buys.

    headway bench staleness [RECIPE]                 # a first picture, within a quarter of an hour
    headway bench staleness [RECIPE] --full          # the study: hours; an interrupted one goes on
    headway bench staleness [RECIPE] --bounds 0,2,inf --seeds 0,1,2 --steps 200

Every run starts from one model, and its engines may hold all the groups that its bound allows. Of
--seeds are trained every bound with the loss and correction of the recipe, and every correction at
the bound of --stale; with --full all other pairs too, of the first seed. The steps of the first
picture are chosen by a short run. Checkpoints are scored by sampling, at the recipe's temperature.

The folder of --out gets the record, `staleness.json`, a page, `staleness.md`, and its pictures.
An existing folder is continued, from its runs or from the record alone.

Without actors.cores and learner.cores in the recipe, the learner gets half of this machine's cores
and the engines share the others.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Annotated, Any, ClassVar

import typer

from benchmarks.harness.comparison import (
    Comparison,
    ScoredOptions,
    in_turn,
    measure_scored,
    scored_plan,
)
from benchmarks.harness.record import PREDICTING, Record, code_checksum
from benchmarks.harness.study import Study, name_of, number, several
from benchmarks.harness.training_runs import Arm, vary
from benchmarks.loop import staleness_page
from benchmarks.loop.first_picture import SCORES_OF_RUN, fitted_steps
from benchmarks.loop.run_figures import read_run
from benchmarks.loop.staleness_cells import AUTO, HELD, SYNCHRONOUS, UNBOUNDED, held, in_order
from benchmarks.loop.staleness_conclusions import conclude
from deploy.config.run_config import RunConfig
from deploy.planner.calibration import LEAST_BATCHES, read_rates
from deploy.planner.rates import Rates
from deploy.planner.simulator import simulate
from deploy.planner.throughput import has_intervals, intervals, setting_of_run
from deploy.report.summary import WARM_UP
from headway.errors import HeadwayError, InputError

CORRECTIONS: Mapping[str, dict[str, Any]] = {
    "none": {"loss": "reinforce"},
    "tis": {"loss": "reinforce", "correction": "tis"},
    "mis": {"loss": "reinforce", "correction": "mis"},
    "cispo": {"loss": "cispo"},
    "decoupled_ppo": {"loss": "decoupled_ppo"},
    "loglinear": {"loss": "decoupled_ppo", "loss_options": {"proximal": "loglinear"}},
}
"""Settings of [learner]; `none` trains stale tokens as if they were new, and `loglinear` takes the
proximal policy between the others by the version of each token (A-3PO)."""
CELLS = (dict(CORRECTIONS), HELD)
"""Settings in which the cells differ."""
PLAIN = {"correction": "none", "loss_options": {}, "correction_options": {}}
FIRST = {"bounds": ("0", "2", "8"), "corrections": ("none",), "seeds": (0,)}
FULL = {
    "bounds": ("0", "1", "2", "4", "8", "16", UNBOUNDED, AUTO),
    "corrections": tuple(CORRECTIONS),
    "seeds": (0, 1, 2, 3, 4),
}
REFERENCE = "2"
"""The bound whose runs the others are predicted from; the largest where it is not asked for."""
FILE = "staleness.json"


def bound(text: str) -> str:
    """Parse a bound: a whole number or a key of HELD; raises `typer.BadParameter`."""
    return text if text in HELD else str(number(0)(text))


class StalenessOptions(ScoredOptions):
    """Options of `headway bench staleness`."""

    full: Annotated[
        bool, typer.Option("--full", help="Every bound and correction, and five seeds.")
    ] = False
    minutes: Annotated[
        float, typer.Option(min=0, help="Of all runs without --full or --steps; 0: any number.")
    ] = 15
    bounds: Annotated[
        Sequence[str], several(bound, f"Values of max_staleness, {AUTO} too; {UNBOUNDED}: none.")
    ] = ()
    corrections: Annotated[
        Sequence[str] | None, several(name_of(CORRECTIONS), "Compared at --stale; '': none.")
    ] = None
    stale: Annotated[int, typer.Option(min=1, help="Bound of the runs with corrections.")] = 8
    seeds: Annotated[Sequence[int], several(number(0), "Of prompts and sampling.")] = ()
    problems: Annotated[int, typer.Option(help="Of the last score; 0: as the recipe has it.")] = 0
    target: Annotated[
        float | None, typer.Option(help="Score whose time is taken; 0.9 of the gain of η = 0.")
    ] = None
    sampled: ClassVar[bool] = True

    def resolved(self) -> "StalenessOptions":
        """Return the options with what was not chosen."""
        usual = FULL if self.full else FIRST
        chosen = {
            "bounds": self.bounds or usual["bounds"],
            "corrections": usual["corrections"] if self.corrections is None else self.corrections,
            "seeds": self.seeds or usual["seeds"],
            "minutes": 0 if self.full or self.steps else self.minutes,
        }
        return self.model_copy(update=chosen)

    @property
    def unleased(self) -> int:
        """The largest number of batches that a run trains when nothing is leased any more."""
        return 1 + max([*map(held, self.bounds), self.stale if self.corrections else 0])


def own_correction(config: RunConfig) -> str:
    """Return the name of the recipe's own loss and corrections."""
    loss, corrections = config.objective.loss, config.objective.corrections
    plain = ["none"] if loss == "reinforce" and not corrections else []
    return "+".join(plain or [*([] if loss == "reinforce" else [loss]), *corrections])


def cells(options: StalenessOptions, own: str) -> tuple[list[tuple[str, str]], ...]:
    """Return the pairs of bound and correction of every seed, and those of the first alone."""
    stale, others = str(options.stale), [name for name in options.corrections or () if name != own]
    bounds = sorted({*options.bounds, *([stale] if others else [])}, key=in_order)
    core = [(bound, own) for bound in bounds] + [(stale, name) for name in others]
    once = {SYNCHRONOUS, stale, AUTO}
    rest = [bound for bound in bounds if options.full and bound not in once]
    return core, [(bound, name) for bound in rest for name in others]


def reference(options: StalenessOptions, own: str) -> str:
    """Return the bound whose rates predict the runs of the same seed."""
    bounds = [bound for bound, correction in cells(options, own)[0] if correction == own]
    given = [bound for bound in bounds if bound != AUTO]
    return REFERENCE if REFERENCE in bounds else (given or bounds)[-1]


def plan(options: StalenessOptions) -> Comparison[StalenessOptions]:
    """Return the runs of every seed; raises `InputError` where they cannot be measured."""
    options = options.resolved()
    file = options.out and options.out / FILE
    record = json.loads(file.read_text()) if file and file.exists() else {}
    if options.minutes and record:
        fitted = {name: record[name] for name in ("steps", "score_every")}
        options = options.model_copy(update={**fitted, "minutes": 0})
    plan = scored_plan(options, "staleness", lambda base: [])
    if plan.base.steps < (least := LEAST_BATCHES + options.unleased):
        raise InputError(
            f"--steps {plan.base.steps} must be at least {least}: figures need {LEAST_BATCHES} "
            f"batches, and the last {options.unleased} of a run are trained when nothing is leased "
            "any more"
        )
    core, of_first = cells(options, own_correction(plan.base))
    parts = [(core, seed) for seed in options.seeds] + [(of_first, min(options.seeds))]
    arms = [
        in_turn([arm_of(plan.base, *cell, seed) for cell in part], position)
        for position, (part, seed) in enumerate(parts)
    ]
    plan = replace(plan, arms=arms, stored=record.get("arms", ()))
    refuse_another(plan, record)
    return plan


def refuse_another(plan: Comparison[StalenessOptions], record: Record) -> None:
    """Raise `InputError` for a record, or a run, of another recipe or other code."""
    codes = {run["environment"]["code"] for run in plan.stored}
    trained = [arm for arms in plan.arms for arm in arms if arm.directory.summary_file.exists()]
    codes |= {(arm.environment() or {}).get("code") for arm in trained}
    is_other = bool(codes - {code_checksum()})
    if is_other or record.get("recipe_key") not in (None, plan.recipe_key(*CELLS)):
        facts = [(key, record[key], value) for key, value in plan.facts().items() if key in record]
        changed = [f"{key} {old!r} and not {new!r}" for key, old, new in facts if old != new]
        other = "other code" if is_other else "another recipe, or of other code beside it"
        shown = f" ({', '.join(changed)})" if changed else ""
        raise InputError(
            f"{plan.folder} has figures of {other}{shown}, which cannot be compared; name another "
            "--out"
        )


def arm_of(base: RunConfig, bound: str, correction: str, seed: int) -> Arm:
    """Return the recipe with a bound and a correction; its engines may hold all that is allowed."""
    groups = (held(bound) + 1) * base.prompts.groups_per_batch
    own = correction == own_correction(base)
    config = vary(
        base.model_copy(update={"seed": seed}),
        f"{'' if own else f'{correction}-'}eta{bound}-seed{seed}",
        queues={
            "max_staleness": {UNBOUNDED: base.steps, AUTO: AUTO}.get(bound) or int(bound),
            "staleness_ceiling": None,
            "window": groups,
            "allow_uncorrected": True,
            **({} if bound == AUTO else {"ess_target": None}),
        },
        learner={} if own else {**PLAIN, **CORRECTIONS[correction]},
        actors={
            "max_concurrent_rollouts": -(-groups * base.prompts.group_size // base.actors.count)
        },
    )
    title = f"seed {seed} · η = {bound} · {correction}"
    return Arm(name=bound, kind=correction, seed=seed, config=config, title=title)


def measure(unfitted: Comparison[StalenessOptions]) -> Iterator[Record]:
    options, fitted = unfitted.options, unfitted
    if options.minutes:
        arm = arm_of(unfitted.base, SYNCHRONOUS, own_correction(unfitted.base), options.seeds[0])
        least = LEAST_BATCHES + options.unleased
        steps = fitted_steps(unfitted, arm, options.minutes * 60, least)
        chosen = {"steps": steps, "score_every": ceil(steps / SCORES_OF_RUN), "minutes": 0}
        fitted = plan(options.model_copy(update={**chosen, "out": unfitted.folder}))
    base, options = fitted.base, fitted.options
    facts = {
        **fitted.facts(),
        "recipe_key": fitted.recipe_key(*CELLS),
        "about": about(base),
        "own": own_correction(base),
        "reference": reference(options, own_correction(base)),
        "stale": options.stale,
        "score_every": options.score_every,
        "corrections": dict(CORRECTIONS),
        "batch": [base.prompts.groups_per_batch, base.prompts.group_size],
        "heldout": base.heldout and base.heldout.size,
    }
    if not fitted.stored:
        yield {**facts, "arms": [], "failed": []}  # the steps, from which it can be continued
    for runs in measure_scored(fitted, read_arm):
        predict_seeds(fitted, runs["arms"])
        yield {**facts, **runs}


def about(config: RunConfig) -> str:
    """Return what is trained by which data, and how fast it learns."""
    tiny, learner = config.model.tiny, config.learner
    size = (
        f"`{config.model.path}`" if tiny is None else f"{tiny.layers} layers of {tiny.hidden_size}"
    )
    model = f"a model of {size}{'' if config.sft is None else ', warm-started'}"
    rewards = ", ".join(f"`{reward}`" for reward in config.actors.reward)
    return (
        f"Prompts of `{config.prompts.source}`, rewarded by {rewards}; {model}; "
        f"{learner.optimizer} at {learner.learning_rate:g}."
    )


def read_arm(arm: Arm) -> Record:
    """Return the figures of a run, of its batches before the last lease."""
    return read_run(arm.directory, leased_only=True)


def predict_seeds(plan: Comparison[StalenessOptions], figures: Sequence[Record]) -> None:
    """Add predictions to the figures of bounds, by the rates of the reference run of their seed.

    Those that other code predicted are predicted again, while the reference run is there.
    """
    predictor = code_checksum(PREDICTING)
    runs = {(run["kind"], run["name"], run["seed"]): run for run in figures}
    own = own_correction(plan.base)
    name = reference(plan.options, own)
    for arms in plan.arms:
        bounds = [arm for arm in arms if arm.kind == own and arm.key in runs and arm.name != AUTO]
        old = [arm for arm in bounds if runs[arm.key].get("predicted_by") != predictor]
        sources = [arm for arm in bounds if arm.name == name and arm.directory.path.exists()]
        for source in sources if old else ():
            try:
                rates = read_rates(source.directory, first=plan.base.steps).rates
                for arm in old:
                    predicted = predict(arm, rates, WARM_UP + runs[arm.key]["batches"])
                    runs[arm.key] |= {**predicted, "predicted_by": predictor}
            except HeadwayError as error:
                print(f"nothing is predicted for seed {source.seed}: {error}", flush=True)


def predict(arm: Arm, rates: Rates, batches: int) -> Record:
    """Return samples per second and mean lag over so many batches of a run, by measured rates."""
    setting = setting_of_run(arm.config, batches)
    names = ("samples_per_second", "lag_mean")
    if has_intervals(arm.config):
        predicted = intervals(setting, rates, seed=arm.seed)
        speed, lag = (predicted[name][1] for name in names)
    else:
        outcome = simulate(setting, rates, seed=arm.seed)
        speed, lag = (getattr(outcome, name) for name in names)
    return {"simulated": speed, "predicted_lag": lag}


STUDY = Study(
    name="staleness",
    options=StalenessOptions,
    plan=plan,
    in_folder=True,
    continued=True,
    file=FILE,
    measure=measure,
    conclude=conclude,
    table=staleness_page.table,
    brief=staleness_page.brief,
    figures=staleness_page.write,
)
