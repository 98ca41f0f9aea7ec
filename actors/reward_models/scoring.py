"""Scores texts with one reward model or several, in batches that concurrent callers share.

    score(prompt, completion) ─▶ token ids, by each member's own tokenizer ─▶ DynamicBatcher
                                                                                  │
    one number ◀── combine ◀── standardise ◀── every member, one padded batch ◀───┘

Batches are padded on the right and scored at the last token of each text, so that the score of a
text does not depend on its batch.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.config import RewardModelConfig
from actors.environments.protocol import Message
from actors.reward_models.dynamic_batcher import DynamicBatcher
from actors.reward_models.folder import load_reader, padding_id, read_scale, split_steps
from actors.rewards.find_reward import StepParts, StepScore
from headway.cpu_cores import bind_process, parse_cores
from headway.errors import InputError


def combine(scores: Tensor, how: str, *, uncertainty: float = 0.0) -> Tensor:
    """Combine the scores of several models (Coste et al. 2023, arXiv 2310.02743).

    Args:
        scores: [M, …], the scores of M models on one scale.
        how: `min`: the smallest; `mean`; `uwo`: the mean less λ times the population variance.
        uncertainty: λ, for `uwo`.

    Returns:
        The shape of `scores` without its first dimension.

    Example:
        >>> combine(torch.tensor([[1.0], [3.0]]), "uwo", uncertainty=0.5)
        tensor([1.5000])
    """
    if how == "min":
        return scores.amin(0)
    if how == "mean":
        return scores.mean(0)
    return scores.mean(0) - uncertainty * scores.var(0, correction=0)


Verdict = float | dict[str, float]
"""The score of a text, or one by the name of each kind of reward models, or `StepParts`."""


class Reading(NamedTuple):
    """A text as a model reads it."""

    ids: list[int]
    ends: list[int]
    """Indices of the tokens whose scores count: the last of each step, or of the whole text."""
    places: list[int]
    """Characters of the completion up to the end of each."""


class Member:
    """A sequence classifier with one label, used as the section of the reward models says."""

    def __init__(
        self,
        model_path: str,
        config: RewardModelConfig,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.read = load_reader(model_path, template_options)
        self._pad = padding_id(model_path)
        self._scale = read_scale(model_path, standardise=config.standardise)
        self.separator = self._scale.separator
        self._device = "cuda" if config.gpus > 0 else "cpu"
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                model_path, dtype=getattr(torch, config.dtype), use_safetensors=True
            )
        except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
            raise InputError(
                f"no reward model can be loaded from {model_path!r}: {error}"
            ) from error
        head = getattr(model, "score", None)
        if not isinstance(head, torch.nn.Linear) or head.out_features != 1:
            raise InputError(f"reward model {model_path!r} has no head `score` of one row")
        if any(getattr(module, "rope_type", None) == "longrope" for module in model.modules()):
            raise InputError(
                f"reward model {model_path!r} has longrope, whose factors follow the longest text "
                "of a batch; the score of a text must not depend on others"
            )
        self._model: Any = model.to(self._device).eval()

    def reading(self, prompt: str | Sequence[Message], completion: str) -> Reading:
        """Return what the model reads of a prompt and a completion; errors as of `read`."""
        if self.separator is None:
            ids = self.read(prompt, completion)
            return Reading(ids, [len(ids) - 1], [len(completion)])
        body = completion.removeprefix(self.read.begun(prompt))
        steps, before = split_steps(body, self.separator), len(completion) - len(body)
        ids, ends = self.read.steps(prompt, [step.text for step in steps], self.separator)
        return Reading(ids, ends, [before + step.end for step in steps])

    def score(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Score texts, given as `read` returns them, at their last tokens; returns [B] float64."""
        return torch.cat(self.score_at(texts, [[len(text) - 1] for text in texts]))

    @torch.inference_mode()
    def score_at(
        self, texts: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Score texts after some of their tokens; returns a float64 tensor for each text.

        A process reward model gives probabilities.
        """
        lengths = torch.tensor([len(text) for text in texts])
        width = int(lengths.max())
        ids = torch.tensor([[*text, *[self._pad] * (width - len(text))] for text in texts])
        mask = torch.arange(width) < lengths[:, None]
        hidden = self._model.base_model(
            input_ids=ids.to(self._device),
            attention_mask=mask.long().to(self._device),
            use_cache=False,
        ).last_hidden_state
        counts = [len(of_text) for of_text in ends]
        rows = torch.arange(len(texts)).repeat_interleave(torch.tensor(counts))
        last = hidden[rows, torch.tensor([end for of_text in ends for end in of_text])]
        scores: Tensor = self._model.score(last)[:, 0].double().cpu()
        scores = (scores - self._scale.mean) / self._scale.std
        return [*torch.split(scores if self.separator is None else scores.sigmoid(), counts)]


class RewardModels:
    """Several reward models, perhaps of several kinds, as one `TextScorer`."""

    def __init__(self, members: Sequence[Member], config: RewardModelConfig) -> None:
        self._members, self._config = members, config
        counts = {f"reward_model/{kind}": len(paths) for kind, paths in config.kinds.items()}
        numbers = iter(range(len(members)))
        self._parts = {
            part: [*islice(numbers, count)]
            for part, count in (counts or {"reward_model": len(members)}).items()
        }
        """Indices of the members that give each part of the reward."""
        for part, indices in self._parts.items():
            if len(separators := {members[index].separator for index in indices}) > 1:
                raise InputError(
                    f"the models of {part} split steps by different texts, {separators}, so that "
                    "their scores cannot be combined; make them kinds of their own"
                )
        if config.each_step and all(member.separator is None for member in members):
            raise InputError(
                "actors.reward_model.each_step = true, but no reward model scores steps: train one "
                "from labelled steps, or set each_step = false"
            )
        self._batches: DynamicBatcher[list[Reading], Verdict] = DynamicBatcher(
            self._compute, size=config.batch_size, wait=config.max_wait_ms / 1000
        )

    async def score(self, prompt: str | Sequence[Message], completion: str) -> Verdict:
        """See `actors.rewards.learned.TextScorer`."""
        return await self._batches.submit([m.reading(prompt, completion) for m in self._members])

    def _compute(self, texts: list[list[Reading]]) -> list[Verdict]:
        """Score texts, each given as every member reads it."""
        scores = [
            member.score_at([text[i].ids for text in texts], [text[i].ends for text in texts])
            for i, member in enumerate(self._members)
        ]
        return [
            self._verdict(text, [of_member[n] for of_member in scores])
            for n, text in enumerate(texts)
        ]

    def _verdict(self, text: list[Reading], scores: list[Tensor]) -> Verdict:
        """Combine the scores of a text by its members, of each step, and take the worst step's."""
        how, uncertainty = self._config.combine, self._config.uncertainty
        parts, steps = StepParts(), list[StepScore]()
        for part, indices in self._parts.items():
            of_part = torch.stack([scores[index] for index in indices])
            combined: list[float] = combine(of_part, how, uncertainty=uncertainty).tolist()
            places = text[indices[0]].places
            steps += [StepScore(part, *step) for step in zip(places, combined, strict=True)]
            parts[part] = min(combined)
        parts.steps = tuple(steps)
        if any(member.separator is not None for member in self._members):
            return parts
        if self._config.kinds:
            return dict(zip(self._config.kinds, parts.values(), strict=True))
        return parts["reward_model"]


def load_reward_models(
    paths: Sequence[str],
    config: RewardModelConfig,
    template_options: Mapping[str, Any] | None = None,
) -> RewardModels:
    """Load reward models and bind this process to its cores; raise InputError if that fails.

    The paths of `config` are ignored; `template_options` are actors.chat_template_options.
    """
    cores = parse_cores(config.cores) if config.cores else []
    if cores:
        bind_process(cores, "actors.reward_model.cores")
    torch.set_num_threads(max(len(cores), 1))
    return RewardModels([Member(path, config, template_options) for path in paths], config)
