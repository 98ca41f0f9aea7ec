"""`headway reward-model`: trains reward models on the preference pairs of a recipe.

    pairs ─▶ held-out ones, common to all ─────────┐
      └────▶ each member's own order ─▶ training ─▶ accuracy, scale ─▶ model-0, model-1, …

The members are trained one after the other in this process, into a folder that appears as a whole,
or not at all.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engines.model_folder import check_model, load_tokenizer
from actors.reward_models.folder import Scale, load_reader
from deploy.config.run_config import RunConfig
from deploy.errors import InputError, RunFailed
from deploy.offline.preference_pairs import PreferencePairs
from deploy.preflight.disk_space import check_runs_dir
from deploy.preflight.models import find_model, model_path
from deploy.preflight.provenance import ORIGIN_FILE, reward_model_origin
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import atomic_folder, check_absent
from learner.config.reward_model import RewardTrainingConfig

if TYPE_CHECKING:
    from torch import Tensor

    from learner.supervised.reward_model import Pair

TRIED = 64
"""Pairs of each member that are checked before anything is loaded; the others as they are drawn."""
REPORT_FILE = "reward_model.json"


def train_reward_models(config: RunConfig, screen: Terminal, *, replace: bool) -> Path:
    """Trains the reward models of a recipe.

    Returns:
        The folder of the model folders, which `headway run` of the same recipe finds.

    Raises:
        InputError: No [reward_model] section, pairs that cannot be used, no model to begin with, or
            reward models that exist and may not be replaced, or that another command is making.
    """
    section = config.reward_model
    if section is None:
        raise InputError(
            "the recipe has no [reward_model] section; it says which pairs to learn from and how "
            "long"
        )
    folder = config.reward_models
    check_absent(folder, replace=replace)
    check_runs_dir(config)
    path = _backbone(config, section)
    drawn = PreferencePairs(config, section, load_reader(path))
    heldout = drawn.heldout()
    for member in range(section.members):
        list(islice(drawn.of(member), TRIED))
    with atomic_folder(folder, replace=replace) as partial:
        screen.say("loading torch and DeepSpeed")
        _train_all(config, section, path, drawn, heldout, partial, screen)
    return folder


def _backbone(config: RunConfig, section: RewardTrainingConfig) -> str:
    """The model that every member begins with."""
    if section.path is not None:
        return find_model(section.path, setting="reward_model.path")
    path = model_path(config)
    check_model(path)
    return path


def _train_all(
    config: RunConfig,
    section: RewardTrainingConfig,
    path: str,
    drawn: PreferencePairs,
    heldout: "list[Pair]",
    partial: Path,
    screen: Terminal,
) -> None:
    """Trains every member, and writes what they are worth alone and together."""
    import torch

    from actors.reward_models.scoring import combine

    if section.threads:
        torch.set_num_threads(section.threads)
    members, scores = [], []
    for member in range(section.members):
        folder = partial / f"model-{member}"
        screen.say(f"reward model {member}: {section.steps} steps from {path}")
        row, found, scale = _train(
            section, path, drawn.of(member), heldout, folder, screen, seed=config.seed + member
        )
        members.append({"folder": folder.name, "seed": config.seed + member, **row})
        scores.append((found - scale.mean) / scale.std)
        screen.say(
            f"reward model {member}: held-out accuracy {row['heldout_accuracy']:.3f}, loss "
            f"{row['heldout_loss']:.4f} ({len(heldout)} pairs)"
        )
    together = {how: _accuracy(combine(torch.stack(scores), how)) for how in ("min", "mean")}
    if len(members) > 1:
        screen.say(
            "together: held-out accuracy "
            + ", ".join(f"{how} {value:.3f}" for how, value in together.items())
        )
    report = {
        "name": config.name,
        "backbone": path,
        "pairs": section.pairs,
        "steps": section.steps,
        "pairs_trained": section.steps * section.batch_pairs,
        "heldout_pairs": len(heldout),
        "members": members,
        "together": together,
    }
    (partial / REPORT_FILE).write_text(json.dumps(report, indent=2))
    (partial / ORIGIN_FILE).write_text(reward_model_origin(config))


def _train(
    section: RewardTrainingConfig,
    path: str,
    pairs: "Iterator[Pair]",
    heldout: "list[Pair]",
    folder: Path,
    screen: Terminal,
    *,
    seed: int,
) -> tuple[dict[str, Any], "Tensor", Scale]:
    """Trains one member into a folder; its figures, its scores [2, P] of held-out pairs, its scale.

    Raises:
        RunFailed: It tells no text from another.
    """
    import torch
    from transformers.utils import logging

    from learner.engine.deepspeed import DeepSpeedEngine
    from learner.model.scalar_model import load_scalar_model
    from learner.supervised.reward_model import (
        RewardProgress,
        bradley_terry,
        score_pairs,
        train_reward_model,
    )

    torch.manual_seed(seed)
    logging.set_verbosity_error()  # that the head is new is no news
    model = load_scalar_model(
        path,
        dtype=section.dtype,
        attention=section.attention,
        seed=seed,
        activation_checkpointing=section.activation_checkpointing,
    )
    _name_padding(model.model.config, path)
    engine = DeepSpeedEngine(
        model,
        section,
        model_path=path,
        zero_stage=section.zero_stage,
        dtype=section.dtype,
        total_steps=section.steps,
    )

    def show(progress: RewardProgress) -> None:
        speed = progress.tokens / progress.seconds
        accuracy = f"accuracy {progress.accuracy:.2f}"
        text = f"loss {progress.loss:.4f} · {accuracy} · {speed:,.0f} tokens/s"
        screen.advance(progress.step, text)

    with screen.bar(section.steps, "the first step"):
        train_reward_model(engine, pairs, section, show)
    found = score_pairs(engine, heldout, section.microbatch_tokens)
    scale = Scale(float(found.mean()), float(found.std()))
    if not scale.std > 0:
        raise RunFailed(
            f"the reward model of seed {seed} gives every text the score {scale.mean:g}; lower "
            "reward_model.learning_rate"
        )
    loss = bradley_terry(*found, margin=section.margin, centring=section.centring).mean()
    engine.save_model(folder)
    engine.close()
    scale.write(folder)
    row = {
        "heldout_accuracy": _accuracy(found),
        "heldout_loss": float(loss),
        "scale": {"mean": scale.mean, "std": scale.std},
    }
    return row, found, scale


def _accuracy(scores: "Tensor") -> float:
    """Share of pairs whose better text has the higher score, of scores [2, P]."""
    return float((scores[0] > scores[1]).double().mean())


def _name_padding(description: Any, path: str) -> None:
    """Sees to it that batches can be made of texts of different lengths."""
    text = description.get_text_config()
    if text.pad_token_id is None:
        tokenizer = load_tokenizer(path)
        text.pad_token_id = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
