"""Preference pairs of a recipe: the held-out ones, and those of other prompts for training."""

from collections.abc import Iterator
from functools import partial
from itertools import islice

from actors.sources.examples import Example, ExampleKind, load_examples, without
from actors.sources.rows import plain_text
from deploy.config.run_config import RunConfig
from deploy.preflight.prompts import heldout_texts
from headway.errors import InputError
from learner.config.supervised import PreferConfig, RewardTrainingConfig


class DrawnPairs:
    """The pairs of a section, as texts; raises InputError when it draws one that cannot be read."""

    def __init__(
        self, config: RunConfig, kind: ExampleKind, section: PreferConfig | RewardTrainingConfig
    ) -> None:
        texts, options = heldout_texts(config), section.options
        self._load = partial(load_examples, kind, section.pairs, options=options, heldout=texts)
        self._labelled = isinstance(section, PreferConfig) and section.loss == "kto"
        self.subject = f"{kind.setting} = {section.pairs!r}"
        """Setting of their origin, for messages."""
        key = kind.setting.replace(".pairs", ".heldout_pairs")
        self._advice = f"; lower {key} = {section.heldout_pairs}"
        self.heldout = list(islice(self._draw(config.seed), section.heldout_pairs))

    def training(self, seed: int) -> Iterator[Example]:
        """Yield pairs without end; none has the prompt of a held-out one."""
        texts = frozenset(plain_text(prompt) for prompt, *_ in self.heldout)
        return without(self._draw(seed), texts, self.subject, advice=self._advice)

    def _draw(self, seed: int) -> Iterator[Example]:
        for example in self._load(seed=seed):
            if not (self._labelled or all(example[1:])):
                raise InputError(
                    f"{self.subject}: {plain_text(example[0])[:40]!r} has one completion with a "
                    "label, must have chosen and rejected; for `headway prefer` with labels, set "
                    'prefer.loss = "kto"'
                )
            yield example
