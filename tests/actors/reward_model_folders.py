"""Reward models for tests: real ones of a few hundred weights, and a fake."""

import asyncio

import torch
from characters import CHARACTERS, character_tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from actors.errors import PromptRefused
from actors.reward_models.folder import Scale

PAD = 0
CONTEXT = 48
SCALE = Scale(0.5, 2.0)


def build_classifier(folder, *, seed=0, labels=1, template=None, pad=PAD, scale=SCALE):
    """Write a sequence classifier with random weights, a character tokenizer and a scale."""
    tokenizer = character_tokenizer(template)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForSequenceClassification(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=CONTEXT,
                initializer_range=0.5,
                num_labels=labels,
                pad_token_id=pad,
            )
        )
    model.save_pretrained(folder)
    if scale is not None:
        scale.write(folder)
    return str(folder)


class FakeScorer:
    """Scores a text by its letters and their places, after others have had their turn."""

    async def score(self, prompt, completion):
        foreign = set(prompt + completion) - set(CHARACTERS)
        if foreign:
            raise PromptRefused(f"no token for {foreign.pop()!r}")
        if len(prompt + completion) > CONTEXT:
            length = len(prompt + completion) + 1
            raise PromptRefused(f"{length} tokens, must have at most {CONTEXT}")
        await asyncio.sleep(0)
        return sum(place * ord(letter) for place, letter in enumerate(prompt + completion)) / 100
