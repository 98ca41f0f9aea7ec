"""Opens the prompt sources of a recipe: training prompts, and the held-out problems they lack.

Every function raises InputError for sources and problems that cannot be used.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from actors.config import HeldoutSet
from actors.engines.model_folder import load_tokenizer
from actors.environments.load_environment import shipped_opening
from actors.environments.single_turn import opening
from actors.errors import SourceFailed
from actors.rollout.chat_rendering import renderer_for
from actors.sources.filters import shorter, within_tokens, without_heldout
from actors.sources.fingerprints import go_on, of_prompts, watched
from actors.sources.load_source import load_source
from actors.sources.mixture import Mixture
from actors.sources.protocol import RestartableSource, TableSource
from deploy.config.evaluation_schedule import PlannedEvaluation, plan
from deploy.config.run_config import RunConfig
from headway.errors import InputError
from queues.readers.issued_prompts import heldout_problems, stored_cursor
from queues.records import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPrompts:
    """The training source of a recipe, and the held-out problems."""

    source: RestartableSource
    first: list[Prompt]
    """Prompts of the first batch, which the source gives again."""
    of_parts: list[Prompt]
    """One prompt of each part of a mixture; empty for other sources."""
    problems: list[Prompt]
    """Held-out problems, as many as the largest evaluation needs; of a resumed run those that it
    began with."""
    evaluations: list[PlannedEvaluation]
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Problems of the sets of heldout.sets, by name."""
    rows: Sequence[Prompt] = ()
    """Those of all rows of the training source, named by file and row; empty for other sources."""

    @property
    def sample(self) -> list[Prompt]:
        """All held-out problems, and the first prompts."""
        return [*self.heldout, *self.first]

    @property
    def heldout(self) -> list[Prompt]:
        """All held-out problems, those of sets with a name too."""
        return [*self.problems, *chain.from_iterable(self.sets.values())]


def open_prompts(
    config: RunConfig, *, model_path: str | None = None, begun: Path | None = None
) -> OpenedPrompts:
    """Open the sources of training prompts and of held-out problems.

    `model_path` names the model whose tokens `prompts.max_tokens` counts; None leaves no prompt out
    for its length. `begun` is the folder of a run with a ledger, which is resumed: the source goes
    on where it was.
    """
    prompts = config.prompts
    evaluations, problems = load_heldout(config)
    sets = load_sets(config)
    recorded = heldout_problems(begun) if begun else []
    own = config.heldout is not None and config.heldout.source is None
    drawn = load_source(
        prompts.source,
        options=prompts.source_options,
        seed=config.seed,
        split="train",
        heldout_size=len(problems) if own else 0,
    )
    source: RestartableSource = without_heldout(
        watched(drawn, prompts.source_options),
        frozenset(p.text for p in chain(problems, recorded, *sets.values())),
    )
    if prompts.max_tokens is not None and model_path is not None:
        actors, tokenizer = config.actors, load_tokenizer(model_path)
        renderer = renderer_for(tokenizer, actors)
        fits = shorter(renderer, prompts.max_tokens, shipped_opening(actors) or opening)
        source = within_tokens(source, fits)
        kept = [problem for problem in problems if fits(problem)]
        if problems and not kept:
            raise InputError(
                f"prompts.max_tokens = {prompts.max_tokens}: every held-out problem is longer"
            )
        problems = kept
        sets = {name: [p for p in prompts if fits(p)] for name, prompts in sets.items()}
    with _source_failures_named():
        beginning = source.cursor()
        first = source.next(prompts.groups_per_batch)
        source.restore(beginning)
        of_parts = drawn.one_of_each() if isinstance(drawn, Mixture) else []
        _check_teachers(config, [*of_parts, *first])
        if begun and (cursor := stored_cursor(begun)) is not None:
            go_on(source, cursor, on_change=prompts.on_change)
    return OpenedPrompts(
        source=source,
        first=first,
        of_parts=of_parts,
        problems=_as_begun(config, problems, recorded),
        evaluations=evaluations,
        sets=sets,
        rows=drawn.table() if isinstance(drawn, TableSource) else (),
    )


def _check_teachers(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse a teacher of prompts that the source does not have."""
    ids = [prompt.prompt_id for prompt in prompts]
    distillation = config.learner.distillation
    for teacher in distillation.teachers if distillation else ():
        for beginning in teacher.prompts:
            if not any(prompt_id.startswith(beginning) for prompt_id in ids):
                raise InputError(
                    f"learner.distillation.teachers: {teacher.path!r} teaches the prompts whose "
                    f"ids begin with {beginning!r}, and no id does; ids are such as "
                    f"{', '.join(map(repr, ids[:3]))}"
                )


def load_heldout(config: RunConfig) -> tuple[list[PlannedEvaluation], list[Prompt]]:
    """Plan the evaluations of a run, and load the problems of the largest one."""
    section = config.heldout
    if section is None:
        return [], []
    planned = plan(section, steps=config.steps, temperature=config.actors.temperature)
    size = max(evaluation.size for evaluation in planned)
    setting, source_name, options = config.heldout_source
    return planned, _draw_heldout(config, source_name, options, size, setting)


def load_sets(config: RunConfig) -> dict[str, list[Prompt]]:
    """Load the problems of the held-out sets of a recipe that have names."""
    section, sets = config.heldout, {}
    if section is None:
        return {}
    for name, options in section.sets.items():
        chosen = HeldoutSet(**options)
        size = chosen.size or section.final_size or section.size
        setting = f"heldout.sets.{name}.source"
        sets[name] = _draw_heldout(config, chosen.source, chosen.options, size, setting)
    return sets


def heldout_texts(config: RunConfig) -> frozenset[str]:
    """Return the texts of all held-out problems of a recipe, which nothing may train."""
    problems = chain(load_heldout(config)[1], *load_sets(config).values())
    return frozenset(problem.text for problem in problems)


def _draw_heldout(
    config: RunConfig, name: str, options: dict[str, Any], size: int, setting: str
) -> list[Prompt]:
    """Draw held-out problems of a source; the same each time."""
    source = load_source(
        name,
        options=options,
        seed=config.seed,
        split="heldout",
        heldout_size=size,
        setting=setting,
    )
    with _source_failures_named("held-out problems: "):
        problems = without_heldout(source, frozenset()).next(size)
    repeated, times = Counter(problem.prompt_id for problem in problems).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"held-out problems: {name!r} gives the prompt_id {repeated!r} to {times} of them, "
            "but each must have its own: their samples are told apart by it"
        )
    return problems


def _as_begun(config: RunConfig, problems: list[Prompt], recorded: list[Prompt]) -> list[Prompt]:
    """Return the held-out problems that a resumed run began with; else the present ones."""
    before, now = of_prompts(recorded), of_prompts(problems[: len(recorded)])
    if before == now:
        return problems
    setting, name, _ = config.heldout_source
    if config.prompts.on_change == "refuse":
        raise InputError(
            f"{setting} = {name!r}: the held-out problems are not those that the run began "
            f"with ({before} before, {now} now), so that it could train what it is scored on. Put "
            "them back, or keep those of its ledger and train neither: "
            '--set prompts.on_change="new_epoch"'
        )
    return recorded


@contextmanager
def _source_failures_named(prefix: str = "") -> Iterator[None]:
    """Report what a source does wrong as bad input."""
    try:
        yield
    except SourceFailed as error:
        raise InputError(f"{prefix}{error}") from error
