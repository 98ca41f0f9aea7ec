"""`headway try`: plays a few episodes of a recipe and prints them in full.

One engine with the initial weights plays them in this process, which loads reward models too.
Nothing is trained or sent, and nothing stays on disk but the output of an engine that failed.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from actors.engines.model_folder import load_tokenizer
from actors.errors import RolloutFailed
from actors.rewards.find_reward import is_of_group
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.offline.local_engine import play_here, refuse_adapter
from deploy.preflight.inputs import Inputs
from learner.config.learner import ModelConfig
from queues.records import Prompt, Rollout


@contextmanager
def before_warm_start(config: RunConfig, say: Callable[[str], None]) -> Iterator[RunConfig]:
    """Yield a recipe whose warm start is not made yet with the model that it would start from.

    A model of `[model.tiny]` is built with random weights, in a folder that the block deletes.
    """
    say(f"{config.warm_start} does not exist yet: this is the model before its warm start")
    with tempfile.TemporaryDirectory(prefix="headway-try-") as folder:
        model = config.model
        if model.tiny is not None:
            from learner.model.policy import build_tiny

            build_tiny(model.tiny, Path(folder), seed=config.seed)
            model = ModelConfig(path=folder)
        yield config.model_copy(update={"sft": None, "prefer": None, "model": model})


def try_recipe(config: RunConfig, inputs: Inputs, count: int, say: Callable[[str], None]) -> None:
    """Play `count` prompts once each and show them; raise RunFailed in the end if some failed.

    With rewards that compare a group, a whole group of each is played.
    """
    refuse_adapter(config, "try")
    prompts = inputs.prompts.source.next(count)
    impatient = config.actors.model_copy(update={"outage_seconds": 0.0})
    say(f"loading {inputs.model_path}")
    samples = config.prompts.group_size if any(map(is_of_group, impatient.reward)) else 1
    patched = config.model_copy(update={"actors": impatient})
    played = play_here(patched, inputs, prompts, samples=samples)
    tokenizer = load_tokenizer(inputs.model_path)
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    outcomes = [outcome for group in played for outcome in group]
    for prompt, outcome in zip(repeated, outcomes, strict=True):
        say(describe(prompt, outcome, tokenizer, config.actors.reward_weights))
    if failed := sum(isinstance(outcome, RolloutFailed) for outcome in outcomes):
        raise RunFailed(f"{failed} of {len(outcomes)} rollouts failed, as printed above")


def describe(
    prompt: Prompt, outcome: Rollout | RolloutFailed, tokenizer: Any, weights: dict[str, float]
) -> str:
    """Describe an episode: its text and ids, what trains, log-probs, rewards by part, time."""
    lines = [f"── {prompt.prompt_id} " + "─" * max(0, 70 - len(prompt.prompt_id))]
    lines.append(f"answer {prompt.answer!r}")
    if isinstance(outcome, RolloutFailed):
        return "\n".join([*lines, f"FAILED ({outcome.reason}): {outcome}", ""])
    start, begins = 0, [segment.start for segment in outcome.segments]
    of_segment = [bisect_right(begins, token) for token in range(len(outcome.token_ids))]
    for (number, sampled), run in groupby(zip(of_segment, outcome.loss_mask, strict=True)):
        end = start + sum(1 for _ in run)
        if start in begins:
            _, parent, prefix = outcome.segments[number - 1]
            lines.append(f"segment {number}: follows the first {prefix} tokens of segment {parent}")
        origin = "sampled, trains" if sampled else "given, does not train"
        ids = list(outcome.token_ids[start:end])
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines += [f"[{start}:{end}] {origin}", f"  text   {text!r}", f"  tokens {ids}"]
        if sampled:
            logprobs = outcome.behavior_logprobs[start:end]
            lines.append(f"  log-probabilities {[round(value, 3) for value in logprobs]}")
        start = end
    lines += [f"left out: {n} sampled tokens, {why}" for why, n in outcome.left_out.items()]
    lines.append(f"reward {outcome.reward:g}")
    for part, value in outcome.reward_parts.items():
        names = dict.fromkeys([part.split("/")[0], part])
        factors = [f" × {weights[name]:g}" for name in names if name in weights]
        lines.append(f"  {part} {value:g}" + "".join(factors))
    seconds = (outcome.finished_at - outcome.created_at).total_seconds()
    lines.append(
        f"ended by {outcome.finish_reason} after {sum(outcome.loss_mask)} sampled tokens, "
        f"{outcome.turns} turns, {seconds:.2f} s\n"
    )
    return "\n".join(lines)
