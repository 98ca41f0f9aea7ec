"""`headway prefer`: trains the model of a recipe on its preferences.

    pairs ─▶ reference ─▶ those that are trained ─▶ training ─▶ model
                 └──────▶ held-out pairs ───────────────┴─────▶ loss, accuracy

The model that training begins from is the reference: it scores every text once, before the first
step, and its log-probabilities are kept beside the checkpoints.
"""

import json
from itertools import chain, islice
from pathlib import Path

from actors.engines.model_folder import check_model
from actors.sources.examples import Example
from actors.sources.preferences import PREFERENCES, judged_completions
from deploy.config.run_config import RunConfig
from deploy.offline.drawn_pairs import DrawnPairs
from deploy.offline.stages import UnfinishedStage, made_model, stage_spec, train_stage
from deploy.offline.warm_start import Demonstrations
from deploy.preflight.machine_checks import check_runs_dir
from deploy.preflight.models import check_adapter, prefer_origin, warm_started_path
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import UNFINISHED
from headway.atomic_file import atomic_file
from headway.errors import InputError
from learner.config.supervised import PreferConfig
from learner.ranks.spec import LearnerSpec
from learner.supervised.prefer import (
    Preference,
    check_loss,
    reference_scores,
    train_preferences,
    unrelated_text,
)
from learner.supervised.sft import Example as Text

CHECKED = 64
"""Pairs that are checked before the model is loaded; others before the first step, or, where no
reference scores them, when they are trained."""
SCORED = 256
"""Pairs whose tokens are held at once while the reference scores them."""
REFERENCE_FILE = "reference.json"


class Preferences:
    """The preferences of a section: those that are held out, and those of all steps in their order.

    Raises InputError for data that the loss cannot learn from.
    """

    def __init__(self, config: RunConfig, section: PreferConfig, path: str | None) -> None:
        self._demonstrations = Demonstrations(config, path, PREFERENCES.setting)
        drawn = DrawnPairs(config, PREFERENCES, section)
        examples_of = judged_completions if section.loss == "kto" else iter
        self.heldout = [*examples_of(drawn.heldout)]
        training = examples_of(drawn.training(config.seed))
        self.training = [*islice(training, section.steps * section.batch_pairs)]
        self.distinct = [*dict.fromkeys((*self.heldout, *self.training))]
        self._others: dict[Example, Example] = {}
        for at, example in enumerate(self.distinct if section.loss == "kto" else ()):
            before = (self.distinct[at - back] for back in range(1, len(self.distinct)))
            self._others[example] = next(other for other in before if other[0] != example[0])
        self.reference: dict[Example, tuple[float, ...]] = {}
        """Log-probabilities of the `texts` of examples under the reference."""

    def texts(self, example: Example) -> tuple[Text, Text]:
        """Return the tokens of the better and the worse text of a pair, as rollouts have them.

        For KTO: of a judged text, and of its prompt with a completion of another prompt, the one
        drawn before it.
        """
        prompt, *sides = example
        if other := self._others.get(example):
            own = self._text(example)
            return own, unrelated_text(own, self._text(other), self._demonstrations.context)
        better, worse = (self._text((prompt, side, "")) for side in sides)
        return better, worse

    def preference(self, example: Example) -> Preference:
        """Return the texts of an example with what the reference says of them."""
        texts, reference = self.texts(example), self.reference.get(example, ())
        if example not in self._others:
            return Preference(texts, reference)
        unrelated, desirable = Preference(texts[1:], reference[1:]), bool(example[1])
        return Preference(texts[:1], reference[:1], desirable=desirable, unrelated=unrelated)

    def _text(self, example: Example) -> "Text":
        prompt, chosen, rejected = example
        return Text(*self._demonstrations.render((prompt, chosen or rejected)))


def prefer_model(config: RunConfig, terminal: Terminal, *, replace: bool) -> Path:
    """Train the model of a recipe on its preferences; return the folder that it is in.

    Raises InputError where section, model or pairs are missing or wrong, or the folder exists.
    """
    section = config.prefer
    if section is None:
        raise InputError(
            "the recipe has no [prefer] section, which names the pairs to learn from and the loss"
        )
    check_runs_dir(config)
    path = warm_started_path(config)
    check_model(path)
    check_adapter(section.lora, path, section="prefer.lora")
    from learner.supervised.stage import Stage

    loss, preferences = check_loss(section), Preferences(config, section, path)
    for example in (*preferences.heldout, *preferences.training[:CHECKED]):
        preferences.texts(example)
    folder, origin = config.preferred, prefer_origin(config)
    with made_model(config, folder, origin, terminal, replace=replace) as made:
        unfinished = UnfinishedStage(folder.with_name(UNFINISHED))
        spec = stage_spec(config, section, "prefer", path, unfinished)
        if loss.referenced:
            scores = _scores(spec, preferences, unfinished, terminal)
            preferences.reference = dict(zip(preferences.distinct, scores, strict=True))
        stage = Stage(
            spec=spec,
            config=section,
            train=train_preferences,
            heldout=[*map(preferences.preference, preferences.heldout)],
            folder=str(made),
        )
        examples = map(preferences.preference, preferences.training)
        batches = iter(lambda: [*islice(examples, section.batch_pairs)], [])
        train_stage(config, stage, batches, unfinished, terminal)
    return folder


def _scores(
    spec: LearnerSpec, preferences: Preferences, unfinished: UnfinishedStage, terminal: Terminal
) -> list[tuple[float, ...]]:
    """Return what the reference, the model of `spec`, says of all texts, or what is kept of it."""
    import torch

    from learner.engine.reference import Reference
    from learner.model.logprobs import LogprobOptions
    from learner.model.policy import load_policy

    kept, config = unfinished.losses.with_name(REFERENCE_FILE), spec.config
    if kept.exists():
        return [tuple(scores) for scores in json.loads(kept.read_text())]
    torch.set_num_threads(config.threads_of_rank)
    options = LogprobOptions(chunk=config.logprob_chunk)
    policy = load_policy(
        spec.model_path,
        options,
        dtype=config.dtype,
        attention=config.attention,
        context=spec.context,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = Reference(policy, device=device, origin=spec.model_path)
    scores: list[tuple[float, ...]] = []
    with terminal.bar(len(preferences.distinct), "the reference scores"):
        for start in range(0, len(preferences.distinct), SCORED):
            some = map(preferences.texts, preferences.distinct[start : start + SCORED])
            texts = [*chain.from_iterable(some)]
            of_texts = reference_scores(reference.logprobs, texts, config.microbatch_tokens)
            scores += zip(of_texts[0::2], of_texts[1::2], strict=True)
            terminal.advance(len(scores), "scored by the reference")
    with atomic_file(kept) as file:
        file.write(json.dumps(scores).encode())
    return scores
