"""Scores texts with one reward model or several, in batches that concurrent callers share.

    score(prompt, completion) ─▶ token ids, by each member's own tokenizer ─▶ DynamicBatcher
                                                                                  │
    one number ◀── combine ◀── standardise ◀── every member, one padded batch ◀───┘

Batches are padded on the right and scored at the last token of each text, so that the score of a
text does not depend on its batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.config import RewardModelConfig
from actors.environments.protocol import Message
from actors.reward_models.dynamic_batcher import DynamicBatcher
from actors.reward_models.folder import Scale, load_reader, padding_id, read_scale
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
        self._scale = read_scale(model_path) if config.standardise else Scale()
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

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Score texts, given as `read` returns them, at their last tokens; returns [B] float64."""
        lengths = torch.tensor([len(text) for text in texts])
        width = int(lengths.max())
        ids = torch.tensor([[*text, *[self._pad] * (width - len(text))] for text in texts])
        mask = torch.arange(width) < lengths[:, None]
        hidden = self._model.base_model(
            input_ids=ids.to(self._device),
            attention_mask=mask.long().to(self._device),
            use_cache=False,
        ).last_hidden_state
        last = hidden[torch.arange(len(texts)), lengths - 1]
        scores: Tensor = self._model.score(last)[:, 0].double().cpu()
        return (scores - self._scale.mean) / self._scale.std


class RewardModels:
    """Several reward models as one `TextScorer`."""

    def __init__(self, members: Sequence[Member], config: RewardModelConfig) -> None:
        self._members, self._config = members, config
        self._batches: DynamicBatcher[list[list[int]], float] = DynamicBatcher(
            self._compute, size=config.batch_size, wait=config.max_wait_ms / 1000
        )

    async def score(self, prompt: str | Sequence[Message], completion: str) -> float:
        """See `actors.rewards.learned.TextScorer`."""
        return await self._batches.submit([m.read(prompt, completion) for m in self._members])

    def _compute(self, texts: list[list[list[int]]]) -> list[float]:
        """Score texts, each given as the token ids of every member."""
        scores = [
            member.score([text[index] for text in texts])
            for index, member in enumerate(self._members)
        ]
        how, uncertainty = self._config.combine, self._config.uncertainty
        combined: list[float] = combine(torch.stack(scores), how, uncertainty=uncertainty).tolist()
        return combined


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
