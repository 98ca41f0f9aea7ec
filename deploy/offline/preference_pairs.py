"""`headway pairs`: makes a preference set of answers that a policy gives and a model compares.

    prompts ─▶ n answers of each ─▶ a judge, asked in both orders, or rewards ─▶ comparisons.jsonl
    comparisons of all prompts ─▶ pairs.jsonl, report.json

`comparisons.jsonl` grows by a line for each prompt, so that the command, interrupted, goes on after
the prompts that it has.
"""

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import combinations, count, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from actors.config import ActorsConfig
from actors.engines.model_folder import load_tokenizer
from actors.environments.single_turn import CONVERSATION, opening
from actors.errors import RolloutFailed, ServiceAway
from actors.rewards.pairwise_judge import load_pair_judge
from actors.rollout.chat_rendering import renderer_for
from actors.rollout.stops import load_stops
from actors.sources.fingerprints import of_prompts
from actors.sources.preferences import PREFERENCES
from deploy.config.pairs import PairsConfig
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.offline.answer_comparison import judged
from deploy.offline.evaluate import load_policy, scored_by
from deploy.offline.evaluated_policy import find_policy
from deploy.offline.local_engine import Outcome, play_here, refuse_adapter
from deploy.preflight.inputs import Inputs
from deploy.preflight.machine_checks import check_runs_dir
from deploy.preflight.models import FILES, model_path, refuse_another_origin
from deploy.report.score_intervals import Verdict, position_bias
from deploy.report.tables import show_scores
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import ORIGIN_FILE, check_absent, making
from deploy.storage.jsonl import append_rows, mend_rows, read_rows, rewrite_rows
from headway.atomic_file import atomic_file
from headway.errors import InputError
from headway.recipe_section import resume_rule
from headway.user_code import beside_recipe
from queues.records import FinishReason, Prompt, Rollout

PAIRS_FILE, COMPARISONS_FILE, REPORT_FILE = "pairs.jsonl", "comparisons.jsonl", "report.json"
ASKING = {"url", "seconds", "attempts", "backoff_seconds", "at_once", "max_calls", "key_variable"}
"""Options of the judge that change no mark."""
ANEW = "begin anew with --replace, or go on with what it was made with"


class Comparison(NamedTuple):
    """Two answers of a prompt, by their indices, and which of them is better."""

    one: int
    other: int
    gap: float
    """The reward of the one less that of the other; of a judge 1, 0 or −1."""
    marks: Sequence[float] = ()
    """Marks of the judge for the answer that it read first: the one, and then the other."""
    principle: str = ""


def choose_pairs(
    comparisons: Iterable[Comparison], *, margin: float, choose: Literal["extremes", "adjacent"]
) -> list[tuple[int, int]]:
    """Return the pairs of a prompt, each a better and a worse answer; see `PairsConfig.choose`."""
    gaps = {(c.one, c.other): c.gap for c in comparisons}
    gaps |= {(other, one): -gap for (one, other), gap in gaps.items()}
    rank: Counter[int] = Counter()
    for (answer, _), gap in gaps.items():
        rank[answer] += (gap > 0) - (gap < 0)
    decided = [pair for pair, gap in gaps.items() if gap > 0 and gap >= margin]
    if choose == "adjacent":
        ranked = sorted(rank, key=lambda answer: (-rank[answer], answer))
        return [pair for pair in pairwise(ranked) if pair in decided]
    return sorted(decided, key=lambda pair: rank[pair[1]] - rank[pair[0]])[:1]


class Comparer:
    """Compares the answers to each prompt, by a judge or by their rewards."""

    def __init__(self, config: RunConfig, section: PairsConfig, model: str) -> None:
        """Load the tokenizer of a model folder, and judge and principles, if there are any."""
        self._judge = load_pair_judge("pairs.judge", section.judge)
        self._seed, self.principles = config.seed, _read_principles(section)
        self.section = section
        self._renderer, actors = renderer_for(load_tokenizer(model), config.actors), config.actors
        self._stops = load_stops(self._renderer, actors.stop, include=actors.include_stop)

    async def row(self, prompt: Prompt, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Return a line of `COMPARISONS_FILE`: every two answers that differ are compared.

        Raises RolloutFailed where a rollout or the judge failed.
        """
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        for failure in (outcome for outcome in outcomes if isinstance(outcome, RolloutFailed)):
            raise failure
        given = prompt.metadata.get(CONVERSATION, prompt.text)
        answers = [self._answer(prompt, rollout) for rollout in rollouts]

        async def compare(one: int, other: int) -> Comparison:
            if self._judge is None:
                gap = rollouts[one].task_reward - rollouts[other].task_reward
                return Comparison(one, other, gap)
            drawn = random.Random(f"{self._seed}/{prompt.prompt_id}/{one}/{other}")
            principle = drawn.choice(self.principles)
            marks = await judged(self._judge, prompt, answers[one], answers[other], principle)
            return Comparison(one, other, 2 * marks.outcome - 1, marks, principle)

        asked = []
        for pair in combinations(range(len(answers)), 2):
            with suppress(ValueError):  # the two are the same, or one is empty
                PREFERENCES.read((given, *(answers[index] for index in pair)))
                asked.append(compare(*pair))
        comparisons = await asyncio.gather(*asked)
        row = {"id": prompt.prompt_id, "prompt": given, "answers": answers}
        return row | {"comparisons": comparisons}

    def _answer(self, prompt: Prompt, rollout: Rollout) -> str:
        """Return an answer as rewards see it."""
        ended = rollout.finish_reason
        if rollout.turns > 1 or ended not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RolloutFailed(
                f"prompt {prompt.prompt_id!r}: a rollout has {rollout.turns} messages and ended by "
                f"{ended}, must be one answer"
            )
        begun = self._renderer.begun(opening(prompt))
        return self._stops.message(rollout.token_ids, rollout.prompt_length, begun, ended)


def _read_principles(section: PairsConfig) -> Sequence[str]:
    """Return the principles of a recipe, or the lines of their file; a judge needs at least one."""
    principles: Sequence[str] = section.principles
    if isinstance(principles, str):
        try:
            lines = beside_recipe(principles).read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(
                f"pairs.principles = {principles!r} cannot be read: {error}; give a list of texts, "
                "or a file with one a line"
            ) from None
        principles = [*filter(None, map(str.strip, lines))]
    if section.judge and not principles:
        raise InputError(
            f"pairs.principles = {section.principles!r} has no text; write by what the judge "
            'compares, as ["Prefer the answer that …"]'
        )
    return principles


def make_pairs(config: RunConfig, policy: str | None, terminal: Terminal, *, replace: bool) -> Path:
    """Make the preference set of a recipe, or finish one that was begun; return its file.

    `policy` names who answers, as for `find_policy`; None is the recipe's model. Raises InputError,
    before anything is written, for a set that exists and settings that do not go together, and
    RunFailed if every prompt failed or no comparison decides.
    """
    if (section := config.pairs) is None:
        raise InputError("the recipe has no [pairs] section, which says what compares answers")
    folder, runs_dir = config.preference_pairs, config.deploy.runs_dir
    check_absent(folder / PAIRS_FILE, replace=replace)
    check_runs_dir(config)
    if policy is None:
        refuse_adapter(config, "pairs")
    named = find_policy(policy or model_path(config), runs_dir)
    config = scored_by(config, reward=section.rewards or (), heldout_reward=())
    with (
        making(folder, replace=True),
        tempfile.TemporaryDirectory(prefix=".models-", dir=runs_dir) as copies,
    ):
        check_absent(folder / PAIRS_FILE, replace=replace)  # it may have been made meanwhile
        inputs = load_policy(config, named.folder(Path(copies) / "model"))
        comparer = Comparer(config, section, inputs.model_path)
        prompts = inputs.prompts.source.next(section.prompts)
        lasting = {
            key for key in ActorsConfig.model_fields if not resume_rule(ActorsConfig, key)[1]
        }
        include: Any = {"seed": True, "prompts": True, "actors": lasting, "pairs": True}
        exclude: Any = {"pairs": {"judge": ASKING, "choose": True, "margin": True}}
        origin = config.model_dump(mode="json", include=include, exclude=exclude)
        origin[FILES] = {
            **inputs.models,
            "model": named.checksum,
            "sequence of prompts": of_prompts(prompts),
            "list of principles": " · ".join(comparer.principles),
        }
        _begin(folder, json.dumps(origin), replace=replace, private=config.deploy.private)
        failed = _compare(config, inputs, prompts, comparer, folder / COMPARISONS_FILE, terminal)
        return _write(section, folder, failed, terminal)


def _begin(folder: Path, origin: str, *, replace: bool, private: bool) -> None:
    """Make the folder of a set, unless one was begun with the same settings."""
    if replace:
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / ORIGIN_FILE).exists():
        refuse_another_origin(folder, origin, ANEW, files=True)
    folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    (folder / ORIGIN_FILE).write_text(origin)


def _compare(
    config: RunConfig,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    comparer: Comparer,
    file: Path,
    terminal: Terminal,
) -> int:
    """Append the comparisons of all prompts that the file has not; return how many failed."""
    known = {row["id"] for row in mend_rows(file, terminal.say)}
    left = [prompt for prompt in prompts if prompt.prompt_id not in known]
    terminal.say(f"{len(known)} of {len(prompts)} prompts are compared")
    failures, ended = list[RolloutFailed](), count(len(known) + 1)

    async def compare(index: int, outcomes: Sequence[Outcome]) -> None:
        try:
            append_rows(file, [await comparer.row(left[index], outcomes)])
        except ServiceAway as away:
            raise RunFailed(f"{away}; once it answers, the same command goes on") from away
        except RolloutFailed as error:
            failures.append(error)
        terminal.advance(next(ended), f"{len(failures)} failed")

    samples = comparer.section.samples
    with terminal.bar(len(prompts), "loading the engine"):
        if left:
            play_here(config, inputs, left, samples=samples, then=compare)
    if failures:
        text = f"{len(failures)} of {len(prompts)} prompts failed; the first: {failures[0]}"
        if len(failures) == len(prompts):
            raise RunFailed(text)
        terminal.say(text)
    return len(failures)


def _write(section: PairsConfig, folder: Path, failed: int, terminal: Terminal) -> Path:
    """Write and show the report of the comparisons; write the pairs, RunFailed without any."""
    rows = read_rows(folder / COMPARISONS_FILE).intact
    compared = [[Comparison(*values) for values in row["comparisons"]] for row in rows]
    pairs = []
    for row, comparisons in zip(rows, compared, strict=True):
        for pair in choose_pairs(comparisons, margin=section.margin, choose=section.choose):
            texts = [row["answers"][index] for index in pair]
            if not isinstance(row["prompt"], str):
                texts = [[{"role": "assistant", "content": text}] for text in texts]
            pairs.append(dict(zip(PREFERENCES.fields, (row["prompt"], *texts), strict=True)))
    every = [comparison for comparisons in compared for comparison in comparisons]
    verdicts = [[Verdict(*c.marks) for c in comparisons if c.marks] for comparisons in compared]
    disagree = sum(not verdict.agrees for group in verdicts for verdict in group)
    ties = sum(c.gap == 0 or abs(c.gap) < section.margin for c in every) - disagree
    report: dict[str, Any] = {
        "prompts": len(rows),
        "failed": failed,
        "comparisons": len(every),
        "disagreements": disagree,
        "ties": ties,
        "pairs": len(pairs),
    }
    terminal.say(", ".join(f"{name} {number}" for name, number in report.items()))
    if any(verdicts):
        report |= (bias := position_bias([*filter(None, verdicts)]))
        shown = {"policies": [{"name": "position bias"}], "sets": {"judge": bias}}
        show_scores(shown, terminal.console)
    with atomic_file(folder / REPORT_FILE, durable=True) as file:
        file.write(json.dumps(report, indent=1).encode())
    if not pairs:
        raise RunFailed(
            "no comparison decides between two answers, so there are no pairs to write; raise "
            "pairs.samples or actors.temperature, or let something else compare"
        )
    rewrite_rows(folder / PAIRS_FILE, pairs)
    return folder / PAIRS_FILE
