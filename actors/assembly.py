"""Builds the engine, the rewards and the episode runner of one actor from a recipe."""

from typing import Any

from actors.config import ActorsConfig
from actors.engines.model_folder import weight_shapes
from actors.engines.protocol import EngineSpec, RolloutEngine
from actors.environments.load_environment import load_environment
from actors.rewards.gold import GoldReward
from actors.rewards.learned import TextScorer
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import Rewards, load_rewards
from actors.rollout.chat_rendering import renderer_for
from actors.rollout.episode import EpisodeRunner
from headway.errors import InputError


def make_pool(config: ActorsConfig) -> RewardPool:
    """Make the processes that call the rewards of one actor."""
    return RewardPool(
        config.reward_processes,
        config.reward_memory_gib,
        variables=config.reward_environment,
        verifier_seconds=config.verifier_seconds,
    )


def build_rewards(
    config: ActorsConfig, *, pool: RewardPool, reward_model_client: TextScorer | None
) -> tuple[Rewards, Rewards, GoldReward | None]:
    """Load the rewards of training rollouts and of evaluations, and the gold reward, if any.

    A reward in several of them has one budget.
    """
    heldout, gold = config.heldout_reward or config.reward, config.gold
    rewards = load_rewards(
        config.all_rewards,
        timeout=config.reward_timeout_seconds,
        options=config.reward_options,
        weights=config.reward_weights,
        reward_model_client=reward_model_client,
        pool=pool,
        code_execution=config.code_execution,
    )
    watching = None if gold is None else GoldReward(rewards.only(gold.reward), gold.share)
    return rewards.only(config.reward), rewards.only(heldout), watching


def build_episodes(
    engine_id: str,
    config: ActorsConfig,
    engine: RolloutEngine,
    tokenizer: Any,
    max_model_len: int,
    rewards: tuple[Rewards, Rewards, GoldReward | None],
) -> EpisodeRunner:
    """Build the episode runner of one engine; `rewards` are those that `build_rewards` returns."""
    training, heldout, gold = rewards
    return EpisodeRunner(
        engine_id=engine_id,
        engine=engine,
        renderer=renderer_for(tokenizer, config),
        config=config,
        new_environment=load_environment(
            config.environment, config.environment_options, code_execution=config.code_execution
        ),
        rewards=training,
        heldout_rewards=heldout,
        gold=gold,
        max_model_len=max_model_len,
    )


def build_engine(spec: EngineSpec, tokenizer: Any, max_model_len: int) -> RolloutEngine:
    """Build the engine of one actor, not started; raise InputError for options that it lacks."""
    config = spec.config
    if config.engine == "scripted":
        from actors.engines.scripted import ScriptedEngine

        options = {
            "vocabulary": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "initial_version": spec.initial_version,
            **config.scripted_options,
        }
        try:
            return ScriptedEngine(weight_shapes(spec.model_path), **options)
        except TypeError as error:
            raise InputError(f"actors.scripted_options: {error}") from error
    from actors.engines.vllm import VllmEngine

    return VllmEngine(spec, max_model_len)
