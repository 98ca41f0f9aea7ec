"""`headway sft`: builds or loads the model of a recipe and trains it on demonstrations."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from actors.engines.model_folder import check_model, context_length, load_tokenizer
from actors.rollout.chat_rendering import unknown_character
from actors.sources.examples import TURN, load_demonstrations
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.preflight.disk_space import check_runs_dir
from deploy.preflight.inputs import load_heldout
from deploy.preflight.models import find_model
from deploy.preflight.provenance import ORIGIN_FILE, warm_start_origin
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import atomic_folder, check_absent
from learner.config.learner import SftConfig, TinyModelConfig

TRIED = 64
"""Demonstrations that are checked before anything is loaded; the others as they are drawn."""

Pair = tuple[str, str]


def warm_start(config: RunConfig, screen: Terminal, *, replace: bool) -> Path:
    """Trains the warm start of a recipe.

    Returns:
        The model folder, which `headway run` of the same recipe starts from.

    Raises:
        InputError: No [sft] section, demonstrations that cannot be used, or a warm start that
            exists and may not be replaced, or that another command is making.
    """
    if config.sft is None:
        raise InputError("the recipe has no [sft] section; it says what to imitate and how long")
    folder = config.warm_start
    check_absent(folder, replace=replace)
    check_runs_dir(config)
    path = find_model(config.model.path) if config.model.path else None
    if path:
        check_model(path)
    _, problems = load_heldout(config)
    pairs = load_demonstrations(
        config.sft.demonstrations,
        options=config.sft.options,
        seed=config.seed,
        heldout=frozenset(problem.text for problem in problems),
    )
    tiny = config.model.tiny
    measure, context = _of_characters(tiny) if tiny else _of_tokenizer(str(path))
    pairs = _fitting(pairs, measure, context)
    first = list(islice(pairs, TRIED))
    try:
        with atomic_folder(folder, replace=replace) as partial:
            screen.say("loading torch and DeepSpeed")
            _train(config, config.sft, chain(first, pairs), screen, partial, path)
    except BaseException:
        with suppress(OSError):  # a folder that holds something else stays
            folder.parent.rmdir()
        raise
    return folder


def _fitting(pairs: Iterator[Pair], measure: Callable[[str], int], context: int) -> Iterator[Pair]:
    """The pairs, each checked when it is drawn.

    Args:
        pairs: Prompts and completions.
        measure: Tokens of a text; raises InputError where it cannot be written.
        context: Most tokens of a pair, the end-of-sequence token included.

    Raises:
        InputError: With the pair that does not fit.
    """
    for prompt, completion in pairs:
        length = measure(prompt) + measure(completion) + 1
        if length > context:
            raise InputError(
                f"sft.demonstrations: {prompt[:40]!r} and its completion have {length} tokens, "
                f"must have at most {context}, the context of the model"
            )
        yield prompt, completion


def _of_characters(tiny: TinyModelConfig) -> tuple[Callable[[str], int], int]:
    """How a model with a token per character measures text, and its context."""

    def measure(text: str) -> int:
        foreign = next((c for c in text.replace(TURN, "") if c not in tiny.characters), None)
        if foreign is not None:
            raise InputError(
                f"sft.demonstrations: {foreign!r} in {text[:80]!r} is not among "
                f"model.tiny.characters = {tiny.characters!r}; add it"
            )
        return len(text)

    return measure, tiny.context


def _of_tokenizer(path: str) -> tuple[Callable[[str], int], int]:
    """How the model in a folder measures text, and its context."""
    tokenizer: Any = load_tokenizer(path)

    def measure(text: str) -> int:
        text = text.replace(TURN, tokenizer.eos_token)
        ids = tokenizer.encode(text, add_special_tokens=False)
        foreign = unknown_character(tokenizer, text, ids)
        if foreign is not None:
            raise InputError(
                f"sft.demonstrations: the tokenizer of {path!r} has no token for {foreign!r} in "
                f"{text[:80]!r}"
            )
        return len(ids)

    return measure, context_length(path)


def _train(
    config: RunConfig,
    sft: SftConfig,
    pairs: Iterator[Pair],
    screen: Terminal,
    partial: Path,
    path: str | None,
) -> None:
    """Builds the model, or loads that of `path`, and trains it into the folder `partial`."""
    import torch

    from learner.engine.deepspeed import PolicyEngine
    from learner.model.policy import build_tiny, load_policy
    from learner.supervised.sft import SftProgress, tokenize, train_supervised

    if sft.threads:
        torch.set_num_threads(sft.threads)
    torch.manual_seed(config.seed)
    origin = path or str(partial)
    if config.model.tiny is not None:
        build_tiny(config.model.tiny, partial, seed=config.seed)
    policy = load_policy(origin, dtype=sft.dtype, attention=sft.attention, chunk=sft.logprob_chunk)
    tokenizer = load_tokenizer(origin)
    examples = (
        tokenize(tokenizer, prompt.replace(TURN, tokenizer.eos_token), completion)
        for prompt, completion in pairs
    )
    engine = PolicyEngine(
        policy,
        sft,
        model_path=origin,
        zero_stage=sft.zero_stage,
        dtype=sft.dtype,
        total_steps=sft.steps,
    )
    parameters = sum(p.numel() for p in policy.parameters())

    def show(progress: SftProgress) -> None:
        speed = progress.tokens / progress.seconds
        screen.advance(progress.step, f"loss {progress.loss:.4f} · {speed:,.0f} tokens/s")

    screen.say(f"supervised warm start: {sft.steps} steps on a model of {parameters:,} parameters")
    with screen.bar(sft.steps, "the first step"):
        train_supervised(engine, examples, sft, show)
    engine.save_model(partial)
    engine.close()
    (partial / ORIGIN_FILE).write_text(warm_start_origin(config))
