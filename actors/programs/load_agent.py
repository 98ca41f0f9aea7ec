"""Loads the agent of a recipe, where its environment is one."""

import inspect
from functools import partial

from actors.config import ActorsConfig
from actors.programs.agent import Agent, FunctionAgent
from actors.shipped import ENVIRONMENTS
from headway.errors import InputError
from headway.user_code import check_call


def load_agent(config: ActorsConfig) -> Agent | None:
    """Return the agent that `actors.environment` names; None if that is a conversation.

    Raises InputError for one that is not found, wrong options, and an engine without a gateway.
    """
    name, options = config.environment, config.environment_options
    if not is_agent(name):
        return None
    entry, setting = ENVIRONMENTS[name], f"actors.environment = {name!r}"
    if config.engine != "vllm":
        raise InputError(
            f"{setting} is an agent, which asks the policy through the gateway of the engine "
            f'"vllm"; found actors.engine = "{config.engine}"'
        )
    if entry.traits.agent:
        agent: Agent = entry.function(name, options)
        return agent
    check_call(entry.function, "task", subject=setting, options=options)
    return FunctionAgent(name, partial(entry.function, **options) if options else entry.function)


def is_agent(name: str) -> bool:
    """Return True for an environment that is an agent; raise InputError if it is not found."""
    entry = ENVIRONMENTS.load(name, setting="actors.environment")
    known, function = ENVIRONMENTS.get(name) is not None, entry.function
    conversation = inspect.isclass(function) or hasattr(function, "reset")
    return entry.traits.agent or not (known or conversation)
