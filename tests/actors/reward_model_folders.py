"""Reward models for tests, of a few hundred weights."""

import torch
from characters import character_tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification

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
