"""`headway sft`: builds or loads the model of a recipe and trains it on demonstrations."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from actors.sources.demonstrations import load_demonstrations
from deploy.config import RunConfig
from deploy.errors import InputError
from deploy.inputs import ORIGIN_FILE, load_heldout, warm_start_origin
from deploy.progress import Screen
from learner.config import SftConfig


def warm_start(config: RunConfig, screen: Screen, *, replace: bool) -> Path:
    """Trains the warm start of a recipe.

    Returns:
        The model folder, which `headway run` of the same recipe starts from.

    Raises:
        InputError: No [sft] section, demonstrations that cannot be used, or a warm start that
            exists and may not be replaced.
    """
    if config.sft is None:
        raise InputError("the recipe has no [sft] section; it says what to imitate and how long")
    folder = config.warm_start
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists; choose another name, or delete it with --replace")
    _, problems = load_heldout(config)
    pairs = load_demonstrations(
        config.sft.demonstrations,
        options=config.sft.options,
        seed=config.seed,
        heldout=frozenset(problem.text for problem in problems),
    )
    screen.say("loading torch and DeepSpeed")
    _train(config, config.sft, pairs, screen)
    return folder


def _train(
    config: RunConfig, sft: SftConfig, pairs: Iterator[tuple[str, str]], screen: Screen
) -> None:
    import torch

    from learner.deepspeed_engine import DeepSpeedEngine
    from learner.model import build_tiny, load_policy, load_tokenizer
    from learner.sft import tokenize, train_supervised

    folder = config.warm_start
    if sft.threads:
        torch.set_num_threads(sft.threads)
    torch.manual_seed(config.seed)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    origin = config.model.path or str(partial)
    if config.model.tiny is not None:
        build_tiny(config.model.tiny, partial, seed=config.seed)
    policy = load_policy(origin, dtype=sft.dtype, attention=sft.attention, chunk=sft.logprob_chunk)
    tokenizer = load_tokenizer(origin)
    examples = (tokenize(tokenizer, prompt, completion) for prompt, completion in pairs)
    engine = DeepSpeedEngine(
        policy,
        sft,
        model_path=origin,
        zero_stage=sft.zero_stage,
        dtype=sft.dtype,
        total_steps=sft.steps,
    )
    parameters = sum(p.numel() for p in policy.parameters())
    screen.say(f"supervised warm start: {sft.steps} steps on a model of {parameters:,} parameters")
    with screen.bar(sft.steps, "the first step"):
        train_supervised(engine, examples, sft, screen.supervised)
    engine.save_model(partial)
    engine.close()
    (partial / ORIGIN_FILE).write_text(warm_start_origin(config))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
