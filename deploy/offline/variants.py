"""`headway replay --set`: trains recorded batches with other settings of the learner too.

    checkpoint ─▶ the run's own settings ─▶ first batch ─┬▶ own settings ─▶ gradient, weights
                                                         └▶ each variant ─▶ compared with them

All learners are held in this process, and go on together batch by batch. The first batch compares
gradients at the same weights; those after it, at weights that part.
"""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deploy.config.changes import changes
from deploy.config.loader import completed, override
from deploy.config.run_config import RunConfig
from deploy.offline.replay import Basis, use_cores_of
from deploy.report.plots import COLOURS, new_figure, plain, save_picture
from deploy.runtime.console import Terminal
from headway.atomic_file import atomic_file
from headway.errors import InputError
from learner.config.objective import ObjectiveConfig
from learner.config.optimizer import OptimizerConfig
from learner.ranks.spec import LearnerSpec
from queues.broker.batch_queue import CHECKSUM
from queues.readers.recorded_batches import read_batch

if TYPE_CHECKING:
    from torch import Tensor

    from learner.diagnostics.batch_report import BatchReport

OWN = "the run's own"
ROUNDING = 1e-5
"""Distance of weights that float32 may make of one objective, written in two ways."""
MODELS = {"optimizer", "critic", "distillation"}
KEYS = sorted({*OptimizerConfig.model_fields, *ObjectiveConfig.model_fields} - MODELS)
"""Keys of `[learner]` that may differ: the others choose models, or how they are computed."""
FUNCTIONS = ("loss", "correction", "advantage")
"""Keys whose value has options in another key."""
LEFT_OUT = (
    "Generation is not repeated: all train the rollouts that the run's own policy sampled. A run "
    "with other settings samples others as soon as its weights part, so that nothing here tells "
    "of scores, of later rewards or of what its policy would explore."
)
PANELS = {
    "gradient_cosine": "cosine of gradient with the run's",
    "grad_norm": "gradient norm before clipping",
    "distance": "distance of weights / run's change",
    "ess": "effective sample size / tokens",
}


def parting(pairs: Iterable[tuple["Tensor", "Tensor"]]) -> dict[str, float | None]:
    """Compare a vector with the run's own, which comes first in each piece; sums are float64.

    `distance` is the norm of the difference over that of the run's own. None: one of them is 0.
    """
    totals = [0.0] * 4
    for piece, other_piece in pairs:
        own, other = piece.double(), other_piece.double()
        products = own @ own, other @ other, own @ other, (other - own) @ (other - own)
        totals = [sum(both) for both in zip(totals, map(float, products), strict=True)]
    size, other_size, product, apart = totals
    return {
        "norm": math.sqrt(other_size),
        "cosine": product / math.sqrt(size * other_size) if size and other_size else None,
        "distance": math.sqrt(apart / size) if size else None,
    }


def read_variants(basis: Basis, variants: Iterable[Sequence[str]]) -> dict[str, RunConfig]:
    """Return the recipe of each variant, given as settings KEY=VALUE, by its name.

    Options of a loss, or of another function, do not go on with another one in its place.

    Raises InputError for settings that only another run could have, or that change nothing.
    """
    from learner.objective.checks import check_objective

    config, plan, recipes = basis.config, basis.plan, {}
    if config.learner.ranks > 1:
        raise InputError(
            "variants are trained by one rank each, in this process, and the run has learner.ranks "
            f"= {config.learner.ranks}; replay without --set and --variant trains with all of them"
        )
    for session in basis.spec().earlier:
        same = (session.config, session.steps) == (config.objective, config.steps)
        if plan.first < session.end < plan.end and not same:
            raise InputError(
                f"the run changed its settings before batch {session.end}; choose --steps before "
                "it or from it on, so that a variant alone differs"
            )
    base = config.updated(queues={"allow_uncorrected": True})  # here it only shows what it does
    for settings in variants:
        document = base.model_dump(mode="json", exclude_none=True)
        for name in FUNCTIONS:
            if any(setting.startswith(f"learner.{name}=") for setting in settings):
                document["learner"].pop(f"{name}_options", None)
        for setting in settings:
            override(document, setting)
        recipe = completed(document, f"of the run with {', '.join(settings)}")
        _check_variant(base, recipe)
        check_objective(recipe.objective)
        recipes[", ".join(settings).replace("learner.", "")] = recipe
    return recipes


def _check_variant(config: RunConfig, variant: RunConfig) -> None:
    """Refuse a variant that differs from the run in another way than it may, or not at all."""
    names = [change.name for change in changes(config.settings(), variant.settings())]
    for name in names:
        section, key, *inner = [*name.split("."), ""]
        if section != "learner" or key not in KEYS or (key == "kl" and inner[0][:3] == "ref"):
            raise InputError(
                f"--set {name}: variants train the same rollouts with the same models, computed "
                f"alike; what may differ is learner.{', learner.'.join(KEYS)}"
            )
    if not names:
        raise InputError("--set and --variant: a variant has the settings that the run has itself")


class Trainee:
    """A learner of one rank that keeps the gradient of its newest batch."""

    def __init__(self, spec: LearnerSpec) -> None:
        from learner.ranks.rank import Rank

        self.rank = Rank(spec)
        self.gradient: dict[str, Tensor] = {}
        """Sum over the steps of the batch, by parameter, as they were applied: clipped."""
        self.rank.engine.watch_gradients(self._add)

    def _add(self, gradients: Mapping[str, "Tensor"]) -> None:
        for name, values in gradients.items():
            self.gradient[name] = self.gradient.get(name, 0) + values

    def train(self, basis: Basis, version: int) -> "BatchReport":
        """Train a recorded batch."""
        self.gradient = {}
        return self.rank.update(read_batch(basis.directory.path, version), version)

    def compared(self, own: "Trainee", begin: Mapping[str, "Tensor"]) -> dict[str, Any]:
        """Return how the gradient, and the weights' change since `begin`, part from the run's."""
        names, weights = {**own.gradient, **self.gradient}, self.rank.engine.stepped_weights()
        gradient = parting(
            (own.gradient.get(name, 0 * values), self.gradient.get(name, 0 * values))
            for name, values in names.items()
        )
        change = parting(
            (values.double() - begin[name], weights[name].double() - begin[name])
            for name, values in own.rank.engine.stepped_weights().items()
        )
        return {
            "gradient_cosine": gradient["cosine"],
            "change_norm": change["norm"],
            "change_cosine": change["cosine"],
            "distance": change["distance"],
        }


def compare_variants(
    basis: Basis, variants: Mapping[str, RunConfig], terminal: Terminal
) -> dict[str, Any]:
    """Train the batches with the run's settings and with each variant's; return the record.

    Unless its `equal` is true, the run's settings did not give the run's weights again.
    """
    import torch

    from weight_sync.publish.snapshot import Snapshot, wire_dtype

    plan, spec, rows, equal = basis.plan, basis.spec(), list[dict[str, Any]](), True
    use_cores_of(spec.config)
    snapshot, dtype = Snapshot(), wire_dtype(basis.config.weight_sync)
    steps = plan.first - plan.start + (plan.end - plan.first) * (1 + len(variants))
    with ExitStack() as stack, terminal.bar(steps, "loading the learners"):

        def begin(spec: LearnerSpec) -> Trainee:
            trainee = Trainee(spec)
            stack.callback(trainee.rank.close)
            return trainee

        own, done = begin(spec), 0
        for version in range(plan.start, plan.first):
            done, report = done + 1, own.train(basis, version)
            terminal.advance(done, f"batch {version}: loss {report.loss:.4f}")
        if plan.first > plan.start:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-")))
            saved = str(own.rank.save(scratch, plan.first))
            spec = replace(spec, checkpoint=saved, version=plan.first)
        with torch.random.fork_rng():  # a learner that is loaded seeds anew
            trainees = {OWN: own} | {
                name: begin(replace(spec, config=variant.objective, earlier=()))
                for name, variant in variants.items()
            }
        weights = {name: w.clone() for name, w in own.rank.engine.stepped_weights().items()}
        for version in range(plan.first, plan.end):
            for name, trainee in trainees.items():
                with ExitStack() as apart:
                    if trainee is not own:
                        apart.enter_context(torch.random.fork_rng())
                    done, report = done + 1, trainee.train(basis, version)
                terminal.advance(done, f"batch {version}, {name}: loss {report.loss:.4f}")
                figures = trainee.compared(own, weights)
                keys = ("loss", "ess", "fractions", "grad_norm")
                figures |= {key: getattr(report, key) for key in keys}
                rows.append({"version": version, "settings": name, **figures})
            checksum = snapshot.take(own.rank.weights(), dtype).result()
            equal = equal and checksum == basis.recorded[version][CHECKSUM]
    return {"run": basis.directory.path.name, "equal": equal, "left_out": LEFT_OUT, "batches": rows}


def describe(record: Mapping[str, Any]) -> list[str]:
    """Return what a record says beside its table, a line each."""
    rows = record["batches"]
    apart = {row["settings"] for row in rows if (row["distance"] or 0) > ROUNDING} | {OWN}
    alike = dict.fromkeys(row["settings"] for row in rows if row["settings"] not in apart)
    equal = "gave its weights again, bit for bit"
    differ = "did NOT give its weights again: what follows is not about them"
    return [
        f"the run's own settings {equal if record['equal'] else differ}",
        "the first batch compares gradients at the same weights, the others at weights that part",
        *(f"{name}: without effect on these batches, but for rounding" for name in alike),
        LEFT_OUT,
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each batch and each settings."""
    change = ("change_norm", "change_cosine", "distance")
    keys = ("grad_norm", "gradient_cosine", *change, "ess", "loss")
    names = ("gradient", "cosine", "change", "cosine", "distance", "ESS", "loss")
    shown = Table("batch", "settings", *names, "clipped, capped, rejected")
    for row in rows:
        shares = (f"{name} {share:.1%}" for name, share in row["fractions"].items() if share)
        values = ("–" if row[key] is None else f"{row[key]:.4g}" for key in keys)
        shown.add_row(str(row["version"]), row["settings"], *values, ", ".join(shares))
    return shown


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Write a record as `replay.json` and a picture, `replay.svg` and `.png`, into a folder."""
    figure, rows = new_figure(9.0, 6.0), record["batches"]
    names = dict.fromkeys(row["settings"] for row in rows)
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for index, name in enumerate(names):
            points = [(row["version"], row[key]) for row in rows if row["settings"] == name]
            width = max(1.0, 4.0 - index)  # a line shows beneath another that equals it
            style = {"marker": "o", "ms": width + 2, "lw": width, "label": plain(name)}
            axes.plot(*zip(*points, strict=True), color=COLOURS[index % len(COLOURS)], **style)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("batch", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    save_picture(figure, folder / "replay")
    with atomic_file(folder / "replay.json") as file:
        file.write(json.dumps(record, indent=1).encode())
