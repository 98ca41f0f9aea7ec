"""The page of the study of staleness, readable alone: a pure function of its record."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.record import Record
from benchmarks.harness.study import markdown_table, text_table
from benchmarks.harness.training_runs import commits, conditions
from benchmarks.loop.seed_intervals import LEAST_SEEDS, Estimate
from benchmarks.loop.staleness_cells import (
    HELD,
    SYNCHRONOUS,
    UNBOUNDED,
    Cell,
    at_stale,
    eta,
    interpolated,
    is_compared,
    of_bounds,
)
from benchmarks.loop.staleness_conclusions import GAIN, conclude
from benchmarks.loop.staleness_pictures import draw, pictures
from deploy.report.staleness_window import BUSY
from deploy.report.summary import WARM_UP
from queues.config import DEFAULT_CEILING

Columns = Mapping[str, tuple[str, str]]
"""Figure of a cell and its format, with ± for an interval, by the title of its column."""
SPEED: Columns = {
    "η": ("bound", ""),
    "samples/s": ("samples_per_second", "±.1f"),
    "× η = 0": ("speedup", "±.2f"),
    "tokens a rollout": ("tokens_per_rollout", ".1f"),
    "predicted samples/s": ("simulated", ".1f"),
    "learner idle": ("learner_idle", ".0%"),
    "actors idle": ("actors_idle", ".0%"),
    "updates": ("pauses", ".1%"),
    "limit": ("limit", ""),
}
LAG: Columns = {
    "η": ("bound", ""),
    "mean lag": ("lag_mean", "±.2f"),
    "predicted": ("predicted_lag", ".2f"),
    "5 %": ("lag_p5", ".1f"),
    "50 %": ("lag_p50", ".1f"),
    "95 %": ("lag_p95", ".1f"),
    "largest": ("lag_max", "d"),
    "batches in engines": ("batches_in_engines", ".1f"),
    "waiting": ("batches_ready", ".1f"),
    "ESS": ("ess", "±.4f"),
    "KL": ("kl", "±.1e"),
}
LEARNING: Columns = {
    "η": ("bound", ""),
    "score": ("score", "±.3f"),
    "less η = 0": ("score_less_synchronous", "±+.3f"),
    "less η = 0, equal time": ("score_in_time_less_synchronous", "±+.3f"),
    "seeds at target": ("reached", ""),
    "batches to target": ("batches_to_target", "±.0f"),
    "seconds to target": ("seconds_to_target", "±.0f"),
}
CORRECTION: Columns = {
    "correction": ("correction", ""),
    **{title: LEARNING[title] for title in ("score", "less η = 0", "less η = 0, equal time")},
    "less none": ("score_less_uncorrected", "±+.3f"),
    "samples/s": SPEED["samples/s"],
    "tokens a rollout": SPEED["tokens a rollout"],
    "mean lag": ("lag_mean", ".2f"),
    "ESS": ("ess", ".4f"),
    "KL": ("kl", ".1e"),
    "cut": ("cut", ".2%"),
}
BRIEF: Columns = {
    "η": ("bound", ""),
    "samples/s": SPEED["samples/s"],
    "mean lag": ("lag_mean", ".2f"),
    "ESS": ("ess", ".3f"),
    "limit": ("limit", ""),
    **{title: LEARNING[title] for title in ("score", "seeds at target", "seconds to target")},
}
TERMINAL: Columns = {
    "η": ("bound", ""),
    **CORRECTION,
    "limit": ("limit", ""),
    "seconds to target": LEARNING["seconds to target"],
}
TABLES: Sequence[tuple[str, Callable[[Record], Sequence[Cell]], Columns, Sequence[str]]] = (
    ("Throughput", of_bounds, SPEED, ("throughput", "throughput_by_lag")),
    ("Off-policyness", of_bounds, LAG, ("lag",)),
    ("Learning", of_bounds, LEARNING, ("score_by_batches", "score_by_seconds")),
    ("Corrections", at_stale, CORRECTION, ("corrections", "map")),
)
"""Heading, cells, columns and pictures of each part of the page."""
TERMS = f"""\
- **η** (`queues.max_staleness`): the bound on staleness. No token trains that was sampled by
  weights more than η versions, of a batch each, older than those it trains, unless the recipe has
  `on_overdue = "train"`. η = 0 is synchronous, on the devices that the others have: engines and
  learner wait for each other, where `headway bench async` gives all of them to both by turns. With
  `auto` the run looks for the narrowest window that costs no throughput, of at most
  {DEFAULT_CEILING} versions. Corrections are not compared at η = 0, where a batch of one step has
  ratios of 1 and the same gradient with all of them.
- **Idle**: the share of the time in which the learner waits for a batch; in which an engine has no
  rollout. Both wait at once while a batch is handed over and new weights are sent.
- **Updates**: the share of the time from asking the engines to pause until they go on with new
  weights; the step that they end meanwhile is part of it.
- **Lag** of a token: the versions between the weights that sampled it and those that it trained.
  Percentiles are over tokens, and means over seeds; the largest is that of all batches and seeds.
- **Batches in engines**: running rollouts over those of a batch; groups of which some rollouts have
  ended, and the batch in training, are neither there nor waiting.
- **ESS**: effective sample size (Kish) of the ratios of the probabilities of a token, trained to
  sampling policy, before any correction; mean over batches, as a share of the tokens. **KL**:
  estimated from the same ratios, from the sampling to the trained policy, in nats a token. **Cut**:
  share of the tokens that the loss or the correction clipped, capped or rejected, of the most
  frequent of these.
- **Limit** of throughput: the learner where it idles less than {100 * BUSY:.0f} % of the time; else
  generation where the engines do and no larger bound trains {100 * BUSY:.0f} % more; else updates
  where new weights stop the engines {100 * BUSY:.0f} % of the time; else admission.
- **Predicted**: simulated with the rates that were measured in one run of the same seed.
- **Seconds** count from the first wait for a batch, without the start of processes. **Target**: a
  time is that of the first crossing between two scores, and is given where every seed reaches the
  target, since the mean of those that do leaves out the slow ones.
- **Brackets**: Student's 95 % interval of the mean over seeds, claimed from {LEAST_SEEDS} seeds
  on, each alone; ratios have a geometric mean. Ratios and differences are of runs of one seed. A
  seed is of prompts and sampling: all runs share first weights, held-out problems and machine,
  whose chance no interval holds."""
ONE_TASK = (
    "It is of one task, one model and one machine: `headway bench staleness RECIPE` measures "
    "another."
)


def shown(cell: Cell, name: str, form: str) -> str:
    """Return a figure of a cell, with the seeds that have it where others have not."""
    value = cell[name]
    if value is None or isinstance(value, str):
        return eta(value) if value == UNBOUNDED else value or "–"
    if not isinstance(value, Estimate):
        return f"{value:{form}}"
    text = value.text(form[1:]) if form.startswith("±") else f"{value.mean:{form}}"
    seeds = len(cell["seeds"])
    return text if value.seeds == seeds else f"{text} ({value.seeds} of {seeds} seeds)"


def rows(cells: Sequence[Cell], columns: Columns) -> list[list[str]]:
    """Return the rows of a table, a cell each."""
    return [[shown(cell, *column) for column in columns.values()] for cell in cells]


def page(record: Record, stem: str = "staleness") -> str:
    """Return the page of a record, with the pictures whose names begin with `stem`."""
    record = record | conclude(record)
    drawn, parts = pictures(record), []
    for heading, choose, columns, names in TABLES:
        cells = choose(record)
        if not cells:
            continue
        parts += [f"## {heading}", markdown_table([*columns], rows(cells, columns))]
        parts += [
            f"![{name.replace('_', ' ').capitalize()}]({stem}_{name}.svg)"
            for name in names
            if name in drawn
        ]
    doubts = "\n".join(f"- {line}" for line in [*record["doubts"], ONE_TASK, *left_out(record)])
    return "\n\n".join(
        [
            f"# Staleness: what it buys, and what it costs\n\n{done(record)}",
            "## Conclusions\n\n" + "\n".join(f"- {line}" for line in record["sentences"]),
            f"## What it cannot tell\n\n{doubts}",
            f"## Terms\n\n{TERMS}",
            *parts,
            "",
        ]
    )


def left_out(record: Record) -> list[str]:
    """Return what failed, and the commits and the load of the machine, a line each."""
    arms, failed = (
        [{**run, "name": f"{eta(run['name'])} {run['kind']}"} for run in record[key]]
        for key in ("arms", "failed")
    )
    return [*conditions(record | {"failed": failed}).splitlines(), *failures(arms)]


def done(record: Record) -> str:
    """Return what was measured, how and where."""
    machine, (groups, rollouts) = record["machine"], record["batch"]
    arms, measured = record["arms"], [commit[:8] for commit in commits(record["arms"])]
    once = sum(not is_compared(record, run["name"], run["kind"]) for run in arms)
    seeds = ", ".join(map(str, sorted({run["seed"] for run in arms})))
    about = record.get("about")
    return (
        f"    {record['command']}\n\n"
        f"{len(arms)} runs of `{record['recipe']}`, seeds {seeds}"
        f"{f' ({once} of them of one seed, for the map)' if once else ''}, at commit "
        f"{', '.join(measured)}, {record['time'][:10]}, on {machine['cores']} cores "
        f"({machine['cpu']}): each trains {record['steps']} batches of {groups} × {rollouts} "
        f"rollouts, from the same model, on the same devices ({record['devices']})."
        f"{f' {about}' if about else ''}\n\n"
        "Engines may hold all the groups that the bound allows, so that lag is not limited by "
        f"their slots; without a bound as many as with η = {HELD[UNBOUNDED]}. Throughput and lag "
        f"are measured from batch {WARM_UP + 1} to the last lease. Scores are of samples, every "
        f"{record['score_every']} batches for the same {record['heldout']} held-out problems, and "
        f"after the same batches for {record['problems']}. {ends(record)}\n\n"
        f"Bounds are compared with the recipe's own correction, `{record['own']}`"
        f"{alternatives(record)}."
    )


def ends(record: Record) -> str:
    """Return what equal time and target are."""
    seconds, target = record["equal_seconds"], record["target_score"]
    trained = [
        interpolated(
            [(at, n) for (at, _), n in zip(run["curve"], run["versions"], strict=True)], seconds
        )
        for run in record["arms"]
        if run["name"] == SYNCHRONOUS
    ]
    text = f"Equal time: {seconds:.0f} s, the end of the fastest run that is compared"
    if trained:
        text += f", when η = 0 has trained {fmean(trained):.0f} batches"
    if target is not None:
        chosen = f", {GAIN} of the gain of η = 0" if record["target"] is None else ""
        text += f"; target: a score of {target:.3f}{chosen}"
    return f"{text}."


def alternatives(record: Record) -> str:
    """Return the other corrections with their settings of [learner]."""
    others = "; ".join(
        f"`{name}`: " + ", ".join(f"{key} = {value}" for key, value in flat(settings).items())
        for name, settings in record["corrections"].items()
        if name != record["own"] and any(run["kind"] == name for run in record["arms"])
    )
    untuned = "Their further options are the defaults; none was tuned"
    return f", and at η = {record['stale']} it with {others}. {untuned}" if others else ""


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of sections among them, by key."""
    single: dict[str, Any] = {}
    for key, value in settings.items():
        single |= value if isinstance(value, dict) else {key: value}
    return single


def table(record: Record) -> str:
    """Return the main figures of every cell, the conclusions and the doubts for the terminal."""
    record = record | conclude(record)  # of a stored one, estimates are lists
    text = text_table([*TERMINAL], rows(record["cells"], TERMINAL))
    return "\n".join([text, *record["sentences"], *record["doubts"], *left_out(record)])


def brief(record: Record) -> str:
    """Return the main figures of the bounds as Markdown."""
    record = record | conclude(record)
    target = record["target_score"]
    seeds = len({run["seed"] for run in record["arms"]})
    aim = "" if target is None else f"; the target is a score of {target:.3f}"
    return (
        f"{markdown_table([*BRIEF], rows(of_bounds(record), BRIEF))}\n\n"
        f"Scores are held-out ones after {record['steps']} batches, means of {seeds} seed(s) with "
        f"95 % intervals{aim}. Without a bound as many batches are live as with η = "
        f"{HELD[UNBOUNDED]}."
    )


def write(record: Record, folder: Path) -> None:
    """Write the page and its pictures."""
    draw(record, folder)
    (folder / "staleness.md").write_text(page(record))
