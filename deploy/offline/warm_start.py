"""`headway sft`: builds or loads the model of a recipe and trains it on demonstrations."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from actors.engines.model_folder import check_model, context_length, end_ids, load_tokenizer
from actors.environments.load_environment import load_environment, shipped_opening
from actors.environments.protocol import Message
from actors.environments.single_turn import conversation, opening
from actors.errors import PromptRefused
from actors.programs.load_agent import is_agent
from actors.rollout.chat_rendering import renderer_for
from actors.rollout.demonstrations import DemonstrationRenderer, Tokens
from actors.rollout.stops import load_stops
from actors.sources.examples import (
    DEMONSTRATIONS,
    HELDOUT_DEMONSTRATIONS,
    Example,
    Messages,
    mix_examples,
    prompts_of,
    read_examples,
)
from actors.sources.rows import plain_text
from deploy.config.run_config import RunConfig
from deploy.offline.stages import UnfinishedStage, made_model, stage_spec, train_stage
from deploy.preflight.machine_checks import check_runs_dir
from deploy.preflight.models import check_adapter, find_model, warm_start_origin
from deploy.preflight.prompts import heldout_texts
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import UNFINISHED
from headway.errors import InputError
from headway.user_code import call, where_raised
from learner.config.supervised import SftConfig
from learner.model.tiny_tokenizer import tiny_tokenizer
from queues.records import Prompt

CHECKED = 64
"""Demonstrations that are checked before the model is loaded; others when they are drawn."""


def warm_start(config: RunConfig, terminal: Terminal, *, replace: bool) -> Path:
    """Train the warm start of a recipe; return its folder, where `headway run` finds it.

    Raises InputError where section or demonstrations are missing, or the folder exists.
    """
    if config.sft is None:
        raise InputError(
            "the recipe has no [sft] section, which names the demonstrations and the steps"
        )
    folder, origin = config.warm_start, warm_start_origin(config)
    check_runs_dir(config)
    path = find_model(config.model.path) if config.model.path else None
    if path:
        check_model(path)
        check_adapter(config.sft.lora, path, section="sft.lora")
    training, heldout = _split(config, config.sft)
    render = Demonstrations(config, path).render
    rendered = map(render, training)
    first = list(islice(rendered, CHECKED))
    drawn = chain(first, rendered), [*map(render, heldout)]
    with made_model(config, folder, origin, terminal, replace=replace) as made:
        train_model(config, config.sft, drawn, terminal, made, path)
    return folder


def _split(config: RunConfig, sft: SftConfig) -> tuple[Iterator[Example], list[Example]]:
    """Return endless demonstrations for training, and those that are held out of it."""
    parts = [(part.source, part.options, part.weight) for part in sft.parts]
    texts = heldout_texts(config)
    draw = partial(mix_examples, DEMONSTRATIONS, parts, seed=config.seed, heldout=texts)
    if isinstance(sft.heldout, str):
        heldout = read_examples(HELDOUT_DEMONSTRATIONS, sft.heldout, sft.heldout_options)
    else:
        heldout = list(islice(draw(), sft.heldout or 0))
    return draw(unseen=frozenset(text for e in heldout for text in prompts_of(e))), heldout


class Demonstrations:
    """Demonstrations as token ids, each beginning as a rollout of its prompt does.

    `path` is the folder or hub name of the model; None stands for the recipe's tiny model.
    `setting` names them in messages. Raises InputError for a stop or an option of the chat template
    that does not exist.
    """

    def __init__(
        self, config: RunConfig, path: str | None, setting: str = DEMONSTRATIONS.setting
    ) -> None:
        self._setting = setting
        actors, tiny = config.actors, config.model.tiny
        tokenizer: Any = None
        if path is not None:
            tokenizer, self.context = load_tokenizer(path), context_length(path)
            ends = end_ids(path, tokenizer)
        elif tiny is not None:
            tokenizer, self.context = tiny_tokenizer(tiny.characters, tiny.context), tiny.context
            ends = frozenset([tokenizer.eos_token_id])
        renderer = renderer_for(tokenizer, actors)
        self._render = DemonstrationRenderer(
            renderer,
            load_stops(renderer, actors.stop),
            end_ids=sorted(ends),
            eos=tokenizer.eos_token_id,
        )
        self._environment = actors.environment
        arguments = actors.environment, actors.environment_options
        self._opens = shipped_opening(actors)
        if self._opens is None and is_agent(actors.environment):
            self._opens = opening  # demonstrations have all messages that the agent sends
        elif self._opens is None:
            execution = actors.code_execution
            self._new_environment = load_environment(*arguments, code_execution=execution)

    def render(self, example: Example) -> Tokens:
        """Return the tokens of a demonstration; raise InputError for one that is too long."""
        prompt, reply = example
        messages = self._opening(prompt)
        try:
            if isinstance(reply, str):
                tokens = self._render.pair(messages, reply)
            else:
                tokens = self._render.conversation(messages, reply)
        except (PromptRefused, InputError) as error:
            raise InputError(f"{self._setting}: {error}") from None
        if len(tokens[0]) > self.context:
            raise InputError(
                f"{self._setting}: {plain_text(prompt)[:40]!r} and its completion have "
                f"{len(tokens[0])} tokens, must have at most {self.context}, the context of the "
                "model"
            )
        return tokens

    def _opening(self, prompt: str | Messages) -> Sequence[Message]:
        """Return the messages that begin a rollout of a prompt; the environment decides them."""
        metadata = {} if isinstance(prompt, str) else conversation(prompt)
        made = Prompt(prompt_id="demonstration", text=plain_text(prompt), metadata=metadata)
        if self._opens is not None:
            return self._opens(made)
        try:
            opening = asyncio.run(call(self._new_environment().reset, made))
        except Exception as error:
            raise InputError(
                f"actors.environment = {self._environment!r} raised {error!r} on the demonstration "
                f"of {made.text[:40]!r}{where_raised(error)}"
            ) from error
        return list(opening)


def train_model(
    config: RunConfig,
    sft: SftConfig,
    demonstrations: tuple[Iterator[Tokens], list[Tokens]],
    terminal: Terminal,
    made: Path,
    path: str | None,
) -> None:
    """Build the model, or load that of `path`, and train it into the folder `made`.

    `demonstrations` are those that are trained, without end, and those whose loss is measured.
    """
    from learner.model.policy import build_tiny
    from learner.supervised.sft import Example, batches_of, train_supervised
    from learner.supervised.stage import Stage

    origin = path or str(made)
    if config.model.tiny is not None:
        build_tiny(config.model.tiny, made, seed=config.seed)
    unfinished = UnfinishedStage(made.parent / UNFINISHED)
    training, heldout = ((Example(*tokens) for tokens in drawn) for drawn in demonstrations)
    stage = Stage(
        spec=stage_spec(config, sft, "sft", origin, unfinished),
        config=sft,
        train=train_supervised,
        heldout=[*heldout],
        folder=str(made),
    )
    train_stage(config, stage, batches_of(training, sft.batch_tokens), unfinished, terminal)
