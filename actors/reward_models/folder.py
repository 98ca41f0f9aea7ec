"""What a reward model's folder says: its output, its scale, and how it reads a text.

A folder is that of transformers' sequence classification with one label, with a tokenizer; what
`headway reward-model` makes holds `reward_scale.json` too. Imports no torch.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.engines.model_folder import configuration, context_length, load_tokenizer, weight_shapes
from actors.errors import InputError, PromptRefused
from actors.rollout.chat_rendering import unknown_character

SCALE_FILE = "reward_scale.json"
CLASSIFIER = "ForSequenceClassification"
"""Ending of the architectures whose head gives one number for each label."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of a model's scores on the held-out pairs, common to all."""

    mean: float = 0.0
    std: float = 1.0

    def write(self, folder: Path) -> None:
        """Puts it into a model folder."""
        (folder / SCALE_FILE).write_text(json.dumps(asdict(self)))


def read_scale(model_path: str) -> Scale:
    """The scale of a reward model.

    Raises:
        InputError: The folder has none, or one that nothing can be divided by.
    """
    file = Path(model_path) / SCALE_FILE
    try:
        found = json.loads(file.read_text())
        scale = Scale(float(found["mean"]), float(found["std"]))
    except FileNotFoundError:
        raise InputError(
            f"reward model {model_path!r} has no {SCALE_FILE}, which `headway reward-model` writes "
            "and standardising needs; set actors.reward_model.standardise = false"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read: {error!r}") from None
    if not (math.isfinite(scale.mean) and math.isfinite(scale.std) and scale.std > 0):
        raise InputError(
            f"{file} has mean = {scale.mean} and std = {scale.std}, must be finite numbers, std "
            "above 0"
        )
    return scale


class TextReader:
    """Writes a prompt and its completion as a model with this tokenizer reads them.

    Args:
        tokenizer: Of transformers.
        context: Most tokens of a text.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self.context = tokenizer, context

    def __call__(self, prompt: str, completion: str) -> list[int]:
        """Token ids: by the tokenizer's chat template, or else plainly, closed by its eos token.

        Closed also where the completion was cut off: the model knows nothing else. Only a text
        that fills the context to its end stays open: its last token, the closing one, is left off
        rather than the text refused, for rollouts that were cut off there have room for no more.

        Raises:
            PromptRefused: A character that the tokenizer does not know, or more tokens than fit.
        """
        if self._tokenizer.chat_template is not None:
            messages = [("user", prompt), ("assistant", completion)]
            ids = self._ids(
                self._tokenizer.apply_chat_template(
                    [{"role": role, "content": content} for role, content in messages],
                    tokenize=False,
                )
            )
        else:
            ids = [*self._ids(prompt), *self._ids(completion), self._tokenizer.eos_token_id]
        if len(ids) > self.context + 1:
            raise PromptRefused(
                f"{prompt[:40]!r} and its completion have {len(ids)} tokens, must have at most "
                f"{self.context}, the context of the reward model"
            )
        return ids[: self.context]

    def check_free_space(self, prompt: str, *, max_new_tokens: int, max_model_len: int) -> None:
        """Compares the longest rollout of a prompt, closed, with the context.

        Completions are taken to have as many tokens here as in the policy, which is so where both
        have the same tokenizer.

        Args:
            prompt: Its text.
            max_new_tokens: Most tokens that the policy samples.
            max_model_len: Longest rollout in tokens, its prompt included.

        Raises:
            InputError: It does not fit.
            PromptRefused: The prompt alone does not.
        """
        length = len(self(prompt, "")) - 1
        longest = min(length + max_new_tokens, max_model_len) + 1
        if longest > self.context:
            raise InputError(
                f"a rollout of prompt {prompt[:40]!r} may have {longest} tokens, min(prompt + "
                f"actors.max_new_tokens, actors.max_model_len) + 1 = min({length} + "
                f"{max_new_tokens}, {max_model_len}) + 1, and the context of the reward model is "
                f"{self.context}; set actors.max_model_len to at most {self.context - 1}, or take "
                "a reward model with a longer context"
            )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        foreign = unknown_character(self._tokenizer, text, ids)
        if foreign is not None:
            raise PromptRefused(
                f"the reward model's tokenizer has no token for {foreign!r} in {text[:80]!r}"
            )
        return ids


def load_reader(model_path: str) -> TextReader:
    """How a model reads texts.

    Raises:
        InputError: The tokenizer or the model's description cannot be read.
    """
    return TextReader(load_tokenizer(model_path), context_length(model_path))


def padding_id(model_path: str) -> int:
    """The token that fills up a batch.

    Raises:
        InputError: Neither the model nor its tokenizer names one.
    """
    named = configuration(model_path).get_text_config().pad_token_id
    if named is None:
        named = load_tokenizer(model_path).pad_token_id
    if named is None:
        raise InputError(
            f"reward model {model_path!r} has no padding token, so texts of different lengths "
            "cannot share a batch; name pad_token_id in its config.json"
        )
    return int(named)


def check_reward_model(
    model_path: str,
    *,
    standardise: bool,
    max_new_tokens: int,
    max_model_len: int,
    prompts: Iterable[str] = (),
) -> None:
    """Reads the description of a reward model, and has it read the prompts that it will meet.

    Args:
        model_path: Local folder or hub name.
        standardise: Whether its scale is needed.
        max_new_tokens: Most tokens that the policy samples.
        max_model_len: Longest rollout in tokens, its prompt included.
        prompts: Texts of prompts.

    Raises:
        InputError: It gives anything but one number, lacks what batches or standardising need,
            cannot read a prompt, or has no room for its longest rollout.
    """
    description = configuration(model_path)
    names = description.architectures or []
    if description.num_labels != 1 or not all(name.endswith(CLASSIFIER) for name in names):
        raise InputError(
            f"reward model {model_path!r} is a {', '.join(names) or description.model_type} with "
            f"{description.num_labels} labels, must be a …{CLASSIFIER} with one (num_labels = 1); "
            "`headway reward-model` makes one"
        )
    padding_id(model_path)
    if standardise:
        read_scale(model_path)
    if Path(model_path).is_dir() and "score.weight" not in weight_shapes(model_path):
        raise InputError(f"reward model {model_path!r} has no head of the name score.weight")
    reader = load_reader(model_path)
    for prompt in prompts:
        try:
            reader.check_free_space(
                prompt, max_new_tokens=max_new_tokens, max_model_len=max_model_len
            )
        except (InputError, PromptRefused) as error:
            raise InputError(f"reward model {model_path!r}: {error}") from None
