"""Builds the engine, the rewards and the runner of rollouts of one actor from a recipe."""

from functools import partial
from typing import Any

from actors.config import ActorsConfig
from actors.engines.model_folder import end_ids, weight_shapes
from actors.engines.protocol import EngineSpec, RolloutEngine
from actors.environments.load_environment import load_environment
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.gateway.template import ChatTemplate
from actors.programs.agent import Agent
from actors.programs.load_agent import load_agent
from actors.programs.runner import AgentRunner
from actors.rewards.gold import GoldReward
from actors.rewards.learned import TextScorer
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import Rewards, load_rewards
from actors.rollout.chat_rendering import renderer_for
from actors.rollout.episode import EpisodeRunner
from actors.rollout.runner import RolloutRunner, sampling_of
from actors.rollout.stops import load_stops
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


def build_runner(
    engine_id: str,
    config: ActorsConfig,
    engine: RolloutEngine,
    tokenizer: Any,
    max_model_len: int,
    rewards: tuple[Rewards, Rewards, GoldReward | None],
) -> RolloutRunner:
    """Build what plays the rollouts of one engine, conversations or those of an agent.

    `rewards` are those that `build_rewards` returns. Raises InputError for an environment that
    cannot be used.
    """
    training, heldout, gold = rewards
    shared: dict[str, Any] = {
        "engine_id": engine_id,
        "renderer": renderer_for(tokenizer, config),
        "config": config,
        "rewards": training,
        "heldout_rewards": heldout,
        "gold": gold,
        "max_model_len": max_model_len,
    }
    agent = load_agent(config)
    if agent is not None:
        return build_agents(engine, agent, shared)
    new_environment = load_environment(
        config.environment, config.environment_options, code_execution=config.code_execution
    )
    return EpisodeRunner(engine=engine, new_environment=new_environment, **shared)


def build_agents(engine: Any, agent: Agent, shared: dict[str, Any]) -> AgentRunner:
    """Build the runner of an agent, and the gateway by which it asks the engine."""
    from actors.gateway.vllm_app import serving_app

    renderer, config = shared["renderer"], shared["config"]
    template = ChatTemplate(renderer, end_ids(engine.model_path, renderer.tokenizer))
    sampling = sampling_of(config, load_stops(renderer, config.stop), config.max_new_tokens)
    return AgentRunner(
        agent=agent,
        gateway=Gateway(config.gateway, partial(serving_app, engine, config, sampling)),
        new_session=partial(Session, template),
        **shared,
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
