"""A folder with a tiny random model whose tokenizer merges characters and whose chat has tools.

The model samples single characters where the tokenizer would merge them: its answers are never
re-tokenised to the same ids by chance.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
MERGES = ["th", "ad", "ad d", "er", "in", "na", "me", "na me", "ar", "on", "12", "aa", '" :']
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LENGTH = 1024
"""Longest context in tokens."""


def agent_tokenizer() -> PreTrainedTokenizerFast:
    pairs = [tuple(m.split()) if " " in m else tuple(m) for m in MERGES]
    vocabulary = [*SPECIAL, *CHARACTERS, *("".join(pair) for pair in pairs)]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=pairs))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        model_max_length=LENGTH,
        chat_template=TEMPLATE,
    )


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
