"""A folder with a tiny random model whose tokenizer merges characters and whose chat has tools.

The model samples single characters where the tokenizer would merge them: its answers are never
re-tokenised to the same ids by chance.
"""

from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.rollouts.agent_rounds import make_tokenizer

MERGES = ["th", "ad", "ad d", "er", "in", "na", "me", "na me", "ar", "on", "12", "aa", '" :']
LENGTH = 1024
"""Longest context in tokens."""


def agent_tokenizer() -> PreTrainedTokenizerFast:
    made = make_tokenizer(MERGES)
    made.model_max_length = LENGTH
    return made


def agent_config(tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.06,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, pad_token_id=0, eos_token_id=3,
        bos_token_id=1, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip


def agent_model(folder) -> Qwen3ForCausalLM:
    """Write tokenizer and model to a folder; return the model."""
    import torch

    tokenizer = agent_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(agent_config(tokenizer)).eval()
    model.save_pretrained(folder)
    return model
