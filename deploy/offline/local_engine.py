"""An engine, rewards and reward models in this process, for commands that play without a run."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from actors.assembly import build_engine, build_episodes, build_rewards, make_pool
from actors.engines.model_folder import context_length, load_tokenizer
from actors.engines.protocol import EngineSpec
from actors.errors import EngineDied, RolloutFailed
from actors.rewards.learned import TextScorer
from deploy.cluster.cpu_affinity import actors_on_cores
from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import Inputs
from queues.records import Lease, Prompt, Purpose, Rollout

Outcome = Rollout | RolloutFailed


def play_here(
    config: RunConfig,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    *,
    purpose: Purpose,
    samples: int = 1,
    temperature: float | None = None,
) -> list[list[Outcome]]:
    """Play every prompt with the weights of `inputs`, so many samples of each.

    Returns the rollouts of each prompt, or the errors that they ended with. `temperature` is that
    of an evaluation. Raises EngineDied, which names the file with the engine's output; else that is
    deleted.
    """
    leases = [
        Lease(
            group_id=f"{purpose}-{index}",
            attempt=1,
            prompt=prompt,
            group_size=samples,
            purpose=purpose,
            temperature=temperature,
            start_version=0,
            deadline_version=None,
        )
        for index, prompt in enumerate(prompts)
    ]
    with tempfile.NamedTemporaryFile(prefix="headway-engine-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    try:
        outcomes = asyncio.run(_play(config, inputs, leases, log))
    except EngineDied as error:
        raise EngineDied(f"{error}\nthe output of the engine is in {log}") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()
    return outcomes


async def _play(
    config: RunConfig, inputs: Inputs, leases: Sequence[Lease], log: Path
) -> list[list[Outcome]]:
    actors = actors_on_cores(config.actors, os.sched_getaffinity(0), None)
    model_path = inputs.model_path
    pool, slots = make_pool(actors), asyncio.Semaphore(actors.max_concurrent_rollouts)
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

        async def play(lease: Lease, sample: int) -> Outcome:
            async with slots:
                try:
                    return await episodes.run(lease, sample)
                except RolloutFailed as error:
                    return error

        async def play_all(lease: Lease) -> list[Outcome]:
            return await asyncio.gather(*(play(lease, n) for n in range(lease.group_size)))

        return await asyncio.gather(*map(play_all, leases))
    finally:
        pool.close()
        await engine.close()


def _load_reward_models(config: RunConfig, inputs: Inputs) -> TextScorer | None:
    """Load the reward models that the recipe uses, onto the cores of this process."""
    if not config.actors.asks_reward_models:
        return None
    from actors.reward_models.scoring import load_reward_models

    section = config.actors.reward_model.model_copy(update={"cores": None, "gpus": 0.0})
    options = config.actors.chat_template_options
    return load_reward_models(inputs.reward_models, section, options)
