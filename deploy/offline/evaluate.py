"""`headway eval`: scores a model, or a version of a run, on the held-out sets of a recipe.

    policy ─▶ one engine in this process ─▶ rollouts of every problem ──┐
    the other policy, if there is one ─▶ rollouts, in its own engine ───┼─▶ scores ─▶ document
    judge, asked in both orders ─▶ verdicts ────────────────────────────┘

Prompts are rendered, played and scored as in a run, by `actors.heldout_reward`. As in a run, what
fails is counted and left out of the scores.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from actors.config import OWN_SET
from actors.engines.model_folder import load_tokenizer
from actors.errors import RolloutFailed
from actors.rewards.pairwise_judge import load_pair_judge
from actors.shipped import REWARDS
from actors.sources.fingerprints import of_prompts
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.offline.answer_comparison import Played, Sample, compare
from deploy.offline.evaluated_policy import Policy
from deploy.offline.local_engine import play_here
from deploy.preflight.inputs import Inputs, check_scoring, load_inputs
from deploy.preflight.models import reward_model_paths
from deploy.report.score_intervals import Score, best_at_k, mean_score, pass_at_k, win_rate
from deploy.storage.jsonl import Say
from headway.atomic_file import atomic_file
from headway.errors import InputError
from learner.config.learner import ModelConfig
from queues.records import Prompt, Rollout

T = TypeVar("T")


def evaluate(
    config: RunConfig, policies: Sequence[Policy], *, samples: int, best_of: str | None, say: Say
) -> tuple[Path, dict[str, Any]]:
    """Score the first policy, against the second if there is one; return file and document.

    Each problem has so many `samples`: one is greedy, several are sampled at `actors.temperature`,
    and the reward `best_of`, if given, chooses among them.

    Raises InputError, before anything is written, for settings and recipes that do not go together,
    and RunFailed if nothing of a set could be scored.
    """
    if config.heldout is None:
        raise InputError(
            "the recipe has no section [heldout], which says what its held-out problems are"
        )
    judge = load_pair_judge("heldout.judge", config.heldout.judge)
    config = _scoring(config, best_of, samples)
    folder = config.deploy.runs_dir / "evaluations"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error}") from None
    with tempfile.TemporaryDirectory(prefix=".models-", dir=folder) as copies:
        paths = [policy.folder(Path(copies) / str(n)) for n, policy in enumerate(policies)]
        inputs = [load_policy(config, path) for path in paths]
        sets = {OWN_SET: inputs[0].prompts.problems, **inputs[0].prompts.sets}
        played = []
        for policy, loaded in zip(policies, inputs, strict=True):
            say(f"{policy.name} plays {', '.join(sets)}")
            played.append(_play(config, loaded, sets, samples, best_of))
    named = ("name", "version", "checksum")
    document: dict[str, Any] = {
        "policies": [{key: getattr(policy, key) for key in named} for policy in policies],
        "samples": samples,
        "best_of": best_of,
        "recipe": config.settings(),
        "problems": {name: of_prompts(prompts) for name, prompts in sets.items()},
    }
    key = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:8]
    document["sets"] = {
        name: _scores(_whole(name, groups, say), config.prompts.pass_threshold, best_of)
        for name, groups in played[0].items()
    }
    if len(played) > 1:
        say("the answers are compared")
        for name, problems in compare(judge, sets, *played).items():
            document["sets"][name]["win_rate"] = win_rate(_whole(name, problems, say))
    label = "-against-".join(Path(policy.name).name for policy in policies)
    file = folder / f"{label}-{key}.json"
    with atomic_file(file, durable=True) as written:
        written.write(json.dumps(document, indent=1).encode())
    return file, document


def _scoring(config: RunConfig, best_of: str | None, samples: int) -> RunConfig:
    """Return the recipe with held-out rewards alone, and the marks of `best_of`, of weight 0."""
    actors = config.actors
    rewards, weights = actors.heldout_reward or actors.reward, dict(actors.reward_weights)
    if best_of is not None:
        REWARDS.check(best_of, setting="--best-of")
        if samples == 1:
            raise InputError("--best-of chooses among the rollouts of a problem: give --samples")
        if best_of not in rewards:
            rewards, weights = (*rewards, best_of), {**weights, best_of: 0.0}
    return scored_by(config, reward=(), heldout_reward=rewards, reward_weights=weights)


def scored_by(config: RunConfig, **rewards: Any) -> RunConfig:
    """Return a recipe that scores by other rewards, keys of [actors], whatever model plays it."""
    actors = config.actors.model_copy(update={**rewards, "gold": None})
    scoring = config.model_copy(update={"actors": actors})
    check_scoring(scoring)
    models = actors.reward_model.model_copy(update={"paths": reward_model_paths(scoring)})
    actors = actors.model_copy(update={"reward_model": models})
    return config.model_copy(update={"actors": actors, "sft": None, "prefer": None})


def load_policy(config: RunConfig, path: str) -> Inputs:
    """Load and check what a recipe needs to play with the model of a folder."""
    learner = config.learner.model_copy(update={"lora": None, "critic": None})
    update = {"model": ModelConfig(path=path), "learner": learner}
    return load_inputs(config.model_copy(update=update), needs_space=False)


def _play(
    config: RunConfig,
    inputs: Inputs,
    sets: Mapping[str, Sequence[Prompt]],
    samples: int,
    best_of: str | None,
) -> Played:
    """Play every problem of the sets with one engine."""
    prompts = [*chain.from_iterable(sets.values())]
    temperature = config.actors.temperature if samples > 1 else 0.0
    played = iter(play_here(config, inputs, prompts, samples=samples, temperature=temperature))
    tokenizer = load_tokenizer(inputs.model_path)
    weights = {name: w for name, w in config.actors.reward_weights.items() if name != best_of}

    def sample(rollout: Rollout) -> Sample:
        ids = rollout.token_ids[rollout.prompt_length :]
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        parts = rollout.reward_parts.items()
        of_parts = ((name.partition("/"), mark * weights.get(name, 1.0)) for name, mark in parts)
        marks = (mark for (reward, _, _), mark in of_parts if reward == best_of)
        return Sample(rollout.task_reward, text, sum(marks))

    def group(outcomes: Sequence[Rollout | RolloutFailed]) -> list[Sample] | RolloutFailed:
        failed = (outcome for outcome in outcomes if isinstance(outcome, RolloutFailed))
        whole = [sample(outcome) for outcome in outcomes if isinstance(outcome, Rollout)]
        return next(failed, whole)

    return {name: [*map(group, islice(played, len(prompts)))] for name, prompts in sets.items()}


def _whole(name: str, problems: Sequence[T | RolloutFailed], say: Say) -> list[T]:
    """Return the problems that did not fail, and say how many did; RunFailed if all did."""
    failures = [problem for problem in problems if isinstance(problem, RolloutFailed)]
    text = f"{name}: {len(failures)} of {len(problems)} problems failed"
    if len(failures) == len(problems):
        raise RunFailed(f"{text}; the first: {failures[0]}")
    if failures:
        say(f"{text}, and are left out; the first: {failures[0]}")
    return [problem for problem in problems if not isinstance(problem, RolloutFailed)]


def _scores(
    groups: Sequence[Sequence[Sample]], threshold: float, best_of: str | None
) -> dict[str, Score]:
    """Return the scores of a set, whose problems have these rollouts."""
    many = len(groups[0])
    rewards = [[sample.reward for sample in group] for group in groups]
    correct = [[reward >= threshold for reward in group] for group in rewards]
    marks = [[sample.mark for sample in group] for group in groups]
    bounded = all(0 <= reward <= 1 for reward in chain.from_iterable(rewards))
    mean = partial(mean_score, rollouts=many)
    scores = {"reward": mean([*map(fmean, rewards)], bounded=bounded)}
    scores["correct"] = mean([*map(fmean, correct)])
    for k in sorted({2**power for power in range(many.bit_length())} | {many}) if many > 1 else ():
        scores[f"pass@{k}"] = mean([pass_at_k(group, k) for group in correct])
        if best_of is not None:
            chosen = [best_at_k(*pair, k) for pair in zip(rewards, marks, strict=True)]
            scores[f"best@{k}"] = mean(chosen, bounded=bounded)
    return scores
