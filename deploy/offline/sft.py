"""`headway sft`: builds or loads the model of a recipe and trains it on demonstrations."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from actors.engines.model_folder import check_model, context_length, load_tokenizer
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import encode
from actors.sources.examples import DEMONSTRATIONS, TURN, Example, load_examples
from deploy.cluster.cpu_affinity import supervised_threads
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.preflight.disk_space import check_runs_dir
from deploy.preflight.inputs import load_heldout
from deploy.preflight.models import find_model
from deploy.preflight.provenance import ORIGIN_FILE, warm_start_origin
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import atomic_folder, check_absent
from learner.config.learner import TinyModelConfig
from learner.config.supervised import SftConfig
from queues.runtime.cpu_affinity import usable_cores

CHECKED = 64
"""Demonstrations that are checked before the model is loaded; others when they are drawn."""


def warm_start(config: RunConfig, terminal: Terminal, *, replace: bool) -> Path:
    """Train the warm start of a recipe; return its folder, where `headway run` finds it.

    Raises:
        InputError: There is no [sft] section, demonstrations cannot be used, or the warm start
            exists already or is being made by another command.
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
    _, problems = load_heldout(config)
    pairs = load_examples(
        DEMONSTRATIONS,
        config.sft.demonstrations,
        options=config.sft.options,
        seed=config.seed,
        heldout=frozenset(problem.text for problem in problems),
    )
    pairs = _checked(pairs, *_measure(config.model.tiny, path))
    first = list(islice(pairs, CHECKED))
    try:
        with atomic_folder(folder, replace=replace) as partial:
            terminal.say("loading torch and DeepSpeed")
            train_model(config, config.sft, chain(first, pairs), terminal, partial, path)
    except BaseException:
        with suppress(OSError):  # a folder that holds something else stays
            folder.parent.rmdir()
        raise
    return folder


def _checked(
    pairs: Iterator[Example], measure: Callable[[str], int], context: int
) -> Iterator[Example]:
    """Yield pairs; raise InputError for one whose tokens, by `measure`, exceed the context."""
    for prompt, completion in pairs:
        length = measure(prompt) + measure(completion) + 1
        if length > context:
            raise InputError(
                f"sft.demonstrations: {prompt[:40]!r} and its completion have {length} tokens, "
                f"must have at most {context}, the context of the model"
            )
        yield prompt, completion


def _measure(tiny: TinyModelConfig | None, path: str | None) -> tuple[Callable[[str], int], int]:
    """Return a counter of a text's tokens, and the context; a tiny model reads characters."""
    tokenizer: Any = None if tiny else load_tokenizer(str(path))

    def count(text: str) -> int:
        if tiny is None:
            try:
                return len(encode(tokenizer, text.replace(TURN, tokenizer.eos_token)))
            except PromptRefused as error:
                raise InputError(f"sft.demonstrations, model {path!r}: {error}") from None
        unknown = next((c for c in text if c not in (TURN, *tiny.characters)), None)
        if unknown is not None:
            raise InputError(
                f"sft.demonstrations: {unknown!r} in {text[:80]!r} is not among "
                f"model.tiny.characters = {tiny.characters!r}; add it"
            )
        return len(text)

    return count, tiny.context if tiny else context_length(str(path))


def train_model(
    config: RunConfig,
    sft: SftConfig,
    pairs: Iterator[Example],
    terminal: Terminal,
    partial: Path,
    path: str | None,
) -> None:
    """Build the model, or load that of `path`, and train it into the folder `partial`."""
    import torch

    from learner.engine.deepspeed import PolicyEngine
    from learner.model.logprobs import LogprobOptions
    from learner.model.policy import build_tiny, load_policy
    from learner.supervised import Progress
    from learner.supervised.sft import tokenize, train_supervised

    torch.set_num_threads(supervised_threads(config, sft, usable_cores()))
    torch.manual_seed(config.seed)
    origin = path or str(partial)
    if config.model.tiny is not None:
        build_tiny(config.model.tiny, partial, seed=config.seed)
    options = LogprobOptions(chunk=sft.logprob_chunk)
    policy = load_policy(origin, options, dtype=sft.dtype, attention=sft.attention)
    tokenizer = load_tokenizer(origin)
    examples = (
        tokenize(tokenizer, prompt.replace(TURN, tokenizer.eos_token), completion)
        for prompt, completion in pairs
    )
    engine = PolicyEngine(
        policy, sft, model_path=origin, zero_stage=sft.zero_stage, dtype=sft.dtype,
        total_steps=sft.steps,
    )  # fmt: skip
    parameters = sum(p.numel() for p in policy.parameters())

    def show(progress: Progress) -> None:
        speed = progress.tokens / progress.seconds
        terminal.advance(progress.step, f"loss {progress.loss:.4f} · {speed:,.0f} tokens/s")

    terminal.say(
        f"supervised warm start: {sft.steps} steps on a model of {parameters:,} parameters"
    )
    with terminal.bar(sft.steps, "the first step"):
        train_supervised(engine, examples, sft, show)
    engine.save_model(partial)
    engine.close()
    (partial / ORIGIN_FILE).write_text(warm_start_origin(config))
