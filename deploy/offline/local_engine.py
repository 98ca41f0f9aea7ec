"""An engine, rewards and reward models in this process, for commands that play without a run."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from actors.assembly import build_engine, build_rewards, build_runner, make_pool
from actors.engines.model_folder import context_length, load_tokenizer
from actors.engines.protocol import EngineSpec
from actors.errors import EngineDied, RolloutFailed
from actors.rewards.learned import TextScorer
from deploy.cluster.cpu_affinity import actors_on_cores
from deploy.config.run_config import RunConfig
from deploy.preflight.inputs import Inputs
from headway.errors import InputError
from queues.records import Lease, Prompt, Purpose, Rollout

Outcome = Rollout | RolloutFailed
Receive = Callable[[int, list[Outcome]], Awaitable[None]]
"""Takes the index of a prompt and its outcomes."""


def refuse_adapter(config: RunConfig, command: str) -> None:
    """Refuse an adapter to begin with, which engines of this process do not load."""
    lora = config.learner.lora
    if lora is not None and lora.path is not None:
        raise InputError(
            f"learner.lora.path = {lora.path!r}: `headway {command}` plays with a model as its "
            "folder has it; to play with both, merge them into a folder and name that in model.path"
        )


def play_here(
    config: RunConfig,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    *,
    samples: int = 1,
    temperature: float | None = None,
    then: Receive | None = None,
) -> list[list[Outcome]]:
    """Play every prompt with the weights of `inputs`, so many samples of each.

    Returns the rollouts of each prompt, or the errors that they ended with. `temperature` is that
    of an evaluation; None plays as for training. `then` is awaited for each prompt as soon as it is
    played, while others still are. Raises EngineDied, which names the file with the engine's
    output; else that is deleted.
    """
    purpose = Purpose.TRAIN if temperature is None else Purpose.EVALUATE
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
        outcomes = asyncio.run(_play(config, inputs, leases, log, then))
    except EngineDied as error:
        raise EngineDied(f"{error}\nthe output of the engine is in {log}") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()
    return outcomes


async def _play(
    config: RunConfig, inputs: Inputs, leases: Sequence[Lease], log: Path, then: Receive | None
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
        runner = build_runner("engine-0", actors, engine, tokenizer, longest, rewards)
        await runner.start()

        async def play(lease: Lease, sample: int) -> Outcome:
            async with slots:
                try:
                    return await runner.run(lease, sample)
                except RolloutFailed as error:
                    return error

        async def play_all(index: int, lease: Lease) -> list[Outcome]:
            outcomes = await asyncio.gather(*(play(lease, n) for n in range(lease.group_size)))
            rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
            if len(rollouts) == len(outcomes):
                try:
                    outcomes = [*await runner.score_group(lease, rollouts)]
                except RolloutFailed as error:
                    outcomes = [error] * len(rollouts)
            if then is not None:
                await then(index, outcomes)
            return outcomes

        tasks = [asyncio.create_task(play_all(*item)) for item in enumerate(leases)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after an error, before the others meet a closed engine
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await runner.close()
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
