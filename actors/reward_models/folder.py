"""Reads and checks the folder of a reward model: its output, scale and tokenizer; no torch.

It holds a sequence classifier of transformers with one label, a tokenizer, and perhaps
`reward_scale.json`, which `headway reward-model` writes. A separator in it makes it a process
reward model: its output after each step is the logit of the probability that the step is right.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from actors.config import ActorsConfig
from actors.engines.model_folder import configuration, context_length, load_tokenizer, weight_shapes
from actors.environments.protocol import Message
from actors.environments.single_turn import as_messages
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import Renderer, read_by
from actors.rollout.demonstrations import judged
from headway.errors import InputError

SCALE_FILE = "reward_scale.json"
CLASSIFIER = "ForSequenceClassification"
"""Ending of the architectures whose head gives one number for each label."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of a model's scores on the held-out pairs."""

    mean: float = 0.0
    std: float = 1.0
    separator: str | None = None
    """Text between the steps that a process reward model scores; None for other models."""

    def write(self, folder: Path) -> None:
        """Write the scale into a model folder."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        (folder / SCALE_FILE).write_text(json.dumps(values))


def read_scale(model_path: str, *, standardise: bool = True) -> Scale:
    """Read the scale of a reward model, or where it does not `standardise`, the separator alone.

    Raises InputError if it is missing where needed, or not finite.
    """
    file = Path(model_path) / SCALE_FILE
    if not (standardise or file.exists()):
        return Scale()
    try:
        values = json.loads(file.read_text())
        scale = Scale(float(values["mean"]), float(values["std"]), values.get("separator"))
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
    return scale if standardise else Scale(separator=scale.separator)


class Step(NamedTuple):
    """A step of a completion."""

    text: str
    end: int
    """Characters of the completion up to its end."""


def split_steps(completion: str, separator: str) -> list[Step]:
    """Return the steps of a completion, at least one; blank ones are left out.

    Example:
        >>> split_steps("a;; b;", ";")
        [Step(text='a', end=1), Step(text=' b', end=5)]
    """
    steps, start = [], 0
    for text in completion.split(separator):
        if text.strip():
            steps.append(Step(text, start + len(text)))
        start += len(text) + len(separator)
    return steps or [Step("", len(completion))]


class TextReader:
    """Encodes a prompt and its completion as input of a reward model of `context` tokens.

    Of `template_options`, those of the policy, its chat template takes the ones that it reads.
    """

    def __init__(
        self, tokenizer: Any, context: int, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self._renderer = Renderer(tokenizer, options=read_by(tokenizer, template_options or {}))
        self.context = context

    def __call__(
        self, prompt: str | Sequence[Message], completion: str | Sequence[Message]
    ) -> list[int]:
        """Return token ids: by the chat template, or else concatenated, closed by the eos token.

        Of messages, the last is the completion, and those before it go on with the prompt.
        A completion that was cut off is closed too, as the model was trained, unless the closing
        token exceeds the context. Raises PromptRefused for an unknown character or too many tokens.
        """
        messages = as_messages(prompt)
        if not isinstance(completion, str):
            messages, completion = [*messages, *completion[:-1]], completion[-1].content
        ids = judged(self._renderer, messages, completion)
        if len(ids) > self.context + 1:
            raise self._too_long(messages, len(ids))
        return ids[: self.context]

    def steps(
        self, prompt: str | Sequence[Message], steps: Sequence[str], separator: str
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and steps, and the index of each step's last token.

        Every step is encoded by itself and closed by the separator, so that its score is the same
        whatever follows. Raises PromptRefused as a call, and for a step that has the separator.
        """
        messages = as_messages(prompt)
        ids, ends = self._renderer.prompt(messages), []
        for step in steps:
            if separator in step:
                raise PromptRefused(
                    f"the step {step[:40]!r} has the separator {separator!r} within it, where it "
                    "would be cut in two; set another reward_model.separator"
                )
            said = [Message("assistant", step + separator)]
            ids += self._renderer.encoded(lambda written: written[0].content, said, follows=True)
            ends.append(len(ids) - 1)
        if len(ids) > self.context:
            raise self._too_long(messages, len(ids))
        return ids, ends

    def begun(self, prompt: str | Sequence[Message]) -> str:
        """Return the text of a completion that the prompt itself has begun."""
        return self._renderer.begun(as_messages(prompt))

    def _too_long(self, messages: Sequence[Message], length: int) -> PromptRefused:
        return PromptRefused(
            f"{messages[-1].content[:40]!r} and its completion have {length} tokens, must have at "
            f"most {self.context}, the context of the reward model"
        )


def load_reader(
    model_path: str,
    template_options: Mapping[str, Any] | None = None,
    *,
    templated: bool = True,
) -> TextReader:
    """Load the reader of a reward model, perhaps without its chat template; raise InputError."""
    tokenizer = load_tokenizer(model_path)
    if not templated:
        tokenizer.chat_template = None
    return TextReader(tokenizer, context_length(model_path), template_options)


def padding_id(model_path: str) -> int:
    """Return the padding token of a reward model; raise InputError if none is named."""
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
    config: ActorsConfig,
    max_model_len: int,
    prompts: Iterable[str | Sequence[Message]] = (),
) -> None:
    """Check the description of a reward model, and that it can encode prompts.

    Raises InputError if it has several outputs, no padding token or no scale, or cannot encode a
    prompt or its longest rollout.
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
    scale = read_scale(model_path, standardise=config.reward_model.standardise)
    closing = len(scale.separator or " ")
    if Path(model_path).is_dir() and "score.weight" not in weight_shapes(model_path):
        raise InputError(f"reward model {model_path!r} has no head of the name score.weight")
    reader = load_reader(model_path, config.chat_template_options)
    for prompt in prompts:
        try:
            length = len(reader(prompt, "")) - 1
        except PromptRefused as error:
            raise InputError(f"reward model {model_path!r}: {error}") from None
        longest = min(length + config.max_new_tokens, max_model_len) + closing
        if longest > reader.context:
            raise InputError(
                f"reward model {model_path!r}: a rollout of prompt "
                f"{as_messages(prompt)[-1].content[:40]!r} may have {longest} tokens, min(prompt + "
                f"actors.max_new_tokens, actors.max_model_len) + {closing} = min({length} + "
                f"{config.max_new_tokens}, {max_model_len}) + {closing}, and the context of the "
                f"reward model is {reader.context}; set actors.max_model_len to at most "
                f"{reader.context - closing}, or take a reward model with a longer context"
            )
