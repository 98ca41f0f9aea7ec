"""`headway reward-model`: trains reward models on the pairs or labelled steps of a recipe.

    pairs ─▶ held-out pairs, common to all ────────┐
      └────▶ each member's own order ─▶ training ─▶ accuracy, scale ─▶ model-0, model-1, …

The members are trained one after the other, each as a stage of `deploy.offline.stages`.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from actors.config import RewardModelConfig
from actors.engines.model_folder import (
    check_model,
    configuration,
    load_tokenizer,
    refuse_quantised,
)
from actors.errors import PromptRefused
from actors.reward_models.folder import Scale, TextReader, load_reader
from actors.sources.examples import LABELLED_STEPS, Example, LabelledSteps
from actors.sources.preferences import REWARD_MODEL_PAIRS
from deploy.cluster.cpu_affinity import learner_of_stage
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.offline.drawn_pairs import DrawnPairs
from deploy.offline.stages import train_ranks
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

    from actors.reward_models.scoring import Member
    from learner.supervised.reward_model import Chain, Pair

CHECKED = 64
"""Pairs of each member that are checked before the model is loaded; others when they are drawn."""
REPORT_FILE = "reward_model.json"


class PreferencePairs:
    """Preference pairs, or steps, as token ids; raises InputError for what `read` refuses."""

    def __init__(self, config: RunConfig, section: RewardTrainingConfig, read: TextReader) -> None:
        self.seed = config.seed
        self.section, self._read = section, read
        self.process = section.kind == "process"
        """Examples are `Chain`s, for a process reward model."""
        self.unit = "completions" if self.process else "pairs"
        kind = LABELLED_STEPS if self.process else REWARD_MODEL_PAIRS
        self._drawn = DrawnPairs(config, kind, section)
        self.heldout: list[Any] = [*map(self._encode, self._drawn.heldout)]
        """Pairs or chains that accuracy is measured on."""

    def training(self, member: int) -> "Iterator[Pair | Chain]":
        """Yield training pairs of a member without end; none has the prompt of a held-out pair."""
        return map(self._encode, self._drawn.training(self.seed + member))

    @property
    def labels(self) -> list[float]:
        """Labels of all steps of the held-out chains."""
        return [label for chain in self.heldout for label in chain.labels]

    def accuracy(self, scores: "Tensor") -> float:
        """Return the share of held-out pairs [2, P], or steps [S], that scores tell right."""
        if self.process:
            right = (scores > 0.5) == (scores.new_tensor(self.labels) > 0.5)
        else:
            right = scores[0] > scores[1]
        return float(right.double().mean())

    def _encode(self, preference: Example) -> "Pair | Chain":
        from learner.supervised.reward_model import Chain, Pair

        prompt, *replies = preference
        try:
            if self.process:
                _, steps, labels = cast("LabelledSteps", preference)
                separator = self.section.separator
                closed = [step.removesuffix(separator) for step in steps]
                return Chain(*self._read.steps(prompt, closed, separator), [*labels])
            return Pair(*(self._read(prompt, reply) for reply in replies))
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

    heldout_pairs = len(pairs.heldout)
    members, scores = [], []
    for member in range(section.members):
        terminal.say(f"reward model {member}: {section.steps} steps from {path}")
        row, member_scores = _train(config, path, pairs, member, partial, terminal)
        members.append(row)
        scores.append(member_scores)
        found = row.get("heldout_faults_found")
        faults = "" if found is None else f", faults found {found:.3f}"
        terminal.say(
            f"reward model {member}: held-out accuracy {row['heldout_accuracy']:.3f}, loss "
            f"{row['heldout_loss']:.4f}{faults} ({heldout_pairs} {pairs.unit})"
        )
    together = {how: pairs.accuracy(combine(torch.stack(scores), how)) for how in ("min", "mean")}
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
    config: RunConfig,
    path: str,
    pairs: PreferencePairs,
    member: int,
    partial: Path,
    terminal: Terminal,
) -> tuple[dict[str, Any], "Tensor"]:
    """Train one member; return its figures, and its scores of what is held out, on its scale."""
    from actors.reward_models.scoring import Member
    from learner.ranks.rank import ScalarRank
    from learner.ranks.spec import LearnerSpec
    from learner.supervised.reward_model import train_process_model, train_reward_model
    from learner.supervised.stage import Stage

    folder, seed, section = partial / f"model-{member}", pairs.seed + member, pairs.section
    spec = LearnerSpec(
        config=learner_of_stage(config, section, usable_cores()),
        section="reward_model",
        model_path=path,
        seed=seed,
        steps=section.steps,
        checkpoints=str(partial),
    )
    stage = Stage(
        spec=spec,
        config=section,
        train=train_process_model if pairs.process else train_reward_model,
        folder=str(folder),
        rank_type=ScalarRank,
    )
    drawn = pairs.training(member)
    batches = islice(iter(lambda: [*islice(drawn, section.batch_pairs)], []), section.steps)
    train_ranks(config, stage, batches, terminal)
    _complete(folder, templated=config.actors.chat_template is not False)
    Scale(separator=section.separator if pairs.process else None).write(folder)
    judge = Member(str(folder), RewardModelConfig())
    scores, figures = (_judge_steps if pairs.process else _judge_pairs)(judge, pairs)
    mean, std = float(scores.mean()), float(scores.std())
    if not std > 0:
        raise RunFailed(
            f"the reward model of seed {seed} gives every text the score {mean:g}; lower "
            "reward_model.learning_rate"
        )
    row = {"folder": folder.name, "seed": seed, "heldout_accuracy": pairs.accuracy(scores)}
    if pairs.process:
        return row | figures, scores
    Scale(mean, std).write(folder)
    return row | figures | {"scale": {"mean": mean, "std": std}}, (scores - mean) / std


def _judge_pairs(judge: "Member", pairs: PreferencePairs) -> tuple["Tensor", dict[str, float]]:
    """Return the scores [2, P] of held-out pairs, and their loss."""
    import torch

    from learner.supervised.reward_model import bradley_terry

    texts = [text for pair in pairs.heldout for text in (pair.chosen, pair.rejected)]
    scored = [judge.score(texts[start : start + 32]) for start in range(0, len(texts), 32)]
    scores, section = torch.cat(scored).view(-1, 2).T, pairs.section
    loss = bradley_terry(*scores, margin=section.margin, centring=section.centring).mean()
    return scores, {"heldout_loss": float(loss)}


def _judge_steps(judge: "Member", pairs: PreferencePairs) -> tuple["Tensor", dict[str, float]]:
    """Return the probabilities [S] of held-out steps, their loss, and the share of faults found.

    A fault is found where the first step below 1/2 is the first one that is labelled so.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy

    found = []
    scores = torch.cat([judge.score_at([c.token_ids], [c.ends])[0] for c in pairs.heldout])
    labels = scores.new_tensor(pairs.labels)
    of_chains = [len(chain.ends) for chain in pairs.heldout]
    for label, score in zip(*(torch.split(x, of_chains) for x in (labels, scores)), strict=True):
        if label.min() < 0.5:
            found.append((label < 0.5).nonzero()[0].equal((score < 0.5).nonzero()[:1].flatten()))
    figures = {"heldout_loss": float(binary_cross_entropy(scores, labels))}
    return scores, figures | ({"heldout_faults_found": sum(found) / len(found)} if found else {})


def _complete(folder: Path, *, templated: bool) -> None:
    """Leave out the chat template that was not used, and name a token that pads batches."""
    if not templated:  # it was trained without, and is read as it is
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    description = configuration(str(folder))
    text, tokenizer = description.get_text_config(), load_tokenizer(str(folder))
    if text.pad_token_id is None:
        padding = tokenizer.pad_token_id
        text.pad_token_id = tokenizer.eos_token_id if padding is None else padding
        description.save_pretrained(folder)
