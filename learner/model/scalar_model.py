"""Models with one number per token: critics and reward models.

Their head is that of transformers' sequence classification with one label.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import InputError
from learner.model.policy import load_pretrained, prepare
from learner.model.ways import SequenceModel


class ScalarModel(SequenceModel):
    """A transformers model with `base_model` and a one-row head `score`."""

    output = "scores"

    def forward(self, token_ids: Tensor, position_ids: Tensor) -> tuple[Tensor]:
        """Compute the score after each token, given it and those before it: [N] float32.

        `token_ids` and `position_ids` are [N] int64, packed as in `Policy.forward`.
        """
        hidden = self.hidden_states(token_ids, position_ids)
        return (self.model.score(hidden).squeeze(-1).float(),)

    def own(self, token_ids: Tensor) -> Tensor:
        """Return the model's own score [1] of a text."""
        score: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits[0]
        return score.float()


def load_scalar_model(
    path: str,
    *,
    dtype: str,
    attention: str,
    seed: int,
    **preparation: Any,
) -> ScalarModel:
    """Load a model folder with one number as its output; `preparation` as `prepare`.

    A language model gets a new head, made from `seed`; a head of one label is kept.

    Raises:
        InputError: The folder holds no such model.
    """
    from transformers import AutoModelForSequenceClassification

    form: dict[str, Any] = {"dtype": dtype, "attention": attention, "num_labels": 1}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = load_pretrained(
            AutoModelForSequenceClassification, path, "model with one number as its output", **form
        )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        heads = {name: m for name, m in model.named_children() if m is not model.base_model}
        layers = " ".join(str(heads).split())
        raise InputError(
            f"the head of {path!r} must be a Linear `score` with one output, found {layers}"
        )
    return prepare(ScalarModel(model), path, attention=attention, **preparation)
