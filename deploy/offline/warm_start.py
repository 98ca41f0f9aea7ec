"""`headway sft`: builds or loads the model of a recipe and trains it on demonstrations."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from actors.engines.model_folder import check_model, context_length, end_ids, load_tokenizer
from actors.environments.load_environment import load_environment, shipped_opening
from actors.environments.protocol import Message
from actors.environments.single_turn import conversation
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import renderer_for
from actors.rollout.demonstrations import DemonstrationRenderer, Tokens
from actors.rollout.stops import load_stops
from actors.sources.examples import DEMONSTRATIONS, Example, Messages, load_examples
from actors.sources.rows import plain_text
from deploy.cluster.cpu_affinity import supervised_threads
from deploy.config.run_config import RunConfig
from deploy.preflight.machine_checks import check_runs_dir
from deploy.preflight.models import check_adapter, find_model, warm_start_origin
from deploy.preflight.prompts import heldout_texts
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import ORIGIN_FILE, atomic_folder, check_absent
from headway.cpu_cores import usable_cores
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
    folder = config.warm_start
    check_absent(folder, replace=replace)
    check_runs_dir(config)
    path = find_model(config.model.path) if config.model.path else None
    if path:
        check_model(path)
        check_adapter(config.sft.lora, path, section="sft.lora")
    pairs = load_examples(
        DEMONSTRATIONS,
        config.sft.demonstrations,
        options=config.sft.options,
        seed=config.seed,
        heldout=heldout_texts(config),
    )
    rendered = map(Demonstrations(config, path).render, pairs)
    first = list(islice(rendered, CHECKED))
    try:
        with atomic_folder(folder, replace=replace, private=config.deploy.private) as partial:
            terminal.say("loading torch and DeepSpeed")
            train_model(config, config.sft, chain(first, rendered), terminal, partial, path)
    except BaseException:
        with suppress(OSError):  # a folder that holds something else stays
            folder.parent.rmdir()
        raise
    return folder


class Demonstrations:
    """Demonstrations as token ids, each beginning as a rollout of its prompt does.

    `path` is the folder or hub name of the model; None stands for the recipe's tiny model. Raises
    InputError for a stop or an option of the chat template that does not exist.
    """

    def __init__(self, config: RunConfig, path: str | None) -> None:
        actors, tiny = config.actors, config.model.tiny
        tokenizer: Any = None
        if path is not None:
            tokenizer, self._context = load_tokenizer(path), context_length(path)
            ends = end_ids(path, tokenizer)
        elif tiny is not None:
            tokenizer, self._context = tiny_tokenizer(tiny.characters, tiny.context), tiny.context
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
        self._new_environment = load_environment(*arguments, code_execution=actors.code_execution)
        self._shipped = shipped_opening(actors)

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
            raise InputError(f"sft.demonstrations: {error}") from None
        if len(tokens[0]) > self._context:
            raise InputError(
                f"sft.demonstrations: {plain_text(prompt)[:40]!r} and its completion have "
                f"{len(tokens[0])} tokens, must have at most {self._context}, the context of the "
                "model"
            )
        return tokens

    def _opening(self, prompt: str | Messages) -> Sequence[Message]:
        """Return the messages that begin a rollout of a prompt; the environment decides them."""
        metadata = {} if isinstance(prompt, str) else conversation(prompt)
        made = Prompt(prompt_id="demonstration", text=plain_text(prompt), metadata=metadata)
        if self._shipped is not None:
            return self._shipped(made)
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
    demonstrations: Iterator[Tokens],
    terminal: Terminal,
    partial: Path,
    path: str | None,
) -> None:
    """Build the model, or load that of `path`, and train it into the folder `partial`."""
    import torch

    from learner.engine.deepspeed import PolicyEngine
    from learner.model.logprobs import LogprobOptions
    from learner.model.lora import add_adapter
    from learner.model.policy import build_tiny, load_policy
    from learner.supervised.row_training import Progress
    from learner.supervised.sft import Example, train_supervised

    torch.set_num_threads(supervised_threads(config, sft, usable_cores()))
    torch.manual_seed(config.seed)
    origin = path or str(partial)
    if config.model.tiny is not None:
        build_tiny(config.model.tiny, partial, seed=config.seed)
    options = LogprobOptions(chunk=sft.logprob_chunk)
    policy = load_policy(
        origin,
        options,
        dtype=sft.dtype,
        attention=sft.attention,
        context=config.actors.max_model_len or context_length(origin),
    )
    if sft.lora is not None:
        add_adapter(policy.model, sft.lora, seed=config.seed, section="sft.lora")
    examples = (Example(*tokens) for tokens in demonstrations)
    engine = PolicyEngine(
        policy, sft, model_path=origin, zero_stage=sft.zero_stage, total_steps=sft.steps
    )
    parameters = sum(p.numel() for p in policy.parameters())

    def show(progress: Progress) -> None:
        speed = progress.tokens / progress.seconds
        terminal.advance(progress.step, f"loss {progress.loss:.4f} · {speed:,.0f} tokens/s")

    terminal.say(
        f"supervised warm start: {sft.steps} steps on a model of {parameters:,} parameters"
    )
    with terminal.bar(sft.steps, "the first step"):
        train_supervised(engine, examples, sft, show)
    if sft.lora is not None and sft.dtype == "bfloat16":
        terminal.say(
            f"lost to rounding of the adapter's changes: {engine.lost_to_rounding() or 0:.1%}"
        )
    engine.save_model(partial)
    engine.close()
    (partial / ORIGIN_FILE).write_text(warm_start_origin(config))
