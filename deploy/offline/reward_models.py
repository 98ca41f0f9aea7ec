"""`headway reward-model`: trains reward models on the preference pairs of a recipe.

    pairs ─▶ held-out pairs, common to all ────────┐
      └────▶ each member's own order ─▶ training ─▶ accuracy, scale ─▶ model-0, model-1, …

The members are trained one after the other in this process.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engines.model_folder import check_model, load_tokenizer, refuse_quantised
from actors.errors import PromptRefused
from actors.reward_models.folder import Scale, TextReader, load_reader
from actors.sources.examples import PREFERENCES, Example
from deploy.cluster.cpu_affinity import supervised_threads
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.offline.pairs import DrawnPairs
from deploy.preflight.machine_checks import check_runs_dir
from deploy.preflight.models import (
    check_adapter,
    find_model,
    reward_model_origin,
    warm_started_path,
)
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import ORIGIN_FILE, atomic_folder, check_absent
from headway.cpu_cores import usable_cores
from headway.errors import InputError
from learner.config.supervised import RewardTrainingConfig

if TYPE_CHECKING:
    from torch import Tensor

    from learner.supervised.reward_model import Pair

CHECKED = 64
"""Pairs of each member that are checked before the model is loaded; others when they are drawn."""
REPORT_FILE = "reward_model.json"


class PreferencePairs:
    """Preference pairs as token ids; raises InputError when it draws a pair that `read` refuses."""

    def __init__(self, config: RunConfig, section: RewardTrainingConfig, read: TextReader) -> None:
        self.seed, self._read = config.seed, read
        self._drawn = DrawnPairs(config, PREFERENCES, section)
        self.heldout = [*map(self._encode, self._drawn.heldout)]
        """Pairs that accuracy is measured on."""

    def training(self, member: int) -> "Iterator[Pair]":
        """Yield training pairs of a member without end; none has the prompt of a held-out pair."""
        return map(self._encode, self._drawn.training(self.seed + member))

    def _encode(self, preference: Example) -> "Pair":
        from learner.supervised.reward_model import Pair

        prompt, *texts = preference
        try:
            return Pair(*(self._read(prompt, str(text)) for text in texts))
        except PromptRefused as error:
            raise InputError(f"{self._drawn.subject}: {error}") from None


def train_reward_models(config: RunConfig, terminal: Terminal, *, replace: bool) -> Path:
    """Train the reward models of a recipe; return their folder, where `headway run` finds them.

    Raises InputError where section, model or pairs are missing, or the folder exists.
    """
    section = config.reward_model
    if section is None:
        raise InputError(
            "the recipe has no [reward_model] section, which names the pairs to learn from and the "
            "number of steps"
        )
    folder = config.reward_models
    check_absent(folder, replace=replace)
    check_runs_dir(config)
    if section.path is not None:
        path = find_model(section.path, setting="reward_model.path")
        refuse_quantised(path)
    else:
        path = warm_started_path(config)
        check_model(path)
    check_adapter(section.lora, path, section="reward_model.lora")
    actors = config.actors
    templated = actors.chat_template is not False
    reader = load_reader(path, actors.chat_template_options, templated=templated)
    pairs = PreferencePairs(config, section, reader)
    for member in range(section.members):
        list(islice(pairs.training(member), CHECKED))
    with atomic_folder(folder, replace=replace, private=config.deploy.private) as partial:
        terminal.say("loading torch and DeepSpeed")
        _train_all(config, section, path, pairs, partial, terminal)
    return folder


def _train_all(
    config: RunConfig,
    section: RewardTrainingConfig,
    path: str,
    pairs: PreferencePairs,
    partial: Path,
    terminal: Terminal,
) -> None:
    """Train every member, and write their held-out accuracy alone and together."""
    import torch

    from actors.reward_models.scoring import combine

    torch.set_num_threads(supervised_threads(config, section, usable_cores()))
    heldout_pairs = len(pairs.heldout)
    members, scores = [], []
    for member in range(section.members):
        terminal.say(f"reward model {member}: {section.steps} steps from {path}")
        row, member_scores, scale = _train(section, path, pairs, member, partial, terminal)
        if config.actors.chat_template is False:  # it was trained without, and is read as it is
            (partial / row["folder"] / "chat_template.jinja").unlink(missing_ok=True)
        members.append(row)
        scores.append((member_scores - scale.mean) / scale.std)
        terminal.say(
            f"reward model {member}: held-out accuracy {row['heldout_accuracy']:.3f}, loss "
            f"{row['heldout_loss']:.4f} ({heldout_pairs} pairs)"
        )
    together = {how: _accuracy(combine(torch.stack(scores), how)) for how in ("min", "mean")}
    if len(members) > 1:
        terminal.say(
            "together: held-out accuracy "
            + ", ".join(f"{how} {value:.3f}" for how, value in together.items())
        )
    report = {
        "name": config.name,
        "backbone": path,
        "pairs": section.pairs,
        "steps": section.steps,
        "pairs_trained": section.steps * section.batch_pairs,
        "heldout_pairs": heldout_pairs,
        "members": members,
        "together": together,
    }
    (partial / REPORT_FILE).write_text(json.dumps(report, indent=2))
    (partial / ORIGIN_FILE).write_text(reward_model_origin(config))


def _train(
    section: RewardTrainingConfig,
    path: str,
    pairs: PreferencePairs,
    member: int,
    partial: Path,
    terminal: Terminal,
) -> tuple[dict[str, Any], "Tensor", Scale]:
    """Train one member; return figures, scores [2, P] of held-out pairs, and their scale."""
    import torch
    from transformers.utils import logging

    from learner.engine.deepspeed import DeepSpeedEngine
    from learner.model.lora import add_adapter
    from learner.model.scalar_model import load_scalar_model
    from learner.supervised.reward_model import bradley_terry, score_pairs, train_reward_model
    from learner.supervised.row_training import Progress

    folder, seed = partial / f"model-{member}", pairs.seed + member
    torch.manual_seed(seed)
    logging.set_verbosity_error()  # no warning that the head is new
    model = load_scalar_model(
        path,
        dtype=section.dtype,
        attention=section.attention,
        seed=seed,
        activation_checkpointing=section.activation_checkpointing,
    )
    if section.lora is not None:
        add_adapter(model.model, section.lora, seed=seed)
    text = model.model.config.get_text_config()
    if text.pad_token_id is None:  # batches of texts of different lengths need one
        tokenizer = load_tokenizer(path)
        padding = tokenizer.pad_token_id
        text.pad_token_id = tokenizer.eos_token_id if padding is None else padding
    engine = DeepSpeedEngine(
        model,
        section,
        model_path=path,
        zero_stage=section.zero_stage,
        total_steps=section.steps,
    )

    def show(progress: Progress) -> None:
        terminal.advance(progress.step, progress.text)

    with terminal.bar(section.steps, "the first step"):
        train_reward_model(engine, pairs.training(member), section, show)
    scores = score_pairs(engine, pairs.heldout, section.microbatch_tokens)
    scale = Scale(float(scores.mean()), float(scores.std()))
    if not scale.std > 0:
        raise RunFailed(
            f"the reward model of seed {seed} gives every text the score {scale.mean:g}; lower "
            "reward_model.learning_rate"
        )
    loss = bradley_terry(*scores, margin=section.margin, centring=section.centring).mean()
    if section.lora is not None and section.dtype == "bfloat16":
        terminal.say(
            f"lost to rounding of the adapter's changes: {engine.lost_to_rounding() or 0:.1%}"
        )
    engine.save_model(folder)
    engine.close()
    scale.write(folder)
    row = {
        "folder": folder.name,
        "seed": seed,
        "heldout_accuracy": _accuracy(scores),
        "heldout_loss": float(loss),
        "scale": {"mean": scale.mean, "std": scale.std},
    }
    return row, scores, scale


def _accuracy(scores: "Tensor") -> float:
    """Return the share of pairs whose better text has the higher score, of scores [2, P]."""
    return float((scores[0] > scores[1]).double().mean())
