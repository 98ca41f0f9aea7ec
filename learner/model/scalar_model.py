"""Models with one number per token: critics and reward models.

Their head is that of transformers' sequence classification with one label.
"""

from typing import Any

import torch
from torch import Tensor, nn

from learner.errors import InputError
from learner.model.packed_attention import attend_packed
from learner.model.policy import checkpoint_activations, quiet


class ScalarModel(nn.Module):
    """A transformers model with `base_model` and a one-row head `score`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, position_ids: Tensor) -> tuple[Tensor]:
        """Compute the score after each token, given it and those before it: [N] float32.

        `token_ids` and `position_ids` are [N] int64, packed as in `Policy.forward`.
        """
        hidden = self.model.base_model(
            input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False
        ).last_hidden_state[0]
        return (self.model.score(hidden).squeeze(-1).float(),)


def load_scalar_model(
    path: str, *, dtype: str, attention: str, seed: int, activation_checkpointing: bool = False
) -> ScalarModel:
    """Load a model folder with one number as its output.

    A language model gets a new head, made from `seed`; a head of one label is kept.

    Raises:
        InputError: The folder holds no such model.
    """
    quiet()
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation=attention, num_labels=1
            )
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"no model with one number as its output can be loaded from {path!r}: {error}"
        ) from error
    if not isinstance(getattr(model, "score", None), nn.Linear):
        heads = {name: m for name, m in model.named_children() if m is not model.base_model}
        found = " ".join(str(heads).split())
        raise InputError(
            f"the head of {path!r} must be a Linear `score` with one output, found {found}"
        )
    attend_packed(model)
    if activation_checkpointing:
        checkpoint_activations(model, path)
    return ScalarModel(model)
