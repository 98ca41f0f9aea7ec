"""`headway try`: plays a few episodes of a recipe and prints them in full.

One engine with the initial weights plays them in this process, which loads reward models too.
Nothing is trained or sent, and nothing stays on disk but the output of an engine that failed.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from actors.assembly import build_engine, build_episodes, build_rewards, make_pool
from actors.engines.model_folder import context_length, load_tokenizer
from actors.engines.protocol import EngineSpec
from actors.errors import EngineDied, RolloutFailed
from actors.rewards.learned import TextScorer
from deploy.cluster.cpu_affinity import actors_on_cores
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.preflight.inputs import Inputs
from headway.errors import InputError
from learner.config.learner import ModelConfig
from queues.records import Lease, Prompt, Purpose, Rollout


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
        yield config.model_copy(update={"sft": None, "model": model})


def try_recipe(config: RunConfig, inputs: Inputs, count: int, say: Callable[[str], None]) -> None:
    """Play `count` prompts once each and show them; raise RunFailed in the end if some failed."""
    lora = config.learner.lora
    if lora is not None and lora.path is not None:
        raise InputError(
            f"learner.lora.path = {lora.path!r}: `headway try` plays with a model as its "
            "folder has it; to try both, merge them into a folder and name that in model.path"
        )
    prompts = inputs.prompts.source.next(count)
    with tempfile.NamedTemporaryFile(prefix="headway-try-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    say(f"loading {inputs.model_path}")
    try:
        outcomes = asyncio.run(_play(config, inputs, prompts, log))
    except EngineDied as error:
        raise EngineDied(f"{error}\nthe output of the engine is in {log}") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()
    tokenizer = load_tokenizer(inputs.model_path)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        say(describe(prompt, outcome, tokenizer, config.actors.reward_weights))
    if failed := sum(isinstance(outcome, RolloutFailed) for outcome in outcomes):
        raise RunFailed(f"{failed} of {count} rollouts failed, as printed above")


async def _play(
    config: RunConfig, inputs: Inputs, prompts: Sequence[Prompt], log: Path
) -> list[Rollout | RolloutFailed]:
    """Return a rollout of every prompt, or the error that it ended with."""
    impatient = config.actors.model_copy(update={"outage_seconds": 0.0})
    actors = actors_on_cores(impatient, os.sched_getaffinity(0), None)
    model_path = inputs.model_path
    pool = make_pool(actors)
    tokenizer = load_tokenizer(model_path)
    longest = actors.max_model_len or context_length(model_path)
    spec = EngineSpec(
        index=0,
        config=actors,
        weight_sync=config.weight_sync,
        model_path=model_path,
        seed=config.seed,
        initial_version=0,
        log=log,
    )
    engine = build_engine(spec, tokenizer, longest)
    await engine.start()
    try:
        reward_models = _load_reward_models(config, inputs)
        rewards = build_rewards(actors, pool=pool, reward_model_client=reward_models)
        episodes = build_episodes("engine-0", actors, engine, tokenizer, longest, rewards)

        async def play(index: int, prompt: Prompt) -> Rollout | RolloutFailed:
            lease = Lease(
                group_id=f"try-{index}",
                attempt=1,
                prompt=prompt,
                group_size=1,
                purpose=Purpose.TRAIN,
                temperature=None,
                start_version=0,
                deadline_version=None,
            )
            try:
                return await episodes.run(lease, 0)
            except RolloutFailed as error:
                return error

        return await asyncio.gather(*(play(*numbered) for numbered in enumerate(prompts)))
    finally:
        pool.close()
        await engine.close()


def _load_reward_models(config: RunConfig, inputs: Inputs) -> TextScorer | None:
    """Load the reward models that the recipe uses, onto the cores of this process."""
    if "reward_model" not in config.actors.reward:
        return None
    from actors.reward_models.scoring import load_reward_models

    section = config.actors.reward_model.model_copy(update={"cores": None, "gpus": 0.0})
    options = config.actors.chat_template_options
    return load_reward_models(inputs.reward_models, section, options)


def describe(
    prompt: Prompt, outcome: Rollout | RolloutFailed, tokenizer: Any, weights: dict[str, float]
) -> str:
    """Describe an episode: its text and ids, what trains, log-probs, rewards by part, time."""
    lines = [f"── {prompt.prompt_id} " + "─" * max(0, 70 - len(prompt.prompt_id))]
    lines.append(f"answer {prompt.answer!r}")
    if isinstance(outcome, RolloutFailed):
        return "\n".join([*lines, f"FAILED ({outcome.reason}): {outcome}", ""])
    start = 0
    for sampled, run in groupby(outcome.loss_mask):
        end = start + sum(1 for _ in run)
        origin = "sampled, trains" if sampled else "given, does not train"
        ids = list(outcome.token_ids[start:end])
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines += [f"[{start}:{end}] {origin}", f"  text   {text!r}", f"  tokens {ids}"]
        if sampled:
            logprobs = outcome.behavior_logprobs[start:end]
            lines.append(f"  log-probabilities {[round(value, 3) for value in logprobs]}")
        start = end
    lines.append(f"reward {outcome.reward:g}")
    for part, value in outcome.reward_parts.items():
        weight = weights.get(part.split("/")[0])
        lines.append(f"  {part} {value:g}" + ("" if weight is None else f" × {weight:g}"))
    seconds = (outcome.finished_at - outcome.created_at).total_seconds()
    lines.append(
        f"ended by {outcome.finish_reason} after {sum(outcome.loss_mask)} sampled tokens, "
        f"{outcome.turns} turns, {seconds:.2f} s\n"
    )
    return "\n".join(lines)
