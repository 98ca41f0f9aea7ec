"""Preference pairs of a recipe as token ids: held-out pairs, and those of each reward model."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from actors.errors import PromptRefused
from actors.reward_models.folder import TextReader
from actors.sources.examples import PREFERENCES, Example, load_examples, without
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.preflight.inputs import load_heldout
from learner.config.supervised import RewardTrainingConfig

if TYPE_CHECKING:
    from learner.supervised.reward_model import Pair


class PreferencePairs:
    """Preference pairs of a source or a file, each checked when it is drawn.

    Methods raise InputError for a pair that `read`, which writes it as tokens, refuses.
    """

    def __init__(self, config: RunConfig, section: RewardTrainingConfig, read: TextReader) -> None:
        _, problems = load_heldout(config)
        self.seed = config.seed
        self._section = section
        self._read = read
        self._texts = frozenset(problem.text for problem in problems)
        self._kept = list(islice(self._load(self.seed), section.heldout_pairs))

    def heldout(self) -> "list[Pair]":
        """Return the pairs that accuracy is measured on."""
        return [self._encoded(preference) for preference in self._kept]

    def training(self, member: int) -> "Iterator[Pair]":
        """Yield training pairs of a member without end; none has the prompt of a held-out pair."""
        setting = f"{PREFERENCES.setting} = {self._section.pairs!r}"
        kept = frozenset(prompt for prompt, *_ in self._kept)
        drawn = without(
            self._load(self.seed + member),
            kept,
            setting,
            advice=f"; lower reward_model.heldout_pairs = {self._section.heldout_pairs}",
        )
        return (self._encoded(preference) for preference in drawn)

    def _load(self, seed: int) -> Iterator[Example]:
        section = self._section
        return load_examples(
            PREFERENCES, section.pairs, options=section.options, seed=seed, heldout=self._texts
        )

    def _encoded(self, preference: Example) -> "Pair":
        from learner.supervised.reward_model import Pair

        prompt, chosen, rejected = preference
        try:
            return Pair(self._read(prompt, chosen), self._read(prompt, rejected))
        except PromptRefused as error:
            raise InputError(f"{PREFERENCES.setting} = {self._section.pairs!r}: {error}") from None
